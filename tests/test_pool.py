"""Batches over many videos: one plan, leased readers, errors where they belong."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest

import fluxon_gop as fg
from tests.media import full_decode

NAMES = ["bframes", "hevc", "vp9", "mpeg4"]


@pytest.fixture
def truth(media):
    return {name: full_decode(media[name]) for name in NAMES}


def test_results_come_in_request_order(media, truth):
    """Several requests a video, mixed with others, each get their own rows."""
    asked = [("hevc", [5, 1]), ("bframes", [50]), ("hevc", [1, 1, 30]), ("mpeg4", [9]), ("vp9", [])]
    with fg.VideoReaderPool() as pool:
        results = pool.read_many([fg.VideoReadRequest(media[name], frames) for name, frames in asked])
        counts = pool.counts()
    for (name, frames), result in zip(asked, results, strict=True):
        assert np.array_equal(truth[name][frames], result.array)
        assert result.error is None
    assert results[0].stats is results[2].stats
    assert (4, 4, 0) == (counts["open_count"], counts["current_readers"], counts["active_readers"])
    assert "uint8" in repr(results[0])


def test_readers_are_reused_and_the_least_recently_used_is_closed(media):
    """The second batch hits; with room for two, the third video's reader drives the oldest out."""
    with fg.VideoReaderPool(max_readers=2) as pool:
        for name in ("bframes", "bframes", "hevc", "vp9"):
            pool.read_many([fg.VideoReadRequest(media[name], [0])])
        counts = pool.counts()
    assert (1, 3) == (counts["reader_cache_hits"], counts["reader_cache_misses"])
    assert (2, 1, 1) == (counts["current_readers"], counts["evict_count"], counts["close_count"])


def test_two_sizes_of_a_video_are_two_readers(media):
    """The output size is part of the key."""
    path = media["bframes"]
    requests = [fg.VideoReadRequest(path, [0]), fg.VideoReadRequest(path, [0], height=48, width=64)]
    with fg.VideoReaderPool() as pool:
        shapes = [result.array.shape for result in pool.read_many(requests)]
        assert 2 == pool.counts()["current_readers"]
    assert [(1, 96, 128, 3), (1, 48, 64, 3)] == shapes


def test_skip_keeps_the_rest_of_the_batch(media, truth, tmp_path):
    """A missing file and a number beyond the end spoil their own requests only, and say why."""
    requests = [
        fg.VideoReadRequest(media["bframes"], [3]),
        fg.VideoReadRequest(tmp_path / "missing.mp4", [0]),
        fg.VideoReadRequest(media["bframes"], [99]),
        fg.VideoReadRequest(media["vp9"], [7]),
    ]
    with fg.VideoReaderPool() as pool:
        results = pool.read_many(requests, on_error="skip")
        assert np.array_equal(truth["bframes"][[3]], results[0].array)
        assert np.array_equal(truth["vp9"][[7]], results[3].array)
        assert [fg.SourceNotFoundError, fg.FrameIndexError] == [type(r.error) for r in results[1:3]]
        assert results[1].array is None
        with pytest.raises(fg.FluxonGopError):
            pool.read_many(requests)
        assert np.array_equal(
            truth["vp9"][[1]], pool.read_many([fg.VideoReadRequest(media["vp9"], [1])])[0].array
        )
        assert 0 == pool.counts()["active_readers"]


def test_a_damaged_frame_spoils_the_requests_that_hold_it(media, tmp_path):
    """Of two clips of one video only the one with the damaged picture fails."""
    path = tmp_path / "damaged.mp4"
    index = fg.build_index(media["bframes"])
    data = bytearray(media["bframes"].read_bytes())
    start, size = int(index.sample_offset[59]), int(index.sample_size[59])
    data[start : start + size] = b"\xff" * size
    path.write_bytes(data)
    bad = int(index.sample_frame[59])
    with fg.VideoReaderPool() as pool:
        one, two = pool.read_many(
            [fg.VideoReadRequest(path, [1, 2]), fg.VideoReadRequest(path, [bad])], on_error="skip"
        )
    assert one.error is None
    assert (bad,) == two.error.frames


def test_explain_reads_no_video(media, server, tmp_path):
    """The plan of a batch with rows costs no request; it prints waves, requests, bytes, path and reason."""
    urls = {name: server.url(f"{name}.mp4") for name in NAMES}
    with fg.IndexTable.open(tmp_path / "t.arrow", create=True) as table:
        table.append([(url, fg.build_index(url)) for name, url in urls.items() if name != "vp9"])
        server.reset()
        with fg.VideoReaderPool(index=table) as pool:
            plan = pool.explain([fg.VideoReadRequest(url, [3, 30]) for url in urls.values()])
    assert [] == server.requests
    text = str(plan)
    assert "4 videos: 3 waves" in text
    assert "no packets are cut of mp4v (MPEG-4 part 2)" in text
    assert "no row: head and movie box first" in text
    assert plan.over_read >= 1.0


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda pool: pool.read_many([], on_error="ignore"), ValueError, "want 'raise' or 'skip'"),
        (lambda pool: pool.read_many(["x.mp4"]), TypeError, "want VideoReadRequest"),
        (lambda pool: fg.VideoReadRequest("x", [0], height=4), ValueError, "give both"),
        (lambda pool: fg.VideoReadRequest("x", [-2]), ValueError, "negative"),
        (lambda pool: fg.VideoReaderPool(0), ValueError, "max_readers is 0"),
        (lambda pool: fg.VideoReaderPool(max_batch_bytes=0), ValueError, "max_batch_bytes is 0"),
    ],
)
def test_senseless_batches_are_refused(call, error, words):
    """Each message names the argument."""
    with fg.VideoReaderPool() as pool, pytest.raises(error, match=words):
        call(pool)


def test_an_empty_batch_is_an_empty_list():
    """No requests, no waves."""
    with fg.VideoReaderPool() as pool:
        assert [] == pool.read_many([])
        assert 0 == pool.explain([]).waves


def test_a_closed_pool_refuses_batches(media):
    """Use after close says so; the readers are closed."""
    pool = fg.VideoReaderPool()
    pool.read_many([fg.VideoReadRequest(media["bframes"], [0])])
    pool.close()
    with pytest.raises(fg.ClosedError, match="closed"):
        pool.read_many([fg.VideoReadRequest(media["bframes"], [0])])
    assert (0, 1) == (pool.counts()["current_readers"], pool.counts()["close_count"])


def test_closing_a_pool_ends_its_batch(server):
    """A batch that waits for the network ends with ClosedError, and no request is left running."""
    server.latency_s = 0.3
    pool = fg.VideoReaderPool()
    threading.Timer(0.1, pool.close).start()
    requests = [fg.VideoReadRequest(server.url(f"{name}.mp4"), [0]) for name in NAMES]
    with pytest.raises(fg.ClosedError):
        pool.read_many(requests)
    before = len(server.requests)
    server.latency_s = 0
    assert before == len(server.requests)


def test_threads_share_a_pool(media, truth):
    """Six threads with batches of their own on one pool all get exact frames."""
    failures = []
    with fg.VideoReaderPool(max_readers=3) as pool:

        def read(seed):
            generator = np.random.default_rng(seed)
            for _ in range(4):
                asked = [
                    (name, generator.integers(0, 60, 3).tolist()) for name in generator.permutation(NAMES)
                ]
                results = pool.read_many(
                    [fg.VideoReadRequest(media[name], frames) for name, frames in asked]
                )
                for (name, frames), result in zip(asked, results, strict=True):
                    if not np.array_equal(truth[name][frames], result.array):
                        failures.append((name, frames))

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        assert pool.counts()["current_readers"] <= 3
    assert [] == failures


def test_a_pickled_pool_is_a_recipe(media, truth):
    """The copy opens its own readers."""
    with fg.VideoReaderPool(5) as pool:
        pool.read_many([fg.VideoReadRequest(media["vp9"], [0])])
        with pickle.loads(pickle.dumps(pool)) as copy:
            (result,) = copy.read_many([fg.VideoReadRequest(media["vp9"], [12])])
            assert 5 == copy.counts()["max_readers"]
    assert np.array_equal(truth["vp9"][[12]], result.array)


def test_sources_may_stand_for_uris(media, truth):
    """A request may name a RangeSource; the caller's source stays the caller's key."""
    source = fg.MemorySource(media["bframes"].read_bytes(), name="in memory")
    with fg.VideoReaderPool() as pool:
        results = pool.read_many([fg.VideoReadRequest(source, [n]) for n in (3, 4)])
    assert np.array_equal(truth["bframes"][[3]], results[0].array)
