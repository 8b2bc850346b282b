"""Bytes that are in memory already, as a source."""

from __future__ import annotations

import hashlib

from fluxon_gop.errors import ClosedError, ShortReadError
from fluxon_gop.lazily import lazily
from fluxon_gop.model import Signature
from fluxon_gop.sources.range_source import Buffer, changed, check_range


class MemorySource:
    """A file's bytes held in memory. The version is the size and a hash of the content."""

    survives_a_fork = True

    def __init__(self, data: bytes | bytearray | memoryview, name: str | None = None) -> None:
        """Keep a read-only view of ``data``; ``name`` defaults to one made of the content's hash."""
        self._data = memoryview(data).toreadonly().cast("B")
        self._given_name = name
        self._closed = False

    @property
    def name(self) -> str:
        """The given name, or ``memory:`` and the hash."""
        return self._given_name or f"memory:{self._hash}"

    @lazily
    def _hash(self) -> str:
        return hashlib.blake2b(self._data, digest_size=8).hexdigest()

    @property
    def signature(self) -> Signature:
        """The size, with the hash as etag."""
        return Signature(len(self._data), self._hash)

    def pin(self, signature: Signature) -> None:
        """Raise SourceChangedError where the content is another."""
        if not self.signature.fits(signature):
            raise changed(self.name, signature, self.signature)

    def read(self, start: int, stop: int) -> Buffer:
        """Return a view of bytes ``[start, stop)``."""
        check_range(self.name, start, stop)
        if self._closed:
            text = f"{self.name}: the source is closed"
            raise ClosedError(text)
        if stop > len(self._data):
            got = max(len(self._data) - start, 0)
            text = f"{self.name}: asked for bytes [{start}, {stop}), got {got}: the file ends there"
            raise ShortReadError(text, source=self.name, start=start, stop=stop, got=got)
        return self._data[start:stop]

    def read_head(self, size: int) -> Buffer:
        """Return a view of the first ``size`` bytes or of all."""
        size = min(size, len(self._data))
        return self.read(0, size) if size else b""

    def close(self) -> None:
        """Refuse further reads."""
        self._closed = True

    def __reduce__(self) -> tuple[type[MemorySource], tuple[bytes, str | None]]:
        """Pickle the bytes: they are all there is to open again."""
        return (MemorySource, (bytes(self._data), self._given_name))

    def __repr__(self) -> str:
        """Show name and size."""
        return f"MemorySource({self.name!r}, {len(self._data)} bytes)"
