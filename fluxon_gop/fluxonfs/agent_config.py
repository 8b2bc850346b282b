"""How an agent listens: address, certificate, tokens, limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fluxon_gop.errors import InvalidRequestError
from fluxon_gop.fluxonfs.agent_wire import AgentLimits


@dataclass(frozen=True)
class AgentConfig:
    """The ``[agent]`` table of a configuration. Making one checks it; files are read when the agent starts."""

    host: str = "127.0.0.1"
    port: int = 8815
    """0 for one that is free."""
    tls_certificate: str | None = None
    """A PEM file, with the chain; None for no TLS: then passwords and tokens travel in the clear."""
    tls_key: str | None = field(default=None, repr=False)
    """A PEM file."""
    token_seconds: float = 3600.0
    """For how long a token is good."""
    stop_seconds: float = 10.0
    """How long calls under way may last when the agent is told to stop."""
    metrics_port: int | None = None
    """Where ``/metrics`` and ``/health`` are served over HTTP, on the same host; None for nowhere."""
    limits: AgentLimits = field(default_factory=AgentLimits)

    def __post_init__(self) -> None:
        """Check each field."""
        for name in ("host", "tls_certificate", "tls_key"):
            value: Any = getattr(self, name)
            if not isinstance(value, str) and (name == "host" or value is not None):
                text = f"{name} is a {type(value).__name__}: want a str"
                raise TypeError(text)
        for name in ("port", "metrics_port"):
            value = getattr(self, name)
            if type(value) is not int and (name == "port" or value is not None):
                text = f"{name} is a {type(value).__name__}: want an int"
                raise TypeError(text)
            if value is not None and not 0 <= value < 1 << 16:
                text = f"{name} is {value}: want 0 to 65535"
                raise InvalidRequestError(text)
        for name in ("token_seconds", "stop_seconds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                text = f"{name} is a {type(value).__name__}: want a number"
                raise TypeError(text)
            if not 0 <= value < 1e9:
                text = f"{name} is {value}: want 0 or more seconds"
                raise InvalidRequestError(text)
        if (self.tls_certificate is None) != (self.tls_key is None):
            text = "tls_certificate and tls_key: want both, or neither"
            raise InvalidRequestError(text)

    def certificate(self) -> tuple[bytes, bytes]:
        """Return certificate and key.

        Raises:
            InvalidRequestError: one of them cannot be read.
        """
        assert self.tls_certificate is not None
        assert self.tls_key is not None
        try:
            return Path(self.tls_certificate).read_bytes(), Path(self.tls_key).read_bytes()
        except OSError as error:
            text = f"certificate or key cannot be read: {error.strerror}"
            raise InvalidRequestError(text) from None
