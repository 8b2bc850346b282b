"""What reads and index builds cost, counted at the server: requests, waves in series, bytes by class."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

import fluxon_gop as fg
from fluxon_gop import entry_points
from fluxon_gop.encode import Recipe
from fluxon_gop.mp4_index import HEAD_BYTES
from fluxon_gop.plan import GAP_BYTES
from fluxon_gop.ranges import as_array, merge, total_bytes
from fluxon_gop.table_build import build_table
from tests.media import full_decode, make
from tools.range_server import RangeServer, summarize

VIDEOS = 16
FRAMES = 120
OPTIONS = {"preset": "ultrafast", "g": "30", "bf": "2", "sc_threshold": "0", "crf": "10"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Sixteen videos of 120 frames, half of them with the movie box first."""
    folder = tmp_path_factory.mktemp("sixteen")
    for n in range(VIDEOS):
        flags = {"movflags": "+faststart"} if n % 2 else {}
        make(
            folder / f"v{n:02}.mp4",
            Recipe(options=OPTIONS, container_options=flags),
            FRAMES,
            320 + 16 * n,
            240,
        )
    return folder


@pytest.fixture
def slow_server(folder):
    """The sixteen over HTTP with 20 ms latency, so that what is in series shows."""
    with RangeServer(folder, latency_s=0.02) as server:
        yield server


@pytest.fixture(scope="module")
def truth(folder) -> list[np.ndarray]:
    return [full_decode(folder / f"v{n:02}.mp4", 64, 64) for n in range(VIDEOS)]


def _requests(server) -> tuple[list[fg.VideoReadRequest], list[list[int]]]:
    generator = random.Random(7)
    starts = [generator.randrange(FRAMES - 16) for _ in range(VIDEOS)]
    clips = [list(range(start, start + 16, 2)) for start in starts]
    return [
        fg.VideoReadRequest(server.url(f"v{n:02}.mp4"), clip, height=64, width=64)
        for n, clip in enumerate(clips)
    ], clips


def _assert_exact(results, clips, truth) -> None:
    for result, clip, pictures in zip(results, clips, truth, strict=True):
        assert np.array_equal(pictures[clip], result.array)


@pytest.mark.parametrize("name", ["table.arrow", "table.lance"])
def test_a_warm_batch_is_one_wave_of_one_request_a_video(slow_server, truth, tmp_path, name):
    """16 clips of 16 videos with rows in memory: 16 requests, depth 1, no unplanned read, no byte wasted."""
    requests, clips = _requests(slow_server)
    with fg.IndexTable.open(tmp_path / name, create=True) as table:
        report = build_table([str(request.uri) for request in requests], table)
        assert (VIDEOS, True) == (report.built, report.is_whole)
        with fg.VideoReaderPool(index=table) as pool:
            table.lookup([str(request.uri) for request in requests])
            plan = pool.explain(requests)
            slow_server.reset()
            # Long enough that a busy machine has sent all requests before the first answer.
            slow_server.latency_s = 0.2
            results = pool.read_many(requests)
            stats = pool.stats()
        _assert_exact(results, clips, truth)
        indexes = [table.lookup([str(request.uri)])[0] for request in requests]
    assert VIDEOS == slow_server.summary()["requests"]
    assert 1 == slow_server.summary()["depth"]
    assert {fg.WaveKind.MEDIA: VIDEOS} == stats.requests
    assert (1, 0) == (stats.depth, stats.unplanned_requests)
    needed = 0
    for index, clip in zip(indexes, clips, strict=True):
        samples = index.frame_sample[clip]
        entry = max(key for key in index.key_samples.tolist() if key <= samples.min())
        needed += int(index.sample_size[entry : samples.max() + 1].sum())
    assert needed <= slow_server.summary()["bytes"] <= 1.05 * needed
    assert (plan.requests, plan.nbytes, plan.waves) == (VIDEOS, slow_server.summary()["bytes"], 1)


def test_a_batch_without_a_table_is_at_most_four_waves_deep(slow_server, truth):
    """Without rows: head, movie box, media; the index classes are counted apart; pictures are exact."""
    requests, clips = _requests(slow_server)
    with fg.VideoReaderPool() as pool:
        results = pool.read_many(requests)
        stats = pool.stats()
    _assert_exact(results, clips, truth)
    for n in range(VIDEOS):
        mine = [request for request in slow_server.requests if request.path == f"v{n:02}.mp4"]
        assert summarize(mine)["depth"] <= 4
    assert max(result.stats.depth for result in results) <= 4
    assert slow_server.summary()["requests"] == stats.total_requests
    assert slow_server.summary()["bytes"] == stats.total_bytes
    assert stats.requests[fg.WaveKind.HEAD_MOOV] <= 2 * VIDEOS
    assert fg.WaveKind.EXTENSION not in stats.requests


def test_the_container_path_is_exact_and_counts_its_holes(slow_server, truth):
    """On the container path every request at the server is in the books, planned or unplanned."""
    requests, clips = _requests(slow_server)
    with fg.VideoReaderPool(path="container") as pool:
        results = pool.read_many(requests)
        stats = pool.stats()
    _assert_exact(results, clips, truth)
    assert VIDEOS == stats.container_reads
    assert slow_server.summary()["requests"] == stats.total_requests
    assert slow_server.summary()["bytes"] == stats.total_bytes


def test_a_batch_beyond_the_byte_budget_runs_in_several_waves(slow_server, truth):
    """With room for about two videos at a time the batch is exact, and deeper than one wave."""
    requests, clips = _requests(slow_server)
    indexes = {request.uri: fg.build_index(request.uri) for request in requests}
    table_bytes = max(index.signature.size for index in indexes.values())
    slow_server.reset()
    with fg.VideoReaderPool(max_batch_bytes=table_bytes) as pool:
        results = pool.read_many(requests)
    _assert_exact(results, clips, truth)
    assert slow_server.summary()["depth"] > 3


@pytest.mark.parametrize("name", ["v00.mp4", "v01.mp4"])
def test_building_an_index_reads_head_moov_and_the_checks_only(folder, name):
    """Movie box last or first: at most the head, the movie box, and the small ranges of the checks."""
    source = fg.TracedSource(fg.LocalSource(folder / name))
    index = fg.build_index(source, check="none")
    moov = index.moov_range
    first = moov.start < HEAD_BYTES
    head = min(HEAD_BYTES, index.signature.size)
    assert len(source.trace.requests) <= 2
    assert source.trace.nbytes == head + max(0, moov.stop - max(moov.start, head))
    assert first == (name == "v01.mp4")

    source.trace.reset()
    checked = fg.build_index(source)
    probes = [entry_points.probe_range(index, int(key)) for key in index.key_samples]
    allowed = total_bytes(merge(as_array(probes), GAP_BYTES))
    assert set(checked.verdicts.tolist()) == {fg.Verdict.PROVEN}
    assert source.trace.nbytes <= head + moov.size + allowed


def test_a_checked_build_is_at_most_three_waves(slow_server):
    """Head, movie box, and all key samples' checks side by side."""
    fg.build_index(slow_server.url("v00.mp4"))
    assert slow_server.summary()["depth"] <= 3


def test_a_small_file_is_indexed_and_checked_by_two_requests(tmp_path):
    """Media data that ends less than 64 KiB behind the head comes with the movie box: no wave of checks, each byte once."""
    recipe = Recipe(options={"preset": "ultrafast", "g": "12"})
    data = make(tmp_path / "small.mp4", recipe, 120, 128, 96).read_bytes()
    source = fg.TracedSource(fg.MemorySource(data))
    index = fg.build_index(source)
    assert HEAD_BYTES < index.moov_range.start <= 2 * HEAD_BYTES
    assert set(index.verdicts.tolist()) == {fg.Verdict.PROVEN}
    assert (2, index.moov_range.stop) == (len(source.trace.requests), source.trace.nbytes)


def test_no_gap_is_read_where_it_saves_nothing(tmp_path):
    """With the movie box in front only the heads of key samples are read beyond the first 64 KiB."""
    recipe = Recipe(
        options={"preset": "ultrafast", "g": "30"}, container_options={"movflags": "+faststart"}
    )
    data = make(tmp_path / "front.mp4", recipe, 120, 192, 144).read_bytes()
    source = fg.TracedSource(fg.MemorySource(data))
    index = fg.build_index(source)
    late = [k for k in index.key_samples.tolist() if index.sample_offset[k] + 1024 > HEAD_BYTES]
    assert HEAD_BYTES + 20_000 < len(data)
    assert late
    assert source.trace.nbytes <= HEAD_BYTES + GAP_BYTES * (len(late) - 1) + 1024 * len(late)
    assert index.moov_range.stop < HEAD_BYTES


def test_a_tail_beyond_the_first_read_costs_one_read_more(tmp_path):
    """A movie box of more than a MiB behind the media is read in two pieces, each byte once."""
    recipe = Recipe(options={"preset": "ultrafast", "g": "9000", "bf": "0"}, rate=30)
    small = make(
        tmp_path / "long.mp4", recipe, 40_000, 16, 16, times=[n * 2 + n % 2 for n in range(40_000)]
    )
    data = small.read_bytes()
    index = fg.build_index(fg.MemorySource(data), check="none")
    source = fg.TracedSource(fg.MemorySource(data))
    fg.build_index(source, check="none")
    assert index.num_frames == 40_000
    assert source.trace.nbytes <= HEAD_BYTES + index.moov_range.size
    assert len(source.trace.requests) <= 3


def test_decoding_starts_at_the_nearest_entry_point(folder):
    """One frame decodes its GOP's pictures up to itself and no other GOP's."""
    path = folder / "v00.mp4"
    index = fg.build_index(path)
    with fg.VideoReader.open(path, index=index) as reader:
        reader.read_frames_numpy([100])
        stats = reader.stats()
    assert 1 == stats.decode_calls
    assert stats.packets_sent <= 100 - 90 + 3
    assert 1 == stats.total_requests


def test_a_table_on_the_same_slow_store_costs_one_index_wave(slow_server, folder, truth, tmp_path):
    """A remote .arrow table is one request when it is opened; the batch is still one wave of one request a video."""
    requests, clips = _requests(slow_server)
    table = fg.IndexTable.open(folder / "rows.arrow", create=True)
    table.replace([(str(request.uri), fg.build_index(request.uri)) for request in requests])
    slow_server.reset()
    slow_server.latency_s = 0.2
    remote = fg.IndexTable.open(slow_server.url("rows.arrow"))
    with fg.VideoReaderPool(index=remote) as pool:
        _assert_exact(pool.read_many(requests), clips, truth)
        stats = pool.stats()
    assert VIDEOS + 1 == slow_server.summary()["requests"]
    assert 2 == slow_server.summary()["depth"]
    assert {fg.WaveKind.INDEX: 1, fg.WaveKind.MEDIA: VIDEOS} == stats.requests
    assert 2 == stats.depth


def test_a_remote_table_is_read_only_and_named_without_secrets(slow_server, folder):
    """Writing says what to do; a signed address's query is in no message; another name is no table."""
    table = fg.IndexTable.open(folder / "own.arrow", create=True)
    index = fg.build_index(folder / "v00.mp4")
    table.replace([("a", index)])
    remote = fg.IndexTable.open(slow_server.url("own.arrow") + "?token=geheim")
    assert ["a"] == remote.keys()
    with pytest.raises(fg.IndexTableError, match="upload it") as caught:
        remote.append([("b", index)])
    assert "geheim" not in f"{caught.value} {remote!r} {remote.uri}"
    with pytest.raises(fg.IndexTableError, match="a Lance data set"):
        fg.IndexTable.open(slow_server.url("table.lance"))
    with pytest.raises(fg.IndexTableError, match="no index table"):
        fg.IndexTable.open(slow_server.url("none.arrow"))
    (folder / "noise.arrow").write_bytes(b"no table" * 9)
    with pytest.raises(fg.IndexTableError, match="no Arrow IPC file"):
        fg.IndexTable.open(slow_server.url("noise.arrow"))
