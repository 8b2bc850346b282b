"""The benchmarks' videos: made once into a folder, by the encoders of PyAV, from scenes with sensor noise.

Two kinds of scene: a camera that stands, before which things move, as robots' cameras see it; and one that pans
over a textured ground, where hardly a block of a picture is like the one before.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt

from fluxon_gop.encode import Recipe, write_video

RATE = 30
_B_FRAMES = {"preset": "medium", "crf": "23", "sc_threshold": "0"}
_GOP_2 = {"g": "2", "crf": "30", "preset": "12", "svtav1-params": "lp=1"}


def scene(
    count: int, width: int, height: int, seed: int = 0, *, pan: bool = False
) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield ``count`` pictures: a camera over a textured ground, things that cross it, and sensor noise."""
    rng = np.random.default_rng(seed)
    size = 2 * max(width, height)
    ground = np.zeros((size, size, 3), np.float32)
    for cells, weight in ((8, 60), (32, 35), (128, 25), (512, 12)):
        coarse = rng.uniform(-1, 1, (cells + 1, cells + 1, 3)).astype(np.float32)
        at = np.linspace(0, cells, size, endpoint=False)
        low, part = at.astype(int), (at % 1).astype(np.float32)[:, None, None]
        rows = coarse[low] * (1 - part) + coarse[low + 1] * part
        across = part.transpose(1, 0, 2)
        ground += weight * (rows[:, low] * (1 - across) + rows[:, low + 1] * across)
    ground += 128
    noise = rng.normal(0, 2, (8, height, width, 1)).astype(np.float32)
    for n in range(count):
        x = int((size - width) * (0.5 + 0.5 * np.sin(pan * n / 150)))
        y = int((size - height) * (0.5 + 0.5 * np.cos(pan * n / 190)))
        picture = ground[y : y + height, x : x + width] + noise[n % 8]
        for thing in range(3):
            left = int((width - width // 6) * (0.5 + 0.5 * np.sin(n / 20 + thing * 2)))
            top = int((height - height // 6) * (0.5 + 0.5 * np.cos(n / 27 + thing)))
            picture[top : top + height // 6, left : left + width // 6] = (
                60 * thing + 40,
                200 - n % 100,
                90,
            )
        bits = np.array([255 if n >> bit & 1 else 0 for bit in range(16)], np.float32)
        picture[:8, : 16 * 8] = np.repeat(bits, 8)[None, :, None]
        yield np.clip(picture, 0, 255).astype(np.uint8)


def repeat(source: Path, target: Path, times: int) -> None:
    """Write ``source`` ``times`` times over, its packets unchanged, one after another in time."""
    with av.open(str(source)) as given:
        stream: Any = given.streams.video[0]
        packets = [packet for packet in given.demux(stream) if packet.dts is not None]
        raw = [(bytes(p), p.pts, p.dts, p.duration, p.is_keyframe) for p in packets]
        length = max(p.pts + p.duration for p in packets) - min(p.pts for p in packets)
        with av.open(
            str(target), "w", options={"video_track_timescale": str(stream.time_base.denominator)}
        ) as out:
            copy = out.add_stream_from_template(stream)
            for turn in range(times):
                for data, pts, dts, duration, key in raw:
                    packet: Any = av.Packet(data)
                    packet.pts, packet.dts, packet.duration = (
                        pts + turn * length,
                        dts + turn * length,
                        duration,
                    )
                    packet.time_base, packet.stream, packet.is_keyframe = stream.time_base, copy, key
                    out.mux(packet)


def make(folder: Path) -> dict[str, Path]:
    """Return the benchmarks' videos by name, made where they are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {}

    def video(
        name: str, count: int, width: int, height: int, recipe: Recipe, seed: int = 0, *, pan: bool = False
    ) -> Path:
        path = files[name] = folder / f"{name}.mp4"
        if not path.exists():
            part = path.with_suffix(".part.mp4")
            write_video(part, scene(count, width, height, seed, pan=pan), recipe)
            part.replace(path)
        return path

    gop128 = Recipe(rate=RATE, options={**_B_FRAMES, "g": "128", "keyint_min": "128"})
    minute = video("gop128", 1792, 640, 360, gop128)
    video("gop128_pan", 896, 640, 360, gop128, pan=True)
    video(
        "h264_gop2", 600, 640, 480, Recipe(rate=RATE, options={"g": "2", "preset": "medium", "crf": "30"})
    )
    video("av1_gop2", 600, 640, 480, Recipe(codec="libsvtav1", rate=RATE, options=_GOP_2))
    hevc = {"preset": "fast", "x265-params": "keyint=60:min-keyint=60:scenecut=0:log-level=none:pools=2"}
    video(
        "hevc_1080p",
        240,
        1920,
        1080,
        Recipe(codec="libx265", tag="hvc1", rate=RATE, options=hevc),
        pan=True,
    )
    for number in range(16):
        video(
            f"of16_{number:02}", 600, 640, 360, Recipe(rate=RATE, options={**_B_FRAMES, "g": "60"}), number
        )
    gop60 = video("gop60", 1800, 640, 360, Recipe(rate=RATE, options={**_B_FRAMES, "g": "60"}))
    for name, source, times in (("ten_minutes", minute, 10), ("one_hour", gop60, 60)):
        files[name] = folder / f"{name}.mp4"
        if not files[name].exists():
            repeat(source, files[name], times)
    return files
