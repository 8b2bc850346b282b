"""What must be forgotten in a forked child: locks that another thread may hold, threads that are not there.

Objects that own such things ask to be told; each gets ``after_fork()`` in the child, before anything else
runs there.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class ForkAware(Protocol):
    """Something that puts itself right in a forked child."""

    def after_fork(self) -> None:
        """Make new locks; leave alone what belongs to the parent's threads."""
        ...


_watched: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def watch(thing: ForkAware) -> None:
    """Call ``thing.after_fork()`` in every child forked from now on, as long as it lives."""
    _watched.add(thing)


def _tell() -> None:
    for thing in list(_watched):
        thing.after_fork()


os.register_at_fork(after_in_child=_tell)
