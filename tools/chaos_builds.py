"""Kill index builds with SIGKILL at seeded moments, and hold what the resumed build leaves against an undisturbed one.

    python tools/chaos_builds.py --kills 100 --seed 5

Chains of five: a build into a new table is killed at a random moment, then the same command, killed again, and so on; the
last one runs to its end. After each kill the table is opened and read: every row whole, no key twice. At the end its rows are
the undisturbed build's (but for where the files are served), its failures too. Lance and Arrow tables, one process and two;
files over HTTP with latency; commits of few rows, so that many moments lie in one.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fluxon_gop as fg  # noqa: E402
from fluxon_gop.encode import Recipe, numbered_picture, write_video  # noqa: E402
from fluxon_gop.failed_videos import FailedVideos  # noqa: E402
from fluxon_gop.table_build import build_table  # noqa: E402
from tools.bench_server import place  # noqa: E402
from tools.range_server import RangeServer  # noqa: E402

PROGRAM = """
import sys
import fluxon_gop.table_build as build
build.COMMIT_ROWS, build.CHUNK = 12, 16
from fluxon_gop.cli import main
print("ready", flush=True)
sys.exit(main(sys.argv[1:]))
"""
LONGEST = 1.6
"""Seconds within which a build is killed."""


def contents(uri: str, base: str) -> list[dict[str, Any]]:
    """Return a table's rows by the file's name, without what tells the server and its etags apart."""
    with fg.IndexTable.open(uri, create=True) as table:
        rows = table.encoded(table.keys()).to_pylist()
    for row in rows:
        row["uri"] = row["uri"].removeprefix(base)
        row["row_checksum"] = row["etag"] = row["mtime_ns"] = None
    return sorted(rows, key=lambda row: str(row["uri"]))


def check(uri: str) -> int:
    """Read a table as it was left; return its rows. Raises AssertionError where one is broken or there twice."""
    with fg.IndexTable.open(uri, create=True) as table:
        keys = table.keys()
        assert len(keys) == len(table) == len(set(keys)) == table.encoded(keys).num_rows, (
            f"{uri}: keys twice"
        )
        assert all(isinstance(row, fg.VideoIndex) for row in table.lookup(keys)), f"{uri}: a row is broken"
        return len(keys)


def campaign(kills: int, seed: int, videos: int = 120) -> dict[str, Any]:
    """Run chains of killed builds; return what was seen."""
    started = time.monotonic()
    told: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "videos"
        folder.mkdir()
        for n, options in enumerate(({"g": "12"}, {"g": "2", "bf": "0"}, {"g": "30"})):
            recipe = Recipe(options={"preset": "ultrafast", **options})
            one = Path(temporary) / f"{n}.mp4"
            write_video(one, (numbered_picture(k, 64, 48) for k in range(30 + n)), recipe)
            for copy in range(n, videos, 3):
                place(one, folder / f"{copy:04}.mp4")
        (folder / "bad.mp4").write_bytes(b"no video at all")
        whole = str(Path(temporary) / "whole.lance")
        build_table([str(folder)], fg.IndexTable.open(whole, create=True))
        wanted = contents(whole, f"{folder}/")
        chain = 0
        while told["kills"] < kills:
            draw = random.Random(f"{seed} {chain}")
            kind = ("lance", "arrow")[chain % 2]
            uri = str(Path(temporary) / f"{chain}.{kind}")
            with RangeServer(folder, latency_s=0.02) as server:
                names = Path(temporary) / f"{chain}.txt"
                names.write_text("\n".join(server.url(path.name) for path in sorted(folder.iterdir())))
                command = [sys.executable, "-c", PROGRAM, "index", "build", f"@{names}", "--to", uri]
                command += ["--processes", str(draw.choice([1, 1, 2]))]
                for _ in range(min(5, kills - told["kills"])):
                    with subprocess.Popen(
                        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                    ) as process:
                        assert process.stdout is not None
                        process.stdout.readline()
                        time.sleep(draw.uniform(0, LONGEST))
                        told["killed under way"] += process.poll() is None
                        process.send_signal(signal.SIGKILL)
                    told["kills"] += 1
                    told["rows found after kills"] += check(uri)
                done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
                assert done.returncode == 1, done.stderr
                assert contents(uri, server.url("")) == wanted, f"{uri}: not the undisturbed table"
                assert [failure.error_class for failure in FailedVideos(uri).all()] == ["NotMp4Error"]
            told[f"chains, {kind}"] += 1
            chain += 1
    return {**told, "videos": videos, "seconds": round(time.monotonic() - started)}


def main() -> int:
    """Run the campaign and print what was seen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=5)
    given = parser.parse_args()
    print(json.dumps(campaign(given.kills, given.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
