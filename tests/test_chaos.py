"""Seeded faults and swapped files: a sample of tools/chaos.py, and with --full all of it."""

from __future__ import annotations

import pytest

from tools.chaos import schedules, swaps
from tools.chaos_loader import campaign


def test_a_sample_of_fault_schedules():
    """Exact, or a typed error, in time; no thread, reader or lease left behind."""
    seen = schedules(45, 11)
    assert ([], []) == (seen["bad"], seen["threads left"])
    assert seen["outcomes"]["exact"] > 10


def test_a_sample_of_swapped_files():
    """Frames of one version, never of the one that was replaced before the call, or a typed error."""
    seen = swaps(60, 11)
    assert [] == seen["bad"]
    assert any("SourceChangedError" in outcome for outcome in seen["outcomes"])


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_the_whole_campaign():
    """1,000 schedules and 500 swaps."""
    assert [] == schedules(1000, 7)["bad"] + swaps(500, 7)["bad"]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_a_sample_of_epochs_that_are_disturbed():
    """Workers killed, loops left, states taken up: every clip once, in order, every frame exact."""
    pytest.importorskip("torch")
    told = campaign(3, 1)
    assert 3 == told["epochs"]
    assert told["faults"]


@pytest.mark.full
@pytest.mark.timeout(3000)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_all_epochs_that_are_disturbed():
    """60 epochs."""
    told = campaign(60, 11)
    assert told["workers killed"] > 20
    assert told["loops left"] > 20
