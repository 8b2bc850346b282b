"""A data set of clips: a batch of them is one plan and one wave over all its videos.

Works with any loader that asks for ``data_set[n]`` or ``data_set.__getitems__([n, ...])``; torch is imported only where
tensors are asked for.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from fluxon_gop.batch_plan import BatchPlan
from fluxon_gop.clip_samples import Clip, Sample, SampleMaker
from fluxon_gop.clip_videos import ClipVideos, Videos
from fluxon_gop.clips import Clips
from fluxon_gop.errors import (
    ClosedError,
    FluxonGopError,
    FrameIndexError,
    InvalidRequestError,
    StaleIndexError,
)
from fluxon_gop.handed_over import HandedOver
from fluxon_gop.index_table import IndexTable
from fluxon_gop.look_ahead import BegunBatches
from fluxon_gop.model import VideoIndex
from fluxon_gop.pool import PrefetchHandle, VideoReaderPool
from fluxon_gop.ranges import Int64Array
from fluxon_gop.requests import (
    VideoReadRequest,
    VideoReadResult,
    as_int,
    check_positive,
    check_size,
    check_threads,
    check_timeout,
)
from fluxon_gop.stats import ReadStats

_log = logging.getLogger(__name__)

NO_FRAMES = np.zeros(0, np.int64)
MAX_BATCH_BYTES = 256 * 1024 * 1024
ROW_CACHE_BYTES = 16 * 1024 * 1024


@dataclass
class _Batch:
    """A batch whose requests are known, and whose reads may be under way."""

    clips: list[Clip]
    errors: dict[int, FluxonGopError]
    """Of clips, by their place, whose frames could not be told: they have no requests."""
    requests: list[VideoReadRequest]
    handle: PrefetchHandle | None = None

    def close(self) -> None:
        if self.handle is not None:
            self.handle.close()


class ClipDataset:
    """Clips of many videos, by number; of a batch, all bytes come in one wave.

    A sample is a dict: ``frames`` uint8 (length, H, W, 3), or (length, 3, H, W) as a view of it; of several views a dict
    of them by name; ``clip`` and ``video`` int; ``frame_numbers`` int64 (length,); ``pts_seconds`` float64 (length,),
    NaN where only FFmpeg's demuxer knows; the video's ``labels``; with ``on_error="mask"`` also ``valid``.

    Pickles small, and opens nothing until it is read in the process that reads it.
    """

    def __init__(
        self,
        videos: Videos,
        clips: Clips,
        *,
        index: IndexTable | None = None,
        frame_counts: npt.ArrayLike | None = None,
        height: int | None = None,
        width: int | None = None,
        layout: str = "NHWC",
        array_type: str = "numpy",
        labels: Mapping[str, npt.ArrayLike] | None = None,
        transform: Callable[[Sample], Any] | None = None,
        on_error: str = "raise",
        num_threads: int = 1,
        apply_rotation: bool = True,
        max_readers: int = 8,
        max_batch_bytes: int = MAX_BATCH_BYTES,
        row_cache_bytes: int = ROW_CACHE_BYTES,
        storage_options: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Count the clips: O(videos), from the table's frame counts; videos without a row are indexed first.

        Args:
            videos: addresses; a mapping of addresses by view, where several cameras filmed the same and frame n of all
                belongs together; or an IndexTable, for all its videos.
            clips: :class:`Windows`, :class:`Pairs`, :class:`FrameLists` or :class:`Timestamps`.
            index: the table of the videos' rows. Rows that it lacks are built now, and travel to the workers.
            frame_counts: int (videos,): taken as they are, so that nothing is looked up or built now.
            height: of the pictures; give both or neither (each video's own size).
            width: likewise.
            layout: "NHWC" or "NCHW".
            array_type: "numpy" or "torch"; loaders make tensors of either.
            labels: values of each video, (videos, ...) by name; a sample holds its video's.
            transform: makes of each sample what the data set returns; must be picklable for spawned workers.
            on_error: "raise"; "skip" to leave a clip that cannot be read out of its batch; "mask" to give it black
                frames and ``valid`` False (needs height and width). Both are counted. With either, a video that cannot
                be read now is logged, listed in ``videos.unreadable``, and has no windows.
            num_threads: see :class:`VideoReaderPool`; workers decode side by side anyway.
            apply_rotation: turn pictures as the display matrix says.
            max_readers: readers that each worker keeps open after a batch.
            max_batch_bytes: fetched bytes that each worker holds at once, those read ahead included.
            row_cache_bytes: decoded index rows that each worker keeps.
            storage_options: for the videos' stores.
            timeout: seconds after which a batch waits for no more bytes; None for the stores' own limits.

        Raises:
            FluxonGopError: an argument that cannot be met, or a video that cannot be read.
        """
        if not isinstance(clips, Clips):
            text = f"clips is a {type(clips).__name__}: want Windows, Pairs, FrameLists or Timestamps"  # type: ignore[unreachable]
            raise TypeError(text)
        if index is not None and not isinstance(index, IndexTable):
            text = f"index is a {type(index).__name__}: want an IndexTable or None"  # type: ignore[unreachable]
            raise TypeError(text)
        if on_error not in {"raise", "skip", "mask"}:
            text = f"on_error is {on_error!r}: want 'raise', 'skip' or 'mask'"
            raise InvalidRequestError(text)
        check_size(height, width)
        check_threads(num_threads)
        check_timeout(timeout)
        check_positive("max_batch_bytes", max_batch_bytes)
        check_positive("max_readers", max_readers)
        check_positive("row_cache_bytes", row_cache_bytes)
        self._size = (height, width)
        self._on_error = on_error
        self._row_cache_bytes = int(row_cache_bytes)
        self._pool_options: dict[str, Any] = {
            "max_readers": max_readers,
            "num_threads": num_threads,
            "apply_rotation": apply_rotation,
            "max_batch_bytes": max_batch_bytes,
            "storage_options": storage_options,
            "timeout": timeout,
        }
        self.videos = ClipVideos(videos, index, storage_options)
        self._maker = SampleMaker(
            views=list(self.videos.views) if self.videos.is_named else None,
            videos=self.videos.count,
            length=clips.length,
            size=self._size,
            layout=layout,
            array_type=array_type,
            labels=labels,
            transform=transform,
            masks=on_error == "mask",
        )
        counts = self.videos.frame_counts(
            frame_counts, need_rows=clips.by_time, tolerant=on_error != "raise"
        )
        if clips.needs_counts:
            counts[list(self.videos.unreadable)] = 0
        self._clips = clips.of(counts)
        self._tell_of_none(clips, counts)
        self._by_time = clips.by_time
        self._handed: dict[str, HandedOver] = {}
        self._closed = False
        self._open_nothing()

    def _tell_of_none(self, clips: Clips, counts: Int64Array) -> None:
        """Refuse a data set without clips; tell of videos that have none."""
        if not self.videos.count:
            text = "there is no video"
            raise InvalidRequestError(text)
        if not len(self._clips):
            text = f"no clip: {clips}; the longest of {self.videos.count} videos has {int(counts.max())} frames"
            raise InvalidRequestError(text)
        without = self._clips.videos_without()
        if without:
            _log.warning(
                "%d of %d videos are shorter than a window, and have no clip", without, self.videos.count
            )

    def _open_nothing(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._pool: VideoReaderPool | None = None
        self._table: IndexTable | None = None
        self._batches: BegunBatches[_Batch] = BegunBatches()
        self._counts = {"clips": 0, "skipped_clips": 0, "masked_clips": 0}

    # ------------------------------------------------------------- what there is

    def __len__(self) -> int:
        """Return the number of clips."""
        return len(self._clips)

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples one by one; an error of one is raised, also one that is an IndexError."""
        return (self[number] for number in range(len(self)))

    def clip(self, number: int) -> Clip:
        """Return what a clip is made of; reads nothing, but of a clip by time its video's index row.

        Raises:
            FrameIndexError: there is no such clip.
            FrameTimestampError: its video shows nothing at its times.
        """
        (clip,), errors = self._located([self._number(number)])
        if errors:
            raise errors[0]
        return clip

    @property
    def transform(self) -> Callable[[Sample], Any] | None:
        """What makes of a sample what the data set returns."""
        return self._maker.transform

    @property
    def nbytes(self) -> int:
        """Bytes of the clip table."""
        return self._clips.nbytes

    def _number(self, number: Any) -> int:
        place, count = as_int("clips: asked for", number), len(self)
        if not -count <= place < count:
            text = f"clip {place} is beyond the end: the data set has {count} clips"
            raise FrameIndexError(text, source="the data set", index=place, length=count)
        return place + count if place < 0 else place

    def _located(self, numbers: Sequence[int]) -> tuple[list[Clip], dict[int, FluxonGopError]]:
        """Return clips, and by place the errors of those whose frames cannot be told."""
        videos = self._clips.video_of(np.array(numbers, np.int64)).tolist()
        uris = [self.videos.uris_of(video) for video in videos]
        indexes: list[VideoIndex | None] = [None] * len(videos)
        if self._by_time:
            _, table = self._opened()
            keys = [self.videos.key_of(next(iter(by_view.values()))) for by_view in uris]
            rows = [None] * len(keys) if table is None else table.lookup(keys)
            indexes = [row if isinstance(row, VideoIndex) else None for row in rows]
        clips, errors = [], {}
        for place, (number, index) in enumerate(zip(numbers, indexes, strict=True)):
            frames = NO_FRAMES
            try:
                frames = self._clips.frames_of(number, index)
            except FluxonGopError as error:
                errors[place] = error
            clips.append(Clip(number, videos[place], uris[place], frames))
        return clips, errors

    # ------------------------------------------------------------- reading

    def __getitem__(self, number: int) -> Any:
        """Return one sample: a batch of one."""
        samples, error = self._read([number])
        if error is not None and not samples:
            raise error
        return samples[0]

    def __getitems__(self, numbers: Sequence[int]) -> list[Any]:
        """Return a sample for each clip, in order; their videos' bytes come in one wave.

        Where the numbers are a :class:`LookAhead`'s batch, the wave of the next one starts before this one decodes.

        With ``on_error="skip"`` clips that cannot be read are not in it, so that it may be empty.

        Raises:
            FluxonGopError: of the first clip that cannot be read, with ``on_error="raise"``.
        """
        return self._read(numbers)[0]

    def _read(self, numbers: Sequence[int]) -> tuple[list[Any], FluxonGopError | None]:
        """Return the samples, and the first error among them."""
        wanted = tuple(self._number(number) for number in numbers)
        ahead = tuple(tuple(map(self._number, batch)) for batch in getattr(numbers, "ahead", ()))
        owner = getattr(numbers, "owner", None)
        pool, _ = self._opened()
        batch = None if owner is None else self._batches.take(owner, wanted)
        if batch is None:
            batch = self._begin(wanted, start=bool(ahead))
        try:
            if owner is not None:
                self._batches.keep_only(owner, ahead, partial(self._begin, start=True))
            reads = batch.requests if batch.handle is None else batch.handle
            results = pool.read_many(reads, on_error="raise" if self._on_error == "raise" else "skip")
        except BaseException:
            batch.close()
            raise
        return self._samples(batch, results)

    def explain(self, numbers: Sequence[int]) -> BatchPlan:
        """Return the plan of a batch without reading any video."""
        return self._opened()[0].explain(
            self._begin([self._number(n) for n in numbers], start=False).requests
        )

    def _begin(self, numbers: Sequence[int], *, start: bool) -> _Batch:
        """Make a batch's requests, one a clip and view, and start their reads where asked to."""
        height, width = self._size
        clips, errors = self._located(numbers)
        if errors and self._on_error == "raise":
            raise next(iter(errors.values()))
        requests = [
            VideoReadRequest(uri, clip.frames, height, width)
            for place, clip in enumerate(clips)
            if place not in errors
            for uri in clip.uris.values()
        ]
        batch = _Batch(clips, errors, requests)
        if start:
            batch.handle = self._opened()[0].prefetch(requests)
        return batch

    def _samples(
        self, batch: _Batch, results: Sequence[VideoReadResult]
    ) -> tuple[list[Any], FluxonGopError | None]:
        views, coming = len(self.videos.views), iter(results)
        samples, first_error = [], None
        for place, clip in enumerate(batch.clips):
            error = batch.errors.get(place)
            mine = [] if error is not None else list(islice(coming, views))
            error = error or self._error_of(clip, mine)
            if error is not None and self._on_error == "raise":
                raise error
            first_error = first_error or error
            if error is not None and self._on_error == "skip":
                self._counts["skipped_clips"] += 1
                continue
            self._counts["clips"] += 1
            self._counts["masked_clips"] += error is not None
            samples.append(self._maker.sample(clip, mine, error))
        return samples, first_error

    def _error_of(self, clip: Clip, results: Sequence[VideoReadResult]) -> FluxonGopError | None:
        """Return why a clip was not read, or not by the index that told its frames."""
        for result in results:
            if result.error is not None:
                return result.error
        if not self._by_time:
            return None
        try:
            if np.array_equal(clip.frames, self._clips.frames_of(clip.number, results[0].index)):
                return None
        except FluxonGopError:
            pass
        text = f"video {clip.video}: its index row is of another version of the file, so that its frames' times are not known; build it again"
        return StaleIndexError(text, source=f"video {clip.video}")

    # ------------------------------------------------------------- in each process

    def _opened(self) -> tuple[VideoReaderPool, IndexTable | None]:
        """Return this process's pool and table."""
        if self._pid != os.getpid():
            # Forked: what the parent had open is the parent's.
            self._open_nothing()
        with self._lock:
            if self._closed:
                text = "the data set is closed"
                raise ClosedError(text)
            if self._pool is None:
                table = self.videos.table
                self._table = None if table is None else table.with_cache(self._row_cache_bytes)
                self._pool = VideoReaderPool(index=self._table, **self._pool_options)
                weakref.finalize(self, _close, self._pool, self._pid).atexit = False
            return self._pool, self._table

    @property
    def forks_badly(self) -> str | None:
        """Why a forked worker could not read this data set, None where it could."""
        return self.videos.forks_badly

    def cost(self) -> dict[str, int | float]:
        """Return what was read in this process: the pool's counters, clips, and how looking ahead went."""
        read = self._pool is not None and self._pid == os.getpid()
        stats = self._pool.stats() if read and self._pool is not None else ReadStats()
        batches = self._batches if self._pid == os.getpid() else BegunBatches[_Batch]()
        return {
            **stats.as_dict(),
            **self._counts,
            "look_ahead_hits": batches.hits,
            "look_ahead_misses": batches.misses,
            "look_ahead_dropped": batches.dropped,
        }

    def close(self) -> None:
        """Cancel what was begun and close the readers; use after it raises ClosedError."""
        if self._pid == os.getpid():
            self._batches.close()
            if self._pool is not None:
                self._pool.close()
        self._closed = True

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker needs; large arrays by what the OS can share of them."""
        state = {
            name: value
            for name, value in self.__dict__.items()
            if name not in {"_lock", "_pool", "_table", "_batches", "_counts", "_pid", "_handed"}
        }
        bare = copy.copy(self._clips)
        for name, array in self._clips.arrays.items():
            # Kept, so that all workers share one copy.
            self._handed.setdefault(name, HandedOver(array))
            delattr(bare, name)
        return {**state, "_clips": bare, "_arrays": self._handed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take it up in another process."""
        self.__dict__ = {name: value for name, value in state.items() if name != "_arrays"}
        self._handed = state["_arrays"]
        for name, handed in self._handed.items():
            setattr(self._clips, name, handed.array)
        self._open_nothing()

    def __repr__(self) -> str:
        """Show counts."""
        return f"ClipDataset({len(self)} clips of {self._maker.length} frames, {self.videos.count} videos)"


def _close(pool: VideoReaderPool, pid: int) -> None:
    """Close what a data set had open that nobody has closed; not in a forked child."""
    if pid == os.getpid():
        pool.close()
