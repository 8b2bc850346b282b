"""The output array, and the one conversion to RGB that fills it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter

from fluxon_gop.frame_set import UInt8Array
from fluxon_gop.model import Orientation
from fluxon_gop.plan import Path


class Canvas:
    """The output array of one read: row i is the i-th wanted picture, RGB, upright, scaled."""

    def __init__(self, count: int, height: int, width: int, orientation: Orientation) -> None:
        """Allocate ``count`` pictures of ``height`` x ``width`` after turning."""
        self.array: UInt8Array = np.empty((count, height, width, 3), np.uint8)
        self._orientation = orientation
        self._size = (width, height) if not orientation.transpose else (height, width)

    def paint(self, row: int, frame: VideoFrame, reformatter: VideoReformatter) -> None:
        """Convert one picture into its row: one swscale pass, one copy.

        The unturned picture is scaled to the turned size, then turned in numpy. Rows may be painted side by
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
        self.array[row] = picture


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

    def canvas(self, count: int, natural: tuple[int, int], orientation: Orientation) -> Canvas:
        """Return the output of ``count`` pictures whose own size, before turning, is ``natural``."""
        turn = orientation if self.apply_rotation else Orientation()
        height, width = self.size or (natural[::-1] if turn.transpose else natural)
        return Canvas(count, height, width, turn)
