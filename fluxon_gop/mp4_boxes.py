"""The boxes of an ISO base media file: headers, the tree, and the tables of a track.

Pure: bytes in, values out; any bad byte raises an :class:`~fluxon_gop.errors.Mp4Error`. Counts are
checked against their box before anything is allocated. The file format's 1-based numbers end here.
Source: ISO/IEC 14496-12 (clause numbers beside each box) and the QuickTime File Format.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fluxon_gop.errors import BoxError, UnsupportedMp4Error
from fluxon_gop.model import MAX_SAMPLES
from fluxon_gop.ranges import Int64Array

_HEADER = struct.Struct(">I4s")
HEADER_BYTES = 16
"""Enough for any box header: size, type, and the 64-bit size."""
MAX_UNBACKED = 1 << 20
"""Samples that a few bytes may claim, where no table has a row for each: a coded video has none of this."""
MAX_EDITS = 1 << 16
MAX_BOXES = 100_000
"""Children of one box that are walked; a real movie box has some dozens."""


class Box(NamedTuple):
    """One box. ``data`` is its parent's buffer, ``start`` and ``stop`` its body there."""

    kind: str
    data: memoryview
    start: int
    stop: int
    path: str
    offset: int
    """Absolute file offset of the body."""

    @property
    def body(self) -> memoryview:
        """The bytes after the header."""
        return self.data[self.start : self.stop]

    def error(self, message: str) -> BoxError:
        """Return an error that names this box and where it lies."""
        text = f"{self.path} at byte {self.offset}: {message}"
        return BoxError(text, path=self.path, offset=self.offset)

    def need(self, size: int, what: str) -> None:
        """Raise where the body is shorter than ``size`` bytes."""
        if self.stop - self.start < size:
            text = f"{what} needs {size} bytes, the box holds {self.stop - self.start}"
            raise self.error(text)

    def unpack(self, form: str, at: int = 0) -> tuple[int, ...]:
        """Return big-endian fields at ``at`` bytes into the body."""
        self.need(at + struct.calcsize(">" + form), f"its fields ({form})")
        return struct.unpack_from(">" + form, self.data, self.start + at)


def parse_header(data: bytes | memoryview, at: int = 0) -> tuple[str, int, int]:
    """Return (type, header size, box size) of the box at ``at``; box size 0 means "to the end".

    Needs 8 bytes, and 16 where the size is 64-bit. Clause 4.2.
    """
    size, kind = _HEADER.unpack_from(data, at)
    if size == 1:
        if len(data) - at < HEADER_BYTES:
            text = f"64-bit box size at byte {at}: the header is cut"
            raise BoxError(text, path="", offset=at)
        return kind.decode("latin-1"), 16, struct.unpack_from(">Q", data, at + 8)[0]
    return kind.decode("latin-1"), 8, size


def children(parent: Box, skip: int = 0, kind: str | None = None) -> Iterator[Box]:
    """Yield the boxes inside ``parent``, from ``skip`` bytes into its body; with ``kind`` only those of this type.

    Ends at a 32-bit zero (a QuickTime terminator) or at less than a header's bytes, as FFmpeg does.
    A child past its parent's end raises, of whatever type it is.
    """
    data, stop = parent.data[: parent.stop], parent.stop
    at = parent.start + skip
    wanted = None if kind is None else kind.encode("latin-1")
    for _ in range(MAX_BOXES):
        if stop - at < 8:
            return
        size, raw = _HEADER.unpack_from(data, at)
        if wanted is not None and raw != wanted and 8 <= size <= stop - at:
            at += size
            continue
        name, header, size = parse_header(data, at)
        if size == 0:
            if name == "\0\0\0\0":
                return
            size = stop - at
        if size < header or at + size > stop:
            offset, path = parent.offset + at - parent.start, _path(parent, name)
            text = f"{path} at byte {offset}: size {size} does not fit: want {header} to {stop - at}"
            raise BoxError(text, path=path, offset=offset)
        if kind is None or name == kind:
            offset = parent.offset + at - parent.start + header
            yield Box(name, parent.data, at + header, at + size, _path(parent, name), offset)
        at += size
    text = f"{parent.path}: more than {MAX_BOXES} boxes"
    raise BoxError(text, path=parent.path, offset=parent.offset)


def child(parent: Box, *kinds: str) -> Box | None:
    """Return the first box of the path ``kinds`` below ``parent``, or None."""
    found: Box | None = parent
    for kind in kinds:
        assert found is not None
        found = next(children(found, kind=kind), None)
        if found is None:
            return None
    return found


def _path(parent: Box, kind: str) -> str:
    return f"{parent.path}/{kind}" if parent.path else kind


def need_child(parent: Box, *kinds: str) -> Box:
    """Return the first box of the path ``kinds`` below ``parent``; raise BoxError without one."""
    found = child(parent, *kinds)
    if found is None:
        raise parent.error("/".join(kinds) + " is missing")
    return found


def _table(box: Box, width: int, at: int = 4) -> tuple[int, memoryview]:
    """Return (count, rows) of a full box that is a count and rows of ``width`` bytes."""
    (count,) = box.unpack("I", at)
    rows = box.body[at + 4 :]
    if count * width > len(rows):
        text = f"says {count} entries of {width} bytes, the box holds {len(rows)} bytes of them"
        raise box.error(text)
    return count, rows[: count * width]


def _words(rows: memoryview, columns: int) -> npt.NDArray[np.int64]:
    return np.frombuffer(rows, dtype=">u4").astype(np.int64).reshape(-1, columns)


def sample_sizes(stbl: Box, file_size: int) -> Int64Array:
    """Return the size of each sample from stsz or stz2. Clause 8.7.3.

    ``file_size`` bounds the count where all samples have one size and no table backs it.
    """
    box = child(stbl, "stsz")
    if box is not None:
        _, uniform, count = box.unpack("III")
        if uniform:
            if count > min(file_size // uniform + 1, MAX_SAMPLES):
                text = f"says {count} samples of {uniform} bytes, the file has {file_size} bytes"
                raise box.error(text)
            if count > MAX_UNBACKED:
                text = f"{box.path} at byte {box.offset}: {count} samples of one size; "
                text += f"this parser indexes up to {MAX_UNBACKED}"
                raise UnsupportedMp4Error(text, count=count)
            return np.full(count, uniform, dtype=np.int64)
        _check_count(box, count)
        return _words(_table(box, 4, 8)[1], 1)[:, 0]
    box = need_child(stbl, "stz2")
    _, width, count = box.unpack("III")
    _check_count(box, count)
    bits = width & 0xFF
    if bits not in {4, 8, 16}:
        text = f"field size {bits} bits: want 4, 8 or 16"
        raise box.error(text)
    rows = box.body[12:]
    nbytes = (count * bits + 7) // 8
    if nbytes > len(rows):
        text = f"says {count} entries of {bits} bits, the box holds {len(rows)} bytes of them"
        raise box.error(text)
    if bits == 16:
        return np.frombuffer(rows[:nbytes], dtype=">u2").astype(np.int64)
    data = np.frombuffer(rows[:nbytes], dtype=np.uint8)
    if bits == 4:
        data = np.stack((data >> 4, data & 15), axis=1).reshape(-1)[:count]
    return data.astype(np.int64)


def _check_count(box: Box, count: int) -> None:
    if count > MAX_SAMPLES:
        text = f"{box.path} at byte {box.offset}: {count} samples; this parser indexes up to {MAX_SAMPLES}"
        raise UnsupportedMp4Error(text, count=count)


def chunk_offsets(stbl: Box) -> Int64Array:
    """Return the file offset of each chunk from stco or co64. Clause 8.7.5."""
    box = child(stbl, "stco")
    if box is not None:
        return _words(_table(box, 4)[1], 1)[:, 0]
    box = need_child(stbl, "co64")
    rows = np.frombuffer(_table(box, 8)[1], dtype=">u8")
    if len(rows) and int(rows.max()) >= 1 << 62:
        text = f"chunk offset {int(rows.max())} is beyond any file"
        raise box.error(text)
    return rows.astype(np.int64)


def sample_chunks(stbl: Box, chunks: int, samples: int) -> tuple[Int64Array, Int64Array]:
    """Return (samples in each chunk, 0-based sample entry of each chunk) from stsc. Clause 8.7.4.

    The counts add up to at most ``samples``; chunks after the last sample hold none. O(chunks).
    """
    box = need_child(stbl, "stsc")
    runs = _words(_table(box, 12)[1], 3)
    if not chunks or not samples:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if not len(runs):
        text = f"no entries for {chunks} chunks"
        raise box.error(text)
    first = runs[:, 0] - 1
    if first[0] != 0 or np.any(first[1:] <= first[:-1]):
        text = f"first chunks {(first[:4] + 1).tolist()}...: want 1, then rising"
        raise box.error(text)
    if np.any(runs[:, 2] < 1) or np.any(runs[:, 1] < 1):
        text = "sample count and sample entry must be 1 or more"
        raise box.error(text)
    runs, first = runs[first < chunks], first[first < chunks]
    repeat = np.diff(np.append(first, chunks))
    per_chunk = np.repeat(np.minimum(runs[:, 1], samples), repeat)
    entry = np.repeat(runs[:, 2] - 1, repeat)
    before = np.cumsum(per_chunk) - per_chunk
    return np.clip(samples - before, 0, per_chunk), entry


def run_values(box: Box, samples: int, *, signed: bool) -> Int64Array:
    """Return one value a sample from runs of (count, value): stts and ctts. Clauses 8.6.1.2, 8.6.1.3.

    Read as far as ``samples``; the result is shorter where the runs are. Signed reads both versions of
    ctts as FFmpeg does, which ignores the version.
    """
    _, rows = _table(box, 8)
    counts = _words(rows, 2)[:, 0]
    values = np.frombuffer(rows, dtype=">i4" if signed else ">u4").astype(np.int64).reshape(-1, 2)[:, 1]
    before = np.cumsum(counts) - counts
    return np.repeat(values, np.clip(samples - before, 0, counts))


def decode_shift(ctts: Box) -> int:
    """Return by how much FFmpeg moves decode times back so that none exceeds its presentation time.

    The largest negative offset, of all runs but the last two and those without samples
    (``mov_read_ctts``).
    """
    _, rows = _table(ctts, 8)
    runs = np.frombuffer(rows, dtype=">i4").reshape(-1, 2)[:-2]
    return max(0, -int(runs[runs[:, 0] > 0, 1].min(initial=0)))


def sync_samples(stbl: Box, samples: int) -> Int64Array | None:
    """Return the 0-based sync samples from stss, sorted; None without the box: all are. Clause 8.6.2.

    As FFmpeg reads it (``mov_build_index``): an empty list leaves the first sample, one that begins with 0
    counts from 0, and one that stops rising ends there.
    """
    box = child(stbl, "stss")
    if box is None:
        return None
    numbers = _words(_table(box, 4)[1], 1)[:, 0]
    if not len(numbers):
        return np.arange(min(samples, 1), dtype=np.int64)
    if numbers[0] > 0:
        numbers = numbers - 1
    falls = np.flatnonzero(numbers[1:] <= numbers[:-1])
    if len(falls):
        numbers = numbers[: falls[0] + 1]
    return numbers[numbers < samples]


class Edit(NamedTuple):
    """One entry of elst: movie ticks that it lasts, media time (-1 = empty), rate as 16.16."""

    duration: int
    media_time: int
    rate: int


def edits(trak: Box) -> list[Edit]:
    """Return the track's edit list, [] without one. Clause 8.6.6."""
    box = child(trak, "edts", "elst")
    if box is None:
        return []
    (version_flags,) = box.unpack("I")
    form, width = (">QqI", 20) if version_flags >> 24 == 1 else (">IiI", 12)
    # As FFmpeg does where the box and its count disagree: as many entries as the box holds.
    box.need(8, "its count")
    count = (len(box.body) - 8) // width
    if count > MAX_EDITS:
        text = f"{box.path} at byte {box.offset}: {count} edits; this parser reads up to {MAX_EDITS}"
        raise UnsupportedMp4Error(text, count=count)
    return [Edit(*struct.unpack_from(form, box.body, 8 + width * i)) for i in range(count)]
