"""Frames by counting: FFmpeg's demuxer from the stream's start, where the index cannot tell what is shown."""

from __future__ import annotations

from fluxon_gop.canvas import Canvas, Choices
from fluxon_gop.decode import Stopwatch, decode_span
from fluxon_gop.demuxed import DemuxedPackets, display_matrix
from fluxon_gop.errors import FluxonGopError
from fluxon_gop.frame_set import FrameSet, Wanted, no_pictures
from fluxon_gop.model import Orientation, beyond_the_end
from fluxon_gop.plan import Span
from fluxon_gop.sparse_buffer import SparseBuffer
from fluxon_gop.stats import ReadStats

COUNT_ALL = 1 << 62
"""A frame number that no video has: counting runs to the end."""


class Counted:
    """What counting has found of one video: its length once it was seen, its picture's size and turn."""

    def __init__(self, name: str, choices: Choices) -> None:
        """Know nothing yet of the video of this name."""
        self._name = name
        self._choices = choices
        self.length: int | None = None
        self._natural: tuple[tuple[int, int], Orientation] | None = None

    def read(self, way: DemuxedPackets, wanted: Wanted, buffer: SparseBuffer, stats: ReadStats) -> FrameSet:
        """Decode from the stream's start, or from where the last read stopped, counting pictures."""
        with Stopwatch(stats):
            return self._read(way, wanted, buffer, stats)

    def run_through(self, way: DemuxedPackets, buffer: SparseBuffer, stats: ReadStats) -> int:
        """Decode to the end and return the number of pictures."""
        way.rewind()
        with Stopwatch(stats):
            try:
                for _ in decode_span(way, Span(0, 0, (COUNT_ALL,)), buffer, stats, None):
                    pass
                self.length = way.position
            finally:
                way.rewind()
        return self.length

    def _read(
        self, way: DemuxedPackets, wanted: Wanted, buffer: SparseBuffer, stats: ReadStats
    ) -> FrameSet:
        missing = set(wanted.frames.tolist())
        targets = tuple(sorted(missing if self._natural else {0, *missing}))
        canvas = self._choices.canvas(wanted, *self._natural) if self._natural else None
        errors = stats.decode_errors
        try:
            for number, frame in filter(None, decode_span(way, Span(0, 0, targets), buffer, stats, None)):
                if self._natural is None:
                    matrix = display_matrix(frame)
                    turn = Orientation.from_matrix(matrix) if matrix else Orientation()
                    self._natural = ((frame.height, frame.width), turn)
                if canvas is None:
                    canvas = self._choices.canvas(wanted, *self._natural)
                if number in missing:
                    missing.discard(number)
                    canvas.paint(number, frame, way.reformatter)
        except BaseException:
            # The count is lost with the pictures that were under way.
            way.rewind()
            raise
        failures: dict[int, FluxonGopError] = {}
        if missing:
            damaged = stats.decode_errors > errors
            length = way.position
            way.rewind()
            if damaged:
                failures = no_pictures(self._name, tuple(missing))
            else:
                self.length = length
                failures = {frame: beyond_the_end(self._name, frame, length) for frame in missing}
        if canvas is None:
            height, width = self._choices.size or (0, 0)
            canvas = Canvas(wanted, height, width, Orientation())
        return FrameSet(wanted, canvas.arrays, failures)
