"""Pieces in this process's memory: the least recently used out first, bounded in bytes."""

from __future__ import annotations

import threading

from cachetools import LRUCache

from fluxon_gop import forks
from fluxon_gop.fluxonfs.piece_key import PieceKey


class MemoryTier:
    """Pieces by key. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        """Hold none yet; of no piece may be more than ``max_bytes``."""
        self._pieces: LRUCache[PieceKey, bytes] = LRUCache(max_bytes, getsizeof=len)
        self._lock = threading.Lock()
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: another thread of the parent may hold the lock for ever; empty."""
        self._lock = threading.Lock()
        # Another thread may have been in the middle of a change.
        self._pieces = LRUCache(self._pieces.maxsize, getsizeof=len)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return int(self._pieces.currsize)

    def has(self, key: PieceKey) -> bool:
        """Return whether a piece is here; that is no use of it."""
        with self._lock:
            return key in self._pieces

    def get(self, key: PieceKey) -> bytes | None:
        """Return a piece, or None where it is not here."""
        with self._lock:
            return self._pieces.get(key)

    def put(self, key: PieceKey, data: bytes) -> None:
        """Keep a piece, where it is not larger than the tier."""
        with self._lock:
            if len(data) <= self._pieces.maxsize:
                self._pieces[key] = data

    def clear(self) -> None:
        """Hold nothing."""
        with self._lock:
            self._pieces.clear()
