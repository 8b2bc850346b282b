"""Indexing some videos, here or in another process: addresses in, encoded rows and outcomes out."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import pyarrow as pa

from fluxon_gop import threads
from fluxon_gop.decode_check import check_by_decoding
from fluxon_gop.errors import FluxonGopError, InvalidRequestError, SourceError
from fluxon_gop.index_build import BATCH, indexes_of
from fluxon_gop.index_rows import Key
from fluxon_gop.model import Signature, VideoIndex
from fluxon_gop.packed_row import encoded
from fluxon_gop.sources import RangeSource, open_source
from fluxon_gop.sources.range_source import table_key_of
from fluxon_gop.stats import ReadStats


@dataclass(frozen=True)
class Outcome:
    """How one video went: small, without its index."""

    uri: str
    status: str
    """built, skipped, failed, or failed_before (and not tried again)."""
    frames: int | None = None
    gops: int | None = None
    requests: int = 0
    nbytes: int = 0
    error: FluxonGopError | None = None
    signature: Signature | None = None
    """Of the file, where it was read so far."""


@dataclass(frozen=True)
class Shard:
    """What is built together."""

    uris: tuple[str, ...]
    known: tuple[Signature | None, ...]
    """Of each, the version that its row in the table is of, where only reading tells whether that is the newest."""
    check: str
    storage_options: Mapping[str, Any] | None
    there: frozenset[str] = frozenset()
    """Those that have a row in the table, which a new one replaces."""
    packed_columns: frozenset[str] = frozenset()
    """See :attr:`IndexTable.packed_columns`."""


@dataclass
class ShardDone:
    """What came of a shard."""

    rows: pa.Table
    outcomes: list[Outcome]
    stats: ReadStats = field(default_factory=ReadStats)
    fragments: list[str] = field(default_factory=list)
    """Rows that are written already, as fragments of the table which wait for their commit."""


def build_shard(shard: Shard) -> ShardDone:
    """Index a shard's videos, 64 side by side; a failure is an outcome."""
    parts = [
        _build(shard, shard.uris[at : at + BATCH], shard.known[at : at + BATCH])
        for at in range(0, len(shard.uris), BATCH)
    ]
    whole = ShardDone(pa.concat_tables([part.rows for part in parts]), [])
    for part in parts:
        whole.outcomes += part.outcomes
        whole.stats.add(part.stats)
    return whole


def _build(shard: Shard, uris: Sequence[str], known_versions: Sequence[Signature | None]) -> ShardDone:
    outcomes: list[Outcome] = []
    rows: list[tuple[Key, VideoIndex]] = []
    sources: list[RangeSource] = []
    total = ReadStats()
    try:
        # Asking for a version is a request: side by side, of those that have one to compare.
        side_by_side = threads.pool("fluxon_gop-look").map if any(known_versions) else map
        for opened in side_by_side(partial(_opened, shard.storage_options), uris, known_versions):
            if isinstance(opened, Outcome):
                outcomes.append(opened)
            else:
                sources.append(opened)
        stats = [ReadStats() for _ in sources]
        for place, found, refused in indexes_of(sources, stats, check=shard.check != "none"):
            index, why = found, refused
            source, one = sources[place], stats[place]
            if index is not None and shard.check == "decode":
                try:
                    index = check_by_decoding(index, source, one).index
                except FluxonGopError as wrong:
                    index, why = None, wrong
            if index is not None:
                rows.append((table_key_of(source), index))
            outcomes.append(_outcome(source, index, why, one))
            total.add(one)
    finally:
        for source in sources:
            source.close()
    return ShardDone(encoded(rows, shard.packed_columns), outcomes, total)


def _opened(options: Mapping[str, Any] | None, uri: str, known: Signature | None) -> RangeSource | Outcome:
    """Return the source of a video, or what became of it where it need not, or cannot, be read."""
    try:
        # A row's key is text.
        uri.encode()
        source = open_source(uri, options)
        if known is not None and known.fits(source.signature):
            source.close()
            return Outcome(source.name, "skipped")
    except (FluxonGopError, UnicodeError) as error:
        return _refused(uri, error)
    return source


def _refused(uri: str, error: FluxonGopError | UnicodeError) -> Outcome:
    """Return the failure of an address that cannot be opened; it may hold a secret, or be no text."""
    if isinstance(error, UnicodeError):
        shown = uri.encode("utf-8", "backslashreplace").decode()
        return Outcome(
            shown, "failed", error=InvalidRequestError(f"{shown}: the name is no UTF-8: rename the file")
        )
    scheme, found, rest = uri.partition("://")
    shown = uri
    if found and isinstance(error, InvalidRequestError):
        # What comes before an '@', and a query, may be secret.
        shown = f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}"
    return Outcome(shown, "failed", error=error)


def _outcome(
    source: RangeSource, index: VideoIndex | None, error: FluxonGopError | None, stats: ReadStats
) -> Outcome:
    requests, nbytes = stats.total_requests, stats.total_bytes
    if index is None:
        seen = source.signature if nbytes else None
        return Outcome(source.name, "failed", None, None, requests, nbytes, error, seen)
    frames = None if index.container_reason else index.num_frames
    return Outcome(source.name, "built", frames, index.num_gops, requests, nbytes, None, index.signature)


class Engine(Protocol):
    """Runs shards, some side by side."""

    @property
    def shard(self) -> int:
        """Videos of a shard."""
        ...

    def run(self, shards: Iterable[Shard]) -> Iterator[ShardDone]:
        """Yield what comes of the shards, in no set order; takes them as they are asked for, and not far ahead."""
        ...


class LocalEngine:
    """Shards in processes of this machine, or on two threads of this one."""

    shard = BATCH

    def __init__(self, processes: int) -> None:
        """Start nothing yet; 1 builds here."""
        self._processes = processes

    def run(self, shards: Iterable[Shard]) -> Iterator[ShardDone]:
        """Keep twice as many shards under way as there are processes."""
        if self._processes == 1:
            with ThreadPoolExecutor(2, thread_name_prefix="fluxon_gop-build") as two:
                yield from in_flight(two, shards, 2)
            return
        again: list[Shard] = []
        with _process_pool(self._processes) as pool:
            _see_it_start(pool)
            pending = iter(shards)
            try:
                yield from in_flight(pool, pending, 2 * self._processes, lost=again)
            except BrokenProcessPool:
                pass
            else:
                return
        # A process has died: what was under way is built again, video by video, each in a process of its own.
        for shard in again:
            yield from self._one_by_one(shard)
        yield from self.run(pending)

    def _one_by_one(self, shard: Shard) -> Iterator[ShardDone]:
        pool = _process_pool(1)
        for uri, known in zip(shard.uris, shard.known, strict=True):
            one = replace(shard, uris=(uri,), known=(known,))
            try:
                yield pool.submit(build_shard, one).result()
            except BrokenProcessPool:
                pool.shutdown()
                pool = _process_pool(1)
                error = SourceError(f"{uri}: the process that indexed it has died", source=uri)
                yield ShardDone(encoded([], shard.packed_columns), [Outcome(uri, "failed", error=error)])
        pool.shutdown()


def _process_pool(processes: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("forkserver")
    return ProcessPoolExecutor(processes, mp_context=context, initializer=_end_with_parent)


def _see_it_start(pool: Executor) -> None:
    """Tell of a program whose processes cannot start: each would run the program again, up to its own build."""
    try:
        pool.submit(os.getpid).result()
    except BrokenProcessPool as error:
        text = (
            "no process can be started from this program: put what it does behind "
            "if __name__ == '__main__': (see multiprocessing, 'Safe importing of main module'), or build in one process"
        )
        raise InvalidRequestError(text) from error


def _end_with_parent() -> None:
    """In a worker: end where the build was killed; nobody else would end what waits for its work."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="fluxon_gop-parent", daemon=True).start()


def in_flight(
    pool: Executor, shards: Iterable[Shard], limit: int, *, lost: list[Shard] | None = None
) -> Iterator[ShardDone]:
    """Run shards on an executor, up to ``limit`` at a time; ``lost`` gets those that a dying process took along."""
    running: dict[Future[ShardDone], Shard] = {}
    pending = iter(shards)
    try:
        while True:
            while len(running) < limit and (shard := next(pending, None)) is not None:
                running[_submitted(pool, shard)] = shard
            if not running:
                return
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            broken: BrokenProcessPool | None = None
            for future in done:
                shard = running[future]
                try:
                    result = future.result()
                except BrokenProcessPool as error:
                    broken = error
                    continue
                del running[future]
                yield result
            if broken is not None:
                raise broken
    finally:
        for future in running:
            future.cancel()
        if lost is not None:
            lost += running.values()


def _submitted(pool: Executor, shard: Shard) -> Future[ShardDone]:
    try:
        return pool.submit(build_shard, shard)
    except BrokenProcessPool as error:
        # As if it had died a moment later.
        future: Future[ShardDone] = Future()
        future.set_exception(error)
        return future
