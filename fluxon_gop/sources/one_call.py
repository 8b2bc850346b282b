"""Sources of a library that reads ranges of many files in one blocking call, and the groups that make that call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future

from fluxon_gop import threads
from fluxon_gop.errors import FluxonGopError, SourceError
from fluxon_gop.sources.range_source import Buffer, GroupRead, check_range
from fluxon_gop.sources.versioned import VersionedSource


class OneCallSource(VersionedSource):
    """A file whose reads its group makes."""

    @property
    @abstractmethod
    def group(self) -> OneCallGroup:
        """What reads this source together with others."""

    def read(self, start: int, stop: int) -> Buffer:
        """Return bytes ``[start, stop)``."""
        check_range(self.name, start, stop)
        return self.group.read([GroupRead(self, start, stop)])[0]

    def read_head(self, size: int) -> Buffer:
        """Return the first ``size`` bytes or the whole file."""
        return self.group.read([GroupRead(self, 0, size, head=True)])[0]


class OneCallGroup(ABC):
    """Reads of many files are one call, on a thread that nobody waits for."""

    @abstractmethod
    def check_process(self, name: str) -> None:
        """Raise ForkedProcessError where the library's threads do not live; ``name`` is whose read it is."""

    @abstractmethod
    def outcomes(self, reads: Sequence[GroupRead]) -> Sequence[Buffer | BaseException]:
        """Make one call, and return what each read got: its bytes or its error."""

    def start(self, reads: Sequence[GroupRead]) -> list[Future[Buffer]]:
        """Start one call for all reads, and return a future for each."""
        self.check_process(reads[0].source.name)
        futures: list[Future[Buffer]] = [Future() for _ in reads]

        def run() -> None:
            live = [n for n, future in enumerate(futures) if future.set_running_or_notify_cancel()]
            if not live:
                return
            try:
                outcomes = self.outcomes([reads[n] for n in live])
            except FluxonGopError as error:
                outcomes = [error for _ in live]
            except BaseException as error:  # noqa: BLE001 - whatever it was, the reads have failed
                name = reads[live[0]].source.name
                text = f"{name}: the call raises {type(error).__name__}"
                outcomes = [SourceError(text, source=name) for _ in live]
            for n, outcome in zip(live, outcomes, strict=True):
                if isinstance(outcome, BaseException):
                    futures[n].set_exception(outcome)
                else:
                    futures[n].set_result(outcome)

        threads.origin_pool().submit(run)
        return futures

    def read(self, reads: Sequence[GroupRead]) -> list[Buffer]:
        """Make one call for all reads, here; raises the first error."""
        self.check_process(reads[0].source.name)
        found: list[Buffer] = []
        for outcome in self.outcomes(reads):
            if isinstance(outcome, BaseException):
                raise outcome
            found.append(outcome)
        return found
