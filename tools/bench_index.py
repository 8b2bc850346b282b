"""Measure building the index of a long file: seconds, peak memory, requests, bytes, and the row's size.

    python tools/bench_index.py                     # 10 hours, 1,080,000 samples
    python tools/bench_index.py --hours 1 --json out.json

The file is really encoded (x264, 16x16, 30 frames a second, GOP 300) and kept in the system's folder for
temporary files for the next run. Timings are printed, never asserted.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import av
import numpy as np

import fluxon_gop as fg
from fluxon_gop import index_rows
from fluxon_gop.encode import Recipe, write_video


def long_video(hours: float, folder: Path) -> Path:
    """Return a file of ``hours`` hours at 30 frames a second, made where it is not there."""
    count = int(hours * 3600 * 30)
    path = folder / f"fluxon-gop-long-{count}.mp4"
    if not path.exists():
        part = path.with_suffix(".part.mp4")
        picture = np.full((16, 16, 3), 90, np.uint8)
        options = {"preset": "ultrafast", "g": "300", "bf": "0", "sc_threshold": "0"}
        write_video(part, (picture for _ in range(count)), Recipe(rate=30, options=options))
        part.replace(path)
    return path


def measure(path: str) -> dict[str, float | int]:
    """Build the index once in this process and return what it took."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    results: dict[str, float | int] = {}
    for check in ("none", "entry-points"):
        source = fg.TracedSource(fg.LocalSource(path))
        started = time.perf_counter()
        index = fg.build_index(source, check=check)
        results[f"seconds_check_{check}"] = round(time.perf_counter() - started, 3)
        results[f"requests_check_{check}"] = len(source.trace.requests)
        results[f"bytes_check_{check}"] = source.trace.nbytes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    row = index_rows.encode([(path, index)])
    return results | {
        "samples": index.num_samples,
        "frames": index.num_frames,
        "gops": len(index.key_samples),
        "moov_bytes": index.moov_range.size,
        "index_bytes_in_memory": index.nbytes,
        "row_bytes_in_arrow": row.nbytes,
        "peak_mib_over_start": round((peak - before) / 1024, 1),
    }


def main() -> None:
    """Run each measurement in a process of its own and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hours", type=float, default=10.0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one)))
        return
    path = long_video(args.hours, Path(tempfile.gettempdir()))
    runs = [
        json.loads(subprocess.check_output([sys.executable, __file__, "--one", str(path)], text=True))
        for _ in range(args.runs)
    ]
    median = {name: float(np.median([run[name] for run in runs])) for name in runs[0]}
    result = {
        "command": " ".join(["python", "tools/bench_index.py", *sys.argv[1:]]),
        "file_bytes": path.stat().st_size,
        "runs": args.runs,
        "median": median,
        "max": {name: max(run[name] for run in runs) for name in runs[0]},
        "python": platform.python_version(),
        "numpy": np.__version__,
        "pyav": av.__version__,
    }
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
