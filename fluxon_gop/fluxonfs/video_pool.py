"""FluxonFS's pool: readers kept by key, and batches over many videos.

Over our own agent a batch is one plan and one wave across exports (:class:`fluxon_gop.VideoReaderPool`); a
foreign agent gets one merged call for each reader key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from fluxon_gop.batch_plan import BatchPlan
from fluxon_gop.errors import ClosedError, InvalidRequestError
from fluxon_gop.fluxonfs.checks import frame_numbers, non_empty, positive
from fluxon_gop.fluxonfs.read_stats import change, reader_stats, split
from fluxon_gop.fluxonfs.users import Identity, check_identity
from fluxon_gop.fluxonfs.video_reader import Agent, FluxonFsVideoReader
from fluxon_gop.pool import VideoReaderPool
from fluxon_gop.reader_cache import ReaderCache
from fluxon_gop.requests import VideoReadRequest


@dataclass(frozen=True)
class FluxonFsVideoReadRequest:
    """Frames wanted of one video of an export; checked when it is made."""

    export_name: str
    relpath: str
    height: int
    width: int
    num_threads: int
    indices: Sequence[int]

    def __post_init__(self) -> None:
        """Check each field; ``indices`` becomes a tuple."""
        for name in ("export_name", "relpath"):
            non_empty(name, getattr(self, name))
        for name in ("height", "width", "num_threads"):
            positive(name, getattr(self, name))
        object.__setattr__(self, "indices", frame_numbers(self.indices))


@dataclass(frozen=True)
class FluxonFsVideoReadResult:
    """What one request got, and what that cost."""

    array: Any
    """uint8 (len(indices), height, width, 3), RGB, owned by the caller."""
    reader_stats: dict[str, int]
    """What this call counted; of a merged call this request's share, by its number of frames."""
    pool_stats: dict[str, int]
    """The pool's counters after the call."""
    reader_cache_hit: bool
    """Whether an idle reader of this key was there."""
    batch_stats: dict[str, int]
    """``read_many_group_size`` and ``read_many_group_frames`` of the merged call, and this request's place in it."""

    def __repr__(self) -> str:
        """Show the shape, never pixels."""
        shape = getattr(self.array, "shape", None)
        return f"FluxonFsVideoReadResult(shape={shape}, reader_cache_hit={self.reader_cache_hit})"


@dataclass(frozen=True)
class VideoReaderKey:
    """What a reader is kept by: the seed's LRU key."""

    export_name: str
    relpath: str
    height: int
    width: int
    num_threads: int
    request_identity: Identity | None = field(repr=False)


class PlanningAgent(Agent, Protocol):
    """An agent that can also plan: our own."""

    def open_pool(self, max_readers: int, /) -> VideoReaderPool:
        """Return the pool that reads its batches."""
        ...

    def read_request(self, key: VideoReaderKey, indices: tuple[int, ...], /) -> VideoReadRequest:
        """Return a request of that pool; the relpath is checked."""
        ...

    def check_access(self, key: VideoReaderKey, /) -> None:
        """Raise where the key's identity may not read its video."""
        ...


class _Group(NamedTuple):
    """What one merged call brought: an array for each request of a key, and what they cost together."""

    arrays: list[Any]
    stats: dict[str, int]
    hit: bool


class FluxonFsVideoReaderPool:
    """Reads videos of exports through up to ``max_readers`` readers, the least recently used out first.

    Thread-safe. A reader serves one call at a time; calls at once on one key open several. Readers in use are
    never closed to make room.
    """

    def __init__(
        self,
        *,
        agent: Agent,
        request_identity: Identity | Callable[[], Identity | None] | None = None,
        max_readers: int = 32,
    ) -> None:
        """Open nothing yet.

        Args:
            agent: opens readers.
            request_identity: (user, password) of all its calls, or None; or what tells the one of each call.
            max_readers: idle and busy readers to keep.
        """
        positive("max_readers", max_readers)
        self._agent = agent
        self._max_readers = max_readers
        self._identity = (
            request_identity if callable(request_identity) else check_identity(request_identity)
        )
        self._engine: _Planned | _Foreign
        if hasattr(agent, "open_pool") and hasattr(agent, "read_request"):
            self._engine = _Planned(agent, max_readers)
        else:
            self._engine = _Foreign(agent, max_readers)
        self._closed = False

    def read_frames_numpy(
        self,
        *,
        export_name: str,
        relpath: str,
        height: int,
        width: int,
        num_threads: int,
        indices: Sequence[int],
    ) -> Any:
        """Return the frames of one request; see :meth:`read_many_numpy_with_stats`."""
        return self.read_frames_numpy_with_stats(
            export_name=export_name,
            relpath=relpath,
            height=height,
            width=width,
            num_threads=num_threads,
            indices=indices,
        ).array

    def read_frames_numpy_with_stats(
        self,
        *,
        export_name: str,
        relpath: str,
        height: int,
        width: int,
        num_threads: int,
        indices: Sequence[int],
    ) -> FluxonFsVideoReadResult:
        """Return the result of one request; see :meth:`read_many_numpy_with_stats`."""
        request = FluxonFsVideoReadRequest(export_name, relpath, height, width, num_threads, indices)
        return self.read_many_numpy_with_stats([request])[0]

    def read_many_numpy_with_stats(
        self, requests: Sequence[FluxonFsVideoReadRequest]
    ) -> list[FluxonFsVideoReadResult]:
        """Return a result for each request, in order.

        Requests of one reader key become one read. Over our own agent all reads of the batch are one plan, and one
        wave of reads of the pieces that no cache tier has; versions and rights that have run out come before, side
        by side.

        Raises:
            FluxonGopError: of the first request that failed.
            ClosedError: the pool is closed.
        """
        wanted = _checked_requests(requests)
        groups = self._grouped(wanted)
        results: dict[int, FluxonFsVideoReadResult] = {}
        answers = self._engine.read(
            {key: [wanted[n].indices for n in members] for key, members in groups.items()}
        )
        for members, group in zip(groups.values(), answers, strict=True):
            counts = [len(wanted[n].indices) for n in members]
            shares = split(group.stats, counts)
            for place, n in enumerate(members):
                batch = {
                    "read_many_group_size": len(members),
                    "read_many_group_frames": sum(counts),
                    "read_many_group_index": place,
                }
                results[n] = FluxonFsVideoReadResult(
                    group.arrays[place], shares[place], {}, group.hit, batch
                )
        stats = self.stats()
        for result in results.values():
            result.pool_stats.update(stats)
        return [results[n] for n in range(len(wanted))]

    def explain(self, requests: Sequence[FluxonFsVideoReadRequest]) -> BatchPlan:
        """Return the plan of a batch without reading any video: byte ranges, and how many of their pieces are where."""
        if not isinstance(self._engine, _Planned):
            text = "this agent cannot plan"
            raise TypeError(text)
        wanted = _checked_requests(requests)
        groups = self._grouped(wanted)
        return self._engine.explain(
            {key: [wanted[n].indices for n in members] for key, members in groups.items()}
        )

    def stats(self) -> dict[str, int]:
        """Return the pool's counters: readers now, opened, closed, evicted, hits and misses."""
        return self._engine.counts()

    def close(self) -> None:
        """Close idle readers now and busy ones as they return; new reads raise ClosedError."""
        self._closed = True
        self._engine.close()

    def _grouped(self, requests: Sequence[FluxonFsVideoReadRequest]) -> dict[VideoReaderKey, list[int]]:
        if self._closed:
            text = "FluxonFsVideoReaderPool is closed"
            raise ClosedError(text)
        # Once for the whole batch: the identity may be another one by the next call.
        identity = check_identity(self._identity()) if callable(self._identity) else self._identity
        groups: dict[VideoReaderKey, list[int]] = {}
        for n, one in enumerate(requests):
            key = VideoReaderKey(
                one.export_name, one.relpath, one.height, one.width, one.num_threads, identity
            )
            groups.setdefault(key, []).append(n)
        return groups

    def __enter__(self) -> Self:
        """Return itself."""
        if self._closed:
            text = "FluxonFsVideoReaderPool is closed"
            raise ClosedError(text)
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle agent, identity and size, passwords included: a worker needs them to read."""
        return (_reopen, (self._agent, self._identity, self._max_readers))

    def __repr__(self) -> str:
        """Show the counts; never the identity."""
        return f"FluxonFsVideoReaderPool({self.stats()['current_readers']} of {self._max_readers} readers)"


def _reopen(agent: Agent, identity: Any, max_readers: int) -> FluxonFsVideoReaderPool:
    return FluxonFsVideoReaderPool(agent=agent, request_identity=identity, max_readers=max_readers)


Wanted = dict[VideoReaderKey, list[Sequence[int]]]
"""Frame numbers of each request, by reader key."""


class _Planned:
    """One plan and one wave for all keys of a batch."""

    def __init__(self, agent: Any, max_readers: int) -> None:
        self._agent: PlanningAgent = agent
        self._pool = self._agent.open_pool(max_readers)

    def read(self, wanted: Wanted) -> list[_Group]:
        results = iter(self._pool.read_many(self._requests(wanted)))
        groups = []
        for clips in wanted.values():
            mine = [next(results) for _ in clips]
            groups.append(
                _Group([one.array for one in mine], reader_stats(mine[0].stats), mine[0].reader_cache_hit)
            )
        return groups

    def explain(self, wanted: Wanted) -> BatchPlan:
        for key in wanted:
            self._agent.check_access(key)
        plan: BatchPlan = self._pool.explain(self._requests(wanted))
        return plan

    def _requests(self, wanted: Wanted) -> list[VideoReadRequest]:
        return [
            self._agent.read_request(key, tuple(clip)) for key, clips in wanted.items() for clip in clips
        ]

    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = self._pool.counts()
        return counts

    def close(self) -> None:
        self._pool.close()


class _Foreign:
    """One merged call for each key, key after key."""

    def __init__(self, agent: Agent, max_readers: int) -> None:
        self._agent = agent
        self._readers: ReaderCache[VideoReaderKey, FluxonFsVideoReader] = ReaderCache(
            max_readers, self._open, owner="FluxonFsVideoReaderPool"
        )

    def _open(self, key: VideoReaderKey) -> FluxonFsVideoReader:
        # FluxonFS's own name, and the key's fields are its arguments.
        return FluxonFsVideoReader._open(agent=self._agent, **vars(key))  # noqa: SLF001

    def read(self, wanted: Wanted) -> list[_Group]:
        return [self._read(key, clips) for key, clips in wanted.items()]

    def _read(self, key: VideoReaderKey, clips: list[Sequence[int]]) -> _Group:
        lease = self._readers.lease(key)
        keep = False
        try:
            before = lease.reader.stats()
            merged = [number for clip in clips for number in clip]
            frames = lease.reader.read_frames_numpy(merged)
            stats = change(before, lease.reader.stats())
            keep = True
        except (ValueError, IndexError, TypeError):
            # The caller's fault: the reader is as good as before.
            keep = True
            raise
        finally:
            self._readers.release(lease, keep=keep)
        if len(clips) == 1:
            return _Group([frames], stats, lease.hit)
        shape = getattr(frames, "shape", None)
        if not shape or shape[0] != len(merged):
            text = f"the agent's reader returned shape {shape} for {len(merged)} frames"
            raise InvalidRequestError(text)
        arrays, at = [], 0
        for clip in clips:
            part = frames[at : at + len(clip)]
            # Each its own caller's.
            arrays.append(part.copy() if isinstance(part, np.ndarray) else part)
            at += len(clip)
        return _Group(arrays, stats, lease.hit)

    def counts(self) -> dict[str, int]:
        return self._readers.counts()

    def close(self) -> None:
        self._readers.close()


def _checked_requests(requests: Any) -> Sequence[FluxonFsVideoReadRequest]:
    if not isinstance(requests, Sequence):
        text = f"requests must be a sequence of FluxonFsVideoReadRequest, got {type(requests).__name__}"
        raise TypeError(text)
    for request in requests:
        if not isinstance(request, FluxonFsVideoReadRequest):
            text = f"requests must hold FluxonFsVideoReadRequest values, got {type(request).__name__}"
            raise TypeError(text)
    return requests
