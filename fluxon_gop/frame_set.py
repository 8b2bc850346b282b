"""The pictures of some frames, and the errors of those that have none.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fluxon_gop.errors import DecodeError, FluxonGopError
from fluxon_gop.ranges import Int64Array

UInt8Array = npt.NDArray[np.uint8]


@dataclass
class FrameSet:
    """The pictures of some frames: row i of ``array`` is ``frames[i]`` unless ``failures`` names it."""

    frames: Int64Array
    array: UInt8Array
    failures: dict[int, FluxonGopError]
    given: bool = False
    """The whole array is a caller's already."""

    def rows(self, wanted: Int64Array) -> UInt8Array:
        """Return the rows of ``wanted``, in its order; raises the first failure among them."""
        for frame in wanted.tolist() if self.failures else ():
            if frame in self.failures:
                raise self.failures[frame]
        if not self.given and len(wanted) == len(self.frames) and (wanted == self.frames).all():
            self.given = True
            return self.array
        return self.array[np.searchsorted(self.frames, wanted)]


def no_pictures(name: str, frames: tuple[int, ...]) -> dict[int, FluxonGopError]:
    """Return the error, by frame, of a video's frames that the decoder gives no picture for."""
    if not frames:
        return {}
    shown = ", ".join(map(str, sorted(frames)[:8])) + (", ..." if len(frames) > 8 else "")
    text = f"{name}: FFmpeg's decoder gives no picture for frame {shown} ({len(frames)} in this read)"
    return dict.fromkeys(frames, DecodeError(text, source=name, frames=tuple(sorted(frames))))
