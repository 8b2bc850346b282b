"""The pool over foreign agents, the patcher's configuration, and both in other processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fluxon_gop as fg
from fluxon_gop.fluxonfs import (
    FluxonFsCache,
    FluxonFsExport,
    FluxonFsPatcher,
    FluxonFsVideoReader,
    FluxonFsVideoReaderPool,
    Users,
    hash_password,
)
from fluxon_gop.fluxonfs.read_stats import reader_stats, split
from tests.fluxonfs import HEIGHT, NAMES, WIDTH, opened, patcher, request, same, totals
from tests.media import RECIPES, full_decode, make
from tools.range_server import RangeServer

DESIGN_NAMES = [
    "decode_calls",
    "decode_frames_requested",
    "decode_errors",
    "read_at_calls",
    "read_at_requested_bytes",
    "read_at_returned_bytes",
    "page_cache_hits",
    "page_cache_misses",
    "remote_read_calls",
    "remote_read_bytes",
]


class ForeignReader:
    """Stands for another system's reader, which cannot run here; written down as it is called."""

    def __init__(self, log: list, key: tuple) -> None:
        self.log, self.key = log, key
        self.calls = self.bytes = 0
        self.closed = False

    def read_frames_numpy(self, indices: list[int]) -> np.ndarray:
        self.log.append((self.key, indices))
        self.calls += 1
        self.bytes += 1000 * len(indices)
        return np.array([[[[n] * 3]] for n in indices], np.uint8).reshape(len(indices), 1, 1, 3)

    def stats(self) -> dict[str, int]:
        return {"read_at_calls": self.calls, "remote_read_bytes": self.bytes}

    def close(self) -> None:
        self.closed = True


class ForeignAgent:
    """Opens foreign readers, and keeps them for the tests to look at."""

    def __init__(self) -> None:
        self.opened: list[ForeignReader] = []
        self.log: list = []

    def open_video_reader(self, *key) -> ForeignReader:
        self.opened.append(ForeignReader(self.log, key))
        return self.opened[-1]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    (folder / "a" / "b").mkdir(parents=True)
    make(folder / NAMES[1], RECIPES["bframes"])
    return folder


@pytest.fixture(scope="module")
def truth(root) -> np.ndarray:
    return full_decode(root / NAMES[1])


def test_a_foreign_agent_gets_its_arguments_by_place_and_one_merged_call_a_key():
    """Two clips of one key and one of another: two readers, two calls, results in order, shares that add up."""
    agent = ForeignAgent()
    pool = FluxonFsVideoReaderPool(agent=agent, request_identity=("user", "pass"), max_readers=2)
    wanted = [request("a.mp4", (0, 4)), request("b.mp4", (7,)), request("a.mp4", (2, 6, 8))]
    results = pool.read_many_numpy_with_stats(wanted)
    assert [[0, 4, 2, 6, 8], [7]] == [indices for _, indices in agent.log]
    assert [("train-videos", f"{n}.mp4", HEIGHT, WIDTH, 1, ("user", "pass")) for n in "ab"] == [
        reader.key for reader in agent.opened
    ]
    assert [[0, 4], [7], [2, 6, 8]] == [result.array[:, 0, 0, 0].tolist() for result in results]
    assert [(2, 5, 0), (1, 1, 0), (2, 5, 1)] == [tuple(result.batch_stats.values()) for result in results]
    assert [2000, 1000, 3000] == [result.reader_stats["remote_read_bytes"] for result in results]
    assert [0, 1, 1] == [result.reader_stats["read_at_calls"] for result in results], "largest remainder"


def test_a_foreign_reader_is_kept_evicted_and_closed_by_the_pool():
    """Reused while idle, the least recently used one closed beyond the bound, all closed with the pool."""
    agent = ForeignAgent()
    pool = FluxonFsVideoReaderPool(agent=agent, request_identity=None, max_readers=1)
    first = pool.read_many_numpy_with_stats([request("a.mp4", (1,))])[0]
    again = pool.read_many_numpy_with_stats([request("a.mp4", (2, 3))])[0]
    assert (False, True, 2000) == (
        first.reader_cache_hit,
        again.reader_cache_hit,
        again.reader_stats["remote_read_bytes"],
    )
    pool.read_many_numpy_with_stats([request("b.mp4", (1,))])
    assert [True, False] == [reader.closed for reader in agent.opened]
    pool.close()
    assert [True, True] == [reader.closed for reader in agent.opened]
    stats = pool.stats()
    assert (2, 2, 1, 1, 2, 0) == tuple(
        stats[name]
        for name in (
            "open_count",
            "close_count",
            "evict_count",
            "reader_cache_hits",
            "reader_cache_misses",
            "current_readers",
        )
    )


def test_a_foreign_reader_that_is_active_is_never_closed_and_not_shared():
    """While one call is inside a reader, a second call on its key opens another, and eviction spares both."""
    agent, inside, go_on = ForeignAgent(), threading.Event(), threading.Event()
    pool = FluxonFsVideoReaderPool(agent=agent, request_identity=None, max_readers=1)
    pool.read_many_numpy_with_stats([request("a.mp4", (1,))])
    busy = agent.opened[0]
    read = busy.read_frames_numpy

    def slow(indices):
        inside.set()
        assert go_on.wait(10)
        assert not busy.closed
        return read(indices)

    busy.read_frames_numpy = slow
    thread = threading.Thread(target=pool.read_many_numpy_with_stats, args=([request("a.mp4", (5,))],))
    thread.start()
    assert inside.wait(10)
    pool.read_many_numpy_with_stats([request("a.mp4", (6,)), request("b.mp4", (6,))])
    assert (3, False, 1) == (len(agent.opened), busy.closed, pool.stats()["active_readers"])
    pool.close()
    assert not busy.closed
    go_on.set()
    thread.join()
    assert busy.closed
    assert (0, 0) == (pool.stats()["current_readers"], pool.stats()["active_readers"])


@pytest.mark.parametrize("stats", [[("a", 1)], {1: 2}, {"a": 1.5}, {"a": True}, None])
def test_a_foreign_readers_stats_must_be_a_dict_of_str_to_int(stats):
    """Anything else is a TypeError that says so."""
    agent = ForeignAgent()
    reader = FluxonFsVideoReader(ForeignReader([], ()))
    reader._inner.stats = lambda: stats
    with pytest.raises(TypeError, match="stats must"):
        reader.stats()
    with pytest.raises(TypeError, match="number of frames"):
        len(reader)
    del agent


def test_a_foreign_array_of_the_wrong_length_is_refused():
    """A merged call that brings fewer frames than asked for cannot be dealt out."""
    agent = ForeignAgent()
    pool = FluxonFsVideoReaderPool(agent=agent, request_identity=None)
    pool.read_many_numpy_with_stats([request("a.mp4", (1,))])
    agent.opened[0].read_frames_numpy = lambda indices: np.zeros((1, 1, 1, 3), np.uint8)
    with pytest.raises(ValueError, match="shape"):
        pool.read_many_numpy_with_stats([request("a.mp4", (1,)), request("a.mp4", (2,))])
    with pytest.raises(TypeError, match="cannot plan"):
        pool.explain([request("a.mp4", (1,))])


@pytest.mark.parametrize("identity", [["u", "p"], ("u",), ("u", "p", "x"), ("u", 3), "up", 7])
def test_a_request_identity_is_a_tuple_of_two_str_or_none(identity, root):
    """Anything else is a TypeError that shows no value."""
    with pytest.raises(TypeError, match="request_identity must"):
        FluxonFsVideoReaderPool(agent=ForeignAgent(), request_identity=identity)
    with pytest.raises(TypeError, match="request_identity must"):
        patcher(root, request_identity=identity)


@given(
    st.dictionaries(st.text(max_size=3), st.integers(0, 10**15), max_size=4),
    st.lists(st.integers(0, 50), min_size=1, max_size=8),
)
def test_shares_add_up_and_are_within_one_of_proportional(stats, weights):
    """Largest remainder: each counter's shares sum to it, none is off its proportion by one or more."""
    shares = split(stats, weights)
    total = sum(weights)
    for name, value in stats.items():
        assert value == sum(share[name] for share in shares)
        for share, weight in zip(shares, weights, strict=True) if total else ():
            assert abs(share[name] * total - value * weight) < total


def test_reader_stats_have_all_names_of_the_design_and_are_ints(root):
    """The names that FluxonFS knows and ours are always there, each an int."""
    stats = reader_stats(fg.ReadStats())
    with opened(patcher(root)) as reader:
        reader.read_frames_numpy([3])
        assert stats.keys() == reader.stats().keys()
        assert {int} == {type(value) for value in reader.stats().values()}
    assert set(DESIGN_NAMES) <= stats.keys()
    for name in ("open_us", "decode_us", "media_waves", "index_waves", "extension_waves", "planned_reads"):
        assert name in stats
    for name in (
        "planned_bytes",
        "unplanned_reads",
        "unplanned_bytes",
        "kv_hits",
        "kv_misses",
        "disk_hits",
    ):
        assert name in stats


def test_what_a_read_asks_and_gets_is_in_its_books(root):
    """Bytes returned equal bytes requested; unplanned reads are counted apart; decode errors too."""
    with opened(patcher(root)) as reader:
        reader.read_frames_numpy([59])
        stats = reader.stats()
    assert 0 < stats["planned_bytes"] == stats["read_at_requested_bytes"] == stats["read_at_returned_bytes"]
    assert (1, 1, 0) == (stats["decode_calls"], stats["media_waves"], stats["unplanned_reads"])
    assert stats["decode_us"] > 0 < stats["open_us"]


def test_what_opening_cost_is_in_the_readers_books(root):
    """The stat, and head and movie box without a row, with their time: as many requests as the server saw."""
    with (
        RangeServer(root, latency_s=0.02) as server,
        patcher(server.base_url) as one,
        opened(one) as reader,
    ):
        stats = reader.stats()
        seen = [record.method for record in server.requests]
    assert (1, seen.count("GET")) == (stats["stat_calls"], stats["remote_read_calls"])
    assert stats["open_us"] > 0


def test_a_toml_file_describes_a_patcher(root, truth, tmp_path):
    """Exports, cache, users, index and identity come from the file; its paths are relative to its folder."""
    (tmp_path / "videos").symlink_to(root)
    (tmp_path / "users.toml").write_text(f'alice = "{hash_password("sesame")}"\n')
    with fg.IndexTable.open(tmp_path / "rows.arrow", create=True) as rows:
        rows.append([(NAMES, fg.build_index(root / NAMES[1]))])
    (tmp_path / "fluxonfs.toml").write_text(
        textwrap.dedent("""
        index = "rows.arrow"
        users = "users.toml"
        request_identity = ["alice", "sesame"]

        [cache]
        memory_bytes = 1_000_000
        disk_path = "pieces"
        piece_bytes = 8192

        [exports.train-videos]
        root = "videos"
        readers = ["alice"]
        cache_kv_key_prefix = "train"
        metadata_cache_ttl_ms = 1000
        miss_policy = "StageToKvThenRead"

        [exports.other]
        root = "https://example.invalid/bucket"
        async_backfill_enabled = false
        """)
    )
    with FluxonFsPatcher.from_toml(tmp_path / "fluxonfs.toml") as one:
        assert {"train-videos", "other"} == one.exports.keys()
        result = one.open_video_reader_pool().read_many_numpy_with_stats([request(indices=(3, 4))])[0]
        assert np.array_equal(truth[[3, 4]], result.array)
        assert 0 == result.reader_stats["index_builds"]
        assert list((tmp_path / "pieces").rglob("*.piece"))
        one.request_identity = None
        with pytest.raises(PermissionError):
            opened(one)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[exports.a]\nroot = 3", "root is a int|want a str"),
        ("[exports.a]\nreaders = ['x']", "root is missing"),
        ("[exports.a]\nroot = 'x'\ncolour = 1", "unknown: colour"),
        ("[exports.a]\nroot = 'x'\nmiss_policy = 'Never'", "want RemoteRead or StageToKvThenRead"),
        ("[exports.a]\nroot = 'x'\nreaders = ['u']", "names its readers"),
        ("[exports.a]\nroot = 'x'\nreaders = 'u'", "one str"),
        ("[exports.a]\nroot = 'x'\nmetadata_cache_ttl_ms = -1", "want 0 or more"),
        ("[exports.a]\nroot = 'bogus://x/y'", "not supported"),
        ("[cache]\npiece_bytes = 3", "piece_bytes is 3"),
        ("[cache]\nmemory_bytes = '1GB'", "want an int"),
        ("exports = 3", "exports is a int"),
        ("password = 'sesame'", "unknown: password"),
        ("request_identity = ['sesame']", "want .user, password."),
        ("request_identity = ['alice', 'sesame'", "no TOML file"),
        ("users = 'nowhere.toml'", "cannot be read as a file of users"),
    ],
)
def test_a_toml_file_that_says_what_cannot_be_is_refused(tmp_path, text, words):
    """Each is an InvalidRequestError that names the place, and never a value that may be secret."""
    (tmp_path / "f.toml").write_text(text)
    with pytest.raises(fg.InvalidRequestError, match=words) as caught:
        FluxonFsPatcher.from_toml(tmp_path / "f.toml")
    assert "sesame" not in str(caught.value)
    with pytest.raises(fg.InvalidRequestError, match="cannot be read"):
        FluxonFsPatcher.from_toml(tmp_path / "none.toml")


def test_exports_are_checked(root):
    """Names are str and there once; a root has a scheme that is supported; users are given where they are named."""
    for bad in ({"name": ""}, {"root": ""}, {"root": "a\0b"}, {"cache_bytes_field_key": ""}):
        with pytest.raises(ValueError, match="non-empty"):
            FluxonFsExport(**{"name": "e", "root": str(root)} | bad)
    for bad in (
        {"name": 3},
        {"cache_max_bytes": 1.5},
        {"async_backfill_enabled": 1},
        {"metadata_cache_ttl_ms": True},
    ):
        with pytest.raises(TypeError):
            FluxonFsExport(**{"name": "e", "root": str(root)} | bad)
    export = FluxonFsExport("e", str(root))
    with pytest.raises(ValueError, match="there twice"):
        FluxonFsPatcher([export, export])
    with pytest.raises(TypeError, match="want FluxonFsExport"):
        FluxonFsPatcher([("e", str(root))])


def test_a_file_uri_is_a_local_root(root, truth):
    """``file:///folder`` is that folder."""
    with patcher(f"file://{root}") as one, opened(one) as reader:
        assert np.array_equal(truth[[2]], reader.read_frames_numpy([2]))
    with pytest.raises(fg.InvalidRequestError, match="on this machine"):
        patcher("file://elsewhere/x")


def test_explain_shows_the_batch_before_it_runs(root):
    """The plan of a batch over an export: waves, ranges, and how many of the pieces are where; no read of media."""
    with RangeServer(root) as server, patcher(server.base_url) as one, one.open_video_reader_pool() as pool:
        wanted = [request(indices=(0, 59))]
        pool.read_many_numpy_with_stats([request(indices=(0,))])
        server.reset()
        text = str(pool.explain(wanted))
        assert [] == server.requests
    assert "fluxonfs://train-videos/a/b/sample.mp4" in text
    assert "pieces: " in text


# ------------------------------------------------------------- processes


def _read_in_child(pool_bytes: bytes, seeds: list[int], answers) -> None:
    pool = pickle.loads(pool_bytes) if isinstance(pool_bytes, bytes) else pool_bytes
    for seed in seeds:
        (result,) = pool.read_many_numpy_with_stats([request(indices=(seed, 59 - seed))])
        answers.put((seed, result.array, result.reader_stats["remote_read_calls"]))


@pytest.mark.filterwarnings("ignore:lance is not fork-safe:UserWarning")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_pool_works_in_another_process(root, truth, tmp_path, method):
    """Forked after use, or pickled to a fresh process: exact frames, through the same disk tier."""
    users = Users({"alice": hash_password("sesame")})
    one = patcher(
        root,
        cache={"disk_path": tmp_path / "disk"},
        readers=["alice"],
        users=users,
        request_identity=("alice", "sesame"),
    )
    pool = one.open_video_reader_pool()
    pool.read_many_numpy_with_stats([request(indices=(0, 59))])
    one.flush()
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    payload = pool if method == "fork" else pickle.dumps(pool)
    child = context.Process(target=_read_in_child, args=(payload, [0, 7, 20], answers))
    child.start()
    got = [answers.get(timeout=60) for _ in range(3)]
    child.join(60)
    assert 0 == child.exitcode
    for seed, array, remote in got:
        assert np.array_equal(truth[[seed, 59 - seed]], array)
        assert remote == 0 or seed != 0
    assert np.array_equal(
        truth[[5, 54]], pool.read_many_numpy_with_stats([request(indices=(5, 54))])[0].array
    )


@pytest.mark.filterwarnings("ignore:lance is not fork-safe:UserWarning")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_remote_export_in_a_forked_child_says_so_at_once(root):
    """After the parent has read from a remote store, a forked child gets ForkedProcessError, not a hang."""
    with RangeServer(root) as server, patcher(server.base_url, cache={"memory_bytes": 0}) as one:
        pool = one.open_video_reader_pool()
        pool.read_many_numpy_with_stats([request()])
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                pool.read_many_numpy_with_stats([request(indices=(50,))])
                os.write(writing, b"read")
            except fg.ForkedProcessError:
                os.write(writing, b"refused")
            except BaseException as error:  # noqa: BLE001 - the parent is told
                os.write(writing, repr(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert b"refused" == os.read(reading, 1000)
        assert 1 == len(pool.read_many_numpy_with_stats([request(indices=(50,))]))


def test_pickles_are_recipes(root, truth):
    """Patcher, reader and pool travel; the copy reads with tiers of its own, and stays small."""
    with patcher(root) as one, opened(one) as reader, one.open_video_reader_pool() as pool:
        reader.read_frames_numpy([3])
        pool.read_many_numpy_with_stats([request()])
        assert len(pickle.dumps(pool)) < 5_000
        copy = pickle.loads(pickle.dumps(one))
        assert 0 == copy.stats()["memory_bytes"] < one.stats()["memory_bytes"]
        with opened(copy) as again:
            assert np.array_equal(truth[[3]], again.read_frames_numpy([3]))
        again = pickle.loads(pickle.dumps(reader))
        assert np.array_equal(truth[[3]], again.read_frames_numpy([3]))
        again.close()


def test_many_files_through_a_small_pool_leave_few_descriptors_open(root, tmp_path):
    """A pool of 8 over 300 files holds no more descriptors than it has readers."""
    for n in range(300):
        os.link(root / NAMES[1], tmp_path / f"{n}.mp4")
    with (
        patcher(tmp_path, cache={"memory_bytes": 0}) as one,
        one.open_video_reader_pool(max_readers=8) as pool,
    ):
        before = len(list(Path("/proc/self/fd").iterdir()))
        for start in range(0, 300, 50):
            results = pool.read_many_numpy_with_stats(
                [request(f"{n}.mp4", (3,)) for n in range(start, start + 50)]
            )
            assert totals(results)["remote_read_calls"] > 0
            assert len(list(Path("/proc/self/fd").iterdir())) <= before + 8 + 2
        assert 8 == pool.stats()["current_readers"]


def test_a_prefetched_batch_of_a_plain_pool_reads_exports_too(root, truth):
    """An export's file is an address like any other: VideoReaderPool reads, prefetches and explains it."""
    with patcher(root) as one:
        file = one._file(*NAMES)
        with fg.VideoReaderPool() as pool:
            handle = pool.prefetch([fg.VideoReadRequest(file, [4, 9])])
            (result,) = pool.read_many(handle)
            assert same([result], [truth[[4, 9]]])
            assert result.stats.source["remote_read_calls"] > 0


def test_the_cache_config_travels():
    """A configuration is a value: equal, hashable, pickled as it is."""
    cache = FluxonFsCache(disk_path="x")
    assert pickle.loads(pickle.dumps(cache)) == cache
