"""The samples that a movie's fragments add to a track.

Pure. Source: ISO/IEC 14496-12 clause 8.8; what is shown and when follows ``mov_read_tfhd`` and
``mov_read_trun`` of libavformat/mov.c (FFmpeg 8).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fluxon_gop.errors import UnsupportedMp4Error
from fluxon_gop.model import MAX_SAMPLES
from fluxon_gop.mp4_boxes import MAX_UNBACKED, Box, child, children
from fluxon_gop.ranges import Int64Array


class Fragments(NamedTuple):
    """The samples that the moofs add to one track, in FFmpeg's order."""

    offset: Int64Array
    size: Int64Array
    dts: Int64Array
    """Decode times of the track, FFmpeg's time offset taken off."""
    composition: Int64Array
    duration: Int64Array
    key: npt.NDArray[np.bool_]
    hidden: npt.NDArray[np.bool_]
    """Overlapped by the fragment before: decoded and dropped."""
    entry: Int64Array
    shift: int
    """The largest negative composition offset of the first fragment."""
    trouble: str | None


class _Defaults(NamedTuple):
    entry: int
    duration: int
    size: int
    flags: int


def read_fragments(
    moofs: list[Box],
    moov: Box,
    track_id: int,
    *,
    file_size: int,
    time_offset: int,
    track_end: int,
    last_dts: int | None,
    shift: int,
) -> Fragments:
    """Return the samples of ``track_id`` in all moofs. O(samples), vectorised within a run.

    Args:
        moofs: in file order.
        moov: for the trex defaults.
        track_id: of tkhd.
        file_size: bounds a run whose samples have one size and no table.
        time_offset: what FFmpeg takes off every decode time (the edit list's start less its empty edits).
        track_end: where the movie box's own samples end.
        last_dts: decode time of the movie box's last sample as FFmpeg indexes it, None without one.
        shift: largest negative composition offset of the movie box's samples.
    """
    trex = _trex(moov, track_id)
    runs: list[tuple[Any, ...]] = []
    trouble = None if trex is not None else "a fragmented track without trex defaults"
    end, total, unbacked = track_end, 0, 0
    first_shift: int | None = None
    for moof in moofs if trex is not None else ():
        assert trex is not None
        next_dts: int | None = None
        moof_start = moof.offset - moof.start
        implicit = moof_start
        for traf in children(moof):
            if traf.kind != "traf":
                continue
            tfdt: int | None = None
            header: tuple[int, int, _Defaults] | None = None
            with_offset = first_run = True
            for box in children(traf):
                if box.kind == "tfhd":
                    header = _tfhd(box, trex, moof_start, implicit)
                elif box.kind == "tfdt":
                    tfdt = box.unpack("Q" if box.unpack("B")[0] else "I", 4)[0]
                    if tfdt >= 1 << 62:
                        text = f"decode time {tfdt} is beyond any clock"
                        raise box.error(text)
                elif box.kind == "trun":
                    if header is None:
                        text = "a run of samples (trun) stands before the fragment's header (tfhd)"
                        raise box.error(text)
                    number, base, defaults = header
                    run = _trun(box, defaults, file_size)
                    with_offset = run.data_offset is not None
                    if number == track_id and not (with_offset or first_run):
                        trouble = trouble or "a run of samples without an offset of its own"
                    begin = base + (run.data_offset or 0)
                    implicit = begin + run.nbytes
                    first_run = False
                    if number != track_id or not run.samples:
                        continue
                    unbacked += 0 if run.table is not None else run.samples
                    if unbacked > MAX_UNBACKED:
                        text = f"{unbacked} samples without a row; this parser indexes up to {MAX_UNBACKED}"
                        raise UnsupportedMp4Error(text, count=unbacked)
                    duration, sizes, sample_flags, composition = run.columns()
                    ends = np.cumsum(sizes)
                    if next_dts is None:
                        next_dts = tfdt if tfdt is not None else end
                        if tfdt is None:
                            trouble = trouble or _no_tfdt(moofs, moof)
                    total += run.samples
                    if total > MAX_SAMPLES:
                        text = f"{total} samples; this parser indexes up to {MAX_SAMPLES}"
                        raise UnsupportedMp4Error(text, count=total)
                    dts = next_dts - time_offset + np.cumsum(duration) - duration
                    hidden = np.zeros(len(dts), bool) if last_dts is None else dts <= last_dts
                    runs.append(
                        (
                            begin + ends - sizes,
                            sizes,
                            dts,
                            composition,
                            duration,
                            (sample_flags & (NON_SYNC | DEPENDS_YES)) == 0,
                            hidden,
                            np.full(len(dts), defaults.entry - 1, np.int64),
                        )
                    )
                    next_dts += int(duration.sum())
                    end, last_dts = next_dts, int(dts[-1])
                    low = max(0, -int(composition.min()))
                    if first_shift is None:
                        first_shift = shift = max(shift, low)
                    elif low > shift:
                        trouble = trouble or "a later fragment has a larger negative composition offset"
    if not runs:
        none = np.zeros(0, np.int64)
        return Fragments(
            none, none, none, none, none, none.astype(bool), none.astype(bool), none, shift, trouble
        )
    columns = [np.concatenate(column) for column in zip(*runs, strict=True)]
    offset, size, dts, composition, duration, key, hidden, entry = columns
    return Fragments(offset, size, dts, composition, duration, key, hidden, entry, shift, trouble)


NON_SYNC = 0x00010000
DEPENDS_YES = 0x01000000
"""Sample flags that make FFmpeg call a sample no key: sample_is_non_sync, sample_depends_on 1."""


def _no_tfdt(moofs: list[Box], moof: Box) -> str | None:
    return None if moof is moofs[0] else "a later fragment without a decode time (tfdt)"


def _trex(moov: Box, track_id: int) -> _Defaults | None:
    """Return the track's defaults. Clause 8.8.3."""
    mvex = child(moov, "mvex")
    for box in children(mvex) if mvex is not None else ():
        if box.kind == "trex" and box.unpack("I", 4)[0] == track_id:
            return _Defaults(*box.unpack("IIII", 8))
    return None


def _tfhd(box: Box, trex: _Defaults, moof_start: int, implicit: int) -> tuple[int, int, _Defaults]:
    """Return (track, base of data offsets, defaults). Clause 8.8.7."""
    flags, track = box.unpack("II")
    at = 8
    base = moof_start if flags & 0x020000 else implicit
    if flags & 0x01:
        (base,) = box.unpack("Q", at)
        at += 8
    fields = list(trex)
    for place, bit in enumerate((0x02, 0x08, 0x10, 0x20)):
        if flags & bit:
            (fields[place],) = box.unpack("I", at)
            at += 4
    if base >= 1 << 62:
        text = f"base data offset {base} is beyond any file"
        raise box.error(text)
    return track, base, _Defaults(*fields)


class _Run(NamedTuple):
    """One run of samples, not expanded: runs of other tracks only move the place of the next."""

    data_offset: int | None
    samples: int
    first_flags: int | None
    present: tuple[bool, ...]
    """Whether the rows have duration, size, flags, composition."""
    table: npt.NDArray[np.uint32] | None
    defaults: _Defaults

    @property
    def nbytes(self) -> int:
        """The sum of the sizes."""
        if self.present[1] and self.table is not None:
            return int(self.table[:, int(self.present[0])].sum(dtype=np.int64))
        return self.samples * self.defaults.size

    def columns(self) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
        """Return duration, size, flags and composition of each sample, defaults filled in."""
        found: list[Int64Array] = []
        column = 0
        defaults = (self.defaults.duration, self.defaults.size, self.defaults.flags, 0)
        for here, default in zip(self.present, defaults, strict=True):
            if here and self.table is not None:
                found.append(self.table[:, column].astype(np.int64))
                column += 1
            else:
                found.append(np.full(self.samples, default, np.int64))
        duration, size, flags, composition = found
        if self.first_flags is not None and self.samples:
            flags[0] = self.first_flags
        # Both versions signed, as FFmpeg reads them.
        return duration, size, flags, np.where(composition >= 1 << 31, composition - (1 << 32), composition)


def _trun(box: Box, defaults: _Defaults, file_size: int) -> _Run:
    """Return one run of samples. Clause 8.8.8."""
    flags, count = box.unpack("II")
    at, data_offset, first_flags = 8, None, None
    if flags & 0x01:
        (data_offset,) = box.unpack("i", at)
        at += 4
    if flags & 0x04:
        (first_flags,) = box.unpack("I", at)
        at += 4
    present = [bool(flags & bit) for bit in (0x100, 0x200, 0x400, 0x800)]
    width = 4 * sum(present)
    rows = box.body[at:]
    if count * width > len(rows):
        text = f"says {count} samples of {width} bytes, the box holds {len(rows)} bytes of them"
        raise box.error(text)
    if not present[1] and count * max(defaults.size, 1) > file_size:
        text = f"says {count} samples of {defaults.size} bytes, the file has {file_size} bytes"
        raise box.error(text)
    if count > MAX_SAMPLES:
        text = f"{box.path} at byte {box.offset}: {count} samples; this parser indexes up to {MAX_SAMPLES}"
        raise UnsupportedMp4Error(text, count=count)
    table = np.frombuffer(rows[: count * width], ">u4").reshape(count, -1) if width and count else None
    return _Run(data_offset, count, first_flags, tuple(present), table, defaults)
