"""The sample entries of a track: which decoder, set up how, in which colours.

Pure. Source: ISO/IEC 14496-12 clause 12.1 (visual sample entries, colr), 14496-15 (avcC, hvcC), the
AV1 and VP codec bindings; which colour wins follows libavformat/mov.c.
"""

from __future__ import annotations

from fluxon_gop.errors import EncryptedVideoError, UnsupportedMp4Error
from fluxon_gop.model import Colour, SampleEntry
from fluxon_gop.mp4_boxes import Box, child, children

VISUAL_ENTRY_BYTES = 78
"""Fixed fields of a visual sample entry before its boxes."""

CODECS = {
    "avc1": ("h264", "avcC"),
    "avc3": ("h264", "avcC"),
    "hvc1": ("hevc", "hvcC"),
    "hev1": ("hevc", "hvcC"),
    "av01": ("libdav1d", "av1C"),
    "vp09": ("vp9", "vpcC"),
}
"""Sample entry -> FFmpeg's decoder and the box of its configuration: the packet path's codecs."""

KNOWN = {
    "vp08": "VP8",
    "mp4v": "MPEG-4 part 2",
    "s263": "H.263",
    "h263": "H.263",
    "apch": "ProRes",
    "apcn": "ProRes",
    "apcs": "ProRes",
    "apco": "ProRes",
    "ap4h": "ProRes 4444",
    "ap4x": "ProRes 4444",
    "jpeg": "Motion JPEG",
    "mjpa": "Motion JPEG",
    "AVdn": "DNxHD",
    "vvc1": "VVC",
    "vc-1": "VC-1",
    "SVQ1": "Sorenson 1",
    "SVQ3": "Sorenson 3",
    "cvid": "Cinepak",
}
"""Names for people of what goes to the container path."""

ENCRYPTED = frozenset({"encv", "drmi"})


def parse_entries(stsd: Box) -> list[Box]:
    """Return the boxes of the sample entries. Clause 8.5.2."""
    stsd.unpack("II")
    return list(children(stsd, skip=8))


def refuse_encrypted(entries: list[Box]) -> None:
    """Raise EncryptedVideoError where an entry says that its samples are encrypted."""
    for entry in entries:
        if entry.kind in ENCRYPTED:
            text = (
                f"{entry.path} at byte {entry.offset}: the video is encrypted ({entry.kind}); "
                "decoding it would give noise. Decrypt the file first"
            )
            raise EncryptedVideoError(text, path=entry.path, offset=entry.offset)


def parse_entry(entry: Box) -> SampleEntry:
    """Return one visual sample entry; ``codec`` is "" where no packets are cut of it."""
    entry.need(VISUAL_ENTRY_BYTES, "a visual sample entry")
    width, height = entry.unpack("HH", 24)
    codec, record = CODECS.get(entry.kind, ("", ""))
    config = b""
    if codec and record != "vpcC":
        config = bytes(need_child_of_entry(entry, record).body)
    colour = None
    if codec:
        for box in children(entry, skip=VISUAL_ENTRY_BYTES):
            if box.kind == "colr":
                colour = _colr(box) or colour
    return SampleEntry(entry.kind, codec, config, width, height, colour)


def need_child_of_entry(entry: Box, kind: str) -> Box:
    """Return the box ``kind`` behind the entry's fixed fields; raise BoxError without one."""
    for box in children(entry, skip=VISUAL_ENTRY_BYTES):
        if box.kind == kind:
            return box
    text = f"{kind} is missing"
    raise entry.error(text)


def _colr(box: Box) -> Colour | None:
    """Return nclx or nclc code points; None for an ICC profile. Clause 12.1.5."""
    kind = bytes(box.body[:4])
    if kind not in {b"nclx", b"nclc"}:
        return None
    primaries, transfer, matrix = box.unpack("HHH", 4)
    full = box.unpack("B", 10)[0] >> 7 if kind == b"nclx" else None
    return Colour(primaries, transfer, matrix, 0 if full is None else 1 + full)


def refuse_external(minf: Box, entries: list[Box]) -> None:
    """Raise UnsupportedMp4Error where an entry's samples lie in another file (``dref``). Clause 8.7.2.

    FFmpeg would read this file's bytes in their place, or none.
    """
    dref = child(minf, "dinf", "dref")
    if dref is None:
        return
    named = {entry.unpack("H", 6)[0] - 1 for entry in entries}
    for number, box in enumerate(children(dref, skip=8)):
        if number not in named:
            continue
        inside = bool(box.unpack("I")[0] & 1)
        empty = box.kind == "url " and box.stop - box.start <= 5
        if box.kind in {"url ", "urn ", "alis", "rsrc"} and not inside and not empty:
            text = (
                f"{box.path} at byte {box.offset}: the samples lie in another file; "
                "put media and movie box into one file"
            )
            raise UnsupportedMp4Error(text, refused=True, path=box.path, offset=box.offset)


def describe(fourcc: str) -> str:
    """Return a name for people: ``mp4v (MPEG-4 part 2)``."""
    name = KNOWN.get(fourcc)
    shown = fourcc.encode("ascii", "backslashreplace").decode()
    return f"{shown} ({name})" if name else shown
