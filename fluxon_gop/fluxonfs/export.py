"""An export: a name for a folder or a remote prefix whose files may be read, by whom, and how they are cached."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from fluxon_gop.errors import InvalidRequestError, SourcePermissionError
from fluxon_gop.fluxonfs.beneath import BeneathSource
from fluxon_gop.fluxonfs.users import Identity, Users
from fluxon_gop.sources import RangeSource, open_source

if TYPE_CHECKING:
    from fluxon_gop.fluxonfs.agent_client import AgentClient
    from fluxon_gop.fluxonfs.agent_source import AgentGroup

MAX_NUMBER = 1 << 50

Authorizer = Callable[[Identity | None, str, str], bool]
"""Says whether this identity may read this relpath of the export of this name."""


class MissPolicy(StrEnum):
    """What a read does where a piece is in no cache tier."""

    REMOTE_READ = "RemoteRead"
    """Read the origin; the shared tiers are filled behind the caller's back."""
    STAGE_TO_KV_THEN_READ = "StageToKvThenRead"
    """Fill the shared tiers before the read answers."""


@dataclass(frozen=True)
class FluxonFsExport:
    """Files under one root, read-only, by relpath. Making one checks it; no IO."""

    name: str
    root: str = field(default="", repr=False)
    """A local folder, or the address of a remote one (``https://...``); a query string is kept, and never shown.
    None with agents."""
    readers: Collection[str] | Authorizer | None = field(default=None, repr=False)
    """Users who may read, or a callable that decides: its True, and nothing else, allows. None lets anyone read,
    without an identity too."""
    cache_kv_key_prefix: str | None = None
    """First part of the keys of pieces in the tiers; None for one made of the root."""
    cache_bytes_field_key: str = "bytes"
    """The field of a piece's entry that holds its bytes."""
    cache_max_bytes: int | None = None
    """Files larger than this bypass the tiers; None for no bound."""
    metadata_cache_ttl_ms: int = 5_000
    """For how long a stat, a "not found" and a right to read hold."""
    async_backfill_enabled: bool = True
    """Whether a miss fills the shared tiers (with ``RemoteRead``)."""
    miss_policy: MissPolicy = MissPolicy.REMOTE_READ
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    """For the root's source."""
    static_nodes: Sequence[str] = ()
    """Agents that have an export of this name, ``grpc://host:port`` or ``grpc+tls://host:port``: the first that answers
    is asked, the others where it does not."""
    agent_registry: str | Callable[[str], Sequence[str]] | None = field(default=None, repr=False)
    """Instead of ``static_nodes``: a TOML file of ``export = ["grpc://..."]`` lines that is read again when it changes,
    or a callable that tells an export's nodes by its name."""
    agent_timeout_ms: int = 30_000
    """Of one call to the agents, all that are tried together."""
    agent_tls_roots: str | None = None
    """A PEM file of the certificates that the agents' own must come from; None for the machine's."""

    def __post_init__(self) -> None:
        """Check each field."""
        for name in ("name", "root", "cache_bytes_field_key"):
            value = getattr(self, name)
            if not isinstance(value, str):
                text = f"export {name} is a {type(value).__name__}: want a str"
                raise TypeError(text)
            if name == "root" and not value and self.has_agents:
                continue
            if not value or "\0" in value:
                text = f"export {name} must be non-empty, without a NUL"
                raise InvalidRequestError(text)
        self._check_numbers()
        try:
            object.__setattr__(self, "miss_policy", MissPolicy(self.miss_policy))
        except ValueError:
            text = f"miss_policy is {self.miss_policy!r}: want {' or '.join(MissPolicy)}"
            raise InvalidRequestError(text) from None
        if isinstance(self.readers, str):
            text = f"readers of export {self.name!r} is one str: want a collection of users"
            raise TypeError(text)
        if self.readers is not None and not callable(self.readers):
            object.__setattr__(self, "readers", frozenset(self.readers))
        if self.has_agents:
            self._check_agents()
        elif self.is_local:
            object.__setattr__(self, "root", self._folder())
        # An address that nothing can be opened by, now rather than at the first read.
        self.open_origin("x")

    def _check_agents(self) -> None:
        if self.root or (self.static_nodes and self.agent_registry is not None):
            text = f"export {self.name!r}: want one of root, static_nodes and agent_registry"
            raise InvalidRequestError(text)
        if isinstance(self.static_nodes, str):
            text = f"static_nodes of export {self.name!r} is one str: want a list of addresses"
            raise TypeError(text)
        object.__setattr__(self, "static_nodes", tuple(self.static_nodes))
        # Flight is loaded where an agent is named, and nowhere else.
        from fluxon_gop.fluxonfs.agent_nodes import client_of

        object.__setattr__(
            self,
            "_client",
            client_of(
                self.name,
                tuple(self.static_nodes),
                self.agent_registry,
                self.agent_timeout_ms / 1000,
                self.agent_tls_roots,
            ),
        )

    def _check_numbers(self) -> None:
        for name in ("cache_max_bytes", "metadata_cache_ttl_ms", "agent_timeout_ms"):
            value = getattr(self, name)
            if value is None and name == "cache_max_bytes":
                continue
            if type(value) is not int:
                text = f"{name} is a {type(value).__name__}: want an int"
                raise TypeError(text)
            if not 0 <= value <= MAX_NUMBER:
                text = f"{name} is {value if abs(value) <= MAX_NUMBER else 'huge'}: want 0 or more, up to {MAX_NUMBER}"
                raise InvalidRequestError(text)
        backfill: object = self.async_backfill_enabled
        if type(backfill) is not bool:
            text = f"async_backfill_enabled is a {type(backfill).__name__}: want a bool"
            raise TypeError(text)

    def _folder(self) -> str:
        """Return the absolute path of a local root, as it is now: a later change of folder does not move it."""
        root = self.root
        if "://" in root:
            parts = urlsplit(root)
            if parts.netloc not in {"", "localhost"} or not parts.path:
                text = f"root of export {self.name!r}: want file:///path, on this machine"
                raise InvalidRequestError(text)
            root = unquote(parts.path)
        return os.path.abspath(root)  # noqa: PTH100 - the root's own links are the owner's

    @property
    def is_local(self) -> bool:
        """Whether the root is a folder of this machine's file systems."""
        return not self.has_agents and self._names_folder

    @property
    def has_agents(self) -> bool:
        """Whether agents give the files."""
        return bool(self.static_nodes) or self.agent_registry is not None

    @property
    def _names_folder(self) -> bool:
        return "://" not in self.root or self.root.lower().startswith("file://")

    @property
    def key_prefix(self) -> str:
        """The first part of the keys of this export's pieces: two roots never share one by accident."""
        if self.cache_kv_key_prefix is not None:
            return self.cache_kv_key_prefix
        if self.has_agents:
            # An export's name, and not the nodes that have it today.
            return "fluxon_gop:agent"
        parts = urlsplit(self.root)
        # A signed query changes while the files stay; where a query names the files, give a prefix.
        place = self.root if self.is_local else f"{parts.scheme}://{parts.netloc}{parts.path}"
        return f"fluxon_gop:{hashlib.blake2b(place.encode(), digest_size=8).hexdigest()}"

    def agents(self, identity: Identity | None) -> AgentGroup | None:
        """Return what agents give to this identity; None where no agent is asked."""
        client: AgentClient | None = getattr(self, "_client", None)
        if client is None:
            return None
        from fluxon_gop.fluxonfs.agent_source import AgentGroup

        return AgentGroup(client, identity)

    def open_origin(self, relpath: str, identity: Identity | None = None) -> RangeSource:
        """Return the source of a file under the root; ``relpath`` has passed ``check_relpath``. No IO.

        ``identity``: under which agents are asked; no other origin knows of it.

        Raises:
            InvalidRequestError: the root's scheme is not supported.
        """
        agents = self.agents(identity)
        if agents is not None:
            return agents.source(self.name, relpath)
        if self.is_local:
            return BeneathSource(self.root, relpath)
        parts = urlsplit(self.root)
        if parts.scheme.lower() not in {"http", "https"}:
            # Keys of object stores are taken as they are.
            return open_source(f"{self.root.rstrip('/')}/{relpath}", self.storage_options)
        path = f"{parts.path.rstrip('/')}/{quote(relpath)}"
        return open_source(urlunsplit(parts._replace(path=path)), self.storage_options)

    def check_access(self, identity: Identity | None, relpath: str, users: Users | None) -> None:
        """Return where this identity may read this file.

        Raises:
            SourcePermissionError: it may not; the message names export and path, and nothing of the identity.
        """
        if self.readers is None:
            return
        known = identity is not None and users is not None and users.knows(identity)
        if callable(self.readers):
            # Without a book of users the callable has to look at the password itself.
            answer: object = (known or users is None or identity is None) and self._ask(identity, relpath)
            allowed = answer is True
        else:
            allowed = known and identity is not None and identity[0] in self.readers
        if not allowed:
            raise self._refusal(relpath, "this identity may not read it")

    def _ask(self, identity: Identity | None, relpath: str) -> object:
        assert callable(self.readers)
        try:
            return self.readers(identity, self.name, relpath)
        except Exception as error:  # noqa: BLE001 - it may hold anything, the identity too
            raise self._refusal(relpath, f"its rights cannot be told ({type(error).__name__})") from None

    def _refusal(self, relpath: str, why: str) -> SourcePermissionError:
        text = f"export {self.name!r}, {relpath!r}: {why}"
        return SourcePermissionError(
            text, source=f"{self.name}/{relpath}", export_name=self.name, relpath=relpath
        )
