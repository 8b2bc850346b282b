"""The videos that could not be indexed: a table beside the index table, a row a failure, none without a reason.

Written as a log, so that builders beside one another and kills lose nothing: of a video's rows the last one counts, and
``resolved`` says that it was indexed since. ``compact`` leaves the failures that stand.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from fluxon_gop.arrow_file import ArrowFile, Rows
from fluxon_gop.errors import FluxonGopError, IndexTableError, one_line
from fluxon_gop.index_rows import signature_in
from fluxon_gop.lance_rows import LanceRows
from fluxon_gop.model import Signature

SCHEMA = pa.schema(
    [
        pa.field("uri", pa.string(), nullable=False),
        pa.field("error_class", pa.string()),
        pa.field("message", pa.string()),
        pa.field("bytes", pa.int64()),
        pa.field("size", pa.int64()),
        pa.field("mtime_ns", pa.int64()),
        pa.field("etag", pa.string()),
        pa.field("time", pa.timestamp("us", tz="UTC")),
        pa.field("resolved", pa.bool_(), nullable=False),
    ]
)


class Failure(NamedTuple):
    """Why a video has no row: the error's class and message, what was read of it, its version where that is known."""

    uri: str
    error_class: str
    message: str
    nbytes: int
    signature: Signature | None


class FailedVideos:
    """The failures beside one index table; all of them in memory."""

    def __init__(self, table_uri: str, storage_options: Mapping[str, Any] | None = None) -> None:
        """Open the table of failures, ``NAME.failures.lance`` or ``NAME.failures.arrow``; it is made by the first one."""
        self.uri = uri_beside(table_uri)
        arrow = self.uri.endswith(".arrow")
        self._rows: Rows = ArrowFile(Path(self.uri)) if arrow else LanceRows(self.uri, storage_options)
        self._failures: dict[str, Failure] = {}
        self._written = 0
        self._load()

    def _load(self) -> None:
        """Read the log."""
        schema = self._rows.schema()
        if schema is None:
            return
        if not set(SCHEMA.names) <= set(schema.names):
            text = f"{self.uri}: no table of failures: its columns are {', '.join(schema.names[:8])}; move it away"
            raise IndexTableError(text, uri=self.uri)
        self._failures, self._written = {}, 0
        for row in self._rows.scalars(SCHEMA.names).to_pylist():
            self._take(row)

    def _take(self, row: dict[str, Any]) -> None:
        self._written += 1
        if row["resolved"]:
            self._failures.pop(row["uri"], None)
            return
        self._failures[row["uri"]] = Failure(
            row["uri"], row["error_class"], row["message"], row["bytes"], signature_in(row)
        )

    def __len__(self) -> int:
        """Return the number of videos that have failed and not been indexed since."""
        return len(self._failures)

    def get(self, uri: str) -> Failure | None:
        """Return a video's failure."""
        return self._failures.get(uri)

    def all(self) -> list[Failure]:
        """Return all failures."""
        return list(self._failures.values())

    def note(self, failed: Iterable[Failure], indexed: Iterable[str]) -> None:
        """Write failures, and which videos are none any more, in one commit."""
        now = int(time.time() * 1e6)
        rows = [_row(failure, now) for failure in failed]
        rows += [_row(self._failures[uri], now, resolved=True) for uri in indexed if uri in self._failures]
        if not rows:
            return
        self._rows.append(pa.Table.from_pylist(rows, schema=SCHEMA))
        for row in rows:
            self._take(row)

    def compact(self) -> None:
        """Leave one row for each failure that stands."""
        if self._written > len(self._failures):
            # Another builder may have written since.
            self._rows.refresh()
            self._load()
            now = int(time.time() * 1e6)
            rows = [_row(failure, now) for failure in self._failures.values()]
            self._rows.overwrite(pa.Table.from_pylist(rows, schema=SCHEMA))
            self._written = len(rows)


def uri_beside(table_uri: str) -> str:
    """Return where the failures of an index table lie."""
    table_uri = table_uri.removeprefix("file://").rstrip("/")
    for suffix in (".arrow", ".lance"):
        if table_uri.endswith(suffix):
            return f"{table_uri.removesuffix(suffix)}.failures{suffix}"
    return f"{table_uri}.failures"


def failure_of(uri: str, error: FluxonGopError, nbytes: int, signature: Signature | None) -> Failure:
    """Return an error as a failure: one line, no secrets (an error has none)."""
    return Failure(uri, type(error).__name__, one_line(error), nbytes, signature)


def _row(failure: Failure, now: int, *, resolved: bool = False) -> dict[str, Any]:
    version = failure.signature
    return {
        "uri": failure.uri,
        "error_class": failure.error_class,
        "message": failure.message,
        "bytes": failure.nbytes,
        "size": None if version is None else version.size,
        "mtime_ns": None if version is None else version.mtime_ns,
        "etag": None if version is None else version.etag,
        "time": now,
        "resolved": resolved,
    }
