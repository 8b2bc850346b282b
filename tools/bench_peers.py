"""The readers that the benchmarks compare, each as a small class: open a video, ask for frames by number.

A peer whose package is missing is left out. Pictures are uint8 (n, H, W, 3) numpy arrays for all.
"""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from fractions import Fraction
from typing import Any, ClassVar, Protocol

import av
import numpy as np
import numpy.typing as npt
import obstore
from obstore.store import HTTPStore

import fluxon_gop as fg

Pictures = npt.NDArray[np.uint8]
Size = tuple[int, int] | None


class Video(Protocol):
    """An opened video of some peer."""

    def frames(self, numbers: list[int]) -> Pictures:
        """Return these frames, in this order."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class Peer(Protocol):
    """A reader under test."""

    name: str

    def prepare(self, address: str) -> None:
        """Make what is kept beside a video (an index row, frame mappings); its cost is reported apart."""
        ...

    def open(self, address: str, *, threads: int = 1, size: Size = None) -> Video:
        """Open a video."""
        ...


class Ours:
    """fluxon_gop with the index row in memory."""

    name = "fluxon_gop"

    def __init__(self) -> None:
        """Hold no row yet."""
        self.rows: dict[str, fg.VideoIndex] = {}

    def prepare(self, address: str) -> None:
        """Build the row."""
        if address not in self.rows:
            self.rows[address] = fg.build_index(address)

    def open(self, address: str, *, threads: int = 1, size: Size = None) -> Video:
        """Open with the row."""
        height, width = size or (None, None)
        return _OurVideo(
            fg.VideoReader.open(
                address, index=self.rows[address], num_threads=threads, height=height, width=width
            )
        )


class OursWithoutRow:
    """fluxon_gop without a row: the index is built at every opening, as a first read of an unknown file."""

    name = "fluxon_gop, no row"

    def prepare(self, address: str) -> None:
        """Nothing is kept."""

    def open(self, address: str, *, threads: int = 1, size: Size = None) -> Video:
        """Open without a row."""
        height, width = size or (None, None)
        return _OurVideo(fg.VideoReader.open(address, num_threads=threads, height=height, width=width))


class _OurVideo:
    def __init__(self, reader: fg.VideoReader) -> None:
        self.reader = reader

    def frames(self, numbers: list[int]) -> Pictures:
        return self.reader.read_frames_numpy(numbers)

    def close(self) -> None:
        self.reader.close()


class TorchCodec:
    """torchcodec's VideoDecoder on a local file."""

    def __init__(self, mode: str) -> None:
        """``mode``: exact, approximate, or mappings."""
        self.name = f"torchcodec {mode}"
        self._mode = mode
        self._mappings: dict[str, str] = {}

    def prepare(self, address: str) -> None:
        """Make the frame mappings."""
        if self._mode == "mappings" and address not in self._mappings:
            self._mappings[address] = frame_mappings(address)

    def open(self, address: Any, *, threads: int = 1, size: Size = None) -> Video:
        """Open a path or a file-like object."""
        from torchcodec.decoders import VideoDecoder
        from torchcodec.transforms import Resize

        options: dict[str, Any] = {"seek_mode": self._mode}
        if self._mode == "mappings":
            options = {"custom_frame_mappings": self._mappings[address]}
        if size is not None:
            options["transforms"] = [Resize(size)]
        return _TorchVideo(
            VideoDecoder(address, dimension_order="NHWC", num_ffmpeg_threads=threads, **options)
        )


class _TorchVideo:
    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    def frames(self, numbers: list[int]) -> Pictures:
        return np.asarray(self._decoder.get_frames_at(numbers).data.numpy())

    def close(self) -> None:
        del self._decoder


def frame_mappings(path: str) -> str:
    """Return the JSON that torchcodec takes, from the container's packets."""
    frames = []
    with av.open(path) as container:
        for packet in container.demux(container.streams.video[0]):
            if packet.pts is not None and not packet.is_discard:
                key = int(packet.is_keyframe)
                frames.append({"pts": packet.pts, "duration": packet.duration or 1, "key_frame": key})
    frames.sort(key=lambda frame: frame["pts"])
    return json.dumps({"frames": frames})


class PlainPyAV:
    """PyAV as its documentation shows: seek to the time, decode up to it."""

    name = "PyAV"

    def prepare(self, address: str) -> None:
        """Nothing is kept."""

    def open(self, address: str, *, threads: int = 1, size: Size = None) -> Video:
        """Open a path or address."""
        return _PlainVideo(address, threads, size)


class _PlainVideo:
    def __init__(self, address: str, threads: int, size: Size) -> None:
        self._container = av.open(address)
        self._stream: Any = self._container.streams.video[0]
        self._stream.thread_type = "FRAME" if threads > 1 else "NONE"
        self._stream.codec_context.thread_count = threads
        self._size = size
        rate: Any = self._stream.average_rate
        base: Any = self._stream.time_base
        self._ticks = 1 / (Fraction(rate) * Fraction(base))
        self._start = self._stream.start_time or 0

    def frames(self, numbers: list[int]) -> Pictures:
        height, width = self._size or (None, None)
        pictures: dict[int, Any] = {}
        decoded: Any = iter(())
        for number in sorted(set(numbers)):
            target = self._start + round(number * self._ticks)
            if pictures and number == max(pictures) + 1:
                frame = next(decoded)
            else:
                self._container.seek(target, stream=self._stream)
                decoded = self._container.decode(self._stream)
                frame = next(decoded)
            while frame.pts < target:
                frame = next(decoded)
            pictures[number] = frame.reformat(
                width, height, format="rgb24", interpolation="BILINEAR"
            ).to_ndarray()
        return np.stack([pictures[number] for number in numbers])

    def close(self) -> None:
        self._container.close()


class Decord:
    """decord's VideoReader."""

    name = "decord"

    def prepare(self, address: str) -> None:
        """Nothing is kept."""

    def open(self, address: str, *, threads: int = 1, size: Size = None) -> Video:
        """Open a path."""
        from decord import VideoReader, cpu

        height, width = size or (-1, -1)
        return _DecordVideo(
            VideoReader(address, ctx=cpu(0), num_threads=threads, height=height, width=width)
        )


class _DecordVideo:
    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def frames(self, numbers: list[int]) -> Pictures:
        return np.asarray(self._reader.get_batch(numbers).asnumpy())

    def close(self) -> None:
        del self._reader


class BufferedRanges(io.RawIOBase):
    """A remote file as torchcodec users read one: whole blocks by ranged reads, each block once."""

    _stores: ClassVar[dict[str, HTTPStore]] = {}

    def __init__(self, url: str, block: int) -> None:
        """Open by one HEAD; ``block`` bytes a read."""
        super().__init__()
        base, self._path = url.rsplit("/", 1)
        options: Any = {"allow_http": True, "timeout": timedelta(seconds=30)}
        self._store = self._stores.setdefault(base, HTTPStore.from_url(base, client_options=options))
        self._size = obstore.head(self._store, self._path)["size"]
        self._block = block
        self._blocks: dict[int, memoryview] = {}
        self._at = 0
        self.reads, self.nbytes = 1, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move and return the new place."""
        self._at = (0, self._at, self._size)[whence] + offset
        return self._at

    def tell(self) -> int:
        """Return the place of the next read."""
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Return up to ``size`` bytes from one block."""
        number, skip = divmod(self._at, self._block)
        if self._at >= self._size:
            return b""
        if number not in self._blocks:
            start = number * self._block
            data = obstore.get_range(
                self._store, self._path, start=start, end=min(start + self._block, self._size)
            )
            self._blocks[number] = memoryview(data)
            self.reads, self.nbytes = self.reads + 1, self.nbytes + len(self._blocks[number])
        piece = self._blocks[number][skip:]
        piece = piece if size < 0 else piece[:size]
        self._at += len(piece)
        return bytes(piece)


class ManyFiles(Protocol):
    """A peer that reads one batch over many remote files."""

    name: str

    def read(self, wanted: Mapping[str, list[int]]) -> list[Pictures]:
        """Return the frames of each address, cold."""
        ...


class OursMany:
    """fluxon_gop's pool: one plan, one wave."""

    name = "fluxon_gop"

    def __init__(self, table: fg.IndexTable) -> None:
        """Take the rows."""
        self.table = table
        self.stats = fg.ReadStats()

    def read(self, wanted: Mapping[str, list[int]]) -> list[Pictures]:
        """Read by a new pool, so that readers are cold."""
        with fg.VideoReaderPool(index=self.table) as pool:
            results = pool.read_many([fg.VideoReadRequest(uri, list(n)) for uri, n in wanted.items()])
            self.stats = pool.stats()
        return [np.asarray(result.array) for result in results]


class TorchMany:
    """torchcodec over buffered ranged reads, a decoder a file, in series or on threads."""

    def __init__(self, block_mib: int, threads: int) -> None:
        """``block_mib``: of a ranged read; ``threads``: files at a time."""
        self.name = (
            f"torchcodec, {block_mib} MiB reads, {'in series' if threads == 1 else f'{threads} threads'}"
        )
        self._block = block_mib << 20
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)

    def read(self, wanted: Mapping[str, list[int]]) -> list[Pictures]:
        """Open and read each file."""

        def one(item: tuple[str, list[int]]) -> Pictures:
            video = TorchCodec("approximate").open(BufferedRanges(item[0], self._block))
            return video.frames(item[1])

        if self._threads == 1:
            return [one(item) for item in wanted.items()]
        return list(self._pool.map(one, wanted.items()))


class CountingFile(io.FileIO):
    """A local file that counts what is read of it."""

    _lock = threading.Lock()

    def __init__(self, path: str) -> None:
        """Open and count from zero."""
        super().__init__(path)
        self.reads = self.nbytes = 0

    def read(self, size: int | None = -1) -> bytes:
        """Read, and count."""
        data = super().read(-1 if size is None else size) or b""
        with self._lock:
            self.reads, self.nbytes = self.reads + 1, self.nbytes + len(data)
        return data


class OnTwoThreads:
    """Another peer, its videos opened for two threads."""

    def __init__(self, peer: Peer) -> None:
        """Take the peer."""
        self._peer = peer
        self.name = f"{peer.name}, two threads"

    def prepare(self, address: str) -> None:
        """As the peer does."""
        self._peer.prepare(address)

    def open(self, address: str, *, threads: int = 2, size: Size = None) -> Video:
        """Open on two threads."""
        return self._peer.open(address, threads=threads, size=size)


def local_peers(*, two_threads: bool = False) -> list[Peer]:
    """Return the peers that are installed, ours first."""
    peers: list[Peer] = [Ours(), OursWithoutRow(), PlainPyAV()]
    try:
        import torchcodec.decoders  # noqa: F401

        peers += [TorchCodec(mode) for mode in ("approximate", "exact", "mappings")]
    except (ImportError, RuntimeError):
        pass
    try:
        import decord  # noqa: F401

        peers.append(Decord())
    except ImportError:
        pass
    if two_threads:
        peers = [peer for peer in peers if peer.name != "decord"]
        peers += [OnTwoThreads(peer) for peer in peers if peer.name in {"fluxon_gop", "torchcodec exact"}]
    return peers
