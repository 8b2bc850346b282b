"""What the tests of FluxonFS share: a small export of real videos, its truth, and sums of counters."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from fluxon_gop.fluxonfs import FluxonFsCache, FluxonFsExport, FluxonFsPatcher, FluxonFsVideoReadRequest

HEIGHT, WIDTH = 96, 128
PIECE = 4096
NAMES = ("train-videos", "a/b/sample.mp4")


def patcher(root: Path | str, *, cache: dict[str, Any] | None = None, **more: Any) -> FluxonFsPatcher:
    """Return a patcher with one export, ``train-videos``; ``more`` goes to the export or to the patcher."""
    own = {name: more.pop(name) for name in ("request_identity", "users", "index") if name in more}
    export = FluxonFsExport("train-videos", str(root), **more)
    return FluxonFsPatcher([export], cache=FluxonFsCache(**{"piece_bytes": PIECE} | (cache or {})), **own)


def opened(one: FluxonFsPatcher, relpath: str = NAMES[1], **more: Any):
    """Open a reader of a video of the export, at its own size."""
    size = {"height": HEIGHT, "width": WIDTH, "num_threads": 1}
    return one.open_video_reader(**{"export_name": NAMES[0], "relpath": relpath} | size | more)


def request(relpath: str = NAMES[1], indices=(0, 8, 16, 24), **more: Any) -> FluxonFsVideoReadRequest:
    """Return a request for frames of a video of the export, at its own size."""
    fields = {"export_name": NAMES[0], "height": HEIGHT, "width": WIDTH, "num_threads": 1}
    return FluxonFsVideoReadRequest(**fields | {"relpath": relpath, "indices": indices} | more)


def totals(results) -> Counter[str]:
    """Return the sums of the results' reader stats."""
    sums: Counter[str] = Counter()
    for result in results:
        sums.update(result.reader_stats)
    return sums


def same(results, wanted) -> bool:
    """Return whether each result has exactly these pictures."""
    return all(np.array_equal(r.array, w) for r, w in zip(results, wanted, strict=True))
