"""The folder of a disk tier, held open: what is read and written is in a folder that only this user may write into."""

from __future__ import annotations

import os
import threading

from fluxon_gop import forks
from fluxon_gop.errors import SourcePermissionError


class PieceFolder:
    """A folder by descriptor, checked whenever it is opened. Thread-safe."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Name the folder; nothing is opened yet."""
        self.path = os.path.abspath(path)
        self._descriptor = -1
        self._lock = threading.Lock()
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: another thread of the parent may hold the lock for ever."""
        self._lock = threading.Lock()

    def open(self) -> int:
        """Return the folder's descriptor; it is made (mode 0700) where it is not there.

        Raises:
            SourcePermissionError: others may write into it, or it is another user's.
            OSError: it cannot be made or opened.
        """
        with self._lock:
            return self._descriptor if self._descriptor >= 0 else self._open()

    def reopen(self) -> int:
        """Return the descriptor of what is at the path now: the old folder may have been deleted; raises as ``open``."""
        with self._lock:
            old = self._descriptor
            if old >= 0:
                now = os.stat(self.path) if os.path.isdir(self.path) else None
                if now is not None and os.path.samestat(now, os.fstat(old)):
                    return old
                # Another thread may be using it: it is replaced by the new one at its own number.
                fresh = self._opened()
                os.dup2(fresh, old, inheritable=False)
                os.close(fresh)
                return old
            return self._open()

    def _open(self) -> int:
        self._descriptor = self._opened()
        return self._descriptor

    def _opened(self) -> int:
        os.makedirs(self.path, mode=0o700, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        theirs = status.st_uid != os.geteuid()
        if theirs or status.st_mode & 0o022:
            os.close(descriptor)
            why = (
                "is another user's"
                if theirs
                else "may be written into by others (chmod 700 makes it yours)"
            )
            text = f"{self.path}: this folder of cached pieces {why}; want one of your own"
            raise SourcePermissionError(text, source=self.path)
        return descriptor

    def __del__(self) -> None:
        """Close it."""
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
