"""A small HTTP server on loopback that answers byte ranges after a fixed latency and counts them.

For the demo: standard library only, no faults, no pacing. One thread a connection, all ended by ``close``.
"""

from __future__ import annotations

import os
import re
import socket
import socketserver
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Self
from urllib.parse import quote, unquote

_PIECE = 16 * 1024
_SEND_BUFFER = 64 * 1024
"""Small, so that a client that hangs up in mid-file was not sent the rest of it."""
_Connection = socket.socket | tuple[bytes, socket.socket]
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


@dataclass(frozen=True)
class Traffic:
    """What a server was asked for."""

    requests: int
    bytes: int
    """Of bodies, as handed to the network."""
    depth: int
    """The largest number of requests of which each came after the answer to the one before."""


@dataclass
class _Record:
    started: float
    answered: float
    nbytes: int = 0


class DemoServer:
    """Serves these files from construction until ``close``; every answer starts after ``latency_s``."""

    def __init__(self, files: Mapping[str, Path], *, latency_s: float = 0.0) -> None:
        """Listen on a free port of the loopback interface.

        Args:
            files: what to serve, by name.
            latency_s: slept before the first byte of each answer, side by side for requests side by side.
        """
        self.files = dict(files)
        self.latency_s = latency_s
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def url(self, name: str) -> str:
        """Return the address of one file."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/{quote(name)}"

    def traffic(self) -> Traffic:
        """Return the counts since the start or the last ``reset``."""
        with self._server.lock:
            records = sorted(self._server.records, key=lambda r: r.answered)
        depth, free = 0, float("-inf")
        for record in records:
            if record.started >= free:
                depth, free = depth + 1, record.answered
        return Traffic(len(records), sum(r.nbytes for r in records), depth)

    def reset(self) -> None:
        """Count from zero."""
        with self._server.lock:
            self._server.records.clear()

    def close(self) -> None:
        """Stop serving, hang up, and wait for the threads."""
        self._server.shutdown()
        self._thread.join()
        self._server.hang_up()
        self._server.server_close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    # Not http.server's: its bind looks up the host's name, which can take seconds.
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, owner: DemoServer) -> None:
        self.owner = owner
        self.lock = threading.Lock()
        self.records: list[_Record] = []
        self.connections: set[_Connection] = set()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)

    def process_request(self, request: _Connection, client_address: object) -> None:
        with self.lock:
            self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: _Connection) -> None:
        with self.lock:
            self.connections.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        with self.lock:
            for connection in self.connections:
                assert isinstance(connection, socket.socket)
                with suppress(OSError):  # the client was first
                    connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, *_args: object, **_kwargs: object) -> None:
        """Print nothing."""

    def handle(self) -> None:
        """Answer the requests of one connection until one side hangs up."""
        with suppress(OSError):
            super().handle()

    def do_GET(self) -> None:
        """Answer one GET or HEAD."""
        started = time.monotonic()
        time.sleep(self.server.owner.latency_s)
        record = _Record(started, time.monotonic())
        with self.server.lock:
            self.server.records.append(record)
        path = self.server.owner.files.get(unquote(self.path).lstrip("/"))
        try:
            file = None if path is None else path.open("rb")
        except OSError:
            file = None
        if file is None:
            self._head(HTTPStatus.NOT_FOUND, 0)
            return
        with file:
            status = os.fstat(file.fileno())
            etag = f'"{status.st_size:x}-{status.st_mtime_ns:x}"'
            if self.headers.get("If-Match", etag) not in {etag, "*"}:
                self._head(HTTPStatus.PRECONDITION_FAILED, 0, etag)
                return
            asked = _RANGE.fullmatch(self.headers.get("Range", ""))
            start = int(asked[1]) if asked else 0
            stop = min(int(asked[2]) + 1, status.st_size) if asked and asked[2] else status.st_size
            if asked and start >= stop:
                whole = f"bytes */{status.st_size}"
                self._head(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, 0, etag, whole)
                return
            if asked:
                part = f"bytes {start}-{stop - 1}/{status.st_size}"
                self._head(HTTPStatus.PARTIAL_CONTENT, stop - start, etag, part)
            else:
                self._head(HTTPStatus.OK, stop - start, etag)
            file.seek(start)
            left = stop - start if self.command == "GET" else 0
            while left and (piece := file.read(min(_PIECE, left))):
                # Counted before it is sent: who has the whole answer finds all of it counted.
                record.nbytes += len(piece)
                left -= len(piece)
                self.wfile.write(piece)

    do_HEAD = do_GET  # noqa: N815 - the name that the base class looks up

    def _head(self, status: HTTPStatus, length: int, etag: str = "", part: str = "") -> None:
        headers = {
            "Accept-Ranges": "bytes",
            "Content-Length": str(length),
            "ETag": etag,
            "Content-Range": part,
        }
        if self.close_connection:
            # Not told, FFmpeg sends its next request on the connection that ends here, and gives up.
            headers["Connection"] = "close"
        self.send_response(status)
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
