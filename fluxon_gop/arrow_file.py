"""A table as one Arrow IPC file: read whole, replaced whole; on a remote store, read only. Or in memory only."""

from __future__ import annotations

import fcntl
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from fluxon_gop.errors import IndexTableError, SourceNotFoundError
from fluxon_gop.index_rows import KEY_COLUMNS, SCHEMA, Key, keys_of, positions
from fluxon_gop.sources.range_source import Buffer, RangeSource
from fluxon_gop.video_columns import rows_of_columns

REMOTE_READ_BYTES = 16 * 1024 * 1024
"""Of one read of a remote file: an index of some ten thousand videos."""


class Rows(Protocol):
    """The rows of a table, wherever they lie."""

    @property
    def forks_badly(self) -> bool:
        """Whether a forked child cannot read them."""
        ...

    def schema(self) -> pa.Schema | None:
        """Return the schema, None where there is no table."""
        ...

    def scalars(self, columns: list[str]) -> pa.Table:
        """Return these columns of all rows."""
        ...

    def take(self, positions: list[int]) -> pa.Table:
        """Return these rows, in this order."""
        ...

    def append(self, table: pa.Table) -> None:
        """Add rows."""
        ...

    def replace(self, table: pa.Table) -> None:
        """Put rows in the place of those with the same keys."""
        ...

    def remove(self, keys: list[Key]) -> None:
        """Remove the rows of these keys."""
        ...

    def overwrite(self, table: pa.Table) -> None:
        """Put rows in the place of all."""
        ...

    def maintain(self) -> None:
        """Have what makes look-ups quick up to date."""
        ...

    def refresh(self) -> None:
        """Have what others have written since seen."""
        ...


class ReadOnlyRows(ABC):
    """Rows that cannot be written to by an index table."""

    @abstractmethod
    def why(self) -> str:
        """Return why not, and what to do."""

    def append(self, table: pa.Table) -> None:
        """Refuse."""
        text = f"{table.num_rows} index rows cannot be written: {self.why()}"
        raise IndexTableError(text)

    def replace(self, table: pa.Table) -> None:
        """Refuse likewise."""
        self.append(table)

    def overwrite(self, table: pa.Table) -> None:
        """Refuse likewise."""
        self.append(table)

    def remove(self, keys: list[Key]) -> None:
        """Refuse likewise."""
        text = f"{len(keys)} index rows cannot be removed: {self.why()}"
        raise IndexTableError(text)

    def maintain(self) -> None:  # noqa: B027 - for those that have something to do
        """Nothing to do."""

    def refresh(self) -> None:  # noqa: B027 - likewise
        """Nothing to do."""


class ArrowFile:
    """One Arrow IPC file, zstd inside, replaced whole by each write."""

    forks_badly = False

    def __init__(self, path: Path) -> None:
        """Name the file; nothing is read yet."""
        self._path = path
        self._held: pa.Table | None = None

    def _read(self) -> pa.Table | None:
        if self._held is None and self._path.exists():
            try:
                self._held = _table_of(self._path.read_bytes())
            except (pa.ArrowException, OSError, ValueError) as error:
                text = f"{self._path}: no Arrow IPC file: {error}"
                raise IndexTableError(text, uri=str(self._path)) from error
        return self._held

    def schema(self) -> pa.Schema | None:
        """Return the file's schema, None where there is no file."""
        table = self._read()
        return None if table is None else table.schema

    def scalars(self, columns: list[str]) -> pa.Table:
        """Return these columns of all rows."""
        table = self._read()
        assert table is not None
        return table.select(columns)

    def take(self, rows: list[int]) -> pa.Table:
        """Return these rows, in this order."""
        table = self._read()
        assert table is not None
        return table.take(pa.array(rows, pa.int64()))

    def append(self, table: pa.Table) -> None:
        """Add rows; a reader sees the file before or after, never between. Writers wait for one another."""
        with self._alone():
            old = self._read()
            self._write(table if old is None else pa.concat_tables([old, table]))

    def replace(self, table: pa.Table) -> None:
        """Put rows in the place of those with the same keys."""
        with self._alone():
            old = self._read()
            if old is None:
                self._write(table)
                return
            kept = np.ones(old.num_rows, dtype=bool)
            places = positions(old)
            kept[[places[key] for key in positions(table) if key in places]] = False
            self._write(pa.concat_tables([old.filter(pa.array(kept)), table]))

    def remove(self, keys: list[Key]) -> None:
        """Remove the rows of these keys."""
        with self._alone():
            old = self._read()
            if old is not None:
                gone = set(keys)
                self._write(old.filter(pa.array([key not in gone for key in keys_of(old)])))

    def overwrite(self, table: pa.Table) -> None:
        """Put rows in the place of all."""
        self._write(table)

    def refresh(self) -> None:
        """Read the file anew when it is needed."""
        self._held = None

    def maintain(self) -> None:
        """Leave one row of each key: two builders at once may both have added it."""
        table = self._read()
        if table is not None and table.num_rows and set(KEY_COLUMNS) <= set(table.column_names):
            last = positions(table)
            if len(last) < table.num_rows:
                with self._alone():
                    now = self._read()
                    assert now is not None
                    self._write(now.take(pa.array(sorted(positions(now).values()), pa.int64())))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the file against other writers, and read it anew: they may have written since."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(self._path.with_name(f".{self._path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._held = None
            yield
        finally:
            os.close(lock)

    def _write(self, table: pa.Table) -> None:
        part = self._path.with_suffix(f".{os.getpid()}.part")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with pa.OSFile(str(part), "wb") as file:
                _write_to(file, table)
            part.replace(self._path)
        finally:
            part.unlink(missing_ok=True)
        self._held = table


class RemoteArrowFile(ReadOnlyRows, ArrowFile):
    """One Arrow IPC file on a remote store: one request, the larger ones one more for each 16 MiB."""

    def __init__(self, source: RangeSource) -> None:
        """Name the file; nothing is read yet."""
        super().__init__(Path(source.name))
        self._source = source

    def _read(self) -> pa.Table | None:
        if self._held is None:
            try:
                step = REMOTE_READ_BYTES
                data = [self._source.read_head(step)]
                size = self._source.signature.size
                data += [self._source.read(at, min(at + step, size)) for at in range(step, size, step)]
                self._held = _table_of(data[0] if len(data) == 1 else b"".join(data))
                self._source.close()
            except SourceNotFoundError:
                return None
            except (pa.ArrowException, ValueError) as error:
                text = f"{self._source.name}: no Arrow IPC file: {error}"
                raise IndexTableError(text, uri=self._source.name) from error
        return self._held

    def why(self) -> str:
        """Return what to do instead: stores have no atomic append."""
        return f"{self._source.name} is a remote .arrow file; write a local one and upload it, or use a Lance data set"


class MemoryRows(ArrowFile):
    """Rows that lie nowhere but in memory; a pickle carries them, compressed."""

    def __init__(self, rows: pa.Table) -> None:
        """Take the rows."""
        super().__init__(Path("memory"))
        self._held = rows

    def _write(self, table: pa.Table) -> None:
        self._held = table

    def refresh(self) -> None:
        """Nobody else writes here."""

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Likewise."""
        yield

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the rows."""
        out = pa.BufferOutputStream()
        _write_to(out, self._held)
        return (_from_bytes, (out.getvalue().to_pybytes(),))


def _from_bytes(data: bytes) -> MemoryRows:
    return MemoryRows(_table_of(data))


class LayeredRows(ReadOnlyRows):
    """A table's rows and more behind them, in memory; read only."""

    def __init__(self, below: Rows, more: MemoryRows) -> None:
        """Take both, of one schema."""
        self._below, self._more = below, more
        self._count: int | None = None

    @property
    def forks_badly(self) -> bool:
        """Whether the table's rows do."""
        return self._below.forks_badly

    def schema(self) -> pa.Schema | None:
        """Return the schema of both."""
        return self._more.schema()

    def scalars(self, columns: list[str]) -> pa.Table:
        """Return these columns, the table's rows first."""
        have = self._below.schema()
        assert have is not None
        below = self._below.scalars([name for name in columns if name in have.names])
        for name in columns:
            if name not in below.column_names:
                kind = SCHEMA.field(name).type
                below = below.append_column(
                    name,
                    pa.nulls(below.num_rows, kind)
                    if name not in KEY_COLUMNS
                    else pa.array([""] * below.num_rows),
                )
        below = below.select(columns)
        self._count = below.num_rows
        return pa.concat_tables([_nullable(below), _nullable(self._more.scalars(columns))])

    def take(self, positions: list[int]) -> pa.Table:
        """Return these rows, in this order."""
        if self._count is None:
            self.scalars(["uri"])
        assert self._count is not None
        count, schema = self._count, self._more.schema()
        assert schema is not None
        below = [place for place in positions if place < count]
        more = [place - count for place in positions if place >= count]
        parts = [_nullable(rows_of_columns(self._below.take(below)))] if below else []
        parts += [_nullable(self._more.take(more))] if more else []
        rows = pa.concat_tables(parts)
        # Where each row now stands, in the order asked for.
        order = np.argsort(np.argsort(np.array(positions) >= count, kind="stable"), kind="stable")
        return rows.take(pa.array(order, pa.int64()))

    def why(self) -> str:
        """Return what to do instead."""
        return "some of this table's are in memory only; write to the table itself"


def _nullable(table: pa.Table) -> pa.Table:
    """Return a table whose columns may hold nulls, without field metadata: what differs between two kinds of rows."""
    schema = pa.schema([pa.field(field.name, field.type) for field in table.schema])
    return pa.Table.from_arrays(table.columns, schema=schema)


def _write_to(file: Any, table: pa.Table | None) -> None:
    assert table is not None
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(file, table.schema, options=options) as out:
        out.write_table(table)


def _table_of(data: Buffer) -> pa.Table:
    with pa.ipc.open_file(pa.BufferReader(data)) as reader:
        table = reader.read_all()
    # Unchecked, damaged offsets end the process where a value is looked at.
    table.validate(full=True)
    return table
