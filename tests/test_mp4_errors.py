"""Every way in which a file is no usable MP4 is an error by name; every doubt is a reason by name."""

from __future__ import annotations

import numpy as np
import pytest

import fluxon_gop as fg
from fluxon_gop import mp4_index
from fluxon_gop.errors import (
    BoxError,
    EncryptedVideoError,
    NotMp4Error,
    TruncatedMp4Error,
    UnsupportedMp4Error,
)
from fluxon_gop.model import Signature
from fluxon_gop.mp4_index import HEAD_BYTES, index_steps
from tests import boxes
from tests.boxes import (
    FTYP,
    IN_THIS_FILE,
    MADE,
    box,
    dref,
    full_box,
    i32,
    made,
    open_box,
    stsd,
    tiny_mp4,
    trak,
    u8,
    u32,
    u64,
    visual_entry,
)
from tests.witnesses import drive, starve

# Errors


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file has 0 bytes: too few for any box"),
        (b"\0\0\0\x08fr", "the file has 6 bytes: too few for any box"),
        (
            b"\x1aE\xdf\xa3" + bytes(99),
            r"the file begins with b'\\x1aE\\xdf\\xa3.*': no ISO base media file",
        ),
        (
            b"RIFF\x10\0\0\0AVI LIST" + bytes(99),
            r"the file begins with b'RIFF\\x10\\x00\\x00\\x00': no ISO base media file",
        ),
        (bytes(99), "no ISO base media file"),
    ],
)
def test_what_is_no_mp4_is_called_so(data, message):
    """Too few bytes, or another container's magic, is NotMp4Error with what was found."""
    with pytest.raises(NotMp4Error, match=message):
        drive(data)


@pytest.mark.parametrize("layout", ["ftyp moov mdat", "ftyp mdat moov", "ftyp mdat64 moov64"])
def test_a_cut_file_is_truncated_at_every_byte(layout, monkeypatch):
    """A file that ends within or before its movie box says how many bytes it needs and has."""
    data = tiny_mp4(layout=layout)
    moov = drive(data).index.moov_range
    starve(monkeypatch)
    for size in range(len(FTYP) + 8, moov.stop):
        with pytest.raises((TruncatedMp4Error, BoxError), match=r"movie box|the header is cut") as caught:
            drive(data[:size])
        if isinstance(caught.value, TruncatedMp4Error):
            assert caught.value.need > caught.value.size == size
        else:
            assert size < moov.start + 16
    with pytest.raises(
        TruncatedMp4Error,
        match=rf"the movie box is bytes \[{moov.start}, {moov.stop}\), the file ends at {moov.stop - 1}",
    ):
        drive(data[: moov.stop - 1])


@pytest.mark.parametrize("layout", ["ftyp mdat", "ftyp", "free mdat0", "ftyp mdat free mdat64"])
def test_a_file_without_a_movie_box_says_so(layout):
    """All boxes walked, none is the movie."""
    data = tiny_mp4(layout=layout)
    with pytest.raises(BoxError, match=rf"no movie box \(moov\) in {len(data)} bytes") as caught:
        drive(data)
    assert (caught.value.path, caught.value.offset) == ("moov", len(data))


def test_a_box_smaller_than_its_header_does_not_loop():
    """A top-level box of 3 bytes is an error that names it, not an endless walk."""
    with pytest.raises(
        BoxError, match=r"top-level box 'free' at byte 24: size 3 is less than its header"
    ) as caught:
        drive(FTYP + u32(3) + b"free" + tiny_mp4(layout="moov mdat"))
    assert (caught.value.path, caught.value.offset) == ("free", 24)


def test_a_swarm_of_boxes_is_given_up(monkeypatch):
    """More top-level boxes in front of the movie than any file has are not walked for ever."""
    monkeypatch.setattr(mp4_index, "MAX_TOP_LEVEL_BOXES", 9)
    assert drive(FTYP + box(b"free") * 7 + tiny_mp4(layout="moov mdat")).index.num_samples == 12
    with pytest.raises(BoxError, match="moov"):
        drive(FTYP + box(b"free") * 8 + tiny_mp4(layout="moov mdat"))


def test_a_movie_box_too_large_to_read_is_unsupported():
    """A movie box of more than the limit is refused before it is read."""
    size = mp4_index.MAX_MOOV_BYTES + 100
    steps = index_steps(Signature(size))
    next(steps)
    with pytest.raises(
        UnsupportedMp4Error,
        match=rf"the movie box has {size} bytes; this parser reads up to {mp4_index.MAX_MOOV_BYTES}",
    ) as caught:
        steps.send([open_box(b"moov", bytes(HEAD_BYTES - 8))])
    assert caught.value.size == size


@pytest.mark.parametrize(
    ("swap", "message"),
    [
        ({"mvhd": None}, r"moov at byte \d+: mvhd is missing"),
        (
            {"mvhd": box(b"mvhd", bytes(40))},
            r"moov/mvhd at byte \d+: its fields \(9i\) needs 72 bytes, the box holds 40",
        ),
        ({"mdhd": None}, r"moov/trak/mdia at byte \d+: mdhd is missing"),
        ({"minf": None}, r"moov/trak/mdia at byte \d+: minf/stbl is missing"),
        ({"stbl": None}, r"moov/trak/mdia at byte \d+: minf/stbl is missing"),
        ({"stsd": None}, r"moov/trak/mdia/minf/stbl at byte \d+: stsd is missing"),
        (
            {"stsd": box(b"stsd", u32(0))},
            r"stbl/stsd at byte \d+: its fields \(II\) needs 8 bytes, the box holds 4",
        ),
        ({"stsd": stsd()}, r"moov/trak/mdia/minf/stbl/stsd: no sample entries"),
        (
            {"stsd": stsd(box(b"avc1", bytes(77)))},
            r"stsd/avc1 at byte \d+: a visual sample entry needs 78 bytes, the box holds 77",
        ),
        ({"stsd": stsd(visual_entry(b"avc1", 9, 9))}, r"stsd/avc1 at byte \d+: avcC is missing"),
        (
            {"stsd": stsd(visual_entry(b"hev1", 9, 9, MADE.config))},
            r"stsd/hev1 at byte \d+: hvcC is missing",
        ),
        ({"stts": None}, r"moov/trak/mdia/minf/stbl at byte \d+: stts is missing"),
        ({"stsc": None}, r"moov/trak/mdia/minf/stbl at byte \d+: stsc is missing"),
        ({"stco": None}, r"moov/trak/mdia/minf/stbl at byte \d+: co64 is missing"),
        ({"stsz": None}, r"moov/trak/mdia/minf/stbl at byte \d+: stz2 is missing"),
        (
            {"stts": full_box(b"stts", 0, 0, u32(1 << 30), bytes(8))},
            r"stbl/stts .*says 1073741824 entries of 8 bytes, the box holds 8",
        ),
        (
            {"ctts": full_box(b"ctts", 0, 0, u32(2), bytes(8))},
            r"stbl/ctts .*says 2 entries of 8 bytes, the box holds 8",
        ),
        ({"tkhd": box(b"tkhd", bytes(20))}, r"moov/trak/tkhd at byte \d+: its fields"),
        (
            {"mdhd": box(b"mdhd", u8(1) + bytes(10))},
            r"moov/trak/mdia/mdhd at byte \d+: its fields \(IQ\) needs 32 bytes, the box holds 11",
        ),
        (
            {"edts": box(b"edts", u32(99) + b"elst")},
            r"moov/trak/edts/elst at byte \d+: size 99 does not fit: want 8 to 8",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_broken_box_is_named_with_path_and_place(swap, message):
    """A missing, cut or contradictory box is a BoxError that says which, where, and what it holds."""
    with pytest.raises(BoxError, match=message) as caught:
        drive(tiny_mp4(swap=swap))
    assert str(caught.value.path) in str(caught.value) or caught.value.path.endswith("stbl")
    assert caught.value.offset > 0


def test_a_movie_without_video_or_with_a_compressed_head_is_unsupported():
    """Sound alone, or a compressed movie box, is a legal file that has no index; the message says why."""
    with pytest.raises(UnsupportedMp4Error, match="the movie box has no video track"):
        drive(tiny_mp4(swap={"hdlr": boxes.hdlr(b"soun")}))
    with pytest.raises(UnsupportedMp4Error, match=r"the movie box is compressed \(cmov\)"):
        drive(FTYP + box(b"moov", box(b"cmov", bytes(30))))


@pytest.mark.parametrize("kind", [b"encv", b"drmi"])
def test_an_encrypted_track_is_refused_by_its_boxes(kind):
    """Encv is recognised before anything is read of the samples; another track can still be asked for."""
    data = tiny_mp4(
        MADE.but(fourcc=kind),
        entry_boxes=box(b"sinf", box(b"frma", b"avc1")),
        other_traks=(b"", trak(made(3), [40], [3])),
    )
    with pytest.raises(
        EncryptedVideoError, match=rf"stsd/{kind.decode()} at byte \d+: the video is encrypted"
    ) as caught:
        drive(data, check=True)
    assert caught.value.path.endswith(kind.decode())
    assert caught.value.offset > 0
    assert drive(data, stream_index=1).index.num_samples == 3


# The container path's reasons


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"media": MADE.but(fourcc=b"mp4v", config=b"")}, "no packets are cut of mp4v (MPEG-4 part 2)"),
        ({"media": MADE.but(fourcc=b"\xa9\0zz", config=b"")}, r"no packets are cut of \xa9" + "\0zz"),
        ({"media": MADE.but(timescale=0)}, "the track has no timescale"),
        ({"media": MADE.but(dts=(0, *range(11)))}, "two samples have one presentation time"),
        ({"media": made(0)}, "the track has no samples"),
        ({"swap": {"stsz": boxes.stsz([9] * 11 + [0])}}, "a sample has no bytes"),
        ({"swap": {"stsz": boxes.stsz([9] * 11 + [1 << 31])}}, "a sample of 2147483648 bytes"),
        ({"swap": {"stsz": boxes.stsz([9] * 11 + [1 << 20])}}, "the file is cut: samples reach to byte"),
        ({"swap": {"stsz": boxes.stsz([9] * 13)}}, "the chunks hold 12 of 13 samples"),
        ({"swap": {"stts": full_box(b"stts", 0, 0, u32(1, 11, 512))}}, "stts times 11 of 12 samples"),
        ({"swap": {"stts": full_box(b"stts", 0, 0, u32(1, 12), i32(-4))}}, "stts has a negative duration"),
        ({"swap": {"ctts": full_box(b"ctts", 0, 0, u32(1, 11, 512))}}, "ctts times 11 of 12 samples"),
        ({"swap": {"ctts": full_box(b"ctts", 0, 0, u32(1, 12, 1 << 30))}}, "ctts has an absurd offset"),
        (
            {"swap": {"stsd": stsd(*[visual_entry(b"avc1", 9, 9, MADE.config)] * 2)}},
            "2 sample entries: the decoder's configuration changes",
        ),
        ({"swap": {"stsc": boxes.stsc([(1, 4, 2)])}}, "a sample names a sample entry that does not exist"),
        ({"swap": {"dinf": box(b"dinf", dref(IN_THIS_FILE, full_box(b"alis", 0, 0)))}}, None),
        ({"swap": {"dinf": None}}, None),
        ({"swap": {"dinf": box(b"dinf", dref(full_box(b"alis", 0, 1)))}}, None),
    ],
)
def test_what_is_not_certain_goes_to_the_container_path_by_name(options, reason):
    """Whatever makes FFmpeg's frames uncertain is the index's container_reason, word for word."""
    index = drive(tiny_mp4(**options), check=True).index
    assert index.container_reason is None if reason is None else index.container_reason.startswith(reason)
    assert index.pts_seconds.dtype == np.float64, "times can be asked for even then"


def test_a_wide_box_behind_the_head_is_read_in_full(monkeypatch):
    """A 64-bit size whose last bytes lie behind what is held is fetched, not guessed."""
    data = FTYP + u32(1) + b"free" + u64(16 + 5) + bytes(5) + tiny_mp4(layout="moov mdat")
    for head in range(len(FTYP), len(FTYP) + 24):
        starve(monkeypatch, head)
        assert drive(data).index.num_samples == 12


@pytest.mark.parametrize("reference", [full_box(b"url ", 0, 0, b"http://x\0"), full_box(b"alis", 0, 0)])
def test_samples_in_another_file_are_refused_by_name(reference):
    """FFmpeg would read this file's bytes in their place: neither index nor picture, but a typed error."""
    data = tiny_mp4(swap={"dinf": box(b"dinf", dref(reference))})
    with pytest.raises(fg.UnsupportedMp4Error, match="the samples lie in another file"):
        fg.VideoReader.open(fg.MemorySource(data))
