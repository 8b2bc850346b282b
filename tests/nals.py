"""Parameter sets and picture heads of H.264, HEVC, AV1 and VP9, made bit by bit for the tests.

A field is text of 0 and 1; :func:`nal` joins fields to bytes.
"""

from __future__ import annotations


def bits(value: int, width: int) -> str:
    """Return an unsigned number of fixed width."""
    return f"{value:0{width}b}" if width else ""


def ue(value: int) -> str:
    """Return an unsigned Exp-Golomb number."""
    return "0" * ((value + 1).bit_length() - 1) + f"{value + 1:b}"


def se(value: int) -> str:
    """Return a signed Exp-Golomb number."""
    return ue(2 * value - 1 if value > 0 else -2 * value)


def packed(*fields: str) -> bytes:
    """Return the fields as bytes, filled up with zeros."""
    text = "".join(fields)
    text += "0" * (-len(text) % 8)
    return bytes(int(text[i : i + 8], 2) for i in range(0, len(text), 8))


def nal(header: bytes, *fields: str) -> bytes:
    """Return a NAL unit: header, the fields, the stop bit; emulation prevention put in."""
    out, zeros = bytearray(header), 0
    for byte in packed(*fields, "1"):
        if zeros == 2 and byte <= 3:
            out.append(3)
            zeros = 0
        zeros = zeros + 1 if byte == 0 else 0
        out.append(byte)
    return bytes(out)


def lengths(*nals: bytes, width: int = 4) -> bytes:
    """Return a sample: each NAL unit behind its length."""
    return b"".join(len(unit).to_bytes(width) + unit for unit in nals)


def _sets(*nals: bytes) -> bytes:
    return b"".join(len(unit).to_bytes(2) + unit for unit in nals)


# H.264


def avc_sps(
    number: int = 0,
    width: int = 64,
    height: int = 48,
    *,
    fields: bool = False,
    high: str = "",
    order: str = ue(2),
    crop: str = "0",
) -> bytes:
    """Return an H.264 SPS, baseline unless ``high`` has the fields from chroma_format_idc on.

    Width and height in whole macroblocks; ``order`` is the picture order count's part.
    """
    profile = 100 if high else 66
    rows = height // (32 if fields else 16)
    return nal(
        b"\x67",
        bits(profile, 8),
        bits(0, 8),
        bits(30, 8),
        ue(number),
        high,
        ue(0),
        order,
        ue(1),
        "0",
        ue(width // 16 - 1),
        ue(rows - 1),
        "00" if fields else "1",
        "1",
        crop,
        "0",
    )


def avc_pps(number: int = 0, sps: int = 0) -> bytes:
    """Return an H.264 PPS."""
    rest = ("00", ue(0), ue(0), ue(0), "0", "00", se(0), se(0), se(0), "000")
    return nal(b"\x68", ue(number), ue(sps), *rest)


def avc_slice(kind: int = 5, pps: int = 0, filler: int = 0) -> bytes:
    """Return the head of a slice and some bytes: 5 is IDR, 1 is not."""
    return nal(bytes([0x60 | kind]), ue(0), ue(7), ue(pps), bits(0x55, 8) * filler)


def avcc(*sets: bytes, width: int = 4) -> bytes:
    """Return the body of avcC that holds these parameter sets."""
    first = [unit for unit in sets if unit[:1] and unit[0] & 31 == 7]
    rest = [unit for unit in sets if unit not in first]
    head = bytes([1, 66, 0, 30, 0xFC | width - 1])
    return head + bytes([0xE0 | len(first)]) + _sets(*first) + bytes([len(rest)]) + _sets(*rest)


# HEVC


def hevc_header(kind: int, layer: int = 0) -> bytes:
    """Return the two bytes of a NAL unit's header."""
    return (kind << 9 | layer << 3 | 1).to_bytes(2)


def hevc_vps(number: int = 0) -> bytes:
    """Return as much of an HEVC VPS as its number needs."""
    return nal(hevc_header(32), bits(number, 4), bits(0xFFF, 12))


def hevc_sps(
    number: int = 0, vps: int = 0, width: int = 64, height: int = 48, *, layers: str = "", crop: str = "0"
) -> bytes:
    """Return an HEVC SPS up to its size; ``layers`` has (profile, level) flags of each sub-layer but one."""
    count = len(layers) // 2
    fill = "11" * (8 - count) if count else ""
    below = "".join(
        "0" * (88 * int(p) + 8 * int(v)) for p, v in zip(layers[::2], layers[1::2], strict=True)
    )
    tiers = ("0" * 96, layers, fill, below)
    return nal(
        hevc_header(33),
        bits(vps, 4),
        bits(count, 3),
        "1",
        *tiers,
        ue(number),
        ue(1),
        ue(width),
        ue(height),
        crop,
    )


def hevc_pps(number: int = 0, sps: int = 0) -> bytes:
    """Return the head of an HEVC PPS."""
    return nal(hevc_header(34), ue(number), ue(sps), "0" * 7)


def hevc_slice(kind: int = 19, pps: int = 0, layer: int = 0) -> bytes:
    """Return the head of an HEVC slice: 19, 20 IDR; 21 CRA; 16 to 18 BLA; 0 to 9 no key."""
    return nal(hevc_header(kind, layer), "10" if 16 <= kind <= 23 else "1", ue(pps), bits(0x55, 8))


def hvcc(*sets: bytes, width: int = 4) -> bytes:
    """Return the body of hvcC, one array for each parameter set."""
    arrays = b"".join(bytes([unit[0] >> 1 & 63 if unit else 0]) + b"\0\1" + _sets(unit) for unit in sets)
    return b"\1" + bytes(20) + bytes([0xFC | width - 1, len(sets)]) + arrays


# AV1 and VP9


def obu(kind: int, payload: bytes, *, sized: bool = True, extended: bool = False) -> bytes:
    """Return an AV1 OBU of less than 128 bytes."""
    head = bytes([kind << 3 | extended << 2 | sized << 1]) + b"\0" * extended
    return head + (bytes([len(payload)]) if sized else b"") + payload


def av1_sequence(*, reduced: bool = False) -> bytes:
    """Return the head of a sequence header OBU."""
    return obu(1, packed("000", "0" if not reduced else "1", str(int(reduced)), "000", bits(0, 16)))


def av1_frame(kind: int = 0, *, existing: bool = False, shown: bool = True, obu_kind: int = 6) -> bytes:
    """Return the head of a frame OBU; kind 0 is a key frame."""
    return obu(obu_kind, packed(str(int(existing)), bits(kind, 2), str(int(shown)), "0000", bits(0x55, 8)))


def vp9_frame(*, profile: int = 0, existing: bool = False, inter: bool = False, marker: int = 2) -> bytes:
    """Return the head of a VP9 frame."""
    low, high = str(profile & 1), str(profile >> 1)
    reserved = "0" if profile == 3 else ""
    return packed(bits(marker, 2), low, high, reserved, str(int(existing)), str(int(inter)), bits(0x55, 16))
