"""Files behind http(s), read through obstore with the version pinned on every read.

obstore's threads do not live in a forked child, where a read would hang for ever: a source used in a
child of a process that has read through obstore raises ForkedProcessError at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, urlsplit

import obstore
from obstore import exceptions as store_errors
from obstore.store import HTTPStore

from fluxon_gop.errors import (
    ClosedError,
    DeadlineError,
    ForkedProcessError,
    InvalidRequestError,
    ShortReadError,
    SourceError,
    SourceNotFoundError,
    SourcePermissionError,
)
from fluxon_gop.model import Signature
from fluxon_gop.sources.range_source import Buffer, changed, check_range

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta
    from obstore.store import ClientConfig

REQUEST_TIMEOUT = timedelta(seconds=30)
"""Limit of one request, from its start to the last byte of its answer."""
CONNECT_TIMEOUT = timedelta(seconds=5)
MAX_RETRIES = 3
RETRY_TIMEOUT = timedelta(seconds=60)

_lock = threading.Lock()


def _new_lock() -> None:
    global _lock  # noqa: PLW0603 - in a forked child another thread's lock is held for ever
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)
_stores: dict[tuple[str, tuple[tuple[str, Any], ...]], HTTPStore] = {}
_runtime_pid: int | None = None


def _claim_runtime(name: str) -> None:
    """Note that obstore's threads live in this process, or refuse where they live in the parent."""
    global _runtime_pid  # noqa: PLW0603 - one IO runtime a process is obstore's own design
    if _runtime_pid is None:
        _runtime_pid = os.getpid()
    elif _runtime_pid != os.getpid():
        text = (
            f"{name}: read in a forked child of process {_runtime_pid}, which has already read from a "
            "remote store; its IO threads do not live here. Start workers with 'spawn' or 'forkserver', "
            "or read nothing remote before the fork"
        )
        raise ForkedProcessError(text, source=name, parent=_runtime_pid)


class ObjectStoreSource:
    """One file behind http(s). The version is (size, etag), or (size, Last-Modified) without an etag.

    A pinned strong etag travels as If-Match; other versions are compared with each answer's own.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        """Name the file; no request is made yet.

        Args:
            url: ``http://`` or ``https://``; a query string is sent as it is and never shown.
            storage_options: obstore's client options (``timeout``, ``default_headers``...).
        """
        try:
            url.encode()
            parts = urlsplit(url)
            port = f":{parts.port}" if parts.port else ""
            path = unquote(parts.path)
        except ValueError as error:
            text = f"no http address: {str(error).split('://', 1)[0]}"
            raise InvalidRequestError(text) from None
        folders = path.split("/")
        if parts.scheme not in {"http", "https"} or not parts.hostname or "\0" in path or ".." in folders:
            text = f"{parts.scheme}://{parts.hostname}/...: want a full http:// or https:// address, without '..'"
            raise InvalidRequestError(text)
        self._name = f"{parts.scheme}://{parts.hostname}{port}{parts.path}"
        self._url = url
        self._options = dict(storage_options or {})
        if parts.query:
            self._base, self._path = url, ""
        else:
            self._base, self._path = f"{parts.scheme}://{parts.netloc}", unquote(parts.path).lstrip("/")
        self._signature: Signature | None = None
        self._closed = False

    @property
    def name(self) -> str:
        """The address without user, password and query."""
        return self._name

    @property
    def signature(self) -> Signature:
        """The pinned or first seen version; one HEAD where nothing was read yet."""
        if self._signature is None:
            meta = self._call(lambda store: obstore.head(store, self._path))
            self._signature = _signature(meta)
        return self._signature

    def pin(self, signature: Signature) -> None:
        """Make every read ask for this version; raises where another one was seen."""
        if self._signature is not None and not self._signature.fits(signature):
            raise changed(self.name, signature, self._signature)
        self._signature = signature

    def read(self, start: int, stop: int) -> Buffer:
        """Return bytes ``[start, stop)`` by one GET."""
        check_range(self.name, start, stop)
        data, _ = self._get(start, stop)
        if len(data) != stop - start:
            text = f"{self.name}: asked for bytes [{start}, {stop}), got {len(data)}: the file ends there"
            raise ShortReadError(text, source=self.name, start=start, stop=stop, got=len(data))
        return data

    def read_head(self, size: int) -> Buffer:
        """Return the first ``size`` bytes or the whole file by one GET; the version is known after it."""
        data, meta = self._get(0, size)
        want = min(size, meta.size)
        if len(data) != want:
            text = f"{self.name}: asked for bytes [0, {want}), got {len(data)}"
            raise ShortReadError(text, source=self.name, start=0, stop=want, got=len(data))
        return data

    def close(self) -> None:
        """Refuse further reads. The connections belong to the process and stay warm."""
        self._closed = True

    def _get(self, start: int, stop: int) -> tuple[memoryview, Signature]:
        options: dict[str, Any] = {"range": (start, stop)}
        pinned = self._signature
        if pinned is not None and pinned.etag is not None and not pinned.etag.startswith("W/"):
            options["if_match"] = pinned.etag

        def get(store: HTTPStore) -> tuple[memoryview, Signature]:
            result: GetResult = obstore.get(store, self._path, options=options)  # type: ignore[arg-type]
            meta = _signature(result.meta)
            return memoryview(result.bytes()), meta

        data, meta = self._call(get)
        if pinned is None:
            self._signature = meta
        elif not pinned.fits(meta):
            raise changed(self.name, pinned, meta)
        return data, meta

    def _call(self, request: Any) -> Any:
        if self._closed:
            text = f"{self.name}: the source is closed"
            raise ClosedError(text)
        _claim_runtime(self.name)
        # None of the causes is shown: they tell the address as it was given, with its secrets.
        try:
            return request(_store(self._base, self._options))
        except store_errors.PreconditionError:
            if self._signature is None:
                text = f"{self.name}: the server answers 412 to a request without a condition"
                raise SourceError(text, source=self.name) from None
            raise changed(self.name, self._signature, Signature(-1, "another (412)")) from None
        except (store_errors.NotFoundError, FileNotFoundError):
            text = f"{self.name}: no such file"
            raise SourceNotFoundError(text, source=self.name) from None
        except (store_errors.PermissionDeniedError, store_errors.UnauthenticatedError):
            text = f"{self.name}: the server refuses the read"
            raise SourcePermissionError(text, source=self.name) from None
        except (store_errors.BaseError, OSError, ValueError, TypeError) as error:
            reason = str(error).split("\n", 1)[0].replace(self._url, self.name)
            if "kind: Timeout" in str(error) or "timed out" in str(error):
                limit = self._options.get("timeout", REQUEST_TIMEOUT)
                text = f"{self.name}: no answer within the limit of a request ({limit})"
                raise DeadlineError(text, source=self.name) from None
            text = f"{self.name}: {_without_query(reason)}"
            raise SourceError(text, source=self.name) from None

    def __reduce__(self) -> tuple[type[ObjectStoreSource], tuple[str, dict[str, Any]]]:
        """Pickle address and options, credentials in them included: a worker needs them to read."""
        return (ObjectStoreSource, (self._url, self._options))

    def __repr__(self) -> str:
        """Show the address without secrets."""
        return f"ObjectStoreSource({self.name!r})"


def _without_query(reason: str) -> str:
    """Cut query strings, where signed addresses carry their secret, out of a message."""
    return " ".join(word.split("?", 1)[0] if "://" in word else word for word in reason.split(" "))


def _signature(meta: ObjectMeta) -> Signature:
    modified = meta["last_modified"]
    etag = meta["e_tag"] or None
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    mtime_ns = int((modified - epoch) / timedelta(microseconds=1)) * 1000
    return Signature(meta["size"], etag, mtime_ns or None)


def _store(base: str, options: Mapping[str, Any]) -> HTTPStore:
    """Return the process's store for this host and these options, so that connections are reused."""
    key = (base, tuple(sorted((name, repr(value)) for name, value in options.items())))
    with _lock:
        store = _stores.get(key)
        if store is None:
            store = HTTPStore.from_url(
                base,
                client_options=cast(
                    "ClientConfig",
                    {
                        "allow_http": True,
                        "timeout": REQUEST_TIMEOUT,
                        "connect_timeout": CONNECT_TIMEOUT,
                        **options,
                    },
                ),
                retry_config={"max_retries": MAX_RETRIES, "retry_timeout": RETRY_TIMEOUT},
            )
            if "?" not in base:
                _stores[key] = store
        return store
