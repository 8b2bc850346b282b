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

from fluxon_gop import entry_points, sample_entries
from fluxon_gop.errors import BoxError, NotMp4Error, TruncatedMp4Error, UnsupportedMp4Error
from fluxon_gop.model import SampleEntry, Signature, Verdict, VideoIndex
from fluxon_gop.mp4_boxes import HEADER_BYTES, Box, child, need_child, parse_header
from fluxon_gop.mp4_chain import MAX_WHOLE_BYTES, walk
from fluxon_gop.mp4_tracks import Track, choose, display_matrix, movie_header, video_tracks
from fluxon_gop.ranges import ByteRange, Int64Array
from fluxon_gop.track_samples import TrackSamples, read_samples

HEAD_BYTES = 64 * 1024
"""First read of a cold file: holds the whole movie box of a short faststart file."""
TAIL_BYTES = 1024 * 1024
"""Read in one go behind the media data, where the movie box is expected to be the file's rest."""
MAX_TAIL_READS = 8
"""Boxes behind which a tail is read in one go; a file with more of them costs a header's bytes each."""
MAX_MOOV_BYTES = 512 * 1024 * 1024
MAX_CHECKED = 1 << 16
"""Key samples that ``check`` reads; those beyond are checked when they are read."""
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
        found = yield from _find_moov(signature.size, check=check)
    moov = Box("moov", found.body, 0, len(found.body), "moov", found.range.stop - len(found.body))
    if child(moov, "cmov") is not None:
        text = "the movie box is compressed (cmov): it is read by FFmpeg's demuxer"
        raise UnsupportedMp4Error(text)
    track = choose(list(video_tracks(moov, signature.size)), stream_index)
    sample_entries.refuse_encrypted(track.entries)
    sample_entries.refuse_external(need_child(track.trak, "mdia", "minf"), track.entries)
    moofs: list[Box] = []
    if child(moov, "mvex") is not None:
        chain = yield from walk(found.range.stop, signature.size, found.behind)
        moofs = [top.box for top in chain if top.kind == "moof" and top.box is not None]
        if any(top.kind == "moof" and top.box is None and top.stop <= signature.size for top in chain):
            text = f"a fragment's header (moof) has more than {MAX_WHOLE_BYTES} bytes"
            raise UnsupportedMp4Error(text)
    index = _assemble(moov, found, signature, track, moofs)
    if check and index.container_reason is None:
        unchecked = np.flatnonzero(index.verdicts == Verdict.UNCHECKED)[:MAX_CHECKED]
        samples = index.key_samples[unchecked]
        wave = tuple(entry_points.probe_ranges(index, samples))
        if wave:
            heads = yield wave
            verdicts = entry_points.judge(index, samples, heads)
            index = index.with_verdicts(samples, verdicts)
    return index


class _Found(NamedTuple):
    """The movie box: its range, its body, what is held behind it, and whether a fragment came before it."""

    range: ByteRange
    body: memoryview
    behind: memoryview
    late: bool


def _try_hint(
    hint: ByteRange | None, size: int
) -> Generator[Wave, list[bytes | memoryview], _Found | None]:
    """Return the movie box where the hint names it, else None."""
    if hint is None or not 0 <= hint.start < hint.stop <= size or not 8 < hint.size <= MAX_MOOV_BYTES:
        return None
    (data,) = yield (hint,)
    body = memoryview(data)
    try:
        kind, header, box_size = parse_header(data)
        if kind != "moov" or not header < box_size <= hint.size:
            return None
        box = Box(kind, body, header, box_size, kind, hint.start + header)
        if child(box, "mvhd") is None or child(box, "trak") is None:
            return None
    except BoxError:
        return None
    moov = ByteRange(hint.start, hint.start + box_size)
    return _Found(moov, body[header:box_size], body[box_size:], late=False)


def _find_moov(size: int, *, check: bool) -> Generator[Wave, list[bytes | memoryview], _Found]:
    """Hop from box to box to the movie box."""
    if size < 8:
        text = f"the file has {size} bytes: too few for any box"
        raise NotMp4Error(text)
    start, held = 0, memoryview((yield (ByteRange(0, min(HEAD_BYTES, size)),))[0])
    at, fragmented = 0, False
    for count in range(MAX_TOP_LEVEL_BOXES):
        if size - at < 8:
            break
        if at + HEADER_BYTES > start + len(held) and start + len(held) < size:
            stop = min(size, at + (TAIL_BYTES if 0 < count <= MAX_TAIL_READS else HEADER_BYTES))
            # Media data that is short comes with the file's rest: the check wants the heads of its key samples.
            end = start + len(held)
            start = end if check and stop == size and end <= at <= end + HEAD_BYTES else at
            held = memoryview((yield (ByteRange(start, stop),))[0])
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
            return _Found(moov_range, body[header:], held[stop - start :], fragmented)
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


def _assemble(moov: Box, found: _Found, signature: Signature, track: Track, moofs: list[Box]) -> VideoIndex:
    entries = tuple(sample_entries.parse_entry(box) for box in track.entries)
    movie_timescale, movie_matrix = movie_header(moov)
    samples = read_samples(moov, track, moofs, movie_timescale, signature.size)
    picture = entry_points.picture_size(entries[0]) if entries else None
    width, height = picture or ((entries[0].width, entries[0].height) if entries else (0, 0))
    keys = _with(samples.stream.start, samples.keys) if len(samples.size) else samples.keys
    return VideoIndex(
        signature=signature,
        moov_range=found.range,
        stream_index=track.number,
        # FFmpeg counts a timescale of 0 as 1; such a track goes to the container path.
        timescale=max(track.timescale, 1),
        entries=entries,
        width=width,
        height=height,
        matrix=display_matrix(track.trak, movie_matrix),
        sample_offset=samples.offset,
        sample_size=samples.size,
        sample_pts=samples.pts,
        sample_dts=samples.dts,
        sample_entry=samples.entry,
        hidden=samples.hidden,
        stream=samples.stream,
        key_samples=keys,
        verdicts=np.full(len(keys), Verdict.UNCHECKED, np.uint8),
        last_duration=samples.last_duration,
        container_reason=_first_reason(
            "a fragment stands before the movie box" if found.late else None,
            _entry_reason(entries, samples, track),
            samples.reason(signature.size),
        ),
    )


def _with(number: int, numbers: Int64Array) -> Int64Array:
    """Return sorted numbers with one more among them, unless it is there."""
    at = int(np.searchsorted(numbers, number))
    return numbers if at < len(numbers) and numbers[at] == number else np.insert(numbers, at, number)


def _first_reason(*reasons: str | None) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


def _entry_reason(entries: tuple[SampleEntry, ...], samples: TrackSamples, track: Track) -> str | None:
    if not entries:
        text = f"{track.stbl.path}/stsd: no sample entries"
        raise BoxError(text, path=track.stbl.path, offset=track.stbl.offset)
    if track.timescale == 0:
        return "the track has no timescale"
    if len(entries) > 1:
        return f"{len(entries)} sample entries: the decoder's configuration changes"
    if not entries[0].codec:
        return f"no packets are cut of {sample_entries.describe(entries[0].fourcc)}"
    if len(samples.entry) and int(samples.entry.max()) >= len(entries):
        return "a sample names a sample entry that does not exist"
    return entry_points.unsuitable(entries[0])
