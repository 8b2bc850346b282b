"""The library against plain PyAV, on one machine: same videos, same frames, same slow server.

Makes four really encoded videos (or takes some), serves them with a latency, indexes them by ranged reads,
reads one batch of clips by the plan and by a plain loop, and compares every frame with FFmpeg's full decode.
"""

from __future__ import annotations

import colorsys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from fluxon_gop.build_shards import Outcome
from fluxon_gop.demo_server import DemoServer
from fluxon_gop.encode import Recipe, write_video
from fluxon_gop.errors import InvalidRequestError
from fluxon_gop.index_table import IndexTable
from fluxon_gop.model import VideoIndex
from fluxon_gop.picture import Strip, contact_sheet, plan_picture
from fluxon_gop.pool import VideoReaderPool
from fluxon_gop.reference import full_decode, plain_read
from fluxon_gop.requests import VideoReadRequest
from fluxon_gop.sources import LocalSource
from fluxon_gop.table_build import build_table

UInt8Array = npt.NDArray[np.uint8]
Remark = Callable[[str], None]

WIDTH, HEIGHT = 320, 240
SECONDS = 10
CLIPS = 4
"""Clips of each video, at seeded random places."""
CLIP_FRAMES = 8
CLIP_STEP = 2
"""Every second frame."""
SEED = 7

_X264 = {"preset": "veryfast", "crf": "20"}
RECIPES = {
    "bframes-edit-list.mp4": Recipe(options={**_X264, "g": "25", "bf": "3"}),
    "hevc-open-gop.mp4": Recipe(
        codec="libx265",
        options={
            "preset": "ultrafast",
            # FFmpeg writes hev1, where parameter sets may change in-band: repeated, they prove each entry point.
            "x265-params": "log-level=none:crf=22:open-gop=1:keyint=25:min-keyint=25:scenecut=0:bframes=4"
            ":repeat-headers=1:pools=none",
        },
    ),
    "variable-rate.mp4": Recipe(options={**_X264, "g": "25", "bf": "2"}, time_base=Fraction(1, 1000)),
    "long-gop-audio.mp4": Recipe(
        rate=30,
        options={**_X264, "g": "250", "keyint_min": "250", "sc_threshold": "0"},
        audio=True,
        container_options={"movflags": "+faststart"},
    ),
}


@dataclass(frozen=True)
class Way:
    """What one way to do it cost, by the server's books, and how many frames came out right."""

    name: str
    requests: int
    waves: int
    """Requests that ran one after another: each costs the latency."""
    bytes: int
    seconds: float
    exact: int | None = None
    """Frames identical to FFmpeg's full decode; None where none were read."""
    frames: int | None = None
    wrong: dict[str, int] = field(default_factory=dict)
    """How many frames of which file were other pictures, or none."""


@dataclass(frozen=True)
class DemoReport:
    """What the demo found. ``print`` it for people."""

    videos: tuple[dict[str, Any], ...]
    latency_ms: float
    ways: tuple[Way, ...]
    plan: str
    files: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Whether every frame of the planned read is FFmpeg's."""
        return all(way.exact == way.frames for way in self.ways if way.name == "planned read")

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Return plan, table and files as text."""
        head = ("", "requests", "in series", "bytes", "seconds", "exact")
        rows = [head]
        for way in self.ways:
            exact = "-"
            if way.exact is not None:
                exact = f"{'yes' if way.exact == way.frames else 'no'} ({way.exact} of {way.frames} frames)"
            cost = (str(way.requests), str(way.waves), f"{way.bytes:,}", f"{way.seconds:.2f}")
            rows.append((way.name, *cost, exact))
        widths = [max(len(row[n]) for row in rows) for n in range(len(head))]
        lines = [
            "  ".join(
                cell.ljust(width) if n in {0, 5} else cell.rjust(width)
                for n, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        size = sum(video["bytes"] for video in self.videos)
        wrong = [
            f"{way.name}: another picture, or none, for {count} frames of {name}"
            for way in self.ways
            for name, count in way.wrong.items()
        ]
        title = f"{len(self.videos)} videos of {size:,} bytes, {self.latency_ms:g} ms latency a request"
        return "\n".join([self.plan, "", title, *lines, "", *wrong, "", *self.files])


def run_demo(
    files: Sequence[Path],
    out: Path,
    *,
    latency_s: float = 0.05,
    seconds: int = SECONDS,
    remark: Remark = lambda _: None,
) -> DemoReport:
    """Run the demo and write its pictures (and the videos, where it makes them) into ``out``.

    Args:
        files: local videos to take; none for four made here.
        out: a folder, made where missing.
        latency_s: of each request to the local server.
        seconds: how long the made videos are.
        remark: told what is going on.

    Raises:
        SourceError: a file cannot be read.
        Mp4Error: one has no index.
        DecodeError: FFmpeg cannot decode one.
    """
    if latency_s < 0:
        text = f"latency is {latency_s} s: want 0 or more"
        raise InvalidRequestError(text)
    out.mkdir(parents=True, exist_ok=True)
    for file in files:
        with ExitStack() as stack:
            source = LocalSource(file)
            stack.callback(source.close)
            _ = source.signature  # a missing file is told before anything is made
    if not files:
        remark(f"encoding {len(RECIPES)} videos of {seconds} s")
        files = make_videos(out / "videos", seconds)
    served = {f"{n}/{path.name}": path for n, path in enumerate(files)}
    with (
        DemoServer(served, latency_s=latency_s) as server,
        tempfile.TemporaryDirectory() as folder,
        IndexTable.open(Path(folder) / "index.arrow", create=True) as table,
    ):
        remark("building the index table")
        indexes, built = _build(server, [server.url(name) for name in served], table)
        paths = dict(zip(indexes, files, strict=True))
        rng = np.random.default_rng(SEED)
        clips = {url: _clips(index.num_frames, rng) for url, index in indexes.items()}
        sizes = {url: _fit(index) for url, index in indexes.items()}
        truth = {}
        remark("decoding the files whole: the truth")
        for url, path in paths.items():
            numbers = sorted({frame for clip in clips[url] for frame in clip})
            decoded = full_decode(path, *sizes[url], frames=numbers)
            truth[url] = dict(zip(numbers, decoded, strict=True))
        requests = [
            VideoReadRequest(url, clip, *sizes[url]) for url, some in clips.items() for clip in some
        ]
        remark("reading the batch by the plan")
        with VideoReaderPool(len(indexes), index=table, apply_rotation=False) as pool:
            plan = pool.explain(requests)
            server.reset()
            started = time.perf_counter()
            arrays = [result.array for result in pool.read_many(requests)]
            took = time.perf_counter() - started
        planned = _way("planned read", server, took)
        remark("reading the batch by a plain loop")
        server.reset()
        started = time.perf_counter()
        plain = {url: plain_read(url, some, *sizes[url]) for url, some in clips.items()}
        took = time.perf_counter() - started
        looped = _way("plain PyAV", server, took)
    loops = [pictures for some in plain.values() for pictures in some]
    planned = _compared(planned, requests, arrays, truth)
    looped = _compared(looped, requests, loops, truth)
    sheet, drawn = out / "contact-sheet.png", out / "plan.png"
    contact_sheet(_strips(requests, arrays), columns=CLIP_FRAMES, cell_width=120).save(sheet)
    plan_picture(plan, indexes).save(drawn)
    videos = tuple(
        {
            "file": str(paths[url]),
            "codec": index.codec or index.fourcc,
            "frames": index.num_frames,
            "bytes": index.signature.size,
            "clips": clips[url],
        }
        for url, index in indexes.items()
    )
    made = (str(sheet), str(drawn))
    return DemoReport(videos, latency_s * 1000, (built, planned, looped), str(plan), made)


def make_videos(folder: Path, seconds: int = SECONDS) -> list[Path]:
    """Encode the four videos into ``folder`` and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for hue, (name, recipe) in enumerate(RECIPES.items()):
        count = seconds * recipe.rate
        times = None
        if recipe.time_base is not None:
            # From 60 to 20 ms a frame and back, in steps: what a camera does as the light changes.
            steps = np.random.default_rng(SEED).choice([20, 33, 40, 47, 60], count)
            times = iter([0, *np.cumsum(steps).tolist()])
        path = folder / name
        write_video(path, _scenes(count, hue / len(RECIPES)), recipe, times=times)
        paths.append(path)
    return paths


def _scenes(count: int, hue: float) -> Iterator[UInt8Array]:
    """Yield pictures of a moving disc and the frame's number, which a wrong frame gives away."""
    font = ImageFont.load_default(96)
    grain = np.random.default_rng(SEED).normal(0, 0.06, (HEIGHT, WIDTH))
    wall = np.linspace(0.9, 0.5, HEIGHT)[:, None] + 0.1 * np.sin(np.arange(WIDTH) * np.pi / 40) + grain
    for number in range(count):
        tint = np.array(colorsys.hsv_to_rgb((hue + number / 900) % 1, 0.55, 255.0))
        pixels = np.roll(wall, 3 * number, axis=1)[..., None] * tint
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        draw = ImageDraw.Draw(image)
        x = 160 + 120 * np.sin(number / 9)
        y = 120 + 80 * np.cos(number / 13)
        draw.ellipse((x - 34, y - 34, x + 34, y + 34), (250, 250, 245))
        draw.text(
            (WIDTH / 2, HEIGHT / 2), str(number), "white", font, "mm", stroke_width=5, stroke_fill="black"
        )
        yield np.asarray(image)


def _build(server: DemoServer, urls: list[str], table: IndexTable) -> tuple[dict[str, VideoIndex], Way]:
    """Index all files into the table; return the indexes by address, and what it cost."""
    server.reset()
    started = time.perf_counter()
    outcomes: list[Outcome] = []
    build_table(urls, table, progress=outcomes.append)
    took = time.perf_counter() - started
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    rows = table.lookup(urls)
    indexes = {url: row for url, row in zip(urls, rows, strict=True) if isinstance(row, VideoIndex)}
    return indexes, _way("index build", server, took)


def _way(name: str, server: DemoServer, seconds: float) -> Way:
    traffic = server.traffic()
    return Way(name, traffic.requests, traffic.depth, traffic.bytes, seconds)


def _compared(
    way: Way,
    requests: list[VideoReadRequest],
    clips: Sequence[UInt8Array | Sequence[UInt8Array | None] | None],
    truth: dict[str, dict[int, UInt8Array]],
) -> Way:
    """Return ``way`` with its pictures, a clip a request, held against the truth."""
    exact, total, wrong = 0, 0, Counter[str]()
    for request, pictures in zip(requests, clips, strict=True):
        frames = request.frames.tolist()
        url = str(request.uri)
        for frame, picture in zip(
            frames, pictures if pictures is not None else [None] * len(frames), strict=True
        ):
            same = picture is not None and np.array_equal(picture, truth[url][frame])
            exact, total = exact + same, total + 1
            if not same:
                wrong[_name(url)] += 1
    return replace(way, exact=exact, frames=total, wrong=dict(wrong))


def _name(url: str) -> str:
    return unquote(url.rsplit("/", 1)[-1])


def _clips(count: int, rng: np.random.Generator) -> list[list[int]]:
    """Return the frame numbers of each clip: shorter ones where the video is."""
    length = min(count, CLIP_FRAMES)
    step = CLIP_STEP if count > CLIP_FRAMES * CLIP_STEP else 1
    if not count:
        return []
    starts = np.sort(rng.integers(0, count - (length - 1) * step, CLIPS)).tolist()
    return [[start + n * step for n in range(length)] for start in starts]


def _fit(index: VideoIndex) -> tuple[int, int]:
    """Return (height, width) within the demo's own, so that long batches of large videos fit in memory."""
    shrink = min(1.0, WIDTH / index.width, WIDTH / index.height)
    return max(round(index.height * shrink), 1), max(round(index.width * shrink), 1)


def _strips(requests: list[VideoReadRequest], arrays: list[UInt8Array | None]) -> Iterator[Strip]:
    before = None
    for request, array in zip(requests, arrays, strict=True):
        name = _name(str(request.uri))
        assert array is not None
        cells = [
            (str(frame), picture) for frame, picture in zip(request.frames.tolist(), array, strict=True)
        ]
        yield Strip("" if name == before else name, cells)
        before = name
