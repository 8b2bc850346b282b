"""Where the bytes come from: one file each, read by ranges, knowing nothing of video."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from fluxon_gop.errors import InvalidRequestError
from fluxon_gop.sources.fsspec_file import FsspecSource
from fluxon_gop.sources.lance_blob import LanceBlobSource, blob_of
from fluxon_gop.sources.local import LocalSource
from fluxon_gop.sources.memory import MemorySource
from fluxon_gop.sources.object_store import ObjectStoreSource
from fluxon_gop.sources.obspec_store import ObspecSource
from fluxon_gop.sources.range_source import Buffer, RangeSource, SourceAddress, is_source
from fluxon_gop.sources.stores import SCHEMES
from fluxon_gop.sources.trace import Trace, TracedSource

__all__ = [
    "Buffer",
    "FsspecSource",
    "LanceBlobSource",
    "LocalSource",
    "MemorySource",
    "ObjectStoreSource",
    "ObspecSource",
    "RangeSource",
    "SourceAddress",
    "Trace",
    "TracedSource",
    "is_source",
    "open_source",
    "uri_of",
]


def open_source(
    uri: str | os.PathLike[str] | RangeSource | SourceAddress,
    storage_options: Mapping[str, Any] | None = None,
) -> RangeSource:
    """Return the source of this address; a source is returned as it is. No IO.

    Raises:
        InvalidRequestError: the scheme is none of path, ``file://``, ``http(s)://``, ``s3://``, ``gs://``, ``az://``.
    """
    if not isinstance(uri, str | os.PathLike):
        if is_source(uri):
            return uri
        if isinstance(uri, SourceAddress):
            return uri.open_source()
        text = f"uri is a {type(uri).__name__}: want a path, an address, or a RangeSource"
        raise TypeError(text)
    text_uri = os.fspath(uri)
    if not text_uri:
        text = "uri is empty: want a path, an address, or a RangeSource"
        raise InvalidRequestError(text)
    if "\0" in text_uri:
        text = "uri holds a NUL: want a path, an address, or a RangeSource"
        raise InvalidRequestError(text)
    scheme = text_uri.split("://", 1)[0].lower() if "://" in text_uri else ""
    if not scheme:
        return LocalSource(text_uri)
    if scheme == "file":
        parts = urlsplit(text_uri)
        if parts.netloc not in {"", "localhost"} or not parts.path:
            text = f"{text_uri}: want file:///path, on this machine"
            raise InvalidRequestError(text)
        return LocalSource(unquote(parts.path))
    if scheme in SCHEMES:
        return ObjectStoreSource(text_uri, storage_options)
    if scheme.partition("+")[0] == "lance":
        return blob_of(text_uri, storage_options)
    if _fsspec_knows(scheme):
        return FsspecSource(text_uri, storage_options)
    text = f"{scheme}:// is not supported: want a path, file://, {', '.join(sorted(SCHEMES))}, or a scheme of fsspec's"
    raise InvalidRequestError(text)


def _fsspec_knows(scheme: str) -> bool:
    if importlib.util.find_spec("fsspec") is None:
        return False
    from fsspec.registry import known_implementations, registry

    # What has a store of its own, or is no single file.
    return scheme in known_implementations or scheme in registry


def uri_of(uri: str | os.PathLike[str] | RangeSource | SourceAddress) -> str:
    """Return the key under which an index table knows this video: the address without secrets."""
    return open_source(uri).name
