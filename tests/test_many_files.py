"""Thousands of different videos through one pool: what it holds does not grow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FILES = 2000
PROGRAM = """
import gc, json, os, sys
from pathlib import Path
import fluxon_gop as fg

folder, count = Path(sys.argv[1]), int(sys.argv[2])
sizes = {}

def held():
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))

with fg.VideoReaderPool(max_readers=16) as pool:
    for start in range(0, count, 8):
        paths = [folder / f"{n}.mp4" for n in range(start, start + 8)]
        pool.read_many([fg.VideoReadRequest(path, [3, 40]) for path in paths])
        if start + 8 in (count // 5, count // 2, count):
            sizes[start + 8] = held()
    counts = pool.counts()
print(json.dumps([list(sizes.values()), counts]))
"""


def test_memory_and_descriptors_are_flat(media, tmp_path):
    """2,000 files, 16 readers: as much memory and as many open files at the end as after the first fifth."""
    kinds = ["bframes", "hevc", "av1", "vp9", "fragmented", "mpeg4", "rotated", "opengop"]
    for n in range(FILES):
        (tmp_path / f"{n}.mp4").hardlink_to(media[kinds[n % len(kinds)]])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), str(FILES)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).resolve().parent.parent,
    )
    (early, middle, late), counts = json.loads(done.stdout.splitlines()[-1])
    assert (FILES, 16) == (counts["open_count"], counts["current_readers"])
    assert early[1] == middle[1] == late[1]
    assert late[0] - early[0] < 12 << 20
