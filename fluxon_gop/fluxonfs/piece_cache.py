"""Ranges of many files by way of pieces: memory, then disk, then the origin, each piece fetched once.

A read names bytes; the cache finds the pieces that they lie in, takes from the tiers what is there, and fetches
the rest in runs, one request each, all at once. Of many who want a piece, in this process or on this node, one
fetches it. All of it runs on threads of its own, where no interrupt arrives; a read is done when its last piece
arrives, and none of these threads waits for another one of this process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import cast

from fluxon_gop import forks, threads
from fluxon_gop.errors import ClosedError, FluxonGopError, ShortReadError, SourceError
from fluxon_gop.fluxonfs.backfill import Backfill
from fluxon_gop.fluxonfs.disk_tier import DiskTier
from fluxon_gop.fluxonfs.export import MissPolicy
from fluxon_gop.fluxonfs.kv_tier import KvEntry, KvTier
from fluxon_gop.fluxonfs.memory_tier import MemoryTier
from fluxon_gop.fluxonfs.piece_key import FilePieces, PieceKey
from fluxon_gop.fluxonfs.piece_reads import (
    Agents,
    Flight,
    PieceRead,
    PieceSource,
    Together,
    flight_runs,
    split_runs,
)
from fluxon_gop.ranges import ByteRange
from fluxon_gop.sources.range_source import Buffer, GroupRead

CLAIM_SECONDS = 10.0
"""For how long pieces are waited for that another process of the node is fetching."""
_PAUSES = (0.001, 0.02)


class PieceCache:
    """The tiers of one file system, and what is on its way into them. Thread-safe; one ``RangeGroup``."""

    def __init__(
        self, memory_bytes: int, disk: DiskTier | None, backfill_bytes: int, kv: KvTier | None = None
    ) -> None:
        """Hold nothing yet.

        Args:
            memory_bytes: of the memory tier, 0 for none.
            disk: the disk tier, None for none.
            backfill_bytes: that may wait to be written to the shared tiers.
            kv: the store that machines share, None for none.
        """
        self.kv = kv
        self.memory = MemoryTier(memory_bytes) if memory_bytes else None
        self.disk = disk
        self.backfill = Backfill(backfill_bytes)
        self._flights: dict[PieceKey, Flight] = {}
        self._storing: dict[PieceKey, bytes] = {}
        self._lock = threading.Lock()
        self._closed = False
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: what is on its way is the parent's."""
        self._lock = threading.Lock()
        self._flights, self._storing = {}, {}

    @property
    def keeps(self) -> bool:
        """Whether there is a tier."""
        return self.memory is not None or self.disk is not None or self.kv is not None

    def start(self, reads: Sequence[GroupRead]) -> list[Future[Buffer]]:
        """Start the planned reads of a wave over any of the file system's sources, and return a future for each.

        Rights to read are renewed first where they have run out, side by side. Cost: one request to the origin
        for each run of pieces that no tier has.
        """
        for read in reads:
            cast("PieceSource", read.source).count(planned_reads=1)
        return self.fetch(reads)

    def fetch(self, reads: Sequence[GroupRead]) -> list[Future[Buffer]]:
        """As ``start``, for reads that nobody planned."""
        if self._closed:
            text = "the file system is closed"
            raise ClosedError(text)
        wanted: dict[int, tuple[PieceSource, list[PieceRead]]] = {}
        futures: list[Future[Buffer]] = []
        for read in reads:
            source = cast("PieceSource", read.source)
            futures.append(Future())
            wanted.setdefault(id(source), (source, []))[1].append(PieceRead(source, read, futures[-1]))
        granted, as_one = [], []
        for source, mine in wanted.values():
            if source.agents is not None or self.kv is not None:
                as_one.append((source, mine))
            elif source.is_granted:
                granted.append((source, mine))
            else:
                self._submit(mine, self._look_up_all, [(source, mine)])
        if granted:
            self._submit([read for _, mine in granted for read in mine], self._look_up_all, granted)
        if as_one:
            self._grant_all(as_one)
        return futures

    def forecast(self, pieces: FilePieces, ranges: Iterable[ByteRange]) -> str:
        """Tell, in words, where the pieces of these bytes are, and what fetching the rest will cost. No read."""
        indices = sorted({index for one in ranges for index in pieces.indices(one.start, one.stop)})
        absent, in_memory = [], 0
        for index in indices:
            key = pieces.key(index)
            if self.memory is not None and self.memory.has(key):
                in_memory += 1
            elif self.disk is None or not self.disk.has(key):
                absent.append(index)
        runs = split_runs(absent, pieces.piece_bytes)
        nbytes = sum(pieces.key(index).nbytes for index in absent)
        on_disk = len(indices) - in_memory - len(absent)
        return (
            f"{_count_of(len(indices), 'piece')}: {in_memory} in memory, {on_disk} on disk, {len(absent)} to fetch "
            f"({_count_of(len(runs), 'request')}, {nbytes:,} bytes)"
        )

    def close(self) -> bool:
        """Refuse further reads, and write what waits to be written, for up to ten seconds; return whether all was."""
        self._closed = True
        done = self.backfill.flush(CLAIM_SECONDS)
        if self.memory is not None:
            self.memory.clear()
        return done

    # ------------------------------------------------------------- from ranges to pieces

    def _look_up_all(self, wanted: Sequence[tuple[PieceSource, list[PieceRead]]]) -> None:
        together = Together()
        for source, reads in wanted:
            try:
                source.grant()
                self._look_up(source, reads, together)
            except BaseException as error:  # noqa: BLE001 - it is the reads' error
                for read in reads:
                    read.fail(error)
        if together:
            self._guarded_together(together)

    def _grant_all(self, wanted: list[tuple[PieceSource, list[PieceRead]]]) -> None:
        """Renew rights side by side; the last one done looks all of them up, so that they are fetched in one call."""
        left, lock = [len(wanted)], threading.Lock()

        def renew(source: PieceSource) -> None:
            # What is refused is asked for again below, and told there.
            with suppress(BaseException):
                source.grant()
            with lock:
                left[0] -= 1
                last = not left[0]
            if last:
                self._look_up_all(wanted)

        if all(source.is_granted for source, _ in wanted):
            self._submit([read for _, mine in wanted for read in mine], self._look_up_all, wanted)
            return
        for source, _ in wanted:
            self._submit([read for _, mine in wanted for read in mine], renew, source)

    def _look_up(self, source: PieceSource, reads: Sequence[PieceRead], together: Together) -> None:
        needed: dict[int, list[PieceRead]] = {}
        for read in reads:
            if not read.fit(source.size):
                continue
            if source.pieces is None:
                if source.agents is not None:
                    together.past.append(read)
                else:
                    self._submit([read], self._read_past, read)
                continue
            for index in read.need(source.pieces):
                needed.setdefault(index, []).append(read)
        if needed:
            self._want(source, needed, together)

    def _read_past(self, read: PieceRead) -> None:
        """Read bytes of a file that no tier takes."""
        if read.begin():
            try:
                read.end(read.source.read_origin(read.start, read.stop))
            except BaseException as error:  # noqa: BLE001 - it is the read's error
                read.fail(error)

    def _want(
        self, source: PieceSource, needed: dict[int, list[PieceRead]], together: Together | None = None
    ) -> None:
        """Get pieces of one file: from memory, from a fetch under way, or by a fetch of their own."""
        assert source.pieces is not None
        fresh: list[Flight] = []
        try:
            for index in sorted(needed):
                key = source.pieces.key(index)
                with self._lock:
                    # All under one lock: a piece that arrives meanwhile is in one of them.
                    held = self.memory.get(key) if self.memory is not None else None
                    if self.memory is not None:
                        source.count(**{"memory_misses" if held is None else "memory_hits": 1})
                    if held is None:
                        held = self._storing.get(key)
                    if held is None:
                        self._join(source, key, needed[index], fresh)
                if held is not None:
                    for read in needed[index]:
                        read.take(index, held)
            if together is not None and (source.agents is not None or self.kv is not None):
                together.flights += fresh
                return
            for run in flight_runs(fresh, source.pieces.piece_bytes):
                threads.origin_pool().submit(self._guarded, run, self._look_further)
        except BaseException as error:
            self._fail(fresh, error)
            raise

    def _join(
        self, source: PieceSource, key: PieceKey, reads: list[PieceRead], fresh: list[Flight]
    ) -> None:
        """Have reads wait for a piece, under the lock; where nobody is fetching it, a flight is added to ``fresh``."""
        flight = self._flights.get(key)
        if flight is None:
            flight = Flight(source, key)
            fresh.append(flight)
            self._flights[key] = flight
        else:
            source.count(shared_reads=1)
        flight.waiting += reads
        if flight.begun:
            for read in reads:
                read.begin()

    # ------------------------------------------------------------- beyond memory

    def _guarded(self, run: list[Flight], step: Callable[[list[Flight]], None]) -> None:
        """Take a step of a run: whatever it raises, no reader is left waiting, and no claim is kept."""
        try:
            step(run)
        except BaseException as error:  # noqa: BLE001 - it is the reads' error
            self._unclaim(run)
            self._fail(run, error)

    def _look_further(self, run: list[Flight]) -> None:
        """Get pieces that memory lacks: from disk, else from the origin, else from who is fetching them."""
        run = self._begun(run)
        if self.disk is None:
            self._fetch_all(run)
            return
        missing = [flight for flight in run if not self._from_disk(flight)]
        if missing and not self._fills_disk(missing[0].source):
            self._fetch_all(missing)
            return
        mine, others = self._claimed(missing)
        if others:
            threads.pool("fluxon_gop-claims").submit(self._guarded, others, self._await_others)
        self._fetch_all(mine)

    def _begun(self, run: list[Flight]) -> list[Flight]:
        """Mark fetches as begun; those that nobody waits for any more are given up."""
        live = []
        with self._lock:
            for flight in run:
                flight.begun = True
                # All of them, not up to the first.
                if sum([read.begin() for read in flight.waiting]):
                    live.append(flight)
                else:
                    self._flights.pop(flight.key, None)
        return live

    def _from_disk(self, flight: Flight, *, again: bool = False) -> bool:
        assert self.disk is not None
        data = self.disk.get(flight.key)
        if data is not None or not again:
            flight.source.count(**{"disk_misses" if data is None else "disk_hits": 1})
        if data is None:
            return False
        self._arrived(flight, data)
        return True

    def _claimed(self, flights: list[Flight]) -> tuple[list[Flight], list[Flight]]:
        """Claim pieces for this process; return those to fetch here, and those that another process is fetching."""
        assert self.disk is not None
        mine, others = [], []
        for flight in flights:
            flight.claimed = self.disk.claim(flight.key)
            if not flight.claimed:
                others.append(flight)
            elif self._from_disk(flight, again=True):
                # Stored between the look and the claim.
                self._unclaim([flight])
            else:
                mine.append(flight)
        return mine, others

    def _await_others(self, waiting: list[Flight]) -> None:
        """Get pieces that other processes are fetching; what they let go of, or keep for too long, is fetched here."""
        until = time.monotonic() + CLAIM_SECONDS
        pause, longest = _PAUSES
        while waiting := [flight for flight in waiting if not self._from_disk(flight, again=True)]:
            free, waiting = self._claimed(waiting)
            if time.monotonic() > until:
                free, waiting = sorted(free + waiting, key=lambda flight: flight.key.index), []
            waiting = [flight for flight in waiting if flight.key in self._flights]
            self._fetch_all(free)
            time.sleep(pause if waiting else 0)
            pause = min(2 * pause, longest)

    def _fetch_all(self, flights: list[Flight]) -> None:
        """Fetch pieces from the origin: runs side by side, the first one on this thread."""
        if not flights:
            return
        pieces = flights[0].source.pieces
        assert pieces is not None
        first, *more = flight_runs(flights, pieces.piece_bytes)
        for run in more:
            self._send(run)
        self._guarded(first, self._fetch)

    def _send(self, run: list[Flight]) -> None:
        try:
            threads.origin_pool().submit(self._guarded, run, self._fetch)
        except RuntimeError as error:
            self._unclaim(run)
            self._fail(run, error)

    def _fetch(self, run: list[Flight]) -> None:
        """Read a run of pieces in one request, hand them out, and have them kept."""
        source = run[0].source
        assert source.pieces is not None
        start, stop = source.pieces.bounds(run[0].key.index, run[-1].key.index)
        data = memoryview(source.read_origin(start, stop))
        if len(data) != stop - start:
            text = f"{source.name}: asked for bytes [{start}, {stop}), got {len(data)}"
            raise ShortReadError(text, source=source.name, start=start, stop=stop, got=len(data))
        self._hand_out(run, data)

    def _hand_out(self, run: list[Flight], data: memoryview) -> None:
        """Give the pieces of a run to who waits for them, and have them kept."""
        source = run[0].source
        assert source.pieces is not None
        size = source.pieces.piece_bytes
        pieces = [(flight, bytes(data[n * size : n * size + size])) for n, flight in enumerate(run)]
        if (self.disk is not None or self.kv is not None) and self._fills_disk(source):
            if source.miss_policy is MissPolicy.STAGE_TO_KV_THEN_READ:
                self._store(pieces, kv=True)
                self._unclaim(run)
            else:
                # Before the readers are told: whoever flushes then waits for these.
                self._have_stored(pieces, len(data), kv=True)
        for flight, piece in pieces:
            self._arrived(flight, piece)

    def _store(self, pieces: list[tuple[Flight, bytes]], *, kv: bool) -> None:
        """Write pieces into the shared tiers."""
        if self.disk is not None:
            for flight, piece in pieces:
                self.disk.put(flight.key, piece)
        if self.kv is not None and kv:
            self.kv.put_many([(_entry_of(flight), piece) for flight, piece in pieces])

    def _have_stored(self, pieces: list[tuple[Flight, bytes]], nbytes: int, *, kv: bool) -> None:
        with self._lock:
            self._storing.update((flight.key, piece) for flight, piece in pieces)

        def store(wanted: bool) -> None:
            try:
                if wanted:
                    self._store(pieces, kv=kv)
            finally:
                with self._lock:
                    for flight, _ in pieces:
                        self._storing.pop(flight.key, None)
                self._unclaim([flight for flight, _ in pieces])

        self.backfill.submit(nbytes, store)

    def _unclaim(self, flights: Iterable[Flight]) -> None:
        for flight in flights:
            if flight.claimed and self.disk is not None:
                flight.claimed = False
                self.disk.unclaim(flight.key)

    def _fills_disk(self, source: PieceSource) -> bool:
        return source.backfills or source.miss_policy is MissPolicy.STAGE_TO_KV_THEN_READ

    # ------------------------------------------------------------- a wave as one

    def _guarded_together(self, together: Together) -> None:
        """Get what is asked for as one; whatever is raised, no reader is left waiting, and no claim is kept."""
        try:
            self._look_further_together(together)
        except BaseException as error:  # noqa: BLE001 - it is the reads' error
            self._unclaim(together.flights)
            self._fail(together.flights, error)
            for read in together.past:
                read.fail(error)

    def _look_further_together(self, together: Together) -> None:
        """Get what is there from disk, then from the shared store, and the rest from the origins.

        One round trip to the store, and one call for each identity and set of agents; other origins as always.
        """
        flights = self._begun(together.flights)
        past = [read for read in together.past if read.begin()]
        if self.disk is not None:
            flights = [flight for flight in flights if not self._from_disk(flight)]
            kept = [flight for flight in flights if self._fills_disk(flight.source)]
            mine, others = self._claimed(kept)
            if others:
                threads.pool("fluxon_gop-claims").submit(self._guarded, others, self._await_others)
            flights = mine + [flight for flight in flights if not self._fills_disk(flight.source)]
        if self.kv is not None and flights:
            flights = self._from_kv(self.kv, flights)
        by_source: dict[int, list[Flight]] = {}
        for flight in flights:
            by_source.setdefault(id(flight.source), []).append(flight)
        groups: dict[Agents, list[list[Flight] | PieceRead]] = {}
        for mine in by_source.values():
            source = mine[0].source
            assert source.pieces is not None
            mine.sort(key=lambda flight: flight.key.index)
            runs = flight_runs(mine, source.pieces.piece_bytes)
            if source.agents is not None:
                groups.setdefault(source.agents, []).extend(runs)
                continue
            for run in runs:
                self._send(run)
        for read in past:
            assert read.source.agents is not None
            groups.setdefault(read.source.agents, []).append(read)
        first, *more = groups.items() or [(None, [])]
        for agents, wanted in more:
            self._submit(
                [read for read in wanted if isinstance(read, PieceRead)], self._ask_agents, agents, wanted
            )
        if first[0] is not None:
            self._ask_agents(*first)

    def _from_kv(self, kv: KvTier, flights: list[Flight]) -> list[Flight]:
        """Hand out what the shared store has; return what it has not."""
        found = kv.get_many([_entry_of(flight) for flight in flights])
        if found is None:
            return flights
        left, held = [], []
        for flight, piece in zip(flights, found, strict=True):
            flight.source.count(**{"kv_misses" if piece is None else "kv_hits": 1})
            if piece is None:
                left.append(flight)
            else:
                held.append((flight, piece))
        kept = [one for one in held if self.disk is not None and self._fills_disk(one[0].source)]
        if kept:
            self._have_stored(kept, sum(len(piece) for _, piece in kept), kv=False)
        for flight, piece in held:
            self._arrived(flight, piece)
        return left

    def _ask_agents(self, agents: Agents, wanted: list[list[Flight] | PieceRead]) -> None:
        """Make one call, and hand out what comes as it comes; each range's error is its own."""
        reads, waiting = [], dict(enumerate(wanted))
        try:
            for one in wanted:
                if isinstance(one, PieceRead):
                    reads.append(one.source.agent_read(one.start, one.stop))
                    continue
                source = one[0].source
                assert source.pieces is not None
                reads.append(source.agent_read(*source.pieces.bounds(one[0].key.index, one[-1].key.index)))
            # One request, whosoever's files are in it.
            _source_of(wanted[0]).count(remote_read_calls=1)
            for place, answer in agents.read_many(reads):
                self._answered(waiting.pop(place), answer)
        except BaseException as error:  # noqa: BLE001 - it is the reads' error
            for left in waiting.values():
                self._refused(left, error)

    def _answered(self, one: list[Flight] | PieceRead, answer: Buffer | FluxonGopError) -> None:
        if isinstance(answer, FluxonGopError):
            self._refused(one, answer)
            return
        _source_of(one).count(remote_read_bytes=len(answer))
        if isinstance(one, PieceRead):
            one.end(answer)
            return
        try:
            self._hand_out(one, memoryview(answer))
        except BaseException as error:  # noqa: BLE001 - it is these reads' error
            self._refused(one, error)

    def _refused(self, one: list[Flight] | PieceRead, error: BaseException) -> None:
        told = _source_of(one).failed(error) if isinstance(error, SourceError) else error
        if isinstance(one, PieceRead):
            one.fail(told)
            return
        self._unclaim(one)
        self._fail(one, told)

    # ------------------------------------------------------------- the end of a fetch

    def _arrived(self, flight: Flight, data: bytes) -> None:
        if self.memory is not None:
            self.memory.put(flight.key, data)
        for read in self._landed(flight):
            read.take(flight.key.index, data)

    def _landed(self, flight: Flight) -> list[PieceRead]:
        with self._lock:
            if self._flights.get(flight.key) is flight:
                del self._flights[flight.key]
            waiting, flight.waiting = flight.waiting, []
            return waiting

    def _fail(self, run: Iterable[Flight], error: BaseException) -> None:
        """Tell who waits for these pieces; those of other readers try again by themselves."""
        again: dict[int, tuple[PieceSource, dict[int, list[PieceRead]]]] = {}
        for flight in run:
            for read in self._landed(flight):
                if read.source is flight.source:
                    read.fail(error)
                elif not read.finished:
                    _, needed = again.setdefault(id(read.source), (read.source, {}))
                    needed.setdefault(flight.key.index, []).append(read)
        for source, needed in again.values():
            try:
                self._want(source, needed)
            except BaseException as failure:  # noqa: BLE001 - it is the reads' error
                for reads in needed.values():
                    for read in reads:
                        read.fail(failure)

    def _submit(self, reads: Iterable[PieceRead], call: Callable[..., None], *arguments: object) -> None:
        try:
            threads.origin_pool().submit(call, *arguments)
        except RuntimeError as error:
            for read in reads:
                read.fail(error)


def _entry_of(flight: Flight) -> KvEntry:
    pieces = flight.source.pieces
    assert pieces is not None
    return KvEntry(flight.key, pieces.prefix, pieces.field)


def _source_of(one: list[Flight] | PieceRead) -> PieceSource:
    return one.source if isinstance(one, PieceRead) else one[0].source


def _count_of(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
