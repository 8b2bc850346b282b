"""The output array, and the one conversion to RGB that fills it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter

from fluxon_gop.frame_set import UInt8Array, Wanted
from fluxon_gop.model import Orientation
from fluxon_gop.plan import Path


class Canvas:
    """The output arrays of one read, one a request: RGB, upright, scaled."""

    def __init__(self, wanted: Wanted, height: int, width: int, orientation: Orientation) -> None:
        """Allocate pictures of ``height`` x ``width`` after turning."""
        self.arrays: list[UInt8Array] = [
            np.empty((len(frames), height, width, 3), np.uint8) for frames in wanted.requests
        ]
        self._places = wanted.places
        self._orientation = orientation
        self._size = (width, height) if not orientation.transpose else (height, width)

    def paint(self, number: int, frame: VideoFrame, reformatter: VideoReformatter) -> None:
        """Convert a frame's picture into every row that wants it: one swscale pass, one copy a row.

        The unturned picture is scaled to the turned size, then turned in numpy. Frames may be painted side by
        side, each thread with a reformatter of its own, which keeps its context from picture to picture.
        """
        width, height = self._size
        rgb = reformatter.reformat(
            frame, width, height, format="rgb24", interpolation=Interpolation.BILINEAR, threads=1
        )
        plane = rgb.planes[0]
        pixels = np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)  # type: ignore[call-overload]
        picture = pixels[:height, : 3 * width].reshape(height, width, 3)
        if self._orientation.transpose:
            picture = picture.transpose(1, 0, 2)
        if self._orientation.flip_rows:
            picture = picture[::-1]
        if self._orientation.flip_columns:
            picture = picture[:, ::-1]
        for request, row in self._places[number]:
            self.arrays[request][row] = picture


@dataclass(frozen=True)
class Choices:
    """What the caller chose for all reads of one video."""

    size: tuple[int, int] | None = None
    """(height, width) of the output, None for the picture's own."""
    num_threads: int = 1
    apply_rotation: bool = True
    stream_index: int | None = None
    path: Path | None = None
    max_bytes: int = 1 << 30

    def canvas(self, wanted: Wanted, natural: tuple[int, int], orientation: Orientation) -> Canvas:
        """Return the output of pictures whose own size, before turning, is ``natural``."""
        turn = orientation if self.apply_rotation else Orientation()
        height, width = self.size or (natural[::-1] if turn.transpose else natural)
        return Canvas(wanted, height, width, turn)
