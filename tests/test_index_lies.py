"""A damaged index row never gives a wrong picture."""

from __future__ import annotations

import random
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

import fluxon_gop as fg
from fluxon_gop import index_rows
from fluxon_gop.table_rows import Damaged, _decoded
from tests.media import full_decode

LIES = [
    "sample_size",
    "sample_gap",
    "gop_frame_idx",
    "first_offset",
    "gop_verdict",
    "entries",
    "composition_offset",
]
NUMBERS = {"first_offset", "first_dts", "timescale", "width"}


def _row(index: fg.VideoIndex) -> dict:
    return index_rows.rows_of(index_rows.encode([("key", index)]))[0]


def _lie(row: dict, column: str, generator: random.Random) -> dict:
    """Return a copy of the row with one value of a column changed."""
    lie = dict(row)
    if column == "entries":
        entry = dict(lie["entries"][0])
        config = bytearray(entry["config"])
        config[generator.randrange(8, len(config))] ^= 1 << generator.randrange(8)
        lie["entries"] = [{**entry, "config": bytes(config)}]
    elif column in NUMBERS:
        lie[column] += generator.choice([-7, -1, 1, 3, 1000])
    else:
        values = (
            np.repeat(lie[column], 59)
            if len(lie[column]) == 1 and column == "sample_gap"
            else lie[column].copy()
        )
        place = generator.randrange(len(values))
        values[place] = max(0, int(values[place]) + generator.choice([-3, -1, 1, 2, 64]))
        if column == "gop_frame_idx":
            values = np.unique(np.minimum(values, 59))
            lie["gop_byte_offset"] = lie["gop_byte_offset"][: len(values)]
            lie["gop_verdict"] = np.array([1], np.uint8)
        lie[column] = values
    return lie


@pytest.mark.parametrize("name", ["bframes", "hevc", "av1", "vp9"])
def test_a_changed_value_fails_the_checksum(media, name):
    """1,000 seeded changes over four codecs: none passes for a row."""
    row = _row(fg.build_index(media[name]))
    generator = random.Random(11)
    columns = [*LIES, *NUMBERS] if name in {"bframes", "hevc"} else [c for c in LIES if c != "entries"]
    for _ in range(250):
        lie = _lie(row, generator.choice(columns), generator)
        same = all(np.array_equal(np.asarray(lie[c], object), np.asarray(row[c], object)) for c in row)
        assert same or isinstance(_decoded(lie), Damaged)


@pytest.mark.parametrize("name", ["bframes", "hevc"])
def test_a_lie_under_a_right_checksum_is_caught_where_the_bytes_betray_it(media, name, capsys):
    """Offsets, sizes and entry points that the bytes contradict lead to a fresh index and exact frames."""
    path = media[name]
    pictures = full_decode(path)
    row = _row(fg.build_index(path))
    generator = random.Random(5)
    outcome: Counter[str] = Counter()
    for number in range(120):
        column = ["sample_size", "sample_gap", "first_offset", "gop_frame_idx"][number % 4]
        lie = _lie(row, column, generator)
        lie["row_checksum"] = index_rows.checksum(lie)
        found = _decoded(lie)
        if isinstance(found, Damaged):
            outcome["refused as a row"] += 1
            continue
        frames = generator.sample(range(60), 4)
        with fg.VideoReader.open(path, index=found) as reader:
            try:
                got = reader.read_frames_numpy(frames)
            except fg.FluxonGopError:
                outcome["typed error"] += 1
                continue
            stats = reader.stats()
        assert np.array_equal(pictures[frames], got), f"lie {number} in {column} gave another picture"
        outcome["found, index built again" if stats.stale_rows else "not in the way of these frames"] += 1
    with capsys.disabled():
        sys.stdout.write(f"\n{name}: of 120 lies {dict(outcome)}\n")
    assert outcome["found, index built again"] > 30
    assert outcome["typed error"] == 0


def test_a_row_of_another_video_is_found_by_its_bytes(media):
    """The right signature on the wrong index: the NAL units do not fit, the index is built again."""
    path = media["bframes"]
    other = fg.build_index(media["opengop"])
    forged = replace(other, signature=fg.LocalSource(path).signature)
    pictures = full_decode(path)
    with fg.VideoReader.open(path, index=forged) as reader:
        assert np.array_equal(pictures[[7, 44]], reader.read_frames_numpy([7, 44]))
        assert reader.stats().stale_rows == 1


def test_rows_are_arrow(media):
    """The rows that the lies start from are plain Arrow."""
    assert isinstance(index_rows.encode([("k", fg.build_index(media["vp9"]))]), pa.Table)
