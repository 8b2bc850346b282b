"""What lies below a prefix of a bucket: names and versions, a page at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import obstore
from obstore import exceptions as store_errors

from fluxon_gop.errors import InvalidRequestError, SourceError, SourceNotFoundError, SourcePermissionError
from fluxon_gop.model import Signature
from fluxon_gop.sources.object_store import signature_of, status_of, words_of
from fluxon_gop.sources.read_loop import READ_LOOP
from fluxon_gop.sources.stores import SCHEMES, store_for

PAGE = 1000
"""Names that a store answers with at once."""
WEB = frozenset({"http", "https"})


class Listed(NamedTuple):
    """A file as a listing tells it: its address, and the version that reading it will find, where the listing tells."""

    uri: str
    signature: Signature | None


def can_be_listed(uri: str) -> bool:
    """Return whether an address is a prefix: of a store that lists, and not of one file."""
    scheme, found, rest = uri.partition("://")
    return bool(found) and scheme.lower() in SCHEMES - WEB and (rest.endswith("/") or "/" not in rest)


def list_files(uri: str, storage_options: Mapping[str, Any] | None = None) -> Iterator[Listed]:
    """Yield the files below ``s3://bucket/prefix/`` and the like, in the store's order; one request for 1,000 names.

    Raises:
        SourceError: the bucket cannot be listed.
    """
    if not can_be_listed(uri):
        text = (
            f"{uri}: not a prefix of a bucket: want {', '.join(sorted(SCHEMES - WEB))}, and '/' at its end"
        )
        raise InvalidRequestError(text)
    scheme, _, rest = uri.partition("://")
    bucket, _, prefix = rest.partition("/")
    if "@" in bucket and scheme.lower() not in {"abfs", "abfss"}:
        text = f"{scheme}://...: credentials belong into storage_options, not into the address"
        raise InvalidRequestError(text)
    base = f"{scheme}://{bucket}"
    shown = f"{base}/{prefix}"
    handle = store_for(base, dict(storage_options or {}), shown)
    pages: Any = obstore.list(handle.store, prefix.rstrip("/") or None, chunk_size=PAGE)

    async def next_page() -> Any:
        try:
            return await anext(pages)
        except StopAsyncIteration:
            return None

    while True:
        failure: SourceError | None = None
        try:
            page = READ_LOOP.call(next_page, shown)
        except SourceError:
            raise
        except (store_errors.PermissionDeniedError, store_errors.UnauthenticatedError):
            failure = SourcePermissionError(f"{shown}: the store refuses to list it", source=shown)
        except (store_errors.NotFoundError, FileNotFoundError):
            failure = SourceNotFoundError(f"{shown}: no such bucket", source=shown)
        except Exception as error:  # noqa: BLE001 - obstore's many kinds become ours; none of them is shown
            status = status_of(error)
            kind = {403: SourcePermissionError, 404: SourceNotFoundError}.get(status or 0, SourceError)
            why = {
                403: "the store refuses (403): wrong or no credentials, or no right to list",
                404: "no such bucket",
            }.get(status or 0, f"the store answers {status}" if status else words_of(error))
            failure = kind(f"{shown}: cannot be listed: {why}", source=shown)
        if failure is not None:
            raise failure
        if page is None:
            return
        for meta in page:
            yield Listed(f"{base}/{meta['path']}", signature_of(meta))
