"""No file makes the parser slow, large, or fail by anything but its own errors: the attacks, one by one."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest

from fluxon_gop import index_rows, mp4_chain
from fluxon_gop.errors import Mp4Error
from fluxon_gop.model import Signature, VideoIndex
from fluxon_gop.mp4_index import MAX_MOOV_BYTES, index_steps
from tests import boxes
from tests.boxes import (
    FTYP,
    MADE,
    box,
    full_box,
    made,
    stsc,
    tiny_mp4,
    trak,
    u8,
    u16,
    u32,
    u64,
    uniform_stsz,
)
from tests.nals import avc_pps, avc_sps, avcc
from tests.test_model import assert_same
from tests.witnesses import calls_of, drive

CALLS = 3_000_000
"""Function calls that a run may make: its work, counted the same on any machine."""
MEMORY = 128 << 20
"""A million samples that no table backs cost a hundred bytes each; more are refused."""
TREX = box(b"mvex", full_box(b"trex", 0, 0, u32(1, 1, 512, 100, 0)))
MOVIE = tiny_mp4(made(0), layout="ftyp moov", other_traks=(b"", TREX))
"""A file's head that announces fragments of track 1, each sample of 100 bytes and 512 ticks."""


def outcome(run: Callable[[], VideoIndex]) -> tuple[VideoIndex | Mp4Error, int]:
    """Return (index or Mp4Error, function calls) of a run; whatever else it raises escapes."""

    def caught_or_made() -> VideoIndex | Mp4Error:
        try:
            return run()
        except Mp4Error as error:
            return error

    return calls_of(caught_or_made)


def assert_harmless(data: bytes, **options) -> VideoIndex | Mp4Error:
    """Assert that a file costs little beyond its own bytes, and return its index or error."""
    result, calls = outcome(lambda: drive(data, check=True, **options).index)
    assert calls < CALLS
    # Once more, since tracing memory takes time.
    tracemalloc.start()
    try:
        outcome(lambda: drive(data, check=True, **options).index)
        assert tracemalloc.get_traced_memory()[1] < MEMORY + len(data)
    finally:
        tracemalloc.stop()
    return result


def moof(*runs: bytes, track: int = 1, flags: int = 0x020000, fields: bytes = b"") -> bytes:
    """Return a fragment of one track: its header and these boxes."""
    return box(b"moof", box(b"traf", full_box(b"tfhd", 0, flags, u32(track), fields), *runs))


def trun(count: int, offset: int = 0, flags: int = 0, rows: bytes = b"") -> bytes:
    return full_box(b"trun", 0, flags | 1, u32(count), boxes.i32(offset), rows)


# Counts without a table behind them


def _one_size(count: int, size: int = 1) -> dict[str, bytes | None]:
    return {
        "stsz": uniform_stsz(size, count),
        "stss": None,
        "stsc": stsc([(1, count, 1)]),
        "stts": full_box(b"stts", 0, 0, u32(1, count, 1)),
    }


@pytest.mark.timeout(60)
def test_samples_of_one_byte_fill_no_memory():
    """A kilobyte of boxes that calls four million bytes of media four million samples is not expanded."""
    assert_harmless(tiny_mp4(swap=_one_size(4 << 20)) + bytes(4 << 20))


@pytest.mark.timeout(60)
def test_many_tracks_of_one_byte_samples_cost_little():
    """A hundred tracks that each claim a million samples of the same bytes are looked at, not expanded."""
    other = trak(MADE, [40], [12], swap=_one_size(1 << 20))
    assert_harmless(tiny_mp4(other_traks=(other * 100, b"")) + bytes(1 << 20))


@pytest.mark.timeout(60)
def test_a_run_of_one_byte_samples_fills_no_memory():
    """A fragment's run without rows that claims four million samples is bounded as the tables are."""
    data = MOVIE + moof(trun(4 << 20), flags=0x020010, fields=u32(1)) + bytes(4 << 20)
    assert_harmless(data)


@pytest.mark.timeout(60)
def test_runs_of_another_track_cost_no_more_than_their_bytes():
    """Twenty-byte runs of a track that nobody asked for, each of a million samples, are passed over."""
    runs = [trun(1 << 20)] * 400
    assert_harmless(MOVIE + moof(*runs, track=2, flags=0x020010, fields=u32(1)) + bytes(1 << 20))


@pytest.mark.timeout(60)
def test_a_million_claimed_keys_are_not_all_checked():
    """Where every sample is called a key, the check's wave is bounded; the rest is checked when it is read."""
    media, count = made(1, 1), 1 << 20
    packet = media.packets[0]
    data = tiny_mp4(media, swap=_one_size(count, len(packet))) + packet * (count - 1)
    assert drive(data).index.num_samples == count
    checked, calls = outcome(lambda: drive(data, check=True).index)
    assert isinstance(checked, VideoIndex)
    assert checked.container_reason is None
    assert calls < CALLS


# Numbers beyond 64 bits


@pytest.mark.parametrize("start", [0, 1 << 40, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_a_fragment_at_the_end_of_time_overflows_nothing(start):
    """Tfdt holds 64 bits without sign: a time that no clock reaches is an error or the container path."""
    data = MOVIE + moof(full_box(b"tfdt", 1, 0, u64(start)), trun(3)) * 2 + bytes(900)
    result = assert_harmless(data)
    if isinstance(result, VideoIndex):
        assert (
            result.container_reason is not None
            or result.sample_dts.tolist() == [start + 512 * n for n in (0, 1, 2)] * 2
        )


@pytest.mark.parametrize("base", [0, 1 << 61, (1 << 62) - 1, 1 << 62, (1 << 64) - 1])
def test_a_fragment_beyond_any_file_overflows_nothing(base):
    """A base data offset, and runs that follow it implicitly, stay within 64 bits."""
    long = trun(1 << 10, flags=0x200, rows=u32(*[(1 << 32) - 1] * (1 << 10)))
    explicit = moof(long, flags=0x01, fields=u64(base))
    follow = b"".join(moof(long, flags=0) for _ in range(40))
    assert_harmless(MOVIE + explicit + follow)


@pytest.mark.parametrize("flags", [0x000, 0x200, 0xF00, 0x004])
def test_a_run_of_no_samples_adds_none(flags):
    """A run that says no samples is passed over, whatever columns it announces."""
    data = MOVIE + moof(trun(0, flags=flags, rows=u32(0)), trun(3, 100)) + bytes(900)
    result = assert_harmless(data)
    assert isinstance(result, VideoIndex)
    assert result.num_samples == 3


def test_a_matrix_product_stays_what_a_row_can_hold():
    """Tkhd's matrix times mvhd's wraps at 32 bits, as in FFmpeg, and the index can be kept in a table."""
    most = (1 << 31) - 1
    index = drive(tiny_mp4(matrix=(most,) * 9, movie_matrix=(most,) * 9)).index
    assert all(-(1 << 31) <= number < 1 << 31 for number in index.matrix)
    assert_same(_through_a_row(index), index)


@pytest.mark.parametrize("width", [16 << 10, 16 << 20, 16 << 32])
def test_a_picture_of_any_width_can_be_kept(width):
    """An SPS that claims a width that no picture has leaves the entry's own, and a row that can be written."""
    media = MADE.but(config=box(b"avcC", avcc(avc_sps(width=width), avc_pps())))
    index = drive(tiny_mp4(media)).index
    assert index.width in {width, 64}
    assert_same(_through_a_row(index), index)


@pytest.mark.parametrize(
    "swap",
    [
        {"stsz": boxes.stsz([(1 << 32) - 1] * 12)},
        {"ctts": boxes.ctts([-(1 << 31)] * 3 + [(1 << 31) - 1] * 3 + [0] * 6)},
        {"stts": boxes.stts([(1 << 31) - 1] * 12)},
        {"stts": boxes.stts([-(1 << 31)] * 12)},
        {"stco": boxes.co64([(1 << 62) - 1, 0, 5])},
    ],
    ids=lambda swap: next(iter(swap)),
)
def test_an_index_of_absurd_numbers_can_be_kept(swap):
    """What goes to the container path still fits a row: same count, same reason, no size below zero."""
    index = drive(tiny_mp4(swap=swap)).index
    there = _through_a_row(index)
    assert (there.num_samples, there.container_reason) == (index.num_samples, index.container_reason)
    assert int(there.sample_size.min()) >= 0


@pytest.mark.parametrize("gap", [0, (1 << 31) - 1537, 1 << 31, 1 << 40])
def test_a_long_gap_between_fragments_is_kept(gap):
    """Fragments hours apart (minutes, at ten million ticks a second) keep their times on the way through a row."""
    parts = [moof(full_box(b"tfdt", 1, 0, u64(start)), trun(3, 100)) for start in (0, 1536 + gap)]
    index = drive(MOVIE + b"".join(parts) + bytes(900)).index
    there = _through_a_row(index)
    assert index.num_samples == 6
    assert index.container_reason is not None or index.frame_pts.tolist() == there.frame_pts.tolist()


def _through_a_row(index: VideoIndex) -> VideoIndex:
    (row,) = index_rows.rows_of(index_rows.encode([("key", index)]))
    return index_rows.decode(row)


def test_a_track_without_a_timescale_still_has_times():
    """FFmpeg counts a timescale of 0 as 1: every question of time has an answer."""
    index = drive(tiny_mp4(MADE.but(timescale=0))).index
    assert index.frame_at(0.0) == 0
    assert index.pts_seconds.tolist() == list(MADE.dts)


# Reads


def _asked(size: int, head: bytes, tail: bytes = b"") -> list[int]:
    """Drive the parser over a file that is zeros but for its head and tail; return the sizes asked for."""
    steps = index_steps(Signature(size), check=True)
    asked: list[int] = []
    try:
        wave = next(steps)
        while True:
            asked += [r.size for r in wave]
            assert max(asked) <= MAX_MOOV_BYTES, f"asked for {max(asked)} bytes"
            assert len(asked) < 10_000
            answers = []
            for start, stop in wave:
                data = bytearray(stop - start)
                if start < len(head):
                    data[: len(head[start:stop])] = head[start:stop]
                if stop > size - len(tail):
                    first = max(start, size - len(tail))
                    data[first - start :] = tail[first - (size - len(tail)) :][: stop - first]
                answers.append(bytes(data))
            wave = steps.send(answers)
    except (StopIteration, Mp4Error):
        return asked


def test_a_fragment_header_of_a_terabyte_is_not_read():
    """A moof that claims half of a huge file is an error, not a read."""
    head = MOVIE + u32(1) + b"moof" + u64(1 << 39)
    assert sum(_asked(1 << 40, head)) < MAX_MOOV_BYTES


def test_a_shortcut_of_gigabytes_is_not_read():
    """An mfra that claims the last four gigabytes is passed over: it is only a shortcut."""
    tail = box(b"free", bytes(5000)) * 3 + full_box(b"mfro", 0, 0, u32((1 << 32) - 1))
    before = MOVIE + moof(trun(1, 100))
    head = before + u32(1) + b"mdat" + u64((1 << 40) - len(tail) - len(before))
    asked = _asked(1 << 40, head, tail)
    assert len(asked) >= 4
    assert sum(asked) < MAX_MOOV_BYTES


def sidx(entries: list[int], first: int = 0) -> bytes:
    rows = b"".join(u32(size, 512, 0) for size in entries)
    return full_box(b"sidx", 0, 0, u32(1, 12800, 0, first), u16(0, len(entries)), rows)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("step", [0, 1, 7, 24, (1 << 31) - 1])
def test_a_lying_sidx_costs_little(step):
    """Sixty thousand places that sidx invents neither fill memory nor change what the chain of boxes says."""
    parts = (moof(full_box(b"tfdt", 1, 0, u64(0)), trun(3, 100)), box(b"mdat", bytes(1 << 20)))
    plain = drive(MOVIE + b"".join(parts)).index
    index = assert_harmless(MOVIE + sidx([step] * 65_000) + b"".join(parts))
    assert isinstance(index, VideoIndex)
    assert index.sample_dts.tolist() == plain.sample_dts.tolist()


@pytest.mark.timeout(120)
def test_the_time_of_a_long_chain_grows_with_its_length(monkeypatch):
    """Ten thousand boxes that are each read by a wave of their own are walked once, not once a wave."""
    monkeypatch.setattr(mp4_chain, "WINDOW", 16)
    result, calls = outcome(lambda: drive(MOVIE + box(b"free", bytes(8)) * 10_000).index)
    assert isinstance(result, VideoIndex)
    assert calls < CALLS


# Boxes within boxes


def test_a_nest_of_boxes_is_not_descended():
    """Thousands of boxes within one another cost nothing: only named paths are followed."""
    nest = b""
    for _ in range(3000):
        nest = box(b"trak", nest)
    assert isinstance(assert_harmless(FTYP + box(b"moov", boxes.mvhd(), nest)), Mp4Error)


def test_a_swarm_of_children_is_walked_in_time():
    """A movie box of sixty thousand empty boxes costs well under a second."""
    data = FTYP + box(b"moov", boxes.mvhd(), box(b"free") * 60_000, trak(made(0)))
    assert isinstance(assert_harmless(data), VideoIndex)


@pytest.mark.parametrize("kind", ["stsz", "stco", "stsc", "stts", "ctts", "stss", "elst"])
@pytest.mark.parametrize("count", [0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 13])
def test_inflated_counts_are_errors(kind, count):
    """A count in any table far beyond its rows is an Mp4Error or what FFmpeg makes of it, at no cost."""
    data = bytearray(tiny_mp4(MADE.but(offsets=(0,) * 12), edits=[(9000, 0, 1 << 16)]))
    at = data.index(kind.encode()) + (12 if kind == "stsz" else 8)
    data[at : at + 4] = u32(count)
    result = assert_harmless(bytes(data))
    if kind != "elst":
        assert isinstance(result, Mp4Error)


def test_every_version_byte_is_answered():
    """Any version of any full box is read or refused."""
    data = tiny_mp4(MADE.but(offsets=(0,) * 12), edits=[(9000, 0, 1 << 16)])
    for kind in (
        "mvhd",
        "tkhd",
        "mdhd",
        "hdlr",
        "stsd",
        "stts",
        "ctts",
        "stss",
        "stsc",
        "stsz",
        "stco",
        "elst",
        "dref",
    ):
        at = data.index(kind.encode()) + 4
        for version in (1, 2, 255):
            assert_harmless(data[:at] + u8(version) + data[at + 1 :])


def test_every_cut_of_the_movie_is_answered():
    """A movie box cut anywhere, its own size set right, is an index or an Mp4Error."""
    data = tiny_mp4(MADE.but(offsets=(0,) * 12), layout="ftyp mdat moov", edits=[(9000, 0, 1 << 16)])
    start = drive(data).index.moov_range.start
    reached = set()
    for stop in range(start + 8, len(data)):
        try:
            drive(data[:start] + u32(stop - start) + data[start + 4 : stop])
        except Mp4Error as error:
            reached.add(type(error).__name__)
    assert "BoxError" in reached
