"""All samples of a track on FFmpeg's time axis: the movie box's tables, the edit list, the fragments.

Pure. Joins ``sample_tables``, ``edit_list`` and ``mp4_fragments``; what makes the result uncertain is named.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fluxon_gop import edit_list
from fluxon_gop.mp4_boxes import Box, Edit, edits
from fluxon_gop.mp4_fragments import Fragments, read_fragments
from fluxon_gop.mp4_tracks import Track, edits_are_applied, track_id
from fluxon_gop.ranges import ByteRange, Int64Array
from fluxon_gop.sample_tables import SampleTables

MAX_SAMPLE_BYTES = 1 << 30
"""FFmpeg's own bound."""


class TrackSamples(NamedTuple):
    """What an index holds of each sample."""

    offset: Int64Array
    size: Int64Array
    pts: Int64Array
    dts: Int64Array
    entry: npt.NDArray[np.uint8]
    keys: Int64Array
    hidden: Int64Array
    stream: ByteRange
    last_duration: int
    trouble: str | None

    def reason(self, file_size: int) -> str | None:
        """Return why what FFmpeg shows of these samples is not certain, None where it is."""
        if self.trouble is not None:
            return self.trouble
        if not len(self.size):
            return "the track has no samples"
        if int(self.size.min()) == 0:
            return "a sample has no bytes"
        if int(self.size.max()) >= MAX_SAMPLE_BYTES:
            return f"a sample of {int(self.size.max())} bytes"
        if int(self.offset.min()) < 0:
            return f"a sample lies at byte {int(self.offset.min())}"
        end = int((self.offset + self.size).max())
        if end > file_size:
            return f"the file is cut: samples reach to byte {end}, the file ends at {file_size}"
        steps = np.abs(np.append(np.diff(self.dts), self.pts - self.dts))
        if int(steps.max()) >= 1 << 31:
            # Rows of a table keep both in 32 bits.
            return f"a sample waits or lasts {int(steps.max())} ticks"
        shown = np.ones(len(self.pts), bool)
        shown[self.hidden] = False
        shown[: self.stream.start] = shown[self.stream.stop :] = False
        pts = np.sort(self.pts[shown])
        if bool(np.any(pts[1:] == pts[:-1])):
            return "two samples have one presentation time"
        return None


def read_samples(
    moov: Box, track: Track, moofs: list[Box], movie_timescale: int, file_size: int
) -> TrackSamples:
    """Return the samples of a track.

    Args:
        moov: the movie box.
        track: one of its tracks.
        moofs: the file's fragments, in order; [] where it has none.
        movie_timescale: ticks a second of the edit list's durations.
        file_size: bounds what the tables may claim.
    """
    tables = SampleTables.read(track.stbl, file_size)
    count = len(tables.size)
    listed = edits(track.trak)
    offset = _time_offset(listed, track.timescale, movie_timescale)
    trouble = tables.trouble
    if abs(offset) >= edit_list.MAX_TICKS:
        trouble, offset = trouble or "an edit has no duration or an absurd one", 0
    shown = edit_list.whole(count)._replace(shift=-offset)
    if listed and count and edits_are_applied(moov, track.number):
        trouble = trouble or edit_list.complication(
            listed, timescale=track.timescale, movie_timescale=movie_timescale
        )
        if trouble is None:
            shown = edit_list.apply(
                listed,
                tables.dts,
                tables.composition,
                tables.keys,
                timescale=track.timescale,
                movie_timescale=movie_timescale,
            )
    dts = tables.dts + shown.shift - tables.decode_shift
    plain = TrackSamples(
        tables.offset,
        tables.size,
        tables.pts + shown.shift,
        dts,
        tables.entry,
        tables.keys,
        shown.hidden,
        shown.stream,
        tables.last_duration,
        trouble,
    )
    if not moofs:
        return plain
    added = read_fragments(
        moofs,
        moov,
        track_id(track.trak),
        file_size=file_size,
        time_offset=offset,
        track_end=int(tables.dts[-1]) + tables.last_duration if count else 0,
        last_dts=int(dts[-1]) if count else None,
        shift=tables.decode_shift,
    )
    return _join(plain, added, tables.decode_shift)


def _join(plain: TrackSamples, added: Fragments, decode_shift: int) -> TrackSamples:
    """Return the movie box's samples with the fragments' behind them."""
    count, more = len(plain.size), len(added.size)
    trouble = plain.trouble or added.trouble
    if count and plain.stream.stop != count:
        trouble = trouble or "an edit ends before the fragments begin"
    if count and added.shift != decode_shift:
        trouble = trouble or "a fragment has a larger negative composition offset than the movie box"
    entry = np.concatenate(
        (np.repeat(plain.entry, count) if len(plain.entry) == 1 else plain.entry, added.entry)
    )
    uniform = bool(len(entry)) and bool((entry == entry[0]).all())
    return TrackSamples(
        np.concatenate((plain.offset, added.offset)),
        np.concatenate((plain.size, added.size)),
        np.concatenate((plain.pts, added.dts + added.shift + added.composition)),
        np.concatenate((plain.dts, added.dts)),
        np.clip(entry[:1] if uniform else entry, 0, 255).astype(np.uint8),
        np.concatenate((plain.keys, np.flatnonzero(added.key) + count)),
        np.concatenate((plain.hidden, np.flatnonzero(added.hidden) + count)),
        ByteRange(plain.stream.start, count + more),
        int(added.duration[-1]) if more else plain.last_duration,
        trouble,
    )


def _time_offset(listed: list[Edit], timescale: int, movie_timescale: int) -> int:
    """Return what FFmpeg takes off decode times where it does not trim: the start less the empty edit."""
    if not listed or not movie_timescale:
        return 0
    empty, real = 0, listed
    if listed[0].media_time == -1:
        empty, real = edit_list.rescale(listed[0].duration, timescale, movie_timescale), listed[1:]
    start = real[0].media_time if real and real[0].media_time >= 0 else 0
    return start - empty
