"""Time training loaders beside each other: the same clips in the same order over the same server.

    python tools/bench_loader.py --media DIR --out loader.json [--workers 0 2 4] [--latency-ms 0 20 50 100]
    python tools/bench_loader.py --cases CASES.csv --out loader.json

Ours with and without look-ahead, and torchcodec over buffered ranged reads (1 MiB blocks, a decoder a video, the 16 used
last kept). Each run is one epoch's first batches; the first ones, until every worker has given two, are left out of the
times. Without ``--cases``: windows of 8 frames at 224x224 of 256 videos (16 files of 20 s, 640x360 H.264, GOP 60, each under 16
names), batches of 8. ``--cases`` takes the columns idx, video_path, height, width, start_idx, end_idx, num_frames: of each
row num_frames frames spread from start_idx to end_idx, both included; the loader's cases of the largest group of one shape
are read. The files are served over loopback HTTP by a process of its own.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import tempfile
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fluxon_gop as fg  # noqa: E402
from tools import bench_media, bench_peers  # noqa: E402
from tools.bench import Truth, compare  # noqa: E402
from tools.bench_about import about  # noqa: E402
from tools.bench_server import place, served  # noqa: E402

EXACT_BATCHES = 3
DECODERS = 16


class OnTorchcodec:
    """The same clips, read as torchcodec's users read remote files."""

    def __init__(self, clips: fg.ClipDataset, size: tuple[int, int]) -> None:
        """Take the clips from ours."""
        self._clips, self._size = clips, size
        self._open: OrderedDict[str, tuple[Any, Any]] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of clips."""
        return len(self._clips)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Read one clip."""
        clip = self._clips.clip(number)
        uri = str(clip.uris[""])
        before = (0, 0)
        if uri not in self._open:
            file = bench_peers.BufferedRanges(uri, 1 << 20)
            self._open[uri] = (bench_peers.TorchCodec("approximate").open(file, size=self._size), file)
            while len(self._open) > DECODERS:
                self._open.popitem(last=False)
        else:
            before = self._open[uri][1].reads, self._open[uri][1].nbytes
        self._open.move_to_end(uri)
        video, file = self._open[uri]
        frames = video.frames(clip.frames.tolist())
        return {
            "frames": frames,
            "clip": number,
            "cost": np.array([file.reads - before[0], file.nbytes - before[1], *_rss()]),
        }


def _rss() -> tuple[int, int]:
    """Return this process's number and resident bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return os.getpid(), int(line.split()[1]) << 10
    return os.getpid(), 0


def with_rss(sample: dict[str, Any]) -> dict[str, Any]:
    """Add what the process holds to a sample."""
    return {"frames": sample["frames"], "clip": sample["clip"], "cost": np.array([0, 0, *_rss()])}


def run(
    reader: str, data: fg.ClipDataset, size: tuple[int, int], batch_size: int, workers: int, batches: int
) -> tuple[dict[str, Any], list[tuple[list[int], np.ndarray[Any, Any]]]]:
    """Read an epoch's first batches; return figures, and the first batches' clips and frames."""
    warm = 2 * max(workers, 1)
    clips: Any = data if reader.startswith("fluxon") else OnTorchcodec(data, size)
    loader = (
        fg.ClipLoader(
            clips,
            batch_size,
            shuffle=True,
            seed=7,
            num_workers=workers,
            look_ahead=0 if "without" in reader else 1,
            start_method="forkserver" if workers else None,
        )
        if reader.startswith("fluxon")
        else torch_loader(clips, batch_size, workers, len(data))
    )
    seconds, kept, rss, reads, nbytes = [], [], Counter[int](), 0, 0
    started = time.perf_counter()
    for number, batch in enumerate(loader):
        now = time.perf_counter()
        if number >= warm:
            seconds.append(now - started)
        started = now
        cost = batch["cost"].numpy()
        reads, nbytes = reads + int(cost[:, 0].sum()), nbytes + int(cost[:, 1].sum())
        for process, held in cost[:, 2:].tolist():
            rss[process] = max(rss[process], held)
        if number < EXACT_BATCHES:
            kept.append((batch["clip"].tolist(), batch["frames"].numpy()))
        if number + 1 == batches + warm:
            break
    done = number + 1
    if isinstance(loader, fg.ClipLoader):
        cost = loader.cost()
        reads, nbytes = int(cost["total_requests"]), int(cost["total_bytes"])
    del loader
    cut = [float(np.percentile(seconds, share, method="higher")) for share in (50, 95, 99)]
    return {
        "reader": reader,
        "samples_per_s": round(len(seconds) * batch_size / sum(seconds), 2),
        "batches": len(seconds),
        "p50_ms": round(cut[0] * 1e3, 1),
        "p95_ms": round(cut[1] * 1e3, 1),
        "p99_ms": round(cut[2] * 1e3, 1),
        "requests_per_batch": round(reads / done, 2),
        "bytes_per_batch": nbytes // done,
        "rss_mb_of_each": sorted((held >> 20 for held in rss.values()), reverse=True),
    }, kept


def torch_loader(clips: OnTorchcodec, batch_size: int, workers: int, count: int) -> Any:
    """Return a DataLoader over the same batches."""
    from torch.utils.data import DataLoader

    from fluxon_gop.samplers import Batches

    return DataLoader(
        clips,  # type: ignore[arg-type]
        batch_sampler=Batches(fg.ClipSampler(count, seed=7), batch_size),
        num_workers=workers,
        multiprocessing_context="forkserver" if workers else None,
    )


@contextmanager
def default_data(media: Path, latency: float) -> Iterator[tuple[fg.ClipDataset, Any, tuple[int, int], int]]:
    """Serve the default videos; yield the data set, what tells true frames, size, and clips of a batch."""
    files = {name: path for name, path in bench_media.make(media).items() if name.startswith("of16")}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sources = {}
        for copy in range(16):
            for name, path in files.items():
                sources[f"{name}_{copy:02}.mp4"] = name
                place(path, folder / f"{name}_{copy:02}.mp4")
        with served(folder, latency) as base:
            uris = [f"{base}/{name}" for name in sources]
            data = fg.ClipDataset(uris, fg.Windows(8, 8), height=224, width=224, transform=with_rss)
            truth = Truth(files)

            def true_frames(clip: int) -> np.ndarray[Any, Any]:
                found = data.clip(clip)
                name = sources[str(uris[found.video]).rsplit("/", 1)[1]]
                return truth.frames(name, found.frames.tolist(), (224, 224))

            yield data, true_frames, (224, 224), 8


@contextmanager
def cases_data(path: Path, latency: float) -> Iterator[tuple[fg.ClipDataset, Any, tuple[int, int], int]]:
    """Serve a list of cases' videos, those of the shape that most have."""
    with path.open(newline="") as file:
        cases = list(csv.DictReader(file))
    shape = Counter((int(c["height"]), int(c["width"]), int(c["num_frames"])) for c in cases).most_common(
        1
    )[0][0]
    mine = [c for c in cases if (int(c["height"]), int(c["width"]), int(c["num_frames"])) == shape]
    paths = sorted({str(Path(c["video_path"]).resolve()) for c in mine})
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        names = {given: f"{n:05}{Path(given).suffix}" for n, given in enumerate(paths)}
        for given, name in names.items():
            place(Path(given), folder / name)
        with served(folder, latency) as base:
            videos = [paths.index(str(Path(c["video_path"]).resolve())) for c in mine]
            frames = [
                np.linspace(int(c["start_idx"]), int(c["end_idx"]), shape[2]).round().astype(int)
                for c in mine
            ]
            data = fg.ClipDataset(
                [f"{base}/{names[given]}" for given in paths],
                fg.FrameLists(videos, frames),
                height=shape[0],
                width=shape[1],
                transform=with_rss,
            )
            truth = Truth({given: Path(given) for given in paths})

            def true_frames(clip: int) -> np.ndarray[Any, Any]:
                return truth.frames(paths[videos[clip]], frames[clip].tolist(), shape[:2])

            yield data, true_frames, shape[:2], 4


def as_table(found: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    lines = [
        "| latency ms | workers | reader | samples/s | p50 ms | p95 ms | p99 ms | batches | requests a batch | bytes a batch | RSS MB each | exact |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        exact = "yes" if row["exact"] else f"no: {row['mean_difference']}, {row['max_difference']}"
        lines.append(
            f"| {row['latency_ms']:g} | {row['workers']} | {row['reader']} | {row['samples_per_s']} | {row['p50_ms']} | {row['p95_ms']} "
            f"| {row['p99_ms']} | {row['batches']} | {row['requests_per_batch']} | {row['bytes_per_batch']:,} "
            f"| {', '.join(map(str, row['rss_mb_of_each']))} | {exact} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Run the grid and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--media", type=Path, default=Path("bench-media"))
    parser.add_argument("--cases", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--render", action="store_true", help="print the table of what --out holds, and run nothing"
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2, 4])
    parser.add_argument("--latency-ms", type=float, nargs="+", default=[0, 20, 50, 100])
    parser.add_argument("--batches", type=int, default=40)
    given = parser.parse_args()
    if given.render:
        print(as_table(json.loads(given.out.read_text())))
        return 0
    readers = ["fluxon_gop", "fluxon_gop without look-ahead", "torchcodec, 1 MiB reads"]
    try:
        import torchcodec.decoders  # noqa: F401
    except (ImportError, RuntimeError):
        readers.pop()
    rows = []
    for latency in given.latency_ms:
        opened = cases_data(given.cases, latency) if given.cases else default_data(given.media, latency)
        with opened as (data, true_frames, size, batch_size):
            for workers in given.workers:
                for reader in readers:
                    # A run of the slow one is as long, not as many batches.
                    count = given.batches if reader.startswith("fluxon") else max(given.batches // 4, 4)
                    count = min(count, len(data) // batch_size - 2 * max(workers, 1))
                    if count < 1:
                        parser.error(f"{len(data)} clips are too few for {workers} workers")
                    figures, kept = run(reader, data, size, batch_size, workers, count)
                    got = [frames for _, batch in kept for frames in batch]
                    wanted = [true_frames(clip) for clips, _ in kept for clip in clips]
                    row = {"latency_ms": latency, "workers": workers, **figures, **compare(got, wanted)}
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    given.out.write_text(
        json.dumps(
            {"about": about("fluxon-gop", "av", "torch", "numpy", "obstore"), "rows": rows}, indent=1
        )
    )
    return 0 if all(row["exact"] for row in rows if row["reader"].startswith("fluxon")) else 1


if __name__ == "__main__":
    sys.exit(main())
