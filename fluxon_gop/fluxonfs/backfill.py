"""Writing into the shared tiers behind the readers' backs, within a bound on what waits."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable

from fluxon_gop import forks

EXIT_SECONDS = 5.0
"""What waits when the process ends is written for up to this long."""

Job = Callable[[bool], None]
"""Called with True to do the work, with False to let it be."""


class Backfill:
    """One thread that works off jobs; a job beyond the bound is let be, and counted. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        """Start no thread yet. ``max_bytes``: of what waits."""
        self._max_bytes = max_bytes
        self._jobs: deque[tuple[int, Job]] = deque()
        self._waiting = 0
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self.dropped = 0
        """Jobs that were let be."""
        _all.add(self)
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: the jobs are the parent's."""
        self._changed = threading.Condition()
        self._jobs, self._waiting, self._thread = deque(), 0, None

    def submit(self, nbytes: int, job: Job) -> None:
        """Have a job done that holds ``nbytes``, or let it be at once where too much waits."""
        with self._changed:
            fits = not self._waiting or self._waiting + nbytes <= self._max_bytes
            if fits and self._max_bytes:
                self._jobs.append((nbytes, job))
                self._waiting += nbytes
                self._start()
                self._changed.notify_all()
                return
            self.dropped += 1
        job(False)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing waits; return whether it came to that within ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=(weakref.ref(self),), daemon=True)
            self._thread.name = "fluxon_gop-backfill"
            try:
                self._thread.start()
            except RuntimeError:
                # No thread is to be had: the next job tries again.
                self._thread = None

    def take(self, patience: float) -> tuple[int, Job] | None:
        """Return the next job, or None after ``patience`` seconds without one; for the thread."""
        with self._changed:
            if not self._jobs and not self._changed.wait_for(lambda: self._jobs, patience):
                return None
            return self._jobs.popleft()

    def done(self, nbytes: int) -> None:
        """Note that a job has ended; for the thread."""
        with self._changed:
            self._waiting -= nbytes
            self._changed.notify_all()


def _work(owner: weakref.ref[Backfill]) -> None:
    """Work off the jobs as long as their owner lives."""
    while True:
        backfill = owner()
        if backfill is None:
            return
        taken = backfill.take(1.0)
        if taken is not None:
            nbytes, job = taken
            try:
                job(True)
            finally:
                backfill.done(nbytes)
            del job
        del backfill, taken


_all: weakref.WeakSet[Backfill] = weakref.WeakSet()


def _flush_all() -> None:
    for backfill in list(_all):
        backfill.flush(EXIT_SECONDS)


atexit.register(_flush_all)
