"""Blobs of a Lance data set as sources: the ranges of a whole batch in one ``read_blob_ranges`` call.

A data set is opened once a process, at one version, and read at that version: an append changes nothing here. Lance is
imported at the first use: it warns at every fork of a process that has it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

from cachetools import LRUCache

from fluxon_gop.errors import (
    ClosedError,
    ForkedProcessError,
    InvalidRequestError,
    ShortReadError,
    SourceError,
    SourceNotFoundError,
)
from fluxon_gop.model import Signature
from fluxon_gop.sources.one_call import OneCallGroup, OneCallSource
from fluxon_gop.sources.range_source import Buffer, GroupRead, changed
from fluxon_gop.sources.stores import plain_endpoint

KNOWN_BLOBS = 1 << 17
"""Versions of blobs that a process remembers of one column."""


class LanceBlobSource(OneCallSource):
    """One blob: a row of a blob column.

    The version is the blob's size with what names its bytes: the row and the data set's version where one was given;
    else the stable row id and the version of its last update, where the data set has those; else data file and place.
    """

    def __init__(
        self,
        dataset: str,
        column: str,
        row: int,
        *,
        version: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Name the blob; nothing is opened yet.

        Args:
            dataset: path or address of the data set, as Lance takes it.
            column: of blobs.
            row: the row's number in scan order, from 0.
            version: of the data set, which the number goes by; None for the newest when it is opened.
            storage_options: for Lance.
        """
        super().__init__()
        if isinstance(row, bool) or not isinstance(row, int):
            text = f"row is a {type(row).__name__}: want an int"
            raise TypeError(text)
        if "@" in dataset.partition("://")[2].split("/", 1)[0]:
            text = "lance://...: credentials belong into storage_options, not into the address"
            raise InvalidRequestError(text)
        if row < 0 or not column or not dataset:
            text = f"dataset {dataset!r}, column {column!r}, row {row}: want names, and a row from 0"
            raise InvalidRequestError(text)
        self._dataset, self._column, self._row = dataset, column, row
        self._version = version
        self._given = dict(storage_options or {})
        self._expected_size: int | None = None

    @property
    def name(self) -> str:
        """``lance://DATASET?column=COLUMN&row=ROW``, and ``&version=VERSION`` where one was given."""
        version = "" if self._version is None else f"&version={self._version}"
        return f"lance://{self._dataset}?column={self._column}&row={self._row}{version}"

    @property
    def row(self) -> int:
        """The row's number."""
        return self._row

    @property
    def group(self) -> BlobGroup:
        """What reads blobs of this column together."""
        return group_of_blobs(self._dataset, self._column, self._version, self._given)

    @property
    def signature(self) -> Signature:
        """The version of the blob; one look at the data set's own columns, for all rows that were not looked at."""
        if self._signature is None:
            self._signature = self.group.signatures([self])[0]
        return self._signature

    def pin(self, signature: Signature) -> None:
        """Make every read be of this version; one without etag and time, of the blob's own row, fits by its size."""
        if signature.etag is None and signature.mtime_ns is None:
            seen = self._signature or self.group.known(self._row)
            if seen is not None and seen.size != signature.size:
                raise changed(self.name, signature, seen)
            self._expected_size = signature.size
            return
        if self._expected_size not in {None, signature.size}:
            raise changed(self.name, Signature(self._expected_size or 0), signature)
        super().pin(signature)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the names and options, credentials in them included: a worker needs them to read."""
        return (_reopen, (self._dataset, self._column, self._row, self._version, self._given))


def split_address(uri: str) -> tuple[str, dict[str, list[str]]]:
    """Return data set and query of ``lance://PATH?column=C&row=N``, or of ``lance+s3://...`` and the like."""
    scheme, _, rest = uri.partition("://")
    place, _, query = rest.rpartition("?")
    inner = scheme.partition("+")[2]
    return f"{inner}://{place}" if inner else place, parse_qs(query)


def blob_of(uri: str, storage_options: Mapping[str, Any] | None) -> LanceBlobSource:
    """Return the source of the address of a blob."""
    dataset, wanted = split_address(uri)
    try:
        column, row = wanted["column"][0], int(wanted["row"][0])
        version = int(wanted["version"][0]) if "version" in wanted else None
    except (KeyError, ValueError):
        text = f"{uri.rpartition('?')[0] or uri}: want ?column=COLUMN&row=NUMBER behind the data set"
        raise InvalidRequestError(text) from None
    return LanceBlobSource(dataset, column, row, version=version, storage_options=storage_options)


class BlobGroup(OneCallGroup):
    """One blob column of one data set at one version."""

    def __init__(self, dataset: str, column: str, version: int | None, options: Mapping[str, Any]) -> None:
        """Open nothing yet."""
        self._uri, self._column, self._options = dataset, column, dict(options)
        self._version = version
        self._opened: Any = None
        self._stable = False
        self._born = ""
        self._known: LRUCache[int, Signature] = LRUCache(KNOWN_BLOBS)
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def signatures(self, sources: Sequence[LanceBlobSource]) -> list[Signature]:
        """Return the versions of blobs: one look for all that are not known yet.

        Raises:
            SourceNotFoundError: no such row, or it holds no blob.
        """
        self.check_process(self._uri)
        with self._lock:
            missing = sorted({source.row for source in sources} - self._known.keys())
            if missing:
                try:
                    self._look(missing)
                except (SourceError, InvalidRequestError):
                    raise
                except Exception as error:  # noqa: BLE001 - Lance raises many kinds
                    text = f"lance://{self._uri}: the rows of {self._column} cannot be looked at: {_line(error)}"
                    raise SourceError(text, source=self._uri) from None
            for source in sources:
                if source.row not in self._known:
                    text = f"{source.name}: no such row, or it holds no blob"
                    raise SourceNotFoundError(text, source=source.name)
            return [self._known[source.row] for source in sources]

    def known(self, row: int) -> Signature | None:
        """Return a blob's version where it was looked at already."""
        return self._known.get(row)

    def learn(self, rows: Sequence[int], descriptors: Sequence[dict[str, Any] | None]) -> None:
        """Take what somebody has read of this column, at this version, which was given."""
        with self._lock:
            self._learn(rows, descriptors)

    def _learn(self, rows: Sequence[int], descriptors: Sequence[dict[str, Any] | None]) -> None:
        for row, blob in zip(rows, descriptors, strict=True):
            if blob is not None:
                self._known[row] = Signature(blob["size"], f"row {row} of version {self._version}")

    def _look(self, rows: Sequence[int]) -> None:
        """Read descriptors and row ids of these rows, no blob."""
        dataset = self.dataset()
        count = dataset.count_rows()
        rows = [row for row in rows if row < count]
        if not rows:
            return
        if self._version is not None:
            self._learn(rows, dataset.take(rows, columns=[self._column]).column(self._column).to_pylist())
            return
        ids = dataset.take(
            rows, columns=["_rowid"] + (["_row_last_updated_at_version"] if self._stable else [])
        )
        blobs = dataset.take(rows, columns=[self._column]).column(self._column).to_pylist()
        place = (
            None
            if self._stable
            else dataset.take(rows, columns=["_rowaddr"]).column("_rowaddr").to_pylist()
        )
        for n, (row, blob) in enumerate(zip(rows, blobs, strict=True)):
            if blob is None:
                continue
            if place is None:
                version = f"row {ids.column('_rowid')[n]}@{ids.column('_row_last_updated_at_version')[n]} of {self._born}"
            else:
                file = self._file_of(place[n] >> 32)
                version = f"{file}:{place[n] & 0xFFFFFFFF}:{blob['position']}"
            self._known[row] = Signature(blob["size"], version)

    def _file_of(self, fragment: int) -> str:
        """Return the data file that holds the column: a column added later lies in another one."""
        dataset = self.dataset()
        found = dataset.get_fragment(fragment)
        field = dataset.lance_schema.field(self._column).id()
        files = [] if found is None else found.data_files()
        return ",".join(file.path for file in files if field in file.fields) or "?"

    def outcomes(self, reads: Sequence[GroupRead]) -> list[Buffer | BaseException]:
        """Make one ``read_blob_ranges`` call for the reads that can be made."""
        sources: list[Any] = [read.source for read in reads]
        outcomes: list[Buffer | BaseException | None] = [None] * len(reads)
        wanted: list[tuple[int, int, int, int]] = []
        known = dict(zip(map(id, sources), self.versions(sources), strict=True))
        for n, (read, source) in enumerate(zip(reads, sources, strict=True)):
            version = known[id(source)]
            try:
                source.check_open()
                if isinstance(version, BaseException):
                    raise version
                source.pin(version)
                stop = min(read.stop, version.size) if read.head else read.stop
                if stop > version.size:
                    text = f"{source.name}: asked for bytes [{read.start}, {stop}): the blob has {version.size}"
                    got = max(version.size - read.start, 0)
                    raise ShortReadError(text, source=source.name, start=read.start, stop=stop, got=got)
            except (SourceError, ClosedError) as error:
                outcomes[n] = error
            else:
                wanted.append((n, source.row, read.start, stop - read.start))
        if wanted:
            try:
                found = self.dataset().read_blob_ranges(
                    self._column,
                    [request[1:] for request in wanted],
                    selector="indices",
                    preserve_order=True,
                )
            except Exception as error:  # noqa: BLE001 - Lance raises many kinds
                text = f"lance://{self._uri}: the blobs of {self._column} cannot be read: {_line(error)}"
                failed = SourceError(text, source=self._uri)
                found = [(0, 0, failed) for _ in wanted]
            for (n, _, _, length), (_, _, data) in zip(wanted, found, strict=True):
                outcomes[n] = data
                if isinstance(data, bytes) and len(data) != length:
                    text = f"{sources[n].name}: asked for {length} bytes, got {len(data)}"
                    outcomes[n] = ShortReadError(
                        text, source=sources[n].name, start=0, stop=length, got=len(data)
                    )
        return [SourceError("no answer") if outcome is None else outcome for outcome in outcomes]

    def versions(self, sources: Sequence[LanceBlobSource]) -> list[Signature | SourceError]:
        """Return each blob's version, or why it has none."""
        try:
            return list(self.signatures(sources))
        except SourceError:
            versions: list[Signature | SourceError] = []
            for source in sources:
                try:
                    versions.append(self.signatures([source])[0])
                except SourceError as error:
                    versions.append(error)
            return versions

    def dataset(self) -> Any:
        """Return the opened LanceDataset.

        Raises:
            SourceNotFoundError: there is none, or not of this version.
        """
        if self._opened is None:
            import lance

            try:
                opened = lance.dataset(
                    self._uri,
                    version=self._version,
                    storage_options=lance_options(self._uri, self._options),
                )
            except (ValueError, OSError) as error:
                text = f"lance://{self._uri}: cannot be opened as a Lance data set: {_line(error)}"
                raise SourceNotFoundError(text, source=self._uri) from None
            if self._column not in opened.schema.names:
                text = f"lance://{self._uri}: no column {self._column!r}"
                raise InvalidRequestError(text)
            if "blob" not in str(opened.schema.field(self._column)) + str(
                opened.schema.field(self._column).metadata
            ):
                text = f"lance://{self._uri}: {self._column!r} is no column of blobs"
                raise InvalidRequestError(text)
            self._stable = bool(opened.has_stable_row_ids)
            # A data set that was deleted and written again has rows of the same numbers.
            self._born = str(opened.versions()[0]["timestamp"]) if self._stable else ""
            self._opened = opened
        return self._opened

    def check_process(self, name: str) -> None:
        """Raise in a forked child: Lance has threads of its own."""
        del name
        if self._pid != os.getpid():
            text = (
                f"lance://{self._uri}: a Lance data set of the parent is read in a forked child, where Lance's threads "
                "do not live. Start workers with 'spawn' or 'forkserver'"
            )
            raise ForkedProcessError(text, source=self._uri)


def _line(error: Exception) -> str:
    return str(error).split("\n", 1)[0][:200]


_GroupKey = tuple[str, str, int | None, str]
_newest: dict[_GroupKey, BlobGroup] = {}
"""Opened at the version that was the newest then, for as long as the process lives."""
_pinned: LRUCache[_GroupKey, BlobGroup] = LRUCache(64)
"""Opened at a version that was asked for: opened again, they are the same."""
_lock = threading.Lock()


def _new_lock() -> None:
    global _lock  # noqa: PLW0603 - in a forked child another thread's lock is held for ever
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)


def group_of_blobs(dataset: str, column: str, version: int | None, options: Mapping[str, Any]) -> BlobGroup:
    """Return the process's opened data set of this version; None for the newest when it is opened."""
    key = (dataset, column, version, repr(sorted(options.items())))
    groups = _newest if version is None else _pinned
    with _lock:
        group = groups.get(key)
        if group is None:
            group = groups[key] = BlobGroup(dataset, column, version, options)
        return group


def lance_options(uri: str, given: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Return storage options as Lance takes them: an endpoint without TLS that was named is one that is meant."""
    options = {name: str(value) for name, value in (given or {}).items()}
    if "://" in uri and plain_endpoint(options):
        options.setdefault("allow_http", "true")
    return options or None


def forget_blobs(dataset: str) -> None:
    """Have a data set's versions opened anew: it may have been deleted and made again since."""
    with _lock:
        for key in [key for key in _pinned if key[0] == dataset]:
            del _pinned[key]


def _reopen(
    dataset: str, column: str, row: int, version: int | None, options: Mapping[str, Any]
) -> LanceBlobSource:
    return LanceBlobSource(dataset, column, row, version=version, storage_options=options)
