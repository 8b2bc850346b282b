"""Counters as FluxonFS names them: flat dicts of int, changes of them, and their split over merged requests.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fluxon_gop.fluxonfs.byte_source import COUNTERS
from fluxon_gop.stats import ReadStats, WaveKind


def reader_stats(stats: ReadStats) -> dict[str, int]:
    """Return what reading cost, all names always there.

    FluxonFS's: ``decode_calls``, ``decode_frames_requested``, ``decode_errors``, ``read_at_*`` (reads asked of the
    byte source, planned ones too), ``page_cache_*`` (of unplanned reads), ``remote_read_*`` (requests to the
    origin). Ours: ``open_us``, ``decode_us`` and ``fetch_us`` (microseconds), waves by kind, planned and unplanned
    reads and their bytes, pieces found or not in each tier (``memory_*``, ``disk_*``, ``kv_*``), pieces that
    another read was fetching already (``shared_reads``), stats asked of the origin, rows that were not used.
    """
    planned_bytes = sum(stats.bytes.values()) - stats.bytes.get(WaveKind.INDEX, 0)
    source = {name: stats.source.get(name, 0) for name in COUNTERS}
    planned = source["planned_reads"]
    return {
        "decode_calls": stats.decode_calls,
        "decode_frames_requested": stats.frames_requested,
        "decode_errors": stats.decode_errors,
        **source,
        "read_at_calls": source["read_at_calls"] + planned,
        "read_at_requested_bytes": source["read_at_requested_bytes"] + planned_bytes,
        "read_at_returned_bytes": source["read_at_returned_bytes"] + planned_bytes,
        "decode_us": int(stats.decode_seconds * 1e6),
        "fetch_us": int(stats.fetch_seconds * 1e6),
        "index_waves": stats.waves.get(WaveKind.INDEX, 0),
        "head_moov_waves": stats.waves.get(WaveKind.HEAD_MOOV, 0),
        "media_waves": stats.waves.get(WaveKind.MEDIA, 0),
        "extension_waves": stats.waves.get(WaveKind.EXTENSION, 0),
        "planned_bytes": planned_bytes,
        "unplanned_reads": stats.unplanned_requests,
        "unplanned_bytes": stats.unplanned_bytes,
        "frames_decoded": stats.frames_decoded,
        "index_builds": stats.index_builds,
        "stale_rows": stats.stale_rows,
        "damaged_rows": stats.damaged_rows,
    }


def checked(stats: Any) -> dict[str, int]:
    """Return a foreign reader's counters; raises TypeError where they are no dict of str to int."""
    if not isinstance(stats, dict):
        text = f"a reader's stats must be dict, got {type(stats).__name__}"
        raise TypeError(text)
    for name, value in stats.items():
        if not isinstance(name, str) or type(value) is not int:
            text = (
                f"a reader's stats must map str to int, got {type(name).__name__} to {type(value).__name__}"
            )
            raise TypeError(text)
    return dict(stats)


def change(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return what was counted between two looks."""
    return {name: value - before.get(name, 0) for name, value in after.items()}


def split(stats: Mapping[str, int], weights: Sequence[int]) -> list[dict[str, int]]:
    """Return each counter's shares by weight, whole numbers that add up to it: largest remainders first.

    Of equal remainders the earlier share is rounded up. Without any weight all goes to the first.
    """
    total = sum(weights)
    if not total:
        weights = [int(n == 0) for n in range(len(weights))]
        total = 1
    parts: list[dict[str, int]] = [{} for _ in weights]
    for name, value in stats.items():
        shares = [value * weight // total for weight in weights]
        remainders = [value * weight % total for weight in weights]
        order = sorted(range(len(weights)), key=lambda n: -remainders[n])
        for n in order[: value - sum(shares)]:
            shares[n] += 1
        for part, share in zip(parts, shares, strict=True):
            part[name] = share
    return parts
