"""FluxonFS's reader: one video of an export at one output size, one read method.

A thin skin over whatever an agent opens: our own agent opens a :class:`fluxon_gop.VideoReader`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

from fluxon_gop.errors import ClosedError
from fluxon_gop.fluxonfs.checks import frame_numbers, non_empty, positive
from fluxon_gop.fluxonfs.read_stats import checked, reader_stats
from fluxon_gop.fluxonfs.users import Identity, check_identity
from fluxon_gop.reader import VideoReader


class AgentReader(Protocol):
    """What an agent opens."""

    def read_frames_numpy(self, indices: list[int], /) -> Any:
        """Return the frames, uint8 (len(indices), height, width, 3)."""
        ...

    def stats(self) -> dict[str, int]:
        """Return the counters since it was opened."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


class Agent(Protocol):
    """What opens readers; FluxonFS's client passes its own."""

    def open_video_reader(
        self,
        export_name: str,
        relpath: str,
        height: int,
        width: int,
        num_threads: int,
        request_identity: Identity | None,
        /,
    ) -> AgentReader:
        """Return a reader of one video at one size."""
        ...


class PlannedReader:
    """What our own agent opens: a :class:`VideoReader` with its counters by FluxonFS's names."""

    def __init__(self, reader: VideoReader, open_seconds: float) -> None:
        """Take a reader, and how long its opening took; closes it."""
        self.reader = reader
        self._more_us = int(open_seconds * 1e6) - reader.stats().source["open_us"]
        """Of the opening, beside what its source counted: index rows, head and movie box."""

    def read_frames_numpy(self, indices: list[int], /) -> Any:
        """Return the frames."""
        return self.reader.read_frames_numpy(indices)

    def stats(self) -> dict[str, int]:
        """Return the counters since it was opened."""
        stats = reader_stats(self.reader.stats())
        stats["open_us"] += self._more_us
        return stats

    def close(self) -> None:
        """Close the reader and its source."""
        self.reader.close()
        self.reader.source.close()


class FluxonFsVideoReader:
    """Reads exact frames of one video of an export, under the identity that opened it."""

    def __init__(self, inner: AgentReader) -> None:
        """Take what an agent opened. Use :meth:`FluxonFsPatcher.open_video_reader`."""
        self._inner = inner
        self._closed = False

    @classmethod
    def _open(
        cls,
        *,
        agent: Agent,
        export_name: str,
        relpath: str,
        height: int,
        width: int,
        num_threads: int,
        request_identity: Identity | None,
    ) -> Self:
        """Check the arguments, then have the agent open the reader."""
        arguments = (
            non_empty("export_name", export_name),
            non_empty("relpath", relpath),
            positive("height", height),
            positive("width", width),
            positive("num_threads", num_threads),
            check_identity(request_identity),
        )
        return cls(agent.open_video_reader(*arguments))

    @property
    def num_frames(self) -> int:
        """The number of frames that FFmpeg's full decode gives; see :attr:`fluxon_gop.VideoReader.num_frames`."""
        self._check_open()
        if not isinstance(self._inner, PlannedReader):
            text = "this agent's readers do not tell their number of frames"
            raise TypeError(text)
        return self._inner.reader.num_frames

    def __len__(self) -> int:
        """Return ``num_frames``."""
        return self.num_frames

    def read_frames_numpy(self, indices: Sequence[int]) -> Any:
        """Return the frames as one uint8 array (len(indices), height, width, 3), RGB, owned by the caller.

        One wave of reads of the pieces that no cache tier has; with an index row in memory nothing else.

        Args:
            indices: frame numbers, ``int`` from 0, any order, repeats allowed.

        Raises:
            TypeError: no sequence of ``int``.
            InvalidRequestError: a negative number.
            FrameIndexError: a number beyond the end.
            SourcePermissionError: the identity may no longer read the video.
            SourceChangedError: the file is another version than the one that was opened.
            DecodeError: no video, or a picture that cannot be decoded.
            ClosedError: the reader is closed.
        """
        self._check_open()
        return self._inner.read_frames_numpy(list(frame_numbers(indices)))

    def stats(self) -> dict[str, int]:
        """Return the counters since the reader was opened; see ``read_stats.reader_stats``."""
        self._check_open()
        return checked(self._inner.stats())

    def close(self) -> None:
        """Close it; reads after it raise ClosedError."""
        if not self._closed:
            self._closed = True
            self._inner.close()

    def _check_open(self) -> None:
        if self._closed:
            text = "FluxonFsVideoReader is closed"
            raise ClosedError(text)

    def __enter__(self) -> Self:
        """Return itself."""
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def __repr__(self) -> str:
        """Show what is read; never the identity."""
        inner = self._inner
        what = repr(inner.reader.source.name) if isinstance(inner, PlannedReader) else type(inner).__name__
        return f"FluxonFsVideoReader({what}{', closed' if self._closed else ''})"
