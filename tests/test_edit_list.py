"""What an edit list shows, and when, is what FFmpeg shows: packet by packet, frame by frame."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from fluxon_gop import edit_list
from fluxon_gop.edit_list import complication
from fluxon_gop.model import VideoIndex
from fluxon_gop.mp4_boxes import Edit
from fluxon_gop.ranges import ByteRange
from tests import boxes
from tests.boxes import Media, box, demuxed, full_box, made, tiny_mp4, u32
from tests.witnesses import drive, ffmpeg_frame_pts, ffmpeg_packets

ONE = 1 << 16
NAMES = ["bframes", "allintra", "longgop", "opengop", "hevc"]
BIG = (1 << 63) - 1


@pytest.fixture(scope="session")
def samples(media) -> dict[str, Media]:
    """Return the real packets of five videos, 60 samples each."""
    return {name: demuxed(media[name]) for name in NAMES}


def assert_as_ffmpeg(data: bytes, path: Path) -> VideoIndex:
    """Assert that the index of ``data`` has FFmpeg's packets, discards and frames, and return it."""
    index = drive(data, check=True).index
    path.write_bytes(data)
    if index.container_reason is not None:
        return index
    frames = ffmpeg_frame_pts(path)
    assert index.num_frames == len(frames)
    if not frames:
        # Nothing is shown: the times of packets that nobody sees are FFmpeg's own affair.
        return index
    stream = slice(*index.stream)
    columns = (index.sample_pts, index.sample_dts, index.sample_offset, index.sample_size)
    packets = ffmpeg_packets(path)
    assert [packet[:4] for packet in packets] == list(
        zip(*(column[stream].tolist() for column in columns), strict=True)
    )
    discarded = [n + index.stream.start for n, packet in enumerate(packets) if packet.discard]
    assert discarded == index.hidden.tolist()
    assert index.frame_pts.tolist() == frames
    return index


# Edits by name


def _ticks(seconds: float, timescale: int = 12800) -> int:
    return round(seconds * timescale)


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("edits", "frames"),
    [
        ([(2400, 1024, ONE)], None),
        ([(2200, _ticks(0.2), ONE)], None),
        ([(1000, _ticks(0.2), ONE)], None),
        ([(500, -1, ONE), (2400, 1024, ONE)], None),
        ([(10_000, -1, ONE), (250, -1, ONE), (2000, _ticks(0.3), ONE)], None),
        ([(2400, _ticks(1.31), ONE)], None),
        ([(40, 1024, ONE)], None),
        ([(1, 1024, ONE)], None),
        ([(1, 20_000, ONE)], None),
        ([(2400, 500_000, ONE)], 0),
        ([(500, -1, ONE)], 0),
        ([(0, -1, ONE), (2400, 1024, ONE)], None),
    ],
    ids=[
        "whole",
        "head",
        "both",
        "delay",
        "delays",
        "mid GOP",
        "a frame",
        "a tick",
        "a late tick",
        "past",
        "no media",
        "no delay",
    ],
)
def test_an_edit_shows_what_ffmpeg_shows(samples, tmp_path, name, edits, frames, version):
    """A trimmed head or tail, a delay, a start within a GOP, and nothing at all are as in FFmpeg."""
    index = assert_as_ffmpeg(tiny_mp4(samples[name], edits=edits, elst_version=version), tmp_path / "o.mp4")
    assert frames is None or index.num_frames == frames


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shift", [512, 1024, 700])
def test_negative_composition_offsets_are_as_in_ffmpeg(samples, tmp_path, name, shift):
    """Ctts with negative offsets moves FFmpeg's decode times back, with an edit list and without."""
    media = samples[name]
    media = media.but(offsets=tuple(offset - shift for offset in media.offsets or [0] * 60))
    for version, edits in ((0, []), (1, []), (1, [(2400, 0, ONE)]), (1, [(2000, 3000, ONE)])):
        assert_as_ffmpeg(tiny_mp4(media, edits=edits, ctts_version=version), tmp_path / "o.mp4")


@pytest.mark.parametrize("timescale", [1, 600, 1000, 90_000, 1_000_000])
def test_durations_are_in_the_movies_timescale(samples, tmp_path, timescale):
    """Elst's media time counts media ticks, its duration movie ticks, whatever those are."""
    edits = [(timescale * 2, 6000, ONE)]
    assert_as_ffmpeg(
        tiny_mp4(samples["bframes"], edits=edits, movie_timescale=timescale), tmp_path / "o.mp4"
    )


def _random_media(generator: random.Random, samples: dict[str, Media]) -> Media:
    """Return real packets with times stretched, offsets moved down, keys forgotten."""
    media = samples[generator.choice(NAMES)]
    if generator.random() < 0.4:
        every, by = generator.choice([(3, 1), (2, 100), (4, 512), (1, 7), (5, 513)])

        def late(tick: int) -> int:
            return tick + tick // (512 * every) * by

        offsets = media.offsets or (0,) * len(media.dts)
        moved = [late(dts + offset) - late(dts) for dts, offset in zip(media.dts, offsets, strict=True)]
        media = media.but(dts=tuple(map(late, media.dts)), offsets=media.offsets and tuple(moved))
    if generator.random() < 0.3:
        down = generator.choice([512, 1024, 700])
        media = media.but(offsets=tuple(offset - down for offset in media.offsets or (0,) * len(media.dts)))
    if generator.random() < 0.3:
        lost = generator.choice(media.keys or (0,))
        media = media.but(
            keys=generator.choice([None, tuple(key for key in media.keys or () if key != lost)])
        )
    return media


def _random_edits(generator: random.Random, media: Media, timescale: int) -> list[tuple[int, int, int]]:
    total = media.dts[-1] + 512
    empty = [
        (generator.choice([0, 1, timescale // 2, 7 * timescale]), -1, ONE)
        for _ in range(generator.choice([0, 0, 0, 1, 2]))
    ]
    begin = generator.choice([0, 512, 1024, generator.randrange(total), generator.randrange(0, total, 512)])
    whole = total * timescale // media.timescale
    return [*empty, (max(1, generator.choice([whole, generator.randrange(whole + 1)])), begin, ONE)]


@pytest.mark.parametrize("seed", range(8))
def test_random_edits_show_what_ffmpeg_shows(samples, tmp_path, seed):
    """Seeded edits, timescales, stretched times, missing keys and moved offsets: all as in FFmpeg."""
    generator = random.Random(seed)
    exact = 0
    for _ in range(25):
        media = _random_media(generator, samples)
        timescale = generator.choice([1, 600, 1000, 12_800, 90_000])
        edits = _random_edits(generator, media, timescale)
        options = {"elst_version": generator.randrange(2), "ctts_version": generator.randrange(2)}
        data = tiny_mp4(media, edits=edits, movie_timescale=timescale, **options)
        exact += assert_as_ffmpeg(data, tmp_path / "o.mp4").container_reason is None
    assert exact >= 10


# What decides where FFmpeg starts


@pytest.mark.parametrize(
    "keys",
    [[], [13, 1], [1, 1, 13], [1, 13, 25, 20, 37], [0, 12, 24]],
    ids=["none", "falling", "twice", "stops", "from 0"],
)
@pytest.mark.parametrize("name", ["bframes", "allintra"])
def test_an_odd_stss_under_an_edit_starts_where_ffmpeg_starts(samples, tmp_path, name, keys):
    """An empty stss, one that stops rising or counts from 0 decides FFmpeg's first packet: ours is the same."""
    swap = {"stss": full_box(b"stss", 0, 0, u32(len(keys), *keys))}
    for begin in (1024, 9000, 15_000):
        assert_as_ffmpeg(tiny_mp4(samples[name], edits=[(1000, begin, ONE)], swap=swap), tmp_path / "o.mp4")


@pytest.mark.parametrize("seed", range(3))
def test_samples_decoded_at_once_start_where_ffmpeg_starts(samples, tmp_path, seed):
    """Where an edit begins on or behind a decode time that several samples share, the start is FFmpeg's."""
    generator = random.Random(seed)
    path = tmp_path / "o.mp4"
    for _ in range(30):
        at, many = generator.randrange(40), generator.randrange(2, 7)
        steps = [0 if at <= n < at + many - 1 else 512 for n in range(59)]
        offsets = generator.choice([None, [0] * 60, [generator.choice([0, 300, -300]) for _ in range(60)]])
        media = samples["allintra"].but(
            dts=tuple(np.cumsum([0, *steps]).tolist()),
            offsets=offsets and tuple(offsets),
            keys=tuple(sorted(generator.sample(range(60), generator.choice([8, 20, 50])))),
        )
        begin = media.dts[at] + generator.choice([0, 100])
        data = tiny_mp4(media, edits=[(1_000_000, begin, ONE)])
        path.write_bytes(data)
        index = drive(data).index
        assert int(index.sample_offset[index.stream.start]) == ffmpeg_packets(path)[0].pos


def test_an_empty_ctts_run_moves_no_decode_time(samples, tmp_path):
    """FFmpeg passes over ctts runs without samples when it looks for the decode shift."""
    pairs = [(0, -1024), (1, 0), (59, 512)]
    swap = {"ctts": full_box(b"ctts", 1, 0, u32(len(pairs)), *(u32(n) + boxes.i32(v) for n, v in pairs))}
    assert_as_ffmpeg(tiny_mp4(samples["allintra"], swap=swap), tmp_path / "o.mp4")


# What is not decided here


@pytest.mark.parametrize(
    ("edits", "reason"),
    [
        ([Edit(10, 0, ONE)], None),
        ([Edit(10, -1, ONE), Edit(10, 0, ONE)], None),
        ([Edit(10, -1, 0), Edit(10, 0, ONE)], None),
        ([Edit(10, 0, ONE), Edit(10, 9, ONE)], "2 real edits: several parts of the media are shown"),
        ([Edit(10, 0, ONE), Edit(10, -1, ONE)], "1 real edits: several parts of the media are shown"),
        ([Edit(10, 0, ONE // 2)], "an edit plays at a rate other than 1"),
        ([Edit(10, 0, 0)], "an edit plays at a rate other than 1"),
        ([Edit(0, 0, ONE)], "an edit has no duration or an absurd one"),
        ([Edit(-5, 0, ONE)], "an edit has a negative time or duration"),
        ([Edit(10, -2, ONE)], "an edit has a negative time or duration"),
        ([Edit(1 << 61, 1 << 61, ONE)], "an edit has no duration or an absurd one"),
        ([Edit(BIG, -1, ONE), Edit(10, 0, ONE)], "an edit has no duration or an absurd one"),
    ],
)
def test_what_goes_to_the_container_path_says_why(edits, reason):
    """Several parts, other rates, negative or absurd numbers are FFmpeg's demuxer's; the rest is ours."""
    assert complication(edits, timescale=12_800, movie_timescale=1000) == reason


@pytest.mark.parametrize(
    "edits",
    [
        [(BIG, -1, ONE), (1000, 0, ONE)],
        [(BIG, -1, ONE)] * 3,
        [(1 << 61, 5, ONE)],
        [(1 << 61, 0, ONE)],
        [(1 << 60, -1, ONE), (1 << 60, -1, ONE), (1 << 61, (1 << 61) - 1, ONE)],
        [((1 << 61) - 1, (1 << 61) - 1, ONE)],
    ],
)
@pytest.mark.parametrize("timescale", [1, 1000, (1 << 32) - 1])
def test_edits_beyond_64_bits_overflow_nothing(edits, timescale):
    """Durations near 2**63 give the container path, or times that 64 bits hold; never an overflow."""
    data = tiny_mp4(
        made().but(timescale=(1 << 32) - 1), edits=edits, elst_version=1, movie_timescale=timescale
    )
    index = drive(data, check=True).index
    pts = index.sample_pts.tolist()
    assert pts == sorted(pts)
    assert index.container_reason is not None or max(map(abs, pts)) < 1 << 62


def test_a_movie_without_a_timescale_has_no_edits_that_could_be_told():
    """An edit list in a movie of timescale 0 goes to the container path."""
    index = drive(tiny_mp4(edits=[(1000, 0, ONE)], movie_timescale=0)).index
    assert index.container_reason == "the movie has no timescale"
    assert drive(tiny_mp4(movie_timescale=0)).index.container_reason is None


def test_several_parts_go_to_the_container_path(samples, tmp_path):
    """Two real edits: FFmpeg's frames are not our samples in order, and the index says so."""
    data = tiny_mp4(samples["bframes"], edits=[(1000, 1024, ONE), (1000, 20_000, ONE)])
    index = assert_as_ffmpeg(data, tmp_path / "o.mp4")
    assert index.container_reason == "2 real edits: several parts of the media are shown"


def test_an_edit_box_without_a_list_changes_nothing():
    """Edts without elst, and elst without entries, show everything."""
    for empty in (box(b"edts"), box(b"edts", boxes.elst([]))):
        index = drive(tiny_mp4(swap={"edts": empty})).index
        assert (index.stream, index.container_reason, len(index.hidden)) == (ByteRange(0, 12), None, 0)


def test_whole_shows_everything():
    """Without edits every sample is shown at its composition time."""
    shown = edit_list.whole(7)
    assert (shown.stream, shown.hidden.tolist(), shown.shift) == (ByteRange(0, 7), [], 0)


def test_rounding_is_to_the_nearest_tick():
    """A duration of half a media tick rounds up, as av_rescale does: the frame at that tick is shown."""
    for movie_ticks, shown in ((0, 0), (1, 1), (2, 1), (3, 2), (4, 2), (5, 3)):
        edits = [Edit(movie_ticks, 0, ONE)]
        found = edit_list.apply(edits, np.arange(9), None, np.arange(9), timescale=1, movie_timescale=2)
        assert len(found.hidden) == found.stream.stop - shown, movie_ticks
