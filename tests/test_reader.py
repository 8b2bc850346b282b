"""One video: exact frames in any order, and bad requests refused by name."""

from __future__ import annotations

import os
import pickle
import threading
from dataclasses import replace

import numpy as np
import pytest

import fluxon_gop as fg
from fluxon_gop.model import Orientation
from tests.media import RECIPES, full_decode, make


@pytest.mark.parametrize("path_choice", [None, "container"])
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_reads_exactly(media, name, path_choice):
    """All frames in one batch, and each alone in random order, are FFmpeg's."""
    truth = full_decode(media[name])
    with fg.VideoReader.open(media[name], apply_rotation=False, path=path_choice) as reader:
        assert len(truth) == len(reader) == reader.num_frames
        order = np.random.default_rng(5).permutation(len(truth))
        assert np.array_equal(truth[order], reader.read_frames_numpy(order))
        for frame in order[:20].tolist():
            assert np.array_equal(truth[frame : frame + 1], reader.read_frames_numpy([frame]))


def test_order_repeats_and_emptiness(media):
    """Any order, repeats allowed; [] gives no pictures of the right size; the array is the caller's."""
    truth = full_decode(media["bframes"])
    with fg.VideoReader.open(media["bframes"]) as reader:
        frames = reader.read_frames_numpy([8, 0, 8, 59, 0])
        assert np.array_equal(truth[[8, 0, 8, 59, 0]], frames)
        assert (np.uint8, True, True) == (frames.dtype, frames.flags.owndata, frames.flags.writeable)
        assert (0, 96, 128, 3) == reader.read_frames_numpy([]).shape
        assert np.array_equal(truth[[4, 2]], reader.read_frames_numpy(np.array([4, 2], np.int32)))
        assert np.array_equal(truth[3:9:3], reader.read_frames_numpy(range(3, 9, 3)))


@pytest.mark.parametrize("size", [(48, 64), (97, 33), (224, 224)])
def test_scaling_is_one_swscale_pass(media, size):
    """At another size the pixels are PyAV's reformat's, bit for bit."""
    truth = full_decode(media["bframes"], *size)
    with fg.VideoReader.open(media["bframes"], height=size[0], width=size[1]) as reader:
        assert np.array_equal(truth[[5, 50]], reader.read_frames_numpy([5, 50]))


@pytest.mark.parametrize("path_choice", [None, "container"])
def test_rotation_turns_after_scaling_to_the_swapped_size(media, path_choice):
    """A quarter turn swaps the sides; the picture is the scaled one, turned in numpy."""
    path = media["rotated"]
    with fg.VideoReader.open(path, path=path_choice) as reader:
        upright = reader.read_frames_numpy([10])[0]
        assert (128, 96, 3) == upright.shape
        # PyAV's rotation of 90 is a matrix that FFmpeg's autorotation turns a quarter to the left.
        assert np.array_equal(np.rot90(full_decode(path)[10], 1), upright)
    with fg.VideoReader.open(path, height=60, width=40, path=path_choice) as reader:
        assert np.array_equal(np.rot90(full_decode(path, 40, 60)[10], 1), reader.read_frames_numpy([10])[0])


def test_times_find_frames_on_vfr(tmp_path):
    """pts_seconds are the stream's own times, and frame_at finds each frame at its time."""
    times = [n + 2 * (n // 3) for n in range(60)]
    path = make(tmp_path / "vfr.mp4", RECIPES["bframes"], times=times)
    with fg.VideoReader.open(path) as reader:
        index = reader.index
        assert np.allclose(np.array(times) / 25, index.pts_seconds)
        assert list(range(60)) == [index.frame_at(seconds) for seconds in index.pts_seconds]
        assert np.array_equal(full_decode(path), reader.read_frames_numpy(range(60)))


@pytest.mark.parametrize("name", ["bframes", "hevc", "fragmented", "longgop"])
def test_iter_frames_yields_each_frame_in_order(media, name):
    """Start, stop and step pick frames; nothing is decoded twice on the packet path."""
    truth = full_decode(media[name])
    with fg.VideoReader.open(media[name]) as reader:
        pairs = list(reader.iter_frames(7, 50, 3))
        assert list(range(7, 50, 3)) == [number for number, _ in pairs]
        assert all(np.array_equal(truth[number], picture) for number, picture in pairs)
        assert 60 == sum(1 for _ in reader.iter_frames())
        assert [] == list(reader.iter_frames(60))


def test_iter_frames_reads_in_bounded_waves(tmp_path, monkeypatch):
    """A long GOP comes in waves, each byte once."""
    monkeypatch.setattr("fluxon_gop.video_jobs.MAX_REQUEST_BYTES", 20_000)
    path = make(tmp_path / "long.mp4", RECIPES["longgop"], 100)
    source = fg.TracedSource(fg.LocalSource(path))
    with fg.VideoReader.open(source) as reader:
        source.trace.reset()
        assert 100 == sum(1 for _ in reader.iter_frames())
        assert len(source.trace.requests) > 3
        assert source.trace.nbytes <= int(reader.index.sample_size.sum()) + 4096


@pytest.mark.parametrize(
    ("indices", "error", "words"),
    [
        ([-1], ValueError, "frame -1 is negative"),
        ([60], IndexError, r"frame 60 is beyond the end: the video has 60 frames"),
        ([True], TypeError, "a bool"),
        ([np.bool_(1)], TypeError, "a bool"),
        ([1.0], TypeError, "a float"),
        (np.array([1.0]), TypeError, "array of float64"),
        (np.zeros((2, 2), int), TypeError, r"shape \(2, 2\)"),
        ("12", TypeError, "a str"),
        (7, TypeError, "a int"),
    ],
)
def test_senseless_frame_numbers_are_refused(media, indices, error, words):
    """Each message says what was given and what is wanted."""
    with fg.VideoReader.open(media["bframes"]) as reader:
        with pytest.raises(error, match=words) as caught:
            reader.read_frames_numpy(indices)
        if isinstance(caught.value, fg.FrameIndexError):
            assert (60, 60) == (caught.value.index, caught.value.length)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"height": 3}, ValueError, "give both, or neither"),
        ({"height": 0, "width": 4}, ValueError, "height is 0: want a positive number"),
        ({"height": 2.5, "width": 4}, TypeError, "want an int"),
        ({"num_threads": 0}, ValueError, "num_threads is 0"),
        ({"path": "fast"}, ValueError, "path is 'fast'"),
        ({"index": "table"}, TypeError, "want a VideoIndex, an IndexTable, or None"),
        ({"stream_index": 5}, fg.UnsupportedMp4Error, "stream 5 is no video track"),
    ],
)
def test_senseless_choices_are_refused(media, options, error, words):
    """Each message names the argument."""
    with pytest.raises(error, match=words):
        fg.VideoReader.open(media["bframes"], **options)


def test_what_is_no_video_is_a_decode_error(tmp_path):
    """A text file opens (it may be any container) and says what FFmpeg says at the first read."""
    (tmp_path / "text.mp4").write_text("no video at all, just words " * 50)
    with (
        fg.VideoReader.open(tmp_path / "text.mp4") as reader,
        pytest.raises(fg.DecodeError, match="cannot open"),
    ):
        reader.read_frames_numpy([0])


def test_a_damaged_picture_names_itself_and_spares_the_others(media, tmp_path):
    """Garbage in one GOP's last picture raises for that frame; other GOPs read exactly."""
    path = tmp_path / "damaged.mp4"
    index = fg.build_index(media["longgop"])
    data = bytearray(media["longgop"].read_bytes())
    start, size = int(index.sample_offset[40]), int(index.sample_size[40])
    data[start : start + size] = b"\xff" * size
    path.write_bytes(data)
    truth = full_decode(media["longgop"])
    with fg.VideoReader.open(path) as reader:
        assert np.array_equal(truth[[39]], reader.read_frames_numpy([39]))
        with pytest.raises(fg.DecodeError, match="no picture for frame 40") as caught:
            reader.read_frames_numpy([39, 40])
        assert (40,) == caught.value.frames
        assert reader.stats().decode_errors > 0


def test_a_closed_reader_refuses_reads(media):
    """Use after close says so."""
    reader = fg.VideoReader.open(media["bframes"])
    reader.close()
    with pytest.raises(fg.ClosedError, match="closed"):
        reader.read_frames_numpy([0])


def test_threads_that_share_a_reader_take_turns(media):
    """Eight threads on one reader all get exact frames."""
    truth = full_decode(media["hevc"])
    failures = []
    with fg.VideoReader.open(media["hevc"]) as reader:

        def read(seed):
            for frame in np.random.default_rng(seed).integers(0, 60, 6).tolist():
                if not np.array_equal(truth[frame], reader.read_frames_numpy([frame])[0]):
                    failures.append(frame)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert [] == failures


@pytest.mark.parametrize("threads", [2, 3])
def test_frame_threads_give_the_same_pictures(media, threads):
    """num_threads changes the time, never a pixel."""
    for name in ("bframes", "hevc", "vp9", "av1"):
        truth = full_decode(media[name])
        with fg.VideoReader.open(media[name], num_threads=threads) as reader:
            assert np.array_equal(truth[[0, 13, 47]], reader.read_frames_numpy([0, 13, 47]))


def test_a_pickled_reader_reads_on_elsewhere(media):
    """The pickle carries address and index; the copy builds none."""
    truth = full_decode(media["bframes"])
    with fg.VideoReader.open(media["bframes"], height=48, width=64) as reader:
        with pickle.loads(pickle.dumps(reader)) as copy:
            frames = copy.read_frames_numpy([30])
            assert (0, (1, 48, 64, 3)) == (copy.stats().index_builds, frames.shape)
            assert np.array_equal(reader.read_frames_numpy([30]), frames)
    assert truth is not None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Lance's own, at a fork
def test_a_reader_of_a_local_file_works_in_a_forked_child(media):
    """The child makes its own decoder and reads through the parent's open file."""
    truth = full_decode(media["bframes"])
    with fg.VideoReader.open(media["bframes"]) as reader:
        reader.read_frames_numpy([3])
        child = os.fork()
        if child == 0:
            try:
                same = np.array_equal(truth[[50, 4]], reader.read_frames_numpy([50, 4]))
            finally:
                os._exit(0 if same else 1)
        assert 0 == os.waitpid(child, 0)[1]


def test_a_wrong_sync_claim_is_found_and_the_plan_extended(media, monkeypatch):
    """A P-frame called sync is refuted on its planned bytes; the extension is counted; frames are exact."""
    monkeypatch.setattr("fluxon_gop.plan.GAP_BYTES", 0)
    index = fg.build_index(media["longgop"], check="none")
    lying = replace(index, key_samples=np.array([0, 20]), verdicts=np.zeros(2, np.uint8))
    truth = full_decode(media["longgop"])
    with fg.VideoReader.open(media["longgop"], index=lying) as reader:
        assert np.array_equal(truth[[30]], reader.read_frames_numpy([30]))
        stats = reader.stats()
    assert 1 == stats.refuted_entry_points
    assert 1 == stats.requests[fg.WaveKind.EXTENSION]
    assert 2 == stats.depth


def test_times_in_another_order_than_the_decoders_go_to_the_container_path(media):
    """Presentation times that contradict the bitstream never give a shifted picture."""
    index = fg.build_index(media["bframes"])
    pts = index.sample_pts.copy()
    pts[13:15] = pts[13:15][::-1]
    truth = full_decode(media["bframes"])
    with fg.VideoReader.open(media["bframes"], index=replace(index, sample_pts=pts)) as reader:
        assert np.array_equal(truth[12:24], reader.read_frames_numpy(range(12, 24)))
        assert "order of pictures" in reader.index.container_reason


def test_the_upright_size_is_the_default(media):
    """Without a size the array has the size of the picture as it is shown."""
    with fg.VideoReader.open(media["rotated"]) as reader:
        assert (128, 96) == reader.index.upright_size()
        assert (96, 128) == reader.index.upright_size(apply_rotation=False)
        assert reader.index.orientation != Orientation()
        assert "VideoReader(" in repr(reader)
