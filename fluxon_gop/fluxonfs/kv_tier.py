"""Pieces in a Valkey or Redis that machines share: a hash each, all of a wave in one round trip, never waited for long.

A store that is dead, slow, full or wrong costs a read its small deadline once, and is then left alone for a while; what it
holds is checked before it is used, so that frames are exact whatever it answers.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from fluxon_gop import forks, threads
from fluxon_gop.errors import InvalidRequestError
from fluxon_gop.fluxonfs.piece_key import PieceKey

SUM_FIELD = "fluxon_gop_sum"
"""Beside a piece's bytes: a hash of key and bytes."""
_POOL = "fluxon_gop-kv"
_log = logging.getLogger(__name__)
T = TypeVar("T")


class KvEntry(NamedTuple):
    """Where a piece lies in the store: under which key, and in which field of it."""

    key: PieceKey
    prefix: str
    field: str

    @property
    def name(self) -> str:
        """The key in the store."""
        return f"{self.prefix}:{self.key.digest.hex()}"


class KvTier:
    """Pieces in a shared store. Thread-safe."""

    def __init__(self, url: str, ttl_seconds: int, timeout_seconds: float, retry_seconds: float) -> None:
        """Check the address; nothing is connected yet.

        Args:
            url: ``redis://user:password@host:port/0``, ``rediss://...`` with TLS, or ``unix://...``.
            ttl_seconds: after which the store forgets a piece.
            timeout_seconds: of one round trip, whatever it carries.
            retry_seconds: for which a store that failed is left alone.

        Raises:
            InvalidRequestError: no such address, or no client library.
        """
        self._url, self._ttl = url, ttl_seconds
        self._timeout, self._retry = timeout_seconds, retry_seconds
        self._client = _client(url, timeout_seconds)
        # Reading and writing fail apart: a full store still gives what it has.
        self._down_until = {"read": float("-inf"), "write": float("-inf")}
        self._counts: Counter[str] = Counter()
        self.after_fork()
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: a lock and connections of its own."""
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def get_many(self, entries: Sequence[KvEntry]) -> list[bytes | None] | None:
        """Return each piece that is there and whole, None for the others; None alone where the store was bypassed.

        One round trip. A piece that fails its check is counted, and removed.
        """

        def ask() -> list[Any]:
            pipeline = self._client.pipeline(transaction=False)
            for entry in entries:
                pipeline.hmget(entry.name, [entry.field, SUM_FIELD])
            found: list[Any] = pipeline.execute(raise_on_error=False)
            if found and all(isinstance(answer, Exception) for answer in found):
                raise found[0]
            return found

        answers = self._done("read", ask)
        if answers is None or len(answers) != len(entries):
            return None
        pieces = [_whole(entry, answer) for entry, answer in zip(entries, answers, strict=True)]
        bad = [
            entry.name
            for entry, answer, piece in zip(entries, answers, pieces, strict=True)
            if piece is None and answer != [None, None]
        ]
        if bad:
            self._count("kv_corrupt", len(bad))
            # Nobody waits for it; where it fails they are found again.
            threads.pool(_POOL).submit(self._client.delete, *bad)
        return pieces

    def put_many(self, entries: Sequence[tuple[KvEntry, bytes]]) -> None:
        """Keep pieces, where the store takes them. One round trip."""

        def tell() -> bool:
            pipeline = self._client.pipeline(transaction=False)
            for entry, data in entries:
                pipeline.hset(entry.name, mapping={entry.field: data, SUM_FIELD: _sum(entry, data)})
                pipeline.expire(entry.name, self._ttl)
            pipeline.execute()
            return True

        if self._done("write", tell):
            self._count("kv_stored", len(entries))

    def counts(self) -> dict[str, int]:
        """Return the tier's counters: pieces stored, corrupt ones, failed and bypassed round trips."""
        names = ("kv_stored", "kv_corrupt", "kv_errors", "kv_bypassed", "kv_round_trips")
        with self._lock:
            return {name: self._counts[name] for name in names}

    def _done(self, what: str, call: Callable[[], T]) -> T | None:
        """Return a round trip's answer, None where the store is left alone, fails, or does not answer in time."""
        if time.monotonic() < self._down_until[what]:
            self._count("kv_bypassed")
            return None
        self._count("kv_round_trips")
        try:
            # The client's own limits are for each part of an answer; this one is for all of it.
            future = threads.pool(_POOL).submit(call)
            return future.result(self._timeout)
        except FutureTimeoutError:
            future.cancel()
            why = "no answer in time"
        except Exception as error:  # noqa: BLE001 - of whatever kind, the store is bypassed
            why = type(error).__name__
        self._count("kv_errors")
        self._down_until[what] = time.monotonic() + self._retry
        _log.warning("the shared KV is left alone for %g s (%s): %s", self._retry, what, why)
        return None

    def _count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number

    def __repr__(self) -> str:
        """Show the host; never the password."""
        return f"KvTier({urlsplit(self._url).hostname!r})"


def _client(url: str, timeout_seconds: float) -> Any:
    try:
        import redis
    except ImportError:
        text = "kv_url needs a client library: pip install 'fluxon-gop[kv]'"
        raise InvalidRequestError(text) from None
    if urlsplit(url).scheme not in {"redis", "rediss", "unix"}:
        text = "kv_url: want redis://host:port/0, rediss://... or unix://..."
        raise InvalidRequestError(text)
    try:
        return redis.Redis.from_url(
            url,
            socket_timeout=timeout_seconds,
            socket_connect_timeout=timeout_seconds,
            decode_responses=False,
        )
    except (ValueError, TypeError):
        # Its own message shows the address, password included.
        text = "kv_url is no address of a Redis or Valkey"
        raise InvalidRequestError(text) from None


def _sum(entry: KvEntry, data: bytes) -> bytes:
    digest = hashlib.blake2b(entry.key.digest, digest_size=16)
    digest.update(data)
    return digest.digest()


def _whole(entry: KvEntry, answer: Any) -> bytes | None:
    if not isinstance(answer, list) or len(answer) != 2:
        return None
    data, told = answer
    if not isinstance(data, bytes) or len(data) != entry.key.nbytes or told != _sum(entry, data):
        return None
    return data
