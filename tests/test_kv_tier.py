"""The shared KV: what a warm wave costs, and that frames are exact whatever the store answers, or does not."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest
import redis

import fluxon_gop as fg
from fluxon_gop.fluxonfs import FluxonFsCache, FluxonFsExport, FluxonFsPatcher, FluxonFsVideoReadRequest
from tests.agents import agent_over
from tests.fluxonfs import totals
from tests.media import RECIPES, full_decode, make
from tests.valkey import PASSWORD, Valkey, free_port
from tools.slow_relay import SlowRelay

VIDEOS = 16
RELPATHS = [f"v{n:02}.mp4" for n in range(VIDEOS)]
CLIPS = {r: tuple(sorted(random.Random(r).sample(range(40), 4))) for r in RELPATHS}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("kv")
    for n, relpath in enumerate(RELPATHS):
        make(folder / relpath, RECIPES[["bframes", "opengop", "hevc", "faststart"][n % 4]], 40)
    return folder


@pytest.fixture(scope="module")
def truth(root) -> dict[str, np.ndarray]:
    return {relpath: full_decode(root / relpath) for relpath in RELPATHS}


@pytest.fixture(scope="module")
def table(root) -> fg.IndexTable:
    with FluxonFsPatcher([FluxonFsExport("e", str(root))]) as one:
        return fg.IndexTable.of([(("e", r), one.build_index("e", r)) for r in RELPATHS])


@pytest.fixture
def valkey(tmp_path):
    with Valkey(tmp_path) as running:
        yield running


def reading(root, url, table, export=None, **cache) -> FluxonFsPatcher:
    tiers = FluxonFsCache(
        **{"memory_bytes": 0, "piece_bytes": 4096, "kv_url": url, "kv_timeout_ms": 1000} | cache
    )
    return FluxonFsPatcher([export or FluxonFsExport("e", str(root))], cache=tiers, index=table)


def read_exactly(one, truth):
    with one.open_video_reader_pool() as pool:
        wanted = [FluxonFsVideoReadRequest("e", r, 96, 128, 1, clip) for r, clip in CLIPS.items()]
        results = pool.read_many_numpy_with_stats(wanted)
    for (relpath, clip), got in zip(CLIPS.items(), results, strict=True):
        assert np.array_equal(truth[relpath][list(clip)], got.array)
    return totals(results)


def test_a_warm_wave_is_one_round_trip(root, truth, table, valkey):
    """Another process of another machine: one round trip to the store for all pieces, no read of the origin."""
    with reading(root, valkey.url, table) as one:
        cold = read_exactly(one, truth)
        assert one.flush(30)
        assert 0 == cold["kv_hits"] < cold["kv_misses"] == one.stats()["kv_stored"]
    with reading(root, valkey.url, table) as other:
        warm = read_exactly(other, truth)
        assert (cold["kv_misses"], 0, 0) == (warm["kv_hits"], warm["kv_misses"], warm["remote_read_calls"])
        assert 1 == other.stats()["kv_round_trips"]


def test_a_warm_wave_asks_no_agent_for_bytes(root, truth, table, valkey):
    """Over an agent: one call cold; warm from the store, one round trip, and only the rights are asked for."""
    with agent_over(FluxonFsExport("e", str(root))) as server:
        export = FluxonFsExport("e", static_nodes=[server.address])
        with reading(root, valkey.url, table, export) as one:
            assert 1 == read_exactly(one, truth)["remote_read_calls"]
            assert one.flush(30)
        with reading(root, valkey.url, table, export) as other:
            warm = read_exactly(other, truth)
            assert (0, VIDEOS) == (warm["remote_read_calls"], warm["stat_calls"])
            assert 1 == other.stats()["kv_round_trips"]
        assert 1 == server.counts.get("calls_total", "do_get")


def test_from_the_store_pieces_go_to_the_disk(root, truth, table, valkey, tmp_path):
    """Warm from disk neither the store nor the origin is asked."""
    for kv_hits in (False, True):
        cache = {"disk_path": tmp_path / f"disk-{kv_hits}"}
        with reading(root, valkey.url, table, **cache) as one:
            assert kv_hits == bool(read_exactly(one, truth)["kv_hits"])
            assert one.flush(30)
        with reading(root, valkey.url, table, **cache) as one:
            warm = read_exactly(one, truth)
            assert (0, 0) == (warm["remote_read_calls"], one.stats()["kv_round_trips"])
            assert warm["disk_hits"]


def test_an_entry_is_a_hash_with_the_exports_field_and_a_time_to_live(root, truth, table, valkey):
    """Key prefix and field are the export's; every entry ends by itself."""
    export = FluxonFsExport("e", str(root), cache_kv_key_prefix="team:a", cache_bytes_field_key="blob")
    with reading(root, valkey.url, table, export, kv_ttl_seconds=500) as one:
        read_exactly(one, truth)
        assert one.flush(30)
    keys = valkey.client.keys()
    assert keys
    for key in keys:
        assert key.startswith(b"team:a:")
        assert {b"blob", b"fluxon_gop_sum"} == set(valkey.client.hkeys(key))
        assert 0 < valkey.client.ttl(key) <= 500


def test_staged_pieces_are_there_before_the_read_answers(root, truth, table, valkey):
    """StageToKvThenRead: no flush is needed."""
    export = FluxonFsExport("e", str(root), miss_policy="StageToKvThenRead")
    with reading(root, valkey.url, table, export) as one:
        cold = read_exactly(one, truth)
        assert cold["kv_misses"] == len(valkey.client.keys())


def test_entries_that_are_wrong_are_never_used(root, truth, table, valkey):
    """Flipped, cut, exchanged, of another kind, without their sum: exact frames, counted, removed."""
    with reading(root, valkey.url, table) as one:
        read_exactly(one, truth)
        assert one.flush(30)
    client = valkey.client
    keys = sorted(client.keys())
    generator = random.Random(4)
    for n, key in enumerate(keys):
        data = bytearray(client.hget(key, "bytes"))
        if n % 5 == 0:
            data[generator.randrange(len(data))] ^= 1
            client.hset(key, "bytes", bytes(data))
        elif n % 5 == 1:
            client.hset(key, "bytes", bytes(data[:-1]))
        elif n % 5 == 2:
            other = client.hgetall(keys[n - 1])
            client.hset(key, mapping=other)
        elif n % 5 == 3:
            client.hdel(key, "fluxon_gop_sum")
    with reading(root, valkey.url, table) as one:
        seen = read_exactly(one, truth)
        assert sum(n % 5 == 4 for n in range(len(keys))) == seen["kv_hits"]
        assert one.stats()["kv_corrupt"] == sum(n % 5 != 4 for n in range(len(keys)))
        assert one.flush(30)
    with reading(root, valkey.url, table) as one:
        assert 0 == read_exactly(one, truth)["kv_misses"]
    for key in keys[::2]:
        client.set(key, b"no hash at all")
    with reading(root, valkey.url, table) as one:
        assert len(keys[1::2]) == read_exactly(one, truth)["kv_hits"]
        assert (len(keys[::2]), 0) == (one.stats()["kv_corrupt"], one.stats()["kv_errors"])


@pytest.mark.parametrize("fault", ["dead", "silent", "slow", "wrong password"])
def test_a_store_that_does_not_answer_is_bypassed(root, truth, table, valkey, fault):
    """Frames are exact, the wait is the small deadline, once; it is counted."""
    relay = SlowRelay(valkey.port)
    url = {
        "dead": f"redis://:{PASSWORD}@127.0.0.1:{free_port()}/0",
        "wrong password": f"redis://:guess@127.0.0.1:{valkey.port}/0",
    }.get(fault, f"redis://:{PASSWORD}@127.0.0.1:{relay.port}/0")
    relay.delay_s = {"silent": 1e9, "slow": 1.0}.get(fault, 0.0)
    with reading(root, url, table, kv_timeout_ms=200, kv_retry_seconds=600) as one:
        for _ in range(3):
            started = time.monotonic()
            assert 0 == read_exactly(one, truth)["kv_hits"]
            assert time.monotonic() - started < 20
        assert one.flush(30)
        counted = one.stats()
        assert counted["kv_errors"] <= 2 <= counted["kv_bypassed"]
        assert "guess" not in repr(one) + repr(one._file_system.pieces.kv)
    relay.close()


def test_a_store_that_comes_back_is_used_again(root, truth, table, valkey):
    """Killed, and started again, empty: bypassed, then filled."""
    with reading(root, valkey.url, table, kv_retry_seconds=0.1) as one:
        read_exactly(one, truth)
        assert one.flush(30)
        valkey.kill()
        read_exactly(one, truth)
        assert one.stats()["kv_errors"]
        valkey.start()
        until = time.monotonic() + 30
        while not read_exactly(one, truth)["kv_hits"]:
            assert one.flush(30)
            assert time.monotonic() < until


def test_a_full_store_still_gives_what_it_has(root, truth, table, valkey):
    """No more is taken: what is there is read, what is not comes from the origin."""
    with reading(root, valkey.url, table) as one:
        read_exactly(one, truth)
        assert one.flush(30)
    client = valkey.client
    keys = client.keys()
    client.delete(*keys[::2])
    client.config_set("maxmemory", 1)
    with reading(root, valkey.url, table, kv_retry_seconds=600) as one:
        for _ in range(2):
            seen = read_exactly(one, truth)
            assert one.flush(30)
            assert (len(keys) - len(keys[::2]), len(keys[::2])) == (seen["kv_hits"], seen["kv_misses"])
        assert one.stats()["kv_errors"]


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_url": "http://a"},
        {"kv_url": "redis://:secret@a:port/0"},
        {"kv_url": "redis://a", "kv_timeout_ms": 0},
        {"kv_url": "redis://a", "kv_ttl_seconds": 0},
        {"kv_retry_seconds": -1},
    ],
)
def test_a_configuration_that_is_wrong_is_refused(root, fields):
    """ValueError, without the password."""
    with pytest.raises(ValueError) as caught:
        FluxonFsPatcher([FluxonFsExport("e", str(root))], cache=FluxonFsCache(**fields))
    assert "secret" not in str(caught.value)


def test_the_password_is_wanted(valkey):
    """The tests' store refuses who does not know it."""
    with pytest.raises(redis.RedisError):
        redis.Redis(port=valkey.port).ping()
