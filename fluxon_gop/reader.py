"""One video at one output size: exact frames by number.

The reader gets the index (given, from a table, or built on the fly), runs one job at a time, and counts.
The pool runs the jobs of many readers side by side.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import numpy as np

from fluxon_gop import forks
from fluxon_gop.canvas import Choices
from fluxon_gop.deadline import Deadline
from fluxon_gop.errors import (
    ClosedError,
    EncryptedVideoError,
    ForkedProcessError,
    FrameIndexError,
    InvalidRequestError,
    Mp4Error,
    SourceChangedError,
    UnsupportedMp4Error,
)
from fluxon_gop.frame_set import FrameSet, UInt8Array, Wanted
from fluxon_gop.index_job import index_job, look_up
from fluxon_gop.index_rows import Key
from fluxon_gop.index_table import IndexTable
from fluxon_gop.jobs import Job, Wave, run_one
from fluxon_gop.model import Signature, VideoIndex
from fluxon_gop.packets import OrderMismatchError, RowMismatchError
from fluxon_gop.plan import Path, VideoPlan
from fluxon_gop.ranges import ByteRange, Int64Array
from fluxon_gop.requests import (
    Indices,
    Uri,
    as_frames,
    check_positive,
    check_size,
    check_stream,
    check_threads,
    check_timeout,
)
from fluxon_gop.sources import RangeSource, is_source, open_source
from fluxon_gop.sources.range_source import table_key_of
from fluxon_gop.stats import ReadStats, WaveKind
from fluxon_gop.table_rows import Damaged, Hint, Row
from fluxon_gop.video_jobs import VideoJobs

_log = logging.getLogger(__name__)

MAX_BATCH_BYTES = 1 << 30

T = TypeVar("T")


class VideoReader:
    """Reads exact frames of one video. Serialises threads that use it at once; closes what it opened."""

    def __init__(
        self,
        uri: Uri,
        *,
        index: VideoIndex | IndexTable | None = None,
        height: int | None = None,
        width: int | None = None,
        num_threads: int = 1,
        apply_rotation: bool = True,
        stream_index: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        path: str | None = None,
        max_bytes: int = MAX_BATCH_BYTES,
        timeout: float | None = None,
    ) -> None:
        """Check the arguments; no IO. Use :meth:`open`, which also gets the index."""
        check_size(height, width)
        check_stream(stream_index)
        check_options(index, num_threads, path)
        check_timeout(timeout)
        self._timeout = timeout
        self._uri = uri
        self._storage_options = storage_options
        self._source = open_source(uri, storage_options)
        self._choices = Choices(
            size=None if height is None or width is None else (int(height), int(width)),
            num_threads=int(num_threads),
            apply_rotation=bool(apply_rotation),
            stream_index=stream_index,
            path=None if path is None else Path(path),
            max_bytes=max_bytes,
        )
        self._given = index
        self._row: Row = index if isinstance(index, VideoIndex) else None
        self._table = index if isinstance(index, IndexTable) else None
        self._video: VideoJobs | None = None
        self._built_here = False
        self._stats = ReadStats()
        self._counts_now = False
        self._lock = threading.RLock()
        self._closed = False
        forks.watch(self)

    @classmethod
    def open(
        cls,
        uri: Uri,
        *,
        index: VideoIndex | IndexTable | None = None,
        height: int | None = None,
        width: int | None = None,
        num_threads: int = 1,
        apply_rotation: bool = True,
        stream_index: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        path: str | None = None,
        timeout: float | None = None,
    ) -> VideoReader:
        """Return a reader with its index at hand.

        Costs nothing with a VideoIndex or a row in memory, one read of the table otherwise; without a row
        normally two requests, 64 KiB of head and the movie box.

        Args:
            uri: a path, ``file://``, ``http(s)://``, or a RangeSource.
            index: a VideoIndex, an IndexTable to look it up in, or None to build it.
            height: of the pictures after turning upright; give both or neither (the picture's own size).
            width: likewise.
            num_threads: spans of a read that decode side by side, or frames of a lone long one; 1 for neither.
            apply_rotation: turn pictures as the file's display matrix says.
            stream_index: which stream of the file, None for FFmpeg's best video stream.
            storage_options: for the source.
            path: "container" or "packet" to force the way; None chooses.
            timeout: seconds after which a call waits for no more bytes and raises DeadlineError; None for no limit
                but the source's own.

        Raises:
            SourceError: the file cannot be read.
            EncryptedVideoError: its video is encrypted.
        """
        reader = cls(
            uri,
            index=index,
            height=height,
            width=width,
            num_threads=num_threads,
            apply_rotation=apply_rotation,
            stream_index=stream_index,
            storage_options=storage_options,
            path=path,
            timeout=timeout,
        )
        try:
            reader.fetch_index()
        except BaseException:
            reader.close()
            raise
        return reader

    def fetch_index(self, *, ask_version: bool = False) -> None:
        """Have the index at hand; see :meth:`open`. ``ask_version``: have the file's version first, from its source."""

        def version(_: ReadStats) -> Job[Signature]:
            yield from ()
            return self._source.signature

        if ask_version:
            self._run(version)
        if self.use_row() is None:
            self._run(self._index_job)

    @property
    def index(self) -> VideoIndex | None:
        """The index; None where the file is no MP4 that has one."""
        return None if self._video is None else self._video.index

    @property
    def source(self) -> RangeSource:
        """Where the bytes come from."""
        return self._source

    @property
    def key(self) -> Key:
        """The key of this video in an index table: its source's ``table_key`` where it has one, else its name."""
        key: Key = table_key_of(self._source)
        return key

    @property
    def num_frames(self) -> int:
        """The number of frames that FFmpeg's full decode gives.

        Free where the index is certain and its first sample checked; where the tables do not tell, the
        file is read and decoded through, once.
        """
        return self._run(self._count_job)

    def __len__(self) -> int:
        """Return ``num_frames``."""
        return self.num_frames

    def stats(self) -> ReadStats:
        """Return a copy of all this reader's counters."""
        copy = ReadStats()
        copy.add(self._stats)
        return copy

    def read_frames_numpy(self, indices: Indices) -> UInt8Array:
        """Return the frames as one uint8 array (len(indices), H, W, 3), RGB, owned by the caller.

        One wave of requests for all of them, several where they exceed ``max_batch_bytes``; each GOP is decoded
        once, up to its last wanted frame.

        Args:
            indices: frame numbers, any order, repeats allowed; [] gives (0, H, W, 3).

        Raises:
            FrameIndexError: a number is beyond the end.
            DecodeError: a picture cannot be decoded; names all such frames of this call.
            SourceError: bytes could not be read.
        """
        frames = as_frames(indices)
        wanted = Wanted.of(frames)
        return self._run(lambda stats: self._read_job(wanted, stats, alone=True)).array()

    def iter_frames(
        self, start: int = 0, stop: int | None = None, step: int = 1
    ) -> Iterator[tuple[int, UInt8Array]]:
        """Yield (frame number, uint8 (H, W, 3)) in rising order, in bounded memory.

        Bytes come in waves of up to 8 MiB, each after the frames of the one before; nothing is decoded
        twice. The reader may be used meanwhile.
        """
        first = int(as_frames([start])[0])
        check_positive("step", step)
        last = self.num_frames if stop is None else min(int(as_frames([stop])[0]), self.num_frames)
        stats = ReadStats()
        numbers = np.arange(first, last, step, dtype=np.int64)
        pictures = self._at_hand.iterate(numbers, stats)
        done = 0
        pid = os.getpid()
        try:
            while True:
                # Held for a step at a time: the caller may go on in another thread, or never.
                with self._lock:
                    self._check_open()
                    if pid != os.getpid():
                        text = f"{self.key}: an iterator of the parent goes on in a forked child; start a new one"
                        raise ForkedProcessError(text, source=self.key)
                    try:
                        with self._counting(stats):
                            self._check_right()
                            item = next(pictures, None)
                    except (OrderMismatchError, RowMismatchError):
                        # The rest goes the way that single reads go.
                        pictures = self._one_by_one(numbers[done:])
                        continue
                if item is None:
                    return
                done += 1
                yield item
        finally:
            self._stats.add(stats)

    def _one_by_one(self, numbers: Int64Array) -> Iterator[tuple[int, UInt8Array]]:
        for number in numbers.tolist():
            yield number, self.read_frames_numpy([number])[0]

    def plan(self, frames: Int64Array) -> VideoPlan:
        """Return the plan of ``frames`` (sorted, unique) by the index at hand; no IO."""
        return self._at_hand.plan(frames)

    def close(self) -> None:
        """Close decoder and source; use after it raises ClosedError."""
        with self._lock:
            self._closed = True
            if self._video is not None:
                self._video.drop_decoders()
            if self._source is not self._uri:
                self._source.close()

    def after_fork(self) -> None:
        """In a forked child: another thread of the parent may hold the lock for ever."""
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what opens it again, the index included; decoder and bytes stay here."""
        size = self._choices.size or (None, None)
        recipe = {
            "uri": self._uri,
            "index": self.index or (self._row if isinstance(self._row, VideoIndex) else self._given),
            "height": size[0],
            "width": size[1],
            "num_threads": self._choices.num_threads,
            "apply_rotation": self._choices.apply_rotation,
            "stream_index": self._choices.stream_index,
            "storage_options": self._storage_options,
            "path": self._choices.path,
            "max_bytes": self._choices.max_bytes,
            "timeout": self._timeout,
        }
        return (_reopen, (recipe,))

    def __repr__(self) -> str:
        """Show the address and the index."""
        return f"VideoReader({self._source.name!r}, {self.index!r})"

    # ------------------------------------------------------------- for the pool

    @property
    def wants_row(self) -> bool:
        """Whether a row of the table would be of use."""
        return self._table is not None and self._video is None and self._row is None

    @property
    def why_no_row(self) -> str:
        """What became of the table's row, in words."""
        if isinstance(self._row, VideoIndex):
            return "the row is of another version of the file, build it again"
        return "the row is damaged, build it again" if isinstance(self._row, Damaged) else "no row"

    @property
    def has_index_or_reason(self) -> bool:
        """Whether a plan can be made without IO."""
        return self._video is not None

    def accept_row(self, row: Row, stats: ReadStats) -> None:
        """Take what the table holds of this video."""
        stats.damaged_rows += isinstance(row, Damaged)
        self._row = row
        self._table = None

    def use_row(self) -> VideoIndex | None:
        """Return the index at hand, or the row's where it fits the file, without building one."""
        if self._video is None and isinstance(self._row, VideoIndex):
            try:
                self._source.pin(self._row.signature)
            except SourceChangedError:
                return None
            self._video = VideoJobs(self._source, self._row, None, self._choices, verify=True)
        return self.index

    def read_job(self, wanted: Wanted, stats: ReadStats, *, alone: bool = True) -> Job[FrameSet]:
        """Return the job that reads what is wanted, the index first where it is missing.

        ``alone``: no other video decodes beside it, so that a long span may have the reader's threads.
        """
        with self._counting(stats):
            return (yield from self._read_job(wanted, stats, alone=alone))

    def _check_right(self) -> None:
        """Have the right to read renewed, where the source is one that has such."""
        grant = getattr(self._source, "grant", None)
        if grant is not None:
            grant()

    def _read_job(self, wanted: Wanted, stats: ReadStats, *, alone: bool) -> Job[FrameSet]:
        before = stats.total_requests
        pictures = yield from self._pictures_job(wanted, stats, alone=alone)
        if stats.total_requests == before:
            # What was asked for was at hand: no read has looked at the right.
            self._check_right()
        return pictures

    def _pictures_job(self, wanted: Wanted, stats: ReadStats, *, alone: bool) -> Job[FrameSet]:
        yield from self._index_job(stats)
        if self._built_here:
            return (yield from self._at_hand.read(wanted, stats, alone=alone))
        try:
            try:
                result = yield from self._at_hand.read(wanted, stats, alone=alone)
            except FrameIndexError:
                # Before the row is believed, one byte tells whether the file is still its version.
                yield Wave(WaveKind.HEAD_MOOV, self._source, (ByteRange(0, 1),))
                raise
            if not result.failures:
                return result
            # The pictures may be damaged, or the row: a fresh index tells.
        except SourceChangedError:
            # A row is pinned to the version that it was built from; here the file is a newer one.
            if is_source(self._uri):
                raise
            self._source.close()
            self._source = open_source(self._uri, self._storage_options)
        except RowMismatchError:
            pass
        row = self._at_hand.index
        self._at_hand.drop_decoders()
        self._video = self._row = None
        yield from self._index_job(stats)
        stale = row is None or self.index is None or not row.same_samples(self.index)
        stats.stale_rows += stale
        if stale:
            _log.warning(
                "%s: its index row did not fit the file, and the index was built again for this reader; mend the row with: fluxon-gop index build",
                self._source.name,
            )
        return (yield from self._at_hand.read(wanted, stats, alone=alone))

    # ------------------------------------------------------------- inside

    @contextmanager
    def _counting(self, stats: ReadStats) -> Iterator[None]:
        """Count what the source counts meanwhile, where it counts."""
        if self._counts_now:
            yield
            return
        opened = self._source
        before = _counts(opened)
        self._counts_now = True
        try:
            yield
        finally:
            self._counts_now = False
            sources = [opened] if opened is self._source else [opened, self._source]
            for name, value in before.items():
                after = sum(_counts(source)[name] for source in sources)
                stats.source[name] = stats.source.get(name, 0) + after - value

    @property
    def _at_hand(self) -> VideoJobs:
        """The video, whose index the index job has brought."""
        assert self._video is not None
        return self._video

    def _run(self, make_job: Callable[[ReadStats], Job[T]]) -> T:
        """Run one job alone, under the lock, and count it."""
        with self._lock:
            self._check_open()
            stats = ReadStats()
            try:
                with self._counting(stats):
                    deadline = None if self._timeout is None else Deadline(self._timeout)
                    return run_one(make_job(stats), stats, deadline)
            finally:
                self._stats.add(stats)

    def _check_open(self) -> None:
        if self._closed:
            text = f"{self._source.name}: the reader is closed"
            raise ClosedError(text)

    def _index_job(self, stats: ReadStats) -> Job[None]:
        """Get the index: the given one, the table's, or one built on the fly."""
        if self._video is not None:
            return
        if self.wants_row:
            assert self._table is not None
            self.accept_row(look_up(self._table, [self.key], stats)[0], stats)
        if self.use_row() is not None:
            return
        stats.stale_rows += isinstance(self._row, VideoIndex)
        hint = self._row.moov_range if isinstance(self._row, Hint) else None
        stream = self._choices.stream_index
        index, no_index = None, None
        try:
            index = yield from index_job(self._source, stats, stream_index=stream, hint=hint)
        except EncryptedVideoError:
            raise
        except Mp4Error as error:
            refused = error.numbers.get("refused") or stream is not None
            if isinstance(error, UnsupportedMp4Error) and refused:
                raise
            no_index = error.numbers["reason"]
        self._video = VideoJobs(self._source, index, no_index, self._choices)
        self._built_here = True

    def _count_job(self, stats: ReadStats) -> Job[int]:
        yield from self._index_job(stats)
        self._check_right()
        return (yield from self._at_hand.count(stats))


def _counts(source: RangeSource) -> dict[str, int]:
    counters = getattr(source, "counters", None)
    return {} if counters is None else counters()


def check_options(index: object, num_threads: Any, path: str | None) -> None:
    """Refuse an index, a number of threads or a path that no reader takes."""
    check_threads(num_threads)
    if path not in {None, "packet", "container"}:
        text = f"path is {path!r}: want None, 'packet' or 'container'"
        raise InvalidRequestError(text)
    if index is not None and not isinstance(index, VideoIndex | IndexTable):
        text = f"index is a {type(index).__name__}: want a VideoIndex, an IndexTable, or None"
        raise TypeError(text)


def _reopen(recipe: dict[str, Any]) -> VideoReader:
    return VideoReader(**recipe)
