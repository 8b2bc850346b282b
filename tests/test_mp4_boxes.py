"""Boxes and tables of a track are read as the standard writes them; what contradicts itself is named."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxon_gop import mp4_boxes
from fluxon_gop.errors import BoxError, UnsupportedMp4Error
from fluxon_gop.model import MAX_SAMPLES
from fluxon_gop.mp4_boxes import (
    Box,
    Edit,
    child,
    children,
    chunk_offsets,
    decode_shift,
    edits,
    need_child,
    parse_header,
    run_values,
    sample_chunks,
    sample_sizes,
    sync_samples,
)
from tests import boxes
from tests.boxes import big_box, box, full_box, open_box, u8, u32, u64

FAR = 1 << 33
"""Where the boxes of these tests lie in their file: offsets in messages are the file's."""
SIZES = st.lists(st.integers(0, 255), max_size=40)


def read(raw: bytes) -> Box:
    """Return the box that ``raw`` starts with, told to lie at FAR."""
    kind, header, size = parse_header(raw)
    return Box(kind, memoryview(raw), header, size or len(raw), kind, FAR + header)


def stbl(*tables: bytes) -> Box:
    return read(box(b"stbl", *tables))


# Headers and the tree


@pytest.mark.parametrize(
    ("raw", "header"),
    [
        (box(b"free", bytes(4)), ("free", 8, 12)),
        (big_box(b"mdat", bytes(4)), ("mdat", 16, 20)),
        (open_box(b"mdat"), ("mdat", 8, 0)),
        (u32(1) + b"mdat" + u64((1 << 64) - 1), ("mdat", 16, (1 << 64) - 1)),
        (u32(8) + b"\xa9xyz", ("\xa9xyz", 8, 8)),
    ],
)
def test_a_header_is_type_and_sizes(raw, header):
    """32-bit, 64-bit and open sizes are read from any place, from bytes and views, whatever follows."""
    assert parse_header(raw) == header
    assert parse_header(memoryview(b"xyz" + raw + b"more"), 3) == header


def test_a_cut_64_bit_header_is_named():
    """A box that announces a 64-bit size needs it."""
    with pytest.raises(BoxError, match="64-bit box size at byte 3: the header is cut") as caught:
        parse_header(b"xyz" + u32(1) + b"mdat" + bytes(7), 3)
    assert (caught.value.path, caught.value.offset) == ("", 3)


def test_children_come_in_order_with_path_and_place():
    """children() gives each box with its path and its absolute offset, its body and nothing else."""
    found = list(
        children(read(box(b"moov", box(b"free", b"ab"), big_box(b"trak", b"cde"), open_box(b"udta", b"f"))))
    )
    assert [(b.kind, bytes(b.body), b.path, b.offset) for b in found] == [
        ("free", b"ab", "moov/free", FAR + 16),
        ("trak", b"cde", "moov/trak", FAR + 34),
        ("udta", b"f", "moov/udta", FAR + 45),
    ]


@pytest.mark.parametrize("tail", [u32(0), u32(0, 0), u32(0, 0) + b"junk", b"\0\0\0", b"", bytes(7)])
def test_a_terminator_or_a_rest_too_short_ends_the_list(tail):
    """A 32-bit zero, zeros, or fewer bytes than a header end the children, as FFmpeg has it."""
    assert [b.kind for b in children(read(box(b"udta", box(b"free"), tail)))] == ["free"]


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        (u32(7) + b"trak", r"moov/trak at byte 8589934600: size 7 does not fit: want 8 to 8"),
        (u32(9) + b"trak", r"moov/trak at byte 8589934600: size 9 does not fit: want 8 to 8"),
        (u32(1) + b"trak" + u64(15), r"moov/trak at byte 8589934600: size 15 does not fit: want 16 to 16"),
        (u32(1) + b"trak" + u64((1 << 64) - 1), r"size 18446744073709551615 does not fit: want 16 to 16"),
    ],
)
def test_a_child_past_its_parent_or_below_its_header_is_named(inner, message):
    """A box that does not fit its parent says which, where, its size, and what would fit."""
    with pytest.raises(BoxError, match=message) as caught:
        list(children(read(box(b"moov", inner) + box(b"trak"))))
    assert (caught.value.path, caught.value.offset) == ("moov/trak", FAR + 8)


def test_more_boxes_than_a_movie_has_are_refused(monkeypatch):
    """A parent with more children than any real one is refused, not walked for ever."""
    monkeypatch.setattr(mp4_boxes, "MAX_BOXES", 5)
    assert len(list(children(read(box(b"moov", *[box(b"free")] * 4))))) == 4
    with pytest.raises(BoxError, match=r"^moov: more than 5 boxes$"):
        list(children(read(box(b"moov", *[box(b"free")] * 6))))


def test_child_finds_the_first_of_a_path():
    """child() follows types downwards to the first of each, or to None; need_child() names what is missing."""
    moov = read(box(b"moov", box(b"trak", box(b"mdia", b"")), box(b"trak", box(b"edts"))))
    found = child(moov, "trak", "mdia")
    assert found is not None
    assert found.path == "moov/trak/mdia"
    assert child(moov, "trak", "edts") is None
    with pytest.raises(BoxError, match=r"moov at byte 8589934600: trak/edts is missing") as caught:
        need_child(moov, "trak", "edts")
    assert (caught.value.path, caught.value.offset) == ("moov", FAR + 8)


def test_fields_that_the_box_does_not_hold_are_named():
    """unpack() says which fields need how many bytes and how many there are."""
    assert read(box(b"mvhd", u32(7, 8))).unpack("II") == (7, 8)
    with pytest.raises(
        BoxError, match=r"mvhd at byte \d+: its fields \(II\) needs 10 bytes, the box holds 8"
    ):
        read(box(b"mvhd", u32(7, 8))).unpack("II", 2)


# Sizes


@settings(deadline=None)
@given(SIZES)
def test_stsz_gives_each_size(sizes):
    """Stsz holds 32 bits a sample."""
    sizes = [size << 24 | size for size in sizes]
    found = sample_sizes(stbl(boxes.stsz(sizes)), FAR)
    assert (found.dtype, found.tolist()) == (np.int64, sizes)


@settings(deadline=None)
@given(SIZES, st.sampled_from([4, 8, 16]))
def test_stz2_gives_each_size(sizes, width):
    """stz2 holds 4, 8 or 16 bits a sample, an odd count of halves included."""
    sizes = [size % (1 << width) for size in sizes]
    found = sample_sizes(stbl(boxes.stz2(sizes, width)), FAR)
    assert (found.dtype, found.tolist()) == (np.int64, sizes)


def test_one_size_for_all():
    """A uniform stsz has no table: its count is bounded by what the file can hold."""
    assert sample_sizes(stbl(boxes.uniform_stsz(10, 5)), 50).tolist() == [10] * 5
    with pytest.raises(
        BoxError, match=r"stbl/stsz at byte \d+: says 7 samples of 10 bytes, the file has 50 bytes"
    ):
        sample_sizes(stbl(boxes.uniform_stsz(10, 7)), 50)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            full_box(b"stsz", 0, 0, u32(0, 4, 1, 1, 1)),
            r"stbl/stsz .*says 4 entries of 4 bytes, the box holds 12 bytes",
        ),
        (
            full_box(b"stsz", 0, 0, u32(0)),
            r"stbl/stsz .*its fields \(III\) needs 12 bytes, the box holds 8",
        ),
        (
            full_box(b"stz2", 0, 0, u32(8, 5), bytes(4)),
            r"stbl/stz2 .*says 5 entries of 8 bits, the box holds 4 bytes",
        ),
        (
            full_box(b"stz2", 0, 0, u32(4, 5), bytes(2)),
            r"stbl/stz2 .*says 5 entries of 4 bits, the box holds 2 bytes",
        ),
        (full_box(b"stz2", 0, 0, u32(12, 1), bytes(4)), r"stbl/stz2 .*field size 12 bits: want 4, 8 or 16"),
        (box(b"free"), r"stbl at byte \d+: stz2 is missing"),
    ],
)
def test_sizes_that_their_box_does_not_hold_are_named(table, message):
    """A count larger than its table is an error with both numbers."""
    with pytest.raises(BoxError, match=message):
        sample_sizes(stbl(table), FAR)


@pytest.mark.parametrize("kind", [b"stsz", b"stz2"])
def test_more_samples_than_are_indexed_is_unsupported(kind):
    """A count beyond the parser's limit is refused before its table is looked at."""
    fields = u32(0 if kind == b"stsz" else 8, MAX_SAMPLES + 1)
    with pytest.raises(
        UnsupportedMp4Error, match=rf"{MAX_SAMPLES + 1} samples; this parser indexes up to"
    ) as caught:
        sample_sizes(stbl(full_box(kind, 0, 0, fields)), FAR)
    assert caught.value.count == MAX_SAMPLES + 1


@pytest.mark.parametrize(
    "table",
    [
        boxes.stsz([1] * 3),
        boxes.stz2([1] * 3, 8),
        boxes.stz2([1] * 3, 16),
        boxes.stco([1] * 3),
        boxes.stss([1, 2, 3]),
    ],
)
@pytest.mark.parametrize("count", [4, 1 << 16, (1 << 24) + 1, (1 << 32) - 1])
def test_a_false_count_costs_no_memory(table, count):
    """A table that says far more entries than it holds is refused before anything is allocated."""
    at = 16 if table[4:8] in {b"stsz", b"stz2"} else 12
    box_of = stbl(table[:at] + u32(count) + table[at + 4 :])
    reader = {b"stco": chunk_offsets, b"stss": lambda b: sync_samples(b, 9)}.get(
        table[4:8], lambda b: sample_sizes(b, FAR)
    )
    tracemalloc.start()
    try:
        with pytest.raises((BoxError, UnsupportedMp4Error)):
            reader(box_of)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# Chunks


@pytest.mark.parametrize("make", [boxes.stco, boxes.co64])
def test_chunk_offsets_are_absolute(make):
    """Stco and co64 give the same offsets."""
    assert chunk_offsets(stbl(make([5, (1 << 32) - 1, 7]))).tolist() == [5, (1 << 32) - 1, 7]
    assert chunk_offsets(stbl(make([]))).tolist() == []


def test_co64_reaches_beyond_four_gigabytes_but_not_beyond_any_file():
    """64-bit offsets are exact; one that no file has is named."""
    assert chunk_offsets(stbl(boxes.co64([FAR + 1]))).tolist() == [FAR + 1]
    with pytest.raises(BoxError, match=r"stbl/co64 .*chunk offset 18446744073709551615 is beyond any file"):
        chunk_offsets(stbl(boxes.co64([3, (1 << 64) - 1])))
    with pytest.raises(BoxError, match=r"stbl at byte \d+: co64 is missing"):
        chunk_offsets(stbl())


@pytest.mark.parametrize(
    ("entries", "chunks", "samples", "counts", "entry"),
    [
        ([(1, 4, 1)], 3, 12, [4, 4, 4], [0, 0, 0]),
        ([(1, 4, 1)], 3, 10, [4, 4, 2], [0, 0, 0]),
        ([(1, 4, 1)], 4, 8, [4, 4, 0, 0], [0] * 4),
        ([(1, 2, 1), (3, 1, 2)], 4, 6, [2, 2, 1, 1], [0, 0, 1, 1]),
        ([(1, 2, 1), (9, 5, 1)], 2, 4, [2, 2], [0, 0]),
        ([(1, 2, 1)], 2, 9, [2, 2], [0, 0]),
        ([(1, (1 << 32) - 1, 1)], 2, 9, [9, 0], [0, 0]),
        ([], 0, 9, [], []),
        ([], 3, 0, [], []),
    ],
)
def test_stsc_runs_are_spread_over_the_chunks(entries, chunks, samples, counts, entry):
    """Each chunk gets its run's count and entry; the last samples end the counting; runs past the end are idle."""
    found, entries_of = sample_chunks(stbl(boxes.stsc(entries)), chunks, samples)
    assert (found.tolist(), entries_of.tolist()) == (counts, entry)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "no entries for 3 chunks"),
        ([(2, 4, 1)], r"first chunks \[2\]\.\.\.: want 1, then rising"),
        ([(0, 4, 1)], r"first chunks \[0\]\.\.\.: want 1, then rising"),
        ([(1, 4, 1), (1, 2, 1)], r"first chunks \[1, 1\]\.\.\.: want 1, then rising"),
        ([(1, 4, 1), (3, 2, 1), (2, 1, 1)], r"first chunks \[1, 3, 2\]\.\.\.: want 1, then rising"),
        ([(1, 0, 1)], "sample count and sample entry must be 1 or more"),
        ([(1, 4, 0)], "sample count and sample entry must be 1 or more"),
    ],
)
def test_stsc_that_contradicts_itself_is_named(entries, message):
    """First chunks start at 1 and rise, counts and entries are 1-based: else the box is named."""
    with pytest.raises(BoxError, match=rf"stbl/stsc at byte \d+: {message}"):
        sample_chunks(stbl(boxes.stsc(entries)), 3, 12)


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(0, 60))
def test_stsc_counts_add_up(counts, samples):
    """The counts of the chunks add up to the samples, or to what the chunks hold."""
    table = boxes.stsc([(n + 1, count, 1) for n, count in enumerate(counts)])
    found, _ = sample_chunks(stbl(table), len(counts), samples)
    assert int(found.sum()) == min(samples, sum(counts))


# Times and keys


@settings(deadline=None)
@given(st.lists(st.integers(-(1 << 31), (1 << 31) - 1), max_size=30), st.integers(0, 40))
def test_runs_become_one_value_a_sample(values, samples):
    """Ctts runs are spread as far as there are samples; both versions are signed."""
    for version in (0, 1):
        found = run_values(read(boxes.ctts(values, version)), samples, signed=True)
        assert (found.dtype, found.tolist()) == (np.int64, values[:samples])
    assert run_values(read(boxes.ctts(values)), samples, signed=False).tolist() == [
        v % (1 << 32) for v in values[:samples]
    ]


def test_a_run_longer_than_the_track_is_cut():
    """A run of four billion costs no more than the samples there are; empty runs give nothing."""
    table = full_box(b"stts", 0, 0, u32(3, 0, 9, (1 << 32) - 1, 512, 5, 1))
    assert run_values(read(table), 4, signed=True).tolist() == [512] * 4
    with pytest.raises(
        BoxError, match=r"stts at byte \d+: says 9 entries of 8 bytes, the box holds 8 bytes"
    ):
        run_values(read(full_box(b"stts", 0, 0, u32(9, 1, 1))), 4, signed=True)


@pytest.mark.parametrize(
    ("offsets", "shift"),
    [
        ([], 0),
        ([-512], 0),
        ([-512, 0], 0),
        ([-512, 0, 512], 512),
        ([0, -512, -1024, 5, 6], 1024),
        ([0, -512, -1024, -9000], 512),
    ],
)
def test_the_decode_shift_is_the_largest_negative_offset_but_two(offsets, shift):
    """FFmpeg's decode times move back by the largest negative offset of all runs but the last two."""
    assert decode_shift(read(boxes.ctts(offsets, 1))) == shift


def test_an_empty_run_does_not_shift():
    """FFmpeg ignores a ctts run of no samples: its offset moves no decode time."""
    table = full_box(
        b"ctts", 1, 0, u32(4), *(u32(n) + boxes.i32(v) for n, v in [(0, -1024), (1, 0), (1, 0), (9, 0)])
    )
    assert decode_shift(read(table)) == 0


@pytest.mark.parametrize(
    ("numbers", "samples", "keys"),
    [
        ([1, 5], 9, [0, 4]),
        ([1, 9, 10, 4000000000], 9, [0, 8]),
        ([1, 5, 3, 7], 9, [0, 4]),
        ([1, 1, 5], 9, [0]),
        ([5, 1], 9, [4]),
        ([0, 5], 9, [0, 5]),
        ([], 0, []),
    ],
)
def test_stss_numbers_become_samples(numbers, samples, keys):
    """Stss is 1-based in the file and 0-based here, sorted, without repeats or samples that do not exist."""
    table = full_box(b"stss", 0, 0, u32(len(numbers), *numbers))
    found = sync_samples(stbl(table), samples)
    assert found is not None
    assert found.tolist() == keys


def test_no_stss_means_all_samples_are_sync():
    """Without the box the answer is None, which is not an empty list."""
    assert sync_samples(stbl(), 9) is None


def test_an_empty_stss_leaves_the_first_sample():
    """FFmpeg takes the first sample of a track with an empty stss for a key (mov_build_index)."""
    found = sync_samples(stbl(boxes.stss([])), 9)
    assert found is not None
    assert found.tolist() == [0]


# Edits


@pytest.mark.parametrize("version", [0, 1])
def test_edits_are_durations_times_and_rates(version):
    """Elst of both versions gives (movie ticks, media time, rate); -1 is an empty edit."""
    wanted = [Edit(500, -1, 1 << 16), Edit(1000, 1024, 1 << 15)]
    raw = box(b"trak", box(b"edts", boxes.elst(wanted, version)))
    assert edits(read(raw)) == wanted


def test_edits_of_64_bits():
    """Version 1 holds times beyond 32 bits."""
    wanted = [Edit(1 << 40, 1 << 41, 1 << 16)]
    assert edits(read(box(b"trak", box(b"edts", boxes.elst(wanted, 1))))) == wanted


@pytest.mark.parametrize("count", [0, 1, 3, 1 << 31])
def test_a_false_count_of_edits_gives_as_many_as_the_box_holds(count):
    """Where elst and its count disagree, the box's own size counts, as in FFmpeg."""
    raw = boxes.elst([(500, 0, 1 << 16), (600, 9, 1 << 16)])
    raw = raw[:12] + u32(count) + raw[16:] + b"rest"
    raw = u32(len(raw)) + raw[4:]
    assert [edit.duration for edit in edits(read(box(b"trak", box(b"edts", raw))))] == [500, 600]


def test_no_edit_list_is_no_edit():
    """A track without edts, or with an empty one, has no edits; a cut elst is named."""
    assert edits(read(box(b"trak"))) == []
    assert edits(read(box(b"trak", box(b"edts")))) == []
    with pytest.raises(
        BoxError, match=r"trak/edts/elst at byte \d+: its count needs 8 bytes, the box holds 4"
    ):
        edits(read(box(b"trak", box(b"edts", box(b"elst", u8(0, 0, 0, 0))))))


def test_a_million_edits_cost_little():
    """An edit list that no one can play is not turned into a million objects."""
    raw = box(b"trak", box(b"edts", full_box(b"elst", 0, 0, u32(1_000_000), bytes(12_000_000))))
    tracemalloc.start()
    try:
        with suppress(UnsupportedMp4Error):
            edits(read(raw))
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
