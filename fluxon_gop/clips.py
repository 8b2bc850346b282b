"""Which clips a data set has: windows counted out, pairs listed, or times; never an object a clip.

Pure. A clip is a video's number and what is wanted of it. Clips are numbered from 0, videos in the data set's
order, windows of a video by their first frame.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fluxon_gop.clip_tables import ClipTable, Float64Array, FrameTable, PairTable, TimeTable, WindowTable
from fluxon_gop.errors import FrameIndexError, InvalidRequestError
from fluxon_gop.ranges import Int64Array
from fluxon_gop.requests import MAX_NUMBER, check_positive

_CHUNK = 1 << 20
"""Clips that are checked at once: the memory of a check is bounded."""


TOLERANCE_SECONDS = 1e-4
MAX_LENGTH, MAX_STEP = 1 << 22, 1 << 40


class Clips(ABC):
    """What a caller asks for: a kind of clip, the same for all videos."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Frames of each clip."""

    @property
    def by_time(self) -> bool:
        """Whether frames are named by their time, so that a video's index must be at hand to know their numbers."""
        return False

    @property
    def needs_counts(self) -> bool:
        """Whether the number of a video's frames says how many clips it has."""
        return False

    @abstractmethod
    def of(self, counts: Int64Array) -> ClipTable:
        """Return the clips of videos with so many frames each; -1 for a number that nobody knows.

        Raises:
            InvalidRequestError: clips that no video can have, or a number is missing that is needed.
            FrameIndexError: a clip ends beyond its video.
        """


class Windows(Clips):
    """All windows of ``length`` frames, ``frameskip`` apart, that start every ``stride`` frames of each video.

    Window w of a video is the frames ``start + w * stride + frameskip * [0, ..., length - 1]``; one that would end
    beyond the video (or its range) is not there. Memory: 8 bytes a video, 16 more with ``ranges``; O(log videos) a clip.
    """

    def __init__(
        self, length: int = 1, stride: int = 1, frameskip: int = 1, *, ranges: npt.ArrayLike | None = None
    ) -> None:
        """Take the shape of a window.

        Args:
            length: frames of a clip.
            stride: frames from one window's start to the next one's.
            frameskip: frames from one frame of a clip to the next one; 1 for all in a row.
            ranges: int (videos, 2): windows lie within frames ``[start, stop)`` of their video; None for all frames.
        """
        _check_shape(length=length, stride=stride, frameskip=frameskip)
        self._length, self._stride, self._frameskip = int(length), int(stride), int(frameskip)
        self._ranges = None if ranges is None else as_integers("ranges", ranges, 2, 2)

    @property
    def length(self) -> int:
        """Frames of each clip."""
        return self._length

    @property
    def needs_counts(self) -> bool:
        """Without ranges windows go to a video's end."""
        return self._ranges is None

    def of(self, counts: Int64Array) -> WindowTable:
        """Return the windows of these videos. O(videos)."""
        first, stop = np.zeros_like(counts), counts
        if self._ranges is not None:
            if len(self._ranges) != len(counts):
                text = f"ranges has {len(self._ranges)} rows for {len(counts)} videos"
                raise InvalidRequestError(text)
            first, stop = self._ranges[:, 0], self._ranges[:, 1]
            wrong = np.flatnonzero((first < 0) | (stop < first))
            if len(wrong):
                text = f"ranges of video {wrong[0]} is {self._ranges[wrong[0]].tolist()}: want 0 <= start <= stop"
                raise InvalidRequestError(text)
            _refuse_beyond("ranges", np.arange(len(counts)), stop, counts)
        elif np.any(counts < 0):
            text = f"the frame count of video {int(np.argmax(counts < 0))} is not known: give ranges"
            raise InvalidRequestError(text)
        span = (self._length - 1) * self._frameskip + 1
        windows = np.maximum((stop - first - span) // self._stride + 1, 0)
        return WindowTable(
            np.concatenate(([0], np.cumsum(windows))),
            None if self._ranges is None else np.ascontiguousarray(first),
            self._stride,
            np.arange(self._length, dtype=np.int64) * self._frameskip,
        )

    def __repr__(self) -> str:
        """Show the shape."""
        within = "" if self._ranges is None else f", ranges of {len(self._ranges)} videos"
        return f"Windows(length={self._length}, stride={self._stride}, frameskip={self._frameskip}{within})"


class Pairs(Clips):
    """Clips that start at listed places: int64 (clips, 2), a video's number and a start frame each.

    Clip i is the frames ``pairs[i, 1] + frameskip * [0, ..., length - 1]`` of video ``pairs[i, 0]``. The array is kept
    as it is given, without a copy: one that is mapped from a file (``np.load(path, mmap_mode="r")``) is mapped again by
    each worker, so that all share its memory.
    """

    def __init__(self, pairs: npt.ArrayLike, length: int = 1, frameskip: int = 1) -> None:
        """Take the array, and the shape of a clip."""
        _check_shape(length=length, frameskip=frameskip)
        self._pairs = as_integers("pairs", pairs, 2, 2)
        self._length, self._frameskip = int(length), int(frameskip)

    @property
    def length(self) -> int:
        """Frames of each clip."""
        return self._length

    def of(self, counts: Int64Array) -> PairTable:
        """Return the pairs, each held against its video. O(clips), a million at a time."""
        span = (self._length - 1) * self._frameskip + 1
        for at in range(0, len(self._pairs), _CHUNK):
            part = self._pairs[at : at + _CHUNK]
            videos, starts = part[:, 0], part[:, 1]
            wrong = np.flatnonzero(
                (videos < 0) | (videos >= len(counts)) | (starts < 0) | (starts > MAX_NUMBER)
            )
            if len(wrong):
                text = f"pairs[{at + wrong[0]}] is {part[wrong[0]].tolist()}: want a video below {len(counts)}, a frame from 0"
                raise InvalidRequestError(text)
            _refuse_beyond("pairs", videos, starts + span, counts, at)
        return PairTable(self._pairs, np.arange(self._length, dtype=np.int64) * self._frameskip)

    def __repr__(self) -> str:
        """Show the shape."""
        return f"Pairs({len(self._pairs)} clips, length={self._length}, frameskip={self._frameskip})"


class FrameLists(Clips):
    """Clips of listed frames: of each clip a video's number, and its frame numbers in any order.

    For frames that are not evenly apart, or spread over a whole video. The arrays are kept as they are given.
    """

    def __init__(self, videos: npt.ArrayLike, frames: npt.ArrayLike) -> None:
        """Take int (clips,) and int (clips, length)."""
        self._videos = as_integers("videos", videos, 1)
        self._frames = as_integers("frames", frames, 2)
        if len(self._videos) != len(self._frames) or not self._frames.shape[1]:
            text = f"{len(self._videos)} videos, frames of the shape {self._frames.shape}: want a row for each, of one or more"
            raise InvalidRequestError(text)

    @property
    def length(self) -> int:
        """Frames of each clip."""
        return int(self._frames.shape[1])

    def of(self, counts: Int64Array) -> FrameTable:
        """Return the clips, each held against its video. O(clips), a million at a time."""
        for at in range(0, len(self._videos), _CHUNK):
            videos, frames = self._videos[at : at + _CHUNK], self._frames[at : at + _CHUNK]
            _refuse_videos(videos, counts, at)
            if frames.min() < 0 or frames.max() > MAX_NUMBER:
                text = f"frames hold {int(frames.min())} to {int(frames.max())}: want numbers from 0 within a video"
                raise InvalidRequestError(text)
            _refuse_beyond("frames", videos, frames.max(axis=1) + 1, counts, at)
        return FrameTable(self._videos, self._frames)

    def __repr__(self) -> str:
        """Show the shape."""
        return f"FrameLists({len(self._videos)} clips, length={self.length})"


class Timestamps(Clips):
    """Clips by time: of each clip a video's number and seconds, and frames at ``seconds + offsets``.

    The frame on the screen at a time is :meth:`VideoIndex.frame_at`'s, the last one that begins before it. Times are often
    sums or 32-bit numbers, and a hair before the frame that is meant: a frame that begins within ``tolerance`` seconds
    after the time counts as on the screen. The index of each clip's video must be certain of
    its times (``container_reason`` is None).
    """

    def __init__(
        self,
        videos: npt.ArrayLike,
        seconds: npt.ArrayLike,
        offsets: Sequence[float] | npt.NDArray[Any] = (0.0,),
        *,
        tolerance: float = TOLERANCE_SECONDS,
    ) -> None:
        """Take int (clips,), float (clips,) seconds of the stream, and float (length,) seconds to add."""
        if not 0 <= tolerance < 1:
            text = f"tolerance is {tolerance}: want seconds from 0, a small part of a frame"
            raise InvalidRequestError(text)
        self._tolerance = float(tolerance)
        self._videos = as_integers("videos", videos, 1)
        self._seconds = _as_seconds("seconds", seconds)
        self._offsets = _as_seconds("offsets", offsets)
        if len(self._videos) != len(self._seconds) or not len(self._offsets):
            text = (
                f"{len(self._videos)} videos, {len(self._seconds)} seconds, {len(self._offsets)} offsets: "
                "want as many videos as seconds, and an offset at least"
            )
            raise InvalidRequestError(text)

    @property
    def length(self) -> int:
        """Frames of each clip."""
        return len(self._offsets)

    @property
    def by_time(self) -> bool:
        """Frames are named by their time."""
        return True

    def of(self, counts: Int64Array) -> TimeTable:
        """Return the clips; whether a video is on the screen at a time shows when the clip is read."""
        _refuse_videos(self._videos, counts)
        return TimeTable(self._videos, self._seconds, self._offsets, self._tolerance)

    def __repr__(self) -> str:
        """Show the shape."""
        return f"Timestamps({len(self._videos)} clips, length={self.length})"


def as_integers(name: str, values: npt.ArrayLike, axes: int, columns: int | None = None) -> Int64Array:
    """Return int64 (n,) or (n, columns); an int64 array comes back as it is.

    Raises:
        TypeError: no integers.
        InvalidRequestError: another shape.
    """
    array = np.asanyarray(values)
    if not array.size and array.dtype.kind == "f":
        array = np.zeros((0, columns or 1)[:axes], np.int64)
    if array.dtype.kind not in "iu":
        text = f"{name} is an array of {array.dtype}: want integers"
        raise TypeError(text)
    if array.ndim != axes or (columns is not None and array.shape[1] != columns):
        text = f"{name} has the shape {array.shape}: want ({', '.join(['n', str(columns or 'm')][:axes])})"
        raise InvalidRequestError(text)
    if array.dtype == np.uint64 and array.size and int(array.max()) > MAX_NUMBER:
        text = f"{name} holds {int(array.max())}, beyond the end of any video"
        raise InvalidRequestError(text)
    return array if array.dtype == np.int64 else array.astype(np.int64)


def _as_seconds(name: str, values: npt.ArrayLike) -> Float64Array:
    array = np.asarray(values)
    if array.dtype.kind not in "iuf":
        text = f"{name} is an array of {array.dtype}: want seconds"
        raise TypeError(text)
    if array.ndim != 1 or not np.all(np.isfinite(array)):
        text = f"{name} has the shape {array.shape}: want (n,), all finite"
        raise InvalidRequestError(text)
    return array.astype(np.float64)


def _check_shape(**values: int) -> None:
    """Refuse what is not positive, or so large that no video has it."""
    for name, value in values.items():
        check_positive(name, value)
        limit = MAX_LENGTH if name == "length" else MAX_STEP
        if value > limit:
            text = f"{name} is {value}: want at most {limit}"
            raise InvalidRequestError(text)


def _refuse_videos(videos: Int64Array, counts: Int64Array, at: int = 0) -> None:
    wrong = np.flatnonzero((videos < 0) | (videos >= len(counts)))
    if len(wrong):
        text = f"videos[{at + wrong[0]}] is {videos[wrong[0]]}: want a number from 0, below {len(counts)}"
        raise InvalidRequestError(text)


def _refuse_beyond(
    name: str, videos: Int64Array, stops: Int64Array, counts: Int64Array, at: int = 0
) -> None:
    """Raise for the first ``stop`` beyond its video; where a count is not known, reading tells."""
    lengths = counts[videos]
    wrong = np.flatnonzero((lengths >= 0) & (stops > lengths))
    if len(wrong):
        place = int(wrong[0])
        stop, length = int(stops[place]), int(lengths[place])
        text = f"{name}[{at + place}] ends at frame {stop - 1} of video {int(videos[place])}, which has {length} frames"
        raise FrameIndexError(text, source=f"video {int(videos[place])}", index=stop - 1, length=length)
