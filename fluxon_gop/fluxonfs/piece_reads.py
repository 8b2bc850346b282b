"""Reads under way, and pieces under way: who waits for what, and what has come."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Protocol

from fluxon_gop.errors import FluxonGopError, ShortReadError, SourceError
from fluxon_gop.fluxonfs.agent_wire import AgentRead
from fluxon_gop.fluxonfs.export import MissPolicy
from fluxon_gop.fluxonfs.piece_key import FilePieces, PieceKey
from fluxon_gop.sources.range_source import Buffer, GroupRead

MAX_RUN_BYTES = 8 * 1024 * 1024
"""Most that one request to the origin asks for."""


class Agents(Protocol):
    """What gives ranges of many files in one call. Hashable; equal ones are asked together."""

    def read_many(self, reads: Sequence[AgentRead]) -> Iterator[tuple[int, Buffer | FluxonGopError]]:
        """Yield each read's place with its bytes or its error, as they come."""
        ...

    def __hash__(self) -> int:
        """Equal ones are one."""
        ...


class PieceSource(Protocol):
    """A file that is read by pieces, under somebody's right to read it."""

    @property
    def name(self) -> str:
        """Safe to print."""
        ...

    @property
    def size(self) -> int:
        """Bytes of the file, once the right is granted."""
        ...

    @property
    def pieces(self) -> FilePieces | None:
        """Its pieces, once the right is granted; None where it bypasses the tiers."""
        ...

    @property
    def miss_policy(self) -> MissPolicy:
        """What a miss does."""
        ...

    @property
    def backfills(self) -> bool:
        """Whether a miss fills the shared tiers."""
        ...

    @property
    def is_granted(self) -> bool:
        """Whether the right holds for now."""
        ...

    def grant(self) -> None:
        """Have the right, and know the file's version."""
        ...

    def read_origin(self, start: int, stop: int) -> Buffer:
        """Read from the origin, in one request."""
        ...

    @property
    def agents(self) -> Agents | None:
        """What reads its origin together with others', in one call; None where each read is one of its own."""
        ...

    def agent_read(self, start: int, stop: int) -> AgentRead:
        """Return bytes ``[start, stop)`` as ``agents`` is asked for them."""
        ...

    def failed(self, error: SourceError) -> SourceError:
        """Return an origin's error as this file's."""
        ...

    def count(self, **changes: int) -> None:
        """Add to the counters."""
        ...


class PieceRead:
    """One read: what it waits for, and what has come. Its future is done exactly once."""

    def __init__(self, source: PieceSource, read: GroupRead, future: Future[Buffer]) -> None:
        """Take a read of ``source``; what it needs is not known yet."""
        self.source = source
        self.start, self.stop = read.start, read.stop
        self.finished = False
        self._future = future
        self._head = read.head
        self._missing: set[int] = set()
        self._parts: dict[int, bytes] = {}
        self._begun = self._alive = False
        self._lock = threading.Lock()

    def fit(self, size: int) -> bool:
        """Cut a head to the file's size; return whether there is anything to read."""
        if self._head:
            self.stop = min(self.stop, size)
            if not self.stop:
                self.end(b"")
            return self.stop > 0
        if self.stop > size:
            got = max(size - self.start, 0)
            name = self.source.name
            text = f"{name}: asked for bytes [{self.start}, {self.stop}), got {got}: the file ends there"
            self.fail(ShortReadError(text, source=name, start=self.start, stop=self.stop, got=got))
            return False
        return True

    def need(self, pieces: FilePieces) -> range:
        """Return, and note, the pieces that the read waits for."""
        indices = pieces.indices(self.start, self.stop)
        self._missing = set(indices)
        return indices

    def take(self, index: int, data: bytes) -> None:
        """Take a piece; the last one ends the read."""
        with self._lock:
            self._parts[index] = data
            self._missing.discard(index)
            if self._missing or self.finished:
                return
        try:
            whole = self._assembled()
        except BaseException as error:  # noqa: BLE001 - out of memory, say: the reader is told
            self.fail(error)
        else:
            self.end(whole)

    def begin(self) -> bool:
        """Note that the read is under way; False where it was cancelled before."""
        with self._lock:
            if not self._begun:
                self._begun = True
                self._alive = self._future.set_running_or_notify_cancel()
            return self._alive

    def end(self, data: Buffer) -> None:
        """End with bytes, unless it has ended."""
        if self._ends() and self.begin():
            self._future.set_result(data)

    def fail(self, error: BaseException) -> None:
        """End with an error, unless it has ended."""
        if self._ends() and self.begin():
            self._future.set_exception(error)

    def _ends(self) -> bool:
        with self._lock:
            ended, self.finished = self.finished, True
            return not ended

    def _assembled(self) -> Buffer:
        """Return the bytes asked for out of their pieces: a view of most of one, else a copy."""
        assert self.source.pieces is not None
        size = self.source.pieces.piece_bytes
        indices = sorted(self._parts)
        first = indices[0] * size
        if len(indices) == 1:
            piece = self._parts[indices[0]]
            view = memoryview(piece)[self.start - first : self.stop - first]
            # A small view would hold on to the whole piece.
            return view if 2 * len(view) >= len(piece) else bytes(view)
        views = [memoryview(self._parts[index]) for index in indices]
        views[0] = views[0][self.start - first :]
        views[-1] = views[-1][: self.stop - indices[-1] * size]
        return b"".join(views)


class Flight:
    """A piece on its way: who fetches it, and who waits."""

    def __init__(self, source: PieceSource, key: PieceKey) -> None:
        """``source`` is the one that fetches."""
        self.source = source
        self.key = key
        self.waiting: list[PieceRead] = []
        self.begun = False
        self.claimed = False
        """Whether this process has claimed the fetching for the node."""


def flight_runs(flights: Sequence[Flight], piece_bytes: int) -> list[list[Flight]]:
    """Return flights, in order of their pieces, as ``split_runs`` splits their numbers."""
    by_index = {flight.key.index: flight for flight in flights}
    return [[by_index[index] for index in run] for run in split_runs(list(by_index), piece_bytes)]


def split_runs(indices: Sequence[int], piece_bytes: int) -> list[list[int]]:
    """Return rising piece numbers as runs without a gap, none of more than ``MAX_RUN_BYTES``."""
    longest = max(MAX_RUN_BYTES // piece_bytes, 1)
    runs: list[list[int]] = []
    for index in indices:
        if not runs or index != runs[-1][-1] + 1 or len(runs[-1]) == longest:
            runs.append([])
        runs[-1].append(index)
    return runs


class Together:
    """What one wave still lacks of origins that are read by agents: pieces, and reads of files that no tier takes."""

    def __init__(self) -> None:
        """Lack nothing yet."""
        self.flights: list[Flight] = []
        self.past: list[PieceRead] = []

    def __bool__(self) -> bool:
        """Whether something is lacking."""
        return bool(self.flights or self.past)
