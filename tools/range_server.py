"""Serve byte ranges over loopback HTTP, with latency, pacing, counters and faults.

For tests, the demo and benchmarks; standard library only. In the foreground, till Ctrl-C:
``python tools/range_server.py DIR --port 8000 --latency-ms 50 --bandwidth-mbps 100``.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import signal
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import lru_cache, partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import BinaryIO, Self, TypedDict
from urllib.parse import quote, unquote

_HOST = "127.0.0.1"
_CHUNK = 256 * 1024
_IMPORTED = time.time()
_RANGE = re.compile(r"bytes=(?:([0-9]{1,19})-([0-9]{0,19})|-([0-9]{1,19}))", re.IGNORECASE)
_ETAG = re.compile(r'(?:W/)?"[^"]*"')

_Span = tuple[int, int]
_Headers = dict[str, str]
_Opened = tuple[BinaryIO, int, str, float]  # stream, size, tag, mtime
_Reply = tuple[int, _Headers, _Span | None]  # status, headers, what of the file to send
_Connection = socket.socket | tuple[bytes, socket.socket]


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """What a hook knows of a request: header names in lower case, ``index`` counted from 0."""

    method: str
    path: str
    headers: Mapping[str, str]
    index: int
    started: float


@dataclass(frozen=True, slots=True)
class Fault:
    """How one response departs from the right one; the defaults change nothing.

    ``status`` answers with that status and no body. ``headers`` replace those of the same name.
    ``truncate_to`` sends that many body bytes under the full Content-Length, then closes.
    ``delay_s`` is slept on top of the latency. ``body`` is sent as the response's body under the
    headers of the real one; where the lengths differ the connection is closed after it.
    ``ignore_range`` answers 200 with the whole file. ``reset`` is a TCP reset after ``delay_s``.
    """

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    truncate_to: int | None = None
    delay_s: float = 0.0
    body: bytes | None = None
    ignore_range: bool = False
    reset: bool = False


# Called in the connection's thread, before any latency; where it raises, the connection closes.
Hook = Callable[[RequestInfo], Fault | None]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One GET or HEAD, on record before the client can see the end of its response.

    ``path`` is decoded, without leading slash and query. ``start`` and ``stop`` are the half-open
    range that the headers promise, None where there is no body; ``nbytes`` are the body bytes
    handed to the socket. ``status`` is 0 for a reset. ``started`` and ``ended`` are
    ``time.monotonic()`` at the arrival and just before the last piece of the response is sent.
    """

    method: str
    path: str
    start: int | None
    stop: int | None
    status: int
    nbytes: int
    started: float
    ended: float


class Summary(TypedDict):
    """Totals, also by path; ``depth`` is how many requests ran strictly one after another."""

    requests: int
    bytes: int
    depth: int
    by_path: dict[str, dict[str, int]]


def summarize(records: list[RequestRecord]) -> Summary:
    """Return the totals of the records, depth by greedy interval scheduling."""
    by_path: dict[str, dict[str, int]] = {}
    depth, free_from = 0, float("-inf")
    for record in sorted(records, key=lambda r: r.ended):
        entry = by_path.setdefault(record.path, {"requests": 0, "bytes": 0})
        entry["requests"] += 1
        entry["bytes"] += record.nbytes
        if record.started >= free_from:
            depth, free_from = depth + 1, record.ended
    total = sum(record.nbytes for record in records)
    return {"requests": len(records), "bytes": total, "depth": depth, "by_path": by_path}


class RangeServer:
    """Serve a directory or a mapping on a loopback port from construction until ``close()``.

    Both are looked up anew for every request, so a test can replace what is served, and change
    the settings. ETags come from size and mtime (files) or a content hash (mapping, whose
    Last-Modified stays the same). Every request sleeps ``latency_s`` before the first byte of its
    response, concurrent ones concurrently. ``bandwidth_bps`` (bytes per second, 0 or None:
    unpaced) paces each connection by itself. Of conditions, If-Match and If-None-Match are heeded.
    """

    def __init__(
        self,
        root: Path | Mapping[str, bytes],
        *,
        latency_s: float = 0.0,
        bandwidth_bps: float | None = None,
        weak_etag: bool = False,
        send_etag: bool = True,
        send_last_modified: bool = True,
        hook: Hook | None = None,
        port: int = 0,
    ) -> None:
        """Listen from here on; port 0 takes a free one."""
        self.root = root if isinstance(root, Mapping) else root.resolve(strict=True)
        self.latency_s, self.bandwidth_bps, self.hook = latency_s, bandwidth_bps, hook
        self.weak_etag, self.send_etag = weak_etag, send_etag
        self.send_last_modified = send_last_modified
        self._server = _Server(self, port)
        serve = partial(self._server.serve_forever, poll_interval=0.02)
        self._thread = threading.Thread(target=serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        """Return the server, which listens already."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Close the server."""
        self.close()

    @property
    def base_url(self) -> str:
        """The URL of the root, without a trailing slash."""
        return f"http://{_HOST}:{self._server.server_address[1]}"

    def url(self, path: str) -> str:
        """Return the URL of a file, percent-encoded."""
        return f"{self.base_url}/{quote(path.lstrip('/'))}"

    @property
    def requests(self) -> list[RequestRecord]:
        """A copy of the records so far, in the order in which the responses ended."""
        with self._server.lock:
            return self._server.records.copy()

    def reset(self) -> None:
        """Forget all records and count from 0; a request in flight is recorded when it ends."""
        with self._server.lock:
            self._server.records.clear()
            self._server.arrived = 0

    def summary(self) -> Summary:
        """Return the totals so far; without latency, ``depth`` may count concurrent requests."""
        return summarize(self.requests)

    def close(self) -> None:
        """Leave no thread and no open socket, whatever the clients do, once hooks have returned."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()


@lru_cache(maxsize=16)
def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _open(root: Path | Mapping[str, bytes], path: str) -> _Opened | None:
    """Return what lies at the path, or None where that is no file under the root."""
    if isinstance(root, Mapping):
        data = root.get(path, root.get(f"/{path}"))
        return None if data is None else (io.BytesIO(data), len(data), _digest(data), _IMPORTED)
    try:
        target = (root / path).resolve(strict=True)
        if not target.is_relative_to(root) or not target.is_file():
            return None
        stream = target.open("rb")
    except (OSError, ValueError, RuntimeError):  # absent, a NUL in the name, a symlink loop
        return None
    stat = os.fstat(stream.fileno())
    return stream, stat.st_size, f"{stat.st_size:x}-{stat.st_mtime_ns:x}", stat.st_mtime


def _parse_range(value: str, size: int) -> _Span | None:
    """Return the half-open range, empty or reversed if unsatisfiable, None if malformed."""
    match = _RANGE.fullmatch(value.strip())
    if match is None or (match[2] and int(match[2]) < int(match[1])):
        return None
    if match[3]:
        return max(0, size - int(match[3])), size
    return int(match[1]), min(size, int(match[2]) + 1) if match[2] else size


def _decide(owner: RangeServer, info: RequestInfo, fault: Fault, opened: _Opened | None) -> _Reply:
    """Return the response that HTTP asks for, but for the fault's status and ignore_range."""
    if fault.status is not None or opened is None:
        return fault.status or HTTPStatus.NOT_FOUND, {}, None
    _, size, tag, mtime = opened
    strong, etag, headers = f'"{tag}"', "", {"Accept-Ranges": "bytes"}
    if owner.send_etag:
        etag = headers["ETag"] = f"W/{strong}" if owner.weak_etag else strong
    if owner.send_last_modified:
        headers["Last-Modified"] = formatdate(mtime, usegmt=True)
    wanted, held = info.headers.get("if-match", "*"), info.headers.get("if-none-match", "")
    # If-Match compares strongly (a weak tag never matches), If-None-Match weakly.
    if wanted.strip() != "*" and (etag != strong or etag not in _ETAG.findall(wanted)):
        return HTTPStatus.PRECONDITION_FAILED, headers, None
    if held.strip() == "*" or (etag and {strong, f"W/{strong}"} & {*_ETAG.findall(held)}):
        return HTTPStatus.NOT_MODIFIED, headers, None
    span = None
    if info.method == "GET" and not fault.ignore_range:
        span = _parse_range(info.headers.get("range", ""), size)
    if span is None:
        return HTTPStatus.OK, headers, (0, size)
    if span[0] >= span[1]:
        headers["Content-Range"] = f"bytes */{size}"
        return HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, headers, None
    headers["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{size}"
    return HTTPStatus.PARTIAL_CONTENT, headers, span


class _Server(socketserver.TCPServer):
    """Run one daemon thread per connection and end them all in ``server_close()``."""

    # Not http.server.HTTPServer: its bind looks up the host's name, which can take seconds.
    allow_reuse_address = True
    request_queue_size = 256

    def __init__(self, owner: RangeServer, port: int) -> None:
        self.owner, self.lock, self.arrived = owner, threading.Lock(), 0
        self.records: list[RequestRecord] = []
        self._closing = threading.Event()
        self._live: dict[threading.Thread, _Connection] = {}
        super().__init__((_HOST, port), _Handler)

    def pause(self, seconds: float) -> None:
        if seconds > 0 and self._closing.wait(seconds):
            raise ConnectionAbortedError

    def process_request(self, request: _Connection, client_address: object) -> None:
        thread = threading.Thread(target=self._serve, args=(request, client_address), daemon=True)
        thread.start()
        # A thread leaves the table only when dead, or close() could miss one that is ending.
        self._live = {t: r for t, r in self._live.items() if t.is_alive()} | {thread: request}

    def _serve(self, request: _Connection, client_address: object) -> None:
        try:
            with suppress(OSError):  # the client left, or the server closes
                self.finish_request(request, client_address)
        finally:
            self.close_request(request)  # no shutdown() before: a FIN must not precede a reset

    def server_close(self) -> None:
        super().server_close()
        self._closing.set()
        for thread, request in self._live.items():
            if isinstance(request, socket.socket):
                with suppress(OSError):  # closed already
                    request.shutdown(socket.SHUT_RDWR)
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    """Answer the requests of one connection, one after another."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, *_args: object, **_kwargs: object) -> None:
        """Print nothing: the records tell more."""

    def do_GET(self) -> None:
        """Answer a GET or HEAD."""
        started = time.monotonic()
        server, owner = self.server, self.server.owner
        path = unquote(self.path.partition("?")[0], errors="surrogateescape").lstrip("/")
        with server.lock:
            index, server.arrived = server.arrived, server.arrived + 1
        headers = {name.lower(): value for name, value in self.headers.items()}
        info = RequestInfo(self.command, path, headers, index, started)
        fault = (owner.hook(info) if owner.hook else None) or Fault()
        if fault.reset:
            server.pause(fault.delay_s)
            self._record(info, 0, None, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return
        server.pause(owner.latency_s + fault.delay_s)
        opened = _open(owner.root, path)
        with opened[0] if opened else io.BytesIO() as stream:
            status, headers, span = _decide(owner, info, fault, opened)
            start, stop = span or (0, 0)
            self._stage(status, headers, stop - start, fault.headers)
            if span is None or self.command == "HEAD":
                self._send(stream, 0, partial(self._record, info, status, None))
                return
            stream.seek(start)
            body = stream if fault.body is None else io.BytesIO(fault.body)
            total = stop - start if fault.body is None else len(fault.body)
            if fault.truncate_to is not None:
                total = min(total, fault.truncate_to)
            self.close_connection |= total != stop - start
            self._send(body, total, partial(self._record, info, status, span))

    do_HEAD = do_GET  # noqa: N815 - the name that the base class looks up

    def _record(self, info: RequestInfo, status: int, span: _Span | None, nbytes: int) -> None:
        start, stop = span or (None, None)
        times = info.started, time.monotonic()
        record = RequestRecord(info.method, info.path, start, stop, status, nbytes, *times)
        with self.server.lock:
            self.server.records.append(record)

    def _stage(self, status: int, headers: _Headers, length: int, replace: _Headers) -> None:
        if status not in {HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED}:
            headers["Content-Length"] = str(length)
        merged = {name.lower(): (name, value) for name, value in (headers | replace).items()}
        self.send_response(status)
        for name, value in merged.values():
            self.send_header(name, value)
        if self.close_connection:
            # Said to a client that asked for it: FFmpeg would go on with the dead connection.
            self.send_header("Connection", "close")

    def _send(self, body: BinaryIO, total: int, record: Callable[[int], None]) -> None:
        """Send the staged headers and the body; record before the last piece, which ends them."""
        rate = self.server.owner.bandwidth_bps or float("inf")
        step = int(min(_CHUNK, max(1, rate / 100)))
        begun, sent, piece = time.monotonic(), 0, b""
        try:
            if total:
                self.end_headers()
            while sent < total:
                self.wfile.write(piece)
                piece = body.read(min(step, total - sent))
                if not piece:
                    raise ConnectionAbortedError  # the file was cut meanwhile
                self.server.pause(begun + (sent + len(piece)) / rate - time.monotonic())
                sent += len(piece)
        finally:
            record(sent)
        if total:
            self.wfile.write(piece)
        else:
            self.end_headers()


def main(argv: list[str] | None = None) -> None:
    """Serve a directory until Ctrl-C, printing the base URL first and the summary last."""
    parser = argparse.ArgumentParser(description="Serve byte ranges of a directory on loopback.")
    parser.add_argument("root", type=Path, metavar="DIR")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="before every response")
    parser.add_argument("--bandwidth-mbps", type=float, default=0.0, help="of every body")
    args = parser.parse_args(argv)
    latency_s, rate = args.latency_ms / 1e3, args.bandwidth_mbps * 1e6 / 8
    # A shell may start background jobs with SIGINT ignored; the summary should come out there too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with RangeServer(args.root, latency_s=latency_s, bandwidth_bps=rate, port=args.port) as server:
        print(server.base_url, flush=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
        print(json.dumps(server.summary(), indent=2))


if __name__ == "__main__":
    main()
