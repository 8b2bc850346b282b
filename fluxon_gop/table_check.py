"""Are the rows of a table still true? Signatures, counts, entry points, or pixels, held against the files."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fluxon_gop import threads
from fluxon_gop.errors import FluxonGopError, InvalidRequestError, SourceNotFoundError
from fluxon_gop.index_build import BATCH, indexes_of
from fluxon_gop.index_rows import Key
from fluxon_gop.index_table import IndexTable
from fluxon_gop.model import Signature, Verdict, VideoIndex
from fluxon_gop.reader import VideoReader
from fluxon_gop.sources import RangeSource, open_source
from fluxon_gop.stats import ReadStats

LEVELS = ("signature", "counts", "entry-points", "pixels")
FRAMES = 8
"""Frames of each video that the last level compares."""


@dataclass(frozen=True)
class Verified:
    """What became of one row: ok, stale (another version of the file), gone, wrong, or damaged; and why."""

    uri: str
    status: str
    why: str = ""


def verify_table(
    table: IndexTable,
    *,
    level: str = "signature",
    sample: int | None = None,
    seed: int = 0,
    storage_options: Mapping[str, Any] | None = None,
) -> Iterator[Verified]:
    """Yield how each row stands, 64 side by side.

    Args:
        table: of addresses; rows of exports' files are left out.
        level: "signature": the file is there, of the row's version (one request a video). "counts": its boxes, read anew, name
            the same samples. "entry-points": the key samples' first bytes bear the row's verdicts out. "pixels": frames read
            by the row are those that FFmpeg's demuxer and decoder give from the file's start (reads the file up to them).
            Each level includes those before it.
        sample: check so many rows, drawn by ``seed``; None for all.
        seed: likewise.
        storage_options: for the videos.
    """
    if level not in LEVELS:
        text = f"level is {level!r}: want one of {', '.join(LEVELS)}"
        raise InvalidRequestError(text)
    keys = [key for key in table.keys() if isinstance(key, str)]  # noqa: SIM118 - a table is no mapping
    if sample is not None and sample < len(keys):
        keys = sorted(random.Random(seed).sample(keys, sample))  # noqa: S311 - a sample is no secret
    for at in range(0, len(keys), BATCH):
        yield from _verify(table, keys[at : at + BATCH], LEVELS.index(level), seed, storage_options)


def _verify(
    table: IndexTable, keys: Sequence[str], level: int, seed: int, options: Mapping[str, Any] | None
) -> Iterator[Verified]:
    rows: dict[Key, Any] = dict(zip(keys, table.lookup(keys), strict=True))
    unsound = table.unsound(keys)
    good: dict[str, VideoIndex] = {}
    looks = threads.pool("fluxon_gop-verify").map(lambda key: _version(key, options), keys)
    for key, version in zip(keys, looks, strict=True):
        row = rows[key]
        if not isinstance(row, VideoIndex) or key in unsound:
            yield Verified(
                key, "damaged", "the row's checksum does not fit, or it has the container's claims only"
            )
        elif isinstance(version, SourceNotFoundError):
            yield Verified(key, "gone", str(version))
        elif isinstance(version, FluxonGopError):
            yield Verified(key, "wrong", str(version))
        elif not row.signature.fits(version):
            yield Verified(key, "stale", f"the row is of {row.signature}, the file is {version}")
        elif level == 0:
            yield Verified(key, "ok")
        else:
            good[key] = row
    wrong = dict(_differences(good, options, entry_points=level >= 2))
    for key, row in good.items():
        why = wrong.get(key, "")
        if not why and level == 3:
            why = _pixels(key, row, seed, options)
        yield Verified(key, "wrong" if why else "ok", why)


def _version(key: str, options: Mapping[str, Any] | None) -> Signature | FluxonGopError:
    try:
        source = open_source(key, options)
        try:
            return source.signature
        finally:
            source.close()
    except FluxonGopError as error:
        return error


def _differences(
    rows: Mapping[str, VideoIndex], options: Mapping[str, Any] | None, *, entry_points: bool
) -> Iterator[tuple[str, str]]:
    """Yield the rows that an index built anew does not bear out, and why."""
    keys = list(rows)
    sources: list[RangeSource] = []
    try:
        sources += [open_source(key, options) for key in keys]
        for place, index, error in indexes_of(sources, [ReadStats() for _ in keys], check=entry_points):
            row = rows[keys[place]]
            if index is None:
                yield keys[place], str(error)
            elif not row.same_samples(index):
                yield keys[place], f"the file has {index!r}, the row {row!r}"
            elif entry_points and _claims_more(row, index):
                yield keys[place], "the row calls key samples entry points that the bitstream refutes"
    finally:
        for source in sources:
            source.close()


def _claims_more(row: VideoIndex, index: VideoIndex) -> bool:
    refuted = index.verdicts == Verdict.REFUSED
    return bool(
        np.any(
            refuted & ~np.isin(row.verdicts, (Verdict.REFUSED, Verdict.DECODED, Verdict.DECODED_TRAILING))
        )
    )


def _pixels(key: str, row: VideoIndex, seed: int, options: Mapping[str, Any] | None) -> str:
    """Return which frame differs from the container path's, "" where none does."""
    if row.container_reason is not None or not row.num_frames:
        return ""
    draw = random.Random(f"{seed} {key}")  # noqa: S311 - likewise
    numbers = sorted(draw.sample(range(row.num_frames), min(FRAMES, row.num_frames)))
    try:
        with (
            VideoReader.open(key, index=row, storage_options=options) as planned,
            VideoReader.open(key, path="container", storage_options=options) as whole,
        ):
            got, expected = planned.read_frames_numpy(numbers), whole.read_frames_numpy(numbers)
    except FluxonGopError as error:
        return str(error)
    if got.shape != expected.shape:
        return f"frames are {got.shape[1:]}, FFmpeg's {expected.shape[1:]}"
    wrong = [n for n, a, b in zip(numbers, got, expected, strict=True) if not np.array_equal(a, b)]
    return f"frame {wrong[0]} is not FFmpeg's" if wrong else ""
