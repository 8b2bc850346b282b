"""The videos of a data set: addresses, how many frames each has, and the index table that reads go by."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fluxon_gop.clips import as_integers
from fluxon_gop.errors import EncryptedVideoError, FluxonGopError, InvalidRequestError, Mp4Error
from fluxon_gop.handed_over import Addresses
from fluxon_gop.index_build import BATCH, indexes_of
from fluxon_gop.index_rows import Key
from fluxon_gop.index_table import Hint, IndexTable, Row
from fluxon_gop.model import VideoIndex
from fluxon_gop.ranges import ByteRange, Int64Array
from fluxon_gop.reader import VideoReader
from fluxon_gop.requests import Uri
from fluxon_gop.sources import is_source, open_source
from fluxon_gop.stats import ReadStats

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
        if isinstance(videos, str | bytes) or not isinstance(videos, Sequence | Mapping):
            text = f"videos is a {type(videos).__name__}: want a sequence of addresses, a mapping of them, or an IndexTable"
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

    def uris_of(self, video: int) -> dict[str, Uri]:
        """Return a video's addresses by view."""
        return {name: uris[video] for name, uris in self.views.items()}

    @property
    def forks_badly(self) -> str | None:
        """Why a forked worker could not read these videos, None where it could."""
        if self.table is not None and self.table.forks_badly:
            return f"{self.table.uri} is a Lance table, and Lance's threads do not live in a forked process"
        if not all(uris.are_local for uris in self.views.values()):
            return "its videos are not local files, and what reads them does not live in a forked process"
        return None

    def key_of(self, uri: Uri) -> Key:
        """Return the key of a video in a table."""
        if isinstance(uri, str) and self.table is not None and uri in self.table:
            return uri
        source = open_source(uri, self._options)
        try:
            key: Key = getattr(source, "table_key", source.name)
        finally:
            if source is not uri:
                source.close()
        return key

    def frame_counts(self, given: npt.ArrayLike | None, *, need_rows: bool) -> Int64Array:
        """Return each video's number of frames, of several views the least, -1 where nobody knows.

        Without ``given``, or where rows are needed, indexes that the table lacks are built, 64 side by side, and kept in
        memory beside it; a video without an index (no MP4) is counted by demuxing or decoding it.
        """
        counts = None if given is None else as_integers("frame_counts", given, 1)
        if counts is not None and len(counts) != self.count:
            text = f"frame_counts has {len(counts)} numbers for {self.count} videos"
            raise InvalidRequestError(text)
        if counts is not None and not need_rows:
            return counts
        found = np.stack([self._count(uris) for uris in self.views.values()]).min(axis=0)
        return found if counts is None else counts

    def _count(self, uris: Addresses) -> Int64Array:
        listed = list(uris)
        keys = [self.key_of(uri) for uri in listed]
        counts = np.full(len(keys), -1, np.int64) if self.table is None else self.table.frame_counts(keys)
        missing = np.flatnonzero(counts < 0).tolist()
        known = self._rows([keys[place] for place in missing])
        hints = {
            place: row.moov_range if isinstance(row, Hint) else None
            for place, row in zip(missing, known, strict=True)
            if not isinstance(row, VideoIndex)
        }
        lacking = list(hints)
        if len(lacking) > MANY_ROWS:
            _log.warning(
                "%d videos have no index row: each start builds them again; make a table with: fluxon-gop index build",
                len(lacking),
            )
        rows: dict[Key, VideoIndex] = {}
        for at in range(0, len(lacking), BATCH):
            places = lacking[at : at + BATCH]
            built = self._indexes([listed[n] for n in places], [hints[n] for n in places])
            for place, index in zip(places, built, strict=True):
                if index is not None:
                    rows[keys[place]] = index
                    counts[place] = -1 if index.container_reason else index.num_frames
        if rows:
            table = self.table
            self.table = IndexTable.of(rows.items()) if table is None else table.with_rows(rows.items())
        for place in missing:
            if counts[place] < 0:
                counts[place] = self._by_reading(listed[place])
        return counts

    def _rows(self, keys: list[Key]) -> list[Row]:
        """Look rows up, some at a time."""
        if self.table is None:
            return [None] * len(keys)
        parts = (keys[at : at + BATCH] for at in range(0, len(keys), BATCH))
        return [row for part in parts for row in self.table.lookup(part)]

    def _indexes(self, uris: Sequence[Uri], hints: Sequence[ByteRange | None]) -> list[VideoIndex | None]:
        """Build indexes side by side; None for a file that has none."""
        sources = [open_source(uri, self._options) for uri in uris]
        stats = [ReadStats() for _ in sources]
        indexes: list[VideoIndex | None] = [None] * len(sources)
        try:
            for place, index, error in indexes_of(sources, stats, hints=hints):
                indexes[place] = index
                if error is not None and not _has_no_index(error):
                    raise error
        finally:
            for source, uri, one in zip(sources, uris, stats, strict=True):
                self.stats.add(one)
                if source is not uri:
                    source.close()
        return indexes

    def _by_reading(self, uri: Uri) -> int:
        _log.warning(
            "%s: its tables do not tell how many frames it has; the file is read through to count them",
            uri.name if is_source(uri) else self.key_of(uri),
        )
        with VideoReader(uri, index=self.table, storage_options=self._options) as reader:
            count = reader.num_frames
            self.stats.add(reader.stats())
            return count


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
