"""The benchmarks' own arithmetic, and their page."""

from __future__ import annotations

import importlib.util
import random
import sys

import numpy as np
import pytest

import fluxon_gop as fg
from tests.conftest import ROOT


def _tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def bench():
    return _tool("bench")


def test_exact_means_every_value_of_every_picture(bench):
    """One value off by one is not exact; another shape neither."""
    a = np.zeros((2, 4, 4, 3), np.uint8)
    b = a.copy()
    assert {"exact": True, "max_difference": 0, "mean_difference": 0.0} == bench.compare([a], [b])
    b[1, 2, 3, 0] = 1
    assert (False, 1) == (bench.compare([a], [b])["exact"], bench.compare([a], [b])["max_difference"])
    assert not bench.compare([a], [a[:1]])["exact"]


def test_the_least_bytes_are_from_entry_to_target(bench, media):
    """What no reader can do without is what our plan asks for where nothing lies between the samples."""
    index = fg.build_index(media["bframes"])
    with fg.VideoReader.open(media["bframes"], index=index) as reader:
        reader.read_frames_numpy([30])
        assert bench.least_bytes(index, [30]) == reader.stats().total_bytes


def test_every_story_draws_frames_that_are_there(bench):
    """Numbers lie within the video; the same seed draws the same."""
    for story in bench.STORIES:
        drawn = story.draw(random.Random(story.name), 600)
        assert drawn == story.draw(random.Random(story.name), 600)
        assert 0 <= min(drawn) <= max(drawn) < 600


def test_our_peer_reads_what_the_package_reads(media):
    """The benchmark's class for this package gives FFmpeg's frames, and so does plain PyAV's."""
    peers = _tool("bench_peers")
    from tests.media import full_decode

    path = str(media["bframes"])
    truth = full_decode(path)
    for peer in (peers.Ours(), peers.PlainPyAV()):
        peer.prepare(path)
        video = peer.open(path)
        assert np.array_equal(truth[[3, 4, 40]], video.frames([3, 4, 40]))
        video.close()


def test_the_page_has_a_line_for_each_reader():
    """Times, ratio, costs and exactness stand in its row; a reader that cannot read the video is named."""
    table = _tool("bench_table")
    row = {
        "peer": "x",
        "runs": 30,
        "median_ms": 1.5,
        "quartiles_ms": [1.0, 2.0],
        "ours_over_this": 0.5,
        "exact": True,
        "requests": 3,
        "bytes": 12345,
        "bytes_over_least": 1.02,
    }
    assert "| x | 1.50 | 1.00 to 2.00 | 0.50 |  | 3 |  | 12,345 | 1.02 |  | yes |" == table.row_of(row)
    assert "cannot read it: no such codec" in table.row_of(
        {"peer": "y", "runs": 0, "raised": "no such codec"}
    )


def test_a_list_of_cases_is_read_as_it_says(media, tmp_path):
    """Of a case, num_frames frames from start_idx to end_idx, both included, at its size; each is exact."""
    pytest.importorskip("torch")
    tool = _tool("bench_loader")
    cases = tmp_path / "cases.csv"
    rows = [
        f"{n},{media[name]},48,64,{n},{n + 30},4" for n, name in enumerate(("bframes", "hevc", "bframes"))
    ]
    cases.write_text(
        "\n".join(["idx,video_path,height,width,start_idx,end_idx,num_frames", *rows, "9,/x.mp4,1,1,0,1,2"])
    )
    with tool.cases_data(cases, 0) as (data, true_frames, size, _):
        assert (3, (48, 64)) == (len(data), size)
        assert [[0, 10, 20, 30], [1, 11, 21, 31], [2, 12, 22, 32]] == [
            data.clip(n).frames.tolist() for n in range(3)
        ]
        for reader in ("fluxon_gop", "fluxon_gop without look-ahead"):
            figures, kept = tool.run(reader, data, size, 1, 0, 1)
            assert figures["requests_per_batch"]
            for clips, frames in kept:
                assert np.array_equal(true_frames(clips[0]), frames[0])
        assert "| fluxon_gop |" in tool.as_table(
            {"rows": [{**figures, "reader": "fluxon_gop", "latency_ms": 0, "workers": 0, "exact": True}]}
        )
