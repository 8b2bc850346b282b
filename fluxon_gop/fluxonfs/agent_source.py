"""A file of an export whose bytes an agent gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fluxon_gop.errors import ClosedError, FluxonGopError, ShortReadError, SourceChangedError
from fluxon_gop.fluxonfs.agent_client import AgentClient
from fluxon_gop.fluxonfs.agent_wire import AgentRead
from fluxon_gop.fluxonfs.users import Identity
from fluxon_gop.model import Signature
from fluxon_gop.sources.range_source import Buffer, changed, check_range


@dataclass(frozen=True)
class AgentGroup:
    """What agents give to one identity: ranges of many files in one call. Equal ones are one."""

    client: AgentClient
    identity: Identity | None

    def read_many(self, reads: Sequence[AgentRead]) -> Iterator[tuple[int, Buffer | FluxonGopError]]:
        """Yield each read's place with its bytes or its error; see :meth:`AgentClient.read_many`."""
        return self.client.read_many(reads, self.identity)

    def source(self, export_name: str, relpath: str) -> AgentSource:
        """Return the source of a file. No IO."""
        return AgentSource(self, export_name, relpath)

    def __repr__(self) -> str:
        """Show the nodes; never the identity."""
        return f"AgentGroup({self.client!r})"


class AgentSource:
    """Bytes of one version of a file, by an agent, under an identity. Each read is a call of its own."""

    def __init__(self, group: AgentGroup, export_name: str, relpath: str) -> None:
        """Name the file; no IO."""
        self.agent = group
        self._export_name, self._relpath = export_name, relpath
        self._pinned: Signature | None = None
        self._asked: Signature | None = None
        self._closed = False

    @property
    def name(self) -> str:
        """``fluxonfs://export/relpath``."""
        return f"fluxonfs://{self._export_name}/{self._relpath}"

    @property
    def signature(self) -> Signature:
        """The version that reads are pinned to. Costs a call where it is not known yet."""
        if self._pinned is not None:
            return self._pinned
        if self._asked is None:
            self._check_open()
            self._asked = self.agent.client.stat(self._export_name, self._relpath, self.agent.identity)
        return self._asked

    def pin(self, signature: Signature) -> None:
        """Make every read be of this version; the agent refuses others."""
        if self._asked is not None and not self._asked.fits(signature):
            raise changed(self.name, signature, self._asked)
        self._pinned = signature

    def read(self, start: int, stop: int) -> Buffer:
        """Return bytes ``[start, stop)``. One call."""
        check_range(self.name, start, stop)
        self._check_open()
        size = self.signature.size
        if stop > size:
            text = f"{self.name}: asked for bytes [{start}, {stop}): the file ends at {size}"
            raise ShortReadError(text, source=self.name, start=start, stop=stop, got=max(size - start, 0))
        read = AgentRead(self._export_name, self._relpath, self.signature, start, stop)
        for _, answer in self.agent.read_many([read]):
            if isinstance(answer, SourceChangedError):
                raise SourceChangedError(answer.message, source=self.name, expected=self.signature)
            if isinstance(answer, FluxonGopError):
                raise answer
            return answer
        raise AssertionError

    def read_head(self, size: int) -> Buffer:
        """Return the first ``size`` bytes or the whole file."""
        stop = min(size, self.signature.size)
        return self.read(0, stop) if stop else b""

    def close(self) -> None:
        """Refuse further reads; the connection is the process's."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            text = f"{self.name}: the source is closed"
            raise ClosedError(text)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle nodes, name and identity, password included: a worker needs them to read."""
        return (AgentSource, (self.agent, self._export_name, self._relpath))
