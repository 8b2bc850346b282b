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

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from fluxon_gop.entry_points import probe_range
from fluxon_gop.model import Verdict, VideoIndex
from fluxon_gop.ranges import ByteRange, Int64Array, as_array, merge, split, total_bytes

REQUEST_OVERHEAD_SECONDS = 0.0005
"""What one more request in a wave costs beside its bytes: the latency itself is shared by the wave."""
BANDWIDTH = 64 * 1024 * 1024
"""Bytes a second of one connection."""
GAP_BYTES = int(REQUEST_OVERHEAD_SECONDS * BANDWIDTH)
"""A hole up to this size is cheaper to read through than a request more: 32 KiB."""
MAX_REQUEST_BYTES = 8 * 1024 * 1024
"""A larger range is split, so that its parts come side by side."""
CONTAINER_HEAD_BYTES = 64 * 1024
"""What FFmpeg's demuxer reads of a file's head to know it."""
PROBE_SAMPLES = 4
"""First samples that FFmpeg looks at while it opens a file."""
REORDER_SAMPLES = 16
"""How far behind its decode order a picture may be shown (H.264's and HEVC's largest buffer)."""


class Path(StrEnum):
    """The two ways to the same packets."""

    PACKET = "packet"
    CONTAINER = "container"


class Span(NamedTuple):
    """What is decoded in one go: samples ``entry`` to ``last``, of which ``targets`` are wanted."""

    entry: int
    last: int
    targets: tuple[int, ...]


@dataclass(frozen=True)
class VideoPlan:
    """What reading some frames of one video takes."""

    path: Path
    spans: tuple[Span, ...]
    ranges: tuple[ByteRange, ...]
    """To fetch, coalesced."""
    wanted_bytes: int
    """Bytes of the samples from each entry point to the last needed one."""
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


def plan_packets(index: VideoIndex, frames: Int64Array) -> VideoPlan:
    """Return the plan of ``frames`` (each below num_frames) on the packet path."""
    spans = _spans(index, frames)
    wanted = _span_ranges(index, spans)
    unchecked = _unchecked(index, spans)
    ranges = merge(np.concatenate((wanted, _first_probe(index, unchecked))))
    return VideoPlan(Path.PACKET, spans, _shape(ranges), total_bytes(wanted), unchecked=unchecked)


def _unchecked(index: VideoIndex, spans: tuple[Span, ...]) -> tuple[int, ...]:
    """Return the unproven claims that the spans rest on; the stream's start is always one of them."""
    claims = index.key_samples[index.verdicts == Verdict.UNCHECKED]
    entries = [span.entry for span in spans] + ([index.stream.start] if spans else [])
    return tuple(np.intersect1d(claims, entries).tolist())


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
        spans = _spans(index, frames)
        wanted = _span_ranges(index, spans)
        unchecked = _unchecked(index, spans)
    else:
        spans, wanted = (), np.zeros((0, 2), np.int64)
        if index.num_frames and len(frames):
            furthest = index.frame_sample[: int(frames.max()) + 1 + REORDER_SAMPLES].max()
            span = Span(index.stream.start, int(furthest), ())
            wanted = _span_ranges(index, (span,))
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
        _shape(ranges),
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
        size = total_bytes(_span_ranges(index, (span,)))
        if not groups or size > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(span)
        room -= size
    result = []
    for group in groups:
        wanted = _span_ranges(index, tuple(group))
        entries = {span.entry for span in group}
        unchecked = tuple(s for s in plan.unchecked if s in entries)
        result.append(
            VideoPlan(Path.PACKET, tuple(group), _shape(wanted), total_bytes(wanted), unchecked=unchecked)
        )
    return result


def sample_range(index: VideoIndex, sample: int) -> ByteRange:
    """Return the bytes of one sample."""
    start = int(index.sample_offset[sample])
    return ByteRange(start, start + int(index.sample_size[sample]))


def _spans(index: VideoIndex, frames: Int64Array) -> tuple[Span, ...]:
    """Return the spans that decode ``frames``, merged where one runs into the next."""
    if not len(frames):
        return ()
    targets = np.unique(index.frame_sample[frames])
    usable = (index.verdicts != Verdict.REFUSED) & (index.key_samples > index.stream.start)
    start = index.stream.start
    keys = np.concatenate(([start], index.key_samples[usable]))
    clean = np.concatenate(([True], np.isin(index.verdicts[usable], (Verdict.PROVEN, Verdict.DECODED))))
    at = np.searchsorted(keys, targets, side="right") - 1
    while True:
        # A leading frame is shown before its key: it needs the entry point before.
        leading = ~clean[at] & (index.sample_pts[targets] < index.sample_pts[keys[at]])
        if not leading.any():
            break
        at[leading] -= 1
    order = np.lexsort((targets, at))
    targets, at = targets[order], at[order]
    spans: list[Span] = []
    for number in np.unique(at):
        mine = targets[at == number]
        entry, last = int(keys[number]), int(mine[-1])
        if spans and entry <= spans[-1].last + 1:
            before = spans.pop()
            joined = tuple(sorted((*before.targets, *mine.tolist())))
            spans.append(Span(before.entry, max(before.last, last), joined))
        else:
            spans.append(Span(entry, last, tuple(mine.tolist())))
    return tuple(spans)


def _span_ranges(index: VideoIndex, spans: tuple[Span, ...]) -> Int64Array:
    """Return the bytes of all samples of the spans, touching ones joined."""
    if not spans:
        return np.zeros((0, 2), np.int64)
    pieces = []
    for span in spans:
        starts = index.sample_offset[span.entry : span.last + 1]
        stops = starts + index.sample_size[span.entry : span.last + 1]
        pieces.append(np.stack((starts, stops), axis=1))
    return merge(np.concatenate(pieces))


def _shape(ranges: Int64Array) -> tuple[ByteRange, ...]:
    """Return the requests that fetch these ranges: joined across small holes, large ones split."""
    return tuple(
        ByteRange(start, stop)
        for start, stop in split(merge(ranges, GAP_BYTES), MAX_REQUEST_BYTES).tolist()
    )
