"""Index tables from one place to another: several into one, one into a Parquet file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from fluxon_gop.errors import IndexTableError
from fluxon_gop.index_rows import SCHEMA, Key, is_sound, keys_of, rows_of
from fluxon_gop.index_table import IndexTable

ROWS = 1024


def merge_tables(
    sources: Sequence[str | os.PathLike[str]],
    to: IndexTable,
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> tuple[int, int]:
    """Add the rows of tables to another one; return how many were added, and how many replaced one of the same key.

    A row replaces one of the same key unless it is the same; of several tables the last one's counts. Damaged rows are left
    out, and replaced. 1,024 rows a commit.

    Raises:
        IndexTableError: a table is missing, or of another format.
    """
    added = replaced = 0
    for source in sources:
        with IndexTable.open(source, storage_options=storage_options) as table:
            for part in encoded_rows(table):
                # Of the columns, not of what may be packed of them.
                sound = [is_sound(row) for row in rows_of(part)]
                rows = part.filter(pa.array(sound, pa.bool_()))
                keys = keys_of(rows)
                there = to.known(keys, ["row_checksum"])
                unsound = to.unsound(keys)
                sums = rows.column("row_checksum").to_pylist()
                before = [there.get(key) for key in keys]
                new = pa.array([row is None for row in before], pa.bool_())
                changed = pa.array(
                    [
                        row is not None and (row["row_checksum"] != mine or key in unsound)
                        for key, row, mine in zip(keys, before, sums, strict=True)
                    ],
                    pa.bool_(),
                )
                to.write(rows.filter(new), rows.filter(changed))
                added += sum(new.to_pylist())
                replaced += sum(changed.to_pylist())
    to.maintain()
    return added, replaced


def export_parquet(table: IndexTable, path: str | os.PathLike[str]) -> int:
    """Write a table's rows, all columns, into one Parquet file (zstd); return how many. The file is there whole or not.

    Raises:
        IndexTableError: the table holds the container's claims only.
    """
    part = Path(f"{os.fspath(path)}.{os.getpid()}.part")
    count = 0
    try:
        with pa.parquet.ParquetWriter(part, SCHEMA, compression="zstd") as file:
            for rows in encoded_rows(table):
                file.write_table(rows.cast(SCHEMA))
                count += rows.num_rows
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return count


def encoded_rows(table: IndexTable) -> Iterator[pa.Table]:
    """Yield a table's rows as they are stored, some at a time."""
    keys: list[Key] = table.keys()
    for at in range(0, len(keys), ROWS):
        rows = table.encoded(keys[at : at + ROWS])
        if "row_checksum" not in rows.column_names:
            text = f"{table.uri}: the table has the container's claims only: build it anew"
            raise IndexTableError(text, uri=table.uri)
        yield rows.select(SCHEMA.names)
