"""``--check decode``: each GOP alone against the full decode."""

from __future__ import annotations

import csv
from dataclasses import replace

import numpy as np
import pytest

import fluxon_gop as fg
from fluxon_gop.decode_check import check_by_decoding
from fluxon_gop.stats import ReadStats
from tests.corpus import CORPUS, truth

KNOWN = CORPUS / "GOPSAFE_STSS.tsv"
ROWS = list(csv.DictReader(KNOWN.read_text().splitlines(), delimiter="\t")) if KNOWN.exists() else []


def _check(path) -> tuple[fg.VideoIndex, object]:
    index = fg.build_index(path, check="none")
    with fg.VideoReader(path) as reader:
        return index, check_by_decoding(index, reader.source, ReadStats())


@pytest.mark.corpus
@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["file"])
def test_it_finds_the_unsafe_gops_of_the_records_and_no_others(row, full):
    """The number of GOPs that do not decode alone is the corpus's own."""
    if int(row["packets"]) > 2000 and not full:
        pytest.skip("a long file: run with --full")
    path = CORPUS / "files" / row["file"]
    try:
        _, check = _check(path)
    except fg.Mp4Error:
        assert row["unsafe_gops"] in {"0", "-", ""} or "encv" in fg_error(path)
        return
    assert int(row["unsafe_gops"]) == sum(not gop.safe for gop in check.gops)


def fg_error(path) -> str:
    try:
        fg.build_index(path)
    except fg.Mp4Error as error:
        return str(error)
    return ""


@pytest.mark.corpus
@pytest.mark.parametrize(
    "name",
    [
        "fate-suite__interlaced_crop.mp4",
        "media__sample_sef_super_slow_motion.mp4",
        "media__sample_with_fake_auxiliary_tracks.mp4",
        "fate-suite__mov-3elist.mp4",
    ],
)
def test_a_file_whose_frames_are_uncertain_takes_ffmpegs_numbering(name):
    """After the check it reads on the packet path, every frame FFmpeg's."""
    path = CORPUS / "files" / name
    _, check = _check(path)
    assert fg.build_index(path).container_reason is not None
    assert check.index.container_reason is None
    pictures, count, _ = truth(path, None, 64)
    with fg.VideoReader.open(path, index=check.index, height=64, width=64, apply_rotation=False) as reader:
        order = np.random.default_rng(0).permutation(count)[:60]
        batch = reader.read_frames_numpy(order)
        assert count == reader.num_frames
        assert 0 == reader.stats().container_reads
    assert all(
        np.array_equal(pictures[n], picture) for n, picture in zip(order.tolist(), batch, strict=True)
    )


def test_clean_gops_are_proven_and_open_ones_for_trailing_frames(media):
    """IDR GOPs are proven by decoding too; CRA GOPs lose their leading frames only."""
    for name, expected in (
        ("bframes", {fg.Verdict.DECODED}),
        ("hevc", {fg.Verdict.DECODED, fg.Verdict.DECODED_TRAILING}),
    ):
        assert expected == set(fg.build_index(media[name], check="decode").verdicts.tolist())


def test_hev1_with_parameter_sets_in_the_record_only_is_proven_by_decoding(media):
    """What the heads alone may not prove, decoding does: reads start at the nearest key again."""
    quick, checked = fg.build_index(media["hev1"]), fg.build_index(media["hev1"], check="decode")
    assert fg.Verdict.REFUSED in quick.verdicts.tolist()
    assert fg.Verdict.REFUSED not in checked.verdicts.tolist()
    pictures, _, _ = truth(media["hev1"], None, None)
    with fg.VideoReader.open(media["hev1"], index=checked) as reader:
        for frame in (59, 13, 37):
            assert np.array_equal(pictures[frame], reader.read_frames_numpy([frame])[0])


def test_a_wrong_key_is_refused(media):
    """A P-frame that the container calls sync does not decode alone."""
    index = fg.build_index(media["longgop"], check="none")
    lying = replace(index, key_samples=np.array([0, 20]), verdicts=np.zeros(2, np.uint8))
    check = check_by_decoding(lying, fg.LocalSource(media["longgop"]), ReadStats())
    assert [fg.Verdict.DECODED, fg.Verdict.REFUSED] == check.index.verdicts.tolist()
