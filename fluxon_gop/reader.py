"""One video at one output size: exact frames by number.

A read is a job (see ``prefetch``): index if there is none, plan, one wave, decode. The reader runs one
job; the pool runs many side by side with the same code.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fluxon_gop import entry_points
from fluxon_gop.decode import Canvas, Stopwatch, UInt8Array, decode_span
from fluxon_gop.errors import (
    ClosedError,
    DecodeError,
    EncryptedVideoError,
    FluxonGopError,
    InvalidRequestError,
    Mp4Error,
    SourceChangedError,
    SourceError,
    UnsupportedMp4Error,
)
from fluxon_gop.index_table import Damaged, Hint, IndexTable, Row
from fluxon_gop.model import Orientation, Verdict, VideoIndex, beyond_the_end
from fluxon_gop.mp4_index import HEAD_BYTES, index_steps
from fluxon_gop.packets import CutPackets, DemuxedPackets, OrderMismatchError, display_matrix
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
from fluxon_gop.prefetch import Job, Wave, run_one
from fluxon_gop.ranges import ByteRange, Int64Array, as_array, as_ranges, merge, subtract
from fluxon_gop.requests import Indices, Uri, as_frames, check_positive, check_size
from fluxon_gop.sources import RangeSource, open_source
from fluxon_gop.sparse_buffer import SparseBuffer
from fluxon_gop.stats import ReadStats, WaveKind

MAX_BATCH_BYTES = 1 << 30
COUNT_ALL = 1 << 62
"""A frame number that no video has: counting runs to the end."""


@dataclass
class FrameSet:
    """The pictures of some frames: row i of ``array`` is ``frames[i]`` unless ``failures`` names it."""

    frames: Int64Array
    array: UInt8Array
    failures: dict[int, FluxonGopError]

    def rows(self, wanted: Int64Array) -> UInt8Array:
        """Return the rows of ``wanted``, in its order; raises the first failure among them."""
        for frame in wanted.tolist() if self.failures else ():
            if frame in self.failures:
                raise self.failures[frame]
        if np.array_equal(wanted, self.frames):
            return self.array
        return self.array[np.searchsorted(self.frames, wanted)]


class VideoReader:
    """Reads exact frames of one video. Serialises threads that use it at once; closes its source."""

    def __init__(  # noqa: PLR0913 - one keyword per documented choice
        self,
        uri: Uri,
        *,
        index: VideoIndex | IndexTable | None = None,
        height: int | None = None,
        width: int | None = None,
        num_threads: int = 1,
        apply_rotation: bool = True,
        stream_index: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        path: str | None = None,
        max_bytes: int = MAX_BATCH_BYTES,
    ) -> None:
        """Check the arguments; no IO. Use :meth:`open`, which also gets the index."""
        check_size(height, width)
        check_positive("num_threads", num_threads)
        if path not in {None, "packet", "container"}:
            text = f"path is {path!r}: want None, 'packet' or 'container'"
            raise InvalidRequestError(text)
        if index is not None and not isinstance(index, VideoIndex | IndexTable):
            text = f"index is a {type(index).__name__}: want a VideoIndex, an IndexTable, or None"
            raise TypeError(text)
        self._recipe = {
            "uri": uri,
            "index": index,
            "height": height,
            "width": width,
            "num_threads": int(num_threads),
            "apply_rotation": bool(apply_rotation),
            "stream_index": stream_index,
            "storage_options": storage_options,
            "path": path,
            "max_bytes": max_bytes,
        }
        self._source = open_source(uri, storage_options)
        self._size = None if height is None or width is None else (int(height), int(width))
        self._threads = int(num_threads)
        self._apply_rotation = bool(apply_rotation)
        self._stream_index = stream_index
        self._forced = None if path is None else Path(path)
        self._max_bytes = max_bytes
        self._row: Row = index if isinstance(index, VideoIndex) else None
        self._table = index if isinstance(index, IndexTable) else None
        self._index: VideoIndex | None = None
        self._index_is_built = False
        self._no_index: str | None = None
        self._counted_frames: int | None = None
        self._natural: tuple[tuple[int, int], Orientation] | None = None
        self._cut: CutPackets | None = None
        self._demuxed: DemuxedPackets | None = None
        self._stats = ReadStats()
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._closed = False

    @classmethod
    def open(  # noqa: PLR0913 - one keyword per documented choice
        cls,
        uri: Uri,
        *,
        index: VideoIndex | IndexTable | None = None,
        height: int | None = None,
        width: int | None = None,
        num_threads: int = 1,
        apply_rotation: bool = True,
        stream_index: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        path: str | None = None,
    ) -> VideoReader:
        """Return a reader with its index at hand.

        Costs nothing with a VideoIndex or a row in memory, one read of the table otherwise; without a row
        normally two requests, 64 KiB of head and the movie box.

        Args:
            uri: a path, ``file://``, ``http(s)://``, or a RangeSource.
            index: a VideoIndex, an IndexTable to look it up in, or None to build it.
            height: of the pictures after turning upright; give both or neither (the picture's own size).
            width: likewise.
            num_threads: of one decoder, 1 for none.
            apply_rotation: turn pictures as the file's display matrix says.
            stream_index: which stream of the file, None for FFmpeg's best video stream.
            storage_options: for the source.
            path: "container" or "packet" to force the way; None chooses.

        Raises:
            SourceError: the file cannot be read.
            EncryptedVideoError: its video is encrypted.
        """
        reader = cls(
            uri,
            index=index,
            height=height,
            width=width,
            num_threads=num_threads,
            apply_rotation=apply_rotation,
            stream_index=stream_index,
            storage_options=storage_options,
            path=path,
        )
        try:
            reader._run(reader._index_job)
        except BaseException:
            reader.close()
            raise
        return reader

    @property
    def index(self) -> VideoIndex | None:
        """The index; None where the file is no MP4 that has one."""
        return self._index

    @property
    def num_frames(self) -> int:
        """The number of frames that FFmpeg's full decode gives.

        Free on the packet path once the first sample is checked. Where the tables do not tell, the file
        is read and decoded through, once.
        """
        return self._run(self._count_job)

    def __len__(self) -> int:
        """Return ``num_frames``."""
        return self.num_frames

    def stats(self) -> ReadStats:
        """Return a copy of all this reader's counters."""
        copy = ReadStats()
        copy.add(self._stats)
        return copy

    def read_frames_numpy(self, indices: Indices) -> UInt8Array:
        """Return the frames as one uint8 array (len(indices), H, W, 3), RGB, owned by the caller.

        One wave of requests for all of them; each GOP is decoded once, up to its last wanted frame.

        Args:
            indices: frame numbers, any order, repeats allowed; [] gives (0, H, W, 3).

        Raises:
            FrameIndexError: a number is beyond the end.
            DecodeError: a picture cannot be decoded; names all such frames of this call.
            SourceError: bytes could not be read.
        """
        frames = as_frames(indices)
        result = self._run(lambda stats: self.read_job(np.unique(frames), stats))
        return result.rows(frames)

    def iter_frames(
        self, start: int = 0, stop: int | None = None, step: int = 1
    ) -> Iterator[tuple[int, UInt8Array]]:
        """Yield (frame number, uint8 (H, W, 3)) in rising order, in bounded memory.

        Bytes come in waves of up to 8 MiB, each after the frames of the one before; nothing is decoded
        twice. The reader must not be used for anything else meanwhile.
        """
        first = as_frames([start])[0]
        check_positive("step", step)
        last = self.num_frames if stop is None else min(int(as_frames([stop])[0]), self.num_frames)
        frames = np.arange(first, last, step, dtype=np.int64)
        with self._lock:
            self._check_open()
            stats = ReadStats()
            try:
                yield from self._iterate(frames, stats)
            finally:
                self._stats.add(stats)

    def close(self) -> None:
        """Close decoder and source; use after it raises ClosedError."""
        with self._lock:
            self._closed = True
            self._drop_ways()
            self._source.close()

    def __enter__(self) -> VideoReader:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what opens it again, the index included; decoder and bytes stay here."""
        recipe = dict(self._recipe)
        if self._index is not None and recipe["index"] is None:
            recipe["index"] = self._index
        return (_reopen, (recipe,))

    def __repr__(self) -> str:
        """Show the address and the index."""
        return f"VideoReader({self._source.name!r}, {self._index!r})"

    @property
    def source(self) -> RangeSource:
        """Where the bytes come from."""
        return self._source

    # ---------------------------------------------------------------- jobs

    def _run(self, make_job: Any) -> Any:
        """Run one job alone, under the lock, and count it."""
        with self._lock:
            self._check_open()
            stats = ReadStats()
            try:
                return run_one(make_job(stats), stats)
            finally:
                self._stats.add(stats)

    def _check_open(self) -> None:
        if self._closed:
            text = f"{self._source.name}: the reader is closed"
            raise ClosedError(text)
        if self._pid != os.getpid():
            self._cut = self._demuxed = None
            self._pid = os.getpid()

    @property
    def key(self) -> str:
        """The key of this video in an index table."""
        return self._source.name

    @property
    def wants_row(self) -> bool:
        """Whether a row of the table would be of use."""
        return self._table is not None and self._index is None and self._no_index is None and self._row is None

    def accept_row(self, row: Row, stats: ReadStats) -> None:
        """Take what the table holds of this video."""
        if isinstance(row, Damaged):
            stats.damaged_rows += 1
        self._row = row
        self._table = None if row is None or isinstance(row, Damaged) else self._table

    def _index_job(self, stats: ReadStats) -> Job[None]:
        """Get the index: the given one, the table's, or one built on the fly."""
        if self._index is not None or self._no_index is not None:
            return
        if self.wants_row:
            assert self._table is not None
            rows = look_up(self._table, [self.key], stats)
            self.accept_row(rows[0], stats)
        if self.use_row() is not None:
            return
        stats.stale_rows += isinstance(self._row, VideoIndex)
        yield from self._build_job(stats)

    def use_row(self) -> VideoIndex | None:
        """Return the index at hand, or the row's where it fits the file, without building one."""
        if self._index is None and isinstance(self._row, VideoIndex):
            try:
                self._source.pin(self._row.signature)
            except SourceChangedError:
                return None
            self._index = self._row
        return self._index

    def _build_job(self, stats: ReadStats) -> Job[None]:
        hint = self._row.moov_range if isinstance(self._row, Hint) else None
        stats.index_builds += 1
        held: dict[ByteRange, Any] = {}
        if hint is not None:
            try:
                (held[hint],) = yield Wave(WaveKind.HEAD_MOOV, self._source, (hint,))
            except SourceError:
                stats.stale_rows += 1
                hint = None
        if hint is None:
            (head,) = yield Wave(WaveKind.HEAD_MOOV, self._source, (ByteRange(0, HEAD_BYTES),), head=True)
            held[ByteRange(0, len(head))] = head
        steps = index_steps(self._source.signature, stream_index=self._stream_index, hint=hint)
        try:
            ranges = next(steps)
            while True:
                if len(ranges) == 1 and ranges[0] in held:
                    data = [held[ranges[0]]]
                else:
                    if ranges[0].start == 0 and hint is not None:
                        stats.stale_rows += 1
                    data = yield Wave(WaveKind.HEAD_MOOV, self._source, ranges)
                ranges = steps.send(data)
        except StopIteration as stop:
            self._index = stop.value
        except EncryptedVideoError:
            raise
        except Mp4Error as error:
            if isinstance(error, UnsupportedMp4Error) and self._stream_index is not None:
                raise
            self._no_index = error.message
        self._index_is_built = True

    def read_job(self, frames: Int64Array, stats: ReadStats) -> Job[FrameSet]:
        """Return the job that reads ``frames`` (sorted, unique)."""
        yield from self._index_job(stats)
        try:
            return (yield from self._planned_job(frames, stats))
        except SourceChangedError:
            if self._index_is_built:
                raise
            stats.stale_rows += 1
        self._forget_index()
        yield from self._build_job(stats)
        return (yield from self._planned_job(frames, stats))

    def _forget_index(self) -> None:
        """Drop a stale index, and the source that is pinned to its version."""
        self._drop_ways()
        self._row = self._index = None
        self._source.close()
        uri = self._recipe["uri"]
        if isinstance(uri, RangeSource):
            uri.close()
            text = f"{uri.name}: the file changed; open a new source of it"
            raise SourceChangedError(text, source=uri.name)
        self._source = open_source(uri, self._recipe["storage_options"])  # type: ignore[arg-type]

    def _planned_job(self, frames: Int64Array, stats: ReadStats) -> Job[FrameSet]:
        while True:
            try:
                if self._uses_packets():
                    result = yield from self._packet_job(frames, stats)
                    if result is not None:
                        return result
                return (yield from self._container_job(frames, stats))
            except OrderMismatchError:
                assert self._index is not None
                reason = "the order of pictures is not the one that the container's times say"
                self._index = replace(self._index, container_reason=reason)
                self._drop_ways()

    def _uses_packets(self) -> bool:
        index = self._index
        return index is not None and index.container_reason is None and self._forced is not Path.CONTAINER

    def plan(self, frames: Int64Array) -> VideoPlan:
        """Return the plan of ``frames`` by the index at hand; no IO."""
        if self._uses_packets():
            assert self._index is not None
            self._index.check_frames(frames)
            return plan_packets(self._index, frames)
        if self._index is None:
            reason = self._no_index or "no index yet"
            return VideoPlan(Path.CONTAINER, (), (), 0, reason=reason, counted=True)
        reason = self._index.container_reason or "asked for"
        if self._index.container_reason is None:
            self._index.check_frames(frames)
        return plan_container(self._index, frames, reason)

    def _packet_job(self, frames: Int64Array, stats: ReadStats) -> Job[FrameSet | None]:
        """Read on the packet path; None where a check shows that the index is not certain."""
        assert self._index is not None
        whole = self.plan(frames)
        canvas = self._canvas(len(frames), *self._index_picture(self._index))
        missing = dict(zip(self._index.frame_sample[frames].tolist(), range(len(frames)), strict=True))
        way = self._cut = self._cut or CutPackets(self._index, self._threads)
        for number, part in enumerate(parts(self._index, whole, self._max_bytes)):
            stats.wanted_bytes += part.wanted_bytes
            buffer = SparseBuffer(self._source, stats)
            fetched = yield Wave(WaveKind.MEDIA, self._source, part.ranges)
            _insert(buffer, part.ranges, fetched)
            plan: VideoPlan | None = part
            while plan is not None and plan.unchecked:
                plan = yield from self._check_job(plan, frames if number == 0 else None, buffer, stats)
            if plan is None:
                self._drop_ways()
                return None
            rank = self._index.sample_frame
            with Stopwatch(stats):
                for span in plan.spans:
                    for sample, frame in decode_span(way, span, buffer, stats, rank):
                        row = missing.pop(sample, None)
                        if row is not None:
                            canvas.paint(row, frame)
        stats.frames_requested += len(frames)
        failed = tuple(int(frames[row]) for row in missing.values())
        return FrameSet(frames, canvas.array, self._failures(failed))

    def _check_job(
        self, plan: VideoPlan, frames: Int64Array | None, buffer: SparseBuffer, stats: ReadStats
    ) -> Job[VideoPlan | None]:
        """Check claimed entry points on the fetched bytes; return the plan that holds after it."""
        del frames
        index = self._index
        assert index is not None
        samples = np.array(plan.unchecked, np.int64)
        heads = [buffer.view(*entry_points.probe_range(index, s)) for s in samples.tolist()]
        verdicts = entry_points.judge(index, samples, heads)
        for i in np.flatnonzero(verdicts == Verdict.UNCHECKED).tolist():
            data = buffer.view(*sample_range(index, int(samples[i])))
            verdicts[i : i + 1] = entry_points.judge(index, samples[i : i + 1], [data])
        index = self._index = index.with_verdicts(samples, verdicts)
        stats.refuted_entry_points += int((verdicts == Verdict.REFUSED).sum())
        if index.container_reason is not None:
            return None
        targets = [sample for span in plan.spans for sample in span.targets]
        if not targets:
            return replace(plan, unchecked=())
        again = plan_packets(index, np.sort(index.sample_frame[targets]))
        held = merge(as_array(buffer.segments))
        missing = as_ranges(subtract(merge(as_array(again.ranges)), held))
        if missing:
            fetched = yield Wave(WaveKind.EXTENSION, self._source, missing, adds=True)
            _insert(buffer, missing, fetched)
            stats.wanted_bytes += again.wanted_bytes - plan.wanted_bytes
        return again

    def _container_job(self, frames: Int64Array, stats: ReadStats) -> Job[FrameSet]:
        stats.container_reads += 1
        stats.frames_requested += len(frames)
        plan = self.plan(frames)
        way = self._demuxed_way()
        buffer = SparseBuffer(self._source, stats)
        stats.wanted_bytes += plan.wanted_bytes
        if plan.ranges and plan.nbytes <= self._max_bytes and not (way.counted and way.position):
            fetched = yield Wave(WaveKind.MEDIA, self._source, plan.ranges)
            _insert(buffer, plan.ranges, fetched)
        with Stopwatch(stats):
            if way.counted:
                return self._decode_counted(way, frames, buffer, stats)
            assert self._index is not None
            canvas = self._canvas(len(frames), *self._index_picture(self._index))
            samples = self._index.frame_sample[frames].tolist()
            missing = dict(zip(samples, range(len(frames)), strict=True))
            for span in plan.spans:
                for sample, frame in decode_span(way, span, buffer, stats, self._index.sample_frame):
                    canvas.paint(missing.pop(sample), frame)
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
        failures: dict[int, FluxonGopError] = {}
        if missing:
            damaged = stats.decode_errors > errors
            length = way.position
            way.rewind()
            if damaged:
                failures = self._failures(tuple(missing))
            else:
                self._counted_frames = length
                failures = {frame: beyond_the_end(frame, length) for frame in missing}
        if canvas is None:
            height, width = self._size or (0, 0)
            canvas = Canvas(len(frames), height, width, Orientation())
        return FrameSet(frames, canvas.array, failures)

    def _count_job(self, stats: ReadStats) -> Job[int]:
        """Return the number of frames."""
        yield from self._index_job(stats)
        index = self._index
        if index is not None and index.container_reason is None:
            first = np.flatnonzero(index.key_samples == index.stream.start)
            if len(first) and index.verdicts[first[0]] == Verdict.UNCHECKED:
                wanted = (entry_points.probe_range(index, index.stream.start),)
                fetched = yield Wave(WaveKind.HEAD_MOOV, self._source, wanted)
                buffer = SparseBuffer(self._source, stats)
                _insert(buffer, wanted, fetched)
                plan = VideoPlan(Path.PACKET, (), (), 0, unchecked=(index.stream.start,))
                yield from self._check_job(plan, None, buffer, stats)
                index = self._index
                assert index is not None
            if index.container_reason is None:
                return index.num_frames
        if self._counted_frames is None:
            way = self._demuxed_way()
            way.rewind()
            buffer = SparseBuffer(self._source, stats)
            with Stopwatch(stats):
                for _ in decode_span(way, Span(0, 0, (COUNT_ALL,)), buffer, stats, None):
                    pass
            self._counted_frames = way.position
            way.rewind()
        return self._counted_frames

    def _iterate(self, frames: Int64Array, stats: ReadStats) -> Iterator[tuple[int, UInt8Array]]:
        if not self._uses_packets():
            for frame in frames.tolist():
                one = np.array([frame], np.int64)
                yield frame, run_one(self.read_job(one, stats), stats).rows(one)[0]
            return
        index = self._index
        assert index is not None
        frame_of = dict(zip(index.frame_sample[frames].tolist(), frames.tolist(), strict=True))
        way = CutPackets(index, self._threads)
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
        for span in self._checked_plan(frames, stats).spans:
            for sample, frame in decode_span(way, span, buffer, stats, index.sample_frame):
                canvas = self._canvas(1, *self._index_picture(index))
                canvas.paint(0, frame)
                number = frame_of.pop(sample)
                yield number, canvas.array[0]
        if frame_of:
            failures = self._failures(tuple(frame_of.values()))
            raise next(iter(failures.values()))

    def _checked_plan(self, frames: Int64Array, stats: ReadStats) -> VideoPlan:
        """Return the plan of ``frames`` in which every entry point used is proven."""
        plan = self.plan(frames)
        while plan.unchecked:
            buffer = SparseBuffer(self._source, stats)
            checked = run_one(self._check_job(plan, None, buffer, stats), stats)
            if checked is None:
                return VideoPlan(Path.CONTAINER, (), (), 0)
            plan = checked
        return plan

    def _fetch_job(self, buffer: SparseBuffer, ranges: tuple[ByteRange, ...]) -> Job[None]:
        fetched = yield Wave(WaveKind.MEDIA, self._source, ranges)
        _insert(buffer, ranges, fetched)

    # ---------------------------------------------------------------- small things

    def _demuxed_way(self) -> DemuxedPackets:
        if self._demuxed is None:
            stream = self._stream_index
            if stream is None and self._index is not None and self._index.container_reason is None:
                stream = self._index.stream_index
            self._demuxed = DemuxedPackets(
                self._index, self._source.signature.size, stream, self._threads
            )
        return self._demuxed

    def _index_picture(self, index: VideoIndex) -> tuple[tuple[int, int], Orientation]:
        return (index.height, index.width), index.orientation

    def _canvas(self, count: int, natural: tuple[int, int], orientation: Orientation) -> Canvas:
        turn = orientation if self._apply_rotation else Orientation()
        height, width = self._size or (natural[::-1] if turn.transpose else natural)
        return Canvas(count, height, width, turn)

    def _failures(self, frames: tuple[int, ...]) -> dict[int, FluxonGopError]:
        if not frames:
            return {}
        shown = ", ".join(map(str, sorted(frames)[:8])) + (", ..." if len(frames) > 8 else "")
        name = self._source.name
        text = f"{name}: FFmpeg's decoder gives no picture for frame {shown} ({len(frames)} in this read)"
        error = DecodeError(text, source=name, frames=tuple(sorted(frames)))
        return dict.fromkeys(frames, error)

    def _drop_ways(self) -> None:
        if self._demuxed is not None:
            self._demuxed.close()
        self._cut = self._demuxed = None


def look_up(table: IndexTable, keys: list[Any], stats: ReadStats) -> list[Row]:
    """Return the rows of ``keys``; a read of the table counts as one wave."""
    held = table.held(keys)
    if held is not None:
        return held
    rows = table.lookup(keys)
    stats.count_wave(WaveKind.INDEX, 1, 0)
    stats.depth += 1
    return rows


def _insert(buffer: SparseBuffer, ranges: tuple[ByteRange, ...], fetched: list[Any]) -> None:
    for wanted, data in zip(ranges, fetched, strict=True):
        buffer.insert(wanted.start, data)


def _reopen(recipe: dict[str, Any]) -> VideoReader:
    return VideoReader(**recipe)
