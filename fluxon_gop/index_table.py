"""The sidecar table of video indexes: a Lance data set, or one Arrow IPC file by its suffix.

Only the scalars that finding a row needs (key, signature, frame count) load up front, of a large table not even those;
all else comes by key, for the videos of a batch, into a cache bounded in bytes. A row whose checksum fails is never used.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
from cachetools import LRUCache

from fluxon_gop import forks, index_rows, packed_row
from fluxon_gop.arrow_file import ArrowFile, LayeredRows, MemoryRows, RemoteArrowFile, Rows
from fluxon_gop.errors import (
    ClosedError,
    IndexTableError,
    IndexVersionError,
)
from fluxon_gop.index_rows import (
    INDEX_VERSION,
    SCHEMA,
    SWM_COLUMNS,
    VERSION_KEY,
    Key,
)
from fluxon_gop.lance_rows import FragmentPlace, LanceRows, forked
from fluxon_gop.model import Signature, VideoIndex
from fluxon_gop.ranges import Int64Array
from fluxon_gop.sources import open_source
from fluxon_gop.table_keys import TableKeys, keys_over
from fluxon_gop.table_rows import Row, is_full, read_rows

CACHE_BYTES = 256 * 1024 * 1024
"""Decoded rows that one table object keeps in memory."""


class _Shared:
    """What finds rows by key; shared by tables over the same rows, made anew after a write."""

    def __init__(self) -> None:
        self.keys: TableKeys | None = None
        self.generation = 0

    def forget(self) -> None:
        self.keys = None
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
        self._shared = _Shared()
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
            make = f"fluxon-gop index build SRC --to {shown}"
            if Path(shown).is_dir():
                make = f"fluxon-gop index build {shown} --to {shown.rstrip('/')}.lance"
            text = f"{shown}: no index table there; make one with: {make}"
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
        other._shared = self._shared
        return other

    @property
    def storage_options(self) -> Mapping[str, Any] | None:
        """What the table's own store was opened with."""
        return self._recipe[2] if self._recipe[0] is _reopen else None

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
        return self._keys().count()

    def __contains__(self, key: object) -> bool:
        """Return whether there is a row for this key."""
        return isinstance(key, str | tuple) and bool(self._keys().values([key], ["size"]))

    def keys(self) -> list[Key]:
        """Return the keys in the table's order."""
        return self._keys().all()

    def frame_counts(self, keys: Sequence[Key]) -> Int64Array:
        """Return each video's number of frames; -1 where no row tells."""
        return self._keys().frame_counts(keys)

    def known(self, keys: Sequence[Key], columns: Sequence[str]) -> dict[Key, dict[str, Any]]:
        """Return these columns of the rows that are there, by key; from memory, or by one query of a large table."""
        return self._keys().values(keys, columns)

    def signature(self, key: Key) -> Signature | None:
        """Return the signature that the row of this key was built from; None without a row."""
        return index_rows.signature_in(self.known([key], ["size", "etag", "mtime_ns"]).get(key, {}))

    def held(self, keys: Sequence[Key]) -> list[Row] | None:
        """Return the rows where all of them are answered from memory, else None."""
        there = self._keys().may_hold(keys)
        with self._lock:
            rows: list[Row] = [self._cache.get(key) for key in keys]
        if any(row is None and key in there for key, row in zip(keys, rows, strict=True)):
            return None
        return rows

    def lookup(self, keys: Sequence[Key]) -> list[Row]:
        """Return a row for each key, in order; those not in memory come by one read of the table."""
        finder = self._keys()
        with self._lock:
            found: dict[Key, Row] = {key: self._cache.get(key) for key in keys}
        missing = finder.may_hold(key for key, row in found.items() if row is None)
        if missing:
            for key, row in read_rows(finder, missing):
                found[key] = row
                if isinstance(row, VideoIndex) and _weight(row) <= self._cache_bytes:
                    with self._lock:
                        self._cache[key] = row
        return [found[key] for key in keys]

    def encoded(self, keys: Sequence[Key]) -> pa.Table:
        """Return the rows of these keys as they are stored, those that are there."""
        return self._keys().rows(keys)[1]

    def unsound(self, keys: Sequence[Key]) -> set[Key]:
        """Return those of whose row the columns are damaged, or not what is packed of it; look-ups read what is packed."""
        finder = self._keys()
        order, table = finder.rows(keys)
        if not is_full(table.schema):
            return set()
        packed, _ = finder.unpacked(keys)
        wrong: set[Key] = set()
        for key, row in zip(order, index_rows.rows_of(table), strict=True):
            if row["row_checksum"] is None:
                continue
            try:
                index_rows.decode(row)
                if key in packed and index_rows.checksum(_filled(packed[key], row)) != row["row_checksum"]:
                    wrong.add(key)
            except index_rows.UNSOUND:
                wrong.add(key)
        return wrong

    def append(self, rows: Iterable[tuple[Key, VideoIndex]]) -> None:
        """Add rows in one commit. A key that is there already raises; use :meth:`replace`."""
        batch = list(rows)
        taken = list(self.known([key for key, _ in batch], ["size"]))
        if taken or len({key for key, _ in batch}) < len(batch):
            text = (
                f"{self.uri}: {len(taken) or 'some'} of the keys are there already or twice; use replace()"
            )
            raise IndexTableError(text, keys=taken)
        self._write(packed_row.encoded(batch, self.packed_columns), self._store.append)

    def replace(self, rows: Iterable[tuple[Key, VideoIndex]]) -> None:
        """Add rows, or put them in the place of those with the same key, in one commit."""
        batch = list({key: (key, index) for key, index in rows}.values())
        old = bool(self.known([key for key, _ in batch], ["size"]))
        self._write(
            packed_row.encoded(batch, self.packed_columns),
            self._store.replace if old else self._store.append,
        )

    def write(self, new: pa.Table, changed: pa.Table) -> None:
        """Add encoded rows, those of keys that are there in the place of the old ones; a commit for each kind."""
        for rows, write in ((new, self._store.append), (changed, self._store.replace)):
            if rows.num_rows:
                self._write(rows, write)

    @property
    def packed_columns(self) -> frozenset[str]:
        """Which of ``key_hash`` and ``packed_row`` its rows have: both of a Lance data set, unless it was made without."""
        return self._store.packed_columns() if isinstance(self._store, LanceRows) else frozenset()

    def fragment_place(self) -> FragmentPlace | None:
        """Return where other processes may write the table's new rows; None where they cannot."""
        return self._store.fragment_place() if isinstance(self._store, LanceRows) else None

    def commit_fragments(self, fragments: Sequence[str]) -> None:
        """Make rows that other processes have written part of the table, in one commit."""
        if fragments and isinstance(self._store, LanceRows):
            self._store.commit_fragments(fragments)
            self._shared.forget()

    def remove(self, keys: Sequence[Key]) -> None:
        """Remove the rows of these keys, in one commit."""
        if keys:
            self._store.remove(list(keys))
            self._shared.forget()

    def maintain(self) -> None:
        """Have a large table's keys indexed and its small pieces joined; readers see it before or after."""
        self._store.maintain()
        self._shared.forget()

    def close(self) -> None:
        """Let go of the cached rows; use after it raises ClosedError."""
        self._closed = True
        with self._lock:
            self._cache.clear()
            self._shared = _Shared()

    def _write(self, rows: pa.Table, write: Callable[[pa.Table], None]) -> None:
        if not rows.num_rows:
            return
        schema = self._store.schema()
        if schema is not None and not is_full(schema):
            text = f"{self.uri}: the table has only {', '.join(SWM_COLUMNS)}; build a new table"
            raise IndexTableError(text, uri=self.uri)
        write(packed_row.fitted(rows, self.packed_columns))
        self._shared.forget()

    def _keys(self) -> TableKeys:
        """Return what finds rows by key."""
        if self._closed:
            text = f"{self.uri}: the index table is closed"
            raise ClosedError(text)
        with self._lock:
            if self._generation != self._shared.generation:
                self._cache.clear()
                self._generation = self._shared.generation
            if self._shared.keys is None:
                if self._pid != os.getpid() and self._store.forks_badly:
                    raise forked(self.uri)
                self._shared.keys = keys_over(self._store)
            return self._shared.keys

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


def _filled(packed: packed_row.Unpacked, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row from what is packed, with the long lists of its columns where they are left out."""
    lists = {} if packed.is_whole else {name: columns[name] for name in packed_row.LONG_LISTS}
    return {**packed.row, **lists}


def _weight(index: VideoIndex) -> int:
    """Return the bytes that a row takes in memory, with what is computed of it when it is read."""
    return 2 * index.nbytes + 1024


def _check_schema(schema: pa.Schema, uri: str) -> None:
    if not is_full(schema):
        if {"moov_range", "uri"} <= set(schema.names):
            return
        text = f"{uri}: no index table: its columns are {', '.join(schema.names[:8])}"
        raise IndexTableError(text, uri=uri)
    version = (schema.metadata or {}).get(VERSION_KEY, b"none").decode()
    if version != INDEX_VERSION:
        text = f"{uri}: index version {version}, this release reads {INDEX_VERSION}; build the table again"
        raise IndexVersionError(text, got=version, expected=INDEX_VERSION)
    wrong = [f.name for f in SCHEMA if f.name not in schema.names or schema.field(f.name).type != f.type]
    wrong += [
        f.name
        for f in packed_row.FIELDS
        if f.name in schema.names
        and schema.field(f.name).type != f.type
        and not (pa.types.is_binary(f.type) and pa.types.is_large_binary(schema.field(f.name).type))
    ]
    if wrong:
        text = f"{uri}: not this format: columns missing or of another type: {', '.join(wrong[:8])}"
        raise IndexTableError(text, uri=uri)
