"""The cache tiers: what a batch costs cold and warm, and that frames are the same whatever state a tier is in."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import fluxon_gop as fg
from fluxon_gop.fluxonfs import FluxonFsCache, FluxonFsExport, FluxonFsPatcher, MissPolicy
from fluxon_gop.fluxonfs.disk_tier import HEAD_BYTES, DiskTier
from fluxon_gop.fluxonfs.piece_key import FilePieces
from tests.conftest import ROOT
from tests.fluxonfs import HEIGHT, WIDTH, opened, patcher, request, same, totals
from tests.media import RECIPES, full_decode, make
from tools.range_server import RangeServer

VIDEOS = 16
RELPATHS = [f"v{n:02}.mp4" for n in range(VIDEOS)]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sixteen")
    names = ["bframes", "opengop", "hevc", "faststart"]
    for n, relpath in enumerate(RELPATHS):
        make(folder / relpath, RECIPES[names[n % 4]], 40)
    return folder


@pytest.fixture(scope="module")
def truth(root) -> list[np.ndarray]:
    return [full_decode(root / relpath) for relpath in RELPATHS]


@pytest.fixture
def server(root):
    with RangeServer(root) as running:
        yield running


@pytest.fixture
def table(server, tmp_path):
    """Rows of the sixteen, built through an export over HTTP; in memory."""
    with fg.IndexTable.open(tmp_path / "rows.arrow", create=True) as rows:
        with patcher(server.base_url) as one:
            rows.append([(("train-videos", r), one.build_index("train-videos", r)) for r in RELPATHS])
        rows.lookup([("train-videos", r) for r in RELPATHS])
        server.reset()
        yield rows


def batch(seed: int = 7):
    """Return sixteen requests of one clip each, and the clips."""
    generator = random.Random(seed)
    clips = [tuple(range(start, start + 8, 2)) for start in (generator.randrange(32) for _ in RELPATHS)]
    return [request(r, clip) for r, clip in zip(RELPATHS, clips, strict=True)], clips


def exact(results, clips, truth) -> bool:
    return same(results, [pictures[list(clip)] for pictures, clip in zip(truth, clips, strict=True)])


def methods(server) -> list[str]:
    return [record.method for record in server.requests]


def test_sixteen_clips_cold_are_one_wave_of_whole_pieces_each_once(server, table, truth):
    """Cold: the stats side by side, then all media reads in one wave; no byte is asked for twice."""
    # Long enough that a busy machine has sent all requests before the first answer.
    server.latency_s = 0.3
    requests, clips = batch()
    with patcher(server.base_url, index=table) as one, one.open_video_reader_pool() as pool:
        results = pool.read_many_numpy_with_stats(requests)
        assert exact(results, clips, truth)
    gets = [r for r in server.requests if r.method == "GET"]
    heads = [r for r in server.requests if r.method == "HEAD"]
    sums = totals(results)
    assert (VIDEOS, VIDEOS) == (len(heads), sums["stat_calls"])
    assert 2 == server.summary()["depth"], "stats, then media"
    assert max(r.started for r in gets if r.path == RELPATHS[0]) < min(r.ended for r in gets)
    assert (len(gets), sum(r.nbytes for r in gets)) == (
        sums["remote_read_calls"],
        sums["remote_read_bytes"],
    )
    seen = set()
    for record in gets:
        pieces = {(record.path, at) for at in range(record.start, record.stop, 4096)}
        assert record.start % 4096 == 0
        assert not seen & pieces
        seen |= pieces
    assert (len(seen), 0) == (sums["memory_misses"], sums["unplanned_reads"])
    assert VIDEOS == sums["media_waves"]


def test_sixteen_clips_warm_from_memory_read_no_origin(server, table, truth):
    """Warm in memory: no request at all within the metadata TTL; the same frames."""
    requests, clips = batch()
    with (
        patcher(server.base_url, index=table, metadata_cache_ttl_ms=60_000) as one,
        one.open_video_reader_pool() as pool,
    ):
        pool.read_many_numpy_with_stats(requests)
        server.reset()
        results = pool.read_many_numpy_with_stats(requests)
    assert exact(results, clips, truth)
    sums = totals(results)
    assert ([], 0, 0) == (server.requests, sums["remote_read_calls"], sums["memory_misses"])
    assert all(result.reader_cache_hit for result in results)


@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
def test_sixteen_clips_warm_from_disk_read_no_origin(server, table, truth, tmp_path, memory_bytes):
    """Warm on disk, in a new process's patcher: the stats that renew the rights, and no byte of the origin."""
    requests, clips = batch()
    cache = {"disk_path": tmp_path / "disk", "memory_bytes": memory_bytes}
    with patcher(server.base_url, index=table, cache=cache) as one, one.open_video_reader_pool() as pool:
        cold = totals(pool.read_many_numpy_with_stats(requests))
    server.reset()
    with patcher(server.base_url, index=table, cache=cache) as one, one.open_video_reader_pool() as pool:
        results = pool.read_many_numpy_with_stats(requests)
    assert exact(results, clips, truth)
    assert ["HEAD"] * VIDEOS == methods(server)
    sums = totals(results)
    assert (0, cold["disk_misses"], 0) == (
        sums["remote_read_calls"],
        sums["disk_hits"],
        sums["disk_misses"],
    )


def test_a_right_that_runs_out_is_renewed_beside_the_others_also_when_all_is_warm(server, table, truth):
    """With a TTL of 0 each batch asks for all versions once more, side by side, and for no byte."""
    requests, clips = batch()
    with (
        patcher(server.base_url, index=table, metadata_cache_ttl_ms=0) as one,
        one.open_video_reader_pool() as pool,
    ):
        pool.read_many_numpy_with_stats(requests)
        server.reset()
        server.latency_s = 0.3
        assert exact(pool.read_many_numpy_with_stats(requests), clips, truth)
    assert ["HEAD"] * VIDEOS == methods(server)
    assert 1 == server.summary()["depth"]


@pytest.mark.parametrize(
    "state", ["off", "memory", "disk", "both", "tiny memory", "tiny disk", "bypass", "no table"]
)
def test_frames_are_the_same_with_every_tier_on_off_and_too_small(server, table, truth, tmp_path, state):
    """Three random batches, twice each: FFmpeg's own frames whatever the tiers are."""
    cache = {
        "off": {"memory_bytes": 0},
        "memory": {},
        "disk": {"memory_bytes": 0, "disk_path": tmp_path / "d"},
        "both": {"disk_path": tmp_path / "d"},
        "tiny memory": {"memory_bytes": 5000},
        "tiny disk": {"memory_bytes": 0, "disk_path": tmp_path / "d", "disk_bytes": 30_000},
        "bypass": {"disk_path": tmp_path / "d"},
        "no table": {"disk_path": tmp_path / "d"},
    }[state]
    more = {"cache_max_bytes": 10} if state == "bypass" else {}
    if state != "no table":
        more["index"] = table
    with patcher(server.base_url, cache=cache, **more) as one, one.open_video_reader_pool() as pool:
        for seed in (1, 1, 2, 2, 3, 3):
            requests, clips = batch(seed)
            results = pool.read_many_numpy_with_stats(requests)
            assert exact(results, clips, truth)
        sums = totals(results)
        one.flush()
        if state == "bypass":
            assert (0, 0) == (one.stats()["memory_bytes"], len(list((tmp_path / "d").rglob("*.piece"))))
        if state in {"memory", "disk", "both", "no table"}:
            assert 0 == sums["remote_read_calls"]
        if state in {"off", "bypass"}:
            gets = [r for r in server.requests if r.method == "GET"]
            assert any(r.start % 4096 for r in gets), "exact ranges, not whole pieces"
    if state == "tiny disk":
        assert sum(p.stat().st_size for p in (tmp_path / "d").rglob("*.piece")) <= 30_000


def _tear(path: Path, how: str, others: list[Path]) -> None:
    data = path.read_bytes()
    if how == "shorter":
        path.write_bytes(data[: len(data) // 2])
    elif how == "longer":
        path.write_bytes(data + b"x")
    elif how == "one bit":
        place = random.Random(len(data)).randrange(len(data))
        path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "another piece":
        path.write_bytes(others[others.index(path) - 1].read_bytes())
    elif how == "zeros":
        path.write_bytes(bytes(len(data)))
    elif how == "a folder":
        path.unlink()
        path.mkdir()
    else:
        path.unlink()
        path.symlink_to(others[others.index(path) - 1])


@pytest.mark.parametrize(
    "how", ["shorter", "longer", "one bit", "empty", "another piece", "zeros", "a folder", "a link"]
)
def test_a_torn_or_altered_piece_is_detected_and_fetched_again(server, table, truth, tmp_path, how):
    """Every third piece on disk is damaged: the frames are right, the damage is counted and mended."""
    requests, clips = batch()
    cache = {"disk_path": tmp_path / "disk", "memory_bytes": 0}
    with patcher(server.base_url, index=table, cache=cache) as one:
        one.open_video_reader_pool().read_many_numpy_with_stats(requests)
    pieces = sorted((tmp_path / "disk").rglob("*.piece"))
    torn = pieces[::3]
    for path in torn:
        _tear(path, how, pieces)
    with patcher(server.base_url, index=table, cache=cache) as one:
        results = one.open_video_reader_pool().read_many_numpy_with_stats(requests)
        assert exact(results, clips, truth)
        assert len(torn) <= one.stats()["disk_corrupt"] + one.stats()["disk_errors"]
        assert totals(results)["remote_read_bytes"] > 0
    server.reset()
    with patcher(server.base_url, index=table, cache=cache) as one:
        results = one.open_video_reader_pool().read_many_numpy_with_stats(requests)
        assert exact(results, clips, truth)
    assert 0 == totals(results)["remote_read_calls"], "mended"


def test_many_who_want_a_piece_at_once_cause_one_fetch(server, table, truth):
    """Eight threads, each with a pool of its own, read the same cold batch: no byte is fetched twice."""
    server.latency_s = 0.05
    requests, clips = batch()
    wrong: list[int] = []
    with patcher(server.base_url, index=table) as one:
        gate = threading.Barrier(8)

        def read(n: int) -> None:
            with one.open_video_reader_pool() as pool:
                gate.wait()
                if not exact(pool.read_many_numpy_with_stats(requests), clips, truth):
                    wrong.append(n)

        threads = [threading.Thread(target=read, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [] == wrong
    fetched = [
        (r.path, at) for r in server.requests if r.method == "GET" for at in range(r.start, r.stop, 4096)
    ]
    assert len(set(fetched)) == len(fetched) > 0
    assert VIDEOS == methods(server).count("HEAD")


def test_a_row_that_does_not_fit_is_not_used_and_the_frames_are_the_same(root, truth, tmp_path):
    """A row of another version of the file is counted as stale; the index is built on the fly."""
    shutil.copytree(root, tmp_path / "videos")
    with fg.IndexTable.open(tmp_path / "rows.arrow", create=True) as rows:
        with patcher(tmp_path / "videos") as one:
            rows.append([(("train-videos", RELPATHS[0]), one.build_index("train-videos", RELPATHS[1]))])
        with patcher(tmp_path / "videos", index=rows) as one:
            (result,) = one.open_video_reader_pool().read_many_numpy_with_stats(
                [request(RELPATHS[0], [3, 9])]
            )
    assert np.array_equal(truth[0][[3, 9]], result.array)
    assert (1, 1) == (result.reader_stats["stale_rows"], result.reader_stats["index_builds"])


def test_rows_by_the_origins_address_serve_an_export_too(root, truth, tmp_path):
    """A table built by ``fluxon-gop index build FOLDER`` is used for the export of that folder."""
    with fg.IndexTable.open(tmp_path / "rows.arrow", create=True) as rows:
        rows.append([(str(root / RELPATHS[2]), fg.build_index(root / RELPATHS[2]))])
        with patcher(root, index=rows) as one:
            (result,) = one.open_video_reader_pool().read_many_numpy_with_stats([request(RELPATHS[2], [5])])
    assert np.array_equal(truth[2][[5]], result.array)
    assert (0, 0) == (result.reader_stats["index_builds"], result.reader_stats["stale_rows"])


def test_a_batch_over_several_exports_is_one_wave(root, server, table, truth, tmp_path):
    """Requests of a local and of a remote export, and of two remote ones, are read in one call and one wave."""
    server.latency_s = 0.3
    exports = [
        FluxonFsExport("train-videos", server.base_url),
        FluxonFsExport("again", server.base_url),
        FluxonFsExport("local", str(root)),
    ]
    with fg.IndexTable.open(tmp_path / "all.arrow", create=True) as rows:
        for export in ("again", "train-videos"):
            found = table.lookup([("train-videos", r) for r in RELPATHS])
            rows.append([((export, r), row) for r, row in zip(RELPATHS, found, strict=True)])
        server.reset()
        with FluxonFsPatcher(exports, index=rows) as one, one.open_video_reader_pool() as pool:
            wanted = [
                request(r, (n,), export_name=export.name)
                for n, r in enumerate(RELPATHS[:4])
                for export in exports
            ]
            results = pool.read_many_numpy_with_stats(wanted)
    assert same(results, [truth[n][[n]] for n in range(4) for _ in exports])
    assert 2 == server.summary()["depth"], "stats, then media"


# ------------------------------------------------------------- a full or failing disk


def test_a_disk_that_takes_no_more_bytes_fails_no_read(server, truth, tmp_path):
    """Every write beyond 100 bytes fails (RLIMIT_FSIZE): exact frames, errors and bypasses counted, no litter."""
    script = textwrap.dedent(f"""
        import resource, sys
        import numpy as np
        from tests.fluxonfs import patcher, request, totals
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        cache = {{"disk_path": {str(tmp_path / "disk")!r}, "memory_bytes": 0, "disk_retry_seconds": 0.05}}
        for policy in ("RemoteRead", "StageToKvThenRead"):
            one = patcher({server.base_url!r}, cache=cache, miss_policy=policy)
            pool = one.open_video_reader_pool()
            for _ in range(3):
                results = pool.read_many_numpy_with_stats([request({RELPATHS[0]!r}, [1, 20, 39])])
                one.flush()
            stats = one.stats()
            assert stats["disk_errors"] > 0, stats
            one.close()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        np.save(sys.argv[1], results[0].array)
        """)
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "frames.npy")],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert 0 == done.returncode, done.stderr
    assert np.array_equal(truth[0][[1, 20, 39]], np.load(tmp_path / "frames.npy"))
    assert [] == [p for p in (tmp_path / "disk").rglob("*") if p.suffix in {".part", ".piece"}]


def test_a_disk_that_failed_is_back_later(root, truth, tmp_path):
    """The folder's place is taken by a file: bypassed, counted; once it is free again, pieces are kept."""
    disk = tmp_path / "disk"
    cache = {"disk_path": disk, "memory_bytes": 0, "disk_retry_seconds": 0.05}
    with patcher(root, cache=cache) as one, one.open_video_reader_pool() as pool:
        shutil.rmtree(disk)
        disk.write_text("in the way")
        for _ in range(3):
            (result,) = pool.read_many_numpy_with_stats([request(RELPATHS[0], [3])])
            assert np.array_equal(truth[0][[3]], result.array)
        one.flush()
        assert one.stats()["disk_errors"] > 0
        disk.unlink()
        time.sleep(0.1)
        pool.read_many_numpy_with_stats([request(RELPATHS[0], [3])])
        one.flush()
        (result,) = pool.read_many_numpy_with_stats([request(RELPATHS[0], [3])])
    assert 0 == result.reader_stats["remote_read_calls"] < result.reader_stats["disk_hits"]


def _pieces(size: int, n: int) -> FilePieces:
    return FilePieces("p", "f", "e", f"v{n}", fg.Signature(size, None, n), 4096)


def test_the_disk_tier_keeps_to_its_bound_and_lets_the_least_recently_used_go(tmp_path):
    """200 pieces into room for 20, by two objects in turn: never beyond the bound; the newest stay."""
    bound = 20 * (4096 + HEAD_BYTES)
    tiers = [DiskTier(tmp_path / "d", bound) for _ in range(2)]
    for n in range(200):
        assert tiers[n % 2].put(_pieces(4096, n).key(0), bytes([n]) * 4096)
        assert sum(p.stat().st_size for p in (tmp_path / "d").rglob("*.piece")) <= bound
        os.utime(next(p for p in (tmp_path / "d").rglob("*.piece") if p.stat().st_size), None)
    assert bytes([199]) * 4096 == tiers[0].get(_pieces(4096, 199).key(0))
    assert tiers[0].get(_pieces(4096, 0).key(0)) is None
    assert sum(tier.counts()["disk_evicted"] for tier in tiers) >= 180
    assert not tiers[0].put(_pieces(1 << 20, 1).key(0), bytes(bound))


def test_pieces_are_private(root, tmp_path):
    """Files of the disk tier have mode 0600, folders 0700; a folder that others may write into is refused."""
    with patcher(root, cache={"disk_path": tmp_path / "disk"}) as one:
        one.open_video_reader_pool().read_many_numpy_with_stats([request(RELPATHS[0])])
    for path in [tmp_path / "disk", *(tmp_path / "disk").rglob("*")]:
        assert (0o700 if path.is_dir() else 0o600) == path.stat().st_mode & 0o777, path
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PermissionError, match="chmod 700"):
        patcher(root, cache={"disk_path": tmp_path / "open"})


def test_the_pieces_of_two_versions_etags_and_sizes_never_meet():
    """A key differs wherever export, relpath, size, mtime_ns, etag, piece size or index differ."""
    base = ("p", "f", "e", "v", fg.Signature(10_000, "x", 5), 4096)
    variants = [base]
    for n, other in enumerate(("q", "g", "d", "w", fg.Signature(10_001, "x", 5), 8192)):
        variants.append((*base[:n], other, *base[n + 1 :]))
    variants += [
        (*base[:4], signature, 4096)
        for signature in (
            fg.Signature(10_000, "y", 5),
            fg.Signature(10_000, None, 5),
            fg.Signature(10_000, "x", 6),
        )
    ]
    digests = {FilePieces(*variant).key(index).digest for variant in variants for index in (0, 1)}
    assert 2 * len(variants) == len(digests)
    assert FilePieces(*base).key(1) == FilePieces(*base).key(1) != FilePieces(*base).key(0)


def test_what_waits_for_the_disk_is_bounded(root, truth, tmp_path):
    """With no room for backfills pieces are not kept on disk, and counted; reads are exact."""
    cache = {"disk_path": tmp_path / "disk", "backfill_bytes": 0}
    with patcher(root, cache=cache) as one:
        (result,) = one.open_video_reader_pool().read_many_numpy_with_stats([request(RELPATHS[0], [3])])
        assert np.array_equal(truth[0][[3]], result.array)
        assert one.stats()["backfill_dropped"] > 0
    assert [] == list((tmp_path / "disk").rglob("*.piece"))


def test_the_cache_is_checked():
    """Sizes are ints from 0; a piece is between 4 KiB and 64 MiB."""
    for name in ("memory_bytes", "disk_bytes", "piece_bytes", "backfill_bytes", "page_cache_pages"):
        with pytest.raises(ValueError, match=name):
            FluxonFsCache(**{name: -1})
        with pytest.raises(TypeError, match=name):
            FluxonFsCache(**{name: True})
    for size in (0, 4095, (64 << 20) + 1):
        with pytest.raises(ValueError, match="piece_bytes"):
            FluxonFsCache(piece_bytes=size)


@pytest.mark.parametrize("policy", list(MissPolicy))
def test_a_closed_patcher_refuses_reads_of_its_open_readers(root, tmp_path, policy):
    """After close, what waited is on disk, and readers and pools say that they cannot read."""
    one = patcher(root, cache={"disk_path": tmp_path / "disk"}, miss_policy=policy)
    reader, pool = opened(one, RELPATHS[0], height=HEIGHT, width=WIDTH), one.open_video_reader_pool()
    reader.read_frames_numpy([1])
    one.close()
    assert list((tmp_path / "disk").rglob("*.piece"))
    for read in (
        lambda: reader.read_frames_numpy([39]),
        lambda: pool.read_many_numpy_with_stats([request(RELPATHS[1])]),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            read()
