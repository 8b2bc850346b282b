"""Count what any source is asked for: requests, bytes, seconds, waves and their depth.

The instrument of the tests is the one that users turn on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fluxon_gop.model import Signature
from fluxon_gop.sources.range_source import Buffer, RangeSource


class Request(NamedTuple):
    """One read: its range, when it ran (``time.monotonic``), and the bytes that came (0 on an error)."""

    name: str
    start: int
    stop: int
    started: float
    ended: float
    nbytes: int


class Trace:
    """A book of requests that several traced sources share. Thread-safe."""

    def __init__(self) -> None:
        """Start with an empty book."""
        self._requests: list[Request] = []
        self._lock = threading.Lock()

    def record(self, request: Request) -> None:
        """Add one request."""
        with self._lock:
            self._requests.append(request)

    def reset(self) -> None:
        """Empty the book."""
        with self._lock:
            self._requests.clear()

    @property
    def requests(self) -> Sequence[Request]:
        """A copy of the book, in order of the requests' ends."""
        with self._lock:
            return tuple(self._requests)

    @property
    def nbytes(self) -> int:
        """Bytes that came."""
        return sum(request.nbytes for request in self.requests)

    @property
    def seconds(self) -> float:
        """Seconds from the first request's start to the last one's end."""
        book = self.requests
        return max(r.ended for r in book) - min(r.started for r in book) if book else 0.0

    @property
    def depth(self) -> int:
        """The largest number of requests that ran strictly one after another: the waves in series."""
        depth, free = 0, float("-inf")
        for request in sorted(self.requests, key=lambda r: r.ended):
            if request.started >= free:
                depth, free = depth + 1, request.ended
        return depth

    def __repr__(self) -> str:
        """Show the sums."""
        return f"Trace({len(self.requests)} requests, {self.nbytes} bytes, depth {self.depth})"


class TracedSource:
    """A source that writes each read into a :class:`Trace` and changes nothing else."""

    def __init__(self, source: RangeSource, trace: Trace | None = None) -> None:
        """Wrap ``source``; ``trace`` may be shared with other sources."""
        self._source = source
        self.trace = trace if trace is not None else Trace()

    @property
    def name(self) -> str:
        """The wrapped source's name."""
        return self._source.name

    @property
    def signature(self) -> Signature:
        """The wrapped source's signature."""
        return self._source.signature

    def pin(self, signature: Signature) -> None:
        """Pin the wrapped source."""
        self._source.pin(signature)

    def read(self, start: int, stop: int) -> Buffer:
        """Read through, and write it down."""
        return self._traced(start, stop, lambda: self._source.read(start, stop))

    def read_head(self, size: int) -> Buffer:
        """Read through, and write it down."""
        return self._traced(0, size, lambda: self._source.read_head(size))

    def close(self) -> None:
        """Close the wrapped source."""
        self._source.close()

    def _traced(self, start: int, stop: int, read: Callable[[], Buffer]) -> Buffer:
        started, nbytes = time.monotonic(), 0
        try:
            data = read()
            nbytes = len(data)
        finally:
            self.trace.record(Request(self.name, start, stop, started, time.monotonic(), nbytes))
        return data

    def __reduce__(self) -> tuple[type[TracedSource], tuple[RangeSource]]:
        """Pickle the wrapped source; the copy starts with an empty book."""
        return (TracedSource, (self._source,))

    def __repr__(self) -> str:
        """Show the wrapped source."""
        return f"TracedSource({self._source!r})"
