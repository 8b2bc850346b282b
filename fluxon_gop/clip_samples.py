"""What a data set returns for a clip: its frames in the layout asked for, and what is known of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fluxon_gop.errors import FluxonGopError, InvalidRequestError
from fluxon_gop.handed_over import HandedOver, Texts
from fluxon_gop.ranges import Int64Array
from fluxon_gop.requests import Uri, VideoReadResult

Sample = dict[str, Any]
RESERVED = frozenset({"frames", "clip", "video", "frame_numbers", "pts_seconds", "valid"})


class Clip(NamedTuple):
    """One clip: its number, its video's number, the files that hold it by view, its frames."""

    number: int
    video: int
    uris: dict[str, Uri]
    frames: Int64Array


class SampleMaker:
    """Makes samples of what was read. Picklable; labels are shared with workers as other arrays are."""

    def __init__(
        self,
        *,
        views: Sequence[str] | None,
        videos: int,
        length: int,
        size: tuple[int | None, int | None],
        layout: str,
        array_type: str,
        labels: Mapping[str, npt.ArrayLike] | None,
        transform: Callable[[Sample], Any] | None,
        masks: bool,
    ) -> None:
        """Check what a caller may choose.

        Args:
            views: names of a sample's frames, None for one array.
            videos: how many there are: a label has a value for each.
            length: frames of a clip.
            size: of the frames, for black ones.
            layout: "NHWC" or "NCHW".
            array_type: "numpy" or "torch".
            labels: see :class:`ClipDataset`.
            transform: likewise.
            masks: whether a clip that cannot be read becomes black frames.
        """
        for name, value, known in (
            ("layout", layout, ("NHWC", "NCHW")),
            ("array_type", array_type, ("numpy", "torch")),
        ):
            if value not in known:
                text = f"{name} is {value!r}: want {' or '.join(map(repr, known))}"
                raise InvalidRequestError(text)
        if masks and size[0] is None:
            text = "on_error='mask' needs height and width: black frames have a size too"
            raise InvalidRequestError(text)
        self._views, self.length, self._size = views, length, size
        self._layout, self._array_type = layout, array_type
        self.transform, self._masks = transform, masks
        if transform is not None and not callable(transform):
            text = f"transform is a {type(transform).__name__}: want a function of a sample"  # type: ignore[unreachable]
            raise TypeError(text)
        if labels is not None and not isinstance(labels, Mapping):
            text = f"labels is a {type(labels).__name__}: want a mapping of values by name"  # type: ignore[unreachable]
            raise TypeError(text)
        self._labels = {name: _label(name, values, videos) for name, values in (labels or {}).items()}

    def sample(self, clip: Clip, results: Sequence[VideoReadResult], error: FluxonGopError | None) -> Any:
        """Return a clip's sample; of one that could not be read, black frames."""
        pictures = [self._picture(result.array) for result in results] if error is None else None
        if pictures is None:
            pictures = [self._picture(None) for _ in self._views or [""]]
        times = results[0].pts_seconds if error is None else None
        if times is None:
            times = np.full(self.length, math.nan)
        sample: Sample = {
            "frames": pictures[0] if self._views is None else dict(zip(self._views, pictures, strict=True)),
            "clip": clip.number,
            "video": clip.video,
            "frame_numbers": self._array(clip.frames),
            "pts_seconds": self._array(times),
        }
        for name, values in self._labels.items():
            sample[name] = self._value(values, clip.video)
        if self._masks:
            sample["valid"] = error is None
        return sample if self.transform is None else self.transform(sample)

    def _picture(self, array: npt.NDArray[np.uint8] | None) -> Any:
        if array is None:
            height, width = self._size
            array = np.zeros((self.length, height or 0, width or 0, 3), np.uint8)
        return self._array(array.transpose(0, 3, 1, 2) if self._layout == "NCHW" else array)

    def _value(self, values: HandedOver | Texts, video: int) -> Any:
        if isinstance(values, Texts):
            return values[video]
        one = values.array[video]
        return self._array(one.copy()) if one.ndim else one.item()

    def _array(self, array: npt.NDArray[Any]) -> Any:
        if self._array_type == "numpy":
            return array
        import torch

        return torch.from_numpy(array)


def _label(name: str, values: npt.ArrayLike, videos: int) -> HandedOver | Texts:
    """Return a label's values as they are held: numbers in an array, texts apart."""
    array = np.asarray(values)
    if not array.ndim or len(array) != videos or name in RESERVED:
        text = f"labels[{name!r}] has the shape {array.shape}: want a value for each of {videos} videos, and a name of its own"
        raise InvalidRequestError(text)
    if array.dtype.kind == "U" and array.ndim == 1:
        return Texts(array.tolist())
    if array.dtype.kind not in "biufc":
        text = f"labels[{name!r}] is an array of {array.dtype}: want numbers, or texts"
        raise InvalidRequestError(text)
    return HandedOver(array.astype(array.dtype.newbyteorder("="), copy=True))
