"""Time reads beside the peers: the same frames, alternated runs, requests, bytes and exactness beside the times.

    python tools/bench.py --media DIR --out bench.json [--runs 30] [--stories NAME...]

Stories are listed in ``bench_stories.py``. Each run of a story draws frame numbers from the seed, and every peer reads
those in a block of reads, one peer after the other in random order; a run's time is the mean of its block. Local files are in the page cache; remote ones come
from ``range_server.py`` in a process of its own. Requests and bytes are counted, and peak memory is taken, in
passes of their own. ``tools/bench_table.py`` renders the JSON.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fluxon_gop as fg  # noqa: E402
from fluxon_gop.plan import find_spans, span_ranges  # noqa: E402
from fluxon_gop.ranges import total_bytes  # noqa: E402
from tools import bench_media, bench_peers  # noqa: E402
from tools.bench_server import served  # noqa: E402
from tools.bench_stories import LATENCY_MS, STORIES, Story  # noqa: E402
from tools.range_server import RangeServer  # noqa: E402

EXACT_RUNS = 3
"""Runs whose pictures are compared with the truth."""


@dataclass
class Row:
    """One peer's part of a story."""

    peer: str
    seconds: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def as_dict(self, ours: float) -> dict[str, Any]:
        """Return what the JSON says: milliseconds, and the ratio of our median to this peer's."""
        if not self.seconds:
            return {"peer": self.peer, "runs": 0, **self.facts}
        low, median, high = statistics.quantiles(self.seconds, n=4)
        return {
            "peer": self.peer,
            "runs": len(self.seconds),
            "median_ms": round(median * 1e3, 3),
            "quartiles_ms": [round(low * 1e3, 3), round(high * 1e3, 3)],
            "min_ms": round(min(self.seconds) * 1e3, 3),
            "ours_over_this": round(ours / median, 3),
            **self.facts,
        }


class Truth:
    """FFmpeg's own frames of the benchmarks' videos, decoded once from the start as far as they are asked for."""

    def __init__(self, files: dict[str, Path]) -> None:
        """Know the files."""
        self._files = files

    def frames(self, name: str, numbers: list[int], size: tuple[int, int] | None) -> np.ndarray[Any, Any]:
        """Return these frames by a full decode."""
        height, width = size or (None, None)
        wanted, got = set(numbers), {}
        with av.open(str(self._files[name])) as container:
            stream = container.streams.video[0]
            stream.thread_type = "FRAME"
            for number, frame in enumerate(container.decode(stream)):
                if number in wanted:
                    rgb = frame.reformat(width, height, format="rgb24", interpolation="BILINEAR", threads=1)
                    got[number] = rgb.to_ndarray()
                if number >= max(wanted):
                    break
        return np.stack([got[number] for number in numbers])


def compare(got: list[np.ndarray[Any, Any]], expected: list[np.ndarray[Any, Any]]) -> dict[str, Any]:
    """Return whether all pictures are the truth bit for bit, and the largest difference of a value."""
    pairs = list(zip(got, expected, strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return {"exact": False, "max_difference": 255, "mean_difference": 255.0}
    off = [np.abs(a.astype(np.int16) - b.astype(np.int16)) for a, b in pairs]
    return {
        "exact": all(not one.any() for one in off),
        "max_difference": int(max(one.max() for one in off)),
        "mean_difference": round(float(np.mean([one.mean() for one in off])), 3),
    }


def least_bytes(index: fg.VideoIndex, numbers: list[int]) -> int:
    """Return the bytes from each entry point to the last needed sample: what no reader can do without."""
    return total_bytes(span_ranges(index, find_spans(index, np.unique(numbers))))


# --------------------------------------------------------------------------- local stories


def run_local(story: Story, files: dict[str, Path], runs: int, seed: int) -> list[Row]:
    """Time one story on a local file for all peers."""
    path = str(files[story.media[0]])
    peers = bench_peers.local_peers(two_threads=story.also_two_threads)
    ours = bench_peers.Ours()
    ours.prepare(path)
    count = ours.rows[path].num_frames
    rng = random.Random(f"{seed} {story.name}")
    draws = [[story.draw(rng, count) for _ in range(story.block)] for _ in range(runs)]
    rows = {peer.name: Row(peer.name) for peer in peers}
    videos = {}
    for peer in list(peers):
        started = time.perf_counter()
        try:
            peer.prepare(path)
            rows[peer.name].facts["prepare_ms"] = round((time.perf_counter() - started) * 1e3, 1)
            if story.cold:
                _cold(peer, path, story, draws[0][0])
            else:
                videos[peer.name] = peer.open(path, size=story.size)
                videos[peer.name].frames(draws[0][0])
        except Exception as error:  # noqa: BLE001 - a peer that cannot read the video is shown as such
            rows[peer.name].facts["raised"] = str(error).splitlines()[0][:120]
            peers.remove(peer)
    truth = Truth(files)
    kept: dict[str, list[np.ndarray[Any, Any]]] = {peer.name: [] for peer in peers}
    for run, block in enumerate(draws):
        for peer in rng.sample(peers, len(peers)):
            started = time.perf_counter()
            for numbers in block:
                pictures = (
                    videos[peer.name].frames(numbers) if videos else _cold(peer, path, story, numbers)
                )
            rows[peer.name].seconds.append((time.perf_counter() - started) / story.block)
            if run < EXACT_RUNS:
                kept[peer.name].append(pictures)
    last = [block[-1] for block in draws[:EXACT_RUNS]]
    # Resized, every library has a filter of its own: exact is compared with swscale's.
    expected = [truth.frames(story.media[0], numbers, story.size) for numbers in last]
    for peer in peers:
        rows[peer.name].facts |= compare(kept[peer.name], expected)
        rows[peer.name].facts |= _local_cost(peer, path, last, ours.rows[path])
    for video in videos.values():
        video.close()
    return list(rows.values())


def _cold(peer: bench_peers.Peer, path: str, story: Story, numbers: list[int]) -> np.ndarray[Any, Any]:
    video = peer.open(path, size=story.size)
    try:
        return video.frames(numbers)
    finally:
        video.close()


def _local_cost(
    peer: bench_peers.Peer, path: str, draws: list[list[int]], index: fg.VideoIndex
) -> dict[str, Any]:
    """Return reads and bytes of a cold read, averaged over some runs; nothing for a peer that takes paths only."""
    least = statistics.mean(least_bytes(index, numbers) for numbers in draws)
    requests, nbytes = [], []
    for numbers in draws:
        if isinstance(peer, bench_peers.Ours):
            with fg.VideoReader.open(path, index=index) as reader:
                reader.read_frames_numpy(numbers)
                requests.append(reader.stats().total_requests)
                nbytes.append(reader.stats().total_bytes)
        elif peer.name in {"torchcodec approximate", "torchcodec exact"}:
            file = bench_peers.CountingFile(path)
            peer.open(file).frames(numbers)  # type: ignore[arg-type]
            requests.append(file.reads)
            nbytes.append(file.nbytes)
        else:
            return {}
    mean = statistics.mean(nbytes)
    return {
        "requests": round(statistics.mean(requests), 1),
        "bytes": round(mean),
        "bytes_over_least": round(mean / least, 3),
    }


# --------------------------------------------------------------------------- remote stories


def many_peers(table: fg.IndexTable) -> list[bench_peers.ManyFiles]:
    """Return the readers of a batch over many remote files."""
    peers: list[bench_peers.ManyFiles] = [bench_peers.OursMany(table)]
    if any(isinstance(peer, bench_peers.TorchCodec) for peer in bench_peers.local_peers()):
        peers += [bench_peers.TorchMany(mib, threads) for mib in (1, 4) for threads in (1, 16)]
    return peers


def make_table(addresses: list[str], path: Path) -> fg.IndexTable:
    """Return a table, its rows in memory, of these videos."""
    path.unlink(missing_ok=True)
    table = fg.IndexTable.open(path, create=True)
    table.append([(address, fg.build_index(address)) for address in addresses])
    table.lookup(addresses)
    return table


def run_remote(story: Story, files: dict[str, Path], runs: int, seed: int, folder: Path) -> list[Row]:
    """Time one story over HTTP for all peers."""
    rng = random.Random(f"{seed} {story.name}")
    indexes = {name: fg.build_index(str(files[name])) for name in story.media}
    draws = [{name: story.draw(rng, indexes[name].num_frames) for name in story.media} for _ in range(runs)]
    with served(folder, LATENCY_MS) as address:
        table = make_table([f"{address}/{name}.mp4" for name in story.media], folder / "bench.arrow")
        peers = many_peers(table)
        rows = {peer.name: Row(peer.name) for peer in peers}
        for run, wanted in enumerate(draws):
            urls = {f"{address}/{name}.mp4": numbers for name, numbers in wanted.items()}
            for peer in rng.sample(peers, len(peers)):
                started = time.perf_counter()
                pictures = peer.read(urls)
                rows[peer.name].seconds.append(time.perf_counter() - started)
                if run == 0:
                    truth = Truth(files)
                    expected = [truth.frames(name, numbers, None) for name, numbers in wanted.items()]
                    rows[peer.name].facts |= compare(pictures, expected)
    with RangeServer(folder, latency_s=LATENCY_MS / 1e3) as server:
        table = make_table([server.url(f"{name}.mp4") for name in story.media], folder / "bench.arrow")
        least = sum(least_bytes(indexes[name], numbers) for name, numbers in draws[0].items())
        for peer in many_peers(table):
            server.reset()
            peer.read({server.url(f"{name}.mp4"): numbers for name, numbers in draws[0].items()})
            seen = server.summary()
            rows[peer.name].facts |= {
                "requests": seen["requests"],
                "depth": seen["depth"],
                "bytes": seen["bytes"],
                "bytes_over_least": round(seen["bytes"] / least, 3),
            }
    return list(rows.values())


# --------------------------------------------------------------------------- memory, conditions, main


def peak_memory(story: Story, peer: str, media: Path, seed: int) -> float | None:
    """Return the peak MiB that a few runs add to a fresh process, None where it failed."""
    command = [
        sys.executable,
        __file__,
        "--media",
        str(media),
        "--seed",
        str(seed),
        "--memory",
        story.name,
        peer,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    try:
        return float(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return None


def measure_memory(story: Story, name: str, files: dict[str, Path], seed: int) -> float:
    """Run a story three times for one peer and return what it adds to the process's peak, in MiB.

    Imports and what is prepared once (rows, mappings) come before; opening is included.
    """
    rng = random.Random(f"{seed} {story.name}")
    if story.remote:
        with served(files[story.media[0]].parent, 0) as address:
            urls = {video: f"{address}/{video}.mp4" for video in story.media}
            table = make_table(list(urls.values()), files[story.media[0]].parent / "memory.arrow")
            (many,) = (one for one in many_peers(table) if one.name == name)
            before = _reset_peak()
            for _ in range(3):
                many.read({urls[video]: story.draw(rng, 600) for video in story.media})
            return _peak() - before
    path = str(files[story.media[0]])
    peers = bench_peers.local_peers(two_threads=story.also_two_threads)
    (peer,) = (one for one in peers if one.name == name)
    peer.prepare(path)
    count = fg.build_index(path).num_frames
    before = _reset_peak()
    video = peer.open(path, size=story.size)
    for _ in range(3):
        video.frames(story.draw(rng, count))
    return _peak() - before


def _reset_peak() -> float:
    """Make the process's present memory its peak, and return it in MiB. Linux: proc(5), clear_refs."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> float:
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    return int(line.split()[1]) / 1024


def index_costs(files: dict[str, Path]) -> list[dict[str, Any]]:
    """Return what building each video's index costs, checks included."""
    costs = []
    for name in ("gop128", "one_hour", "h264_gop2", "av1_gop2", "hevc_1080p", "ten_minutes", "of16_00"):
        seconds = []
        for _ in range(5):
            source = fg.TracedSource(fg.LocalSource(files[name]))
            started = time.perf_counter()
            index = fg.build_index(source)
            seconds.append(time.perf_counter() - started)
        costs.append(
            {
                "video": name,
                "frames": index.num_frames,
                "file_bytes": index.signature.size,
                "median_ms": round(statistics.median(seconds) * 1e3, 2),
                "requests": len(source.trace.requests),
                "bytes": source.trace.nbytes,
            }
        )
    return costs


def conditions() -> dict[str, Any]:
    """Return machine and versions."""
    versions = {}
    for package in ("fluxon-gop", "av", "torch", "torchcodec", "decord", "obstore", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    cpu = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        "",
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu,
        "ffmpeg of PyAV": ".".join(map(str, av.library_versions["libavcodec"])),
        "versions": versions,
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def main() -> None:
    """Run the stories and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--media", type=Path, required=True, help="where the videos are, or are made")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stories", nargs="*")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--memory", nargs=2, metavar=("STORY", "PEER"), help="for the program itself")
    options = parser.parse_args()
    files = bench_media.make(options.media)
    by_name = {story.name: story for story in STORIES}
    if options.memory:
        print(measure_memory(by_name[options.memory[0]], options.memory[1], files, options.seed))
        return
    result: dict[str, Any] = {"conditions": conditions(), "seed": options.seed, "stories": []}
    result["index"] = index_costs(files)
    for story in [by_name[name] for name in options.stories or by_name]:
        if story.remote:
            rows = run_remote(story, files, options.runs, options.seed, options.media)
        else:
            rows = run_local(story, files, options.runs, options.seed)
        if not options.no_memory:
            for row in (row for row in rows if row.seconds):
                row.facts["peak_mib"] = peak_memory(story, row.peer, options.media, options.seed)
        ours = statistics.median(rows[0].seconds)
        dicts = [row.as_dict(ours) for row in rows]
        result["stories"].append({"name": story.name, "text": story.text, "rows": dicts})
        print(f"{story.name}: {story.text}", file=sys.stderr)
        for made in dicts:
            print("  " + json.dumps(made), file=sys.stderr)
        if options.out:
            # After each story: what was measured is not lost with the rest.
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
