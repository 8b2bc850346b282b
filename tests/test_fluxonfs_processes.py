"""Many processes on one disk tier: a seeded sample of the campaign in tools/chaos_pieces.py, and with --full all of it."""

from __future__ import annotations

import pytest

from tools.chaos_pieces import campaign


def _assert_held(seen, batches: int) -> None:
    undisturbed, disturbed = seen["undisturbed"], seen["disturbed"]
    assert {"exact": batches} == undisturbed["outcomes"]
    assert 0 == undisturbed["pieces fetched twice"] < undisturbed["media requests"]
    assert (batches, 0, False) == (
        disturbed["batches"],
        disturbed["processes that failed"],
        disturbed["hung"],
    )
    assert "WRONG" not in disturbed["outcomes"]
    assert seen["held"], seen


@pytest.mark.timeout(900)
def test_processes_share_a_disk_tier_that_is_tormented_and_are_killed():
    """Undisturbed: exact, each piece fetched once by all together. Tormented and killed: exact or a typed error."""
    _assert_held(campaign(processes=3, batches=20, seed=11, videos=8, kills=0.4), 60)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_eight_processes_of_two_hundred_batches():
    """The whole campaign: 8 processes, 200 random batches each."""
    _assert_held(campaign(processes=8, batches=200, seed=7), 1600)
