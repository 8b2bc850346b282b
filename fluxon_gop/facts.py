"""What the command line tells of a video, a table, a plan, a build: plain values, ready for JSON."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from fluxon_gop.batch_plan import BatchPlan
from fluxon_gop.errors import IndexMissingError, IndexTableError, StaleIndexError
from fluxon_gop.index_build import Built
from fluxon_gop.index_table import Damaged, IndexTable
from fluxon_gop.model import Verdict, VideoIndex
from fluxon_gop.ranges import Int64Array
from fluxon_gop.sources import open_source

LOOK_UP_ROWS = 128
"""Rows that ``table_facts`` holds at once."""


def outcome(built: Built) -> dict[str, Any]:
    """Return one video's line of a build."""
    index, error = built.index, built.error
    return {
        "uri": built.uri,
        "status": "skipped" if built.skipped else "failed" if error else "built",
        "frames": None if index is None or index.container_reason else index.num_frames,
        "gops": None if index is None else len(gop_lengths(index)),
        "requests": built.stats.total_requests,
        "bytes": built.stats.total_bytes,
        "error": None if error is None else {"class": type(error).__name__, "message": one_line(error)},
    }


def video_facts(uri: str, index: VideoIndex) -> dict[str, Any]:
    """Return what ``index show`` tells of one video."""
    lengths = gop_lengths(index)
    verdicts = Counter(index.verdicts.tolist())
    seconds = (index.end_ticks - int(index.frame_pts[0])) / index.timescale if index.num_frames else 0.0
    return {
        "uri": uri,
        "codec": index.codec or index.fourcc,
        "height": index.height,
        "width": index.width,
        "frames": index.num_frames,
        "frames_certain": index.container_reason is None,
        "seconds": round(seconds, 6),
        "fps": round(index.average_fps, 6),
        "gops": {
            "count": len(lengths),
            "min": int(lengths.min()) if len(lengths) else 0,
            "median": float(np.median(lengths)) if len(lengths) else 0.0,
            "max": int(lengths.max()) if len(lengths) else 0,
        },
        "key_samples": {
            "proven": verdicts[Verdict.PROVEN] + verdicts[Verdict.PROVEN_TRAILING],
            "decoded": verdicts[Verdict.DECODED] + verdicts[Verdict.DECODED_TRAILING],
            "unchecked": verdicts[Verdict.UNCHECKED],
            "refused": verdicts[Verdict.REFUSED],
        },
        "path": "packet" if index.container_reason is None else "container",
        "reason": index.container_reason,
        "index_bytes": index.nbytes,
    }


def gop_lengths(index: VideoIndex) -> Int64Array:
    """Return the samples of each GOP: an entry point up to the next one; the stream's start is one."""
    first, stop = index.stream
    later = index.key_samples[(index.verdicts != Verdict.REFUSED) & (index.key_samples > first)]
    entries = np.concatenate(([first], later[later < stop]))
    return np.diff(np.append(entries, stop)) if stop > first else np.zeros(0, np.int64)


def row_of(table: IndexTable, video: str) -> VideoIndex:
    """Return the table's index of a video, held against the file's version."""
    source = open_source(video)
    try:
        row = table.lookup([source.name])[0]
        if row is None:
            text = (
                f"{table.uri}: no row for {source.name}; add it with: fluxon-gop index build "
                f"{source.name} --to {table.uri} (what is no MP4 needs none)"
            )
            raise IndexMissingError(text, key=source.name)
        if not isinstance(row, VideoIndex):
            what = "is damaged" if isinstance(row, Damaged) else "has the container's claims only"
            text = f"{table.uri}: the row of {source.name} {what}; build it again"
            raise IndexTableError(text, key=source.name)
        if not row.signature.fits(source.signature):
            text = (
                f"{table.uri}: the row of {source.name} is of another version of the file; build it again"
            )
            raise StaleIndexError(text, key=source.name)
        return row
    finally:
        source.close()


def table_facts(table: IndexTable) -> dict[str, Any]:
    """Return what ``index show`` tells of a table."""
    keys = table.keys()
    paths, reasons, frames = Counter[str](), Counter[str](), 0
    for start in range(0, len(keys), LOOK_UP_ROWS):
        for row in table.lookup(keys[start : start + LOOK_UP_ROWS]):
            if not isinstance(row, VideoIndex):
                paths["damaged" if isinstance(row, Damaged) else "claims only"] += 1
                continue
            frames += row.num_frames
            paths["packet" if row.container_reason is None else "container"] += 1
            if row.container_reason is not None:
                reasons[row.container_reason] += 1
    return {
        "table": table.uri,
        "rows": len(keys),
        "frames": frames,
        "paths": {path: {"rows": n, "share": round(n / len(keys), 4)} for path, n in paths.most_common()},
        "reasons": dict(reasons.most_common()),
    }


def plan_facts(plan: BatchPlan) -> dict[str, Any]:
    """Return what ``plan`` tells of a batch."""
    return {
        "waves": plan.waves,
        "requests": plan.requests,
        "bytes": plan.nbytes,
        "over_read": round(plan.over_read, 4),
        "videos": [
            {
                "uri": video.name,
                "frames": video.frames,
                "path": video.plan.path.value if video.plan else None,
                "note": video.note or None,
                "requests": video.requests,
                "bytes": video.nbytes,
                "ranges": [list(r) for r in video.plan.ranges] if video.plan else [],
            }
            for video in plan.videos
        ],
    }


def one_line(error: BaseException) -> str:
    """Return an error's text without line breaks."""
    return " ".join(str(error).split())
