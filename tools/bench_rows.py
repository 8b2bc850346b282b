"""Look rows up in a table of a million: opening, 64 keys at a time, and a worker's memory over a thousand batches.

    python tools/bench_rows.py --out rows.json [--rows 1000000] [--table DIR]

Rows are those of real videos (12 of 10 to 60 s, H.264 and HEVC, GOP 2 to 250, some VFR), each under many names. The look-ups are of keys
drawn at random, so that nearly none is in the row cache; the file's pages are in the system's cache ("warm").
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fluxon_gop as fg  # noqa: E402
from fluxon_gop.encode import Recipe, numbered_picture, write_video  # noqa: E402
from fluxon_gop.index_rows import SCHEMA, checksum, encode, rows_of  # noqa: E402
from tools.bench_about import about  # noqa: E402
from tools.bench_clips import resident  # noqa: E402

PART = 20_000


def indexes(folder: Path) -> list[fg.VideoIndex]:
    """Return the indexes of real videos of ordinary lengths."""
    found = []
    for n, (gop, seconds, rate) in enumerate(
        [(2, 10, 15), (12, 20, 25), (30, 20, 30), (60, 20, 30), (60, 60, 30), (250, 60, 25)]
    ):
        for codec in ("libx264", "libx265"):
            options = {"preset": "ultrafast", "g": str(gop)}
            if codec == "libx265":
                options = {"preset": "ultrafast", "x265-params": f"keyint={gop}:log-level=none"}
            path = folder / f"{n}-{codec}.mp4"
            times = [k * 2 + (k % 3 == 0) for k in range(seconds * rate)] if n == 1 else None
            recipe = Recipe(
                codec=codec,
                rate=rate * 2 if times else rate,
                options=options,
                tag="hvc1" if codec == "libx265" else None,
            )
            write_video(
                path, (numbered_picture(k, 96, 64) for k in range(seconds * rate)), recipe, times=times
            )
            found.append(fg.build_index(path))
    return found


def key_of(number: int) -> str:
    """Return the address of a row."""
    return f"s3://robots/site-{number % 37:02}/episode_{number:09}/camera_front.mp4"


def make(folder: Path, rows: int) -> str:
    """Write the table."""
    uri = str(folder / "million.lance")
    table = fg.IndexTable.open(uri, create=True)
    found = indexes(folder)
    pattern = encode([(key_of(n), index) for n, index in enumerate(found)])
    templates = rows_of(pattern)
    for start in range(0, rows, PART):
        count = min(PART, rows - start)
        places = pa.array((np.arange(start, start + count) % len(found)).tolist(), pa.int64())
        part = pattern.take(places)
        keys = [key_of(n) for n in range(start, start + count)]
        sums = [
            checksum({**templates[n % len(found)], "uri": key})
            for n, key in zip(range(start, start + count), keys, strict=True)
        ]
        part = part.set_column(0, SCHEMA.field("uri"), pa.array(keys, pa.string()))
        part = part.set_column(len(SCHEMA) - 1, SCHEMA.field("row_checksum"), pa.array(sums, pa.string()))
        table.write(part, part.slice(0, 0))
    started = time.perf_counter()
    table.maintain()
    print(f"maintained in {time.perf_counter() - started:.1f} s", file=sys.stderr)
    return uri


def main() -> int:
    """Measure and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--table", type=Path, help="keep the table there, and use it where it is")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.table or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        uri = str(folder / "million.lance")
        if not Path(uri).exists():
            make(folder, given.rows)
        files = [file for fragment in lance.dataset(uri).get_fragments() for file in fragment.data_files()]
        size = sum(file.file_size_bytes or 0 for file in files)
        opened = []
        for _ in range(5):
            started = time.perf_counter()
            table = fg.IndexTable.open(uri)
            count = len(table)
            opened.append(time.perf_counter() - started)
        rng = np.random.default_rng(3)
        seconds, held = [], []
        table = table.with_cache(16 << 20)
        for batch in range(1000):
            keys = [key_of(n) for n in rng.integers(0, count, 64).tolist()]
            started = time.perf_counter()
            rows = table.lookup(keys)
            seconds.append(time.perf_counter() - started)
            assert all(isinstance(row, fg.VideoIndex) for row in rows)
            if batch % 100 == 99:
                held.append(resident()["VmRSS"] >> 20)
    told: dict[str, Any] = {
        "rows": count,
        "bytes_per_row": round(size / count),
        "open_ms": round(statistics.median(opened) * 1e3, 2),
        "lookup_ms": {
            "first": round(seconds[0] * 1e3, 1),
            "median": round(statistics.median(seconds[20:]) * 1e3, 2),
            "p95": round(float(np.percentile(seconds[20:], 95)) * 1e3, 2),
        },
        "rss_mb_every_100_batches": held,
    }
    print(json.dumps(told))
    if given.out is not None:
        given.out.write_text(json.dumps({"about": about("pylance"), **told}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
