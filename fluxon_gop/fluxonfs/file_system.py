"""The exports of one configuration, and what their readers share: rights, metadata, pieces."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fluxon_gop.errors import InvalidRequestError, SourceError, SourceNotFoundError
from fluxon_gop.fluxonfs.disk_tier import DiskTier
from fluxon_gop.fluxonfs.export import FluxonFsExport
from fluxon_gop.fluxonfs.kv_tier import KvTier
from fluxon_gop.fluxonfs.metadata_cache import FileKey, Fresh, MetadataCache
from fluxon_gop.fluxonfs.piece_cache import PieceCache
from fluxon_gop.fluxonfs.piece_key import FilePieces
from fluxon_gop.fluxonfs.users import Identity, Users
from fluxon_gop.model import Signature

MIN_PIECE_BYTES, MAX_PIECE_BYTES = 4 * 1024, 64 * 1024 * 1024


@dataclass(frozen=True)
class FluxonFsCache:
    """Where pieces are kept, and how much of them. All in bytes; 0 turns a part off."""

    memory_bytes: int = 64 * 1024 * 1024
    """Of the memory tier of a process."""
    disk_path: str | os.PathLike[str] | None = None
    """Folder of the disk tier, shared by the processes of a node; None for no disk tier."""
    disk_bytes: int = 16 * 1024 * 1024 * 1024
    """Of the disk tier, all processes together."""
    piece_bytes: int = 256 * 1024
    """Size of a piece, and of a page."""
    backfill_bytes: int = 64 * 1024 * 1024
    """That may wait to be written to the disk tier; what comes beyond it is not kept there."""
    page_cache_pages: int = 16
    """Pages that a reader keeps of its unplanned reads."""
    disk_retry_seconds: float = 5.0
    """For how long a disk that failed is left alone."""

    kv_url: str | None = field(default=None, repr=False)
    """Of a Valkey or Redis that machines share, ``redis://user:password@host:6379/0`` or ``rediss://...``; None for none."""
    kv_ttl_seconds: int = 7 * 24 * 3600
    """After which it forgets a piece."""
    kv_timeout_ms: int = 250
    """Of one round trip to it; then it is bypassed."""
    kv_retry_seconds: float = 5.0
    """For how long it is left alone where it failed."""

    def __post_init__(self) -> None:
        """Check each number."""
        for name in (
            "memory_bytes",
            "disk_bytes",
            "piece_bytes",
            "backfill_bytes",
            "page_cache_pages",
            "kv_ttl_seconds",
            "kv_timeout_ms",
        ):
            value = getattr(self, name)
            if type(value) is not int:
                text = f"{name} is a {type(value).__name__}: want an int"
                raise TypeError(text)
            if value < 0:
                text = f"{name} is {value}: want 0 or more"
                raise InvalidRequestError(text)
        if not MIN_PIECE_BYTES <= self.piece_bytes <= MAX_PIECE_BYTES:
            text = f"piece_bytes is {self.piece_bytes}: want {MIN_PIECE_BYTES} to {MAX_PIECE_BYTES}"
            raise InvalidRequestError(text)
        for name in ("disk_retry_seconds", "kv_retry_seconds"):
            seconds = getattr(self, name)
            if isinstance(seconds, bool) or not isinstance(seconds, int | float):
                text = f"{name} is a {type(seconds).__name__}: want a number"
                raise TypeError(text)
            if not 0 <= seconds < 1e9:
                text = f"{name} is {seconds}: want 0 or more seconds"
                raise InvalidRequestError(text)
        if self.kv_url is not None and not (self.kv_ttl_seconds and self.kv_timeout_ms):
            text = "kv_ttl_seconds and kv_timeout_ms: want more than 0"
            raise InvalidRequestError(text)
        if self.disk_path is not None and 0 < self.disk_bytes < self.piece_bytes + 1024:
            text = f"disk_bytes is {self.disk_bytes}: want room for a piece of {self.piece_bytes} bytes, or 0 for no tier"
            raise InvalidRequestError(text)
        if isinstance(self.disk_path, str) and (not self.disk_path or "\0" in self.disk_path):
            text = "disk_path must be non-empty, without a NUL"
            raise InvalidRequestError(text)


class FileSystem:
    """Exports by name over one metadata cache and one piece cache. Thread-safe."""

    def __init__(
        self,
        exports: Iterable[FluxonFsExport],
        cache: FluxonFsCache,
        users: Users | None = None,
        row_key: Callable[[str, str, Callable[[], str]], Any] | None = None,
    ) -> None:
        """Check the configuration; makes the disk tier's folder.

        Args:
            exports: with names of their own.
            cache: the tiers.
            users: needed where an export names the users who may read.
            row_key: tells the key of a row in an index table, by export name, relpath and what tells the origin's name.
        """
        self._exports: dict[str, FluxonFsExport] = {}
        for export in exports:
            if not isinstance(export, FluxonFsExport):
                text = f"an export is a {type(export).__name__}: want FluxonFsExport"  # type: ignore[unreachable]
                raise TypeError(text)
            if export.name in self._exports:
                text = f"export {export.name!r} is there twice"
                raise InvalidRequestError(text)
            if export.readers is not None and not callable(export.readers) and users is None:
                text = f"export {export.name!r} names its readers: give the users with their passwords too"
                raise InvalidRequestError(text)
            self._exports[export.name] = export
        self.cache = cache
        self._users = users
        self._row_key = row_key
        self._metadata = MetadataCache()
        disk = None
        if cache.disk_path is not None and cache.disk_bytes:
            disk = DiskTier(cache.disk_path, cache.disk_bytes, retry_seconds=cache.disk_retry_seconds)
        kv = None
        if cache.kv_url is not None:
            kv = KvTier(
                cache.kv_url, cache.kv_ttl_seconds, cache.kv_timeout_ms / 1000, cache.kv_retry_seconds
            )
        self.pieces = PieceCache(cache.memory_bytes, disk, cache.backfill_bytes, kv)

    @property
    def users(self) -> Users | None:
        """The book of users."""
        return self._users

    @property
    def exports(self) -> dict[str, FluxonFsExport]:
        """A copy of the exports by name."""
        return dict(self._exports)

    def export(self, name: str) -> FluxonFsExport:
        """Return an export.

        Raises:
            SourceNotFoundError: there is none of this name.
        """
        export = self._exports.get(name)
        if export is None:
            text = f"export {name!r}: no such export; there are: {', '.join(self._exports) or 'none'}"
            raise SourceNotFoundError(text, source=name, export_name=name)
        return export

    def check_access(self, export_name: str, relpath: str, identity: Identity | None) -> None:
        """Return where the identity may read the file; raises SourcePermissionError."""
        self.export(export_name).check_access(identity, relpath, self._users)

    def stat(self, export_name: str, relpath: str, identity: Identity | None = None) -> tuple[Fresh, bool]:
        """Return a file's version with until when it holds, and whether the origin was asked.

        An agent's answer holds for the identity that asked: it is its right to read too.

        Raises:
            SourceError: the file is not there, is no file, or the origin refuses; names export and relpath.
        """
        export = self.export(export_name)
        asked = []

        def ask() -> Signature:
            asked.append(True)
            origin = export.open_origin(relpath, identity)
            try:
                return origin.signature
            except SourceNotFoundError:
                raise
            except SourceError as error:
                raise in_export(error, export_name, relpath) from error
            finally:
                origin.close()

        ttl = export.metadata_cache_ttl_ms / 1000
        fresh = self._metadata.get(_file_key(export, relpath, identity), ttl, ask)
        return fresh, bool(asked)

    def forget(self, export_name: str, relpath: str, identity: Identity | None = None) -> None:
        """Ask for this file's version again at its next use."""
        self._metadata.forget(_file_key(self.export(export_name), relpath, identity))

    def pieces_of(self, export: FluxonFsExport, relpath: str, signature: Signature) -> FilePieces | None:
        """Return the pieces of a version of a file, None where it bypasses the tiers."""
        limit = export.cache_max_bytes
        if not self.pieces.keeps or not signature.size or (limit is not None and signature.size > limit):
            return None
        return FilePieces(
            export.key_prefix,
            export.cache_bytes_field_key,
            export.name,
            relpath,
            signature,
            self.cache.piece_bytes,
        )

    def table_key(self, export_name: str, relpath: str) -> Any:
        """Return the key of a file's row in an index table."""
        if self._row_key is None:
            return (export_name, relpath)
        return self._row_key(
            export_name, relpath, lambda: self.export(export_name).open_origin(relpath).name
        )

    def close(self) -> bool:
        """Refuse further reads, and write what waits to be written; return whether all was, within ten seconds."""
        return self.pieces.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the configuration; a copy shares the disk tier, and has a memory tier of its own."""
        return (FileSystem, (tuple(self._exports.values()), self.cache, self._users, self._row_key))

    def __repr__(self) -> str:
        """Show the exports' names."""
        return f"FileSystem({', '.join(self._exports)})"


def _file_key(export: FluxonFsExport, relpath: str, identity: Identity | None) -> FileKey:
    return (export.name, relpath, identity) if export.has_agents else (export.name, relpath, None)


def in_export(error: SourceError, export_name: str, relpath: str) -> SourceError:
    """Return an origin's error with the names under which the caller knows the file."""
    named = f"export {export_name!r}, {relpath!r}: "
    # An agent has named it already.
    text = named + error.message.removeprefix(named)
    return type(error)(text, **{**error.numbers, "export_name": export_name, "relpath": relpath})
