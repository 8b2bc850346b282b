"""A table as one Arrow IPC file: read whole, replaced whole; on a remote store, read only."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from fluxon_gop.errors import IndexTableError, SourceNotFoundError
from fluxon_gop.index_rows import positions
from fluxon_gop.sources.range_source import Buffer, RangeSource

REMOTE_READ_BYTES = 16 * 1024 * 1024
"""Of one read of a remote file: an index of some ten thousand videos."""


class ArrowFile:
    """One Arrow IPC file, zstd inside, replaced whole by each write."""

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
        """Add rows; a reader sees the file before or after, never between."""
        old = self._read()
        self._write(table if old is None else pa.concat_tables([old, table]))

    def replace(self, table: pa.Table) -> None:
        """Put rows in the place of those with the same keys."""
        old = self._read()
        if old is None:
            self._write(table)
            return
        kept = np.ones(old.num_rows, dtype=bool)
        places = positions(old)
        kept[[places[key] for key in positions(table) if key in places]] = False
        self._write(pa.concat_tables([old.filter(pa.array(kept)), table]))

    def _write(self, table: pa.Table) -> None:
        part = self._path.with_suffix(f".{os.getpid()}.part")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        try:
            with (
                pa.OSFile(str(part), "wb") as file,
                pa.ipc.new_file(file, table.schema, options=options) as out,
            ):
                out.write_table(table)
            part.replace(self._path)
        finally:
            part.unlink(missing_ok=True)
        self._held = table


class RemoteArrowFile(ArrowFile):
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

    def append(self, table: pa.Table) -> None:
        """Refuse: stores have no atomic append."""
        self._refuse(table)

    def replace(self, table: pa.Table) -> None:
        """Refuse likewise."""
        self._refuse(table)

    def _refuse(self, table: pa.Table) -> None:
        text = (
            f"{self._source.name}: {table.num_rows} rows cannot be written to a remote .arrow file; write a local "
            "one and upload it, or use a Lance data set"
        )
        raise IndexTableError(text, uri=self._source.name)


def _table_of(data: Buffer) -> pa.Table:
    with pa.ipc.open_file(pa.BufferReader(data)) as reader:
        table = reader.read_all()
    # Unchecked, damaged offsets end the process where a value is looked at.
    table.validate(full=True)
    return table
