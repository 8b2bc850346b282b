"""One video's index as one row of plain Arrow types, and back.

Pure. The rules, all of which ``docs/format/index-table.md`` tells a stranger: a list column with one
value stands for that value at every sample (or GOP); offsets are stored as gaps after the sample
before, decode times as durations, presentation times as composition offsets; the checksum covers every
other column.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from fluxon_gop.errors import FluxonGopError, IndexTableError
from fluxon_gop.model import IDENTITY_MATRIX, MAX_SAMPLES, Colour, SampleEntry, Signature, VideoIndex
from fluxon_gop.ranges import ByteRange, Int64Array

Key = str | tuple[str, str]
"""A uri, or (export_name, relpath)."""

UNSOUND = (ValueError, KeyError, TypeError, IndexError, OverflowError, MemoryError)
"""What decoding a damaged row raises."""
INDEX_VERSION = "1"
VERSION_KEY = b"fluxon_gop:index_version"
SWM_VERSION_KEY = b"swm:video_index_version"
SWM_COLUMNS = ("moov_range", "gop_frame_idx", "gop_byte_offset")
KEY_COLUMNS = ("uri", "export_name", "relpath")
SCALAR_COLUMNS = (*KEY_COLUMNS, "size", "mtime_ns", "etag", "frame_count")

_ENTRY = pa.struct(
    [
        pa.field("fourcc", pa.string()),
        pa.field("codec", pa.string()),
        pa.field("config", pa.binary()),
        pa.field("width", pa.int32()),
        pa.field("height", pa.int32()),
        pa.field("colour", pa.list_(pa.int32())),
    ]
)
_SWM = {SWM_VERSION_KEY: b"1"}


def _per_sample(kind: pa.DataType) -> pa.DataType:
    """Return a list type whose values Lance compresses with zstd (a hint; other readers ignore it)."""
    return pa.list_(pa.field("item", kind, metadata={b"lance-encoding:compression": b"zstd"}))


SCHEMA = pa.schema(
    [
        pa.field("uri", pa.string(), nullable=False),
        pa.field("export_name", pa.string(), nullable=False),
        pa.field("relpath", pa.string(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
        pa.field("mtime_ns", pa.int64()),
        pa.field("etag", pa.string()),
        pa.field("frame_count", pa.int64()),
        pa.field("moov_range", pa.list_(pa.int64()), metadata=_SWM),
        pa.field("gop_frame_idx", _per_sample(pa.int32()), metadata=_SWM),
        pa.field("gop_byte_offset", _per_sample(pa.int64()), metadata=_SWM),
        pa.field("gop_verdict", pa.list_(pa.uint8())),
        pa.field("stream_index", pa.int32()),
        pa.field("timescale", pa.int64()),
        pa.field("width", pa.int32()),
        pa.field("height", pa.int32()),
        pa.field("matrix", pa.list_(pa.int32())),
        pa.field("entries", pa.list_(_ENTRY)),
        pa.field("sample_count", pa.int64()),
        pa.field("first_offset", pa.int64()),
        pa.field("first_dts", pa.int64()),
        pa.field("sample_size", _per_sample(pa.int32())),
        pa.field("sample_gap", _per_sample(pa.int64())),
        pa.field("sample_duration", _per_sample(pa.int32())),
        pa.field("composition_offset", _per_sample(pa.int32())),
        pa.field("sample_entry", pa.list_(pa.uint8())),
        pa.field("hidden_samples", pa.list_(pa.int32())),
        pa.field("stream_range", pa.list_(pa.int32())),
        pa.field("container_reason", pa.string()),
        pa.field("row_checksum", pa.string(), nullable=False),
    ],
    metadata={VERSION_KEY: INDEX_VERSION.encode(), **_SWM},
)


NUMBER_LISTS = frozenset(
    field.name
    for field in SCHEMA
    if pa.types.is_list(field.type) and pa.types.is_integer(field.type.value_type)
)
"""The columns that are lists of numbers."""


def key_columns(key: Key) -> tuple[str, str, str]:
    """Return (uri, export_name, relpath) with "" for what the key does not use."""
    return (key, "", "") if isinstance(key, str) else ("", *key)


def encode(rows: Iterable[tuple[Key, VideoIndex]]) -> pa.Table:
    """Return a table of these rows, checksums included."""
    return table_of(row_dicts(rows))


def row_dicts(rows: Iterable[tuple[Key, VideoIndex]]) -> list[dict[str, Any]]:
    """Return these rows as mappings of column to value, lists of numbers as arrays, checksums included."""
    dicts = []
    for key, index in rows:
        try:
            "".join(key_columns(key)).encode()
        except UnicodeEncodeError:
            text = f"{key!r} is no UTF-8, and cannot be a key: rename the file"
            raise IndexTableError(text) from None
        row = _encode_row(key, index)
        row["row_checksum"] = checksum(row)
        dicts.append(row)
    return dicts


def table_of(dicts: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return a table of such mappings."""
    columns = [pa.array([row[f.name] for row in dicts], f.type) for f in SCHEMA]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def _encode_row(key: Key, index: VideoIndex) -> dict[str, Any]:
    uri, export_name, relpath = key_columns(key)
    offset, size = index.sample_offset, index.sample_size
    gap = offset[1:] - offset[:-1] - size[:-1]
    duration = np.append(np.diff(index.sample_dts), index.last_duration)[: len(offset)]
    known = index.container_reason is None
    return {
        "uri": uri,
        "export_name": export_name,
        "relpath": relpath,
        "size": index.signature.size,
        "mtime_ns": index.signature.mtime_ns,
        "etag": index.signature.etag,
        "frame_count": index.num_frames if known else None,
        "moov_range": np.array([index.moov_range.start, index.moov_range.size], np.int64),
        "gop_frame_idx": index.key_samples.astype(np.int32),
        "gop_byte_offset": offset[index.key_samples],
        "gop_verdict": _squeeze(index.verdicts),
        "stream_index": index.stream_index,
        "timescale": index.timescale,
        "width": index.width,
        "height": index.height,
        "matrix": None if index.matrix == IDENTITY_MATRIX else np.array(index.matrix, np.int32),
        "entries": [
            {**entry._asdict(), "colour": None if entry.colour is None else list(entry.colour)}
            for entry in index.entries
        ],
        "sample_count": index.num_samples,
        "first_offset": int(offset[0]) if len(offset) else 0,
        "first_dts": int(index.sample_dts[0]) if len(offset) else 0,
        "sample_size": _squeeze(_int32(size)),
        "sample_gap": _squeeze(gap),
        "sample_duration": _squeeze(_int32(duration)),
        "composition_offset": _squeeze(_int32(index.sample_pts - index.sample_dts)),
        "sample_entry": index.sample_entry,
        "hidden_samples": index.hidden.astype(np.int32),
        "stream_range": np.array(index.stream, np.int32),
        "container_reason": index.container_reason,
    }


def _int32(values: Int64Array) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the values in 32 bits; what does not fit is clipped (of such an index nothing is cut)."""
    return np.clip(values, -(1 << 31), (1 << 31) - 1).astype(np.int32)


def _squeeze(values: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
    """Return one value where all are alike, else all."""
    return values[:1] if len(values) and bool((values == values[0]).all()) else values


def _spread(values: Any, count: int, dtype: type[np.generic] = np.int64) -> Int64Array:
    """Undo :func:`_squeeze`; raises ValueError where the length is neither 1 nor ``count``."""
    if len(values) == count:
        return np.asarray(values, dtype)
    if len(values) != 1 and count:
        text = f"{len(values)} values for {count} samples"
        raise ValueError(text)
    return np.full(count, values[0], dtype) if count else np.zeros(0, dtype)


def decode(row: Mapping[str, Any]) -> VideoIndex:
    """Return the index of a row (a mapping of column to value, lists as arrays).

    Raises:
        ValueError: the row's checksum is not its content's, or its columns contradict each other.
    """
    if checksum(row) != row["row_checksum"]:
        text = "the row's checksum does not fit its content"
        raise ValueError(text)
    return index_of(row)


def is_sound(row: Mapping[str, Any]) -> bool:
    """Return whether :func:`decode` gives an index of a row."""
    try:
        decode(row)
    except UNSOUND:
        return False
    return True


def index_of(row: Mapping[str, Any]) -> VideoIndex:
    """Return the index of a row whose content is known to be sound; raises as :func:`decode`."""
    count = row["sample_count"]
    first, stop = row["stream_range"]
    if not 0 <= first <= stop <= count <= MAX_SAMPLES:
        text = f"samples {first} to {stop} of {count}"
        raise ValueError(text)
    size = _spread(row["sample_size"], count)
    gap = _spread(row["sample_gap"], max(count - 1, 0))
    offset = np.empty(count, np.int64)
    if count:
        offset[0] = row["first_offset"]
        np.cumsum(size[:-1] + gap, out=offset[1:])
        offset[1:] += row["first_offset"]
    duration = _spread(row["sample_duration"], count)
    dts = np.cumsum(duration) - duration + row["first_dts"]
    keys = np.asarray(row["gop_frame_idx"], np.int64)
    moov = row["moov_range"]
    try:
        return VideoIndex(
            signature=Signature(row["size"], row["etag"], row["mtime_ns"]),
            moov_range=ByteRange(int(moov[0]), int(moov[0]) + int(moov[1])),
            stream_index=row["stream_index"],
            timescale=row["timescale"],
            entries=tuple(_entry(entry) for entry in row["entries"]),
            width=row["width"],
            height=row["height"],
            matrix=IDENTITY_MATRIX if row["matrix"] is None else tuple(int(m) for m in row["matrix"]),
            sample_offset=offset,
            sample_size=size,
            sample_pts=dts + _spread(row["composition_offset"], count),
            sample_dts=dts,
            sample_entry=np.array(row["sample_entry"], np.uint8),
            hidden=np.asarray(row["hidden_samples"], np.int64),
            stream=ByteRange(int(first), int(stop)),
            key_samples=keys,
            verdicts=_spread(row["gop_verdict"], len(keys), np.uint8).astype(np.uint8),
            last_duration=int(duration[-1]) if count else 0,
            container_reason=row["container_reason"],
        )
    except FluxonGopError as error:
        raise ValueError(str(error)) from error


def _entry(entry: Mapping[str, Any]) -> SampleEntry:
    colour = entry["colour"]
    return SampleEntry(
        entry["fourcc"],
        entry["codec"],
        entry["config"],
        entry["width"],
        entry["height"],
        None if colour is None else Colour(*(int(c) for c in colour)),
    )


def checksum(row: Mapping[str, Any]) -> str:
    """Return the row's checksum: BLAKE2b-64, in hex, over every other column in schema order.

    Each value is its column's name, NUL, and: nothing for null; 8 bytes little-endian for a number; its
    bytes (text as UTF-8) behind their count for text and binary; a list as its count and its values, a
    struct as its fields in order, with their names.
    """
    digest = hashlib.blake2b(digest_size=8)
    for column in SCHEMA:
        if column.name != "row_checksum":
            digest.update(column.name.encode() + b"\0")
            _feed(digest, row[column.name])
    return digest.hexdigest()


def _feed(digest: hashlib.blake2b, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, Mapping):
        for name, item in value.items():
            digest.update(name.encode() + b"\0")
            _feed(digest, item)
    elif isinstance(value, str | bytes):
        raw = value.encode() if isinstance(value, str) else value
        digest.update(len(raw).to_bytes(8, "little") + raw)
    elif isinstance(value, np.ndarray):
        digest.update(len(value).to_bytes(8, "little"))
        digest.update(value.astype("<i8").tobytes())
    elif isinstance(value, list):
        digest.update(len(value).to_bytes(8, "little"))
        for item in value:
            _feed(digest, item)
    else:
        digest.update(int(value).to_bytes(8, "little", signed=True))


def signature_in(row: Mapping[str, Any]) -> Signature | None:
    """Return the version that a row's columns tell; None where they tell none."""
    return None if row.get("size") is None else Signature(row["size"], row["etag"], row["mtime_ns"])


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """Return the rows of a table of this schema, or of some of its columns, number lists as arrays."""
    rows: list[dict[str, Any]] = [{} for _ in range(table.num_rows)]
    for column in SCHEMA:
        if column.name not in table.column_names:
            continue
        # Not a Python number for each value.
        values = table.column(column.name).combine_chunks()
        for i, row in enumerate(rows):
            value = values[i]
            if not value.is_valid:
                row[column.name] = None
            elif column.name in NUMBER_LISTS:
                row[column.name] = value.values.to_numpy(zero_copy_only=False)
            else:
                row[column.name] = value.as_py()
    return rows


def key_of(row: Mapping[str, Any]) -> Key:
    """Return the key of a row."""
    return row["uri"] or (row["export_name"], row["relpath"])


def keys_of(table: pa.Table) -> list[Key]:
    """Return the key of each row."""
    columns = [
        table.column(name).to_pylist() if name in table.column_names else [""] * table.num_rows
        for name in KEY_COLUMNS
    ]
    return [uri or (export, path) for uri, export, path in zip(*columns, strict=True)]


def positions(table: pa.Table) -> dict[Key, int]:
    """Return the row number of each key; the last one where a key stands twice."""
    return {key: position for position, key in enumerate(keys_of(table))}
