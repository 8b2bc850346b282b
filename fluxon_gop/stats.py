"""What a read cost: plain counters that add up.

Pure. Requests are range reads sent to a source, bytes are what they brought, a wave is a set of reads
in flight together, the depth is the number of waves in series.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum


class WaveKind(StrEnum):
    """What a wave of reads is for."""

    INDEX = "index"
    """Rows of the index table."""
    HEAD_MOOV = "head_moov"
    """Head, movie box and entry-point checks of a video without a row."""
    MEDIA = "media"
    """Samples."""
    EXTENSION = "extension"
    """Samples before a claimed entry point that its bytes refuted."""


@dataclass
class ReadStats:
    """Counters of one call, of one reader, or of a whole pool; ``add`` sums them."""

    requests: dict[WaveKind, int] = field(default_factory=dict)
    """Range requests by kind of wave; table look-ups count as one index request each."""
    bytes: dict[WaveKind, int] = field(default_factory=dict)
    waves: dict[WaveKind, int] = field(default_factory=dict)
    depth: int = 0
    """Waves in series of the deepest video, index rows included."""
    unplanned_requests: int = 0
    """Reads that the plan did not foresee (holes, files that are no MP4)."""
    unplanned_bytes: int = 0
    wanted_bytes: int = 0
    """Bytes of the samples from each entry point, or from where a decoder goes on, to the last needed one."""
    frames_requested: int = 0
    frames_decoded: int = 0
    """Pictures that the decoder put out, wanted or not."""
    packets_sent: int = 0
    decode_calls: int = 0
    """Spans decoded, each run of a long one counted."""
    decode_errors: int = 0
    container_reads: int = 0
    """Videos read on the container path."""
    reasons: dict[str, int] = field(default_factory=dict)
    """Why videos were read on the container path."""
    stale_rows: int = 0
    """Index rows that did not fit their file and were not used."""
    damaged_rows: int = 0
    """Index rows whose checksum failed and that were not used."""
    index_builds: int = 0
    """Indexes built on the fly."""
    refuted_entry_points: int = 0
    source: dict[str, int] = field(default_factory=dict)
    """What the source itself counted, where it does: pages, pieces, cache tiers, reads of the origin."""
    fetch_seconds: float = 0.0
    decode_seconds: float = 0.0
    """Summed over spans, also where they ran side by side."""

    def count_wave(self, kind: WaveKind, requests: int, nbytes: int) -> None:
        """Count one wave of ``requests`` reads that brought ``nbytes``."""
        self.requests[kind] = self.requests.get(kind, 0) + requests
        self.bytes[kind] = self.bytes.get(kind, 0) + nbytes
        self.waves[kind] = self.waves.get(kind, 0) + 1

    def add(self, other: ReadStats) -> None:
        """Add the other's counters; the depth is the larger of the two."""
        mine, theirs = self.__dict__, other.__dict__
        depth = max(self.depth, other.depth)
        for name, value in theirs.items():
            if not value:
                continue
            if isinstance(value, dict):
                held = mine[name]
                for kind, count in value.items():
                    held[kind] = held.get(kind, 0) + count
            else:
                mine[name] += value
        self.depth = depth

    def add_beside(self, other: ReadStats) -> None:
        """Add a video of the same batch: its waves ran beside those counted here, not after them."""
        waves = dict(self.waves)
        for kind, count in other.waves.items():
            waves[kind] = max(waves.get(kind, 0), count)
        fetch = max(self.fetch_seconds, other.fetch_seconds)
        self.add(other)
        self.waves, self.fetch_seconds = waves, fetch

    @property
    def total_requests(self) -> int:
        """All range requests, planned and unplanned."""
        return sum(self.requests.values()) + self.unplanned_requests

    @property
    def total_bytes(self) -> int:
        """All bytes that came, planned and unplanned."""
        return sum(self.bytes.values()) + self.unplanned_bytes

    @property
    def report(self) -> str:
        """One sentence on what the plan did not foresee, with the reason; empty where all went by plan."""
        parts = []
        if self.stale_rows:
            parts.append("an index row did not fit its file")
        if self.damaged_rows:
            parts.append("an index row was damaged")
        if self.index_builds:
            parts.append("the index was built on the fly")
        if self.refuted_entry_points:
            parts.append("key samples did not prove to be entry points")
        extension = self.requests.get(WaveKind.EXTENSION, 0)
        if extension:
            parts.append(f"{extension} reads more fetched what comes before them")
        if self.container_reads:
            parts.append(
                f"FFmpeg's demuxer read it, because {' and '.join(self.reasons) or 'it was asked to'}"
            )
        if self.unplanned_requests:
            parts.append(
                f"{self.unplanned_requests} reads ({self.unplanned_bytes:,} bytes) were outside the plan"
            )
        if not parts:
            return ""
        return f"{parts[0][0].upper()}{'; '.join(parts)[1:]}."

    def as_dict(self) -> dict[str, int | float]:
        """Return flat counters, ``media_requests`` and the like, for logs and JSON."""
        flat: dict[str, int | float] = {
            "total_requests": self.total_requests,
            "total_bytes": self.total_bytes,
        }
        for item in fields(self):
            if item.name == "reasons":
                continue
            value = getattr(self, item.name)
            if isinstance(value, dict):
                kinds = value if item.name == "source" else WaveKind
                flat |= {f"{kind}_{item.name}": value.get(kind, 0) for kind in kinds}
            else:
                flat[item.name] = value
        return flat
