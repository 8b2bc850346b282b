"""Reference readings with plain PyAV, for the demo and for checks.

Nothing here uses an index or a plan: :func:`full_decode` is the truth that frames are compared with,
:func:`plain_read` is what a user's own loop does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import av
import numpy as np
import numpy.typing as npt

from fluxon_gop.errors import DecodeError

UInt8Array = npt.NDArray[np.uint8]

TIMEOUT_SECONDS = 30.0
"""How long FFmpeg waits for a server."""


def full_decode(
    path: str | os.PathLike[str],
    height: int | None = None,
    width: int | None = None,
    *,
    frames: Sequence[int] | None = None,
) -> UInt8Array:
    """Return FFmpeg's frames of a file decoded from its start by one thread: uint8 (n, H, W, 3) RGB, unturned.

    Args:
        path: a local file.
        height: of the pictures; with ``width``, or neither for the stream's own size.
        width: likewise.
        frames: numbers to return, in this order; None for all. Decoding ends behind the last of them.

    Raises:
        DecodeError: FFmpeg cannot open or decode the file, or has no such frame.
    """
    wanted = None if frames is None else set(frames)
    pictures: dict[int, UInt8Array] = {}
    with _opened(path) as (container, stream):
        for number, frame in enumerate(container.decode(stream)):
            if wanted is not None and len(pictures) == len(wanted):
                break
            if wanted is None or number in wanted:
                pictures[number] = _rgb(frame, height, width)
    order = list(pictures) if frames is None else list(frames)
    missing = tuple(number for number in order if number not in pictures)
    if missing or not order:
        shown = ", ".join(map(str, missing[:8])) or "any"
        text = f"{os.fspath(path)}: FFmpeg's full decode has no picture for frame {shown}"
        raise DecodeError(text, source=os.fspath(path), frames=missing)
    return np.stack([pictures[number] for number in order])


def plain_read(
    url: str, clips: Sequence[Sequence[int]], height: int | None = None, width: int | None = None
) -> list[list[UInt8Array | None]]:
    """Return for each clip the pictures that a plain loop gets, None where none came.

    As such loops are written: a frame's time is its number over the stream's average rate; a clip (rising
    numbers) is one seek to its first time, then decoding forward, taking the first picture at or behind
    each time. One file at a time, FFmpeg's own protocols, nothing held between clips.

    Raises:
        DecodeError: FFmpeg cannot open or decode the file.
    """
    read: list[list[UInt8Array | None]] = []
    with _opened(url, timeout=TIMEOUT_SECONDS) as (container, stream):
        rate = stream.average_rate or stream.guessed_rate or Fraction(25)
        for clip in clips:
            times = [number / rate for number in clip]
            container.seek(int(times[0] / stream.time_base), stream=stream)
            pictures: list[UInt8Array | None] = []
            for frame in container.decode(stream):
                if frame.pts is None:
                    continue
                now = frame.pts * stream.time_base
                while len(pictures) < len(times) and now >= times[len(pictures)]:
                    pictures.append(_rgb(frame, height, width))
                if len(pictures) == len(times):
                    break
            read.append(pictures + [None] * (len(times) - len(pictures)))
    return read


@contextmanager
def _opened(path: str | os.PathLike[str], **options: Any) -> Iterator[tuple[Any, Any]]:
    """Give container and best video stream; FFmpeg's errors become one DecodeError."""
    name = os.fspath(path)
    try:
        with av.open(name, metadata_errors="ignore", **options) as container:
            stream = container.streams.best("video")
            if stream is None:
                text = f"{name}: FFmpeg finds no video stream"
                raise DecodeError(text, source=name, frames=())
            stream.thread_type = "NONE"
            stream.codec_context.thread_count = 1
            yield container, stream
    except av.error.FFmpegError as error:
        text = f"{name}: FFmpeg: {error.strerror}"
        raise DecodeError(text, source=name, frames=()) from error


def _rgb(frame: Any, height: int | None, width: int | None) -> UInt8Array:
    picture: UInt8Array = frame.reformat(
        width, height, format="rgb24", interpolation="BILINEAR", threads=1
    ).to_ndarray()
    return picture
