"""FluxonFS's VideoReader interface over any storage: exports, identity, caches, readers, pools.

``FluxonFsPatcher`` is the entry; docs/fluxonfs.md tells the way from a folder to frames.
"""

from __future__ import annotations

from fluxon_gop.fluxonfs.export import FluxonFsExport, MissPolicy
from fluxon_gop.fluxonfs.file_system import FluxonFsCache
from fluxon_gop.fluxonfs.patcher import FluxonFsPatcher
from fluxon_gop.fluxonfs.users import Users, hash_password
from fluxon_gop.fluxonfs.video_pool import (
    FluxonFsVideoReaderPool,
    FluxonFsVideoReadRequest,
    FluxonFsVideoReadResult,
)
from fluxon_gop.fluxonfs.video_reader import FluxonFsVideoReader

__all__ = [
    "FluxonFsCache",
    "FluxonFsExport",
    "FluxonFsPatcher",
    "FluxonFsVideoReadRequest",
    "FluxonFsVideoReadResult",
    "FluxonFsVideoReader",
    "FluxonFsVideoReaderPool",
    "MissPolicy",
    "Users",
    "hash_password",
]
