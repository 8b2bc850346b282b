"""The agent: what a wave costs, who may read, what is refused, and what happens where a node goes away."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import flight

import fluxon_gop as fg
from fluxon_gop.fluxonfs import (
    FluxonFsCache,
    FluxonFsExport,
    FluxonFsPatcher,
    FluxonFsVideoReadRequest,
    Users,
    hash_password,
)
from fluxon_gop.fluxonfs.agent_client import AgentClient
from fluxon_gop.fluxonfs.agent_wire import SCHEMA, AgentLimits, AgentRead, reads_in, ticket_of
from fluxon_gop.model import Signature
from tests.agents import agent_over, certificate, start_agent
from tests.conftest import ROOT
from tests.fluxonfs import totals
from tests.media import RECIPES, full_decode, make

VIDEOS = 16
RELPATHS = [f"v{n:02}.mp4" for n in range(VIDEOS)]
DATA = random.Random(3).randbytes(300_000)
ALICE = ("alice", "sesame")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("agent")
    names = ["bframes", "opengop", "hevc", "faststart"]
    for n, relpath in enumerate(RELPATHS):
        make(folder / relpath, RECIPES[names[n % 4]], 40)
    (folder / "sub").mkdir()
    (folder / "sub" / "data.bin").write_bytes(DATA)
    (folder / "out").symlink_to("/etc")
    return folder


@pytest.fixture(scope="module")
def truth(root) -> dict[str, np.ndarray]:
    return {relpath: full_decode(root / relpath) for relpath in RELPATHS}


@pytest.fixture(scope="module")
def table(root) -> fg.IndexTable:
    with FluxonFsPatcher([FluxonFsExport("e", str(root))]) as one:
        return fg.IndexTable.of([(("e", r), one.build_index("e", r)) for r in RELPATHS])


def client_patcher(nodes, cache=None, index=None, identity=None, **more) -> FluxonFsPatcher:
    export = FluxonFsExport("e", static_nodes=nodes, **more)
    tiers = FluxonFsCache(**{"piece_bytes": 4096} | (cache or {}))
    return FluxonFsPatcher([export], cache=tiers, index=index, request_identity=identity)


def batch(truth, seed=1):
    generator = random.Random(seed)
    clips = {r: tuple(sorted(generator.sample(range(40), 4))) for r in RELPATHS}
    wanted = [FluxonFsVideoReadRequest("e", r, 96, 128, 1, clip) for r, clip in clips.items()]
    return wanted, [truth[r][list(clip)] for r, clip in clips.items()]


def read_exactly(pool, truth, seed=1):
    wanted, pictures = batch(truth, seed)
    results = pool.read_many_numpy_with_stats(wanted)
    assert all(np.array_equal(want, got.array) for want, got in zip(pictures, results, strict=True))
    return totals(results)


@pytest.mark.parametrize("cache", [{}, {"memory_bytes": 0}], ids=["pieces", "no tiers"])
def test_a_wave_over_sixteen_videos_is_one_call(root, truth, table, cache):
    """Sixteen clips of sixteen videos of one agent: a stat each, and one read call for all."""
    with (
        agent_over(FluxonFsExport("e", str(root))) as server,
        client_patcher([server.address], cache, table) as one,
        one.open_video_reader_pool() as pool,
    ):
        counted = read_exactly(pool, truth)
        assert 1 == counted["remote_read_calls"] == server.counts.get("calls_total", "do_get")
        assert counted["remote_read_bytes"] == server.counts.get("bytes_total")
        assert VIDEOS == server.counts.get("calls_total", "do_action")


def test_a_warm_wave_asks_no_agent_but_for_the_right(root, truth, table, tmp_path):
    """From memory and from disk no range is read; a new process asks for each video's version once more."""
    with agent_over(FluxonFsExport("e", str(root))) as server:
        cache = {"disk_path": tmp_path / "disk"}
        with client_patcher([server.address], cache, table) as one, one.open_video_reader_pool() as pool:
            read_exactly(pool, truth)
            calls = server.counts.get("calls_total", "do_get")
            counted = read_exactly(pool, truth)
            assert (0, 0) == (counted["remote_read_calls"], counted["stat_calls"])
            assert one.flush(30)
        with client_patcher([server.address], cache, table) as one, one.open_video_reader_pool() as pool:
            counted = read_exactly(pool, truth)
        assert (0, VIDEOS) == (counted["remote_read_calls"], counted["stat_calls"])
        assert calls == server.counts.get("calls_total", "do_get")


def test_a_right_that_ran_out_is_renewed_before_the_one_call(root, truth, table):
    """With a TTL of nothing each wave asks for each right, and is one read call all the same."""
    with (
        agent_over(FluxonFsExport("e", str(root))) as server,
        client_patcher([server.address], {"memory_bytes": 0}, table, metadata_cache_ttl_ms=0) as one,
        one.open_video_reader_pool() as pool,
    ):
        for seed in (1, 2):
            before = server.counts.get("calls_total", "do_get")
            read_exactly(pool, truth, seed)
            assert 1 == server.counts.get("calls_total", "do_get") - before


def test_videos_without_rows_are_read_exactly(root, truth):
    """Indexes are built through the agent."""
    with (
        agent_over(FluxonFsExport("e", str(root))) as server,
        client_patcher([server.address]) as one,
        one.open_video_reader_pool() as pool,
    ):
        read_exactly(pool, truth)


def test_a_file_that_changes_is_noticed_and_read_anew(tmp_path):
    """A reader of the old version gets SourceChangedError; one that is opened then reads the new one exactly."""
    path = make(tmp_path / "v.mp4", RECIPES["bframes"], 40)
    size = {"height": 96, "width": 128, "num_threads": 1}
    with (
        agent_over(FluxonFsExport("e", str(tmp_path))) as server,
        client_patcher([server.address], {"memory_bytes": 0}, metadata_cache_ttl_ms=600_000) as one,
    ):
        with one.open_video_reader(export_name="e", relpath="v.mp4", **size) as reader:
            reader.read_frames_numpy([1])
            make(tmp_path / "w.mp4", RECIPES["hevc"], 40).replace(path)
            with pytest.raises(fg.SourceChangedError) as caught:
                reader.read_frames_numpy([39])
            assert 1 == str(caught.value).count("export 'e'")
        with one.open_video_reader(export_name="e", relpath="v.mp4", **size) as reader:
            assert np.array_equal(full_decode(path)[[39]], reader.read_frames_numpy([39]))
        path.unlink()
        with pytest.raises(fg.SourceNotFoundError):
            client_patcher([server.address]).stat("e", "v.mp4")


def test_a_listing_names_what_one_may_read(root):
    """By an agent and from a folder alike; links are not followed, folders that are none are told."""
    wanted = sorted([*RELPATHS, "sub/data.bin"])
    users = Users({"alice": hash_password("sesame")})
    rule = lambda identity, export, relpath: relpath.startswith("sub/")
    with (
        agent_over(
            FluxonFsExport("e", str(root), readers=["alice"]),
            FluxonFsExport("f", str(root), readers=rule),
            users=users,
        ) as server,
        FluxonFsPatcher(
            [FluxonFsExport(name, static_nodes=[server.address]) for name in "ef"], request_identity=ALICE
        ) as far,
        FluxonFsPatcher([FluxonFsExport("e", str(root))]) as near,
    ):
        for one in (far, near):
            assert wanted == sorted(relpath for relpath, _ in one.list_files("e"))
            assert [("sub/data.bin", one.stat("e", "sub/data.bin"))] == one.list_files("e", "sub")
            for prefix in ("out", "nope", "../e", "v00.mp4"):
                with pytest.raises((fg.SourceError, fg.InvalidRequestError)):
                    one.list_files("e", prefix)
        assert ["sub/data.bin"] == [relpath for relpath, _ in far.list_files("f")]
        far.request_identity = None
        with pytest.raises(fg.SourcePermissionError):
            far.list_files("e")


def test_an_agent_over_a_bucket(root, truth, table, s3):
    """An agent's export may itself lie on an object store."""
    for relpath in RELPATHS:
        s3.put(f"agent/{relpath}", (root / relpath).read_bytes())
    export = FluxonFsExport("e", "s3://videos/agent", storage_options=s3.options)
    with (
        agent_over(export) as server,
        client_patcher([server.address]) as one,
        one.open_video_reader_pool() as pool,
    ):
        counted = read_exactly(pool, truth)
        listed = AgentClient((server.address,)).list_files("e", "", None)
    assert counted["remote_read_calls"] > 0
    assert sorted(RELPATHS) == sorted(relpath for relpath, _ in listed)


def test_each_identity_has_its_own_right(root):
    """What one identity has cached, another one without the right does not get; passwords are checked by the agent."""
    users = Users({"alice": hash_password("sesame"), "bob": hash_password("hunter2")})
    with (
        agent_over(FluxonFsExport("e", str(root), readers=["alice"]), users=users) as server,
        client_patcher([server.address], identity=ALICE) as one,
    ):
        assert 300_000 == one.stat("e", "sub/data.bin").size
        for identity in (("bob", "hunter2"), ("alice", "guess"), ("carol", ""), None):
            one.request_identity = identity
            with pytest.raises(fg.SourcePermissionError) as caught:
                one.stat("e", "sub/data.bin")
            assert not {"hunter2", "guess", "sesame"} & set(str(caught.value).split())
        one.request_identity = ALICE
        assert 300_000 == one.stat("e", "sub/data.bin").size
        # One handshake for each password that is right, and for each try with a wrong one.
        assert 4 == server.counts.get("calls_total", "handshake") + server.counts.get(
            "refused_total", "unauthenticated"
        )


def test_a_token_ends_with_the_password_and_with_its_time(root, tmp_path):
    """A changed password refuses the old token at once; one that ran out is got anew without the caller's knowing."""
    book = tmp_path / "users.toml"
    book.write_text(f'alice = "{hash_password("sesame")}"\n')
    export = FluxonFsExport("e", str(root), readers=["alice"])
    with agent_over(export, users=Users(book), token_seconds=0.2) as server:
        client = AgentClient((server.address,), timeout_seconds=5)
        for _ in range(2):
            assert 300_000 == client.stat("e", "sub/data.bin", ALICE).size
            time.sleep(0.3)
        assert 2 == server.counts.get("calls_total", "handshake")
        client.stat("e", "sub/data.bin", ALICE)
        book.write_text(f'alice = "{hash_password("other")}"\n')
        with pytest.raises(fg.SourcePermissionError):
            client.stat("e", "sub/data.bin", ALICE)


def test_tokens_that_are_none_are_refused(root):
    """Replayed after the agent's end, of another agent, invented, malformed: unauthenticated, and the agent lives."""
    users = Users({"alice": hash_password("sesame")})
    export = FluxonFsExport("e", str(root), readers=["alice"])
    with agent_over(export, users=users) as other:
        foreign = flight.FlightClient(other.address).authenticate_basic_token(b"alice", b"sesame")[1]
    body = json.dumps({"export_name": "e", "relpath": "sub/data.bin"}).encode()
    with agent_over(export, users=users) as server:
        client = flight.FlightClient(server.address)
        own = client.authenticate_basic_token(b"alice", b"sesame")[1]
        for token in (
            foreign,
            own[:-1],
            b"Bearer ",
            b"Bearer x",
            b"Basic !!!",
            b"Basic YWxpY2U=",
            b"Digest x",
        ):
            options = flight.FlightCallOptions(timeout=5, headers=[(b"authorization", token)])
            with pytest.raises(flight.FlightUnauthenticatedError):
                list(client.do_action(flight.Action("stat", body), options))
        options = flight.FlightCallOptions(timeout=5, headers=[(b"authorization", own)])
        assert 1 == len(list(client.do_action(flight.Action("stat", body), options)))


SIGNED = Signature(len(DATA), None, 1)
BAD_PATHS = [
    "../x",
    "/etc/passwd",
    "a/../../x",
    "sub//data.bin",
    "%2e%2e/x",
    "a\\b",
    "C:/x",
    "a\0b",
    "",
    ".",
    "sub/",
]


@pytest.mark.parametrize(
    "ticket",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"files": 5}',
        b'{"files": [[]]}',
        b'{"files": [["e", "a", 10, null, null, 5]]}',
        b'{"files": [["e", "a", 10, null, null, [[0, 0, 1e3]]]]}',
        b'{"files": [["e", "a", 10, null, null, [[0, 0, true]]]]}',
        b'{"files": [["e", "a", 10, null, null, [[0, -1, 5]]]]}',
        b'{"files": [["e", "a", 10, null, null, [[0, 5, 5]]]]}',
        b'{"files": [["e", "a", 10, null, null, [[0, 7, 5]]]]}',
        b'{"files": [["e", "a", 10, null, null, [[0, 0, 11]]]]}',
        b'{"files": [["e", "a", 10, null, null, [[0, 0, 5], [0, 5, 6]]]]}',
        b'{"files": [["e", "a", -1, null, null, [[0, 0, 5]]]]}',
        b'{"files": [["e", "a", 9999999999999999999999, null, null, [[0, 0, 5]]]]}',
        b'{"files": [["e", "a", 10, 5, null, [[0, 0, 5]]]]}',
        b'{"files": [[7, "a", 10, null, null, [[0, 0, 5]]]]}',
        b'{"files": [["e", null, 10, null, null, [[0, 0, 5]]]]}',
        json.dumps({"files": [["e", "a", 1 << 40, None, None, [[0, 0, 1 << 39]]]]}).encode(),
        json.dumps({"files": [["e", "a", 99, None, None, [[n, 0, 1] for n in range(70_000)]]]}).encode(),
        *(json.dumps({"files": [["e", path, 10, None, None, [[0, 0, 5]]]]}).encode() for path in BAD_PATHS),
    ],
)
def test_a_ticket_that_is_wrong_is_refused_whole(ticket):
    """Malformed, out of the export, out of the file, too many, too large: InvalidRequestError before any IO."""
    with pytest.raises(fg.InvalidRequestError):
        reads_in(ticket, AgentLimits())


def test_a_ticket_says_what_was_asked():
    """The reads of a ticket are those that it was made of."""
    reads = [AgentRead("e", f"{n % 3}", SIGNED, n, n + 5) for n in range(20)]
    assert dict(enumerate(reads)) == reads_in(ticket_of(reads), AgentLimits())


def test_what_is_refused_leaves_the_agent_alive(root, caplog):
    """Escapes, foreign exports, wrong versions, unknown actions, garbage: typed errors, no place of the machine in them."""
    users = Users({"alice": hash_password("sesame")})
    with agent_over(FluxonFsExport("e", str(root)), users=users, limits={"max_ranges": 8}) as server:
        client = AgentClient((server.address,), timeout_seconds=5)
        told = []
        for export_name, relpath in [
            ("e", "../x"),
            ("e", "out/passwd"),
            ("e", "nope"),
            ("z", "a"),
            ("e", "sub"),
        ]:
            with pytest.raises((fg.SourceError, fg.InvalidRequestError)) as caught:
                client.stat(export_name, relpath, None)
            told.append(str(caught.value))
        now = client.stat("e", "sub/data.bin", None)
        wrong = [
            AgentRead("e", "sub/data.bin", now._replace(mtime_ns=5), 0, 10),
            AgentRead("e", "out/passwd", now, 0, 10),
            AgentRead("e", "nope", now, 0, 10),
            AgentRead("z", "sub/data.bin", now, 0, 10),
            AgentRead("e", "sub/data.bin", now, 5, 10),
        ]
        answers = dict(client.read_many(wrong, None))
        kinds = [
            fg.SourceChangedError,
            fg.SourcePermissionError,
            fg.SourceNotFoundError,
            fg.SourceNotFoundError,
        ]
        assert kinds == [type(answers[n]) for n in range(4)]
        assert DATA[5:10] == bytes(answers[4])
        told += [str(answers[n]) for n in range(4)]
        with pytest.raises(
            fg.InvalidRequestError, match="too much for one call"
        ):  # beyond what this agent allows
            list(client.read_many([AgentRead("e", "sub/data.bin", now, n, n + 1) for n in range(9)], None))
        raw = flight.FlightClient(server.address)
        options = flight.FlightCallOptions(timeout=5)
        for action in ("nope", "", "stat", "list"):
            with pytest.raises((flight.FlightError, OSError, ValueError)):
                list(raw.do_action(flight.Action(action, b"\xff{"), options))
        for attempt in (
            lambda: raw.do_get(flight.Ticket(b"\0" * 1000), options),
            lambda: list(raw.list_flights(b"", options)),
            lambda: raw.get_flight_info(flight.FlightDescriptor.for_path("a"), options),
        ):
            with pytest.raises((flight.FlightError, OSError, NotImplementedError)):
                attempt()
        with socket.create_connection(("127.0.0.1", server.port)) as plain:
            plain.sendall(random.Random(1).randbytes(100_000))
        assert now == client.stat("e", "sub/data.bin", None)
        assert not [line for line in told + caplog.messages if str(root) in line or "sesame" in line]


@pytest.mark.parametrize("limits", [{"max_calls": 1}, {"max_bytes": 30_000_000}])
def test_limits_of_an_identity(root, limits):
    """Calls and bytes beyond what one identity may have under way wait for their turn."""
    with agent_over(FluxonFsExport("e", str(root)), limits=limits) as server:
        client = AgentClient((server.address,), timeout_seconds=20)
        now = client.stat("e", "sub/data.bin", None)
        # More than lies on the way: it is under way until it is taken.
        answers = client.read_many([AgentRead("e", "sub/data.bin", now, 0, 300_000)] * 100, None)
        next(answers)
        got: list[bytes] = []

        def read() -> None:
            read = AgentRead("e", "sub/data.bin", now, 0, 200_000)
            got.extend(bytes(data) for _, data in client.read_many([read], None))

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.2)
        list(answers)
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert [DATA[:200_000]] * 4 == got
        assert server.counts.get("refused_total", "busy")


def test_idle_and_slow_clients_harm_nobody(root):
    """A thousand silent connections and a reader that takes nothing: others are served, and little is read ahead."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 4096), hard), hard))
    (root / "large.bin").write_bytes(b"\1" * (64 << 20))
    with agent_over(FluxonFsExport("e", str(root))) as server:
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(1000)]
        client = AgentClient((server.address,), timeout_seconds=20)
        now = client.stat("e", "large.bin", None)
        slow = client.read_many(
            [AgentRead("e", "large.bin", now, n << 20, (n + 1) << 20) for n in range(64)], None
        )
        next(slow)
        for _ in range(20):
            assert now == client.stat("e", "large.bin", None)
        # The one that takes nothing is not read ahead for without bound.
        assert server.counts.get("bytes_total") < 64 << 20
        slow.close()
        for connection in silent:
            connection.close()
        assert now == client.stat("e", "large.bin", None)
    (root / "large.bin").unlink()


class EvilAgent(flight.FlightServerBase):
    """Answers what it was told to."""

    mode = ""

    def do_get(self, context, ticket):
        def row(place, data, error=None):
            columns = [
                pa.array([place], pa.int32()),
                pa.array([data], pa.binary()),
                pa.array([error], pa.string()),
            ]
            return pa.record_batch(columns, schema=SCHEMA)

        def endless():
            while True:
                yield row(0, b"x").slice(0, 0)

        if self.mode == "schema":
            return flight.RecordBatchStream(pa.table({"a": [1]}))
        answers = {
            "nothing": [],
            "twice": [row(0, b"x" * 10)] * 2,
            "short": [row(0, b"x")],
            "long": [row(0, b"x" * 11)],
            "null": [row(0, None)],
            "other class": [row(0, None, '["KeyboardInterrupt", "x"]')],
            "no words": [row(0, None, "{")],
            "negative": [row(-1, b"x" * 10)],
            "endless": endless(),
        }
        return flight.GeneratorStream(SCHEMA, iter(answers[self.mode]))

    def do_action(self, context, action):
        return iter([text.encode() for text in json.loads(self.mode)])


@pytest.fixture
def evil():
    server = EvilAgent("grpc://127.0.0.1:0")
    threading.Thread(target=server.serve, daemon=True).start()
    yield server
    server.shutdown()


@pytest.mark.parametrize(
    "mode",
    [
        "schema",
        "nothing",
        "twice",
        "short",
        "long",
        "null",
        "other class",
        "no words",
        "negative",
        "endless",
    ],
)
def test_an_agent_that_lies_is_found_out(evil, mode):
    """Wrong, missing, doubled and endless answers: a SourceError, in time."""
    evil.mode = mode
    client = AgentClient((f"grpc://127.0.0.1:{evil.port}",), timeout_seconds=1)
    read = AgentRead("e", "f", Signature(100, None, 1), 0, 10)
    try:
        answers = list(client.read_many([read], None))
    except fg.SourceError:
        return
    assert [fg.SourceError] == [type(answer) for _, answer in answers]


@pytest.mark.parametrize(
    "answer",
    [
        "[]",
        '["{"]',
        '["[1, 2]"]',
        '["[1,null,null]", "[1,null,null]"]',
        '["[-5,null,null]"]',
        '["null"]',
        '["[[1]]"]',
    ],
)
def test_versions_that_are_none_are_refused(evil, answer):
    """A stat or a listing that says nothing sensible is a SourceError."""
    evil.mode = answer
    client = AgentClient((f"grpc://127.0.0.1:{evil.port}",), timeout_seconds=2)
    with pytest.raises(fg.SourceError):
        client.stat("e", "f", None)
    if answer != "[]":
        with pytest.raises(fg.SourceError):
            client.list_files("e", "", None)


def test_users_that_cannot_be_read_refuse_everybody_and_come_back(root, tmp_path, caplog):
    """The file of users is gone, or broken: no call passes, its place is told to nobody; mended, calls pass."""
    book = tmp_path / "users.toml"
    good = f'alice = "{hash_password("sesame")}"\n'
    book.write_text(good)
    with agent_over(FluxonFsExport("e", str(root), readers=["alice"]), users=Users(book)) as server:
        client = AgentClient((server.address,), timeout_seconds=0.5)
        client.stat("e", "sub/data.bin", ALICE)
        for broken in (None, "alice = 5", "alice = "):
            book.unlink() if broken is None else book.write_text(broken)
            with pytest.raises(fg.DeadlineError, match="cannot read its users") as caught:
                client.stat("e", "sub/data.bin", ALICE)
            assert str(tmp_path) not in str(caught.value)
        book.write_text(good)
        client.stat("e", "sub/data.bin", ALICE)
        for identity in (("alice", "sesame\0"), ("alice:", "sesame"), ("ali\0ce", "sesame"), ("", "")):
            with pytest.raises(fg.SourcePermissionError):
                client.stat("e", "sub/data.bin", identity)


def test_calls_that_are_called_off_hold_nothing(root):
    """After streams that were left in the middle no call and no byte counts as under way."""
    with agent_over(FluxonFsExport("e", str(root))) as server:
        client = AgentClient((server.address,))
        now = client.stat("e", "sub/data.bin", None)
        for _ in range(10):
            answers = client.read_many([AgentRead("e", "sub/data.bin", now, 0, 300_000)] * 100, None)
            next(answers)
            answers.close()
        until = time.monotonic() + 10
        while server.counts.get("calls_running") and time.monotonic() < until:
            time.sleep(0.02)
        assert 0 == server.counts.get("calls_running") == server._callers.running
        assert not server._callers._bytes


def test_large_reads_come_in_parts_and_many_in_several_calls(root, monkeypatch):
    """What is more than one call takes is asked for by more of them; a part that fails is its read's error."""
    monkeypatch.setattr("fluxon_gop.fluxonfs.agent_client.PART_BYTES", 1000)
    monkeypatch.setattr("fluxon_gop.fluxonfs.agent_client.CALL_BYTES", 50_000)
    monkeypatch.setattr("fluxon_gop.fluxonfs.agent_client.CALL_RANGES", 30)
    with agent_over(FluxonFsExport("e", str(root))) as server:
        client = AgentClient((server.address,))
        now = client.stat("e", "sub/data.bin", None)
        generator = random.Random(8)
        spans = [tuple(sorted(generator.sample(range(len(DATA)), 2))) for _ in range(12)]
        spans += [(n, n + 1) for n in range(100)] + [(5, 1005), (0, 2000)]
        reads = [AgentRead("e", "sub/data.bin", now, *span) for span in spans]
        bad = AgentRead("e", "sub/data.bin", now._replace(mtime_ns=1), 0, 5000)
        answers = list(client.read_many([bad, *reads, bad], None))
    assert list(range(len(reads) + 2)) == sorted(place for place, _ in answers)
    by_place = dict(answers)
    for place, (start, stop) in enumerate(spans, 1):
        assert DATA[start:stop] == bytes(by_place[place])
    assert isinstance(by_place[0], fg.SourceChangedError)
    assert isinstance(by_place[len(reads) + 1], fg.SourceChangedError)


def test_a_call_that_lasts_too_long_is_ended(root):
    """call_seconds is over: the client's read ends with a typed error, and the agent serves others."""
    with agent_over(FluxonFsExport("e", str(root)), limits={"call_seconds": 0.3}) as server:
        client = AgentClient((server.address,), timeout_seconds=3)
        now = client.stat("e", "sub/data.bin", None)
        reads = [AgentRead("e", "sub/data.bin", now, 0, 300_000)] * 400
        with pytest.raises(fg.DeadlineError):
            [time.sleep(0.01) for _ in client.read_many(reads, None)]
        assert server.counts.get("refused_total", "timed_out")
        assert now == client.stat("e", "sub/data.bin", None)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_the_next_node_answers_where_one_is_down(root, truth, table):
    """A node that refuses, and one that is silent, cost a part of the deadline, not the read."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(16)
        nodes = [f"grpc://127.0.0.1:{free_port()}", f"grpc://127.0.0.1:{silent.getsockname()[1]}"]
        with (
            agent_over(FluxonFsExport("e", str(root))) as server,
            client_patcher([*nodes, server.address], index=table, agent_timeout_ms=6000) as one,
            one.open_video_reader_pool() as pool,
        ):
            read_exactly(pool, truth)


def test_without_an_agent_a_read_ends_in_time(root):
    """Nobody answers: DeadlineError within the export's limit."""
    with client_patcher([f"grpc://127.0.0.1:{free_port()}"], agent_timeout_ms=700) as one:
        started = time.monotonic()
        with pytest.raises(fg.DeadlineError, match="no agent answered within"):
            one.stat("e", "sub/data.bin")
        assert time.monotonic() - started < 5


def test_a_registry_tells_the_nodes(root, tmp_path):
    """A file that is read again when it changes, or a callable; nodes that are none are refused."""
    book = tmp_path / "agents.toml"
    with agent_over(FluxonFsExport("e", str(root))) as server:
        book.write_text("other = []\n")
        export = FluxonFsExport(
            "e", agent_registry=str(book), agent_timeout_ms=2000, metadata_cache_ttl_ms=0
        )
        with FluxonFsPatcher([export]) as one:
            with pytest.raises(fg.SourceError, match="no agent to ask"):
                one.stat("e", "sub/data.bin")
            book.write_text(f'e = ["{server.address}"]\n')
            assert len(DATA) == one.stat("e", "sub/data.bin").size
            book.write_text('e = ["http://x"]\n')
            with pytest.raises(fg.InvalidRequestError, match="grpc://host:port"):
                one.stat("e", "sub/data.bin")
        export = FluxonFsExport("e", agent_registry=lambda name: {"e": [server.address]}[name])
        with FluxonFsPatcher([export]) as one:
            assert len(DATA) == one.stat("e", "sub/data.bin").size


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"static_nodes": ["http://a:1"]}, ValueError),
        ({"static_nodes": ["grpc://a"]}, ValueError),
        ({"static_nodes": ["grpc://user:secret@a:1"]}, ValueError),
        ({"static_nodes": [7]}, TypeError),
        ({"static_nodes": "grpc://a:1"}, TypeError),
        ({"static_nodes": ["grpc://a:1"], "root": "/x"}, ValueError),
        ({"static_nodes": ["grpc://a:1"], "agent_registry": "x"}, ValueError),
        ({"static_nodes": ["grpc://a:1"], "agent_tls_roots": "/nowhere"}, ValueError),
        ({}, ValueError),
    ],
)
def test_an_export_that_names_its_agents_wrong_is_refused(fields, kind):
    """One of root, nodes and registry; addresses of Flight."""
    with pytest.raises(kind) as caught:
        FluxonFsExport("e", **fields)
    assert "secret" not in str(caught.value)


def config_of(folder: Path, root: Path, **agent) -> Path:
    lines = [f"{name} = {json.dumps(value)}" for name, value in {"port": 0, **agent}.items()]
    users = folder / "users.toml"
    users.write_text(f'alice = "{hash_password("sesame")}"\n')
    path = folder / "agent.toml"
    text = f'users = "users.toml"\n[agent]\n{chr(10).join(lines)}\n'
    path.write_text(text + f'[exports.e]\nroot = "{root}"\nreaders = ["alice"]\n')
    return path


def test_an_agents_process_with_tls(root, truth, table, tmp_path):
    """A real process behind a certificate: exact frames, health and metrics over HTTP, and an end on SIGTERM."""
    pem, key = certificate(tmp_path)
    port = free_port()
    config = config_of(tmp_path, root, tls_certificate="agent.pem", tls_key=str(key), metrics_port=port)
    process, address = start_agent(config)
    try:
        assert address.startswith("grpc+tls://")
        with (
            client_patcher([address], index=table, identity=ALICE, agent_tls_roots=str(pem)) as one,
            one.open_video_reader_pool() as pool,
        ):
            read_exactly(pool, truth)
        with client_patcher([address], identity=ALICE, agent_timeout_ms=1000) as stranger:
            with pytest.raises(fg.SourceError):
                stranger.stat("e", "sub/data.bin")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
            assert {"status": "serving"} == json.load(answer)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            assert 'fluxon_gop_agent_calls_total{kind="do_get"} 1' in answer.read().decode()
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/etc/passwd")
    finally:
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=30)
    assert 0 == process.returncode
    assert "sesame" not in told


def test_a_killed_agent_is_one_that_comes_back(root, truth, table, tmp_path):
    """Frames are exact or the error is typed while the agent is killed; started again, it is read from."""
    port = free_port()
    config = config_of(tmp_path, root, port=port)
    process, address = start_agent(config)
    try:
        with client_patcher(
            [address], {"memory_bytes": 0}, table, ALICE, agent_timeout_ms=1500, metadata_cache_ttl_ms=0
        ) as one:
            pool = one.open_video_reader_pool()
            read_exactly(pool, truth)
            process.kill()
            process.communicate()
            with pytest.raises(fg.SourceError):
                read_exactly(pool, truth)
            process, _ = start_agent(config)
            until = time.monotonic() + 20
            while True:
                try:
                    read_exactly(pool, truth)
                    break
                except fg.SourceError:
                    assert time.monotonic() < until
    finally:
        process.kill()
        process.communicate()


def test_a_stopping_agent_lets_calls_end(root):
    """stop() refuses new calls and waits for those under way."""
    with agent_over(FluxonFsExport("e", str(root)), stop_seconds=20) as server:
        client = AgentClient((server.address,), timeout_seconds=1)
        now = client.stat("e", "sub/data.bin", None)
        answers = AgentClient((server.address,)).read_many(
            [AgentRead("e", "sub/data.bin", now, n, n + 200_000) for n in range(50)], None
        )
        next(answers)
        ended: list[bool] = []
        stopping = threading.Thread(target=lambda: ended.append(server.stop()))
        stopping.start()
        time.sleep(0.1)
        with pytest.raises(fg.DeadlineError, match="stopping"):
            client.stat("e", "sub/data.bin", None)
        assert 49 == len(list(answers))
        stopping.join(20)
    assert [True] == ended


def test_workers_read_through_agents(root, truth, table):
    """A pickled patcher opens connections of its own in a spawned process; a forked child is told at once."""
    program = (
        "import os, pickle, sys\n"
        "import fluxon_gop as fg\n"
        "one = pickle.loads(sys.stdin.buffer.read())\n"
        "size = one.stat('e', 'sub/data.bin').size\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    try:\n"
        "        one.stat('e', 'v00.mp4')\n"
        "    except fg.ForkedProcessError:\n"
        "        os._exit(7)\n"
        "    finally:\n"
        "        os._exit(1)\n"
        "print(size, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    with agent_over(FluxonFsExport("e", str(root))) as server, client_patcher([server.address]) as one:
        done = subprocess.run(
            [sys.executable, "-c", program],
            input=pickle.dumps(one),
            capture_output=True,
            check=False,
            timeout=60,
            cwd=ROOT,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
        )
    assert b"300000 7" == done.stdout.strip(), done.stderr.decode()


def test_flight_is_loaded_only_where_an_agent_is_named():
    """Who names no agent pays nothing for it."""
    program = (
        "import sys\n"
        "from fluxon_gop.fluxonfs import FluxonFsExport, FluxonFsPatcher\n"
        "import fluxon_gop.cli\n"
        "FluxonFsPatcher([FluxonFsExport('e', '.')]).close()\n"
        "assert 'pyarrow.flight' not in sys.modules\n"
        "FluxonFsExport('e', static_nodes=['grpc://a:1'])\n"
        "assert 'pyarrow.flight' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
