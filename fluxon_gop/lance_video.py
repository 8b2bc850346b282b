"""Lance tables of videos: a row a video, its bytes a blob, and the index beside it in the same row.

The layout is stable-worldmodel's (``episode_idx`` int32, ``video_key`` string, ``video_bytes`` blob) with four columns
more, which readers that know nothing of them do not see.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from fluxon_gop.arrow_file import ReadOnlyRows
from fluxon_gop.clip_dataset import ClipDataset
from fluxon_gop.clips import Clips
from fluxon_gop.errors import IndexTableError, IndexVersionError, InvalidRequestError, SourceNotFoundError
from fluxon_gop.index_rows import INDEX_VERSION, SCHEMA, SWM_COLUMNS, VERSION_KEY
from fluxon_gop.index_table import CACHE_BYTES, IndexTable
from fluxon_gop.lance_rows import open_dataset
from fluxon_gop.ranges import Int64Array
from fluxon_gop.sources import LanceBlobSource
from fluxon_gop.sources.lance_blob import BlobGroup, forget_blobs, group_of_blobs
from fluxon_gop.video_columns import FIELDS, STRUCT_COLUMN, rows_of_columns

if TYPE_CHECKING:
    from lance import LanceDataset

EPISODE, VIEW, BYTES = "episode_idx", "video_key", "video_bytes"


class LanceVideoTable:
    """A video table at one version: which videos there are, and data sets of their clips."""

    def __init__(
        self, uri: str, version: int, rows: pa.Table, storage_options: Mapping[str, Any] | None
    ) -> None:
        """Use :meth:`open`."""
        self._uri, self._version = uri, version
        self._options = dict(storage_options or {})
        if rows.column(EPISODE).null_count or rows.column(VIEW).null_count:
            text = f"{uri}: {EPISODE} or {VIEW} of some row is null"
            raise IndexTableError(text, uri=uri)
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
        dataset = open_dataset(given, dict(storage_options or {}) or None)
        if dataset is None:
            text = f"{given}: no Lance data set there"
            raise SourceNotFoundError(text, source=given)
        check_layout(dataset.schema, given)
        forget_blobs(given)
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
        row = self._row_of.get((operator.index(episode), view))
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
        labels = dict(options.pop("labels", None) or {})
        if EPISODE in labels:
            text = f"labels: {EPISODE!r} is the table's"
            raise InvalidRequestError(text)
        labels[EPISODE] = self.episodes_of(views)
        if not len(self.episodes_of(views)):
            text = f"{self._uri}: no episode has all of the views {', '.join(self._checked(views))}"
            raise InvalidRequestError(text)
        options.setdefault("storage_options", self._options)
        return ClipDataset(self.videos(views), clips, index=self.index, labels=labels, **options)

    def _checked(self, views: Sequence[str] | None) -> list[str]:
        wanted = self.views if views is None else list(views)
        missing = [view for view in wanted if view not in self.views]
        if isinstance(views, str):
            text = f"views is a text, {views!r}: want a list, [{views!r}]"
            raise InvalidRequestError(text)
        if missing:
            text = f"{self._uri}: no video_key {missing[0]!r}: want a list out of {', '.join(self.views)}"
            raise InvalidRequestError(text)
        return wanted

    def __repr__(self) -> str:
        """Show the address and counts."""
        return f"LanceVideoTable({self._uri!r}, version {self._version}, {len(self)} videos, views {self.views})"


class VideoRows(ReadOnlyRows):
    """The index rows inside of a video table; read only."""

    forks_badly = True

    def __init__(self, uri: str, version: int, options: Mapping[str, Any]) -> None:
        """Name the table; nothing is opened yet."""
        self._uri, self._version, self._options = uri, version, options

    def _group(self) -> BlobGroup:
        group = group_of_blobs(self._uri, BYTES, self._version, self._options)
        group.check_process(self._uri)
        return group

    def schema(self) -> pa.Schema:
        """Return an index table's."""
        return SCHEMA

    def scalars(self, columns: list[str]) -> pa.Table:
        """Return key, frame count and size of all rows."""
        dataset: LanceDataset = self._group().dataset()
        names = [f"{STRUCT_COLUMN}.{name}" for name in ("size", "frame_count")]
        count = dataset.count_rows()
        found = dataset.to_table(columns=names) if has_struct(dataset.schema) else None
        keys = [LanceBlobSource(self._uri, BYTES, row, version=self._version).name for row in range(count)]
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
        """Return these rows, in this order; the blobs' sizes come along, so that reading needs no other look."""
        group = self._group()
        dataset: LanceDataset = group.dataset()
        names = [name for name in SWM_COLUMNS if is_claims(dataset.schema, name)]
        names += [STRUCT_COLUMN] if has_struct(dataset.schema) else []
        try:
            found = dataset.take(positions, columns=[*names, BYTES])
        except (OSError, ValueError) as error:
            text = (
                f"{self._uri}: rows of version {self._version} cannot be read: {str(error).splitlines()[0]}"
            )
            raise IndexTableError(text, uri=self._uri) from None
        group.learn(positions, found.column(BYTES).to_pylist())
        return rows_of_columns(found)

    def why(self) -> str:
        """Return what to do instead."""
        return f"{self._uri} is a video table; use add_index_columns()"


def _open_rows(uri: str, version: int, options: Mapping[str, Any], cache_bytes: int) -> IndexTable:
    recipe = (_open_rows, uri, version, options, cache_bytes)
    return IndexTable(VideoRows(uri, version, options), uri, recipe, cache_bytes=cache_bytes)


def check_layout(schema: pa.Schema, uri: str) -> None:
    """Refuse what is no video table, or has a column of ours that is something else."""
    missing = [name for name in (EPISODE, VIEW, BYTES) if name not in schema.names]
    if missing:
        text = f"{uri}: no video table: it has no {', '.join(missing)}"
        raise IndexTableError(text, uri=uri)
    if "blob" not in str(schema.field(BYTES)) + str(schema.field(BYTES).metadata):
        text = f"{uri}: no video table: {BYTES} is no column of blobs"
        raise IndexTableError(text, uri=uri)
    if STRUCT_COLUMN in schema.names and not has_struct(schema):
        version = (schema.field(STRUCT_COLUMN).metadata or {}).get(VERSION_KEY, b"none").decode()
        text = f"{uri}: its column {STRUCT_COLUMN} is of version {version}, this release knows {INDEX_VERSION}; drop it, and add it again"
        raise IndexVersionError(text, uri=uri, got=version, expected=INDEX_VERSION)


def is_claims(schema: pa.Schema, name: str) -> bool:
    """Return whether a table has one of the seed's columns, and not somebody's own of that name."""
    if name not in schema.names:
        return False
    kind = schema.field(name).type
    return bool(
        (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_integer(kind.value_type)
    )


def has_struct(schema: pa.Schema) -> bool:
    """Return whether a table has our column, in the version that this release knows."""
    if STRUCT_COLUMN not in schema.names:
        return False
    field = schema.field(STRUCT_COLUMN)
    mine = FIELDS.field(STRUCT_COLUMN).type
    same = pa.types.is_struct(field.type) and {f.name for f in mine} <= {f.name for f in field.type}
    return same and (field.metadata or {}).get(VERSION_KEY) == INDEX_VERSION.encode()
