"""What sources have in common that learn their file's version from answers, or are told it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from fluxon_gop.errors import ClosedError
from fluxon_gop.model import Signature
from fluxon_gop.sources.range_source import changed


class VersionedSource(ABC):
    """One file of one version, until it is closed."""

    def __init__(self) -> None:
        """Know no version yet."""
        self._signature: Signature | None = None
        self._closed = False

    @property
    @abstractmethod
    def name(self) -> str:
        """The address without secrets."""

    @property
    @abstractmethod
    def signature(self) -> Signature:
        """The pinned or first seen version; one request where nothing was read yet."""

    def pin(self, signature: Signature) -> None:
        """Make every read be of this version; raises where another one was seen."""
        if self._signature is not None and not self._signature.fits(signature):
            raise changed(self.name, signature, self._signature)
        self._signature = signature

    def check_open(self) -> None:
        """Raise ClosedError where the source is closed."""
        if self._closed:
            text = f"{self.name}: the source is closed"
            raise ClosedError(text)

    def close(self) -> None:
        """Refuse further reads. What the process shares of connections stays open."""
        self._closed = True

    def __repr__(self) -> str:
        """Show the name."""
        return f"{type(self).__name__}({self.name!r})"
