"""What is known of a remote host: how many requests and bytes are in flight to it, what its latency is.

Used from the read loop's thread alone, but for the measured numbers, which anyone may look at.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_WEIGHT = 0.2
"""Of a new measurement in the running mean."""
_BODY_BYTES = 64 * 1024
"""Answers of at least this many bytes tell the bandwidth."""


class Host:
    """Bounds on what is in flight to one host, and measurements of it."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        """Take the bounds; nothing is measured yet."""
        self.max_requests = max_requests
        self._max_bytes = max_bytes
        self._requests = self._bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.latency_seconds: float | None = None
        self.bandwidth: float | None = None

    @asynccontextmanager
    async def slot(self, nbytes: int) -> AsyncIterator[None]:
        """Wait for room for one more request of ``nbytes``; first come, first served.

        One request always has room, however large.
        """
        if self._waiting or not self._fits(nbytes):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            entry = (nbytes, turn)
            self._waiting.append(entry)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._give(nbytes)
                else:
                    with suppress(ValueError):
                        self._waiting.remove(entry)
                    self._admit()
                raise
        else:
            self._take(nbytes)
        try:
            yield
        finally:
            self._give(nbytes)

    def measure(self, first_byte_seconds: float, body_seconds: float, nbytes: int) -> None:
        """Take one answer into the running means."""
        self.latency_seconds = _mean(self.latency_seconds, first_byte_seconds)
        if nbytes >= _BODY_BYTES and body_seconds > 0:
            self.bandwidth = _mean(self.bandwidth, nbytes / body_seconds)

    def _fits(self, nbytes: int) -> bool:
        return not self._requests or (
            self._requests < self.max_requests and self._bytes + nbytes <= self._max_bytes
        )

    def _take(self, nbytes: int) -> None:
        self._requests += 1
        self._bytes += nbytes

    def _give(self, nbytes: int) -> None:
        self._requests -= 1
        self._bytes -= nbytes
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._take(size)
                turn.set_result(None)


def _mean(before: float | None, now: float) -> float:
    return now if before is None else before + _WEIGHT * (now - before)
