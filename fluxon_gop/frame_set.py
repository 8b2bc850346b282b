"""What some requests want of one video, the pictures they get, and the errors of frames that have none.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fluxon_gop.errors import DecodeError, FluxonGopError
from fluxon_gop.ranges import Int64Array

UInt8Array = npt.NDArray[np.uint8]


class Wanted(NamedTuple):
    """The frames that some requests want of one video, each request in its own order."""

    requests: tuple[Int64Array, ...]
    frames: Int64Array
    """All of them, sorted, each once: what is read."""

    @classmethod
    def of(cls, *requests: Int64Array) -> Wanted:
        """Return what these requests want together."""
        frames = requests[0] if len(requests) == 1 else np.concatenate(requests)
        # Most windows rise already.
        rising = len(frames) < 2 or bool((frames[1:] > frames[:-1]).all())
        return cls(requests, frames if rising else np.unique(frames))

    @property
    def places(self) -> dict[int, list[tuple[int, int]]]:
        """(request, row) for each time that a frame is asked for, by frame."""
        if len(self.requests) == 1 and self.frames is self.requests[0]:
            return {frame: [(0, row)] for row, frame in enumerate(self.frames.tolist())}
        places: dict[int, list[tuple[int, int]]] = {}
        for number, frames in enumerate(self.requests):
            for row, frame in enumerate(frames.tolist()):
                places.setdefault(frame, []).append((number, row))
        return places


@dataclass
class FrameSet:
    """The pictures of some requests: ``arrays[i]`` is the i-th one's, but for frames that ``failures`` names."""

    wanted: Wanted
    arrays: list[UInt8Array]
    failures: dict[int, FluxonGopError]

    def array(self, request: int = 0) -> UInt8Array:
        """Return the pictures of one request, in its order; raises the first failure among them."""
        for frame in self.wanted.requests[request].tolist() if self.failures else ():
            if frame in self.failures:
                raise self.failures[frame]
        return self.arrays[request]


def no_pictures(name: str, frames: tuple[int, ...]) -> dict[int, FluxonGopError]:
    """Return the error, by frame, of a video's frames that the decoder gives no picture for."""
    if not frames:
        return {}
    shown = ", ".join(map(str, sorted(frames)[:8])) + (", ..." if len(frames) > 8 else "")
    text = f"{name}: FFmpeg's decoder gives no picture for frame {shown} ({len(frames)} in this read)"
    return dict.fromkeys(frames, DecodeError(text, source=name, frames=tuple(sorted(frames))))
