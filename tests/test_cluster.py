"""Clients, agents and the shared KV while all are tormented: a seeded sample, and with --full all of it."""

from __future__ import annotations

import pytest

from tools.chaos_cluster import campaign


@pytest.mark.timeout(600)
def test_a_sample_of_a_tormented_cluster():
    """Exact or a typed error, nothing beyond its deadline."""
    seen = campaign(processes=2, batches=25, seed=5, videos=6)
    assert seen["held"], seen
    assert seen["outcomes"].get("exact", 0) > 25


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_whole_campaign():
    """Eight clients of two hundred batches."""
    seen = campaign(processes=8, batches=200, seed=13)
    assert seen["held"], seen
