"""What the command line tells of a video, a table, a plan, a build: plain values, ready for JSON."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from fluxon_gop.batch_plan import BatchPlan
from fluxon_gop.build_shards import Outcome
from fluxon_gop.errors import IndexMissingError, IndexTableError, StaleIndexError, one_line
from fluxon_gop.index_table import IndexTable
from fluxon_gop.model import Verdict, VideoIndex
from fluxon_gop.sources import open_source
from fluxon_gop.table_rows import Damaged


def outcome_facts(outcome: Outcome) -> dict[str, Any]:
    """Return one video's line of a build; its status is built, skipped, failed, or failed_before (not tried again)."""
    error = outcome.error
    return {
        "uri": outcome.uri,
        "status": outcome.status,
        "frames": outcome.frames,
        "gops": outcome.gops,
        "requests": outcome.requests,
        "bytes": outcome.nbytes,
        "error": None if error is None else {"class": type(error).__name__, "message": one_line(error)},
    }


def video_facts(uri: str, index: VideoIndex) -> dict[str, Any]:
    """Return what ``index show`` tells of one video."""
    lengths = index.gop_lengths
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
