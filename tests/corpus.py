"""The corpus of real files, and what its records say of each."""

from __future__ import annotations

import csv
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import av
import numpy as np

CORPUS = Path(__file__).resolve().parent.parent.parent / "shared" / "corpus"

PLANAR = {"h264", "hevc", "av1", "vp9"}


class RealFile(NamedTuple):
    """One file: its path, its records, and FFmpeg's number of frames (None where it is damaged)."""

    path: Path
    manifest: dict[str, str]
    frames: dict[str, str]

    @property
    def plain(self) -> bool:
        """Not fragmented, encrypted or damaged; H.264, HEVC, AV1 or VP9 in MP4; shows all its samples."""
        properties, notes = self.manifest["properties"], self.frames["notes"]
        return (
            "mov,mp4" in self.manifest["ffprobe_format"]
            and self.manifest["codec"] in PLANAR
            and "mvex" not in properties
            and "enc:" not in properties
            and "threading-dependent" not in notes
            and self.frames["table_samples"] == self.truth_count
            and self.frames["pyav181_discard"] == "0"
        )

    @property
    def truth_count(self) -> str:
        """The number of frames of the best stream by the records."""
        best = CORPUS / "truth" / f"{self.path.name}.pyav181.best.tsv"
        if best.exists():
            return str(sum(not line.startswith("#") for line in best.read_text().splitlines()))
        return self.frames["pyav181_frames"]


def _rows(name: str) -> dict[str, dict[str, str]]:
    with (CORPUS / name).open(newline="") as file:
        return {row["file"]: row for row in csv.DictReader(file, delimiter="\t")}


def real_files() -> list[RealFile]:
    """Return all files of the corpus, [] without it."""
    if not CORPUS.is_dir():
        return []
    manifest, frames = _rows("MANIFEST.tsv"), _rows("FRAMES.tsv")
    return [
        RealFile(CORPUS / "files" / name, manifest[name], frames[name])
        for name in sorted(manifest)
        if (CORPUS / "files" / name).exists()
    ]


@lru_cache(maxsize=1)
def truth(
    path: Path, keep: frozenset[int] | None, size: int | None
) -> tuple[dict[int, np.ndarray], int, bool]:
    """Return (pictures by frame number, how many frames came, damaged) of FFmpeg's full decode.

    ``keep`` limits which pictures are kept (None: all), ``size`` scales them to a square. The last answer is kept: a file
    is read in several ways one after another.
    """
    pictures: dict[int, np.ndarray] = {}
    count = 0
    try:
        with av.open(str(path), metadata_errors="ignore") as container:
            stream = container.streams.best("video")
            if stream is None or stream.codec_context is None:
                return {}, 0, True
            stream.thread_type = "NONE"
            stream.codec_context.thread_count = 1
            for frame in container.decode(stream):
                if keep is None or count in keep:
                    rgb = frame.reformat(size, size, format="rgb24", interpolation="BILINEAR", threads=1)
                    pictures[count] = rgb.to_ndarray()
                count += 1
    except av.error.FFmpegError:
        return pictures, count, True
    return pictures, count, False
