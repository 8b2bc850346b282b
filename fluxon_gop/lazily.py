"""A property computed once, without a lock.

``functools.cached_property`` of Python 3.11 holds one lock for each property of a class, and a fork may leave it
locked in the child for ever. Here two threads may both compute a value; one of the two stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")
S = TypeVar("S")


class lazily(Generic[T]):  # noqa: N801 - used as a decorator
    """Compute an attribute at its first use, and keep it in the object's ``__dict__``."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        """Take what computes it."""
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        """Take the attribute's name."""
        self._name = name

    @overload
    def __get__(self, thing: None, owner: type) -> lazily[T]: ...

    @overload
    def __get__(self, thing: S, owner: type[S]) -> T: ...

    def __get__(self, thing: Any, owner: type) -> Any:
        """Return the value, computed where it is not there yet."""
        if thing is None:
            return self
        value = self._compute(thing)
        # Whoever was first wins, so that all see one object.
        return thing.__dict__.setdefault(self._name, value)
