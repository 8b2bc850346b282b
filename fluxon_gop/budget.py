"""Bytes in memory, bounded: what the waves under way may hold together."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol


class Waiter(Protocol):
    """Something that waits for room."""

    def wake(self) -> None:
        """Look again whether there is room."""
        ...


class Budget:
    """Bytes that some crews' waves may hold at once, all of them together. Thread-safe."""

    def __init__(self, max_bytes: int | None) -> None:
        """Take the bound; None for none."""
        self._max_bytes = max_bytes
        self._held = 0
        self._lock = threading.Lock()
        self._waiters: weakref.WeakSet[Waiter] = weakref.WeakSet()

    def take(self, nbytes: int, *, force: bool = False) -> bool:
        """Note ``nbytes`` as held and return True, or return False where they do not fit beside what is held."""
        with self._lock:
            fits = self._max_bytes is None or not self._held or self._held + nbytes <= self._max_bytes
            if fits or force:
                self._held += nbytes
            return fits or force

    def give(self, nbytes: int) -> None:
        """Give bytes back, and wake who waits for room."""
        with self._lock:
            self._held -= nbytes
            waiters = list(self._waiters) if nbytes else []
        for waiter in waiters:
            waiter.wake()

    def subscribe(self, waiter: Waiter) -> None:
        """Wake this waiter whenever bytes are given back."""
        with self._lock:
            self._waiters.add(waiter)
