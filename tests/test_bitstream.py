"""Headers of coded pictures and parameter sets are read bit by bit as the standards write them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxon_gop import bitstream, entry_points
from fluxon_gop.bitstream import Bits, BitsExhausted
from fluxon_gop.model import SampleEntry
from tests.nals import (
    avc_pps,
    avc_sps,
    avcc,
    bits,
    hevc_pps,
    hevc_sps,
    hevc_vps,
    hvcc,
    lengths,
    nal,
    se,
    ue,
)

AVC = avcc(avc_sps(), avc_pps())
IN_BAND_HEVC = (hevc_vps(), hevc_sps(), hevc_pps())
HEVC = hvcc(*IN_BAND_HEVC)


def entry_of(fourcc: str, config: bytes) -> SampleEntry:
    codec = {"avc1": "h264", "hvc1": "hevc", "av01": "libdav1d", "vp09": "vp9"}[fourcc]
    return SampleEntry(fourcc, codec, config, 0, 0)


# Records and sets


def test_records_hold_their_sets():
    """AvcC and hvcC give their sets in order and the width of lengths."""
    assert bitstream.avc_record(AVC) == bitstream.Record(4, (avc_sps(), avc_pps()))
    assert bitstream.hevc_record(hvcc(*IN_BAND_HEVC, width=2)) == bitstream.Record(2, IN_BAND_HEVC)


@pytest.mark.parametrize(("read", "config"), [(bitstream.avc_record, AVC), (bitstream.hevc_record, HEVC)])
def test_a_cut_record_is_damaged(read, config):
    """Every shorter record is refused."""
    for size in range(len(config)):
        with pytest.raises(BitsExhausted):
            read(config[:size])


SCALING = "1" + ("1" + se(0) * 16) * 6 + ("1" + se(-8)) * 2
HIGH = {
    "4:2:0": ue(1) + ue(0) + ue(0) + "00",
    "4:2:2 10 bit": ue(2) + ue(2) + ue(2) + "00",
    "4:4:4": ue(3) + "0" + ue(0) + ue(0) + "00",
    "4:4:4 planes": ue(3) + "1" + ue(0) + ue(0) + "00",
    "scaling": ue(1) + ue(0) + ue(0) + "0" + SCALING,
}


@pytest.mark.parametrize(
    ("kwargs", "size"),
    [
        ({}, (64, 48)),
        ({"width": 1920, "height": 1088, "crop": "1" + ue(0) + ue(0) + ue(0) + ue(4)}, (1920, 1080)),
        ({"fields": True, "height": 64, "crop": "1" + ue(0) + ue(1) + ue(0) + ue(1)}, (62, 60)),
        ({"order": ue(0) + ue(4)}, (64, 48)),
        ({"order": ue(1) + "0" + se(-3) + se(5) + ue(3) + se(1) + se(-1) + se(9)}, (64, 48)),
        ({"high": HIGH["4:2:0"], "crop": "1" + ue(0) + ue(1) + ue(0) + ue(1)}, (62, 46)),
        ({"high": HIGH["4:2:2 10 bit"], "crop": "1" + ue(0) + ue(1) + ue(0) + ue(1)}, (62, 47)),
        ({"high": HIGH["4:4:4"], "crop": "1" + ue(1) + ue(1) + ue(0) + ue(1)}, (62, 47)),
        ({"high": HIGH["4:4:4 planes"], "crop": "1" + ue(0) + ue(1) + ue(0) + ue(1)}, (63, 47)),
        ({"high": HIGH["scaling"]}, (64, 48)),
        ({"crop": "1" + ue(0) + ue(32) + ue(0) + ue(0)}, (64, 48)),
    ],
)
def test_an_h264_sps_gives_the_cropped_size(kwargs, size):
    """Width and height are what the decoder shows, by chroma format, fields and cropping."""
    sps = bitstream.avc_sps(avc_sps(5, **kwargs))
    assert (sps.number, sps.frame_mbs_only) == (5, not kwargs.get("fields", False))
    assert (sps.width, sps.height) == size
    config = avcc(avc_sps(**kwargs), avc_pps())
    entry = entry_of("avc1", config)
    assert entry_points.picture_size(entry) == size
    reason = "the pictures may be coded as fields" if kwargs.get("fields") else None
    assert entry_points.unsuitable(entry) == reason


@pytest.mark.parametrize(
    ("kwargs", "size"),
    [
        ({}, (64, 48)),
        ({"width": 1920, "height": 1088, "crop": "1" + ue(0) + ue(0) + ue(0) + ue(4)}, (1920, 1080)),
        ({"layers": "1110"}, (64, 48)),
        ({"layers": "00" * 6}, (64, 48)),
    ],
)
def test_an_hevc_sps_gives_the_cropped_size(kwargs, size):
    """Width and height are behind the sub-layers' profiles, less the conformance window."""
    sps = bitstream.hevc_sps(hevc_sps(2, **kwargs))
    assert (sps.number, sps.width, sps.height) == (2, *size)
    entry = entry_of("hvc1", hvcc(hevc_vps(), hevc_sps(**kwargs), hevc_pps()))
    assert entry_points.picture_size(entry) == size


@pytest.mark.parametrize(
    ("fourcc", "config"),
    [
        ("avc1", avcc(avc_sps(width=16 << 32), avc_pps())),
        ("avc1", avcc(avc_sps(height=16 << 20), avc_pps())),
        ("hvc1", hvcc(hevc_vps(), hevc_sps(width=1 << 32), hevc_pps())),
        ("hvc1", hvcc(hevc_vps(), hevc_sps(crop="1" + ue(40) * 4), hevc_pps())),
    ],
    ids=["columns", "rows", "hevc columns", "hevc crop"],
)
def test_a_size_that_no_picture_has_is_none(fourcc, config):
    """A set that says four billion columns, or less than none, has no picture size."""
    assert entry_points.picture_size(entry_of(fourcc, config)) is None


@pytest.mark.parametrize(
    ("fourcc", "config", "reason"),
    [
        ("avc1", avcc(avc_pps()), "the configuration record has no SPS"),
        ("avc1", AVC[:9], "the configuration record is damaged"),
        ("avc1", avcc(avc_sps()[:3], avc_pps()), "the configuration record is damaged"),
        ("avc1", avcc(avc_sps(), b""), "the configuration record is damaged"),
        ("hvc1", hvcc(hevc_vps(), hevc_pps()), "the configuration record has no SPS"),
        ("hvc1", HEVC[:30], "the configuration record is damaged"),
        ("hvc1", hvcc(b"\x42"), "the configuration record is damaged"),
        ("av01", b"", None),
        ("vp09", b"", None),
    ],
    ids=lambda value: None if isinstance(value, bytes) else value,
)
def test_an_unsuitable_record_is_named(fourcc, config, reason):
    """Streams whose record has no SPS, or is damaged, are not cut, and the reason says so."""
    assert entry_points.unsuitable(entry_of(fourcc, config)) == reason


# Bits


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(st.tuples(st.just("u"), st.integers(1, 40)), st.sampled_from([("ue", 0), ("se", 0)])),
        max_size=20,
    ),
    st.data(),
)
def test_bits_come_back_as_written(forms, data):
    """u, ue and se give back what was written, through emulation prevention."""
    limit = {"ue": (0, (1 << 32) - 2), "se": (-(1 << 31) + 1, (1 << 31) - 1)}
    written = [
        (form, width, data.draw(st.integers(*limit.get(form, (0, (1 << width) - 1)))))
        for form, width in forms
    ]
    write = {"u": bits, "ue": lambda value, _: ue(value), "se": lambda value, _: se(value)}
    unit = nal(b"\x67", *(write[form](value, width) for form, width, value in written))
    assert b"\0\0\0" not in unit[1:]
    reader = Bits(unit[1:], nal=True)
    assert [reader.u(w) if form == "u" else getattr(reader, form)() for form, w, _ in written] == [
        v for *_, v in written
    ]


def test_bits_that_are_not_there_raise():
    """Reading past the end, or a number of more than 32 leading zeros, is exhaustion."""
    with pytest.raises(BitsExhausted):
        Bits(b"\xff").u(9)
    with pytest.raises(BitsExhausted):
        Bits(bytes(20)).ue()
    assert Bits(b"").u(0) == 0


@pytest.mark.parametrize(
    ("data", "size", "expected"),
    [
        (lengths(b"ab", b"", b"c"), 15, [b"ab", b"c"]),
        (lengths(b"ab") + b"\0\0", 8, [b"ab"]),
        (lengths(b"abcd")[:6], 8, [b"ab"]),
        (b"", 4, []),
    ],
)
def test_nal_units_of_a_sample(data, size, expected):
    """NAL units come out one by one; empty ones are passed over, the last may be cut, a stump is ignored."""
    assert [bytes(unit) for unit in bitstream.sample_nals(memoryview(data), 4, size)] == expected


def test_nal_units_past_the_sample_or_the_head_raise():
    """A length past the sample is a ValueError with numbers; a head that ends first is exhaustion."""
    with pytest.raises(ValueError, match="a NAL unit of 9 bytes at 4 of a sample of 12"):
        list(bitstream.sample_nals(memoryview(b"\0\0\0\x09" + bytes(8)), 4, 12))
    with pytest.raises(BitsExhausted):
        list(bitstream.sample_nals(memoryview(lengths(b"ab")), 4, 20))
