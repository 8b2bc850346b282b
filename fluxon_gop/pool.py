"""Many videos, one plan, one wave: batches read through leased readers.

Thread-safe. Requests of one video and size become one read; all reads of a batch share their waves.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self, cast

from fluxon_gop import forks
from fluxon_gop.batch import Batch, ReaderKey, Readers, grouped, look_up_rows
from fluxon_gop.batch_plan import BatchPlan, PlannedVideo
from fluxon_gop.budget import Budget
from fluxon_gop.deadline import Deadline
from fluxon_gop.errors import ClosedError, ForkedProcessError, InvalidRequestError
from fluxon_gop.frame_set import Wanted
from fluxon_gop.index_table import IndexTable
from fluxon_gop.model import VideoIndex
from fluxon_gop.plan import gap_for
from fluxon_gop.ranges import ByteRange
from fluxon_gop.reader import MAX_BATCH_BYTES, VideoReader, check_options
from fluxon_gop.reader_cache import Lease, ReaderCache
from fluxon_gop.requests import Uri, VideoReadRequest, VideoReadResult, check_positive, check_timeout
from fluxon_gop.sources.range_source import RequestCosts
from fluxon_gop.stats import ReadStats


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
        timeout: float | None = None,
    ) -> None:
        """Open nothing yet.

        Args:
            max_readers: idle and busy readers to keep.
            index: an IndexTable to look videos up in, or None to build each index on the fly.
            num_threads: spans of one video, or frames of one long span, that decode side by side; videos of a
                batch decode side by side on the process's cores anyway, but for worker processes.
            apply_rotation: turn pictures as the display matrix says.
            max_batch_bytes: fetched bytes that the batches under way hold at once; a wave that exceeds it waits,
                but for one wave of each batch that is being read and has nothing else to go on with.
            storage_options: for the sources.
            path: "container" or "packet" to force the way of all; None chooses.
            timeout: seconds after which ``read_many`` waits for no more bytes: what is not read by then is a
                DeadlineError. A prefetched batch's begin when it is read. None for no limit but the sources' own.
        """
        check_timeout(timeout)
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
        self._timeout = timeout
        self._readers: Readers = ReaderCache(self._max_readers, self._open_reader)
        self._budget = Budget(self._max_bytes)
        self._lock = threading.Lock()
        self._batches: set[Batch] = set()
        self._handles: weakref.WeakSet[PrefetchHandle] = weakref.WeakSet()
        self._stats = ReadStats()
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: what other threads of the parent held or ran is not here."""
        self._lock = threading.Lock()
        self._budget = Budget(self._max_bytes)
        self._batches, self._handles = set(), weakref.WeakSet()

    def read_many(
        self, requests: Sequence[VideoReadRequest] | PrefetchHandle, *, on_error: str = "raise"
    ) -> list[VideoReadResult]:
        """Return a result for each request, in order.

        With all index rows in memory: one wave of media reads over all videos. Each video decodes as soon
        as its own ranges are in, several side by side. A batch beyond ``max_batch_bytes`` takes several waves.

        Args:
            requests: any number, of any videos; or what :meth:`prefetch` returned for them.
            on_error: "raise" the first error; "skip" sets ``error`` in the results that it concerns.

        Raises:
            FluxonGopError: of the first request that failed, with ``on_error="raise"``.
        """
        if on_error not in {"raise", "skip"}:
            text = f"on_error is {on_error!r}: want 'raise' or 'skip'"
            raise InvalidRequestError(text)
        if isinstance(requests, PrefetchHandle):
            batch = requests.take(self)
            batch.begin_reading()
        else:
            check_requests(requests)
            batch = self._batch(requests)
        return self._finish(batch, skip=on_error == "skip")

    def prefetch(self, requests: Sequence[VideoReadRequest]) -> PrefetchHandle:
        """Start a batch's reads now, for ``read_many(handle)`` to decode later; returns at once.

        Its rows, missing indexes and media come in waves on a thread of their own, within what other batches of this
        pool leave of ``max_batch_bytes``; nothing is decoded. Errors come with ``read_many``. A video that another
        batch is using gets a second reader, so that without a table its index is built once more.

        Raises:
            ClosedError: the pool is closed.
        """
        check_requests(requests)
        self._readers.check_open()
        batch = self._batch(requests)
        batch.fetch_ahead()
        handle = PrefetchHandle(self, batch)
        with self._lock:
            self._handles.add(handle)
        try:
            # Closed meanwhile, it would not know of the handle.
            self._readers.check_open()
        except ClosedError:
            handle.close()
            raise
        return handle

    def _batch(self, requests: Sequence[VideoReadRequest]) -> Batch:
        deadline = None if self._timeout is None else Deadline(self._timeout)
        return Batch(requests, self._readers, self._table, self._budget, deadline)

    def _finish(self, batch: Batch, *, skip: bool) -> list[VideoReadResult]:
        with self._lock:
            self._batches.add(batch)
        try:
            self._readers.check_open()
            return batch.results(skip=skip)
        finally:
            self.dismiss(batch)

    def dismiss(self, batch: Batch) -> None:
        """End a batch, and count what it cost."""
        cost = batch.close()
        with self._lock:
            self._batches.discard(batch)
            self._stats.add(cost)

    def explain(self, requests: Sequence[VideoReadRequest]) -> BatchPlan:
        """Return the plan of a batch without reading any video; index rows are looked up."""
        check_requests(requests)
        videos, waves = [], 1 if requests else 0
        groups = grouped(requests)
        leased: list[Lease[ReaderKey, VideoReader]] = []
        cost = ReadStats()
        try:
            leased.extend(map(self._readers.lease, groups))
            look_up_rows([lease.reader for lease in leased], self._table, cost)
            for (_, reader, _), members in zip(leased, groups.values(), strict=True):
                frames = Wanted.of(*(requests[m].frames for m in members)).frames
                reader.use_row()
                plan = reader.plan(frames) if reader.has_index_or_reason else None
                note = (plan.reason or "") if plan else f"{reader.why_no_row}: head and movie box first"
                # What a cache makes of the ranges.
                forecast = getattr(reader.source, "forecast", None)
                costs = getattr(reader.source, "costs", None)
                if plan and costs and not forecast:
                    forecast = partial(_cost_words, costs)
                if plan and forecast:
                    note = "; ".join(filter(None, (note, forecast(plan.ranges))))
                videos.append(PlannedVideo(reader.source.name, len(frames), plan, note))
                waves = waves if plan else 3
        finally:
            with self._lock:
                self._stats.add(cost)
            for lease in leased:
                self._readers.release(lease)
        return BatchPlan(tuple(videos), waves)

    def _open_reader(self, key: ReaderKey) -> VideoReader:
        options = self._options
        if key.num_threads is not None:
            options = {**options, "num_threads": key.num_threads}
        return VideoReader(cast("Uri", key.video), height=key.height, width=key.width, **options)

    def stats(self) -> ReadStats:
        """Return a copy of the counters of all batches."""
        copy = ReadStats()
        with self._lock:
            copy.add(self._stats)
        return copy

    def counts(self) -> dict[str, int]:
        """Return the pool's own counters: readers now, opened, closed, evicted, hits and misses."""
        return self._readers.counts()

    def close(self) -> None:
        """Close idle readers now and busy ones as they return; a batch under way ends with ClosedError."""
        self._readers.close()
        with self._lock:
            batches, handles = list(self._batches), list(self._handles)
        for batch in batches:
            batch.stop()
        for handle in handles:
            handle.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the options; readers are opened where the copy is used."""
        options = {name: value for name, value in self._options.items() if name != "max_bytes"}
        return (_reopen, (self._max_readers, self._max_bytes, {**options, "timeout": self._timeout}))

    def __repr__(self) -> str:
        """Show the counts."""
        counts = self.counts()
        return f"VideoReaderPool({counts['current_readers']} of {self._max_readers} readers)"


class PrefetchHandle:
    """A batch whose reads are under way: give it to ``read_many`` once, or close it."""

    def __init__(self, pool: VideoReaderPool, batch: Batch) -> None:
        """Use :meth:`VideoReaderPool.prefetch`."""
        self._pool = pool
        self._batch: Batch | None = batch
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def take(self, pool: VideoReaderPool) -> Batch:
        """Return the batch to the pool that started it, once."""
        if self._pid != os.getpid():
            text = "a prefetched batch of the parent is read in a forked child; start it there"
            raise ForkedProcessError(text)
        if pool is not self._pool:
            text = "the batch was prefetched by another pool"
            raise InvalidRequestError(text)
        with self._lock:
            batch, self._batch = self._batch, None
        if batch is None:
            text = "the prefetched batch is read or closed already"
            raise ClosedError(text)
        return batch

    def close(self) -> None:
        """Cancel the reads, where the batch was not read; harmless otherwise."""
        if self._pid != os.getpid():
            return
        with self._lock:
            batch, self._batch = self._batch, None
        if batch is not None:
            self._pool.dismiss(batch)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def __del__(self) -> None:
        """Have what a caller forgot closed, on another thread: this may run anywhere, under any lock."""
        batch, self._batch = self._batch, None
        if batch is not None and self._pid == os.getpid():
            batch.forget(self._pool.dismiss)

    def __repr__(self) -> str:
        """Tell whether it can be read."""
        return f"PrefetchHandle({'read or closed' if self._batch is None else 'under way'})"


def _cost_words(costs: RequestCosts, ranges: Sequence[ByteRange]) -> str:
    """Tell how the ranges were joined, and what the wave is expected to take."""
    latency, bandwidth, at_once = costs
    nbytes = sum(one.size for one in ranges)
    seconds = -(-len(ranges) // at_once) * latency + nbytes / bandwidth
    return (
        f"holes up to {gap_for(*costs, len(ranges)):,} bytes read through at {latency * 1e3:.0f} ms and {bandwidth / 1e6:.0f} MB/s, "
        f"about {seconds * 1e3:.0f} ms"
    )


def check_requests(requests: Sequence[VideoReadRequest]) -> None:
    """Refuse what is no sequence of requests."""
    for request in requests:
        if not isinstance(request, VideoReadRequest):
            text = f"a request is a {type(request).__name__}: want VideoReadRequest"  # type: ignore[unreachable]
            raise TypeError(text)


def _reopen(max_readers: int, max_bytes: int, options: dict[str, Any]) -> VideoReaderPool:
    return VideoReaderPool(max_readers, max_batch_bytes=max_bytes, **options)
