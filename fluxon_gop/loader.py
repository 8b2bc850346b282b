"""A training loader over clips: torch's DataLoader, looking ahead, counted, and resumable."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from fluxon_gop.clip_dataset import ClipDataset
from fluxon_gop.errors import ForkedProcessError, InvalidRequestError, SourceError
from fluxon_gop.samplers import Batches, ClipSampler, LookAhead

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_PEAKS = frozenset({"depth"})
"""Counters of which the largest counts, not the sum."""


class ClipLoader:
    """Batches of clips, epoch after epoch: each worker has the next batch's bytes under way while it decodes one.

    Iterating gives an epoch, as the collate function makes its batches; the next iteration is the next epoch.
    ``state_dict()`` says where it is; a loader of the same arguments that is given it goes on with the next batch.
    """

    def __init__(
        self,
        dataset: ClipDataset,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        sampler: Iterable[int] | None = None,
        batch_sampler: Iterable[Sequence[int]] | None = None,
        look_ahead: int = 1,
        num_workers: int = 0,
        start_method: str | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        **options: Any,
    ) -> None:
        """Set up the loader; workers start with the first epoch.

        Args:
            dataset: the clips.
            batch_size: clips of a batch.
            shuffle: in an order that rests on ``seed`` and the epoch; see :class:`ClipSampler`.
            seed: likewise.
            drop_last: leave out what does not fill a batch, or a rank's share.
            rank: of ``world_size`` processes that share each epoch.
            world_size: likewise.
            sampler: clip numbers in an order of yours, instead of shuffle, seed, rank, world_size. Its ``set_epoch``,
                where it has one, is called. To be resumable, its order must be the same again for the same epoch.
            batch_sampler: lists of clip numbers; instead of sampler, batch_size, drop_last too.
            look_ahead: batches that each worker reads ahead; 0 for none.
            num_workers: processes that read; 0 reads here.
            start_method: "fork", "spawn" or "forkserver"; None for fork where the data set can be read in a forked
                process, else forkserver. (Scripts that spawn need ``if __name__ == "__main__":``.)
            collate_fn: makes a batch of a list of samples; None for torch's default.
            options: for torch's DataLoader (pin_memory, prefetch_factor, persistent_workers, timeout, ...).

        Raises:
            ForkedProcessError: ``start_method="fork"`` where a forked process cannot read the data set.
        """
        try:
            from torch.utils.data import DataLoader, default_collate
        except ImportError:
            text = "ClipLoader needs torch: install it, or the extra fluxon-gop[torch]"
            raise InvalidRequestError(text) from None
        _check_workers(num_workers, start_method)
        order = {"shuffle": shuffle, "seed": seed, "rank": rank, "world_size": world_size != 1}
        if sampler is not None:
            _refuse_beside("sampler", order)
        if batch_sampler is not None:
            batches = {
                "batch_size": batch_size != 1,
                "drop_last": drop_last,
                "sampler": sampler is not None,
            }
            _refuse_beside("batch_sampler", {**order, **batches})
        _check_options(options)
        if not isinstance(dataset, ClipDataset):
            text = f"dataset is a {type(dataset).__name__}: want a ClipDataset"  # type: ignore[unreachable]
            raise TypeError(text)
        why = dataset.forks_badly
        if num_workers and start_method == "fork" and why is not None:
            text = f"workers cannot be forked: {why}. Use start_method='forkserver' or 'spawn'"
            raise ForkedProcessError(text)
        if start_method is None and num_workers:
            start_method = "fork" if why is None else "forkserver"
        if num_workers and start_method != "fork":
            _check_picklable({"transform": dataset.transform, "collate_fn": collate_fn})
        if batch_sampler is None:
            if sampler is None:
                sampler = ClipSampler(
                    dataset,
                    shuffle=shuffle,
                    seed=seed,
                    rank=rank,
                    world_size=world_size,
                    drop_last=drop_last,
                )
            batch_sampler = Batches(sampler, batch_size, drop_last=drop_last)
        self.dataset = dataset
        self._batches = _From(batch_sampler)
        self._identity = {
            "clips": len(dataset),
            "batches_of_epoch": len(self._batches),
            "batch_size": getattr(batch_sampler, "batch_size", None),
            "drop_last": getattr(batch_sampler, "drop_last", None),
            **_order_of(getattr(batch_sampler, "sampler", batch_sampler)),
        }
        if not len(self._batches):
            text = f"not one batch: {len(dataset)} clips, batches of {batch_size}, drop_last={drop_last}, world_size={world_size}"
            raise InvalidRequestError(text)
        self._epoch = self._done = 0
        self._resumes = self._is_begun = False
        self._cost: dict[str, int | float] = {}
        self._counted = _Counted(collate_fn or default_collate, dataset)
        self._loader: DataLoader[Any] = DataLoader(
            dataset,  # type: ignore[arg-type]
            batch_sampler=LookAhead(self._batches, num_workers, depth=look_ahead),
            num_workers=num_workers,
            multiprocessing_context=start_method if num_workers else None,
            collate_fn=self._counted,
            **options,
        )

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch, or what is left of it after ``load_state_dict``."""
        if self._is_begun and not self._resumes:
            self.set_epoch(self._epoch + 1)
        self._is_begun, self._resumes = True, False
        self._batches.begin(self._epoch, self._done)
        if not self._loader.num_workers:
            self._counted.begin()
        self._turn = turn = object()
        came = False
        for batch, cost in self._loader:
            if turn is self._turn:
                self._done += 1
                came = came or not _is_nothing(batch)
            for name, value in cost.items():
                held = self._cost.get(name, 0)
                self._cost[name] = max(held, value) if name in _PEAKS else held + value
            if not _is_nothing(batch):
                yield batch
        if turn is self._turn:
            if self._done and not came:
                text = f"not one clip of epoch {self._epoch} could be read, and on_error='skip' leaves all of them out"
                raise SourceError(text)
            self.set_epoch(self._epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration be of this epoch: from its start, or where a loaded state of it says."""
        if not (self._resumes and epoch == self._epoch):
            self._epoch, self._done, self._resumes = int(epoch), 0, False
        self._is_begun = False

    @property
    def epoch(self) -> int:
        """The epoch that is under way, or comes next."""
        return self._epoch

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader is: plain numbers, for a checkpoint. The batch last yielded counts as done."""
        epoch, done = self._epoch, self._done
        if done and done == len(self):
            # Nothing of it is left.
            epoch, done = epoch + 1, 0
        return {"epoch": epoch, "batches_done": done, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another loader of the same arguments was.

        Raises:
            InvalidRequestError: the state is of other clips, batches or another seed.
        """
        if not isinstance(state, Mapping) or not all(  # type: ignore[redundant-expr]
            type(state.get(name)) is int and state[name] >= 0 for name in ("epoch", "batches_done")
        ):
            text = f"the state is {state!r}: want what state_dict() returned"
            raise InvalidRequestError(text)
        wrong = [name for name, value in self._identity.items() if state.get(name) != value]
        if wrong:
            text = "the state is of another loader: " + ", ".join(
                f"{name} {state.get(name)} there, {self._identity[name]} here" for name in wrong
            )
            raise InvalidRequestError(text)
        if state["batches_done"] and state["batches_done"] >= len(self):
            text = f"the state has {state['batches_done']} of {len(self)} batches done"
            raise InvalidRequestError(text)
        self._epoch, self._done = state["epoch"], state["batches_done"]
        self._resumes = True

    def cost(self) -> dict[str, int | float]:
        """Return what the batches yielded so far cost, all workers together; see :meth:`ClipDataset.cost`."""
        return dict(self._cost)

    def __repr__(self) -> str:
        """Show where it is."""
        return f"ClipLoader({self.dataset!r}, epoch {self._epoch}, {self._done} of {len(self)} batches)"


def _order_of(sampler: object) -> dict[str, Any]:
    """Return what a sampler's order rests on, as far as it tells."""
    found = getattr(sampler, "identity", None)
    if isinstance(found, dict):
        return found
    names = ("seed", "rank", "num_replicas", "shuffle")
    return {"sampler": type(sampler).__name__, **{name: getattr(sampler, name, None) for name in names}}


class _From:
    """A batch sampler's lists of one epoch from some place on."""

    def __init__(self, batches: Iterable[Sequence[int]]) -> None:
        self.batches = batches
        self._skip = 0

    def begin(self, epoch: int, skip: int) -> None:
        for thing in (self.batches, getattr(self.batches, "sampler", None)):
            set_epoch = getattr(thing, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        self._skip = skip

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Sequence[int]]:
        return islice(iter(self.batches), self._skip, None)


NOTHING = "no clip of this batch could be read"
"""Stands for a batch that is left out; also between processes."""


class _Counted:
    """Collates a batch, in the worker that read it, and says what it cost."""

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: ClipDataset) -> None:
        self._collate, self._dataset = collate, dataset
        self._before: dict[str, int | float] = {}

    def begin(self) -> None:
        """Have only what is read from here on counted, where the data set is read in this process."""
        self._before = self._dataset.cost()

    def __call__(self, samples: list[Any]) -> tuple[Any, dict[str, int | float]]:
        from torch.utils.data import get_worker_info

        batch = self._batch(samples) if samples else NOTHING
        worker = get_worker_info()
        dataset: Any = self._dataset if worker is None else worker.dataset
        now, before = dataset.cost(), self._before
        self._before = now
        return batch, {
            name: value if name in _PEAKS else value - before.get(name, 0) for name, value in now.items()
        }

    def _batch(self, samples: list[Any]) -> Any:
        try:
            return self._collate(samples)
        except Exception:
            shapes = {
                getattr(sample.get("frames"), "shape", None)
                for sample in samples
                if isinstance(sample, dict)
            }
            if len(shapes) < 2:
                raise
            text = f"the clips of a batch are of several sizes ({', '.join(map(str, shapes))}): give height and width, or a collate_fn"
            raise InvalidRequestError(text) from None

    def __getstate__(self) -> dict[str, Any]:
        # The worker has the data set anyhow.
        return {"_collate": self._collate, "_dataset": None, "_before": {}}


def _refuse_beside(name: str, others: Mapping[str, object]) -> None:
    """Refuse arguments that a sampler of the caller's leaves without a meaning."""
    given = [other for other, value in others.items() if value]
    if given:
        text = f"{name} is given: {', '.join(given)} would have no meaning beside it"
        raise InvalidRequestError(text)


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse options of torch's that are arguments here, or would break the order of batches."""
    reasons = {
        "dataset": "it is the first argument",
        "multiprocessing_context": "use start_method",
        "in_order": "a state tells the place in the order of batches, which have to come in order",
    }
    for name in reasons.keys() & options.keys():
        if name != "in_order" or not options[name]:
            text = f"{name} cannot be given: {reasons[name]}"
            raise InvalidRequestError(text)


def _is_nothing(batch: Any) -> bool:
    return isinstance(batch, str) and batch == NOTHING


def _check_workers(num_workers: int, start_method: str | None) -> None:
    if start_method not in {None, "fork", "spawn", "forkserver"}:
        text = f"start_method is {start_method!r}: want 'fork', 'spawn', 'forkserver' or None"
        raise InvalidRequestError(text)
    if num_workers and getattr(multiprocessing.current_process(), "_inheriting", False):
        text = (
            "a worker process imports the script, and the script starts workers: put what it runs behind "
            "if __name__ == '__main__':"
        )
        raise InvalidRequestError(text)


def _check_picklable(things: Mapping[str, object]) -> None:
    """Refuse what cannot be sent to a process that is not forked."""
    for name, thing in things.items():
        try:
            pickle.dumps(thing)
        except Exception as error:  # noqa: BLE001 - whatever its __reduce__ raises
            text = (
                f"{name} cannot be sent to workers that are not forked ({type(error).__name__}: {str(error).splitlines()[0][:200]}): "
                "a lambda, or a function within another one, cannot; one of a module can"
            )
            raise InvalidRequestError(text) from None
