"""The clips of some videos by number: counted out or listed, never an object a clip.

Pure.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from fluxon_gop.errors import FrameTimestampError
from fluxon_gop.model import VideoIndex
from fluxon_gop.ranges import Int64Array

Float64Array = npt.NDArray[np.float64]


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

    def videos_without(self) -> int:
        """Return how many videos have no clip though all could have some."""
        return 0

    @property
    @abstractmethod
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """What the table holds, by attribute: what a worker is given."""

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())


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

    def videos_without(self) -> int:
        """Return how many videos have no window."""
        return int(np.count_nonzero(np.diff(self.first_clip) == 0))

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The prefix sums, and first frames where windows lie within ranges."""
        found = {"first_clip": self.first_clip}
        return found if self.first_frame is None else {**found, "first_frame": self.first_frame}


class ListedTable(ClipTable):
    """Clips whose videos are listed."""

    def __init__(self, **columns: npt.NDArray[Any]) -> None:
        """Take the arrays, one value or row a clip."""
        self._names = tuple(columns)
        self.__dict__.update(columns)

    def __len__(self) -> int:
        """Return the number of clips."""
        return len(self.arrays[self._names[0]])

    def video_of(self, clips: Int64Array) -> Int64Array:
        """Return the number of each clip's video."""
        return np.asarray(self.arrays["videos"][clips])

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays as they were given."""
        return {name: self.__dict__[name] for name in self._names}


class PairTable(ListedTable):
    """Clips at (video, start)."""

    pairs: Int64Array

    def __init__(self, pairs: Int64Array, steps: Int64Array) -> None:
        """Take (video, start) of each clip, and the steps within a clip."""
        super().__init__(pairs=pairs)
        self._steps = steps

    def video_of(self, clips: Int64Array) -> Int64Array:
        """Return the number of each clip's video."""
        return np.asarray(self.pairs[clips, 0])

    def frames_of(self, clip: int, index: VideoIndex | None) -> Int64Array:
        """Return a clip's frame numbers."""
        del index
        return self._steps + int(self.pairs[clip, 1])


class FrameTable(ListedTable):
    """Clips of listed frames."""

    videos: Int64Array
    frames: Int64Array

    def __init__(self, videos: Int64Array, frames: Int64Array) -> None:
        """Take each clip's video and frames."""
        super().__init__(videos=videos, frames=frames)

    def frames_of(self, clip: int, index: VideoIndex | None) -> Int64Array:
        """Return a clip's frame numbers."""
        del index
        return np.array(self.frames[clip])


class TimeTable(ListedTable):
    """Clips at times."""

    videos: Int64Array
    seconds: Float64Array

    def __init__(
        self, videos: Int64Array, seconds: Float64Array, offsets: Float64Array, tolerance: float
    ) -> None:
        """Take each clip's video and time, the offsets within a clip, and how much early a time may be."""
        super().__init__(videos=videos, seconds=seconds)
        self._offsets, self._tolerance = offsets, tolerance

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
        try:
            return np.array(
                [self._frame_at(index, start + offset) for offset in self._offsets.tolist()], np.int64
            )
        except FrameTimestampError as error:
            text = f"clip {clip} of video {int(self.videos[clip])}: {error.message}"
            raise FrameTimestampError(text, **error.numbers) from None

    def _frame_at(self, index: VideoIndex, seconds: float) -> int:
        if 0 < seconds + self._tolerance < index.end_ticks / index.timescale:
            try:
                return index.frame_at(seconds + self._tolerance)
            except FrameTimestampError:
                # The error names the time as it was asked for.
                pass
        return index.frame_at(seconds)
