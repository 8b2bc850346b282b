"""The two witnesses of a file: the parser, and FFmpeg through PyAV."""

from __future__ import annotations

import cProfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import av
import pytest

from fluxon_gop import mp4_index
from fluxon_gop.model import Signature, VideoIndex
from fluxon_gop.ranges import ByteRange

T = TypeVar("T")


class Driven(NamedTuple):
    """What the parser made of a file, and the waves of ranges that it asked for."""

    index: VideoIndex
    waves: list[tuple[ByteRange, ...]]

    @property
    def requests(self) -> int:
        """How many ranges were asked for."""
        return sum(len(wave) for wave in self.waves)

    @property
    def bytes(self) -> int:
        """How many bytes were asked for."""
        return sum(r.size for wave in self.waves for r in wave)


def calls_of(run: Callable[[], T]) -> tuple[T, int]:
    """Return (what ``run`` returns, how many functions it called): its work, the same on any machine."""
    profile = cProfile.Profile()
    result = profile.runcall(run)
    return result, sum(entry.callcount for entry in profile.getstats())


def drive(data: bytes, **options) -> Driven:
    """Run the parser over ``data``: each wave gets exactly the bytes it asks for."""
    steps = mp4_index.index_steps(Signature(len(data)), **options)
    waves = []
    try:
        wave = next(steps)
        while True:
            assert all(0 <= r.start < r.stop <= len(data) for r in wave), f"asked outside the file: {wave}"
            waves.append(wave)
            # Bytes and views of them are both promised to work.
            wave = steps.send(
                [data[r.start : r.stop] if len(waves) % 2 else memoryview(data)[slice(*r)] for r in wave]
            )
    except StopIteration as stop:
        return Driven(stop.value, waves)


def starve(monkeypatch: pytest.MonkeyPatch, head: int = 16, tail: int = 16) -> None:
    """Make the parser's first reads tiny, so that it asks for all that it needs piece by piece."""
    monkeypatch.setattr(mp4_index, "HEAD_BYTES", head)
    monkeypatch.setattr(mp4_index, "TAIL_BYTES", tail)


class Packet(NamedTuple):
    """One packet of FFmpeg's demuxer."""

    pts: int
    dts: int
    pos: int
    size: int
    key: bool
    discard: bool


def ffmpeg_packets(path: Path) -> list[Packet]:
    """Return the packets of the best video stream as FFmpeg's demuxer gives them."""
    with av.open(str(path)) as container:
        stream = container.streams.best("video")
        return [
            Packet(p.pts, p.dts, p.pos, p.size, bool(p.is_keyframe), bool(p.is_discard))
            for p in container.demux(stream)
            if p.size
        ]


def ffmpeg_frame_pts(path: Path) -> list[int]:
    """Return the pts of every frame of FFmpeg's full decode, one thread."""
    with av.open(str(path), metadata_errors="ignore") as container:
        stream = container.streams.best("video")
        stream.thread_type = "NONE"
        stream.codec_context.thread_count = 1
        return [frame.pts for frame in container.decode(stream)]
