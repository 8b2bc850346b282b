"""The fragments of a movie: finding every moof by ranged reads, and the samples they add.

Pure. The truth is the chain of top-level boxes; ``sidx`` and ``mfra`` only say where to look, so that the
heads of many fragments come side by side. Source: ISO/IEC 14496-12 clauses 8.8 and 8.16.3; what is shown and
when follows ``mov_read_tfhd`` and ``mov_read_trun`` of libavformat/mov.c (FFmpeg 8).
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fluxon_gop.errors import BoxError, UnsupportedMp4Error
from fluxon_gop.model import MAX_SAMPLES
from fluxon_gop.mp4_boxes import HEADER_BYTES, Box, child, children, parse_header
from fluxon_gop.ranges import ByteRange, Int64Array

Wave = tuple[ByteRange, ...]

WINDOW = 2048
"""Read of each place where a fragment is expected: its moof and the head of its mdat."""
MAX_TOP_LEVEL_BOXES = 1 << 21
MFRO_BYTES = 16
_WHOLE = frozenset({"moof", "sidx"})
"""Boxes whose bodies are read; the others are hopped over."""


class TopBox(NamedTuple):
    """A top-level box: its type, where the next one begins, and its body where that is read."""

    kind: str
    stop: int
    box: Box | None


def walk(
    start: int, size: int, first: memoryview
) -> Generator[Wave, list[bytes | memoryview], list[TopBox]]:
    """Return the top-level boxes from byte ``start`` to the end of the file, in order.

    Waves: the first window with the file's last 16 bytes; mfra where there is one and no sidx; then all places
    that sidx or mfra name, side by side, and one more for each box that they do not name. Without sidx and
    mfra it is one small read a fragment, in series.

    Args:
        start: behind the movie box.
        size: the file's size.
        first: the bytes from ``start`` that are held already.
    """
    windows: dict[int, memoryview] = {start: first}
    boxes: dict[int, TopBox] = {}
    cursors = {start: start}
    mfra: ByteRange | None = None
    tail_asked = False
    while True:
        needs = _follow(cursors, windows, boxes, size)
        chain = _chain(start, size, boxes)
        if chain is not None:
            return chain
        wave = sorted(needs.values())
        extra = []
        if not tail_asked and not any(box.kind == "sidx" for box in boxes.values()):
            extra = [ByteRange(max(start, size - MFRO_BYTES), size)]
        elif mfra is not None:
            extra = [mfra]
        data = yield (*wave, *extra)
        for wanted, got in zip(wave, data, strict=False):
            windows[wanted.start] = memoryview(got)
        if extra and not tail_asked:
            mfra = _mfra_range(bytes(data[-1]), start, size)
        elif extra:
            cursors |= {
                place: place for place in _tfra_places(memoryview(data[-1])) if start < place < size
            }
            mfra = None
        tail_asked = True


def _follow(
    cursors: dict[int, int], windows: dict[int, memoryview], boxes: dict[int, TopBox], size: int
) -> dict[int, ByteRange]:
    """Take boxes from every cursor on, as far as what is held goes; return what is needed to go on."""
    needs: dict[int, ByteRange] = {}
    work = list(cursors)
    cursors.clear()
    while work:
        at = window = work.pop()
        while at not in boxes and size - at >= 8:
            window = at if at in windows else window
            found = _box_at(windows.get(window, memoryview(b"")), window, at, size)
            if isinstance(found, ByteRange):
                needs[at] = found
                cursors[at] = at
                break
            if len(boxes) >= MAX_TOP_LEVEL_BOXES:
                text = f"more than {MAX_TOP_LEVEL_BOXES} top-level boxes"
                raise UnsupportedMp4Error(text)
            boxes[at] = found
            work.extend(place for place in _sidx_places(found) if place < size)
            at = found.stop
    return needs


def _box_at(window: memoryview, start: int, at: int, size: int) -> TopBox | ByteRange:
    """Return the box at ``at`` out of the window from ``start``, or the range that is needed for it."""
    data = window[at - start :] if at >= start else memoryview(b"")
    if len(data) < min(HEADER_BYTES, size - at):
        return ByteRange(at, min(size, at + WINDOW))
    kind, header, box_size = parse_header(data)
    stop = size if box_size == 0 else at + box_size
    if stop < at + header:
        # No box: FFmpeg stops here too.
        return TopBox("", size, None)
    if kind not in _WHOLE or stop > size:
        return TopBox(kind, stop, None)
    if len(data) < stop - at:
        return ByteRange(at, min(size, stop + HEADER_BYTES))
    return TopBox(kind, stop, Box(kind, data, header, stop - at, kind, at + header))


def _chain(start: int, size: int, boxes: dict[int, TopBox]) -> list[TopBox] | None:
    """Return the boxes from ``start`` to the end, None where one is not read yet."""
    chain, at = [], start
    while size - at >= 8:
        if at not in boxes:
            return None
        chain.append(boxes[at])
        at = boxes[at].stop
    return chain


def _sidx_places(found: TopBox) -> Iterator[int]:
    """Yield where a sidx says that its subsegments (or further sidx boxes) begin. Clause 8.16.3."""
    box = found.box
    if found.kind != "sidx" or box is None:
        return
    try:
        wide = box.unpack("B")[0] != 0
        at = found.stop + box.unpack("Q" if wide else "I", 20 if wide else 16)[0]
        (count,) = box.unpack("H", 30 if wide else 22)
        for entry in range(count):
            (size,) = box.unpack("I", (32 if wide else 24) + 12 * entry)
            yield at
            at += size & 0x7FFFFFFF
    except BoxError:
        # A damaged shortcut costs reads, nothing else.
        return


def _mfra_range(tail: bytes, start: int, size: int) -> ByteRange | None:
    """Return where the mfra box lies by the file's last bytes, None without one. Clause 8.8.11."""
    if len(tail) < MFRO_BYTES or tail[4:8] != b"mfro":
        return None
    length = int.from_bytes(tail[12:16])
    return ByteRange(size - length, size) if MFRO_BYTES < length <= size - start else None


def _tfra_places(mfra: memoryview) -> list[int]:
    """Return the moof offsets that the tfra boxes name. Clause 8.8.10."""
    places: set[int] = set()
    try:
        kind, header, _ = parse_header(mfra)
        if kind != "mfra":
            return []
        for box in children(Box("mfra", mfra, header, len(mfra), "mfra", 0)):
            if box.kind != "tfra":
                continue
            version_flags, _, sizes, count = box.unpack("IIII")
            wide = version_flags >> 24 == 1
            extra = sum((sizes >> shift & 3) + 1 for shift in (0, 2, 4))
            width = (16 if wide else 8) + extra
            rows = box.body[16 : 16 + count * width]
            at = 8 if wide else 4
            for row in range(len(rows) // width):
                field = rows[row * width + at : row * width + at + (8 if wide else 4)]
                places.add(int.from_bytes(field))
    except (BoxError, struct.error):
        return []
    return sorted(places)


class Fragments(NamedTuple):
    """The samples that the moofs add to one track, in FFmpeg's order."""

    offset: Int64Array
    size: Int64Array
    dts: Int64Array
    """Decode times of the track, FFmpeg's time offset taken off."""
    composition: Int64Array
    duration: Int64Array
    key: npt.NDArray[np.bool_]
    hidden: npt.NDArray[np.bool_]
    """Overlapped by the fragment before: decoded and dropped."""
    entry: Int64Array
    shift: int
    """The largest negative composition offset of the first fragment."""
    trouble: str | None


class _Defaults(NamedTuple):
    entry: int
    duration: int
    size: int
    flags: int


def read_fragments(
    moofs: list[Box],
    moov: Box,
    track_id: int,
    *,
    file_size: int,
    time_offset: int,
    track_end: int,
    last_dts: int | None,
    shift: int,
) -> Fragments:
    """Return the samples of ``track_id`` in all moofs. O(samples), vectorised within a run.

    Args:
        moofs: in file order.
        moov: for the trex defaults.
        track_id: of tkhd.
        file_size: bounds a run whose samples have one size and no table.
        time_offset: what FFmpeg takes off every decode time (the edit list's start less its empty edits).
        track_end: where the movie box's own samples end.
        last_dts: decode time of the movie box's last sample as FFmpeg indexes it, None without one.
        shift: largest negative composition offset of the movie box's samples.
    """
    trex = _trex(moov, track_id)
    runs: list[tuple[Any, ...]] = []
    trouble = None if trex is not None else "a fragmented track without trex defaults"
    end, total = track_end, 0
    first_shift: int | None = None
    for moof in moofs if trex is not None else ():
        assert trex is not None
        next_dts: int | None = None
        moof_start = moof.offset - moof.start
        implicit = moof_start
        for traf in children(moof):
            if traf.kind != "traf":
                continue
            tfdt: int | None = None
            header: tuple[int, int, _Defaults] | None = None
            with_offset = first_run = True
            for box in children(traf):
                if box.kind == "tfhd":
                    header = _tfhd(box, trex, moof_start, implicit)
                elif box.kind == "tfdt":
                    tfdt = box.unpack("Q" if box.unpack("B")[0] else "I", 4)[0]
                elif box.kind == "trun":
                    if header is None:
                        text = "a run of samples (trun) stands before the fragment's header (tfhd)"
                        raise box.error(text)
                    number, base, defaults = header
                    run = _trun(box, defaults, file_size)
                    with_offset = run.data_offset is not None
                    if number == track_id and not (with_offset or first_run):
                        trouble = trouble or "a run of samples without an offset of its own"
                    begin = base + (run.data_offset or 0)
                    ends = np.cumsum(run.size)
                    implicit = begin + (int(ends[-1]) if len(ends) else 0)
                    first_run = False
                    if number != track_id or not len(run.size):
                        continue
                    if next_dts is None:
                        next_dts = tfdt if tfdt is not None else end
                        if tfdt is None:
                            trouble = trouble or _no_tfdt(moofs, moof)
                    total += len(run.size)
                    if total > MAX_SAMPLES:
                        text = f"{total} samples; this parser indexes up to {MAX_SAMPLES}"
                        raise UnsupportedMp4Error(text, count=total)
                    dts = next_dts - time_offset + np.cumsum(run.duration) - run.duration
                    hidden = np.zeros(len(dts), bool) if last_dts is None else dts <= last_dts
                    runs.append(
                        (
                            begin + ends - run.size,
                            run.size,
                            dts,
                            run.composition,
                            run.duration,
                            (run.flags & (NON_SYNC | DEPENDS_YES)) == 0,
                            hidden,
                            np.full(len(dts), defaults.entry - 1, np.int64),
                        )
                    )
                    next_dts += int(run.duration.sum())
                    end, last_dts = next_dts, int(dts[-1])
                    low = max(0, -int(run.composition.min()))
                    if first_shift is None:
                        first_shift = shift = max(shift, low)
                    elif low > shift:
                        trouble = trouble or "a later fragment has a larger negative composition offset"
    if not runs:
        none = np.zeros(0, np.int64)
        return Fragments(
            none, none, none, none, none, none.astype(bool), none.astype(bool), none, shift, trouble
        )
    columns = [np.concatenate(column) for column in zip(*runs, strict=True)]
    offset, size, dts, composition, duration, key, hidden, entry = columns
    return Fragments(offset, size, dts, composition, duration, key, hidden, entry, shift, trouble)


NON_SYNC = 0x00010000
DEPENDS_YES = 0x01000000
"""Sample flags that make FFmpeg call a sample no key: sample_is_non_sync, sample_depends_on 1."""


def _no_tfdt(moofs: list[Box], moof: Box) -> str | None:
    return None if moof is moofs[0] else "a later fragment without a decode time (tfdt)"


def _trex(moov: Box, track_id: int) -> _Defaults | None:
    """Return the track's defaults. Clause 8.8.3."""
    mvex = child(moov, "mvex")
    for box in children(mvex) if mvex is not None else ():
        if box.kind == "trex" and box.unpack("I", 4)[0] == track_id:
            return _Defaults(*box.unpack("IIII", 8))
    return None


def _tfhd(box: Box, trex: _Defaults, moof_start: int, implicit: int) -> tuple[int, int, _Defaults]:
    """Return (track, base of data offsets, defaults). Clause 8.8.7."""
    flags, track = box.unpack("II")
    at = 8
    base = moof_start if flags & 0x020000 else implicit
    if flags & 0x01:
        (base,) = box.unpack("Q", at)
        at += 8
    fields = list(trex)
    for place, bit in enumerate((0x02, 0x08, 0x10, 0x20)):
        if flags & bit:
            (fields[place],) = box.unpack("I", at)
            at += 4
    if base >= 1 << 62:
        text = f"base data offset {base} is beyond any file"
        raise box.error(text)
    return track, base, _Defaults(*fields)


class _Run(NamedTuple):
    data_offset: int | None
    duration: Int64Array
    size: Int64Array
    flags: Int64Array
    composition: Int64Array


def _trun(box: Box, defaults: _Defaults, file_size: int) -> _Run:
    """Return one run of samples, defaults filled in. Clause 8.8.8."""
    flags, count = box.unpack("II")
    at, data_offset, first_flags = 8, None, None
    if flags & 0x01:
        (data_offset,) = box.unpack("i", at)
        at += 4
    if flags & 0x04:
        (first_flags,) = box.unpack("I", at)
        at += 4
    present = [bool(flags & bit) for bit in (0x100, 0x200, 0x400, 0x800)]
    width = 4 * sum(present)
    rows = box.body[at:]
    if count * width > len(rows):
        text = f"says {count} samples of {width} bytes, the box holds {len(rows)} bytes of them"
        raise box.error(text)
    if not present[1] and count * max(defaults.size, 1) > file_size:
        text = f"says {count} samples of {defaults.size} bytes, the file has {file_size} bytes"
        raise box.error(text)
    if count > MAX_SAMPLES:
        text = f"{box.path} at byte {box.offset}: {count} samples; this parser indexes up to {MAX_SAMPLES}"
        raise UnsupportedMp4Error(text, count=count)
    table = (
        np.frombuffer(rows[: count * width], ">u4").astype(np.int64).reshape(count, -1) if width else None
    )
    columns: list[Int64Array] = []
    column = 0
    for here, default in zip(present, (defaults.duration, defaults.size, defaults.flags, 0), strict=True):
        if here and table is not None:
            columns.append(table[:, column])
            column += 1
        else:
            columns.append(np.full(count, default, np.int64))
    duration, size, sample_flags, composition = columns
    if first_flags is not None and count:
        sample_flags = sample_flags.copy()
        sample_flags[0] = first_flags
    # Both versions signed, as FFmpeg reads them.
    composition = np.where(composition >= 1 << 31, composition - (1 << 32), composition)
    return _Run(data_offset, duration, size, sample_flags, composition)
