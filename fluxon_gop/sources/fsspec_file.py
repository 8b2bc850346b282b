"""Files of any fsspec file system: ``hf://`` and whatever else has no store of its own here.

fsspec is imported at the first use. Its answers carry no version: it is asked for after each call, one request a file.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from fluxon_gop.errors import (
    ForkedProcessError,
    InvalidRequestError,
    ShortReadError,
    SourceError,
    SourceNotFoundError,
    SourcePermissionError,
)
from fluxon_gop.model import Signature
from fluxon_gop.sources.one_call import OneCallGroup, OneCallSource
from fluxon_gop.sources.range_source import Buffer, GroupRead, changed

_VERSION_NAMES = ("ETag", "etag", "e_tag", "md5", "checksum", "last_commit", "blob_id", "generation")
_TIME_NAMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")


class FsspecSource(OneCallSource):
    """One file of an fsspec file system. The version is size with an etag or the like, else with a time.

    A wave over files of one file system is one ``cat_ranges`` call; errors are raised, never taken for bytes.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        """Name the file; nothing is opened yet.

        Args:
            url: ``scheme://...`` of a file system that fsspec knows.
            storage_options: of that file system.
        """
        super().__init__()
        self._url = url
        self._given = dict(storage_options or {})
        self._made: tuple[FsspecGroup, str] | None = None

    @property
    def name(self) -> str:
        """The address without user, password and query."""
        scheme, _, rest = self._url.partition("://")
        authority, slash, path = rest.partition("/")
        if scheme != "hf":
            # There '@' names a revision.
            authority = authority.rpartition("@")[2]
        return f"{scheme}://{authority}{slash}{path.split('?', 1)[0]}"

    @property
    def group(self) -> FsspecGroup:
        """What reads files of this file system together."""
        return self._opened()[0]

    @property
    def signature(self) -> Signature:
        """The pinned or first seen version; one request where nothing was read yet."""
        if self._signature is None:
            self._signature = self.ask()
        return self._signature

    def ask(self) -> Signature:
        """Ask the file system for the version now."""
        self.check_open()
        group, path = self._opened()
        return group.ask(self.name, path)

    @property
    def path(self) -> str:
        """The file in its file system."""
        return self._opened()[1]

    def _opened(self) -> tuple[FsspecGroup, str]:
        if self._made is None:
            self._made = _group_of(self._url, self._given, self.name)
        return self._made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle address and options, credentials in them included: a worker needs them to read."""
        return (FsspecSource, (self._url, self._given))


class FsspecGroup(OneCallGroup):
    """One file system: reads of many of its files are one call."""

    def __init__(self, file_system: Any) -> None:
        """Take an fsspec file system."""
        self._file_system = file_system
        self._pid = os.getpid()

    def ask(self, name: str, path: str) -> Signature:
        """Return the version of a file as it is now."""
        self.check_process(name)
        try:
            self._file_system.invalidate_cache(path)
            return _signature(self._file_system.info(path))
        except Exception as error:  # noqa: BLE001 - file systems raise many kinds
            raise _typed(error, name) from None

    def outcomes(self, reads: Sequence[GroupRead]) -> list[Buffer | BaseException]:
        """Make one call, and where a file fails one call for each."""
        try:
            return list(self._cat(reads))
        except asyncio.CancelledError:
            text = f"{reads[0].source.name}: the file system called the read off"
            return [SourceError(text, source=reads[0].source.name) for _ in reads]
        except Exception as error:  # noqa: BLE001 - each read gets its own file's error
            sources = {id(read.source): read.source for read in reads}
            if len(sources) == 1:
                return [error for _ in reads]
            # One bad file spoils no other's reads.
            by_source = {
                key: iter(self.outcomes([read for read in reads if id(read.source) == key]))
                for key in sources
            }
            return [next(by_source[id(read.source)]) for read in reads]

    def _cat(self, reads: Sequence[GroupRead]) -> list[Buffer]:
        names = [read.source.name for read in reads]
        sources: dict[int, Any] = {id(read.source): read.source for read in reads}
        for source in sources.values():
            source.check_open()
        # Known before the call, so that what comes is held against it.
        for source in sources.values():
            assert source.signature is not None
        stops = [min(read.stop, read.source.signature.size) if read.head else read.stop for read in reads]
        try:
            found = self._file_system.cat_ranges(
                [sources[id(read.source)].path for read in reads],
                [read.start for read in reads],
                stops,
                on_error="raise",
            )
        except Exception as error:  # noqa: BLE001 - file systems raise many kinds
            raise _typed(error, names[0]) from None
        for source in sources.values():
            now = source.ask()
            if not source.signature.fits(now):
                raise changed(source.name, source.signature, now)
        if not isinstance(found, Sequence) or len(found) != len(reads):
            text = f"{names[0]}: the file system answers {len(reads)} reads with something else"
            raise SourceError(text, source=names[0])
        for read, name, stop, data in zip(reads, names, stops, found, strict=True):
            if isinstance(data, Exception):
                raise _typed(data, name)
            if not isinstance(data, bytes | bytearray | memoryview):
                text = f"{name}: the file system answers with a {type(data).__name__}"
                raise SourceError(text, source=name)
            if len(data) != stop - read.start:
                text = (
                    f"{name}: asked for bytes [{read.start}, {stop}), got {len(data)}: the file ends there"
                )
                raise ShortReadError(text, source=name, start=read.start, stop=stop, got=len(data))
        return [data if isinstance(data, bytes) else memoryview(data) for data in found]

    def check_process(self, name: str) -> None:
        """Raise where the file system has a thread of its own, in a forked child."""
        if self._pid != os.getpid() and getattr(self._file_system, "async_impl", False):
            text = (
                f"{name}: read in a forked child of process {self._pid}, where the file system's thread does not "
                "live. Start workers with 'spawn' or 'forkserver'"
            )
            raise ForkedProcessError(text, source=name, parent=self._pid)


_groups: dict[int, FsspecGroup] = {}
_lock = threading.Lock()


def _new_lock() -> None:
    global _lock  # noqa: PLW0603 - in a forked child another thread's lock is held for ever
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)


def _group_of(url: str, options: Mapping[str, Any], name: str) -> tuple[FsspecGroup, str]:
    try:
        import fsspec
    except ImportError:
        text = f"{name}: this scheme is read through fsspec, which is not installed: pip install fsspec"
        raise InvalidRequestError(text) from None
    try:
        file_system, path = fsspec.core.url_to_fs(url, **options)
    except Exception as error:  # noqa: BLE001 - it may quote options, secrets among them
        text = f"{name}: no file system for this address ({type(error).__name__})"
        raise InvalidRequestError(text) from None
    with _lock:
        # fsspec hands out one object for the same options.
        group = _groups.get(id(file_system))
        if group is None:
            group = _groups[id(file_system)] = FsspecGroup(file_system)
        return group, path


def _signature(info: Mapping[str, Any]) -> Signature:
    size = info.get("size")
    if not isinstance(size, int):
        text = "its size is not known"
        raise SourceError(text)
    versions = [str(info[name]) for name in _VERSION_NAMES if info.get(name)]
    etag = hashlib.blake2b("|".join(versions).encode(), digest_size=16).hexdigest() if versions else None
    times = [info[name] for name in _TIME_NAMES if info.get(name)]
    when = times[0] if times else None
    if isinstance(when, datetime):
        when = when.timestamp()
    mtime_ns = int(when * 1e9) if isinstance(when, int | float) else None
    return Signature(size, etag, mtime_ns)


def _typed(error: Exception, name: str) -> SourceError:
    if isinstance(error, SourceError):
        return error
    if isinstance(error, FileNotFoundError):
        return SourceNotFoundError(f"{name}: no such file", source=name)
    if isinstance(error, PermissionError):
        return SourcePermissionError(f"{name}: the file system refuses the read", source=name)
    return SourceError(f"{name}: the file system raises {type(error).__name__}", source=name)
