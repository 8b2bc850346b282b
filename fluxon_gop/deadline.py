"""The moment at which a call must have ended, and how what runs on its behalf knows of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from typing import TypeVar

from fluxon_gop.errors import DeadlineError

T = TypeVar("T")


class Deadline:
    """The moment at which a call must have ended."""

    def __init__(self, seconds: float) -> None:
        """Set it ``seconds`` from now."""
        self._seconds = seconds
        self._moment = time.monotonic() + seconds

    def renew(self) -> None:
        """Set it anew, as many seconds from now."""
        self._moment = time.monotonic() + self._seconds

    @property
    def left(self) -> float:
        """Seconds that are left, 0 where it is over."""
        return max(self._moment - time.monotonic(), 0.0)

    @property
    def is_over(self) -> bool:
        """Whether it is over."""
        return time.monotonic() >= self._moment

    def error(self, name: str) -> DeadlineError:
        """Return the error for a video that was not read in time."""
        text = f"{name}: not read within the call's limit ({self._seconds:g} s)"
        return DeadlineError(text, source=name)


class _Here(threading.local):
    deadline: Deadline | None = None


_here = _Here()


@contextmanager
def within(deadline: Deadline | None) -> Iterator[None]:
    """Have what this thread waits for meanwhile end at a deadline."""
    before, _here.deadline = _here.deadline, deadline
    try:
        yield
    finally:
        _here.deadline = before


def bound(deadline: Deadline | None, task: Callable[[], object]) -> Callable[[], object]:
    """Return a call that ends its waiting at a deadline, in whatever thread it is made."""
    if deadline is None:
        return task

    def run() -> object:
        with within(deadline):
            return task()

    return run


def await_result(future: Future[T], name: str) -> T:
    """Return a future's result, or call it off: at this thread's deadline, and where the wait is interrupted."""
    deadline = _here.deadline
    try:
        return future.result(None if deadline is None else deadline.left)
    except FutureTimeoutError:
        if deadline is None or (future.done() and not future.cancelled()):
            # Its own error, or it came just now.
            return future.result()
        future.cancel()
        raise deadline.error(name) from None
    except BaseException:
        future.cancel()
        raise
