"""An index answers questions of time exactly, never changes, and travels small."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxon_gop import index_rows
from fluxon_gop.errors import FrameIndexError, FrameTimestampError, InvalidRequestError
from fluxon_gop.model import Colour, Orientation, SampleEntry, Signature, Verdict, VideoIndex
from fluxon_gop.ranges import ByteRange

ENTRY = SampleEntry("avc1", "h264", b"\1\2\3", 64, 48, Colour(1, 1, 1, 1))


def index_of(
    pts, dts=None, *, timescale: int = 1000, last_duration: int = 40, keys=(0,), **fields
) -> VideoIndex:
    """Return an index of samples with these times, 100 bytes each, one behind the other."""
    count = len(pts)
    values = {
        "signature": Signature(10_000, None, 5),
        "moov_range": ByteRange(0, 500),
        "stream_index": 0,
        "timescale": timescale,
        "entries": (ENTRY,),
        "width": 64,
        "height": 48,
        "sample_offset": np.arange(count, dtype=np.int64) * 100 + 500,
        "sample_size": np.full(count, 100, np.int64),
        "sample_pts": np.array(pts, np.int64),
        "sample_dts": np.array(sorted(pts) if dts is None else dts, np.int64),
        "sample_entry": np.zeros(1, np.uint8),
        "hidden": np.zeros(0, np.int64),
        "stream": ByteRange(0, count),
        "key_samples": np.array(keys, np.int64),
        "verdicts": np.full(len(keys), Verdict.PROVEN, np.uint8),
        "last_duration": last_duration,
    }
    return VideoIndex(**(values | fields))


CFR = index_of(range(0, 4000, 40))
VFR = index_of([0, 40, 200, 240, 1000], last_duration=60)
NTSC = index_of(range(0, 300 * 1001, 1001), timescale=30000, last_duration=1001)
REORDERED = index_of([40, 160, 80, 120, 280, 200, 240], range(0, 280, 40), hidden=np.array([2]))
EMPTY = index_of([], keys=())
INDEXES = {"cfr": CFR, "vfr": VFR, "ntsc": NTSC, "reordered": REORDERED}


def arrays(index: VideoIndex) -> dict[str, np.ndarray]:
    """Return every array of the index by name."""
    values = {field.name: getattr(index, field.name) for field in dataclasses.fields(index)}
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


def assert_same(one: VideoIndex, other: VideoIndex) -> None:
    """Assert that two indexes have the same content."""
    for field in dataclasses.fields(one):
        mine, its = getattr(one, field.name), getattr(other, field.name)
        if isinstance(mine, np.ndarray):
            assert mine.dtype == its.dtype, field.name
            assert np.array_equal(mine, its), field.name
        else:
            assert mine == its, field.name


# Time


@pytest.mark.parametrize("index", INDEXES.values(), ids=INDEXES)
def test_a_frame_is_found_by_its_own_time(index):
    """frame_at(pts_seconds[k]) and frame_at of the exact Fraction are k for every frame."""
    for frame, seconds in enumerate(index.pts_seconds.tolist()):
        assert index.frame_at(seconds) == frame
        assert index.frame_at(Fraction(int(index.frame_pts[frame]), index.timescale)) == frame


@pytest.mark.parametrize("index", INDEXES.values(), ids=INDEXES)
def test_a_frame_stays_until_the_next(index):
    """A time between two frames shows the earlier one, up to the last exact instant before the next."""
    ticks = [*index.frame_pts.tolist(), index.end_ticks]
    for frame, (start, stop) in enumerate(itertools.pairwise(ticks)):
        middle = Fraction(start + stop, 2 * index.timescale)
        just_before = Fraction(stop, index.timescale) - Fraction(1, 10**18)
        assert index.frame_at(middle) == frame
        assert index.frame_at(float(middle)) == frame
        assert index.frame_at(just_before) == frame


@pytest.mark.parametrize(
    "seconds",
    [-0.001, 4.0, 4.5, float("inf"), float("-inf"), float("nan"), -1, Fraction(4), Fraction(-1, 10**9)],
)
def test_a_time_outside_the_video_is_refused_by_number(seconds):
    """Before the first frame, or at or after the end of the last, is an error that names the video's times."""
    with pytest.raises(
        FrameTimestampError, match=r"no frame at \S+ s: the video shows \[0\.0, 4\.0\) s"
    ) as caught:
        CFR.frame_at(seconds)
    assert (caught.value.begin, caught.value.end) == (0.0, 4.0)
    assert caught.value.seconds == float(seconds) or seconds != seconds  # noqa: PLR0124 - NaN


def test_a_shifted_start_is_a_time_of_the_stream():
    """A video whose first frame is shown at 10 s has no frame at 0 s and its first at 10 s."""
    index = index_of(range(10_000, 11_000, 40))
    assert index.frame_at(10) == 0
    with pytest.raises(
        FrameTimestampError, match=r"no frame at 0\.0 s: the video shows \[10\.0, 11\.0\) s"
    ):
        index.frame_at(0.0)


def test_an_empty_video_has_no_time():
    """Without frames every time is refused, and nothing divides by zero."""
    with pytest.raises(FrameTimestampError, match=r"the video shows \[0\.0, 0\.0\) s"):
        EMPTY.frame_at(0.0)
    assert EMPTY.frames_between(0.0, 9.0) == range(0)
    assert (EMPTY.num_frames, EMPTY.end_ticks, EMPTY.average_fps) == (0, 0, 0.0)


def test_a_video_of_one_frame_without_duration_lasts_a_tick():
    """A last duration of zero still leaves the last frame on the screen for one tick."""
    index = index_of([0], last_duration=0)
    assert (index.frame_at(0.0), index.end_ticks) == (0, 1)


@pytest.mark.parametrize(
    ("start", "stop", "frames"),
    [
        (0.0, 0.2, range(2)),
        (0.0, 0.201, range(3)),
        (0.04, 0.2, range(1, 2)),
        (0.041, 0.3, range(2, 4)),
        (0, 100, range(5)),
        (-5, 0, range(0)),
        (0.5, 0.1, range(4, 4)),
        (2, 3, range(5, 5)),
        (Fraction(1, 25), Fraction(1, 5), range(1, 2)),
        (Fraction(1, 25) + Fraction(1, 10**18), Fraction(1, 5) + Fraction(1, 10**18), range(2, 3)),
    ],
)
def test_frames_between_are_those_whose_time_lies_in_the_half_open_window(start, stop, frames):
    """frames_between(start, stop) has each frame with start <= pts < stop, VFR and Fractions included."""
    assert VFR.frames_between(start, stop) == frames


@settings(deadline=None)
@given(st.fractions(-1, 12), st.fractions(-1, 12))
def test_frames_between_fractions_agree_with_arithmetic(start, stop):
    """With Fractions the window is exact at 30000/1001 frames a second."""
    times = [Fraction(pts, 30000) for pts in NTSC.frame_pts.tolist()]
    assert list(NTSC.frames_between(start, stop)) == [
        n for n, time in enumerate(times) if start <= time < stop
    ]


def test_neighbouring_windows_share_no_frame_and_lose_none():
    """Windows [a, b), [b, c) by float times of frames cut the video without overlap or hole."""
    edges = [*NTSC.pts_seconds[::7].tolist(), 1e9]
    frames = [frame for a, b in itertools.pairwise(edges) for frame in NTSC.frames_between(a, b)]
    assert frames == list(range(300))


def test_average_fps_counts_frames_over_the_whole_time():
    """100 frames in 4 s are 25 a second; at 30000/1001 they are 29.97."""
    assert CFR.average_fps == 25.0
    assert NTSC.average_fps == 30000 / 1001


# Frames and samples


def test_frames_are_ranked_by_presentation_time():
    """Frame k is the k-th shown sample by pts; hidden samples have no number."""
    assert REORDERED.frame_sample.tolist() == [0, 3, 1, 5, 6, 4]
    assert REORDERED.sample_frame.tolist() == [0, 2, -1, 1, 5, 3, 4]
    assert REORDERED.frame_pts.tolist() == [40, 120, 160, 200, 240, 280]


def test_samples_outside_the_stream_are_no_frames():
    """Only samples that FFmpeg demuxes count."""
    index = index_of(range(0, 400, 40), stream=ByteRange(2, 8))
    assert index.frame_sample.tolist() == [2, 3, 4, 5, 6, 7]


def test_a_frame_beyond_the_end_is_named():
    """check_frames raises with the first number beyond the end and the length."""
    CFR.check_frames(np.array([0, 99]), "a.mp4")
    with pytest.raises(
        FrameIndexError, match=r"a\.mp4: frame 100 is beyond the end: the video has 100 frames \(0 to 99\)"
    ) as caught:
        CFR.check_frames(np.array([3, 100, 101]), "a.mp4")
    assert (caught.value.index, caught.value.length) == (100, 100)


@pytest.mark.parametrize("name", ["sample_size", "sample_pts", "sample_dts"])
def test_arrays_of_different_lengths_are_refused(name):
    """An index whose arrays contradict each other is not made."""
    with pytest.raises(InvalidRequestError, match=rf"{name} has 2 samples, sample_offset has 3"):
        index_of([0, 40, 80], **{name: np.array([0, 1])})


def test_a_verdict_for_each_key_sample():
    """Key samples without a verdict each are refused."""
    with pytest.raises(InvalidRequestError, match="1 verdicts for 2 key samples"):
        index_of([0, 40, 80], keys=(0, 2), verdicts=np.zeros(1, np.uint8))


# Immutable, small


@pytest.mark.parametrize("name", arrays(CFR))
def test_arrays_are_read_only(name):
    """No array of an index can be written to."""
    with pytest.raises(ValueError, match="read-only"):
        arrays(CFR)[name][...] = 0


def test_fields_cannot_be_set():
    """An index is frozen."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        CFR.width = 3


def test_the_repr_shows_no_array():
    """The repr says codec, size, counts and path, in one line, whatever the length."""
    assert repr(CFR) == "VideoIndex(h264 64x48, 100 samples, 100 frames, 1 GOPs, packet path)"
    container = dataclasses.replace(CFR, container_reason="two edits")
    assert repr(container).endswith("container path (two edits))")
    assert len(repr(index_of(range(100_000)))) < 120


def test_nbytes_is_the_memory_of_arrays_and_records():
    """Nbytes adds up the arrays and the configuration records."""
    assert CFR.nbytes == sum(array.nbytes for array in arrays(CFR).values()) + len(ENTRY.config)


def test_a_pickle_is_whole_and_small():
    """An index pickles to under a tenth of its memory and comes back the same, read-only."""
    index = index_of(range(0, 400_000, 40), keys=range(0, 10_000, 12))
    packed = pickle.dumps(index)
    there = pickle.loads(packed)
    assert len(packed) < index.nbytes / 10
    assert_same(index, there)
    assert not any(array.flags.writeable for array in arrays(there).values())


@pytest.mark.parametrize("index", [*INDEXES.values(), EMPTY], ids=[*INDEXES, "empty"])
def test_every_index_travels(index):
    """A pickle of any index is that index, its questions already answered or not."""
    assert index.num_frames == len(index.pts_seconds)
    assert_same(index, pickle.loads(pickle.dumps(index)))


# Signature, verdicts


@pytest.mark.parametrize(
    ("one", "other", "fits"),
    [
        (Signature(9, "a"), Signature(9, "a"), True),
        (Signature(9, "a"), Signature(9, "b"), False),
        (Signature(9, "a"), Signature(8, "a"), False),
        (Signature(9, None, 5), Signature(9, None, 5), True),
        (Signature(9, None, 5), Signature(9, None, 6), False),
        (Signature(9, "a", 5), Signature(9, "a", 6), True),
        (Signature(9, "a", 5), Signature(9, None, 5), True),
        (Signature(9, "a"), Signature(9, None, 5), False),
        (Signature(9, "a"), Signature(9), False),
        (Signature(9), Signature(9), True),
    ],
)
def test_signatures_fit_by_size_and_etag_or_time(one, other, fits):
    """Size first, then the etag where both have one, else the time; what cannot be compared does not fit."""
    assert one.fits(other) is fits
    assert other.fits(one) is fits


def test_verdicts_make_a_new_index():
    """with_verdicts leaves the index as it was and marks just the given key samples."""
    index = index_of(range(0, 400, 40), keys=(0, 4, 8), verdicts=np.zeros(3, np.uint8))
    judged = index.with_verdicts(np.array([8, 0]), np.array([Verdict.REFUSED, Verdict.PROVEN], np.uint8))
    assert index.verdicts.tolist() == [Verdict.UNCHECKED] * 3
    assert judged.verdicts.tolist() == [Verdict.PROVEN, Verdict.UNCHECKED, Verdict.REFUSED]
    assert judged.container_reason is None


@pytest.mark.parametrize(
    ("pts", "verdict", "reason"),
    [
        ([0, 40, 80], Verdict.REFUSED, "the first sample is no proven entry point"),
        ([80, 0, 40], Verdict.PROVEN_TRAILING, "the stream starts with an open GOP"),
        ([0, 40, 80], Verdict.PROVEN_TRAILING, None),
        ([80, 0, 40], Verdict.PROVEN, None),
    ],
)
def test_a_stream_that_starts_unclean_goes_to_the_container_path(pts, verdict, reason):
    """A refused first sample, or an open GOP with leading frames first, makes the count uncertain."""
    index = index_of(pts, [0, 40, 80]).with_verdicts(np.array([0]), np.array([verdict], np.uint8))
    found = index.container_reason
    assert found is None if reason is None else found.startswith(reason)


# Orientation


@pytest.mark.parametrize(
    "numbers",
    [
        n
        for n in itertools.product((-1, 0, 1), repeat=4)
        if abs(n[0] * n[3] - n[1] * n[2]) == 1 and sum(map(abs, n)) == 2
    ],
)
def test_the_eight_quarter_turns_and_flips_put_each_pixel_where_the_matrix_says(numbers):
    """The turn by numpy moves each pixel's centre as (x, y) (a b; c d) does."""
    a, b, c, d = (number << 16 for number in numbers)
    turn = Orientation.from_matrix((a, b, 0, c, d, 0, 5 << 16, 7 << 16, 1 << 30))
    picture = np.arange(6).reshape(2, 3)
    centres = [(2 * x - 2, 2 * y - 1) for y in range(2) for x in range(3)]
    moved = [(x * numbers[0] + y * numbers[2], x * numbers[1] + y * numbers[3]) for x, y in centres]
    columns, rows = (sorted({place[axis] for place in moved}) for axis in (0, 1))
    want = np.zeros((len(rows), len(columns)), int)
    for (x, y), value in zip(moved, picture.ravel().tolist(), strict=True):
        want[rows.index(y), columns.index(x)] = value
    upright = picture.T if turn.transpose else picture
    upright = upright[:: -1 if turn.flip_rows else 1, :: -1 if turn.flip_columns else 1]
    assert np.array_equal(upright, want)
    index = index_of([0], matrix=(a, b, 0, c, d, 0, 0, 0, 1 << 30))
    assert index.upright_size() == tuple(s * 16 for s in ((4, 3) if turn.transpose else (3, 4)))
    assert index.upright_size(apply_rotation=False) == (48, 64)


@pytest.mark.parametrize(
    "matrix", [(0,) * 9, (46341, 46341, 0, -46341, 46341, 0, 0, 0, 1 << 30), (0, 5, 0, 0, 0, 0, 0, 0, 0)]
)
def test_another_angle_is_left_as_it_is(matrix):
    """A matrix of 45 degrees or without a direction turns nothing."""
    assert Orientation.from_matrix(matrix) == Orientation()


# Rows

INT = st.integers(0, 50)


@st.composite
def any_index(draw) -> VideoIndex:
    """Draw an index such as the parser makes: any sizes, gaps, times, keys, edits and entries."""
    count = draw(st.integers(0, 9))
    column = st.lists(INT, min_size=count, max_size=count)
    sizes, gaps, steps, shifts = (np.array(draw(column), np.int64) for _ in range(4))
    if draw(st.booleans()):
        sizes[:], steps[:] = 7, 3
    dts = np.cumsum(steps) - steps + draw(st.integers(-(1 << 40), 1 << 40))
    keys = sorted(draw(st.sets(st.integers(0, count - 1)))) if count else []
    edges = sorted(draw(st.tuples(st.integers(0, count), st.integers(0, count))))
    return index_of(
        (dts + shifts - draw(INT)).tolist(),
        dts,
        keys=keys,
        signature=draw(st.builds(Signature, INT, st.none() | st.text(), st.none() | INT)),
        sample_offset=np.cumsum(sizes + gaps) - sizes,
        sample_size=sizes,
        hidden=np.array(draw(st.sampled_from([[], keys])), np.int64),
        stream=ByteRange(*edges),
        verdicts=np.array([draw(st.integers(0, 3)) for _ in keys], np.uint8),
        sample_entry=np.array(draw(st.sampled_from([[0], [1] * count])), np.uint8),
        entries=(ENTRY, ENTRY._replace(colour=None, config=draw(st.binary(max_size=4)), fourcc="a\xffc1")),
        matrix=draw(st.sampled_from([(1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30), (-1,) * 9])),
        last_duration=int(steps[-1]) if count else 0,
        container_reason=draw(st.none() | st.text()),
    )


@settings(deadline=None)
@given(any_index(), st.text(min_size=1) | st.tuples(st.text(), st.text(min_size=1)))
def test_a_row_is_the_index(index, key):
    """encode() and rows_of() and decode() give back the same index, field by field."""
    (row,) = index_rows.rows_of(index_rows.encode([(key, index)]))
    assert_same(index, index_rows.decode(row))
    assert (row["uri"], row["export_name"], row["relpath"]) == index_rows.key_columns(key)
    assert row["frame_count"] == (None if index.container_reason is not None else index.num_frames)


@settings(deadline=None)
@given(any_index(), st.sampled_from([f.name for f in index_rows.SCHEMA if f.name != "row_checksum"]))
def test_a_changed_column_is_found(index, name):
    """A row with any column changed fails its checksum."""
    (row,) = index_rows.rows_of(index_rows.encode([("key", index)]))
    old = row[name]
    row[name] = {int: 77, str: "other"}.get(
        type(old), np.array([123, 7]) if isinstance(old, np.ndarray) else []
    )
    if old is None:
        row[name] = 5
    with pytest.raises(ValueError, match="the row's checksum does not fit its content"):
        index_rows.decode(row)
