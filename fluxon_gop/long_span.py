"""A span that is too long to hold, or not to be held: fetched in runs of samples, each in the place of the last."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fluxon_gop.decode import decode_span
from fluxon_gop.jobs import Job, Wave
from fluxon_gop.model import VideoIndex
from fluxon_gop.packets import CutPackets
from fluxon_gop.plan import Span, chunks, run_ranges, shape
from fluxon_gop.ranges import ByteRange
from fluxon_gop.sources.range_source import RangeSource
from fluxon_gop.sparse_buffer import SparseBuffer
from fluxon_gop.stats import ReadStats, WaveKind


class LongSpan:
    """Its ``pictures`` come run by run: they yield None where the next run is to be fetched."""

    def __init__(
        self, source: RangeSource, index: VideoIndex, way: CutPackets, span: Span, stats: ReadStats
    ) -> None:
        """Fetch nothing yet.

        Args:
            source: the bytes.
            index: of them.
            way: decodes the span; is let go of by the caller.
            span: what to decode.
            stats: counts.
        """
        self._source = source
        self._index = index
        self._way = way
        self._span = span
        self._buffer = SparseBuffer(source, stats)
        way.held = span.first
        self.pictures = decode_span(way, span, self._buffer, stats, index.show_order)

    def runs(self, max_bytes: int, check: Callable[[SparseBuffer], None]) -> Iterator[Job[None]]:
        """Yield a job for each run of at most ``max_bytes``; ``check`` is made on the first one's bytes."""
        for run in chunks(self._index, self._span, max_bytes):
            yield self._fetch(run, check if run.start == self._span.first else None)

    def _fetch(self, run: ByteRange, check: Callable[[SparseBuffer], None] | None) -> Job[None]:
        ranges = shape(run_ranges(self._index, *run))
        self._buffer.clear()
        if ranges:
            fetched = yield Wave(WaveKind.MEDIA, self._source, ranges)
            self._buffer.insert_all(ranges, fetched)
        if check is not None:
            check(self._buffer)
        self._way.held = run.stop
