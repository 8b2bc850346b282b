"""What is known of files without asking: sizes and versions, and what is not there, for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from cachetools import LRUCache

from fluxon_gop import forks, threads
from fluxon_gop.errors import SourceNotFoundError
from fluxon_gop.fluxonfs.users import Identity
from fluxon_gop.model import Signature

MAX_FILES = 100_000
FileKey = tuple[str, str, Identity | None]
"""(export name, relpath, and for whom, where the origin tells rights too)."""


class Fresh(NamedTuple):
    """A version, and until when (``time.monotonic``) it holds without asking again."""

    signature: Signature
    until: float


class _Missing(NamedTuple):
    until: float


class MetadataCache:
    """Versions of files, each for its export's TTL. Thread-safe; of many who ask at once, one asks the origin.

    The origin is asked on threads of their own, where no interrupt arrives.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self._known: LRUCache[FileKey, Fresh | _Missing] = LRUCache(MAX_FILES)
        self._asked: dict[FileKey, Future[Fresh]] = {}
        self._lock = threading.Lock()
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: the threads that ask are the parent's, and may have been in the middle of a change."""
        self._lock = threading.Lock()
        self._known, self._asked = LRUCache(MAX_FILES), {}

    def get(self, key: FileKey, ttl: float, stat: Callable[[], Signature]) -> Fresh:
        """Return the version of a file: what is known, else what ``stat`` says.

        Args:
            key: the file.
            ttl: seconds for which an answer holds, "not found" included; other errors are not kept.
            stat: asks the origin.

        Raises:
            SourceNotFoundError: the file is not there, or was not within the TTL.
        """
        with self._lock:
            known = self._known.get(key)
            if known is not None and time.monotonic() < known.until:
                if isinstance(known, _Missing):
                    raise not_found(key)
                return known
            asked = self._asked.get(key)
            if asked is None:
                # It cannot end before it is written down here: it takes the lock for that.
                asked = threads.pool("fluxon_gop-stat").submit(self._ask, key, ttl, stat)
                self._asked[key] = asked
        return asked.result()

    def _ask(self, key: FileKey, ttl: float, stat: Callable[[], Signature]) -> Fresh:
        # What is true when the answer comes was true when it was asked for, not later.
        until = time.monotonic() + ttl
        known: Fresh | _Missing | None = None
        try:
            known = Fresh(stat(), until)
        except SourceNotFoundError as error:
            known = _Missing(until)
            raise not_found(key) from error
        finally:
            with self._lock:
                self._asked.pop(key, None)
                if known is not None:
                    self._known[key] = known
        return known

    def forget(self, key: FileKey) -> None:
        """Ask again at the next ``get``."""
        with self._lock:
            self._known.pop(key, None)


def not_found(key: FileKey) -> SourceNotFoundError:
    """Return the error for a file that is not there."""
    text = f"export {key[0]!r}, {key[1]!r}: no such file"
    return SourceNotFoundError(text, source=f"{key[0]}/{key[1]}", export_name=key[0], relpath=key[1])
