"""Objects of any obspec store: obstore's own stores, and whatever else speaks its protocols."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fluxon_gop import threads
from fluxon_gop.errors import InvalidRequestError
from fluxon_gop.sources.host import Host
from fluxon_gop.sources.object_store import StoreSource
from fluxon_gop.sources.options import parse_options


class ObspecSource(StoreSource):
    """One object of a store that has obspec's ``get_async`` or ``get``, and ``head_async`` or ``head``.

    The version is (size, etag), or (size, last modified) without one; it is held against each answer's, and sent along
    as ``if_match`` where it is a strong etag. A store's own credentials and retries are its own.
    """

    def __init__(
        self,
        store: Any,
        path: str,
        *,
        name: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Name the object; no request is made yet.

        Args:
            store: any object with those methods.
            path: of the object in it.
            name: safe to print, and its key in an index table; None for one of class and path.
            storage_options: limits of reads, as for other remote sources.

        Raises:
            InvalidRequestError: the store lacks the methods, or the path is empty.
        """
        if not path:
            text = "path must be a non-empty str"
            raise InvalidRequestError(text)
        missing = [
            one for one in ("get", "head") if not (hasattr(store, one) or hasattr(store, f"{one}_async"))
        ]
        if missing:
            text = f"a {type(store).__name__} has no {' and no '.join(missing)}: want an obspec store"
            raise InvalidRequestError(text)
        options = parse_options(storage_options)
        super().__init__(
            name or f"{type(store).__name__}:{path}", options, Host(options.max_requests, options.max_bytes)
        )
        self._store, self._path = store, path
        self._given = dict(storage_options or {})

    async def _get(self, options: dict[str, Any]) -> Any:
        if hasattr(self._store, "get_async"):
            return await self._store.get_async(self._path, options=options)
        return _Whole(await _blocking(partial(self._store.get, self._path, options=options)))

    async def _head(self) -> Any:
        if hasattr(self._store, "head_async"):
            return await self._store.head_async(self._path)
        return await _blocking(partial(self._store.head, self._path))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle store and path, where the store can be pickled."""
        return (_reopen, (self._store, self._path, self._name, self._given))


class _Whole:
    """A synchronous answer with the face of an asynchronous one."""

    def __init__(self, answer: Any) -> None:
        self.meta, self.range = answer.meta, answer.range
        self._answer = answer

    async def buffer_async(self) -> Any:
        return await _blocking(self._answer.buffer)


async def _blocking(call: Callable[[], Any]) -> Any:
    """Make a call that blocks on a thread of the process's own pool."""
    return await asyncio.get_running_loop().run_in_executor(threads.pool("fluxon_gop-blocking"), call)


def _reopen(store: Any, path: str, name: str, given: Mapping[str, Any]) -> ObspecSource:
    return ObspecSource(store, path, name=name, storage_options=given)
