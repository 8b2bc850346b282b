"""A video table's columns of index: the seed's three, and one struct of the rest, beside the blob they are of.

Pure. The struct holds the columns of an index table's row but for its key, so that a row is the same in both places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from fluxon_gop.index_rows import (
    INDEX_VERSION,
    KEY_COLUMNS,
    SCHEMA,
    SWM_COLUMNS,
    VERSION_KEY,
    encode,
)
from fluxon_gop.model import Signature, VideoIndex

STRUCT_COLUMN = "fluxon_gop_index"
_REST = [f.with_nullable(True) for f in SCHEMA if f.name not in {*SWM_COLUMNS, *KEY_COLUMNS}]

FIELDS = pa.schema(
    [
        *(SCHEMA.field(name) for name in SWM_COLUMNS),
        pa.field(STRUCT_COLUMN, pa.struct(_REST), metadata={VERSION_KEY: INDEX_VERSION.encode()}),
    ]
)
"""The four columns that a video table gains."""
NAMES = tuple(FIELDS.names)


def columns_of(indexes: Sequence[VideoIndex | None]) -> pa.Table:
    """Return the four columns of these blobs, null where there is no index. The version is the row's: only the size stays."""
    rows = encode(
        ("", replace(index, signature=Signature(index.signature.size))) for index in indexes if index
    )
    there = iter(range(rows.num_rows))
    places = pa.array([None if index is None else next(there) for index in indexes], pa.int64())
    rest = pa.StructArray.from_arrays(
        [rows.column(field.name).combine_chunks() for field in _REST], fields=_REST
    )
    three = [rows.column(name).combine_chunks() for name in SWM_COLUMNS]
    return pa.Table.from_arrays([column.take(places) for column in (*three, rest)], schema=FIELDS)


def rows_of_columns(table: pa.Table) -> pa.Table:
    """Return index rows of a table that has some of the four columns, null where a row has none; whole rows as they are."""
    count = table.num_rows
    if "row_checksum" in table.column_names:
        return table.select(SCHEMA.names)
    columns: dict[str, Any] = {name: pa.array([""] * count, pa.string()) for name in KEY_COLUMNS}
    for name in SWM_COLUMNS:
        if name in table.column_names:
            columns[name] = table.column(name).cast(SCHEMA.field(name).type)
    if STRUCT_COLUMN in table.column_names:
        struct = table.column(STRUCT_COLUMN).combine_chunks()
        columns |= dict(zip((field.name for field in struct.type), struct.flatten(), strict=True))
    nullable = pa.schema([field.with_nullable(True) for field in SCHEMA])
    return pa.Table.from_arrays(
        [columns.get(field.name, pa.nulls(count, field.type)) for field in SCHEMA], schema=nullable
    )
