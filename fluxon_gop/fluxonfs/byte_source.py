"""One file of an export as a source of bytes, under the identity of whoever opened it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cachetools import LRUCache

from fluxon_gop import forks
from fluxon_gop.deadline import await_result
from fluxon_gop.errors import (
    ClosedError,
    InvalidRequestError,
    ShortReadError,
    SourceChangedError,
    SourceError,
)
from fluxon_gop.fluxonfs.agent_wire import AgentRead
from fluxon_gop.fluxonfs.export import MissPolicy
from fluxon_gop.fluxonfs.file_system import FileSystem, in_export
from fluxon_gop.fluxonfs.piece_cache import PieceCache
from fluxon_gop.fluxonfs.piece_key import FilePieces
from fluxon_gop.fluxonfs.relpath import check_relpath
from fluxon_gop.fluxonfs.users import Identity
from fluxon_gop.model import Signature
from fluxon_gop.ranges import ByteRange
from fluxon_gop.sources.range_source import Buffer, GroupRead, RangeSource, changed, check_range

if TYPE_CHECKING:
    from fluxon_gop.fluxonfs.agent_source import AgentGroup

AVSEEK_SIZE = 0x10000
"""``whence`` that asks for the size. Source: FFmpeg, libavformat/avio.h."""
COUNTERS = (
    "open_us",
    "stat_calls",
    "read_at_calls",
    "read_at_requested_bytes",
    "read_at_returned_bytes",
    "page_cache_hits",
    "page_cache_misses",
    "remote_read_calls",
    "remote_read_bytes",
    "planned_reads",
    "memory_hits",
    "memory_misses",
    "disk_hits",
    "disk_misses",
    "kv_hits",
    "kv_misses",
    "shared_reads",
)
"""What a source counts: microseconds of getting rights and versions; stats asked of the origin; reads asked of
this source and their bytes; pages of unplanned reads; requests to the origin and their bytes; reads that came in
planned waves; pieces by tier; pieces that another read was fetching already."""


class FluxonFsVideoByteSource:
    """Bytes of one version of one file. Thread-safe but for ``seek`` and ``read_packet``, which share a position.

    The right to read and the file's version are got at the first use and renewed every metadata TTL, also where
    everything is in a cache. Planned reads go through ``group``; others through a small cache of pages.
    """

    def __init__(
        self, file_system: FileSystem, export_name: str, relpath: str, identity: Identity | None
    ) -> None:
        """Use :meth:`FluxonFsFile.open_source`. No IO."""
        self._file_system = file_system
        self._export = file_system.export(export_name)
        self._relpath = relpath
        self._identity = identity
        self._origin: RangeSource | None = None
        self._pinned: Signature | None = None
        self._signature: Signature | None = None
        self._granted_until = float("-inf")
        self._position = 0
        self._closed = False
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._pages: LRUCache[int, bytes | memoryview] = self._no_pages()
        self._pieces: FilePieces | None = None
        self._new_locks()
        forks.watch(self)

    def _no_pages(self) -> LRUCache[int, bytes | memoryview]:
        return LRUCache(self._file_system.cache.page_cache_pages)

    def _new_locks(self) -> None:
        self._lock = threading.Lock()
        self._granting = threading.Lock()

    def after_fork(self) -> None:
        """In a forked child: other threads of the parent may hold the locks for ever; no page is here."""
        self._new_locks()
        self._pages = self._no_pages()

    @property
    def name(self) -> str:
        """``fluxonfs://export/relpath``."""
        return f"fluxonfs://{self._export.name}/{self._relpath}"

    @property
    def table_key(self) -> Any:
        """The key of this file's row in an index table."""
        return self._file_system.table_key(self._export.name, self._relpath)

    @property
    def group(self) -> PieceCache:
        """What reads files of this file system together."""
        return self._file_system.pieces

    @property
    def signature(self) -> Signature:
        """The version that reads are pinned to. Costs a stat where it is not known yet."""
        if self._signature is None:
            self.grant()
        assert self._signature is not None
        return self._signature

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.signature.size

    @property
    def pieces(self) -> FilePieces | None:
        """The file's pieces; None where it bypasses the tiers, or its version is not known yet."""
        return self._pieces

    @property
    def miss_policy(self) -> MissPolicy:
        """The export's."""
        return self._export.miss_policy

    @property
    def backfills(self) -> bool:
        """Whether a miss fills the shared tiers."""
        return self._export.async_backfill_enabled

    @property
    def is_granted(self) -> bool:
        """Whether the right to read holds for now."""
        return time.monotonic() < self._granted_until

    def grant(self) -> None:
        """Have the right to read and the file's version, renewed where the metadata TTL is over.

        Raises:
            SourcePermissionError: the identity may not read this file.
            SourceNotFoundError: the file is not there.
            SourceChangedError: it is another version than the one that was opened.
            ClosedError: the source is closed.
        """
        with self._granting:
            self._check_open()
            if self.is_granted:
                return
            started = time.perf_counter()
            self._file_system.check_access(self._export.name, self._relpath, self._identity)
            fresh, asked = self._file_system.stat(self._export.name, self._relpath, self._identity)
            expected = self._signature or self._pinned
            if expected is not None and not expected.fits(fresh.signature):
                raise changed(self.name, expected, fresh.signature)
            if self._signature is None:
                self._signature = fresh.signature
                self._pieces = self._file_system.pieces_of(self._export, self._relpath, fresh.signature)
            with self._lock:
                self._check_open()
                self._granted_until = fresh.until
            self.count(open_us=int((time.perf_counter() - started) * 1e6), stat_calls=int(asked))

    def pin(self, signature: Signature) -> None:
        """Make every read be of this version; raises where another one is known."""
        if self._signature is not None and not self._signature.fits(signature):
            raise changed(self.name, signature, self._signature)
        self._pinned = signature

    def read(self, start: int, stop: int) -> Buffer:
        """Return bytes ``[start, stop)``, by way of the pages; nobody planned this read."""
        check_range(self.name, start, stop)
        self.grant()
        if stop > self.size:
            got = max(self.size - start, 0)
            text = f"{self.name}: asked for bytes [{start}, {stop}), got {got}: the file ends there"
            raise ShortReadError(text, source=self.name, start=start, stop=stop, got=got)
        return self._read_pages(start, stop)

    def read_head(self, size: int) -> Buffer:
        """Return the first ``size`` bytes or the whole file."""
        self.grant()
        stop = min(size, self.size)
        return self.read(0, stop) if stop else b""

    # ------------------------------------------------------------- as FFmpeg's callbacks

    def read_at(self, offset: int, length: int) -> bytes:
        """Return up to ``length`` bytes from ``offset``: fewer where the file ends, none at or past its end.

        Raises:
            InvalidRequestError: a negative number.
            ShortReadError: the origin gave fewer bytes than the file has.
        """
        if offset < 0 or length < 0:
            text = f"{self.name}: read_at({offset}, {length}): want numbers from 0"
            raise InvalidRequestError(text)
        self.grant()
        stop = min(offset + length, self.size)
        return bytes(self._read_pages(offset, stop, asked=length)) if offset < stop else b""

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position and return it; ``AVSEEK_SIZE`` returns the size and moves nothing.

        Raises:
            InvalidRequestError: before the start, or an unknown ``whence``.
        """
        if whence == AVSEEK_SIZE:
            return self.size
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position}.get(whence)
        if whence == os.SEEK_END:
            base = self.size
        if base is None or base + offset < 0:
            text = f"{self.name}: seek({offset}, {whence}): no such place"
            raise InvalidRequestError(text)
        self._position = base + offset
        return self._position

    def read_packet(self, want: int) -> bytes:
        """Return up to ``want`` bytes from the position, and move it by what came."""
        data = self.read_at(self._position, want)
        self._position += len(data)
        return data

    # ------------------------------------------------------------- inside

    def _read_pages(self, start: int, stop: int, asked: int | None = None) -> Buffer:
        """Return bytes out of pages, fetching those that are missing: one request for each run."""
        size = self._file_system.cache.piece_bytes
        indices = range(start // size, -(-stop // size))
        pages: dict[int, bytes | memoryview] = {}
        with self._lock:
            for index in indices:
                page = self._pages.get(index)
                if page is not None:
                    pages[index] = page
        self.count(page_cache_hits=len(pages), page_cache_misses=len(indices) - len(pages))
        gaps = _gaps(indices, pages)
        reads = [GroupRead(self, first * size, min(last * size + size, self.size)) for first, last in gaps]
        fetches = self.group.fetch(reads) if reads else []
        for (first, _), future in zip(gaps, fetches, strict=True):
            data = memoryview(await_result(future, self.name))
            for n in range(-(-len(data) // size)):
                # A copy: a view would hold on to the whole run.
                page = bytes(data[n * size : n * size + size])
                pages[first + n] = page
                if self._pages.maxsize:
                    with self._lock:
                        self._pages[first + n] = page
        view = (
            memoryview(b"".join(pages[index] for index in indices))
            if len(indices) > 1
            else memoryview(pages[indices[0]])
        )
        skip = indices[0] * size
        answer = view[start - skip : stop - skip]
        self.count(
            read_at_calls=1,
            read_at_requested_bytes=stop - start if asked is None else asked,
            read_at_returned_bytes=len(answer),
        )
        return answer

    def forecast(self, ranges: Sequence[ByteRange]) -> str:
        """Tell, in words, what planned reads of these bytes will cost, as far as the version is known. No IO."""
        signature = self._signature or self._pinned
        if signature is None:
            return ""
        pieces = self._pieces or self._file_system.pieces_of(self._export, self._relpath, signature)
        return "past the tiers" if pieces is None else self.group.forecast(pieces, ranges)

    def read_origin(self, start: int, stop: int) -> Buffer:
        """Return bytes ``[start, stop)`` from the origin. One request; counted."""
        with self._lock:
            self._check_open()
            if self._origin is None:
                self._origin = self._export.open_origin(self._relpath, self._identity)
            origin = self._origin
        try:
            origin.pin(self.signature)
            data = origin.read(start, stop)
        except SourceError as error:
            raise self.failed(error) from error
        self.count(remote_read_calls=1, remote_read_bytes=len(data))
        return data

    @property
    def agents(self) -> AgentGroup | None:
        """What reads this file's origin together with others', in one call; None where each read is one of its own."""
        return self._export.agents(self._identity)

    def agent_read(self, start: int, stop: int) -> AgentRead:
        """Return bytes ``[start, stop)`` as ``agents`` is asked for them."""
        return AgentRead(self._export.name, self._relpath, self.signature, start, stop)

    def failed(self, error: SourceError) -> SourceError:
        """Return an origin's error as this file's; a changed version is asked for again."""
        if isinstance(error, SourceChangedError):
            self._file_system.forget(self._export.name, self._relpath, self._identity)
        return in_export(error, self._export.name, self._relpath)

    def count(self, **changes: int) -> None:
        """Add to the counters."""
        with self._lock:
            for name, change in changes.items():
                self._counts[name] += change

    def counters(self) -> dict[str, int]:
        """Return a copy of the counters; see ``COUNTERS``."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """Let go of the pages and of the origin; reads after it raise ClosedError."""
        with self._lock:
            self._closed = True
            origin, self._origin = self._origin, None
            self._pages.clear()
            self._granted_until = float("-inf")
        if origin is not None:
            origin.close()

    def _check_open(self) -> None:
        if self._closed:
            text = f"{self.name}: the source is closed"
            raise ClosedError(text)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle file system, name and identity, password included: a worker needs them to read."""
        return (
            FluxonFsVideoByteSource,
            (self._file_system, self._export.name, self._relpath, self._identity),
        )

    def __repr__(self) -> str:
        """Show the name; never the identity."""
        return f"FluxonFsVideoByteSource({self.name!r})"


def _gaps(indices: range, held: dict[int, Any]) -> list[tuple[int, int]]:
    """Return the runs of ``indices`` that are not held, as (first, last)."""
    gaps: list[tuple[int, int]] = []
    for index in indices:
        if index in held:
            continue
        if gaps and gaps[-1][1] == index - 1:
            gaps[-1] = (gaps[-1][0], index)
        else:
            gaps.append((index, index))
    return gaps


@dataclass(frozen=True)
class FluxonFsFile:
    """A file of an export under an identity: an address that opens a source. Equal ones share a reader."""

    file_system: FileSystem = field(repr=False)
    export_name: str
    relpath: str
    identity: Identity | None = field(repr=False)

    def __post_init__(self) -> None:
        """Check that there is such an export, and that the relpath leads nowhere else. No IO."""
        self.file_system.export(self.export_name)
        check_relpath(self.relpath)

    @property
    def name(self) -> str:
        """``fluxonfs://export/relpath``."""
        return f"fluxonfs://{self.export_name}/{self.relpath}"

    def open_source(self) -> FluxonFsVideoByteSource:
        """Return a source of its own. No IO: the right to read is got at the first use."""
        return FluxonFsVideoByteSource(self.file_system, self.export_name, self.relpath, self.identity)
