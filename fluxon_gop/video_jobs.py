"""How one video's frames are read: the jobs between an index and an array.

A job yields the waves it needs (see ``prefetch``). Packet path: plan, one wave, check what is unproven,
decode. Container path: the same plan through FFmpeg's demuxer; counted from the stream's start where the
index cannot tell what is shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from fluxon_gop import entry_points
from fluxon_gop.decode import Canvas, Stopwatch, UInt8Array, decode_span
from fluxon_gop.errors import DecodeError, FluxonGopError
from fluxon_gop.frame_set import FrameSet
from fluxon_gop.model import Orientation, Verdict, VideoIndex, beyond_the_end
from fluxon_gop.packets import (
    CutPackets,
    DemuxedPackets,
    OrderMismatchError,
    RowMismatchError,
    display_matrix,
)
from fluxon_gop.plan import (
    MAX_REQUEST_BYTES,
    Path,
    Span,
    VideoPlan,
    parts,
    plan_container,
    plan_packets,
    sample_range,
)
from fluxon_gop.prefetch import Compute, Job, Wave, run_one
from fluxon_gop.ranges import ByteRange, Int64Array, as_array, as_ranges, merge, subtract
from fluxon_gop.sources.range_source import RangeSource
from fluxon_gop.sparse_buffer import SparseBuffer
from fluxon_gop.stats import ReadStats, WaveKind

COUNT_ALL = 1 << 62
"""A frame number that no video has: counting runs to the end."""


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
        self._counted_frames: int | None = None
        self._natural: tuple[tuple[int, int], Orientation] | None = None
        self._cut: CutPackets | None = None
        self._demuxed: DemuxedPackets | None = None

    def read(self, frames: Int64Array, stats: ReadStats) -> Job[FrameSet]:
        """Return the job that reads ``frames`` (sorted, unique)."""
        while True:
            try:
                read = self._packet_job if self._uses_packets() else self._container_job
                result = yield from read(frames, stats)
                if result is not None:
                    stats.frames_requested += len(frames)
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
        """Return the plan of ``frames`` by the index at hand; no IO."""
        if self._uses_packets():
            assert self.index is not None
            self.index.check_frames(frames, self._source.name)
            return plan_packets(self.index, frames)
        if self.index is None:
            reason = self._no_index or "no index yet"
            return VideoPlan(Path.CONTAINER, (), (), 0, reason=reason, counted=True)
        reason = self.index.container_reason or "asked for"
        if self.index.container_reason is None:
            self.index.check_frames(frames, self._source.name)
        return plan_container(self.index, frames, reason)

    def _packet_job(self, frames: Int64Array, stats: ReadStats) -> Job[FrameSet | None]:
        """Read on the packet path; None where a check shows that the index is not certain."""
        index = self.index
        assert index is not None
        whole = self.plan(frames)
        canvas = self._canvas(len(frames), *self._index_picture(index))
        missing = dict(zip(index.frame_sample[frames].tolist(), range(len(frames)), strict=True))
        way = self._cut = self._cut or CutPackets(index, self._choices.num_threads, verify=self._verify)
        for part in parts(index, whole, self._choices.max_bytes):
            stats.wanted_bytes += part.wanted_bytes
            buffer = SparseBuffer(self._source, stats)
            fetched = yield Wave(WaveKind.MEDIA, self._source, part.ranges)
            buffer.insert_all(part.ranges, fetched)
            plan = yield from self._check_job(part, buffer, stats)
            if plan is None:
                return None
            if self._verify:
                self._hold_against_bytes(plan, buffer)
            yield Compute()
            self._paint(way, plan, buffer, stats, missing, canvas)
        failed = tuple(int(frames[row]) for row in missing.values())
        return FrameSet(frames, canvas.array, self._failures(failed))

    def _paint(
        self,
        way: CutPackets | DemuxedPackets,
        plan: VideoPlan,
        buffer: SparseBuffer,
        stats: ReadStats,
        missing: dict[int, int],
        canvas: Canvas,
    ) -> None:
        """Decode the plan's spans into the rows that ``missing`` names by sample, and strike those out."""
        assert self.index is not None
        with Stopwatch(stats):
            for span in plan.spans:
                for sample, frame in decode_span(way, span, buffer, stats, self.index.sample_frame):
                    canvas.paint(missing.pop(sample), frame)

    def _hold_against_bytes(self, plan: VideoPlan, buffer: SparseBuffer) -> None:
        """Raise RowMismatchError where an entry point's bytes are not what the index says."""
        assert self.index is not None
        for span in plan.spans:
            if span.entry not in self._verified:
                head = buffer.view(*entry_points.probe_range(self.index, span.entry))
                if entry_points.contradicts(self.index, span.entry, head):
                    raise RowMismatchError
                self._verified.add(span.entry)

    def _check_job(self, plan: VideoPlan, buffer: SparseBuffer, stats: ReadStats) -> Job[VideoPlan | None]:
        """Check claimed entry points on the fetched bytes, and fetch what a refuted one leaves missing.

        Returns the plan that rests on proven entry points only, or None where the check shows that what
        FFmpeg shows of this file is not certain.
        """
        while plan.unchecked:
            index = self.index
            assert index is not None
            samples = np.array(plan.unchecked, np.int64)
            heads = [buffer.view(*entry_points.probe_range(index, s)) for s in plan.unchecked]
            verdicts = entry_points.judge(index, samples, heads)
            for i in np.flatnonzero(verdicts == Verdict.UNCHECKED).tolist():
                data = buffer.view(*sample_range(index, plan.unchecked[i]))
                verdicts[i : i + 1] = entry_points.judge(index, samples[i : i + 1], [data])
            index = self.index = index.with_verdicts(samples, verdicts)
            stats.refuted_entry_points += int((verdicts == Verdict.REFUSED).sum())
            if index.container_reason is not None:
                self.drop_decoders()
                return None
            targets = [sample for span in plan.spans for sample in span.targets]
            if not targets:
                return replace(plan, unchecked=())
            before, plan = plan, self.plan(np.sort(index.sample_frame[targets]))
            held = merge(as_array(buffer.segments))
            missing = as_ranges(subtract(merge(as_array(plan.ranges)), held))
            if missing:
                fetched = yield Wave(WaveKind.EXTENSION, self._source, missing, adds=True)
                buffer.insert_all(missing, fetched)
                stats.wanted_bytes += plan.wanted_bytes - before.wanted_bytes
        return plan

    def _container_job(self, frames: Int64Array, stats: ReadStats) -> Job[FrameSet | None]:
        """Read on the container path; None where a check shows that the index is not certain."""
        stats.container_reads += 1
        plan = self.plan(frames)
        way = self._demuxed_way()
        buffer = SparseBuffer(self._source, stats)
        stats.wanted_bytes += plan.wanted_bytes
        if plan.ranges and plan.nbytes <= self._choices.max_bytes and not (way.counted and way.position):
            fetched = yield Wave(WaveKind.MEDIA, self._source, plan.ranges)
            buffer.insert_all(plan.ranges, fetched)
        checked = yield from self._check_job(plan, buffer, stats)
        if checked is None:
            return None
        yield Compute()
        if way.counted:
            with Stopwatch(stats):
                return self._decode_counted(way, frames, buffer, stats)
        assert self.index is not None
        canvas = self._canvas(len(frames), *self._index_picture(self.index))
        samples = self.index.frame_sample[frames].tolist()
        missing = dict(zip(samples, range(len(frames)), strict=True))
        self._paint(way, checked, buffer, stats, missing, canvas)
        failed = tuple(int(frames[row]) for row in missing.values())
        return FrameSet(frames, canvas.array, self._failures(failed))

    def _decode_counted(
        self, way: DemuxedPackets, frames: Int64Array, buffer: SparseBuffer, stats: ReadStats
    ) -> FrameSet:
        """Decode from the stream's start, or from where the last read stopped, counting pictures."""
        row_of = {frame: row for row, frame in enumerate(frames.tolist())}
        wanted = tuple(sorted(row_of if self._natural else {0, *row_of}))
        canvas = self._canvas(len(frames), *self._natural) if self._natural else None
        errors = stats.decode_errors
        missing = dict(row_of)
        try:
            for number, frame in decode_span(way, Span(0, 0, wanted), buffer, stats, None):
                if self._natural is None:
                    matrix = display_matrix(frame)
                    turn = Orientation.from_matrix(matrix) if matrix else Orientation()
                    self._natural = ((frame.height, frame.width), turn)
                if canvas is None:
                    canvas = self._canvas(len(frames), *self._natural)
                row = missing.pop(number, None)
                if row is not None:
                    canvas.paint(row, frame)
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
                failures = self._failures(tuple(missing))
            else:
                self._counted_frames = length
                failures = {frame: beyond_the_end(self._source.name, frame, length) for frame in missing}
        if canvas is None:
            height, width = self._choices.size or (0, 0)
            canvas = Canvas(len(frames), height, width, Orientation())
        return FrameSet(frames, canvas.array, failures)

    def count(self, stats: ReadStats) -> Job[int]:
        """Return the job that finds the number of frames; free where the index is certain."""
        index = self.index
        if index is not None and index.container_reason is None:
            first = np.flatnonzero(index.key_samples == index.stream.start)
            if len(first) and index.verdicts[first[0]] == Verdict.UNCHECKED:
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
        if self._counted_frames is None:
            way = self._demuxed_way()
            way.rewind()
            buffer = SparseBuffer(self._source, stats)
            yield Compute()
            with Stopwatch(stats):
                try:
                    for _ in decode_span(way, Span(0, 0, (COUNT_ALL,)), buffer, stats, None):
                        pass
                except BaseException:
                    way.rewind()
                    raise
            self._counted_frames = way.position
            way.rewind()
        return self._counted_frames

    def iterate(self, frames: Int64Array, stats: ReadStats) -> Iterator[tuple[int, UInt8Array]]:
        """Yield ``frames`` (rising) one by one, each wave after the frames of the one before."""
        if not self._uses_packets():
            for frame in frames.tolist():
                one = np.array([frame], np.int64)
                yield frame, run_one(self.read(one, stats), stats).rows(one)[0]
            return
        index = self.index
        assert index is not None
        frame_of = dict(zip(index.frame_sample[frames].tolist(), frames.tolist(), strict=True))
        way = CutPackets(index, self._choices.num_threads)
        buffer = SparseBuffer(self._source, stats)
        ends = np.cumsum(index.sample_size)

        def fetch_more(sample: int) -> int:
            """Put the next samples, up to 8 MiB of them, in the place of those before."""
            before = int(ends[sample - 1]) if sample else 0
            stop = int(np.searchsorted(ends, before + MAX_REQUEST_BYTES, side="right"))
            stop = min(max(stop, sample + 1), index.stream.stop)
            wanted = merge(
                np.stack(
                    (
                        index.sample_offset[sample:stop],
                        index.sample_offset[sample:stop] + index.sample_size[sample:stop],
                    ),
                    axis=1,
                )
            )
            buffer.clear()
            run_one(self._fetch_job(buffer, as_ranges(wanted)), stats)
            return stop

        way.fetch_more = fetch_more
        plan = run_one(self._check_job(self.plan(frames), buffer, stats), stats)
        if plan is None:
            yield from self.iterate(frames, stats)
            return
        for span in plan.spans:
            try:
                for sample, frame in decode_span(way, span, buffer, stats, index.sample_frame):
                    canvas = self._canvas(1, *self._index_picture(index))
                    canvas.paint(0, frame)
                    number = frame_of.pop(sample)
                    yield number, canvas.array[0]
            except OrderMismatchError:
                # The rest goes the way that a single read would go.
                rest = np.array(sorted(frame_of.values()), np.int64)
                for number in rest.tolist():
                    yield (
                        number,
                        run_one(self.read(np.array([number]), stats), stats).rows(np.array([number]))[0],
                    )
                return
        if frame_of:
            failures = self._failures(tuple(frame_of.values()))
            raise next(iter(failures.values()))

    def _fetch_job(self, buffer: SparseBuffer, ranges: tuple[ByteRange, ...]) -> Job[None]:
        fetched = yield Wave(WaveKind.MEDIA, self._source, ranges)
        buffer.insert_all(ranges, fetched)

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

    def _canvas(self, count: int, natural: tuple[int, int], orientation: Orientation) -> Canvas:
        turn = orientation if self._choices.apply_rotation else Orientation()
        height, width = self._choices.size or (natural[::-1] if turn.transpose else natural)
        return Canvas(count, height, width, turn)

    def _failures(self, frames: tuple[int, ...]) -> dict[int, FluxonGopError]:
        if not frames:
            return {}
        shown = ", ".join(map(str, sorted(frames)[:8])) + (", ..." if len(frames) > 8 else "")
        name = self._source.name
        text = f"{name}: FFmpeg's decoder gives no picture for frame {shown} ({len(frames)} in this read)"
        error = DecodeError(text, source=name, frames=tuple(sorted(frames)))
        return dict.fromkeys(frames, error)

    def drop_decoders(self) -> None:
        """Close decoders and demuxer; the next read opens new ones."""
        if self._demuxed is not None:
            self._demuxed.close()
        self._cut = self._demuxed = None
