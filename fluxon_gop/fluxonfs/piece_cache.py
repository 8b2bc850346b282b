"""Ranges of many files by way of pieces: memory, then disk, then the origin, each piece fetched once.

A read names bytes; the cache finds the pieces that they lie in, takes from the tiers what is there, and fetches
the rest in runs, one request each, all at once. Of many who want a piece, in this process or on this node, one
fetches it. No thread ever waits for another one here: a read is done when its last piece arrives.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol, cast

from fluxon_gop import forks, threads
from fluxon_gop.errors import ClosedError, ShortReadError
from fluxon_gop.fluxonfs.backfill import Backfill
from fluxon_gop.fluxonfs.disk_tier import DiskTier
from fluxon_gop.fluxonfs.export import MissPolicy
from fluxon_gop.fluxonfs.file_lock import FileLock
from fluxon_gop.fluxonfs.memory_tier import MemoryTier
from fluxon_gop.fluxonfs.piece_key import FilePieces, PieceKey
from fluxon_gop.ranges import ByteRange
from fluxon_gop.sources.range_source import Buffer, GroupRead

MAX_RUN_BYTES = 8 * 1024 * 1024
"""Most that one request to the origin asks for."""
CLAIM_SECONDS = 10.0
"""For how long a piece is waited for that another process of the node is fetching."""
_PAUSES = (0.001, 0.02)


class Source(Protocol):
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
    def is_local(self) -> bool:
        """Whether a grant costs no request."""
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

    def count(self, **changes: int) -> None:
        """Add to the counters."""
        ...


class PieceCache:
    """The tiers of one file system, and what is on its way into them. Thread-safe; one ``RangeGroup``."""

    def __init__(self, memory_bytes: int, disk: DiskTier | None, backfill_bytes: int) -> None:
        """Hold nothing yet.

        Args:
            memory_bytes: of the memory tier, 0 for none.
            disk: the disk tier, None for none.
            backfill_bytes: that may wait to be written to the disk tier.
        """
        self.memory = MemoryTier(memory_bytes) if memory_bytes else None
        self.disk = disk
        self.backfill = Backfill(backfill_bytes)
        self._flights: dict[PieceKey, _Flight] = {}
        self._lock = threading.Lock()
        self._closed = False
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: what is on its way is the parent's."""
        self._lock = threading.Lock()
        self._flights = {}

    @property
    def keeps(self) -> bool:
        """Whether there is a tier."""
        return self.memory is not None or self.disk is not None

    def start(self, reads: Sequence[GroupRead]) -> list[Future[Buffer]]:
        """Start the planned reads of a wave over any of the file system's sources, and return a future for each.

        Rights to read are renewed first where they have run out, side by side. Cost: one request to the origin
        for each run of pieces that no tier has.
        """
        for read in reads:
            cast("Source", read.source).count(planned_reads=1)
        return self.fetch(reads)

    def fetch(self, reads: Sequence[GroupRead]) -> list[Future[Buffer]]:
        """As ``start``, for reads that nobody planned."""
        if self._closed:
            text = "the file system is closed"
            raise ClosedError(text)
        wanted: dict[int, tuple[Source, list[_Range]]] = {}
        futures: list[Future[Buffer]] = []
        for read in reads:
            source = cast("Source", read.source)
            futures.append(Future())
            one = _Range(source, read, futures[-1])
            wanted.setdefault(id(source), (source, []))[1].append(one)
        for source, ranges in wanted.values():
            if source.is_granted or source.is_local:
                self._granted(source, ranges)
            else:
                self._submit(ranges, self._granted, source, ranges)
        return futures

    def forecast(self, pieces: FilePieces, ranges: Iterable[ByteRange]) -> str:
        """Tell, in words, where the pieces of these bytes are, and what fetching the rest will cost. No read."""
        indices = sorted({index for one in ranges for index in pieces.indices(one.start, one.stop)})
        absent, in_memory = [], 0
        for index in indices:
            key = pieces.key(index)
            if self.memory is not None and self.memory.get(key) is not None:
                in_memory += 1
            elif self.disk is None or not self.disk.has(key):
                absent.append(index)
        runs = split_runs(absent, pieces.piece_bytes)
        nbytes = sum(pieces.key(index).nbytes for index in absent)
        on_disk = len(indices) - in_memory - len(absent)
        return (
            f"{len(indices)} pieces: {in_memory} in memory, {on_disk} on disk, {len(absent)} to fetch "
            f"({len(runs)} requests, {nbytes:,} bytes)"
        )

    def close(self) -> None:
        """Refuse further reads, and write what waits to be written."""
        self._closed = True
        self.backfill.flush(CLAIM_SECONDS)
        if self.memory is not None:
            self.memory.clear()

    # ------------------------------------------------------------- from ranges to pieces

    def _granted(self, source: Source, ranges: list[_Range]) -> None:
        """Get the right to read and the file's version; then look for the pieces."""
        try:
            source.grant()
            self._look_up(source, ranges)
        except BaseException as error:  # noqa: BLE001 - it is the reads' error
            for one in ranges:
                one.fail(error)

    def _look_up(self, source: Source, ranges: list[_Range]) -> None:
        needed: dict[int, list[_Range]] = {}
        for one in ranges:
            if not one.fit(source.size):
                continue
            if source.pieces is None:
                self._submit([one], self._read_past, one)
                continue
            one.missing = set(source.pieces.indices(one.start, one.stop))
            for index in one.missing:
                needed.setdefault(index, []).append(one)
        if needed:
            self._want(source, needed)

    def _read_past(self, one: _Range) -> None:
        """Read bytes of a file that no tier takes."""
        if one.begin():
            try:
                data = one.source.read_origin(one.start, one.stop)
            except BaseException as error:  # noqa: BLE001 - it is the read's error
                one.fail(error)
            else:
                one.future.set_result(data)

    def _want(self, source: Source, needed: dict[int, list[_Range]]) -> None:
        """Get pieces of one file: from memory, from a fetch under way, or by a fetch of their own."""
        assert source.pieces is not None
        claimed: list[_Flight] = []
        for index in sorted(needed):
            key = source.pieces.key(index)
            with self._lock:
                # Both under one lock: a piece that arrives meanwhile is in one of the two.
                held = self.memory.get(key) if self.memory is not None else None
                if held is None:
                    flight = self._flights.get(key)
                    if flight is None:
                        self._flights[key] = flight = _Flight(source, key)
                        claimed.append(flight)
                    else:
                        source.count(shared_reads=1)
                    flight.waiting += needed[index]
                    if flight.begun:
                        for one in needed[index]:
                            one.begin()
            if self.memory is not None:
                source.count(**{"memory_misses" if held is None else "memory_hits": 1})
            if held is not None:
                self._hand_out(needed[index], index, held)
        for run in _runs(claimed, source.pieces.piece_bytes):
            try:
                threads.origin_pool().submit(self._look_further, run)
            except RuntimeError as error:
                self._fail(run, error)

    def _hand_out(self, ranges: Iterable[_Range], index: int, data: bytes) -> None:
        for one in ranges:
            one.take(index, data)

    # ------------------------------------------------------------- beyond memory

    def _look_further(self, run: list[_Flight]) -> None:
        """Get pieces that memory lacks: from disk, else from the origin, else from who is fetching them."""
        try:
            self._look(self._begun(run))
        except BaseException as error:
            # Not even a bug may leave a reader waiting.
            self._fail(run, error)
            raise

    def _look(self, run: list[_Flight]) -> None:
        if self.disk is None:
            self._fetch_all(run, None)
            return
        missing = [flight for flight in run if not self._from_disk(flight)]
        if not missing:
            return
        source = missing[0].source
        claims = self.disk.claims() if self._fills_disk(source) else None
        if claims is None:
            self._fetch_all(missing, None)
            return
        shared = _Claims(claims)
        mine: list[_Flight] = []
        others: list[_Flight] = []
        try:
            for flight in missing:
                (mine if claims.try_lock(flight.key.number) else others).append(flight)
            # Stored between the look and the claim.
            mine = [flight for flight in mine if not self._from_disk(flight, again=True)]
            self._fetch_all(mine, shared)
        finally:
            shared.done()
        for flight in others:
            self._await_other(flight)

    def _begun(self, run: list[_Flight]) -> list[_Flight]:
        """Mark fetches as begun; those that nobody waits for any more are given up."""
        live = []
        with self._lock:
            for flight in run:
                flight.begun = True
                # All of them, not up to the first.
                if sum([one.begin() for one in flight.waiting]):
                    live.append(flight)
                else:
                    self._flights.pop(flight.key, None)
        return live

    def _from_disk(self, flight: _Flight, *, again: bool = False) -> bool:
        assert self.disk is not None
        data = self.disk.get(flight.key)
        if data is not None or not again:
            flight.source.count(**{"disk_misses" if data is None else "disk_hits": 1})
        if data is None:
            return False
        self._arrived(flight, data)
        return True

    def _fetch_all(self, flights: list[_Flight], claims: _Claims | None) -> None:
        """Fetch pieces from the origin: runs side by side, the first one on this thread."""
        if not flights:
            return
        pieces = flights[0].source.pieces
        assert pieces is not None
        first, *more = _runs(flights, pieces.piece_bytes)
        for run in more:
            if claims is not None:
                claims.share()
            try:
                threads.origin_pool().submit(self._fetch, run, claims)
            except RuntimeError as error:
                if claims is not None:
                    claims.done()
                self._fail(run, error)
        if claims is not None:
            claims.share()
        self._fetch(first, claims)

    def _fetch(self, run: list[_Flight], claims: _Claims | None) -> None:
        """Read a run of pieces in one request, hand them out, and have them kept."""
        release = claims.done if claims is not None else _nothing
        source = run[0].source
        try:
            assert source.pieces is not None
            start, stop = source.pieces.bounds(run[0].key.index, run[-1].key.index)
            data = memoryview(source.read_origin(start, stop))
            size = source.pieces.piece_bytes
            pieces = [
                (flight, bytes(data[at : at + size]))
                for flight, at in zip(run, range(0, stop - start, size), strict=True)
            ]
        except BaseException as error:  # noqa: BLE001 - it is the reads' error
            release()
            self._fail(run, error)
            return
        disk = self.disk
        if disk is None or not self._fills_disk(source):
            release()
            for flight, piece in pieces:
                self._arrived(flight, piece)
            return
        if source.miss_policy is MissPolicy.STAGE_TO_KV_THEN_READ:
            for flight, piece in pieces:
                disk.put(flight.key, piece)
            release()
            for flight, piece in pieces:
                self._arrived(flight, piece)
            return
        keep = [(flight.key, piece) for flight, piece in pieces]
        for flight, piece in pieces:
            self._arrived(flight, piece)

        def store(wanted: bool) -> None:
            try:
                for key, piece in keep if wanted else ():
                    disk.put(key, piece)
            finally:
                release()

        self.backfill.submit(stop - start, store)

    def _await_other(self, flight: _Flight) -> None:
        """Get a piece that another process of the node is fetching; fetch it where that one does not."""
        assert self.disk is not None
        until = time.monotonic() + CLAIM_SECONDS
        pause, longest = _PAUSES
        while not self._from_disk(flight, again=True):
            claims = self.disk.claims()
            if claims is None:
                self._fetch([flight], None)
                return
            if claims.try_lock(flight.key.number) or time.monotonic() > until:
                # Stored, perhaps, between the look and the claim.
                if self._from_disk(flight, again=True):
                    claims.close()
                else:
                    self._fetch([flight], _Claims(claims))
                return
            claims.close()
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _fills_disk(self, source: Source) -> bool:
        return source.backfills or source.miss_policy is MissPolicy.STAGE_TO_KV_THEN_READ

    # ------------------------------------------------------------- the end of a fetch

    def _arrived(self, flight: _Flight, data: bytes) -> None:
        if self.memory is not None:
            self.memory.put(flight.key, data)
        self._hand_out(self._landed(flight), flight.key.index, data)

    def _landed(self, flight: _Flight) -> list[_Range]:
        with self._lock:
            flight.done = True
            if self._flights.get(flight.key) is flight:
                del self._flights[flight.key]
            waiting, flight.waiting = flight.waiting, []
            return waiting

    def _fail(self, run: list[_Flight], error: BaseException) -> None:
        """Tell who waits for these pieces; those of other readers try again by themselves."""
        again: dict[int, tuple[Source, dict[int, list[_Range]]]] = {}
        for flight in run:
            for one in self._landed(flight):
                if one.source is flight.source:
                    one.fail(error)
                elif not one.finished:
                    _, needed = again.setdefault(id(one.source), (one.source, {}))
                    needed.setdefault(flight.key.index, []).append(one)
        for source, needed in again.values():
            self._want(source, needed)

    def _submit(self, ranges: list[_Range], call: Callable[..., None], *arguments: object) -> None:
        try:
            threads.origin_pool().submit(call, *arguments)
        except RuntimeError as error:
            for one in ranges:
                one.fail(error)


class _Range:
    """One read: what it waits for, and what has come."""

    def __init__(self, source: Source, read: GroupRead, future: Future[Buffer]) -> None:
        self.source = source
        self.start, self.stop = read.start, read.stop
        self.future = future
        self.missing: set[int] = set()
        self.parts: dict[int, bytes] = {}
        self.finished = False
        self._head = read.head
        self._begun = self._alive = False
        self._lock = threading.Lock()

    def take(self, index: int, data: bytes) -> None:
        """Take a piece; the last one ends the read."""
        with self._lock:
            self.parts[index] = data
            self.missing.discard(index)
            ended = self.finished or bool(self.missing)
            self.finished = self.finished or not ended
        if not ended and self.begin():
            self.future.set_result(self.assembled())

    def begin(self) -> bool:
        """Note that the read is under way; False where it was cancelled before."""
        with self._lock:
            if not self._begun:
                self._begun = True
                self._alive = self.future.set_running_or_notify_cancel()
            return self._alive

    def fail(self, error: BaseException) -> None:
        """End with an error, unless it has ended."""
        with self._lock:
            ended, self.finished = self.finished, True
        if not ended and self.begin():
            self.future.set_exception(error)

    def fit(self, size: int) -> bool:
        """Cut a head to the file's size; return whether there is anything to read."""
        if self._head:
            self.stop = min(self.stop, size)
            if not self.stop and self.begin():
                self.finished = True
                self.future.set_result(b"")
            return self.stop > 0
        if self.stop > size:
            got = max(size - self.start, 0)
            name = self.source.name
            text = f"{name}: asked for bytes [{self.start}, {self.stop}), got {got}: the file ends there"
            self.fail(ShortReadError(text, source=name, start=self.start, stop=self.stop, got=got))
            return False
        return True

    def assembled(self) -> Buffer:
        """Return the bytes asked for out of their pieces: a view of one, a copy of several."""
        assert self.source.pieces is not None
        size = self.source.pieces.piece_bytes
        indices = sorted(self.parts)
        first = indices[0] * size
        if len(indices) == 1:
            return memoryview(self.parts[indices[0]])[self.start - first : self.stop - first]
        views = [memoryview(self.parts[index]) for index in indices]
        views[0] = views[0][self.start - first :]
        views[-1] = views[-1][: self.stop - indices[-1] * size]
        return b"".join(views)


class _Flight:
    """A piece on its way: who fetches it, and who waits."""

    def __init__(self, source: Source, key: PieceKey) -> None:
        self.source = source
        self.key = key
        self.waiting: list[_Range] = []
        self.begun = self.done = False


class _Claims:
    """One process's claims on pieces, let go of when the last of those who share them is done."""

    def __init__(self, lock: FileLock) -> None:
        self._file = lock
        self._users = 1
        self._lock = threading.Lock()

    def share(self) -> None:
        """Count one more user."""
        with self._lock:
            self._users += 1

    def done(self) -> None:
        """Count one user less."""
        with self._lock:
            self._users -= 1
            last = not self._users
        if last:
            self._file.close()


def _runs(flights: list[_Flight], piece_bytes: int) -> list[list[_Flight]]:
    """Return flights, in order of their pieces, as runs without a gap, none of more than ``MAX_RUN_BYTES``."""
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


def _nothing() -> None:
    """Let go of nothing."""
