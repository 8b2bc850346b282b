"""The key of a piece: one fixed-size stretch of one version of one file of an export.

Pure.
"""

from __future__ import annotations

import hashlib
import json

from fluxon_gop.model import Signature


class FilePieces:
    """The pieces of one version of a file. Equal for the same (export, relpath, size, mtime_ns, etag)."""

    def __init__(
        self,
        prefix: str,
        field: str,
        export_name: str,
        relpath: str,
        signature: Signature,
        piece_bytes: int,
    ) -> None:
        """Name the file's version.

        Args:
            prefix: the export's, first part of every key.
            field: of an entry that holds the bytes.
            export_name: of the file.
            relpath: of the file.
            signature: size, ``mtime_ns``, and the etag where the origin has one.
            piece_bytes: size of each piece but the last.
        """
        self.prefix, self.field = prefix, field
        etag = signature.etag
        parts = [prefix, field, export_name, relpath, signature.size, signature.mtime_ns, piece_bytes]
        if etag is not None:
            parts.append(hashlib.sha256(etag.encode()).hexdigest())
        self.identity = json.dumps(parts)
        """The version, as text that differs wherever one of its parts does."""
        self.size = signature.size
        self.piece_bytes = piece_bytes

    def key(self, index: int) -> PieceKey:
        """Return the key of piece ``index``, 0-based."""
        start = index * self.piece_bytes
        return PieceKey(self.identity, index, min(self.piece_bytes, self.size - start))

    def indices(self, start: int, stop: int) -> range:
        """Return the pieces that bytes ``[start, stop)`` lie in."""
        return range(start // self.piece_bytes, -(-stop // self.piece_bytes))

    def bounds(self, first: int, last: int) -> tuple[int, int]:
        """Return the bytes ``[start, stop)`` of pieces ``first`` to ``last``, both included."""
        return first * self.piece_bytes, min((last + 1) * self.piece_bytes, self.size)


class PieceKey:
    """The key of one piece. Hashable; ``digest`` names it in a store."""

    __slots__ = ("_digest", "identity", "index", "nbytes")

    def __init__(self, identity: str, index: int, nbytes: int) -> None:
        """Use :meth:`FilePieces.key`."""
        self.identity = identity
        self.index = index
        self.nbytes = nbytes
        self._digest: bytes | None = None

    @property
    def digest(self) -> bytes:
        """32 bytes that no other key has."""
        if self._digest is None:
            self._digest = hashlib.sha256(f"{self.identity}#{self.index}".encode()).digest()
        return self._digest

    @property
    def number(self) -> int:
        """A number below 2**62 that hardly another key has."""
        return int.from_bytes(self.digest[:8], "big") >> 2

    def __eq__(self, other: object) -> bool:
        """Compare file version and index."""
        return isinstance(other, PieceKey) and (self.index, self.identity) == (other.index, other.identity)

    def __hash__(self) -> int:
        """Hash file version and index."""
        return hash((self.identity, self.index))

    def __repr__(self) -> str:
        """Show both."""
        return f"PieceKey({self.identity}#{self.index})"
