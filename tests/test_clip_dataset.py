"""ClipDataset: exact clips, one wave a batch, the next batch's bytes ahead, errors as asked."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import fluxon_gop as fg
from fluxon_gop.encode import Recipe
from fluxon_gop.samplers import AheadBatch
from tests.media import full_decode, make
from tools.range_server import RangeServer

NAMES = ("bframes", "hevc", "av1", "faststart")


@pytest.fixture(scope="module")
def paths(media):
    return [media[name] for name in NAMES]


@pytest.fixture(scope="module")
def truth(paths):
    return [full_decode(path) for path in paths]


@pytest.fixture
def served(server):
    """A table of the served videos, its rows in memory."""
    uris = [server.url(f"{name}.mp4") for name in NAMES]
    table = fg.IndexTable.of((uri, fg.build_index(uri)) for uri in uris)
    server.reset()
    return table


def _check(samples, truth):
    for sample in samples:
        assert np.array_equal(truth[sample["video"]][sample["frame_numbers"]], sample["frames"])


def test_every_clip_is_exact(paths, truth):
    """All windows of all videos, some batches, are FFmpeg's frames; their numbers, videos and times are told."""
    with fg.ClipDataset(paths, fg.Windows(4, 3, 2)) as data:
        assert 4 * 18 == len(data)
        for start in range(0, len(data), 16):
            numbers = list(range(start, min(start + 16, len(data))))
            samples = data.__getitems__(numbers)
            assert numbers == [sample["clip"] for sample in samples]
            _check(samples, truth)
            assert np.allclose(samples[0]["frame_numbers"] / 25, samples[0]["pts_seconds"])
        with pytest.raises(IndexError):
            data[len(data)]
        assert len(data) - 1 == data[-1]["clip"]


def test_a_loop_over_it_ends(paths):
    """Iterating by number stops behind the last clip."""
    with fg.ClipDataset(paths[:1], fg.Windows(30, 15)) as data:
        assert [0, 1, 2] == [sample["clip"] for sample in data]


def test_kinds_of_clips(paths, truth):
    """Pairs, listed frames and times name the frames they say."""
    with fg.ClipDataset(paths, fg.Pairs([[2, 7], [0, 50]], 3, 4)) as data:
        samples = data.__getitems__([0, 1])
        assert [[7, 11, 15], [50, 54, 58]] == [s["frame_numbers"].tolist() for s in samples]
        _check(samples, truth)
    with fg.ClipDataset(paths, fg.FrameLists([1, 3], [[9, 0, 9], [59, 58, 57]])) as data:
        _check(data.__getitems__([1, 0]), truth)
    with fg.ClipDataset(paths, fg.Timestamps([1, 0], [1.0, 0.5], [-0.1, 0.0, 0.1])) as data:
        samples = data.__getitems__([0, 1])
        assert [[22, 25, 27], [10, 12, 15]] == [s["frame_numbers"].tolist() for s in samples]
        _check(samples, truth)
        assert data.clip(1).frames.tolist() == [10, 12, 15]
    with fg.ClipDataset(paths, fg.Timestamps([1], [99.0])) as data, pytest.raises(fg.FrameTimestampError):
        data[0]


def test_shapes_and_kinds_of_arrays(paths):
    """NCHW is a view of the same frames; torch tensors hold the same values; resized frames are FFmpeg's."""
    torch = pytest.importorskip("torch")
    small = full_decode(paths[0], 48, 64)
    numbers = {"height": 48, "width": 64}
    with fg.ClipDataset(paths[:1], fg.Windows(5), **numbers) as data:
        assert np.array_equal(small[:5], data[0]["frames"])
    with fg.ClipDataset(paths[:1], fg.Windows(5), layout="NCHW", **numbers) as data:
        assert np.array_equal(small[:5].transpose(0, 3, 1, 2), data[0]["frames"])
    with fg.ClipDataset(paths[:1], fg.Windows(5), array_type="torch", layout="NCHW", **numbers) as data:
        sample = data[0]
        assert isinstance(sample["frames"], torch.Tensor)
        assert (5, 3, 48, 64) == tuple(sample["frames"].shape)
        assert np.array_equal(small[:5].transpose(0, 3, 1, 2), sample["frames"].numpy())
        assert isinstance(sample["pts_seconds"], torch.Tensor)


def test_views_labels_and_transform(paths, truth):
    """Several cameras come together by name; a video's labels are in its samples; the transform has the last word."""
    views = {"front": [paths[0], paths[1]], "wrist": [paths[2], paths[3]]}
    labels = {"task": ["push", "pull"], "goal": np.eye(2)}
    with fg.ClipDataset(views, fg.Windows(3, 20), labels=labels) as data:
        for sample in data.__getitems__([0, 4]):
            video, numbers = sample["video"], sample["frame_numbers"]
            assert np.array_equal(truth[video][numbers], sample["frames"]["front"])
            assert np.array_equal(truth[video + 2][numbers], sample["frames"]["wrist"])
            assert ["push", "pull"][video] == sample["task"]
            assert np.eye(2)[video].tolist() == sample["goal"].tolist()
    with fg.ClipDataset(paths[:1], fg.Windows(3), transform=lambda sample: sample["frames"].mean()) as data:
        assert truth[0][:3].mean() == data[0]


def test_a_batch_is_one_wave(server, served, media):
    """Eight clips of four videos: one request a video at once, each byte from entry point to last frame, no other."""
    server.latency_s = 0.02
    with fg.ClipDataset(served, fg.Windows(4, 8)) as data:
        numbers = [0, 1, 8, 9, 16, 17, 24, 25]
        plan = data.explain(numbers)
        _check(data.__getitems__(numbers), [full_decode(media[name]) for name in NAMES])
        cost = data.cost()
    summary = server.summary()
    assert 4 == summary["requests"] == cost["media_requests"] == plan.requests
    assert 1 == summary["depth"] == cost["media_waves"]
    assert summary["bytes"] == cost["media_bytes"] == plan.nbytes
    assert 8 == cost["clips"]


def test_the_next_batch_is_fetched_while_this_one_decodes(server, served):
    """With a look-ahead's batches no request is sent when a batch is asked for: its wave ran before."""
    with fg.ClipDataset(served, fg.Windows(4, 8)) as data:
        batches = list(fg.LookAhead([[0, 8], [16, 24], [1, 9]], 0))
        data.__getitems__(batches[0])
        _until(lambda: len(server.requests) == 4)
        for count, batch in ((6, batches[1]), (6, batches[2])):
            before = len(server.requests)
            samples = data.__getitems__(batch)
            assert list(batch) == [sample["clip"] for sample in samples]
            _until(lambda count=count: len(server.requests) == count)
            assert before >= 4
        cost = data.cost()
    assert (2, 1, 0) == tuple(cost[f"look_ahead_{name}"] for name in ("hits", "misses", "dropped"))
    assert 6 == len(server.requests)


def _until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def test_what_is_begun_and_not_asked_for_is_dropped(server, served):
    """Another batch than the one ahead gives the begun one up, and is exact."""
    server.latency_s = 0.2
    batch, other = AheadBatch([0]), AheadBatch([16])
    batch.ahead = ((8, 24),)
    batch.owner = other.owner = "a sampler"
    with fg.ClipDataset(served, fg.Windows(4, 8)) as data:
        data.__getitems__(batch)
        assert 16 == data.__getitems__(other)[0]["clip"]
        assert 1 == data.cost()["look_ahead_dropped"]
        # What was sent for nothing is counted too.
        _until(lambda: len(server.requests) == data.cost()["media_requests"] == 4)


def test_dropped_data_sets_leave_nothing_behind(paths):
    """Data sets that nobody closes let go of their threads and files without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(20):
            data = fg.ClipDataset(paths, fg.Windows(4, 4))
            for batch in itertools.islice(fg.LookAhead([[0, 20], [1, 21], [2, 22]]), 2):
                data.__getitems__(batch)
            del data
        _until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before + 4)
        _until(lambda: sum("ahead" in thread.name for thread in threading.enumerate()) < 4)
    finally:
        gc.enable()


def test_threads_share_a_data_set(server, served, media):
    """Threads that read one data set at once, looking ahead, get their own clips."""
    truth = [full_decode(media[name]) for name in NAMES]
    wrong = []
    with fg.ClipDataset(served, fg.Windows(4, 8)) as data:

        def read(seed):
            sampler = fg.ClipSampler(data, seed=seed)
            numbers = list(sampler)
            for batch in fg.LookAhead([numbers[n : n + 4] for n in range(0, len(numbers), 4)]):
                samples = data.__getitems__(batch)
                try:
                    assert list(batch) == [s["clip"] for s in samples]
                    _check(samples, truth)
                except AssertionError as error:
                    wrong.append(error)

        threads = [threading.Thread(target=read, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


@pytest.fixture
def broken(media, tmp_path):
    """A good video, one that ends in its middle, one that is gone after its row was built."""
    good, short, gone = (tmp_path / f"{name}.mp4" for name in ("good", "short", "gone"))
    data = media["faststart"].read_bytes()
    good.write_bytes(data)
    gone.write_bytes(data)
    short.write_bytes(data)
    rows = [(str(path), fg.build_index(path)) for path in (good, short, gone)]
    short.write_bytes(data[: len(data) // 2])
    gone.unlink()
    return fg.IndexTable.of(rows)


def test_errors_as_asked_for(broken, media):
    """raise: the first error; skip: the other clips, counted; mask: black frames that say so, counted."""
    numbers = [0, 2, 3, 5, 6]  # 30 frames each, at 0, 15, 30 of every video
    with fg.ClipDataset(broken, fg.Windows(30, 15)) as data, pytest.raises(fg.FluxonGopError):
        data.__getitems__(numbers)
    truth = full_decode(media["faststart"])
    with fg.ClipDataset(broken, fg.Windows(30, 15), on_error="skip") as data:
        samples = data.__getitems__(numbers)
        assert {0, 2} <= {sample["clip"] for sample in samples} < set(numbers)
        assert {0: 0, 2: 0}[samples[0]["clip"]] == 0
        assert np.array_equal(truth[:30], samples[0]["frames"])
        assert len(numbers) - len(samples) == data.cost()["skipped_clips"]
        with pytest.raises(fg.SourceNotFoundError):
            data[6]
        assert [] == data.__getitems__([6])
    size = {"height": 96, "width": 128}
    with fg.ClipDataset(broken, fg.Windows(30, 15), on_error="mask", **size) as data:
        samples = data.__getitems__(numbers)
        assert numbers == [sample["clip"] for sample in samples]
        valid = [sample["valid"] for sample in samples]
        assert [True, True] == valid[:2]
        assert not valid[4]
        assert not samples[4]["frames"].any()
        assert np.isnan(samples[4]["pts_seconds"]).all()
        assert valid.count(False) == data.cost()["masked_clips"]


def test_a_video_that_cannot_be_read_at_the_start(media, tmp_path, caplog):
    """raise: an error at once; skip, mask: it has no windows, is told, and the others are read; all of them: an error."""
    bad = tmp_path / "bad.mp4"
    bad.write_bytes(b"no video at all, but long enough to look at")
    videos = [media["bframes"], bad, tmp_path / "gone.mp4", media["hevc"]]
    with pytest.raises(fg.FluxonGopError):
        fg.ClipDataset(videos, fg.Windows(30, 30))
    for how in ({"on_error": "skip"}, {"on_error": "mask", "height": 96, "width": 128}):
        with fg.ClipDataset(videos, fg.Windows(30, 30), **how) as data:
            assert {1, 2} == set(data.videos.unreadable)
            assert [0, 0, 3, 3] == [data.clip(n).video for n in range(len(data))]
            assert np.array_equal(full_decode(media["hevc"])[30:], data[3]["frames"])
    assert "cannot be read, its clips are left out" in caplog.text
    with pytest.raises(fg.FluxonGopError):
        fg.ClipDataset(videos[1:3], fg.Windows(30, 30), on_error="skip")


def test_frames_by_time_are_refused_where_the_row_is_old(media, tmp_path):
    """Times are looked up in the row: where the file has changed and shows others then, an error, each time."""
    path = tmp_path / "a.mp4"
    path.write_bytes(media["bframes"].read_bytes())
    table = fg.IndexTable.of([(str(path), fg.build_index(path))])
    slow = make(tmp_path / "slow.mp4", Recipe(rate=10, options={"preset": "ultrafast", "g": "12"}))
    path.write_bytes(slow.read_bytes())
    with fg.ClipDataset([path], fg.Timestamps([0, 0, 0], [1.0, 0.5, 0.0]), index=table) as data:
        for number in (0, 1, 0):
            with pytest.raises(fg.StaleIndexError):
                data[number]
        # The first frame is the first one in both.
        assert np.array_equal(full_decode(path)[[0]], data[2]["frames"])
    with fg.ClipDataset([path], fg.Pairs([[0, 25]]), index=table) as data:
        assert np.array_equal(full_decode(path)[[25]], data[0]["frames"])


def test_a_time_that_is_a_hair_early_is_the_frames(paths, truth):
    """Times of 32 bits, and sums of times, name the frames that they were taken from."""
    times = (np.arange(60) / 25).astype(np.float32)
    with fg.ClipDataset(paths[:1], fg.Timestamps(np.zeros(60, int), times)) as data:
        assert list(range(60)) == [int(data.clip(n).frames[0]) for n in range(60)]
    with fg.ClipDataset(paths[:1], fg.Timestamps([0], [0.1], [0.1 * n for n in range(3)])) as data:
        assert [2, 5, 7] == data.clip(0).frames.tolist()


def test_errors_of_times_are_treated_as_asked(paths, truth):
    """A time outside its video leaves out, or blackens, its own clip only."""
    clips = fg.Timestamps([0, 1, 2], [0.5, 99.0, 1.0], [0.0, 0.04])
    with fg.ClipDataset(paths, clips, on_error="skip") as data:
        samples = data.__getitems__([0, 1, 2])
        assert [0, 2] == [sample["clip"] for sample in samples]
        _check(samples, truth)
    with fg.ClipDataset(paths, clips, on_error="mask", height=96, width=128) as data:
        samples = data.__getitems__([0, 1, 2])
        assert [True, False, True] == [sample["valid"] for sample in samples]
        _check(samples[::2], truth)
    with fg.ClipDataset(paths, clips) as data, pytest.raises(fg.FrameTimestampError):
        data.__getitems__([0, 1, 2])


def test_a_loop_tells_of_a_clip_beyond_its_video(paths):
    """A clip that its video does not have ends a loop with an error, never as if there were no more."""
    with fg.ClipDataset(paths[:2], fg.Windows(30, 30), frame_counts=[90, 60]) as data:
        with pytest.raises(fg.FrameIndexError):
            list(data)


def test_a_label_is_the_samples_own(paths):
    """Changing a sample's label changes no other's; texts of any length are labels, objects are none."""
    labels = {"goal": np.zeros((4, 3)), "task": ["a", "b" * 5000, "c", "d"]}
    with fg.ClipDataset(paths, fg.Windows(60), labels=labels) as data:
        data[0]["goal"][:] = 7
        assert not data[0]["goal"].any()
        assert "b" * 5000 == data[1]["task"]
        assert len(pickle.dumps(data)) < 20_000
    with pytest.raises(fg.InvalidRequestError, match="want numbers, or texts"):
        fg.ClipDataset(paths, fg.Windows(60), labels={"task": ["a", None, "b", "c"]})


def test_a_video_named_twice_is_indexed_once(server):
    """Ten names of one file are one index."""
    server.reset()
    with fg.ClipDataset([server.url("bframes.mp4")] * 10, fg.Windows(60)) as data:
        assert 1 == data.videos.stats.index_builds
        assert 10 == len(data)


def test_the_cost_is_there_after_the_end(paths):
    """Closed, a data set still tells what it read."""
    with fg.ClipDataset(paths, fg.Windows(60)) as data:
        data[0]
    assert 1 == data.cost()["clips"]
    assert data.cost()["media_requests"]


def test_a_pause_is_no_timeout(server, served):
    """The time limit of a batch that was begun ahead starts when it is asked for."""
    batch = AheadBatch([0])
    batch.ahead = ((8, 16, 24),)
    batch.owner = "a sampler"
    later = AheadBatch([8, 16, 24])
    later.owner = "a sampler"
    with fg.ClipDataset(served, fg.Windows(4, 8), timeout=0.5, max_batch_bytes=2000) as data:
        data.__getitems__(batch)
        time.sleep(0.8)
        assert 3 == len(data.__getitems__(later))
        assert 1 == data.cost()["look_ahead_hits"]


def test_videos_without_a_row(media, tmp_path, caplog):
    """What the table lacks is built at the start and travels along; a file without an index is counted by reading."""
    recipe = Recipe(codec="mpeg4", format="avi", options={"g": "12", "bf": "0"})
    avi = make(tmp_path / "a.avi", recipe, count=20)
    table = fg.IndexTable.of([(str(media["bframes"]), fg.build_index(media["bframes"]))])
    videos = [media["bframes"], media["hevc"], avi]
    with fg.ClipDataset(videos, fg.Windows(10, 10), index=table) as data:
        assert [6, 6, 2] == [sum(data.clip(n).video == v for n in range(len(data))) for v in range(3)]
        assert 1 == len(table)
        copy_of = pickle.loads(pickle.dumps(data))
        _check(copy_of.__getitems__([0, 7, 13]), [full_decode(v) for v in videos])
        assert 0 == copy_of.cost()["head_moov_requests"] - copy_of.cost()["index_builds"]
        copy_of.close()
    assert "read through to count them" in caplog.text


def test_given_counts_cost_nothing(server):
    """With frame counts given, nothing is looked up or read before a clip is asked for."""
    uris = [server.url(f"{name}.mp4") for name in NAMES]
    with fg.ClipDataset(uris, fg.Windows(60), frame_counts=[60] * 4) as data:
        assert 4 == len(data)
        assert not server.requests
        assert (60, 96, 128, 3) == data[2]["frames"].shape
    with (
        fg.ClipDataset(uris, fg.Windows(61), frame_counts=[61] * 4) as data,
        pytest.raises(fg.FrameIndexError),
    ):
        data[0]


def test_copies_work_alone(paths, truth):
    """Copies and pickles of a data set in use read by themselves; closed, it stays closed."""
    data = fg.ClipDataset(paths, fg.Pairs([[0, 0], [1, 5]], 4))
    data[0]
    copies = [copy.copy(data), copy.deepcopy(data), pickle.loads(pickle.dumps(data))]
    data.close()
    for one in copies:
        _check(one.__getitems__([0, 1]), truth)
        one.close()
    with pytest.raises(fg.ClosedError):
        data[0]
    with pytest.raises(fg.ClosedError):
        pickle.loads(pickle.dumps(data))[0]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"layout": "HWC"}, ValueError),
        ({"array_type": "jax"}, ValueError),
        ({"on_error": "ignore"}, ValueError),
        ({"on_error": "mask"}, ValueError),
        ({"height": 10}, ValueError),
        ({"index": "index.lance"}, TypeError),
        ({"labels": {"a": [1]}}, ValueError),
        ({"labels": {"frames": [1, 2]}}, ValueError),
        ({"frame_counts": [1]}, ValueError),
        ({"frame_counts": [1.5, 2.0]}, TypeError),
        ({"max_batch_bytes": 0}, ValueError),
        ({"row_cache_bytes": -1}, ValueError),
        ({"timeout": 0}, ValueError),
        ({"transform": 3}, TypeError),
    ],
)
def test_wrong_arguments_are_refused(paths, arguments, error):
    """Before anything is read."""
    with pytest.raises(error):
        fg.ClipDataset(paths[:2], fg.Windows(2), **arguments)


def test_wrong_videos_are_refused(paths):
    """One text is no sequence of addresses; views are of one length; clips are of a known kind."""
    with pytest.raises(TypeError):
        fg.ClipDataset(str(paths[0]), fg.Windows(2))
    with pytest.raises(fg.InvalidRequestError):
        fg.ClipDataset({"a": paths[:1], "b": paths[:2]}, fg.Windows(2))
    with pytest.raises(fg.InvalidRequestError):
        fg.ClipDataset({}, fg.Windows(2))
    with pytest.raises(TypeError):
        fg.ClipDataset(paths, 8)
    with pytest.raises(fg.SourceNotFoundError):
        fg.ClipDataset(["/nowhere.mp4"], fg.Windows(2))
    with fg.ClipDataset(paths, fg.Windows(2)) as data:
        for wrong in (1.0, True, "0", None):
            with pytest.raises(TypeError):
                data[wrong]


def test_no_clip_is_an_error_and_few_are_told(paths, tmp_path, caplog):
    """No video, or windows longer than all of them: an error that says how long they are; than some: a warning."""
    with pytest.raises(fg.InvalidRequestError, match="no video"):
        fg.ClipDataset([], fg.Windows(2))
    with pytest.raises(fg.InvalidRequestError, match="longest of 4 videos has 60 frames"):
        fg.ClipDataset(paths, fg.Windows(61))
    short = make(tmp_path / "short.mp4", Recipe(options={"preset": "ultrafast"}), count=5)
    with fg.ClipDataset([*paths, short], fg.Windows(30)):
        assert "1 of 5 videos are shorter than a window" in caplog.text


def test_a_tiny_budget_reads_all_the_same(server, served, media):
    """Where a batch and the one ahead exceed the bytes that may be held, both come, one after the other."""
    truth = [full_decode(media[name]) for name in NAMES]
    with RangeServer(media["bframes"].parent, latency_s=0.01) as slow:
        uris = [slow.url(f"{name}.mp4") for name in NAMES]
        with fg.ClipDataset(uris, fg.Windows(4, 8), max_batch_bytes=1) as data:
            for batch in fg.LookAhead([[0, 8, 16, 24], [1, 9, 17, 25], [2, 10, 18, 26]]):
                _check(data.__getitems__(batch), truth)
