"""The few bits of a coded picture that tell how it may be decoded: headers, never pictures.

Pure. Readers of NAL units, OBUs and VP9 frame headers, as far as an entry-point proof needs them.
Source: ITU-T H.264 clause 7.3, ITU-T H.265 clause 7.3, ISO/IEC 14496-15, the AV1 and VP9 bitstream
specifications.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

MAX_SET_BYTES = 4096
"""Bytes of a parameter set that are looked at: its size stands in front, its longest lists fit."""
MAX_SIDE = 1 << 16
"""Columns or rows of a picture; a set that says more is damaged."""


class BitsExhausted(Exception):  # noqa: N818 - a signal between these two rooms, not an error
    """The bits ended before the answer: more bytes are needed, or the stream is damaged."""


class Bits:
    """Reads bits from the left; emulation prevention bytes are taken out where ``nal`` is set."""

    def __init__(self, data: bytes | memoryview, *, nal: bool = False) -> None:
        """Start at the first bit of ``data``."""
        raw = bytes(data)
        if nal:
            raw = raw.replace(b"\0\0\3", b"\0\0")
        self._value = int.from_bytes(raw)
        self._left = len(raw) * 8

    def u(self, count: int) -> int:
        """Return ``count`` bits as an unsigned number."""
        if count > self._left:
            raise BitsExhausted
        self._left -= count
        return (self._value >> self._left) & ((1 << count) - 1)

    def ue(self) -> int:
        """Return an unsigned Exp-Golomb number. H.264 clause 9.1."""
        zeros = 0
        while not self.u(1):
            zeros += 1
            if zeros > 32:
                raise BitsExhausted
        return (1 << zeros) - 1 + self.u(zeros)

    def se(self) -> int:
        """Return a signed Exp-Golomb number."""
        code = self.ue()
        return (code + 1) // 2 if code % 2 else -(code // 2)


class Record(NamedTuple):
    """A configuration record's parameter sets and the width of a NAL unit's length field."""

    length_size: int
    nals: tuple[bytes, ...]


def avc_record(config: bytes) -> Record:
    """Return what avcC holds. ISO/IEC 14496-15 clause 5.3.3."""
    if len(config) < 7:
        raise BitsExhausted
    nals: list[bytes] = []
    at = 5
    for mask in (31, 255):
        if at >= len(config):
            raise BitsExhausted
        count, at = config[at] & mask, at + 1
        for _ in range(count):
            size = int.from_bytes(config[at : at + 2])
            nals.append(config[at + 2 : at + 2 + size])
            at += 2 + size
    if at > len(config):
        raise BitsExhausted
    return Record((config[4] & 3) + 1, tuple(nals))


def hevc_record(config: bytes) -> Record:
    """Return what hvcC holds. ISO/IEC 14496-15 clause 8.3.3."""
    if len(config) < 23:
        raise BitsExhausted
    nals: list[bytes] = []
    at = 23
    for _ in range(config[22]):
        if at + 3 > len(config):
            raise BitsExhausted
        count, at = int.from_bytes(config[at + 1 : at + 3]), at + 3
        for _ in range(count):
            size = int.from_bytes(config[at : at + 2])
            nals.append(config[at + 2 : at + 2 + size])
            at += 2 + size
            if at > len(config):
                raise BitsExhausted
    return Record((config[21] & 3) + 1, tuple(nals))


def sample_nals(data: memoryview, length_size: int, sample_size: int) -> Iterator[memoryview]:
    """Yield the NAL units of a sample of which ``data`` are the first bytes; the last may be cut.

    Ends silently where the sample does; raises BitsExhausted where ``data`` ends first, ValueError
    where a length points past the sample.
    """
    at = 0
    while at + length_size < sample_size:
        if at + length_size >= len(data):
            raise BitsExhausted
        size = int.from_bytes(data[at : at + length_size])
        at += length_size
        if at + size > sample_size:
            text = f"a NAL unit of {size} bytes at {at} of a sample of {sample_size}"
            raise ValueError(text)
        if size:
            yield data[at : at + size]
        at += size


class SampleRole(NamedTuple):
    """What a sample's NAL headers say of the pictures that may need it."""

    fills: bool
    """NAL units with their lengths fill the sample exactly, as ISO/IEC 14496-15 demands."""
    layer: int
    """Its temporal layer (H.264: 0)."""
    disposable: bool
    """No picture of this or a lower layer needs it, and it carries nothing but that picture."""
    has_sets: bool
    """It carries parameter sets, which a decoder keeps beyond the GOP."""


_PLAIN_SEI = frozenset({0, 1, 4, 132})
"""Buffering, timing, captions, hashes: messages that change no later picture."""


def avc_role(data: memoryview, length_size: int) -> SampleRole:
    """Return the role of an H.264 sample: disposable where all slices have nal_ref_idc 0. Clause 7.4.1."""
    at, end = 0, len(data)
    slices, rest, sets = 0, False, False
    while at + length_size < end:
        start = at + length_size
        at = start + int.from_bytes(data[at:start])
        if at == start:
            continue
        head = data[start]
        if head == 1:
            slices += 1
        elif head & 31 not in {9, 12} and not (head & 31 == 6 and _plain(data[start + 1 : at])):
            rest = True
            sets = sets or head & 31 in {7, 8, 13, 15}
    return SampleRole(at == end, 0, slices > 0 and not rest, sets)


def hevc_role(data: memoryview, length_size: int) -> SampleRole:
    """Return the role of an HEVC sample: disposable where it is a sub-layer non-reference picture. Table 7-1."""
    at, end = 0, len(data)
    slices, rest, sets, layer = 0, False, False, 0
    while at + length_size < end:
        start = at + length_size
        at = start + int.from_bytes(data[at:start])
        if at < start + 2 or start + 1 >= end:
            continue
        kind = data[start] >> 1 & 63
        if kind < 32:
            layer = max(layer, (data[start + 1] & 7) - 1)
        # The bits between are the layer of a scalable stream, which is no part of the picture here.
        if kind < 15 and not kind & 1 and not (data[start] & 1 or data[start + 1] >> 3):
            slices += 1
        elif kind not in {35, 38} and not (kind in {39, 40} and _plain(data[start + 2 : at])):
            rest = True
            sets = sets or 32 <= kind <= 34
    return SampleRole(at == end, layer, slices > 0 and not rest, sets)


def _plain(message: memoryview) -> bool:
    """Return whether an SEI NAL unit's payloads are all of a plain kind. H.264 clause 7.3.2.3.1."""
    raw = bytes(message).replace(b"\0\0\3", b"\0\0")
    at = 0
    while at + 2 < len(raw):
        numbers = []
        for _ in range(2):
            number = 0
            while at < len(raw) and raw[at] == 255:
                number, at = number + 255, at + 1
            if at == len(raw):
                return False
            numbers.append(number + raw[at])
            at += 1
        if numbers[0] not in _PLAIN_SEI:
            return False
        at += numbers[1]
    return True


class AvcSps(NamedTuple):
    """What is used of an H.264 sequence parameter set. Clause 7.3.2.1.1."""

    number: int
    frame_mbs_only: bool
    width: int
    height: int


_HIGH_PROFILES = frozenset({100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135})


def avc_sps(nal: bytes | memoryview) -> AvcSps:
    """Parse an H.264 SPS, NAL header included."""
    bits = Bits(nal[1:MAX_SET_BYTES], nal=True)
    profile = bits.u(8)
    bits.u(16)
    number = bits.ue()
    chroma, separate = 1, 0
    if profile in _HIGH_PROFILES:
        chroma = bits.ue()
        if chroma == 3:
            separate = bits.u(1)
        bits.ue(), bits.ue(), bits.u(1)
        if bits.u(1):
            for i in range(12 if chroma == 3 else 8):
                if bits.u(1):
                    _skip_scaling_list(bits, 16 if i < 6 else 64)
    bits.ue()
    order_type = bits.ue()
    if order_type == 0:
        bits.ue()
    elif order_type == 1:
        bits.u(1), bits.se(), bits.se()
        cycle = bits.ue()
        if cycle > 255:
            raise BitsExhausted
        for _ in range(cycle):
            bits.se()
    bits.ue(), bits.u(1)
    width, map_units = 16 * (bits.ue() + 1), bits.ue() + 1
    frame_only = bits.u(1)
    if not frame_only:
        bits.u(1)
    bits.u(1)
    height = 16 * map_units * (2 - frame_only)
    if bits.u(1):
        left, right, top, bottom = (bits.ue() for _ in range(4))
        sampled = chroma if not separate else 0
        unit_x = 2 if sampled in {1, 2} else 1
        unit_y = (2 if sampled == 1 else 1) * (2 - frame_only)
        if unit_x * (left + right) < width and unit_y * (top + bottom) < height:
            width -= unit_x * (left + right)
            height -= unit_y * (top + bottom)
    if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE):
        raise BitsExhausted
    return AvcSps(number, bool(frame_only), width, height)


def _skip_scaling_list(bits: Bits, size: int) -> None:
    last = following = 8
    for _ in range(size):
        if following:
            following = (last + bits.se()) % 256
        last = following or last


class HevcSps(NamedTuple):
    """What is used of an HEVC sequence parameter set. Clause 7.3.2.2.1."""

    number: int
    width: int
    height: int


def hevc_sps(nal: bytes | memoryview) -> HevcSps:
    """Parse an HEVC SPS, NAL header included."""
    bits = Bits(nal[2:MAX_SET_BYTES], nal=True)
    bits.u(4)
    layers = bits.u(3)
    bits.u(1)
    bits.u(96)
    present = [(bits.u(1), bits.u(1)) for _ in range(layers)]
    if layers:
        bits.u(2 * (8 - layers))
    for profile, level in present:
        bits.u(88 * profile + 8 * level)
    number = bits.ue()
    chroma = bits.ue()
    if chroma == 3:
        bits.u(1)
    width, height = bits.ue(), bits.ue()
    if bits.u(1):
        left, right, top, bottom = (bits.ue() for _ in range(4))
        width -= (2 if chroma in {1, 2} else 1) * (left + right)
        height -= (2 if chroma == 1 else 1) * (top + bottom)
    if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE):
        raise BitsExhausted
    return HevcSps(number, width, height)


def avc_type(nal: bytes | memoryview) -> int:
    """Return nal_unit_type of an H.264 NAL unit."""
    return nal[0] & 31


def hevc_type(nal: bytes | memoryview) -> int:
    """Return nal_unit_type of an HEVC NAL unit, -1 for one of another layer."""
    if len(nal) < 2:
        raise BitsExhausted
    return nal[0] >> 1 & 63 if not (nal[0] & 1 or nal[1] >> 3) else -1


class Obu(NamedTuple):
    """One AV1 open bitstream unit: its type and payload. Section 5.3."""

    kind: int
    payload: memoryview


def obus(data: memoryview) -> Iterator[Obu]:
    """Yield the OBUs at the start of a sample; the last may be cut."""
    at = 0
    while at < len(data):
        header, at = data[at], at + 1
        if header & 4:
            at += 1
        size = len(data) - at
        if header & 2:
            size = shift = 0
            while True:
                if at >= len(data) or shift > 56:
                    raise BitsExhausted
                byte, at = data[at], at + 1
                size |= (byte & 127) << shift
                shift += 7
                if not byte & 128:
                    break
        yield Obu(header >> 3 & 15, data[at : at + size])
        at += size
