"""Many videos to index rows: listing, building side by side, writing to a table.

The roof over parser, prefetch and table; the command line is its thin skin.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from fluxon_gop.decode_check import check_by_decoding
from fluxon_gop.errors import FluxonGopError, InvalidRequestError
from fluxon_gop.index_job import index_job
from fluxon_gop.index_table import IndexTable
from fluxon_gop.jobs import run_one
from fluxon_gop.model import Verdict, VideoIndex
from fluxon_gop.prefetch import Crew
from fluxon_gop.ranges import ByteRange
from fluxon_gop.requests import Uri
from fluxon_gop.sources import RangeSource, open_source
from fluxon_gop.sources.listing import can_be_listed, list_files
from fluxon_gop.stats import ReadStats

SUFFIXES = frozenset({".mp4", ".m4v", ".mov", ".3gp", ".3g2", ".m4s", ".avif"})
"""Files of a folder that are taken for videos; a file named itself is taken whatever its suffix."""
BATCH = 64
"""Videos indexed side by side, and rows of one commit."""
CHECKS = ("none", "entry-points", "decode")


def build_index(
    uri: Uri,
    *,
    stream_index: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    check: str = "entry-points",
) -> VideoIndex:
    """Return the index of one video, its entry points proven from the bitstream.

    Normally three waves: 64 KiB of head, the movie box, the first bytes of each key sample.

    Args:
        uri: a path, ``file://``, ``http(s)://``, or a RangeSource.
        stream_index: the track (its place among the file's), None for FFmpeg's best video stream.
        storage_options: for the source.
        check: "entry-points"; "decode" to decode the whole file and each GOP alone (reads all its bytes);
            "none" to leave the container's claims unchecked.

    Raises:
        SourceError: the file cannot be read.
        Mp4Error: it has no index: no MP4, damaged, encrypted.
    """
    if check not in CHECKS:
        text = f"check is {check!r}: want one of {', '.join(CHECKS)}"
        raise InvalidRequestError(text)
    source = open_source(uri, storage_options)
    stats = ReadStats()
    try:
        job = index_job(source, stats, stream_index=stream_index, check=check != "none")
        index = run_one(job, stats)
        return check_by_decoding(index, source, stats).index if check == "decode" else index
    finally:
        if source is not uri:
            source.close()


@dataclass(frozen=True)
class Built:
    """How indexing one video went."""

    uri: str
    index: VideoIndex | None
    error: FluxonGopError | None
    stats: ReadStats
    skipped: bool = False
    """Its row fits the file already: nothing was read."""


@dataclass
class BuildReport:
    """What a build did."""

    built: int = 0
    skipped: int = 0
    failures: list[tuple[str, FluxonGopError]] = field(default_factory=list)
    stats: ReadStats = field(default_factory=ReadStats)


def find_videos(sources: Sequence[str], storage_options: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Yield the videos that these names stand for: files, folders (all below), globs, addresses, prefixes of buckets.

    A prefix is ``s3://bucket/videos/``, with the slash; of its files, as of a folder's, those named like MP4 are taken.

    Local paths come out absolute, each video once.

    Raises:
        InvalidRequestError: a name stands for nothing.
    """
    seen: set[str] = set()
    for name in sources:
        found = False
        for video in _expand(name, storage_options):
            found = True
            if video not in seen:
                seen.add(video)
                yield video
        if not found:
            text = f"{name}: no video there (a folder is searched for {', '.join(sorted(SUFFIXES))})"
            raise InvalidRequestError(text)


def _expand(name: str, storage_options: Mapping[str, Any] | None) -> Iterator[str]:
    if can_be_listed(name):
        for listed in list_files(name, storage_options):
            if Path(listed.uri).suffix.lower() in SUFFIXES:
                yield listed.uri
        return
    if "://" in name:
        yield name
        return
    path = Path(name)
    if path.is_dir():
        for folder, folders, files in os.walk(path):
            folders.sort()
            for file in sorted(files):
                if Path(file).suffix.lower() in SUFFIXES:
                    yield os.path.abspath(os.path.join(folder, file))  # noqa: PTH100, PTH118
    elif path.exists():
        yield os.path.abspath(path)  # noqa: PTH100 - resolve() would follow links
    elif glob.has_magic(name):
        for match in sorted(glob.glob(name, recursive=True)):  # noqa: PTH207 - absolute patterns too
            yield from _expand(match, storage_options)
    else:
        yield name


def build_indexes(
    videos: Iterable[str],
    table: IndexTable | None = None,
    *,
    check: str = "entry-points",
    rebuild: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[Built]:
    """Yield how each video went, 64 side by side; rows that fit their file are skipped without a read.

    What each batch built is in the table, in one commit, before its outcomes are yielded.
    """
    pending = iter(videos)
    while batch := list(islice(pending, BATCH)):
        outcomes = list(
            _build_batch(batch, table, check=check, rebuild=rebuild, storage_options=storage_options)
        )
        if table is not None:
            table.replace(
                (outcome.uri, outcome.index)
                for outcome in outcomes
                if outcome.index is not None and not outcome.skipped
            )
        yield from outcomes


def _build_batch(
    batch: list[str],
    table: IndexTable | None,
    *,
    check: str,
    rebuild: bool,
    storage_options: Mapping[str, Any] | None,
) -> Iterator[Built]:
    sources: list[RangeSource] = []
    try:
        for uri in batch:
            try:
                source = open_source(uri, storage_options)
                if table is not None and not rebuild and _unchanged(source, table, check):
                    source.close()
                    yield Built(source.name, None, None, ReadStats(), skipped=True)
                    continue
            except FluxonGopError as error:
                yield Built(uri, None, error, ReadStats())
                continue
            sources.append(source)
        stats = [ReadStats() for _ in sources]
        for n, found, refused in indexes_of(sources, stats, check=check != "none"):
            index, failure = found, refused
            if index is not None and check == "decode":
                try:
                    index = check_by_decoding(index, sources[n], stats[n]).index
                except FluxonGopError as error:
                    index, failure = None, error
            yield Built(sources[n].name, index, failure, stats[n])
    finally:
        for source in sources:
            source.close()


def indexes_of(
    sources: Sequence[RangeSource],
    stats: Sequence[ReadStats],
    *,
    check: bool = True,
    hints: Sequence[ByteRange | None] | None = None,
) -> Iterator[tuple[int, VideoIndex | None, FluxonGopError | None]]:
    """Yield (place, index, None) or (place, None, error) of each source, as they are done; their waves run together.

    ``stats``: one for each source. ``check``: prove the entry points, by one more wave. ``hints``: where the movie boxes
    are said to lie; each saves a wave where true.
    """
    jobs = [
        (index_job(source, one, check=check, hint=hint), one)
        for source, one, hint in zip(sources, stats, hints or [None] * len(sources), strict=True)
    ]
    for outcome in Crew(jobs):
        failure = outcome.error
        if failure is not None and not isinstance(failure, FluxonGopError):
            raise failure
        yield outcome.number, outcome.value, failure


def _unchanged(source: RangeSource, table: IndexTable, check: str) -> bool:
    """Return whether the table's row fits the file and is checked as asked; costs the file's signature."""
    known = table.signature(source.name)
    if known is None or not known.fits(source.signature):
        return False
    row = table.lookup([source.name])[0]
    return isinstance(row, VideoIndex) and _level(row) >= CHECKS.index(check)


def _level(row: VideoIndex) -> int:
    """Return which of CHECKS a row has been through."""
    found = set(row.verdicts.tolist())
    if not found or found & {Verdict.DECODED, Verdict.DECODED_TRAILING}:
        return 2
    return 1 if row.container_reason is not None or Verdict.UNCHECKED not in found else 0


def build_table(
    sources: Sequence[str],
    table: IndexTable,
    *,
    check: str = "entry-points",
    rebuild: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[Built], None] | None = None,
) -> BuildReport:
    """Index all videos that ``sources`` stand for into ``table`` and report.

    Args:
        sources: see :func:`find_videos`.
        table: rows are added, or replaced where the file changed.
        check: see :func:`build_index`; a row that is checked less is built again.
        rebuild: build all rows again, unchanged files' too.
        storage_options: for the sources.
        progress: called with each outcome.
    """
    if check not in CHECKS:
        text = f"check is {check!r}: want one of {', '.join(CHECKS)}"
        raise InvalidRequestError(text)
    report = BuildReport()
    for built in build_indexes(
        find_videos(sources, storage_options),
        table,
        check=check,
        rebuild=rebuild,
        storage_options=storage_options,
    ):
        report.stats.add(built.stats)
        report.skipped += built.skipped
        report.built += built.index is not None
        if built.error is not None:
            report.failures.append((built.uri, built.error))
        if progress is not None:
            progress(built)
    return report
