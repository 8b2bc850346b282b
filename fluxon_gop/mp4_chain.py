"""The chain of top-level boxes behind a movie box: finding every moof by ranged reads.

Pure. The truth is the chain itself; ``sidx`` and ``mfra`` only say where to look, so that the heads of many
fragments come side by side. Source: ISO/IEC 14496-12 clauses 8.8.10, 8.8.11 and 8.16.3.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator
from typing import NamedTuple

from fluxon_gop.errors import BoxError, UnsupportedMp4Error
from fluxon_gop.mp4_boxes import HEADER_BYTES, Box, children, parse_header
from fluxon_gop.ranges import ByteRange

Wave = tuple[ByteRange, ...]

WINDOW = 2048
"""Read of each place where a fragment is expected: its moof and the head of its mdat."""
MAX_TOP_LEVEL_BOXES = 1 << 19
MAX_WHOLE_BYTES = 64 * 1024 * 1024
"""A moof, sidx or mfra that is read; a shortcut beyond is passed over, a moof beyond is unsupported."""
SIDE_BY_SIDE = 4096
"""Places that are read in one wave: what a lying shortcut may cost at once."""
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
    chain: list[TopBox] = []
    at = start
    while True:
        needs = _follow(cursors, windows, boxes, size)
        windows.clear()
        while size - at >= 8 and at in boxes:
            chain.append(boxes[at])
            at = boxes[at].stop
        if size - at < 8:
            return chain
        wave = sorted(needs.values())[:SIDE_BY_SIDE]
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
    if kind not in _WHOLE or stop > size or stop - at > MAX_WHOLE_BYTES:
        return TopBox(kind, stop, None)
    if len(data) < stop - at:
        return ByteRange(at, min(size, stop + HEADER_BYTES))
    return TopBox(kind, stop, Box(kind, data, header, stop - at, kind, at + header))


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
    most = min(size - start, MAX_WHOLE_BYTES)
    return ByteRange(size - length, size) if MFRO_BYTES < length <= most else None


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
