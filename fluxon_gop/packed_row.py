"""A row once more in one value, and its key as one number: what a look-up reads in the place of thirty columns.

Pure. The columns stay what a row is; ``docs/format/index-table.md`` tells a stranger how to write, or to do without, these two.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import index
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fluxon_gop.index_rows import (
    NUMBER_LISTS,
    SCHEMA,
    Key,
    is_sound,
    key_columns,
    key_of,
    row_dicts,
    rows_of,
    table_of,
)
from fluxon_gop.model import VideoIndex

KEY_HASH, PACKED = "key_hash", "packed_row"
FIELDS = (pa.field(KEY_HASH, pa.int64(), nullable=False), pa.field(PACKED, pa.binary()))
PACKED_SCHEMA = pa.schema([*SCHEMA, *FIELDS], metadata=SCHEMA.metadata)
"""A row, and what is packed of it."""
LONG_LISTS = ("sample_size", "sample_gap", "sample_duration", "composition_offset")
"""The lists with a number a sample."""
LONG_BYTES = 1.75
"""The long lists are packed too where they take at most so many bytes a sample: with their columns less than 4, as measured."""
SHORT_BYTES = 512
"""And so many bytes more, whatever the number of samples."""
FEW = 8
"""Lists of so many numbers stand among the values; the long lists never do."""

_LENGTHS = struct.Struct("<III")
_DIGEST_BYTES = 8
_LZ4 = pa.Codec("lz4_raw")
_NUMBERS = {width: np.dtype(f"<i{width}") for width in (1, 2, 4, 8)}
_ENTRY_FIELDS = tuple(field.name for field in SCHEMA.field("entries").type.value_type)
_NAMES = tuple(SCHEMA.names)
_SCALARS = {
    field.name: str if pa.types.is_string(field.type) else int
    for field in SCHEMA
    if not pa.types.is_list(field.type)
}
_NEEDED = tuple(
    name
    for name in _NAMES
    if name not in {*LONG_LISTS, "etag", "mtime_ns", "frame_count", "matrix", "container_reason"}
)


class Unpacked(NamedTuple):
    """A row as :func:`fluxon_gop.index_rows.rows_of` gives it, but that short lists are lists."""

    row: dict[str, Any]
    is_whole: bool
    """Whether the long lists are in it; they are None else."""


def key_hash(key: Key) -> int:
    """Return a key's number: the first 8 bytes of BLAKE2b-64 over its three columns with a NUL between, signed."""
    # A key that is no UTF-8 has a number too, and no row.
    text = "\0".join(key_columns(key)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little", signed=True)


def encoded(rows: Iterable[tuple[Key, VideoIndex]], columns: Collection[str]) -> pa.Table:
    """Return a table of these rows, checksums included, with those of the two columns that are named."""
    dicts = row_dicts(rows)
    table = table_of(dicts)
    return _with_columns(table, dicts, map(pack, dicts)).select(_names(columns)) if columns else table


def fitted(rows: pa.Table, columns: Collection[str]) -> pa.Table:
    """Return rows with those of the two columns that are named, made where they are missing. A damaged row is not packed."""
    names = _names(columns)
    if not set(names) <= set(rows.column_names):
        rows = rows.select(SCHEMA.names)
        dicts = rows_of(rows)
        rows = _with_columns(rows, dicts, (pack(row) if is_sound(row) else None for row in dicts))
    return rows.select(names)


def _names(columns: Collection[str]) -> list[str]:
    return [*SCHEMA.names, *(field.name for field in FIELDS if field.name in columns)]


def _with_columns(
    rows: pa.Table, dicts: Sequence[Mapping[str, Any]], packed: Iterable[bytes | None]
) -> pa.Table:
    hashes = [key_hash(key_of(row)) for row in dicts]
    columns = [pa.array(hashes, pa.int64()), pa.array(list(packed), pa.binary())]
    return pa.Table.from_arrays([*rows.columns, *columns], schema=PACKED_SCHEMA)


def pack(row: Mapping[str, Any]) -> bytes:
    """Return a row in one value.

    8 bytes of BLAKE2b-64 over the rest; three lengths (uint32, little-endian): of the head and of the long lists before they
    are compressed, and of the head; the head; the long lists, each an LZ4 block. The head is a line of JSON, the row's values
    in schema order, and behind it what it names by its size. Of numbers all first bytes come first, then all second ones:
    they pack better.
    """
    values: list[Any] = []
    numbers: list[bytes] = []
    long_numbers: list[bytes] = []
    for name in _NAMES:
        value = row[name]
        if value is not None and name in NUMBER_LISTS:
            if name in LONG_LISTS or len(value) > FEW:
                narrow = _narrow(np.asarray(value))
                (long_numbers if name in LONG_LISTS else numbers).append(_planes(narrow))
                value = f"{narrow.itemsize}x{len(narrow)}"
            else:
                value = np.asarray(value).tolist()
        elif name == "entries":
            numbers += [entry["config"] for entry in value]
            value = [[len(v) if isinstance(v, bytes) else v for v in entry.values()] for entry in value]
        values.append(value)
    raw = b"".join(long_numbers)
    lists = _LZ4.compress(raw, asbytes=True)
    if len(lists) > LONG_BYTES * row["sample_count"] + SHORT_BYTES:
        raw = lists = b""
        for name in LONG_LISTS:
            values[_NAMES.index(name)] = None
    line = json.dumps(values, separators=(",", ":"), default=index).encode()
    plain = b"".join([line, b"\n", *numbers])
    head = _LZ4.compress(plain, asbytes=True)
    body = b"".join([_LENGTHS.pack(len(plain), len(raw), len(head)), head, lists])
    return _digest(body) + body


def unpack(data: bytes) -> Unpacked:
    """Return the row of a value.

    Raises:
        ValueError: it is damaged.
    """
    body = memoryview(data)[_DIGEST_BYTES:]
    if len(body) < _LENGTHS.size or _digest(body) != data[:_DIGEST_BYTES]:
        text = "the packed row's digest does not fit its content"
        raise ValueError(text)
    plain, raw, stop = _LENGTHS.unpack_from(body)
    stop += _LENGTHS.size
    try:
        lists = _LZ4.decompress(body[stop:], raw, asbytes=True) if raw else b""
        return _unpacked(_LZ4.decompress(body[_LENGTHS.size : stop], plain, asbytes=True), lists)
    except (TypeError, KeyError, IndexError, OverflowError, OSError, MemoryError, RecursionError) as error:
        text = f"the packed row is none: {error}"
        raise ValueError(text) from error


def _unpacked(head: bytes, lists: bytes) -> Unpacked:
    end = head.index(b"\n") + 1
    row: dict[str, Any] = dict(zip(_NAMES, json.loads(head[:end]), strict=True))
    short, long = _Tail(head, end), _Tail(lists, 0)
    for name, value in row.items():
        kind = _SCALARS.get(name)
        if value is None or type(value) is kind:
            continue
        if kind is not None:
            text = f"{name} is {type(value).__name__}"
            raise ValueError(text)
        if name == "entries":
            row[name] = [_entry(entry, short) for entry in value]
        elif isinstance(value, str):
            width, count = value.split("x")
            row[name] = (long if name in LONG_LISTS else short).numbers(int(width), int(count))
        elif not {type(number) for number in value} <= {int}:
            text = f"{name} holds other things than numbers"
            raise ValueError(text)
    if any(row[name] is None for name in _NEEDED):
        text = "a value is missing"
        raise ValueError(text)
    return Unpacked(row, row["sample_size"] is not None)


def _entry(values: list[Any], tail: _Tail) -> dict[str, Any]:
    entry = dict(zip(_ENTRY_FIELDS, values, strict=True))
    if [type(value) for value in values[:-1]] != [str, str, int, int, int]:
        text = "an entry holds other things than an entry does"
        raise ValueError(text)
    entry["config"] = tail.raw(entry["config"])
    return entry


class _Tail:
    """Numbers and bytes one after another."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at

    def numbers(self, width: int, count: int) -> np.ndarray[Any, np.dtype[Any]]:
        dtype = _NUMBERS[width]
        raw = self.raw(width * count)
        if width == 1 or not count:
            return np.frombuffer(raw, dtype)
        planes = np.frombuffer(raw, np.uint8).reshape(width, count)
        return np.ascontiguousarray(planes.T).view(dtype)[:, 0]

    def raw(self, count: int) -> bytes:
        at, self._at = self._at, self._at + count
        if not at <= self._at <= len(self._data):
            text = f"{count} bytes at {at} of {len(self._data)}"
            raise ValueError(text)
        return self._data[at : self._at]


def _digest(body: memoryview | bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


def _narrow(values: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the values in the fewest bytes each, 1, 2, 4 or 8, signed."""
    if not len(values):
        return values.astype(np.int8)
    # Most lists are a few numbers.
    few = values.tolist() if len(values) < 16 else (int(values.min()), int(values.max()))
    low, high = min(few), max(few)
    width = next(w for w in (1, 2, 4, 8) if -(1 << 8 * w - 1) <= low and high < 1 << 8 * w - 1)
    return values.astype(_NUMBERS[width])


def _planes(values: np.ndarray[Any, np.dtype[Any]]) -> bytes:
    """Return the first bytes of all values, then the second ones."""
    if values.itemsize == 1 or not len(values):
        return values.tobytes()
    return values.view(np.uint8).reshape(len(values), values.itemsize).T.tobytes()
