"""Batches begun before they are asked for: found again by their clips, dropped when nobody will ask."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

from fluxon_gop import threads


class Begun(Protocol):
    """A batch whose reads are under way."""

    def close(self) -> None:
        """Cancel them."""
        ...


B = TypeVar("B", bound=Begun)
Clips = tuple[int, ...]


class BegunBatches(Generic[B]):
    """The batches that a worker has begun, by their clips. For one thread."""

    def __init__(self, begin: Callable[[Clips], B]) -> None:
        """``begin`` starts a batch's reads; it runs on a thread of its own."""
        self._begin = begin
        self._begun: dict[Clips, Future[B]] = {}
        self.hits = self.misses = self.dropped = 0

    def take(self, clips: Clips) -> B | None:
        """Return the batch of these clips where it was begun, else None; raises what beginning it raised."""
        future = self._begun.pop(clips, None)
        if future is None:
            self.misses += 1
            return None
        self.hits += 1
        return future.result()

    def keep_only(self, ahead: Iterable[Clips]) -> None:
        """Begin these batches where they were not, and drop all others."""
        wanted = dict.fromkeys(ahead)
        for clips in [clips for clips in self._begun if clips not in wanted]:
            self._drop(self._begun.pop(clips))
        for clips in wanted:
            if clips not in self._begun:
                self._begun[clips] = threads.pool("fluxon_gop-clips").submit(self._begin, clips)

    def close(self) -> None:
        """Drop all."""
        self.keep_only(())

    def _drop(self, future: Future[B]) -> None:
        self.dropped += 1
        if not future.cancel():
            future.add_done_callback(_close)


def _close(future: Future[B]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result().close()
