"""Fragments: found by few waves, indexed as FFmpeg does, read as one video."""

from __future__ import annotations

import av
import numpy as np
import pytest

import fluxon_gop as fg
from fluxon_gop.encode import Recipe
from fluxon_gop.mp4_chain import WINDOW
from tests.cases import BASE, FRAGMENTS, remux
from tests.media import full_decode, make
from tools.range_server import RangeServer

LONG = 1500
"""Frames of the long file, a fragment every 10: 150 fragments."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make(tmp_path_factory.mktemp("fragments") / "base.mp4", BASE, 100)


@pytest.fixture(scope="module")
def long_files(tmp_path_factory):
    """A file of many small fragments: with sidx, with mfra, and with neither."""
    folder = tmp_path_factory.mktemp("long")
    recipe = Recipe(options={"preset": "ultrafast", "g": "10", "bf": "2", "sc_threshold": "0", "crf": "8"})
    whole = make(folder / "whole.mp4", recipe, LONG, 320, 240)
    options = {
        "sidx": FRAGMENTS + "+dash+global_sidx",
        "mfra": FRAGMENTS,
        "none": FRAGMENTS + "+skip_trailer",
    }
    return {
        name: remux(whole, folder / f"{name}.mp4", options={"movflags": flags})
        for name, flags in options.items()
    }


@pytest.mark.parametrize(
    "flags",
    [
        FRAGMENTS,
        FRAGMENTS + "+negative_cts_offsets",
        "frag_keyframe",
        "frag_keyframe+empty_moov",
        "frag_every_frame+empty_moov+default_base_moof",
        FRAGMENTS + "+dash",
        FRAGMENTS + "+dash+global_sidx",
        FRAGMENTS + "+omit_tfhd_offset",
        "frag_keyframe+empty_moov+separate_moof+cmaf",
    ],
)
def test_every_way_of_fragmenting_is_indexed_as_ffmpeg_does(base, tmp_path, flags):
    """Offsets, sizes, times, keys and frames are FFmpeg's demuxer's and decoder's."""
    path = remux(base, tmp_path / "f.mp4", options={"movflags": flags})
    index = fg.build_index(path)
    assert index.container_reason is None
    with av.open(str(path)) as container:
        packets = [p for p in container.demux(container.streams.video[0]) if p.size]
    assert [p.pts for p in packets] == index.sample_pts.tolist()
    assert [p.dts for p in packets] == index.sample_dts.tolist()
    assert [p.pos for p in packets] == index.sample_offset.tolist()
    assert [p.size for p in packets] == index.sample_size.tolist()
    assert [n for n, p in enumerate(packets) if p.is_keyframe] == index.key_samples.tolist()
    truth = full_decode(path)
    with fg.VideoReader.open(path, index=index) as reader:
        assert np.array_equal(truth[[77, 3, 50]], reader.read_frames_numpy([77, 3, 50]))


@pytest.mark.parametrize("name", ["sidx", "mfra"])
def test_a_long_fragmented_file_costs_few_waves_and_bytes(long_files, name):
    """With sidx or mfra: at most 8 waves, and the heads of the fragments only."""
    path = long_files[name]
    with RangeServer(path.parent, latency_s=0.1) as server:
        index = fg.build_index(server.url(path.name), check="none")
        summary = server.summary()
    assert (LONG, None) == (index.num_frames, index.container_reason)
    assert summary["depth"] <= 8
    assert summary["bytes"] <= 64 * 1024 + (LONG // 10 + 2) * (WINDOW + 64)


def test_without_shortcuts_the_cost_is_a_small_read_a_fragment(long_files):
    """No sidx, no mfra: one read of the head of each fragment, in series, and nothing of the media."""
    source = fg.TracedSource(fg.LocalSource(long_files["none"]))
    index = fg.build_index(source, check="none")
    assert (LONG, None) == (index.num_frames, index.container_reason)
    assert len(source.trace.requests) <= LONG // 10 + 4


@pytest.mark.parametrize("name", ["sidx", "mfra", "none"])
def test_the_shortcuts_change_the_cost_and_not_the_index(long_files, name):
    """Whatever led to the fragments, the samples are the demuxer's."""
    index = fg.build_index(long_files[name])
    with av.open(str(long_files[name])) as container:
        packets = [p for p in container.demux(container.streams.video[0]) if p.size]
    assert [p.pts for p in packets] == index.sample_pts.tolist()
    assert [p.pos for p in packets] == index.sample_offset.tolist()


@pytest.mark.parametrize("kind", [b"sidx", b"tfra"])
def test_a_lying_shortcut_costs_reads_and_nothing_else(long_files, kind):
    """sidx and mfra are never truth: with every number in them wrong the index is the same."""
    path = long_files["sidx" if kind == b"sidx" else "mfra"]
    data = bytearray(path.read_bytes())
    honest = fg.build_index(fg.MemorySource(bytes(data)))
    at = data.rindex(kind)
    for place in range(at + 28, min(len(data) - 24, at + 28 + 400)):
        data[place] ^= 0x2A
    index = fg.build_index(fg.MemorySource(bytes(data)))
    assert np.array_equal(honest.sample_offset, index.sample_offset)
    assert np.array_equal(honest.sample_pts, index.sample_pts)


def test_a_cut_fragmented_file_keeps_what_is_whole(long_files, tmp_path):
    """A file cut inside a fragment reads its whole part, and says where it ends."""
    data = long_files["mfra"].read_bytes()
    path = tmp_path / "cut.mp4"
    path.write_bytes(data[: len(data) // 2])
    truth = full_decode(long_files["mfra"], 32, 32)
    with fg.VideoReader.open(path, height=32, width=32) as reader:
        assert np.array_equal(truth[[200, 5]], reader.read_frames_numpy([200, 5]))
        with pytest.raises((fg.DecodeError, fg.FrameIndexError)):
            reader.read_frames_numpy([LONG - 1])
