"""What all remote sources have in common: one version, time limits, further tries, one renewal for many waiters."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from fluxon_gop.errors import (
    DeadlineError,
    ShortReadError,
    SourceError,
    SourcePermissionError,
)
from fluxon_gop.model import Signature
from fluxon_gop.sources.host import Host
from fluxon_gop.sources.options import RemoteOptions
from fluxon_gop.sources.range_source import Buffer, RequestCosts, changed, check_range
from fluxon_gop.sources.read_loop import READ_LOOP, ReadLoop
from fluxon_gop.sources.versioned import VersionedSource

_log = logging.getLogger(__name__)

T = TypeVar("T")

LATENCY_SECONDS = 0.02
"""Taken for a request before one was measured."""
BANDWIDTH = 100e6
"""Bytes a second, likewise."""


class TransientError(Exception):
    """A request failed for the moment: another try may succeed. ``error`` is what is raised when no try does."""

    def __init__(self, error: SourceError) -> None:
        """Keep the typed error."""
        super().__init__(str(error))
        self.error = error


class DeniedError(Exception):
    """The store refused a request; once renewed, credentials or address may do. ``error`` is what is raised else."""

    def __init__(self, error: SourcePermissionError, seen: Any) -> None:
        """Keep the typed error, and what ``_renew`` needs to tell whether somebody has renewed since."""
        super().__init__(str(error))
        self.error = error
        self.seen = seen


class RemoteSource(VersionedSource):
    """One remote file. Reads run in the process's read loop; thread-safe.

    The version is pinned by the first answer, or by ``pin``, and every answer is held against it. A request that fails
    for the moment (408, 425, 429, 5xx, resets, stalls, bodies cut short) is tried again with growing, random pauses,
    within the limits of the options.
    """

    def __init__(self, name: str, options: RemoteOptions, host: Host) -> None:
        """Name the file; no request is made yet."""
        super().__init__()
        self._name = name
        self._limits = options
        self._host = host

    @property
    def name(self) -> str:
        """The address without secrets."""
        return self._name

    @property
    def group(self) -> ReadLoop:
        """What reads remote sources together."""
        return READ_LOOP

    @property
    def costs(self) -> RequestCosts:
        """What a request costs: as the options say, as measured, or as is usual."""
        options, host = self._limits, self._host
        return RequestCosts(
            options.latency_seconds or host.latency_seconds or LATENCY_SECONDS,
            options.bandwidth or host.bandwidth or BANDWIDTH,
            host.max_requests,
        )

    @property
    def signature(self) -> Signature:
        """The pinned or first seen version; one request where nothing was read yet."""
        if self._signature is None:
            self.check_open()
            READ_LOOP.call(self._ask, self._name)
        assert self._signature is not None
        return self._signature

    def read(self, start: int, stop: int) -> Buffer:
        """Return bytes ``[start, stop)`` by one request, and further tries where it fails for the moment."""
        check_range(self._name, start, stop)
        self.check_open()
        return READ_LOOP.call(lambda: self.fetch(start, stop, head=False), self._name)

    def read_head(self, size: int) -> Buffer:
        """Return the first ``size`` bytes or the whole file by one request; the version is known after it."""
        self.check_open()
        return READ_LOOP.call(lambda: self.fetch(0, size, head=True), self._name)

    async def fetch(self, start: int, stop: int, *, head: bool) -> Buffer:
        """Return bytes ``[start, stop)``, with ``head`` what there is of them. In the read loop."""
        if not head:
            check_range(self._name, start, stop)
        data, meta = await self._persist(lambda: self._attempt(start, stop), stop - start)
        self._hold(meta)
        want = min(stop, meta.size) - start if head else stop - start
        if len(data) != want:
            text = f"{self.name}: asked for bytes [{start}, {start + want}), got {len(data)}: the file ends there"
            raise ShortReadError(text, source=self.name, start=start, stop=start + want, got=len(data))
        answer: Buffer = data
        return answer

    async def _ask(self) -> None:
        meta = await self._persist(self._ask_once, 0)
        self._hold(meta)

    def _hold(self, meta: Signature) -> None:
        """Hold an answer's version against the pinned one; the first one is pinned."""
        if self._signature is None:
            self._signature = meta
        elif not self._signature.fits(meta):
            raise changed(self._name, self._signature, meta)

    # ------------------------------------------------------------- for the kinds of stores

    @abstractmethod
    async def _attempt(self, start: int, stop: int) -> tuple[memoryview, Signature]:
        """Make one request for a range; the signature is the answer's. Conditional on the pinned version where it can be.

        Raises:
            TransientError: it failed for the moment.
            DeniedError: it was refused.
            SourceError: any other failure.
        """

    @abstractmethod
    async def _ask_once(self) -> Signature:
        """Make one request for the version; raises as ``_attempt``."""

    async def _renew(self, seen: Any) -> bool:
        """Renew credentials or address, once for all who wait; return whether there is a way to."""
        del seen
        return False

    # ------------------------------------------------------------- persistence

    async def _persist(self, request: Any, nbytes: int) -> Any:
        """Make a request until it succeeds, fails for good, or the limits are reached."""
        self.check_open()
        limits = self._limits
        last: list[SourceError] = []

        async def limited() -> Any:
            self.check_open()
            try:
                async with asyncio.timeout(limits.attempt_seconds):
                    return await request()
            except TimeoutError:
                text = (
                    f"{self.name}: no answer within the limit of a request ({limits.attempt_seconds:g} s)"
                )
                last[:] = [DeadlineError(text, source=self.name)]
                _log.info("another try: %s", text)
                raise TransientError(last[0]) from None
            except TransientError as error:
                last[:] = [error.error]
                _log.info("another try: %s", error)
                raise

        async def renewing() -> Any:
            try:
                return await self._again(limited)
            except DeniedError as denied:
                if not await self._renew(denied.seen):
                    raise denied.error from None
                _log.info("%s: renewed", self._name)
            try:
                return await self._again(limited)
            except DeniedError as denied:
                raise denied.error from None

        async with self._host.slot(nbytes):
            started = time.monotonic()
            try:
                async with asyncio.timeout(limits.retry_seconds):
                    return await renewing()
            except TransientError as error:
                tries = limits.max_retries + 1
                text = f"{error.error.message} ({tries} tries in {time.monotonic() - started:.1f} s)"
                raise type(error.error)(text, **error.error.numbers) from None
            except TimeoutError:
                why = f"; the last try: {last[0].message}" if last else ""
                text = (
                    f"{self.name}: not read within the limit of all tries ({limits.retry_seconds:g} s){why}"
                )
                raise DeadlineError(text, source=self.name) from None

    async def _again(self, request: Callable[[], Awaitable[Any]]) -> Any:
        """Make a request, and again where it fails for the moment, with growing, random pauses."""
        try:
            return await request()
        except TransientError as error:
            first = [error]

        async def repeat() -> Any:
            if first:
                # Already tried: tenacity's books are dear where nothing fails.
                raise first.pop()
            return await request()

        retrying = AsyncRetrying(
            stop=stop_after_attempt(self._limits.max_retries + 1),
            wait=wait_random_exponential(multiplier=0.1, max=5.0),
            retry=retry_if_exception_type(TransientError),
            reraise=True,
        )
        return await retrying(repeat)
