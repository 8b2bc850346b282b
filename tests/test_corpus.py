"""Every real file reads exactly on every path, or says by a typed error why not."""

from __future__ import annotations

import random

import av
import numpy as np
import pytest

import fluxon_gop as fg
from fluxon_gop import index_rows
from fluxon_gop.demuxed import display_matrix
from tests.conftest import CORPUS
from tests.corpus import RealFile, real_files, truth

FILES = real_files()
SIDE = 64

REFUSED = {
    "fate-suite__faststart-4gb-overflow.wav": fg.DecodeError,
    "fate-suite__mov-frag-encrypted.mp4": fg.EncryptedVideoError,
    "fate-suite__mov-tenc-only-encrypted.mp4": fg.EncryptedVideoError,
    "media__full_blocks.mkv": fg.DecodeError,
    "media__sample_av1c_fragmented_clearkey.mp4": fg.EncryptedVideoError,
    "media__sample_fragmented_sgpd_v2.mp4": fg.EncryptedVideoError,
    "media__sample_malformed_free_box.mp4": fg.DecodeError,
    "media__video_dovi_3840x2160_30fps_dav1_10.mp4": fg.DecodeError,
    "mp4parse-rust__av1-clearkey-cbcs-video.mp4": fg.EncryptedVideoError,
    "mp4parse-rust__chunk_out_of_range.mp4": fg.DecodeError,
    "mp4parse-rust__short-cenc.mp4": fg.EncryptedVideoError,
    "mp4parse-rust__wide_box_size_0.avif": fg.DecodeError,
}
"""Files without a picture to compare: encrypted, or FFmpeg itself cannot open or decode them."""

DAMAGED = {
    "fate-suite__attachment631-small.mp4",
    "fate-suite__displaymatrix.mp4",
    "fate-suite__two_first_slice.mp4",
    "fate-suite__white_zombie_scrunch-part.mp4",
    "media__sample_fragmented_uuid.mp4",
    "media__sample_with_invalid_nalu.mp4",
    "mp4parse-rust__no_timescale.mp4",
    "mp4parse-rust__test_case_1185230.mp4",
    "mp4parse-rust__zero_empty_stsc.mp4",
}
"""Files in which a picture fails to decode: the frames before it are the truth."""

UNREPEATABLE = {"fate-suite__empty_edit_5s.mp4"}
"""FFmpeg's own decode differs from run to run (its chroma is not in the file): counts are compared only."""

pytestmark = [pytest.mark.corpus, pytest.mark.timeout(600)]


def test_the_records_name_49_plain_files():
    """By the corpus's records 49 files are plain: the ones that must read exactly on both paths."""
    assert 49 == sum(file.plain for file in FILES)


def _numbers(count: int, full: bool, seed: str) -> list[int]:
    """Return the frame numbers to read, in random order: all, or a seeded 240 of a long file."""
    numbers = list(range(count))
    generator = random.Random(seed)
    generator.shuffle(numbers)
    return numbers if full else numbers[:240]


def _open(file: RealFile, way: str, side: int | None) -> fg.VideoReader:
    """Open by one of the four ways: table or none, chosen path or container path."""
    options = {"height": side, "width": side, "apply_rotation": False}
    if way == "container":
        return fg.VideoReader.open(file.path, path="container", **options)
    index = None
    if way.startswith("table"):
        try:
            built = fg.build_index(file.path)
        except fg.Mp4Error:
            built = None
        if built is not None:
            # A table's row is the index encoded and decoded.
            index = index_rows.decode(index_rows.rows_of(index_rows.encode([("key", built)]))[0])
    path = "container" if way == "table+container" else None
    return fg.VideoReader.open(file.path, index=index, path=path, **options)


@pytest.mark.parametrize("way", ["no table", "table", "container", "table+container"])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.path.name)
def test_a_real_file_reads_exactly_or_is_refused_by_name(file, way, full):
    """Each frame, read in random order in a batch and one by one, is FFmpeg's frame; the counts agree."""
    name = file.path.name
    if name in REFUSED:
        with pytest.raises(REFUSED[name]), _open(file, way, SIDE) as reader:
            reader.read_frames_numpy([0])
        return
    with _open(file, way, SIDE) as reader:
        count = reader.num_frames
        numbers = _numbers(count, full, name)
        pictures, truth_count, damaged = truth(file.path, frozenset(numbers), SIDE)
        assert (name in DAMAGED) == damaged
        if not damaged:
            assert truth_count == count
        wanted = [number for number in numbers if number in pictures]
        if name in UNREPEATABLE:
            assert len(wanted) == len(reader.read_frames_numpy(wanted))
            return
        batch = reader.read_frames_numpy(wanted)
        for number, picture in zip(wanted, batch, strict=True):
            assert np.array_equal(pictures[number], picture), f"frame {number} in a batch"
        for number in wanted if full and len(wanted) < 300 else wanted[:6]:
            picture = reader.read_frames_numpy([number])[0]
            assert np.array_equal(pictures[number], picture), f"frame {number} alone"
        if not damaged:
            with pytest.raises(fg.FrameIndexError, match=f"the video has {count} frames"):
                reader.read_frames_numpy([count])


@pytest.mark.parametrize("file", [f for f in FILES if f.plain], ids=lambda file: file.path.name)
def test_a_plain_file_has_its_own_size(file):
    """Without a size asked for, the pictures have FFmpeg's size and FFmpeg's pixels."""
    keep = frozenset({0, 3})
    pictures, _, _ = truth(file.path, keep, None)
    with fg.VideoReader.open(file.path, apply_rotation=False) as reader:
        wanted = sorted(pictures)
        first = pictures[0].shape
        same = [n for n in wanted if pictures[n].shape == first]
        for number, picture in zip(same, reader.read_frames_numpy(same), strict=True):
            assert np.array_equal(pictures[number], picture)


def test_at_least_80_of_the_files_with_frames_read_exactly():
    """All files that give frames but those in the lists above, at least 80, read exactly."""
    giving = [f for f in FILES if f.truth_count.isdigit() and int(f.truth_count) > 0]
    rest = REFUSED.keys() | DAMAGED | UNREPEATABLE
    exact = [f for f in giving if f.path.name not in rest]
    print(f"{len(FILES)} files, {len(giving)} give frames, {len(exact)} read exactly")
    assert len(exact) >= 80


def test_most_frames_are_read_by_the_packet_path():
    """At least 80 % of the frames of the files that read exactly are cut from memory: the container path is no refuge."""
    frames = {True: 0, False: 0}
    for file in FILES:
        if file.path.name in REFUSED.keys() | DAMAGED | UNREPEATABLE or not file.truth_count.isdigit():
            continue
        try:
            packet = fg.build_index(file.path).container_reason is None
        except fg.Mp4Error:
            packet = False
        frames[packet] += int(file.truth_count)
    share = frames[True] / sum(frames.values())
    print(f"packet path: {frames[True]} of {sum(frames.values())} frames, {share:.1%}")
    assert share >= 0.8


@pytest.mark.corpus
@pytest.mark.parametrize("name", ["fate-suite__multiview.mp4", "media__water_180_mvhevc_5frames.mov"])
def test_a_picture_with_side_data_that_pyav_does_not_know_has_a_display_matrix_all_the_same(name):
    """PyAV 18.1 raises at MV-HEVC's stereo views; the picture is upright, and read as such."""
    with av.open(str(CORPUS / "files" / name), metadata_errors="ignore") as container:
        frame = next(container.decode(container.streams.best("video")))
    with pytest.raises(ValueError, match="not a valid"):
        list(frame.side_data)
    assert display_matrix(frame) is None
