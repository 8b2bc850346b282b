"""What the FluxonFS interface takes, checked before anything else happens.

Pure. Stricter than the rest of the package, as FluxonFS's own client is: an int is an ``int``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fluxon_gop.errors import InvalidRequestError

MAX_FRAMES = 1 << 24
"""Of one request."""


def non_empty(name: str, value: Any) -> str:
    """Return a str that is not empty; raises TypeError or InvalidRequestError (a ValueError)."""
    if not isinstance(value, str):
        text = f"{name} must be str, got {type(value).__name__}"
        raise TypeError(text)
    if not value:
        text = f"{name} must be non-empty"
        raise InvalidRequestError(text)
    return value


def positive(name: str, value: Any) -> int:
    """Return an int above 0, no bool and no NumPy integer; raises TypeError or InvalidRequestError."""
    if type(value) is not int:
        text = f"{name} must be int, got {type(value).__name__}"
        raise TypeError(text)
    if value <= 0:
        text = f"{name} must be positive, got {value}"
        raise InvalidRequestError(text)
    return value


def frame_numbers(indices: Any) -> tuple[int, ...]:
    """Return a sequence of int from 0 as a tuple; raises TypeError or InvalidRequestError."""
    if isinstance(indices, str | bytes) or not isinstance(indices, Sequence):
        text = f"indices must be a sequence of int values, got {type(indices).__name__}"
        raise TypeError(text)
    if len_of(indices) > MAX_FRAMES:
        text = "indices names more frames than a video has"
        raise InvalidRequestError(text)
    for value in indices:
        if type(value) is not int:
            text = f"indices must hold int values, got {type(value).__name__}"
            raise TypeError(text)
        if value < 0:
            text = f"indices must be non-negative, got {value}"
            raise InvalidRequestError(text)
    return tuple(indices)


def len_of(indices: Sequence[Any]) -> int:
    """Return the length, also of a range beyond what ``len`` can tell."""
    if isinstance(indices, range):
        return max(0, -(-(indices.stop - indices.start) // indices.step))
    return len(indices)
