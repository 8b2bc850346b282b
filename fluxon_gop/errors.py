"""The one tree of errors, and what each one says.

FluxonGopError (abstract)
├── InvalidRequestError (ValueError)        the caller's arguments cannot be met
├── FrameIndexError (IndexError)            a frame number beyond the end
├── FrameTimestampError (ValueError)        a time outside the video
├── ClosedError (RuntimeError)              used after close()
├── ForkedProcessError (RuntimeError)       a remote source used in a forked child
├── SourceError (OSError)                   the bytes could not be read
│   ├── SourceNotFoundError (FileNotFoundError)
│   ├── SourcePermissionError (PermissionError)
│   ├── ShortReadError                      fewer bytes than asked
│   ├── SourceChangedError                  another version than the signature says
│   └── DeadlineError (TimeoutError)        no answer within the time limit
├── Mp4Error (ValueError)                   the bytes are not a usable MP4
│   ├── NotMp4Error
│   ├── TruncatedMp4Error
│   ├── BoxError
│   ├── UnsupportedMp4Error
│   └── EncryptedVideoError
├── IndexTableError                         the index table
│   ├── IndexMissingError (KeyError)
│   ├── IndexVersionError
│   └── StaleIndexError
└── DecodeError (RuntimeError)              a picture could not be decoded

A message says what, where, got, expected, and what to do. Numbers are also attributes.
Any other exception that leaves the package is a bug.
"""

from __future__ import annotations

from typing import Any


class FluxonGopError(Exception):
    """Base of every error of this package; never raised itself."""

    def __init__(self, message: str, **numbers: Any) -> None:
        """Keep ``message`` and set each keyword in ``numbers`` as an attribute."""
        if type(self) is FluxonGopError:
            text = "FluxonGopError is abstract: raise one of its children"
            raise TypeError(text)
        super().__init__(message)
        self.message = message
        self.numbers = numbers
        for name, value in numbers.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        """Return the message alone (a KeyError's own form would be quoted)."""
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by message and numbers, so that a worker's error reaches its parent whole."""
        return (_rebuild, (type(self), self.message, self.numbers))


def _rebuild(kind: type[FluxonGopError], message: str, numbers: dict[str, Any]) -> FluxonGopError:
    return kind(message, **numbers)


class InvalidRequestError(FluxonGopError, ValueError):
    """An argument cannot be met; raised before any IO."""


class FrameIndexError(FluxonGopError, IndexError):
    """A frame number is beyond the end. Attributes: ``index``, ``length``."""

    index: int
    length: int


class FrameTimestampError(FluxonGopError, ValueError):
    """A time lies outside the video. Attributes: ``seconds``, ``begin``, ``end``."""


class ClosedError(FluxonGopError, RuntimeError):
    """A reader, pool, table or source was used after ``close()``."""


class ForkedProcessError(FluxonGopError, RuntimeError):
    """A remote source was used in a forked child, where its IO threads do not live."""


class SourceError(FluxonGopError, OSError):
    """The bytes could not be read. Attribute: ``source`` (a name that is safe to print)."""


class SourceNotFoundError(SourceError, FileNotFoundError):
    """There is nothing at this address."""


class SourcePermissionError(SourceError, PermissionError):
    """The store or the file system refuses the read."""


class ShortReadError(SourceError):
    """Fewer bytes came than were asked for. Attributes: ``start``, ``stop``, ``got``."""


class SourceChangedError(SourceError):
    """The file is another version than the signature says. Attributes: ``expected``, ``got``."""


class DeadlineError(SourceError, TimeoutError):
    """No answer came within the time limit."""


class Mp4Error(FluxonGopError, ValueError):
    """The bytes are not an MP4 that can be indexed."""


class NotMp4Error(Mp4Error):
    """The file is no ISO base media file (it may be MKV, AVI, TS...)."""


class TruncatedMp4Error(Mp4Error):
    """The file ends before its movie box does. Attributes: ``need``, ``size``."""


class BoxError(Mp4Error):
    """A box contradicts itself or its neighbours. Attributes: ``path``, ``offset``."""


class UnsupportedMp4Error(Mp4Error):
    """A legal file that this parser does not index; the message names the reason."""


class EncryptedVideoError(Mp4Error):
    """The video track is encrypted (``encv``/``sinf``); decoding it gives noise."""


class IndexTableError(FluxonGopError):
    """The index table cannot be used as asked."""


class IndexMissingError(IndexTableError, KeyError):
    """The table has no row for this video. Attribute: ``key``."""


class IndexVersionError(IndexTableError):
    """The table was written for another version of the format."""


class StaleIndexError(IndexTableError):
    """The row's signature or checksum does not fit the file."""


class DecodeError(FluxonGopError, RuntimeError):
    """Pictures could not be decoded. Attributes: ``source``, ``frames`` (their numbers)."""

    frames: tuple[int, ...]


def one_line(error: BaseException) -> str:
    """Return an error's text without line breaks."""
    return " ".join(str(error).split())
