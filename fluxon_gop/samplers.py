"""In which order clips are read, and what each worker will read next.

Pure, and without torch: a sampler is anything that yields clip numbers, a batch sampler anything that yields lists of
them.
"""

from __future__ import annotations

import operator
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

import numpy as np

from fluxon_gop.errors import InvalidRequestError
from fluxon_gop.requests import check_positive

_PART = 1 << 16
"""Numbers that are Python objects at once."""


class ClipSampler:
    """All clips of an epoch, in order or shuffled, or one rank's share of them: 4 or 8 bytes a clip while it runs.

    The order rests on ``seed`` and ``epoch`` alone, so that it is the same again after a restart, and all ranks draw
    parts of one order. Of ranks, each gets the same number of clips: with ``drop_last`` what is left over is left
    out, else the first clips of the order are read twice.
    """

    def __init__(
        self,
        clips: int | Sized,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
    ) -> None:
        """Take the number of clips, or the data set; ``rank`` of ``world_size`` processes that share an epoch."""
        self._count = len(clips) if isinstance(clips, Sized) else operator.index(clips)
        check_positive("world_size", world_size)
        rank, seed = operator.index(rank), operator.index(seed)
        if not 0 <= rank < world_size or seed < 0 or self._count < 0:
            text = f"rank {rank} of {world_size}, seed {seed}, {self._count} clips: want a rank below world_size, none negative"
            raise InvalidRequestError(text)
        self._shuffle, self.seed, self.epoch = shuffle, seed, 0
        self._rank, self._world_size = rank, world_size
        share = self._count // world_size
        self._share = share if drop_last or share * world_size == self._count else share + 1

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration be of this epoch."""
        if operator.index(epoch) < 0:
            text = f"epoch is {epoch}: epochs count from 0"
            raise InvalidRequestError(text)
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of clips of this rank."""
        return self._share

    def __iter__(self) -> Iterator[int]:
        """Yield clip numbers."""
        order = None
        if self._shuffle:
            dtype = np.uint32 if self._count < 1 << 32 else np.int64
            order = np.arange(self._count, dtype=dtype)
            np.random.default_rng([self.seed, self.epoch]).shuffle(order)
        for start in range(0, self._share if self._count else 0, _PART):
            places = np.arange(start, min(start + _PART, self._share), dtype=np.int64)
            numbers = (places * self._world_size + self._rank) % self._count
            yield from (numbers if order is None else order[numbers]).tolist()

    @property
    def identity(self) -> dict[str, int | bool]:
        """What the order rests on, but for the epoch."""
        return {
            "clips": self._count,
            "shuffle": self._shuffle,
            "seed": self.seed,
            "rank": self._rank,
            "world_size": self._world_size,
        }

    def __repr__(self) -> str:
        """Show what the order rests on."""
        order = f"shuffled by seed {self.seed}" if self._shuffle else "in order"
        return f"ClipSampler({self._share} clips, {order}, rank {self._rank} of {self._world_size})"


class Batches:
    """A sampler's numbers in lists of ``batch_size``."""

    def __init__(self, sampler: Iterable[int], batch_size: int, *, drop_last: bool = False) -> None:
        """Take the sampler; ``drop_last``: leave out a last list that is shorter."""
        check_positive("batch_size", batch_size)
        self.sampler, self.batch_size, self.drop_last = sampler, int(batch_size), drop_last

    def __len__(self) -> int:
        """Return the number of lists."""
        clips = _length_of(self.sampler)
        return clips // self.batch_size if self.drop_last else -(-clips // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the lists."""
        batch: list[int] = []
        for number in self.sampler:
            batch.append(number)
            if len(batch) == self.batch_size:
                yield batch
                batch = []
        if batch and not self.drop_last:
            yield batch


class AheadBatch(list[int]):
    """A batch that knows which batches its worker reads next, and which sampler says so."""

    owner: str = ""
    ahead: tuple[tuple[int, ...], ...] = ()


class LookAhead:
    """The batches of another batch sampler, in its order, each with the next ones of the same worker.

    A ``DataLoader`` gives batches to its workers in turn, so that batch n + ``num_workers`` comes to the worker of
    batch n; with that known, a :class:`ClipDataset` has its bytes under way while it decodes batch n. The sampler below
    is asked ``depth * num_workers`` batches early; nothing else of it changes. (With ``in_order=False`` workers take
    turns as they are ready: the batches are the same, what is read ahead is then often for another worker and dropped.)
    """

    def __init__(self, batches: Iterable[Sequence[int]], num_workers: int = 0, *, depth: int = 1) -> None:
        """Take the batch sampler, the loader's ``num_workers``, and how many batches a worker reads ahead."""
        if isinstance(num_workers, bool) or num_workers < 0 or depth < 0:
            text = f"num_workers {num_workers}, depth {depth}: want numbers from 0"
            raise InvalidRequestError(text)
        self.batches = batches
        self._turn = max(num_workers, 1)
        self._depth = depth
        self._name = uuid.uuid4().hex

    def __len__(self) -> int:
        """Return the number of batches."""
        return _length_of(self.batches)

    def __iter__(self) -> Iterator[AheadBatch]:
        """Yield the batches."""
        waiting: deque[tuple[int, ...]] = deque()
        for numbers in self.batches:
            waiting.append(tuple(numbers))
            if len(waiting) > self._depth * self._turn:
                yield self._first_of(waiting)
        while waiting:
            yield self._first_of(waiting)

    def _first_of(self, waiting: deque[tuple[int, ...]]) -> AheadBatch:
        batch = AheadBatch(waiting[0])
        batch.owner = self._name
        batch.ahead = tuple(
            waiting[place]
            for place in range(self._turn, self._depth * self._turn + 1, self._turn)
            if place < len(waiting)
        )
        waiting.popleft()
        return batch

    def __getattr__(self, name: str) -> Any:
        """Answer for the batch sampler below: ``sampler``, ``batch_size``, ``drop_last``, ``set_epoch``."""
        if name.startswith("__") or name == "batches":
            raise AttributeError(name)
        return getattr(self.batches, name)


def _length_of(thing: object) -> int:
    if not isinstance(thing, Sized):
        text = f"{type(thing).__name__} has no length"
        raise TypeError(text)
    return len(thing)
