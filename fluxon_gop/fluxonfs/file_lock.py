"""Locks between the processes of a node: ranges of a file, let go of when their owner ends, by whatever end.

Open file description locks: each object is an owner of its own, in whatever thread. Source: Linux, fcntl(2).
"""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress
from typing import Self

from fluxon_gop import forks

_SET = getattr(fcntl, "F_OFD_SETLK", None)
_SET_WAIT = getattr(fcntl, "F_OFD_SETLKW", None)


class FileLock:
    """One owner of locks on numbers from 0 below 2**62; ``close`` lets go of all."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open, or make, the file.

        Raises:
            OSError: it cannot be opened.
        """
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: close its copy, which would keep the parent's locks."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def try_lock(self, number: int) -> bool:
        """Lock a number where nobody else holds it, and return whether it is held now.

        True also where the file system has no such locks: then nobody is held back.
        """
        try:
            self._set(_SET, fcntl.F_WRLCK, number, 1)
        except BlockingIOError:
            return False
        except PermissionError:
            # POSIX allows EACCES for EAGAIN.
            return False
        except OSError:
            return True
        return True

    def lock(self, number: int) -> None:
        """Wait for a number; hold it briefly."""
        self._set(_SET_WAIT, fcntl.F_WRLCK, number, 1)

    def _set(self, command: int | None, kind: int, number: int, length: int) -> None:
        if command is None:
            return
        wanted = struct.pack("hhqqi0q", kind, os.SEEK_SET, number, length, 0)
        fcntl.fcntl(self._descriptor, command, wanted)

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
                self._set(_SET, fcntl.F_UNLCK, 0, 0)
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()
