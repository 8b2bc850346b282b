"""Frames to MP4: really encoded videos for the demo, the tests and the benchmarks.

Writes what a recipe says, with FFmpeg's own encoders and muxer through PyAV.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Recipe:
    """How to encode: codec, size of a GOP, times, and the container's options."""

    codec: str = "libx264"
    pix_fmt: str = "yuv420p"
    rate: int = 25
    options: Mapping[str, str] = field(default_factory=dict)
    """The encoder's (``g``, ``bf``, ``preset``, ``x264-params``...)."""
    container_options: Mapping[str, str] = field(default_factory=dict)
    """The muxer's (``movflags``...)."""
    audio: bool = False
    """Interleave a second stream of a sine tone (AAC)."""
    tag: str | None = None
    """The sample entry's type where the muxer's default is not wanted (``hvc1``)."""
    format: str | None = None
    rotation: int = 0
    """Degrees of the display matrix, as PyAV counts them."""
    time_base: Fraction | None = None


def numbered_picture(number: int, width: int, height: int) -> npt.NDArray[np.uint8]:
    """Return a picture that differs from every other number's: moving bars, and the number in bits."""
    x, y = np.arange(width), np.arange(height)[:, None]
    picture = np.empty((height, width, 3), np.uint8)
    picture[..., 0] = (x * 3 + number * 5) % 256
    picture[..., 1] = (y * 2 + number * 3) % 256
    picture[..., 2] = (x + y + number * 7) % 256
    cell = max(width // 20, 1)
    for bit in range(min(16, width // cell)):
        picture[: height // 8, bit * cell : (bit + 1) * cell] = 255 if number >> bit & 1 else 0
    return picture


def write_video(
    path: str | Path,
    frames: Iterable[npt.NDArray[np.uint8]],
    recipe: Recipe = Recipe(),
    *,
    times: Iterable[int] | None = None,
) -> None:
    """Encode ``frames`` (uint8 (H, W, 3) RGB) into ``path``.

    Args:
        path: the file; its suffix names the container unless the recipe does.
        frames: the pictures in presentation order, all of one size.
        recipe: how.
        times: presentation times in ticks of ``1/rate`` (or of the recipe's ``time_base``), one a frame;
            None for 0, 1, 2...
    """
    ticks = iter(times) if times is not None else None
    options = dict(recipe.container_options)
    with av.open(str(path), "w", format=recipe.format, container_options=options) as container:
        video: Any = None
        audio: Any = container.add_stream("aac", rate=48000) if recipe.audio else None
        sent = 0
        for number, pixels in enumerate(frames):
            if video is None:
                video = container.add_stream(recipe.codec, rate=recipe.rate, options=dict(recipe.options))
                video.height, video.width = pixels.shape[:2]
                video.pix_fmt = recipe.pix_fmt
                video.thread_count = 1
                if recipe.tag is not None:
                    video.codec_context.codec_tag = recipe.tag
                if recipe.time_base is not None:
                    video.codec_context.time_base = recipe.time_base
                if recipe.rotation:
                    video.set_display_rotation(recipe.rotation)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = number if ticks is None else next(ticks)
            frame.time_base = recipe.time_base or Fraction(1, recipe.rate)
            container.mux(video.encode(frame))
            if audio is not None:
                sent = _mux_tone(container, audio, sent, (number + 1) * 48000 // recipe.rate)
        if video is not None:
            container.mux(video.encode(None))
        if audio is not None:
            container.mux(audio.encode(None))


def _mux_tone(container: Any, audio: Any, sent: int, until: int) -> int:
    """Mux 440 Hz in frames of 1024 samples up to sample ``until``; return the first one not sent."""
    while sent + 1024 <= until:
        wave = np.sin(np.arange(sent, sent + 1024) * (2 * np.pi * 440 / 48000), dtype=np.float64)
        frame = av.AudioFrame.from_ndarray(wave.astype(np.float32)[None, :], format="fltp", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = 48000, sent, Fraction(1, 48000)
        container.mux(audio.encode(frame))
        sent += 1024
    return sent
