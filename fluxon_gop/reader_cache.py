"""Readers kept open for the next batch: leased to one user at a time, the least recently used out first."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Generic, NamedTuple, Protocol, TypeVar

from fluxon_gop import forks
from fluxon_gop.errors import ClosedError


class Closable(Protocol):
    """Something that is closed once."""

    def close(self) -> None:
        """Close it."""
        ...


K = TypeVar("K", bound=Hashable)
R = TypeVar("R", bound=Closable)


class Lease(NamedTuple, Generic[K, R]):
    """A reader in use; give it back to ``release``."""

    key: K
    reader: R
    hit: bool
    """Whether it had been open and idle."""


class ReaderCache(Generic[K, R]):
    """Up to ``max_readers`` open readers, idle ones first to go. Thread-safe; each step is O(1).

    A reader serves one lease at a time; leases at once on one key open several. Readers in use are never
    closed to make room. Readers are opened and closed outside the lock.
    """

    def __init__(self, max_readers: int, open_reader: Callable[[K], R], *, owner: str = "the pool") -> None:
        """Open none yet. ``owner`` is who is closed, in words."""
        self._max_readers = max_readers
        self._open_reader = open_reader
        self._owner = owner
        self._idle: OrderedDict[int, tuple[K, R]] = OrderedDict()
        self._numbers: defaultdict[K, dict[int, None]] = defaultdict(dict)
        self._next = 0
        self._busy = 0
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(
            ("open_count", "close_count", "evict_count", "reader_cache_hits", "reader_cache_misses"), 0
        )
        self._closed = False
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: what other threads of the parent held is not here."""
        self._lock = threading.Lock()
        self._busy = 0

    def check_open(self) -> None:
        """Raise ClosedError where the cache is closed."""
        if self._closed:
            text = f"{self._owner} is closed"
            raise ClosedError(text)

    def lease(self, key: K) -> Lease[K, R]:
        """Take the idle reader of this key that was used last, or open one."""
        with self._lock:
            self.check_open()
            self._busy += 1
            numbers = self._numbers.get(key)
            if numbers:
                number, _ = numbers.popitem()
                if not numbers:
                    del self._numbers[key]
                _, reader = self._idle.pop(number)
                self._counts["reader_cache_hits"] += 1
                return Lease(key, reader, hit=True)
            self._counts["reader_cache_misses"] += 1
            self._counts["open_count"] += 1
        try:
            return Lease(key, self._open_reader(key), hit=False)
        except BaseException:
            with self._lock:
                self._busy -= 1
                self._counts["open_count"] -= 1
            raise

    def release(self, lease: Lease[K, R], *, keep: bool = True) -> None:
        """Put a reader back, or close it; then close the least recently used beyond the bound."""
        closing = []
        with self._lock:
            self._busy -= 1
            if keep and not self._closed:
                self._next += 1
                self._idle[self._next] = (lease.key, lease.reader)
                self._numbers[lease.key][self._next] = None
            else:
                closing.append(lease.reader)
            while self._idle and len(self._idle) + self._busy > self._max_readers:
                number, (old_key, old) = self._idle.popitem(last=False)
                del self._numbers[old_key][number]
                if not self._numbers[old_key]:
                    del self._numbers[old_key]
                closing.append(old)
                self._counts["evict_count"] += 1
            self._counts["close_count"] += len(closing)
        # How another reader closes is no concern of the one that was given back.
        with suppress(Exception):
            _close_all(closing)

    def counts(self) -> dict[str, int]:
        """Return readers now, opened, closed, evicted, hits and misses."""
        with self._lock:
            return {
                "max_readers": self._max_readers,
                "current_readers": len(self._idle) + self._busy,
                "active_readers": self._busy,
                **self._counts,
            }

    def close(self) -> None:
        """Close idle readers now, and busy ones as they return."""
        with self._lock:
            self._closed = True
            readers = [reader for _, reader in self._idle.values()]
            self._idle.clear()
            self._numbers.clear()
            self._counts["close_count"] += len(readers)
        _close_all(readers)


def _close_all(readers: list[R]) -> None:
    """Close each, also where one fails; the first error is raised at the end."""
    failed: list[BaseException] = []
    for reader in readers:
        try:
            reader.close()
        except Exception as error:  # noqa: BLE001 - raised below
            failed.append(error)
    if failed:
        raise failed[0]
