"""The faults of today's readers, on inputs made here: every one reads exactly on both paths."""

from __future__ import annotations

import numpy as np
import pytest

import fluxon_gop as fg
from tests.cases import CASES, make_cases
from tests.corpus import truth

CONTAINER = {
    "truncated",
    "AVI",
    "MKV without cues",
    "Motion JPEG",
    "first sample no key",
    "alpha",
    "MPEG-TS",
}
"""Cases that the packet path leaves to FFmpeg's demuxer."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    return make_cases(tmp_path_factory.mktemp("cases"))


@pytest.mark.parametrize("path_choice", [None, "container"])
@pytest.mark.parametrize("name", CASES)
def test_a_case_reads_exactly(cases, name, path_choice):
    """All frames in random order, in a batch and alone, are FFmpeg's; the count is FFmpeg's."""
    pictures, count, damaged = truth(cases[name], None, None)
    assert (name == "truncated") == damaged
    with fg.VideoReader.open(cases[name], apply_rotation=False, path=path_choice) as reader:
        order = np.random.default_rng(3).permutation(count)
        batch = reader.read_frames_numpy(order)
        assert all(
            np.array_equal(pictures[n], picture) for n, picture in zip(order.tolist(), batch, strict=True)
        )
        for number in order[:8].tolist():
            assert np.array_equal(pictures[number], reader.read_frames_numpy([number])[0])
        if not damaged:
            assert count == reader.num_frames
            with pytest.raises(fg.FrameIndexError):
                reader.read_frames_numpy([count])
        assert (name in CONTAINER) == (reader.index is None or reader.index.container_reason is not None)


@pytest.mark.parametrize("name", [n for n in CASES if n not in CONTAINER])
def test_times_are_the_demuxers(cases, name):
    """Each frame's pts is the one that FFmpeg's full decode gives."""
    import av

    with av.open(str(cases[name])) as container:
        stream = container.streams.best("video")
        pts = [frame.pts for frame in container.decode(stream)]
    assert pts == fg.build_index(cases[name]).frame_pts.tolist()


def test_a_damaged_file_raises_where_the_truth_ends(cases):
    """Behind the last picture of a cut file: a typed error that names the frame; no hang, no repeat."""
    _, count, _ = truth(cases["truncated"], frozenset(), 8)
    with (
        fg.VideoReader.open(cases["truncated"]) as reader,
        pytest.raises(fg.DecodeError, match=f"frame {count + 3}"),
    ):
        reader.read_frames_numpy([count + 3])


def test_another_track_by_its_number(cases):
    """stream_index picks the track that is not FFmpeg's best."""
    path = cases["two video tracks"]
    best = fg.build_index(path)
    other = 1 - best.stream_index
    with fg.VideoReader.open(path, stream_index=other) as reader:
        assert other == reader.index.stream_index
        assert {(best.height, best.width), (reader.index.height, reader.index.width)} == {
            (48, 64),
            (96, 128),
        }
        assert reader.read_frames_numpy([5]).shape[1:3] == (reader.index.height, reader.index.width)
