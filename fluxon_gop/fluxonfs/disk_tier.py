"""Pieces on a local disk, shared by the processes of a node: bounded in bytes, checked at every read.

A piece is a file of its own, written beside its place and renamed into it, so that a killed process leaves no
half of one; its head is a hash of key and bytes, so that a torn or altered one is known. Nothing is trusted to
stay: the folder may be emptied, filled or corrupted at any time. What the disk refuses is bypassed for a while.

Written here because the kept libraries do not fit: diskcache (last release 2023) keeps its entries in a SQLite file
that a crash or a shared disk can leave malformed, and unpickles what it reads; LMDB maps its file, where a byte
altered by another hand ends the process.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from fluxon_gop import forks
from fluxon_gop.errors import InvalidRequestError, SourcePermissionError
from fluxon_gop.fluxonfs.file_lock import FileLock
from fluxon_gop.fluxonfs.piece_key import PieceKey

MAGIC = b"fgop-piece-1\n"
HEAD_BYTES = len(MAGIC) + 32
_TOUCH_SECONDS = 60
"""A piece that is used is marked as used at most this often."""
_ABANDONED_SECONDS = 60
"""Age at which a file that is still being written belongs to a process that was killed."""
_SUFFIX, _PART = ".piece", ".part"
_KEEP = 0.9
"""Share of the bound that stays when room is made."""


class DiskTier:
    """A folder of pieces. Thread-safe, and safe beside other processes; never raises for what the disk does."""

    def __init__(
        self, folder: str | os.PathLike[str], max_bytes: int, *, retry_seconds: float = 5.0
    ) -> None:
        """Make the folder (mode 0700) where it is not there.

        Args:
            folder: on a disk of this node.
            max_bytes: of all pieces, heads included, of all processes together.
            retry_seconds: for how long a disk that failed is left alone.

        Raises:
            SourcePermissionError: others may write into the folder, or it is another user's.
        """
        self._folder = Path(os.path.abspath(folder))  # noqa: PTH100 - resolve() would follow links
        self._max_bytes = max_bytes
        self._retry_seconds = retry_seconds
        self._resting_until = 0.0
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("disk_errors", "disk_bypassed", "disk_corrupt", "disk_evicted"), 0)
        with suppress(OSError):
            self._make_folder()
        self._check_trust()
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: another thread of the parent may hold the lock for ever."""
        self._lock = threading.Lock()

    @property
    def folder(self) -> Path:
        """Where the pieces lie."""
        return self._folder

    def counts(self) -> dict[str, int]:
        """Return errors, calls that bypassed a failed disk, corrupt pieces found, pieces evicted."""
        with self._lock:
            return dict(self._counts)

    def has(self, key: PieceKey) -> bool:
        """Return whether there seems to be a piece; whether it is whole shows when it is read."""
        return self._path(key).exists()

    def get(self, key: PieceKey) -> bytes | None:
        """Return a piece, or None where it is not here, whole and unaltered."""
        if self._rests():
            return None
        path = self._path(key)
        try:
            data, used = _read(path, HEAD_BYTES + key.nbytes + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.EISDIR}:
                # A link or a folder in a piece's place is no fault of the disk.
                self._refused(path)
            else:
                self._failed()
            return None
        view = memoryview(data)
        if len(data) != HEAD_BYTES + key.nbytes or view[:HEAD_BYTES] != _head(key, view[HEAD_BYTES:]):
            self._refused(path)
            return None
        if time.time() - used > _TOUCH_SECONDS:
            with suppress(OSError):
                os.utime(path)
        return data[HEAD_BYTES:]

    def put(self, key: PieceKey, data: bytes | memoryview) -> bool:
        """Keep a piece, others going where there is no room; return whether it is kept."""
        size = HEAD_BYTES + len(data)
        if size > self._max_bytes or self._rests():
            return False
        path = self._path(key)
        try:
            if path.exists():
                return True
            try:
                self._reserve(size)
                self._write(path, key, data)
            except FileNotFoundError:
                # The folder was deleted meanwhile.
                self._make_folder(path.parent)
                self._reserve(size)
                self._write(path, key, data)
        except OSError:
            self._failed()
            return False
        return True

    def claims(self) -> FileLock | None:
        """Return what claims for this process the fetching of pieces: one fetches, the node's others wait.

        ``try_lock(key.number)`` each piece, and ``close`` when they are here. None where the disk gives no
        locks; then nobody is held back.
        """
        if self._rests():
            return None
        try:
            try:
                return FileLock(self._folder / "claims")
            except FileNotFoundError:
                self._make_folder()
                return FileLock(self._folder / "claims")
        except OSError:
            self._failed()
            return None

    # ------------------------------------------------------------- the folder

    def _make_folder(self, below: Path | None = None) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if below is not None:
            below.mkdir(mode=0o700, exist_ok=True)

    def _check_trust(self) -> None:
        try:
            status = self._folder.stat()
        except OSError:
            # A disk that is not there yet.
            return
        if not self._folder.is_dir():
            text = f"{self._folder}: is a file, want a folder for cached pieces"
            raise InvalidRequestError(text)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            text = f"{self._folder}: others may write into this folder of cached pieces; make it yours (chmod 700)"
            raise SourcePermissionError(text, source=str(self._folder))

    def _path(self, key: PieceKey) -> Path:
        name = key.digest.hex()
        return self._folder / name[:2] / f"{name[2:]}{_SUFFIX}"

    def _write(self, path: Path, key: PieceKey, data: bytes | memoryview) -> None:
        part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}{_PART}")
        descriptor = os.open(
            part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            try:
                for piece in (_head(key, data), data):
                    view = memoryview(piece)
                    while view:
                        view = view[os.write(descriptor, view) :]
            finally:
                os.close(descriptor)
            part.rename(path)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise

    # ------------------------------------------------------------- the bound

    def _reserve(self, size: int) -> None:
        """Add ``size`` to the bytes in use of all processes; where they exceed the bound, make room first."""
        with FileLock(self._folder / "usage") as usage:
            usage.lock(0)
            used = _parsed(usage.read(64))
            if used is None or used + size > self._max_bytes:
                used = self._make_room(size)
            usage.write(_usage(used + size))

    def _make_room(self, size: int) -> int:
        """Delete the pieces that were not used for longest until ``size`` fits; return the bytes left."""
        found = sorted(self._scan())
        used = sum(nbytes for _, nbytes, _ in found)
        if used + size <= self._max_bytes:
            return used
        evicted = 0
        for _, nbytes, path in found:
            if used + size <= self._max_bytes * _KEEP:
                break
            if path.suffix == _SUFFIX:
                with suppress(FileNotFoundError):
                    path.unlink()
                    evicted += 1
                used -= nbytes
        self._count("disk_evicted", evicted)
        return used

    def _scan(self) -> Iterable[tuple[float, int, Path]]:
        """Yield last use, bytes and path of all pieces; delete what a killed process left half-written."""
        now = time.time()
        for folder in self._folder.iterdir():
            if not folder.is_dir() or folder.is_symlink():
                continue
            with suppress(FileNotFoundError), os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        written = entry.name.endswith(_SUFFIX)
                        if not written and not entry.name.endswith(_PART):
                            continue
                        if not written and now - status.st_mtime > _ABANDONED_SECONDS:
                            Path(entry.path).unlink()
                            continue
                        yield status.st_mtime, status.st_size, Path(entry.path)

    # ------------------------------------------------------------- a failed disk

    def _rests(self) -> bool:
        if time.monotonic() >= self._resting_until:
            return False
        self._count("disk_bypassed")
        return True

    def _refused(self, path: Path) -> None:
        """Count what stands in a piece's place and is none, and delete it."""
        self._count("disk_corrupt")
        with suppress(OSError):
            path.unlink()

    def _failed(self) -> None:
        self._count("disk_errors")
        self._resting_until = time.monotonic() + self._retry_seconds

    def _count(self, name: str, n: int = 1) -> None:
        with self._lock:
            self._counts[name] += n

    def __repr__(self) -> str:
        """Show folder and bound."""
        return f"DiskTier({str(self._folder)!r}, {self._max_bytes} bytes)"


def _head(key: PieceKey, data: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(key.digest)
    digest.update(data)
    return MAGIC + digest.digest()


def _read(path: Path, most: int) -> tuple[bytes, float]:
    """Return up to ``most`` bytes of a file, so that one of another size shows, and its last use."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        data = os.read(descriptor, most)
        while data and len(data) < most:
            more = os.read(descriptor, most - len(data))
            if not more:
                break
            data += more
        return data, os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


def _usage(used: int) -> bytes:
    """Return the text of the usage file; its check tells it from what another hand wrote."""
    return f"{used} {hashlib.sha256(str(used).encode()).hexdigest()[:16]}".encode().ljust(64)


def _parsed(text: bytes) -> int | None:
    number, _, _ = text.partition(b" ")
    if not number.isdigit() or len(number) > 20 or text != _usage(int(number)):
        return None
    return int(number)
