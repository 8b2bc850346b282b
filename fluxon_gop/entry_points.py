"""Prove from the bitstream where decoding may start.

Pure. A container's sync flag is a claim; the first bytes of the sample prove or refuse it. H.264: IDR.
HEVC: IDR; BLA and CRA for what is shown at or after them. AV1, VP9: key frames. And every parameter
set that the picture names lies in its own sample, or in the configuration record of a sample entry that
forbids in-band sets (avc1, hvc1: a file that breaks that rule is found by decoding only).
Source: H.264 clause 7.4.1.2.4, H.265 clause 8.1.3, ISO/IEC 14496-15, AV1 section 7.20, VP9 section 7.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fluxon_gop.bitstream import (
    Bits,
    BitsExhausted,
    avc_record,
    avc_sps,
    avc_type,
    hevc_record,
    hevc_sps,
    hevc_type,
    obus,
    sample_nals,
)
from fluxon_gop.model import SampleEntry, Verdict, VideoIndex
from fluxon_gop.ranges import ByteRange, Int64Array

PROBE_BYTES = 1024
"""Read of each key sample: its parameter sets and the head of its first slice."""
LONG_PROBE_BYTES = 4096
"""Read of the first sample, and of all where parameter sets come in band: a user-data SEI may stand first."""
_X264 = b"x264 - core "
_NO_IN_BAND_SETS = frozenset({"avc1", "hvc1"})


def probe_range(index: VideoIndex, sample: int) -> ByteRange:
    """Return the first bytes of a sample, as many as the check wants."""
    return probe_ranges(index, np.array([sample], np.int64))[0]


def probe_ranges(index: VideoIndex, samples: Int64Array) -> list[ByteRange]:
    """Return the first bytes of each sample, as many as the check wants."""
    # Encoders that repeat parameter sets repeat their long user-data SEI with them.
    usual = LONG_PROBE_BYTES if index.fourcc in {"avc3", "hev1"} else PROBE_BYTES
    want = np.where(samples == index.stream.start, LONG_PROBE_BYTES, usual)
    start = index.sample_offset[samples]
    stop = start + np.minimum(index.sample_size[samples], want)
    return list(map(ByteRange, start.tolist(), stop.tolist()))


def judge(
    index: VideoIndex, samples: Int64Array, heads: Sequence[bytes | memoryview]
) -> npt.NDArray[np.uint8]:
    """Return a verdict for each sample from its first bytes; UNCHECKED where those do not suffice."""
    entry, begin = index.entries[0], index.stream.start
    sizes = index.sample_size[samples].tolist()
    return np.array(
        [
            _verdict(entry, size, head, first=sample == begin)
            for sample, size, head in zip(samples.tolist(), sizes, heads, strict=True)
        ],
        np.uint8,
    )


def _verdict(entry: SampleEntry, size: int, head: bytes | memoryview, *, first: bool) -> Verdict:
    """Return the verdict on one sample of ``size`` bytes; ``first``: the stream begins with it."""
    # At the stream's first sample the configuration record is the decoder's whole state.
    trusted = entry.fourcc in _NO_IN_BAND_SETS or first
    try:
        if first and _remembers_its_encoder(entry, bytes(head)):
            return Verdict.REFUSED
        return _CHECKS[entry.codec](_known_sets(entry), memoryview(head), size, trusted)
    except BitsExhausted:
        return Verdict.REFUSED if len(head) >= size else Verdict.UNCHECKED
    except ValueError:
        return Verdict.REFUSED


def _remembers_its_encoder(entry: SampleEntry, head: bytes) -> bool:
    """Return whether FFmpeg decodes the whole stream by what the first sample's message says of its encoder.

    It follows x264's early errors: of B-pictures up to build 33, of lossless High 4:4:4 up to build 150. A decoder
    that starts later does not know the build. Source: FFmpeg's ``x264_build`` in h264_direct.c and h264_mb.c.
    """
    at = head.find(_X264) if entry.codec == "h264" else -1
    if at < 0:
        return False
    digits = head[at + len(_X264) : at + len(_X264) + 4].split(b" ")[0]
    build = int(digits) if digits.isdigit() else 0
    return build <= 33 or (build < 151 and _is_predictive(entry))


def _is_predictive(entry: SampleEntry) -> bool:
    """Return whether the profile is High 4:4:4 Predictive."""
    return any(nal[1] == 244 for nal in avc_record(entry.config).nals if avc_type(nal) == 7)


class _Known(NamedTuple):
    """What a configuration record holds, read once for all samples of a track."""

    length_size: int = 4
    videos: frozenset[int] = frozenset()
    """HEVC VPS numbers."""
    sequences: Mapping[int, int] = {}
    """SPS number -> its VPS's (H.264: 0)."""
    pictures: Mapping[int, int] = {}
    """PPS number -> its SPS's."""


@lru_cache(maxsize=256)
def _known_sets(entry: SampleEntry) -> _Known:
    """Return the parameter sets of the configuration record; a damaged set is as good as none."""
    if entry.codec not in {"h264", "hevc"}:
        return _Known()
    avc = entry.codec == "h264"
    record = avc_record(entry.config) if avc else hevc_record(entry.config)
    videos: set[int] = set()
    sequences: dict[int, int] = {}
    pictures: dict[int, int] = {}
    for nal in record.nals:
        with suppress(BitsExhausted, IndexError):
            kind = avc_type(nal) + 26 if avc else hevc_type(nal)
            if kind == 32 and not avc:
                videos.add(nal[2] >> 4)
            elif kind == 33:
                sequences[avc_sps(nal).number if avc else hevc_sps(nal).number] = 0 if avc else nal[2] >> 4
            elif kind == 34:
                number, sequence = _avc_pps(nal) if avc else _hevc_pps(nal)
                pictures[number] = sequence
    return _Known(record.length_size, frozenset(videos), sequences, pictures)


@lru_cache(maxsize=256)
def unsuitable(entry: SampleEntry) -> str | None:
    """Return why no packets are cut of streams with this configuration, None where they are."""
    try:
        if entry.codec == "h264":
            sets = [avc_sps(nal) for nal in avc_record(entry.config).nals if avc_type(nal) == 7]
            if not sets:
                return "the configuration record has no SPS"
            if not all(sps.frame_mbs_only for sps in sets):
                return "the pictures may be coded as fields"
        elif entry.codec == "hevc" and not any(
            hevc_type(nal) == 33 for nal in hevc_record(entry.config).nals
        ):
            return "the configuration record has no SPS"
    except (BitsExhausted, IndexError):
        return "the configuration record is damaged"
    return None


@lru_cache(maxsize=256)
def length_size(entry: SampleEntry) -> int:
    """Return the bytes of a NAL unit's length field, 0 where samples are no NAL units."""
    try:
        if entry.codec == "h264":
            return avc_record(entry.config).length_size
        if entry.codec == "hevc":
            return hevc_record(entry.config).length_size
    except (BitsExhausted, IndexError):
        return 0
    return 0


def contradicts(index: VideoIndex, sample: int, head: memoryview) -> bool:
    """Return whether a sample's first bytes contradict that the index calls it a proven entry point."""
    claimed = index.verdict_of(sample)
    if claimed not in {Verdict.PROVEN, Verdict.PROVEN_TRAILING}:
        return False
    (found,) = judge(index, np.array([sample], np.int64), [head])
    return found not in {claimed, Verdict.UNCHECKED}


@lru_cache(maxsize=256)
def picture_size(entry: SampleEntry) -> tuple[int, int] | None:
    """Return (width, height) of the decoded picture from the configuration record, None without it."""
    try:
        if entry.codec == "h264":
            for nal in avc_record(entry.config).nals:
                if avc_type(nal) == 7:
                    avc = avc_sps(nal)
                    return avc.width, avc.height
        elif entry.codec == "hevc":
            for nal in hevc_record(entry.config).nals:
                if hevc_type(nal) == 33:
                    hevc = hevc_sps(nal)
                    return hevc.width, hevc.height
    except (BitsExhausted, IndexError):
        return None
    return None


def _check_avc(known: _Known, head: memoryview, size: int, trusted: bool) -> Verdict:
    sequences = set(known.sequences) if trusted else set()
    pictures = dict(known.pictures) if trusted else {}
    for nal in sample_nals(head, known.length_size, size):
        kind = avc_type(nal)
        if kind == 7:
            sequences.add(avc_sps(nal).number)
        elif kind == 8:
            pictures |= dict([_avc_pps(nal)])
        elif kind == 5:
            bits = Bits(nal[1:64], nal=True)
            bits.ue(), bits.ue()
            named = bits.ue()
            return Verdict.PROVEN if pictures.get(named, -1) in sequences else Verdict.REFUSED
        elif 1 <= kind <= 4:
            return Verdict.REFUSED
    return Verdict.REFUSED


def _avc_pps(nal: bytes | memoryview) -> tuple[int, int]:
    """Return (its number, its SPS's number). H.264 clause 7.3.2.2."""
    bits = Bits(nal[1:64], nal=True)
    return bits.ue(), bits.ue()


def _check_hevc(known: _Known, head: memoryview, size: int, trusted: bool) -> Verdict:
    videos = set(known.videos) if trusted else set()
    sequences = dict(known.sequences) if trusted else {}
    pictures = dict(known.pictures) if trusted else {}
    for nal in sample_nals(head, known.length_size, size):
        kind = hevc_type(nal)
        if kind in {32, 33} and len(nal) < 3:
            raise BitsExhausted
        if kind == 32:
            videos.add(nal[2] >> 4)
        elif kind == 33:
            sequences[hevc_sps(nal).number] = nal[2] >> 4
        elif kind == 34:
            pictures |= dict([_hevc_pps(nal)])
        elif 16 <= kind <= 21:
            bits = Bits(nal[2:64], nal=True)
            bits.u(2)
            sequence = pictures.get(bits.ue(), -1)
            if sequences.get(sequence, -1) not in videos:
                return Verdict.REFUSED
            return Verdict.PROVEN if kind in {19, 20} else Verdict.PROVEN_TRAILING
        elif 0 <= kind <= 31:
            return Verdict.REFUSED
    return Verdict.REFUSED


def _hevc_pps(nal: bytes | memoryview) -> tuple[int, int]:
    """Return (its number, its SPS's number). H.265 clause 7.3.2.3.1."""
    bits = Bits(nal[2:64], nal=True)
    return bits.ue(), bits.ue()


def _check_av1(known: _Known, head: memoryview, size: int, trusted: bool) -> Verdict:
    del known, size, trusted
    reduced: int | None = None
    for kind, payload in obus(head):
        if kind == 1:
            bits = Bits(payload[:1])
            bits.u(4)
            reduced = bits.u(1)
        elif kind in {3, 6}:
            if reduced is None:
                return Verdict.REFUSED
            if reduced:
                return Verdict.PROVEN
            bits = Bits(payload[:1])
            existing, frame_type, shown = bits.u(1), bits.u(2), bits.u(1)
            return Verdict.PROVEN if (existing, frame_type, shown) == (0, 0, 1) else Verdict.REFUSED
    raise BitsExhausted


def _check_vp9(known: _Known, head: memoryview, size: int, trusted: bool) -> Verdict:
    del known, size, trusted
    bits = Bits(head[:2])
    if bits.u(2) != 2:
        return Verdict.REFUSED
    if bits.u(1) | bits.u(1) << 1 == 3:
        bits.u(1)
    existing, inter = bits.u(1), bits.u(1)
    return Verdict.REFUSED if existing or inter else Verdict.PROVEN


_CHECKS: dict[str, Callable[[_Known, memoryview, int, bool], Verdict]] = {
    "h264": _check_avc,
    "hevc": _check_hevc,
    "libdav1d": _check_av1,
    "vp9": _check_vp9,
}
