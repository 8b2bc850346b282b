"""Read windows of videos by FluxonFS and by decord: shapes, pixels and times, each with its conditions.

    python tools/compare_decord.py VIDEO... [--windows N] [--length L] [--latency-ms MS] [--decord-python PYTHON]

A video's folder is an export with a temporary disk tier; with ``--latency-ms`` it is served over HTTP too. The same
windows are read cold (empty caches), disk-warm (a second patcher over the same disk tier) and memory-warm (a new
reader of that patcher), one reader for all windows; decord reads them by path. Each reader has a process of its own,
which has read one frame before the clock runs, and is killed at the time-out. The truth is PyAV's full decode,
turned upright. FluxonFS's frames must be the truth; decord's are reported. Scaled, decord's differ: its filter is
another one.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fluxon_gop.demuxed import display_matrix  # noqa: E402
from fluxon_gop.fluxonfs import FluxonFsCache, FluxonFsExport, FluxonFsPatcher  # noqa: E402
from fluxon_gop.model import IDENTITY_MATRIX, Orientation  # noqa: E402
from fluxon_gop.reference import full_decode  # noqa: E402
from tools.bench import conditions  # noqa: E402
from tools.range_server import RangeServer  # noqa: E402

Pictures = npt.NDArray[np.uint8]
Facts = dict[str, Any]

COLD, *WARM = CACHES = ("cold", "disk-warm", "memory-warm")
FILE = ("video", "file_bytes", "codec", "width", "height", "frames")
PLACE = ("reader", "export", "storage", "cache")
RANGE_READS = (
    "read_at_calls",
    "read_at_returned_bytes",
    "stat_calls",
    "remote_read_calls",
    "remote_read_bytes",
)
TIERS = ("kv_hits", "kv_misses", "memory_hits", "memory_misses", "disk_hits", "disk_misses")
COSTS = (*FILE, *PLACE, "open_ms", "read_ms", "decode_us", *RANGE_READS, *TIERS, "exact", "note")
DIFFERENCES = ("identical_share", "max_difference", "mean_difference")
PIXELS = ("video", "window", "first_frame", "shape", "exact", "decord_shape", "decord_exact", *DIFFERENCES)
PAGE_CACHE = "Files are in the system's page cache, whatever the state of FluxonFS's caches."
DECORD = """
import json, os, sys, time

import numpy as np
from decord import VideoReader, cpu

with open(sys.argv[1]) as file:
    job = json.load(file)
size = {name: job[name] for name in ("width", "height", "num_threads")}
fact = {"cache": "none", "window_ms": [], "note": ""}


def timed(call):
    started, got = time.perf_counter(), None
    try:
        got = call()
    except Exception as error:
        # Behind the time of day in brackets.
        words = str(error).strip().split("\\n")[0].split("] ", 1)[-1]
        fact["note"] = f"{type(error).__name__}: {words[:160]}"
    return got, (time.perf_counter() - started) * 1e3


def opened():
    return VideoReader(job["path"], ctx=cpu(0), **size)


timed(lambda: opened()[0].asnumpy())
fact["note"] = ""
reader, fact["open_ms"] = timed(opened)
if reader is not None and len(reader) != job["frames"]:
    fact["note"] = f"counts {len(reader)} frames"
for n, window in enumerate(job["windows"]):
    if reader is not None:
        frames, milliseconds = timed(lambda: reader.get_batch(window).asnumpy())
        fact["window_ms"].append(milliseconds)
        if frames is not None:
            np.save(job["save"].format(cache="none", window=n), frames)
    with open(job["facts"], "a") as file:
        print(json.dumps(fact), file=file)
# Its threads go on decoding after it has answered.
os._exit(0)
"""
"""What runs in decord's interpreter, which need not have this package; each line of facts replaces the one before."""


class Video(NamedTuple):
    """What a full decode tells of one file; its size is that of the first picture, upright."""

    path: Path
    codec: str
    height: int
    width: int
    frames: int
    orientation: Orientation

    @classmethod
    def look(cls, path: Path) -> Video | str:
        """Decode a file through and count; return FFmpeg's words where there is nothing to compare with."""
        first, count = None, 0
        try:
            with av.open(str(path), metadata_errors="ignore") as container:
                stream: Any = container.streams.best("video")
                context = stream and stream.codec_context
                if context:
                    stream.thread_type, context.thread_count = "NONE", 1
                    for frame in container.decode(stream):
                        first, count = first or frame, count + 1
        except av.error.FFmpegError as error:
            return f"FFmpeg: {error.strerror}"
        if first is None:
            return "FFmpeg decodes no picture"
        turn = orientation_of(first)
        size = (first.width, first.height) if turn.transpose else (first.height, first.width)
        return cls(path, context.name, *size, count, turn)

    def truth(self, windows: Sequence[Sequence[int]], height: int, width: int) -> list[Pictures]:
        """Return the windows by a full decode, scaled, then turned upright."""
        turn = self.orientation
        size = (width, height) if turn.transpose else (height, width)
        frames = full_decode(self.path, *size, frames=[n for window in windows for n in window])
        frames = frames.transpose(0, 2, 1, 3) if turn.transpose else frames
        frames = frames[:, ::-1] if turn.flip_rows else frames
        frames = frames[:, :, ::-1] if turn.flip_columns else frames
        return np.split(frames, len(windows))


def orientation_of(frame: Any) -> Orientation:
    """Return how FFmpeg turns a picture upright; where PyAV cannot list its side data (MV-HEVC), by the angle alone."""
    try:
        return Orientation.from_matrix(display_matrix(frame) or IDENTITY_MATRIX)
    except ValueError:
        cosine, sine = round(np.cos(np.radians(frame.rotation))), round(np.sin(np.radians(frame.rotation)))
        return Orientation.from_matrix((cosine, -sine, 0, sine, cosine, 0, 0, 0, 1))


class Reading(NamedTuple):
    """What one reader's process told, how it ended, and where its pictures are."""

    facts: list[Facts]
    note: str
    save: str

    def pictures(self, cache: str, window: int) -> Pictures | None:
        """Return a window, None where the reader did not come to its end."""
        try:
            return np.asarray(np.load(self.save.format(cache=cache, window=window)))
        except (FileNotFoundError, EOFError, ValueError):
            return None

    def row(self, cache: str, truth: Sequence[Pictures]) -> Facts:
        """Return what was read in one state of the caches: times, counters, whether it is the truth."""
        told: Facts = {"window_ms": [], "note": ""}
        told |= next((fact for fact in reversed(self.facts) if fact["cache"] == cache), {})
        exact = [same(self.pictures(cache, n), wanted) for n, wanted in enumerate(truth)]
        ended = "" if len(told["window_ms"]) == len(truth) else self.note
        return {
            **told,
            "cache": cache,
            "read_ms": sum(told["window_ms"]) or None,
            "exact": all(exact),
            "windows_exact": exact,
            "note": "; ".join(filter(None, (ended, told["note"]))),
        }


def read_ours(job: Facts) -> None:
    """Read by FluxonFS in the three states of the caches; runs in a process of its own."""
    exports = [FluxonFsExport("compare", job["root"])]
    with FluxonFsPatcher(exports, cache=FluxonFsCache(memory_bytes=0)) as patcher:
        read_windows(patcher, job, [[0]])
    cache = FluxonFsCache(disk_path=job["disk"])
    for states in ((COLD,), WARM):
        with FluxonFsPatcher(exports, cache=cache) as patcher:
            for state in states:
                fact, read = read_windows(patcher, job, job["windows"])
                for n, frames in enumerate(read):
                    np.save(job["save"].format(cache=state, window=n), frames)
                with Path(job["facts"]).open("a") as file:
                    print(json.dumps({**fact, "cache": state}), file=file)
            patcher.flush()


def read_windows(
    patcher: FluxonFsPatcher, job: Facts, windows: list[list[int]]
) -> tuple[Facts, list[Pictures]]:
    """Open one reader and read by it; return times and counters, and the pictures."""
    size = {name: job[name] for name in ("height", "width", "num_threads")}
    read: list[Pictures] = []
    clock = [time.perf_counter()]
    with patcher.open_video_reader(export_name="compare", relpath=job["relpath"], **size) as reader:
        clock.append(time.perf_counter())
        for window in windows:
            read.append(reader.read_frames_numpy(window))
            clock.append(time.perf_counter())
        opened, *windows_ms = (np.diff(clock) * 1e3).tolist()
        return {**reader.stats(), "open_ms": opened, "window_ms": windows_ms}, read


def run_reader(command: list[str], job: Facts, folder: Path, timeout_s: float) -> Reading:
    """Run a reader's process to its end, or kill it at the time-out."""
    folder.mkdir()
    facts, asked = folder / "facts", folder / "job.json"
    facts.touch()
    job = {
        **job,
        "facts": str(facts),
        "disk": str(folder / "disk"),
        "save": f"{folder}/{{cache}}-{{window}}.npy",
    }
    asked.write_text(json.dumps(job))
    try:
        done = subprocess.run([*command, str(asked)], capture_output=True, timeout=timeout_s, check=False)
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit {done.returncode}"]
        note = f"failed: {said[-1][:200]}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        note = "timeout"
    # A line without an end is a killed process's.
    lines = facts.read_text().split("\n")[:-1]
    return Reading([json.loads(line) for line in lines], note, job["save"])


def same(got: Pictures | None, truth: Pictures) -> bool:
    """Return whether these are the truth's pictures: type, shape and every bit."""
    return got is not None and got.dtype == truth.dtype and np.array_equal(got, truth)


def difference(one: Pictures | None, other: Pictures | None) -> Facts:
    """Return the share of identical pixels, the largest and the mean difference; {} where shapes differ."""
    if one is None or other is None or one.shape != other.shape:
        return {}
    off = [np.abs(a.astype(np.int16) - b) for a, b in zip(one, other, strict=True)]
    shares = [float((picture.max(axis=-1) == 0).mean()) for picture in off]
    means = [float(picture.mean()) for picture in off]
    largest = int(max(picture.max() for picture in off))
    return dict(zip(DIFFERENCES, (float(np.mean(shares)), largest, float(np.mean(means))), strict=True))


def shape_of(frames: Pictures | None) -> str | None:
    """Return type and shape in words."""
    return None if frames is None else f"{frames.dtype} {'x'.join(map(str, frames.shape))}"


def compare_video(
    path: Path, options: argparse.Namespace, *, decord: bool
) -> tuple[list[Facts], list[Facts]]:
    """Return one video's rows: what each reading cost, and what each window's pixels are."""
    known: Facts = {**dict.fromkeys(COSTS)} | {
        "video": path.name,
        "file_bytes": path.stat().st_size,
        "reader": "fluxonfs",
    }
    video = Video.look(path)
    if isinstance(video, str):
        return [{**known, "exact": False, "note": f"no truth: {video}"}], []
    known |= {name: value for name, value in video._asdict().items() if name in COSTS}
    known |= {"turned": video.orientation != Orientation()}
    height, width = options.height or video.height, options.width or video.width
    length = min(options.length, video.frames)
    rng = random.Random(f"{options.seed} {path.name}")
    starts = [rng.randrange(video.frames - length + 1) for _ in range(options.windows)]
    job: Facts = {"height": height, "width": width, "num_threads": options.num_threads}
    job |= {"windows": [list(range(start, start + length)) for start in starts]}
    known |= {f"output_{name}": job[name] for name in ("height", "width")}
    truth = video.truth(job["windows"], height, width)
    rows: list[Facts] = []
    readings: list[Reading] = []
    with tempfile.TemporaryDirectory() as temporary, places_of(path, options.latency_ms) as places:
        for where, root in places:
            command = [sys.executable, str(Path(__file__).resolve()), "--ours"]
            asked = {**job, "root": root, "relpath": path.name}
            ours = run_reader(command, asked, Path(temporary, where["export"]), options.timeout_s)
            rows += [{**known, **where, **ours.row(cache, truth)} for cache in CACHES]
            readings.append(ours)
        exact = [all(row["windows_exact"][n] for row in rows) for n in range(len(truth))]
        theirs = Reading([], "", "")
        if decord:
            asked = {**job, "path": str(path), "frames": video.frames}
            command = [options.decord_python, "-c", DECORD]
            theirs = run_reader(command, asked, Path(temporary, "decord"), options.timeout_s)
            where = {"reader": "decord", "export": "none", "storage": storage_of(path)}
            rows.append({**known, **where, **theirs.row("none", truth)})
        windows: list[Facts] = []
        for n, start in enumerate(starts):
            mine, other = readings[0].pictures(COLD, n), theirs.pictures("none", n)
            window = {"video": path.name, "window": n, "first_frame": start, "exact": exact[n]}
            window |= {"shape": shape_of(mine), "decord_shape": shape_of(other)}
            window |= {"decord_exact": same(other, truth[n]) if decord else None}
            windows.append({**dict.fromkeys(PIXELS), **window, **difference(mine, other)})
    return rows, windows


@contextmanager
def places_of(path: Path, latency_ms: float | None) -> Iterator[list[tuple[Facts, str]]]:
    """Give the video's folder as a local export and, with a latency, over HTTP: what a row tells of it, and its root."""
    storage = storage_of(path)
    local = ({"export": "local", "storage": storage}, str(path.parent))
    if latency_ms is None:
        yield [local]
        return
    with RangeServer(path.parent, latency_s=latency_ms / 1e3) as server:
        yield [
            local,
            ({"export": "http", "storage": f"{storage}, {latency_ms:g} ms away"}, server.base_url),
        ]


def storage_of(path: Path) -> str:
    """Return the type of the file system that a path is on (``ext4``), "unknown" where the system does not tell."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    above = [(len(mount[1]), mount[2]) for mount in mounts if path.is_relative_to(mount[1])]
    return max(above, default=(0, "unknown"))[1]


def decord_version(python: str) -> str | None:
    """Return decord's version in an interpreter, None where it cannot be imported there."""
    command = [python, "-c", "import decord; print(decord.__version__)"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split()[-1]


def cell(value: object) -> str:
    """Return a value as a table shows it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4f}" if abs(value) <= 1 else f"{value:,.1f}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value).replace("|", "/")


def table(columns: Sequence[str], rows: Sequence[Facts]) -> str:
    """Return an aligned Markdown table, without columns that are empty."""
    shown = [name for name in columns if any(cell(row[name]) for row in rows)]
    lines = [
        [name.replace("_", " ") for name in shown],
        *([cell(row[name]) for name in shown] for row in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    padded = [[text.ljust(width) for text, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("videos", nargs="*", type=Path, metavar="VIDEO")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=8, help="frames of a window, one after another")
    parser.add_argument("--height", type=int, help="of the pictures; the video's own size without it")
    parser.add_argument("--width", type=int)
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--latency-ms", type=float, help="read over HTTP too, each answer this late")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="of each reader on each export")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--decord-python", default=sys.executable, help="the interpreter that has decord")
    parser.add_argument("--ours", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if (options.height is None) != (options.width is None):
        parser.error("give both --height and --width, or neither")
    for name in ("windows", "length", "height", "width", "num_threads", "timeout_s"):
        if getattr(options, name) is not None and getattr(options, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    for path in options.videos:
        if not path.is_file():
            parser.error(f"{path}: no such file")
    if not options.videos and not options.ours:
        parser.error("give a VIDEO")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Compare all videos, print and write the tables; return 0 where FluxonFS's frames are the truth, else 1."""
    options = parsed(argv)
    if options.ours:
        read_ours(json.loads(options.ours.read_text()))
        return 0
    version = decord_version(options.decord_python)
    missing = (
        f"decord cannot be imported by {options.decord_python}: FluxonFS is compared with the truth only."
    )
    rows, windows = [], []
    for path in options.videos:
        costs, pixels = compare_video(path.resolve(), options, decord=version is not None)
        rows += costs
        windows += pixels
    names = ("windows", "length", "num_threads", "latency_ms", "timeout_s", "seed")
    cache, machine = FluxonFsCache(), conditions()
    chosen = {name: getattr(options, name) for name in names}
    chosen |= {name: getattr(cache, name) for name in ("piece_bytes", "memory_bytes", "disk_bytes")}
    told = [f"{name} {value}" for name, value in chosen.items()]
    told += [
        machine["date"],
        f"{machine['cores']} cores of {machine['cpu']}",
        f"Python {machine['python']}",
    ]
    parts = [missing if version is None else f"decord {version}.", f"{', '.join(told)}. {PAGE_CACHE}"]
    parts += [table(columns, lines) for columns, lines in ((COSTS, rows), (PIXELS, windows)) if lines]
    text = "\n\n".join(parts)
    print(text)
    if options.json:
        facts = {**machine, **chosen, "decord": version, "page_cache": PAGE_CACHE}
        whole = {"conditions": facts, "rows": rows, "windows": windows}
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(f"# FluxonFS beside decord\n\n{text}\n")
    wrong = [row for row in rows if row["reader"] == "fluxonfs" and (row["note"] or not row["exact"])]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
