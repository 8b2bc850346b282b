"""Many videos, one plan, one wave: leased readers in an LRU, and batches read through them.

Thread-safe. Requests of one video and size become one read; all reads of a batch share their waves.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Self, cast

import numpy as np

from fluxon_gop import forks
from fluxon_gop.batch_plan import BatchPlan, PlannedVideo
from fluxon_gop.errors import (
    ClosedError,
    FluxonGopError,
    FrameIndexError,
    InvalidRequestError,
    SourceChangedError,
)
from fluxon_gop.frame_set import FrameSet
from fluxon_gop.index_job import look_up
from fluxon_gop.index_table import IndexTable
from fluxon_gop.model import VideoIndex
from fluxon_gop.prefetch import Crew
from fluxon_gop.ranges import Int64Array
from fluxon_gop.reader import MAX_BATCH_BYTES, VideoReader, check_options
from fluxon_gop.requests import Uri, VideoReadRequest, VideoReadResult, check_positive
from fluxon_gop.sources import RangeSource
from fluxon_gop.stats import ReadStats

ReaderKey = tuple[object, int | None, int | None]


class VideoReaderPool:
    """Reads batches over many videos; keeps up to ``max_readers`` readers open, least recently used out.

    A reader serves one call at a time; calls at once on one video open several. Readers in use are never
    closed to make room.
    """

    def __init__(
        self,
        max_readers: int = 32,
        *,
        index: VideoIndex | IndexTable | None = None,
        num_threads: int = 1,
        apply_rotation: bool = True,
        max_batch_bytes: int = MAX_BATCH_BYTES,
        storage_options: Mapping[str, Any] | None = None,
        path: str | None = None,
    ) -> None:
        """Open nothing yet.

        Args:
            max_readers: idle and busy readers to keep.
            index: an IndexTable to look videos up in, or None to build each index on the fly.
            num_threads: of one decoder.
            apply_rotation: turn pictures as the display matrix says.
            max_batch_bytes: fetched bytes that a batch holds at once; what exceeds it waits.
            storage_options: for the sources.
            path: "container" or "packet" to force the way of all; None chooses.
        """
        check_positive("max_readers", max_readers)
        check_options(index, num_threads, path)
        check_positive("max_batch_bytes", max_batch_bytes)
        self._max_readers = int(max_readers)
        self._max_bytes = int(max_batch_bytes)
        self._table = index if isinstance(index, IndexTable) else None
        self._options: dict[str, Any] = {
            "index": index,
            "num_threads": num_threads,
            "apply_rotation": apply_rotation,
            "storage_options": storage_options,
            "path": path,
            "max_bytes": self._max_bytes,
        }
        self._idle: OrderedDict[int, tuple[ReaderKey, VideoReader]] = OrderedDict()
        self._busy = 0
        self._lock = threading.Lock()
        self._crews: set[Crew[FrameSet]] = set()
        self._stats = ReadStats()
        self._counts = dict.fromkeys(
            ("open_count", "close_count", "evict_count", "reader_cache_hits", "reader_cache_misses"), 0
        )
        self._closed = False
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: what other threads of the parent held or ran is not here."""
        self._lock = threading.Lock()
        self._crews = set()
        self._busy = 0

    def read_many(
        self, requests: Sequence[VideoReadRequest], *, on_error: str = "raise"
    ) -> list[VideoReadResult]:
        """Return a result for each request, in order.

        With all index rows in memory: one wave of media reads over all videos. Each video decodes as soon
        as its own ranges are in. A batch beyond ``max_batch_bytes`` takes several waves.

        Args:
            requests: any number, of any videos.
            on_error: "raise" the first error; "skip" sets ``error`` in the results that it concerns.

        Raises:
            FluxonGopError: of the first request that failed, with ``on_error="raise"``.
        """
        if on_error not in {"raise", "skip"}:
            text = f"on_error is {on_error!r}: want 'raise' or 'skip'"
            raise InvalidRequestError(text)
        for request in requests:
            if not isinstance(request, VideoReadRequest):
                text = f"a request is a {type(request).__name__}: want VideoReadRequest"  # type: ignore[unreachable]
                raise TypeError(text)
        groups = _grouped(requests)
        results: list[VideoReadResult | None] = [None] * len(requests)
        leased: list[tuple[ReaderKey, VideoReader]] = []
        healthy: set[int] = set()
        try:
            for key in list(groups):
                try:
                    leased.append((key, self._lease(key)))
                except ClosedError:
                    raise
                except FluxonGopError as error:
                    # An address that nothing can be opened by.
                    if on_error == "raise":
                        raise
                    mine = {m: requests[m].frames for m in groups.pop(key)}
                    _deal(None, error, mine, ReadStats(), results)
            stats = self._look_up_rows([reader for _, reader in leased])
            wanted = [
                np.unique(np.concatenate([requests[m].frames for m in members]))
                for members in groups.values()
            ]
            crew: Crew[FrameSet] = Crew(
                [
                    (reader.read_job(frames, one), one)
                    for (_, reader), frames, one in zip(leased, wanted, stats, strict=True)
                ],
                max_bytes=self._max_bytes,
            )
            self._enlist(crew)
            try:
                members_of = list(groups.values())
                for outcome in crew:
                    n = outcome.number
                    mine = {m: requests[m].frames for m in members_of[n]}
                    if isinstance(outcome.error, FrameIndexError) and len(mine) > 1:
                        self._one_by_one(leased[n][1], mine, stats[n], results)
                    else:
                        _deal(outcome.value, outcome.error, mine, stats[n], results)
                    if not isinstance(outcome.error, SourceChangedError):
                        healthy.add(n)
                    if on_error == "raise":
                        failed = next((r for m in mine if (r := results[m]) and r.error), None)
                        if failed is not None and failed.error is not None:
                            raise failed.error
            finally:
                self._dismiss(crew, stats)
        finally:
            for n, (key, reader) in enumerate(leased):
                self._release(key, reader, keep=n in healthy)
        return [result for result in results if result is not None]

    def explain(self, requests: Sequence[VideoReadRequest]) -> BatchPlan:
        """Return the plan of a batch without reading any video; index rows are looked up."""
        videos, waves = [], 1 if requests else 0
        groups = _grouped(requests)
        leased: list[tuple[ReaderKey, VideoReader]] = []
        try:
            leased.extend((key, self._lease(key)) for key in groups)
            self._look_up_rows([reader for _, reader in leased])
            for (_, reader), members in zip(leased, groups.values(), strict=True):
                frames = np.unique(np.concatenate([requests[m].frames for m in members]))
                reader.use_row()
                plan = reader.plan(frames) if reader.has_index_or_reason else None
                note = (plan.reason or "") if plan else f"{reader.why_no_row}: head and movie box first"
                videos.append(PlannedVideo(reader.source.name, len(frames), plan, note))
                waves = waves if plan else 3
        finally:
            for key, reader in leased:
                self._release(key, reader, keep=True)
        return BatchPlan(tuple(videos), waves)

    def stats(self) -> ReadStats:
        """Return a copy of the counters of all batches."""
        copy = ReadStats()
        with self._lock:
            copy.add(self._stats)
        return copy

    def counts(self) -> dict[str, int]:
        """Return the pool's own counters: readers now, opened, closed, evicted, hits and misses."""
        with self._lock:
            return {
                "max_readers": self._max_readers,
                "current_readers": len(self._idle) + self._busy,
                "active_readers": self._busy,
                **self._counts,
            }

    def close(self) -> None:
        """Close idle readers now and busy ones as they return; a batch under way ends with ClosedError."""
        with self._lock:
            self._closed = True
            readers = [reader for _, reader in self._idle.values()]
            self._idle.clear()
            self._counts["close_count"] += len(readers)
            crews = list(self._crews)
        for crew in crews:
            crew.stop()
        for reader in readers:
            reader.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the options; readers are opened where the copy is used."""
        options = {name: value for name, value in self._options.items() if name != "max_bytes"}
        return (_reopen, (self._max_readers, self._max_bytes, options))

    def __repr__(self) -> str:
        """Show the counts."""
        counts = self.counts()
        return f"VideoReaderPool({counts['current_readers']} of {self._max_readers} readers)"

    # ---------------------------------------------------------------- readers

    def _lease(self, key: ReaderKey) -> VideoReader:
        """Take an idle reader of this key, or make one."""
        with self._lock:
            self._check_open()
            for number, (idle_key, reader) in self._idle.items():
                if idle_key == key:
                    del self._idle[number]
                    self._busy += 1
                    self._counts["reader_cache_hits"] += 1
                    return reader
            self._busy += 1
            self._counts["reader_cache_misses"] += 1
            self._counts["open_count"] += 1
        try:
            return VideoReader(cast("Uri", key[0]), height=key[1], width=key[2], **self._options)
        except BaseException:
            with self._lock:
                self._busy -= 1
                self._counts["open_count"] -= 1
            raise

    def _release(self, key: ReaderKey, reader: VideoReader, *, keep: bool) -> None:
        """Put a reader back, or close it; then close the least recently used beyond the bound."""
        closing = []
        with self._lock:
            self._busy -= 1
            if keep and not self._closed:
                self._idle[id(reader)] = (key, reader)
            else:
                closing.append(reader)
            while self._idle and len(self._idle) + self._busy > self._max_readers:
                _, (_, old) = self._idle.popitem(last=False)
                closing.append(old)
                self._counts["evict_count"] += 1
            self._counts["close_count"] += len(closing)
        for old in closing:
            old.close()

    def _check_open(self) -> None:
        if self._closed:
            text = "the pool is closed"
            raise ClosedError(text)

    def _look_up_rows(self, readers: list[VideoReader]) -> list[ReadStats]:
        """Look up all rows of a batch at once; return fresh stats for each reader."""
        stats = [ReadStats() for _ in readers]
        wanting = [n for n, reader in enumerate(readers) if reader.wants_row]
        if wanting and self._table is not None:
            cost = ReadStats()
            rows = look_up(self._table, [readers[n].key for n in wanting], cost)
            with self._lock:
                self._stats.add(cost)
            for n, row in zip(wanting, rows, strict=True):
                stats[n].depth = cost.depth
                readers[n].accept_row(row, stats[n])
        return stats

    def _one_by_one(
        self,
        reader: VideoReader,
        mine: dict[int, Int64Array],
        stats: ReadStats,
        results: list[VideoReadResult | None],
    ) -> None:
        """Read requests apart: a number beyond the end spoils its own request only."""
        for member, frames in mine.items():
            one = ReadStats()
            for outcome in Crew([(reader.read_job(np.unique(frames), one), one)]):
                _deal(outcome.value, outcome.error, {member: frames}, stats, results)
            stats.add(one)

    def _enlist(self, crew: Crew[FrameSet]) -> None:
        with self._lock:
            self._check_open()
            self._crews.add(crew)

    def _dismiss(self, crew: Crew[FrameSet], stats: list[ReadStats]) -> None:
        batch = ReadStats()
        for one in stats:
            batch.add_beside(one)
        with self._lock:
            self._crews.discard(crew)
            self._stats.add(batch)


def _grouped(requests: Sequence[VideoReadRequest]) -> dict[ReaderKey, list[int]]:
    """Return the requests' places by reader key: same video and size is one reader."""
    groups: dict[ReaderKey, list[int]] = {}
    for place, request in enumerate(requests):
        uri = request.uri
        groups.setdefault((_video_of(uri), request.height, request.width), []).append(place)
    return groups


def _video_of(uri: Uri) -> object:
    """Return what a video is known by: a relative path means another file after a change of folder."""
    if isinstance(uri, RangeSource):
        return uri
    text = os.fspath(uri)
    return text if "://" in text else os.path.abspath(text)  # noqa: PTH100 - resolve() would follow links


def _deal(
    frames: FrameSet | None,
    error: BaseException | None,
    mine: dict[int, Int64Array],
    stats: ReadStats,
    results: list[VideoReadResult | None],
) -> None:
    """Give each request its rows, or its error."""
    if error is not None and not isinstance(error, FluxonGopError):
        raise error
    for member, wanted in mine.items():
        if frames is None:
            results[member] = VideoReadResult(None, stats, error)
            continue
        try:
            results[member] = VideoReadResult(frames.rows(wanted), stats)
        except FluxonGopError as failure:
            results[member] = VideoReadResult(None, stats, failure)


def _reopen(max_readers: int, max_bytes: int, options: dict[str, Any]) -> VideoReaderPool:
    return VideoReaderPool(max_readers, max_batch_bytes=max_bytes, **options)
