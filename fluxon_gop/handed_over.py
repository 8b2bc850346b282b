"""Arrays and addresses as a data set hands them to its workers: small when pickled, shared where the OS can.

A forked worker shares all memory with its parent anyhow, as long as nobody counts references in it: so no Python
object for each video.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import tempfile
import weakref
import zlib
from collections.abc import Iterator, Sequence
from multiprocessing import reduction
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fluxon_gop.errors import SourceChangedError

Array = npt.NDArray[Any]

SHARED_BYTES = 1 << 20
"""Larger arrays are shared with workers that are started by spawn or forkserver; smaller ones are copied."""


class HandedOver:
    """An array that is pickled as what it is mapped from, or as shared memory for a process being started.

    An array mapped from a file (``numpy.memmap``, read only) travels as the file's name, so that it must be there for
    the worker too.
    """

    def __init__(self, array: Array) -> None:
        """Take the array; no copy."""
        self.array = array
        self._file: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the file's name, a descriptor, or the array."""
        array, base = self.array, cast("Any", self.array.base)
        if isinstance(array, np.memmap) and isinstance(base, mmap.mmap) and array.mode == "r":
            order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
            name = os.path.abspath(str(array.filename))  # noqa: PTH100 - resolve() would follow links
            return (_map_name, (name, _version(name), array.dtype.str, array.offset, array.shape, order))
        spawning = multiprocessing.context.get_spawning_popen() is not None
        if spawning and array.nbytes > SHARED_BYTES:
            if self._file is None:
                self._file = _file_of(np.ascontiguousarray(array))
                weakref.finalize(self, self._file.close)
            return (_map_shared, (reduction.DupFd(self._file.fileno()), array.dtype.str, array.shape))
        return (HandedOver, (np.ascontiguousarray(array),))


def _file_of(array: Array) -> Any:
    """Return an open file of an array's bytes, in memory where there is room: gone with the last process that has it."""
    for folder in ("/dev/shm", None):  # noqa: S108 - the file has no name there
        if folder is not None and not os.access(folder, os.W_OK):
            continue
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        try:
            file.write(array.data)
            file.flush()
        except OSError:
            # Containers often have little of it.
            file.close()
            if folder is None:
                raise
        else:
            return file
    raise AssertionError


def _version(name: str) -> tuple[int, int]:
    found = Path(name).stat()
    return found.st_size, found.st_mtime_ns


def _map_name(
    name: str, version: tuple[int, int], dtype: str, offset: int, shape: tuple[int, ...], order: Any
) -> HandedOver:
    now = _version(name)
    if now != version:
        text = f"{name}: size and time are {now}, they were {version}: the file that an array is mapped from has changed"
        raise SourceChangedError(text, source=name, expected=version, got=now)
    return HandedOver(np.memmap(name, dtype, "r", offset, shape, order))


def _map_shared(descriptor: Any, dtype: str, shape: tuple[int, ...]) -> HandedOver:
    number = descriptor.detach()
    try:
        mapped = mmap.mmap(number, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(number)
    return HandedOver(np.frombuffer(mapped, dtype).reshape(shape))


class Texts(Sequence[str]):
    """Texts as one Arrow array; a pickle is compressed."""

    def __init__(self, texts: Sequence[str]) -> None:
        """Take the texts."""
        self._array: pa.StringArray = pa.array(texts, pa.string())

    def __len__(self) -> int:
        """Return the number of texts."""
        return len(self._array)

    def __getitem__(self, place: Any) -> Any:
        """Return one text."""
        return self._array[int(place)].as_py()

    def __iter__(self) -> Iterator[str]:
        """Yield the texts."""
        return iter(self._array.to_pylist())

    def __getstate__(self) -> tuple[bytes, bytes]:
        """Return the texts as compressed UTF-8, and their lengths."""
        texts = [text.encode() for text in self]
        lengths = np.fromiter(map(len, texts), np.uint32, len(texts))
        return zlib.compress(b"".join(texts), 1), zlib.compress(lengths.tobytes(), 1)

    def __setstate__(self, state: tuple[bytes, bytes]) -> None:
        """Build the array again."""
        lengths = np.frombuffer(zlib.decompress(state[1]), np.uint32)
        edges = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).astype(np.int32)
        buffers = [None, pa.py_buffer(edges), pa.py_buffer(zlib.decompress(state[0]))]
        self._array = pa.Array.from_buffers(pa.string(), len(lengths), buffers)


class Addresses(Sequence[Any]):
    """Videos' addresses: :class:`Texts` where all are, relative paths made absolute; else a list."""

    def __init__(self, uris: Sequence[Any]) -> None:
        """Take addresses."""
        named = [_text_of(uri) for uri in uris]
        self._held: Texts | list[Any] = (
            Texts([name for name in named if name is not None])
            if None not in named
            else [uri if name is None else name for uri, name in zip(uris, named, strict=True)]
        )

    def __len__(self) -> int:
        """Return the number of videos."""
        return len(self._held)

    def __getitem__(self, place: Any) -> Any:
        """Return a video's address."""
        return self._held[int(place)]

    def __iter__(self) -> Iterator[Any]:
        """Yield the addresses."""
        return iter(self._held)

    @property
    def survive_a_fork(self) -> bool:
        """Whether all can be read in a forked process whose parent has read them: paths, and sources that say so."""
        return all(
            ("://" not in uri or uri.startswith("file://"))
            if isinstance(uri, str)
            else getattr(uri, "survives_a_fork", False)
            for uri in self._held
        )


def _text_of(uri: object) -> str | None:
    if not isinstance(uri, str | os.PathLike):
        return None
    text = os.fspath(uri)
    if not isinstance(text, str) or not text or "\0" in text:
        return None
    try:
        text.encode()
    except UnicodeEncodeError:
        # A file name that is no UTF-8.
        return None
    return text if "://" in text else os.path.abspath(text)  # noqa: PTH100 - resolve() would follow links
