"""The decoders of one video: reused by flush, left standing where the next read may go on, one a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from fluxon_gop import forks
from fluxon_gop.canvas import Canvas
from fluxon_gop.decode import Picture, Stopwatch, decode_span
from fluxon_gop.model import VideoIndex
from fluxon_gop.packets import CutPackets, Way
from fluxon_gop.plan import Span, VideoPlan, open_claims, plan_spans
from fluxon_gop.sparse_buffer import SparseBuffer
from fluxon_gop.stats import ReadStats
from fluxon_gop.threads import decode_limit

FRAME_THREAD_SAMPLES = 24
"""A lone span of this many samples is worth frame threads."""

Missing = dict[int, int]
"""Sample that is still to come -> its frame number."""


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

    def resumed(self, index: VideoIndex, plan: VideoPlan) -> VideoPlan:
        """Return the plan less the samples that an idle decoder has seen already, and less their claims."""
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
        return plan_spans(index, tuple(spans), open_claims(index, tuple(spans)))

    def ways_for(self, spans: Sequence[Span], *, alone: bool) -> list[Callable[[], CutPackets]]:
        """Return what gives a decoder for each span: the one that stands in it, else an idle one, or a new one.

        Those that stand in a span are taken at once, before another span takes them. A long span that decodes
        ``alone`` gets the reader's threads.
        """
        taken: dict[Span, CutPackets] = {}
        for span in spans:
            if span.resume is not None:
                way = next((way for way in self._idle if way.resume_at(span) == span.resume), None)
                assert way is not None, "a plan goes on where no decoder stands"
                self._idle.remove(way)
                taken[span] = way
        return [partial(self._take, span, taken.get(span), alone=alone) for span in spans]

    def _take(self, span: Span, standing: CutPackets | None, *, alone: bool) -> CutPackets:
        if standing is not None:
            return standing
        threads = 1
        if alone and span.last + 1 - span.entry >= FRAME_THREAD_SAMPLES:
            threads = min(self._num_threads, decode_limit(self._num_threads))
        with self._lock:
            fitting = [way for way in self._idle if way.threads == threads]
            if fitting:
                # One that stands nowhere first: another may be of use to the next read.
                way = min(fitting, key=lambda way: way.stands)
                self._idle.remove(way)
                return way
        return CutPackets(self._index, threads, verify=self._verify)

    def put_back(self, way: CutPackets) -> None:
        """Keep a decoder that came to the end of its span, without the bytes that it was given."""
        way.release()
        with self._lock:
            self._idle.append(way)
            if len(self._idle) > self._num_threads:
                self._idle.pop(0).close()

    def decode(
        self,
        take: Callable[[], CutPackets],
        span: Span,
        buffer: SparseBuffer,
        stats: ReadStats,
        missing: Missing,
        canvas: Canvas,
    ) -> None:
        """Decode one span and paint its frames. Spans may decode side by side."""
        way = take()
        wanted = {target: missing[target] for target in span.targets}
        way.damaged = False
        paint(way, decode_span(way, span, buffer, stats, self._index.show_order), stats, missing, canvas)
        if not self.is_damaged(way, span, missing):
            self.put_back(way)
            return
        missing |= wanted
        way, whole = self.whole(), span._replace(resume=None)
        paint(way, decode_span(way, whole, buffer, stats, self._index.show_order), stats, missing, canvas)
        way.close()

    @staticmethod
    def is_damaged(way: CutPackets, span: Span, missing: Missing) -> bool:
        """Return whether the span's pictures must be decoded again, by :meth:`whole`, from its entry."""
        return way.damaged or any(target in missing for target in span.targets)

    def whole(self) -> CutPackets:
        """Return a decoder of its own that is sent everything, on one thread.

        How FFmpeg makes up for damage depends on all that it was sent, and on its threads.
        """
        way = CutPackets(self._index, 1, verify=self._verify)
        way.keeps_all = True
        return way

    def close(self) -> None:
        """Close them."""
        while self._idle:
            self._idle.pop().close()


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
