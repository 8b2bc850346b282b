"""What a caller may ask for, checked once, before any IO.

Pure.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fluxon_gop.errors import FluxonGopError, InvalidRequestError
from fluxon_gop.model import VideoIndex
from fluxon_gop.ranges import Int64Array
from fluxon_gop.sources import RangeSource, SourceAddress
from fluxon_gop.stats import ReadStats

MAX_NUMBER = 1 << 62
MAX_FRAMES = 1 << 32
MAX_SIDE = 1 << 15
"""Rows or columns of an output picture; swscale's own bound."""
MAX_THREADS = 1024

Uri = str | os.PathLike[str] | RangeSource | SourceAddress
Indices = Sequence[int] | npt.NDArray[np.integer[Any]] | range


def as_frames(indices: Indices) -> Int64Array:
    """Return frame numbers as an int64 array.

    Raises:
        TypeError: a bool, a float, or no sequence of integers.
        InvalidRequestError: a negative number.
    """
    if isinstance(indices, range):
        far = max(abs(indices.start), abs(indices.stop)) >= MAX_NUMBER
        if far or len(indices) > MAX_FRAMES:
            text = f"{indices} names more frames than a video has"
            raise InvalidRequestError(text)
        frames = np.arange(indices.start, indices.stop, indices.step, dtype=np.int64)
    elif isinstance(indices, np.ndarray):
        if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
            text = f"indices is an array of {indices.dtype}, shape {indices.shape}: want integers, one axis"
            raise TypeError(text)
        frames = indices.astype(np.int64)
    elif isinstance(indices, str | bytes) or not isinstance(indices, Sequence):
        text = f"indices is a {type(indices).__name__}: want a sequence of integers"
        raise TypeError(text)
    else:
        frames = np.array(
            [v if type(v) is int and 0 <= v < MAX_NUMBER else _as_integer(v) for v in indices], np.int64
        )
    if len(frames) and int(frames.min()) < 0:
        text = f"frame {int(frames.min())} is negative: frames count from 0"
        raise InvalidRequestError(text)
    return frames


def as_int(where: str, value: Any) -> int:
    """Return an integer of any kind as an int; ``where`` begins the TypeError of what is none, a bool included."""
    if isinstance(value, bool | np.bool_):
        text = f"{where} {value!r}, a bool: want integers"
        raise TypeError(text)
    try:
        return operator.index(value)
    except TypeError:
        text = f"{where} {value!r}, a {type(value).__name__}: want integers"
        raise TypeError(text) from None


def _as_integer(value: Any) -> int:
    number = as_int("indices holds", value)
    if number >= MAX_NUMBER:
        text = f"frame {number} is beyond the end of any video"
        raise InvalidRequestError(text)
    if number < 0:
        text = f"frame {number} is negative: frames count from 0"
        raise InvalidRequestError(text)
    return number


def check_threads(num_threads: Any) -> None:
    """Refuse a number of threads that no decoder takes."""
    check_positive("num_threads", num_threads)
    if num_threads > MAX_THREADS:
        text = f"num_threads is {num_threads}: want at most {MAX_THREADS}"
        raise InvalidRequestError(text)


def check_stream(stream_index: Any) -> None:
    """Refuse a stream number that is no whole number from 0."""
    if stream_index is None:
        return
    if isinstance(stream_index, bool | np.bool_) or not isinstance(stream_index, int | np.integer):
        text = f"stream_index is {stream_index!r}, a {type(stream_index).__name__}: want an int or None"
        raise TypeError(text)
    if stream_index < 0:
        text = f"stream_index is {stream_index}: streams count from 0"
        raise InvalidRequestError(text)


def check_size(height: int | None, width: int | None) -> None:
    """Refuse an output size that is not two positive integers or nothing."""
    if (height is None) != (width is None):
        text = f"height={height}, width={width}: give both, or neither for the picture's own size"
        raise InvalidRequestError(text)
    if height is not None:
        check_positive("height", height)
        check_positive("width", width)
        if max(height, width or 0) > MAX_SIDE:
            text = f"height={height}, width={width}: want at most {MAX_SIDE}"
            raise InvalidRequestError(text)


def check_positive(name: str, value: Any) -> None:
    """Refuse what is not a positive integer."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        text = f"{name} is {value!r}, a {type(value).__name__}: want an int"
        raise TypeError(text)
    if value <= 0:
        text = f"{name} is {value}: want a positive number"
        raise InvalidRequestError(text)


def check_timeout(timeout: Any) -> None:
    """Refuse a limit that is no positive number of seconds."""
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        text = f"timeout is {timeout!r}, a {type(timeout).__name__}: want seconds or None"
        raise TypeError(text)
    if not 0 < timeout < 1e7:
        text = f"timeout is {timeout}: want a positive number of seconds"
        raise InvalidRequestError(text)


@dataclass(frozen=True)
class VideoReadRequest:
    """Frames wanted of one video: ``indices`` in any order, repeats allowed, at one output size."""

    uri: Uri
    indices: Indices
    height: int | None = None
    width: int | None = None
    num_threads: int | None = None
    """As for a reader; None for the pool's."""
    frames: Int64Array = field(init=False, repr=False, compare=False)
    """The indices as an int64 array."""

    def __post_init__(self) -> None:
        """Check size and indices."""
        check_size(self.height, self.width)
        if self.num_threads is not None:
            check_threads(self.num_threads)
        object.__setattr__(self, "frames", as_frames(self.indices))


@dataclass(frozen=True)
class VideoReadResult:
    """What one request got: the array, or why not. Requests of one video share their ``stats``."""

    array: npt.NDArray[np.uint8] | None
    """uint8 (frames, H, W, 3) RGB, owned by the caller; None where ``error`` is set."""
    stats: ReadStats
    """What reading this video's frames in the batch cost, all its requests together."""
    error: FluxonGopError | None = None
    reader_cache_hit: bool = False
    """Whether the pool had an idle reader of this video and size."""
    pts_seconds: npt.NDArray[np.float64] | None = None
    """float64 (frames,): when each is shown, in seconds of the stream; None where only FFmpeg's demuxer knows, or
    ``error`` is set."""
    index: VideoIndex | None = None
    """The index that the frames were read by; None where there is none, or ``error`` is set."""

    @property
    def report(self) -> str:
        """One sentence on what the plan of this video did not foresee, or on its error; empty where all went by plan."""
        return str(self.error) if self.error is not None else self.stats.report

    def __repr__(self) -> str:
        """Show shapes, never pixels."""
        shape = "None" if self.array is None else f"{self.array.shape} {self.array.dtype}"
        return f"VideoReadResult({shape}, error={self.error!r})"
