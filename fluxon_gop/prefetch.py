"""One wave of range reads for many videos, each going on as soon as its own ranges are in.

Knows no video: jobs (``jobs.py``) run on the calling thread; reads, and calls side by side, on the process's threads.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from itertools import islice, repeat
from typing import Any, Generic, NamedTuple, TypeVar

from fluxon_gop import threads
from fluxon_gop.budget import Budget
from fluxon_gop.deadline import Deadline, bound, within
from fluxon_gop.errors import ClosedError
from fluxon_gop.jobs import Compute, Job, Wave, count_called_off, group_reads, landed, read_here, read_range
from fluxon_gop.sources.range_source import Buffer, RangeGroup, group_of
from fluxon_gop.stats import ReadStats

T = TypeVar("T")


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
    at_once: int = 1
    tasks: deque[Callable[[], object]] = field(default_factory=deque)
    calls: set[Future[object]] = field(default_factory=set)
    error: BaseException | None = None
    ended: bool = False
    grouped: bool = False
    """Whether its reads are a group's, which ends them by itself."""


class _Signal(Enum):
    STOP = auto()
    """The loop ends with ClosedError."""
    WAKE = auto()
    """There may be room for a wave that waits."""
    HAND_OVER = auto()
    """The thread that fetches ahead leaves the rest to the caller."""


class _Called(NamedTuple):
    run: _Running[Any]
    future: Future[object]


class Crew(Generic[T]):
    """Runs jobs over their waves. Used once: ``for outcome in Crew(jobs): ...``.

    Each outcome comes when its job ends, in no set order. Leaving the loop early, by whatever way,
    cancels the reads that have not begun and waits for those that have.
    """

    def __init__(
        self,
        jobs: Sequence[tuple[Job[T], ReadStats]],
        budget: Budget | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        """Take jobs with the stats to count in.

        Args:
            jobs: each is started when the loop begins, or when the crew fetches ahead.
            budget: a wave waits while what others hold and it would exceed this.
            deadline: at which jobs that wait for bytes end with DeadlineError; calls that have begun go on.
        """
        self._runs = [_Running(n, job, stats) for n, (job, stats) in enumerate(jobs)]
        self._budget = budget or Budget(None)
        self._deadline = deadline
        self._late = False
        self._ready: queue.SimpleQueue[_Running[T] | _Called | _Signal] = queue.SimpleQueue()
        self._waiting: deque[_Running[T]] = deque()
        self._computing: deque[_Running[T]] = deque()
        self._gathered: dict[int, tuple[RangeGroup, list[_Running[T]]]] = {}
        self._early: list[Outcome[T]] = []
        self._fetching = False
        self._woken = False
        self._begun = False
        self._in_flight = self._calls = 0
        self._depth = 0
        self._limits: dict[int, int] = {}
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Outcome[T]]:
        """Run the jobs, or what ``fetch`` left of them, and yield their outcomes."""
        self._fetching = False
        try:
            yield from self._early
            yield from self._begin()
            while self._in_flight or self._waiting or self._computing or self._calls:
                if self._deadline is not None and self._deadline.is_over and not self._late:
                    yield from self._out_of_time(self._deadline)
                    continue
                outcome = self._step()
                if outcome is not None:
                    yield outcome
        finally:
            self.abandon()

    def fetch(self) -> None:
        """Run the jobs' waves, and no computing, until ``hand_over`` is called.

        For a thread that fetches ahead of the one that iterates.
        """
        self._fetching = True
        self._early.extend(self._begin())
        while True:
            self._send()
            event = self._ready.get()
            if event is _Signal.HAND_OVER:
                return
            if event is _Signal.STOP:
                # For the caller, who is told when the crew is iterated.
                self._ready.put(event)
                return
            outcome = self._take(event)
            if outcome is not None:
                self._early.append(outcome)

    def hand_over(self) -> None:
        """Make ``fetch``, in whatever thread it runs, return."""
        self._ready.put(_Signal.HAND_OVER)

    def stop(self) -> None:
        """Make the loop, in whatever thread it runs, end with ClosedError."""
        self._ready.put(_Signal.STOP)

    def wake(self) -> None:
        """Look again whether there is room for a wave that waits."""
        if not self._woken:
            self._woken = True
            self._ready.put(_Signal.WAKE)

    def abandon(self) -> None:
        """Cancel what has not begun, wait for what has, and close the jobs."""
        pending: list[Future[Any]] = []
        for run in self._runs:
            if run.grouped:
                for future in run.futures:
                    future.cancel()
            else:
                pending += run.futures
            pending += run.calls
        for future in pending:
            future.cancel()
        wait([future for future in pending if not future.cancelled()])
        for run in self._runs:
            if run.futures and run.wave is not None:
                count_called_off(run.wave, run.futures, run.stats, sent=run.grouped)
            run.job.close()
            self._release(run)

    def _begin(self) -> Iterator[Outcome[T]]:
        if not self._begun:
            self._begun = True
            for run in self._runs:
                outcome = self._advance(run, None)
                if outcome is not None:
                    yield outcome

    def _step(self) -> Outcome[T] | None:
        """Go on with one job: one whose bytes are in, else one that has work to do, else wait."""
        self._send()
        self._hand_out()
        if self._computing and not self._calls and self._ready.empty():
            return self._work_here(self._computing.popleft())
        if not self._in_flight and not self._computing and not self._calls:
            # All that is held belongs to jobs that wait themselves: one of them goes first.
            self._launch(self._waiting.popleft(), force=True)
            self._send()
        timed = self._deadline is not None and not self._late
        try:
            return self._take(
                self._ready.get(timeout=self._deadline.left if timed and self._deadline else None)
            )
        except queue.Empty:
            return None

    def _out_of_time(self, deadline: Deadline) -> Iterator[Outcome[T]]:
        """End the jobs that wait for bytes; those that have theirs go on, as far as they need no more."""
        self._late = True
        with suppress(queue.Empty):
            while True:
                outcome = self._take(self._ready.get_nowait())
                if outcome is not None:
                    yield outcome
        self._gathered = {}
        for run in self._runs:
            waits = run in self._waiting
            if run.ended or not (waits or run.left):
                continue
            if waits:
                self._waiting.remove(run)
            else:
                self._in_flight -= 1
            for future in run.futures:
                future.cancel()
            yield self._late_end(run, deadline)

    def _late_end(self, run: _Running[T], deadline: Deadline) -> Outcome[T]:
        run.ended = True
        self._release(run)
        assert run.wave is not None
        return Outcome(run.number, error=deadline.error(run.wave.source.name))

    def _take(self, event: _Running[T] | _Called | _Signal) -> Outcome[T] | None:
        if isinstance(event, _Running):
            return self._land(event)
        if isinstance(event, _Called):
            return self._called(event)
        if event is _Signal.STOP:
            text = "closed while the batch was being read"
            raise ClosedError(text)
        self._woken = False
        self._admit()
        return None

    def _advance(self, run: _Running[T], answer: Any) -> Outcome[T] | None:
        """Let a job go on until it needs bytes, has work to do, or ends."""
        try:
            with within(self._deadline):
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
                run.tasks, run.at_once, run.error = deque(wave.tasks), wave.at_once, None
                self._computing.append(run)
                return None
            if not wave.adds:
                self._release(run)
            run.wave = wave
            if self._late and self._deadline is not None:
                return self._late_end(run, self._deadline)
            if not self._launch(run):
                # Told first, so that room made between the two tries is not missed.
                self._budget.subscribe(self)
                if not self._launch(run):
                    self._waiting.append(run)
            return None
        run.ended = True
        self._release(run)
        self._admit()
        return outcome

    # ------------------------------------------------------------- computing

    def _hand_out(self) -> None:
        """Give calls of the jobs that wait for them to the process's threads, as many as may run at once.

        A single call gains nothing from another thread.
        """
        if not self._computing:
            return
        alone = len(self._runs) == 1 and not self._calls
        if alone and all(min(len(run.tasks), run.at_once) < 2 for run in self._computing):
            return
        for run in list(self._computing):
            limit = self._limit_for(run.at_once)
            while run.tasks and len(run.calls) < run.at_once and self._calls < limit > 1:
                self._call(run, run.tasks.popleft())
            if not run.tasks and run.calls:
                self._computing.remove(run)

    def _limit_for(self, at_once: int) -> int:
        if at_once not in self._limits:
            self._limits[at_once] = threads.decode_limit(at_once)
        return self._limits[at_once]

    def _call(self, run: _Running[T], task: Callable[[], object]) -> None:
        future = threads.decode_pool().submit(bound(self._deadline, task))
        run.calls.add(future)
        self._calls += 1
        future.add_done_callback(lambda done: self._ready.put(_Called(run, done)))

    def _called(self, called: _Called) -> Outcome[T] | None:
        """Note that a call has ended; the job goes on behind its last one."""
        run, future = called
        run.calls.discard(future)
        self._calls -= 1
        error = future.exception()
        if error is not None:
            run.error = run.error or error
            if run.tasks:
                run.tasks.clear()
                self._computing.remove(run)
        if run.tasks or run.calls:
            return None
        return self._advance(run, [] if run.error is None else run.error)

    def _work_here(self, run: _Running[T]) -> Outcome[T] | None:
        """Make a job's calls on this thread."""
        try:
            with within(self._deadline):
                while run.tasks:
                    run.tasks.popleft()()
        except Exception as error:  # noqa: BLE001 - the job is told, as it would be of a wave's error
            run.tasks.clear()
            return self._advance(run, error)
        return self._advance(run, [])

    # ------------------------------------------------------------- reading

    def _release(self, run: _Running[T]) -> None:
        held, run.held = run.held, 0
        if held:
            self._budget.give(held)

    def _admit(self) -> None:
        """Launch waves that waited for room; each comes after everything that has been in flight."""
        while self._waiting:
            run = self._waiting[0]
            depth = max(run.stats.depth, self._depth)
            if not self._launch(run, depth=depth):
                return
            self._waiting.popleft()

    def _launch(self, run: _Running[T], *, force: bool = False, depth: int | None = None) -> bool:
        """Send a job's wave where there is room for it, and return whether there was."""
        wave = run.wave
        assert wave is not None
        nbytes = wave.nbytes
        if not self._budget.take(nbytes, force=force):
            return False
        run.held += nbytes
        run.stats.depth = (run.stats.depth if depth is None else depth) + 1
        self._depth = max(self._depth, run.stats.depth)
        run.started = time.perf_counter()
        run.left, run.grouped = len(wave.ranges), False
        group = group_of(wave.source)
        if not wave.ranges:
            run.futures = []
            self._ready.put(run)
        elif group is not None:
            # Sent with the waves of the group's other sources.
            run.futures, run.grouped = [], True
            self._gathered.setdefault(id(group), (group, []))[1].append(run)
        elif len(self._runs) == 1 and run.left == 1 and not self._fetching:
            run.futures = [read_here(wave, wave.ranges[0])]
            self._ready.put(run)
        else:
            pool = threads.io_pool()
            # One by one: where a thread cannot be started, those under way are known and waited for.
            run.futures = []
            for wanted in wave.ranges:
                run.futures.append(pool.submit(read_range, wave, wanted))
            for future in run.futures:
                future.add_done_callback(partial(self._one_done, run))
        self._in_flight += 1
        return True

    def _send(self) -> None:
        """Start the reads of waves over sources that read together: one call for each group."""
        gathered, self._gathered = self._gathered, {}
        for group, runs in gathered.values():
            waves = [run.wave for run in runs if run.wave is not None]
            try:
                futures = iter(group.start([read for wave in waves for read in group_reads(wave)]))
            except Exception as error:  # noqa: BLE001 - the jobs are told, as of any read's error
                futures = repeat(_failed(error))
            for run, wave in zip(runs, waves, strict=True):
                run.futures = list(islice(futures, len(wave.ranges)))
            for run in runs:
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
        if run.ended:
            # Its time was over before its bytes came.
            return None
        self._in_flight -= 1
        run.left = 0
        assert run.wave is not None
        reads, run.futures = run.futures, []
        try:
            data = landed(run.wave, reads, run.stats, run.started)
        except Exception as error:  # noqa: BLE001 - the job is told, and may go on
            return self._advance(run, error)
        return self._advance(run, data)


def _failed(error: Exception) -> Future[Buffer]:
    future: Future[Buffer] = Future()
    future.set_exception(error)
    return future
