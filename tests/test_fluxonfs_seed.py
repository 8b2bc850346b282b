"""The seed text's tables, row by row. Each test's docstring begins with the row it holds to."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import fluxon_gop as fg
from fluxon_gop.fluxonfs import (
    FluxonFsExport,
    FluxonFsPatcher,
    FluxonFsVideoReader,
    FluxonFsVideoReaderPool,
    FluxonFsVideoReadRequest,
    FluxonFsVideoReadResult,
    MissPolicy,
    Users,
    hash_password,
)
from fluxon_gop.fluxonfs.byte_source import AVSEEK_SIZE, FluxonFsFile, FluxonFsVideoByteSource
from tests.conftest import ROOT
from tests.fluxonfs import HEIGHT, NAMES, PIECE, WIDTH, opened, patcher, request, same, totals
from tests.media import RECIPES, full_decode, make
from tools.range_server import Fault, RangeServer

SEED = ROOT.parent / "shared" / "design" / "seed-fluxonfs-videoreader.txt"
ALICE, BOB = ("alice", "wonderland-7"), ("bob", "builder-8")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    (folder / "a" / "b").mkdir(parents=True)
    make(folder / NAMES[1], RECIPES["bframes"])
    shutil.copy(folder / NAMES[1], folder / "other.mp4")
    (folder / "words.mp4").write_text("no video at all, only words " * 40)
    return folder


@pytest.fixture(scope="module")
def truth(root) -> np.ndarray:
    return full_decode(root / NAMES[1])


@pytest.fixture(scope="module")
def users() -> Users:
    return Users({name: hash_password(password) for name, password in (ALICE, BOB)})


@pytest.fixture
def http(root):
    with RangeServer(root) as server:
        yield server


def source_of(one: FluxonFsPatcher, relpath: str = NAMES[1], identity=None) -> FluxonFsVideoByteSource:
    """White box: the byte source is not public."""
    return FluxonFsFile(one._file_system, NAMES[0], relpath, identity).open_source()


# ------------------------------------------------------------- section 4, the reader's contract


def test_4_reader_entry_FluxonFsPatcher_open_video_reader(root, truth):
    """入口 | FluxonFsPatcher.open_video_reader(...)"""
    with patcher(root).open_video_reader(
        export_name="train-videos", relpath="a/b/sample.mp4", height=96, width=128, num_threads=8
    ) as reader:
        assert isinstance(reader, FluxonFsVideoReader)
        assert np.array_equal(truth[[0, 8, 16, 24]], reader.read_frames_numpy([0, 8, 16, 24]))


def test_4_reader_locates_by_export_name_str_and_relpath_str(root):
    """定位文件 | export_name: str + relpath: str"""
    one = patcher(root)
    for bad, name in [({"export_name": 7}, "export_name"), ({"relpath": Path("a")}, "relpath")]:
        with pytest.raises(TypeError, match=f"{name} must be str"):
            opened(one, **bad)
    for name in ("export_name", "relpath"):
        with pytest.raises(ValueError, match=f"^{name} must be non-empty$"):
            opened(one, **{name: ""})


def test_4_reader_output_size_height_int_width_int_must_be_positive(root, truth):
    """输出尺寸 | height: int + width: int，必须为正数"""
    one = patcher(root)
    for name in ("height", "width"):
        for value in (0, -3):
            with pytest.raises(ValueError, match=f"^{name} must be positive"):
                opened(one, **{name: value})
        for value in (True, 96.0, np.int64(96), "96", None):
            with pytest.raises(TypeError, match=f"^{name} must be int"):
                opened(one, **{name: value})
    with opened(one, height=48, width=80) as reader:
        wanted = full_decode(root / NAMES[1], 48, 80)
        assert np.array_equal(wanted[[5, 3]], reader.read_frames_numpy([5, 3]))


def test_4_reader_num_threads_int_must_be_positive(root, truth):
    """解码线程 | num_threads: int，必须为正数"""
    one = patcher(root)
    for value in (0, -1):
        with pytest.raises(ValueError, match="^num_threads must be positive"):
            opened(one, num_threads=value)
    with pytest.raises(TypeError, match="^num_threads must be int"):
        opened(one, num_threads=True)
    with opened(one, num_threads=3) as reader:
        assert np.array_equal(truth, reader.read_frames_numpy(range(60)))


def test_4_reader_read_frames_numpy_indices_Sequence_int_to_ndarray(root, truth):
    """读取方法 | read_frames_numpy(indices: Sequence[int]) -> numpy.ndarray"""
    with opened(patcher(root)) as reader:
        for indices in ([3], (59, 0, 0, 7), range(4, 50, 9)):
            assert np.array_equal(truth[list(indices)], reader.read_frames_numpy(indices))
        for bad in ([1, "2"], [True], [1.0], [np.int64(1)], np.array([1]), 3, "12", None, {1}):
            with pytest.raises(TypeError, match="int values"):
                reader.read_frames_numpy(bad)
        synonyms = {"get_batch", "get_batch_numpy", "read_frames", "__getitem__"}
        assert not synonyms & set(dir(reader))


def test_4_reader_returns_dtype_uint8_shape_len_indices_height_width_3(root):
    """返回数组 | dtype=uint8，shape 为 (len(indices), height, width, 3)"""
    with opened(patcher(root), height=20, width=30) as reader:
        for indices in ([], [0], [4, 4, 9]):
            array = reader.read_frames_numpy(indices)
            assert (np.uint8, (len(indices), 20, 30, 3)) == (array.dtype, array.shape)
            assert array.flags.writeable
            assert array.flags.c_contiguous


def test_4_reader_context_manager_and_after_close_all_reads_fail(root):
    """生命周期 | reader 支持 context manager；close() 后所有读取失败"""
    with opened(patcher(root)) as reader:
        reader.read_frames_numpy([0])
    for use in (lambda: reader.read_frames_numpy([0]), reader.stats, lambda: len(reader), reader.__enter__):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    reader.close()


def test_4_reader_identity_is_captured_at_open_and_does_not_follow(root, truth, users):
    """身份 | 打开 reader 时捕获 patcher 当前 request identity；reader 生命周期内不跟随后续身份变更"""
    one = patcher(root, readers=["alice"], users=users, request_identity=ALICE, metadata_cache_ttl_ms=0)
    with opened(one) as reader:
        one.request_identity = BOB
        assert np.array_equal(truth[[30]], reader.read_frames_numpy([30]))
        with pytest.raises(PermissionError):
            opened(one)


# ------------------------------------------------------------- section 4, the pool's contract


def test_4_pool_entry_FluxonFsPatcher_open_video_reader_pool_max_readers_32(root, truth):
    """入口 | FluxonFsPatcher.open_video_reader_pool(max_readers=32)"""
    assert 32 == inspect.signature(FluxonFsPatcher.open_video_reader_pool).parameters["max_readers"].default
    with patcher(root).open_video_reader_pool(max_readers=32) as pool:
        assert isinstance(pool, FluxonFsVideoReaderPool)
        assert 32 == pool.stats()["max_readers"]


def test_4_pool_lru_key_export_name_relpath_height_width_num_threads_request_identity(root, users):
    """LRU key | (export_name, relpath, height, width, num_threads, request_identity)"""
    exports = [FluxonFsExport(name, str(root), readers=["alice", "bob"]) for name in ("e", "f")]
    one = FluxonFsPatcher(exports, users=users, request_identity=ALICE)
    pool = one.open_video_reader_pool()
    key = {"export_name": "e", "relpath": NAMES[1], "height": 48, "width": 64, "num_threads": 1}
    others = [
        {"export_name": "f"},
        {"relpath": "other.mp4"},
        {"height": 50},
        {"width": 66},
        {"num_threads": 2},
    ]
    pool.read_frames_numpy(**key, indices=[0])
    assert pool.read_frames_numpy_with_stats(**key, indices=[9]).reader_cache_hit
    for n, other in enumerate(others):
        assert not pool.read_frames_numpy_with_stats(**key | other, indices=[0]).reader_cache_hit
        assert n + 2 == pool.stats()["current_readers"]
    one.request_identity = BOB
    assert not pool.read_frames_numpy_with_stats(**key, indices=[0]).reader_cache_hit
    one.request_identity = ALICE
    assert pool.read_frames_numpy_with_stats(**key, indices=[0]).reader_cache_hit


def test_4_pool_capacity_max_readers_positive_and_active_readers_stay_open(root):
    """容量 | max_readers: int，必须为正数；活跃 reader 不会被强制关闭"""
    one = patcher(root)
    for bad, error in [(0, ValueError), (-1, ValueError), (True, TypeError), (2.0, TypeError)]:
        with pytest.raises(error, match="max_readers must be (positive|int)"):
            one.open_video_reader_pool(max_readers=bad)
    pool = one.open_video_reader_pool(max_readers=1)
    results = pool.read_many_numpy_with_stats(
        [request(), request("other.mp4"), request(height=20, width=20)]
    )
    assert 3 == len(results)
    stats = pool.stats()
    assert (1, 0, 3, 2, 2) == tuple(
        stats[n] for n in ("current_readers", "active_readers", "open_count", "close_count", "evict_count")
    )


def test_4_pool_read_frames_numpy_returns_ndarray(root, truth):
    """读取方法 | read_frames_numpy(...) -> numpy.ndarray"""
    pool = patcher(root).open_video_reader_pool()
    frames = pool.read_frames_numpy(
        export_name="train-videos",
        relpath=NAMES[1],
        height=HEIGHT,
        width=WIDTH,
        num_threads=1,
        indices=[8, 0],
    )
    assert np.array_equal(truth[[8, 0]], frames)


def test_4_pool_metrics_read_frames_numpy_with_stats_FluxonFsVideoReadResult(root, truth):
    """指标方法 | read_frames_numpy_with_stats(...) -> FluxonFsVideoReadResult"""
    pool = patcher(root).open_video_reader_pool()
    key = {"export_name": NAMES[0], "relpath": NAMES[1], "height": HEIGHT, "width": WIDTH, "num_threads": 1}
    result = pool.read_frames_numpy_with_stats(**key, indices=[8, 0])
    assert isinstance(result, FluxonFsVideoReadResult)
    assert np.array_equal(truth[[8, 0]], result.array)
    assert {
        "read_many_group_size": 1,
        "read_many_group_frames": 2,
        "read_many_group_index": 0,
    } == result.batch_stats
    assert 2 == result.reader_stats["decode_frames_requested"]
    assert pool.stats() == result.pool_stats
    again = pool.read_frames_numpy_with_stats(**key, indices=[8, 0])
    assert 2 == again.reader_stats["decode_frames_requested"]
    assert 0 == again.reader_stats["remote_read_calls"]


def test_4_pool_read_many_numpy_with_stats_requests_to_list_of_results(root, truth):
    """批量方法 | read_many_numpy_with_stats(requests: Sequence[FluxonFsVideoReadRequest]) -> list[FluxonFsVideoReadResult]"""
    pool = patcher(root).open_video_reader_pool()
    clips = [(0, 8, 16, 24), (12, 20, 28, 36), (59,), ()]
    results = pool.read_many_numpy_with_stats([request(indices=clip) for clip in clips])
    assert isinstance(results, list)
    assert same(results, [truth[list(clip)] for clip in clips])
    assert [0, 1, 2, 3] == [r.batch_stats["read_many_group_index"] for r in results]
    assert {(4, 9)} == {
        (r.batch_stats["read_many_group_size"], r.batch_stats["read_many_group_frames"]) for r in results
    }
    sums = totals(results)
    assert (9, 1) == (sums["decode_frames_requested"], sums["media_waves"])
    assert [4, 4, 1, 0] == [r.reader_stats["decode_frames_requested"] for r in results]
    assert [] == pool.read_many_numpy_with_stats([])
    for bad in (None, 3, [{}], [fg.VideoReadRequest("x", [0])]):
        with pytest.raises(TypeError, match="FluxonFsVideoReadRequest"):
            pool.read_many_numpy_with_stats(bad)


def test_4_pool_context_manager_and_after_close_all_new_reads_fail(root):
    """生命周期 | pool 支持 context manager；close() 后所有新读取失败"""
    with patcher(root).open_video_reader_pool() as pool:
        pool.read_many_numpy_with_stats([request()])
    for use in (lambda: pool.read_many_numpy_with_stats([request()]), pool.__enter__):
        with pytest.raises(RuntimeError, match="closed"):
            use()
    assert (0, 1) == (pool.stats()["current_readers"], pool.stats()["close_count"])


def test_4_pool_one_cached_reader_serves_one_call_and_concurrent_ones_open_several(root, truth):
    """线程语义 | 一个 cached reader 同一时刻只租给一个调用；并发请求可打开多个 reader"""
    pool = patcher(root).open_video_reader_pool()
    wrong = []

    def read() -> None:
        for n in range(10):
            clip = [n, 59 - n]
            if not same(pool.read_many_numpy_with_stats([request(indices=clip)]), [truth[clip]]):
                wrong.append(clip)

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == wrong
    stats = pool.stats()
    assert 1 <= stats["open_count"] <= 6
    assert 60 == stats["reader_cache_hits"] + stats["reader_cache_misses"]


# ------------------------------------------------------------- section 6.3, the byte source's fields


def test_6_3_export_name(root):
    """export_name | export 名称"""
    with pytest.raises(FileNotFoundError, match="'nowhere'"):
        FluxonFsFile(patcher(root)._file_system, "nowhere", NAMES[1], None).open_source()
    assert source_of(patcher(root)).name.startswith("fluxonfs://train-videos/")


def test_6_3_relpath(root):
    """relpath | export 内相对路径"""
    source = source_of(patcher(root))
    assert "fluxonfs://train-videos/a/b/sample.mp4" == source.name
    assert (root / NAMES[1]).read_bytes()[:20] == source.read_at(0, 20)


def test_6_3_size(root):
    """size | 打开时文件大小"""
    source = source_of(patcher(root))
    assert (root / NAMES[1]).stat().st_size == source.size == source.seek(0, AVSEEK_SIZE)


def test_6_3_mtime_ns(root):
    """mtime_ns | 打开时文件 mtime"""
    assert (root / NAMES[1]).stat().st_mtime_ns == source_of(patcher(root)).signature.mtime_ns


def test_6_3_request_identity(root, users):
    """request_identity | 打开 reader 时捕获的身份"""
    one = patcher(root, readers=["alice"], users=users)
    assert 5 == len(source_of(one, identity=ALICE).read_at(0, 5))
    with pytest.raises(PermissionError):
        source_of(one, identity=BOB).read_at(0, 5)


def test_6_3_page_bytes(root, http):
    """page_bytes | 内部页大小，默认跟随现有 piece / read chunk 约束"""
    source = source_of(patcher(http.base_url, cache={"memory_bytes": 0}))
    source.read_at(PIECE + 10, 1)
    assert [(PIECE, 2 * PIECE)] == [(r.start, r.stop) for r in http.requests if r.method == "GET"]


def test_6_3_page_cache(http):
    """page_cache | reader 级 LRU，减少 FFmpeg 小读和重复 seek 的 RPC 次数"""
    source = source_of(patcher(http.base_url, cache={"memory_bytes": 0, "page_cache_pages": 2}))
    for offset in range(0, 2 * PIECE, 100):
        source.read_at(offset, 50)
    counts = source.counters()
    assert (2, 2) == (counts["remote_read_calls"], counts["page_cache_misses"])
    source.read_at(2 * PIECE, 1)
    source.read_at(0, 1)
    assert 4 == source.counters()["remote_read_calls"], "the least recently used page went"


# ------------------------------------------------------------- section 6.4, the export's fields


def test_6_4_cache_kv_key_prefix(root, tmp_path):
    """cache_kv_key_prefix | KV piece cache key 前缀"""

    def remote_reads(prefix: str | None) -> int:
        one = patcher(root, cache={"disk_path": tmp_path / "disk"}, cache_kv_key_prefix=prefix)
        sums = totals(one.open_video_reader_pool().read_many_numpy_with_stats([request()]))
        one.close()
        return sums["remote_read_calls"]

    assert remote_reads("p") > 0
    assert 0 == remote_reads("p")
    assert remote_reads("q") > 0
    assert remote_reads(None) > 0


def test_6_4_cache_bytes_field_key(root, tmp_path):
    """cache_bytes_field_key | KV 中保存 piece bytes 的字段"""
    reads = []
    for field in ("bytes", "bytes", "payload"):
        one = patcher(root, cache={"disk_path": tmp_path / "disk"}, cache_bytes_field_key=field)
        results = one.open_video_reader_pool().read_many_numpy_with_stats([request()])
        reads.append(totals(results)["remote_read_calls"] > 0)
        one.close()
    assert [True, False, True] == reads


def test_6_4_cache_max_bytes(http, root):
    """cache_max_bytes | 判断对象是否允许进入 KV cache"""
    size = (root / NAMES[1]).stat().st_size
    for limit, hits in ((size, True), (size - 1, False)):
        one = patcher(http.base_url, cache_max_bytes=limit)
        with opened(one) as reader:
            reader.read_frames_numpy([0])
            first = reader.stats()["remote_read_calls"]
            reader.read_frames_numpy([0])
            stats = reader.stats()
        assert hits == (stats["remote_read_calls"] == first)
        assert hits == (stats["memory_hits"] > 0)
        assert hits == (one.stats()["memory_bytes"] > 0)


def test_6_4_metadata_cache_ttl_ms(http):
    """metadata_cache_ttl_ms | 复用现有 stat / metadata cache 行为"""
    long = patcher(http.base_url, metadata_cache_ttl_ms=60_000)
    for _ in range(3):
        assert long.stat(*NAMES).size > 0
        opened(long).close()
    assert 1 == [r.method for r in http.requests].count("HEAD")
    never = patcher(http.base_url, metadata_cache_ttl_ms=0)
    http.reset()
    for _ in range(3):
        never.stat(*NAMES)
    assert 3 == [r.method for r in http.requests].count("HEAD")


def test_6_4_async_backfill_enabled(root, tmp_path):
    """async_backfill_enabled | KV miss 后是否异步补齐 piece"""
    for enabled, reads_again in ((False, True), (True, False)):
        disk = tmp_path / str(enabled)
        sums = []
        for _ in range(2):
            one = patcher(root, cache={"disk_path": disk}, async_backfill_enabled=enabled)
            sums.append(totals(one.open_video_reader_pool().read_many_numpy_with_stats([request()])))
            one.close()
        assert sums[0]["remote_read_calls"] > 0
        assert reads_again == (sums[1]["remote_read_calls"] > 0)
        assert enabled == bool(list(disk.rglob("*.piece")))


def test_6_4_inner_disk_cache_shows_no_fd_or_path_to_the_reader(root, tmp_path):
    """FluxonFS 内部磁盘缓存 | 作为 remote_read_chunk_by_handle... 之后的内部优化，不向 VideoReader 暴露 FD / path"""
    one = patcher(root, cache={"disk_path": tmp_path / "disk"})
    with opened(one) as reader:
        reader.read_frames_numpy([0])
        assert reader.stats()["disk_misses"] > 0
        assert str(tmp_path / "disk") not in repr(reader) + repr(reader.__dict__) + repr(one)


# ------------------------------------------------------------- section 8, failures


def test_8_unknown_export_name_fails_to_open(root):
    """export_name 不存在 | 打开 reader 失败"""
    with pytest.raises(fg.SourceNotFoundError, match="export 'nowhere': no such export"):
        opened(patcher(root), export_name="nowhere")


def test_8_relpath_that_is_missing_or_no_file_fails_to_open(root, http):
    """relpath 不存在或不是文件 | 打开 reader 失败"""
    for place in (root, http.base_url):
        with pytest.raises(
            fg.SourceNotFoundError, match=r"export 'train-videos', 'a/none.mp4': no such file"
        ):
            opened(patcher(place), "a/none.mp4")
    with pytest.raises(fg.SourceError, match=r"export 'train-videos', 'a/b': .*is a directory"):
        opened(patcher(root), "a/b")
    with pytest.raises(fg.SourceNotFoundError, match="no such file"):
        patcher(root).open_video_reader_pool().read_many_numpy_with_stats([request("none.mp4", ())])


def test_8_no_right_fails_to_open_or_to_read(root, users, monkeypatch):
    """权限不足 | 打开或读取失败，错误保留 FluxonFS 权限语义"""
    allowed = {"alice"}
    rule = lambda identity, export, relpath: identity is not None and identity[0] in allowed
    one = patcher(root, readers=rule, request_identity=ALICE, metadata_cache_ttl_ms=0)
    with opened(one) as reader:
        reader.read_frames_numpy([0])
        allowed.clear()
        with pytest.raises(
            fg.SourcePermissionError, match=r"export 'train-videos', 'a/b/sample.mp4'"
        ) as caught:
            reader.read_frames_numpy([0])
    assert isinstance(caught.value, PermissionError)
    assert ALICE[1] not in str(caught.value) + repr(caught.value)
    with pytest.raises(fg.SourcePermissionError):
        opened(one)


@pytest.mark.parametrize("name", ["height", "width", "num_threads"])
def test_8_height_width_num_threads_of_0_or_less_fail_to_open(root, name):
    """height / width / num_threads <= 0 | 打开 reader 失败"""
    for value in (0, -1, -(1 << 40)):
        with pytest.raises(ValueError, match=f"^{name} must be positive"):
            opened(patcher(root), **{name: value})
        with pytest.raises(ValueError, match=f"^{name} must be positive"):
            request(**{name: value})


def test_8_negative_indices_fail_read_frames_numpy(root):
    """indices 包含负数 | read_frames_numpy 失败"""
    with opened(patcher(root)) as reader, pytest.raises(ValueError, match="non-negative"):
        reader.read_frames_numpy([3, -1])
    with pytest.raises(ValueError, match="non-negative"):
        request(indices=[-1])


def test_8_what_ffmpeg_knows_no_container_or_stream_of_fails_read_frames_numpy(root):
    """FFmpeg 无法识别容器或视频流 | read_frames_numpy 失败"""
    with opened(patcher(root), "words.mp4") as reader, pytest.raises(fg.DecodeError, match="words.mp4"):
        reader.read_frames_numpy([0])


def test_8_a_short_read_of_the_remote_fails_the_current_read(root, truth):
    """读取中远端短读 | 当前读取失败"""
    short = threading.Event()

    def cut(info) -> Fault | None:
        return Fault(truncate_to=10) if short.is_set() and info.method == "GET" else None

    with RangeServer(root, hook=cut) as server:
        options = {"timeout": "2s"}
        one = patcher(server.base_url, cache={"memory_bytes": 0}, storage_options=options)
        with opened(one) as reader:
            short.set()
            with pytest.raises(fg.SourceError):
                reader.read_frames_numpy([0])
            short.clear()
            assert np.array_equal(truth[[0]], reader.read_frames_numpy([0]))


def test_8_a_closed_reader_fails_later_reads(root):
    """reader 已关闭 | 后续读取失败"""
    reader = opened(patcher(root))
    reader.close()
    with pytest.raises(RuntimeError, match="closed"):
        reader.read_frames_numpy([0])


# ------------------------------------------------------------- section 10, the first two layers


def test_10_byte_source_read_at_seek_eof(root):
    """字节源单测 | read_at、seek、EOF、跨 page 读取、重复读命中 page cache"""
    data = (root / NAMES[1]).read_bytes()
    source = source_of(patcher(root))
    assert data[5:25] == source.read_at(5, 20)
    assert data[-7:] == source.read_at(len(data) - 7, 100), "beyond the end: what there is"
    assert b"" == source.read_at(len(data), 10) == source.read_at(len(data) + 5, 10) == source.read_at(3, 0)
    for bad in ((-1, 5), (5, -1)):
        with pytest.raises(ValueError, match="want numbers from 0"):
            source.read_at(*bad)
    assert data[:10] == source.read_packet(10)
    assert data[10:14] == source.read_packet(4)
    assert 24 == source.seek(10, os.SEEK_CUR)
    assert data[24:30] == source.read_packet(6)
    assert len(data) == source.seek(30, AVSEEK_SIZE)
    assert 30 == source.seek(0, os.SEEK_CUR), "AVSEEK_SIZE moves nothing"
    assert len(data) - 3 == source.seek(-3, os.SEEK_END)
    assert data[-3:] == source.read_packet(100)
    assert b"" == source.read_packet(100)
    assert 7 == source.seek(7, os.SEEK_SET)
    for bad in ((-8, os.SEEK_CUR), (-1, os.SEEK_SET), (0, 9)):
        with pytest.raises(ValueError, match="no such place"):
            source.seek(*bad)
    source.close()
    with pytest.raises(RuntimeError, match="closed"):
        source.read_at(0, 1)


def test_10_byte_source_reads_across_pages_and_hits_the_page_cache(root):
    """字节源单测 | read_at、seek、EOF、跨 page 读取、重复读命中 page cache"""
    data = (root / NAMES[1]).read_bytes()
    source = source_of(patcher(root, cache={"memory_bytes": 0}))
    assert data[PIECE - 3 : 3 * PIECE + 3] == source.read_at(PIECE - 3, 2 * PIECE + 6)
    before = source.counters()
    assert (4, 0, 1) == tuple(
        before[n] for n in ("page_cache_misses", "page_cache_hits", "remote_read_calls")
    )
    assert data[PIECE : PIECE + 9] == source.read_at(PIECE, 9)
    after = source.counters()
    assert (4, 1, 1) == tuple(
        after[n] for n in ("page_cache_misses", "page_cache_hits", "remote_read_calls")
    )


def test_10_integration_export_rights(root, users):
    """FluxonFS 集成测试 | export 权限、metadata cache、KV piece cache、内部磁盘缓存、文件变更签名"""
    one = patcher(root, readers=["alice"], users=users)
    for identity in (None, BOB, ("alice", "wrong"), ("carol", "x"), ("", "")):
        one.request_identity = identity
        with pytest.raises(PermissionError):
            opened(one)
        with pytest.raises(PermissionError):
            one.open_video_reader_pool().read_many_numpy_with_stats([request(indices=())])
    one.request_identity = ALICE
    opened(one).close()


def test_10_integration_metadata_cache_knows_what_is_not_there(root, tmp_path):
    """FluxonFS 集成测试 | export 权限、metadata cache、KV piece cache、内部磁盘缓存、文件变更签名"""
    one = patcher(tmp_path, metadata_cache_ttl_ms=300)
    with pytest.raises(FileNotFoundError):
        opened(one, "late.mp4")
    shutil.copy(root / NAMES[1], tmp_path / "late.mp4")
    with pytest.raises(FileNotFoundError):
        opened(one, "late.mp4")
    time.sleep(0.35)
    opened(one, "late.mp4").close()


@pytest.mark.parametrize("policy", list(MissPolicy))
def test_10_integration_piece_cache_and_inner_disk_cache(http, truth, tmp_path, policy):
    """FluxonFS 集成测试 | export 权限、metadata cache、KV piece cache、内部磁盘缓存、文件变更签名"""
    clip = [3, 50]
    for n in range(2):
        cache = {"disk_path": tmp_path / "disk"}
        one = patcher(http.base_url, cache=cache, miss_policy=policy, metadata_cache_ttl_ms=60_000)
        http.reset()
        with opened(one) as reader:
            for again in range(2):
                assert np.array_equal(truth[clip], reader.read_frames_numpy(clip))
                gets = [r for r in http.requests if r.method == "GET"]
                assert bool(gets) == (n == again == 0)
                http.reset()
            stats = reader.stats()
        assert bool(stats["disk_hits"]) == bool(n)
        if policy is MissPolicy.REMOTE_READ:
            one.flush()
        # StageToKvThenRead: on disk before the read has answered.
        assert len(list((tmp_path / "disk").rglob("*.piece"))) >= stats["disk_misses"] + stats["disk_hits"]


def test_10_integration_a_changed_file_is_another_version(root, truth, tmp_path):
    """FluxonFS 集成测试 | export 权限、metadata cache、KV piece cache、内部磁盘缓存、文件变更签名"""
    place, disk = tmp_path / "videos", tmp_path / "disk"
    place.mkdir()
    shutil.copy(root / NAMES[1], place / "v.mp4")
    one = patcher(place, cache={"disk_path": disk}, metadata_cache_ttl_ms=0)
    reader = opened(one, "v.mp4")
    assert np.array_equal(truth[[4]], reader.read_frames_numpy([4]))
    new = make(tmp_path / "new.mp4", RECIPES["allintra"])
    os.replace(new, place / "v.mp4")
    with pytest.raises(fg.SourceChangedError):
        reader.read_frames_numpy([4])
    reader.close()
    wanted = full_decode(place / "v.mp4")
    with opened(one, "v.mp4") as reader:
        assert np.array_equal(wanted[[4]], reader.read_frames_numpy([4]))


# ------------------------------------------------------------- the tables themselves


@pytest.mark.skipif(not SEED.exists(), reason="the seed text is not beside the checkout")
def test_every_row_of_the_tables_has_a_test_that_quotes_it():
    """The rows of sections 4, 6.3, 6.4, 8 and of section 10's first two layers are all quoted above."""
    text = SEED.read_text().replace("`", "")
    sections = re.split(r"\n(?=\d+(?:\.\d)? |\d+\. )", text[text.index("4. 公共接口") :])
    wanted = []
    for section in sections:
        if re.match(r"(4\.|6\.3|6\.4|8\.|10\.) ?", section):
            rows = [line.split("\t") for line in section.splitlines() if "\t" in line]
            wanted += [
                " | ".join(row)
                for row in rows
                if row[0] not in {"项目", "字段", "配置 / 状态", "条件", "层级"}
            ]
    wanted = [row for row in wanted if not row.startswith("视频过程测试")]
    here = [f.__doc__ for n, f in vars(sys.modules[__name__]).items() if n.startswith("test_")]
    assert len(wanted) == 8 + 8 + 7 + 6 + 8 + 2
    assert [] == [row for row in wanted if row not in here]


def test_a_request_is_checked_when_it_is_made():
    """Wrong names, sizes and numbers are refused before any pool sees them; indices become a tuple."""
    assert (1, 2) == request(indices=[1, 2]).indices
    for bad, error in [
        ({"export_name": ""}, ValueError),
        ({"relpath": 3}, TypeError),
        ({"height": 1.5}, TypeError),
        ({"indices": [None]}, TypeError),
    ]:
        with pytest.raises(error):
            request(**bad)
    assert isinstance(request(), FluxonFsVideoReadRequest)
