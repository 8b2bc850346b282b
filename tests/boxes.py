"""Boxes and whole small files made by hand around samples made up or taken from real videos.

Everything an MP4 can say is one function here: ``box(b"stss", u32(0), ...)``. :func:`tiny_mp4` joins
them to a file around given samples; ``swap`` puts any other bytes in the place of any box.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path

import av
import numpy as np

from fluxon_gop.model import IDENTITY_MATRIX
from tests.nals import avc_pps, avc_slice, avc_sps, avcc, bits, lengths, packed


def u8(*values: int) -> bytes:
    return bytes(values)


def u16(*values: int) -> bytes:
    return b"".join(value.to_bytes(2) for value in values)


def u32(*values: int) -> bytes:
    return b"".join(value.to_bytes(4) for value in values)


def u64(*values: int) -> bytes:
    return b"".join(value.to_bytes(8) for value in values)


def i32(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, signed=True) for value in values)


def i64(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, signed=True) for value in values)


def box(kind: bytes, *payload: bytes) -> bytes:
    """Return a box with the size that it has."""
    body = b"".join(payload)
    return u32(8 + len(body)) + kind + body


def big_box(kind: bytes, *payload: bytes) -> bytes:
    """Return a box with its size in 64 bits."""
    body = b"".join(payload)
    return u32(1) + kind + u64(16 + len(body)) + body


def open_box(kind: bytes, *payload: bytes) -> bytes:
    """Return a box of size 0: it reaches to the end."""
    return u32(0) + kind + b"".join(payload)


def full_box(kind: bytes, version: int, flags: int, *payload: bytes) -> bytes:
    return box(kind, u8(version), flags.to_bytes(3), *payload)


@dataclass(frozen=True)
class Media:
    """The samples of one track, and what a file says of them."""

    packets: tuple[bytes, ...]
    dts: tuple[int, ...]
    offsets: tuple[int, ...] | None
    """Composition offsets; None: no ctts box."""
    keys: tuple[int, ...] | None
    """0-based; None: no stss box."""
    config: bytes = box(b"avcC", avcc(avc_sps(), avc_pps()))
    """The whole boxes behind the fixed fields of the sample entry."""
    fourcc: bytes = b"avc1"
    width: int = 64
    height: int = 48
    timescale: int = 12800
    last_duration: int = 512

    @property
    def durations(self) -> list[int]:
        """Ticks that each sample lasts."""
        return [*np.diff(self.dts).tolist(), self.last_duration]

    def but(self, **changes) -> Media:
        """Return a copy with these fields changed."""
        return replace(self, **changes)


def made(count: int = 12, gop: int = 4) -> Media:
    """Return samples that look like H.264, each under 16 bytes: IDR heads and other slices, no pictures."""
    packets = tuple(lengths(avc_slice(1 if n % gop else 5, filler=n % 6)) for n in range(count))
    return Media(packets, tuple(512 * n for n in range(count)), None, tuple(range(0, count, gop)))


MADE = made()


def demuxed(path: Path) -> Media:
    """Return the real packets of a video that this project's tests encoded."""
    with av.open(str(path)) as container:
        stream = container.streams.best("video")
        packets = [packet for packet in container.demux(stream) if packet.size]
        context = stream.codec_context
        record, fourcc = {"h264": (b"avcC", b"avc1"), "hevc": (b"hvcC", b"hvc1")}[context.name]
        first = packets[0].dts
        dts = tuple(packet.dts - first for packet in packets)
        least = min(packet.pts - packet.dts for packet in packets)
        offsets = tuple(packet.pts - packet.dts - least for packet in packets)
        return Media(
            packets=tuple(bytes(packet) for packet in packets),
            dts=dts,
            offsets=offsets if any(offsets) else None,
            keys=tuple(n for n, packet in enumerate(packets) if packet.is_keyframe),
            config=box(record, bytes(context.extradata)),
            fourcc=fourcc,
            width=context.width,
            height=context.height,
            timescale=stream.time_base.denominator,
            last_duration=packets[-1].duration,
        )


# The tables of a track.


def runs(values: Sequence[int]) -> list[tuple[int, int]]:
    """Return (how many, value) for each stretch of equal values."""
    return [(len(list(group)), value) for value, group in groupby(values)]


def stts(durations: Sequence[int]) -> bytes:
    pairs = runs(durations)
    return full_box(b"stts", 0, 0, u32(len(pairs)), *(u32(n) + i32(value) for n, value in pairs))


def ctts(offsets: Sequence[int], version: int = 0) -> bytes:
    pairs = runs(offsets)
    return full_box(b"ctts", version, 0, u32(len(pairs)), *(u32(n) + i32(value) for n, value in pairs))


def stss(samples: Sequence[int]) -> bytes:
    """Return stss of 0-based samples."""
    return full_box(b"stss", 0, 0, u32(len(samples)), *(u32(sample + 1) for sample in samples))


def stsz(sizes: Sequence[int]) -> bytes:
    return full_box(b"stsz", 0, 0, u32(0, len(sizes)), *map(u32, sizes))


def uniform_stsz(size: int, count: int) -> bytes:
    return full_box(b"stsz", 0, 0, u32(size, count))


def stz2(sizes: Sequence[int], width: int) -> bytes:
    return full_box(b"stz2", 0, 0, u32(width, len(sizes)), packed(*(bits(size, width) for size in sizes)))


def stsc(entries: Sequence[tuple[int, int, int]]) -> bytes:
    """Return stsc of (1-based first chunk, samples a chunk, 1-based sample entry)."""
    return full_box(b"stsc", 0, 0, u32(len(entries)), *(u32(*entry) for entry in entries))


def stco(offsets: Sequence[int]) -> bytes:
    return full_box(b"stco", 0, 0, u32(len(offsets)), u32(*offsets))


def co64(offsets: Sequence[int]) -> bytes:
    return full_box(b"co64", 0, 0, u32(len(offsets)), u64(*offsets))


def elst(edits: Sequence[tuple[int, int, int]], version: int = 0) -> bytes:
    """Return elst of (movie ticks, media time, rate as 16.16)."""
    write = i64 if version else i32
    return full_box(b"elst", version, 0, u32(len(edits)), *(write(d, t) + i32(r) for d, t, r in edits))


def visual_entry(fourcc: bytes, width: int, height: int, *boxes: bytes) -> bytes:
    fixed = (
        bytes(6),
        u16(1),
        bytes(16),
        u16(width, height),
        u32(72 << 16, 72 << 16, 0),
        u16(1),
        bytes(32),
        u16(24),
        u16(65535),
    )
    return box(fourcc, *fixed, *boxes)


def stsd(*entries: bytes) -> bytes:
    return full_box(b"stsd", 0, 0, u32(len(entries)), *entries)


def nclx(primaries: int, transfer: int, matrix: int, *, full: bool) -> bytes:
    return box(b"colr", b"nclx", u16(primaries, transfer, matrix), u8(full << 7))


def dref(*entries: bytes) -> bytes:
    return full_box(b"dref", 0, 0, u32(len(entries)), *entries)


IN_THIS_FILE = full_box(b"url ", 0, 1)


def tkhd(
    *,
    version: int = 0,
    flags: int = 3,
    matrix: Sequence[int] = IDENTITY_MATRIX,
    size: tuple[int, int] = (64, 48),
) -> bytes:
    times = u64(0, 0) + u32(1, 0) + u64(0) if version else u32(0, 0, 1, 0, 0)
    shape = u32(size[0] << 16, size[1] << 16)
    return full_box(b"tkhd", version, flags, times, bytes(8), bytes(8), i32(*matrix), shape)


def mdhd(timescale: int, duration: int, version: int = 0) -> bytes:
    times = u64(0, 0) + u32(timescale) + u64(duration) if version else u32(0, 0, timescale, duration)
    return full_box(b"mdhd", version, 0, times, u16(0x55C4, 0))


def mvhd(
    timescale: int = 1000, duration: int = 0, *, version: int = 0, matrix: Sequence[int] = IDENTITY_MATRIX
) -> bytes:
    times = u64(0, 0) + u32(timescale) + u64(duration) if version else u32(0, 0, timescale, duration)
    return full_box(
        b"mvhd", version, 0, times, u32(1 << 16), u16(1 << 8), bytes(10), i32(*matrix), bytes(24), u32(9)
    )


def hdlr(kind: bytes = b"vide") -> bytes:
    return full_box(b"hdlr", 0, 0, u32(0), kind, bytes(12), b"made\0")


FTYP = box(b"ftyp", b"isom", u32(512), b"isomavc1")

Swap = Mapping[str, bytes | None]


def trak(
    media: Media = MADE,
    offsets: Sequence[int] = (),
    per_chunk: Sequence[int] = (),
    *,
    wide: bool = False,
    compact: int = 0,
    ctts_version: int = 0,
    edits: Sequence[tuple[int, int, int]] = (),
    elst_version: int = 0,
    matrix: Sequence[int] = IDENTITY_MATRIX,
    entry_boxes: bytes = b"",
    version: int = 0,
    flags: int = 3,
    swap: Swap | None = None,
) -> bytes:
    """Return a track whose chunks of ``per_chunk`` samples lie at ``offsets``; see :func:`tiny_mp4`."""
    sizes = [len(packet) for packet in media.packets]
    stretches = [(n, count) for n, count in enumerate(per_chunk) if not n or count != per_chunk[n - 1]]
    entry = visual_entry(media.fourcc, media.width, media.height, media.config, entry_boxes)
    table: dict[str, bytes | None] = {
        "stsd": stsd(entry),
        "stts": stts(media.durations if sizes else ()),
        "ctts": None if media.offsets is None else ctts(media.offsets, ctts_version),
        "stss": None if media.keys is None else stss(media.keys),
        "stsc": stsc([(n + 1, count, 1) for n, count in stretches]),
        "stsz": stz2(sizes, compact) if compact else stsz(sizes),
        "stco": co64(offsets) if wide else stco(offsets),
    }
    swap = swap or {}
    stbl = swap.get("stbl", box(b"stbl", *(swap.get(kind, made) or b"" for kind, made in table.items())))
    vmhd = full_box(b"vmhd", 0, 1, bytes(8))
    parts = {
        "tkhd": tkhd(version=version, flags=flags, matrix=matrix, size=(media.width, media.height)),
        "edts": box(b"edts", elst(edits, elst_version)) if edits else b"",
        "mdhd": mdhd(media.timescale, sum(media.durations), version),
        "hdlr": hdlr(),
        "dinf": box(b"dinf", dref(IN_THIS_FILE)),
    }
    parts = {kind: swap.get(kind, made) or b"" for kind, made in parts.items()}
    minf = swap.get("minf", box(b"minf", vmhd, parts["dinf"], stbl or b"")) or b""
    mdia = swap.get("mdia", box(b"mdia", parts["mdhd"], parts["hdlr"], minf)) or b""
    return box(b"trak", parts["tkhd"], parts["edts"], mdia)


FILLERS = {
    "free": box(b"free", bytes(24)),
    "wide": box(b"wide"),
    "skip": box(b"skip", b"moov"),
    "uuid": box(b"uuid", bytes(40)),
}


def tiny_mp4(
    media: Media = MADE,
    *,
    layout: str = "ftyp moov mdat",
    per_chunk: int | Sequence[int] = 4,
    mvex: bool = False,
    movie_timescale: int = 1000,
    movie_matrix: Sequence[int] = IDENTITY_MATRIX,
    version: int = 0,
    other_traks: tuple[bytes, bytes] = (b"", b""),
    swap: Swap | None = None,
    **track,
) -> bytes:
    """Return a complete file around the samples.

    Args:
        media: the samples.
        layout: the top-level boxes in order; ``mdat64``, ``moov64`` have 64-bit sizes, ``mdat0``, ``moov0``
            reach to the end, several mdats share the chunks evenly; free, wide, skip and uuid are fillers.
        per_chunk: samples of each chunk, the last one's for all that follow.
        mvex: whether the movie box announces fragments.
        movie_timescale: ticks of the edit list's durations.
        movie_matrix: of mvhd.
        version: of mvhd, tkhd and mdhd.
        other_traks: tracks before and after this one.
        swap: bytes in the place of a box ("mvhd", "trak", and whatever :func:`trak` makes); None leaves it out.
        track: see :func:`trak`.
    """
    wanted = [per_chunk] if isinstance(per_chunk, int) else list(per_chunk)
    counts, left = [], len(media.packets)
    while left:
        counts.append(min(left, wanted[min(len(counts), len(wanted) - 1)]))
        left -= counts[-1]
    edges = np.cumsum([0, *counts])
    chunks = [b"".join(media.packets[a:b]) for a, b in pairwise(edges)]
    words = layout.split()
    mdats = [n for n, word in enumerate(words) if word.startswith("mdat")]
    share = -(-len(chunks) // max(len(mdats), 1))
    wrap = {"64": big_box, "0": open_box}
    swap = swap or {}

    def lay(offsets: Sequence[int]) -> tuple[bytes, list[int]]:
        own = swap.get("trak", trak(media, offsets, counts, version=version, swap=swap, **track)) or b""
        head = swap.get("mvhd", mvhd(movie_timescale, version=version, matrix=movie_matrix)) or b""
        moov = (head, other_traks[0], own, other_traks[1], box(b"mvex") if mvex else b"")
        out, found = b"", []
        for number, word in enumerate(words):
            maker = next((make for end, make in wrap.items() if word.endswith(end)), box)
            if word.startswith("mdat"):
                rank = mdats.index(number)
                held = chunks[rank * share : (rank + 1) * share]
                at = len(out) + (16 if maker is big_box else 8)
                found += (np.cumsum([at, *map(len, held)])[:-1]).tolist()
                out += maker(b"mdat", *held)
            elif word.startswith("moov"):
                out += maker(b"moov", *moov)
            else:
                out += FTYP if word == "ftyp" else FILLERS[word]
        return out, found

    _, offsets = lay([0] * len(chunks))
    return lay(offsets)[0]
