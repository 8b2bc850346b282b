"""What is known of files without asking: sizes and versions, and what is not there, for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from cachetools import LRUCache

from fluxon_gop import forks
from fluxon_gop.errors import SourceNotFoundError
from fluxon_gop.model import Signature

MAX_FILES = 100_000
FileKey = tuple[str, str]
"""(export name, relpath)."""


class Fresh(NamedTuple):
    """A version, and until when (``time.monotonic``) it holds without asking again."""

    signature: Signature
    until: float


class _Missing(NamedTuple):
    until: float


class MetadataCache:
    """Versions of files, each for its export's TTL. Thread-safe; of many who ask at once, one asks the origin."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._known: LRUCache[FileKey, Fresh | _Missing] = LRUCache(MAX_FILES)
        self._asked: dict[FileKey, Future[Fresh]] = {}
        self._lock = threading.Lock()
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: the threads that ask are the parent's."""
        self._lock = threading.Lock()
        self._asked = {}

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
                mine = self._asked[key] = Future()
        if asked is not None:
            return asked.result()
        try:
            # What is true when the answer comes was true when it was asked for, not later.
            until = time.monotonic() + ttl
            try:
                fresh = Fresh(stat(), until)
            except SourceNotFoundError as error:
                self._keep(key, _Missing(until))
                raise not_found(key) from error
            self._keep(key, fresh)
            mine.set_result(fresh)
        except BaseException as error:
            mine.set_exception(error)
            raise
        else:
            return fresh
        finally:
            with self._lock:
                self._asked.pop(key, None)

    def forget(self, key: FileKey) -> None:
        """Ask again at the next ``get``."""
        with self._lock:
            self._known.pop(key, None)

    def _keep(self, key: FileKey, known: Fresh | _Missing) -> None:
        with self._lock:
            self._known[key] = known


def not_found(key: FileKey) -> SourceNotFoundError:
    """Return the error for a file that is not there."""
    text = f"export {key[0]!r}, {key[1]!r}: no such file"
    return SourceNotFoundError(text, source="/".join(key), export_name=key[0], relpath=key[1])
