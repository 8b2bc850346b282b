"""The faults of today's readers as tiny inputs, made by FFmpeg's own encoders and muxers through PyAV.

Each name stands for a row of the project's list of cases (its number in the comment); the truth about each is
FFmpeg's full decode, never a number written here.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av

from fluxon_gop.encode import Recipe
from tests.media import RECIPES, make

FAST = {"preset": "ultrafast", "sc_threshold": "0"}
BASE = Recipe(options={**FAST, "g": "12", "bf": "2"})
COUNT = 100


def remux(
    source: Path,
    target: Path,
    *,
    shift: int = 0,
    skip: int = 0,
    options: dict[str, str] | None = None,
    format: str | None = None,
    audio: bool = False,
) -> Path:
    """Copy the packets into another file, ``shift`` ticks earlier, without the first ``skip`` of them."""
    with (
        av.open(str(source)) as reading,
        av.open(str(target), "w", format=format, options=options or {}) as writing,
    ):
        stream = reading.streams.video[0]
        copy = writing.add_stream_from_template(stream)
        if audio:
            tone = writing.add_stream("aac", rate=48000)
            frame = av.AudioFrame(format="fltp", layout="mono", samples=1024)
            frame.sample_rate, frame.pts, frame.time_base = 48000, 0, Fraction(1, 48000)
            for plane in frame.planes:
                plane.update(bytes(plane.buffer_size))
            writing.mux(tone.encode(frame))
            writing.mux(tone.encode(None))
        for number, packet in enumerate(reading.demux(stream)):
            if packet.dts is None or number < skip:
                continue
            packet.pts -= shift
            packet.dts -= shift
            packet.stream = copy
            writing.mux(packet)
    return target


def _encoded(
    recipe: Recipe, count: int = COUNT, width: int = 128, height: int = 96, times=None
) -> Callable:
    return lambda path, _: make(path, recipe, count, width, height, times)


def _copied(**options) -> Callable:
    return lambda path, base: remux(base, path, **options)


def _truncated(path: Path, base: Path) -> Path:
    whole = remux(base, path.with_suffix(".whole.mp4"), options={"movflags": "+faststart"})
    data = whole.read_bytes()
    path.write_bytes(data[: 2 * len(data) // 3])
    whole.unlink()
    return path


def _two_tracks(path: Path, base: Path) -> Path:
    """A small video track first, the larger one second: FFmpeg's best is not the first."""
    small = make(path.with_suffix(".small.mp4"), BASE, 40, 64, 48)
    with av.open(str(small)) as one, av.open(str(base)) as two, av.open(str(path), "w") as writing:
        streams = [one.streams.video[0], two.streams.video[0]]
        copies = [writing.add_stream_from_template(stream) for stream in streams]
        for reading, stream, copy in zip((one, two), streams, copies, strict=True):
            for packet in reading.demux(stream):
                if packet.dts is not None:
                    packet.stream = copy
                    writing.mux(packet)
    small.unlink()
    return path


def _late_key(path: Path, base: Path) -> Path:
    """An open GOP cut in its midst: the first samples have no key before them."""
    source = _encoded(RECIPES["opengop"])(path.with_suffix(".source.mp4"), base)
    remux(source, path, skip=15)
    source.unlink()
    return path


FRAGMENTS = "frag_keyframe+empty_moov+default_base_moof"

CASES: dict[str, tuple[str, Callable]] = {
    "discarded first key": (".mp4", lambda path, _: _discarded_key(path)),  # 1
    "edit inside a frame": (".mp4", lambda path, _: _mid_frame(path)),  # 2
    "B-frames": (".mp4", _copied()),  # 3
    "trimmed head": (".mp4", _copied(shift=5 * 512)),  # 4
    "non-zero start": (".mp4", _copied(shift=-10 * 12800)),  # 5
    "negative cts": (".mp4", _copied(options={"movflags": "negative_cts_offsets"})),  # 6
    "empty edit": (".mp4", _copied(shift=-6400, audio=True)),  # 7
    "open GOP H.264": (".mp4", _encoded(RECIPES["opengop"])),  # 8
    "open GOP HEVC": (".mp4", _encoded(RECIPES["hevc"])),  # 8
    "VFR": (".mp4", _encoded(BASE, times=[n + 2 * (n // 3) for n in range(COUNT)])),  # 9
    "truncated": (".mp4", _truncated),  # 10, 12
    "AVI": (".avi", _encoded(Recipe(codec="mpeg4", options={"g": "12", "bf": "2"}))),  # 11, 16
    "MKV without cues": (".mkv", _copied(options={"live": "1"}, format="matroska")),  # 13
    "fragmented": (".mp4", _copied(options={"movflags": FRAGMENTS})),  # 14
    "DASH with sidx": (".mp4", _copied(options={"movflags": FRAGMENTS + "+dash+global_sidx"})),  # 14
    "hybrid": (".mp4", _copied(options={"movflags": "frag_keyframe"})),  # 15
    "no stss": (".mp4", _encoded(Recipe(options={**FAST, "g": "1"}), 30)),  # 17
    "Motion JPEG": (".mov", _encoded(Recipe(codec="mjpeg", pix_fmt="yuvj420p"), 30)),  # 17
    "one key": (".mp4", _encoded(Recipe(options={**FAST, "g": "100000"}))),  # 18
    "one frame": (".mp4", _encoded(BASE, 1)),  # 21
    "first sample no key": (".mp4", _late_key),  # 22
    "rotated": (".mp4", _encoded(Recipe(options=BASE.options, rotation=90), 30)),  # 26
    "full range": (
        ".mp4",
        _encoded(Recipe(options={**BASE.options, "color_range": "2", "colorspace": "1"}), 30),
    ),  # 27
    "odd size 4:4:4": (
        ".mp4",
        _encoded(Recipe(options=BASE.options, pix_fmt="yuv444p"), 30, 127, 95),
    ),  # 28
    "odd size VP9": (
        ".mp4",
        _encoded(
            Recipe(codec="libvpx-vp9", options={"g": "12", "cpu-used": "8", "deadline": "realtime"}),
            30,
            127,
            95,
        ),
    ),  # 28
    "10 bit": (".mp4", _encoded(Recipe(options=BASE.options, pix_fmt="yuv420p10le"), 30)),  # 29
    "alpha": (
        ".mov",
        _encoded(Recipe(codec="prores_ks", pix_fmt="yuva444p10le", options={"profile": "4444"}), 6),
    ),  # 30
    "two video tracks": (".mp4", _two_tracks),
    "MPEG-TS": (".ts", _copied(format="mpegts")),
    "faststart": (".mp4", _copied(options={"movflags": "+faststart"})),  # 19
}


def _discarded_key(path: Path) -> Path:
    """30 samples, the edit starts behind the first GOP's key."""
    source = make(
        path.with_suffix(".source.mp4"), Recipe(options={**FAST, "g": "10", "bf": "0"}), 30, 64, 64
    )
    remux(source, path, shift=5 * 512)
    source.unlink()
    return path


def _mid_frame(path: Path) -> Path:
    """Media ticks of a microsecond; the edit starts 6.98 ms into the first frame."""
    source = make(path.with_suffix(".source.mp4"), BASE, COUNT)
    with (
        av.open(str(source)) as reading,
        av.open(str(path), "w", options={"video_track_timescale": "1000000"}) as writing,
    ):
        stream = reading.streams.video[0]
        copy = writing.add_stream_from_template(stream)
        for packet in reading.demux(stream):
            if packet.dts is None:
                continue
            for name in ("pts", "dts"):
                microseconds = int(getattr(packet, name) * stream.time_base * 1_000_000)
                setattr(packet, name, microseconds - 6980)
            packet.time_base = Fraction(1, 1_000_000)
            packet.stream = copy
            writing.mux(packet)
    source.unlink()
    return path


def make_cases(folder: Path) -> dict[str, Path]:
    """Make all cases below ``folder`` and return their paths by name."""
    base = make(folder / "base.mp4", BASE, COUNT)
    made = {}
    for name, (suffix, maker) in CASES.items():
        path = folder / (name.replace(" ", "_").replace(":", "") + suffix)
        made[name] = maker(path, base)
    base.unlink()
    return made
