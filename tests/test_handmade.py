"""Files that no command makes, built box by box around real pictures: exact, by whichever path."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest

import fluxon_gop as fg
from fluxon_gop.encode import Recipe
from fluxon_gop.sources.range_source import check_range
from tests.boxes import co64, demuxed, full_box, stco, stsd, stss, tiny_mp4, u32, visual_entry
from tests.media import X264, full_decode, make

COUNT = 24


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make(tmp_path_factory.mktemp("handmade") / "real.mp4", Recipe(options={**X264, "g": "8"}), COUNT)


@pytest.fixture(scope="module")
def real(path):
    return demuxed(path)


@pytest.fixture(scope="module")
def pictures(path):
    return full_decode(path)


def _truth(data: bytes) -> list[np.ndarray]:
    with av.open(io.BytesIO(data), metadata_errors="ignore") as container:
        stream = container.streams.best("video")
        stream.thread_type = "NONE"
        return [f.reformat(format="rgb24", threads=1).to_ndarray() for f in container.decode(stream)]


def _assert_exact(source: fg.RangeSource, truth, packet: bool) -> fg.VideoIndex:
    with fg.VideoReader.open(source) as reader:
        assert len(truth) == reader.num_frames
        order = np.random.default_rng(1).permutation(len(truth))
        for number, picture in zip(order.tolist(), reader.read_frames_numpy(order), strict=True):
            assert np.array_equal(truth[number], picture)
        for number in order[:5].tolist():
            assert np.array_equal(truth[number], reader.read_frames_numpy([number])[0])
        assert packet == (reader.index.container_reason is None)
        return reader.index


@pytest.mark.parametrize(
    "options",
    [
        {"compact": 16},
        {"per_chunk": [1, 3, 2, 5]},
        {"per_chunk": 1},
        {"wide": True, "layout": "ftyp free moov skip uuid mdat64"},
        {"layout": "ftyp mdat free mdat mdat moov", "per_chunk": 3},
        {"layout": "ftyp wide moov mdat mdat mdat mdat", "per_chunk": 2},
        {"layout": "ftyp moov mdat0"},
        {"ctts_version": 1, "version": 1},
    ],
    ids=[
        "stz2",
        "stsc runs",
        "a chunk a sample",
        "co64 and fillers",
        "GOP over mdats",
        "many mdats",
        "to the end",
        "v1",
    ],
)
def test_every_way_to_lay_out_the_samples_reads_exactly(real, options):
    """The packet path cuts the right bytes whatever tables and boxes say where they lie."""
    data = tiny_mp4(real, **options)
    _assert_exact(fg.MemorySource(data), _truth(data), packet=True)


def test_chunks_out_of_order_read_exactly(real):
    """The second chunk lies before the first: samples are found by offset, not by order."""
    half = COUNT // 2
    data = tiny_mp4(real, per_chunk=half)
    sizes = [sum(map(len, real.packets[:half])), sum(map(len, real.packets[half:]))]
    start = len(data) - sum(sizes)
    swapped = data[:start] + data[start + sizes[0] :] + data[start : start + sizes[0]]
    swapped = swapped.replace(stco([start, start + sizes[0]]), stco([start + sizes[1], start]))
    index = _assert_exact(fg.MemorySource(swapped), _truth(swapped), packet=True)
    assert index.sample_offset[half] < index.sample_offset[0]


class FarSource(fg.MemorySource):
    """A file with five GiB of nothing in its midst."""

    GAP = 5 << 30

    def __init__(self, head: bytes, tail: bytes):
        self.parts = [(0, head), (len(head) + self.GAP, tail)]
        super().__init__(head + tail, name="far")

    @property
    def signature(self):
        return fg.Signature(self.parts[1][0] + len(self.parts[1][1]), "far")

    def read(self, start, stop):
        check_range(self.name, start, stop)
        out = bytearray(stop - start)
        for at, data in self.parts:
            first, last = max(start, at), min(stop, at + len(data))
            if first < last:
                out[first - start : last - start] = data[first - at : last - at]
        return bytes(out)

    def read_head(self, size):
        return self.read(0, size)


def test_samples_beyond_four_gib_read_exactly(real, pictures):
    """64-bit chunk offsets and a 64-bit box size in between, on a source that holds no five gigabytes."""
    data = tiny_mp4(real, wide=True, per_chunk=COUNT)
    start = len(data) - sum(map(len, real.packets))
    head, tail = data[: start - 8], data[start - 8 :]
    head = head.replace(co64([start]), co64([start + FarSource.GAP + 16]))
    source = FarSource(head + u32(1) + b"free" + (FarSource.GAP + 16).to_bytes(8), tail)
    with fg.VideoReader.open(source) as reader:
        assert reader.index.sample_offset[0] > 1 << 32
        assert np.array_equal(pictures[[20, 3]], reader.read_frames_numpy([20, 3]))
        assert reader.stats().total_bytes < 1 << 22


@pytest.mark.parametrize("at", [0, 5, COUNT - 1])
def test_samples_without_bytes_show_nothing(real, at):
    """FFmpeg's demuxer skips a sample of size 0; the frames around it keep their pictures."""
    packets = list(real.packets)
    packets.insert(at, b"")
    dts = tuple(512 * n for n in range(COUNT + 1))
    offsets = list(real.offsets)
    offsets.insert(at, 0)
    keys = tuple(key + (key >= at) for key in real.keys)
    data = tiny_mp4(real.but(packets=tuple(packets), dts=dts, offsets=tuple(offsets), keys=keys))
    _assert_exact(fg.MemorySource(data), _truth(data), packet=False)


def test_two_sample_entries_read_exactly(real):
    """A second sample entry in use goes to FFmpeg's demuxer, which hands the decoder each configuration."""
    entry = visual_entry(real.fourcc, real.width, real.height, real.config)
    runs = full_box(b"stsc", 0, 0, u32(2), u32(1), u32(8), u32(1), u32(2), u32(8), u32(2))
    data = tiny_mp4(real, per_chunk=8, swap={"stsd": stsd(entry, entry), "stsc": runs})
    _assert_exact(fg.MemorySource(data), _truth(data), packet=False)


def test_partial_sync_samples_change_nothing(real):
    """stps names no entry points of its own; frames are exact."""
    both = stss(real.keys[:1]) + full_box(b"stps", 0, 0, u32(1), u32(real.keys[1] + 1))
    data = tiny_mp4(real, swap={"stss": both})
    _assert_exact(fg.MemorySource(data), _truth(data), packet=True)


@pytest.mark.parametrize("kind", [b"rap ", b"sync"])
def test_sample_groups_change_nothing(real, kind):
    """Random access by sample groups alone: without stss claims decoding starts earlier, and is exact."""
    groups = full_box(b"sgpd", 1, 0, kind, u32(1), u32(1), b"\x80") + full_box(
        b"sbgp", 0, 0, kind, u32(2), u32(8), u32(0), u32(1), u32(1)
    )
    data = tiny_mp4(real, swap={"stss": stss(real.keys[:1]) + groups})
    _assert_exact(fg.MemorySource(data), _truth(data), packet=True)


def test_an_idr_whose_parameter_sets_came_earlier_in_band_is_no_entry_point(tmp_path):
    """avc3, sets in the first sample only: later IDRs are refused, frames are exact from the start."""
    options = {**X264, "g": "8", "x264-params": "repeat-headers=1"}
    media = demuxed(make(tmp_path / "inband.mp4", Recipe(options=options), COUNT))

    def without_sets(packet: bytes) -> bytes:
        out, at = b"", 0
        while at < len(packet):
            size = int.from_bytes(packet[at : at + 4])
            nal = packet[at : at + 4 + size]
            out += b"" if nal[4] & 31 in {7, 8} else nal
            at += 4 + size
        return out

    packets = (media.packets[0], *(without_sets(packet) for packet in media.packets[1:]))
    data = tiny_mp4(media.but(packets=packets, fourcc=b"avc3"))
    index = fg.build_index(fg.MemorySource(data))
    assert [fg.Verdict.PROVEN, fg.Verdict.REFUSED, fg.Verdict.REFUSED] == index.verdicts.tolist()
    _assert_exact(fg.MemorySource(data), _truth(data), packet=True)
    whole = tiny_mp4(media.but(fourcc=b"avc3"))
    assert {fg.Verdict.PROVEN} == set(fg.build_index(fg.MemorySource(whole)).verdicts.tolist())
    _assert_exact(fg.MemorySource(whole), _truth(whole), packet=True)
