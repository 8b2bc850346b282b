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
_IDLE_SECONDS = 1.0

Job = Callable[[bool], None]
"""Called with True to do the work, with False to let it be."""


class _Queue:
    """What waits, shared by the owner and its thread: the thread works off what is there when the owner is gone."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[int, Job]] = deque()
        self.waiting = 0
        self.dropped = 0
        self.changed = threading.Condition()
        self.owned = True


class Backfill:
    """One thread that works off jobs; a job beyond the bound is let be, and counted. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        """Start no thread yet. ``max_bytes``: of what waits."""
        self._max_bytes = max_bytes
        self._queue = _Queue()
        self._thread: threading.Thread | None = None
        _all.add(self)
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: the jobs are the parent's."""
        self._queue, self._thread = _Queue(), None

    @property
    def dropped(self) -> int:
        """Jobs that were let be."""
        return self._queue.dropped

    def submit(self, nbytes: int, job: Job) -> None:
        """Have a job done that holds ``nbytes``, or let it be at once where too much waits."""
        queue = self._queue
        with queue.changed:
            fits = bool(self._max_bytes) and (
                not queue.waiting or queue.waiting + nbytes <= self._max_bytes
            )
            if fits and self._has_thread():
                queue.jobs.append((nbytes, job))
                queue.waiting += nbytes
                queue.changed.notify_all()
                return
            queue.dropped += 1
        job(False)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until nothing waits; return whether it came to that within ``timeout`` seconds."""
        queue = self._queue
        with queue.changed:
            return queue.changed.wait_for(lambda: not queue.waiting, timeout)

    def _has_thread(self) -> bool:
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(
                target=_work, args=(self._queue,), name="fluxon_gop-backfill", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                # No thread is to be had: the next job tries again.
                return False
            self._thread = thread
        return True

    def __del__(self) -> None:
        """Have the thread end once all is done."""
        self._queue.owned = False


def _work(queue: _Queue) -> None:
    """Work off the jobs; end when there are none and nobody can bring more."""
    while True:
        with queue.changed:
            while not queue.jobs:
                if not queue.owned:
                    return
                queue.changed.wait(_IDLE_SECONDS)
            nbytes, job = queue.jobs.popleft()
        try:
            job(True)
        except BaseException:  # noqa: BLE001 - what a tier refuses is no reader's concern, and others' jobs go on
            queue.dropped += 1
        finally:
            del job
            with queue.changed:
                queue.waiting -= nbytes
                queue.changed.notify_all()


_all: weakref.WeakSet[Backfill] = weakref.WeakSet()


def _flush_all() -> None:
    for backfill in list(_all):
        backfill.flush(EXIT_SECONDS)


atexit.register(_flush_all)
