"""Build a video's index from byte ranges: a parser that asks for the bytes it needs.

Pure: :func:`index_steps` yields waves of ranges and is sent their bytes; who fetches them is not its
concern. Normally two waves of one read each: 64 KiB of head, then the movie box, wherever it lies. With
``check`` one more wave of small ranges, the first bytes of each key sample.
Source: ISO/IEC 14496-12; where files leave the norm, libavformat/mov.c decides what is shown.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

import numpy as np

from fluxon_gop import edit_list, entry_points, sample_entries
from fluxon_gop.errors import BoxError, NotMp4Error, TruncatedMp4Error, UnsupportedMp4Error
from fluxon_gop.model import IDENTITY_MATRIX, SampleEntry, Signature, Verdict, VideoIndex
from fluxon_gop.mp4_boxes import (
    HEADER_BYTES,
    Box,
    child,
    children,
    edits,
    need_child,
    parse_header,
    sample_sizes,
)
from fluxon_gop.ranges import ByteRange
from fluxon_gop.sample_tables import SampleTables

HEAD_BYTES = 64 * 1024
"""First read of a cold file: holds the whole movie box of a short faststart file."""
TAIL_BYTES = 1024 * 1024
"""Read in one go behind the media data, where the movie box is expected to be the file's rest."""
MAX_MOOV_BYTES = 512 * 1024 * 1024
MAX_TOP_LEVEL_BOXES = 4096
"""Boxes in front of the movie box; each one past the head costs a read."""

TOP_LEVEL = frozenset(
    {
        "ftyp", "moov", "mdat", "free", "skip", "wide", "uuid", "pnot", "udta", "meta", "styp", "sidx", "ssix",
        "prft", "moof", "mfra", "pdin", "emsg", "PICT", "junk", "bloc", "imda", "ID32", "sefd", "axte", "pict",
    }
)  # fmt: skip
"""Boxes with which a file of this family may begin."""

Wave = tuple[ByteRange, ...]
Steps = Generator[Wave, list[bytes | memoryview], VideoIndex]


def index_steps(
    signature: Signature,
    *,
    stream_index: int | None = None,
    check: bool = False,
    hint: ByteRange | None = None,
) -> Steps:
    """Return a generator that yields ranges, is sent their bytes in order, and returns the index.

    Args:
        signature: the file's version; its size bounds every read.
        stream_index: the track to index (its place among the ``trak`` boxes); None for FFmpeg's best.
        check: also read the first bytes of each key sample and prove or refuse it as an entry point.
        hint: where the movie box is said to lie; saves the head's wave where true, costs one where false.

    Raises:
        Mp4Error: whatever the bytes are, in time and memory bounded by the movie box.
    """
    found = yield from _try_hint(hint, signature.size)
    if found is None:
        found = yield from _find_moov(signature.size)
    moov_range, moov, fragmented = found
    index = _parse_moov(moov, moov_range, signature, stream_index=stream_index, fragmented=fragmented)
    if check and index.container_reason is None:
        unchecked = np.flatnonzero(index.verdicts == Verdict.UNCHECKED)
        samples = index.key_samples[unchecked]
        wave = tuple(entry_points.probe_range(index, int(sample)) for sample in samples)
        if wave:
            heads = yield wave
            verdicts = entry_points.judge(index, samples, heads)
            index = index.with_verdicts(samples, verdicts)
    return index


_Found = tuple[ByteRange, memoryview, bool]


def _try_hint(
    hint: ByteRange | None, size: int
) -> Generator[Wave, list[bytes | memoryview], _Found | None]:
    """Return the movie box where the hint names it, else None."""
    if hint is None or not 0 <= hint.start < hint.stop <= size or not 8 < hint.size <= MAX_MOOV_BYTES:
        return None
    (data,) = yield (hint,)
    kind, header, box_size = parse_header(data)
    if kind != "moov" or not header < box_size <= hint.size:
        return None
    return ByteRange(hint.start, hint.start + box_size), memoryview(data)[header:box_size], False


def _find_moov(size: int) -> Generator[Wave, list[bytes | memoryview], _Found]:
    """Hop from box to box to the movie box and return (its range, its bytes, moofs seen before it)."""
    if size < 8:
        text = f"the file has {size} bytes: too few for any box"
        raise NotMp4Error(text)
    start, held = 0, memoryview((yield (ByteRange(0, min(HEAD_BYTES, size)),))[0])
    at, fragmented = 0, False
    for count in range(MAX_TOP_LEVEL_BOXES):
        if size - at < 8:
            break
        if at + HEADER_BYTES > start + len(held) and start + len(held) < size:
            want = ByteRange(at, min(size, at + (TAIL_BYTES if count else HEADER_BYTES)))
            start, held = at, memoryview((yield (want,))[0])
        kind, header, box_size = parse_header(held, at - start)
        if count == 0 and kind not in TOP_LEVEL:
            text = f"the file begins with {bytes(held[:8])!r}: no ISO base media file"
            raise NotMp4Error(text)
        stop = size if box_size == 0 else at + box_size
        if stop < at + header:
            text = f"top-level box {kind!r} at byte {at}: size {box_size} is less than its header"
            raise BoxError(text, path=kind, offset=at)
        fragmented = fragmented or kind == "moof"
        if kind == "moov":
            moov_range = ByteRange(at, stop)
            body = yield from _read_moov(moov_range, size, start, held)
            return moov_range, body[header:], fragmented
        at = stop
    text = f"no movie box (moov) in {size} bytes"
    raise (
        TruncatedMp4Error(text, need=at, size=size) if at > size else BoxError(text, path="moov", offset=at)
    )


def _read_moov(
    moov: ByteRange, size: int, start: int, held: memoryview
) -> Generator[Wave, list[bytes | memoryview], memoryview]:
    """Return the movie box, reading only what is not held."""
    if moov.stop > size:
        text = f"the movie box is bytes [{moov.start}, {moov.stop}), the file ends at {size}"
        raise TruncatedMp4Error(text, need=moov.stop, size=size)
    if moov.size > MAX_MOOV_BYTES:
        text = f"the movie box has {moov.size} bytes; this parser reads up to {MAX_MOOV_BYTES}"
        raise UnsupportedMp4Error(text, size=moov.size)
    have = held[moov.start - start :][: moov.size]
    if len(have) == moov.size:
        return have
    (rest,) = yield (ByteRange(moov.start + len(have), moov.stop),)
    return memoryview(b"".join((have, rest)))


class _Track(NamedTuple):
    """What choosing among the video tracks needs."""

    number: int
    trak: Box
    stbl: Box
    timescale: int
    entries: list[Box]
    enabled: bool
    samples: int
    bytes: int
    duration: int

    @property
    def rank(self) -> tuple[int, int, float, int]:
        """FFmpeg's order of preference: default flag, a few frames, bit rate, frames."""
        rate = self.bytes * self.timescale / self.duration if self.duration else 0.0
        return (self.enabled, min(self.samples, 5), rate, self.samples)


def _parse_moov(
    body: memoryview,
    moov_range: ByteRange,
    signature: Signature,
    *,
    stream_index: int | None,
    fragmented: bool,
) -> VideoIndex:
    moov = Box("moov", body, 0, len(body), "moov", moov_range.stop - len(body))
    if child(moov, "cmov") is not None:
        text = "the movie box is compressed (cmov): it is read by FFmpeg's demuxer"
        raise UnsupportedMp4Error(text)
    fragmented = fragmented or child(moov, "mvex") is not None
    movie_timescale, movie_matrix = _mvhd(moov)
    track = _choose(list(_video_tracks(moov, signature.size)), stream_index)
    sample_entries.refuse_encrypted(track.entries)
    entries = tuple(sample_entries.parse_entry(box) for box in track.entries)
    tables = SampleTables.read(track.stbl, signature.size)
    reason = _first_reason(
        "the file is fragmented (mvex)" if fragmented else None,
        _entry_reason(entries, tables, track),
        tables.reason(signature.size),
    )
    listed = edits(track.trak)
    shown = edit_list.whole(len(tables.size))
    if listed and len(tables.size):
        complication = edit_list.complication(listed)
        if movie_timescale == 0:
            complication = "the movie has no timescale"
        reason = _first_reason(reason, complication)
        if reason is None:
            shown = edit_list.apply(
                listed,
                tables.dts,
                tables.composition,
                tables.keys,
                timescale=track.timescale,
                movie_timescale=movie_timescale,
            )
    picture = entry_points.picture_size(entries[0]) if entries else None
    width, height = picture or ((entries[0].width, entries[0].height) if entries else (0, 0))
    keys = np.union1d(tables.keys, [shown.stream.start]) if len(tables.size) else tables.keys
    return VideoIndex(
        signature=signature,
        moov_range=moov_range,
        stream_index=track.number,
        timescale=track.timescale,
        entries=entries,
        width=width,
        height=height,
        matrix=_matrix(track.trak, movie_matrix),
        sample_offset=tables.offset,
        sample_size=tables.size,
        sample_pts=tables.pts + shown.shift,
        sample_dts=tables.dts + shown.shift - tables.decode_shift,
        sample_entry=tables.entry,
        hidden=shown.hidden,
        stream=shown.stream,
        key_samples=keys,
        verdicts=np.full(len(keys), Verdict.UNCHECKED, np.uint8),
        last_duration=tables.last_duration,
        container_reason=reason,
    )


def _first_reason(*reasons: str | None) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


def _mvhd(moov: Box) -> tuple[int, tuple[int, ...]]:
    """Return the movie's timescale and matrix. Clause 8.2.2."""
    box = need_child(moov, "mvhd")
    wide = box.unpack("B")[0] == 1
    (timescale,) = box.unpack("I", 20 if wide else 12)
    return timescale, box.unpack("9i", 48 if wide else 36)


def _matrix(trak: Box, movie: tuple[int, ...]) -> tuple[int, ...]:
    """Return the track's matrix times the movie's, the display matrix. Clauses 8.3.2, 6.2.2."""
    box = child(trak, "tkhd")
    if box is None:
        return IDENTITY_MATRIX
    track = box.unpack("9i", 52 if box.unpack("B")[0] == 1 else 40)
    if movie == IDENTITY_MATRIX:
        return track
    shifts = (16, 16, 30)
    return tuple(
        sum((track[3 * i + e] * movie[3 * e + j]) >> shifts[e] for e in range(3))
        for i in range(3)
        for j in range(3)
    )


def _video_tracks(moov: Box, file_size: int) -> Generator[_Track, None, None]:
    for number, trak in enumerate(box for box in children(moov) if box.kind == "trak"):
        mdia = child(trak, "mdia")
        handler = mdia and child(mdia, "hdlr")
        if mdia is None or handler is None or bytes(handler.body[8:12]) != b"vide":
            continue
        stbl = need_child(mdia, "minf", "stbl")
        entries = sample_entries.parse_entries(need_child(stbl, "stsd"))
        header = need_child(mdia, "mdhd")
        timescale, duration = (
            header.unpack("IQ", 20) if header.unpack("B")[0] == 1 else header.unpack("II", 12)
        )
        flags = child(trak, "tkhd")
        sizes = sample_sizes(stbl, file_size)
        yield _Track(
            number,
            trak,
            stbl,
            timescale,
            entries,
            flags is not None and bool(flags.unpack("I")[0] & 1),
            len(sizes),
            int(sizes.sum()),
            duration,
        )


def _choose(tracks: list[_Track], stream_index: int | None) -> _Track:
    """Return the asked track, or the one that FFmpeg calls best."""
    if not tracks:
        text = "the movie box has no video track"
        raise UnsupportedMp4Error(text)
    if stream_index is None:
        return max(tracks, key=lambda track: track.rank)
    for track in tracks:
        if track.number == stream_index:
            return track
    have = [track.number for track in tracks]
    text = f"stream {stream_index} is no video track: the file's video tracks are {have}"
    raise UnsupportedMp4Error(text, stream_index=stream_index)


def _entry_reason(entries: tuple[SampleEntry, ...], tables: SampleTables, track: _Track) -> str | None:
    if not entries:
        text = f"{track.stbl.path}/stsd: no sample entries"
        raise BoxError(text, path=track.stbl.path, offset=track.stbl.offset)
    if track.timescale == 0:
        return "the track has no timescale"
    external = sample_entries.external_data(need_child(track.trak, "mdia", "minf"))
    if external is not None:
        return f"the samples lie outside the file ({external})"
    if len(entries) > 1:
        return f"{len(entries)} sample entries: the decoder's configuration changes"
    if not entries[0].codec:
        return f"no packets are cut of {sample_entries.describe(entries[0].fourcc)}"
    if len(tables.entry) and int(tables.entry.max()) >= len(entries):
        return "a chunk names a sample entry that does not exist"
    return entry_points.unsuitable(entries[0])
