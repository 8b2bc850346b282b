"""Turn frame numbers into spans to decode and byte ranges to fetch.

Pure: no IO, no clock. O(samples of the spans), vectorised. Ranges are half-open absolute file bytes,
sorted and disjoint.

::

    samples   K . . . . K . . . . . K . . .      K: entry point
    targets         x         x   x
    spans     [-----]   [---------]              (entry, last needed sample, targets)
    ranges    [=====]   [=========]
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fluxon_gop.entry_points import probe_range
from fluxon_gop.model import Verdict, VideoIndex
from fluxon_gop.ranges import ByteRange, Int64Array, as_array, as_ranges, merge, split, total_bytes

REQUEST_OVERHEAD_SECONDS = 0.0005
"""What one more request in a wave costs beside its bytes: the latency itself is shared by the wave."""
BANDWIDTH = 64 * 1024 * 1024
"""Bytes a second of one connection."""
GAP_BYTES = int(REQUEST_OVERHEAD_SECONDS * BANDWIDTH)
"""A hole up to this size is cheaper to read through than a request more: 32 KiB."""
MAX_GAP_BYTES = 1024 * 1024
"""However costly a request is."""
MAX_REQUEST_BYTES = 8 * 1024 * 1024
"""A larger range is split, so that its parts come side by side."""
CONTAINER_HEAD_BYTES = 64 * 1024
"""What FFmpeg's demuxer reads of a file's head to know it."""
PROBE_SAMPLES = 4
"""First samples that FFmpeg looks at while it opens a file."""
MIN_PIECE_SAMPLES = 8
"""Samples below which handing a piece to another thread costs more than it saves."""
REORDER_SAMPLES = 16
"""How far behind its decode order a picture may be shown (H.264's and HEVC's largest buffer)."""


_NOTHING = np.zeros((0, 2), np.int64)


class Path(StrEnum):
    """The two ways to the same packets."""

    PACKET = "packet"
    CONTAINER = "container"


class Span(NamedTuple):
    """What is decoded in one go: samples ``entry`` to ``last``, of which ``targets`` are wanted."""

    entry: int
    last: int
    targets: tuple[int, ...]
    resume: int | None = None
    """The first sample to send where a decoder stands in the midst of the span; None for the entry."""

    @property
    def first(self) -> int:
        """The first sample to send."""
        return self.entry if self.resume is None else self.resume


@dataclass(frozen=True)
class VideoPlan:
    """What reading some frames of one video takes."""

    path: Path
    spans: tuple[Span, ...]
    ranges: tuple[ByteRange, ...]
    """To fetch, coalesced."""
    wanted_bytes: int
    """Bytes of the samples from each entry point, or from where a decoder goes on, to the last needed one."""
    reason: str | None = None
    """Why the container path."""
    counted: bool = False
    """Frames are counted from the start of the stream, not found by their time."""
    unchecked: tuple[int, ...] = field(default=())
    """Key samples whose claim is to be checked on the fetched bytes before decoding."""

    @property
    def nbytes(self) -> int:
        """Bytes to fetch."""
        return sum(r.size for r in self.ranges)

    @property
    def over_read(self) -> float:
        """Bytes to fetch per wanted byte; 1.0 is no waste."""
        return self.nbytes / self.wanted_bytes if self.wanted_bytes else 1.0


def gap_for(latency_seconds: float, bandwidth: float, at_once: int, requests: int) -> int:
    """Return up to how many bytes of a hole are cheaper to read through than a request more.

    A request more costs its own handling and, where more than ``at_once`` of them have to take turns, its share of
    a further round of latency; a hole costs its bytes at ``bandwidth`` (bytes a second).
    """
    turns = latency_seconds / at_once if requests > at_once else 0.0
    return max(GAP_BYTES, min(int((REQUEST_OVERHEAD_SECONDS + turns) * bandwidth), MAX_GAP_BYTES))


def coalesced(plan: VideoPlan, costs: tuple[float, float, int] | None) -> VideoPlan:
    """Return the plan with those holes read through that are worth it; ``costs`` as for ``gap_for``, None for local."""
    if costs is None or len(plan.ranges) < 2:
        return plan
    gap = gap_for(*costs, len(plan.ranges))
    joined = split(merge(as_array(plan.ranges), gap), MAX_REQUEST_BYTES)
    return replace(plan, ranges=as_ranges(joined))


def plan_packets(index: VideoIndex, frames: Int64Array) -> VideoPlan:
    """Return the plan of ``frames`` (each below num_frames) on the packet path."""
    spans = find_spans(index, frames)
    return plan_spans(index, spans, unchecked=open_claims(index, spans))


def plan_spans(index: VideoIndex, spans: tuple[Span, ...], unchecked: tuple[int, ...] = ()) -> VideoPlan:
    """Return the plan of these spans on the packet path, with these claims to check."""
    wanted = span_ranges(index, spans)
    ranges = merge(np.concatenate((wanted, _first_probe(index, unchecked)))) if unchecked else wanted
    return VideoPlan(Path.PACKET, spans, shape(ranges), total_bytes(wanted), unchecked=unchecked)


def open_claims(index: VideoIndex, spans: tuple[Span, ...]) -> tuple[int, ...]:
    """Return the unproven claims that the spans rest on; the stream's start is always one of them."""
    if index.all_checked:
        return ()
    entries = {span.entry for span in spans if span.resume is None} | (
        {index.stream.start} if spans else set()
    )
    return tuple(sample for sample in sorted(entries) if index.verdict_of(sample) is Verdict.UNCHECKED)


def _first_probe(index: VideoIndex, unchecked: tuple[int, ...]) -> Int64Array:
    """Return the range of the first sample's check where that is still to be made."""
    start = index.stream.start
    return as_array([probe_range(index, start)] if start in unchecked else [])


def plan_container(index: VideoIndex, frames: Int64Array, reason: str) -> VideoPlan:
    """Return the plan of ``frames`` on the container path: head, movie box, and the samples.

    Where the index tells what is shown, spans as on the packet path, found by time. Otherwise everything
    from the start of the stream up to where the last frame must have come, counted.
    """
    counted = index.container_reason is not None
    unchecked: tuple[int, ...] = ()
    if not counted:
        spans = find_spans(index, frames)
        wanted = span_ranges(index, spans)
        unchecked = open_claims(index, spans)
    else:
        spans, wanted = (), _NOTHING
        if index.num_frames and len(frames):
            furthest = index.frame_sample[: int(frames.max()) + 1 + REORDER_SAMPLES].max()
            span = Span(index.stream.start, int(furthest), ())
            wanted = span_ranges(index, (span,))
    size = index.signature.size
    extra = [ByteRange(0, min(CONTAINER_HEAD_BYTES, size)), index.moov_range]
    # Opening, FFmpeg reads the first packets to learn the stream's properties.
    first = range(index.stream.start, min(index.stream.stop, index.stream.start + PROBE_SAMPLES))
    extra.extend(sample_range(index, sample) for sample in first)
    probe = _first_probe(index, unchecked)
    ranges = np.clip(merge(np.concatenate((wanted, as_array(extra), probe))), 0, size)
    return VideoPlan(
        Path.CONTAINER,
        spans,
        shape(ranges),
        total_bytes(wanted),
        reason=reason,
        counted=counted,
        unchecked=unchecked,
    )


def parts(index: VideoIndex, plan: VideoPlan, max_bytes: int) -> list[VideoPlan]:
    """Return the plan cut between its spans into plans of at most ``max_bytes`` each, where it can be."""
    if plan.nbytes <= max_bytes or plan.path is Path.CONTAINER or len(plan.spans) < 2:
        return [plan]
    groups: list[list[Span]] = []
    room = 0
    for span in plan.spans:
        size = total_bytes(span_ranges(index, (span,)))
        if not groups or size > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(span)
        room -= size
    first = {index.stream.start} & set(plan.unchecked)
    result = []
    for group in groups:
        claims = {span.entry for span in group} & set(plan.unchecked)
        result.append(plan_spans(index, tuple(group), tuple(sorted(claims | first))))
        first = set()
    return result


def chunks(index: VideoIndex, span: Span, max_bytes: int) -> list[ByteRange]:
    """Return the span's samples in runs ``[first, stop)`` of at most ``max_bytes`` each, or one sample."""
    ends = np.cumsum(index.sample_size[span.first : span.last + 1])
    runs, at = [], 0
    while at < len(ends):
        before = int(ends[at - 1]) if at else 0
        stop = max(int(np.searchsorted(ends, before + max_bytes, side="right")), at + 1)
        runs.append(ByteRange(span.first + at, span.first + stop))
        at = stop
    return runs


def divide(index: VideoIndex, spans: tuple[Span, ...], pieces: int) -> list[Span]:
    """Return the spans, the longest ones cut at clean entry points, so that about ``pieces`` can decode at once.

    Nothing is decoded twice for it. Pieces are no shorter than ``MIN_PIECE_SAMPLES``.
    """
    total = sum(span.last + 1 - span.first for span in spans)
    size = max(-(-total // pieces), MIN_PIECE_SAMPLES)
    result: list[Span] = []
    starts, clean = index.starts
    for span in spans:
        rest = span
        for cut in starts[clean][
            slice(*np.searchsorted(starts[clean], (span.first + 1, span.last + 1)))
        ].tolist():
            if cut - rest.first < size or span.last + 1 - cut < MIN_PIECE_SAMPLES:
                continue
            left = tuple(target for target in rest.targets if target < cut)
            right = tuple(target for target in rest.targets if target >= cut)
            if left and right:
                result.append(Span(rest.entry, left[-1], left, rest.resume))
                rest = Span(cut, span.last, right)
        result.append(rest)
    return result


def sample_range(index: VideoIndex, sample: int) -> ByteRange:
    """Return the bytes of one sample."""
    start = int(index.sample_offset[sample])
    return ByteRange(start, start + int(index.sample_size[sample]))


def find_spans(index: VideoIndex, frames: Int64Array) -> tuple[Span, ...]:
    """Return the spans that decode ``frames``, merged where one runs into the next."""
    if not len(frames):
        return ()
    targets = index.frame_sample[frames]
    starts, clean = index.starts
    if len(targets) == 1:
        return (_span_of_one(index, int(targets[0])),)
    targets.sort()
    at = starts.searchsorted(targets, side="right") - 1
    if index.all_clean and at[0] == at[-1]:
        # A window inside one GOP: what most reads ask for.
        return (Span(int(starts[at[0]]), int(targets[-1]), tuple(targets.tolist())),)
    while not index.all_clean:
        # A leading frame is shown before its key: it needs the entry point before.
        leading = ~clean[at] & (index.sample_pts[targets] < index.sample_pts[starts[at]])
        if not leading.any():
            break
        at[leading] -= 1
    if np.any(at[1:] < at[:-1]):
        order = np.lexsort((targets, at))
        targets, at = targets[order], at[order]
    edges = [0, *(np.flatnonzero(at[1:] != at[:-1]) + 1).tolist(), len(targets)]
    entries, wanted = starts[at[edges[:-1]]].tolist(), targets.tolist()
    spans: list[Span] = []
    for entry, (begin, end) in zip(entries, pairwise(edges), strict=True):
        if spans and entry <= spans[-1].last + 1:
            before = spans.pop()
            joined = tuple(sorted((*before.targets, *wanted[begin:end])))
            spans.append(Span(before.entry, joined[-1], joined))
        else:
            spans.append(Span(entry, wanted[end - 1], tuple(wanted[begin:end])))
    return tuple(spans)


def _span_of_one(index: VideoIndex, target: int) -> Span:
    """Return the span of a single target: what cold reads mostly ask for, without arrays."""
    starts, clean = index.starts
    at = int(starts.searchsorted(target, side="right")) - 1
    pts = index.sample_pts
    while not clean[at] and pts[target] < pts[starts[at]]:
        at -= 1
    return Span(int(starts[at]), target, (target,))


def span_ranges(index: VideoIndex, spans: tuple[Span, ...]) -> Int64Array:
    """Return the bytes of all samples that the spans send, touching ones joined."""
    if len(spans) == 1:
        return run_ranges(index, spans[0].first, spans[0].last + 1)
    return merge(
        np.concatenate([run_ranges(index, span.first, span.last + 1) for span in spans] or [_NOTHING])
    )


def run_ranges(index: VideoIndex, first: int, stop: int) -> Int64Array:
    """Return the bytes of samples ``[first, stop)``, touching ones joined."""
    starts = index.sample_offset[first:stop]
    stops = starts + index.sample_size[first:stop]
    # Most often nothing lies between them.
    if len(starts) and (len(starts) == 1 or (starts[1:] == stops[:-1]).all()) and stops[-1] > starts[0]:
        return np.array(((starts[0], stops[-1]),))
    return merge(np.stack((starts, stops), axis=1))


def shape(ranges: Int64Array) -> tuple[ByteRange, ...]:
    """Return the requests that fetch these ranges: joined across small holes, large ones split."""
    if len(ranges) == 1 and ranges[0, 1] - ranges[0, 0] <= MAX_REQUEST_BYTES:
        return (ByteRange(int(ranges[0, 0]), int(ranges[0, 1])),)
    return tuple(
        ByteRange(start, stop)
        for start, stop in split(merge(ranges, GAP_BYTES), MAX_REQUEST_BYTES).tolist()
    )
