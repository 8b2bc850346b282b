"""One batch under way: readers leased, rows looked up, the crew that runs its waves, results in order."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fluxon_gop.budget import Budget
from fluxon_gop.deadline import Deadline
from fluxon_gop.errors import ClosedError, FluxonGopError, FrameIndexError, SourceChangedError
from fluxon_gop.frame_set import FrameSet, Wanted
from fluxon_gop.index_job import look_up
from fluxon_gop.index_table import IndexTable
from fluxon_gop.prefetch import Crew
from fluxon_gop.reader import VideoReader
from fluxon_gop.reader_cache import Lease, ReaderCache
from fluxon_gop.requests import Uri, VideoReadRequest, VideoReadResult
from fluxon_gop.stats import ReadStats


class ReaderKey(NamedTuple):
    """What a reader serves."""

    video: object
    """The address or the source; hashable."""
    height: int | None
    width: int | None
    num_threads: int | None


Readers = ReaderCache[ReaderKey, VideoReader]


class Batch:
    """Reads some requests once. ``results``, or ``fetch_ahead`` and later ``results``; then ``close``."""

    def __init__(
        self,
        requests: Sequence[VideoReadRequest],
        readers: Readers,
        table: IndexTable | None,
        budget: Budget,
        deadline: Deadline | None = None,
    ) -> None:
        """Take checked requests; nothing is leased yet."""
        self._requests = list(requests)
        self._readers = readers
        self._table = table
        self._budget = budget
        self._deadline = deadline
        self._results: list[VideoReadResult | None] = [None] * len(self._requests)
        self._members: list[list[int]] = []
        self._leased: list[Lease[ReaderKey, VideoReader]] = []
        self._stats: list[ReadStats] = []
        self._cost = ReadStats()
        self._unfit: set[int] = set()
        self._crew: Crew[FrameSet] | None = None
        self._ahead: threading.Thread | None = None
        self._failed: BaseException | None = None
        self._nested: Crew[FrameSet] | None = None
        self._orders: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._dismiss: Callable[[Batch], None] | None = None
        self._stopped = False
        self._ended = threading.Event()

    def fetch_ahead(self) -> None:
        """Start a thread that looks rows up and runs the waves, but no decoding; returns at once."""
        ahead = threading.Thread(target=self._fetch, name="fluxon_gop-ahead", daemon=True)
        ahead.start()
        self._ahead = ahead

    def begin_reading(self) -> None:
        """Have the time limit of a batch that was fetched ahead begin now, when it is waited for."""
        if self._deadline is not None:
            self._deadline.renew()

    def results(self, *, skip: bool) -> list[VideoReadResult]:
        """Return a result for each request, in order; raises the first error unless ``skip``."""
        self._take_over()
        if self._failed is not None:
            raise self._failed
        crew = self._crew or self._open()
        self._raise_first(range(len(self._requests)), skip=skip)
        for outcome in crew:
            n = outcome.number
            mine = self._members[n]
            if outcome.error is not None and (
                isinstance(outcome.error, SourceChangedError)
                or not isinstance(outcome.error, FluxonGopError)
            ):
                self._unfit.add(n)
            if isinstance(outcome.error, FrameIndexError) and len(mine) > 1:
                self._one_by_one(n, mine)
            else:
                self._deal(outcome.value, outcome.error, mine, self._stats[n], lease=self._leased[n])
            self._raise_first(mine, skip=skip)
        answered = [result for result in self._results if result is not None]
        assert len(answered) == len(self._requests), "a request was left without an answer"
        return answered

    def stop(self) -> None:
        """Make ``results``, in whatever thread it runs, end with ClosedError."""
        self._stopped = True
        for crew in (self._crew, self._nested):
            if crew is not None:
                crew.stop()

    def forget(self, dismiss: Callable[[Batch], None]) -> None:
        """Let the thread that fetches ahead close the batch; nobody will read it. Takes no lock, waits for nothing."""
        self._dismiss = dismiss
        self._orders.put("close")
        if self._crew is not None:
            self._crew.hand_over()

    def close(self) -> ReadStats:
        """Cancel what is under way, give the readers back, and return what the batch cost."""
        self._take_over()
        if self._crew is not None:
            self._crew.abandon()
        leased, self._leased = self._leased, []
        for n, lease in enumerate(leased):
            self._readers.release(lease, keep=n not in self._unfit)
        cost, self._cost = self._cost, ReadStats()
        beside = ReadStats()
        for one in self._stats:
            beside.add_beside(one)
        self._stats = []
        cost.add(beside)
        return cost

    def _fetch(self) -> None:
        """In a thread of its own: fetch until the batch is asked for, or forgotten."""
        try:
            crew = self._open()
            # Whoever gives the order looks for the crew afterwards: one of the two is seen.
            if self._orders.empty():
                crew.fetch()
        except BaseException as error:  # noqa: BLE001 - it is raised where the results are asked for
            self._failed = error
        try:
            if self._orders.get() == "close" and self._dismiss is not None:
                self._dismiss(self)
        finally:
            self._ended.set()

    def _take_over(self) -> None:
        """End the thread that fetches ahead; this one does the rest."""
        ahead = self._ahead
        if ahead is None or ahead is threading.current_thread():
            return
        self._orders.put("hand over")
        if self._crew is not None:
            self._crew.hand_over()
        # An interrupted wait is made again before anything is given back; after an interrupted join() the thread
        # would count as stopped.
        self._ended.wait()
        ahead.join()
        self._ahead = None

    def _open(self) -> Crew[FrameSet]:
        """Lease readers, look up all rows at once, and set up the crew."""
        for key, members in grouped(self._requests).items():
            try:
                lease = self._readers.lease(key)
            except ClosedError:
                raise
            except FluxonGopError as error:
                # An address that nothing can be opened by.
                self._deal(None, error, members, ReadStats())
                continue
            self._leased.append(lease)
            self._members.append(members)
        readers = [lease.reader for lease in self._leased]
        self._stats = look_up_rows(readers, self._table, self._cost)
        wanted = [Wanted.of(*(self._requests[m].frames for m in members)) for members in self._members]
        alone = len(readers) == 1
        jobs = [
            (reader.read_job(frames, stats, alone=alone), stats)
            for reader, frames, stats in zip(readers, wanted, self._stats, strict=True)
        ]
        self._crew = Crew(jobs, self._budget, self._deadline)
        if self._stopped:
            self._crew.stop()
        return self._crew

    def _one_by_one(self, n: int, mine: list[int]) -> None:
        """Read requests apart: a number beyond the end spoils its own request only."""
        lease = self._leased[n]
        for member in mine:
            one = ReadStats()
            job = lease.reader.read_job(Wanted.of(self._requests[member].frames), one)
            self._nested = Crew([(job, one)], self._budget, self._deadline)
            if self._stopped:
                self._nested.stop()
            for outcome in self._nested:
                self._deal(outcome.value, outcome.error, [member], self._stats[n], lease=lease)
            self._stats[n].add(one)

    def _deal(
        self,
        pictures: FrameSet | None,
        error: BaseException | None,
        mine: list[int],
        stats: ReadStats,
        *,
        lease: Lease[ReaderKey, VideoReader] | None = None,
    ) -> None:
        """Give each request its rows, or its error."""
        if error is not None and not isinstance(error, FluxonGopError):
            raise error
        hit = lease is not None and lease.hit
        index = None if lease is None else lease.reader.index
        known = index is not None and index.container_reason is None
        for number, member in enumerate(mine):
            if pictures is None:
                self._results[member] = VideoReadResult(None, stats, error, hit)
                continue
            try:
                array = pictures.array(number)
                times = index.seconds_of(self._requests[member].frames) if index and known else None
                self._results[member] = VideoReadResult(array, stats, None, hit, times, index)
            except FluxonGopError as failure:
                self._results[member] = VideoReadResult(None, stats, failure, hit)

    def _raise_first(self, members: Sequence[int], *, skip: bool) -> None:
        for member in () if skip else members:
            result = self._results[member]
            if result is not None and result.error is not None:
                raise result.error


def grouped(requests: Sequence[VideoReadRequest]) -> dict[ReaderKey, list[int]]:
    """Return the requests' places by reader key: same video and size is one reader."""
    groups: dict[ReaderKey, list[int]] = {}
    for place, request in enumerate(requests):
        key = ReaderKey(_video_of(request.uri), request.height, request.width, request.num_threads)
        groups.setdefault(key, []).append(place)
    return groups


def _video_of(uri: Uri) -> object:
    """Return what a video is known by: a relative path means another file after a change of folder."""
    if not isinstance(uri, str | os.PathLike):
        return uri
    text = os.fspath(uri)
    return text if "://" in text else os.path.abspath(text)  # noqa: PTH100 - resolve() would follow links


def look_up_rows(
    readers: Sequence[VideoReader], table: IndexTable | None, cost: ReadStats
) -> list[ReadStats]:
    """Look up all rows of a batch at once, counted in ``cost``; return fresh stats for each reader."""
    stats = [ReadStats() for _ in readers]
    wanting = [n for n, reader in enumerate(readers) if reader.wants_row]
    if wanting and table is not None:
        rows = look_up(table, [readers[n].key for n in wanting], cost)
        for n, row in zip(wanting, rows, strict=True):
            stats[n].depth = cost.depth
            readers[n].accept_row(row, stats[n])
    return stats
