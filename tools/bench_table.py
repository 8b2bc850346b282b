"""Render bench.py's JSON as docs/benchmarks.md, with one plot.

    python tools/bench_table.py bench.json docs/benchmarks.md

The plot (``docs/benchmarks.svg``) needs matplotlib.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

OURS = "fluxon_gop"
BAR = 0.11
INTRODUCTION = """# Benchmarks

The same frames read by this package and by its peers, each story in one run of `tools/bench.py`: {runs} alternated runs,
frame numbers from seed {seed}, made videos (`tools/bench_media.py`). Times are milliseconds of a whole read, opening
included where a story is cold; a run of a story with short reads is the mean of five. *ours / this* is our median over
the peer's: below 1 we are faster. *prepare* is what a reader makes once and keeps beside the video, in milliseconds: our
index row, torchcodec's frame mappings. Rows are in memory; "no row" builds the index at every opening. Where a reader
stands there again with "two threads", all others had one, and decord is left out, since its own threads go on decoding
after it has answered.

Conditions: {date}, {cores} cores of {cpu}, Python {python}, {versions}, PyAV's libavcodec {avcodec}. Local files are in
the page cache; remote ones come from `tools/range_server.py` in a process of its own. Requests and bytes are those of
a cold read, counted in a pass of its own (ours: range reads; torchcodec's: reads of a file-like object; PyAV, decord and
the frame mappings take paths only, and are not counted). Where 16 files are read, ours decodes on both cores, and
torchcodec asks for each file's size, which our rows hold. *bytes / least*: over the bytes from each entry point to the last needed
sample. Peak memory is what opening and three reads add to a process. *exact*, checked on three runs (16 files: one): bit
for bit FFmpeg's frame as PyAV converts it; else the mean and largest difference of a value (resized, other libraries filter otherwise: it is the same frame).

![Our time over each peer's, by story](benchmarks.svg)
"""
COLUMNS = (
    "| reader | median ms | quartiles | ours / this | prepare | requests | depth | bytes | bytes / least | peak MiB | exact |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def row_of(row: dict[str, Any]) -> str:
    """Return a reader's line."""
    if not row["runs"]:
        return f"| {row['peer']} | cannot read it: {row['raised'][:60].replace('|', '/')} |" + " |" * 9
    low, high = row["quartiles_ms"]
    exact = "yes" if row["exact"] else f"no: {row['mean_difference']}, {row['max_difference']}"
    cells = [
        row["peer"],
        f"{row['median_ms']:.2f}",
        f"{low:.2f} to {high:.2f}",
        f"{row['ours_over_this']:.2f}",
        f"{row['prepare_ms']:.1f}" if row.get("prepare_ms", 0) > 0.1 else "",
        _number(row.get("requests")),
        _number(row.get("depth")),
        _number(row.get("bytes")),
        "" if row.get("bytes_over_least") is None else f"{row['bytes_over_least']:.2f}",
        "" if row.get("peak_mib") is None else f"{row['peak_mib']:.0f}",
        exact,
    ]
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def page(result: dict[str, Any]) -> str:
    """Return the page."""
    facts = result["conditions"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    runs = max(row["runs"] for story in result["stories"] for row in story["rows"])
    parts = [
        INTRODUCTION.format(
            runs=runs,
            seed=result["seed"],
            date=facts["date"],
            cores=facts["cores"],
            cpu=facts["cpu"],
            python=facts["python"],
            versions=versions,
            avcodec=facts["ffmpeg of PyAV"],
        )
    ]
    for story in result["stories"]:
        lines = [f"## {story['name']}", "", f"{story['text'][0].upper()}{story['text'][1:]}.", "", COLUMNS]
        lines += [row_of(row) for row in story["rows"]]
        parts.append("\n".join(lines) + "\n")
    lines = [
        "## What an index costs",
        "",
        "Building a row once, key samples checked; reads above have it in memory. torchcodec's exact mode scans the file",
        "at every opening, its frame mappings come from a demuxed file.",
        "",
        "| video | frames | file bytes | ms | requests | bytes read |",
        "|---|---|---|---|---|---|",
    ]
    for cost in result["index"]:
        lines.append(
            f"| {cost['video']} | {cost['frames']:,} | {cost['file_bytes']:,} | {cost['median_ms']:.1f} "
            f"| {cost['requests']} | {cost['bytes']:,} |"
        )
    parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw our median over each peer's, a group of bars a story."""
    import matplotlib as mpl  # type: ignore[import-not-found]

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = OURS
    from matplotlib import pyplot as plt

    stories = result["stories"]
    peers = list(dict.fromkeys(row["peer"] for s in stories for row in s["rows"] if row["peer"] != OURS))
    figure, axes = plt.subplots(figsize=(9, 0.75 * len(stories) + 1))
    for number, peer in enumerate(peers):
        places, widths = [], []
        for place, story in enumerate(stories):
            ratio = next((r.get("ours_over_this") for r in story["rows"] if r["peer"] == peer), None)
            if ratio is not None:
                places.append(place + (number - len(peers) / 2) * BAR)
                widths.append(ratio)
        axes.barh(places, widths, height=BAR * 0.9, label=peer)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(stories)), [story["name"] for story in stories])
    axes.invert_yaxis()
    axes.set_xlabel("our median time over the peer's: left of the line we are faster")
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Read the JSON, write the page and its plot."""
    source, target = (Path(argument) for argument in sys.argv[1:3])
    result = json.loads(source.read_text())
    target.write_text(page(result))
    plot(result, target.with_suffix(".svg"))


if __name__ == "__main__":
    main()
