"""The sidecar table of video indexes: a Lance data set, or one Arrow IPC file by its suffix.

Only the scalars that finding a row needs (key, signature, frame count) load up front; all else comes by
key, for the videos of a batch, into a cache bounded in bytes. A row whose checksum fails is never used.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
from cachetools import LRUCache

from fluxon_gop import forks, index_rows
from fluxon_gop.arrow_file import ArrowFile, LayeredRows, MemoryRows, RemoteArrowFile, Rows
from fluxon_gop.errors import (
    ClosedError,
    IndexTableError,
    IndexVersionError,
)
from fluxon_gop.index_rows import (
    INDEX_VERSION,
    SCALAR_COLUMNS,
    SCHEMA,
    SWM_COLUMNS,
    VERSION_KEY,
    Key,
    positions,
)
from fluxon_gop.lance_rows import LanceRows, forked
from fluxon_gop.model import Signature, VideoIndex
from fluxon_gop.ranges import ByteRange, Int64Array
from fluxon_gop.sources import open_source

MAX_HINT_BYTES = 512 * 1024 * 1024
CACHE_BYTES = 256 * 1024 * 1024
"""Decoded rows that one table object keeps in memory."""


class Damaged:
    """Stands for a row that is there and cannot be trusted."""


class Hint:
    """Stands for a row with the seed's three columns only: where the movie box is said to lie."""

    def __init__(self, moov_range: ByteRange) -> None:
        """Keep the claimed range."""
        self.moov_range = moov_range


Row = VideoIndex | Hint | Damaged | None
"""What a look-up finds: an index, a hint, a damaged row, or nothing."""


class _Keys:
    """What was read of a table's keys and signatures; shared by tables over the same rows, renewed after a write."""

    def __init__(self) -> None:
        self.scalars: pa.Table | None = None
        self.positions: dict[Key, int] | None = None
        self.generation = 0

    def forget(self) -> None:
        self.scalars = self.positions = None
        self.generation += 1


class IndexTable:
    """Index rows by video. Thread-safe for reading; a pickle carries the address, not the rows."""

    def __init__(
        self,
        store: Rows,
        uri: str,
        recipe: tuple[Any, ...],
        *,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """Use :meth:`open` or :meth:`of`. ``recipe``: a function and its arguments that open the same table again."""
        self._store = store
        self._uri = uri
        self._recipe = recipe
        self._cache_bytes = cache_bytes
        self._lock = threading.RLock()
        self._cache: LRUCache[Key, VideoIndex] = LRUCache(cache_bytes, getsizeof=_weight)
        self._keys = _Keys()
        self._generation = 0
        self._pid = os.getpid()
        self._closed = False
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: another thread of the parent may hold the lock for ever."""
        self._lock = threading.RLock()

    @classmethod
    def open(
        cls,
        uri: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        create: bool = False,
        cache_bytes: int = CACHE_BYTES,
    ) -> IndexTable:
        """Return the table at ``uri``: an Arrow IPC file where it ends in ``.arrow``, else a Lance data set.

        Args:
            uri: a path, ``http(s)://`` of an ``.arrow`` file (read whole, once), or any address that Lance takes.
            storage_options: passed on to Lance, or to the source of a remote file.
            create: a missing table is an empty one, made by the first append.
            cache_bytes: decoded rows to keep in memory.

        Raises:
            IndexTableError: nothing there, or not such a table.
            IndexVersionError: written for another version of this format.
            SourceError: a remote ``.arrow`` file cannot be read.
        """
        given = os.fspath(uri)
        shown = given
        store: Rows
        if given.startswith(("http://", "https://")):
            source = open_source(given, storage_options)
            shown = source.name
            if not shown.endswith(".arrow"):
                text = f"{shown}: behind http(s) a table is one .arrow file; use a Lance data set on an object store"
                raise IndexTableError(text, uri=shown)
            store = RemoteArrowFile(source)
        elif given.endswith(".arrow"):
            path = given.removeprefix("file://")
            if "://" in path:
                text = f"{given}: an .arrow table is a local file or behind http(s); use a Lance data set there"
                raise IndexTableError(text, uri=given)
            store = ArrowFile(Path(path))
        elif Path(given).is_file():
            text = f"{given}: is a file; want a Lance data set (a folder), or a name that ends in .arrow"
            raise IndexTableError(text, uri=given)
        else:
            store = LanceRows(given, storage_options)
        schema = store.schema()
        if schema is None and not create:
            text = f"{shown}: no index table there; make one with: fluxon-gop index build SRC --to {shown}"
            raise IndexTableError(text, uri=shown)
        if schema is not None:
            _check_schema(schema, shown)
        recipe = (_reopen, given, storage_options, cache_bytes)
        return cls(store, shown, recipe, cache_bytes=cache_bytes)

    @classmethod
    def of(cls, rows: Iterable[tuple[Key, VideoIndex]], *, cache_bytes: int = CACHE_BYTES) -> IndexTable:
        """Return a table in memory, which travels whole in a pickle: about 4 bytes a frame, compressed."""
        return _in_memory(MemoryRows(index_rows.encode(rows)), cache_bytes)

    def with_rows(self, rows: Iterable[tuple[Key, VideoIndex]]) -> IndexTable:
        """Return this table and more rows, kept in memory, which travel in a pickle; a row here hides one of its key."""
        more = MemoryRows(index_rows.encode(rows))
        if self._store.schema() is None:
            return _in_memory(more, self._cache_bytes)
        return _layered(self, more, self._cache_bytes)

    def with_cache(self, cache_bytes: int) -> IndexTable:
        """Return the same table with a row cache of its own; what was read of keys and signatures is shared."""
        other = IndexTable(
            self._store, self._uri, (*self._recipe[:-1], cache_bytes), cache_bytes=cache_bytes
        )
        other._keys = self._keys
        return other

    @property
    def forks_badly(self) -> bool:
        """Whether a forked worker cannot read the table: Lance's threads do not live there."""
        return self._store.forks_badly

    @property
    def uri(self) -> str:
        """The address without secrets."""
        return self._uri

    def __len__(self) -> int:
        """Return the number of videos."""
        return len(self._load())

    def __contains__(self, key: object) -> bool:
        """Return whether there is a row for this key."""
        return key in self._load()

    def keys(self) -> list[Key]:
        """Return the keys in the table's order."""
        return list(self._load())

    def frame_counts(self, keys: Sequence[Key]) -> Int64Array:
        """Return each video's number of frames, from memory; -1 where no row tells."""
        places = self._load()
        table = self._table()
        if not places or "frame_count" not in table.column_names:
            return np.full(len(keys), -1, np.int64)
        counts = table.column("frame_count").fill_null(-1).to_numpy()
        at = np.fromiter((places.get(key, -1) for key in keys), np.int64, len(keys))
        return np.where(at < 0, -1, counts[at]).astype(np.int64)

    def signature(self, key: Key) -> Signature | None:
        """Return the signature that the row of this key was built from, from memory; None without a row."""
        position = self._load().get(key)
        if position is None or "size" not in (table := self._table()).column_names:
            return None
        row = {name: table.column(name)[position].as_py() for name in ("size", "etag", "mtime_ns")}
        return Signature(row["size"], row["etag"], row["mtime_ns"])

    def held(self, keys: Sequence[Key]) -> list[Row] | None:
        """Return the rows where all of them are answered from memory, else None."""
        places = self._load()
        with self._lock:
            rows: list[Row] = [self._cache.get(key) for key in keys]
        if any(row is None and key in places for key, row in zip(keys, rows, strict=True)):
            return None
        return rows

    def lookup(self, keys: Sequence[Key]) -> list[Row]:
        """Return a row for each key, in order; those not in memory come by one read of the table."""
        places = self._load()
        with self._lock:
            found: dict[Key, Row] = {key: self._cache.get(key) for key in keys}
        missing = [key for key, row in found.items() if row is None and key in places]
        if missing:
            order = sorted(missing, key=places.__getitem__)
            table = self._store.take([places[key] for key in order])
            rows = index_rows.rows_of(table) if _is_full(table.schema) else _hints(table)
            for key, row in zip(order, rows, strict=True):
                found[key] = _decoded(row)
                if isinstance(index := found[key], VideoIndex) and _weight(index) <= self._cache_bytes:
                    with self._lock:
                        self._cache[key] = index
        return [found[key] for key in keys]

    def append(self, rows: Iterable[tuple[Key, VideoIndex]]) -> None:
        """Add rows in one commit. A key that is there already raises; use :meth:`replace`."""
        batch = list(rows)
        taken = [key for key, _ in batch if key in self._load()]
        if taken or len({key for key, _ in batch}) < len(batch):
            text = (
                f"{self.uri}: {len(taken) or 'some'} of the keys are there already or twice; use replace()"
            )
            raise IndexTableError(text, keys=taken)
        self._write(batch, self._store.append)

    def replace(self, rows: Iterable[tuple[Key, VideoIndex]]) -> None:
        """Add rows, or put them in the place of those with the same key, in one commit."""
        batch = list({key: (key, index) for key, index in rows}.values())
        old = any(key in self._load() for key, _ in batch)
        self._write(batch, self._store.replace if old else self._store.append)

    def close(self) -> None:
        """Let go of the cached rows; use after it raises ClosedError."""
        self._closed = True
        with self._lock:
            self._cache.clear()
            self._keys = _Keys()

    def _write(self, batch: list[tuple[Key, VideoIndex]], write: Any) -> None:
        if not batch:
            return
        schema = self._store.schema()
        if schema is not None and not _is_full(schema):
            text = f"{self.uri}: the table has only {', '.join(SWM_COLUMNS)}; build a new table"
            raise IndexTableError(text, uri=self.uri)
        write(index_rows.encode(batch))
        self._keys.forget()

    def _table(self) -> pa.Table:
        self._load()
        scalars = self._keys.scalars
        return SCHEMA.empty_table() if scalars is None else scalars

    def _load(self) -> dict[Key, int]:
        """Return key -> position; the scalars are read once."""
        if self._closed:
            text = f"{self.uri}: the index table is closed"
            raise ClosedError(text)
        with self._lock:
            if self._generation != self._keys.generation:
                self._cache.clear()
                self._generation = self._keys.generation
            places = self._keys.positions
            if places is None:
                if self._pid != os.getpid() and self._store.forks_badly:
                    raise forked(self.uri)
                schema = self._store.schema()
                names = [] if schema is None else schema.names
                have = [name for name in SCALAR_COLUMNS if name in names]
                table = self._store.scalars(have) if have else None
                places = {} if table is None else positions(table)
                self._keys.scalars, self._keys.positions = table, places
            return places

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the address and options; the rows are read again where they are used."""
        return (self._recipe[0], self._recipe[1:])

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def __repr__(self) -> str:
        """Show the address."""
        return f"IndexTable({self.uri!r})"


def _reopen(uri: str, storage_options: Mapping[str, Any] | None, cache_bytes: int) -> IndexTable:
    return IndexTable.open(uri, storage_options=storage_options, create=True, cache_bytes=cache_bytes)


def _in_memory(rows: MemoryRows, cache_bytes: int) -> IndexTable:
    return IndexTable(rows, "memory", (_in_memory, rows, cache_bytes), cache_bytes=cache_bytes)


def _layered(below: IndexTable, more: MemoryRows, cache_bytes: int) -> IndexTable:
    store = LayeredRows(below._store, more)  # noqa: SLF001 - a table of this room
    return IndexTable(store, below.uri, (_layered, below, more, cache_bytes), cache_bytes=cache_bytes)


def _weight(index: VideoIndex) -> int:
    """Return the bytes that a row takes in memory, with what is computed of it when it is read."""
    return 2 * index.nbytes + 1024


def _is_full(schema: pa.Schema) -> bool:
    return "row_checksum" in schema.names


def _check_schema(schema: pa.Schema, uri: str) -> None:
    if not _is_full(schema):
        if {"moov_range", "uri"} <= set(schema.names):
            return
        text = f"{uri}: no index table: its columns are {', '.join(schema.names[:8])}"
        raise IndexTableError(text, uri=uri)
    version = (schema.metadata or {}).get(VERSION_KEY, b"none").decode()
    if version != INDEX_VERSION:
        text = f"{uri}: index version {version}, this release reads {INDEX_VERSION}; build the table again"
        raise IndexVersionError(text, got=version, expected=INDEX_VERSION)
    wrong = [f.name for f in SCHEMA if f.name not in schema.names or schema.field(f.name).type != f.type]
    if wrong:
        text = f"{uri}: not this format: columns missing or of another type: {', '.join(wrong[:8])}"
        raise IndexTableError(text, uri=uri)


def _decoded(row: dict[str, Any] | Hint | Damaged) -> Row:
    if isinstance(row, Hint | Damaged):
        return row
    if row["row_checksum"] is None:
        # A row of a video table that somebody else has written.
        claimed = None if row["moov_range"] is None else row["moov_range"].tolist()
        return _hint_of(claimed) if claimed is not None and _is_hint(claimed) else None
    try:
        return index_rows.decode(row)
    except (ValueError, KeyError, TypeError, IndexError, OverflowError):
        return Damaged()


def _hints(table: pa.Table) -> list[Any]:
    ranges = table.column("moov_range").to_pylist()
    return [_hint_of(claimed) if _is_hint(claimed) else Damaged() for claimed in ranges]


def _hint_of(claimed: list[int]) -> Hint:
    return Hint(ByteRange(claimed[0], claimed[0] + claimed[1]))


def _is_hint(value: Any) -> bool:
    """Return whether a value is (offset, size) of something that can be a movie box."""
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(n, int) for n in value):
        return False
    return bool(value[0] >= 0 and 8 <= value[1] <= MAX_HINT_BYTES)
