"""Lance tables of videos: a row a video, its bytes a blob, and the index beside it in the same row.

The layout is stable-worldmodel's (``episode_idx`` int32, ``video_key`` string, ``video_bytes`` blob) with four columns
more, which readers that know nothing of them do not see. Lance is imported at the first use.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fluxon_gop.clip_dataset import ClipDataset
from fluxon_gop.clips import Clips
from fluxon_gop.encode import Recipe, write_video
from fluxon_gop.errors import (
    ClosedError,
    FluxonGopError,
    IndexTableError,
    IndexVersionError,
    InvalidRequestError,
    SourceNotFoundError,
)
from fluxon_gop.index_build import BATCH, BuildReport, build_index, indexes_of
from fluxon_gop.index_rows import INDEX_VERSION, SCHEMA, SWM_VERSION_KEY, VERSION_KEY
from fluxon_gop.index_table import CACHE_BYTES, IndexTable
from fluxon_gop.model import VideoIndex
from fluxon_gop.ranges import Int64Array
from fluxon_gop.sources import LanceBlobSource, MemorySource
from fluxon_gop.sources.lance_blob import group_of_blobs
from fluxon_gop.stats import ReadStats
from fluxon_gop.video_columns import FIELDS, NAMES, STRUCT_COLUMN, columns_of, rows_of_columns

if TYPE_CHECKING:
    from lance import LanceDataset

EPISODE, VIEW, BYTES = "episode_idx", "video_key", "video_bytes"
ROWS_OF_COMMIT = 4096
"""Rows whose columns ``add_columns`` holds in memory, and commits at once."""
Progress = Callable[[int], object]
BYTES_OF_COMMIT = 64 * 1024 * 1024


class LanceVideoTable:
    """A video table at one version: which videos there are, and data sets of their clips."""

    def __init__(
        self, uri: str, version: int, rows: pa.Table, storage_options: Mapping[str, Any] | None
    ) -> None:
        """Use :meth:`open`."""
        self._uri, self._version = uri, version
        self._options = dict(storage_options or {})
        self._episodes = rows.column(EPISODE).to_numpy()
        views: list[str] = rows.column(VIEW).to_pylist()
        self._row_of: dict[tuple[int, str], int] = {}
        for row, key in enumerate(zip(self._episodes.tolist(), views, strict=True)):
            if key in self._row_of:
                text = f"{uri}: episode {key[0]}, {key[1]!r} stands in rows {self._row_of[key]} and {row}"
                raise IndexTableError(text, uri=uri)
            self._row_of[key] = row
        self.views: list[str] = sorted(set(views))
        """The names of the views, as ``video_key`` has them."""
        recipe = (_open_rows, uri, version, self._options, CACHE_BYTES)
        self.index: IndexTable = IndexTable(
            VideoRows(uri, version, self._options), uri, recipe, cache_bytes=CACHE_BYTES
        )
        """The rows' own indexes; for a pool, or a data set."""

    @classmethod
    def open(
        cls, uri: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
    ) -> LanceVideoTable:
        """Return the table as it is now: what is appended later is not seen. One read of two small columns.

        Raises:
            SourceNotFoundError: there is no Lance data set.
            IndexTableError: it is no video table, or names a video twice.
        """
        given = os.fspath(uri)
        dataset = _existing(given, dict(storage_options or {}) or None)
        if dataset is None:
            text = f"{given}: no Lance data set there"
            raise SourceNotFoundError(text, source=given)
        _check_layout(dataset.schema, given)
        rows = dataset.to_table(columns=[EPISODE, VIEW])
        return cls(given, dataset.version, rows, storage_options)

    def __len__(self) -> int:
        """Return the number of videos."""
        return len(self._episodes)

    def episodes_of(self, views: Sequence[str] | None = None) -> Int64Array:
        """Return the episodes that have all these views (None for all), in the table's order; int64 (episodes,)."""
        wanted = self._checked(views)
        ordered = dict.fromkeys(self._episodes.tolist())
        return np.array([e for e in ordered if all((e, view) in self._row_of for view in wanted)], np.int64)

    def address(self, episode: int, view: str) -> str:
        """Return the address of a video, for a reader, a pool, or a request.

        Raises:
            InvalidRequestError: there is no such video.
        """
        row = self._row_of.get((int(episode), view))
        if row is None:
            text = f"{self._uri}: no video of episode {episode}, {view!r}"
            raise InvalidRequestError(text)
        return LanceBlobSource(self._uri, BYTES, row, version=self._version).name

    def videos(self, views: Sequence[str] | None = None) -> dict[str, list[str]]:
        """Return addresses by view, episode by episode as ``episodes_of`` lists them."""
        wanted = self._checked(views)
        episodes = self.episodes_of(wanted).tolist()
        return {view: [self.address(episode, view) for episode in episodes] for view in wanted}

    def clips(self, clips: Clips, views: Sequence[str] | None = None, **options: Any) -> ClipDataset:
        """Return a data set of clips: a batch is one ``read_blob_ranges`` call over all its episodes and views.

        A sample's ``frames`` is a dict by view, and ``episode_idx`` its episode; clips count videos as ``episodes_of``
        lists them. ``options``: :class:`ClipDataset`'s.
        """
        labels = {EPISODE: self.episodes_of(views), **options.pop("labels", {})}
        options.setdefault("storage_options", self._options)
        return ClipDataset(self.videos(views), clips, index=self.index, labels=labels, **options)

    def _checked(self, views: Sequence[str] | None) -> list[str]:
        wanted = self.views if views is None else list(views)
        missing = [view for view in wanted if view not in self.views]
        if missing or isinstance(views, str):
            text = f"{self._uri}: no video_key {views if isinstance(views, str) else missing[0]!r}: want a list out of {', '.join(self.views)}"
            raise InvalidRequestError(text)
        return wanted

    def __repr__(self) -> str:
        """Show the address and counts."""
        return f"LanceVideoTable({self._uri!r}, version {self._version}, {len(self)} videos, views {self.views})"


class VideoRows:
    """The index rows inside of a video table; read only."""

    forks_badly = True

    def __init__(self, uri: str, version: int, options: Mapping[str, Any]) -> None:
        """Name the table; nothing is opened yet."""
        self._uri, self._version, self._options = uri, version, options

    def _dataset(self) -> LanceDataset:
        group = group_of_blobs(self._uri, BYTES, self._version, self._options)
        group.check_process(self._uri)
        dataset: LanceDataset = group.dataset()
        return dataset

    def schema(self) -> pa.Schema:
        """Return an index table's."""
        return SCHEMA

    def scalars(self, columns: list[str]) -> pa.Table:
        """Return key, frame count and size of all rows."""
        dataset = self._dataset()
        names = [f"{STRUCT_COLUMN}.{name}" for name in ("size", "frame_count")]
        count = dataset.count_rows()
        found = dataset.to_table(columns=names) if _has_struct(dataset.schema) else None
        keys = [LanceBlobSource(self._uri, BYTES, row).table_key for row in range(count)]
        known = {
            "uri": pa.array(keys, pa.string()),
            **{name: pa.array([""] * count, pa.string()) for name in ("export_name", "relpath")},
            **{
                name: found.column(path)
                for name, path in zip(("size", "frame_count"), names, strict=True)
                if found is not None
            },
        }
        return pa.table(
            {name: known.get(name, pa.nulls(count, SCHEMA.field(name).type)) for name in columns}
        )

    def take(self, positions: list[int]) -> pa.Table:
        """Return these rows, in this order."""
        dataset = self._dataset()
        names = [
            name
            for name in NAMES
            if name in dataset.schema.names and (name != STRUCT_COLUMN or _has_struct(dataset.schema))
        ]
        if not names:
            return rows_of_columns(pa.table({"": pa.nulls(len(positions))}))
        return rows_of_columns(dataset.take(positions, columns=names))

    def append(self, table: pa.Table) -> None:
        """Refuse: rows come with their videos."""
        text = f"{self._uri}: {table.num_rows} index rows cannot be written to a video table: use add_columns()"
        raise IndexTableError(text, uri=self._uri)

    def replace(self, table: pa.Table) -> None:
        """Refuse likewise."""
        self.append(table)


def _open_rows(uri: str, version: int, options: Mapping[str, Any], cache_bytes: int) -> IndexTable:
    recipe = (_open_rows, uri, version, options, cache_bytes)
    return IndexTable(VideoRows(uri, version, options), uri, recipe, cache_bytes=cache_bytes)


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
        self._options = dict(storage_options or {}) or None
        dataset = _existing(self._uri, self._options)
        self._schema = None if dataset is None else dataset.schema
        if self._schema is not None:
            _check_layout(self._schema, self._uri)
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
        """Add one video: MP4 bytes, or frames uint8 (H, W, 3) RGB, which are encoded."""
        if self._closed:
            text = f"{self._uri}: the writer is closed"
            raise ClosedError(text)
        if not isinstance(video_key, str) or not video_key:  # type: ignore[redundant-expr]
            text = f"video_key is {video_key!r}: want a name"
            raise InvalidRequestError(text)
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
        self._rows.append((int(episode_idx), video_key, data, index))
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
        more = columns_of(indexes)
        if self._schema is not None:
            more = _as_in(more.select([name for name in NAMES if name in self._schema.names]), self._schema)
        fields += list(more.schema)
        columns += more.columns
        schema = pa.schema(fields, metadata={SWM_VERSION_KEY: b"1"} if self._schema is None else None)
        new: dict[str, Any] = {}
        if self._schema is None:
            new = {"data_storage_version": "2.2", "enable_stable_row_ids": True}
        written = lance.write_dataset(
            pa.Table.from_arrays(columns, schema=schema),
            self._uri,
            mode="create" if new else "append",
            storage_options=self._options,
            **new,
        )
        self._schema = written.schema
        self._rows, self._held = [], 0

    def close(self) -> None:
        """Commit what is held, and refuse more."""
        if not self._closed:
            self._closed = True
            self.commit()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close; after an error what is held is dropped."""
        if kind is not None:
            self._rows, self._held = [], 0
        self.close()


def add_columns(
    uri: str | os.PathLike[str],
    *,
    check: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> BuildReport:
    """Give a video table its index columns, in place, or the rows that lack them.

    Reads each such video's head, movie box and key samples' first bytes by ranges, never a whole blob. Rows stay where
    they are, and no other column is written. Commits after every 4,096 rows: what was committed is not done again.

    Args:
        uri: the table.
        check: prove where decoding may start, by one more wave of small ranges.
        storage_options: for Lance.
        progress: called with the number of rows done after each batch.

    Returns:
        what was built, what has its columns already, and which videos have no index.

    Raises:
        SourceNotFoundError: there is no Lance data set.
        IndexTableError: it is no video table, or has columns of these names that are something else.
    """
    given = os.fspath(uri)
    options = dict(storage_options or {}) or None
    dataset = _existing(given, options)
    if dataset is None:
        text = f"{given}: no Lance data set there"
        raise SourceNotFoundError(text, source=given)
    _check_layout(dataset.schema, given)
    missing = [FIELDS.field(name) for name in NAMES if name not in dataset.schema.names]
    if missing:
        # All null, at no cost: a reader meanwhile takes the rows for videos without an index.
        dataset.add_columns(pa.schema(missing))
        dataset = _opened(given, options)
    seen, report, row = dataset.version, BuildReport(), 0
    for fragment in dataset.get_fragments():
        there = fragment.scanner(columns=[f"{STRUCT_COLUMN}.row_checksum"], with_row_id=True).to_table()
        lacking = np.flatnonzero(there.column(0).is_null().to_numpy())
        report.skipped += there.num_rows - len(lacking)
        ids = there.column("_rowid").to_numpy()
        for at in range(0, len(lacking), ROWS_OF_COMMIT):
            places = lacking[at : at + ROWS_OF_COMMIT]
            sources = [
                LanceBlobSource(given, BYTES, row + int(n), version=seen, storage_options=options)
                for n in places
            ]
            indexes = _indexes(sources, report, check=check, progress=progress)
            found = np.array([index is not None for index in indexes])
            if found.any():
                columns = _as_in(
                    columns_of([index for index in indexes if index is not None]), dataset.schema
                )
                row_ids = pa.array(ids[places[found]], pa.uint64())
                dataset = _committed(
                    dataset, fragment.fragment_id, columns.append_column("_rowid", row_ids), options
                )
        row += there.num_rows
    if SWM_VERSION_KEY not in (dataset.schema.metadata or {}):
        dataset.update_schema_metadata({SWM_VERSION_KEY.decode(): "1"})
    return report


def _indexes(
    sources: Sequence[LanceBlobSource], report: BuildReport, *, check: bool, progress: Progress | None
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
                report.failures.append((batch[place].table_key, error))
        for one in stats:
            report.stats.add(one)
        if progress is not None:
            progress(len(batch))
    return indexes


def _committed(
    dataset: LanceDataset, fragment: int, rows: pa.Table, options: dict[str, Any] | None
) -> LanceDataset:
    """Write columns of rows of one fragment, by row id, as a version of the table; return it."""
    import lance

    found: Any = dataset.get_fragment(fragment)
    updated, fields = found.update_columns(rows, left_on="_rowid")
    operation = lance.LanceOperation.Update(updated_fragments=[updated], fields_modified=fields)
    try:
        return lance.LanceDataset.commit(
            dataset.uri, operation, read_version=dataset.version, storage_options=options
        )
    except OSError as error:
        text = f"{dataset.uri}: somebody else has rewritten these rows meanwhile; run it again: {str(error).splitlines()[0]}"
        raise IndexTableError(text, uri=dataset.uri) from error


def _as_in(columns: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns as a table's schema has them."""
    fields = [schema.field(name) for name in columns.schema.names]
    return pa.Table.from_arrays(
        [columns.column(field.name).cast(field.type) for field in fields], schema=pa.schema(fields)
    )


def _existing(uri: str, options: dict[str, Any] | None) -> LanceDataset | None:
    try:
        return _opened(uri, options)
    except (ValueError, FileNotFoundError) as error:
        if "not found" in str(error).lower():
            return None
        text = f"{uri}: cannot be opened as a Lance data set: {str(error).splitlines()[0]}"
        raise IndexTableError(text, uri=uri) from None


def _opened(uri: str, options: dict[str, Any] | None) -> LanceDataset:
    import lance

    return lance.dataset(uri, storage_options=options)


def _check_layout(schema: pa.Schema, uri: str) -> None:
    """Refuse what is no video table, or has a column of ours that is something else."""
    missing = [name for name in (EPISODE, VIEW, BYTES) if name not in schema.names]
    if missing:
        text = f"{uri}: no video table: it has no {', '.join(missing)}"
        raise IndexTableError(text, uri=uri)
    if STRUCT_COLUMN in schema.names and not _has_struct(schema):
        version = (schema.field(STRUCT_COLUMN).metadata or {}).get(VERSION_KEY, b"none").decode()
        text = f"{uri}: its column {STRUCT_COLUMN} is of version {version}, this release knows {INDEX_VERSION}; drop it, and add it again"
        raise IndexVersionError(text, uri=uri, got=version, expected=INDEX_VERSION)


def _has_struct(schema: pa.Schema) -> bool:
    if STRUCT_COLUMN not in schema.names:
        return False
    field = schema.field(STRUCT_COLUMN)
    mine = FIELDS.field(STRUCT_COLUMN).type
    same = pa.types.is_struct(field.type) and {f.name for f in mine} <= {f.name for f in field.type}
    return same and (field.metadata or {}).get(VERSION_KEY) == INDEX_VERSION.encode()


def _encoded(frames: Iterable[npt.NDArray[np.uint8]], recipe: Recipe) -> bytes:
    """Return frames as an MP4."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video.mp4"
        write_video(path, frames, recipe)
        return path.read_bytes() if path.exists() else b""
