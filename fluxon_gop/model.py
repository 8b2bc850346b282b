"""What is known of one video: the immutable values that every floor shares.

Pure. Sample numbers are 0-based in decode order, frame numbers 0-based in presentation order,
offsets are absolute file bytes, times are ticks of the media timescale unless a name says seconds.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass, field, fields
from enum import IntEnum
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fluxon_gop.errors import FrameIndexError, FrameTimestampError, InvalidRequestError, UnsupportedMp4Error
from fluxon_gop.lazily import lazily
from fluxon_gop.ranges import ByteRange, Int64Array

MAX_SAMPLES = 1 << 25
"""Samples of one track that are indexed: 155 hours at 60 frames a second."""


class Signature(NamedTuple):
    """The version of a file: its size with the etag where there is one, else with ``mtime_ns``."""

    size: int
    etag: str | None = None
    mtime_ns: int | None = None

    def fits(self, other: Signature) -> bool:
        """Return whether both name the same version of the file."""
        if self.size != other.size:
            return False
        if self.etag is not None and other.etag is not None:
            return self.etag == other.etag
        if self.mtime_ns is not None and other.mtime_ns is not None:
            return self.mtime_ns == other.mtime_ns
        return self.etag == other.etag and self.mtime_ns == other.mtime_ns


class Verdict(IntEnum):
    """What the bitstream says of a sample that the container calls sync."""

    UNCHECKED = 0
    PROVEN = 1
    """Everything from here on, in decode order, decodes exactly (IDR, key frame)."""
    PROVEN_TRAILING = 2
    """Frames shown at or after it decode exactly; its leading frames need an earlier entry (CRA, BLA)."""
    REFUSED = 3
    """Not proven: decoding starts at an earlier entry point."""
    DECODED = 4
    """As PROVEN, by decoding the GOP alone; the sample's first bytes need not tell."""
    DECODED_TRAILING = 5
    """As PROVEN_TRAILING, by decoding the GOP alone."""


class Colour(NamedTuple):
    """The ``colr`` box's code points (ISO/IEC 23091-2; 2 = unspecified) and range as FFmpeg counts it."""

    primaries: int = 2
    transfer: int = 2
    matrix: int = 2
    range: int = 0
    """0 unspecified, 1 limited (MPEG), 2 full (JPEG)."""


class SampleEntry(NamedTuple):
    """One entry of ``stsd``: how to set up the decoder."""

    fourcc: str
    codec: str
    """FFmpeg's decoder name, or "" where this package cuts no packets of it."""
    config: bytes
    """The body of avcC, hvcC, av1C; empty where the decoder needs none."""
    width: int
    height: int
    colour: Colour | None = None


class Orientation(NamedTuple):
    """How to turn a decoded picture upright: transpose first, then flip rows, then columns."""

    transpose: bool = False
    flip_rows: bool = False
    flip_columns: bool = False

    @classmethod
    def from_matrix(cls, matrix: tuple[int, ...]) -> Orientation:
        """Return the turn that FFmpeg's autorotation makes of a display matrix of 9 fixed-point numbers.

        Quarter turns and flips; another angle is left as it is. Source: fftools' filter set-up and
        ``av_display_rotation_get``.
        """
        scale0, scale1 = math.hypot(matrix[0], matrix[3]), math.hypot(matrix[1], matrix[4])
        if not scale0 or not scale1:
            return cls()
        theta = round(math.degrees(math.atan2(matrix[1] / scale1, matrix[0] / scale0))) % 360
        if abs(theta - 90) < 1:
            return cls(True, False, not matrix[3] > 0)
        if abs(theta - 270) < 1:
            return cls(True, True, matrix[3] < 0)
        if abs(theta - 180) < 1:
            return cls(False, matrix[4] < 0, matrix[0] < 0)
        if theta == 0:
            return cls(False, matrix[4] < 0, False)
        return cls()


IDENTITY_MATRIX = (1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)


@dataclass(frozen=True, eq=False, kw_only=True)
class VideoIndex:
    """The index of one video: where each sample lies, when it is shown, where decoding may start.

    Immutable; arrays are validated once and read-only. ``nbytes`` tells its memory; a pickle is
    compressed. Built by :func:`fluxon_gop.build_index` or loaded from an index table.
    """

    signature: Signature
    moov_range: ByteRange
    stream_index: int
    """The track's place among the ``trak`` boxes, which is FFmpeg's stream number."""
    timescale: int
    """Ticks a second of all times here."""
    entries: tuple[SampleEntry, ...]
    width: int
    """Width of the decoded picture before rotation, in pixels."""
    height: int
    matrix: tuple[int, ...] = IDENTITY_MATRIX
    """The display matrix, 9 numbers as in the file."""
    sample_offset: Int64Array
    sample_size: Int64Array
    sample_pts: Int64Array
    """Presentation time as FFmpeg's demuxer gives it, the edit list applied (where it shows anything)."""
    sample_dts: Int64Array
    """Decode time on the same axis."""
    sample_entry: npt.NDArray[np.uint8]
    """Which of ``entries`` each sample uses; one value stands for all."""
    hidden: Int64Array
    """Samples that are decoded but not shown (outside the edit), sorted."""
    stream: ByteRange
    """``[first, stop)`` samples that FFmpeg demuxes; the others do not exist for it."""
    key_samples: Int64Array
    """Samples that the container calls sync, sorted."""
    verdicts: npt.NDArray[np.uint8]
    """A :class:`Verdict` for each key sample."""
    last_duration: int = 0
    """Ticks that the last sample lasts."""
    container_reason: str | None = None
    """Why packets cannot be cut from memory; None where they can."""
    frame_sample: Int64Array = field(init=False, repr=False)
    """The sample of each frame."""

    def __post_init__(self) -> None:
        """Check shapes once, freeze the arrays, and rank the shown samples by presentation time."""
        count = len(self.sample_offset)
        for name in ("sample_size", "sample_pts", "sample_dts"):
            if len(getattr(self, name)) != count:
                text = f"{name} has {len(getattr(self, name))} samples, sample_offset has {count}"
                raise InvalidRequestError(text)
        if len(self.verdicts) != len(self.key_samples):
            text = f"{len(self.verdicts)} verdicts for {len(self.key_samples)} key samples"
            raise InvalidRequestError(text)
        shown = np.arange(self.stream.start, self.stream.stop, dtype=np.int64)
        if len(self.hidden):
            shown = np.setdiff1d(shown, self.hidden, assume_unique=True)
        pts = self.sample_pts[shown]
        if len(pts) > 1 and np.any(pts[1:] < pts[:-1]):
            shown = shown[np.argsort(pts, kind="stable")]
        object.__setattr__(self, "frame_sample", shown)
        for name in _ARRAYS:
            getattr(self, name).setflags(write=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields, each array as compressed differences."""
        state = {}
        for item in fields(self):
            if not item.init:
                continue
            value = getattr(self, item.name)
            if isinstance(value, np.ndarray):
                step = np.diff(value.astype(np.int64), prepend=0)
                value = (value.dtype.str, zlib.compress(step.tobytes(), 1))
            state[item.name] = value
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Rebuild the arrays and check them again."""
        for item in fields(self):
            if not item.init:
                continue
            value = state[item.name]
            if item.name.startswith(("sample_", "hidden", "key_", "verdicts")):
                dtype, packed = value
                steps = np.frombuffer(zlib.decompress(packed), dtype=np.int64)
                value = np.cumsum(steps).astype(dtype)
            object.__setattr__(self, item.name, value)
        self.__post_init__()

    def __repr__(self) -> str:
        """Show what it is of, never its arrays."""
        path = f"container path ({self.container_reason})" if self.container_reason else "packet path"
        return (
            f"VideoIndex({self.codec or self.fourcc} {self.width}x{self.height}, "
            f"{self.num_samples} samples, {self.num_frames} frames, {len(self.key_samples)} GOPs, {path})"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays and of the configuration records."""
        records = sum([len(entry.config) for entry in self.entries])
        return records + sum([int(getattr(self, name).nbytes) for name in _ARRAYS])

    @property
    def num_samples(self) -> int:
        """Samples in the track's tables."""
        return len(self.sample_offset)

    @property
    def num_frames(self) -> int:
        """Shown samples. It is FFmpeg's count of frames where ``container_reason`` is None."""
        return len(self.frame_sample)

    @lazily
    def gop_lengths(self) -> Int64Array:
        """The samples of each GOP, an entry point up to the next one; the stream's start is one."""
        first, stop = self.stream
        later = self.key_samples[(self.verdicts != Verdict.REFUSED) & (self.key_samples > first)]
        entries = np.concatenate(([first], later[later < stop]))
        return np.diff(np.append(entries, stop)) if stop > first else np.zeros(0, np.int64)

    @property
    def num_gops(self) -> int:
        """GOPs."""
        return len(self.gop_lengths)

    @property
    def fourcc(self) -> str:
        """The first sample entry's type."""
        return self.entries[0].fourcc if self.entries else ""

    @property
    def codec(self) -> str:
        """FFmpeg's decoder name of the first sample entry, "" where packets are not cut."""
        return self.entries[0].codec if self.entries else ""

    @lazily
    def orientation(self) -> Orientation:
        """The turn that makes the picture upright."""
        return Orientation.from_matrix(self.matrix)

    def upright_size(self, *, apply_rotation: bool = True) -> tuple[int, int]:
        """Return (height, width) of the picture as it is shown."""
        swap = apply_rotation and self.orientation.transpose
        return (self.width, self.height) if swap else (self.height, self.width)

    @lazily
    def sample_frame(self) -> Int64Array:
        """The frame that each sample shows, -1 for one that is not shown."""
        frames = np.full(self.num_samples, -1, np.int64)
        frames[self.frame_sample] = np.arange(self.num_frames)
        return frames

    @lazily
    def starts(self) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """Where decoding may start: (samples, sorted; whether leading frames decode from there too).

        The stream's first sample, which needs no claim, and the key samples that are not refused.
        """
        usable = (self.verdicts != Verdict.REFUSED) & (self.key_samples > self.stream.start)
        clean = np.isin(self.verdicts[usable], (Verdict.PROVEN, Verdict.DECODED))
        samples = np.concatenate(([self.stream.start], self.key_samples[usable]))
        return samples, np.concatenate(([True], clean))

    @lazily
    def all_clean(self) -> bool:
        """Whether every start decodes its leading frames too."""
        return bool(self.starts[1].all())

    @lazily
    def all_checked(self) -> bool:
        """Whether no key sample's claim is open."""
        return Verdict.UNCHECKED not in self.verdicts

    def verdict_of(self, sample: int) -> Verdict | None:
        """Return what is known of a key sample's claim, None for a sample that is not called sync."""
        at = int(np.searchsorted(self.key_samples, sample))
        if at == len(self.key_samples) or self.key_samples[at] != sample:
            return None
        return Verdict(int(self.verdicts[at]))

    def show_order(self, sample: int) -> tuple[int, int] | None:
        """Return what shown samples come in the order of; None for a hidden one."""
        if len(self.hidden):
            at = int(np.searchsorted(self.hidden, sample))
            if at < len(self.hidden) and self.hidden[at] == sample:
                return None
        return int(self.sample_pts[sample]), sample

    @lazily
    def frame_pts(self) -> Int64Array:
        """Presentation time of each frame in ticks."""
        return self.sample_pts[self.frame_sample]

    @lazily
    def pts_seconds(self) -> npt.NDArray[np.float64]:
        """Presentation time of each frame in seconds of the stream."""
        return self.frame_pts / self.timescale

    def seconds_of(self, frames: Int64Array) -> npt.NDArray[np.float64]:
        """Return when these frames are shown, in seconds of the stream. O(frames asked for)."""
        return self.sample_pts[self.frame_sample[frames]] / self.timescale

    @property
    def end_ticks(self) -> int:
        """Time at which the last frame ends, in ticks."""
        return int(self.frame_pts[-1]) + max(self.last_duration, 1) if self.num_frames else 0

    @property
    def average_fps(self) -> float:
        """Frames a second over the whole video; 0 where it has no duration."""
        ticks = self.end_ticks - int(self.frame_pts[0]) if self.num_frames else 0
        return self.num_frames * self.timescale / ticks if ticks > 0 else 0.0

    def frame_at(self, seconds: float | Fraction) -> int:
        """Return the frame that is on the screen at this time: the last with pts <= ``seconds``.

        O(log frames). A float is compared with ``pts_seconds``, so that ``frame_at(pts_seconds[k])``
        is the last frame with k's time; a Fraction is compared exactly.

        Raises:
            FrameTimestampError: before the first frame or at or after the end of the last.
        """
        end = Fraction(self.end_ticks, self.timescale)
        if isinstance(seconds, Fraction):
            ticks = math.floor(seconds * self.timescale)
            frame = int(np.searchsorted(self.frame_pts, ticks, side="right")) - 1
        else:
            frame = int(np.searchsorted(self.pts_seconds, seconds, side="right")) - 1
        if frame < 0 or not seconds < end:
            begin = float(self.pts_seconds[0]) if self.num_frames else 0.0
            text = f"no frame at {float(seconds)} s: the video shows [{begin}, {float(end)}) s"
            raise FrameTimestampError(text, seconds=float(seconds), begin=begin, end=float(end))
        return frame

    def frames_between(self, start: float | Fraction, stop: float | Fraction) -> range:
        """Return the frames whose pts lies in ``[start, stop)`` seconds. O(log frames)."""
        if isinstance(start, Fraction) and isinstance(stop, Fraction):
            edges = [math.ceil(start * self.timescale), math.ceil(stop * self.timescale)]
            first, last = np.searchsorted(self.frame_pts, edges, side="left")
        else:
            first, last = np.searchsorted(self.pts_seconds, [float(start), float(stop)], side="left")
        return range(int(first), max(int(first), int(last)))

    def to_torchcodec_frame_mappings(self) -> str:
        """Return the JSON that torchcodec's ``VideoDecoder(custom_frame_mappings=...)`` takes, so that it need not scan.

        Frames in presentation order with ``pts`` and ``duration`` in ticks and ``key_frame`` 0 or 1, as
        ``ffprobe -show_frames`` tells them; a key frame is a sync sample that the bitstream does not refute. O(frames).

        Raises:
            UnsupportedMp4Error: which frames FFmpeg shows is not certain from the tables.
        """
        if self.container_reason is not None:
            text = f"no frame mappings: {self.container_reason}"
            raise UnsupportedMp4Error(text)
        durations = np.append(np.diff(self.sample_dts), self.last_duration)[: self.num_samples]
        keys = np.zeros(self.num_samples, np.int64)
        keys[self.key_samples[self.verdicts != Verdict.REFUSED]] = 1
        columns = (column[self.frame_sample].tolist() for column in (self.sample_pts, durations, keys))
        return json.dumps(
            {
                "frames": [
                    {"pts": pts, "duration": duration, "key_frame": key}
                    for pts, duration, key in zip(*columns, strict=True)
                ]
            }
        )

    def same_samples(self, other: VideoIndex) -> bool:
        """Return whether both name the same samples, shown at the same times."""
        names = ("sample_offset", "sample_size", "sample_pts", "frame_sample", "key_samples")
        return all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names)

    def check_frames(self, frames: Int64Array, name: str) -> None:
        """Raise FrameIndexError, in the name of the video, for the first frame number beyond the end."""
        if len(frames) and int(frames.max()) >= self.num_frames:
            beyond = frames[frames >= self.num_frames]
            raise beyond_the_end(name, int(beyond[0]), self.num_frames)

    def with_verdicts(self, samples: Int64Array, verdicts: npt.NDArray[np.uint8]) -> VideoIndex:
        """Return a copy in which these key samples have these verdicts.

        Where the stream's first sample turns out not to be a clean start, what FFmpeg shows cannot be
        told from the tables, and the copy goes to the container path.
        """
        new = self.verdicts.copy()
        new[np.searchsorted(self.key_samples, samples)] = verdicts
        reason = self.container_reason
        at = np.flatnonzero(self.key_samples == self.stream.start)
        if reason is None and len(at):
            reason = self._unclean_start(Verdict(int(new[at[0]])))
        new.setflags(write=False)
        # The rest is valid as it is.
        same = object.__new__(type(self))
        vars(same).update({name: getattr(self, name) for name in _FIELDS})
        vars(same).update(verdicts=new, container_reason=reason)
        return same

    def _unclean_start(self, verdict: Verdict) -> str | None:
        first = self.stream.start
        if verdict is Verdict.REFUSED:
            return "the first sample is no proven entry point: which frames FFmpeg shows is not certain"
        leading = self.sample_pts[first : self.stream.stop] < self.sample_pts[first]
        if verdict is Verdict.PROVEN_TRAILING and bool(leading.any()):
            return "the stream starts with an open GOP: its leading frames cannot be decoded"
        return None


_FIELDS = tuple(item.name for item in fields(VideoIndex))
_ARRAYS = (
    "sample_offset", "sample_size", "sample_pts", "sample_dts", "sample_entry", "hidden", "key_samples", "verdicts",
    "frame_sample",
)  # fmt: skip


def beyond_the_end(name: str, index: int, length: int) -> FrameIndexError:
    """Return the error for a frame number beyond the end."""
    text = f"{name}: frame {index} is beyond the end: the video has {length} frames (0 to {length - 1})"
    return FrameIndexError(text, source=name, index=index, length=length)
