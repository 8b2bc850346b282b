"""Files on object stores and behind http(s), read through obstore with the version pinned on every read."""

from __future__ import annotations

import re
import time
from abc import abstractmethod
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore import exceptions as store_errors

from fluxon_gop.errors import (
    DeadlineError,
    InvalidRequestError,
    ShortReadError,
    SourceError,
    SourceNotFoundError,
    SourcePermissionError,
)
from fluxon_gop.model import Signature
from fluxon_gop.sources.range_source import changed
from fluxon_gop.sources.remote import DeniedError, RemoteSource, TransientError
from fluxon_gop.sources.stores import SCHEMES, StoreHandle, host_for, store_for

_STATUS = re.compile(r"status code: (\d{3})")
_TRANSIENT = frozenset({408, 425, 429})
"""Besides 5xx, statuses after which another try may succeed."""


class StoreSource(RemoteSource):
    """One object of a store that answers as obspec says: its version comes with each answer."""

    @abstractmethod
    async def _get(self, options: dict[str, Any]) -> Any:
        """Return obspec's answer to a conditional range request."""

    @abstractmethod
    async def _head(self) -> Any:
        """Return obspec's metadata of the object."""

    def _stand(self) -> Any:
        """Return what a renewal is held against: a newer one is no reason to renew again."""
        return None

    async def _attempt(self, start: int, stop: int, *, asks: bool = False) -> tuple[memoryview, Signature]:
        options: dict[str, Any] = {"range": (start, stop)}
        pinned = self._signature
        if pinned is not None and pinned.etag is not None and not pinned.etag.startswith("W/"):
            options["if_match"] = pinned.etag
        seen = self._stand()
        sent = time.perf_counter()
        failure: Exception | None = None
        try:
            result = await self._get(options)
            answered = time.perf_counter()
            meta = signature_of(result.meta)
            data = memoryview(await result.buffer_async())
        except Exception as error:  # noqa: BLE001 - obstore's many kinds become ours
            # Raised below: an error's context would show the address as it was given, with its secrets.
            failure, status = self._typed(error, start, stop, seen), status_of(error)
        if failure is not None:
            if status == 416 and start == 0:
                # No byte of an empty file can be asked for.
                meta = Signature(0) if asks else await self._ask_once()
                if not meta.size:
                    return memoryview(b""), meta
            if status == 416 and not asks and self._signature is not None and start < self._signature.size:
                # The version that is pinned reaches that far: this is another one.
                self._hold(await self._ask_once())
            raise failure
        if tuple(getattr(result, "range", ())) != (start, max(min(stop, meta.size), start)):
            text = f"{self.name}: asked for bytes [{start}, {stop}), got another range"
            raise TransientError(SourceError(text, source=self.name))
        self._host.measure(answered - sent, time.perf_counter() - answered, len(data))
        return data, meta

    async def _ask_once(self) -> Signature:
        seen = self._stand()
        try:
            return signature_of(await self._head())
        except Exception as error:  # noqa: BLE001 - obstore's many kinds become ours
            failure, refused = self._typed(error, 0, 0, seen), _refuses_head(error)
        if not refused:
            raise failure
        # An address signed for GET, or a server without HEAD: the first byte's answer tells the version too.
        _, meta = await self._attempt(0, 1, asks=True)
        return meta

    def _typed(self, error: Exception, start: int, stop: int, seen: Any) -> Exception:
        """Return obstore's error as one of ours. None of the causes is shown: they tell the address with its secrets."""
        name = self.name
        status = status_of(error)
        if isinstance(error, store_errors.PreconditionError):
            if self._signature is None:
                return SourceError(f"{name}: 412 to a request without a condition", source=name)
            return changed(name, self._signature, Signature(-1, "another (412)"))
        if isinstance(error, store_errors.NotFoundError | FileNotFoundError):
            return SourceNotFoundError(f"{name}: no such file", source=name)
        if isinstance(
            error, store_errors.PermissionDeniedError | store_errors.UnauthenticatedError | PermissionError
        ):
            return DeniedError(
                SourcePermissionError(f"{name}: the store refuses the read", source=name), seen
            )
        if status == 416:
            text = f"{name}: asked for bytes [{start}, {stop}), got 0: the file ends before"
            return ShortReadError(text, source=name, start=start, stop=stop, got=0)
        if status is not None and status not in _TRANSIENT and status < 500:
            return SourceError(f"{name}: the store answers {status}", source=name)
        if isinstance(error, TypeError | AttributeError | NotImplementedError):
            return SourceError(f"{name}: the store raises {type(error).__name__}", source=name)
        if isinstance(error, store_errors.NotSupportedError):
            return SourceError(f"{name}: the server answers without the range asked for", source=name)
        if "kind: Timeout" in str(error) or "timed out" in str(error):
            return TransientError(DeadlineError(f"{name}: no answer in time", source=name))
        # With a status only that: the answer's body may quote the request, its query too.
        words = f"the store answers {status}" if status is not None else words_of(error)
        return TransientError(SourceError(f"{name}: {words}", source=name))


class ObjectStoreSource(StoreSource):
    """One file on ``s3://``, ``gs://``, ``az://`` or behind ``http(s)://``.

    The version is (size, etag), or (size, Last-Modified) without an etag. A pinned strong etag travels as If-Match;
    other versions are compared with each answer's own.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        """Name the file; no request is made yet.

        Args:
            url: ``s3://bucket/key`` and the like, or ``http(s)://`` (a query string is sent as it is and never shown).
            storage_options: of the store (credentials, region, endpoint) and of its client (``timeout``,
                ``default_headers``, ``proxy_url``, ``root_certificate``...), in obstore's and lance's names; ours are in
                docs/remote.md.

        Raises:
            InvalidRequestError: no such address, or options that no store can be opened with.
        """
        self._given = dict(storage_options or {})
        self._url = url
        name, self._base, self._path, shared = _parsed(url)
        self._handle = store_for(self._base, self._given, name, keep=shared)
        super().__init__(
            name, self._handle.options, host_for(_place(self._base, self._given), self._handle.options)
        )

    async def _get(self, options: dict[str, Any]) -> Any:
        return await obstore.get_async(self._handle.store, self._path, options=options)  # type: ignore[arg-type]

    async def _head(self) -> Any:
        return await obstore.head_async(self._handle.store, self._path)

    def _stand(self) -> tuple[StoreHandle, int]:
        return self._handle, self._handle.generation

    async def _renew(self, seen: Any) -> bool:
        handle, _ = seen
        if handle.options.renew is None:
            return False
        async with handle.renewing:
            if self._stand() != seen:
                # Somebody has, since this request was sent.
                return True
            fresh = await handle.ask_renewal(self._name)
            if isinstance(fresh, str):
                shown, self._base, self._path, shared = _parsed(fresh)
                self._url = fresh
                self._handle = store_for(self._base, self._given, shown, keep=shared)
            else:
                handle.take(fresh, self._name)
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle address and options, credentials in them included: a worker needs them to read."""
        return (ObjectStoreSource, (self._url, self._given))


def _parsed(url: str) -> tuple[str, str, str, bool]:
    """Return name, the store's address, the path in it, and whether other files share that store."""
    try:
        url.encode()
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError as error:
        text = f"no address of a file: {str(error).split('://', 1)[0]}"
        raise InvalidRequestError(text) from None
    scheme = parts.scheme.lower()
    shown = f"{scheme}://{parts.hostname or ''}{port}{parts.path}"
    if scheme not in SCHEMES:
        text = f"{scheme}:// is not supported: want {', '.join(sorted(SCHEMES))}"
        raise InvalidRequestError(text)
    web = scheme in {"http", "https"}
    if web:
        path = unquote(parts.path)
    else:
        # A key is taken as it is: there is no escaping, and '?' and '#' may be part of it.
        bucket, _, path = url.split("://", 1)[1].partition("/")
        shown = f"{scheme}://{bucket.rpartition('@')[2]}/{path}"
        if "@" in bucket and scheme not in {"abfs", "abfss"}:
            text = f"{shown}: credentials belong into storage_options, not into the address"
            raise InvalidRequestError(text)
        if scheme in {"abfs", "abfss"}:
            shown = f"{scheme}://{bucket}/{path}"
    if not parts.hostname or "\0" in path or ".." in path.split("/") or not (web or path):
        text = f"{scheme}://{parts.hostname}/...: want a full address of one file, without '..'"
        raise InvalidRequestError(text)
    if web and parts.query:
        return shown, url, "", False
    base = f"{parts.scheme}://{parts.netloc}" if web else f"{parts.scheme}://{bucket}"
    return shown, base, path.lstrip("/"), True


def _refuses_head(error: Exception) -> bool:
    """Return whether a server refuses HEAD as such; obstore tells 405 as "not found"."""
    refused = (
        store_errors.PermissionDeniedError
        | store_errors.UnauthenticatedError
        | store_errors.NotSupportedError
    )
    return isinstance(error, refused) or status_of(error) in {405, 501}


def _place(base: str, given: Mapping[str, Any]) -> str:
    """Return what bounds and measurements are kept by: a web server, or a bucket at its endpoint."""
    parts = urlsplit(base)
    if parts.scheme in {"http", "https"}:
        return f"{parts.scheme}://{parts.hostname}:{parts.port}"
    ends = [str(value) for name, value in sorted(given.items()) if "endpoint" in name]
    return " ".join([base, *ends])


def signature_of(meta: Any) -> Signature:
    """Return size, etag and time of an answer; a time of 1970 stands for none."""
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    mtime_ns = int((meta["last_modified"] - epoch) / timedelta(microseconds=1)) * 1000
    return Signature(meta["size"], meta["e_tag"] or None, mtime_ns or None)


def status_of(error: Exception) -> int | None:
    """Return the HTTP status that obstore's error tells in its text."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def words_of(error: Exception) -> str:
    """Return what went wrong without any address: its query may be a signature."""
    line = str(error).split("\n", 1)[0]
    words = ["..." if "://" in word else word for word in line.split(" ")]
    return " ".join(words)[:300]
