"""Local files opened beneath a root: no name, and no symlink swapped meanwhile, leads out of it.

On Linux the kernel resolves the whole path beneath the root (openat2 with RESOLVE_BENEATH: links that stay
beneath are followed). Elsewhere each segment is opened without following links, so that a path with a link
in it is refused.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
from typing import Any

from fluxon_gop.errors import SourceError, SourcePermissionError
from fluxon_gop.sources.local import LocalSource, open_regular

_SYS_OPENAT2 = 437
"""The same number on every architecture but alpha. Source: Linux, scripts/syscall.tbl."""
_NO_MAGICLINKS, _BENEATH = 0x02, 0x08
"""RESOLVE_NO_MAGICLINKS, RESOLVE_BENEATH. Source: Linux, include/uapi/linux/openat2.h."""
_RACES = 64
"""Tries where a rename elsewhere makes the kernel give up (EAGAIN)."""
_O_PATH = getattr(os, "O_PATH", 0)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class BeneathSource(LocalSource):
    """The file ``relpath`` beneath the folder ``root``; opened as the module says, else a :class:`LocalSource`."""

    def __init__(self, root: str, relpath: str) -> None:
        """Name the file; ``relpath`` has passed ``check_relpath``. Nothing is opened yet."""
        super().__init__(f"{root}/{relpath}")
        self._root = root
        self._relpath = relpath

    def _open_descriptor(self) -> int:
        return open_regular(self._relpath, self.name, self._opener)

    def _named_status(self) -> os.stat_result:
        descriptor = self._opener(self._relpath, _O_PATH | os.O_CLOEXEC)
        try:
            return os.fstat(descriptor)
        finally:
            os.close(descriptor)

    def _opener(self, relpath: str, flags: int) -> int:
        try:
            root = os.open(self._root, _O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            text = f"{self._root}: the root of the export cannot be opened: {error.strerror}"
            raise SourceError(text, source=self._root) from error
        try:
            return open_beneath(root, relpath, flags)
        except OSError as error:
            if error.errno not in {errno.EXDEV, errno.ELOOP}:
                raise
            text = f"{self.name}: a symlink leads out of the export, or around in a circle"
            raise SourcePermissionError(text, source=self.name) from error
        finally:
            os.close(root)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle root and relpath; the file is opened again where it is used."""
        return (BeneathSource, (self._root, self._relpath))


def open_beneath(root: int, relpath: str, flags: int) -> int:
    """Return a descriptor of ``relpath`` beneath the folder that ``root`` is a descriptor of.

    Raises:
        OSError: EXDEV or ELOOP where a link leads out; any other as ``os.open``.
    """
    if _has_openat2():
        for _ in range(_RACES):
            try:
                return _openat2(root, relpath, flags)
            except BlockingIOError:
                continue
    return _walk(root, relpath, flags)


def _walk(root: int, relpath: str, flags: int) -> int:
    """Open segment by segment, following no link."""
    *folders, name = relpath.split("/")
    here = os.dup(root)
    try:
        for folder in folders:
            try:
                below = os.open(
                    folder, _O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here
                )
            except NotADirectoryError:
                # What O_DIRECTORY with O_NOFOLLOW says of a link.
                if stat.S_ISLNK(os.stat(folder, dir_fd=here, follow_symlinks=False).st_mode):
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), relpath) from None
                raise
            os.close(here)
            here = below
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=here)
    finally:
        os.close(here)


def _openat2(root: int, relpath: str, flags: int) -> int:
    how = _OpenHow(flags, 0, _BENEATH | _NO_MAGICLINKS)
    assert _libc is not None
    descriptor: int = _libc.syscall(
        _SYS_OPENAT2, root, os.fsencode(relpath), ctypes.byref(how), ctypes.sizeof(how)
    )
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), relpath)
    return descriptor


def _has_openat2() -> bool:
    """Return whether the kernel has the call, and no sandbox forbids it; asked once."""
    global _openat2_works  # noqa: PLW0603 - a fact of the machine
    if _openat2_works is None:
        try:
            os.close(_openat2(_AT_FDCWD, ".", _O_PATH | os.O_CLOEXEC))
        except (OSError, AssertionError):
            _openat2_works = False
        else:
            _openat2_works = True
    return _openat2_works


_AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_openat2_works: bool | None = None
