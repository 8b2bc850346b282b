"""Which agents have an export: named in the configuration, or told by a registry."""

from __future__ import annotations

import threading
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fluxon_gop import forks
from fluxon_gop.errors import InvalidRequestError
from fluxon_gop.fluxonfs.agent_client import AgentClient

Registry = str | Callable[[str], Sequence[str]]


def client_of(
    export_name: str,
    static_nodes: tuple[str, ...],
    registry: Registry | None,
    timeout_seconds: float,
    tls_roots: str | None,
) -> AgentClient:
    """Return what asks an export's agents; no IO but for the certificates' file.

    Raises:
        TypeError: an address that is no str.
        InvalidRequestError: an address that is none, or certificates that cannot be read.
    """
    for node in static_nodes:
        _check(node, f"static_nodes of export {export_name!r}")
    roots = None
    if tls_roots is not None:
        try:
            roots = Path(tls_roots).read_bytes()
        except OSError as error:
            text = f"agent_tls_roots of export {export_name!r} cannot be read: {error.strerror}"
            raise InvalidRequestError(text) from None
    nodes: Any = static_nodes if registry is None else RegistryNodes(export_name, registry)
    return AgentClient(nodes, timeout_seconds, roots)


class RegistryNodes:
    """The nodes of an export as a registry tells them now. Equal ones name the same."""

    def __init__(self, export_name: str, registry: Registry) -> None:
        """Ask nothing yet."""
        self._export_name, self._registry = export_name, registry
        self._version: tuple[int, ...] | None = None
        self._nodes: tuple[str, ...] = ()
        self.after_fork()
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: another thread of the parent may hold the lock for ever."""
        self._lock = threading.Lock()

    def __call__(self) -> tuple[str, ...]:
        """Return the nodes, in order; none where the registry knows none.

        Raises:
            InvalidRequestError: the registry cannot be read, or names what is no address.
        """
        if callable(self._registry):
            return self._checked(self._registry(self._export_name))
        path = Path(self._registry)
        try:
            status = path.stat()
            version = (status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size)
            with self._lock:
                if version != self._version:
                    self._nodes = self._checked(tomllib.loads(path.read_text()).get(self._export_name, []))
                    self._version = version
                return self._nodes
        except (OSError, ValueError, RecursionError) as error:
            if isinstance(error, InvalidRequestError):
                raise
            text = f"{path}: cannot be read as a registry of agents: {type(error).__name__}"
            raise InvalidRequestError(text) from None

    def _checked(self, nodes: Any) -> tuple[str, ...]:
        where = f"the agent registry, for export {self._export_name!r}"
        if isinstance(nodes, str) or not isinstance(nodes, Sequence):
            text = f"{where}: want a list of addresses"
            raise InvalidRequestError(text)
        for node in nodes:
            _check(node, where)
        return tuple(nodes)

    def __eq__(self, other: object) -> bool:
        """Compare export and registry."""
        return isinstance(other, RegistryNodes) and (self._export_name, self._registry) == (
            other._export_name,
            other._registry,
        )

    def __hash__(self) -> int:
        """Hash the same."""
        return hash((self._export_name, self._registry))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle both."""
        return (RegistryNodes, (self._export_name, self._registry))


def _check(node: object, where: str) -> None:
    if not isinstance(node, str):
        text = f"{where}: an address is a {type(node).__name__}: want a str"
        raise TypeError(text)
    scheme, found, rest = node.partition("://")
    host, colon, port = rest.rpartition(":")
    fits = bool(found and host and colon) and scheme in {"grpc", "grpc+tls", "grpc+tcp"} and "@" not in rest
    if not fits or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        text = f"{where}: want addresses like grpc://host:port or grpc+tls://host:port"
        raise InvalidRequestError(text)
