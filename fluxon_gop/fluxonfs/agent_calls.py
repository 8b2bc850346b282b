"""Who calls an agent, and how much is under way for each: tokens, limits, counters."""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import secrets
import threading
import time
from collections import Counter
from typing import Any, NamedTuple

from cachetools import TTLCache
from pyarrow import flight

from fluxon_gop.errors import FluxonGopError
from fluxon_gop.fluxonfs.agent_wire import AgentLimits
from fluxon_gop.fluxonfs.users import Identity, Users

_log = logging.getLogger("fluxon_gop.agent")
MAX_TOKENS = 100_000
MIDDLEWARE = "fluxon_gop"


class NoHandshake(flight.ServerAuthHandler):  # type: ignore[misc]
    """Lets Flight's handshake pass: who calls is told by the headers of each call."""

    def authenticate(self, outgoing: Any, incoming: Any) -> None:
        """Nothing to do."""

    def is_valid(self, token: bytes) -> bytes:
        """Nothing to do."""
        del token
        return b""


class Counts:
    """An agent's counters, for people and for Prometheus. Thread-safe."""

    HELP = {  # noqa: RUF012 - never changed
        "calls_total": ("counter", "Calls that began, by method."),
        "refused_total": ("counter", "Calls and reads that were refused or failed, by class of error."),
        "ranges_total": ("counter", "Ranges that were read."),
        "bytes_total": ("counter", "Bytes that were read."),
        "calls_running": ("gauge", "Calls under way."),
    }

    def __init__(self) -> None:
        """Begin at 0."""
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, number: int = 1, label: str = "") -> None:
        """Add to a counter."""
        with self._lock:
            self._counts[name, label] += number

    def get(self, name: str, label: str = "") -> int:
        """Return a counter."""
        return self._counts[name, label]

    def text(self) -> str:
        """Return all of them in Prometheus's text format (version 0.0.4)."""
        with self._lock:
            counts = dict(self._counts)
        lines = []
        for name, (kind, words) in self.HELP.items():
            lines += [f"# HELP fluxon_gop_agent_{name} {words}", f"# TYPE fluxon_gop_agent_{name} {kind}"]
            found = {label: value for (one, label), value in counts.items() if one == name} or {"": 0}
            for label, value in sorted(found.items()):
                where = f'{{kind="{label}"}}' if label else ""
                lines.append(f"fluxon_gop_agent_{name}{where} {value}")
        return "\n".join(lines) + "\n"


class _Token(NamedTuple):
    identity: Identity


class Callers(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Tells who calls by each call's headers: Basic for a token, the token after that, nothing for nobody."""

    def __init__(
        self, users: Users | None, limits: AgentLimits, token_seconds: float, counts: Counts
    ) -> None:
        """Know no token yet."""
        super().__init__()
        self._users, self._limits, self._counts = users, limits, counts
        self._tokens: TTLCache[bytes, _Token] = TTLCache(MAX_TOKENS, token_seconds)
        self._running: Counter[Identity | None] = Counter()
        self._bytes: Counter[Identity | None] = Counter()
        self._lock = threading.Lock()
        self.stopping = False

    def start_call(self, info: Any, headers: dict[str, list[Any]]) -> Call:
        """Return the call, with who makes it.

        Raises:
            FlightUnauthenticatedError: a password or token that is none.
            FlightUnavailableError: too many calls of this identity, or the agent stops.
        """
        if self.stopping:
            raise self._refused(flight.FlightUnavailableError, "stopping", "the agent is stopping")
        given = _header(headers)
        identity, token = None, None
        if given is not None:
            kind, _, rest = given.partition(" ")
            if kind.lower() == "basic":
                identity = self._by_password(rest)
                token = secrets.token_urlsafe(32)
                with self._lock:
                    self._tokens[_digest(token)] = _Token(identity)
            else:
                identity = self._by_token(rest if kind.lower() == "bearer" else "")
        with self._lock:
            if self._running[identity] >= self._limits.max_calls:
                raise self._refused(
                    flight.FlightUnavailableError,
                    "busy",
                    f"{self._limits.max_calls} calls of this identity are under way",
                )
            self._running[identity] += 1
        self._counts.add("calls_running")
        self._counts.add("calls_total", label=info.method.name.lower())
        return Call(self, identity, token)

    def hold(self, identity: Identity | None, nbytes: int) -> None:
        """Have a call under way that reads so many bytes.

        Raises:
            FlightUnavailableError: too many, all of this identity's calls together.
        """
        with self._lock:
            if self._bytes[identity] and self._bytes[identity] + nbytes > self._limits.max_bytes:
                raise self._refused(
                    flight.FlightUnavailableError,
                    "busy",
                    f"{self._bytes[identity]} bytes of this identity are under way",
                )
            self._bytes[identity] += nbytes

    def done(self, identity: Identity | None, nbytes: int) -> None:
        """Have a call end."""
        self._counts.add("calls_running", -1)
        with self._lock:
            for counter, number in ((self._running, 1), (self._bytes, nbytes)):
                counter[identity] -= number
                if not counter[identity]:
                    del counter[identity]

    @property
    def running(self) -> int:
        """Calls under way."""
        with self._lock:
            return sum(self._running.values())

    def _by_password(self, text: str) -> Identity:
        try:
            user, found, password = base64.b64decode(text, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            found = ""
        identity = (user, password) if found else None
        if identity is None or not self._knows(identity):
            raise self._refused(
                flight.FlightUnauthenticatedError, "unauthenticated", "no such user and password"
            )
        return identity

    def _by_token(self, token: str) -> Identity:
        with self._lock:
            found = self._tokens.get(_digest(token))
        # Asked again: the user may be gone since, or have another password.
        if found is None or not self._knows(found.identity):
            raise self._refused(
                flight.FlightUnauthenticatedError, "unauthenticated", "the token is none, or has run out"
            )
        return found.identity

    def _knows(self, identity: Identity) -> bool:
        try:
            return self._users is not None and self._users.knows(identity)
        except FluxonGopError as error:
            # It names a place of this machine; whoever runs the agent is told.
            _log.error("%s", error)
            text = "the agent cannot read its users"
            raise self._refused(flight.FlightUnavailableError, "no users", text) from None

    def _refused(self, kind: Any, label: str, text: str) -> Exception:
        self._counts.add("refused_total", label=label)
        error: Exception = kind(text)
        return error


class Call(flight.ServerMiddleware):  # type: ignore[misc]
    """One call: whose it is, and what it holds until it has ended."""

    def __init__(self, callers: Callers, identity: Identity | None, token: str | None) -> None:
        """Note when it began."""
        super().__init__()
        self._callers, self._token = callers, token
        self.identity = identity
        self.began = time.monotonic()
        self._held = 0
        self._ended = False

    def hold(self, nbytes: int) -> None:
        """Count the bytes that it reads."""
        self._callers.hold(self.identity, nbytes)
        self._held += nbytes

    def sending_headers(self) -> dict[str, str]:
        """Give the token to who came with a password."""
        return {} if self._token is None else {"authorization": f"Bearer {self._token}"}

    def call_completed(self, exception: Any) -> None:
        """Let go of what it holds."""
        del exception
        if not self._ended:
            self._ended = True
            self._callers.done(self.identity, self._held)


def _header(headers: dict[str, list[Any]]) -> str | None:
    for name, values in headers.items():
        if name.lower() == "authorization" and values:
            value = values[0]
            return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    return None


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()
