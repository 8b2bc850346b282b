"""Lance video tables: another project's table read, extended in place, appended to in its way, read again."""

from __future__ import annotations

import datetime as dt
import io
import json
import shutil
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pytest

import fluxon_gop as fg
from fluxon_gop.cli import main
from fluxon_gop.encode import Recipe, numbered_picture
from fluxon_gop.video_columns import STRUCT_COLUMN
from tests.conftest import ROOT
from tests.media import make

lance = pytest.importorskip("lance")
SHARED = ROOT.parent / "shared" / "lance_video" / "episodes"
OTHERS = pytest.mark.skipif(
    not SHARED.is_dir(), reason="the other project's table is not beside the checkout"
)
THREE = ["episode_idx", "video_key", "video_bytes"]


def _decoded(data: bytes) -> np.ndarray:
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        stream.thread_type = "NONE"
        pictures = [
            frame.reformat(format="rgb24", interpolation="BILINEAR", threads=1).to_ndarray()
            for frame in container.decode(stream)
        ]
    return np.stack(pictures)


def _blobs(uri) -> list[bytes]:
    dataset = lance.dataset(str(uri))
    return [
        data for _, data in dataset.read_blobs("video_bytes", indices=list(range(dataset.count_rows())))
    ]


def _keys(uri) -> list[dict]:
    return lance.dataset(str(uri)).to_table(columns=THREE[:2]).to_pylist()


@pytest.fixture
def others(tmp_path) -> Path:
    """A copy of the table that stable-worldmodel's writer made."""
    shutil.copytree(SHARED, tmp_path / "episodes")
    return tmp_path / "episodes" / "episodes_videos.lance"


def _append_in_their_way(uri: Path, blobs: list[bytes], episode: int) -> None:
    """Add one episode of two views by lancedb's ``add``, with exactly the three columns."""
    lancedb = pytest.importorskip("lancedb")
    table = lancedb.connect(str(uri.parent)).open_table(uri.stem)
    table.add(
        [
            {"episode_idx": episode, "video_key": view, "video_bytes": data}
            for view, data in zip(("pixels", "pixels_wrist"), blobs, strict=True)
        ]
    )


def _all_exact(uri: Path) -> dict[str, int | float]:
    """Read all windows of all episodes in batches, hold them against the blobs' own decode; return the cost."""
    truth = {
        (key["episode_idx"], key["video_key"]): _decoded(data)
        for key, data in zip(_keys(uri), _blobs(uri), strict=True)
    }
    table = fg.LanceVideoTable.open(uri)
    with table.clips(fg.Windows(5, 4, 2)) as data:
        assert sum(
            len(range(0, len(truth[e, "pixels"]) - 8, 4)) for e in table.episodes_of().tolist()
        ) == len(data)
        for start in range(0, len(data), 12):
            for sample in data.__getitems__(range(start, min(start + 12, len(data)))):
                for view, frames in sample["frames"].items():
                    whole = truth[sample["episode_idx"], view]
                    assert np.array_equal(whole[sample["frame_numbers"]], frames)
        return data.cost() | {"built": data.videos.stats.index_builds}


@OTHERS
def test_the_other_projects_table(others):
    """Read as it is; extended in place; appended to in its way; extended again: frames, rows and columns unchanged."""
    keys, blobs = _keys(others), _blobs(others)
    assert 6 == _all_exact(others)["built"]
    report = fg.add_index_columns(others)
    assert (6, 0, []) == (report.built, report.skipped, report.failures)
    assert report.stats.total_bytes < sum(map(len, blobs)) * 1.1
    assert keys == _keys(others)
    assert blobs == _blobs(others)
    assert THREE == lance.dataset(str(others)).schema.names[:3]
    assert 0 == _all_exact(others)["built"]
    _append_in_their_way(others, blobs[2:4], 3)
    assert [*keys, *[{"episode_idx": 3, "video_key": v} for v in ("pixels", "pixels_wrist")]] == _keys(
        others
    )
    assert 2 == _all_exact(others)["built"]
    again = fg.add_index_columns(others)
    assert (2, 6) == (again.built, again.skipped)
    assert 0 == _all_exact(others)["built"]
    assert [*blobs, *blobs[2:4]] == _blobs(others)
    assert 8 == len(_keys(others))


@OTHERS
def test_a_batch_is_one_call(others, monkeypatch):
    """All episodes and views of a batch come by one read_blob_ranges call, of no more than each video's union of spans."""
    fg.add_index_columns(others)
    calls = []
    plain = lance.LanceDataset.read_blob_ranges

    def counted(self, column, ranges, **options):
        calls.append(list(ranges))
        return plain(self, column, ranges, **options)

    monkeypatch.setattr(lance.LanceDataset, "read_blob_ranges", counted)
    with fg.LanceVideoTable.open(others).clips(fg.Windows(4, 2)) as data:
        numbers = [0, 1, 2, 30, 31, 50, 60]
        plan = data.explain(numbers)
        data.__getitems__(numbers)
        cost = data.cost()
    assert 1 == len(calls)
    assert sorted({row for row, _, _ in calls[0]}) == list(range(6))
    assert len(calls[0]) == plan.requests == cost["media_requests"] == 6
    assert sum(length for _, _, length in calls[0]) == cost["media_bytes"] == cost["total_bytes"]
    assert 1 == cost["media_waves"]


@OTHERS
def test_columns_by_the_command_line(others, capsys):
    """``index add-columns`` tells what it did, in words and as JSON; a table that is none of videos is a plain error."""
    assert 0 == main(["index", "add-columns", str(others), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (6, 0, 0) == (told["built"], told["skipped"], told["failed"])
    assert 0 == main(["index", "add-columns", str(others)])
    assert "0 built, 6 skipped, 0 failed" in capsys.readouterr().out
    assert 1 == main(["index", "add-columns", str(others.parent / "episodes.lance")])
    assert "no video table" in capsys.readouterr().err


def _pictures(count: int, first: int = 0) -> list[np.ndarray]:
    return [numbered_picture(first + n, 96, 64) for n in range(count)]


RECIPE = Recipe(rate=10, options={"g": "5", "preset": "ultrafast"})


def test_a_table_of_our_own(tmp_path, media):
    """Frames and MP4 bytes written with their columns are read by one media wave, without a build."""
    uri = tmp_path / "videos.lance"
    with fg.LanceVideoWriter(uri, recipe=RECIPE) as writer:
        writer.write(0, "front", _pictures(30))
        writer.write(0, "wrist", media["hevc"].read_bytes())
        writer.write(1, "front", _pictures(20, 100))
        writer.commit()
        writer.write(1, "wrist", memoryview(media["bframes"].read_bytes()))
    assert not writer.without_index
    table = fg.LanceVideoTable.open(uri)
    assert (["front", "wrist"], 4, [0, 1]) == (table.views, len(table), table.episodes_of().tolist())
    schema = lance.dataset(str(uri)).schema
    assert [*THREE, "moov_range", "gop_frame_idx", "gop_byte_offset", STRUCT_COLUMN] == schema.names
    assert b"1" == schema.metadata[b"swm:video_index_version"]
    cost = _all_exact_of(uri)
    assert (0, 0) == (cost["built"], cost["head_moov_requests"])
    row = (
        lance.dataset(str(uri))
        .take([0], columns=["moov_range", "gop_frame_idx", "gop_byte_offset"])
        .to_pylist()[0]
    )
    data = _blobs(uri)[0]
    start, size = row["moov_range"]
    assert b"moov" == data[start + 4 : start + 8]
    assert size == int.from_bytes(data[start : start + 4], "big")
    assert [0, 5, 10, 15, 20, 25] == row["gop_frame_idx"]
    index = fg.build_index(fg.MemorySource(data))
    assert index.sample_offset[row["gop_frame_idx"]].tolist() == row["gop_byte_offset"]


def _all_exact_of(uri) -> dict[str, int | float]:
    truth = [_decoded(data) for data in _blobs(uri)]
    keys = [(key["episode_idx"], key["video_key"]) for key in _keys(uri)]
    table = fg.LanceVideoTable.open(uri)
    with table.clips(fg.Windows(3, 5)) as data:
        for sample in data.__getitems__(range(len(data))):
            for view, frames in sample["frames"].items():
                whole = truth[keys.index((sample["episode_idx"], view))]
                assert np.array_equal(whole[sample["frame_numbers"]], frames)
        return data.cost() | {"built": data.videos.stats.index_builds}


@pytest.mark.parametrize("kept", [[], ["moov_range", "gop_frame_idx", "gop_byte_offset"]])
@pytest.mark.parametrize("stable", [True, False])
def test_appending_keeps_the_tables_schema(tmp_path, media, kept, stable):
    """A table without our columns, or with the seed's three only, is appended to as it is, and read."""
    data = media["bframes"].read_bytes()
    schema = pa.schema(
        [
            pa.field("episode_idx", pa.int32()),
            pa.field("video_key", pa.string()),
            lance.blob_field("video_bytes"),
            *[pa.field(name, pa.list_(pa.int64())) for name in kept],
        ]
    )
    columns = [pa.array([0], pa.int32()), pa.array(["a"]), lance.blob_array([data])]
    columns += [pa.array([None], pa.list_(pa.int64())) for _ in kept]
    uri = tmp_path / "t.lance"
    lance.write_dataset(
        pa.table(columns, schema=schema), str(uri), data_storage_version="2.2", enable_stable_row_ids=stable
    )
    before = lance.dataset(str(uri)).schema
    with fg.LanceVideoWriter(uri) as writer:
        writer.write(1, "a", data)
    assert before == lance.dataset(str(uri)).schema
    cost = _all_exact_of(uri)
    assert 2 == cost["built"]
    if kept:
        row = lance.dataset(str(uri)).take([1], columns=kept).to_pylist()[0]
        assert data[row["moov_range"][0] :][4:8] == b"moov"
        table = fg.LanceVideoTable.open(uri)
        with fg.VideoReader.open(table.address(1, "a"), index=table.index) as reader:
            # The seed's columns are a hint: the movie box without the head.
            assert 1 == reader.stats().requests[fg.WaveKind.HEAD_MOOV]
    report = fg.add_index_columns(uri)
    assert 2 == report.built
    assert 0 == _all_exact_of(uri)["built"]


@pytest.mark.parametrize("stable", [True, False])
def test_columns_of_rows_that_moved_or_went(tmp_path, media, stable):
    """Several fragments, deleted rows, blobs that are null or no MP4, compaction: each row has its own columns."""
    names = ["bframes", "hevc", "faststart", "av1", "opengop", "vp9"]
    uri = str(tmp_path / "t.lance")
    field = lance.blob_field("video_bytes")
    for n, name in enumerate(names):
        schema = pa.schema([pa.field("episode_idx", pa.int32()), pa.field("video_key", pa.string()), field])
        columns = [
            pa.array([2 * n, 2 * n + 1], pa.int32()),
            pa.array(["a", "a"]),
            lance.blob_array([media[name].read_bytes(), b"no video" if n else None]),
        ]
        lance.write_dataset(
            pa.table(columns, schema=schema),
            uri,
            mode="append" if n else "create",
            data_storage_version="2.2",
            enable_stable_row_ids=stable,
        )
    lance.dataset(uri).delete("episode_idx in (2, 7)")
    keys = _keys(uri)
    report = fg.add_index_columns(uri)
    assert (5, 0, 5) == (report.built, report.skipped, len(report.failures))
    assert {"NotMp4Error", "SourceNotFoundError"} == {type(error).__name__ for _, error in report.failures}
    assert keys == _keys(uri)
    old = fg.LanceVideoTable.open(uri)
    _check_rows(old, media, names)
    lance.dataset(uri).optimize.compact_files()
    # Opened before, at its version, and anew.
    _check_rows(old, media, names)
    _check_rows(fg.LanceVideoTable.open(uri), media, names)
    assert 5 == fg.add_index_columns(uri).skipped


def _check_rows(table, media, names):
    from tests.media import full_decode

    with fg.VideoReaderPool(index=table.index) as pool:
        wanted = [n for n in range(len(names)) if 2 * n != 2]
        requests = [fg.VideoReadRequest(table.address(2 * n, "a"), [30, 2]) for n in wanted]
        for n, result in zip(wanted, pool.read_many(requests), strict=True):
            assert np.array_equal(full_decode(media[names[n]])[[30, 2]], result.array)
            assert not result.stats.index_builds
            assert not result.stats.stale_rows


def test_a_blob_that_was_replaced_is_not_read_by_the_old_columns(tmp_path, media):
    """Where another writer has put other bytes into a row, its columns do not fit by their size, and are not used."""
    uri = str(tmp_path / "t.lance")
    with fg.LanceVideoWriter(uri) as writer:
        writer.write(0, "a", media["bframes"].read_bytes())
    dataset = lance.dataset(uri)
    row = dataset.to_table(
        columns=[
            "episode_idx",
            "video_key",
            "moov_range",
            "gop_frame_idx",
            "gop_byte_offset",
            STRUCT_COLUMN,
        ]
    )
    other = media["hevc"].read_bytes()
    schema = pa.schema([*row.schema, lance.blob_field("video_bytes")])
    dataset.delete("true")
    lance.write_dataset(
        pa.table([*row.columns, lance.blob_array([other])], schema=schema), uri, mode="append"
    )
    table = fg.LanceVideoTable.open(uri)
    with fg.VideoReader.open(table.address(0, "a"), index=table.index) as reader:
        assert np.array_equal(_decoded(other)[[7]], reader.read_frames_numpy([7]))
        assert 1 == reader.stats().stale_rows


def test_writing_ends_well(tmp_path, media):
    """An error in the block commits no more; bytes without an index are stored and told; wrong input is refused."""
    uri = tmp_path / "t.lance"
    data = media["bframes"].read_bytes()
    with pytest.raises(KeyError), fg.LanceVideoWriter(uri) as writer:  # noqa: PT012
        writer.write(0, "a", data)
        writer.commit()
        writer.write(1, "a", data)
        raise KeyError
    assert 1 == len(fg.LanceVideoTable.open(uri))
    with pytest.raises(fg.ClosedError):
        writer.write(2, "a", data)
    with fg.LanceVideoWriter(uri) as writer:
        writer.write(2, "a", b"no video at all")
        for wrong in (b"", []):
            with pytest.raises(fg.InvalidRequestError):
                writer.write(3, "a", wrong)
        with pytest.raises(fg.InvalidRequestError):
            writer.write(3, "", data)
        with pytest.raises(TypeError, match="read_bytes"):
            writer.write(3, "a", media["bframes"])
    assert [(2, "a")] == [video[:2] for video in writer.without_index]
    assert [data, b"no video at all"] == _blobs(uri)
    lance.write_dataset(pa.table({"a": [1]}), str(tmp_path / "other.lance"))
    for open_it in (fg.LanceVideoWriter, fg.LanceVideoTable.open, fg.add_index_columns):
        with pytest.raises(fg.IndexTableError, match="no video table"):
            open_it(tmp_path / "other.lance")


def test_a_table_made_by_two_writers_has_both_ones_videos(tmp_path, media):
    """Each has found no table; neither one's rows take the place of the other's."""
    uri = tmp_path / "t.lance"
    with fg.LanceVideoWriter(uri) as one, fg.LanceVideoWriter(uri) as other:
        one.write(0, "cam", media["bframes"].read_bytes())
        other.write(1, "cam", media["hevc"].read_bytes())
    assert [(0, "cam"), (1, "cam")] == sorted((row["episode_idx"], row["video_key"]) for row in _keys(uri))
    dataset = lance.dataset(str(uri))
    assert ("2.2", True) == (dataset.data_storage_version, dataset.has_stable_row_ids)
    _all_exact_of(uri)


def test_a_video_named_twice_is_an_error(tmp_path, media):
    """Which of two rows of one episode and view is meant cannot be told: not written, and not read."""
    data = media["bframes"].read_bytes()
    for _ in range(2):
        writer = fg.LanceVideoWriter(tmp_path / "t.lance")
        if not _:
            writer.write(0, "a", data)
        with pytest.raises(fg.InvalidRequestError, match="there already"):
            writer.write(0, "a", data)
        writer.close()
    schema = lance.dataset(str(tmp_path / "t.lance")).schema
    columns = [pa.array([0], pa.int32()), pa.array(["a"]), lance.blob_array([data])]
    lance.write_dataset(
        pa.table(columns, schema=pa.schema([*list(schema)[:2], lance.blob_field("video_bytes")])),
        str(tmp_path / "t.lance"),
        mode="append",
    )
    with pytest.raises(fg.IndexTableError, match="rows 0 and 1"):
        fg.LanceVideoTable.open(tmp_path / "t.lance")


def test_names_that_are_not_there(tmp_path, media):
    """An episode, a view, a version that the table has not."""
    with fg.LanceVideoWriter(tmp_path / "t.lance") as writer:
        writer.write(0, "a", media["bframes"].read_bytes())
        writer.write(1, "b", media["bframes"].read_bytes())
    table = fg.LanceVideoTable.open(tmp_path / "t.lance")
    assert [] == table.episodes_of().tolist()
    with pytest.raises(fg.InvalidRequestError, match="no episode has all of the views a, b"):
        table.clips(fg.Windows(4))
    assert [1] == table.episodes_of(["b"]).tolist()
    with pytest.raises(fg.InvalidRequestError):
        table.address(1, "a")
    for wrong in (["c"], "a"):
        with pytest.raises(fg.InvalidRequestError):
            table.videos(wrong)
    with pytest.raises(fg.SourceNotFoundError):
        fg.LanceVideoTable.open(tmp_path / "nowhere.lance")
    with pytest.raises(fg.SourceNotFoundError):
        fg.LanceBlobSource(str(tmp_path / "t.lance"), "video_bytes", 0, version=99).read(0, 4)


def test_workers_read_a_video_table(tmp_path, media):
    """DataLoader workers that are not forked read the table at the version that the data set was made of."""
    pytest.importorskip("torch")
    uri = tmp_path / "t.lance"
    clip = make(tmp_path / "v.mp4", RECIPE, count=40)
    with fg.LanceVideoWriter(uri) as writer:
        for episode in range(3):
            writer.write(episode, "a", clip.read_bytes())
    with fg.LanceVideoTable.open(uri).clips(fg.Windows(4, 4)) as data:
        lance.dataset(str(uri)).delete("episode_idx = 0")
        loader = fg.ClipLoader(data, 5, shuffle=True, num_workers=2)
        truth, seen = _decoded(clip.read_bytes()), []
        for batch in loader:
            for frames, numbers in zip(batch["frames"]["a"], batch["frame_numbers"], strict=True):
                assert np.array_equal(truth[numbers.numpy()], frames.numpy())
            seen += batch["episode_idx"].tolist()
    assert {0: 10, 1: 10, 2: 10} == {episode: seen.count(episode) for episode in range(3)}


def test_a_table_made_again_at_the_same_place(tmp_path, media):
    """Deleted and written anew, a table is read and extended as what it is now, in the same process."""
    uri = tmp_path / "t.lance"
    for name in ("bframes", "hevc"):
        shutil.rmtree(uri, ignore_errors=True)
        with fg.LanceVideoWriter(uri) as writer:
            writer.write(0, "a", media[name].read_bytes())
        assert 0 == _all_exact_of(uri)["built"]
        lance.dataset(str(uri)).drop_columns([STRUCT_COLUMN])
        assert 1 == fg.add_index_columns(uri).built
        assert 0 == _all_exact_of(uri)["built"]


def test_somebody_elses_columns_are_left_alone(tmp_path, media):
    """A column of one of our names that is something else: not overwritten, and not taken for an index."""
    uri = tmp_path / "t.lance"
    schema = pa.schema(
        [
            pa.field("episode_idx", pa.int64()),
            pa.field("video_key", pa.large_string()),
            lance.blob_field("video_bytes"),
            pa.field("moov_range", pa.list_(pa.string())),
        ]
    )
    columns = [[0], ["a"], lance.blob_array([media["bframes"].read_bytes()]), [["mine", "x"]]]
    arrays = [
        c if isinstance(c, pa.Array) else pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)
    ]
    lance.write_dataset(pa.table(arrays, schema=schema), str(uri), data_storage_version="2.2")
    for act in (fg.add_index_columns, fg.LanceVideoWriter):
        with pytest.raises(fg.IndexTableError, match="moov_range"):
            act(uri)
    assert [["mine", "x"]] == lance.dataset(str(uri)).to_table(columns=["moov_range"])[
        "moov_range"
    ].to_pylist()
    assert 1 == _all_exact_of(uri)["built"]
    lance.dataset(str(uri)).drop_columns(["moov_range"])
    with fg.LanceVideoWriter(uri) as writer:
        writer.write(1, "a", media["hevc"].read_bytes())
    assert [pa.int64(), pa.large_string()] == lance.dataset(str(uri)).schema.types[:2]
    assert 2 == _all_exact_of(uri)["built"]


def test_one_bad_row_does_not_spoil_a_table(tmp_path, media):
    """With on_error a row without a video has no windows; its columns stay null; the others are read."""
    uri = tmp_path / "t.lance"
    with fg.LanceVideoWriter(uri) as writer:
        writer.write(0, "a", media["bframes"].read_bytes())
        writer.write(1, "a", b"no video at all")
        writer.write(2, "a", media["hevc"].read_bytes())
    table = fg.LanceVideoTable.open(uri)
    with pytest.raises(fg.FluxonGopError):
        table.clips(fg.Windows(30, 30))
    with table.clips(fg.Windows(30, 30), on_error="skip") as data:
        assert [0, 0, 2, 2] == [s["episode_idx"] for s in data.__getitems__(range(len(data)))]


def test_a_version_that_is_gone_is_a_typed_error(tmp_path, media):
    """A table that was opened, and whose version was cleaned up since."""
    uri = tmp_path / "t.lance"
    with fg.LanceVideoWriter(uri) as writer:
        writer.write(0, "a", media["bframes"].read_bytes())
    table = fg.LanceVideoTable.open(uri)
    lance.dataset(str(uri)).delete("true")
    with fg.LanceVideoWriter(uri) as writer:
        writer.write(1, "a", media["bframes"].read_bytes())
    lance.dataset(str(uri)).cleanup_old_versions(dt.timedelta(0))
    with pytest.raises((fg.IndexTableError, fg.SourceError)):
        table.clips(fg.Windows(30, 30))[0]


@pytest.mark.parametrize("name", ["a b.lance", "a#b.lance", "a?b.lance", "a%20b&c.lance"])
def test_names_of_tables(tmp_path, media, name):
    """Whatever a folder is called."""
    with fg.LanceVideoWriter(tmp_path / name) as writer:
        writer.write(0, "a", media["bframes"].read_bytes())
    assert 0 == _all_exact_of(tmp_path / name)["built"]
