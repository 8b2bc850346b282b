"""What planning and bookkeeping of a 16-request batch cost: a batch read whose reads and decoding take no time.

    python tools/bench_books.py [--profile]

The videos are in memory (a read is a view), the decoder's pictures are made up, and calls that would go to threads
are made at once, on this one; what is left is leasing, planning, waves, counters and results. "New pool" looks the rows
up (in memory) and makes 16 readers too. Walking NAL headers and making packets count as decoding here.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fluxon_gop as fg  # noqa: E402
from fluxon_gop.encode import Recipe, numbered_picture, write_video  # noqa: E402
from fluxon_gop.plan import Span  # noqa: E402

VIDEOS = 16
FRAMES = 8
RUNS = 300


class Now:
    """A pool that makes each call at once."""

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Make the call."""
        future: Future[Any] = Future()
        future.set_result(call(*arguments))
        return future


def made_up(_way: Any, span: Span, *_: Any) -> Iterator[tuple[int, None]]:
    """Yield the span's targets without decoding."""
    for target in span.targets:
        yield target, None


def nothing(*_: Any) -> None:
    """Do nothing, faster than a mock would."""


def main() -> None:
    """Time it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", action="store_true", help="print where the time goes, too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video.mp4"
        recipe = Recipe(options={"g": "60", "preset": "ultrafast", "sc_threshold": "0"})
        write_video(path, (numbered_picture(n, 64, 48) for n in range(600)), recipe)
        sources = [fg.MemorySource(path.read_bytes(), f"video {n}") for n in range(VIDEOS)]
        table = fg.IndexTable.open(Path(folder) / "rows.arrow", create=True)
        table.append([(source.name, fg.build_index(source)) for source in sources])
        table.lookup([source.name for source in sources])
    starts = [(37 * n) % 580 for n in range(VIDEOS)]
    requests = [
        fg.VideoReadRequest(source, list(range(start, start + FRAMES)))
        for source, start in zip(sources, starts, strict=True)
    ]
    with (
        mock.patch("fluxon_gop.decoders.decode_span", made_up),
        mock.patch("fluxon_gop.canvas.Canvas.paint", nothing),
        mock.patch("fluxon_gop.threads.io_pool", Now),
        mock.patch("fluxon_gop.threads.decode_pool", Now),
        fg.VideoReaderPool(index=table) as pool,
    ):
        kept = [timed(pool, requests) for _ in range(RUNS)]
        if options.profile:
            with cProfile.Profile() as profile:
                for _ in range(RUNS):
                    pool.read_many(requests)
            pstats.Stats(profile).sort_stats("cumulative").print_stats(30)
        new = []
        for _ in range(RUNS):
            with fg.VideoReaderPool(index=table) as fresh:
                new.append(timed(fresh, requests))
    for name, seconds in (("kept pool", kept), ("new pool", new)):
        low, median, high = (1e3 * value for value in statistics.quantiles(seconds, n=4))
        print(
            f"{name}: {VIDEOS} requests of {FRAMES} frames, {RUNS} runs: median {median:.2f} ms, "
            f"quartiles {low:.2f} to {high:.2f}"
        )


def timed(pool: fg.VideoReaderPool, requests: list[fg.VideoReadRequest]) -> float:
    """Return the seconds of one batch."""
    started = time.perf_counter()
    pool.read_many(requests)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
