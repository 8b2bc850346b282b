"""A file system's configuration as a TOML file: exports, cache, users, index table, identity."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fluxon_gop.errors import InvalidRequestError
from fluxon_gop.fluxonfs.agent_config import AgentConfig
from fluxon_gop.fluxonfs.agent_wire import AgentLimits
from fluxon_gop.fluxonfs.export import FluxonFsExport
from fluxon_gop.fluxonfs.file_system import FluxonFsCache
from fluxon_gop.fluxonfs.users import Identity, Users


@dataclass(frozen=True)
class FluxonFsConfig:
    """What a file says; relative paths in it are relative to its folder."""

    exports: tuple[FluxonFsExport, ...]
    cache: FluxonFsCache
    users: Users | None = None
    index: str | None = field(default=None, repr=False)
    request_identity: Identity | None = field(default=None, repr=False)
    agent: AgentConfig = field(default_factory=AgentConfig)


def read_config(path: str | os.PathLike[str]) -> FluxonFsConfig:
    """Return the configuration in a TOML file.

    Top level: ``index``, ``users`` (a file), ``request_identity = ["user", "password"]``; ``[cache]`` with the fields of
    FluxonFsCache; ``[exports.NAME]`` with those of FluxonFsExport; ``[agent]`` with those of AgentConfig, and
    ``[agent.limits]`` with those of AgentLimits.

    Raises:
        InvalidRequestError: no such file, no TOML, an unknown or missing name, a value that is refused.
    """
    file = Path(path)
    try:
        given = tomllib.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        # A TOML error quotes the line, and a line may hold a password.
        reason = error.strerror if isinstance(error, OSError) else "it is no TOML file"
        text = f"{file}: cannot be read: {reason}"
        raise InvalidRequestError(text) from None
    _known(given, {"index", "users", "request_identity", "cache", "exports", "agent"}, str(file))
    folder = file.parent
    try:
        cache = dict(_table(given, "cache"))
        if "disk_path" in cache:
            cache["disk_path"] = _beside(folder, cache["disk_path"])
        exports = _table(given, "exports")
        return FluxonFsConfig(
            exports=tuple(_export(name, exports, folder) for name in exports),
            cache=_made(FluxonFsCache, cache, f"{file}: [cache]"),
            users=Users(_beside(folder, given["users"])) if "users" in given else None,
            index=_beside(folder, given["index"]) if "index" in given else None,
            request_identity=_identity(given.get("request_identity")),
            agent=_agent(_table(given, "agent"), folder, str(file)),
        )
    except TypeError as error:
        text = f"{file}: {error}"
        raise InvalidRequestError(text) from None


def _agent(given: Mapping[str, Any], folder: Path, file: str) -> AgentConfig:
    agent = dict(given)
    for name in ("tls_certificate", "tls_key"):
        if name in agent:
            agent[name] = _beside(folder, agent[name])
    limits = _made(AgentLimits, _table(given, "limits"), f"{file}: [agent.limits]")
    made = _made(AgentConfig, {**agent, "limits": limits}, f"{file}: [agent]")
    assert isinstance(made, AgentConfig)
    return made


def _export(name: str, exports: Mapping[str, Any], folder: Path) -> FluxonFsExport:
    given = dict(_table(exports, name))
    for field_name in ("root", "agent_registry", "agent_tls_roots"):
        if field_name in given:
            given[field_name] = _beside(folder, given[field_name])
    made = _made(FluxonFsExport, {"name": name, **given}, f"[exports.{name}]")
    assert isinstance(made, FluxonFsExport)
    return made


def _made(kind: Any, given: Mapping[str, Any], where: str) -> Any:
    names = {item.name for item in fields(kind)}
    _known(given, names, where)
    if kind is FluxonFsExport and not {"root", "static_nodes", "agent_registry"} & set(given):
        text = f"{where}: root is missing (or static_nodes, or agent_registry)"
        raise InvalidRequestError(text)
    return kind(**given)


def _known(given: Mapping[str, Any], names: set[str], where: str) -> None:
    unknown = sorted(set(given) - names)
    if unknown:
        hint = (
            " (index, users and request_identity stand before the first table)"
            if where.startswith("[")
            else ""
        )
        text = f"{where}: unknown: {', '.join(unknown)}; want some of {', '.join(sorted(names))}{hint}"
        raise InvalidRequestError(text)


def _table(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = given.get(name, {})
    if not isinstance(table, dict):
        text = f"{name} is a {type(table).__name__}: want a table"
        raise TypeError(text)
    return table


def _beside(folder: Path, value: Any) -> str:
    """Return an address as it is, a path from the file's folder."""
    if not isinstance(value, str):
        text = f"a path or address is a {type(value).__name__}: want a str"
        raise TypeError(text)
    return value if not value or "://" in value else str(folder / Path(value).expanduser())


def _identity(given: Any) -> Identity | None:
    if given is None:
        return None
    if not isinstance(given, list) or len(given) != 2 or not all(isinstance(part, str) for part in given):
        text = "request_identity: want [user, password]"
        raise TypeError(text)
    return (given[0], given[1])
