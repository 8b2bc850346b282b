"""One decode loop for both ways to packets.

A picture is FFmpeg's own or an error: targets that do not come out are named, never replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import av
from av.video.frame import VideoFrame

from fluxon_gop.packets import OrderMismatchError, Way
from fluxon_gop.plan import Span
from fluxon_gop.sparse_buffer import SparseBuffer
from fluxon_gop.stats import ReadStats

Picture = tuple[int, VideoFrame]
"""A target and its decoded picture."""
Order = Callable[[int], tuple[int, int] | None]


def decode_span(
    way: Way, span: Span, buffer: SparseBuffer, stats: ReadStats, order: Order | None
) -> Iterator[Picture | None]:
    """Yield (target, picture) for the span's targets as they come out of the decoder.

    Sends packets up to the last needed one, then drains: nothing behind it is needed. A packet that the
    decoder refuses is counted and the next one is sent; a target that never comes is simply not yielded.
    Yields None where the way waits for more bytes in the buffer.

    Args:
        way: where the packets come from.
        span: what to decode; its targets are what ``way.key`` answers.
        buffer: the fetched bytes.
        stats: counts packets, pictures and errors.
        order: of shown keys, None for what is not shown; pictures must come out in it. None where keys are
            counted themselves.

    Raises:
        OrderMismatchError: they do not.
    """
    wanted = set(span.targets)
    if not wanted:
        return
    codec = way.start(span, buffer)
    before: tuple[int, int] | None = None
    errors = stats.decode_errors
    under_way = 0
    packets = way.packets(span)
    draining = False
    while not draining:
        try:
            packet = next(packets) if wanted else None
            draining = not wanted
        except StopIteration:
            packet, draining = None, True
        except av.error.FFmpegError:
            # The demuxer gave up: what it could give has been decoded.
            stats.decode_errors += 1
            return
        if packet is None and not draining:
            yield None
            continue
        try:
            frames = codec.decode(packet)
            stats.packets_sent += not draining
            under_way += not draining
        except (av.error.EOFError, av.error.BlockingIOError):
            continue
        except av.error.FFmpegError:
            stats.decode_errors += 1
            way.damaged = True
            if order is None:
                # Counting cannot go on behind a picture that did not come.
                return
            continue
        for frame in frames:
            stats.frames_decoded += 1
            under_way -= 1
            if frame.is_corrupt:
                way.damaged = True
            key = way.key(frame)
            if key is None:
                continue
            if order is not None and (now := order(key)) is not None:
                if before is not None and now <= before:
                    raise OrderMismatchError
                before = now
            if key in wanted:
                wanted.discard(key)
                yield key, frame
        # Where pictures are under way still, on to the drain: one that a target was made from may be damaged.
        if not wanted and (order is None or under_way <= 0):
            if not draining and before is not None and errors == stats.decode_errors:
                way.keep_position(before)
            return


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
