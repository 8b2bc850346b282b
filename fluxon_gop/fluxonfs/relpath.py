"""Paths inside an export: POSIX, relative, and never out of it.

Pure. A relpath is checked once, when a reader opens, before any IO.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

from fluxon_gop.errors import InvalidRequestError

MAX_BYTES = 4096
"""PATH_MAX of Linux; object stores allow less."""
_DRIVE = re.compile(r"^[A-Za-z]:")


def check_relpath(relpath: object) -> str:
    """Return ``relpath`` as it is where it names something beneath an export's root.

    Refused: what is no str, empty, absolute, a drive letter or a backslash, a NUL or another control character,
    an empty, ``.`` or ``..`` segment, a trailing slash, percent escapes that would decode to any of these (once
    or more often) or to no valid UTF-8, text that is no valid Unicode, and more than 4,096 bytes.

    Raises:
        TypeError: no str.
        InvalidRequestError: any other of these; the message names the reason and shows the relpath escaped.
    """
    if not isinstance(relpath, str):
        text = f"relpath is a {type(relpath).__name__}: want a str"
        raise TypeError(text)
    reason = _reason(relpath)
    if reason is None and "%" in relpath:
        reason = _decoded_reason(relpath)
    if reason is not None:
        text = f"relpath {relpath[:200]!a} {reason}: want a relative POSIX path inside the export"
        raise InvalidRequestError(text)
    return relpath


def _decoded_reason(path: str) -> str | None:
    """Return why a path would be refused, were its percent escapes decoded, as often as they can be."""
    while True:
        try:
            decoded = unquote_to_bytes(path).decode()
        except UnicodeDecodeError:
            return "holds percent escapes that are no valid UTF-8"
        if decoded == path:
            return None
        # Each decoding makes it shorter: this ends.
        path = decoded
        reason = _reason(path)
        if reason is not None:
            return f"{reason}, once its percent escapes are decoded"


def _reason(path: str) -> str | None:
    """Return why a path is refused, None where it is not."""
    if not path:
        return "must be non-empty"
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        return "is no valid Unicode"
    if size > MAX_BYTES:
        return f"has {size} bytes, more than {MAX_BYTES}"
    if any(ord(character) < 32 or ord(character) == 127 for character in path):
        return "holds a control character"
    if path.startswith("/"):
        return "is absolute"
    if "\\" in path:
        return "holds a backslash"
    if _DRIVE.match(path):
        return "starts with a drive letter"
    segments = path.split("/")
    if ".." in segments or "." in segments:
        return "holds a dot segment"
    if "" in segments:
        return "holds an empty segment"
    return None
