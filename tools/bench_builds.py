"""Index many small files: both engines over an S3 server, counts of requests, and throughput beside ffprobe and PyAV.

    python tools/bench_builds.py --out builds.json [--files 10000] [--throughput-files 1000]

The files (24 to 90 frames, 128x96, H.264 and HEVC, some with the movie box in front, some fragmented) lie on SeaweedFS; built
in this process, by two processes and by Ray into a table each, whose rows must be the same; then built once more, which must
read nothing. With ``--media``, throughput is taken of episodes too (600 frames, 0.85 MB). Throughput is taken over loopback HTTP with 20 ms latency: ours, ``ffprobe -show_packets``, and PyAV's demuxer, each
with 128 files at a time.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import av

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fluxon_gop as fg  # noqa: E402
from fluxon_gop.build_shards import LocalEngine  # noqa: E402
from fluxon_gop.encode import Recipe, numbered_picture, write_video  # noqa: E402
from fluxon_gop.table_build import BuildOptions, build_table, engine_of  # noqa: E402
from tools.bench_about import about  # noqa: E402
from tools.bench_server import place, served  # noqa: E402

AT_ONCE = 128
X264 = {"preset": "ultrafast", "g": "12"}
RECIPES = (
    Recipe(options=X264),
    Recipe(options={**X264, "g": "2", "bf": "0"}),
    Recipe(options=X264, container_options={"movflags": "+faststart"}),
    Recipe(options=X264, container_options={"movflags": "frag_keyframe+empty_moov+default_base_moof"}),
    Recipe(
        codec="libx265",
        tag="hvc1",
        options={"preset": "ultrafast", "x265-params": "keyint=12:log-level=none"},
    ),
    Recipe(options=X264, audio=True),
)


def make(folder: Path) -> list[Path]:
    """Make the files whose copies are indexed."""
    made = []
    for n, recipe in enumerate(RECIPES):
        for count in (24, 48, 90):
            path = folder / f"{n}-{count}.mp4"
            write_video(path, (numbered_picture(k, 128, 96) for k in range(count)), recipe)
            made.append(path)
    return made


def rows_of(uri: Path) -> list[dict[str, Any]]:
    """Return a table's rows by key."""
    with fg.IndexTable.open(uri) as table:
        keys = table.keys()
        rows = [
            row
            for at in range(0, len(keys), 1000)
            for row in table.encoded(keys[at : at + 1000]).to_pylist()
        ]
    return sorted(rows, key=lambda row: str(row["uri"]))


def on_s3(made: list[Path], folder: Path, files: int) -> list[dict[str, Any]]:
    """Build the same bucket with each engine, and once more; return what each cost."""
    from tests.seaweed import SeaweedFS

    told, tables = [], []
    (folder / "seaweed").mkdir()
    with SeaweedFS(folder / "seaweed") as s3:
        data = [path.read_bytes() for path in made]
        with ThreadPoolExecutor(8) as pool:
            list(
                pool.map(
                    lambda n: s3.put(f"small/{n % 100:02}/{n:06}.mp4", data[n % len(data)]), range(files)
                )
            )
        options = BuildOptions(storage_options=s3.options)
        for name in ("here", "2 processes", "ray"):
            uri = folder / f"{name.replace(' ', '-')}.lance"
            table = fg.IndexTable.open(uri, create=True)
            engine = {"here": LocalEngine(1), "2 processes": LocalEngine(2)}.get(name) or engine_of(
                "ray", 1, table
            )
            report = build_table(["s3://videos/small/"], table, options, engine=engine)
            again = build_table(["s3://videos/small/"], table, options)
            told.append(
                {
                    "engine": name,
                    "videos": report.built,
                    "failed": sum(report.failed.values()),
                    "seconds": round(report.seconds, 1),
                    "videos_per_s": round(report.built / report.seconds, 1),
                    "requests_per_video": round(report.stats.total_requests / report.built, 3),
                    "bytes_per_video": report.stats.total_bytes // report.built,
                    "second_run_s": round(again.seconds, 1),
                    "second_run_requests": again.stats.total_requests,
                    "second_run_skipped": again.skipped,
                }
            )
            print(json.dumps(told[-1]), flush=True)
            tables.append(rows_of(uri))
    same = all(rows == tables[0] for rows in tables)
    print(json.dumps({"tables are equal": same}), flush=True)
    told.append({"tables_are_equal": same})
    return told


def beside(story: str, made: list[Path], folder: Path, files: int) -> list[dict[str, Any]]:
    """Time ours, ffprobe and PyAV over a server with latency."""
    videos = folder / f"served {story}"
    videos.mkdir()
    for n in range(files):
        place(made[n % len(made)], videos / f"{n:06}.mp4")
    told = []
    with served(videos, 20) as base:
        uris = [f"{base}/{n:06}.mp4" for n in range(files)]
        (folder / "list.txt").write_text("\n".join(uris))

        def ours(processes: int) -> int:
            table = fg.IndexTable.open(folder / f"{story}{processes}.lance", create=True)
            return build_table([f"@{folder / 'list.txt'}"], table, engine=LocalEngine(processes)).built

        def probe(uri: str) -> int:
            command = [
                shutil.which("ffprobe") or "ffprobe",
                "-v",
                "error",
                "-select_streams",
                "v",
                "-show_packets",
                uri,
            ]
            return subprocess.run(command, capture_output=True, check=True).stdout.count(b"[PACKET]") > 0

        def demux(uri: str) -> int:
            with av.open(uri) as container:
                return sum(packet.size > 0 for packet in container.demux(container.streams.video[0])) > 0

        def many(one: Any) -> int:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                return sum(pool.map(one, uris))

        acts: list[tuple[str, Callable[[], int]]] = [
            ("fluxon_gop", lambda: ours(1)),
            ("fluxon_gop, 2 processes", lambda: ours(2)),
            ("ffprobe -show_packets", lambda: many(probe)),
            ("PyAV demux", lambda: many(demux)),
        ]
        for name, act in acts:
            started = time.perf_counter()
            done = act()
            took = time.perf_counter() - started
            told.append(
                {
                    "files": story,
                    "what": name,
                    "videos": done,
                    "seconds": round(took, 2),
                    "videos_per_s": round(done / took, 1),
                }
            )
            print(json.dumps(told[-1]), flush=True)
    return told


def main() -> int:
    """Measure and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--throughput-files", type=int, default=1000)
    parser.add_argument("--media", type=Path, help="the benchmarks' videos: episodes of 20 s, 640x360, too")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "made").mkdir()
        made = make(folder / "made")
        throughput = beside("small", made, folder, given.throughput_files)
        if given.media is not None:
            episodes = sorted(given.media.glob("of16_*.mp4"))
            throughput += beside("episodes", episodes, folder, given.throughput_files // 2)
        engines = on_s3(made, folder, given.files) if given.files else []
    if given.out is not None:
        given.out.write_text(
            json.dumps(
                {
                    "about": about("fluxon-gop", "av", "obstore", "pylance"),
                    "throughput": throughput,
                    "engines": engines,
                },
                indent=1,
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
