"""What client and agent say to each other, over Arrow Flight: requests as JSON, bytes as record batches.

Pure. A read is one ``DoGet``: its ticket names ranges of many files, each file with the version that is meant; the answer
has a row for each range, with its bytes or with an error of its own. ``stat`` and ``list`` are actions. Nothing that comes
from the other side is trusted: a request is checked whole before it is worked on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from fluxon_gop import errors
from fluxon_gop.errors import FluxonGopError, InvalidRequestError, SourceError, one_line
from fluxon_gop.fluxonfs.relpath import check_relpath
from fluxon_gop.model import Signature

SCHEMA = pa.schema(
    [
        pa.field("read", pa.int32(), nullable=False),
        pa.field("data", pa.binary()),
        pa.field("error", pa.string()),
    ]
)
"""Of an answer: the read's place in the ticket, and its bytes or its error."""
MAX_TICKET_BYTES = 16 * 1024 * 1024
_MAX_OFFSET = 1 << 62


class AgentRead(NamedTuple):
    """Bytes ``[start, stop)`` of one version of a file of an export."""

    export_name: str
    relpath: str
    signature: Signature
    start: int
    stop: int


@dataclass(frozen=True)
class AgentLimits:
    """What an agent does for one identity, beyond which it refuses."""

    max_calls: int = 256
    """At once: of all who come with one identity, or with none."""
    max_ranges: int = 65_536
    """Of one call."""
    max_range_bytes: int = 64 * 1024 * 1024
    """Of one range."""
    max_call_bytes: int = 1024 * 1024 * 1024
    """Of one call."""
    max_bytes: int = 16 * 1024 * 1024 * 1024
    """Of all calls at once."""
    call_seconds: float = 120.0
    """For how long a call may last."""

    def __post_init__(self) -> None:
        """Check each number."""
        names = (
            "max_calls",
            "max_ranges",
            "max_range_bytes",
            "max_call_bytes",
            "max_bytes",
            "call_seconds",
        )
        for name in names:
            value = getattr(self, name)
            kinds = (int, float) if name == "call_seconds" else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds):
                text = f"{name} is a {type(value).__name__}: want a number"
                raise TypeError(text)
            if not 0 < value < 1 << 50:
                text = f"{name} is {value}: want more than 0"
                raise InvalidRequestError(text)


def ticket_of(reads: Sequence[AgentRead]) -> bytes:
    """Return the ticket of these reads: each file once, its version and ranges in it."""
    files: dict[tuple[Any, ...], list[list[int]]] = {}
    for place, read in enumerate(reads):
        key = (read.export_name, read.relpath, *_words(read.signature))
        files.setdefault(key, []).append([place, read.start, read.stop])
    return json.dumps({"files": [[*key, ranges] for key, ranges in files.items()]}).encode()


def reads_in(ticket: bytes, limits: AgentLimits) -> dict[int, AgentRead]:
    """Return the reads of a ticket by their place.

    Raises:
        InvalidRequestError: it is malformed, names a path that leads out, or asks for too much.
    """
    files = _object(ticket).get("files")
    found: dict[int, AgentRead] = {}
    total = 0
    for file in files if isinstance(files, list) else [None]:
        if not isinstance(file, list) or len(file) != 6 or not isinstance(file[5], list):
            raise _malformed()
        export_name, relpath, *words, ranges = file
        _check_name(export_name)
        _check_relpath(relpath)
        signature = signature_of(words)
        for one in ranges:
            if not isinstance(one, list) or len(one) != 3 or not all(type(n) is int for n in one):
                raise _malformed()
            place, start, stop = one
            if not 0 <= start < stop <= signature.size or not 0 <= place < 1 << 31 or place in found:
                text = "a range lies outside its file, is empty or backwards, or is there twice"
                raise InvalidRequestError(text)
            if stop - start > limits.max_range_bytes:
                text = f"a range of {stop - start} bytes: this agent gives up to {limits.max_range_bytes} at once"
                raise InvalidRequestError(text)
            total += stop - start
            found[place] = AgentRead(export_name, relpath, signature, start, stop)
            if len(found) > limits.max_ranges or total > limits.max_call_bytes:
                text = (
                    f"too much for one call: this agent gives up to {limits.max_ranges} ranges and "
                    f"{limits.max_call_bytes} bytes"
                )
                raise InvalidRequestError(text)
    return found


def body_of(**fields: Any) -> bytes:
    """Return an action's body."""
    return json.dumps(fields).encode()


def names_in(body: bytes) -> tuple[str, str]:
    """Return export name and relpath of a ``stat``.

    Raises:
        InvalidRequestError: it is malformed, or the path leads out.
    """
    given = _object(body)
    export_name: Any = given.get("export_name")
    relpath: Any = given.get("relpath")
    _check_name(export_name)
    _check_relpath(relpath)
    return export_name, relpath


def listing_in(body: bytes) -> tuple[str, str]:
    """Return export name and prefix of a ``list``; "" for the whole export.

    Raises:
        InvalidRequestError: it is malformed, or the path leads out.
    """
    given = _object(body)
    export_name: Any = given.get("export_name")
    prefix: Any = given.get("prefix", "")
    _check_name(export_name)
    if prefix != "":
        _check_relpath(prefix)
    return export_name, prefix


def signature_of(words: Any) -> Signature:
    """Return a version out of ``[size, etag, mtime_ns]``.

    Raises:
        InvalidRequestError: it is none.
    """
    if not isinstance(words, list) or len(words) != 3:
        raise _malformed()
    size, etag, mtime_ns = words
    fits = type(size) is int and 0 <= size < _MAX_OFFSET
    fits = fits and (etag is None or (isinstance(etag, str) and len(etag) < 4096))
    if not fits or not (mtime_ns is None or (type(mtime_ns) is int and abs(mtime_ns) < _MAX_OFFSET)):
        raise _malformed()
    return Signature(size, etag, mtime_ns)


def signature_words(signature: Signature) -> list[Any]:
    """Return a version as JSON has it."""
    return list(_words(signature))


def error_words(error: BaseException) -> str:
    """Return an error as it travels: its class and its message, one line; of foreign ones the class only."""
    if not isinstance(error, FluxonGopError):
        return json.dumps(["SourceError", f"the agent failed ({type(error).__name__})"])
    return json.dumps([type(error).__name__, one_line(error)])


def error_of(words: str, source: str) -> FluxonGopError:
    """Return what ``error_words`` made; a class that no read raises becomes a SourceError."""
    try:
        name, message = json.loads(words)
        kind = getattr(errors, name)
        fits = issubclass(kind, SourceError | InvalidRequestError)
    except (ValueError, TypeError, AttributeError):
        return SourceError(f"{source}: the agent gave an answer that is none", source=source)
    return (kind if fits else SourceError)(str(message)[:2000], source=source)


def _words(signature: Signature) -> tuple[int, str | None, int | None]:
    return signature.size, signature.etag, signature.mtime_ns


def _object(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_TICKET_BYTES:
        text = f"a request of {len(data)} bytes: want up to {MAX_TICKET_BYTES}"
        raise InvalidRequestError(text)
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        raise _malformed() from None
    if not isinstance(given, dict):
        raise _malformed()
    return given


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not 0 < len(name) < 1024:
        raise _malformed()


def _check_relpath(relpath: Any) -> None:
    try:
        check_relpath(relpath)
    except TypeError:
        raise _malformed() from None


def _malformed() -> InvalidRequestError:
    return InvalidRequestError("the request is malformed")
