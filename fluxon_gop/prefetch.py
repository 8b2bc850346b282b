"""One wave of range reads for many videos, each going on as soon as its own ranges are in.

Knows no video: a job is a generator that yields the wave it needs and is sent the bytes. Jobs run on
the calling thread; reads run side by side on one pool of threads per process.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from fluxon_gop.errors import ClosedError
from fluxon_gop.ranges import ByteRange
from fluxon_gop.sources.range_source import Buffer, RangeSource
from fluxon_gop.stats import ReadStats, WaveKind

MAX_REQUESTS_IN_FLIGHT = 64

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
        return sum(r.size for r in self.ranges)


@dataclass(frozen=True)
class Compute:
    """Yielded by a job before long work on the processor: other jobs send their reads first."""


Job = Generator[Wave | Compute, list[Buffer], T]


@dataclass
class Outcome(Generic[T]):
    """How a job ended: ``value``, or ``error``. Its place in the sequence of jobs is ``number``."""

    number: int
    value: T | None = None
    error: BaseException | None = None


@dataclass
class _Running(Generic[T]):
    number: int
    job: Job[T]
    stats: ReadStats
    held: int = 0
    wave: Wave | None = None
    futures: list[Future[Buffer]] = field(default_factory=list)
    left: int = 0
    started: float = 0.0


_pool_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def _io_pool() -> ThreadPoolExecutor:
    """Return the process's pool of reading threads."""
    global _pool  # noqa: PLW0603 - one bounded pool a process is the point
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(MAX_REQUESTS_IN_FLIGHT, thread_name_prefix="fluxon_gop-io")
        return _pool


def _forget_pool() -> None:
    """In a forked child: the parent's threads are not here, and its lock may be held for ever."""
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_pool)


class Crew(Generic[T]):
    """Runs jobs over their waves. Used once: ``for outcome in Crew(jobs, budget): ...``.

    Each outcome comes when its job ends, in no set order. Leaving the loop early, by whatever way,
    cancels the reads that have not begun and waits for those that have.
    """

    def __init__(self, jobs: Sequence[tuple[Job[T], ReadStats]], *, max_bytes: int | None = None) -> None:
        """Take jobs with the stats to count in.

        Args:
            jobs: each is started when the loop begins.
            max_bytes: a wave waits while what other jobs hold and it would exceed this.
        """
        self._runs = [_Running(n, job, stats) for n, (job, stats) in enumerate(jobs)]
        self._max_bytes = max_bytes
        self._ready: queue.SimpleQueue[_Running[T] | None] = queue.SimpleQueue()
        self._waiting: deque[_Running[T]] = deque()
        self._computing: deque[_Running[T]] = deque()
        self._held = 0
        self._in_flight = 0
        self._depth = 0
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Outcome[T]]:
        """Run the jobs and yield their outcomes."""
        try:
            for run in self._runs:
                outcome = self._advance(run, None)
                if outcome is not None:
                    yield outcome
            while self._in_flight or self._waiting or self._computing:
                outcome = self._step()
                if outcome is not None:
                    yield outcome
        finally:
            self._abandon()

    def _step(self) -> Outcome[T] | None:
        """Go on with one job: one whose bytes are in, else one that has work to do, else wait."""
        if self._computing and self._ready.empty():
            return self._advance(self._computing.popleft(), [])
        if not self._in_flight and not self._computing:
            # All that is held belongs to jobs that wait themselves: one of them goes first.
            self._launch(self._waiting.popleft())
        landed = self._ready.get()
        if landed is None:
            text = "closed while the batch was being read"
            raise ClosedError(text)
        return self._land(landed)

    def stop(self) -> None:
        """Make the loop, in whatever thread it runs, end with ClosedError."""
        self._ready.put(None)

    def _advance(self, run: _Running[T], answer: Any) -> Outcome[T] | None:
        """Let a job go on until it needs bytes or ends."""
        try:
            if answer is None:
                wave = next(run.job)
            elif isinstance(answer, BaseException):
                wave = run.job.throw(answer)
            else:
                wave = run.job.send(answer)
        except StopIteration as stop:
            outcome: Outcome[T] = Outcome(run.number, value=stop.value)
        except Exception as error:  # noqa: BLE001 - a job's error is its outcome; the others go on
            outcome = Outcome(run.number, error=error)
        else:
            if isinstance(wave, Compute):
                self._computing.append(run)
            elif self._takes(run, wave):
                self._launch(run)
            else:
                self._waiting.append(run)
            return None
        self._release(run)
        self._admit()
        return outcome

    def _takes(self, run: _Running[T], wave: Wave) -> bool:
        """Note the wave that a job asks for and return whether there is room for it now."""
        if not wave.adds:
            self._release(run)
        run.wave = wave
        return self._fits(wave)

    def _fits(self, wave: Wave) -> bool:
        return self._max_bytes is None or not self._held or self._held + wave.nbytes <= self._max_bytes

    def _release(self, run: _Running[T]) -> None:
        self._held -= run.held
        run.held = 0

    def _admit(self) -> None:
        """Launch waves that waited for room; each comes after everything that has been in flight."""
        while self._waiting:
            run = self._waiting[0]
            assert run.wave is not None
            if not self._fits(run.wave):
                return
            self._waiting.popleft()
            run.stats.depth = max(run.stats.depth, self._depth)
            self._launch(run)

    def _launch(self, run: _Running[T]) -> None:
        wave = run.wave
        assert wave is not None
        run.held += wave.nbytes
        self._held += wave.nbytes
        run.stats.depth += 1
        self._depth = max(self._depth, run.stats.depth)
        run.started = time.perf_counter()
        self._in_flight += 1
        run.left = len(wave.ranges)
        if not wave.ranges:
            run.futures = []
            self._ready.put(run)
        elif len(self._runs) == 1 and run.left == 1:
            run.futures = [_read_here(wave, wave.ranges[0])]
            self._ready.put(run)
        else:
            pool = _io_pool()
            run.futures = [pool.submit(_read, wave, r) for r in wave.ranges]
            for future in run.futures:
                future.add_done_callback(partial(self._one_done, run))

    def _one_done(self, run: _Running[T], _: Future[Buffer]) -> None:
        with self._lock:
            run.left -= 1
            last = run.left == 0
        if last:
            self._ready.put(run)

    def _land(self, run: _Running[T]) -> Outcome[T] | None:
        """Give a job the bytes of its wave, or the first error among its reads."""
        self._in_flight -= 1
        wave, futures = run.wave, run.futures
        assert wave is not None
        run.futures = []
        error = next((e for f in futures if (e := f.exception()) is not None), None)
        data = [f.result() for f in futures if f.exception() is None]
        run.stats.fetch_seconds += time.perf_counter() - run.started
        run.stats.count_wave(wave.kind, len(futures), sum(len(d) for d in data))
        return self._advance(run, data if error is None else error)

    def _abandon(self) -> None:
        pending = [future for run in self._runs for future in run.futures]
        for future in pending:
            future.cancel()
        wait([future for future in pending if not future.cancelled()])
        for run in self._runs:
            run.job.close()


def _read(wave: Wave, wanted: ByteRange) -> Buffer:
    if wave.head:
        return wave.source.read_head(wanted.stop)
    return wave.source.read(*wanted)


def _read_here(wave: Wave, wanted: ByteRange) -> Future[Buffer]:
    """Read on the calling thread: one read gains nothing from another thread."""
    future: Future[Buffer] = Future()
    try:
        future.set_result(_read(wave, wanted))
    except Exception as error:  # noqa: BLE001 - handed on as a pool's thread would
        future.set_exception(error)
    return future


def run_one(job: Job[T], stats: ReadStats) -> T:
    """Run one job to its end and return its value, or raise its error."""
    (outcome,) = Crew([(job, stats)])
    if outcome.error is not None:
        raise outcome.error
    return outcome.value  # type: ignore[return-value]
