"""The decoders of one video: reused by flush, left standing where the next read may go on, one a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

from fluxon_gop import forks
from fluxon_gop.canvas import Canvas
from fluxon_gop.decode import Picture, Stopwatch, decode_span
from fluxon_gop.model import VideoIndex
from fluxon_gop.packets import CutPackets, Way
from fluxon_gop.plan import Span, VideoPlan, plan_spans
from fluxon_gop.sparse_buffer import SparseBuffer
from fluxon_gop.stats import ReadStats

FRAME_THREAD_SAMPLES = 24
"""A lone span of this many samples is worth frame threads."""

Missing = dict[int, int]
"""Frame number by the sample that is still to come."""


class Decoders:
    """The packet path's decoders of one video at one version of its index."""

    def __init__(self, index: VideoIndex, num_threads: int, *, verify: bool) -> None:
        """Open none yet; at most ``num_threads`` stay open. ``verify``: see CutPackets."""
        self._index = index
        self._num_threads = num_threads
        self._verify = verify
        self._idle: list[CutPackets] = []
        self._lock = threading.Lock()
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: another thread of the parent may hold the lock for ever."""
        self._lock = threading.Lock()

    def resumed(self, plan: VideoPlan) -> VideoPlan:
        """Return the plan less the samples that an idle decoder has seen already."""
        idle = list(self._idle)
        spans = list(plan.spans)
        for number, span in enumerate(plan.spans):
            for way in idle:
                resume = way.resume_at(span)
                if resume is not None:
                    idle.remove(way)
                    spans[number] = span._replace(resume=resume)
                    break
        if len(idle) == len(self._idle):
            return plan
        return plan_spans(self._index, tuple(spans), plan.unchecked)

    def way_for(self, span: Span, *, alone: bool) -> Callable[[], CutPackets]:
        """Return what gives a decoder for the span: the one that stands in it, else any idle one, or a new one.

        The first kind is taken at once, before another span takes it. A long span that decodes ``alone`` gets
        the reader's threads.
        """
        if span.resume is not None:
            standing = next(way for way in self._idle if way.resume_at(span) == span.resume)
            self._idle.remove(standing)
            return lambda: standing
        long = span.last + 1 - span.entry >= FRAME_THREAD_SAMPLES
        return partial(self._take, self._num_threads if alone and long else 1)

    def _take(self, threads: int) -> CutPackets:
        with self._lock:
            for way in self._idle:
                if way.threads == threads:
                    self._idle.remove(way)
                    return way
        return CutPackets(self._index, threads, verify=self._verify)

    def put_back(self, way: CutPackets) -> None:
        """Keep a decoder that came to the end of its span."""
        with self._lock:
            self._idle.append(way)
            if len(self._idle) > self._num_threads:
                self._idle.pop(0).close()

    def decode(
        self,
        way_for: Callable[[], CutPackets],
        span: Span,
        buffer: SparseBuffer,
        stats: ReadStats,
        missing: Missing,
        canvas: Canvas,
    ) -> None:
        """Decode one span and paint its frames. Spans may decode side by side."""
        way = way_for()
        pictures = decode_span(way, span, buffer, stats, self._index.show_order)
        paint(way, pictures, stats, missing, canvas)
        self.put_back(way)

    def close(self) -> None:
        """Drop them."""
        self._idle.clear()


def paint(
    way: Way,
    pictures: Iterator[Picture | None],
    stats: ReadStats,
    missing: Missing,
    canvas: Canvas,
) -> None:
    """Paint the frames that ``missing`` names, and strike those out; stops where bytes lack."""
    with Stopwatch(stats):
        for item in pictures:
            if item is None:
                return
            sample, frame = item
            canvas.paint(missing.pop(sample), frame, way.reformatter)
