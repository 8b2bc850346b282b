"""The sidecar table of video indexes: a Lance data set, or one Arrow IPC file by its suffix.

Only the scalars that finding a row needs (key, signature, frame count) load up front; all else comes by
key, for the videos of a batch, into a cache bounded in bytes. A row whose checksum fails is never used.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import pyarrow as pa
from cachetools import LRUCache

from fluxon_gop import forks, index_rows
from fluxon_gop.arrow_file import ArrowFile, RemoteArrowFile
from fluxon_gop.errors import (
    ClosedError,
    ForkedProcessError,
    IndexTableError,
    IndexVersionError,
)
from fluxon_gop.index_rows import (
    INDEX_VERSION,
    KEY_COLUMNS,
    SCALAR_COLUMNS,
    SCHEMA,
    SWM_COLUMNS,
    VERSION_KEY,
    Key,
    positions,
)
from fluxon_gop.model import Signature, VideoIndex
from fluxon_gop.ranges import ByteRange
from fluxon_gop.sources import open_source

if TYPE_CHECKING:
    from lance import LanceDataset

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


class _Store(Protocol):
    """The two shapes of the table on disk."""

    def scalars(self, columns: list[str]) -> pa.Table: ...

    def take(self, positions: list[int]) -> pa.Table: ...

    def schema(self) -> pa.Schema | None: ...

    def append(self, table: pa.Table) -> None: ...

    def replace(self, table: pa.Table) -> None: ...


class IndexTable:
    """Index rows by video. Thread-safe for reading; a pickle carries the address, not the rows."""

    def __init__(self, store: _Store, uri: str, recipe: tuple[str, Mapping[str, Any] | None]) -> None:
        """Use :meth:`open`."""
        self._store = store
        self._uri = uri
        self._recipe = recipe
        self._lock = threading.RLock()
        self._cache: LRUCache[Key, VideoIndex] = LRUCache(CACHE_BYTES, getsizeof=lambda v: v.nbytes + 1024)
        self._positions: dict[Key, int] | None = None
        self._scalars: pa.Table | None = None
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
    ) -> IndexTable:
        """Return the table at ``uri``: an Arrow IPC file where it ends in ``.arrow``, else a Lance data set.

        Args:
            uri: a path, ``http(s)://`` of an ``.arrow`` file (read whole, once), or any address that Lance takes.
            storage_options: passed on to Lance, or to the source of a remote file.
            create: a missing table is an empty one, made by the first append.

        Raises:
            IndexTableError: nothing there, or not such a table.
            IndexVersionError: written for another version of this format.
            SourceError: a remote ``.arrow`` file cannot be read.
        """
        given = os.fspath(uri)
        shown = given
        store: _Store
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
            store = _LanceDataset(given, storage_options)
        schema = store.schema()
        if schema is None and not create:
            text = f"{shown}: no index table there; make one with: fluxon-gop index build SRC --to {shown}"
            raise IndexTableError(text, uri=shown)
        if schema is not None:
            _check_schema(schema, shown)
        return cls(store, shown, (given, storage_options))

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
                if isinstance(index := found[key], VideoIndex) and index.nbytes < CACHE_BYTES:
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
            self._scalars = self._positions = None

    def _write(self, batch: list[tuple[Key, VideoIndex]], write: Any) -> None:
        if not batch:
            return
        schema = self._store.schema()
        if schema is not None and not _is_full(schema):
            text = f"{self.uri}: the table has only {', '.join(SWM_COLUMNS)}; build a new table"
            raise IndexTableError(text, uri=self.uri)
        write(index_rows.encode(batch))
        with self._lock:
            self._scalars = self._positions = None
            for key, _ in batch:
                self._cache.pop(key, None)

    def _table(self) -> pa.Table:
        self._load()
        assert self._scalars is not None
        return self._scalars

    def _load(self) -> dict[Key, int]:
        """Return key -> position; the scalars are read once."""
        if self._closed:
            text = f"{self.uri}: the index table is closed"
            raise ClosedError(text)
        with self._lock:
            if self._positions is None:
                if self._pid != os.getpid() and isinstance(self._store, _LanceDataset):
                    raise _forked(self.uri)
                schema = self._store.schema()
                names = [] if schema is None else schema.names
                have = [name for name in SCALAR_COLUMNS if name in names]
                table = self._store.scalars(have) if have else None
                self._scalars = table
                self._positions = {} if table is None else positions(table)
            return self._positions

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the address and options; the rows are read again where they are used."""
        return (_reopen, self._recipe)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def __repr__(self) -> str:
        """Show the address."""
        return f"IndexTable({self.uri!r})"


def _reopen(uri: str, storage_options: Mapping[str, Any] | None) -> IndexTable:
    return IndexTable.open(uri, storage_options=storage_options, create=True)


def _forked(uri: str) -> ForkedProcessError:
    text = (
        f"{uri}: a Lance table opened before the fork is used in the child, where Lance's threads do not "
        "live. Start workers with 'spawn' or 'forkserver', or use an .arrow table"
    )
    return ForkedProcessError(text, source=uri)


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


def _decoded(row: dict[str, Any] | Hint) -> Row:
    if isinstance(row, Hint):
        return row
    try:
        return index_rows.decode(row)
    except (ValueError, KeyError, TypeError, IndexError, OverflowError):
        return Damaged()


def _hints(table: pa.Table) -> list[Any]:
    ranges = table.column("moov_range").to_pylist()
    return [Hint(ByteRange(r[0], r[0] + r[1])) if _is_hint(r) else Damaged() for r in ranges]


def _is_hint(value: Any) -> bool:
    """Return whether a value is (offset, size) of something that can be a movie box."""
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(n, int) for n in value):
        return False
    return bool(value[0] >= 0 and 8 <= value[1] <= MAX_HINT_BYTES)


class _LanceDataset:
    """A Lance data set; each write is one version.

    Lance is imported at the first use: it warns at every fork of a process that has it.
    """

    def __init__(self, uri: str, storage_options: Mapping[str, Any] | None) -> None:
        self._uri = uri
        self._options = dict(storage_options) if storage_options else None
        self._dataset: LanceDataset | None = None
        self._pid = os.getpid()

    def _open(self) -> LanceDataset | None:
        if self._pid != os.getpid():
            raise _forked(self._uri)
        if self._dataset is None:
            import lance

            try:
                self._dataset = lance.dataset(self._uri, storage_options=self._options)
            except (ValueError, FileNotFoundError) as error:
                if "not found" in str(error).lower():
                    return None
                text = f"{self._uri}: cannot be opened as a Lance data set: {str(error).splitlines()[0]}"
                raise IndexTableError(text, uri=self._uri) from error
        return self._dataset

    def schema(self) -> pa.Schema | None:
        dataset = self._open()
        return None if dataset is None else dataset.schema

    def scalars(self, columns: list[str]) -> pa.Table:
        dataset = self._open()
        assert dataset is not None
        return dataset.to_table(columns=columns)

    def take(self, positions: list[int]) -> pa.Table:
        dataset = self._open()
        assert dataset is not None
        return dataset.take(positions)

    def append(self, table: pa.Table) -> None:
        import lance

        exists = self._open() is not None
        self._dataset = lance.write_dataset(
            table, self._uri, mode="append" if exists else "create", storage_options=self._options
        )

    def replace(self, table: pa.Table) -> None:
        dataset = self._open()
        assert dataset is not None
        merge = dataset.merge_insert(list(KEY_COLUMNS))
        merge.when_matched_update_all().when_not_matched_insert_all().execute(table)
        self._dataset = None
