"""The plan of a batch as people and programs read it, before it runs.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from fluxon_gop.plan import VideoPlan


@dataclass(frozen=True)
class PlannedVideo:
    """One video's part of a batch plan."""

    name: str
    frames: int
    plan: VideoPlan | None
    """None where there is no row: the index is built first."""
    note: str

    @property
    def requests(self) -> int:
        """Range requests of the media wave."""
        return len(self.plan.ranges) if self.plan else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the media wave."""
        return self.plan.nbytes if self.plan else 0


@dataclass(frozen=True)
class BatchPlan:
    """What a batch will cost, before it runs. ``print`` it for people."""

    videos: tuple[PlannedVideo, ...]
    waves: int
    """Waves in series that are foreseen: one with all rows at hand, two more without."""

    @property
    def requests(self) -> int:
        """Range requests that are foreseen."""
        return sum(video.requests for video in self.videos)

    @property
    def nbytes(self) -> int:
        """Bytes that are foreseen."""
        return sum(video.nbytes for video in self.videos)

    @property
    def over_read(self) -> float:
        """Bytes to fetch per byte from an entry point to a last needed sample."""
        wanted = sum(video.plan.wanted_bytes for video in self.videos if video.plan)
        return self.nbytes / wanted if wanted else 1.0

    def __str__(self) -> str:
        """Return one line for the batch and one a video."""
        lines = [
            (
                f"{count_of(len(self.videos), 'video')}: {count_of(self.waves, 'wave')}, {count_of(self.requests, 'request')}, "
                f"{self.nbytes:,} bytes, {self.over_read:.2f} of what is needed"
            )
        ]
        for video in self.videos:
            path = video.plan.path.value if video.plan else "index first"
            note = f" ({video.note})" if video.note else ""
            lines.append(f"  {video.name}: {count_of(video.frames, 'frame')}, {path}{note}, {_cost(video)}")
        return "\n".join(lines)


def count_of(number: int, noun: str) -> str:
    """Return ``1 wave``, ``2 waves``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _cost(video: PlannedVideo) -> str:
    if video.plan is not None and not video.plan.ranges and video.frames:
        return "read on demand: requests and bytes are not foreseen"
    return f"{count_of(video.requests, 'request')}, {video.nbytes:,} bytes"
