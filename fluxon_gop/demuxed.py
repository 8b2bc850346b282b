"""The container path: packets from FFmpeg's demuxer over the sparse buffer.

Found by time where the index tells what is shown, else counted from the stream's start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import av
import numpy as np
from av.container import InputContainer
from av.sidedata.sidedata import SideData
from av.sidedata.sidedata import Type as SideDataType
from av.stream import Discard
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream

from fluxon_gop import forks
from fluxon_gop.errors import DecodeError, FluxonGopError
from fluxon_gop.model import VideoIndex
from fluxon_gop.packets import OrderMismatchError, Packet, abandon, role_reader, set_threads
from fluxon_gop.plan import Span
from fluxon_gop.sparse_buffer import SparseBuffer, SparseFile


class DemuxedPackets:
    """The container path. Keeps the opened file; what it reads comes from the buffer of the moment."""

    def __init__(
        self, index: VideoIndex | None, size: int, stream_index: int | None, num_threads: int
    ) -> None:
        """Take the file's size; ``index`` is None for what is no MP4.

        Args:
            index: tells times where its ``container_reason`` is None; then pictures are found by time.
            size: the file's size in bytes.
            stream_index: FFmpeg's stream number, None for its best video stream.
            num_threads: frame threads of the decoder.
        """
        self._index = index
        self._stream_index = stream_index
        self._threads = num_threads
        self.counted = index is None or index.container_reason is not None
        self._file = SparseFile(size)
        self.hint = ""
        """What the parser said of the file, for the error where FFmpeg cannot open it either."""
        self._container: InputContainer | None = None
        self._stream: VideoStream | None = None
        self._next_frame = 0
        self._demuxed: Iterator[Packet] | None = None
        self._sample_of: dict[int, int] = {}
        self.reformatter = VideoReformatter()
        self.damaged = False
        self._role = None if index is None else role_reader(index)
        # Parameter sets that came in band would outlive a flush.
        self._has_sets = False
        forks.watch(self)

    @property
    def position(self) -> int:
        """Counted: the number of the frame that comes next."""
        return self._next_frame

    def open(self, buffer: SparseBuffer) -> VideoStream:
        """Open the file where it is not open, and return its video stream."""
        self._file.buffer = buffer
        if self._stream is None:
            self._file.seek(0)
            name = buffer.source.name
            try:
                container = cast("InputContainer", av.open(self._file, metadata_errors="ignore"))
            except FluxonGopError:
                raise
            except (av.error.FFmpegError, ValueError, OSError) as error:
                self._file.check()
                text = f"{name}: FFmpeg cannot open the file: {_words(error)}{self.hint}"
                raise DecodeError(text, source=name, frames=()) from error
            stream = self._choose(container)
            if stream is None:
                container.close()
                text = f"{name}: FFmpeg finds no video stream"
                raise DecodeError(text, source=name, frames=())
            for other in () if self.counted else container.streams:
                # Saves their bytes. Counted, it would change where FFmpeg gives up on a cut file.
                if other is not stream:
                    other.discard = Discard.all
            set_threads(self._decoder(stream, name), self._threads)
            self._container, self._stream = container, stream
            self._next_frame, self._demuxed = 0, None
        return self._stream

    def _choose(self, container: InputContainer) -> VideoStream | None:
        if self._stream_index is not None:
            try:
                stream = container.streams[self._stream_index]
            except IndexError:
                return None
            return stream if isinstance(stream, VideoStream) else None
        best = container.streams.best("video")
        return best if isinstance(best, VideoStream) else None

    @staticmethod
    def _decoder(stream: VideoStream, name: str) -> VideoCodecContext:
        codec: VideoCodecContext | None = stream.codec_context
        if codec is None:
            text = f"{name}: FFmpeg has no decoder for this video stream"
            raise DecodeError(text, source=name, frames=())
        return codec

    def rewind(self) -> None:
        """Forget the opened file, so that the next start is at the beginning."""
        self._demuxed = None
        if self._container is not None:
            self._container.close()
        self._container = self._stream = None

    def start(self, span: Span, buffer: SparseBuffer) -> VideoCodecContext:
        """Return the decoder at a place at or before the span's entry."""
        if self.counted:
            if self._stream is not None and span.targets and span.targets[0] < self._next_frame:
                self.rewind()
            return self.open(buffer).codec_context
        assert self._index is not None
        if self._has_sets:
            self.rewind()
            self._has_sets = False
        stream = self.open(buffer)
        assert self._container is not None
        stream.codec_context.flush_buffers()
        self._demuxed = None
        # FFmpeg's index is searched by decode time.
        seek_to = int(self._index.sample_dts[span.entry])
        try:
            self._container.seek(seek_to, stream=stream, backward=True)
        except av.error.FFmpegError:
            self.rewind()
            stream = self.open(buffer)
        pts = self._index.sample_pts
        self._sample_of = {int(pts[sample]): sample for sample in span.targets}
        return stream.codec_context

    def packets(self, span: Span) -> Iterator[Packet]:
        """Yield packets up to the span's last; counted, as far as they are asked for."""
        assert self._container is not None
        assert self._stream is not None
        if self.counted:
            if self._demuxed is None:
                self._demuxed = self._container.demux(self._stream)
            # No ``yield from``: closing this generator must not close the one that the next read goes on.
            while (packet := self._next(self._demuxed)) is not None:
                yield packet
            return
        assert self._index is not None
        first, last = (int(self._index.sample_dts[sample]) for sample in span[:2])
        begun = False
        demuxed = self._container.demux(self._stream)
        while (packet := self._next(demuxed)) is not None:
            if packet.dts is None:
                break
            # The seek may land earlier; sent from there, pictures without their references can leave
            # FFmpeg's HEVC decoder mute.
            if packet.dts < first:
                continue
            if not begun and packet.dts != first:
                raise OrderMismatchError
            begun = True
            if self._role is not None:
                self._has_sets |= self._role(memoryview(bytes(packet))).has_sets
            yield packet
            # Demuxing one packet more would read bytes that the plan did not bring.
            if packet.dts >= last:
                return
        if not begun:
            raise OrderMismatchError

    def _next(self, demuxed: Iterator[Packet]) -> Packet | None:
        """Return the next packet, None at the end; an end that an interrupted read made is none."""
        try:
            return next(demuxed, None)
        finally:
            if self._file.interrupted is not None:
                self.rewind()
                self._file.check()

    def key(self, frame: VideoFrame) -> int | None:
        """Return the picture's sample by its time, or its number by counting."""
        if self.counted:
            self._next_frame += 1
            return self._next_frame - 1
        return None if frame.pts is None else self._sample_of.get(frame.pts)

    def keep_position(self, shown: tuple[int, int]) -> None:
        """Nothing: each span seeks."""

    def after_fork(self) -> None:
        """Leave the parent's demuxer and decoder alone."""
        for thing in (self._container, self._stream, self._demuxed):
            abandon(thing)
        self._container = self._stream = self._demuxed = None

    def release(self) -> None:
        """Let go of the fetched bytes; the next start brings others."""
        self._file.buffer = None

    def close(self) -> None:
        """Close the file."""
        self.rewind()
        self._file.buffer = None


def _words(error: BaseException) -> str:
    """Return an FFmpeg error's text without its number and Python's decoration."""
    return getattr(error, "strerror", None) or str(error)


def display_matrix(frame: VideoFrame) -> tuple[int, ...] | None:
    """Return the display matrix that FFmpeg hangs on a picture, None without one."""
    try:
        sides = cast("list[SideData]", list(frame.side_data))
    except ValueError:
        # PyAV 18.1 does not know every kind (MV-HEVC's stereo views), and then shows none: the angle alone is left.
        turns = {90: (0, -1, 1, 0), -90: (0, 1, -1, 0), 180: (-1, 0, 0, -1), -180: (-1, 0, 0, -1)}
        if frame.rotation not in turns:
            return None
        a, b, c, d = (part << 16 for part in turns[frame.rotation])
        return (a, b, 0, c, d, 0, 0, 0, 1 << 30)
    for side in sides:
        if side.type is SideDataType.DISPLAYMATRIX:
            return tuple(int(value) for value in np.frombuffer(bytes(side), dtype="<i4")[:9])
    return None
