"""The videos of a data set: addresses, how many frames each has, and the index table that reads go by."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fluxon_gop.clips import as_integers
from fluxon_gop.errors import EncryptedVideoError, FluxonGopError, InvalidRequestError, Mp4Error
from fluxon_gop.handed_over import Addresses
from fluxon_gop.index_build import BATCH, indexes_of
from fluxon_gop.index_rows import Key
from fluxon_gop.index_table import IndexTable
from fluxon_gop.model import VideoIndex
from fluxon_gop.ranges import ByteRange, Int64Array
from fluxon_gop.reader import VideoReader
from fluxon_gop.requests import Uri
from fluxon_gop.sources import open_source
from fluxon_gop.sources.range_source import table_key_of
from fluxon_gop.stats import ReadStats
from fluxon_gop.table_rows import Hint, Row

_log = logging.getLogger(__name__)

MANY_ROWS = 1000
"""Beyond so many indexes built for one data set, its maker is told of tables."""

Videos = Sequence[Uri] | Mapping[str, Sequence[Uri]] | IndexTable
"""Addresses; or of several cameras that filmed the same, by name; or all videos of a table."""


class ClipVideos:
    """Videos by number, each one file, or one file for each view of it."""

    def __init__(
        self,
        videos: Videos,
        table: IndexTable | None,
        storage_options: Mapping[str, Any] | None,
    ) -> None:
        """Take addresses and where their rows are; nothing is read yet but the table's keys."""
        if isinstance(videos, IndexTable):
            table, videos = videos if table is None else table, _keys_of(videos)
        if hasattr(videos, "tolist"):
            videos = videos.tolist()
        if isinstance(videos, str | bytes) or not isinstance(videos, Sequence | Mapping):
            text = f"videos is a {type(videos).__name__}: want a sequence of addresses, a mapping of them, or an IndexTable (IndexTable.open(...))"
            raise TypeError(text)
        views = videos if isinstance(videos, Mapping) else {"": videos}
        self.views: dict[str, Addresses] = {name: Addresses(uris) for name, uris in views.items()}
        self.is_named = isinstance(videos, Mapping)
        counts = {len(uris) for uris in self.views.values()}
        if len(counts) != 1:
            text = f"videos has views of {sorted(counts)} files: want one or more, all of one length"
            raise InvalidRequestError(text)
        self.count = counts.pop()
        self.table = table
        self._options = storage_options
        self.stats = ReadStats()
        """What building missing indexes cost."""
        self.unreadable: dict[int, FluxonGopError] = {}
        """Videos by number that could not be read when they were counted, and why."""

    def uris_of(self, video: int) -> dict[str, Uri]:
        """Return a video's addresses by view."""
        return {name: uris[video] for name, uris in self.views.items()}

    @property
    def forks_badly(self) -> str | None:
        """Why a forked worker could not read these videos, None where it could."""
        if self.table is not None and self.table.forks_badly:
            return f"{self.table.uri} is a Lance table, and Lance's threads do not live in a forked process"
        if not all(uris.survive_a_fork for uris in self.views.values()):
            return "its videos are not local files, and what reads them does not live in a forked process"
        return None

    def key_of(self, uri: Uri) -> Key:
        """Return the key of a video in a table."""
        if isinstance(uri, str) and "://" not in uri:
            return uri
        source = open_source(uri, self._options)
        try:
            key: Key = table_key_of(source)
        finally:
            if source is not uri:
                source.close()
        return key

    def frame_counts(self, given: npt.ArrayLike | None, *, need_rows: bool, tolerant: bool) -> Int64Array:
        """Return each video's number of frames, of several views the least, -1 where nobody knows.

        Without ``given``, or where rows are needed, indexes that the table lacks are built, 64 side by side, and kept in
        memory beside it; a video without an index (no MP4) is counted by demuxing or decoding it. ``tolerant``: one that
        cannot be read is noted in ``unreadable``, unless none can.
        """
        counts = None if given is None else as_integers("frame_counts", given, 1)
        if counts is not None and len(counts) != self.count:
            text = f"frame_counts has {len(counts)} numbers for {self.count} videos"
            raise InvalidRequestError(text)
        if counts is not None and not need_rows:
            return counts
        found = np.stack([self._count(uris) for uris in self.views.values()]).min(axis=0)
        if self.unreadable and (not tolerant or len(self.unreadable) == self.count):
            raise next(iter(self.unreadable.values()))
        for video, error in self.unreadable.items():
            _log.warning("video %d cannot be read, its clips are left out or masked: %s", video, error)
        return found if counts is None else counts

    def _count(self, uris: Addresses) -> Int64Array:
        """Count one view's videos: by the table, by indexes built now, by reading."""
        places: dict[Key, list[int]] = {}
        for place, uri in enumerate(uris):
            places.setdefault(self.key_of(uri), []).append(place)
        keys = list(places)
        counts = np.full(len(keys), -1, np.int64) if self.table is None else self.table.frame_counts(keys)
        missing = {keys[n]: uris[places[keys[n]][0]] for n in np.flatnonzero(counts < 0).tolist()}
        found = dict(zip(keys, counts.tolist(), strict=True)) | self._count_missing(missing, places)
        result = np.empty(len(uris), np.int64)
        for key, where in places.items():
            result[where] = found[key]
        return result

    def _count_missing(self, videos: dict[Key, Uri], places: dict[Key, list[int]]) -> dict[Key, int]:
        """Build the indexes that are not there, and count what they do not tell."""
        rows = self._build(videos, places)
        counts = {key: index.num_frames for key, index in rows.items() if index.container_reason is None}
        failed = set(self.unreadable)
        for key, uri in videos.items():
            if key in counts:
                continue
            counts[key] = -1
            if failed.isdisjoint(places[key]):
                try:
                    counts[key] = self._by_reading(key, uri)
                except FluxonGopError as error:
                    self.unreadable |= dict.fromkeys(places[key], error)
        return counts

    def _build(self, videos: dict[Key, Uri], places: dict[Key, list[int]]) -> dict[Key, VideoIndex]:
        """Return the rows of videos that have none in the table, and keep them beside it."""
        found: dict[Key, Row] = {}
        for keys in _some(list(videos)):
            found |= dict(
                zip(
                    keys, [None] * len(keys) if self.table is None else self.table.lookup(keys), strict=True
                )
            )
        rows = {key: row for key, row in found.items() if isinstance(row, VideoIndex)}
        lacking = [key for key in videos if key not in rows]
        if len(lacking) > MANY_ROWS:
            _log.warning(
                "%d videos have no index row: each start builds them again; make a table with: fluxon-gop index build",
                len(lacking),
            )
        built: dict[Key, VideoIndex] = {}
        for keys in _some(lacking):
            hints = [row.moov_range if isinstance(row := found[key], Hint) else None for key in keys]
            for key, index, error in self._indexes({key: videos[key] for key in keys}, hints):
                if index is not None:
                    built[key] = index
                elif error is not None and not _has_no_index(error):
                    self.unreadable |= dict.fromkeys(places[key], error)
        if built:
            table = self.table
            self.table = IndexTable.of(built.items()) if table is None else table.with_rows(built.items())
        return rows | built

    def _indexes(
        self, videos: dict[Key, Uri], hints: Sequence[ByteRange | None]
    ) -> Iterator[tuple[Key, VideoIndex | None, FluxonGopError | None]]:
        """Yield the index, or the error, of videos whose waves run side by side."""
        keys, uris = list(videos), list(videos.values())
        sources = [open_source(uri, self._options) for uri in uris]
        stats = [ReadStats() for _ in sources]
        try:
            for place, index, error in indexes_of(sources, stats, hints=hints):
                yield keys[place], index, error
        finally:
            for source, uri, one in zip(sources, uris, stats, strict=True):
                self.stats.add(one)
                if source is not uri:
                    source.close()

    def _by_reading(self, key: Key, uri: Uri) -> int:
        _log.warning(
            "%s: its tables do not tell how many frames it has; the file is read through to count them", key
        )
        with VideoReader(uri, index=self.table, storage_options=self._options) as reader:
            count = reader.num_frames
            self.stats.add(reader.stats())
            return count


def _some(keys: list[Key]) -> Iterator[list[Key]]:
    for at in range(0, len(keys), BATCH):
        yield keys[at : at + BATCH]


def _has_no_index(error: FluxonGopError) -> bool:
    return isinstance(error, Mp4Error) and not isinstance(error, EncryptedVideoError)


def _keys_of(table: IndexTable) -> list[str]:
    keys = table.keys()
    named = [key for key in keys if isinstance(key, str)]
    if len(named) < len(keys):
        text = (
            f"{table.uri}: {len(keys) - len(named)} of its rows are of files of exports: give the videos themselves, "
            "and the table as index"
        )
        raise InvalidRequestError(text)
    return named
