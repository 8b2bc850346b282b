"""One event loop a process for remote reads: many at once, any of which can be called off.

Its thread does not live in a forked child; whoever reads there is told so at once.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar, cast

from fluxon_gop.deadline import await_result
from fluxon_gop.errors import ForkedProcessError, SourceError
from fluxon_gop.sources.range_source import Buffer, GroupRead

T = TypeVar("T")


class AsyncSource(Protocol):
    """A source that reads in the loop."""

    @property
    def name(self) -> str:
        """Safe to print."""
        ...

    async def fetch(self, start: int, stop: int, *, head: bool) -> Buffer:
        """Return bytes ``[start, stop)``; with ``head`` what there is of them."""
        ...


class ReadLoop:
    """Runs coroutines on a thread of its own, started at the first use. One ``RangeGroup`` for all remote sources."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid: int | None = None
        self._lock = threading.Lock()

    def start(self, reads: Sequence[GroupRead]) -> list[Future[Buffer]]:
        """Start all reads, and return a future for each; a cancelled one is called off at once."""
        sources = [cast("AsyncSource", read.source) for read in reads]
        return self.submit(
            [
                lambda source=source, read=read: source.fetch(read.start, read.stop, head=read.head)  # type: ignore[misc]
                for source, read in zip(sources, reads, strict=True)
            ],
            sources[0].name if sources else "",
        )

    def call(self, make: Callable[[], Coroutine[Any, Any, T]], name: str) -> T:
        """Run one coroutine and wait for it, from any thread but the loop's own."""
        if self._thread is threading.current_thread():
            text = f"{name}: a blocking read on the read loop's own thread would wait for itself; use another thread"
            raise SourceError(text, source=name)
        (future,) = self.submit([make], name)
        return await_result(future, name)

    def submit(self, makers: Sequence[Callable[[], Coroutine[Any, Any, T]]], name: str) -> list[Future[T]]:
        """Start coroutines; ``name`` is whose they are, for the error in a forked child."""
        loop = self._running(name)
        futures: list[Future[T]] = [Future() for _ in makers]

        def begin() -> None:
            for make, future in zip(makers, futures, strict=True):
                if not future.cancelled():
                    task = loop.create_task(_carry(make, future))
                    future.add_done_callback(lambda done, task=task: _call_off(loop, done, task))  # type: ignore[misc]

        loop.call_soon_threadsafe(begin)
        return futures

    def check_process(self, name: str) -> None:
        """Raise ForkedProcessError in a forked child of a process that has read remotely."""
        if self._pid is not None and self._pid != os.getpid():
            text = (
                f"{name}: read in a forked child of process {self._pid}, which has already read from a "
                "remote store; its IO threads do not live here. Start workers with 'spawn' or 'forkserver', "
                "or read nothing remote before the fork"
            )
            raise ForkedProcessError(text, source=name, parent=self._pid)

    def _running(self, name: str) -> asyncio.AbstractEventLoop:
        self.check_process(name)
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                thread = threading.Thread(target=loop.run_forever, name="fluxon_gop-remote", daemon=True)
                thread.start()
                self._thread = thread
                self._loop, self._pid = loop, os.getpid()
            return self._loop

    def after_fork(self) -> None:
        """In a forked child: the parent's threads may hold the lock for ever; the loop is not here."""
        self._lock = threading.Lock()


async def _carry(make: Callable[[], Coroutine[Any, Any, T]], future: Future[T]) -> None:
    try:
        value = await make()
    except asyncio.CancelledError:
        if not future.cancelled() and future.set_running_or_notify_cancel():
            # Not by us: something below gave up.
            future.set_exception(SourceError("the read was called off by its store"))
        raise
    except BaseException as error:  # noqa: BLE001 - it is the read's error
        if future.set_running_or_notify_cancel():
            future.set_exception(error)
    else:
        if future.set_running_or_notify_cancel():
            future.set_result(value)


def _call_off(loop: asyncio.AbstractEventLoop, future: Future[T], task: asyncio.Task[None]) -> None:
    if future.cancelled():
        loop.call_soon_threadsafe(task.cancel)


READ_LOOP = ReadLoop()
os.register_at_fork(after_in_child=READ_LOOP.after_fork)
