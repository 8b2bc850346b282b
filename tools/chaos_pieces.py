"""Many processes on one disk tier, while it is deleted, filled and corrupted and processes are killed.

``python tools/chaos_pieces.py --processes 8 --batches 200 --seed 7`` runs twice. Undisturbed: every frame is FFmpeg's
own, and no piece is fetched twice by anyone. Disturbed: every frame is FFmpeg's own or the batch ends with a typed
error, nobody hangs. Exit code 0 where both held; ``--markdown FILE`` writes what was seen.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import av
import numpy as np

from fluxon_gop.encode import Recipe, numbered_picture, write_video
from fluxon_gop.errors import FluxonGopError
from fluxon_gop.fluxonfs import FluxonFsCache, FluxonFsExport, FluxonFsPatcher, FluxonFsVideoReadRequest
from fluxon_gop.reference import full_decode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.range_server import RangeServer

FRAMES, HEIGHT, WIDTH = 48, 144, 192
PIECE = 4096
STALL_SECONDS = 120.0
"""A process that does not end a batch within this hangs."""


@dataclass(frozen=True)
class Plan:
    """What a worker is told."""

    base_url: str
    folder: str
    disk_bytes: int
    seed: int
    batches: int
    videos: int
    full_share: float
    """Share of batches during which this process's writes fail as on a full disk."""

    @property
    def disk(self) -> Path:
        """The tier's folder."""
        return Path(self.folder) / "tier"

    def book(self, number: int) -> Path:
        """Where worker ``number`` writes down its batches."""
        return Path(self.folder) / f"worker-{number}.jsonl"


def work(plan: Plan, number: int) -> None:
    """Read random batches, those that are not in the book yet, and write down how each went."""
    book = plan.book(number)
    done = len(book.read_text().splitlines()) if book.exists() else 0
    truth = [np.load(Path(plan.folder) / f"{n}.npy", mmap_mode="r") for n in range(plan.videos)]
    cache = FluxonFsCache(
        memory_bytes=(0, 16 * PIECE)[number % 2],
        disk_path=plan.disk,
        disk_bytes=plan.disk_bytes,
        piece_bytes=PIECE,
        disk_retry_seconds=0.1,
    )
    policy = ("RemoteRead", "StageToKvThenRead")[number % 3 == 0]
    export = FluxonFsExport("chaos", plan.base_url, miss_policy=policy, metadata_cache_ttl_ms=500)  # type: ignore[arg-type]
    with (
        FluxonFsPatcher([export], cache=cache) as patcher,
        patcher.open_video_reader_pool(max_readers=4) as pool,
        book.open("a") as lines,
    ):
        for batch in range(done, plan.batches):
            generator = random.Random(f"{plan.seed} {number} {batch}")
            wanted = random_batch(generator, plan.videos)
            requests = [
                FluxonFsVideoReadRequest("chaos", f"{video}.mp4", HEIGHT, WIDTH, 1, frames)
                for video, frames in wanted
            ]
            full = generator.random() < plan.full_share
            if full:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
            started = time.monotonic()
            try:
                results = pool.read_many_numpy_with_stats(requests)
                exact = all(
                    np.array_equal(result.array, truth[video][frames])
                    for result, (video, frames) in zip(results, wanted, strict=True)
                )
                outcome = "exact" if exact else "WRONG"
                remote = sum(result.reader_stats["remote_read_calls"] for result in results)
            except FluxonGopError as error:
                outcome, remote = type(error).__name__, 0
            finally:
                if full:
                    patcher.flush()
                    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            line = {
                "outcome": outcome,
                "remote": remote,
                "full": full,
                "seconds": time.monotonic() - started,
            }
            lines.write(json.dumps(line) + "\n")
            lines.flush()
        patcher.flush()
        (Path(plan.folder) / f"tiers-{number}-{os.getpid()}.json").write_text(json.dumps(patcher.stats()))


def random_batch(generator: random.Random, videos: int) -> list[tuple[int, list[int]]]:
    """Return one to four videos, and of each one to six frames."""
    return [
        (generator.randrange(videos), sorted(generator.sample(range(FRAMES), generator.randint(1, 6))))
        for _ in range(generator.randint(1, 4))
    ]


def make_videos(folder: Path, count: int) -> None:
    """Write small videos and the truth about each: FFmpeg's full decode."""
    options = [
        Recipe(options={"preset": "ultrafast", "g": "12", "bf": "2", "sc_threshold": "0", "crf": "8"}),
        Recipe(
            options={"preset": "ultrafast", "g": "4", "crf": "8"},
            container_options={"movflags": "+faststart"},
        ),
        Recipe(codec="mpeg4", options={"g": "12", "bf": "2", "qscale": "3"}),
    ]
    (folder / "videos").mkdir()
    for n in range(count):
        path = folder / "videos" / f"{n}.mp4"
        pictures = (numbered_picture(n + k, WIDTH, HEIGHT) for k in range(FRAMES))
        write_video(path, pictures, options[n % len(options)])
        np.save(folder / f"{n}.npy", full_decode(path))


def torment(tier: Path, generator: random.Random, did: Counter[str]) -> None:
    """Do one bad thing to the tier."""
    pieces = list(tier.rglob("*.piece"))
    deed = generator.choice(
        ["delete all", "delete some", "flip", "flip", "cut", "cut", "fill", "usage", "claims", "swap"]
    )
    did[deed] += 1
    try:
        if deed == "delete all":
            shutil.rmtree(tier, ignore_errors=True)
        elif deed == "fill":
            for _ in range(64):
                place = tier / f"{generator.randrange(256):02x}"
                place.mkdir(exist_ok=True)
                (place / f"{generator.getrandbits(200):062x}.piece").write_bytes(generator.randbytes(PIECE))
        elif deed in {"usage", "claims"}:
            (tier / deed).write_bytes(generator.randbytes(generator.choice([0, 8, 64, 1000])))
        for path in generator.sample(pieces, min(len(pieces), 8)):
            data = bytearray(path.read_bytes())
            if deed == "flip" and data:
                data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
                path.write_bytes(data)
            elif deed == "cut":
                path.write_bytes(data[: generator.randrange(len(data) + 1)])
            elif deed == "delete some":
                path.unlink()
            elif deed == "swap":
                path.replace(generator.choice(pieces))
    except OSError:
        # The processes evict and write meanwhile.
        did["too late"] += 1


def run(plan: Plan, processes: int, torture: Callable[[], None] | None, kills: float) -> dict[str, Any]:
    """Run the workers to their end, started again where they are killed, and return what they wrote down."""
    context = multiprocessing.get_context("spawn")
    generator = random.Random(plan.seed)
    workers = {n: context.Process(target=work, args=(plan, n)) for n in range(processes)}
    for worker in workers.values():
        worker.start()
    killed, failed, hung = 0, 0, False
    progress, moved = 0, time.monotonic()
    at_kill = progress
    next_kill = time.monotonic() + kills if kills else float("inf")
    while any(worker.is_alive() for worker in workers.values()):
        time.sleep(0.05)
        if torture is not None:
            torture()
        alive = [n for n, worker in workers.items() if worker.is_alive()]
        # A slow machine starts a process slower than they are killed: some batch is read between two kills.
        if alive and time.monotonic() > next_kill and progress != at_kill:
            victim = generator.choice(alive)
            pid = workers[victim].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            workers[victim].join()
            workers[victim] = context.Process(target=work, args=(plan, victim))
            workers[victim].start()
            killed += 1
            at_kill = progress
            next_kill = time.monotonic() + generator.uniform(0.5, 1.5) * kills
        lines = sum(plan.book(n).stat().st_size for n in range(processes) if plan.book(n).exists())
        if lines != progress:
            progress, moved = lines, time.monotonic()
        elif time.monotonic() - moved > STALL_SECONDS:
            hung = True
            for worker in workers.values():
                worker.kill()
            break
    for worker in workers.values():
        worker.join()
        failed += worker.exitcode != 0
    books = [json.loads(line) for n in range(processes) for line in _lines(plan.book(n))]
    tiers: Counter[str] = Counter()
    for path in Path(plan.folder).glob("tiers-*.json"):
        tiers.update(json.loads(path.read_text()))
    return {
        "batches": len(books),
        "outcomes": dict(Counter(book["outcome"] for book in books)),
        "batches on a full disk": sum(book["full"] for book in books),
        "slowest batch, s": round(max((book["seconds"] for book in books), default=0.0), 2),
        "killed": killed,
        "processes that failed": failed,
        "hung": hung,
        "tier": dict(tiers),
        "largest tier, bytes": sum(path.stat().st_size for path in plan.disk.rglob("*.piece")),
    }


def _lines(book: Path) -> list[str]:
    """Return the whole lines of a book; a killed worker may leave half of one."""
    text = book.read_text() if book.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def fetched_twice(server: RangeServer) -> int:
    """Return how many pieces the origin was asked for more than once."""
    seen: Counter[tuple[str, int]] = Counter()
    for record in server.requests:
        if record.method == "GET" and record.start is not None and record.stop is not None:
            seen.update((record.path, at) for at in range(record.start, record.stop, PIECE))
    return sum(count > 1 for count in seen.values())


def campaign(
    processes: int, batches: int, seed: int, videos: int = 16, kills: float = 1.0
) -> dict[str, Any]:
    """Run both parts and return what was seen; ``held`` says whether everything did."""
    with tempfile.TemporaryDirectory(prefix="chaos-pieces-") as name:
        folder = Path(name)
        make_videos(folder, videos)
        with RangeServer(folder / "videos", latency_s=0.005) as server:
            quiet = folder / "quiet"
            loud = folder / "loud"
            for place in (quiet, loud):
                place.mkdir()
                for n in range(videos):
                    (place / f"{n}.npy").symlink_to(folder / f"{n}.npy")
            calm = Plan(server.base_url, str(quiet), 1 << 30, seed, batches, videos, 0.0)
            undisturbed = run(calm, processes, None, 0.0)
            undisturbed["pieces fetched twice"] = fetched_twice(server)
            undisturbed["media requests"] = sum(record.method == "GET" for record in server.requests)
            server.reset()
            total = sum(path.stat().st_size for path in (folder / "videos").iterdir())
            bad = Plan(server.base_url, str(loud), total // 2, seed + 1, batches, videos, 0.1)
            generator, did = random.Random(seed), Counter[str]()
            disturbed = run(bad, processes, lambda: torment(bad.disk, generator, did), kills)
            disturbed["deeds"] = dict(did)
            disturbed["media requests"] = sum(record.method == "GET" for record in server.requests)
    for part in (undisturbed, disturbed):
        wrong = part["outcomes"].get("WRONG", 0) + part["processes that failed"] + part["hung"]
        part["held"] = not wrong and part["batches"] == processes * batches
    undisturbed["held"] &= undisturbed["pieces fetched twice"] == 0 and set(undisturbed["outcomes"]) == {
        "exact"
    }
    return {
        "held": undisturbed["held"] and disturbed["held"],
        "undisturbed": undisturbed,
        "disturbed": disturbed,
    }


def main(argv: list[str] | None = None) -> int:
    """Run the campaign and print what was seen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--kills", type=float, default=1.0, help="seconds between two kills, on average; 0 for none"
    )
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args(argv)
    started = time.monotonic()
    seen = campaign(options.processes, options.batches, options.seed, kills=options.kills)
    seen["seconds"] = round(time.monotonic() - started, 1)
    print(json.dumps(seen, indent=2))
    if options.markdown is not None:
        options.markdown.write_text(_page(options, seen))
    return 0 if seen["held"] else 1


def _page(options: argparse.Namespace, seen: dict[str, Any]) -> str:
    command = (
        f"python tools/chaos_pieces.py --processes {options.processes} --batches {options.batches} "
        f"--seed {options.seed} --kills {options.kills:g}"
    )
    versions = f"Python {platform.python_version()}, PyAV {av.__version__}, {os.cpu_count()} cores"
    text = f"# One disk tier, many processes\n\n`{command}`, {datetime.now(UTC):%Y-%m-%d}, {versions}; {seen['seconds']} s.\n"
    for part in ("undisturbed", "disturbed"):
        text += f"\n## {part.capitalize()}\n\n| what | seen |\n|---|---|\n"
        text += "".join(f"| {name} | {_cell(value)} |\n" for name, value in seen[part].items())
    return text


def _cell(value: Any) -> str:
    return ", ".join(f"{k}: {v:,}" for k, v in value.items()) if isinstance(value, dict) else str(value)


if __name__ == "__main__":
    sys.exit(main())
