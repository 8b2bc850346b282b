"""``to_torchcodec_frame_mappings``: what ffprobe tells, and what torchcodec reads exact frames by."""

from __future__ import annotations

import json
import shutil
import subprocess

import numpy as np
import pytest

import fluxon_gop as fg
from tests.corpus import real_files
from tests.media import full_decode

MEDIA = (
    "bframes",
    "audio",
    "faststart",
    "allintra",
    "longgop",
    "hevc",
    "av1",
    "vp9",
    "fragmented",
    "hybrid",
)


def _probed(path, stream="v:0") -> list[dict[str, int]]:
    ffprobe = shutil.which("ffprobe")
    if ffprobe is None:
        pytest.skip("ffprobe is not installed")
    command = [ffprobe, "-v", "error", "-select_streams", stream, "-show_packets", "-of", "json", str(path)]
    packets = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)[
        "packets"
    ]
    shown = [p for p in packets if "D" not in p["flags"]]
    frames = [
        {"pts": p["pts"], "duration": p.get("duration", 0), "key_frame": int("K" in p["flags"])}
        for p in shown
    ]
    return sorted(frames, key=lambda frame: frame["pts"])


@pytest.mark.parametrize("name", MEDIA)
def test_the_mappings_are_ffprobes(media, name):
    """pts, duration and key flag of every frame are what ffprobe tells of its packet."""
    mappings = json.loads(fg.build_index(media[name]).to_torchcodec_frame_mappings())
    assert _probed(media[name]) == mappings["frames"]


@pytest.mark.corpus
@pytest.mark.parametrize(
    "file", [f for f in real_files() if f.plain and f.path.suffix != ".avif"], ids=lambda f: f.path.name
)
def test_the_mappings_of_real_files_are_ffprobes(file):
    """The same of the corpus's ordinary files; durations where ffprobe tells one, but for the last frame's, which it guesses."""
    index = fg.build_index(file.path)
    if index.container_reason is not None:
        with pytest.raises(fg.UnsupportedMp4Error):
            index.to_torchcodec_frame_mappings()
        return
    mine = json.loads(index.to_torchcodec_frame_mappings())["frames"]
    theirs = _probed(file.path, str(index.stream_index))
    refused = {int(index.sample_frame[s]) for s in index.key_samples[index.verdicts == fg.Verdict.REFUSED]}
    for number in refused:
        # A claim of the container that the bitstream refutes.
        theirs[number]["key_frame"] = 0
    assert len(theirs) == len(mine)
    for number, (told, frame) in enumerate(zip(theirs, mine, strict=True)):
        if not told["duration"] or number == len(mine) - 1:
            told["duration"] = frame["duration"]
    assert theirs == mine


@pytest.mark.parametrize("name", ["bframes", "audio", "faststart", "allintra", "longgop", "hevc", "vp9"])
def test_torchcodec_reads_by_the_mappings(media, name):
    """By them torchcodec gives the frame that was asked for, in random order, without a scan of its own."""
    decoders = pytest.importorskip("torchcodec.decoders", exc_type=(ImportError, RuntimeError))
    truth = full_decode(media[name]).astype(np.int16)
    mappings = fg.build_index(media[name]).to_torchcodec_frame_mappings()
    decoder = decoders.VideoDecoder(
        str(media[name]), custom_frame_mappings=mappings, dimension_order="NHWC"
    )
    assert len(truth) == len(decoder)
    order = np.random.default_rng(1).permutation(len(truth)).tolist()
    for number, picture in zip(order, decoder.get_frames_at(order).data.numpy(), strict=True):
        off = np.abs(truth - picture.astype(np.int16)).mean(axis=(1, 2, 3))
        assert number == int(off.argmin())


def test_trimmed_frames_are_not_in_the_mappings(media, tmp_path):
    """Of a file whose edit list hides frames, only the shown ones are told, at their times."""
    ffmpeg = shutil.which("ffmpeg")
    if ffmpeg is None:
        pytest.skip("ffmpeg is not installed")
    cut = tmp_path / "cut.mp4"
    command = [ffmpeg, "-v", "error", "-ss", "0.2", "-i", str(media["bframes"]), "-c", "copy", str(cut)]
    subprocess.run(command, check=True, timeout=60)
    index = fg.build_index(cut)
    assert index.num_frames < index.num_samples
    assert _probed(cut) == json.loads(index.to_torchcodec_frame_mappings())["frames"]
