"""The corpus's nastiest files, one line each: how many frames they show, and on which path they are read."""

from __future__ import annotations

import pytest

import fluxon_gop as fg
from tests.corpus import CORPUS

PACKET, CONTAINER = "packet", "container"

NASTIEST = [
    ("fate-suite__mp4-init-nonkeyframe-1.mp4", 27, CONTAINER),
    ("media__sample_edit_list_no_sync_frame_before_edit.mp4", 68, PACKET),
    ("media__sample_edit_list.mp4", 77, PACKET),
    ("media__sample.video.mp4", 73, PACKET),
    ("fate-suite__elst_ends_betn_b_and_i.mp4", 24, PACKET),
    ("fate-suite__mov_ibi_elst_starts_b.mp4", 24, PACKET),
    ("fate-suite__test_iibbibb.mp4", 13, PACKET),
    ("fate-suite__test_iibbibb_neg_ctts.mp4", 13, PACKET),
    ("fate-suite__interlaced_crop.mp4", 126, CONTAINER),
    ("fate-suite__mov-2elist-elist1-ends-bframe.mp4", 42, CONTAINER),
    ("fate-suite__mov-elist-starts-ctts-2ndsample.mp4", 48, CONTAINER),
    ("fate-suite__mov_neg_first_pts_discard.mp4", 15, PACKET),
    ("fate-suite__svq3_decoding_regression.mp4", 0, CONTAINER),
    ("media__sample_partially_fragmented.mp4", 30, PACKET),
    ("fate-suite__frag_overlap.mp4", 96, None),
    ("fate-suite__wwwq_cut.mp4", 30, CONTAINER),
    ("fate-suite__Vertical400kbit.sorenson3.mp4", 1308, None),
    ("fate-suite__extradata-reload-multi-stsd.mp4", 4, CONTAINER),
    ("fate-suite__mp4-with-mov-in24-ver.mp4", 0, CONTAINER),
    ("media__mv_with_2_top_shots.mp4", 53, PACKET),
    ("media__sample_with_fake_auxiliary_tracks.mp4", 5, CONTAINER),
    ("libavif__Chimera-AV1-10bit-480x270.avif", 95, None),
    ("media__sample_2_byte_NAL_length.mp4", 30, PACKET),
    ("media__sample_fragmented_sgpd_v2.mp4", fg.EncryptedVideoError, None),
    ("fate-suite__empty_edit_5s.mp4", 100, PACKET),
    ("media__sample_malformed_free_box.mp4", fg.DecodeError, None),
    ("mp4parse-rust__wide_box_size_0.avif", fg.DecodeError, None),
    ("mp4parse-rust__chunk_out_of_range.mp4", fg.DecodeError, None),
    ("media__sample_mdat_too_long.mp4", 30, PACKET),
    ("media__sample_empty_track.mp4", 30, PACKET),
    ("fate-suite__dovi-p7.mp4", 10, CONTAINER),
    ("media__sample_vvc.mp4", 120, CONTAINER),
    ("fate-suite__attachment631-small.mp4", None, CONTAINER),
    ("fate-suite__two_first_slice.mp4", None, CONTAINER),
    ("mp4parse-rust__test_case_1185230.mp4", None, CONTAINER),
    ("mp4parse-rust__no_timescale.mp4", None, None),
    ("media__sample_with_invalid_nalu.mp4", None, PACKET),
]
"""(file, frames or the error, path); None: damaged (test_corpus reads what is whole), or no index."""


@pytest.mark.corpus
@pytest.mark.parametrize(("name", "frames", "path"), NASTIEST, ids=[line[0] for line in NASTIEST])
def test_a_nasty_file_shows_what_ffmpeg_shows(name, frames, path):
    """The count is the full decode's (or the error the right one), and the path is the expected one."""
    if isinstance(frames, type):
        with pytest.raises(frames), fg.VideoReader.open(CORPUS / "files" / name) as reader:
            reader.read_frames_numpy([0])
        return
    with fg.VideoReader.open(CORPUS / "files" / name) as reader:
        if frames is not None:
            assert frames == reader.num_frames
        if path is not None:
            assert (path == PACKET) == (reader.index.container_reason is None)
