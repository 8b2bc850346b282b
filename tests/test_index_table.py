"""The sidecar table: append, replace, look up; rows that do not fit are found and never used."""

from __future__ import annotations

import os
import pickle
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import lance
import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest

import fluxon_gop as fg
from fluxon_gop import index_rows, lance_rows
from fluxon_gop.lance_rows import LanceRows
from fluxon_gop.table_rows import Damaged, Hint
from tests.media import full_decode

ARRAYS = (
    "sample_offset",
    "sample_size",
    "sample_pts",
    "sample_dts",
    "frame_sample",
    "hidden",
    "key_samples",
    "verdicts",
)


@pytest.fixture(params=["table.arrow", "table.lance"])
def uri(request, tmp_path) -> str:
    return str(tmp_path / request.param)


@pytest.fixture
def indexes(media) -> dict[str, fg.VideoIndex]:
    return {str(path): fg.build_index(path) for path in media.values()}


def _same(one: fg.VideoIndex, other: fg.VideoIndex) -> bool:
    scalars = (
        "signature",
        "moov_range",
        "stream_index",
        "timescale",
        "entries",
        "width",
        "height",
        "matrix",
    )
    rest = ("stream", "last_duration", "container_reason")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ARRAYS) and all(
        getattr(one, name) == getattr(other, name) for name in (*scalars, *rest)
    )


def test_what_is_appended_is_looked_up(uri, indexes):
    """Many keys at once come back in order, None for those that are not there."""
    with fg.IndexTable.open(uri, create=True) as table:
        table.append(indexes.items())
    with fg.IndexTable.open(uri) as table:
        keys = [*reversed(indexes), "nowhere"]
        rows = table.lookup(keys)
        assert len(indexes) == len(table)
        assert rows[-1] is None
        assert all(_same(indexes[key], row) for key, row in zip(keys, rows[:-1], strict=False))
        assert set(indexes) == set(table.keys())
        assert next(iter(indexes)) in table


def test_replace_keeps_one_row_a_video(uri, indexes):
    """A replaced row stands once, with the new content; the others stay."""
    (first, index), *_ = indexes.items()
    other = replace(index, signature=fg.Signature(1, "new"))
    with fg.IndexTable.open(uri, create=True) as table:
        table.append(indexes.items())
        table.lookup([first])
        table.replace([(first, other), ("fresh", index)])
        assert len(indexes) + 1 == len(table)
        assert fg.Signature(1, "new", None) == table.signature(first)
    with fg.IndexTable.open(uri) as table:
        assert _same(other, table.lookup([first])[0])
        assert table.signature("nowhere") is None


def test_append_refuses_a_key_that_is_there(uri, indexes):
    """A second row for a video is refused by name of the way out."""
    item = next(iter(indexes.items()))
    with fg.IndexTable.open(uri, create=True) as table:
        table.append([item])
        with pytest.raises(fg.IndexTableError, match=r"use replace\(\)"):
            table.append([item])


def test_a_data_set_made_by_many_at_once_has_all_rows(tmp_path):
    """Whoever comes second appends, where it looked before the first one had made the data set."""
    rows = pa.table({"uri": ["a", "b"]})
    for n in range(5):
        place = str(tmp_path / f"{n}.lance")
        gate = threading.Barrier(4)

        def add(place: str = place, gate: threading.Barrier = gate) -> None:
            one = LanceRows(place, None)
            gate.wait()
            one.append(rows)

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(add) for _ in range(4)]:
                done.result()
        assert 8 == LanceRows(place, None).count()


def test_a_data_set_that_appears_between_two_looks_is_there(tmp_path, monkeypatch):
    """Not found, and then its data is: another process has made it meanwhile. Data without versions stays an error."""
    uri = str(tmp_path / "t.lance")
    has_data = lance_rows._has_data

    def appears(place: str) -> bool:
        lance.write_dataset(pa.table({"n": [1]}), place)
        return has_data(place)

    monkeypatch.setattr(lance_rows, "_has_data", appears)
    assert 1 == lance_rows.open_dataset(uri, None).count_rows()
    monkeypatch.undo()
    shutil.rmtree(tmp_path / "t.lance" / "_versions")
    with pytest.raises(fg.IndexTableError, match="cannot be opened"):
        lance_rows.open_dataset(uri, None)


def test_rows_are_added_while_another_writer_puts_all_anew(tmp_path):
    """An append that an overwrite has overtaken is tried again on the newest version: neither of the two is an error."""
    rows = pa.table({"uri": ["a"]})
    for n in range(6):
        place = str(tmp_path / f"{n}.lance")
        LanceRows(place, None).append(rows)
        gate = threading.Barrier(2, timeout=30)
        one, other = LanceRows(place, None), LanceRows(place, None)
        assert 1 == one.count() == other.count()

        def anew(gate: threading.Barrier = gate, other: LanceRows = other) -> None:
            gate.wait()
            other.overwrite(rows)

        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(anew)
            gate.wait()
            one.append(pa.table({"uri": ["b"]}))
            done.result()
        assert LanceRows(place, None).count() in {1, 2}


def test_keys_of_exports_and_uris_live_side_by_side(uri, indexes):
    """A key is a uri, or (export, relpath)."""
    index = next(iter(indexes.values()))
    with fg.IndexTable.open(uri, create=True) as table:
        table.append([("x/y", index), (("x", "y"), replace(index, signature=fg.Signature(9)))])
        one, two = table.lookup(["x/y", ("x", "y")])
    assert (index.signature, fg.Signature(9, None, None)) == (one.signature, two.signature)


def test_a_missing_table_says_how_to_make_one(uri):
    """Opening nothing names the command that builds a table."""
    with pytest.raises(fg.IndexTableError, match="fluxon-gop index build SRC --to"):
        fg.IndexTable.open(uri)


def test_a_file_that_is_no_table_is_refused(tmp_path):
    """Noise, and an Arrow file with other columns, are refused by name."""
    (tmp_path / "noise.arrow").write_bytes(b"no arrow file")
    with pytest.raises(fg.IndexTableError, match="no Arrow IPC file"):
        fg.IndexTable.open(tmp_path / "noise.arrow")
    _write(tmp_path / "other.arrow", pa.table({"a": [1]}))
    with pytest.raises(fg.IndexTableError, match="its columns are a"):
        fg.IndexTable.open(tmp_path / "other.arrow")


def test_a_table_of_another_version_is_refused(tmp_path, indexes):
    """Another version number says which one is read here."""
    table = index_rows.encode(list(indexes.items())[:1])
    table = table.replace_schema_metadata({**table.schema.metadata, index_rows.VERSION_KEY: b"99"})
    _write(tmp_path / "v.arrow", table)
    with pytest.raises(fg.IndexVersionError, match="index version 99, this release reads"):
        fg.IndexTable.open(tmp_path / "v.arrow")


def test_a_closed_table_refuses_use(uri, indexes):
    """Use after close says so."""
    table = fg.IndexTable.open(uri, create=True)
    table.append(list(indexes.items())[:1])
    table.close()
    with pytest.raises(fg.ClosedError, match="closed"):
        table.lookup(["x"])


def test_a_pickle_of_a_table_reads_the_same_rows(uri, indexes):
    """A pickle carries the address, not the rows."""
    key, index = next(iter(indexes.items()))
    with fg.IndexTable.open(uri, create=True) as table:
        table.append(indexes.items())
        table.lookup(list(indexes))
        raw = pickle.dumps(table)
    assert len(raw) < 1000
    with pickle.loads(raw) as copy:
        assert _same(index, copy.lookup([key])[0])


def test_a_damaged_row_is_never_used_and_the_read_is_exact(media, tmp_path):
    """A row whose content does not fit its checksum is counted, and the index is built on the fly."""
    path = media["bframes"]
    table = index_rows.encode([(str(path), fg.build_index(path))])
    lie = pa.array(
        [[n + 1 for n in table.column("gop_frame_idx")[0].as_py()]],
        table.schema.field("gop_frame_idx").type,
    )
    at = table.schema.get_field_index("gop_frame_idx")
    _write(tmp_path / "lie.arrow", table.set_column(at, table.schema.field("gop_frame_idx"), lie))
    with fg.IndexTable.open(tmp_path / "lie.arrow") as opened:
        assert isinstance(opened.lookup([str(path)])[0], Damaged)
        with fg.VideoReader.open(path, index=opened) as reader:
            assert np.array_equal(full_decode(path)[[3, 40]], reader.read_frames_numpy([3, 40]))
            assert (1, 1) == (reader.stats().damaged_rows, reader.stats().index_builds)


def test_a_stale_row_is_never_used_and_the_read_is_exact(media, tmp_path):
    """A row of another version of the file is counted, and the index is built on the fly."""
    path = tmp_path / "video.mp4"
    path.write_bytes(media["bframes"].read_bytes())
    with fg.IndexTable.open(tmp_path / "t.arrow", create=True) as table:
        table.append([(str(path), fg.build_index(path))])
        path.write_bytes(media["hevc"].read_bytes())
        os.utime(path, (1, 1))
        with fg.VideoReader.open(path, index=table) as reader:
            assert np.array_equal(full_decode(path)[[3, 40]], reader.read_frames_numpy([3, 40]))
            assert (1, 1) == (reader.stats().stale_rows, reader.stats().index_builds)


def test_a_stale_row_of_a_remote_file_is_found_by_the_first_read(media, tmp_path, server):
    """Behind HTTP the stale row shows at the media wave (412); the read starts over and is exact."""
    folder = server.root
    path = folder / "changing.mp4"
    path.write_bytes(media["bframes"].read_bytes())
    try:
        uri = server.url("changing.mp4")
        with fg.IndexTable.open(tmp_path / "t.arrow", create=True) as table:
            table.append([(uri, fg.build_index(uri))])
            path.write_bytes(media["vp9"].read_bytes())
            with fg.VideoReaderPool(index=table) as pool:
                (result,) = pool.read_many([fg.VideoReadRequest(uri, [0, 33])])
            assert np.array_equal(full_decode(path)[[0, 33]], result.array)
            assert 1 == result.stats.stale_rows
    finally:
        path.unlink()


@pytest.mark.parametrize("lie", [False, True])
def test_a_row_with_the_three_seed_columns_is_a_hint(media, tmp_path, server, lie):
    """moov_range saves the head's read where it is true; a wrong one is found, counted, and harmless."""
    uri, path = server.url("faststart.mp4"), media["faststart"]
    index = fg.build_index(path)
    start, size = index.moov_range.start + 5 * lie, index.moov_range.size
    columns = {
        "uri": [uri],
        "moov_range": [[start, size]],
        "gop_frame_idx": [[0]],
        "gop_byte_offset": [[0]],
    }
    _write(tmp_path / "seed.arrow", pa.table(columns))
    with fg.IndexTable.open(tmp_path / "seed.arrow") as table:
        assert isinstance(table.lookup([uri])[0], Hint)
        server.reset()
        with fg.VideoReader.open(uri, index=table) as reader:
            assert np.array_equal(full_decode(path)[[7]], reader.read_frames_numpy([7]))
            assert int(lie) == reader.stats().stale_rows
            first = server.requests[0]
            assert (start, start + size) == (first.start, first.stop)
        with pytest.raises(fg.IndexTableError, match="has only moov_range"):
            table.replace([("a", index)])


def test_the_seed_columns_keep_their_meaning(media):
    """moov_range is (offset, size); GOP columns are each sync sample's number and offset; the tag is there."""
    path = media["bframes"]
    index = fg.build_index(path)
    table = index_rows.encode([("k", index)])
    row = table.to_pylist()[0]
    data = path.read_bytes()
    offset, size = row["moov_range"]
    assert b"moov" == data[offset + 4 : offset + 8]
    assert size == int.from_bytes(data[offset : offset + 4])
    assert index.sample_offset[row["gop_frame_idx"]].tolist() == row["gop_byte_offset"]
    for name in index_rows.SWM_COLUMNS:
        assert {b"swm:video_index_version": b"1"} == table.schema.field(name).metadata


def test_rows_are_small(media):
    """A list column of equal values is one value: a file without B-frames stores no per-sample times."""
    row = index_rows.encode([("k", fg.build_index(media["longgop"]))]).to_pylist()[0]
    assert 1 == len(row["sample_duration"]) == len(row["sample_gap"]) == len(row["gop_frame_idx"])
    assert 60 == len(row["sample_size"])


def test_look_ups_are_cached_and_bounded(uri, indexes, monkeypatch):
    """The second look-up of a key reads nothing."""
    with fg.IndexTable.open(uri, create=True) as table:
        table.append(indexes.items())
        keys = list(indexes)
        assert table.held(keys) is None
        table.lookup(keys)
        monkeypatch.setattr(table._store, "take", None)
        assert all(isinstance(row, fg.VideoIndex) for row in table.held(keys))
        assert all(isinstance(row, fg.VideoIndex) for row in table.lookup(keys))


def _write(path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as out:
        out.write_table(table)
