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
Clips = tuple[int, ...]


class BegunBatches(Generic[B]):
    """The batches that a worker has begun, by their clips; each thread has its own. Thread-safe."""

    def __init__(self, begin: Callable[[Clips], B]) -> None:
        """``begin`` starts a batch's reads; it runs on a thread of its own."""
        self._begin = begin
        self._begun: dict[tuple[int, Clips], Future[B]] = {}
        self._lock = threading.Lock()
        self.hits = self.misses = self.dropped = 0

    def take(self, clips: Clips) -> B | None:
        """Return the batch of these clips where it was begun, else None; raises what beginning it raised."""
        with self._lock:
            future = self._begun.pop((threading.get_ident(), clips), None)
            self.hits += future is not None
            self.misses += future is None
        return None if future is None else future.result()

    def keep_only(self, ahead: Iterable[Clips]) -> None:
        """Begin these batches where this thread has not, and drop all others of its."""
        me = threading.get_ident()
        wanted = {(me, clips): clips for clips in ahead}
        with self._lock:
            dropped = [
                self._begun.pop(key) for key in list(self._begun) if key[0] == me and key not in wanted
            ]
            for key, clips in wanted.items():
                if key not in self._begun:
                    self._begun[key] = io_threads.pool("fluxon_gop-clips").submit(self._begin, clips)
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
                future.add_done_callback(_close)


def _close(future: Future[B]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()
