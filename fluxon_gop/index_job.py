"""The job that builds one video's index: the parser's ranges, fetched as waves.

Joins the pure parser to any source. Costs normally two waves of one request each, with the check of the
entry points one more wave of small ranges.
"""

from __future__ import annotations

from typing import Any

from fluxon_gop.errors import InvalidRequestError, Mp4Error, SourceError
from fluxon_gop.index_table import IndexTable
from fluxon_gop.jobs import Job, Wave
from fluxon_gop.model import VideoIndex
from fluxon_gop.mp4_index import HEAD_BYTES, index_steps
from fluxon_gop.plan import GAP_BYTES
from fluxon_gop.ranges import ByteRange, as_array, as_ranges, merge
from fluxon_gop.sources.range_source import RangeSource
from fluxon_gop.sparse_buffer import SparseBuffer
from fluxon_gop.stats import ReadStats, WaveKind
from fluxon_gop.table_rows import Row


def index_job(
    source: RangeSource,
    stats: ReadStats,
    *,
    stream_index: int | None = None,
    check: bool = False,
    hint: ByteRange | None = None,
) -> Job[VideoIndex]:
    """Return the job that builds the index of ``source``.

    Args:
        source: the file; after the first wave its signature is known.
        stats: counts the build, and a hint that proved wrong as a stale row.
        stream_index: see :func:`fluxon_gop.build_index`.
        check: prove or refuse all key samples.
        hint: where the movie box is said to lie; saves the head's wave where true.

    Raises:
        Mp4Error: the file has no index.
    """
    stats.index_builds += 1
    held = SparseBuffer(source, stats)
    if hint is not None:
        try:
            (data,) = yield Wave(WaveKind.HEAD_MOOV, source, (hint,))
            held.insert(hint.start, data)
        except (SourceError, InvalidRequestError):
            stats.stale_rows += 1
            hint = None
    if hint is None:
        (data,) = yield Wave(WaveKind.HEAD_MOOV, source, (ByteRange(0, HEAD_BYTES),), head=True)
        held.insert(0, data)
    steps = index_steps(source.signature, stream_index=stream_index, check=check, hint=hint)
    name = source.name
    try:
        ranges = next(steps)
        while True:
            missing = [r for r in ranges if not held.holds(*r)]
            if missing:
                if hint is not None and ranges[0].start == 0:
                    # The parser starts over from the head: the hint was wrong.
                    stats.stale_rows += 1
                    hint = None
                # Small ranges that lie close together come in one request.
                wave = as_ranges(merge(as_array(missing), GAP_BYTES if len(missing) > 1 else 0))
                fetched = yield Wave(WaveKind.HEAD_MOOV, source, wave, adds=True)
                held.insert_all(wave, fetched)
            ranges = steps.send([held.view(*r) for r in ranges])
    except StopIteration as stop:
        index: VideoIndex = stop.value
        return index
    except Mp4Error as error:
        # The parser does not know whose bytes it parses.
        numbers = {**error.numbers, "source": name, "reason": error.message}
        text = f"{name}: {error.message}"
        raise type(error)(text, **numbers) from error


def look_up(table: IndexTable, keys: list[Any], stats: ReadStats) -> list[Row]:
    """Return the rows of ``keys``; a read of the table counts as one wave."""
    held = table.held(keys)
    if held is not None:
        return held
    rows = table.lookup(keys)
    stats.count_wave(WaveKind.INDEX, 1, 0)
    stats.depth += 1
    return rows
