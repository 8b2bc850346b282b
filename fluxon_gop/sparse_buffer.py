"""The fetched bytes of one file in memory; a hole falls through to the source and is counted.

Knows no video. Segments are kept as they came, without a copy; a read inside one segment is a view.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

from fluxon_gop.errors import InvalidRequestError
from fluxon_gop.ranges import ByteRange
from fluxon_gop.sources.range_source import Buffer, RangeSource
from fluxon_gop.stats import ReadStats

MIN_HOLE_READ = 64 * 1024
"""An unplanned read brings at least this much, as far as the next segment or the end."""
MAX_HOLE_READ = 4 * 1024 * 1024
"""Reads in sequence double up to this size."""
MAX_HOLE_BYTES = 32 * 1024 * 1024
"""Of what unplanned reads brought, the newest this much stays: a file read through on demand stays small."""


class SparseBuffer:
    """Bytes of a file by their place in it. ``view`` may be called by several threads at once."""

    def __init__(self, source: RangeSource, stats: ReadStats) -> None:
        """Start empty; holes are read from ``source`` and counted in ``stats``."""
        self.source = source
        self.stats = stats
        self._starts: list[int] = []
        self._data: list[memoryview] = []
        self._filled: deque[ByteRange] = deque()
        self._filled_bytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(len(data) for data in self._data)

    @property
    def segments(self) -> list[ByteRange]:
        """The ranges held, sorted."""
        return [ByteRange(s, s + len(d)) for s, d in zip(self._starts, self._data, strict=True)]

    def insert(self, start: int, data: Buffer) -> None:
        """Hold ``data`` as the bytes from ``start``. Overlaps are cut from the newcomer."""
        view = memoryview(data)
        while view:
            at = bisect_right(self._starts, start)
            if at and (end := self._starts[at - 1] + len(self._data[at - 1])) > start:
                view, start = view[end - start :], end
                continue
            room = self._starts[at] - start if at < len(self._starts) else len(view)
            self._starts.insert(at, start)
            self._data.insert(at, view[:room])
            view, start = view[room:], start + room

    def insert_all(self, ranges: Sequence[ByteRange], fetched: Sequence[Buffer]) -> None:
        """Hold what a wave brought, range by range."""
        for wanted, data in zip(ranges, fetched, strict=True):
            self.insert(wanted.start, data)

    def clear(self) -> None:
        """Hold nothing."""
        self._starts.clear()
        self._data.clear()
        self._filled.clear()
        self._filled_bytes = 0

    def piece(self, start: int) -> memoryview:
        """Return what is held from ``start`` up to its segment's edge; empty in a hole. O(log segments)."""
        at = bisect_right(self._starts, start) - 1
        if at < 0:
            return memoryview(b"")
        return self._data[at][start - self._starts[at] :]

    def holds(self, start: int, stop: int) -> bool:
        """Return whether all of bytes ``[start, stop)`` is held, in one segment or several."""
        while start < stop:
            piece = self.piece(start)
            if not piece:
                return False
            start += len(piece)
        return True

    def view(self, start: int, stop: int) -> memoryview:
        """Return bytes ``[start, stop)``: a view inside one segment, else joined; holes are read."""
        with self._lock:
            piece = self.piece(start)[: stop - start]
            if len(piece) == stop - start:
                return piece
            joined = bytearray()
            while start < stop:
                piece = self.piece(start)[: stop - start]
                if not piece:
                    self._fill(start, min(stop, self._next_start(start, stop)))
                    continue
                joined += piece
                start += len(piece)
            return memoryview(joined).toreadonly()

    def fill_hole(self, start: int, size: int, end: int) -> None:
        """Read about ``size`` bytes from ``start``, not past ``end`` nor into what is held."""
        self._fill(start, self._next_start(start, min(end, start + size)))

    def _next_start(self, start: int, stop: int) -> int:
        at = bisect_right(self._starts, start)
        return min(stop, self._starts[at]) if at < len(self._starts) else stop

    def _fill(self, start: int, stop: int) -> None:
        data = self.source.read(start, stop)
        self.stats.unplanned_requests += 1
        self.stats.unplanned_bytes += len(data)
        self.insert(start, data)
        self._filled.append(ByteRange(start, stop))
        self._filled_bytes += stop - start
        while self._filled_bytes > MAX_HOLE_BYTES and len(self._filled) > 1:
            oldest = self._filled.popleft()
            self._filled_bytes -= oldest.size
            at = bisect_right(self._starts, oldest.start) - 1
            del self._starts[at], self._data[at]


class SparseFile:
    """The buffer as a seekable binary file, as FFmpeg reads it through PyAV.

    ``read`` answers short at a segment's edge and goes to the source only in a hole. Source: av's
    container/pyio.py (``read`` returns bytes, the size is asked by ``seek(-1, 2)``).
    """

    def __init__(self, size: int) -> None:
        """Make a file of ``size`` bytes; set ``buffer`` before it is read."""
        self.buffer: SparseBuffer | None = None
        self.interrupted: BaseException | None = None
        """What interrupted a read: PyAV passes on errors, and swallows a KeyboardInterrupt."""
        self._size = size
        self._at = 0
        self._hole_read = MIN_HOLE_READ
        self._hole_end = -1

    def read(self, size: int = -1) -> bytes:
        """Return up to ``size`` bytes; b"" at the end."""
        try:
            return self._read(size)
        except Exception:
            raise
        except BaseException as error:
            self.interrupted = error
            text = "interrupted"
            raise InterruptedError(text) from error

    def check(self) -> None:
        """Raise what interrupted a read, once."""
        error, self.interrupted = self.interrupted, None
        if error is not None:
            raise error

    def _read(self, size: int) -> bytes:
        assert self.buffer is not None
        if size < 0:
            size = self._size - self._at
        if self._at >= self._size or not size:
            return b""
        piece = self.buffer.piece(self._at)[:size]
        if not piece:
            following = self._at == self._hole_end
            self._hole_read = min(2 * self._hole_read, MAX_HOLE_READ) if following else MIN_HOLE_READ
            self.buffer.fill_hole(self._at, max(self._hole_read, size), self._size)
            piece = self.buffer.piece(self._at)
            self._hole_end = self._at + len(piece)
            piece = piece[:size]
        self._at += len(piece)
        return bytes(piece)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move and return the new place."""
        base = (0, self._at, self._size)[whence]
        if base + offset < 0:
            text = f"seek to {base + offset}: before the start of the file"
            raise InvalidRequestError(text)
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """Return the place of the next read."""
        return self._at

    def seekable(self) -> bool:
        """Return True."""
        return True
