"""Writing Lance tables of videos: new rows with their index, and the index of rows that have none."""

from __future__ import annotations

import logging
import operator
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fluxon_gop.encode import Recipe, write_video
from fluxon_gop.errors import (
    ClosedError,
    FluxonGopError,
    IndexTableError,
    InvalidRequestError,
    SourceNotFoundError,
)
from fluxon_gop.index_build import BATCH, build_index, indexes_of
from fluxon_gop.index_rows import SWM_COLUMNS, SWM_VERSION_KEY
from fluxon_gop.lance_rows import create_dataset, open_dataset, typed
from fluxon_gop.lance_video import BYTES, EPISODE, VIEW, check_layout, is_claims
from fluxon_gop.model import VideoIndex
from fluxon_gop.sources import LanceBlobSource, MemorySource
from fluxon_gop.sources.lance_blob import forget_blobs, lance_options
from fluxon_gop.stats import ReadStats
from fluxon_gop.video_columns import FIELDS, NAMES, STRUCT_COLUMN, columns_of

if TYPE_CHECKING:
    from lance import LanceDataset

_log = logging.getLogger(__name__)

ROWS_OF_COMMIT = 4096
"""Rows whose columns ``add_index_columns`` holds in memory, and commits at once."""
BYTES_OF_COMMIT = 64 * 1024 * 1024
Progress = Callable[[int], object]


class LanceVideoWriter:
    """Appends videos to a video table, each with its index: from the bytes at hand, without further IO.

    A table that is not there is made with all columns; one that has none of the index columns, or only the seed's three,
    keeps its schema. Rows are committed 64 MiB of video at a time, the last ones by ``close``; leaving a ``with`` block
    by an error commits no more.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        recipe: Recipe | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Open the table, where there is one.

        Args:
            uri: path or address of the Lance data set.
            recipe: how frames are encoded; None for H.264 at 25 frames a second. MP4 bytes are stored as they are.
            storage_options: for Lance.

        Raises:
            IndexTableError: there is a table, and it is no video table.
        """
        self._uri, self._recipe = os.fspath(uri), recipe or Recipe()
        self._options = lance_options(self._uri, storage_options)
        dataset = open_dataset(self._uri, self._options)
        self._schema = None if dataset is None else dataset.schema
        self._there: set[tuple[int, str]] = set()
        if dataset is not None:
            check_layout(dataset.schema, self._uri)
            check_columns(dataset.schema, self._uri)
            if "blob.v2" not in str(dataset.schema.field(BYTES).type):
                text = f"{self._uri}: its blobs are of an older format than this release writes (Lance blob v2, files 2.2)"
                raise IndexTableError(text, uri=self._uri)
            keys = dataset.to_table(columns=[EPISODE, VIEW])
            self._there = set(
                zip(keys.column(EPISODE).to_pylist(), keys.column(VIEW).to_pylist(), strict=True)
            )
        self._rows: list[tuple[int, str, bytes, VideoIndex | None]] = []
        self._held = 0
        self._closed = False
        self.without_index: list[tuple[int, str, FluxonGopError]] = []
        """Videos whose bytes have no index, and why; they are stored all the same."""

    def write(
        self,
        episode_idx: int,
        video_key: str,
        video: bytes | bytearray | memoryview | Iterable[npt.NDArray[np.uint8]],
    ) -> None:
        """Add one video: MP4 bytes, or frames uint8 (H, W, 3) RGB, which are encoded.

        Raises:
            InvalidRequestError: the table has this episode's view, or there is nothing to store.
        """
        if self._closed:
            text = f"{self._uri}: the writer is closed"
            raise ClosedError(text)
        if not isinstance(video_key, str) or not video_key:  # type: ignore[redundant-expr]
            text = f"video_key is {video_key!r}: want a name"
            raise InvalidRequestError(text)
        key = (operator.index(episode_idx), video_key)
        if not -(1 << 31) <= key[0] < 1 << 31:
            text = f"episode_idx is {episode_idx}: the column is one of 32 bits"
            raise InvalidRequestError(text)
        if key in self._there:
            text = f"{self._uri}: episode {episode_idx}, {video_key!r} is there already"
            raise InvalidRequestError(text)
        if isinstance(video, str | os.PathLike):
            text = f"video is a path, {os.fspath(video)!r}: give its bytes, Path(...).read_bytes()"
            raise TypeError(text)
        if isinstance(video, bytes | bytearray | memoryview):
            data = bytes(video)
        else:
            data = _encoded(video, self._recipe)
        if not data:
            text = f"episode {episode_idx}, {video_key!r}: no bytes, or no frames"
            raise InvalidRequestError(text)
        index = None
        try:
            index = build_index(MemorySource(data))
        except FluxonGopError as error:
            self.without_index.append((episode_idx, video_key, error))
            _log.warning("episode %d, %r is stored without an index: %s", episode_idx, video_key, error)
        self._there.add(key)
        self._rows.append((*key, data, index))
        self._held += len(data)
        if self._held >= BYTES_OF_COMMIT:
            self.commit()

    def commit(self) -> None:
        """Write what is held as a version of the table."""
        if not self._rows:
            return
        import lance

        episodes, views, blobs, indexes = zip(*self._rows, strict=True)
        fields = [pa.field(EPISODE, pa.int32()), pa.field(VIEW, pa.string()), lance.blob_field(BYTES)]
        columns: list[Any] = [
            pa.array(episodes, pa.int32()),
            pa.array(views, pa.string()),
            lance.blob_array(list(blobs)),
        ]
        if self._schema is not None:
            fields[:2] = [self._schema.field(EPISODE), self._schema.field(VIEW)]
            columns[:2] = [
                column.cast(field.type) for column, field in zip(columns, fields[:2], strict=False)
            ]
        more = columns_of(indexes)
        if self._schema is not None:
            more = _as_in(more.select([name for name in NAMES if name in self._schema.names]), self._schema)
        fields += list(more.schema)
        columns += more.columns
        schema = pa.schema(fields, metadata={SWM_VERSION_KEY: b"1"} if self._schema is None else None)
        if self._schema is None:
            create_dataset(self._uri, self._options, schema, stable_row_ids=True)
        with typed(self._uri):
            written = lance.write_dataset(
                pa.Table.from_arrays(columns, schema=schema),
                self._uri,
                mode="append",
                storage_options=self._options,
            )
        self._schema = written.schema
        self._rows, self._held = [], 0

    def close(self) -> None:
        """Commit what is held, and refuse more."""
        self.commit()
        self._closed = True

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close; after an error what is held is dropped."""
        if kind is not None:
            self._rows, self._held = [], 0
            self._closed = True
        self.close()


@dataclass
class ColumnsReport:
    """What ``add_index_columns`` did."""

    built: int = 0
    skipped: int = 0
    failures: list[tuple[str, FluxonGopError]] = field(default_factory=list)
    stats: ReadStats = field(default_factory=ReadStats)


def add_index_columns(
    uri: str | os.PathLike[str],
    *,
    check: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> ColumnsReport:
    """Give a video table its index columns, in place, or the rows that lack them.

    Reads each such video's head, movie box and key samples' first bytes by ranges, never a whole blob, 64 videos side by
    side. Rows stay where they are, and no other column is written. Commits after every 4,096 rows: what was committed is
    not done again.

    Args:
        uri: the table.
        check: prove where decoding may start, by one more wave of small ranges.
        storage_options: for Lance.
        progress: called with the number of rows done after each batch.

    Returns:
        what was built, what has its columns already, and which videos have no index.

    Raises:
        SourceNotFoundError: there is no Lance data set.
        IndexTableError: it is no video table, has columns of these names that are something else, or somebody else has
            rewritten its rows meanwhile.
    """
    given = os.fspath(uri)
    options = lance_options(given, storage_options)
    dataset = open_dataset(given, options)
    if dataset is None:
        text = f"{given}: no Lance data set there"
        raise SourceNotFoundError(text, source=given)
    check_layout(dataset.schema, given)
    check_columns(dataset.schema, given)
    forget_blobs(given)
    missing = [FIELDS.field(name) for name in NAMES if name not in dataset.schema.names]
    if missing:
        # All null, at no cost: a reader meanwhile takes the rows for videos without an index.
        dataset.add_columns(pa.schema(missing))
    if missing or dataset.schema.metadata is None or SWM_VERSION_KEY not in dataset.schema.metadata:
        dataset.update_schema_metadata({SWM_VERSION_KEY.decode(): "1"})
        dataset = _newest(given, options)
    report = ColumnsReport()
    lacking, report.skipped = _lacking(dataset)
    seen = dataset.version
    for at in range(0, len(lacking), ROWS_OF_COMMIT):
        rows = lacking[at : at + ROWS_OF_COMMIT]
        sources = [
            LanceBlobSource(given, BYTES, row.number, version=seen, storage_options=options) for row in rows
        ]
        indexes = _indexes(sources, report, check=check, progress=progress)
        dataset = _committed(dataset, rows, indexes, options)
    return report


class _Lacking(NamedTuple):
    """A row without index: its number in scan order, its fragment, its id."""

    number: int
    fragment: int
    row_id: int


def _lacking(dataset: LanceDataset) -> tuple[list[_Lacking], int]:
    """Return the rows without index, and how many have one; reads a checksum of each row."""
    found, row, skipped = [], 0, 0
    for fragment in dataset.get_fragments():
        there = fragment.scanner(columns=[f"{STRUCT_COLUMN}.row_checksum"], with_row_id=True).to_table()
        empty = np.flatnonzero(there.column(0).is_null().to_numpy()).tolist()
        ids = there.column("_rowid").to_pylist()
        found += [_Lacking(row + place, fragment.fragment_id, ids[place]) for place in empty]
        row += there.num_rows
        skipped += there.num_rows - len(empty)
    return found, skipped


def _indexes(
    sources: Sequence[LanceBlobSource], report: ColumnsReport, *, check: bool, progress: Progress | None
) -> list[VideoIndex | None]:
    """Build indexes, some side by side; None where there is none, which is in the report."""
    indexes: list[VideoIndex | None] = [None] * len(sources)
    for at in range(0, len(sources), BATCH):
        batch = sources[at : at + BATCH]
        stats = [ReadStats() for _ in batch]
        for place, index, error in indexes_of(batch, stats, check=check):
            indexes[at + place] = index
            report.built += index is not None
            if error is not None:
                report.failures.append((batch[place].name, error))
        for one in stats:
            report.stats.add(one)
        if progress is not None:
            progress(len(batch))
    return indexes


def _committed(
    dataset: LanceDataset,
    rows: Sequence[_Lacking],
    indexes: Sequence[VideoIndex | None],
    options: dict[str, Any] | None,
) -> LanceDataset:
    """Write the columns of these rows, by row id, as one version of the table; return it."""
    import lance

    built = [(row, index) for row, index in zip(rows, indexes, strict=True) if index is not None]
    if not built:
        return dataset
    columns = _as_in(columns_of([index for _, index in built]), dataset.schema)
    columns = columns.append_column("_rowid", pa.array([row.row_id for row, _ in built], pa.uint64()))
    of = np.array([row.fragment for row, _ in built])
    updated, modified = [], set()
    for number in np.unique(of).tolist():
        fragment: Any = dataset.get_fragment(number)
        if fragment is None:
            raise _rewritten(dataset.uri, "a fragment is gone")
        part = columns.filter(pa.array(of == number))
        metadata, fields = fragment.update_columns(part, left_on="_rowid")
        updated.append(metadata)
        modified |= set(fields)
    operation = lance.LanceOperation.Update(updated_fragments=updated, fields_modified=sorted(modified))
    try:
        return lance.LanceDataset.commit(
            dataset.uri, operation, read_version=dataset.version, storage_options=options
        )
    except OSError as error:
        raise _rewritten(dataset.uri, str(error).splitlines()[0]) from error


def _rewritten(uri: str, why: str) -> IndexTableError:
    text = f"{uri}: somebody else has rewritten these rows meanwhile; run it again: {why}"
    return IndexTableError(text, uri=uri)


def check_columns(schema: pa.Schema, uri: str) -> None:
    """Refuse a table that has columns of the seed's names that are somebody's own."""
    foreign = [name for name in SWM_COLUMNS if name in schema.names and not is_claims(schema, name)]
    if foreign:
        text = f"{uri}: its column {foreign[0]} is of {schema.field(foreign[0]).type}, and no index"
        raise IndexTableError(text, uri=uri)


def _newest(uri: str, options: dict[str, Any] | None) -> LanceDataset:
    dataset = open_dataset(uri, options)
    assert dataset is not None
    return dataset


def _as_in(columns: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns as a table's schema has them."""
    fields = [schema.field(name) for name in columns.schema.names]
    return pa.Table.from_arrays(
        [columns.column(field.name).cast(field.type) for field in fields], schema=pa.schema(fields)
    )


def _encoded(frames: Iterable[npt.NDArray[np.uint8]], recipe: Recipe) -> bytes:
    """Return frames as an MP4."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video.mp4"
        try:
            write_video(path, frames, recipe)
        except (OSError, ValueError, AttributeError, RuntimeError) as error:
            text = f"the frames cannot be encoded: {error} (want uint8 (H, W, 3) arrays that {recipe.codec} takes)"
            raise InvalidRequestError(text) from error
        return path.read_bytes() if path.exists() else b""
