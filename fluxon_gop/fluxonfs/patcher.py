"""FluxonFS's entry: exports, caches and identity of a process, and the readers and pools that they open."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any, Self

from fluxon_gop.fluxonfs.byte_source import FluxonFsFile
from fluxon_gop.fluxonfs.config import read_config
from fluxon_gop.fluxonfs.export import FluxonFsExport
from fluxon_gop.fluxonfs.export_listing import files_for
from fluxon_gop.fluxonfs.file_system import FileSystem, FluxonFsCache
from fluxon_gop.fluxonfs.relpath import check_relpath
from fluxon_gop.fluxonfs.users import Identity, Users, check_identity
from fluxon_gop.fluxonfs.video_pool import FluxonFsVideoReaderPool, VideoReaderKey
from fluxon_gop.fluxonfs.video_reader import FluxonFsVideoReader, PlannedReader
from fluxon_gop.index_build import build_index
from fluxon_gop.index_table import IndexTable
from fluxon_gop.model import Signature, VideoIndex
from fluxon_gop.pool import VideoReaderPool
from fluxon_gop.reader import VideoReader
from fluxon_gop.requests import VideoReadRequest


class FluxonFsPatcher:
    """Opens videos by export and relpath, through the caches, under an identity. Thread-safe.

    It patches nothing: FFmpeg reads through our own sources, never through ``open()``.
    """

    def __init__(
        self,
        exports: Iterable[FluxonFsExport],
        *,
        cache: FluxonFsCache | None = None,
        request_identity: Identity | None = None,
        users: Users | None = None,
        index: IndexTable | str | os.PathLike[str] | None = None,
    ) -> None:
        """Check the configuration. No IO but the disk tier's folder, and the index table's schema.

        Args:
            exports: with names of their own.
            cache: tiers and sizes; None for a memory tier alone.
            request_identity: (user, password) under which readers open.
            users: needed where an export names the users who may read.
            index: a table, or its address, with rows by ``(export_name, relpath)`` or by the origin's address; a row
                whose signature does not fit is not used. Without one each index is built when a video opens.
        """
        self._identity = check_identity(request_identity)
        self._table = index if isinstance(index, IndexTable | None) else IndexTable.open(index)
        self._file_system = FileSystem(exports, cache or FluxonFsCache(), users, _RowKey(self._table))
        self.agent = LocalAgent(self._file_system, self._table)
        """What opens readers in this process; for a pool made by hand."""

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Self:
        """Return the patcher that a TOML file describes; see docs/fluxonfs.md.

        Raises:
            InvalidRequestError: the file cannot be read, or says what is refused.
        """
        config = read_config(path)
        return cls(
            config.exports,
            cache=config.cache,
            request_identity=config.request_identity,
            users=config.users,
            index=config.index,
        )

    @property
    def request_identity(self) -> Identity | None:
        """The (user, password) under which the next reader opens, and the pools' next calls run."""
        return self._identity

    @request_identity.setter
    def request_identity(self, identity: Identity | None) -> None:
        self._identity = check_identity(identity)

    @property
    def exports(self) -> dict[str, FluxonFsExport]:
        """A copy of the exports by name."""
        return self._file_system.exports

    def open_video_reader(
        self, *, export_name: str, relpath: str, height: int, width: int, num_threads: int
    ) -> FluxonFsVideoReader:
        """Return a reader of one video at one size, under the identity of this moment, kept for its life.

        Costs a stat where none is known within the metadata TTL, and without an index row two reads (head and movie
        box), through the caches.

        Args:
            export_name: the export.
            relpath: of the video in it: POSIX, relative, beneath the root.
            height: of the pictures after turning upright.
            width: likewise.
            num_threads: spans of a read that decode side by side.

        Raises:
            TypeError: no str, no int.
            InvalidRequestError: empty, not positive, or a relpath that leads out of the export.
            SourceNotFoundError: no such export or file.
            SourcePermissionError: the identity may not read it.
            SourceError: it is no file, or cannot be read.
        """
        return FluxonFsVideoReader._open(  # noqa: SLF001 - FluxonFS's own name
            agent=self.agent,
            export_name=export_name,
            relpath=relpath,
            height=height,
            width=width,
            num_threads=num_threads,
            request_identity=self._identity,
        )

    def open_video_reader_pool(self, max_readers: int = 32) -> FluxonFsVideoReaderPool:
        """Return a pool of up to ``max_readers`` readers; each call runs under the identity of its moment."""
        return FluxonFsVideoReaderPool(
            agent=self.agent, request_identity=_CurrentIdentity(self), max_readers=max_readers
        )

    def stat(self, export_name: str, relpath: str) -> Signature:
        """Return a file's size and version, under the identity of this moment; from memory within the TTL.

        Raises:
            SourceError: as :meth:`open_video_reader`.
        """
        return self._file(export_name, relpath).open_source().signature

    def list_files(self, export_name: str, prefix: str = "") -> list[tuple[str, Signature | None]]:
        """Return relpath and version of each file of an export, or below a folder of it, that this identity may read.

        Cost: one call to an agent, one request for 1,000 names of a bucket. Links of a local root are not followed.

        Raises:
            SourceNotFoundError: no such export or folder.
            SourcePermissionError: the identity may read nothing there.
            InvalidRequestError: a prefix that leads out, or a web server's root, which lists nothing.
        """
        export = self._file_system.export(export_name)
        if prefix:
            check_relpath(prefix)
        agents = export.agents(self._identity)
        if agents is not None:
            return agents.client.list_files(export_name, prefix, self._identity)
        return list(files_for(self._file_system, export, prefix, self._identity))

    def build_index(self, export_name: str, relpath: str, *, check: str = "entry-points") -> VideoIndex:
        """Return the index of a video, for a table's row under ``(export_name, relpath)``; see ``fg.build_index``."""
        return build_index(self._file(export_name, relpath), check=check)

    def _file(self, export_name: str, relpath: str) -> FluxonFsFile:
        return FluxonFsFile(self._file_system, export_name, relpath, self._identity)

    def stats(self) -> dict[str, int]:
        """Return the tiers' own counters: bytes in memory, the disk's errors and evictions, backfills let be."""
        pieces = self._file_system.pieces
        memory = pieces.memory.nbytes if pieces.memory is not None else 0
        disk = pieces.disk.counts() if pieces.disk is not None else {}
        disk |= pieces.kv.counts() if pieces.kv is not None else {}
        return {"memory_bytes": memory, **disk, "backfill_dropped": pieces.backfill.dropped}

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that was read is in the disk tier; return whether it came to that in ``timeout`` seconds."""
        return self._file_system.pieces.backfill.flush(timeout)

    def close(self) -> bool:
        """Refuse further reads, those of open readers too, and write what waits for the disk tier.

        Returns whether all of it was written, within ten seconds.
        """
        return self._file_system.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the configuration, passwords and credentials included: a worker needs them to read."""
        return (_reopen, (self._file_system, self._identity, self._table))

    def __repr__(self) -> str:
        """Show the exports; never the identity."""
        return f"FluxonFsPatcher({', '.join(self.exports)})"


class LocalAgent:
    """Opens readers in this process, and plans batches: what a patcher passes as agent."""

    def __init__(self, file_system: FileSystem, table: IndexTable | None) -> None:
        """Take what the readers share."""
        self._file_system = file_system
        self._table = table

    def open_video_reader(
        self,
        export_name: str,
        relpath: str,
        height: int,
        width: int,
        num_threads: int,
        request_identity: Identity | None,
        /,
    ) -> PlannedReader:
        """Return a reader, its right to read and its index at hand."""
        started = time.perf_counter()
        # A source, not an address: this reader is of one version of the file for its life.
        source = FluxonFsFile(self._file_system, export_name, relpath, request_identity).open_source()
        reader = VideoReader(source, index=self._table, height=height, width=width, num_threads=num_threads)
        try:
            reader.fetch_index(ask_version=True)
        except BaseException:
            reader.close()
            source.close()
            raise
        return PlannedReader(reader, time.perf_counter() - started)

    def open_pool(self, max_readers: int, /) -> VideoReaderPool:
        """Return the pool that reads batches."""
        return VideoReaderPool(max_readers, index=self._table)

    def read_request(self, key: VideoReaderKey, indices: tuple[int, ...], /) -> VideoReadRequest:
        """Return a request of that pool."""
        file = FluxonFsFile(self._file_system, key.export_name, key.relpath, key.request_identity)
        return VideoReadRequest(file, indices, key.height, key.width, key.num_threads)

    def check_access(self, key: VideoReaderKey, /) -> None:
        """Raise where the key's identity may not read its video."""
        self._file_system.check_access(key.export_name, key.relpath, key.request_identity)

    def __repr__(self) -> str:
        """Show the file system."""
        return f"LocalAgent({self._file_system!r})"


class _RowKey:
    """Tells under which key a table holds a file's row: its place in the export, or its origin's address."""

    def __init__(self, table: IndexTable | None) -> None:
        self._table = table

    def __call__(self, export_name: str, relpath: str, origin: Callable[[], str]) -> Any:
        key = (export_name, relpath)
        if self._table is None or key in self._table:
            return key
        name = origin()
        return name if name in self._table else key


class _CurrentIdentity:
    """Tells a patcher's identity of the moment; pickles with it."""

    def __init__(self, patcher: FluxonFsPatcher) -> None:
        self._patcher = patcher

    def __call__(self) -> Identity | None:
        return self._patcher.request_identity


def _reopen(
    file_system: FileSystem, identity: Identity | None, table: IndexTable | None
) -> FluxonFsPatcher:
    patcher = FluxonFsPatcher.__new__(FluxonFsPatcher)
    patcher._identity, patcher._file_system, patcher._table = identity, file_system, table  # noqa: SLF001
    patcher.agent = LocalAgent(file_system, table)
    return patcher
