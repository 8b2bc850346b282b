"""The packet path: packets cut from memory by the index, and the decoder they go to.

What the decode loop asks of either way to packets is :class:`Way`; the other one is ``demuxed.py``.
Facts of PyAV and FFmpeg that this rests on stand beside the lines that need them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import av
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter

from fluxon_gop import forks
from fluxon_gop.bitstream import SampleRole, avc_role, hevc_role
from fluxon_gop.entry_points import length_size
from fluxon_gop.model import VideoIndex
from fluxon_gop.plan import Span
from fluxon_gop.sparse_buffer import SparseBuffer

if TYPE_CHECKING:
    Packet = av.Packet[Any]
else:
    # Generic for type checkers only.
    Packet = av.Packet


class OrderMismatchError(Exception):
    """Packets or pictures come in another order than the index says: it is not certain."""


class RowMismatchError(Exception):
    """The bytes are not the samples that the index names: it is of another file, or damaged."""


class Way(Protocol):
    """One way to packets. ``start`` a span, decode its ``packets``, ask each picture's ``key``."""

    reformatter: VideoReformatter
    """Converts this way's pictures; it keeps its context from one to the next."""
    damaged: bool
    """Whether the decoder refused a packet or made up for what was missing since this was last set to False."""

    def start(self, span: Span, buffer: SparseBuffer) -> VideoCodecContext:
        """Return the decoder, made ready to decode from the span's entry."""
        ...

    def packets(self, span: Span) -> Iterator[Packet | None]:
        """Yield the span's packets in decode order; None where the buffer does not hold the next one yet."""
        ...

    def keep_position(self, shown: tuple[int, int]) -> None:
        """Note that the decoder gave all targets without being drained, ``shown`` being its last picture's order."""
        ...

    def key(self, frame: VideoFrame) -> int | None:
        """Return which target this picture is (a sample, or a frame number), None for no known one."""
        ...

    def close(self) -> None:
        """Let go of decoder and demuxer."""
        ...


class _Position(NamedTuple):
    """Where an undrained decoder stands in the stream."""

    entry: int
    next: int
    """The first sample that was not sent."""
    shown: tuple[int, int]
    """The order of the last picture that came out."""
    skipped: frozenset[int]


class CutPackets:
    """The packet path: slices of the fetched bytes, numbered by sample."""

    def __init__(self, index: VideoIndex, num_threads: int, *, verify: bool = False) -> None:
        """Take an index that allows cutting packets.

        Args:
            index: with ``container_reason`` None.
            num_threads: frame threads of the decoder.
            verify: check that NAL units fill each sample exactly, for an index that this process has not
                built from the file itself; else RowMismatchError.
        """
        self._index = index
        entry = index.entries[0]
        self._verify = verify
        self._role = role_reader(index)
        self._layered = entry.codec == "hevc"
        # Parameter sets that came in band would outlive a flush.
        self._has_sets = False
        self.threads = num_threads
        self.reformatter = VideoReformatter()
        self._codec: VideoCodecContext | None = None
        self._buffer: SparseBuffer | None = None
        self._position: _Position | None = None
        self._entry = self._next = 0
        self._skipped: set[int] = set()
        self.damaged = False
        self.keeps_all = False
        """Whether packets are sent that no target needs."""
        self.held: int | None = None
        """For long spans: the first sample that is not in the buffer yet; None where all are."""
        forks.watch(self)

    def resume_at(self, span: Span) -> int | None:
        """Return the first sample to send where the decoder may go on to ``span`` from where it stands, else None.

        It may where nothing was drained, and no target has come out already or was left out.
        """
        position = self._position
        if position is None or not position.entry <= span.entry <= position.next:
            return None
        for target in span.targets:
            order = self._index.show_order(target)
            if order is None or order <= position.shown or target in position.skipped:
                return None
        # What one span of a stream in temporal layers leaves out may be of use to a higher layer later.
        return None if position.skipped and self._layered else position.next

    def start(self, span: Span, buffer: SparseBuffer) -> VideoCodecContext:
        """Return a decoder without memory of what it decoded before, or one that stands in the span."""
        position, self._position = self._position, None
        self._buffer = buffer
        if span.resume is not None:
            assert position is not None
            assert self._codec is not None
            assert position.next == span.resume
            self._entry, self._next, self._skipped = position.entry, position.next, set(position.skipped)
            return self._codec
        self._entry, self._next, self._skipped = span.entry, span.entry, set()
        if self._codec is None or self._has_sets:
            self._codec = open_decoder(self._index, self.threads)
            self._has_sets = False
        else:
            self._codec.flush_buffers()
        return self._codec

    def packets(self, span: Span) -> Iterator[Packet | None]:
        """Yield a packet for each sample that a target may need; its pts is the sample's number."""
        at, end = span.first, span.last + 1
        while at < end:
            stop = end if self.held is None else min(end, self.held)
            if stop <= at:
                yield None
                continue
            for sample, data in self._needed(at, stop, span):
                # FFmpeg's own memory: padded for decoders that read past the end, and freed without Python,
                # which a frame thread would wait for while the thread that ends the decoder waits for it.
                packet: Packet = av.Packet(len(data))
                packet.update(data)  # type: ignore[arg-type]
                packet.pts = packet.dts = sample
                self._next = sample + 1
                yield packet
            at = self._next = stop

    def _needed(self, first: int, stop: int, span: Span) -> list[tuple[int, memoryview]]:
        """Return samples ``[first, stop)`` with their bytes, less those that no target needs."""
        assert self._buffer is not None
        starts = self._index.sample_offset[first:stop].tolist()
        sizes = self._index.sample_size[first:stop].tolist()
        view = self._buffer.view
        samples = [
            (n, view(at, at + size)) for n, at, size in zip(range(first, stop), starts, sizes, strict=True)
        ]
        if self._role is None:
            return samples
        roles = [self._role(data) for _, data in samples]
        if self._verify and not all(role.fills for role in roles):
            raise RowMismatchError
        self._has_sets = self._has_sets or any(role.has_sets for role in roles)
        if self.keeps_all or (self._layered and (stop <= span.last or self.held is not None)):
            # Not all is known here: a later sample of a higher layer may need what nothing here does.
            return samples
        targets = set(span.targets)
        top = max(role.layer for role in roles)
        needed = []
        for (sample, data), role in zip(samples, roles, strict=True):
            if role.disposable and role.layer == top and sample not in targets:
                self._skipped.add(sample)
            else:
                needed.append((sample, data))
        return needed

    @property
    def stands(self) -> bool:
        """Whether the decoder stands where another span may go on."""
        return self._position is not None

    def keep_position(self, shown: tuple[int, int]) -> None:
        """Note where the decoder stands, so that the next span of the same GOP may go on from there."""
        self._position = _Position(self._entry, self._next, shown, frozenset(self._skipped))

    def release(self) -> None:
        """Let go of the fetched bytes."""
        self._buffer = self.held = None

    def key(self, frame: VideoFrame) -> int | None:
        """Return the picture's sample: the decoder hands each packet's pts through."""
        return frame.pts

    def after_fork(self) -> None:
        """Leave the parent's decoder alone: freeing it would wait for threads that are not here."""
        abandon(self._codec)
        self._codec = self._buffer = self._position = None

    def close(self) -> None:
        """Drop the decoder."""
        self._codec = self._buffer = self._position = None


def role_reader(index: VideoIndex) -> Callable[[memoryview], SampleRole] | None:
    """Return what tells a sample's role from its bytes, None where samples are no NAL units."""
    read = {"h264": avc_role, "hevc": hevc_role}.get(index.codec)
    size = length_size(index.entries[0]) if read else 0
    return partial(read, length_size=size) if read and size else None


def open_decoder(index: VideoIndex, num_threads: int) -> VideoCodecContext:
    """Return a decoder for the index's first sample entry, set up as FFmpeg's demuxer would."""
    entry = index.entries[0]
    codec = av.CodecContext.create(entry.codec, "r")
    assert isinstance(codec, VideoCodecContext)
    if entry.config:
        codec.extradata = entry.config
    if entry.codec == "h264":
        # Without the demuxer's look at the first packets the decoder does not know how many pictures it
        # must hold back, and drops some; strict makes it hold as many as the level allows.
        codec.options = {"strict": "strict"}
    set_threads(codec, num_threads)
    if entry.colour is not None:
        # The bitstream's own values win; these stand where it has none, as from the demuxer.
        codec.color_primaries, codec.color_trc, codec.colorspace, codec.color_range = entry.colour
    return codec


def set_threads(codec: VideoCodecContext, num_threads: int) -> None:
    """Set frame threads or none; slice threads deadlock when several decoders use them at once."""
    codec.thread_type = "NONE" if num_threads == 1 else "FRAME"
    codec.thread_count = num_threads


def abandon(thing: object) -> None:
    """Make an object live for ever, so that it is never freed in this process."""
    if thing is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
