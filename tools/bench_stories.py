"""What the benchmarks read: each story's videos, and the frame numbers of a run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

LATENCY_MS = 50


@dataclass(frozen=True)
class Story:
    """What is read, and how."""

    name: str
    text: str
    media: tuple[str, ...]
    draw: Callable[[random.Random, int], list[int]]
    """Frame numbers of one run from (generator, number of frames)."""
    cold: bool = True
    """Open the video in every run; else it stays open."""
    size: tuple[int, int] | None = None
    also_two_threads: bool = False
    """Ours and torchcodec once more, on two threads, in the same run; without decord, whose own threads go on decoding
    after it has answered."""
    remote: bool = False
    block: int = 5
    """Reads of one reader in a run: a training process does not change its reader from read to read, and right after
    another reader's turn much of the time goes into filling the processor's caches again. 1 for long reads."""


def _one(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(count)]


def _deep(rng: random.Random, count: int) -> list[int]:
    return [128 * rng.randrange(count // 128) + rng.randrange(100, 124)]


def _windows(number: int, length: int = 16) -> Callable[[random.Random, int], list[int]]:
    def draw(rng: random.Random, count: int) -> list[int]:
        starts = [rng.randrange(count - length) for _ in range(number)]
        return [start + i for start in starts for i in range(length)]

    return draw


def _uniform(_: random.Random, count: int) -> list[int]:
    return [int(n) for n in np.linspace(0, count - 1, 64)]


SMALL = (224, 224)
_ON_TWO: dict[str, Any] = {"cold": False, "block": 1, "also_two_threads": True}
STORIES = [
    Story("cold-gop128", "cold open, one random frame, 640x360 H.264 GOP 128", ("gop128",), _one),
    Story("cold-gop128-pan", "the same of a panning camera", ("gop128_pan",), _one),
    Story("cold-1h", "cold open, one random frame, 1 h, 640x360 H.264 GOP 60", ("one_hour",), _one),
    Story("cold-h264-gop2", "cold open, one random frame, 640x480 H.264 GOP 2", ("h264_gop2",), _one),
    Story("cold-av1-gop2", "cold open, one random frame, 640x480 AV1 GOP 2", ("av1_gop2",), _one),
    Story(
        "deep", "one frame 100 to 123 deep in GOP 128 with B-frames, warm", ("gop128",), _deep, cold=False
    ),
    Story("window-16", "16 frames in a row at a random place, warm", ("gop128",), _windows(1), cold=False),
    Story("window-16-pan", "the same of a panning camera", ("gop128_pan",), _windows(1), cold=False),
    Story("resize-224", "the same resized to 224x224", ("gop128",), _windows(1), size=SMALL, cold=False),
    Story(
        "windows-8", "8 windows of 16 frames in one read, warm", ("ten_minutes",), _windows(8), **_ON_TWO
    ),
    Story("windows-8-224", "the same at 224x224", ("ten_minutes",), _windows(8), size=SMALL, **_ON_TWO),
    Story(
        "window-1080p",
        "16 frames in a row, 1080p HEVC GOP 60, warm",
        ("hevc_1080p",),
        _windows(1),
        **_ON_TWO,
    ),
    Story("uniform-64", "cold open, 64 uniform frames of 10 minutes", ("ten_minutes",), _uniform, block=1),
    Story(
        "sixteen-files",
        f"8 frames in a row of each of 16 files at {LATENCY_MS} ms latency, cold readers, rows in memory",
        tuple(f"of16_{n:02}" for n in range(16)),
        _windows(1, 8),
        remote=True,
        block=1,
    ),
]
