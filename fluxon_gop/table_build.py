"""Building an index table at scale: listings streamed, unchanged videos skipped, commits one after another.

Killed at any moment, a build has lost at most what was not committed; the same command goes on from there.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fluxon_gop import errors
from fluxon_gop.build_shards import Engine, LocalEngine, Outcome, Shard, ShardDone
from fluxon_gop.errors import InvalidRequestError, SourceError
from fluxon_gop.failed_videos import FailedVideos, Failure, failure_of
from fluxon_gop.index_build import CHECKS
from fluxon_gop.index_rows import keys_of, positions, signature_in
from fluxon_gop.index_table import IndexTable
from fluxon_gop.model import Signature, Verdict
from fluxon_gop.sources.listing import Listed
from fluxon_gop.stats import ReadStats
from fluxon_gop.video_listing import SUFFIXES, list_videos, roots_of

CHUNK = 1024
"""Listed videos that are held against the table at once."""
COMMIT_ROWS, COMMIT_BYTES, COMMIT_SECONDS = 1024, 256 * 1024 * 1024, 20.0
"""Rows are committed when there are so many, or so many bytes of them, or so long after the last commit."""


@dataclass
class TableReport:
    """What a build did."""

    built: int = 0
    skipped: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """Videos that failed in this build, by class of error."""
    failed_before: int = 0
    """Videos that had failed in an earlier build, are the same file since, and were not tried again."""
    deleted: list[str] = field(default_factory=list)
    """Videos of the table that are in the listed folders and buckets no more."""
    pruned: int = 0
    stats: ReadStats = field(default_factory=ReadStats)
    seconds: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether every listed video has a row."""
        return not self.failed and not self.failed_before


@dataclass(frozen=True)
class BuildOptions:
    """How a table is built."""

    check: str = "entry-points"
    """See :func:`build_index`; a row that was checked less is built again."""
    rebuild: bool = False
    """Build all rows again, unchanged files' too."""
    retry_failed: bool = False
    """Try again what failed in an earlier build, unchanged files too."""
    prune: bool = False
    """Remove the rows of videos that are gone from the listed folders and buckets."""
    storage_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        """Check the check."""
        if self.check not in CHECKS:
            text = f"check is {self.check!r}: want one of {', '.join(CHECKS)}"
            raise InvalidRequestError(text)


def build_table(
    sources: Sequence[str],
    table: IndexTable,
    options: BuildOptions = BuildOptions(),
    *,
    engine: Engine | None = None,
    progress: Callable[[Outcome], object] | None = None,
) -> TableReport:
    """Index all videos that ``sources`` stand for into ``table``.

    A video whose version the listing tells, and whose row is of it, is skipped without a request; of other videos with a
    row, one request tells. Of the rest: normally 64 KiB of head, the movie box, and the key samples' first bytes.
    Failures go into a table beside (:class:`FailedVideos`).

    Args:
        sources: see :func:`list_videos`.
        table: rows are added, or replaced where the file changed.
        options: how.
        engine: where videos are indexed; None for this process.
        progress: called with each outcome, skipped ones too.

    Raises:
        FluxonGopError: a listing, or the table, cannot be read or written.
    """
    return _Build(table, options, engine or LocalEngine(1), progress).run(sources)


class _Wanted(NamedTuple):
    """A video to be built, or to be asked whether it is of the version that is known."""

    uri: str
    known: Signature | None
    has_row: bool


class _Build:
    """One build under way."""

    def __init__(
        self,
        table: IndexTable,
        options: BuildOptions,
        engine: Engine,
        progress: Callable[[Outcome], object] | None,
    ) -> None:
        self._table, self._options, self._engine = table, options, engine
        self._tell = progress or (lambda _: None)
        self._failed = FailedVideos(table.uri, table.storage_options)
        self._report = TableReport()
        self._seen: list[int] = []
        self._rows: list[pa.Table] = []
        self._outcomes: list[Outcome] = []
        self._committed = time.monotonic()

    def run(self, sources: Sequence[str]) -> TableReport:
        """Build, and look for what is gone."""
        started = time.monotonic()
        roots = roots_of(sources)
        before = self._below(roots)
        try:
            for done in self._engine.run(self._shards(sources)):
                self._take(done)
        finally:
            # What was indexed is kept, whatever ended the build.
            self._commit()
        self._gone(roots, before)
        self._failed.compact()
        self._table.maintain()
        self._report.seconds = time.monotonic() - started
        return self._report

    # ------------------------------------------------------------- what is to be done

    def _shards(self, sources: Sequence[str]) -> Iterator[Shard]:
        """Yield what has to be built, as the listing comes."""
        options, size = self._options, self._engine.shard
        waiting: list[_Wanted] = []
        listing = list_videos(sources, options.storage_options)
        while chunk := list(islice(listing, CHUNK)):
            waiting += self._wanting(chunk)
            while len(waiting) >= size:
                yield self._shard(waiting[:size])
                waiting = waiting[size:]
        if waiting:
            yield self._shard(waiting)

    def _shard(self, videos: list[_Wanted]) -> Shard:
        uris, known, _ = zip(*videos, strict=True)
        options = self._options
        there = frozenset(video.uri for video in videos if video.has_row)
        columns = self._table.packed_columns
        return Shard(uris, known, options.check, options.storage_options, there, columns)

    def _wanting(self, chunk: list[Listed]) -> list[_Wanted]:
        """Return the videos that have no row, or one of another version, or may have one; tell of the others."""
        options = self._options
        names = [listed.uri for listed in chunk]
        self._seen += [hash(name) for name in names]
        rows = self._table.known(
            [name for name in names if _is_text(name)],
            ["size", "mtime_ns", "etag", "gop_verdict", "container_reason"],
        )
        wanting: list[_Wanted] = []
        for listed in chunk:
            row = rows.get(listed.uri)
            known = None if row is None else signature_in(row)
            if options.rebuild or (row is not None and _level(row) < CHECKS.index(options.check)):
                known = None
            failure = None if options.retry_failed or options.rebuild else self._failed.get(listed.uri)
            if known is not None and listed.signature is not None and known.fits(listed.signature):
                self._report.skipped += 1
                self._tell(Outcome(listed.uri, "skipped"))
            elif failure is not None and _stands(failure, listed.signature):
                self._report.failed_before += 1
                self._tell(Outcome(listed.uri, "failed_before", signature=listed.signature))
            else:
                unknown = listed.signature is None
                wanting.append(_Wanted(listed.uri, known if unknown else None, row is not None))
        return wanting

    # ------------------------------------------------------------- what came of it

    def _take(self, done: ShardDone) -> None:
        report = self._report
        self._table.commit_fragments(done.fragments)
        self._rows.append(done.rows)
        self._outcomes += done.outcomes
        report.stats.add(done.stats)
        for outcome in done.outcomes:
            report.built += outcome.status == "built"
            report.skipped += outcome.status == "skipped"
            if outcome.error is not None:
                report.failed[type(outcome.error).__name__] += 1
        full = (
            sum(rows.num_rows for rows in self._rows) >= COMMIT_ROWS
            or sum(rows.nbytes for rows in self._rows) >= COMMIT_BYTES
        )
        if full or done.fragments or time.monotonic() - self._committed >= COMMIT_SECONDS:
            self._commit()

    def _commit(self) -> None:
        """Write what is held, tell of it, and note failures: in this order, so that a failure is never of a row."""
        rows, self._rows = self._rows, []
        outcomes, self._outcomes = self._outcomes, []
        table = pa.concat_tables(rows) if rows else None
        if table is not None:
            last = positions(table)
            if len(last) < table.num_rows:
                table = table.take(pa.array(sorted(last.values()), pa.int64()))
        if table is not None and table.num_rows:
            keys = keys_of(table)
            # Asked now: another builder may have added some since they were listed.
            there = self._table.known(keys, ["size"])
            old = np.array([key in there for key in keys])
            self._table.write(table.filter(pa.array(~old)), table.filter(pa.array(old)))
        self._failed.note(
            [
                failure_of(outcome.uri, outcome.error, outcome.nbytes, outcome.signature)
                for outcome in outcomes
                if outcome.error is not None
            ],
            [outcome.uri for outcome in outcomes if outcome.error is None],
        )
        self._committed = time.monotonic()
        for outcome in outcomes:
            self._tell(outcome)

    def _below(self, roots: list[str]) -> list[str]:
        """Return the table's videos that a listing of these roots would name, were they there."""
        if not roots:
            return []
        keys = (key for key in self._table.keys() if isinstance(key, str))  # noqa: SIM118 - a table is no mapping
        return [
            key for key in keys if key.startswith(tuple(roots)) and Path(key).suffix.lower() in SUFFIXES
        ]

    def _gone(self, roots: list[str], before: list[str]) -> None:
        """Find rows, and failures, of videos that the listings of their folders and buckets do not name any more.

        Only what was in the table before the listing began: another builder may have added others since. A local file must
        not be there either: a listing follows no links.
        """
        if not roots:
            return
        seen = set(self._seen)
        gone = [key for key in before if hash(key) not in seen and not _is_there(key)]
        self._report.deleted = gone
        if self._options.prune and gone:
            self._table.remove(gone)
            self._report.pruned = len(gone)
        self._failed.note(
            [],
            [
                failure.uri
                for failure in self._failed.all()
                if failure.uri.startswith(tuple(roots))
                and hash(failure.uri) not in seen
                and not _is_there(failure.uri)
            ],
        )


def _is_text(name: str) -> bool:
    """Return whether a name can be a key: some file names are no UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_there(uri: str) -> bool:
    """Return whether a local file is there, or may be: what cannot be looked at counts as there."""
    if "://" in uri:
        return False
    try:
        os.lstat(uri)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def _stands(failure: Failure, now: Signature | None) -> bool:
    """Return whether trying again would fail again: the file itself was wrong, not the way to it, and is the same still."""
    if failure.signature is None or now is None:
        return False
    kind = getattr(errors, failure.error_class, SourceError)
    return not issubclass(kind, SourceError) and failure.signature.fits(now)


def _level(row: Mapping[str, Any]) -> int:
    """Return which of CHECKS a row has been through."""
    found = set(row.get("gop_verdict") or [])
    if not found or found & {Verdict.DECODED, Verdict.DECODED_TRAILING}:
        return 2
    return 1 if row.get("container_reason") is not None or Verdict.UNCHECKED not in found else 0


def engine_of(name: str, processes: int, table: IndexTable) -> Engine:
    """Return the engine of this name, for builds into a table.

    Raises:
        InvalidRequestError: there is none, or what it needs is not installed.
    """
    if name == "local":
        return LocalEngine(processes)
    if name == "ray":
        from fluxon_gop.ray_engine import RayEngine

        return RayEngine(table)
    text = f"engine is {name!r}: want 'local' or 'ray'"
    raise InvalidRequestError(text)
