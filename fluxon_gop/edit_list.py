"""Which samples an edit list shows and when, exactly as FFmpeg's demuxer decides it.

Pure. Covers what can be told from the tables: empty edits, then one real edit of rate 1. Source:
``mov_fix_index`` and ``find_prev_closest_index`` of libavformat/mov.c (FFmpeg 8).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fluxon_gop.mp4_boxes import Edit
from fluxon_gop.ranges import ByteRange, Int64Array

_INT64_MAX = (1 << 63) - 1
MAX_TICKS = 1 << 60
"""Media ticks that an edit list may span: sums of times stay within 64 bits."""


class Edited(NamedTuple):
    """The samples that FFmpeg demuxes, those of them that it does not show, and the shift of time."""

    stream: ByteRange
    hidden: Int64Array
    shift: int
    """Added to a sample's composition time it gives the demuxer's pts."""


def whole(samples: int) -> Edited:
    """Return what holds without an edit list: everything is shown at its composition time."""
    return Edited(ByteRange(0, samples), np.zeros(0, np.int64), 0)


def complication(edits: list[Edit], *, timescale: int, movie_timescale: int) -> str | None:
    """Return why these edits go to the container path, None where :func:`apply` knows them."""
    if not movie_timescale:
        return "the movie has no timescale"
    real = [edit for edit in edits if edit.media_time >= 0]
    leading = 0
    while leading < len(edits) and edits[leading].media_time == -1:
        leading += 1
    if any(edit.media_time < -1 or edit.duration < 0 for edit in edits):
        return "an edit has a negative time or duration"
    spans = sum(rescale(e.duration, timescale, movie_timescale) + max(e.media_time, 0) for e in edits)
    if spans >= MAX_TICKS or any(edit.duration == 0 for edit in real):
        return "an edit has no duration or an absurd one"
    if any(edit.rate != 1 << 16 for edit in real):
        return "an edit plays at a rate other than 1"
    if len(real) > 1 or leading + len(real) != len(edits):
        return f"{len(real)} real edits: several parts of the media are shown"
    return None


def apply(
    edits: list[Edit],
    dts: Int64Array,
    offsets: Int64Array | None,
    keys: Int64Array,
    *,
    timescale: int,
    movie_timescale: int,
) -> Edited:
    """Return what the one real edit shows of samples with decode times ``dts``.

    Args:
        edits: accepted by :func:`complication`, not empty.
        dts: ascending decode times in media ticks from 0.
        offsets: composition offsets, None without a ctts box.
        keys: the sync samples, sorted.
        timescale: media ticks a second.
        movie_timescale: movie ticks a second.
    """
    empty = sum(rescale(edit.duration, timescale, movie_timescale) for edit in edits if edit.media_time < 0)
    real = [edit for edit in edits if edit.media_time >= 0]
    count = len(dts)
    if not real:
        # Only empty edits: FFmpeg's index ends up without entries.
        return Edited(ByteRange(0, 0), np.zeros(0, np.int64), empty)
    begin = real[0].media_time
    end = begin + rescale(real[0].duration, timescale, movie_timescale)
    cts = dts if offsets is None else dts + offsets
    is_key = np.zeros(count, dtype=bool)
    is_key[keys] = True

    first = _closest_before(begin, dts, offsets, keys)
    duration = np.diff(dts, append=dts[-1] + end - begin)
    after = np.flatnonzero((cts + duration >= end) & is_key & (np.arange(count) >= first))
    # With composition offsets FFmpeg waits for one more key, for the leading frames of the first.
    wait = 0 if offsets is None else 1
    last = int(after[wait]) if len(after) > wait else count - 1

    stream = ByteRange(first, last + 1)
    shown = (cts[first : last + 1] >= begin) & (cts[first : last + 1] < end)
    hidden = np.flatnonzero(~shown) + first
    visible = np.flatnonzero(shown) + first
    if not len(visible):
        return Edited(stream, hidden, empty - begin)
    start = int(dts[visible[0]])
    return Edited(stream, hidden, empty - start - _correction(cts[visible] - start, empty))


def _closest_before(begin: int, dts: Int64Array, offsets: Int64Array | None, keys: Int64Array) -> int:
    """Return the sample from which FFmpeg demuxes: the last key at or before ``begin``, else 0."""
    at = _search(begin, dts)
    before = keys[keys <= at]
    if not len(before):
        # Without offsets FFmpeg then takes any sample, the first of those with one decode time.
        return int(np.searchsorted(dts, dts[at])) if offsets is None and at >= 0 else 0
    first = keys[np.searchsorted(dts[keys], dts[before[-1]])]
    if offsets is None:
        return int(first)
    shown = before[(before <= first) & ((dts + offsets)[before] <= begin)]
    return int(shown[-1]) if len(shown) else 0


def _search(wanted: int, dts: Int64Array) -> int:
    """Return the last sample with dts <= ``wanted``, -1 without; among equals the one that FFmpeg meets."""
    low, high = -1, len(dts)
    if dts[-1] < wanted:
        low = high - 1
    while high - low > 1:
        middle = (low + high) >> 1
        at = int(dts[middle])
        if at >= wanted:
            high = middle
        if at <= wanted:
            low = middle
    return low


def _correction(pts: Int64Array, empty: int) -> int:
    """Return by how much FFmpeg pulls the shown pictures forward so that the first is at ``empty``.

    ``pts`` counts from the first shown sample's decode time, in decode order. A negative value starts
    FFmpeg's minimum afresh.
    """
    negative = np.flatnonzero(pts + empty < 0)
    rest = pts[negative[-1] + 1 :] if len(negative) else pts
    return max(0, int(rest.min())) if len(rest) else 0


def rescale(ticks: int, to: int, source: int) -> int:
    """Return ``ticks`` in another timescale, rounded to nearest, halves up, capped as FFmpeg's."""
    return min((ticks * to + source // 2) // source, _INT64_MAX)
