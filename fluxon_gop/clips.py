"""Which clips a data set has: windows counted out, pairs listed, or times; never an object a clip.

Pure. A clip is a video's number and what is wanted of it. Clips are numbered from 0, videos in the data set's
order, windows of a video by their first frame.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fluxon_gop.errors import FrameIndexError, FrameTimestampError, InvalidRequestError
from fluxon_gop.model import VideoIndex
from fluxon_gop.ranges import Int64Array
from fluxon_gop.requests import MAX_NUMBER, check_positive

_CHUNK = 1 << 20
"""Clips that are checked at once: the memory of a check is bounded."""

Float64Array = npt.NDArray[np.float64]


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

    @abstractmethod
    def of(self, counts: Int64Array) -> ClipTable:
        """Return the clips of videos with so many frames each; -1 for a number that nobody knows.

        Raises:
            InvalidRequestError: clips that no video can have, or a number is missing that is needed.
            FrameIndexError: a clip ends beyond its video.
        """


class ClipTable(ABC):
    """The clips of some videos: how many there are, and which frames each is."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of clips."""

    @abstractmethod
    def video_of(self, clips: Int64Array) -> Int64Array:
        """Return the number of the video of each clip; clips are within the table."""

    @abstractmethod
    def frames_of(self, clip: int, index: VideoIndex | None) -> Int64Array:
        """Return a clip's frame numbers, int64 (length,); ``index`` is the video's, where frames are named by time."""

    @property
    @abstractmethod
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What the table holds, by attribute: what a worker is given."""

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


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
        for name, value in (("length", length), ("stride", stride), ("frameskip", frameskip)):
            check_positive(name, value)
        self._length, self._stride, self._frameskip = int(length), int(stride), int(frameskip)
        self._ranges = None if ranges is None else as_integers("ranges", ranges, 2, 2)

    @property
    def length(self) -> int:
        """Frames of each clip."""
        return self._length

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


class WindowTable(ClipTable):
    """Windows by prefix sums: none of them is stored."""

    def __init__(
        self, first_clip: Int64Array, first_frame: Int64Array | None, stride: int, steps: Int64Array
    ) -> None:
        """Take the number of each video's first clip (and of the end), its first frame, and the steps within a clip."""
        self.first_clip, self.first_frame = first_clip, first_frame
        self._stride, self._steps = stride, steps

    def __len__(self) -> int:
        """Return the number of windows."""
        return int(self.first_clip[-1])

    def video_of(self, clips: Int64Array) -> Int64Array:
        """Return the number of each window's video: a binary search."""
        return np.searchsorted(self.first_clip, clips, side="right") - 1

    def frames_of(self, clip: int, index: VideoIndex | None) -> Int64Array:
        """Return a window's frame numbers."""
        del index
        video = int(np.searchsorted(self.first_clip, clip, side="right")) - 1
        start = (clip - int(self.first_clip[video])) * self._stride
        return self._steps + start + (0 if self.first_frame is None else int(self.first_frame[video]))

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The prefix sums, and first frames where windows lie within ranges."""
        found = {"first_clip": self.first_clip}
        return found if self.first_frame is None else {**found, "first_frame": self.first_frame}


class Pairs(Clips):
    """Clips that start at listed places: int64 (clips, 2), a video's number and a start frame each.

    Clip i is the frames ``pairs[i, 1] + frameskip * [0, ..., length - 1]`` of video ``pairs[i, 0]``. The array is kept
    as it is given, without a copy: one that is mapped from a file (``np.load(path, mmap_mode="r")``) is mapped again by
    each worker, so that all share its memory.
    """

    def __init__(self, pairs: npt.ArrayLike, length: int = 1, frameskip: int = 1) -> None:
        """Take the array, and the shape of a clip."""
        check_positive("length", length)
        check_positive("frameskip", frameskip)
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


class PairTable(ClipTable):
    """Clips at listed places: one array."""

    def __init__(self, pairs: Int64Array, steps: Int64Array) -> None:
        """Take (video, start) of each clip, and the steps within a clip."""
        self.pairs, self._steps = pairs, steps

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.pairs)

    def video_of(self, clips: Int64Array) -> Int64Array:
        """Return the number of each clip's video."""
        return np.asarray(self.pairs[clips, 0])

    def frames_of(self, clip: int, index: VideoIndex | None) -> Int64Array:
        """Return a clip's frame numbers."""
        del index
        return self._steps + int(self.pairs[clip, 1])

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The pairs."""
        return {"pairs": self.pairs}


class Frames(Clips):
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
            if frames.min() < 0:
                text = f"frame {int(frames.min())} is negative: frames count from 0"
                raise InvalidRequestError(text)
            _refuse_beyond("frames", videos, frames.max(axis=1) + 1, counts, at)
        return FrameTable(self._videos, self._frames)

    def __repr__(self) -> str:
        """Show the shape."""
        return f"Frames({len(self._videos)} clips, length={self.length})"


class FrameTable(ClipTable):
    """Clips of listed frames: two arrays."""

    def __init__(self, videos: Int64Array, frames: Int64Array) -> None:
        """Take each clip's video and frames."""
        self.videos, self.frames = videos, frames

    def __len__(self) -> int:
        """Return the number of clips."""
        return len(self.videos)

    def video_of(self, clips: Int64Array) -> Int64Array:
        """Return the number of each clip's video."""
        return np.asarray(self.videos[clips])

    def frames_of(self, clip: int, index: VideoIndex | None) -> Int64Array:
        """Return a clip's frame numbers."""
        del index
        return np.array(self.frames[clip])

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Videos and frames."""
        return {"videos": self.videos, "frames": self.frames}


class Timestamps(Clips):
    """Clips by time: of each clip a video's number and seconds, and frames at ``seconds + offsets``.

    The frame on the screen at a time is :meth:`VideoIndex.frame_at`'s. The index of each clip's video must be certain of
    its times (``container_reason`` is None).
    """

    def __init__(
        self,
        videos: npt.ArrayLike,
        seconds: npt.ArrayLike,
        offsets: Sequence[float] | npt.NDArray[Any] = (0.0,),
    ) -> None:
        """Take int (clips,), float (clips,) seconds of the stream, and float (length,) seconds to add."""
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
        return TimeTable(self._videos, self._seconds, self._offsets)

    def __repr__(self) -> str:
        """Show the shape."""
        return f"Timestamps({len(self._videos)} clips, length={self.length})"


class TimeTable(ClipTable):
    """Clips at times: two arrays."""

    def __init__(self, videos: Int64Array, seconds: Float64Array, offsets: Float64Array) -> None:
        """Take each clip's video and time, and the offsets within a clip."""
        self.videos, self.seconds, self._offsets = videos, seconds, offsets

    def __len__(self) -> int:
        """Return the number of clips."""
        return len(self.videos)

    def video_of(self, clips: Int64Array) -> Int64Array:
        """Return the number of each clip's video."""
        return np.asarray(self.videos[clips])

    def frames_of(self, clip: int, index: VideoIndex | None) -> Int64Array:
        """Return the frames on the screen at the clip's times.

        Raises:
            FrameTimestampError: a time outside the video, or the index does not tell the frames' times.
        """
        start = float(self.seconds[clip])
        if index is None or index.container_reason is not None:
            why = "no index of it" if index is None else index.container_reason
            text = f"clip {clip}: which frame its video shows at {start} s is not known: {why}"
            raise FrameTimestampError(text, seconds=start, begin=math.nan, end=math.nan)
        return np.array([index.frame_at(start + offset) for offset in self._offsets.tolist()], np.int64)

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Videos and seconds."""
        return {"videos": self.videos, "seconds": self.seconds}


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
