"""What a data set of 21,000,000 windows over 20,000 videos of GOP 2 costs: to make, to pickle, in a worker.

    python tools/bench_clips.py --out clips.json [--videos 20000] [--batches 200]

One video of 1,057 frames (128x96 H.264, GOP 2) under 20,000 names, a row of the index table for each; windows of 8 frames,
one a frame. A worker is a process started by spawn: its resident bytes are taken when it has imported all it needs, when the
data set has come with its start, and after random batches of 8 clips. VmRSS is RssAnon (its own), RssFile (code of
libraries and mapped files, which all processes share) and RssShmem; of RssFile, what libraries hold is told apart. The same clips once more as an explicit list, int64
(clips, 2), in memory and mapped from a file; and for comparison the windows of one of the videos.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pickle
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fluxon_gop as fg  # noqa: E402
from fluxon_gop.encode import Recipe, numbered_picture, write_video  # noqa: E402
from tools.bench_about import about  # noqa: E402
from tools.bench_server import place  # noqa: E402

FRAMES, LENGTH = 1057, 8


def make(folder: Path, videos: int) -> fg.IndexTable:
    """Make the video, its names, and the table."""
    one = folder / "one.mp4"
    recipe = Recipe(options={"g": "2", "bf": "0", "preset": "ultrafast"})
    write_video(one, (numbered_picture(n, 128, 96) for n in range(FRAMES)), recipe)
    index = fg.build_index(one)
    names = [folder / f"bucket-of-robot-episodes/episode_{n:06}/camera_front.mp4" for n in range(videos)]
    for name in names:
        name.parent.mkdir(parents=True)
        place(one, name)
    table = fg.IndexTable.open(folder / "index.lance", create=True)
    for at in range(0, videos, 2000):
        table.append((str(name), index) for name in names[at : at + 2000])
    return table


def resident() -> dict[str, int]:
    """Return this process's resident bytes, all and by kind."""
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in {"VmRSS", "RssAnon", "RssFile", "RssShmem"}:
            found[name] = int(value.split()[0]) << 10
    found["libraries"] = _library_bytes()
    return found


def _library_bytes() -> int:
    """Return the resident bytes of mapped libraries: code of what is imported, paged in where it is first used."""
    total, in_library = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in name and " " in line and not value.strip().endswith("kB"):
            in_library = ".so" in line.rpartition("/")[2]
        elif name == "Rss" and in_library:
            total += int(value.split()[0]) << 10
    return total


class Imports:
    """Unpickled before the data set in a worker: imports all that reading needs, and tells what is resident then."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Measure where it is unpickled."""
        return (_import, ())


def _import() -> dict[str, int]:
    import lance  # noqa: F401
    import torch.utils.data  # noqa: F401

    return resident()


def work(pipe: Connection, imports: Any, data: fg.ClipDataset, batches: int) -> None:
    """In a worker: read, and tell what was added to the imports."""
    told = [resident()]
    rng = np.random.default_rng(1)
    for _ in range(batches):
        samples = data.__getitems__(rng.integers(0, len(data), 8).tolist())
        assert samples[0]["frames"].shape == (LENGTH, 96, 128, 3)
    told.append(resident())
    started, ended = ({name: value - imports[name] for name, value in now.items()} for now in told)
    pipe.send({"imports": imports["VmRSS"], "start_adds": started, "reading_adds": ended})


def in_worker(data: fg.ClipDataset, batches: int) -> dict[str, Any]:
    """Return what a spawned worker's memory grows by, in bytes."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs, Imports(), data, batches))
    process.start()
    found: dict[str, Any] = mine.recv()
    process.join()
    return found


def figures(name: str, make_data: Any, batches: int) -> dict[str, Any]:
    """Return one data set's row."""
    started = time.perf_counter()
    data = make_data()
    made = time.perf_counter() - started
    started = time.perf_counter()
    pickled = pickle.dumps(data)
    took = time.perf_counter() - started
    row = {
        "data_set": name,
        "clips": len(data),
        "construct_s": round(made, 3),
        "pickle_bytes": len(pickled),
        "pickle_ms": round(took * 1e3, 2),
        "clip_table_bytes": data.nbytes,
        "worker": in_worker(data, batches),
    }
    print(json.dumps(row), flush=True)
    return row


def main() -> int:
    """Measure and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--videos", type=int, default=20_000)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        uri = make(folder, given.videos).uri
        rows = [
            figures(
                "one video",
                lambda: fg.ClipDataset(
                    [str(key) for key in fg.IndexTable.open(uri).keys()[:1]],
                    fg.Windows(LENGTH),
                    index=fg.IndexTable.open(uri),
                ),
                given.batches,
            ),
            figures(
                "windows",
                lambda: fg.ClipDataset(fg.IndexTable.open(uri), fg.Windows(LENGTH)),
                given.batches,
            ),
        ]
        windows = FRAMES - LENGTH + 1
        pairs = np.stack(
            [np.repeat(np.arange(given.videos), windows), np.tile(np.arange(windows), given.videos)], axis=1
        )
        rows.append(
            figures(
                "pairs in memory",
                lambda: fg.ClipDataset(fg.IndexTable.open(uri), fg.Pairs(pairs, LENGTH)),
                given.batches,
            )
        )
        np.save(folder / "pairs.npy", pairs)
        mapped = np.load(folder / "pairs.npy", mmap_mode="r")
        rows.append(
            figures(
                "pairs mapped from a file",
                lambda: fg.ClipDataset(fg.IndexTable.open(uri), fg.Pairs(mapped, LENGTH)),
                given.batches,
            )
        )
    if given.out is not None:
        given.out.write_text(
            json.dumps({"about": about("fluxon-gop", "pylance", "torch"), "rows": rows}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
