"""Tiny real videos that the tests make, and the truth about them: PyAV's full decode."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np

from fluxon_gop.encode import Recipe, numbered_picture, write_video

X264 = {"preset": "ultrafast", "g": "12", "bf": "2", "sc_threshold": "0"}

RECIPES = {
    "bframes": Recipe(options=X264),
    "audio": Recipe(options=X264, audio=True),
    "faststart": Recipe(options=X264, container_options={"movflags": "+faststart"}),
    "allintra": Recipe(options={"preset": "ultrafast", "g": "1"}),
    "longgop": Recipe(options={"preset": "ultrafast", "g": "100000", "sc_threshold": "0"}),
    "opengop": Recipe(
        options={
            "preset": "veryfast",
            "x264-params": "open-gop=1:keyint=12:min-keyint=12:scenecut=0:bframes=3",
        }
    ),
    "hevc": Recipe(
        codec="libx265",
        tag="hvc1",
        options={"preset": "ultrafast", "x265-params": "keyint=12:log-level=none"},
    ),
    "hev1": Recipe(
        codec="libx265", options={"preset": "ultrafast", "x265-params": "keyint=12:log-level=none"}
    ),
    "vp9": Recipe(codec="libvpx-vp9", options={"g": "12", "cpu-used": "8", "deadline": "realtime"}),
    "av1": Recipe(codec="libsvtav1", options={"g": "12", "preset": "12", "svtav1-params": "lp=1"}),
    "mpeg4": Recipe(codec="mpeg4", options={"g": "12", "bf": "2"}),
    "fragmented": Recipe(
        options=X264, container_options={"movflags": "frag_keyframe+empty_moov+default_base_moof"}
    ),
    "hybrid": Recipe(options=X264, container_options={"movflags": "frag_keyframe"}),
    "rotated": Recipe(options=X264, rotation=90),
}


def make(
    path: Path, recipe: Recipe, count: int = 60, width: int = 128, height: int = 96, times=None
) -> Path:
    """Write ``count`` test pictures by ``recipe`` and return the path."""
    write_video(path, (numbered_picture(n, width, height) for n in range(count)), recipe, times=times)
    return path


def full_decode(path: Path | str, height: int | None = None, width: int | None = None) -> np.ndarray:
    """Return FFmpeg's every frame as RGB (frames, H, W, 3), unturned: the truth."""
    with av.open(str(path), metadata_errors="ignore") as container:
        stream = container.streams.best("video")
        stream.thread_type = "NONE"
        stream.codec_context.thread_count = 1
        pictures = [
            frame.reformat(width, height, format="rgb24", interpolation="BILINEAR", threads=1).to_ndarray()
            for frame in container.decode(stream)
        ]
    return np.stack(pictures)
