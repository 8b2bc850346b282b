"""Arrays and addresses as a data set hands them to its workers: small when pickled, shared where the OS can.

A forked worker shares all memory with its parent anyhow, as long as nobody counts references in it: so no Python
object for each video.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from multiprocessing import reduction
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

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
            return (_map_name, (name, array.dtype.str, array.offset, array.shape, order))
        spawning = multiprocessing.context.get_spawning_popen() is not None
        if spawning and array.nbytes > SHARED_BYTES:
            if self._file is None:
                # Without a name: gone with the last process that has it open.
                self._file = tempfile.TemporaryFile(dir=_memory_folder())  # noqa: SIM115
                self._file.write(np.ascontiguousarray(array).data)
                self._file.flush()
            return (_map_shared, (reduction.DupFd(self._file.fileno()), array.dtype.str, array.shape))
        return (HandedOver, (np.ascontiguousarray(array),))


def _memory_folder() -> str | None:
    """Return a folder that lies in memory, where there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108 - the file has no name there


def _map_name(name: str, dtype: str, offset: int, shape: tuple[int, ...], order: Any) -> HandedOver:
    return HandedOver(np.memmap(name, dtype, "r", offset, shape, order))


def _map_shared(descriptor: Any, dtype: str, shape: tuple[int, ...]) -> HandedOver:
    number = descriptor.detach()
    try:
        mapped = mmap.mmap(number, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(number)
    return HandedOver(np.frombuffer(mapped, dtype).reshape(shape))


class Addresses(Sequence[Any]):
    """Videos' addresses: texts as one Arrow array, anything else as it is. A pickle of texts is compressed."""

    def __init__(self, uris: Sequence[Any]) -> None:
        """Take addresses; relative paths are made absolute."""
        texts = [_text_of(uri) for uri in uris]
        known = [text for text in texts if text is not None]
        self._texts: pa.StringArray | None = (
            pa.array(known, pa.string()) if len(known) == len(texts) else None
        )
        self._objects = list(uris) if self._texts is None else []

    def __len__(self) -> int:
        """Return the number of videos."""
        return len(self._objects) if self._texts is None else len(self._texts)

    def __getitem__(self, place: Any) -> Any:
        """Return a video's address."""
        return self._objects[place] if self._texts is None else self._texts[int(place)].as_py()

    def __iter__(self) -> Iterator[Any]:
        """Yield the addresses."""
        return iter(self._objects if self._texts is None else self._texts.to_pylist())

    @property
    def are_local(self) -> bool:
        """Whether all are paths."""
        if self._texts is None:
            return all(isinstance(uri, str | Path) and "://" not in str(uri) for uri in self._objects)
        return not any("://" in text and not text.startswith("file://") for text in self._texts.to_pylist())

    def __getstate__(self) -> dict[str, Any]:
        """Return the texts as compressed UTF-8."""
        if self._texts is None:
            return {"objects": self._objects}
        texts = [text.encode() for text in self._texts.to_pylist()]
        lengths = np.fromiter(map(len, texts), np.uint32, len(texts))
        return {"texts": zlib.compress(b"".join(texts), 1), "lengths": zlib.compress(lengths.tobytes(), 1)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Build the array again."""
        self._objects, self._texts = state.get("objects", []), None
        if "texts" in state:
            lengths = np.frombuffer(zlib.decompress(state["lengths"]), np.uint32)
            edges = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).astype(np.int32)
            buffers = [None, pa.py_buffer(edges), pa.py_buffer(zlib.decompress(state["texts"]))]
            self._texts = pa.Array.from_buffers(pa.string(), len(lengths), buffers)


def _text_of(uri: object) -> str | None:
    if not isinstance(uri, str | os.PathLike):
        return None
    text = os.fspath(uri)
    if not isinstance(text, str) or not text or "\0" in text:
        return None
    return text if "://" in text else os.path.abspath(text)  # noqa: PTH100 - resolve() would follow links
