"""The local range server keeps what it promises to two real HTTP clients."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import obstore
import pytest
from obstore.exceptions import PreconditionError
from obstore.store import HTTPStore

from tools.range_server import Fault, RangeServer, RequestInfo, RequestRecord, summarize

if TYPE_CHECKING:
    from collections.abc import Iterator

DATA = bytes(range(256)) * 4
SIZE = len(DATA)
TIMEOUT_S = 10.0


class Answer(NamedTuple):
    """What a client got."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes


def connect(server: RangeServer) -> http.client.HTTPConnection:
    """Return a connection that is opened by its first request."""
    return http.client.HTTPConnection(urlsplit(server.base_url).netloc, timeout=TIMEOUT_S)


def ask(
    server: RangeServer, target: str, method: str = "GET", headers: dict[str, str] | None = None
) -> Answer:
    """Send one request on a connection of its own, the target as it stands."""
    with closing(connect(server)) as connection:
        connection.request(method, f"/{target}", headers=headers or {})
        response = connection.getresponse()
        return Answer(response.status, response.headers, response.read())


def ask_range(server: RangeServer, value: str, target: str = "a.bin") -> Answer:
    """Send one GET with a Range header."""
    return ask(server, target, headers={"Range": value})


@pytest.fixture
def server() -> Iterator[RangeServer]:
    """Serve one file of known content and an empty one."""
    with RangeServer({"a.bin": DATA, "empty": b""}) as running:
        yield running


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a directory of files with a secret next to it, and a symlink to the secret."""
    (tmp_path / "secret").write_bytes(b"secret")
    folder = tmp_path / "root"
    (folder / "sub dir").mkdir(parents=True)
    (folder / "a.bin").write_bytes(DATA)
    (folder / "sub dir" / "ä.bin").write_bytes(b"umlaut")
    (folder / "out").symlink_to(tmp_path / "secret")
    (folder / "in").symlink_to(folder / "a.bin")
    return folder


@pytest.mark.parametrize(
    ("value", "start", "stop"),
    [
        ("0-8", 0, 9),
        ("9-", 9, SIZE),
        ("9-9999", 9, SIZE),
        ("-9", SIZE - 9, SIZE),
        ("-9999", 0, SIZE),
    ],
)
def test_single_range(server: RangeServer, value: str, start: int, stop: int) -> None:
    """A range that touches the file is answered by 206, its bytes and their Content-Range."""
    answer = ask_range(server, f"bytes={value}")
    assert (answer.status, answer.body) == (206, DATA[start:stop])
    assert answer.headers["Content-Range"] == f"bytes {start}-{stop - 1}/{SIZE}"
    assert answer.headers["Content-Length"] == str(stop - start)
    (record,) = server.requests
    assert (record.start, record.stop, record.nbytes) == (start, stop, stop - start)


@pytest.mark.parametrize("value", [f"bytes={SIZE}-", f"bytes={SIZE}-{SIZE + 5}", "bytes=-0"])
def test_unsatisfiable_range(server: RangeServer, value: str) -> None:
    """A range that misses the file is answered by 416, the size and no body."""
    answer = ask_range(server, value)
    assert (answer.status, answer.body) == (416, b"")
    assert answer.headers["Content-Range"] == f"bytes */{SIZE}"


@pytest.mark.parametrize(
    "value", ["bytes=5-2", "bytes=-", "bytes=a-b", "bytes=0-1,4-5", "items=0-1", "bytes 0-1", ""]
)
def test_malformed_range(server: RangeServer, value: str) -> None:
    """A Range header that is no single byte range is ignored."""
    answer = ask_range(server, value)
    assert (answer.status, answer.body) == (200, DATA)
    assert "Content-Range" not in answer.headers


def test_empty_file(server: RangeServer) -> None:
    """An empty file is served whole, and no range of it exists."""
    assert ask(server, "empty")[::2] == (200, b"")
    assert ask_range(server, "bytes=0-0", "empty").status == 416


def test_head(server: RangeServer) -> None:
    """HEAD has the headers of a GET of the whole file, no body, and no range on record."""
    answer = ask(server, "a.bin", "HEAD", {"Range": "bytes=0-1"})
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["Content-Length"] == str(SIZE)
    assert answer.headers["Accept-Ranges"] == "bytes"
    (record,) = server.requests
    assert (record.method, record.start, record.stop, record.nbytes) == ("HEAD", None, None, 0)


def test_if_match(server: RangeServer) -> None:
    """If-Match lets a request through for the current ETag and for ``*``, else it is a 412."""
    etag = ask(server, "a.bin", "HEAD").headers["ETag"]
    assert etag.startswith('"')
    for value in (etag, "*", f'"other", {etag}'):
        assert ask(server, "a.bin", headers={"If-Match": value}).status == 200
    for value in ('"other"', etag.strip('"'), f"W/{etag}"):
        assert ask(server, "a.bin", headers={"If-Match": value}).status == 412


def test_if_none_match(server: RangeServer) -> None:
    """If-None-Match turns a request for what the client holds into a 304 without body."""
    etag = ask(server, "a.bin", "HEAD").headers["ETag"]
    for value in (etag, "*", f"W/{etag}"):
        answer = ask(server, "a.bin", headers={"If-None-Match": value})
        assert (answer.status, answer.body, answer.headers["ETag"]) == (304, b"", etag)
    assert ask(server, "a.bin", headers={"If-None-Match": '"other"'}).status == 200


def test_weak_etag(server: RangeServer) -> None:
    """A weak ETag never satisfies If-Match but does satisfy If-None-Match."""
    server.weak_etag = True
    etag = ask(server, "a.bin").headers["ETag"]
    assert etag.startswith('W/"')
    assert ask(server, "a.bin", headers={"If-Match": etag}).status == 412
    assert ask(server, "a.bin", headers={"If-None-Match": etag}).status == 304


def test_no_validators() -> None:
    """A server told to send no ETag and no Last-Modified sends neither."""
    with RangeServer({"a.bin": DATA}, send_etag=False, send_last_modified=False) as server:
        assert not {"ETag", "Last-Modified"} & {*ask(server, "a.bin").headers.keys()}
        assert ask(server, "a.bin", headers={"If-Match": '"x"'}).status == 412
        assert ask(server, "a.bin", headers={"If-None-Match": '"x"'}).status == 200


def test_replaced_content(root: Path) -> None:
    """Replacing an entry or rewriting a file changes its ETag at the next request."""
    entries = {"a.bin": DATA}
    with RangeServer(entries) as server:
        before = ask(server, "a.bin").headers["ETag"]
        entries["a.bin"] = DATA[::-1]
        assert ask(server, "a.bin").headers["ETag"] != before
    with RangeServer(root) as server:
        before = ask(server, "a.bin").headers["ETag"]
        assert ask(server, "in").headers["ETag"] == before
        os.utime(root / "a.bin", ns=(1, 1))
        after = ask(server, "a.bin")
        assert after.headers["ETag"] != before
        assert after.headers["Last-Modified"] == "Thu, 01 Jan 1970 00:00:00 GMT"


def test_directory(root: Path) -> None:
    """Files of a directory are found by their percent-encoded names, the query ignored."""
    with RangeServer(root) as server:
        path = urlsplit(server.url("sub dir/ä.bin")).path
        assert path.isascii()
        assert ask(server, f"{path[1:]}?v=1&x=/..").body == b"umlaut"
        assert ask(server, "sub%20dir/../a.bin").body == DATA
        assert server.requests[0].path == "sub dir/ä.bin"


def test_large_file(root: Path) -> None:
    """A body of many chunks arrives whole, and so does a range of it."""
    data = os.urandom(1_000_003)
    (root / "big").write_bytes(data)
    with RangeServer(root) as server:
        assert ask(server, "big").body == data
        assert ask_range(server, "bytes=300001-900000", "big").body == data[300_001:900_001]


@pytest.mark.parametrize(
    "target",
    ["none", "", "sub%20dir", "a.bin/x", "..%2fsecret", "%2e%2e/secret", "../secret", "out", "%00"],
)
def test_not_found(root: Path, target: str) -> None:
    """What is absent, no file or outside the root is a 404."""
    with RangeServer(root) as server:
        assert ask(server, target)[::2] == (404, b"")
        assert ask(server, str(root.parent / "secret")).status == 404


def test_keep_alive(server: RangeServer) -> None:
    """One connection carries many requests, each on record once its response is read."""
    lines = ("GET /a.bin", "GET /none", "HEAD /a.bin", "GET /empty")
    sockets = set()
    with closing(connect(server)) as connection:
        for count in range(300):
            method, target = lines[count % 4].split()
            connection.request(method, target)
            response = connection.getresponse()
            assert (response.status, response.version) == (404 if target == "/none" else 200, 11)
            assert response.read() == (DATA if count % 4 == 0 else b"")
            assert len(server.requests) == count + 1
            sockets.add(connection.sock)
    assert len(sockets) == 1


def test_summary_and_reset(server: RangeServer) -> None:
    """The summary counts requests and bytes by path and in total, until they are reset."""
    ask_range(server, "bytes=0-9")
    ask(server, "a.bin", "HEAD")
    ask(server, "none")
    assert server.summary() == {
        "requests": 3,
        "bytes": 10,
        "depth": 3,
        "by_path": {"a.bin": {"requests": 2, "bytes": 10}, "none": {"requests": 1, "bytes": 0}},
    }
    server.reset()
    assert server.summary() == {"requests": 0, "bytes": 0, "depth": 0, "by_path": {}}


@pytest.mark.parametrize(
    ("times", "depth"),
    [([], 0), ([0, 9, 1, 2, 3, 4, 5, 8], 3), ([0, 3, 2, 5, 4, 7], 2), ([0, 9, 1, 8, 2, 7], 1)],
)
def test_depth(times: list[float], depth: int) -> None:
    """Depth is the largest number of requests of which none overlaps another."""
    spans = zip(times[::2], times[1::2], strict=True)
    records = [RequestRecord("GET", "a", 0, 1, 206, 1, *span) for span in spans]
    assert summarize(records)["depth"] == depth


def test_concurrent_requests(server: RangeServer) -> None:
    """Requests that are in flight together are all on record, at depth one."""
    barrier = threading.Barrier(16, timeout=TIMEOUT_S)

    def meet(_: RequestInfo) -> None:
        barrier.wait()

    server.hook = meet
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: ask_range(server, "bytes=0-9"), range(16)))
    assert [answer.body for answer in answers] == [DATA[:10]] * 16
    summary = server.summary()
    assert (summary["requests"], summary["bytes"], summary["depth"]) == (16, 160, 1)


def test_latency() -> None:
    """Latency is waited before the response, and a fault's delay on top of it."""
    with RangeServer({"a.bin": DATA}, latency_s=0.05) as server:
        begun = time.monotonic()
        ask(server, "a.bin")
        assert time.monotonic() - begun >= 0.05
        server.hook = lambda _: Fault(delay_s=0.05)
        begun = time.monotonic()
        ask(server, "none")
        assert time.monotonic() - begun >= 0.1


def test_bandwidth(server: RangeServer) -> None:
    """A paced body is whole, and its last byte comes no sooner than the bandwidth allows."""
    server.bandwidth_bps = SIZE * 10
    begun = time.monotonic()
    assert ask(server, "a.bin").body == DATA
    assert time.monotonic() - begun >= 0.1


def test_fault_status_and_headers(server: RangeServer) -> None:
    """A fault can answer with another status, and replace headers whatever their case."""
    faults = [Fault(503, {"retry-after": "1"}), Fault(headers={"etag": '"new"'}), None]
    server.hook = lambda info: faults[info.index]
    answer = ask(server, "a.bin")
    assert (answer.status, answer.body, answer.headers["Retry-After"]) == (503, b"", "1")
    assert ask(server, "a.bin").headers.get_all("ETag") == ['"new"']
    assert ask(server, "a.bin").headers["ETag"] != '"new"'


@pytest.mark.parametrize("fault", [Fault(truncate_to=7), Fault(body=DATA[:7])])
def test_fault_short_body(fault: Fault) -> None:
    """A body cut short comes under the full Content-Length, then the connection is closed."""
    with RangeServer({"a.bin": DATA}, hook=lambda _: fault) as server:
        with pytest.raises(http.client.IncompleteRead) as caught:
            ask_range(server, "bytes=0-99")
        assert (caught.value.partial, caught.value.expected) == (DATA[:7], 93)
        (record,) = server.requests
        assert (record.status, record.start, record.stop, record.nbytes) == (206, 0, 100, 7)


def test_fault_body_and_ignored_range() -> None:
    """A fault can send other bytes under the right headers, or ignore the range."""
    faults = [Fault(body=b"0123456789"), Fault(ignore_range=True)]
    with RangeServer({"a.bin": DATA}, hook=lambda info: faults[info.index]) as server:
        answer = ask_range(server, "bytes=10-19")
        assert (answer.status, answer.body) == (206, b"0123456789")
        assert answer.headers["Content-Range"] == f"bytes 10-19/{SIZE}"
        assert ask_range(server, "bytes=10-19")[::2] == (200, DATA)


def test_fault_reset(server: RangeServer) -> None:
    """A fault can reset the connection of one request, which is on record with status 0."""
    server.hook = lambda info: Fault(reset=info.headers["range"] == "bytes=10-19")
    with pytest.raises(ConnectionResetError):
        ask_range(server, "bytes=10-19")
    assert ask_range(server, "bytes=10-20").body == DATA[10:21]
    assert [record.status for record in server.requests] == [0, 206]


def test_close_leaves_nothing() -> None:
    """Closing ends idle, sleeping and blocked connections, their threads and the listener."""
    before = set(threading.enumerate())
    server = RangeServer({"a.bin": DATA, "big": bytes(32_000_000)})
    arrived = threading.Semaphore(0)

    def hook(info: RequestInfo) -> Fault:
        arrived.release()
        return Fault(delay_s=3600.0 if info.headers.get("x-sleep") else 0.0)

    server.hook = hook
    idle, sleeping, blocked = connect(server), connect(server), connect(server)
    with closing(idle), closing(sleeping), closing(blocked):
        idle.request("GET", "/a.bin")
        idle.getresponse().read()
        sleeping.request("GET", "/a.bin", headers={"X-Sleep": "1"})
        blocked.request("GET", "/big")
        for _ in range(3):
            assert arrived.acquire(timeout=TIMEOUT_S)
        server.close()
        assert set(threading.enumerate()) == before
        assert idle.sock
        assert idle.sock.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            ask(server, "a.bin")
    server.close()


def test_obstore(root: Path) -> None:
    """Obstore reads ranges of the pinned version and refuses another one."""
    with RangeServer(root) as server:
        store = HTTPStore.from_url(server.base_url, client_options={"allow_http": True})
        meta = obstore.head(store, "a.bin")
        assert (meta["size"], meta["e_tag"]) == (SIZE, ask(server, "a.bin").headers["ETag"])
        options: obstore.GetOptions = {"range": (10, 20), "if_match": meta["e_tag"]}
        assert bytes(obstore.get(store, "a.bin", options=options).bytes()) == DATA[10:20]
        parts = obstore.get_ranges(store, "a.bin", starts=[0, 1000], ends=[4, 1004])
        assert [bytes(part) for part in parts] == [DATA[:4], DATA[1000:1004]]
        (root / "a.bin").write_bytes(DATA + b"more")
        with pytest.raises(PreconditionError):
            obstore.get(store, "a.bin", options=options)
        with pytest.raises(FileNotFoundError):
            obstore.get(store, "none")
        statuses = [record.status for record in server.requests]
        assert (statuses[:3], statuses[-2:]) == ([200, 200, 206], [412, 404])


def test_command_line(root: Path) -> None:
    """The command prints its base URL at once and the summary after an interrupt."""
    script = Path(__file__).parents[1] / "tools" / "range_server.py"
    command = [sys.executable, str(script), str(root), "--latency-ms=1", "--bandwidth-mbps=100"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = urlsplit(process.stdout.readline().strip())
            with closing(http.client.HTTPConnection(url.netloc, timeout=TIMEOUT_S)) as connection:
                connection.request("GET", "/a.bin", headers={"Range": "bytes=0-9"})
                assert connection.getresponse().read() == DATA[:10]
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
    assert process.returncode == 0
    assert json.loads(output)["by_path"] == {"a.bin": {"requests": 1, "bytes": 10}}
