"""The tree of errors is the one that its module draws, and each error travels whole."""

from __future__ import annotations

import builtins
import copy
import pickle
import re

import pytest

from fluxon_gop import errors
from fluxon_gop.errors import FluxonGopError

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, FluxonGopError) and value is not FluxonGopError
]
EXAMPLES = [
    errors.FrameIndexError("frame 7 is beyond the end", index=7, length=5),
    errors.FrameTimestampError("no frame at 9.0 s", seconds=9.0, begin=0.0, end=4.0),
    errors.ShortReadError("3 of 10 bytes", source="a.mp4", start=0, stop=10, got=3),
    errors.SourceChangedError("changed", source="a.mp4", expected=(1, None), got=(2, None)),
    errors.BoxError("moov/trak at byte 40: bad", path="moov/trak", offset=40),
    errors.TruncatedMp4Error("cut", need=100, size=50),
    errors.IndexMissingError("no row", key=("export", "a.mp4")),
    errors.DecodeError("2 pictures", source="a.mp4", frames=(3, 4)),
]


def drawn() -> dict[str, tuple[str, str | None]]:
    """Return (parent, builtin) of each class in the tree that the module's docstring draws."""
    found: dict[str, tuple[str, str | None]] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^((?:│   |    )*)(?:├── |└── )?([A-Z]\w+Error)(?: \((\w+)\))?", line)
        if match:
            branch = "├── " in line or "└── " in line
            depth = len(match[1]) // 4 + branch
            above[depth:] = [match[2]]
            if depth:
                found[match[2]] = (above[depth - 1], match[3])
    return found


def test_the_module_draws_every_class():
    """The tree in the module's docstring has exactly the classes of the module."""
    assert {kind.__name__ for kind in CLASSES} == drawn().keys()


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_class_stands_where_the_tree_draws_it(kind):
    """Each class has the parent that is drawn, and is the builtin beside its name."""
    parent, builtin = drawn()[kind.__name__]
    assert issubclass(kind, getattr(errors, parent))
    assert builtin is None or issubclass(kind, getattr(builtins, builtin))


def test_the_base_is_never_raised():
    """FluxonGopError refuses instantiation and says what to do."""
    with pytest.raises(TypeError, match=r"FluxonGopError is abstract: raise one of its children"):
        FluxonGopError("x")


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_class_prints_its_message(kind):
    """The text of an error is its message, unquoted, whatever builtin it also is."""
    assert str(kind("it's so")) == "it's so"


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("travel", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_an_error_travels_whole(error, travel):
    """Pickled or copied, an error keeps its class, its message and its numbers as attributes."""
    there = travel(error)
    assert type(error) is type(there)
    assert str(error) == str(there)
    assert error.numbers == there.numbers
    assert all(getattr(there, name) == value for name, value in error.numbers.items())


def test_a_source_error_that_is_a_file_error_is_caught_as_one():
    """SourceNotFoundError is what ``except FileNotFoundError`` catches, its message intact."""
    error = errors.SourceNotFoundError("nothing at a.mp4", source="a.mp4")
    with pytest.raises(FileNotFoundError) as caught:
        raise error
    assert (str(caught.value), caught.value.source) == ("nothing at a.mp4", "a.mp4")
