"""``pool.prefetch``: a batch's waves run before it is asked for, within the pool's bytes, and nothing is lost."""

from __future__ import annotations

import gc
import os
import threading
import time

import numpy as np
import pytest

import fluxon_gop as fg
from tests.media import full_decode

NAMES = ("bframes", "hevc", "av1", "faststart")


@pytest.fixture
def table(server):
    """Rows of the served videos."""
    urls = [server.url(f"{name}.mp4") for name in NAMES]
    rows = [(url, fg.build_index(url)) for url in urls]
    server.reset()
    return rows


@pytest.fixture
def pool(table, tmp_path):
    index = fg.IndexTable.open(tmp_path / "t.arrow", create=True)
    index.append(table)
    index.lookup([key for key, _ in table])
    with fg.VideoReaderPool(index=index) as pool:
        yield pool


def _requests(server, *frames):
    return [fg.VideoReadRequest(server.url(f"{name}.mp4"), list(frames)) for name in NAMES]


def _wait_for(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def test_the_wave_is_done_before_the_batch_is_asked_for(media, server, pool):
    """All bytes come ahead by one request a video; reading the handle sends none, and is exact."""
    handle = pool.prefetch(_requests(server, 3, 40))
    _wait_for(lambda: len(server.requests) == len(NAMES))
    assert 0 == pool.stats().frames_decoded
    results = pool.read_many(handle)
    assert len(NAMES) == len(server.requests)
    for name, result in zip(NAMES, results, strict=True):
        assert np.array_equal(full_decode(media[name])[[3, 40]], result.array)
        assert 1 == result.stats.depth
    assert {fg.WaveKind.MEDIA: len(NAMES)} == pool.stats().requests


def test_without_rows_all_waves_come_ahead(media, server):
    """Head, movie box and media are fetched while nobody asks yet."""
    with fg.VideoReaderPool() as pool:
        handle = pool.prefetch(_requests(server, 7))
        _wait_for(lambda: len(server.requests) >= 2 * len(NAMES))
        time.sleep(0.1)
        before = len(server.requests)
        results = pool.read_many(handle)
        assert before == len(server.requests) == pool.stats().total_requests
    for name, result in zip(NAMES, results, strict=True):
        assert np.array_equal(full_decode(media[name])[[7]], result.array)


def test_a_loop_that_looks_one_batch_ahead_is_exact(media, server, pool):
    """The next batch's reads are under way while this one decodes; readers on the same video do not mix."""
    truth = {name: full_decode(media[name]) for name in NAMES}
    batches = [[n, n + 9, n + 1] for n in range(0, 45, 5)]
    handle = pool.prefetch(_requests(server, *batches[0]))
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        ahead = pool.prefetch(_requests(server, *following)) if following else None
        for name, result in zip(NAMES, pool.read_many(handle), strict=True):
            assert np.array_equal(truth[name][batch], result.array)
        handle = ahead
    assert 0 == pool.counts()["active_readers"]


def test_batches_ahead_stay_within_the_pools_bytes(media, server, table, tmp_path):
    """With room for one batch the second one's wave is sent when the first one's bytes are given back."""
    index = fg.IndexTable.open(tmp_path / "t.arrow", create=True)
    index.append(table)
    frames = list(range(60))
    with fg.VideoReaderPool(index=index) as measure:
        need = measure.explain(_requests(server, *frames)).nbytes
    with fg.VideoReaderPool(index=index, max_batch_bytes=need) as pool:
        first = pool.prefetch(_requests(server, *frames))
        _wait_for(lambda: len(server.requests) == len(NAMES))
        second = pool.prefetch(_requests(server, *frames))
        time.sleep(0.2)
        assert len(NAMES) == len(server.requests)
        pool.read_many(first)
        _wait_for(lambda: len(server.requests) == 2 * len(NAMES))
        results = pool.read_many(second)
    for name, result in zip(NAMES, results, strict=True):
        assert np.array_equal(full_decode(media[name]), result.array)


def test_a_batch_larger_than_the_budget_is_read_ahead_in_part_and_then_whole(
    media, server, table, tmp_path
):
    """What fits comes ahead, the rest when the batch is read."""
    index = fg.IndexTable.open(tmp_path / "t.arrow", create=True)
    index.append(table)
    frames = list(range(60))
    with fg.VideoReaderPool(index=index, max_batch_bytes=40_000) as pool:
        handle = pool.prefetch(_requests(server, *frames))
        _wait_for(lambda: server.requests)
        results = pool.read_many(handle)
    for name, result in zip(NAMES, results, strict=True):
        assert np.array_equal(full_decode(media[name]), result.array)


def test_errors_come_when_the_batch_is_read(media, server, pool):
    """A missing file and a number beyond the end are raised by read_many, or skipped there; not by prefetch."""
    requests = [*_requests(server, 1), fg.VideoReadRequest(server.url("none.mp4"), [0])]
    requests.append(fg.VideoReadRequest(server.url("hevc.mp4"), [999]))
    handle = pool.prefetch(requests)
    results = pool.read_many(handle, on_error="skip")
    errors = [type(result.error) for result in results]
    assert [type(None)] * len(NAMES) + [fg.SourceNotFoundError, fg.FrameIndexError] == errors
    assert np.array_equal(full_decode(media["hevc"])[[1]], results[1].array)
    with pytest.raises(fg.SourceNotFoundError):
        pool.read_many(pool.prefetch(requests[-2:-1]))


def test_a_handle_is_read_once_and_by_its_pool(media, server, pool):
    """A second read, a read after close and a read by another pool are refused by name."""
    handle = pool.prefetch(_requests(server, 1))
    with fg.VideoReaderPool() as other, pytest.raises(fg.InvalidRequestError, match="another pool"):
        other.read_many(handle)
    pool.read_many(handle)
    with pytest.raises(fg.ClosedError, match="read or closed already"):
        pool.read_many(handle)
    with pool.prefetch(_requests(server, 1)) as closed:
        pass
    with pytest.raises(fg.ClosedError):
        pool.read_many(closed)
    with pytest.raises(TypeError, match="want VideoReadRequest"):
        pool.prefetch(["a.mp4"])


@pytest.mark.parametrize("way", ["close", "forget", "close the pool"])
def test_a_batch_that_nobody_reads_leaves_nothing_behind(server, pool, way):
    """Closed, forgotten, or its pool closed in the midst: no read goes on, no thread stays, readers are back."""
    server.latency_s = 0.2
    handle = pool.prefetch(_requests(server, 1))
    _wait_for(lambda: server.requests)
    if way == "close":
        handle.close()
    elif way == "forget":
        del handle
        gc.collect()
    else:
        pool.close()
    _wait_for(lambda: not [thread for thread in threading.enumerate() if "ahead" in thread.name])
    _wait_for(lambda: not pool.counts()["active_readers"])
    done = time.monotonic()
    time.sleep(0.5)
    # The server puts a request on record when it answers; one that was called off it began before.
    assert all(record.started < done for record in server.requests)


def test_a_closed_pool_starts_no_batch(server, pool):
    """prefetch on a closed pool raises at once."""
    pool.close()
    with pytest.raises(fg.ClosedError, match="closed"):
        pool.prefetch(_requests(server, 1))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_batch_of_the_parent_is_refused_in_a_forked_child(media):
    """The thread that reads ahead does not live there: the child is told at once."""
    with fg.VideoReaderPool() as pool:
        handle = pool.prefetch([fg.VideoReadRequest(media["bframes"], [1])])
        child = os.fork()
        if child == 0:
            try:
                pool.read_many(handle)
            except fg.ForkedProcessError:
                os._exit(7)
            finally:
                os._exit(1)
        assert 7 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        (result,) = pool.read_many(handle)
    assert np.array_equal(full_decode(media["bframes"])[[1]], result.array)


def test_an_error_of_the_thread_ahead_is_raised_where_the_batch_is_read(media, pool, monkeypatch):
    """Where no thread can be had for a read, read_many says so and does not wait for ever."""
    from fluxon_gop import threads

    def none():
        text = "can't start new thread"
        raise RuntimeError(text)

    monkeypatch.setattr(threads, "io_pool", none)
    local = [fg.VideoReadRequest(media[name], [1]) for name in NAMES]
    handle = pool.prefetch(local)
    with pytest.raises(RuntimeError, match="can't start"):
        pool.read_many(handle)
    assert 0 == pool.counts()["active_readers"]


def test_one_failing_video_leaves_the_other_readers_open(media, server, pool):
    """Readers that did their work, or were not asked yet, are there for the next batch."""
    pool.read_many(_requests(server, 1))
    with pytest.raises(fg.SourceNotFoundError):
        pool.read_many([*_requests(server, 2), fg.VideoReadRequest(server.url("none.mp4"), [0])])
    assert len(NAMES) + 1 == pool.counts()["current_readers"]
    pool.prefetch(_requests(server, 3)).close()
    assert 0 == pool.counts()["close_count"]
