"""The parser finds the movie box for the promised price, and its arrays are FFmpeg's packets."""

from __future__ import annotations

from pathlib import Path

import pytest

from fluxon_gop import entry_points
from fluxon_gop.errors import (
    UnsupportedMp4Error,
)
from fluxon_gop.model import Colour, Orientation, Signature, Verdict, VideoIndex
from fluxon_gop.mp4_index import HEAD_BYTES, TAIL_BYTES
from fluxon_gop.ranges import ByteRange
from tests import boxes
from tests.boxes import (
    FTYP,
    MADE,
    Media,
    box,
    demuxed,
    made,
    nclx,
    tiny_mp4,
    trak,
    u16,
    u32,
)
from tests.media import RECIPES
from tests.test_model import assert_same
from tests.witnesses import Driven, drive, ffmpeg_frame_pts, ffmpeg_packets, starve

LAYOUTS = [
    "ftyp moov mdat",
    "ftyp mdat moov",
    "moov mdat",
    "ftyp free mdat moov skip",
    "ftyp wide mdat64 moov uuid",
    "ftyp uuid moov64 free mdat mdat",
    "ftyp mdat moov mdat free mdat64",
    "skip wide free uuid ftyp moov mdat0",
    "ftyp mdat moov0",
]


def unsigned(index: VideoIndex) -> VideoIndex:
    """Return the index as of a file of any size."""
    object.__setattr__(index, "signature", Signature(0))
    return index


# Three ways


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_whole_starved_and_with_a_tail(layout, monkeypatch):
    """Boxes in any order, with any kind of size: the same index from one head, from crumbs, and with more behind."""
    data = tiny_mp4(layout=layout)
    index = drive(data, check=True).index
    assert [data[o : o + s] for o, s in zip(index.sample_offset, index.sample_size, strict=True)] == list(
        MADE.packets
    )
    assert index.container_reason is None
    assert data[index.moov_range.start + 4 :][:4] == b"moov"
    assert index.moov_range.size == (
        len(data) - index.moov_range.start if "moov0" in layout else index.moov_range.size
    )
    if not layout.endswith("0"):
        assert_same(unsigned(drive(data + b"trailing bytes", check=True).index), unsigned(index))
        assert_same(unsigned(drive(data + box(b"free", bytes(70)), check=True).index), unsigned(index))
    for head, tail in ((1, 16), (16, 16), (17, 40), (600, 16)):
        starve(monkeypatch, head, tail)
        starved = drive(data, check=True)
        assert_same(unsigned(starved.index), unsigned(index))
        assert len(starved.waves) >= 3


@pytest.mark.parametrize(
    "options",
    [
        {"wide": True},
        {"compact": 4},
        {"compact": 8},
        {"compact": 16},
        {"per_chunk": 1},
        {"per_chunk": 12},
        {"per_chunk": [1, 1, 3, 2]},
        {"version": 1},
        {"swap": {"stss": None}},
        {"mvex": True},
        {"other_traks": (trak(swap={"hdlr": boxes.hdlr(b"soun")}), b"")},
        {"other_traks": (b"", box(b"udta", box(b"meta", u32(0))))},
    ],
    ids=str,
)
def test_every_form_of_a_table_says_the_same(options):
    """co64, stz2, runs of chunks, 64-bit headers: the samples are where they were put."""
    data = tiny_mp4(layout="ftyp free moov mdat mdat", **options)
    index = drive(data).index
    assert [data[o : o + s] for o, s in zip(index.sample_offset, index.sample_size, strict=True)] == list(
        MADE.packets
    )
    assert index.sample_pts.tolist() == list(MADE.dts)
    assert index.stream_index == (1 if options.get("other_traks", (b"",))[0] else 0)
    assert index.key_samples.tolist() == (list(range(12)) if "swap" in options else [0, 4, 8])


# Cost


def big(media: Media, nbytes: int) -> Media:
    """Return the samples with zeros behind them that add up to ``nbytes``."""
    more = bytes(nbytes // len(media.packets))
    return media.but(packets=tuple(packet + more for packet in media.packets))


def spans(driven: Driven) -> list[tuple[int, int]]:
    """Return every range that was asked for."""
    return [tuple(r) for wave in driven.waves for r in wave]


def test_a_small_moov_first_file_costs_one_read():
    """With the movie box in the head: one read of 64 KiB, whatever the file's size."""
    data = tiny_mp4(big(MADE, 300_000))
    assert spans(drive(data)) == [(0, HEAD_BYTES)]
    assert spans(drive(tiny_mp4())) == [(0, len(tiny_mp4()))]


def test_a_long_moov_first_file_costs_the_head_and_exactly_the_rest():
    """With a movie box beyond the head: the head, then what is missing of the box, not a byte more."""
    data = tiny_mp4(made(30_000, 30))
    driven = drive(data)
    assert driven.index.moov_range.stop > HEAD_BYTES
    assert spans(driven) == [(0, HEAD_BYTES), (HEAD_BYTES, driven.index.moov_range.stop)]


def test_a_moov_last_file_costs_two_reads():
    """With the movie box behind the media: the head, then the rest of the file; no byte in between."""
    data = tiny_mp4(big(MADE, 300_000), layout="ftyp mdat moov free")
    driven = drive(data)
    assert spans(driven) == [(0, HEAD_BYTES), (driven.index.moov_range.start, len(data))]


def test_a_long_movie_box_at_the_end_costs_three_reads():
    """A movie box behind the media that is longer than the tail read costs one more read of exactly its rest."""
    media = big(made(300_000, 30), 3_000_000)
    driven = drive(tiny_mp4(media, layout="ftyp mdat moov"))
    start, stop = driven.index.moov_range
    assert stop - start > TAIL_BYTES
    assert spans(driven) == [(0, HEAD_BYTES), (start, start + TAIL_BYTES), (start + TAIL_BYTES, stop)]


def test_every_hop_over_media_costs_one_read():
    """Two large boxes in front of the movie box cost a read each, of a tail's length."""
    data = tiny_mp4(big(MADE, 6_000_000), layout="ftyp mdat mdat moov")
    driven = drive(data)
    assert driven.requests == 3
    assert driven.bytes <= HEAD_BYTES + TAIL_BYTES + driven.index.moov_range.size


@pytest.mark.parametrize("layout", ["ftyp moov mdat", "ftyp mdat moov", "ftyp mdat64 moov64"])
def test_the_check_adds_one_wave_of_small_ranges(layout):
    """check=True reads the heads of key samples in one wave, after what the index alone costs."""
    data = tiny_mp4(big(MADE, 900_000), layout=layout)
    plain, checked = drive(data), drive(data, check=True)
    assert checked.waves[:-1] == plain.waves
    assert len(checked.waves[-1]) == len(checked.index.key_samples)
    assert plain.bytes <= HEAD_BYTES + plain.index.moov_range.size
    small = entry_points.LONG_PROBE_BYTES + 2 * entry_points.PROBE_BYTES
    assert checked.bytes <= plain.bytes + small


def test_a_true_hint_saves_the_head():
    """Told where the movie box lies, the parser reads just that; more than the box is no harm."""
    data = tiny_mp4(big(MADE, 300_000), layout="ftyp mdat moov free")
    index = drive(data).index
    for hint in (index.moov_range, ByteRange(index.moov_range.start, len(data))):
        driven = drive(data, hint=hint)
        assert spans(driven) == [tuple(hint)]
        assert_same(driven.index, index)


BAIT = box(b"mdat", box(b"moov", box(b"mvhd", bytes(8))), u32(1) + b"moov" + bytes(3))


@pytest.mark.parametrize(
    "hint",
    [
        ByteRange(0, 40),
        ByteRange(40, 90),
        ByteRange(5, 5),
        ByteRange(9, 3),
        ByteRange(0, 1 << 50),
        ByteRange(-5, 20),
        ByteRange(0, 8),
        ByteRange(len(FTYP) + 8, len(FTYP) + 32),
        ByteRange(len(FTYP) + 32, len(FTYP) + 43),
    ],
    ids=[
        "ftyp",
        "inside",
        "empty",
        "backwards",
        "past the end",
        "negative",
        "a header",
        "a false movie box",
        "a cut header",
    ],
)
def test_a_false_hint_costs_a_read_and_nothing_else(hint):
    """A hint that names no movie box, or one that is none, leads to the same index by way of the head."""
    data = tiny_mp4()
    data = data[: len(FTYP)] + BAIT + data[len(FTYP) :]
    plain, hinted = drive(data), drive(data, hint=hint)
    assert_same(hinted.index, plain.index)
    assert hinted.requests <= plain.requests + 1


# FFmpeg's packets


@pytest.mark.parametrize("name", RECIPES)
def test_the_arrays_are_ffmpegs_packets(media, name):
    """Time, place and size of every sample are those of FFmpeg's packets, the frames' times those of its frames."""
    path = media[name]
    index = drive(path.read_bytes(), check=True).index
    packets = ffmpeg_packets(path)
    columns = (index.sample_pts, index.sample_dts, index.sample_offset, index.sample_size)
    if name == "mpeg4":
        assert index.container_reason == "no packets are cut of mp4v (MPEG-4 part 2)"
    else:
        assert index.container_reason is None
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == [
        packet[:4] for packet in packets
    ]
    assert [n for n, packet in enumerate(packets) if packet.discard] == index.hidden.tolist()
    assert index.frame_pts.tolist() == ffmpeg_frame_pts(path)
    # FFmpeg flags by the bitstream where it parses; a proven entry point is a key for it, too.
    proven = index.key_samples[index.verdicts == Verdict.PROVEN].tolist()
    assert set(proven) <= {n for n, packet in enumerate(packets) if packet.key}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("per_chunk", [1, 7, [3, 1, 1, 20]])
def test_a_file_by_hand_is_what_ffmpeg_reads(media, tmp_path, layout, per_chunk):
    """Real samples in every layout: our index and FFmpeg agree on each packet, and all 60 frames decode."""
    data = tiny_mp4(demuxed(media["bframes"]), layout=layout, per_chunk=per_chunk, wide="64" in layout)
    path = tmp_path / "o.mp4"
    path.write_bytes(data)
    index = drive(data, check=True).index
    columns = (index.sample_pts, index.sample_dts, index.sample_offset, index.sample_size)
    assert list(zip(*(c.tolist() for c in columns), strict=True)) == [
        packet[:4] for packet in ffmpeg_packets(path)
    ]
    assert index.frame_pts.tolist() == ffmpeg_frame_pts(path)
    assert index.num_frames == 60


# Which track


def test_the_best_track_is_ffmpegs(media, tmp_path):
    """Of several video tracks the enabled one with the higher bit rate is taken, whatever its place."""
    low = demuxed(media["bframes"])
    data = tiny_mp4(low, flags=2, other_traks=(trak(made()), b""))
    assert drive(data).index.stream_index == 0
    for flags, best in ((3, 1), (2, 0)):
        other = trak(made(60, 4).but(last_duration=512), [60] * 15, [4] * 15)
        data = tiny_mp4(low, flags=flags, other_traks=(other, b""))
        path: Path = tmp_path / "o.mp4"
        path.write_bytes(data)
        assert drive(data).index.stream_index == best


def test_a_track_is_chosen_by_its_place():
    """stream_index counts all tracks, sound included; another number is refused with the video tracks there are."""
    sound = trak(swap={"hdlr": boxes.hdlr(b"soun")})
    data = tiny_mp4(other_traks=(sound, trak(made(3), [40], [3])))
    assert drive(data, stream_index=1).index.num_samples == 12
    assert drive(data, stream_index=2).index.stream_index == 2
    for wrong in (0, 3):
        with pytest.raises(
            UnsupportedMp4Error,
            match=rf"stream {wrong} is no video track: the file's video tracks are \[1, 2\]",
        ) as caught:
            drive(data, stream_index=wrong)
        assert caught.value.stream_index == wrong


# What the boxes say of the picture


@pytest.mark.parametrize(
    ("colr", "colour"),
    [
        (nclx(9, 16, 9, full=True), Colour(9, 16, 9, 2)),
        (nclx(1, 1, 1, full=False), Colour(1, 1, 1, 1)),
        (box(b"colr", b"nclc", u16(1, 1, 6)), Colour(1, 1, 6, 0)),
        (box(b"colr", b"prof", bytes(20)), None),
        (nclx(9, 16, 9, full=True) + box(b"colr", b"prof", bytes(20)), Colour(9, 16, 9, 2)),
        (b"", None),
    ],
    ids=["full range", "limited", "nclc", "profile", "both", "none"],
)
def test_colours_are_the_colr_boxs(colr, colour):
    """Nclx and nclc are kept, an ICC profile changes nothing."""
    assert drive(tiny_mp4(entry_boxes=box(b"pasp", u32(1, 1)) + colr)).index.entries[0].colour == colour


def test_the_entry_is_kept_whole():
    """The configuration record, the codec and both sizes come from stsd and the SPS."""
    index = drive(tiny_mp4(MADE.but(width=100, height=90))).index
    entry = index.entries[0]
    assert (entry.fourcc, entry.codec, entry.width, entry.height) == ("avc1", "h264", 100, 90)
    assert box(b"avcC", entry.config) == MADE.config
    assert (index.width, index.height) == (64, 48), "the decoded picture's size is the SPS's"


QUARTER = (0, 1 << 16, 0, -(1 << 16), 0, 0, 48 << 16, 0, 1 << 30)
FLIP = (1 << 16, 0, 0, 0, -(1 << 16), 0, 0, 0, 1 << 30)


@pytest.mark.parametrize("version", [0, 1])
def test_the_display_matrix_is_the_tracks_times_the_movies(version):
    """Tkhd's matrix is multiplied by mvhd's, as FFmpeg does; both versions of both boxes."""
    assert drive(tiny_mp4(matrix=QUARTER, version=version)).index.matrix == QUARTER
    both = drive(tiny_mp4(matrix=QUARTER, movie_matrix=FLIP, version=version)).index
    assert both.orientation == Orientation.from_matrix((0, -(1 << 16), 0, -(1 << 16), 0, 0, 0, 0, 1 << 30))
    assert drive(tiny_mp4(swap={"tkhd": None})).index.orientation == Orientation()


def test_a_rotated_video_is_turned_as_it_was_written(media):
    """A display matrix of 90 degrees swaps the upright picture's sides."""
    index = drive(media["rotated"].read_bytes()).index
    assert (index.upright_size(), index.upright_size(apply_rotation=False)) == ((128, 96), (96, 128))
