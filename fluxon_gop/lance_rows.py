"""The index table as a Lance data set: each write is one version.

Lance is imported at the first use: it warns at every fork of a process that has it.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from fluxon_gop.errors import ForkedProcessError, IndexTableError
from fluxon_gop.index_rows import KEY_COLUMNS, Key
from fluxon_gop.packed_row import KEY_HASH, PACKED, PACKED_SCHEMA, key_hash
from fluxon_gop.sources.lance_blob import lance_options

if TYPE_CHECKING:
    from lance import LanceDataset


@contextmanager
def typed(uri: str) -> Iterator[None]:
    """Raise what Lance raises as one of our errors, without the places in its own sources."""
    try:
        yield
    except (OSError, ValueError) as error:
        text = f"{uri}: the table cannot be read or written: {_first_line(error)}"
        raise IndexTableError(text, uri=uri) from error


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].split(", /home/", 1)[0] if str(error) else type(error).__name__


def _has_data(uri: str) -> bool:
    """Return whether a folder holds data files: without its versions it is a data set half copied, or half deleted."""
    return "://" not in uri and any((Path(uri) / "data").glob("*.lance"))


MAX_FRAGMENTS = 16
INDEXED_ROWS = 10_000
"""Smaller tables are scanned in milliseconds."""
_KEYS = 2000
_PAUSES = (0.02, 0.1, 0.3, 1.0, 2.0)
"""Seconds between tries of a commit that another one has overtaken."""


def open_dataset(uri: str, options: Mapping[str, Any] | None) -> LanceDataset | None:
    """Return a data set as it is now, None where there is none.

    Raises:
        IndexTableError: it cannot be opened.
    """
    import lance

    def opened() -> LanceDataset | Exception:
        try:
            return lance.dataset(uri, storage_options=lance_options(uri, options))
        except (ValueError, OSError) as error:
            return error

    found = opened()
    if isinstance(found, Exception) and "not found" in str(found).lower():
        if not _has_data(uri):
            return None
        # Another process may have made it between the two looks.
        found = opened()
    if isinstance(found, Exception):
        text = f"{uri}: cannot be opened as a Lance data set: {_first_line(found)}"
        raise IndexTableError(text, uri=uri)
    return found


def create_dataset(
    uri: str, options: Mapping[str, Any] | None, schema: pa.Schema, *, stable_row_ids: bool = False
) -> LanceDataset:
    """Return a data set, made without rows unless another process has just made it.

    ``write_dataset(mode="create")`` is no way: of two at once, the second one's rows take the place of the first one's
    (pylance 14: its commit is an overwrite, tried again as version 2).

    Raises:
        IndexTableError: it cannot be made.
    """
    import lance

    try:
        with typed(uri):
            return lance.LanceDataset.commit(
                uri,
                lance.LanceOperation.Overwrite(schema, []),
                storage_options=lance_options(uri, options),
                max_retries=0,
                enable_stable_row_ids=stable_row_ids,
            )
    except IndexTableError:
        there = open_dataset(uri, options)
        if there is None:
            raise
        return there


class FragmentPlace(NamedTuple):
    """Where a table's fragments are written, by whatever process."""

    uri: str
    options: dict[str, Any] | None


def write_fragments(rows: pa.Table, place: FragmentPlace) -> list[str]:
    """Write rows as fragments that are no part of the table yet; return what a commit makes them one by."""
    if not rows.num_rows:
        return []
    from lance.fragment import write_fragments as write

    fragments = write(rows, place.uri, mode="append", storage_options=place.options)
    return [json.dumps(fragment.to_json()) for fragment in fragments]


class LanceRows:
    """Rows of a Lance data set."""

    forks_badly = True

    def __init__(self, uri: str, storage_options: Mapping[str, Any] | None) -> None:
        """Name the data set; nothing is opened yet."""
        self._uri = uri
        self._options = lance_options(uri, storage_options)
        self._dataset: LanceDataset | None = None
        self._pid = os.getpid()

    def _open(self) -> LanceDataset | None:
        if self._pid != os.getpid():
            raise forked(self._uri)
        if self._dataset is None:
            self._dataset = open_dataset(self._uri, self._options)
        return self._dataset

    def schema(self) -> pa.Schema | None:
        """Return the data set's schema, None where there is none."""
        dataset = self._open()
        return None if dataset is None else dataset.schema

    def count(self) -> int:
        """Return the number of rows, from the manifest."""
        dataset = self._open()
        return 0 if dataset is None else dataset.count_rows()

    def is_indexed(self) -> bool:
        """Return whether the data set has an index of its keys."""
        dataset = self._open()
        return dataset is not None and any(
            _key_column(dataset.schema) in index.field_names for index in dataset.describe_indices()
        )

    def packed_columns(self) -> frozenset[str]:
        """Return which of ``key_hash`` and ``packed_row`` rows have; those of a data set that is not there yet have both."""
        dataset = self._open()
        return frozenset(PACKED_SCHEMA.names if dataset is None else dataset.schema.names) & {
            KEY_HASH,
            PACKED,
        }

    @contextmanager
    def _at_work(self) -> Iterator[LanceDataset]:
        """Give the data set, which is there; what Lance raises meanwhile is one of our errors."""
        dataset = self._open()
        assert dataset is not None
        with typed(self._uri):
            yield dataset

    def find(self, condition: str | None, columns: list[str]) -> pa.Table:
        """Return the rows that fulfil a condition, None for all; of an indexed column without a scan."""
        with self._at_work() as dataset:
            return dataset.to_table(columns=columns, filter=condition)

    def scalars(self, columns: list[str]) -> pa.Table:
        """Return these columns of all rows."""
        return self.find(None, columns)

    def take(self, positions: list[int], columns: Sequence[str] | None = None) -> pa.Table:
        """Return these rows, in this order; all columns but the packed ones, or those that are named."""
        with self._at_work() as dataset:
            names = [name for name in dataset.schema.names if name not in (KEY_HASH, PACKED)]
            return dataset.take(positions, columns=list(columns or names))

    def append(self, table: pa.Table) -> None:
        """Add rows as a new version."""
        if self._open() is None:
            self._create(table.schema)
        self._write(table, "append")

    def _create(self, schema: pa.Schema) -> None:
        """Make the data set, without rows, unless another process has just done so."""
        self._dataset = create_dataset(self._uri, self._options, schema)

    def overwrite(self, table: pa.Table) -> None:
        """Put rows in the place of all, as a new version."""
        self._write(table, "overwrite")

    def _write(self, table: pa.Table, mode: str) -> None:
        import lance

        def write() -> None:
            with typed(self._uri):
                self._dataset = lance.write_dataset(
                    table, self._uri, mode=mode, storage_options=self._options
                )

        self._again(write)

    def _again(self, act: Callable[[], None]) -> None:
        """Do it, and again on the newest version where another writer's commit came between."""
        for pause in (*_PAUSES, None):
            try:
                act()
            except IndexTableError as error:
                if pause is None or not _is_conflict(error):
                    raise
            else:
                return
            self.refresh()
            time.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311 - so that two do not meet again

    def replace(self, table: pa.Table) -> None:
        """Put rows in the place of those with the same keys, as a new version."""

        def merge() -> None:
            with self._at_work() as dataset:
                into = dataset.merge_insert(list(KEY_COLUMNS))
                into.when_matched_update_all().when_not_matched_insert_all().execute(table)

        self._again(merge)
        self._dataset = None

    def fragment_place(self) -> FragmentPlace:
        """Return where fragments of this table are written; the table is made where it is not there."""
        if self._open() is None:
            self._create(PACKED_SCHEMA)
        return FragmentPlace(self._uri, self._options)

    def commit_fragments(self, fragments: Sequence[str]) -> None:
        """Make fragments that somebody has written part of the table, as a new version."""
        import lance

        found = [lance.FragmentMetadata.from_json(text) for text in fragments]

        def commit() -> None:
            with self._at_work() as dataset:
                self._dataset = lance.LanceDataset.commit(
                    self._uri,
                    lance.LanceOperation.Append(found),
                    read_version=dataset.version,
                    storage_options=self._options,
                )

        self._again(commit)

    def remove(self, keys: list[Key]) -> None:
        """Remove the rows of these keys as new versions, some thousand keys each."""
        for at in range(0, len(keys), _KEYS):
            some = keys[at : at + _KEYS]
            quick = f"{where_hash(some)} AND " if KEY_HASH in self.packed_columns() else ""
            self._delete(f"{quick}({where(some)})")

    def _delete(self, condition: str) -> None:
        def delete() -> None:
            with self._at_work() as dataset:
                dataset.delete(condition)

        self._again(delete)
        self._dataset = None

    def refresh(self) -> None:
        """Open the newest version when it is needed."""
        self._dataset = None

    def maintain(self) -> None:
        """Join small fragments, index the keys of a large table, and bring the index up to date."""
        try:
            self._maintain()
        except IndexTableError as error:
            # Another builder is at it: it, or the next build, leaves the table as it should be.
            if not _is_conflict(error):
                raise
            self.refresh()

    def _maintain(self) -> None:
        schema = self.schema()
        if schema is None or "uri" not in schema.names:
            return
        self._again(self._drop_twins)
        with self._at_work() as dataset:
            if len(dataset.get_fragments()) > MAX_FRAGMENTS:
                dataset.optimize.compact_files(target_rows_per_fragment=1 << 20)
                self._dataset = None
        with self._at_work() as dataset:
            if dataset.count_rows() < INDEXED_ROWS:
                return
            if self.is_indexed():
                dataset.optimize.optimize_indices()
            else:
                first = _key_column(dataset.schema)
                for column in [first] if first == KEY_HASH else [first, "relpath"]:
                    dataset.create_scalar_index(column, "BTREE")
        self._dataset = None

    def _drop_twins(self) -> None:
        """Remove all but the last row of each key: two builders at once may both have added it."""
        keys = self.scalars([*KEY_COLUMNS, "_rowid"])
        numbered = keys.append_column("at", pa.array(range(keys.num_rows), pa.int64()))
        last = numbered.group_by(list(KEY_COLUMNS)).aggregate([("at", "max")])
        if last.num_rows == keys.num_rows:
            return
        kept = set(last.column("at_max").to_pylist())
        twins = [row for at, row in enumerate(keys.column("_rowid").to_pylist()) if at not in kept]
        for at in range(0, len(twins), _KEYS):
            with self._at_work() as dataset:
                dataset.delete(f"_rowid IN ({', '.join(map(str, twins[at : at + _KEYS]))})")
            self._dataset = None


def _is_conflict(error: IndexTableError) -> bool:
    """Return whether another writer's commit is what is in the way."""
    words = str(error.__cause__).lower()
    return any(word in words for word in ("conflict", "incompatible transaction", "concurrent"))


def _key_column(schema: pa.Schema) -> str:
    """Return the column by which rows are found."""
    return KEY_HASH if KEY_HASH in schema.names else "uri"


def where_hash(keys: Sequence[Key]) -> str:
    """Return the condition that names the hashes of these keys."""
    return f"{KEY_HASH} IN ({', '.join(str(key_hash(key)) for key in keys)})"


def where(keys: Sequence[Key]) -> str:
    """Return the condition that names these keys."""
    uris = [key for key in keys if isinstance(key, str)]
    by_export: dict[str, list[str]] = {}
    for export, path in (key for key in keys if not isinstance(key, str)):
        by_export.setdefault(export, []).append(path)
    parts = [f"uri IN ({_listed(uris)})"] if uris else []
    parts += [
        f"(relpath IN ({_listed(paths)}) AND export_name = {_quoted(export)})"
        for export, paths in by_export.items()
    ]
    return " OR ".join(parts)


def _listed(texts: Sequence[str]) -> str:
    return ", ".join(map(_quoted, texts))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def forked(uri: str) -> ForkedProcessError:
    """Return the error for a use in a forked child."""
    text = (
        f"{uri}: a Lance table opened before the fork is used in the child, where Lance's threads do not "
        "live. Start workers with 'spawn' or 'forkserver', or use an .arrow table"
    )
    return ForkedProcessError(text, source=uri)
