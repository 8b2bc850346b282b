"""What is packed of a row: the same row, or found out and not used."""

from __future__ import annotations

import dataclasses
import hashlib
import json

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fluxon_gop as fg
from fluxon_gop import index_rows, lance_rows, packed_row, table_keys
from fluxon_gop.model import Signature
from fluxon_gop.packed_row import (
    FIELDS,
    KEY_HASH,
    LONG_BYTES,
    LONG_LISTS,
    PACKED,
    SHORT_BYTES,
    pack,
    unpack,
)
from fluxon_gop.ranges import ByteRange
from fluxon_gop.table_build import build_table
from fluxon_gop.table_check import verify_table
from fluxon_gop.table_files import merge_tables
from fluxon_gop.table_rows import Damaged
from tests.media import full_decode
from tests.test_model import any_index, assert_same


def _row(index: fg.VideoIndex, key: str = "key") -> dict:
    return index_rows.row_dicts([(key, index)])[0]


def _long(count: int = 3000) -> fg.VideoIndex:
    """Return an index whose sizes and times no packing makes small."""
    random = np.random.default_rng(1)
    size, step = random.integers(1, 1 << 20, count), random.integers(1, 1 << 16, count)
    dts = np.cumsum(step) - step
    return fg.VideoIndex(
        signature=Signature(int(size.sum()), None, 1),
        moov_range=ByteRange(0, 8),
        stream_index=0,
        timescale=1000,
        entries=(),
        width=2,
        height=2,
        sample_offset=np.cumsum(size) - size,
        sample_size=size,
        sample_pts=dts + random.integers(0, 1 << 16, count),
        sample_dts=dts,
        sample_entry=np.zeros(1, np.uint8),
        hidden=np.zeros(0, np.int64),
        stream=ByteRange(0, count),
        key_samples=np.zeros(1, np.int64),
        verdicts=np.ones(1, np.uint8),
    )


@settings(deadline=None)
@given(any_index(), st.text(min_size=1) | st.tuples(st.text(), st.text(min_size=1)))
def test_what_is_packed_is_the_row(index, key):
    """unpack() gives back every column: the row's own checksum fits."""
    row = index_rows.row_dicts([(key, index)])[0]
    found = unpack(pack(row))
    assert found.is_whole
    assert row["row_checksum"] == index_rows.checksum(found.row) == found.row["row_checksum"]
    assert_same(index, index_rows.index_of(found.row))


@settings(deadline=None)
@given(any_index(), st.data())
def test_a_damaged_value_is_found(index, data):
    """Any changed, cut or added byte is an error."""
    whole = pack(_row(index))
    at = data.draw(st.integers(0, len(whole) - 1))
    flipped = bytearray(whole)
    flipped[at] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(flipped), whole[:at], whole + b"x"):
        with pytest.raises(ValueError, match="digest does not fit"):
            unpack(damaged)


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_a_value_with_a_right_digest_is_held_to_its_form(body):
    """What somebody else wrote is a row, or a ValueError."""
    try:
        unpack(hashlib.blake2b(body, digest_size=8).digest() + body)
    except ValueError:
        return
    pytest.fail("that was no row")


def _forged(row: dict, change) -> bytes:
    """Return a value with a right digest whose line of JSON somebody else has written."""
    lz4 = pa.Codec("lz4_raw")
    value = pack(row)
    head_bytes, list_bytes, packed_head = np.frombuffer(value, "<u4", 3, 8).tolist()
    head = lz4.decompress(value[20 : 20 + packed_head], head_bytes, asbytes=True)
    line, _, numbers = head.partition(b"\n")
    values = dict(zip(index_rows.SCHEMA.names, json.loads(line), strict=True))
    changed = change(values)
    text = (
        changed if isinstance(changed, bytes) else json.dumps(list({**values, **changed}.values())).encode()
    )
    head = text + b"\n" + numbers
    packed = lz4.compress(head, asbytes=True)
    lengths = np.array([len(head), list_bytes, len(packed)], "<u4").tobytes()
    body = lengths + packed + value[20 + packed_head :]
    return hashlib.blake2b(body, digest_size=8).digest() + body


@pytest.mark.parametrize(
    "change",
    [
        lambda v: {"size": "12"},
        lambda v: {"timescale": 1.5},
        lambda v: {"width": True},
        lambda v: {"uri": 7},
        lambda v: {"sample_size": "3x60"},
        lambda v: {"sample_size": "2x-60"},
        lambda v: {"sample_size": "8x1000000000000"},
        lambda v: {"sample_size": "60"},
        lambda v: {"moov_range": ["a", "b"]},
        lambda v: {"moov_range": {}},
        lambda v: {"moov_range": 5},
        lambda v: {"entries": [["avc1"]]},
        lambda v: {"entries": [["avc1", "h264", -1, 1, 1, None]]},
        lambda v: {"entries": [["avc1", "h264", 1 << 40, 1, 1, None]]},
        lambda v: {"entries": [[1, 2, 3, 4, 5, 6]]},
        lambda v: {"entries": 7},
        lambda v: {"more": 1},
        lambda v: {"first_offset": 1 << 70},
        lambda v: {"sample_count": 7},
        lambda v: {"sample_count": -1},
        lambda v: {"stream_range": [0]},
        lambda v: {"row_checksum": None},
        lambda v: {"uri": None},
        lambda v: {"width": None},
        lambda v: {"composition_offset": None},
        lambda v: b"",
        lambda v: b"7",
        lambda v: b"{}",
        lambda v: b"[" * 100_000,
        lambda v: b"\xff",
    ],
)
def test_a_value_that_somebody_else_forged_is_damaged(media, tmp_path, change):
    """With a right digest and wrong content, the columns are read, or the row is a damaged one: nothing else is raised."""
    key = str(media["bframes"])
    with fg.IndexTable.open(tmp_path / "t.lance", create=True) as table:
        table.append([(key, fg.build_index(key))])
        forged = _forged(_row(fg.build_index(key), key), change)
        rewritten = _rewritten(table, key, lambda _: {PACKED: forged})
        (row,) = rewritten.lookup([key])
        assert {"ok", "damaged"} >= {told.status for told in verify_table(rewritten)}
    if not isinstance(row, Damaged):
        assert_same(fg.build_index(key), row)


def test_the_long_lists_are_left_out_where_they_are_dear():
    """Packed lists take at most 1.75 bytes a frame, and 512 bytes: with their columns less than 4 bytes a frame."""
    row = _row(_long())
    found = unpack(pack(row))
    assert not found.is_whole
    assert {None} == {found.row[name] for name in LONG_LISTS}
    assert len(pack(row)) < 1000
    assert unpack(pack(_row(_long(50)))).is_whole
    assert 10 * 50 < LONG_BYTES * 50 + SHORT_BYTES < 10 * 3000


@pytest.fixture
def queried(monkeypatch):
    """Have small tables asked by query."""
    monkeypatch.setattr(table_keys, "QUERIED_ROWS", 2)
    monkeypatch.setattr(lance_rows, "INDEXED_ROWS", 2)


@pytest.fixture(params=["loaded", "queried"])
def how(request) -> str:
    if request.param == "queried":
        request.getfixturevalue("queried")
    return request.param


@pytest.fixture
def table(media, tmp_path, how) -> fg.IndexTable:
    """A table of the media and of one video whose lists are left out."""
    del how
    uri = tmp_path / "t.lance"
    with fg.IndexTable.open(uri, create=True) as made:
        made.append([(str(path), fg.build_index(path)) for path in media.values()])
        made.append([("dear", _long()), (("export", "a/b.mp4"), _long(50))])
        made.maintain()
    return fg.IndexTable.open(uri)


class _Reads:
    """The columns of each read of the table."""

    def __init__(self, table: fg.IndexTable, monkeypatch: pytest.MonkeyPatch) -> None:
        self.columns: list[list[str]] = []
        table.known(["nowhere"], ["size"])
        store = table._store
        find, take = store.find, store.take

        def finding(condition, columns):
            self.columns.append(list(columns))
            return find(condition, columns)

        def taking(places, columns=None):
            self.columns.append(list(columns or index_rows.SCHEMA.names))
            return take(places, columns)

        monkeypatch.setattr(store, "find", finding)
        monkeypatch.setattr(store, "take", taking)


def test_a_look_up_reads_one_column(table, media, monkeypatch):
    """Many keys are one read of what is packed, and nothing else."""
    reads = _Reads(table, monkeypatch)
    keys = [str(path) for path in media.values()]
    for key, row in zip(keys, table.lookup(keys), strict=True):
        assert_same(fg.build_index(key), row)
    assert [[PACKED]] == reads.columns


def test_of_dear_rows_the_lists_are_read_too(table, monkeypatch):
    """Where the lists are not packed, their four columns are one read more."""
    reads = _Reads(table, monkeypatch)
    rows = table.lookup(["dear", "nowhere", ("export", "a/b.mp4")])
    assert_same(_long(), rows[0])
    assert rows[1] is None
    assert_same(_long(50), rows[2])
    first, second = reads.columns
    assert [PACKED] == first
    assert set(LONG_LISTS) <= set(second) <= {*LONG_LISTS, "uri", "export_name", "relpath"}


def _rewritten(table: fg.IndexTable, key: str, change) -> fg.IndexTable:
    """Return the table with one row's columns changed by somebody else."""
    dataset = lance.dataset(table.uri)
    rows = dataset.to_table(filter=f"uri = '{key}'")
    (row,) = rows.to_pylist()
    changed = pa.Table.from_pylist([{**row, **change(row)}], schema=rows.schema)
    dataset.merge_insert("uri").when_matched_update_all().execute(changed)
    return fg.IndexTable.open(table.uri)


@pytest.mark.parametrize(
    "packed",
    [
        lambda row: None,
        lambda row: b"",
        lambda row: row[PACKED][:-1],
        lambda row: pack(_row(_long(30), "another key")),
    ],
    ids=["none", "empty", "cut", "another video's"],
)
def test_what_is_not_sound_is_not_used(table, media, packed):
    """A packed value that is missing, damaged, or of another row: the columns are read."""
    key = str(media["bframes"])
    changed = _rewritten(table, key, lambda row: {PACKED: packed(row)})
    (row,) = changed.lookup([key])
    assert_same(fg.build_index(key), row)
    with fg.VideoReader.open(key, index=changed) as reader:
        assert np.array_equal(full_decode(media["bframes"])[[7]], reader.read_frames_numpy([7]))
        assert not reader.stats().damaged_rows


def test_what_is_packed_of_another_version_is_stale(table, media):
    """A packed value of another version of the file is held to the file as any row: not used, and the read is exact."""
    path = media["bframes"]
    changed = _rewritten(table, str(path), lambda row: {PACKED: pack(_row(_long(30), row["uri"]))})
    with fg.VideoReader.open(path, index=changed) as reader:
        assert np.array_equal(full_decode(path)[[7]], reader.read_frames_numpy([7]))
        assert 1 == reader.stats().stale_rows


def test_damaged_columns_are_found_though_what_is_packed_is_sound(table, media, tmp_path):
    """verify tells of them; merge leaves them out, packs none of them, and mends them from a sound table."""
    key = str(media["bframes"])
    changed = _rewritten(table, key, lambda row: {"sample_size": [9, *row["sample_size"][1:]]})
    assert_same(fg.build_index(key), changed.lookup([key])[0])
    told = {row.uri: row.status for row in verify_table(changed)}
    assert {str(path): "damaged" if str(path) == key else "ok" for path in media.values()} | {
        "dear": "gone"
    } == told
    merged = fg.IndexTable.open(tmp_path / "merged.lance", create=True)
    merge_tables([changed.uri], merged)
    assert [None] == merged.lookup([key])
    assert_same(fg.build_index(media["audio"]), merged.lookup([str(media["audio"])])[0])
    with fg.IndexTable.open(tmp_path / "sound.lance", create=True) as sound:
        sound.append([(key, fg.build_index(key))])
    merge_tables([tmp_path / "sound.lance"], changed)
    assert not changed.unsound([key])
    damaged = changed.encoded([key]).set_column(3, "size", pa.array([7], pa.int64()))
    merged.write(damaged, damaged.slice(0, 0))
    assert isinstance(merged.lookup([key])[0], Damaged)


def test_damaged_lists_of_a_dear_row_are_found(table):
    """The columns that are read beside what is packed are held against the row's checksum."""
    changed = _rewritten(table, "dear", lambda row: {"sample_size": [9, *row["sample_size"][1:]]})
    (row,) = changed.lookup(["dear"])
    assert isinstance(row, Damaged)


def test_a_table_made_without_is_read_and_written(media, tmp_path, how):
    """A data set with the plain columns only: look-ups, appends, replacing, removing, and builds go on as before."""
    del how
    uri = tmp_path / "old.lance"
    keys = [str(path) for path in media.values()]
    lance.write_dataset(index_rows.encode([(key, fg.build_index(key)) for key in keys[:3]]), uri)
    table = fg.IndexTable.open(uri)
    table.maintain()
    assert not table.packed_columns
    table.append([(keys[3], fg.build_index(keys[3]))])
    table.replace([(keys[0], _long())])
    table.remove([keys[1]])
    build_table(keys[4:5], table)
    rows = fg.IndexTable.open(uri).lookup(keys[:5])
    assert_same(_long(), rows[0])
    assert rows[1] is None
    for key, row in zip(keys[2:5], rows[2:], strict=True):
        assert_same(fg.build_index(key), row)
    assert not set(lance.dataset(uri).schema.names) & {field.name for field in FIELDS}


def test_two_keys_of_one_hash_are_two_rows(media, tmp_path, queried, monkeypatch):
    """The hash only finds candidates: look-ups, replacing and removing go by the key."""
    for module in (packed_row, lance_rows):
        monkeypatch.setattr(module, "key_hash", lambda _: 7)
    table = fg.IndexTable.open(tmp_path / "t.lance", create=True)
    keys = [str(path) for path in media.values()][:4]
    table.append([(key, fg.build_index(key)) for key in keys])
    table.maintain()
    table = fg.IndexTable.open(tmp_path / "t.lance")
    assert isinstance(table._keys(), table_keys.QueriedKeys)
    for key in keys:
        (row,) = table.lookup([key])
        assert_same(fg.build_index(key), row)
        assert table.signature(key) == fg.build_index(key).signature
    assert [None] == table.lookup(["nowhere"])
    assert "nowhere" not in table
    table.replace([(keys[0], _long())])
    table.remove([keys[1]])
    rows = table.lookup(keys)
    assert_same(_long(), rows[0])
    assert rows[1] is None
    assert_same(fg.build_index(keys[2]), rows[2])


def test_the_hash_is_as_the_format_says():
    """A key's number can be made by a stranger."""
    for key, text in (("s3://a/b", "s3://a/b\0\0"), (("e", "p"), "\0e\0p")):
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        assert int.from_bytes(digest, "little", signed=True) == packed_row.key_hash(key)
    assert not packed_row.PACKED_SCHEMA.field(KEY_HASH).nullable


def test_a_value_in_another_videos_row_is_not_that_videos(table, media):
    """An older row of one video that stands in another's row answers for neither."""
    mine, other = str(media["bframes"]), str(media["audio"])
    _rewritten(table, mine, lambda _: {PACKED: None})
    changed = _rewritten(table, other, lambda _: {PACKED: pack(_row(_long(30), mine))})
    for key, row in zip((other, mine), changed.lookup([other, mine]), strict=True):
        assert_same(fg.build_index(key), row)


def test_of_twins_the_last_row_counts(media, tmp_path, how):
    """Where two builders have added a key, look-ups take the row that signatures are of, packed or not."""
    del how
    uri = tmp_path / "t.lance"
    key = str(media["bframes"])
    with fg.IndexTable.open(uri, create=True) as made:
        made.append([(key, _long(30)), ("other", _long(20))])
        made.maintain()
    newer = packed_row.encoded([(key, fg.build_index(key))], packed_row.PACKED_SCHEMA.names)
    place = newer.schema.get_field_index(PACKED)
    lance.write_dataset(
        newer.set_column(place, newer.schema.field(place), pa.nulls(1, pa.binary())), uri, mode="append"
    )
    table = fg.IndexTable.open(uri)
    assert_same(fg.build_index(key), table.lookup([key])[0])
    assert fg.build_index(key).signature == table.signature(key)


@pytest.mark.parametrize("change", ["first_offset", "frame_count"])
def test_verify_finds_a_value_that_contradicts_its_row(table, media, change):
    """What is packed is held against the columns."""
    key = str(media["bframes"])
    index = fg.build_index(key)
    forged = _forged(_row(index, key), lambda v: {change: v[change] and v[change] + 1})
    told = {row.uri: row.status for row in verify_table(_rewritten(table, key, lambda _: {PACKED: forged}))}
    assert ("damaged", "ok") == (told[key], told[str(media["audio"])])


def test_odd_keys_and_numbers(table, media):
    """A name that is no UTF-8 has no row, and is refused as a key; numpy's numbers in an index are numbers."""
    name = "/videos/\udcff.mp4"
    assert [None] == table.lookup([name])
    assert name not in table
    with pytest.raises(fg.IndexTableError, match="no UTF-8"):
        table.append([(name, _long(20))])
    index = dataclasses.replace(
        fg.build_index(media["hevc"]), timescale=np.int64(12800), width=np.int32(128)
    )
    table.replace([("numpy", index)])
    assert_same(index, table.lookup(["numpy"])[0])


@pytest.mark.parametrize("dropped", [KEY_HASH, PACKED])
def test_a_table_with_one_of_the_two_columns(table, media, dropped):
    """Either may be dropped: look-ups, appends, replacing, removing and maintaining go on."""
    lance.dataset(table.uri).drop_columns([dropped])
    table = fg.IndexTable.open(table.uri)
    key, other = str(media["bframes"]), str(media["audio"])
    assert_same(fg.build_index(key), table.lookup([key])[0])
    table.replace([(key, _long(30)), ("new", _long(20))])
    table.append([("newer", _long(25))])
    table.remove([other])
    table.maintain()
    rows = fg.IndexTable.open(table.uri).lookup([key, "new", "newer", other, "dear"])
    for index, row in zip([_long(30), _long(20), _long(25)], rows[:3], strict=True):
        assert_same(index, row)
    assert rows[3] is None
    assert_same(_long(), rows[4])


def test_columns_of_other_types_are_refused(tmp_path):
    """A table whose columns of these names are something else is no index table."""
    rows = index_rows.encode([("k", _long(20))]).append_column(PACKED, pa.array(["text"]))
    lance.write_dataset(rows, tmp_path / "t.lance")
    with pytest.raises(fg.IndexTableError, match=PACKED):
        fg.IndexTable.open(tmp_path / "t.lance")
