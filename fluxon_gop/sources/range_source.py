"""What every source of bytes promises.

A source is one file. It knows no frame, codec or GOP. Reads are exact: the bytes asked for, all of
them and of the pinned version, or a typed error.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

from fluxon_gop.errors import InvalidRequestError, SourceChangedError
from fluxon_gop.model import Signature

Buffer = bytes | memoryview


@runtime_checkable
class RangeSource(Protocol):
    """One file that is read by byte ranges. Thread-safe; a pickle carries what opens it again."""

    @property
    def name(self) -> str:
        """The address, without secrets: safe to print, to log, to use as a key."""
        ...

    @property
    def signature(self) -> Signature:
        """The version that reads are pinned to. Costs one request where nothing was read yet."""
        ...

    def pin(self, signature: Signature) -> None:
        """Pin the version that all reads must have; refused where another one is known already."""
        ...

    def read(self, start: int, stop: int) -> Buffer:
        """Return exactly bytes ``[start, stop)``. Costs one request.

        Raises:
            ShortReadError: the file ends before ``stop``.
            SourceChangedError: the file is no longer the pinned version.
            SourceError: it cannot be read.
        """
        ...

    def read_head(self, size: int) -> Buffer:
        """Return the first ``size`` bytes, or the whole file where it is shorter. Costs one request.

        After it the signature is known without a further request.
        """
        ...

    def close(self) -> None:
        """Let go of what is open. Reads after it raise ClosedError."""
        ...


@runtime_checkable
class SourceAddress(Protocol):
    """Names a file, and opens it. Hashable: equal addresses share a reader."""

    @property
    def name(self) -> str:
        """The address, without secrets."""
        ...

    def open_source(self) -> RangeSource:
        """Return a source of its own for the caller, who closes it. No IO."""
        ...


class RequestCosts(NamedTuple):
    """What a request costs: seconds before its first byte, bytes a second after it, how many run side by side."""

    latency_seconds: float
    bandwidth: float
    at_once: int


class GroupRead(NamedTuple):
    """One range read out of many: bytes ``[start, stop)``, or with ``head`` what there is of them."""

    source: RangeSource
    start: int
    stop: int
    head: bool = False


class RangeGroup(Protocol):
    """What several sources have in common that can read ranges of all of them in one call.

    A source says so by an attribute ``group``; a wave over such sources is one call of ``start``.
    """

    def start(self, reads: Sequence[GroupRead]) -> list[Future[Buffer]]:
        """Start all reads, and return at once with a future for each; a pending one may be cancelled."""
        ...


def is_source(thing: object) -> TypeGuard[RangeSource]:
    """Return whether a thing has what a RangeSource has. No IO, where ``isinstance`` may ask for the signature."""
    own = getattr(thing, "__dict__", {})
    return all(hasattr(type(thing), name) or name in own for name in _SOURCE_NAMES)


_SOURCE_NAMES = ("name", "signature", "pin", "read", "read_head", "close")


def table_key_of(source: RangeSource) -> Any:
    """Return the key under which an index table knows a source: its ``table_key`` where it has one, else its name."""
    return getattr(source, "table_key", source.name)


def group_of(source: RangeSource) -> RangeGroup | None:
    """Return what reads this source together with others, None where it reads alone."""
    group: RangeGroup | None = getattr(source, "group", None)
    return group


def check_range(name: str, start: int, stop: int) -> None:
    """Refuse a range that is empty, negative or backwards, before any IO."""
    if not 0 <= start < stop:
        text = f"{name}: bytes [{start}, {stop}) are no range to read: want 0 <= start < stop"
        raise InvalidRequestError(text)


def changed(name: str, expected: Signature, got: Signature) -> SourceChangedError:
    """Return the error for a file that is another version than the pinned one."""
    text = (
        f"{name}: the file changed: expected {_words(expected)}, got {_words(got)}; "
        "build its index again (fluxon-gop index build)"
    )
    return SourceChangedError(text, source=name, expected=expected, got=got)


def _words(signature: Signature) -> str:
    parts = [f"{signature.size} bytes"]
    if signature.etag is not None:
        parts.append(f"etag {signature.etag}")
    elif signature.mtime_ns is not None:
        parts.append(f"mtime_ns {signature.mtime_ns}")
    return ", ".join(parts)
