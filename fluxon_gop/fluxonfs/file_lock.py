"""Locks between the processes of a node: numbers in a file, let go of when their owner ends, by whatever end.

Open file description locks: each object is an owner of its own, in whatever thread. Source: Linux, fcntl(2). Where
there are none, nobody is held back.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from contextlib import suppress
from typing import Self

from fluxon_gop import forks

_SET = getattr(fcntl, "F_OFD_SETLK", None)
_PAUSES = (0.0005, 0.01)


class FileLock:
    """One owner of locks on numbers from 0 below 2**62; ``close`` lets go of all."""

    def __init__(self, path: str, *, folder: int | None = None) -> None:
        """Open, or make, the file; ``folder``: the descriptor of the folder that ``path`` is in.

        Raises:
            OSError: it cannot be opened.
        """
        self._descriptor = -1
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._descriptor = os.open(path, flags, 0o600, dir_fd=folder)
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: close its copy, which would keep the parent's locks."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    @property
    def is_named(self) -> bool:
        """Whether the file still has a name; one that was deleted keeps nobody out."""
        return os.fstat(self._descriptor).st_nlink > 0

    def try_lock(self, number: int) -> bool:
        """Lock a number where nobody else holds it, and return whether it is free for this owner now."""
        try:
            self._set(fcntl.F_WRLCK, number, 1)
        except (BlockingIOError, PermissionError):
            # POSIX allows EACCES for EAGAIN.
            return False
        except OSError:
            # A file system without such locks.
            return True
        return True

    def lock(self, number: int, seconds: float) -> bool:
        """Wait for a number for up to ``seconds``, and return whether it came."""
        until = time.monotonic() + seconds
        pause, longest = _PAUSES
        while not self.try_lock(number):
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return True

    def unlock(self, number: int) -> None:
        """Let go of one number."""
        with suppress(OSError):
            self._set(fcntl.F_UNLCK, number, 1)

    def _set(self, kind: int, number: int, length: int) -> None:
        if _SET is not None:
            fcntl.fcntl(
                self._descriptor, _SET, struct.pack("hhqqi0q", kind, os.SEEK_SET, number, length, 0)
            )

    def read(self, size: int) -> bytes:
        """Return the first bytes of the file."""
        return os.pread(self._descriptor, size, 0)

    def write(self, data: bytes) -> None:
        """Write the first bytes of the file."""
        os.pwrite(self._descriptor, data, 0)

    def close(self) -> None:
        """Let go of everything; harmless a second time."""
        if self._descriptor >= 0:
            with suppress(OSError):
                # Closing alone would leave the locks with a copy that a child was just forked with.
                self._set(fcntl.F_UNLCK, 0, 0)
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def __del__(self) -> None:
        """Close what was forgotten."""
        self.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()
