"""What reads from agents: connections and tokens of a process, deadlines, the next node where one does not answer."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, TypeVar

import pyarrow as pa
from pyarrow import flight

from fluxon_gop import forks
from fluxon_gop.errors import (
    DeadlineError,
    FluxonGopError,
    ForkedProcessError,
    InvalidRequestError,
    SourceError,
    SourcePermissionError,
    one_line,
)
from fluxon_gop.fluxonfs import agent_wire as wire
from fluxon_gop.fluxonfs.users import Identity
from fluxon_gop.model import Signature
from fluxon_gop.sources.range_source import Buffer

DOWN_SECONDS = 5.0
"""For how long a node that did not answer is asked last."""
_BUSY_PAUSES = (0.02, 0.5)
PART_BYTES, CALL_BYTES, CALL_RANGES = 32 << 20, 512 << 20, 16_384
"""Within what an agent allows by default."""
_TOKENS = 3
"""Tries of one call with a token that was good a moment ago."""
T = TypeVar("T")


class _UnansweredError(Exception):
    """A node did not answer, or cannot now: the next one is asked."""


class Node(NamedTuple):
    """An agent's address, and the certificates that its own must come from; None for the machine's."""

    address: str
    tls_roots: bytes | None


class _Connection:
    """The process's connection to one node, and the tokens that it has given."""

    def __init__(self, node: Node) -> None:
        options: dict[str, Any] = {}
        if node.tls_roots is not None:
            options["tls_root_certs"] = node.tls_roots
        self.client = flight.FlightClient(node.address, **options)
        self.tokens: dict[Identity, bytes] = {}
        self.lock = threading.Lock()
        self.down_until = 0.0


class _Connections:
    """All connections of the process. Thread-safe; a forked child has none of its parent's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Node, _Connection] = {}
        self._pid = os.getpid()
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: gRPC's threads do not live here; what was open is left alone."""
        self._lock = threading.Lock()

    def to(self, node: Node) -> _Connection:
        """Return the connection to a node; opened at the first use, which is no IO yet."""
        if self._open and self._pid != os.getpid():
            text = (
                f"{node.address}: an agent that was asked before the fork is asked in the child, where the threads of "
                "its connection do not live. Start workers with 'spawn' or 'forkserver'"
            )
            raise ForkedProcessError(text, source=node.address)
        with self._lock:
            self._pid = os.getpid()
            if node not in self._open:
                self._open[node] = _Connection(node)
            return self._open[node]


_connections = _Connections()


@dataclass(frozen=True)
class AgentClient:
    """Asks the agents of one export: the first of its nodes that answers. Equal ones share connections."""

    nodes: Callable[[], Sequence[str]] | tuple[str, ...]
    """Addresses, ``grpc://host:port`` or ``grpc+tls://host:port``, in order; or what tells them."""
    timeout_seconds: float = 30.0
    """Of one call, all nodes that are tried together."""
    tls_roots: bytes | None = field(default=None, repr=False)

    def stat(self, export_name: str, relpath: str, identity: Identity | None) -> Signature:
        """Return a file's version. One call.

        Raises:
            SourceError: as the agent says, or no agent answers.
        """
        name = f"{export_name}/{relpath}"
        body = wire.body_of(export_name=export_name, relpath=relpath)

        def ask(connection: _Connection, options: Any) -> Signature:
            answers = list(connection.client.do_action(flight.Action("stat", body), options))
            _check_answer(len(answers) == 1, name)
            return _version(_json(answers[0], name), name)

        return self._asked(name, identity, ask)

    def list_files(
        self, export_name: str, prefix: str, identity: Identity | None
    ) -> list[tuple[str, Signature | None]]:
        """Return relpath and version of each file below a prefix ("" for all). One call.

        Raises:
            SourceError: as the agent says, or no agent answers.
        """
        name = f"{export_name}/{prefix}"
        body = wire.body_of(export_name=export_name, prefix=prefix)

        def ask(connection: _Connection, options: Any) -> list[tuple[str, Signature | None]]:
            found: list[tuple[str, Signature | None]] = []
            for page in connection.client.do_action(flight.Action("list", body), options):
                entries = _json(page, name)
                _check_answer(isinstance(entries, list), name)
                for entry in entries:
                    _check_answer(isinstance(entry, list) and len(entry) == 2, name)
                    relpath, words = entry
                    found.append((str(relpath), None if words is None else _version(words, name)))
            return found

        return self._asked(name, identity, ask)

    def read_many(
        self, reads: Sequence[wire.AgentRead], identity: Identity | None
    ) -> Iterator[tuple[int, Buffer | FluxonGopError]]:
        """Yield each read's place with its bytes or its error, as they come.

        One call for up to 512 MiB and 16,384 ranges, and one more where a node goes away. A read of more than 32 MiB is
        put together from parts.

        Raises:
            SourceError: no agent answers in time; what was yielded before stands.
        """
        until = time.monotonic() + self.timeout_seconds
        parts = [(place, part) for place, read in enumerate(reads) for part in _parts(read)]
        left = Counter(place for place, _ in parts)
        held: dict[int, dict[int, Buffer]] = {}
        for call in _calls(parts):
            for number, answer in self._one_call([part for _, part in call], identity, until):
                place, part = call[number]
                left[place] -= 1
                if isinstance(answer, FluxonGopError):
                    if left[place] >= 0:
                        # Its other parts are not waited for.
                        left[place] = -1
                        yield place, answer
                    continue
                if left[place] == 0 and place not in held:
                    yield place, answer
                    continue
                mine = held.setdefault(place, {})
                mine[part.start] = answer
                if left[place] == 0:
                    yield place, b"".join(mine[start] for start in sorted(mine))
                if left[place] <= 0:
                    del held[place]

    def _one_call(
        self, reads: Sequence[wire.AgentRead], identity: Identity | None, until: float
    ) -> Iterator[tuple[int, Buffer | FluxonGopError]]:
        left = dict(enumerate(reads))
        name = f"{reads[0].export_name}/{reads[0].relpath}"
        while left:
            places = list(left)
            connection, reader = self._begun(name, identity, list(left.values()), until)
            try:
                for chunk in reader:
                    for row, data, error in _rows(chunk.data):
                        place = places[row] if 0 <= row < len(places) else -1
                        _check_answer(place in left, name)
                        yield place, _checked(left.pop(place), data, error)
                _check_answer(not left, name)
            except GeneratorExit:
                reader.cancel()
                raise
            except FluxonGopError:
                raise
            except Exception as error:  # noqa: BLE001 - Flight's many kinds become ours
                try:
                    _explain(error, name)
                except _UnansweredError:
                    # What has not come is asked of the next node.
                    connection.down_until = time.monotonic() + DOWN_SECONDS

    def _begun(
        self, name: str, identity: Identity | None, reads: list[wire.AgentRead], until: float
    ) -> tuple[_Connection, Any]:
        """Return the answer's stream, and whose it is."""
        ticket = flight.Ticket(wire.ticket_of(reads))

        def ask(connection: _Connection, options: Any) -> tuple[_Connection, Any]:
            reader = connection.client.do_get(ticket, options)
            # What is refused whole is told with the schema.
            _check_answer(reader.schema == wire.SCHEMA, name)
            return connection, reader

        return self._asked(name, identity, ask, until)

    # ------------------------------------------------------------- one call

    def _asked(
        self,
        name: str,
        identity: Identity | None,
        ask: Callable[[_Connection, Any], T],
        until: float | None = None,
    ) -> T:
        """Return a call's answer by the first node that gives one, in time."""
        until = time.monotonic() + self.timeout_seconds if until is None else until
        pause, longest = _BUSY_PAUSES
        why = "no answer in time"
        while True:
            connections = self._in_order(name)
            for position, (address, connection) in enumerate(connections):
                left = until - time.monotonic()
                if left <= 0:
                    break
                # A node that is silent leaves time for the others.
                share = left / (len(connections) - position)
                try:
                    return self._by(connection, name, identity, ask, share)
                except _UnansweredError as error:
                    why = f"{address}: {error}"
                    connection.down_until = time.monotonic() + DOWN_SECONDS
            if time.monotonic() + pause >= until or not connections:
                break
            time.sleep(pause)
            pause = min(2 * pause, longest)
        if not connections:
            text = f"{name}: no agent to ask: none is named"
            raise SourceError(text, source=name)
        text = f"{name}: no agent answered within {self.timeout_seconds:g} s ({why})"
        raise DeadlineError(text, source=name)

    def _by(
        self,
        connection: _Connection,
        name: str,
        identity: Identity | None,
        ask: Callable[[_Connection, Any], T],
        seconds: float,
    ) -> T:
        """Return the answer of one node; a token that is none any more is got anew."""
        until = time.monotonic() + seconds
        for _ in range(_TOKENS):
            token = b""
            try:
                headers = []
                if identity is not None:
                    token = _token(connection, identity, until, name)
                    headers = [(b"authorization", token)]
                left = max(until - time.monotonic(), 0.001)
                return ask(connection, flight.FlightCallOptions(timeout=left, headers=headers))
            except flight.FlightUnauthenticatedError:
                # Another agent is there now, or it has run out; another thread may have got a new one already.
                if identity is None:
                    break
                with connection.lock:
                    if connection.tokens.get(identity) == token:
                        del connection.tokens[identity]
            except FluxonGopError:
                raise
            except Exception as error:  # noqa: BLE001 - Flight's many kinds become ours
                _explain(error, name)
        raise _unknown(name)

    def _in_order(self, name: str) -> list[tuple[str, _Connection]]:
        """Return the nodes, those that did not answer lately last."""
        addresses = self.nodes() if callable(self.nodes) else self.nodes
        found = []
        for address in addresses:
            try:
                found.append((address, _connections.to(Node(address, self.tls_roots))))
            except (pa.ArrowException, ValueError) as error:
                text = f"{name}: {address!r} is no agent's address: want grpc://host:port or grpc+tls://host:port"
                raise InvalidRequestError(text) from error
        now = time.monotonic()
        return sorted(found, key=lambda one: one[1].down_until > now)


def _parts(read: wire.AgentRead) -> Iterator[wire.AgentRead]:
    """Yield a read in parts that an agent gives at once."""
    for start in range(read.start, read.stop, PART_BYTES):
        yield read._replace(start=start, stop=min(start + PART_BYTES, read.stop))


def _calls(parts: list[tuple[int, wire.AgentRead]]) -> Iterator[list[tuple[int, wire.AgentRead]]]:
    """Yield parts as one call asks for them."""
    call: list[tuple[int, wire.AgentRead]] = []
    nbytes = 0
    for place, part in parts:
        size = part.stop - part.start
        if call and (len(call) == CALL_RANGES or nbytes + size > CALL_BYTES):
            yield call
            call, nbytes = [], 0
        call.append((place, part))
        nbytes += size
    if call:
        yield call


def _token(connection: _Connection, identity: Identity, until: float, name: str) -> bytes:
    """Return the token of an identity; of many who want one, one asks for it."""
    if "\0" in "".join(identity) or ":" in identity[0]:
        # Flight would send what stands before the NUL, and take the user for another one.
        raise _unknown(name)
    with connection.lock:
        token = connection.tokens.get(identity)
        if token is None:
            options = flight.FlightCallOptions(timeout=max(until - time.monotonic(), 0.001))
            user, password = (part.encode("utf-8", "surrogatepass") for part in identity)
            try:
                token = connection.client.authenticate_basic_token(user, password, options)[1]
            except flight.FlightUnauthenticatedError:
                raise _unknown(name) from None
            assert token is not None
            connection.tokens[identity] = token
        return token


def _unknown(name: str) -> SourcePermissionError:
    text = f"{name}: the agent knows no such user and password"
    return SourcePermissionError(text, source=name)


def _rows(batch: pa.RecordBatch) -> Iterator[tuple[int, Any, Any]]:
    reads, data, errors = batch.columns
    for row in range(batch.num_rows):
        value = data[row]
        yield (
            reads[row].as_py(),
            memoryview(value.as_buffer()) if value.is_valid else None,
            errors[row].as_py(),
        )


def _checked(read: wire.AgentRead, data: memoryview | None, error: str | None) -> Buffer | FluxonGopError:
    """Return a read's bytes where they are as many as asked for, else its error."""
    name = f"{read.export_name}/{read.relpath}"
    if data is None:
        return wire.error_of(error or "", name)
    if len(data) != read.stop - read.start:
        text = f"{name}: asked for bytes [{read.start}, {read.stop}), the agent gave {len(data)}"
        return SourceError(text, source=name)
    return data


def _words(error: Exception) -> str:
    """Return a foreign error's first words: gRPC appends addresses and debugging."""
    return one_line(error).partition(". Detail:")[0].partition("gRPC client debug context")[0][:300].strip()


def _json(answer: Any, name: str) -> Any:
    try:
        return json.loads(answer.body.to_pybytes())
    except (ValueError, RecursionError):
        _check_answer(False, name)


def _version(words: Any, name: str) -> Signature:
    try:
        return wire.signature_of(words)
    except InvalidRequestError:
        _check_answer(False, name)
        raise


def _check_answer(fits: bool, name: str) -> None:
    if not fits:
        text = f"{name}: the agent gave an answer that is none"
        raise SourceError(text, source=name)


def _explain(error: Exception, name: str) -> NoReturn:
    """Raise a foreign error as one of ours, or as a node that does not answer."""
    if isinstance(error, flight.FlightUnavailableError):
        raise _UnansweredError(_words(error)) from error
    if isinstance(error, flight.FlightTimedOutError):
        text = "no answer in time"
        raise _UnansweredError(text) from error
    if isinstance(error, flight.FlightCancelledError | flight.FlightInternalError):
        raise _UnansweredError(_words(error)) from error
    if isinstance(error, flight.FlightUnauthenticatedError):
        text = "the token has run out"
        raise _UnansweredError(text) from error
    extra = getattr(error, "extra_info", None)
    if isinstance(error, flight.FlightUnauthorizedError | flight.FlightServerError) and extra:
        raise wire.error_of(bytes(extra).decode("utf-8", "replace"), name) from None
    if isinstance(error, flight.FlightUnauthorizedError):
        text = f"{name}: the agent refuses: this identity may not read it"
        raise SourcePermissionError(text, source=name) from error
    if isinstance(error, pa.ArrowException | OSError | ValueError | KeyError | TypeError):
        text = f"{name}: the agent cannot be asked: {_words(error)}"
        raise SourceError(text, source=name) from error
    raise error
