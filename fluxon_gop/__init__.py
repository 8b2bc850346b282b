"""Exact video frames from remote storage: planned byte ranges, one wave of requests, decoded from memory.

The library is synchronous. Start with :class:`VideoReader` for one video, :class:`VideoReaderPool` for
batches over many, :class:`IndexTable` for the indexes that make a batch cost one round trip.
"""

from __future__ import annotations

from importlib.metadata import version as _version

from fluxon_gop.batch_plan import BatchPlan, PlannedVideo
from fluxon_gop.clip_dataset import ClipDataset
from fluxon_gop.clip_samples import Clip
from fluxon_gop.clips import Clips, FrameLists, Pairs, Timestamps, Windows
from fluxon_gop.errors import (
    BoxError,
    ClosedError,
    DeadlineError,
    DecodeError,
    EncryptedVideoError,
    FluxonGopError,
    ForkedProcessError,
    FrameIndexError,
    FrameTimestampError,
    IndexMissingError,
    IndexTableError,
    IndexVersionError,
    InvalidRequestError,
    Mp4Error,
    NotMp4Error,
    ShortReadError,
    SourceChangedError,
    SourceError,
    SourceNotFoundError,
    SourcePermissionError,
    StaleIndexError,
    TruncatedMp4Error,
    UnsupportedMp4Error,
)
from fluxon_gop.index_build import build_index
from fluxon_gop.index_table import IndexTable
from fluxon_gop.lance_video import LanceVideoTable
from fluxon_gop.lance_video_writer import LanceVideoWriter, add_index_columns
from fluxon_gop.loader import ClipLoader
from fluxon_gop.model import Signature, Verdict, VideoIndex
from fluxon_gop.pool import VideoReaderPool
from fluxon_gop.reader import VideoReader
from fluxon_gop.requests import VideoReadRequest, VideoReadResult
from fluxon_gop.samplers import ClipSampler, LookAhead
from fluxon_gop.sources import (
    FsspecSource,
    LanceBlobSource,
    LocalSource,
    MemorySource,
    ObjectStoreSource,
    ObspecSource,
    RangeSource,
    Trace,
    TracedSource,
    open_source,
)
from fluxon_gop.stats import ReadStats, WaveKind

__version__ = _version("fluxon-gop")

__all__ = [
    "BatchPlan",
    "BoxError",
    "Clip",
    "ClipDataset",
    "ClipLoader",
    "ClipSampler",
    "Clips",
    "ClosedError",
    "DeadlineError",
    "DecodeError",
    "EncryptedVideoError",
    "FluxonGopError",
    "ForkedProcessError",
    "FrameIndexError",
    "FrameLists",
    "FrameTimestampError",
    "FsspecSource",
    "IndexMissingError",
    "IndexTable",
    "IndexTableError",
    "IndexVersionError",
    "InvalidRequestError",
    "LanceBlobSource",
    "LanceVideoTable",
    "LanceVideoWriter",
    "LocalSource",
    "LookAhead",
    "MemorySource",
    "Mp4Error",
    "NotMp4Error",
    "ObjectStoreSource",
    "ObspecSource",
    "Pairs",
    "PlannedVideo",
    "RangeSource",
    "ReadStats",
    "ShortReadError",
    "Signature",
    "SourceChangedError",
    "SourceError",
    "SourceNotFoundError",
    "SourcePermissionError",
    "StaleIndexError",
    "Timestamps",
    "Trace",
    "TracedSource",
    "TruncatedMp4Error",
    "UnsupportedMp4Error",
    "Verdict",
    "VideoIndex",
    "VideoReadRequest",
    "VideoReadResult",
    "VideoReader",
    "VideoReaderPool",
    "WaveKind",
    "Windows",
    "__version__",
    "add_index_columns",
    "build_index",
    "open_source",
]
