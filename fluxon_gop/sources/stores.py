"""The process's connections to object stores: one store for each address and options, renewed for all its sources."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from cachetools import LRUCache
from obstore.store import HTTPStore, from_url

from fluxon_gop import threads
from fluxon_gop.errors import InvalidRequestError, SourcePermissionError
from fluxon_gop.sources.host import Host
from fluxon_gop.sources.options import RemoteOptions, parse_options

_FAILED_SECONDS = 1.0
"""For how long a renewal that failed is not tried again."""
SCHEMES = frozenset({"http", "https", "s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl"})
_Key = tuple[str, tuple[tuple[str, Any], ...]]


class StoreHandle:
    """A store and what renews it. ``generation`` counts the renewals."""

    def __init__(self, base: str, given: Mapping[str, Any], shown: str) -> None:
        """Open no connection yet. ``shown`` stands for the address in messages."""
        self.options = parse_options(given)
        self.generation = 0
        self._failed: tuple[float, str] | None = None
        self._given = dict(given)
        self._base = base
        self._shown = shown
        self.renewing = asyncio.Lock()
        self.store = self._open()

    def _open(self) -> Any:
        options = self.options
        more: dict[str, Any] = {}
        if options.credential_provider is not None:
            more["credential_provider"] = options.credential_provider
        if options.store:
            more["config"] = dict(options.store)
        client: dict[str, Any] = {
            "timeout": timedelta(seconds=options.attempt_seconds),
            "connect_timeout": timedelta(seconds=options.connect_seconds),
            **options.client,
        }
        if self._base.startswith("http") or plain_endpoint(options.store):
            client.setdefault("allow_http", True)
        open_store: Any = HTTPStore.from_url if self._base.startswith("http") else from_url
        try:
            # Further tries are ours: obstore's own would hide them, and know nothing of a read's deadline.
            return open_store(self._base, client_options=client, retry_config={"max_retries": 0}, **more)
        except Exception as error:  # noqa: BLE001 - obstore raises many kinds, some of them about a secret's value
            names = ", ".join(sorted({**options.store, **options.client})) or "none"
            text = f"{self._shown}: no store can be opened with these options ({names}): {type(error).__name__}"
            raise InvalidRequestError(text) from None

    async def ask_renewal(self, name: str) -> Any:
        """Return what ``renew`` brings; under ``renewing``, so that of many who wait one asks.

        Raises:
            SourcePermissionError: it raised.
        """
        assert self.options.renew is not None
        if self._failed is not None and time.monotonic() < self._failed[0]:
            # Those who waited for it get its failure too.
            text = f"{name}: {self._failed[1]}"
            raise SourcePermissionError(text, source=name)
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(threads.pool("fluxon_gop-renew"), self.options.renew, name)
        except Exception as error:  # noqa: BLE001 - it may hold anything, secrets too
            why = f"the store refuses the read, and renewing raised {type(error).__name__}"
            self._failed = (time.monotonic() + _FAILED_SECONDS, why)
            text = f"{name}: {why}"
            raise SourcePermissionError(text, source=name) from None

    def take(self, fresh: Any, name: str) -> None:
        """Take fresh storage options; the old ones stay where these make no sense."""
        if not isinstance(fresh, Mapping):
            text = f"{name}: renew returned a {type(fresh).__name__}: want an address or storage options"
            raise SourcePermissionError(text, source=name)
        renewed = StoreHandle(self._base, {**self._given, **fresh}, self._shown)
        self._given, self.options, self.store = renewed._given, renewed.options, renewed.store
        self.generation += 1


def plain_endpoint(given: Mapping[str, Any]) -> bool:
    """Return whether the options or the environment name an endpoint without TLS: that is consent."""
    names = (
        "endpoint",
        "aws_endpoint",
        "endpoint_url",
        "aws_endpoint_url",
        "azure_endpoint",
        "azure_storage_endpoint",
    )
    named = [str(given.get(name, "")) for name in names]
    named += [
        os.environ.get(name, "") for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3")
    ]
    return any(endpoint.startswith("http://") for endpoint in named)


_lock = threading.Lock()
_handles: LRUCache[_Key, StoreHandle] = LRUCache(256)
"""Beyond that many the least recently used are let go; sources keep theirs."""
_hosts: dict[tuple[str, int, int], Host] = {}


def _forget() -> None:
    """In a forked child: connections are the parent's, and its lock may be held for ever."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _handles.clear()
    _hosts.clear()


os.register_at_fork(after_in_child=_forget)


def store_for(base: str, given: Mapping[str, Any], shown: str, *, keep: bool = True) -> StoreHandle:
    """Return the process's store for this address and these options, so that connections are reused."""
    if not keep:
        return StoreHandle(base, given, shown)
    # What may hide its secret behind a repr is known by its identity; the handle keeps it alive.
    plain = (str, int, float, bool, bytes, timedelta, type(None))
    key = (base, tuple(sorted((n, repr(v) if type(v) in plain else _deep(v)) for n, v in given.items())))
    with _lock:
        handle = _handles.get(key)
        if handle is None:
            handle = _handles[key] = StoreHandle(base, given, shown)
        return handle


def _deep(value: Any) -> str:
    if isinstance(value, Mapping) and all(type(v) in {str, bytes, int} for v in value.values()):
        return repr(sorted(value.items()))
    return f"object {id(value)}"


def host_for(place: str, options: RemoteOptions) -> Host:
    """Return what the process knows of a host (or bucket)."""
    key = (place, options.max_requests, options.max_bytes)
    with _lock:
        if key not in _hosts:
            _hosts[key] = Host(options.max_requests, options.max_bytes)
        return _hosts[key]
