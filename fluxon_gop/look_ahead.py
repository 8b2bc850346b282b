"""Batches begun before they are asked for: found again by their clips, dropped when nobody will ask."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

from fluxon_gop import threads as io_threads


class Begun(Protocol):
    """A batch whose reads are under way."""

    def close(self) -> None:
        """Cancel them."""
        ...


B = TypeVar("B", bound=Begun)
Numbers = tuple[int, ...]
"""The clips of a batch."""


class BegunBatches(Generic[B]):
    """The batches that a worker has begun, by who asks for them and by their clips. Thread-safe."""

    def __init__(self) -> None:
        """Begin nothing yet."""
        self._begun: dict[tuple[str, Numbers], Future[B]] = {}
        self._lock = threading.Lock()
        self.hits = self.misses = self.dropped = 0

    def take(self, owner: str, clips: Numbers) -> B | None:
        """Return the batch of these clips where it was begun, else None; raises what beginning it raised."""
        with self._lock:
            future = self._begun.pop((owner, clips), None)
            self.hits += future is not None
            self.misses += future is None
        return None if future is None else future.result()

    def keep_only(self, owner: str, ahead: Iterable[Numbers], begin: Callable[[Numbers], B]) -> None:
        """Begin these batches where they are not, and drop all others of this owner.

        ``begin`` starts a batch's reads; it runs on another thread: it may look up index rows first.
        """
        wanted = {(owner, clips): clips for clips in ahead}
        with self._lock:
            dropped = [
                self._begun.pop(key) for key in list(self._begun) if key[0] == owner and key not in wanted
            ]
            for key, clips in wanted.items():
                if key not in self._begun:
                    self._begun[key] = io_threads.pool("fluxon_gop-clips").submit(begin, clips)
        self._drop(dropped)

    def close(self) -> None:
        """Drop all."""
        with self._lock:
            dropped = list(self._begun.values())
            self._begun.clear()
        self._drop(dropped)

    def _drop(self, futures: Iterable[Future[B]]) -> None:
        for future in futures:
            self.dropped += 1
            if not future.cancel():
                # Not here: closing waits for reads that have begun.
                io_threads.pool("fluxon_gop-clips").submit(_close, future)


def _close(future: Future[B]) -> None:
    if future.exception() is None:
        future.result().close()
