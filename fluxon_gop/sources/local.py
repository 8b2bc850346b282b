"""A file on a local or mounted file system, read by pread. It works in a forked child."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fluxon_gop import forks
from fluxon_gop.errors import (
    ClosedError,
    ShortReadError,
    SourceError,
    SourceNotFoundError,
    SourcePermissionError,
)
from fluxon_gop.model import Signature
from fluxon_gop.sources.range_source import Buffer, changed, check_range


class LocalSource:
    """One local file. The version is (size, mtime_ns), compared after every read (fstat and stat, no request).

    The file is opened at the first use and stays open; one that is renamed over it meanwhile is another version,
    unless size and mtime_ns are the same.
    """

    survives_a_fork = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Name the file; nothing is opened yet."""
        self._path = os.path.abspath(path)  # noqa: PTH100 - resolve() would follow links
        self._descriptor: int | None = None
        self._signature: Signature | None = None
        self._closed = False
        self._lock = threading.Lock()
        forks.watch(self)

    @property
    def name(self) -> str:
        """The absolute path."""
        return self._path

    @property
    def signature(self) -> Signature:
        """Size and mtime_ns of the file as it was opened."""
        self._open()
        assert self._signature is not None
        return self._signature

    def pin(self, signature: Signature) -> None:
        """Raise SourceChangedError where the file is another version."""
        if not self.signature.fits(signature):
            raise changed(self.name, signature, self.signature)

    def read(self, start: int, stop: int) -> Buffer:
        """Return bytes ``[start, stop)`` by pread."""
        check_range(self.name, start, stop)
        descriptor = self._open()
        try:
            data = os.pread(descriptor, stop - start, start)
            while data and len(data) < stop - start:
                more = os.pread(descriptor, stop - start - len(data), start + len(data))
                if not more:
                    break
                data += more
            # Closed meanwhile, the number may be another file's by now.
            self._check_still(descriptor)
            # After the read: what was written before it or meanwhile shows.
            now = self._version_now(descriptor)
            if now != self._signature:
                assert self._signature is not None
                raise changed(self.name, self._signature, now)
        except SourceError:
            raise
        except OSError as error:
            self._check_still(descriptor)
            text = f"{self.name}: bytes [{start}, {stop}) could not be read: {error.strerror}"
            raise SourceError(text, source=self.name) from error
        if len(data) < stop - start:
            text = f"{self.name}: asked for bytes [{start}, {stop}), got {len(data)}: the file ends there"
            raise ShortReadError(text, source=self.name, start=start, stop=stop, got=len(data))
        return data

    def read_head(self, size: int) -> Buffer:
        """Return the first ``size`` bytes or the whole file."""
        size = min(size, self.signature.size)
        return self.read(0, size) if size else b""

    def after_fork(self) -> None:
        """In a forked child: another thread of the parent may hold the lock for ever."""
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._closed = True
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _version_now(self, descriptor: int) -> Signature:
        """Return the version of the open file, or of another one that has been put in its place."""
        status = os.fstat(descriptor)
        with suppress(OSError):
            # A deleted file is still the version that was opened.
            named = self._named_status()
            if not os.path.samestat(named, status):
                status = named
        return Signature(status.st_size, None, status.st_mtime_ns)

    def _named_status(self) -> os.stat_result:
        """Return the status of what is at the path now."""
        return os.stat(self._path)  # noqa: PTH116 - as it was opened

    def _check_still(self, descriptor: int) -> None:
        with self._lock:
            self._check_open()
            assert self._descriptor == descriptor

    def _check_open(self) -> None:
        if self._closed:
            text = f"{self.name}: the source is closed"
            raise ClosedError(text)

    def _open(self) -> int:
        with self._lock:
            self._check_open()
            if self._descriptor is None:
                self._descriptor = self._open_descriptor()
                self._signature = _signature(self._descriptor)
            return self._descriptor

    def _open_descriptor(self) -> int:
        return open_regular(self._path, self._path)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path; the file is opened again where it is used."""
        return (LocalSource, (self._path,))

    def __del__(self) -> None:
        """Close what a caller forgot."""
        if getattr(self, "_descriptor", None) is not None:
            self.close()

    def __repr__(self) -> str:
        """Show the path."""
        return f"LocalSource({self.name!r})"


def open_regular(path: str, name: str, opener: Callable[[str, int], int] = os.open) -> int:
    """Return a descriptor of the regular file at ``path``; errors call it ``name``."""
    try:
        # A pipe that nobody writes to would block the opening for ever.
        descriptor = opener(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except SourceError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        text = f"{name}: no such file"
        raise SourceNotFoundError(text, source=name) from error
    except PermissionError as error:
        text = f"{name}: permission denied"
        raise SourcePermissionError(text, source=name) from error
    except OSError as error:
        text = f"{name}: cannot be opened: {error.strerror}"
        raise SourceError(text, source=name) from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        text = f"{name}: is {'a directory' if stat.S_ISDIR(mode) else 'no regular file'}, want a file"
        raise SourceError(text, source=name)
    return descriptor


def _signature(descriptor: int) -> Signature:
    status = os.fstat(descriptor)
    return Signature(status.st_size, None, status.st_mtime_ns)
