"""Prove entry points by decoding: each GOP alone against the full decode, picture by picture.

The strongest check. It closes what the bitstream's heads leave open (parameter sets sent in band where the
sample entry forbids them), and it takes FFmpeg's own numbering: a file whose tables leave its frames uncertain
goes to the packet path where reading it so gives every picture of the full decode. It reads the file once, in
order, holds its packets in memory, and decodes it two to three times.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import av
import numpy as np

from fluxon_gop.canvas import Choices
from fluxon_gop.demuxed import DemuxedPackets
from fluxon_gop.errors import FluxonGopError
from fluxon_gop.frame_set import Wanted
from fluxon_gop.jobs import run_one
from fluxon_gop.model import Verdict, VideoIndex
from fluxon_gop.packets import Packet, open_decoder, role_reader
from fluxon_gop.plan import Span
from fluxon_gop.ranges import Int64Array
from fluxon_gop.sources.range_source import RangeSource
from fluxon_gop.sparse_buffer import SparseBuffer
from fluxon_gop.stats import ReadStats
from fluxon_gop.video_jobs import VideoJobs

CHUNK_FRAMES = 32
"""Pictures of the packet path that are compared at a time."""
_EVERYTHING = Span(0, 0, ())


class GopFinding(NamedTuple):
    """What decoding one GOP alone gave, against the full decode."""

    key_sample: int
    frames: int
    """Pictures that the full decode makes of the GOP's packets."""
    missing: int
    mismatching: int
    refused_packets: int
    """Packets that the decoder refuses: their pictures are lost, the others stand."""
    leading_only: bool
    """All that is missing or different is shown before the key."""

    @property
    def safe(self) -> bool:
        """Every packet of the GOP alone gives the picture that it gives in the full decode."""
        return not (self.missing or self.mismatching or self.refused_packets)

    @property
    def verdict(self) -> Verdict:
        """What the key sample is worth as an entry point."""
        if not self.missing and not self.mismatching:
            return Verdict.DECODED
        return Verdict.DECODED_TRAILING if self.leading_only else Verdict.REFUSED


@dataclass(frozen=True)
class DecodeCheck:
    """The findings of one file."""

    index: VideoIndex
    """With verdicts by decoding, and FFmpeg's own frames where they are samples of the index."""
    gops: tuple[GopFinding, ...]
    frames: int
    """Pictures of the full decode."""
    damaged: bool
    """A packet was refused by the decoder."""


class _Picture(NamedTuple):
    packet: int
    digest: bytes


def check_by_decoding(index: VideoIndex, source: RangeSource, stats: ReadStats) -> DecodeCheck:
    """Decode the whole file, then each GOP alone, and return what was found.

    Args:
        index: of ``source``; its key samples are the claims.
        source: is read through, in order.
        stats: counts it.
    """
    way = DemuxedPackets(None, source.signature.size, index.stream_index, 1)
    try:
        codec = way.start(_EVERYTHING, SparseBuffer(source, stats))
        codec.copy_opaque = True
        packets: list[Packet] = []
        for packet in _until_damage(way.packets(_EVERYTHING)):
            if packet.size:
                packet.opaque = len(packets)
                packets.append(packet)
        full, refused = _decode(codec, packets)
        damaged = refused > 0
        wanted = {picture.packet: picture.digest for picture in full}
        places = _places(index, packets)
        findings = []
        claims = [number for number, place in enumerate(places) if place in set(index.key_samples.tolist())]
        # Where sets come in band, what is left of an earlier GOP's may hurt, or hide what is missing.
        ways_to_start = (False, True) if _has_sets(index, packets) else (False,)
        for start, stop in zip(claims, [*claims[1:], len(packets)], strict=True):
            found = []
            for fresh in ways_to_start:
                codec = _decoder_of_a_reader(index, codec, fresh=fresh)
                alone, refused = _decode(codec, packets[start:stop])
                found.append(_compare(places[start], packets[start:stop], start, alone, refused, wanted))
            findings.append(
                max(found, key=lambda finding: (not finding.safe, finding.missing + finding.mismatching))
            )
    finally:
        way.close()
    verdicts = index.verdicts.copy()
    for finding in findings:
        verdicts[np.searchsorted(index.key_samples, finding.key_sample)] = finding.verdict
    checked = replace(index, verdicts=verdicts)
    if not damaged:
        shown = [(places[picture.packet], packets[picture.packet].pts) for picture in full]
        if all(place >= 0 and pts == index.sample_pts[place] for place, pts in shown):
            checked = _renumber(checked, [place for place, _ in shown])
            checked = _lift_reason(checked, source, [picture.digest for picture in full], stats)
    return DecodeCheck(checked, tuple(findings), len(full), damaged)


def _decoder_of_a_reader(
    index: VideoIndex, codec: av.VideoCodecContext, *, fresh: bool
) -> av.VideoCodecContext:
    """Return a decoder in a state in which a reader may start a GOP.

    One for all, flushed, so that what one GOP leaves behind may hurt the next; or a fresh one, which knows the
    configuration record alone.
    """
    if fresh and len(index.entries) == 1 and index.codec:
        codec = open_decoder(index, 1)
        codec.copy_opaque = True
    else:
        codec.flush_buffers()
    return codec


def _has_sets(index: VideoIndex, packets: Sequence[Packet]) -> bool:
    """Return whether any packet carries parameter sets."""
    role = role_reader(index)
    return role is not None and any(role(memoryview(bytes(packet))).has_sets for packet in packets)


def _until_damage(packets: Iterator[Packet]) -> Iterator[Packet]:
    """Yield packets as far as the demuxer gives them."""
    try:
        yield from packets
    except av.error.FFmpegError:
        return


def _decode(codec: av.VideoCodecContext, packets: Sequence[Packet]) -> tuple[list[_Picture], int]:
    """Return the pictures of these packets, drained, and how many packets were refused."""
    pictures: list[_Picture] = []
    refused = 0
    for packet in (*packets, None):
        try:
            frames = codec.decode(packet)
        except av.error.EOFError:
            continue
        except av.error.FFmpegError:
            refused += 1
            continue
        pictures.extend(_Picture(cast("int", frame.opaque), _digest(frame)) for frame in frames)
    return pictures, refused


def _places(index: VideoIndex, packets: Sequence[Packet]) -> list[int]:
    """Return each packet's sample by where its bytes lie, -1 for none of the index."""
    sample_at = {offset: sample for sample, offset in enumerate(index.sample_offset.tolist())}
    return [sample_at.get(-1 if packet.pos is None else packet.pos, -1) for packet in packets]


def _compare(
    key: int,
    packets: Sequence[Packet],
    start: int,
    alone: list[_Picture],
    refused: int,
    wanted: dict[int, bytes],
) -> GopFinding:
    numbers = range(start, start + len(packets))
    expected = {number: wanted[number] for number in numbers if number in wanted}
    got = {picture.packet: picture.digest for picture in alone}
    missing = [number for number in expected if number not in got]
    different = [number for number in expected if number in got and got[number] != expected[number]]
    first = packets[0].pts
    leading = first is not None and all(
        (pts := packets[number - start].pts) is not None and pts < first
        for number in (*missing, *different)
    )
    return GopFinding(key, len(expected), len(missing), len(different), refused, leading)


def _renumber(index: VideoIndex, samples: list[int]) -> VideoIndex:
    """Return the index with FFmpeg's own frames where each is one sample of it, else the index as it is."""
    wanted = np.array(samples, np.int64)
    if np.array_equal(wanted, index.frame_sample) or len(set(samples)) < len(samples):
        return index
    hidden = np.setdiff1d(np.arange(*index.stream), wanted)
    renumbered = replace(index, hidden=hidden)
    return renumbered if np.array_equal(renumbered.frame_sample, wanted) else index


def _lift_reason(
    index: VideoIndex, source: RangeSource, digests: list[bytes], stats: ReadStats
) -> VideoIndex:
    """Return the index without its reason for the container path where the packet path proves exact."""
    if index.container_reason is None or not index.codec or len(index.entries) != 1:
        return index
    if (
        index.num_frames != len(digests)
        or int((index.sample_offset + index.sample_size).max()) > index.signature.size
    ):
        return index
    lifted = replace(index, container_reason=None)
    jobs = VideoJobs(source, lifted, None, Choices(apply_rotation=False))
    try:
        for start in range(0, len(digests), CHUNK_FRAMES):
            frames: Int64Array = np.arange(start, min(start + CHUNK_FRAMES, len(digests)), dtype=np.int64)
            pictures = run_one(jobs.read(Wanted.of(frames), stats), stats)
            if pictures.failures or jobs.index is not lifted:
                return index
            if [_hash(picture.tobytes()) for picture in pictures.array()] != digests[
                start : start + len(frames)
            ]:
                return index
    except FluxonGopError:
        return index
    finally:
        jobs.drop_decoders()
    return lifted


def _digest(frame: av.VideoFrame) -> bytes:
    """Return a hash of the picture as this package gives it, at its own size."""
    rgb = frame.reformat(format="rgb24", interpolation="BILINEAR", threads=1)
    return _hash(rgb.to_ndarray().tobytes())


def _hash(pixels: bytes) -> bytes:
    return hashlib.blake2b(pixels, digest_size=16).digest()
