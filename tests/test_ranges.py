"""The arithmetic on ranges agrees with sets of bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxon_gop.ranges import ByteRange, as_array, as_ranges, merge, split, subtract, total_bytes

RANGES = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda pair: ByteRange(pair[0], sum(pair))),
    max_size=12,
)


def covered(ranges) -> set[int]:
    """Return every byte of the ranges."""
    return {byte for start, stop in ranges for byte in range(start, stop)}


def runs(held: set[int], gap: int = 0) -> list[tuple[int, int]]:
    """Return the stretches of a set of bytes, joined across holes of up to ``gap``."""
    found: list[list[int]] = []
    for byte in sorted(held):
        if found and byte - found[-1][1] <= gap:
            found[-1][1] = byte + 1
        else:
            found.append([byte, byte + 1])
    return [(start, stop) for start, stop in found]


@settings(deadline=None)
@given(RANGES, st.integers(0, 9))
def test_merge_is_the_union_of_bytes(ranges, gap):
    """merge() gives the stretches of the union, sorted and disjoint, joined across holes up to the gap."""
    before = as_array(ranges)
    kept = before.copy()
    assert runs(covered(ranges), gap) == [tuple(r) for r in merge(before, gap).tolist()]
    assert np.array_equal(kept, before), "the caller's array was changed"


@settings(deadline=None)
@given(RANGES, RANGES)
def test_subtract_is_the_difference_of_bytes(ranges, held):
    """subtract() gives the stretches of what is wanted and not held."""
    wanted, have = merge(as_array(ranges)), merge(as_array(held))
    missing = subtract(wanted, have)
    assert runs(covered(ranges) - covered(held)) == [tuple(r) for r in merge(missing).tolist()]
    assert covered(ranges) - covered(held) == covered(missing.tolist())
    assert total_bytes(missing) == len(covered(missing.tolist())), "a byte would be fetched twice"


@settings(deadline=None)
@given(RANGES, st.integers(1, 7))
def test_split_keeps_every_byte_in_small_pieces(ranges, most):
    """split() gives the same bytes in order, no piece over the limit, near equal within one range."""
    whole = merge(as_array(ranges))
    pieces = split(whole, most)
    assert covered(whole.tolist()) == covered(pieces.tolist())
    assert total_bytes(whole) == total_bytes(pieces)
    assert whole.tolist() == merge(pieces).tolist()
    for start, stop in whole.tolist():
        sizes = [b - a for a, b in pieces.tolist() if start <= a < stop]
        assert max(sizes) <= most
        assert max(sizes) - min(sizes) <= 1
        assert len(sizes) == -(-(stop - start) // most), "more pieces than needed"


def test_split_passes_over_an_empty_range():
    """A range without bytes has no pieces and harms no other."""
    ranges = as_array([ByteRange(0, 10), ByteRange(20, 20)])
    assert (ByteRange(0, 5), ByteRange(5, 10)) == tuple(r for r in as_ranges(split(ranges, 5)) if r.size)


@pytest.mark.parametrize("gap", [0, 5])
def test_nothing_stays_nothing(gap):
    """No ranges, or only empty ones, merge, split, subtract and add up to nothing."""
    none = as_array([])
    assert (0, 2) == none.shape == merge(none, gap).shape == split(none, 3).shape
    assert merge(as_array([ByteRange(7, 7)]), gap).shape == (0, 2)
    assert subtract(none, as_array([ByteRange(0, 9)])).shape == (0, 2)
    assert total_bytes(none) == 0
    assert as_ranges(none) == ()


def test_offsets_beyond_four_gigabytes_stay_exact():
    """Ranges at 2**40 and more keep their last bit."""
    far = 1 << 40
    ranges = (ByteRange(far + 3, far + 7), ByteRange(far, far + 3), ByteRange(1, 2))
    assert (ByteRange(1, 2), ByteRange(far, far + 7)) == as_ranges(merge(as_array(ranges)))
    assert ranges == as_ranges(as_array(ranges))
    assert all(type(edge) is int for r in as_ranges(as_array(ranges)) for edge in r)


def test_a_range_knows_its_size():
    """ByteRange is a pair with a size."""
    assert ByteRange(3, 10).size == 7
    assert ByteRange(3, 10) == (3, 10)
