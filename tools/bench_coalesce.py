"""Joining ranges by what requests cost, beside joining none, touching ones, and holes of up to 1 MiB.

``python tools/bench_coalesce.py``: 25 reads of about 25 KB with holes of 40 to 80 KB, at several latencies and
bandwidths, from a server in a process of its own; medians of alternated runs. ``--markdown FILE`` keeps the table.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

import fluxon_gop as fg
from fluxon_gop.plan import MAX_REQUEST_BYTES, gap_for
from fluxon_gop.ranges import ByteRange, as_array, as_ranges, merge, split
from fluxon_gop.sources.range_source import GroupRead

READS = 25
STRATEGIES = ("none", "gap 0", "gap 1 MiB", "ours")


def wanted_ranges(seed: int) -> list[tuple[int, int]]:
    """Return the reads: sizes about 25 KB, holes of 40 to 80 KB."""
    generator = random.Random(seed)
    ranges, at = [], 0
    for _ in range(READS):
        size = generator.randrange(20_000, 30_000)
        ranges.append((at, at + size))
        at += size + generator.randrange(40_000, 80_000)
    return ranges


def timed(
    source: fg.ObjectStoreSource, ranges: list[tuple[int, int]], strategy: str
) -> tuple[float, int, int]:
    """Return seconds, requests and bytes of one wave."""
    started = time.perf_counter()
    if strategy == "none":
        reads = ranges
    else:
        gap = {"gap 0": 0, "gap 1 MiB": 1 << 20}.get(strategy)
        joined = merge(
            as_array([ByteRange(*one) for one in ranges]),
            gap_for(*source.costs, len(ranges)) if gap is None else gap,
        )
        reads = [tuple(one) for one in as_ranges(split(joined, MAX_REQUEST_BYTES))]  # type: ignore[misc]
    futures = source.group.start([GroupRead(source, start, stop) for start, stop in reads])
    nbytes = sum(len(future.result()) for future in futures)
    return time.perf_counter() - started, len(reads), nbytes


def measure(latency_ms: float, mbps: float, runs: int) -> dict[str, tuple[float, int, int]]:
    """Return each strategy's median seconds, requests and bytes."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        (Path(folder) / "a.bin").write_bytes(os.urandom(4 << 20))
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        tool = Path(__file__).with_name("range_server.py")
        command = [sys.executable, str(tool), folder, "--port", str(port), "--latency-ms", str(latency_ms)]
        command += ["--bandwidth-mbps", str(8 * mbps)] if mbps else []
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            url = f"http://127.0.0.1:{port}/a.bin"
            for _ in range(100):
                try:
                    urllib.request.urlopen(url, timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.1)
            source = fg.ObjectStoreSource(url)
            seen: dict[str, list[tuple[float, int, int]]] = {strategy: [] for strategy in STRATEGIES}
            for run in range(runs + 1):
                for strategy in STRATEGIES:
                    outcome = timed(source, wanted_ranges(run), strategy)
                    if run:
                        seen[strategy].append(outcome)
        finally:
            server.terminate()
            server.wait()
    return {
        strategy: (statistics.median(one[0] for one in outcomes), outcomes[-1][1], outcomes[-1][2])
        for strategy, outcomes in seen.items()
    }


def main(argv: list[str] | None = None) -> int:
    """Run the table; 1 where ours takes more than 1.2 times the best."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args(argv)
    lines = ["| latency | bandwidth of a connection | " + " | ".join(STRATEGIES) + " | ours / best |"]
    lines.append("|---" * (len(STRATEGIES) + 3) + "|")
    worst = 0.0
    for latency in (10, 50, 200):
        for mbps in (0, 20):
            seen = measure(latency, mbps, options.runs)
            best = min(seen[strategy][0] for strategy in STRATEGIES[:3])
            ratio = seen["ours"][0] / best
            worst = max(worst, ratio)
            cells = [f"{1e3 * s:.0f} ms, {n} requests, {b / 1e6:.2f} MB" for s, n, b in seen.values()]
            lines.append(
                f"| {latency} ms | {f'{mbps} MB/s' if mbps else 'loopback'} | {' | '.join(cells)} | {ratio:.2f} |"
            )
            print(lines[-1])
    if options.markdown is not None:
        when = f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, {os.cpu_count()} cores"
        head = f"# Joining ranges\n\n`python tools/bench_coalesce.py --runs {options.runs}`, {when}; medians.\n\n"
        options.markdown.write_text(head + "\n".join(lines) + "\n")
    return int(worst > 1.2)


if __name__ == "__main__":
    sys.exit(main())
