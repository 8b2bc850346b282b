"""Index many small files: both engines over an S3 server, counts of requests, and throughput beside ffprobe and PyAV.

    python tools/bench_builds.py --out builds.json [--files 10000] [--throughput-files 1000]

The files (24 to 90 frames, 128x96, H.264 and HEVC, some with the movie box in front, some fragmented) lie on SeaweedFS; built
in this process, by two processes and by Ray into a table each, whose rows must be the same; then built once more, which must
read nothing. Throughput is taken over a link with a round trip of 20 ms (``tools/far_link.py``), with TLS and without: ours, ``ffprobe
-show_packets`` and PyAV's demuxer of signed addresses, with equally many requests in flight. With ``--media`` of episodes too (600 frames,
0.85 MB).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import av
import obstore

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fluxon_gop as fg  # noqa: E402
from fluxon_gop.build_shards import LocalEngine  # noqa: E402
from fluxon_gop.encode import Recipe, numbered_picture, write_video  # noqa: E402
from fluxon_gop.table_build import BuildOptions, build_table, engine_of  # noqa: E402
from tools.bench_about import about  # noqa: E402
from tools.bench_server import far  # noqa: E402

RTT_MS = 20.0
AT_ONCE = (1, 8, 16, 32, 128)
"""Requests in flight; a process of a peer has one."""
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


def beside(
    story: str, made: list[Path], folder: Path, files: int, over: Sequence[str], levels: Sequence[int]
) -> list[dict[str, Any]]:
    """Time ours, ffprobe and PyAV over a link with a round trip of 20 ms, plain and with TLS."""
    from tests.agents import certificate
    from tests.seaweed import BUCKET, SeaweedFS

    told = []
    tls = certificate(folder)
    place = folder / f"seaweed-{story.replace(' ', '-')}"
    place.mkdir()
    with SeaweedFS(place, tls) as s3:
        data = [path.read_bytes() for path in made]
        names = [f"far/{n:06}.mp4" for n in range(files)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: s3.put(names[n], data[n % len(data)]), range(files)))
        ports = {"https": s3.tls_port, "http": int(s3.endpoint.rpartition(":")[2])}
        for scheme in over:
            with far(ports[scheme], RTT_MS) as near:
                endpoint = f"{scheme}://127.0.0.1:{near}"
                options = {**s3.options, "endpoint": endpoint, "allow_invalid_certificates": "true"}
                signed = list(obstore.sign(s3.store_at(endpoint), "GET", names, timedelta(hours=6)))
                ours = [f"s3://{BUCKET}/{name}" for name in names]
                for at_once in levels:
                    for row in _race(ours, signed, options, at_once, folder):
                        told.append({"files": story, "over": scheme, "at_once": at_once, **row})
                        print(json.dumps(told[-1]), flush=True)
    return told


def _race(
    ours: list[str], signed: list[str], options: dict[str, Any], at_once: int, folder: Path
) -> Iterator[dict[str, Any]]:
    """Let everyone read as many videos as fit into some seconds, with equally many requests in flight."""

    def build(uris: list[str], processes: int) -> int:
        (folder / "list.txt").write_text("\n".join(uris))
        shutil.rmtree(folder / "raced.lance", ignore_errors=True)
        table = fg.IndexTable.open(folder / "raced.lance", create=True)
        limited = {**options, "max_requests_in_flight": at_once // processes}
        report = build_table(
            [f"@{folder / 'list.txt'}"],
            table,
            BuildOptions(storage_options=limited),
            engine=LocalEngine(processes),
        )
        return report.built

    def many(one: Callable[[str], bool], urls: list[str]) -> int:
        with ThreadPoolExecutor(at_once) as pool:
            return sum(pool.map(one, urls))

    acts: list[tuple[str, list[str], Callable[[list[str]], int]]] = [
        ("fluxon_gop", ours[: 300 * at_once], lambda uris: build(uris, 1)),
        ("fluxon_gop, 2 processes", ours[: 300 * at_once], lambda uris: build(uris, 2)),
        ("ffprobe -show_packets", signed[: min(40 * at_once, 300)], lambda urls: many(_probe, urls)),
        ("PyAV demux", signed[: 300 * at_once], lambda urls: many(_demux, urls)),
    ]
    for name, videos, act in acts:
        if name.endswith("processes") and at_once == 1:
            continue
        started = time.perf_counter()
        done = act(videos)
        took = time.perf_counter() - started
        assert done == len(videos)
        yield {
            "what": name,
            "videos": done,
            "seconds": round(took, 2),
            "videos_per_s": round(done / took, 1),
        }


def _probe(url: str) -> bool:
    command = [shutil.which("ffprobe") or "ffprobe", "-v", "error", "-select_streams", "v", "-show_packets"]
    answer = subprocess.run([*command, url], capture_output=True, check=True)
    return b"[PACKET]" in answer.stdout


def _demux(url: str) -> bool:
    with av.open(url) as container:
        return sum(packet.size > 0 for packet in container.demux(container.streams.video[0])) > 0


def main() -> int:
    """Measure and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--throughput-files", type=int, default=9600)
    parser.add_argument("--at-once", type=int, nargs="*", default=AT_ONCE, help="requests in flight")
    parser.add_argument("--over", nargs="*", default=["https", "http"])
    parser.add_argument("--media", type=Path, help="the benchmarks' videos: episodes of 20 s, 640x360, too")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "made").mkdir()
        made = make(folder / "made")
        throughput = beside("small files", made, folder, given.throughput_files, given.over, given.at_once)
        if given.media is not None:
            episodes = sorted(given.media.glob("of16_*.mp4"))
            throughput += beside(
                "episodes", episodes, folder, given.throughput_files // 8, given.over, given.at_once
            )
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
