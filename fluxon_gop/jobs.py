"""What a job asks for: waves of range reads, and calls to make; and how one job runs alone.

Knows no video: a job is a generator that yields the wave it needs and is sent the bytes, or yields calls to
make and is sent nothing. Many jobs run together in ``prefetch``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeVar

from fluxon_gop import threads
from fluxon_gop.deadline import Deadline, bound, within
from fluxon_gop.errors import DeadlineError
from fluxon_gop.ranges import ByteRange
from fluxon_gop.sources.range_source import Buffer, GroupRead, RangeSource, group_of
from fluxon_gop.stats import ReadStats, WaveKind

T = TypeVar("T")


@dataclass(frozen=True)
class Wave:
    """Ranges of one source that a job needs before it can go on."""

    kind: WaveKind
    source: RangeSource
    ranges: tuple[ByteRange, ...]
    head: bool = False
    """Read as the file's head: it may be shorter than asked, and tells the size."""
    adds: bool = False
    """What the waves before brought stays in memory beside it."""

    @property
    def nbytes(self) -> int:
        """Bytes to fetch."""
        return sum([stop - start for start, stop in self.ranges])


@dataclass(frozen=True)
class Compute:
    """Work on the processor that a job waits for: other jobs send their reads first."""

    tasks: tuple[Callable[[], object], ...]
    """Calls, made in any order; the first error comes back to the job."""
    at_once: int = 1
    """How many of them may run side by side."""


Job = Generator[Wave | Compute, list[Buffer], T]


def read_range(wave: Wave, wanted: ByteRange) -> Buffer:
    """Read one range of a wave."""
    if wave.head:
        return wave.source.read_head(wanted.stop)
    return wave.source.read(*wanted)


def group_reads(wave: Wave) -> list[GroupRead]:
    """Return a wave's reads, for the group of its source."""
    return [GroupRead(wave.source, start, stop, wave.head) for start, stop in wave.ranges]


def run_one(job: Job[T], stats: ReadStats, deadline: Deadline | None = None) -> T:
    """Run one job to its end and return its value, or raise its error.

    As a crew of one, without its books: a wave of one read, and a single call, stay on this thread.
    """
    try:
        with within(deadline):
            step = next(job)
        while True:
            try:
                if isinstance(step, Compute):
                    answer = _compute(step, deadline)
                else:
                    answer = _fetch(step, stats, deadline)
            except DeadlineError as error:
                if deadline is not None and deadline.is_over:
                    raise
                with within(deadline):
                    step = job.throw(error)
            except Exception as error:  # noqa: BLE001 - the job is told, and may go on
                with within(deadline):
                    step = job.throw(error)
            else:
                with within(deadline):
                    step = job.send(answer)
    except StopIteration as stop:
        value: T = stop.value
        return value
    finally:
        job.close()


def _compute(work: Compute, deadline: Deadline | None) -> list[Buffer]:
    side_by_side = min(len(work.tasks), work.at_once, threads.decode_limit(work.at_once))
    if side_by_side < 2:
        with within(deadline):
            for task in work.tasks:
                task()
        return []
    waiting = deque(bound(deadline, task) for task in work.tasks)

    def go_on() -> None:
        while waiting:
            try:
                task = waiting.popleft()
            except IndexError:
                # Another thread took the last one.
                return
            try:
                task()
            except BaseException:
                waiting.clear()
                raise

    pool = threads.decode_pool()
    calls = [pool.submit(go_on) for _ in range(side_by_side - 1)]
    try:
        go_on()
    finally:
        waiting.clear()
        # A helper that has not begun has nothing left to do: other batches may keep its thread for long.
        begun = [call for call in calls if not call.cancel()]
        wait(begun)
    for call in begun:
        call.result()
    return []


def _fetch(wave: Wave, stats: ReadStats, deadline: Deadline | None) -> list[Buffer]:
    started = time.perf_counter()
    stats.depth += 1
    group = group_of(wave.source)
    if group is not None:
        reads = group.start(group_reads(wave))
    else:
        pool = threads.io_pool() if len(wave.ranges) > 1 else None
        reads = [
            read_here(wave, wanted) if pool is None else pool.submit(read_range, wave, wanted)
            for wanted in wave.ranges
        ]
    try:
        if wait(reads, None if deadline is None else deadline.left).not_done:
            assert deadline is not None
            raise deadline.error(wave.source.name)
        return landed(wave, reads, stats, started)
    finally:
        for read in reads:
            read.cancel()
        if group is None:
            wait([read for read in reads if not read.cancelled()])


def read_here(wave: Wave, wanted: ByteRange) -> Future[Buffer]:
    """Read on the calling thread: one read gains nothing from another thread."""
    future: Future[Buffer] = Future()
    try:
        future.set_result(read_range(wave, wanted))
    except Exception as error:  # noqa: BLE001 - handed on as a pool's thread would
        future.set_exception(error)
    return future


def landed(wave: Wave, reads: Sequence[Future[Buffer]], stats: ReadStats, started: float) -> list[Buffer]:
    """Return what a wave's reads, all done, have brought, and count it; raises the first error among them."""
    data = [read.result() for read in reads if read.exception() is None]
    stats.fetch_seconds += time.perf_counter() - started
    stats.count_wave(wave.kind, len(reads), sum(len(piece) for piece in data))
    for read in reads:
        read.result()
    return data


def count_called_off(wave: Wave, reads: Sequence[Future[Buffer]], stats: ReadStats, *, sent: bool) -> None:
    """Count a wave that nobody waits for any more: its requests that were, or with ``sent`` may have been, sent."""
    done = [read for read in reads if read.done() and not read.cancelled() and read.exception() is None]
    requests = len(reads) if sent else sum(not read.cancelled() for read in reads)
    if requests:
        stats.count_wave(wave.kind, requests, sum(len(read.result()) for read in done))
