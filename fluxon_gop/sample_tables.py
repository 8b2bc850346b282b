"""The sample tables of one track, expanded to one value a sample.

Pure, vectorised: no Python loop per sample. What makes the tables uncertain is named, not guessed at.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fluxon_gop.mp4_boxes import (
    Box,
    child,
    chunk_offsets,
    decode_shift,
    need_child,
    run_values,
    sample_chunks,
    sample_sizes,
    sync_samples,
)
from fluxon_gop.ranges import Int64Array


class SampleTables(NamedTuple):
    """The sample tables of one track, expanded."""

    offset: Int64Array
    size: Int64Array
    dts: Int64Array
    composition: Int64Array | None
    keys: Int64Array
    entry: npt.NDArray[np.uint8]
    last_duration: int
    decode_shift: int
    trouble: str | None

    @property
    def pts(self) -> Int64Array:
        """Composition times from 0, before the edit list."""
        return self.dts if self.composition is None else self.dts + self.composition

    @classmethod
    def read(cls, stbl: Box, file_size: int) -> SampleTables:
        """Expand stsz, stsc, stco, stts, ctts and stss, vectorised."""
        trouble = None
        size = sample_sizes(stbl, file_size)
        chunks = chunk_offsets(stbl)
        per_chunk, entry = sample_chunks(stbl, len(chunks), len(size))
        count = int(per_chunk.sum())
        if count < len(size):
            trouble = f"the chunks hold {count} of {len(size)} samples"
        size = size[:count]
        before = np.cumsum(size) - size
        first = np.cumsum(per_chunk) - per_chunk
        held = per_chunk > 0
        offset = before + np.repeat(chunks[held] - before[first[held]], per_chunk[held])

        durations = run_values(need_child(stbl, "stts"), count, signed=True)
        if len(durations) < count:
            trouble = trouble or f"stts times {len(durations)} of {count} samples"
            durations = np.append(durations, np.zeros(count - len(durations), np.int64))
        if count and int(durations.min()) < 0:
            trouble = trouble or "stts has a negative duration"
        dts = np.cumsum(durations) - durations
        composition, shift = None, 0
        ctts = child(stbl, "ctts")
        if ctts is not None:
            shift = decode_shift(ctts)
            composition = run_values(ctts, count, signed=True)
            if len(composition) < count:
                trouble = trouble or f"ctts times {len(composition)} of {count} samples"
                composition = np.append(composition, np.zeros(count - len(composition), np.int64))
            if count and int(np.abs(composition).max()) >= 1 << 28:
                trouble = trouble or "ctts has an absurd offset"
        keys = sync_samples(stbl, count)
        if keys is None:
            keys = np.arange(count, dtype=np.int64)
        used = entry[held]
        uniform = not len(used) or bool((used == used[0]).all())
        per_sample = used[:1] if uniform else np.repeat(used, per_chunk[held])
        return cls(
            offset,
            size,
            dts,
            composition,
            keys,
            np.minimum(per_sample, 255).astype(np.uint8),
            int(durations[-1]) if count else 0,
            shift,
            trouble,
        )
