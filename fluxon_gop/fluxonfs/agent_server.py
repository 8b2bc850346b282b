"""The agent: gives byte ranges of its exports' files to clients, over Arrow Flight. It decodes nothing.

Every call is checked against the export's rights, with the identity that its headers tell. A wave of reads over many
files is one call; what is wrong with one range is that range's error.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from typing import Any

import pyarrow as pa
from pyarrow import flight

from fluxon_gop import threads
from fluxon_gop.errors import (
    FluxonGopError,
    InvalidRequestError,
    SourceError,
    SourceNotFoundError,
    SourcePermissionError,
)
from fluxon_gop.fluxonfs import agent_wire as wire
from fluxon_gop.fluxonfs.agent_calls import MIDDLEWARE, Call, Callers, Counts, NoHandshake
from fluxon_gop.fluxonfs.agent_config import AgentConfig
from fluxon_gop.fluxonfs.export import FluxonFsExport
from fluxon_gop.fluxonfs.export_listing import files_for
from fluxon_gop.fluxonfs.file_system import FileSystem, in_export
from fluxon_gop.fluxonfs.users import Identity, Users
from fluxon_gop.sources.range_source import Buffer, RangeSource

READS_AHEAD, BYTES_AHEAD = 16, 64 * 1024 * 1024
"""Of one call: reads under way while the one before is on its way to the client."""
PAGE = 1000
_log = logging.getLogger("fluxon_gop.agent")


class AgentServer(flight.FlightServerBase):  # type: ignore[misc]
    """Serves from the moment it is made; ``serve()`` waits until it is stopped."""

    def __init__(self, file_system: FileSystem, users: Users | None, config: AgentConfig) -> None:
        """Listen.

        Raises:
            InvalidRequestError: certificate or key cannot be read, or the port is taken.
        """
        self._files, self._config = file_system, config
        self.counts = Counts()
        self._callers = Callers(users, config.limits, config.token_seconds, self.counts)
        scheme = "grpc" if config.tls_certificate is None else "grpc+tls"
        try:
            super().__init__(
                f"{scheme}://{config.host}:{config.port}",
                auth_handler=NoHandshake(),
                tls_certificates=None if config.tls_certificate is None else [config.certificate()],
                middleware={MIDDLEWARE: self._callers},
            )
        except (OSError, pa.ArrowException) as error:
            text = f"the agent cannot listen at {config.host}:{config.port}: {type(error).__name__}"
            raise InvalidRequestError(text) from error

    @property
    def address(self) -> str:
        """What a client names it by."""
        scheme = "grpc" if self._config.tls_certificate is None else "grpc+tls"
        return f"{scheme}://{self._config.host}:{self.port}"

    def stop(self) -> bool:
        """Refuse new calls, let those under way end for ``stop_seconds``, then end; return whether all ended."""
        self._callers.stopping = True
        until = time.monotonic() + self._config.stop_seconds
        while self._callers.running and time.monotonic() < until:
            time.sleep(0.02)
        ended = not self._callers.running
        self.shutdown()
        return ended

    @contextmanager
    def over_http(self) -> Iterator[int | None]:
        """Serve ``/metrics`` and ``/health`` meanwhile, where the configuration names a port; yield it."""
        if self._config.metrics_port is None:
            yield None
            return
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                known = self.path in {"/metrics", "/health"}
                text = server.counts.text() if self.path == "/metrics" else server.health()
                self.send_response(200 if known else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.end_headers()
                self.wfile.write(text.encode() if known else b"want /metrics or /health\n")

            def log_message(self, *_: object) -> None:
                """Log nothing: who asks is known."""

            timeout = 5

        try:
            http = ThreadingHTTPServer((self._config.host, self._config.metrics_port), Handler)
        except OSError as error:
            text = f"metrics cannot be served at port {self._config.metrics_port}: {error.strerror}"
            raise InvalidRequestError(text) from None
        thread = threading.Thread(target=http.serve_forever, name="fluxon_gop-metrics", daemon=True)
        thread.start()
        try:
            yield http.server_port
        finally:
            http.shutdown()
            http.server_close()

    def health(self) -> str:
        """Return whether the agent serves, as JSON."""
        status = "stopping" if self._callers.stopping else "serving"
        return wire.body_of(status=status).decode()

    # ------------------------------------------------------------- Flight's calls

    def do_get(self, context: Any, ticket: Any) -> Any:
        """Give the bytes of a ticket's reads, a row each, in whatever order."""
        call = context.get_middleware(MIDDLEWARE)
        with self._told("read", call):
            reads = wire.reads_in(ticket.ticket, self._config.limits)
            call.hold(sum(read.stop - read.start for read in reads.values()))
        return flight.GeneratorStream(wire.SCHEMA, self._rows(call, reads))

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        """Answer ``stat``, ``list``, ``health`` and ``metrics``."""
        call = context.get_middleware(MIDDLEWARE)
        body = b"" if action.body is None else action.body.to_pybytes()
        with self._told(action.type, call):
            if action.type == "stat":
                export_name, relpath = wire.names_in(body)
                return iter([json.dumps(self._stat(call.identity, export_name, relpath)).encode()])
            if action.type == "list":
                export_name, prefix = wire.listing_in(body)
                pages = self._list(call.identity, export_name, prefix)
                # The first one now, so that what is wrong is told as all else.
                return chain([next(pages)], pages)
            if action.type == "health":
                return iter([self.health().encode()])
            if action.type == "metrics":
                return iter([self.counts.text().encode()])
            text = "no such action: want stat, list, health or metrics"
            raise InvalidRequestError(text)

    def list_actions(self, context: Any) -> list[Any]:
        """Tell of the actions."""
        del context
        return [
            flight.ActionType("stat", "size and version of a file"),
            flight.ActionType("list", "the files below a prefix"),
            flight.ActionType("health", "whether the agent serves"),
            flight.ActionType("metrics", "counters, as Prometheus reads them"),
        ]

    # ------------------------------------------------------------- reads

    def _rows(self, call: Call, reads: dict[int, wire.AgentRead]) -> Iterator[Any]:
        """Yield a batch for each read; some are read ahead of the one that the client takes."""
        until = call.began + self._config.limits.call_seconds
        opened: dict[tuple[Any, ...], RangeSource | BaseException] = {}
        ahead: deque[tuple[int, Future[Buffer]]] = deque()
        held, waiting = 0, iter(reads.items())
        pool = threads.pool("fluxon_gop-agent")
        following = next(waiting, None)
        try:
            while ahead or following is not None:
                while following is not None and (
                    not ahead or (len(ahead) < READS_AHEAD and held < BYTES_AHEAD)
                ):
                    place, read = following
                    held += read.stop - read.start
                    ahead.append((place, pool.submit(self._read, call.identity, read, opened)))
                    following = next(waiting, None)
                place, future = ahead.popleft()
                held -= reads[place].stop - reads[place].start
                if time.monotonic() > until:
                    self.counts.add("refused_total", label="timed_out")
                    text = f"the call lasted longer than {self._config.limits.call_seconds:g} s"
                    raise flight.FlightTimedOutError(text)
                yield self._row(place, future)
        finally:
            for _, future in ahead:
                future.cancel()
            for source in opened.values():
                if not isinstance(source, BaseException):
                    source.close()

    def _row(self, place: int, future: Future[Buffer]) -> pa.RecordBatch:
        try:
            data = future.result()
        except Exception as error:  # noqa: BLE001 - it is this read's error
            self._note(error)
            columns = [
                pa.array([place], pa.int32()),
                pa.nulls(1, pa.binary()),
                pa.array([self._words(error)]),
            ]
            return pa.record_batch(columns, schema=wire.SCHEMA)
        self.counts.add("ranges_total")
        self.counts.add("bytes_total", len(data))
        offsets = pa.py_buffer(b"\0\0\0\0" + len(data).to_bytes(4, "little"))
        # Not copied.
        values = pa.Array.from_buffers(pa.binary(), 1, [None, offsets, pa.py_buffer(data)])
        return pa.record_batch(
            [pa.array([place], pa.int32()), values, pa.nulls(1, pa.string())], schema=wire.SCHEMA
        )

    def _read(
        self,
        identity: Identity | None,
        read: wire.AgentRead,
        opened: dict[tuple[Any, ...], RangeSource | BaseException],
    ) -> Buffer:
        """Read one range, of the version that is meant."""
        name = read[:3]
        source = opened.get(name)
        if source is None:
            # Two threads may open it at once; one of the two is then dropped, and closes with its last reader.
            source = opened.setdefault(name, self._opened(identity, read))
        if isinstance(source, BaseException):
            raise source
        try:
            return source.read(read.start, read.stop)
        except SourceError as error:
            self._files.forget(read.export_name, read.relpath)
            # By the names that the client knows, not by the places of this machine.
            raise in_export(error, read.export_name, read.relpath) from error

    def _opened(self, identity: Identity | None, read: wire.AgentRead) -> RangeSource | BaseException:
        try:
            export = self._export(read.export_name)
            self._files.check_access(read.export_name, read.relpath, identity)
            source = export.open_origin(read.relpath)
            source.pin(read.signature)
        except Exception as error:  # noqa: BLE001 - each of the file's reads has it
            return error
        return source

    # ------------------------------------------------------------- what is there

    def _export(self, name: str) -> FluxonFsExport:
        """Return an export; which others there are is told to nobody."""
        export = self._files.exports.get(name)
        if export is None:
            text = f"export {name[:100]!r}: no such export"
            raise SourceNotFoundError(text, source=name)
        return export

    def _stat(self, identity: Identity | None, export_name: str, relpath: str) -> list[Any]:
        export = self._export(export_name)
        self._files.check_access(export_name, relpath, identity)
        if export.is_local:
            # Clients keep it for their TTL: it is of this moment.
            self._files.forget(export_name, relpath)
        fresh, _ = self._files.stat(export_name, relpath)
        return wire.signature_words(fresh.signature)

    def _list(self, identity: Identity | None, export_name: str, prefix: str) -> Iterator[bytes]:
        page: list[list[Any]] = []
        for relpath, signature in files_for(self._files, self._export(export_name), prefix, identity):
            page.append([relpath, wire.signature_words(signature) if signature is not None else None])
            if len(page) == PAGE:
                yield json.dumps(page).encode()
                page = []
        yield json.dumps(page).encode()

    # ------------------------------------------------------------- errors

    @contextmanager
    def _told(self, what: str, call: Call) -> Iterator[None]:
        """Tell the client what is wrong, as Flight's kind of error with ours inside; others' texts stay here."""
        try:
            yield
        except flight.FlightError:
            raise
        except Exception as error:  # noqa: BLE001 - what is not ours is logged here, and not told
            self._note(error)
            words = self._words(error)
            user = "nobody" if call.identity is None else repr(call.identity[0])[:100]
            _log.info("%s of %s refused: %s", what[:20], user, type(error).__name__)
            kind: Callable[..., Exception] = flight.FlightServerError
            if isinstance(error, SourcePermissionError):
                kind = flight.FlightUnauthorizedError
            shown = "the agent failed"
            if isinstance(error, FluxonGopError):
                shown = self._without_places(error.message)
            raise kind(shown, words.encode()) from None

    def _words(self, error: BaseException) -> str:
        """Return an error as it travels, without the places of this machine."""
        if isinstance(error, FluxonGopError):
            return wire.error_words(type(error)(self._without_places(error.message)))
        return wire.error_words(error)

    def _without_places(self, message: str) -> str:
        for export in self._files.exports.values():
            message = message.replace(export.root, export.name)
        return message

    def _note(self, error: BaseException) -> None:
        self.counts.add("refused_total", label=type(error).__name__)
        if not isinstance(error, FluxonGopError):
            _log.error("a call failed: %s", type(error).__name__, exc_info=error)
        elif isinstance(error, SourceNotFoundError):
            _log.debug("%s", error)


def run_agent(server: AgentServer, stop: threading.Event) -> None:
    """Serve until ``stop`` is set, then end gracefully."""
    thread = threading.Thread(target=server.serve, name="fluxon_gop-agent", daemon=True)
    thread.start()
    _log.info("process %d serves at %s", os.getpid(), server.address)
    with server.over_http():
        while not stop.wait(1.0) and thread.is_alive():
            pass
        server.stop()
    thread.join(10)
