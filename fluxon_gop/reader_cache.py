"""Readers kept open for the next batch: leased to one batch at a time, the least recently used out first."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any, cast

from fluxon_gop import forks
from fluxon_gop.errors import ClosedError
from fluxon_gop.reader import VideoReader
from fluxon_gop.requests import Uri

ReaderKey = tuple[object, int | None, int | None]
"""What a reader serves: the video, height and width."""


class ReaderCache:
    """Up to ``max_readers`` open readers, idle ones first to go. Thread-safe.

    A reader serves one lease at a time; leases at once on one video open several. Readers in use are never
    closed to make room.
    """

    def __init__(self, max_readers: int, options: Mapping[str, Any]) -> None:
        """Open none yet. ``options``: for each VideoReader."""
        self._max_readers = max_readers
        self._options = options
        self._idle: OrderedDict[int, tuple[ReaderKey, VideoReader]] = OrderedDict()
        self._numbers: defaultdict[ReaderKey, list[int]] = defaultdict(list)
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
            text = "the pool is closed"
            raise ClosedError(text)

    def lease(self, key: ReaderKey) -> VideoReader:
        """Take an idle reader of this key, or make one; no IO."""
        with self._lock:
            self.check_open()
            self._busy += 1
            numbers = self._numbers.get(key)
            if numbers:
                _, reader = self._idle.pop(self._forget(key, numbers[-1]))
                self._counts["reader_cache_hits"] += 1
                return reader
            self._counts["reader_cache_misses"] += 1
            self._counts["open_count"] += 1
        try:
            return VideoReader(cast("Uri", key[0]), height=key[1], width=key[2], **self._options)
        except BaseException:
            with self._lock:
                self._busy -= 1
                self._counts["open_count"] -= 1
            raise

    def release(self, key: ReaderKey, reader: VideoReader, *, keep: bool) -> None:
        """Put a reader back, or close it; then close the least recently used beyond the bound."""
        closing = []
        with self._lock:
            self._busy -= 1
            if keep and not self._closed:
                self._next += 1
                self._idle[self._next] = (key, reader)
                self._numbers[key].append(self._next)
            else:
                closing.append(reader)
            while self._idle and len(self._idle) + self._busy > self._max_readers:
                number, (old_key, old) = self._idle.popitem(last=False)
                self._forget(old_key, number)
                closing.append(old)
                self._counts["evict_count"] += 1
            self._counts["close_count"] += len(closing)
        for old in closing:
            old.close()

    def _forget(self, key: ReaderKey, number: int) -> int:
        numbers = self._numbers[key]
        numbers.remove(number)
        if not numbers:
            del self._numbers[key]
        return number

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
        for reader in readers:
            reader.close()
