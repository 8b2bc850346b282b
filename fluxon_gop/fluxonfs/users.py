"""Who is who: users and their passwords, kept as scrypt hashes, and re-read where their file changes."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
import threading
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fluxon_gop import forks
from fluxon_gop.errors import InvalidRequestError

Identity = tuple[str, str]
"""(user, password) of a request."""

_N, _R, _P = 1 << 14, 8, 1
"""16 MiB and some 30 ms a try. Source: RFC 7914, section 2; OWASP's least for scrypt with p=1 is more, for
passwords that people choose: prefer random ones."""
_MAX_MEMORY = 256 * 1024 * 1024
_MAX_PARALLEL = 16


def hash_password(password: str) -> str:
    """Return ``scrypt$n$r$p$salt$hash`` of a password, for a file of users."""
    salt = secrets.token_bytes(16)
    digest = hashlib.scrypt(password.encode(), salt=salt, n=_N, r=_R, p=_P, maxmem=_MAX_MEMORY)
    parts = (base64.b64encode(part).decode() for part in (salt, digest))
    return f"scrypt${_N}${_R}${_P}${'$'.join(parts)}"


def check_identity(identity: object) -> Identity | None:
    """Return a ``(user, password)`` tuple or None as it is.

    Raises:
        TypeError: anything else; the message shows no value.
    """
    if identity is None:
        return None
    if not isinstance(identity, tuple) or len(identity) != 2:
        text = "request_identity must be a (user, password) tuple or None"
        raise TypeError(text)
    user, password = identity
    if not isinstance(user, str) or not isinstance(password, str):
        text = "request_identity must hold two str: user and password"
        raise TypeError(text)
    return (user, password)


class Users:
    """Users by name, each with the scrypt hash of a password. Thread-safe; a password is hashed once a process."""

    def __init__(self, users: Mapping[str, str] | str | os.PathLike[str]) -> None:
        """Take hashes by name, or a TOML file of ``name = "scrypt$..."`` lines that is re-read when it changes."""
        self._path = None if isinstance(users, Mapping) else Path(users)
        self._version: tuple[int, ...] | None = None
        self._hashes: dict[str, tuple[str, ...]] = {}
        self._known: dict[tuple[str, tuple[str, ...]], bytes] = {}
        self._secret = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._hashing = threading.Lock()
        if isinstance(users, Mapping):
            self._hashes = _parsed(users, "users")
        self._read_again()
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: another thread of the parent may hold the locks for ever."""
        self._lock = threading.Lock()
        self._hashing = threading.Lock()

    def knows(self, identity: Identity | None) -> bool:
        """Return whether this user exists and this is the password."""
        if identity is None:
            return False
        user, password = identity
        self._read_again()
        entry = self._hashes.get(user)
        if entry is None:
            return False
        digest = hmac.digest(self._secret, password.encode("utf-8", "surrogatepass"), "sha256")
        with self._lock:
            known = self._known.get((user, entry))
        if known is not None and hmac.compare_digest(known, digest):
            return True
        # One at a time: many who come with the same password wait for the first one's answer.
        with self._hashing:
            known = self._known.get((user, entry))
            if known is not None and hmac.compare_digest(known, digest):
                return True
            if not _matches(password, entry):
                return False
            with self._lock:
                self._known[user, entry] = digest
        return True

    def _read_again(self) -> None:
        """Read the file where it is another version than the one at hand."""
        if self._path is None:
            return
        try:
            status = self._path.stat()
            version = (status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size)
            if version == self._version:
                return
            users = tomllib.loads(self._path.read_text())
        except (OSError, ValueError, RecursionError) as error:
            text = f"{self._path}: cannot be read as a file of users: {type(error).__name__}"
            raise InvalidRequestError(text) from None
        hashes = _parsed(users, str(self._path))
        with self._lock:
            self._hashes, self._version, self._known = hashes, version, {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the file's name, or the hashes."""
        given: Any = self._path or {
            user: "$".join(("scrypt", *entry)) for user, entry in self._hashes.items()
        }
        return (Users, (given,))

    def __repr__(self) -> str:
        """Show how many, and from where."""
        return f"Users({len(self._hashes)}{'' if self._path is None else f' from {str(self._path)!r}'})"


def _parsed(users: Mapping[str, Any], where: str) -> dict[str, tuple[str, ...]]:
    parsed = {}
    for user, text in users.items():
        kind, *rest = text.split("$") if isinstance(text, str) else ("",)
        try:
            n, r, p = (int(number) for number in rest[:3])
            salt, digest = (base64.b64decode(part, validate=True) for part in rest[3:])
            fits = kind == "scrypt" and n > 1 and not n & (n - 1) and min(r, p, len(salt), len(digest)) > 0
            fits = fits and 128 * n * r <= _MAX_MEMORY // 2 and p <= _MAX_PARALLEL
        except ValueError:
            fits = False
        if not fits:
            message = (
                f"{where}: the entry of user {user!r} is no scrypt hash; make one with hash_password()"
            )
            raise InvalidRequestError(message)
        parsed[user] = tuple(rest)
    return parsed


def _matches(password: str, entry: tuple[str, ...]) -> bool:
    n, r, p = (int(number) for number in entry[:3])
    salt, digest = (base64.b64decode(part) for part in entry[3:])
    got = hashlib.scrypt(
        password.encode("utf-8", "surrogatepass"),
        salt=salt,
        n=n,
        r=r,
        p=p,
        maxmem=_MAX_MEMORY,
        dklen=len(digest),
    )
    return hmac.compare_digest(got, digest)
