"""Half-open byte ranges and the arithmetic on many of them.

Pure. A single range is a :class:`ByteRange`; many ranges are one int64 array of shape (n, 2)
whose rows are ``[start, stop)`` in absolute file bytes.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


class ByteRange(NamedTuple):
    """``[start, stop)`` in absolute file bytes."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self.stop - self.start


def as_array(ranges: list[ByteRange] | tuple[ByteRange, ...]) -> Int64Array:
    """Return the ranges as an (n, 2) int64 array."""
    return np.array(ranges, dtype=np.int64).reshape(-1, 2)


def as_ranges(array: Int64Array) -> tuple[ByteRange, ...]:
    """Return an (n, 2) array as byte ranges of Python ints."""
    return tuple(ByteRange(int(start), int(stop)) for start, stop in array)


def total_bytes(array: Int64Array) -> int:
    """Return the sum of the sizes."""
    return int((array[:, 1] - array[:, 0]).sum()) if len(array) else 0


def merge(array: Int64Array, gap: int = 0) -> Int64Array:
    """Return sorted, disjoint ranges that cover ``array``, joined across holes of up to ``gap`` bytes.

    O(n log n), vectorised. Empty ranges are dropped. ``gap=0`` joins only what touches or overlaps.
    """
    array = array[array[:, 1] > array[:, 0]]
    if len(array) <= 1:
        return array.copy()
    starts = array[:, 0]
    if np.any(starts[1:] < starts[:-1]):
        array = array[np.argsort(starts, kind="stable")]
    reach = np.maximum.accumulate(array[:, 1])
    first = np.concatenate(([True], array[1:, 0] > reach[:-1] + gap))
    begin = np.flatnonzero(first)
    last = np.concatenate((begin[1:] - 1, [len(array) - 1]))
    return np.stack((array[begin, 0], reach[last]), axis=1)


def subtract(array: Int64Array, held: Int64Array) -> Int64Array:
    """Return what of ``array`` (merged) lies outside ``held`` (merged): what is still to be fetched."""
    if not len(held) or not len(array):
        return array
    pieces: list[tuple[int, int]] = []
    for start, stop in array.tolist():
        at = start
        first = int(np.searchsorted(held[:, 1], start, side="right"))
        for held_start, held_stop in held[first:].tolist():
            if held_start >= stop:
                break
            if held_start > at:
                pieces.append((at, held_start))
            at = max(at, held_stop)
        if at < stop:
            pieces.append((at, stop))
    return np.array(pieces, dtype=np.int64).reshape(-1, 2)


def split(array: Int64Array, max_size: int) -> Int64Array:
    """Return the ranges cut into pieces of at most ``max_size`` bytes, near equal within one range."""
    sizes = array[:, 1] - array[:, 0]
    if not len(array) or int(sizes.max()) <= max_size:
        return array
    pieces: list[tuple[int, int]] = []
    for start, stop in array[sizes > 0].tolist():
        count = -(-(stop - start) // max_size)
        edges = [start + (stop - start) * i // count for i in range(count + 1)]
        pieces.extend(pairwise(edges))
    return np.array(pieces, dtype=np.int64).reshape(-1, 2)
