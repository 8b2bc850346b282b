"""How one video's frames are read: the jobs between an index and an array.

A job yields the waves it needs (see ``prefetch``). Packet path: plan, one wave, check what is unproven,
decode. Container path: the same plan through FFmpeg's demuxer; counted from the stream's start where the
index cannot tell what is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from fluxon_gop import entry_points
from fluxon_gop.canvas import Canvas, Choices
from fluxon_gop.counted import Counted
from fluxon_gop.decode import Picture, decode_span
from fluxon_gop.decoders import Decoders, Missing, paint
from fluxon_gop.demuxed import DemuxedPackets
from fluxon_gop.frame_set import FrameSet, UInt8Array, Wanted, no_pictures
from fluxon_gop.jobs import Compute, Job, Wave, run_one
from fluxon_gop.long_span import LongSpan
from fluxon_gop.model import Orientation, Verdict, VideoIndex
from fluxon_gop.packets import (
    CutPackets,
    OrderMismatchError,
    RowMismatchError,
)
from fluxon_gop.plan import (
    MAX_REQUEST_BYTES,
    Path,
    Span,
    VideoPlan,
    coalesced,
    divide,
    parts,
    plan_container,
    plan_packets,
    plan_spans,
    sample_range,
    span_ranges,
)
from fluxon_gop.ranges import Int64Array, as_array, as_ranges, merge, subtract, total_bytes
from fluxon_gop.sources.range_source import RangeSource
from fluxon_gop.sparse_buffer import SparseBuffer
from fluxon_gop.stats import ReadStats, WaveKind


class VideoJobs:
    """One version of one video: its source, its index or the reason for none, its decoders."""

    def __init__(
        self,
        source: RangeSource,
        index: VideoIndex | None,
        no_index: str | None,
        choices: Choices,
        *,
        verify: bool = False,
    ) -> None:
        """Take a source whose signature the index fits.

        Args:
            source: the bytes.
            index: what is known of them, None where they have no index.
            no_index: why not.
            choices: the caller's.
            verify: hold the index against the bytes that are read; for one that comes from a table.

        """
        self._verify = verify
        self._verified: set[int] = set()
        self.index = index
        self._no_index = no_index
        self._source = source
        self._choices = choices
        self._counted = Counted(source.name, choices)
        self._cutting: Decoders | None = None
        self._demuxed: DemuxedPackets | None = None

    def read(self, wanted: Wanted, stats: ReadStats, *, alone: bool = True) -> Job[FrameSet]:
        """Return the job that reads what is wanted; ``alone`` where no other video decodes beside it."""
        while True:
            try:
                if self._uses_packets():
                    result = yield from self._packet_job(wanted, stats, alone)
                else:
                    result = yield from self._container_job(wanted, stats)
                if result is not None:
                    stats.frames_requested += len(wanted.frames)
                    return result
            except OrderMismatchError:
                assert self.index is not None
                reason = "the order of pictures is not the one that the container's times say"
                self.index = replace(self.index, container_reason=reason)
                self.drop_decoders()

    def _uses_packets(self) -> bool:
        index = self.index
        return (
            index is not None
            and index.container_reason is None
            and self._choices.path is not Path.CONTAINER
        )

    def plan(self, frames: Int64Array) -> VideoPlan:
        """Return the plan of ``frames`` by the index at hand, and by where its decoders stand; no IO."""
        if self._uses_packets():
            assert self.index is not None
            self.index.check_frames(frames, self._source.name)
            plan = self._decoders(self.index).resumed(self.index, plan_packets(self.index, frames))
            return coalesced(plan, self._costs)
        if self.index is None:
            reason = self._no_index or "no index yet"
            return VideoPlan(Path.CONTAINER, (), (), 0, reason=reason, counted=True)
        reason = self.index.container_reason or "asked for"
        if self.index.container_reason is None:
            self.index.check_frames(frames, self._source.name)
        return coalesced(plan_container(self.index, frames, reason), self._costs)

    @property
    def _costs(self) -> tuple[float, float, int] | None:
        """What the source's requests cost, None where they cost next to nothing."""
        return getattr(self._source, "costs", None)

    def _packet_job(self, wanted: Wanted, stats: ReadStats, alone: bool) -> Job[FrameSet | None]:
        """Read on the packet path; None where a check shows that the index is not certain."""
        index = self.index
        assert index is not None
        frames = wanted.frames
        index.check_frames(frames, self._source.name)
        canvas = self._choices.canvas(wanted, *self._index_picture(index))
        missing = dict(zip(index.frame_sample[frames].tolist(), frames.tolist(), strict=True))
        limit = self._choices.max_bytes
        for part in parts(index, plan_packets(index, frames), limit):
            # Each part by itself: the one before may have taken the decoder on.
            plan = self._decoders(index).resumed(index, part)
            wider = coalesced(plan, self._costs)
            plan = wider if wider.nbytes <= limit else plan
            if plan.nbytes > limit:
                done = yield from self._long_job(plan, stats, missing, canvas)
            else:
                done = yield from self._part_job(plan, stats, missing, canvas, alone)
            if not done:
                return None
            assert self.index is not None
            index = self.index
        failures = no_pictures(self._source.name, tuple(missing.values()))
        return FrameSet(wanted, canvas.arrays, failures)

    def _part_job(
        self, part: VideoPlan, stats: ReadStats, missing: Missing, canvas: Canvas, alone: bool
    ) -> Job[bool]:
        """Fetch a plan's ranges in one wave and decode its spans; False where the index is not certain."""
        stats.wanted_bytes += part.wanted_bytes
        buffer = SparseBuffer(self._source, stats)
        if part.ranges:
            fetched = yield Wave(WaveKind.MEDIA, self._source, part.ranges)
            buffer.insert_all(part.ranges, fetched)
        plan = (yield from self._check_job(part, buffer, stats)) if part.unchecked else part
        if plan is None:
            return False
        spans = self._pieces(plan, buffer, stats)
        self._hold_against_bytes(spans, buffer)
        assert self.index is not None
        decoders = self._decoders(self.index)
        # Spans that run side by side count apart.
        counts = [ReadStats() for _ in spans]
        ways = decoders.ways_for(spans, alone=alone and len(spans) == 1)
        tasks = [
            partial(decoders.decode, way, span, buffer, count, missing, canvas)
            for way, span, count in zip(ways, spans, counts, strict=True)
        ]
        try:
            yield Compute(tuple(tasks), self._choices.num_threads)
        finally:
            for count in counts:
                stats.add(count)
        return True

    def _pieces(self, plan: VideoPlan, buffer: SparseBuffer, stats: ReadStats) -> list[Span]:
        """Return the plan's spans, divided for the reader's threads."""
        threads = self._choices.num_threads
        index = self.index
        assert index is not None
        if threads == 1:
            return list(plan.spans)
        spans = list(plan.spans)
        if len(spans) < threads:
            claims = index.key_samples[index.verdicts == Verdict.UNCHECKED]
            inside = [
                claim
                for span in spans
                for claim in claims[slice(*np.searchsorted(claims, (span.first, span.last + 1)))].tolist()
            ]
            if inside:
                index = self._judge(inside, buffer, stats)
            spans = divide(index, plan.spans, threads)
        # The longest first, so that the threads end together.
        return sorted(spans, key=lambda span: span.first - span.last)

    def _long_job(self, part: VideoPlan, stats: ReadStats, missing: Missing, canvas: Canvas) -> Job[bool]:
        """Decode a span that is too long to hold, wave after wave; False where the index is not certain."""
        plan = yield from self._claims_job(part, stats)
        if plan is None:
            return False
        index = self.index
        assert index is not None
        decoders = self._decoders(index)
        for planned in plan.spans:
            # Each by itself: the one before may have taken the decoder on.
            fresh = planned._replace(resume=None)
            (span,) = decoders.resumed(index, plan_spans(index, (fresh,))).spans
            stats.wanted_bytes += total_bytes(span_ranges(index, (span,)))
            (take,) = decoders.ways_for([span], alone=True)
            way = take()
            wanted = {target: missing[target] for target in span.targets}
            way.damaged = False
            yield from self._runs_job(way, span, stats, missing, canvas)
            if not decoders.is_damaged(way, span, missing):
                decoders.put_back(way)
                continue
            missing |= wanted
            way = decoders.whole()
            yield from self._runs_job(way, fresh, stats, missing, canvas)
            way.close()
        return True

    def _runs_job(
        self, way: CutPackets, span: Span, stats: ReadStats, missing: Missing, canvas: Canvas
    ) -> Job[None]:
        """Fetch a span run by run, and paint each run's pictures before the next one is fetched."""
        assert self.index is not None
        long = LongSpan(self._source, self.index, way, span, stats)
        for fetch in long.runs(self._choices.max_bytes, partial(self._hold_against_bytes, [span])):
            yield from fetch
            yield Compute((partial(paint, way, long.pictures, stats, missing, canvas),))

    def _claims_job(self, plan: VideoPlan, stats: ReadStats) -> Job[VideoPlan | None]:
        """Check a long plan's claims on their own bytes; None where the index is not certain."""
        buffer = SparseBuffer(self._source, stats)
        return (yield from self._check_job(plan, buffer, stats, whole=False))

    def _hold_against_bytes(self, spans: list[Span], buffer: SparseBuffer) -> None:
        """Raise RowMismatchError where an entry point's bytes are not what a row says."""
        assert self.index is not None
        for span in spans if self._verify else ():
            if span.resume is None and span.entry not in self._verified:
                head = buffer.view(*entry_points.probe_range(self.index, span.entry))
                if entry_points.contradicts(self.index, span.entry, head):
                    raise RowMismatchError
                self._verified.add(span.entry)

    def _check_job(
        self, plan: VideoPlan, buffer: SparseBuffer, stats: ReadStats, *, whole: bool = True
    ) -> Job[VideoPlan | None]:
        """Check claimed entry points on the fetched bytes, and fetch what a refuted one leaves missing.

        Returns the plan that rests on proven entry points only, or None where the check shows that what
        FFmpeg shows of this file is not certain. ``whole``: the plan's bytes are in the buffer, and are to be
        afterwards; else the claims' own are fetched, and no others.
        """
        while plan.unchecked:
            index = self.index
            assert index is not None
            if not whole:
                probes = as_ranges(
                    merge(as_array([entry_points.probe_range(index, s) for s in plan.unchecked]))
                )
                fetched = yield Wave(WaveKind.MEDIA, self._source, probes, adds=True)
                buffer.insert_all(probes, fetched)
            index = self._judge(plan.unchecked, buffer, stats)
            if index.container_reason is not None:
                self.drop_decoders()
                return None
            targets = [sample for span in plan.spans for sample in span.targets]
            if not targets:
                return replace(plan, unchecked=())
            before, plan = plan, self.plan(np.sort(index.sample_frame[targets]))
            if not whole:
                continue
            held = merge(as_array(buffer.segments))
            missing = as_ranges(subtract(merge(as_array(plan.ranges)), held))
            if missing:
                fetched = yield Wave(WaveKind.EXTENSION, self._source, missing, adds=True)
                buffer.insert_all(missing, fetched)
                stats.wanted_bytes += plan.wanted_bytes - before.wanted_bytes
        return plan

    def _judge(self, claims: Sequence[int], buffer: SparseBuffer, stats: ReadStats) -> VideoIndex:
        """Take the bitstream's verdicts on these key samples into the index, and return it."""
        index = self.index
        assert index is not None
        samples = np.array(claims, np.int64)
        heads = [buffer.view(*entry_points.probe_range(index, sample)) for sample in claims]
        verdicts = entry_points.judge(index, samples, heads)
        for i in np.flatnonzero(verdicts == Verdict.UNCHECKED).tolist():
            data = buffer.view(*sample_range(index, claims[i]))
            verdicts[i : i + 1] = entry_points.judge(index, samples[i : i + 1], [data])
        stats.refuted_entry_points += int((verdicts == Verdict.REFUSED).sum())
        self.index = index.with_verdicts(samples, verdicts)
        return self.index

    def _container_job(self, wanted: Wanted, stats: ReadStats) -> Job[FrameSet | None]:
        """Read on the container path; None where a check shows that the index is not certain."""
        stats.container_reads += 1
        frames = wanted.frames
        plan = self.plan(frames)
        stats.reasons[plan.reason or "no index"] = stats.reasons.get(plan.reason or "no index", 0) + 1
        way = self._demuxed_way()
        buffer = SparseBuffer(self._source, stats)
        stats.wanted_bytes += plan.wanted_bytes
        if plan.ranges and plan.nbytes <= self._choices.max_bytes and not (way.counted and way.position):
            fetched = yield Wave(WaveKind.MEDIA, self._source, plan.ranges)
            buffer.insert_all(plan.ranges, fetched)
        checked = yield from self._check_job(plan, buffer, stats)
        if checked is None:
            return None
        if way.counted:
            pictures: list[FrameSet] = []
            yield Compute((lambda: pictures.append(self._counted.read(way, wanted, buffer, stats)),))
            way.release()
            return pictures[0]
        assert self.index is not None
        canvas = self._choices.canvas(wanted, *self._index_picture(self.index))
        samples = self.index.frame_sample[frames].tolist()
        missing = dict(zip(samples, frames.tolist(), strict=True))
        order = self.index.show_order
        spans = [decode_span(way, span, buffer, stats, order) for span in checked.spans]
        yield Compute(tuple(partial(paint, way, one, stats, missing, canvas) for one in spans))
        way.release()
        failures = no_pictures(self._source.name, tuple(missing.values()))
        return FrameSet(wanted, canvas.arrays, failures)

    def count(self, stats: ReadStats) -> Job[int]:
        """Return the job that finds the number of frames; free where the index is certain."""
        index = self.index
        if index is not None and index.container_reason is None:
            if index.verdict_of(index.stream.start) is Verdict.UNCHECKED:
                wanted = (entry_points.probe_range(index, index.stream.start),)
                fetched = yield Wave(WaveKind.HEAD_MOOV, self._source, wanted)
                buffer = SparseBuffer(self._source, stats)
                buffer.insert_all(wanted, fetched)
                plan = VideoPlan(Path.PACKET, (), (), 0, unchecked=(index.stream.start,))
                yield from self._check_job(plan, buffer, stats)
                index = self.index
                assert index is not None
            if index.container_reason is None:
                return index.num_frames
        if self._counted.length is None:
            way = self._demuxed_way()
            buffer = SparseBuffer(self._source, stats)
            yield Compute((partial(self._counted.run_through, way, buffer, stats),))
            assert self._counted.length is not None
        return self._counted.length

    def iterate(self, frames: Int64Array, stats: ReadStats) -> Iterator[tuple[int, UInt8Array]]:
        """Yield ``frames`` (rising) one by one, each wave after the frames of the one before.

        Raises:
            OrderMismatchError, RowMismatchError: as a single read finds it; what was yielded stands.
        """
        plan = None
        if self._uses_packets():
            assert self.index is not None
            plan = run_one(self._claims_job(plan_packets(self.index, frames), stats), stats)
        if plan is None:
            for number in frames.tolist():
                one = Wanted.of(np.array([number], np.int64))
                yield number, run_one(self.read(one, stats), stats).array()[0]
            return
        index = self.index
        assert index is not None
        frame_of = dict(zip(index.frame_sample[frames].tolist(), frames.tolist(), strict=True))
        way = CutPackets(index, self._choices.num_threads, verify=self._verify)
        for span in plan.spans:
            for sample, frame in self._stream(way, span._replace(resume=None), stats):
                number = frame_of.pop(sample)
                one = Wanted.of(np.array([number], np.int64))
                canvas = self._choices.canvas(one, *self._index_picture(index))
                canvas.paint(number, frame, way.reformatter)
                yield number, canvas.arrays[0][0]
        if frame_of:
            failures = no_pictures(self._source.name, tuple(frame_of.values()))
            raise next(iter(failures.values()))

    def _stream(self, way: CutPackets, span: Span, stats: ReadStats) -> Iterator[Picture]:
        """Yield the span's pictures, fetching up to 8 MiB at a time as the decoder needs them."""
        assert self.index is not None
        long = LongSpan(self._source, self.index, way, span, stats)
        runs = long.runs(MAX_REQUEST_BYTES, partial(self._hold_against_bytes, [span]))
        for item in long.pictures:
            if item is None:
                run_one(next(runs), stats)
            else:
                yield item

    def _decoders(self, index: VideoIndex) -> Decoders:
        if self._cutting is None:
            self._cutting = Decoders(index, self._choices.num_threads, verify=self._verify)
        return self._cutting

    def _demuxed_way(self) -> DemuxedPackets:
        if self._demuxed is None:
            stream = self._choices.stream_index
            if stream is None and self.index is not None and self.index.container_reason is None:
                stream = self.index.stream_index
            self._demuxed = DemuxedPackets(
                self.index, self._source.signature.size, stream, self._choices.num_threads
            )
            self._demuxed.hint = f" (and: {self._no_index})" if self._no_index else ""
        return self._demuxed

    def _index_picture(self, index: VideoIndex) -> tuple[tuple[int, int], Orientation]:
        return (index.height, index.width), index.orientation

    def drop_decoders(self) -> None:
        """Close decoders and demuxer; the next read opens new ones."""
        if self._demuxed is not None:
            self._demuxed.close()
        self._demuxed = None
        if self._cutting is not None:
            self._cutting.close()
        self._cutting = None
