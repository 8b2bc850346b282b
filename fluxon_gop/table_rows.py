"""What a look-up finds: an index, a hint, a row that cannot be trusted, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from fluxon_gop import index_rows
from fluxon_gop.index_rows import Key
from fluxon_gop.model import VideoIndex
from fluxon_gop.packed_row import LONG_LISTS
from fluxon_gop.ranges import ByteRange
from fluxon_gop.table_keys import TableKeys

MAX_HINT_BYTES = 512 * 1024 * 1024


class Damaged:
    """Stands for a row that is there and cannot be trusted."""


class Hint:
    """Stands for a row with the seed's three columns only: where the movie box is said to lie."""

    def __init__(self, moov_range: ByteRange) -> None:
        """Keep the claimed range."""
        self.moov_range = moov_range


Row = VideoIndex | Hint | Damaged | None
"""What a look-up finds: an index, a hint, a damaged row, or nothing."""


def is_full(schema: pa.Schema) -> bool:
    """Return whether a table has whole rows, not only the container's claims."""
    return "row_checksum" in schema.names


def read_rows(finder: TableKeys, keys: set[Key]) -> Iterator[tuple[Key, Row]]:
    """Yield each row that is there: from what is packed of it, else from its columns."""
    unpacked, others = finder.unpacked(list(keys))
    whole = {key: row for key, (row, is_whole) in unpacked.items() if is_whole}
    for key, row in whole.items():
        yield key, _decoded(row, index_rows.index_of)
    # Of some only the numbers of each sample are missing.
    dear = [key for key in unpacked if key not in whole]
    if dear:
        order, table = finder.rows(dear, LONG_LISTS)
        for key, numbers in zip(order, index_rows.rows_of(table), strict=True):
            yield key, _decoded({**unpacked[key].row, **numbers})
    if others:
        order, table = finder.rows(others)
        rows = index_rows.rows_of(table) if is_full(table.schema) else _hints(table)
        for key, row in zip(order, rows, strict=True):
            yield key, _decoded(row)


def _decoded(
    row: dict[str, Any] | Hint | Damaged,
    decode: Callable[[Mapping[str, Any]], VideoIndex] = index_rows.decode,
) -> Row:
    if isinstance(row, Hint | Damaged):
        return row
    if row["row_checksum"] is None:
        # A row of a video table that somebody else has written.
        claimed = None if row["moov_range"] is None else row["moov_range"].tolist()
        return _hint_of(claimed) if claimed is not None and _is_hint(claimed) else None
    try:
        return decode(row)
    except index_rows.UNSOUND:
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
