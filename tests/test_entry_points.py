"""A key sample is believed only where its own bits, and the sets they name, prove it."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fluxon_gop as fg
from fluxon_gop import entry_points
from fluxon_gop.encode import Recipe
from fluxon_gop.model import SampleEntry, Verdict
from tests.boxes import MADE, Media, box, demuxed, made, tiny_mp4
from tests.media import full_decode, make
from tests.nals import (
    av1_frame,
    av1_sequence,
    avc_pps,
    avc_slice,
    avc_sps,
    avcc,
    bits,
    hevc_header,
    hevc_pps,
    hevc_slice,
    hevc_sps,
    hevc_vps,
    hvcc,
    lengths,
    obu,
    packed,
    se,
    ue,
    vp9_frame,
)
from tests.witnesses import calls_of, drive

U, P, T, R = Verdict.UNCHECKED, Verdict.PROVEN, Verdict.PROVEN_TRAILING, Verdict.REFUSED
AVC = avcc(avc_sps(), avc_pps())
HEVC = hvcc(hevc_vps(), hevc_sps(), hevc_pps())
IN_BAND_AVC = (avc_sps(), avc_pps())
IN_BAND_HEVC = (hevc_vps(), hevc_sps(), hevc_pps())
CODECS = {"avc1": "h264", "avc3": "h264", "hvc1": "hevc", "hev1": "hevc", "av01": "libdav1d", "vp09": "vp9"}


def verdict(
    fourcc: str, config: bytes, sample: bytes, *, head: int | None = None, first: bool = False
) -> Verdict:
    """Return the verdict on ``sample`` (the track's second unless ``first``) from its ``head`` bytes."""
    entry = SampleEntry(fourcc, CODECS[fourcc], config, 64, 48)
    index = drive(tiny_mp4(made(2, 1))).index
    index.sample_size.setflags(write=True)
    index.sample_size[:] = len(sample)
    object.__setattr__(index, "entries", (entry,))
    at = np.array([0 if first else 1])
    return Verdict(int(entry_points.judge(index, at, [sample[:head]])[0]))


# H.264


@pytest.mark.parametrize(
    ("fourcc", "nal_units", "expected"),
    [
        ("avc1", [avc_slice(5)], P),
        ("avc1", [avc_slice(1)], R),
        ("avc1", [avc_slice(2)], R),
        ("avc1", [b"\x09\x10", b"\x06\x05\x01\x80", avc_slice(5)], P),
        ("avc1", [b"\x09\x10", avc_slice(1), avc_slice(5)], R),
        ("avc1", [avc_slice(5, pps=1)], R),
        ("avc1", [avc_pps(1, 0), avc_slice(5, pps=1)], P),
        ("avc1", [avc_pps(1, 7), avc_slice(5, pps=1)], R),
        ("avc1", [b"\x09\x10"], R),
        ("avc3", [avc_slice(5)], R),
        ("avc3", [*IN_BAND_AVC, avc_slice(5)], P),
        ("avc3", [avc_pps(), avc_slice(5)], R),
        ("avc3", [avc_sps(), avc_slice(5)], R),
        ("avc3", [avc_sps(3), avc_pps(9, 3), avc_slice(5, pps=9)], P),
        ("avc3", [avc_slice(5), *IN_BAND_AVC], R),
    ],
)
def test_h264_needs_idr_and_the_sets_that_it_names(fourcc, nal_units, expected):
    """IDR with its PPS and SPS at hand is proven; another picture, or a set from elsewhere, is not."""
    assert verdict(fourcc, AVC, lengths(*nal_units)) is expected


@pytest.mark.parametrize("width", [1, 2, 4])
def test_nal_lengths_of_every_width_are_read(width):
    """The configuration record says how wide a NAL unit's length is."""
    config = avcc(avc_sps(), avc_pps(), width=width)
    assert verdict("avc1", config, lengths(b"\x09\x10", avc_slice(5), width=width)) is P


# HEVC


@pytest.mark.parametrize(
    ("fourcc", "nal_units", "expected"),
    [
        *[("hvc1", [hevc_slice(kind)], P) for kind in (19, 20)],
        *[("hvc1", [hevc_slice(kind)], T) for kind in (16, 17, 18, 21)],
        *[("hvc1", [hevc_slice(kind)], R) for kind in (0, 1, 8, 9, 22, 23)],
        ("hvc1", [b"\x46\x01\x50", hevc_slice(19)], P),
        ("hvc1", [hevc_slice(1, layer=1), hevc_slice(19)], P),
        ("hvc1", [hevc_slice(19, pps=2)], R),
        ("hvc1", [hevc_slice(19, layer=1)], R),
        ("hev1", [hevc_slice(19)], R),
        ("hev1", [*IN_BAND_HEVC, hevc_slice(19)], P),
        ("hev1", [*IN_BAND_HEVC, hevc_slice(21)], T),
        ("hev1", [hevc_sps(), hevc_pps(), hevc_slice(19)], R),
        ("hev1", [hevc_vps(), hevc_pps(), hevc_slice(19)], R),
        ("hev1", [hevc_vps(), hevc_sps(), hevc_slice(19)], R),
        ("hev1", [hevc_vps(2), hevc_sps(1, vps=2), hevc_pps(5, 1), hevc_slice(20, pps=5)], P),
        ("hev1", [hevc_vps(3), hevc_sps(1, vps=2), hevc_pps(5, 1), hevc_slice(20, pps=5)], R),
        ("hev1", [], R),
    ],
)
def test_hevc_needs_an_irap_and_the_sets_that_it_names(fourcc, nal_units, expected):
    """IDR is proven, BLA and CRA for what follows in time; leading pictures, other layers, missing sets not."""
    assert verdict(fourcc, HEVC, lengths(*nal_units) or b"\0") is expected


def test_a_record_with_a_stump_of_a_set_proves_nothing_and_harms_nobody():
    """A VPS of two bytes in hvcC is damage: the samples are refused or go to the container path."""
    stump = hvcc(hevc_vps(), hevc_sps(), hevc_pps(), hevc_header(32))
    media = Media((lengths(hevc_slice(19)),) * 3, (0, 1, 2), None, None, box(b"hvcC", stump), b"hvc1")
    index = drive(tiny_mp4(media), check=True).index
    assert index.container_reason is not None or P in index.verdicts


# AV1, VP9


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (obu(2, b"") + av1_sequence() + av1_frame(0), P),
        (av1_sequence() + av1_frame(0, obu_kind=3), P),
        (av1_sequence() + av1_frame(0, shown=False), R),
        (av1_sequence() + av1_frame(1), R),
        (av1_sequence() + av1_frame(2), R),
        (av1_sequence() + av1_frame(0, existing=True), R),
        (av1_frame(0), R),
        (av1_sequence(reduced=True) + av1_frame(1), P),
        (obu(2, b"", extended=True) + av1_sequence() + obu(6, packed("00010000"), sized=False), P),
        (obu(2, b""), R),
        (obu(1, b""), R),
        (b"\x36" + b"\xff" * 12, R),
        (b"\x0e", R),
    ],
)
def test_av1_needs_a_shown_key_frame_behind_its_sequence_header(sample, expected):
    """A shown key frame with its sequence header in the sample is proven; nothing else is."""
    assert verdict("av01", b"", sample) is expected


@pytest.mark.parametrize("profile", range(4))
@pytest.mark.parametrize(
    ("head", "expected"),
    [({}, P), ({"inter": True}, R), ({"existing": True}, R), ({"marker": 1}, R)],
)
def test_vp9_needs_a_key_frame(profile, head, expected):
    """A VP9 key frame of every profile is proven; inter, repeated and broken frames are not."""
    assert verdict("vp09", b"", vp9_frame(profile=profile, **head)) is expected


# What the first bytes cannot tell


@pytest.mark.parametrize(
    ("fourcc", "config", "sample", "enough"),
    [
        ("avc3", AVC, lengths(b"\x06" + bytes(50), *IN_BAND_AVC, avc_slice(5, filler=40)), 88),
        ("hev1", HEVC, lengths(b"\x4e\x01" + bytes(50), *IN_BAND_HEVC, hevc_slice(19)), 146),
        ("av01", b"", obu(2, b"") + obu(5, bytes(60)) + av1_sequence() + av1_frame(0), 71),
        ("vp09", b"", vp9_frame(), 1),
    ],
    ids=["avc3", "hev1", "av01", "vp09"],
)
def test_a_head_that_ends_early_leaves_the_question_open(fourcc, config, sample, enough):
    """Cut anywhere, the head of a proven sample is proven or unchecked, never refused; the whole is proven."""
    verdicts = [verdict(fourcc, config, sample, head=head) for head in range(1, len(sample) + 1)]
    assert set(verdicts) <= {U, P}
    assert verdicts == sorted(verdicts), "more bytes unmade a proof"
    assert verdicts.index(P) <= enough
    assert verdicts[-1] is P


@pytest.mark.parametrize("fourcc", CODECS)
@settings(deadline=None)
@given(sample=st.binary(min_size=1, max_size=60), config=st.binary(max_size=60), head=st.integers(1, 60))
def test_any_bytes_get_a_verdict(fourcc, sample, config, head):
    """Whatever record and sample hold, the answer is a verdict; the whole sample never leaves it open."""
    if entry_points.unsuitable(SampleEntry(fourcc, CODECS[fourcc], config, 0, 0)) is not None:
        config = AVC if CODECS[fourcc] == "h264" else HEVC
    assert verdict(fourcc, config, sample, head=head) in Verdict
    assert verdict(fourcc, config, sample) is not U


@settings(deadline=None)
@given(
    st.binary(max_size=80), st.sampled_from([AVC, HEVC]), st.integers(0, 100), st.sampled_from(list(CODECS))
)
def test_any_record_is_suitable_or_not(noise, record, at, fourcc):
    """A configuration record of any bytes gives a reason or none, and a picture size that exists or none."""
    config = record[:at] + noise
    entry = SampleEntry(fourcc, CODECS[fourcc], config, 0, 0)
    reason = entry_points.unsuitable(entry)
    size = entry_points.picture_size(entry)
    assert reason is None or reason
    assert size is None or all(0 < side <= 1 << 17 for side in size)
    if reason is None and size is not None:
        assert verdict(fourcc, config, lengths(avc_slice(5)), first=True) in Verdict


# The wave of the check


def test_the_check_reads_the_first_bytes_of_each_key_sample():
    """check=True adds one wave: up to 4 KiB of the first sample, 1 KiB of every other key, no byte past a sample."""
    long = tuple(packet + bytes(5000) if n % 4 == 0 else packet for n, packet in enumerate(MADE.packets))
    driven = drive(tiny_mp4(MADE.but(packets=long)), check=True)
    index = driven.index
    wave = driven.waves[-1]
    assert [r.size for r in wave] == [
        entry_points.LONG_PROBE_BYTES,
        entry_points.PROBE_BYTES,
        entry_points.PROBE_BYTES,
    ]
    assert [r.start for r in wave] == index.sample_offset[index.key_samples].tolist()
    assert index.verdicts.tolist() == [P, P, P]
    short = drive(tiny_mp4(MADE), check=True)
    assert [r.size for r in short.waves[-1]] == short.index.sample_size[short.index.key_samples].tolist()


def test_a_first_sample_that_is_no_idr_goes_to_the_container_path():
    """Where the stream's first sample is refused, the count of frames is not certain."""
    media = MADE.but(packets=(lengths(avc_slice(1)), *MADE.packets[1:]))
    index = drive(tiny_mp4(media), check=True).index
    assert (
        index.container_reason
        == "the first sample is no proven entry point: which frames FFmpeg shows is not certain"
    )
    assert index.verdicts.tolist() == [R, P, P]


@pytest.mark.parametrize("name", ["bframes", "allintra", "longgop", "opengop", "hevc", "av1", "vp9"])
def test_encoders_keep_their_word(media, name):
    """What x264, x265, SVT-AV1 and libvpx write as IDR or key frame is proven; open GOPs are not, or trailing."""
    index = drive(media[name].read_bytes(), check=True).index
    later = set(index.verdicts[1:].tolist())
    expected = {"opengop": {R}, "hevc": {T}, "longgop": set()}.get(name, {P})
    assert (index.verdicts[0], later, index.container_reason) == (P, expected, None)


# Cost


def test_a_long_set_costs_no_more_than_a_short_one():
    """A parameter set of 64 KiB that promises four billion numbers is given up at once."""
    head = packed(bits(66, 8), bits(0, 8), bits(30, 8), ue(0), ue(0), ue(1), "0", se(0), se(0), ue(1 << 31))
    sets = b"\x67" + head + b"\xff" * 65_000
    entry = SampleEntry("avc1", "h264", avcc(sets, avc_pps()), 0, 0)
    assert calls_of(lambda: entry_points.unsuitable(entry))[1] < 10_000


@pytest.mark.parametrize("fourcc", ["avc1", "hvc1"])
def test_a_long_record_is_read_once_not_for_every_key(fourcc):
    """Checking thousands of key samples costs their bytes, not their number times the record's size."""
    if fourcc == "avc1":
        config, units = avcc(avc_sps(), avc_pps(), *[b"\x6f" + bytes(60_000)] * 200), [avc_slice(5)]
    else:
        config, units = (
            HEVC[:22] + b"\4" + HEVC[23:] + b"\x27\x9c\x40" + b"\0\2\x4e\1" * 40_000,
            [hevc_slice(19)],
        )
    kind = b"avcC" if fourcc == "avc1" else b"hvcC"
    count = 2000
    media = Media(
        (lengths(*units),) * count, tuple(range(count)), None, None, box(kind, config), fourcc.encode()
    )
    data = tiny_mp4(media)
    assert calls_of(lambda: drive(data, check=True))[1] < 1_000_000


def test_real_packets_are_proven_in_a_file_by_hand(media):
    """Samples taken from a real video and laid out by hand have the verdicts of the original."""
    original = drive(media["bframes"].read_bytes(), check=True).index
    by_hand = drive(tiny_mp4(demuxed(media["bframes"])), check=True).index
    assert by_hand.verdicts.tolist() == original.verdicts.tolist() == [P] * 5


def test_a_stream_that_old_x264_made_is_decoded_from_its_start(tmp_path):
    """FFmpeg decodes lossless 4:4:4 by the encoder's build, which stands in the first sample alone."""
    recipe = Recipe(pix_fmt="yuv444p", options={"preset": "medium", "qp": "0", "g": "12"})
    path = make(tmp_path / "lossless.mp4", recipe, 36)
    data = path.read_bytes()
    assert drive(data, check=True).index.container_reason is None
    path.write_bytes(re.sub(rb"x264 - core \d\d\d", b"x264 - core 100", data))
    truth = full_decode(path)
    assert not np.array_equal(truth, full_decode_of(data, tmp_path))
    with fg.VideoReader.open(path) as reader:
        for frame in (30, 13, 2, 35):
            assert np.array_equal(truth[frame], reader.read_frames_numpy([frame])[0])
    assert "first sample" in fg.build_index(path).container_reason


def full_decode_of(data, folder):
    """Return every frame of these bytes."""
    (folder / "of.mp4").write_bytes(data)
    return full_decode(folder / "of.mp4")
