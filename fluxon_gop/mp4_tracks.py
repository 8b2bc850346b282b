"""The tracks of a movie: which one FFmpeg calls the best video, and how it is placed in time and space.

Pure. Source: ISO/IEC 14496-12 clauses 8.2 to 8.4 and 8.6.6; the choice and the meaning of edits follow
libavformat/mov.c and ``av_find_best_stream``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fluxon_gop import sample_entries
from fluxon_gop.errors import UnsupportedMp4Error
from fluxon_gop.model import IDENTITY_MATRIX
from fluxon_gop.mp4_boxes import Box, child, children, need_child, sample_sizes


class Track(NamedTuple):
    """What choosing among the video tracks needs."""

    number: int
    trak: Box
    stbl: Box
    timescale: int
    entries: list[Box]
    enabled: bool
    samples: int
    bytes: int
    duration: int

    @property
    def rank(self) -> tuple[int, int, float, int]:
        """FFmpeg's order of preference: default flag, a few frames, bit rate, frames."""
        rate = self.bytes * self.timescale / self.duration if self.duration else 0.0
        return (self.enabled, min(self.samples, 5), rate, self.samples)


def movie_header(moov: Box) -> tuple[int, tuple[int, ...]]:
    """Return the movie's timescale and matrix. Clause 8.2.2."""
    box = need_child(moov, "mvhd")
    wide = box.unpack("B")[0] == 1
    (timescale,) = box.unpack("I", 20 if wide else 12)
    return timescale, box.unpack("9i", 48 if wide else 36)


def display_matrix(trak: Box, movie: tuple[int, ...]) -> tuple[int, ...]:
    """Return the track's matrix times the movie's, the display matrix. Clauses 8.3.2, 6.2.2."""
    box = child(trak, "tkhd")
    if box is None:
        return IDENTITY_MATRIX
    track = box.unpack("9i", 52 if box.unpack("B")[0] == 1 else 40)
    if movie == IDENTITY_MATRIX:
        return track
    shifts = (16, 16, 30)
    products = (
        sum((track[3 * i + e] * movie[3 * e + j]) >> shifts[e] for e in range(3))
        for i in range(3)
        for j in range(3)
    )
    # Kept in 32 bits, as FFmpeg keeps it.
    return tuple((product + (1 << 31)) % (1 << 32) - (1 << 31) for product in products)


def video_tracks(moov: Box, file_size: int) -> Iterator[Track]:
    """Yield the tracks with a video handler."""
    for number, trak in enumerate(children(moov, kind="trak")):
        mdia = child(trak, "mdia")
        handler = mdia and child(mdia, "hdlr")
        if mdia is None or handler is None or bytes(handler.body[8:12]) != b"vide":
            continue
        stbl = need_child(mdia, "minf", "stbl")
        entries = sample_entries.parse_entries(need_child(stbl, "stsd"))
        header = need_child(mdia, "mdhd")
        timescale, duration = (
            header.unpack("IQ", 20) if header.unpack("B")[0] == 1 else header.unpack("II", 12)
        )
        flags = child(trak, "tkhd")
        sizes = sample_sizes(stbl, file_size)
        yield Track(
            number,
            trak,
            stbl,
            timescale,
            entries,
            flags is not None and bool(flags.unpack("I")[0] & 1),
            len(sizes),
            int(sizes.sum()),
            duration,
        )


def choose(tracks: list[Track], stream_index: int | None) -> Track:
    """Return the asked track, or the one that FFmpeg calls best."""
    if not tracks:
        text = "the movie box has no video track"
        raise UnsupportedMp4Error(text)
    if stream_index is None:
        return max(tracks, key=lambda track: track.rank)
    for track in tracks:
        if track.number == stream_index:
            return track
    have = [track.number for track in tracks]
    text = f"stream {stream_index} is no video track: the file's video tracks are {have}"
    raise UnsupportedMp4Error(text, stream_index=stream_index)


def track_id(trak: Box) -> int:
    """Return the track's number from tkhd, 0 without one. Clause 8.3.2."""
    box = child(trak, "tkhd")
    if box is None:
        return 0
    return box.unpack("I", 20 if box.unpack("B")[0] == 1 else 12)[0]


def edits_are_applied(moov: Box, number: int) -> bool:
    """Return whether FFmpeg trims by edit lists: not once a track up to ``number`` has empty tables.

    Empty time and chunk tables are its sign of a fragmented file; all later tracks then only shift time.
    """
    for at, trak in enumerate(children(moov, kind="trak")):
        if at > number:
            break
        stbl = child(trak, "mdia", "minf", "stbl")
        if stbl is None:
            continue
        stts = child(stbl, "stts")
        chunks = child(stbl, "stco") or child(stbl, "co64")
        counts = [box.unpack("I", 4)[0] if box is not None else 0 for box in (stts, chunks)]
        if not any(counts):
            return False
    return True
