"""Many videos to index rows: listing, building side by side, writing to a table.

The roof over parser, prefetch and table; the command line is its thin skin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fluxon_gop.decode_check import check_by_decoding
from fluxon_gop.errors import FluxonGopError, InvalidRequestError
from fluxon_gop.index_job import index_job
from fluxon_gop.jobs import run_one
from fluxon_gop.model import VideoIndex
from fluxon_gop.prefetch import Crew
from fluxon_gop.ranges import ByteRange
from fluxon_gop.requests import Uri
from fluxon_gop.sources import RangeSource, open_source
from fluxon_gop.stats import ReadStats

BATCH = 64
"""Videos indexed side by side."""
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
