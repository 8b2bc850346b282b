"""One decode loop for both ways to packets, and the one conversion to RGB.

A picture is FFmpeg's own or an error: targets that do not come out are named, never replaced.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import av
import numpy as np
import numpy.typing as npt
from av.video.frame import VideoFrame
from av.video.reformatter import Interpolation, VideoReformatter

from fluxon_gop.model import Orientation
from fluxon_gop.packets import OrderMismatchError, Packet, Way
from fluxon_gop.plan import Span
from fluxon_gop.sparse_buffer import SparseBuffer
from fluxon_gop.stats import ReadStats

UInt8Array = npt.NDArray[np.uint8]


def decode_span(
    way: Way, span: Span, buffer: SparseBuffer, stats: ReadStats, rank: npt.NDArray[np.int64] | None
) -> Iterator[tuple[int, VideoFrame]]:
    """Yield (target, picture) for the span's targets as they come out of the decoder.

    Sends packets up to the last needed one, then drains: nothing behind it is needed. A packet that the
    decoder refuses is counted and the next one is sent; a target that never comes is simply not yielded.

    Args:
        way: where the packets come from.
        span: what to decode; its targets are what ``way.key`` answers.
        buffer: the fetched bytes.
        stats: counts packets, pictures and errors.
        rank: frame number by key, -1 for what is not shown; pictures must come out in its order. None
            where keys are counted themselves.

    Raises:
        OrderMismatchError: they do not.
    """
    wanted = set(span.targets)
    codec = way.start(span, buffer)
    before: int | None = None
    packets = _then_drain(way.packets(span))
    while True:
        try:
            packet = next(packets)
        except StopIteration:
            return
        except av.error.FFmpegError:
            # The demuxer gave up: what it could give has been decoded.
            stats.decode_errors += 1
            return
        try:
            frames = codec.decode(packet)
            stats.packets_sent += packet is not None
        except (av.error.EOFError, av.error.BlockingIOError):
            continue
        except av.error.FFmpegError:
            stats.decode_errors += 1
            if rank is None:
                # Counting cannot go on behind a picture that did not come.
                return
            continue
        for frame in frames:
            stats.frames_decoded += 1
            key = way.key(frame)
            if key is None:
                continue
            if rank is not None and (now := int(rank[key])) >= 0:
                if before is not None and now <= before:
                    raise OrderMismatchError
                before = now
            if key in wanted:
                wanted.discard(key)
                yield key, frame
        if not wanted:
            return


def _then_drain(packets: Iterator[Packet]) -> Iterator[Packet | None]:
    yield from packets
    yield None


class Canvas:
    """The output array of one read: row i is the i-th wanted picture, RGB, upright, scaled."""

    def __init__(self, count: int, height: int, width: int, orientation: Orientation) -> None:
        """Allocate ``count`` pictures of ``height`` x ``width`` after turning."""
        self.array: UInt8Array = np.empty((count, height, width, 3), np.uint8)
        self._orientation = orientation
        self._size = (width, height) if not orientation.transpose else (height, width)
        self._reformatter = VideoReformatter()

    def paint(self, row: int, frame: VideoFrame) -> None:
        """Convert one picture into its row: one swscale pass, one copy.

        The unturned picture is scaled to the turned size, then turned in numpy.
        """
        width, height = self._size
        rgb = self._reformatter.reformat(
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


class Stopwatch:
    """Adds the seconds of a with-block to ``stats.decode_seconds``."""

    def __init__(self, stats: ReadStats) -> None:
        """Count into ``stats``."""
        self._stats = stats
        self._started = 0.0

    def __enter__(self) -> None:
        """Start."""
        self._started = time.perf_counter()
        self._stats.decode_calls += 1

    def __exit__(self, *_: object) -> None:
        """Stop and add."""
        self._stats.decode_seconds += time.perf_counter() - self._started
