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
import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

from fluxon_gop import forks
from fluxon_gop.errors import InvalidRequestError, SourcePermissionError
from fluxon_gop.fluxonfs.file_lock import FileLock
from fluxon_gop.fluxonfs.piece_folder import PieceFolder
from fluxon_gop.fluxonfs.piece_key import PieceKey

_log = logging.getLogger(__name__)

MAGIC = b"fgop-piece-1\n"
HEAD_BYTES = len(MAGIC) + 32
_TOUCH_SECONDS = 1.0
"""A piece that is used is marked as used at most this often."""
_ABANDONED_SECONDS = 60
"""Age at which a file that is still being written belongs to a process that was killed."""
_SUFFIX, _PART = ".piece", ".part"
_KEEP = 0.9
"""Share of the bound that stays when room is made."""
_USAGE_SECONDS = 1.0
"""For how long the book of bytes in use is waited for: its holder may have been stopped."""


class DiskTier:
    """A folder of pieces. Thread-safe, and safe beside other processes; never raises for what the disk does."""

    def __init__(
        self, folder: str | os.PathLike[str], max_bytes: int, *, retry_seconds: float = 5.0
    ) -> None:
        """Make the folder (mode 0700) where it is not there.

        Args:
            folder: on a disk of this node.
            max_bytes: of all pieces, heads included, of all processes together.
            retry_seconds: for how long a disk that failed is left alone, for reads and for writes apart.

        Raises:
            SourcePermissionError: others may write into the folder, or it is another user's.
        """
        self._folder = PieceFolder(folder)
        self._max_bytes = max_bytes
        self._retry_seconds = retry_seconds
        self._resting_until = {"get": 0.0, "put": 0.0}
        self._claims: FileLock | None = None
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("disk_errors", "disk_bypassed", "disk_corrupt", "disk_evicted"), 0)
        try:
            self._folder.open()
        except (NotADirectoryError, FileExistsError):
            text = f"{self._folder.path}: a file is in the way, want a folder for cached pieces"
            raise InvalidRequestError(text) from None
        except SourcePermissionError:
            raise
        except OSError as error:
            # A disk that is not there yet.
            self._failed("put", error)
        forks.watch(self)

    def after_fork(self) -> None:
        """In a forked child: another thread of the parent may hold the lock for ever; the claims are the parent's."""
        self._lock = threading.Lock()
        self._claims = None

    def counts(self) -> dict[str, int]:
        """Return errors, calls that bypassed a failed disk, corrupt pieces found, pieces evicted."""
        with self._lock:
            return dict(self._counts)

    def has(self, key: PieceKey) -> bool:
        """Return whether there seems to be a piece; whether it is whole shows when it is read."""
        try:
            os.stat(_place(key), dir_fd=self._folder.open(), follow_symlinks=False)
        except OSError:
            return False
        return True

    def get(self, key: PieceKey) -> bytes | None:
        """Return a piece, or None where it is not here, whole and unaltered."""
        if self._rests("get"):
            return None
        place = _place(key)
        try:
            folder = self._folder.open()
        except OSError as error:
            self._failed("get", error)
            return None
        try:
            data, used = _read(place, folder, HEAD_BYTES + key.nbytes + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.EISDIR}:
                # A link or a folder in a piece's place is no fault of the disk.
                self._refused(place, folder)
            else:
                self._failed("get", error)
            return None
        view = memoryview(data)
        if len(data) != HEAD_BYTES + key.nbytes or view[:HEAD_BYTES] != _head(key, view[HEAD_BYTES:]):
            self._refused(place, folder)
            return None
        if abs(time.time() - used) > _TOUCH_SECONDS:
            with suppress(OSError):
                os.utime(place, dir_fd=folder)
        return data[HEAD_BYTES:]

    def put(self, key: PieceKey, data: bytes | memoryview) -> bool:
        """Keep a piece, others going where there is no room; return whether it is kept."""
        if HEAD_BYTES + len(data) > self._max_bytes or self._rests("put"):
            return False
        try:
            try:
                return self._put(key, data)
            except FileNotFoundError:
                # The folder was deleted meanwhile.
                self._folder.reopen()
                return self._put(key, data)
        except OSError as error:
            self._failed("put", error)
            return False

    def claim(self, key: PieceKey) -> bool:
        """Claim the fetching of a piece for this process: one fetches, the node's others wait.

        True also where the disk gives no locks: then nobody is held back.
        """
        if self._rests("put"):
            return True
        try:
            with self._lock:
                if self._claims is None or not self._claims.is_named:
                    # The old one, should there be one, keeps what it holds until that is let go of.
                    try:
                        self._claims = FileLock("claims", folder=self._folder.open())
                    except FileNotFoundError:
                        self._claims = FileLock("claims", folder=self._folder.reopen())
                return self._claims.try_lock(key.number)
        except OSError as error:
            self._failed("put", error)
            return True

    def unclaim(self, key: PieceKey) -> None:
        """Let others fetch a piece."""
        with self._lock:
            if self._claims is not None:
                self._claims.unlock(key.number)

    # ------------------------------------------------------------- writing

    def _put(self, key: PieceKey, data: bytes | memoryview) -> bool:
        """Write a piece under another name, its bytes reserved, and give it its name."""
        folder, place = self._folder.open(), _place(key)
        with suppress(FileExistsError):
            os.mkdir(place[:2], 0o700, dir_fd=folder)
        if stat.S_ISREG(_mode(place, folder)):
            return True
        part = f"{place}.{os.getpid()}.{threading.get_ident()}{_PART}"
        size = HEAD_BYTES + len(data)
        descriptor = -1
        try:
            with FileLock("usage", folder=folder) as usage:
                if not usage.lock(0, _USAGE_SECONDS):
                    return False
                used = _parsed(usage.read(64))
                if used is None or used + size > self._max_bytes:
                    used = self._make_room(size, folder)
                if used + size > self._max_bytes:
                    usage.write(_usage(used))
                    return False
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
                descriptor = os.open(part, flags, 0o600, dir_fd=folder)
                # Whoever looks through the folder meanwhile sees the whole of it.
                os.ftruncate(descriptor, size)
                usage.write(_usage(used + size))
            for piece in (_head(key, data), data):
                view = memoryview(piece)
                while view:
                    view = view[os.write(descriptor, view) :]
            with FileLock("usage", folder=folder) as usage:
                # Nobody counts while a name changes.
                usage.lock(0, _USAGE_SECONDS)
                os.rename(part, place, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(part, dir_fd=folder)
            raise
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return True

    def _make_room(self, size: int, folder: int) -> int:
        """Delete the pieces that were not used for longest until ``size`` fits; return the bytes in use."""
        found = sorted(self._scan(folder))
        used = sum(nbytes for _, nbytes, _ in found)
        if used + size <= self._max_bytes:
            return used
        evicted = 0
        for _, nbytes, place in found:
            if used + size <= self._max_bytes * _KEEP:
                break
            if place.endswith(_SUFFIX):
                with suppress(FileNotFoundError):
                    os.unlink(place, dir_fd=folder)
                    evicted += 1
                used -= nbytes
        self._count("disk_evicted", evicted)
        return used

    @staticmethod
    def _scan(folder: int) -> Iterator[tuple[float, int, str]]:
        """Yield last use, bytes and place of all pieces; delete what a killed process left half-written."""
        now = time.time()
        for name in os.listdir(folder):
            if len(name) != 2:
                continue
            try:
                below = os.open(
                    name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder
                )
            except OSError:
                continue
            try:
                for file in os.listdir(below):
                    if not file.endswith((_SUFFIX, _PART)):
                        continue
                    with suppress(FileNotFoundError):
                        status = os.stat(file, dir_fd=below, follow_symlinks=False)
                        if not stat.S_ISREG(status.st_mode):
                            continue
                        if file.endswith(_PART) and now - status.st_mtime > _ABANDONED_SECONDS:
                            os.unlink(file, dir_fd=below)
                            continue
                        yield status.st_mtime, status.st_size, f"{name}/{file}"
            finally:
                os.close(below)

    # ------------------------------------------------------------- what goes wrong

    def _rests(self, what: str) -> bool:
        if time.monotonic() >= self._resting_until[what]:
            return False
        self._count("disk_bypassed")
        return True

    def _refused(self, place: str, folder: int) -> None:
        """Count what stands in a piece's place and is none, and delete it."""
        self._count("disk_corrupt")
        try:
            os.unlink(place, dir_fd=folder)
        except OSError:
            # A folder; ours is the only hand that may have made it.
            shutil.rmtree(place, ignore_errors=True, dir_fd=folder)

    def _failed(self, what: str, error: OSError) -> None:
        self._count("disk_errors")
        _log.warning(
            "%s: the disk tier is bypassed for %g s: %s", self._folder.path, self._retry_seconds, error
        )
        self._resting_until[what] = time.monotonic() + self._retry_seconds

    def _count(self, name: str, n: int = 1) -> None:
        with self._lock:
            self._counts[name] += n

    def __repr__(self) -> str:
        """Show folder and bound."""
        return f"DiskTier({self._folder.path!r}, {self._max_bytes} bytes)"


def _place(key: PieceKey) -> str:
    name = key.digest.hex()
    return f"{name[:2]}/{name[2:]}{_SUFFIX}"


def _mode(place: str, folder: int) -> int:
    try:
        return os.stat(place, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return 0


def _head(key: PieceKey, data: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(key.digest)
    digest.update(data)
    return MAGIC + digest.digest()


def _read(place: str, folder: int, most: int) -> tuple[bytes, float]:
    """Return up to ``most`` bytes of a file, so that one of another size shows, and its last use."""
    descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
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
