"""Counters add up, beside and after each other, and go to logs as flat numbers."""

from __future__ import annotations

from fluxon_gop.stats import ReadStats, WaveKind


def _media(requests: int, nbytes: int, depth: int) -> ReadStats:
    stats = ReadStats(depth=depth)
    stats.count_wave(WaveKind.MEDIA, requests, nbytes)
    return stats


def test_calls_one_after_another_add_their_waves():
    """Two batches are two waves; the depth is the deeper one's."""
    total = _media(3, 30, 1)
    total.add(_media(2, 20, 4))
    assert (5, 50, 2, 4) == (
        total.requests[WaveKind.MEDIA],
        total.bytes[WaveKind.MEDIA],
        total.waves[WaveKind.MEDIA],
        total.depth,
    )


def test_videos_of_a_batch_share_their_wave():
    """Two videos side by side are one wave of all their requests."""
    batch = _media(3, 30, 1)
    batch.add_beside(_media(2, 20, 1))
    assert (5, 1) == (batch.requests[WaveKind.MEDIA], batch.waves[WaveKind.MEDIA])


def test_as_dict_is_flat():
    """Each kind of wave has its own keys, and totals hold planned and unplanned reads."""
    stats = _media(3, 30, 1)
    stats.unplanned_requests, stats.unplanned_bytes = 2, 7
    flat = stats.as_dict()
    assert (5, 37, 3, 0) == (
        flat["total_requests"],
        flat["total_bytes"],
        flat["media_requests"],
        flat["index_requests"],
    )
    assert all(isinstance(value, int | float) for value in flat.values())
