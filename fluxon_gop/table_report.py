"""What a table says of its videos, and what reading them will cost: GOP lengths, a forecast, advice."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np

from fluxon_gop.batch_plan import count_of
from fluxon_gop.index_table import IndexTable
from fluxon_gop.model import VideoIndex
from fluxon_gop.plan import find_spans, span_ranges
from fluxon_gop.ranges import total_bytes
from fluxon_gop.table_rows import Damaged

SAMPLE = 2000
"""Rows that GOP lengths and the forecast are taken from, where a table has more."""
WINDOWS = 4
"""Windows of each video that the forecast plans."""
MUCH = 4.0
"""Pictures decoded for each wanted one, from where on re-encoding is advised."""
_ROWS = 64


def table_facts(table: IndexTable, *, window: int = 16, seed: int = 0) -> dict[str, Any]:
    """Return what ``index show --table`` tells: rows, GOP lengths, shares of paths and why, a forecast, advice.

    Of a table of more than 2,000 rows, that many, drawn by ``seed``, stand for all.

    Args:
        table: of any kind.
        window: frames of a window in a row, at a random place: what the forecast is for.
        seed: of what is drawn.
    """
    count = len(table)
    keys = table.keys()
    draw = random.Random(seed)  # noqa: S311 - a sample is no secret
    if len(keys) > SAMPLE:
        keys = draw.sample(keys, SAMPLE)
    paths, reasons, frames = Counter[str](), Counter[str](), 0
    lengths: list[np.ndarray[Any, Any]] = []
    nbytes = decoded = wanted = tails = 0
    for at in range(0, len(keys), _ROWS):
        for row in table.lookup(keys[at : at + _ROWS]):
            if not isinstance(row, VideoIndex):
                paths["damaged" if isinstance(row, Damaged) else "claims only"] += 1
                continue
            frames += row.num_frames
            tails += row.num_samples > 0 and row.moov_range.start > int(row.sample_offset.min())
            paths["packet" if row.container_reason is None else "container"] += 1
            if row.container_reason is not None:
                reasons[row.container_reason] += 1
                continue
            lengths.append(row.gop_lengths)
            for _ in range(WINDOWS if row.num_frames else 0):
                length = min(window, row.num_frames)
                start = draw.randrange(row.num_frames - length + 1)
                spans = find_spans(row, np.arange(start, start + length))
                nbytes += total_bytes(span_ranges(row, spans))
                decoded += sum(span.last - span.entry + 1 for span in spans)
                wanted += length
    gops = np.concatenate(lengths) if lengths else np.zeros(0, np.int64)
    forecast = {
        "window": window,
        "bytes_per_frame": round(nbytes / wanted) if wanted else None,
        "decoded_per_frame": round(decoded / wanted, 2) if wanted else None,
    }
    return {
        "table": table.uri,
        "rows": count,
        "looked_at": len(keys),
        "frames": frames,
        "gop_lengths": {
            name: int(np.percentile(gops, share, method="nearest")) if len(gops) else 0
            for name, share in (("min", 0), ("median", 50), ("p90", 90), ("max", 100))
        },
        "paths": {path: {"rows": n, "share": round(n / len(keys), 4)} for path, n in paths.most_common()},
        "reasons": dict(reasons.most_common()),
        "forecast": forecast,
        "advice": _advice(forecast, paths, tails, len(keys)),
    }


def _advice(forecast: dict[str, Any], paths: Counter[str], tails: int, count: int) -> list[str]:
    """Return what would make reading cheaper, most first."""
    advice = []
    decoded, window = forecast["decoded_per_frame"], forecast["window"]
    if decoded is not None and decoded > MUCH:
        advice.append(
            f"{decoded:g} pictures are decoded for each wanted one: re-encode with a GOP of about {max(window // 2, 2)} "
            f"(ffmpeg -g {max(window // 2, 2)}) where windows of {window} frames are read"
        )
    if paths["container"]:
        advice.append(
            f"{count_of(paths['container'], 'video')} of {count} go through FFmpeg's demuxer, which is slower; the reasons are "
            "above: most go away by a remux (ffmpeg -c copy -tag:v hvc1 for HEVC, one edit, no fragments), or by a build with --check decode"
        )
    if tails:
        advice.append(
            f"{count_of(tails, 'video')} of {count} have the movie box behind the media: -movflags +faststart saves a request of each "
            "build, and of each read without a row"
        )
    if paths["damaged"] or paths["claims only"]:
        advice.append(
            f"{paths['damaged'] + paths['claims only']} rows are of no use: build them again (index build --rebuild)"
        )
    return advice
