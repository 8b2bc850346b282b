"""How rows are found by key: by all keys in memory, or, of a large table with an index of its keys, by a query.

A query costs a few milliseconds whatever the number of rows; keys in memory cost a scan of them at the first use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fluxon_gop.arrow_file import Rows
from fluxon_gop.index_rows import KEY_COLUMNS, SCALAR_COLUMNS, SCHEMA, Key, key_of, keys_of, positions
from fluxon_gop.lance_rows import LanceRows, where, where_hash
from fluxon_gop.packed_row import KEY_HASH, PACKED, Unpacked, unpack
from fluxon_gop.ranges import Int64Array

QUERIED_ROWS = 50_000
"""Tables of so many rows are asked by query, where their keys are indexed."""
_MANY = 2000
"""Beyond so many keys, a scan of all is quicker than a query."""


class TableKeys(ABC):
    """Finds rows by key."""

    @abstractmethod
    def count(self) -> int:
        """Return the number of keys."""

    @abstractmethod
    def all(self) -> list[Key]:
        """Return all keys, in the table's order."""

    @abstractmethod
    def may_hold(self, keys: Iterable[Key]) -> set[Key]:
        """Return the keys that may have a row, from memory."""

    @abstractmethod
    def values(self, keys: Sequence[Key], columns: Sequence[str]) -> dict[Key, dict[str, Any]]:
        """Return these columns of the rows that are there."""

    @abstractmethod
    def rows(self, keys: Sequence[Key], columns: Sequence[str] | None = None) -> tuple[list[Key], pa.Table]:
        """Return the rows that are there, whole or at least these columns of them, and the key of each."""

    @abstractmethod
    def unpacked(self, keys: Sequence[Key]) -> tuple[dict[Key, Unpacked], list[Key]]:
        """Return the rows that are there packed, and sound, and the keys of which only ``rows`` tells; that is slower."""

    @abstractmethod
    def frame_counts(self, keys: Sequence[Key]) -> Int64Array:
        """Return each key's number of frames, -1 where no row tells."""


def keys_over(store: Rows) -> TableKeys:
    """Return what finds rows of this store."""
    if isinstance(store, LanceRows) and store.count() >= QUERIED_ROWS and store.is_indexed():
        return QueriedKeys(store)
    return LoadedKeys(store)


class LoadedKeys(TableKeys):
    """All keys and signatures in memory, read once."""

    def __init__(self, store: Rows) -> None:
        """Read them."""
        self._store = store
        schema = store.schema()
        names = [] if schema is None else schema.names
        have = [name for name in SCALAR_COLUMNS if name in names]
        self._scalars = store.scalars(have) if have else SCHEMA.empty_table().select(SCALAR_COLUMNS)
        self._positions = positions(self._scalars)
        self._packed_in = (
            store if isinstance(store, LanceRows) and PACKED in store.packed_columns() else None
        )

    def count(self) -> int:
        """Return the number of keys."""
        return len(self._positions)

    def all(self) -> list[Key]:
        """Return all keys."""
        return list(self._positions)

    def may_hold(self, keys: Iterable[Key]) -> set[Key]:
        """Return the keys that are there."""
        return {key for key in keys if key in self._positions}

    def _places(self, keys: Sequence[Key]) -> tuple[list[Key], list[int]]:
        """Return the keys that are there, in the table's order, and where."""
        there = sorted(self.may_hold(keys), key=self._positions.__getitem__)
        return there, [self._positions[key] for key in there]

    def values(self, keys: Sequence[Key], columns: Sequence[str]) -> dict[Key, dict[str, Any]]:
        """Return these columns, those that are no scalars by one read of the table."""
        there, places = self._places(keys)
        if not there:
            return {}
        if set(columns) <= set(self._scalars.column_names):
            found = self._scalars.take(pa.array(places, pa.int64()))
        else:
            found = self._store.take(places)
        have = [name for name in columns if name in found.column_names]
        return dict(
            zip(there, found.select(have).to_pylist() if have else [{} for _ in there], strict=True)
        )

    def rows(self, keys: Sequence[Key], columns: Sequence[str] | None = None) -> tuple[list[Key], pa.Table]:
        """Return the rows by their places."""
        there, places = self._places(keys)
        if not there:
            return [], SCHEMA.empty_table()
        if columns is not None and isinstance(self._store, LanceRows):
            return there, self._store.take(places, columns)
        return there, self._store.take(places)

    def unpacked(self, keys: Sequence[Key]) -> tuple[dict[Key, Unpacked], list[Key]]:
        """Return the rows by their places."""
        there, places = self._places(keys)
        if self._packed_in is None or not there:
            return {}, there
        found = self._packed_in.take(places, [PACKED])
        rows = zip(there, _unpacked(found), strict=True)
        sound = {key: row for key, row in rows if row is not None and key_of(row.row) == key}
        return sound, [key for key in there if key not in sound]

    def frame_counts(self, keys: Sequence[Key]) -> Int64Array:
        """Return the numbers from memory."""
        if not self._positions or "frame_count" not in self._scalars.column_names:
            return np.full(len(keys), -1, np.int64)
        counts = self._scalars.column("frame_count").fill_null(-1).to_numpy()
        at = np.fromiter((self._positions.get(key, -1) for key in keys), np.int64, len(keys))
        return np.where(at < 0, -1, counts[at]).astype(np.int64)


class QueriedKeys(TableKeys):
    """Nothing in memory: the table's own index of its keys is asked."""

    def __init__(self, store: LanceRows) -> None:
        """Take a store whose keys are indexed."""
        self._store = store
        self._columns = store.packed_columns()

    def _find(self, keys: Sequence[Key], columns: list[str]) -> pa.Table:
        """Return these columns of the rows of these keys; of few others too, where two keys have one hash."""
        return self._store.find(where_hash(keys) if KEY_HASH in self._columns else where(keys), columns)

    def count(self) -> int:
        """Return the number of rows."""
        return self._store.count()

    def all(self) -> list[Key]:
        """Return all keys, by a scan."""
        return list(dict.fromkeys(keys_of(self._store.scalars(list(KEY_COLUMNS)))))

    def may_hold(self, keys: Iterable[Key]) -> set[Key]:
        """Return all: only a query tells."""
        return set(keys)

    def values(self, keys: Sequence[Key], columns: Sequence[str]) -> dict[Key, dict[str, Any]]:
        """Return these columns by one query."""
        if not keys:
            return {}
        found = self._find(keys, [*KEY_COLUMNS, *columns])
        wanted = set(keys)
        rows = zip(keys_of(found), found.select(list(columns)).to_pylist(), strict=True)
        return {key: row for key, row in rows if key in wanted}

    def rows(self, keys: Sequence[Key], columns: Sequence[str] | None = None) -> tuple[list[Key], pa.Table]:
        """Return the rows by one query; of a key that stands twice, the last one."""
        if not keys:
            return [], SCHEMA.empty_table()
        found = self._find(keys, SCHEMA.names if columns is None else [*KEY_COLUMNS, *columns])
        wanted = set(keys)
        last = {key: place for key, place in positions(found).items() if key in wanted}
        if len(last) < found.num_rows:
            found = found.take(pa.array(list(last.values()), pa.int64()))
        return list(last), found

    def unpacked(self, keys: Sequence[Key]) -> tuple[dict[Key, Unpacked], list[Key]]:
        """Return the rows by one query of one column."""
        if PACKED not in self._columns or not keys:
            return {}, list(keys)
        rows = _unpacked(self._find(keys, [PACKED]))
        sound = {key_of(row.row): row for row in rows if row is not None}
        if len(sound) < len(rows) or not set(sound) <= set(keys):
            # One is damaged, one stands in another's row, a key has two rows, two keys have one hash: the columns tell.
            return {}, list(keys)
        return sound, []

    def frame_counts(self, keys: Sequence[Key]) -> Int64Array:
        """Return the numbers by a query, of many by a scan of two columns."""
        texts = all(isinstance(key, str) for key in keys)
        if len(keys) <= _MANY or not texts:
            found: dict[Key, dict[str, Any]] = {}
            for at in range(0, len(keys), _MANY):
                found |= self.values(keys[at : at + _MANY], ["frame_count"])
            counts = [found.get(key, {}).get("frame_count") for key in keys]
            return np.array([-1 if count is None else count for count in counts], np.int64)
        table = self._store.scalars(["uri", "frame_count"])
        places = pc.index_in(pa.array(keys, pa.string()), value_set=table.column("uri").combine_chunks())
        at = places.fill_null(-1).to_numpy()
        counts = table.column("frame_count").fill_null(-1).to_numpy()
        return np.where(at < 0, -1, counts[at]).astype(np.int64)


def _unpacked(found: pa.Table) -> list[Unpacked | None]:
    """Return each row from what is packed of it, None where that is missing or damaged."""
    rows: list[Unpacked | None] = []
    for data in found.column(PACKED).to_pylist():
        try:
            rows.append(unpack(data or b""))
        except ValueError:
            rows.append(None)
    return rows
