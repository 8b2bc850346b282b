"""Which videos some names stand for, one after another: files, folders, globs, buckets, lists, tables.

A listing that tells versions (folders, buckets, Lance tables) saves the look at each file of a later build.
"""

from __future__ import annotations

import csv
import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from fluxon_gop.errors import FluxonGopError, InvalidRequestError, SourceError
from fluxon_gop.model import Signature
from fluxon_gop.sources import LanceBlobSource, uri_of
from fluxon_gop.sources.lance_blob import group_of_blobs, split_address
from fluxon_gop.sources.listing import Listed, can_be_listed, list_files

SUFFIXES = frozenset({".mp4", ".m4v", ".mov", ".3gp", ".3g2", ".m4s", ".avif"})
"""Files of a folder that are taken for videos; a file named itself is taken whatever its suffix."""
COLUMNS = ("uri", "url", "video_path", "path", "file")
"""Columns of a CSV or Parquet list that hold the addresses; the first one that is there, else the first column."""
_ROWS = 4096


def list_videos(
    sources: Sequence[str], storage_options: Mapping[str, Any] | None = None
) -> Iterator[Listed]:
    """Yield the videos that names stand for, each once, local paths absolute, with their version where a listing tells it.

    A name is a file, a folder (all below), a glob, an address, a prefix of a bucket (``s3://bucket/videos/``), a list
    (``@videos.txt``, ``@videos.csv``, ``@videos.parquet``), or a column of blobs (``lance://TABLE?column=NAME``). Streams:
    what it holds is a hash of each name.

    Raises:
        InvalidRequestError: a name stands for nothing.
        SourceError: a bucket, list or table cannot be read.
    """
    seen: set[int] = set()
    for name in sources:
        found = False
        for given in _expand(name, storage_options):
            found = True
            listed = given._replace(uri=_key_of(given.uri))
            mark = hash(listed.uri)
            if mark not in seen:
                seen.add(mark)
                yield listed
        if not found and os.path.isdir(os.path.join(name, "_versions")):  # noqa: PTH112, PTH118 - likewise
            text = (
                f"{name}: a Lance data set: name its column of videos, lance://{name}?column=NAME; of a video table, "
                f"fluxon-gop index add-columns {name}"
            )
            raise InvalidRequestError(text)
        if not found:
            text = f"{name}: no video there (a folder is searched for {', '.join(sorted(SUFFIXES))})"
            raise InvalidRequestError(text)


def roots_of(sources: Sequence[str]) -> list[str]:
    """Return the names whose listing is complete, as their videos' names begin: what is missing there is deleted."""
    roots = []
    for name in sources:
        if can_be_listed(name):
            roots.append(name if name.endswith("/") else f"{name}/")
        elif "://" not in name and os.path.isdir(name):  # noqa: PTH112 - Path raises for a name that is too long
            roots.append(os.path.join(os.path.abspath(name), ""))  # noqa: PTH100, PTH118 - links are not followed
    return roots


def _expand(name: str, options: Mapping[str, Any] | None) -> Iterator[Listed]:
    if name.startswith("@"):
        for uri in _listed_in(name[1:]):
            yield Listed(_absolute(uri), None)
    elif can_be_listed(name):
        for listed in list_files(name, options):
            if Path(listed.uri).suffix.lower() in SUFFIXES:
                yield listed
    elif name.startswith("lance") and "://" in name and "row=" not in name.rpartition("?")[2]:
        yield from _blobs(name, options)
    elif "://" in name:
        yield _file(uri_of(name)) if name.startswith("file://") else Listed(name, None)
    elif os.path.isdir(name):  # noqa: PTH112 - Path raises for a name that is too long
        yield from _folder(name)
    elif not os.path.exists(name) and glob.has_magic(name):  # noqa: PTH110 - likewise
        for match in sorted(glob.iglob(name, recursive=True)):  # noqa: PTH207 - absolute patterns too
            yield from _expand(match, options)
    else:
        yield _file(_absolute(name))


def _absolute(name: str) -> str:
    return name if "://" in name else os.path.abspath(name)  # noqa: PTH100 - resolve() would follow links


def _key_of(name: str) -> str:
    """Return the name under which a table knows a video; one that names nothing stays, for its failure to be told.

    An address with a query (a presigned one) is what reading needs, so it stays too.
    """
    if "://" not in name or urlsplit(name).query:
        return name
    try:
        return uri_of(name)
    except FluxonGopError:
        return name


def _file(path: str) -> Listed:
    try:
        found = Path(path).stat()
    except OSError:
        # Reading it tells why.
        return Listed(path, None)
    return Listed(path, Signature(found.st_size, None, found.st_mtime_ns))


def _folder(name: str) -> Iterator[Listed]:
    for folder, folders, files in os.walk(name, onerror=_refuse_folder):
        folders.sort()
        for file in sorted(files):
            if Path(file).suffix.lower() in SUFFIXES:
                yield _file(os.path.abspath(os.path.join(folder, file)))  # noqa: PTH100, PTH118


def _refuse_folder(error: OSError) -> None:
    """Raise where a folder cannot be listed: what lies in it is not gone."""
    text = f"{error.filename}: cannot be listed: {error.strerror}"
    raise SourceError(text, source=str(error.filename)) from error


def _listed_in(path: str) -> Iterator[str]:
    """Yield the addresses in a text, CSV or Parquet file."""
    kind = Path(path).suffix.lower()
    try:
        if kind in {".csv", ".parquet"}:
            opened: Any = _open_csv(path) if kind == ".csv" else pa.parquet.ParquetFile(path)
            batches = opened if kind == ".csv" else opened.iter_batches()
            for batch in batches:
                names = batch.schema.names
                column = next((name for name in COLUMNS if name in names), names[0])
                yield from (str(uri) for uri in batch.column(names.index(column)).to_pylist() if uri)
        else:
            with Path(path).open(encoding="utf-8-sig") as file:
                yield from (text for line in file if (text := line.strip()) and not text.startswith("#"))
    except (OSError, ValueError, pa.ArrowException) as error:
        text = f"{path}: cannot be read as a list of videos: {str(error).splitlines()[0]}"
        raise SourceError(text, source=path) from error


def _open_csv(path: str) -> Any:
    """Open a CSV file, all columns as texts."""
    with Path(path).open(encoding="utf-8-sig", newline="") as file:
        names = next(csv.reader(file), [])
    if any("://" in name or Path(name).suffix.lower() in SUFFIXES for name in names):
        text = (
            f"{path}: its first line holds a video, and no names of columns: name them, or give a .txt list"
        )
        raise SourceError(text, source=path)
    convert = pa.csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=True
    )
    return pa.csv.open_csv(path, convert_options=convert)


def _blobs(name: str, options: Mapping[str, Any] | None) -> Iterator[Listed]:
    """Yield the blobs of a column of a Lance data set."""
    dataset, query = split_address(name)
    column = query.get("column", [""])[0]
    group = group_of_blobs(dataset, column, None, dict(options or {}))
    count = group.dataset().count_rows()
    for start in range(0, count, _ROWS):
        rows = range(start, min(start + _ROWS, count))
        sources = [LanceBlobSource(dataset, column, row, storage_options=options) for row in rows]
        for source, version in zip(sources, group.versions(sources), strict=True):
            yield Listed(source.name, version if isinstance(version, Signature) else None)
