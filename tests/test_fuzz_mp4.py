"""Any bytes either give an index or raise an Mp4Error, in bounded time and memory."""

from __future__ import annotations

import argparse
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxon_gop.errors import Mp4Error
from fluxon_gop.model import Signature
from fluxon_gop.mp4_index import index_steps
from fluxon_gop.ranges import ByteRange
from tests.boxes import FTYP, box, full_box, made, tiny_mp4, u32
from tools import fuzz_mp4
from tools.fuzz_mp4 import Seed, campaign, mutated, run_one, seed_of

INPUTS = 300
GOOD = {"index, packet path", "index, container path", "BoxError", "NotMp4Error", "TruncatedMp4Error"}
GOOD |= {"UnsupportedMp4Error", "EncryptedVideoError"}
VALID = tiny_mp4(
    made().but(offsets=(512,) * 6 + (-256,) * 6),
    layout="ftyp mdat moov",
    edits=[(400, 512, 1 << 16)],
    mvex=True,
)


@pytest.fixture(scope="module")
def seeds(media) -> list[Seed]:
    """Return the tests' own videos as seeds, and one by hand."""
    names = ["bframes", "audio", "faststart", "hevc", "vp9", "fragmented", "hybrid"]
    return [seed_of(name, media[name].read_bytes()) for name in names] + [seed_of("by hand", VALID)]


def test_a_seeded_sample_of_the_campaign_keeps_the_promise(seeds):
    """Three hundred mutated heads: an index that can be asked and kept, or an Mp4Error, each within a second."""
    report = campaign(seeds, INPUTS, seed=0, limit_s=2.0)
    assert report.failures == []
    assert sum(report.outcomes.values()) == INPUTS
    assert set(report.outcomes) <= GOOD
    assert report.outcomes["index, packet path"] > INPUTS / 20, "the mutations leave nothing whole"
    assert report.outcomes["BoxError"] > INPUTS / 20, "the mutations break nothing"


def test_an_input_is_the_same_in_every_run(seeds):
    """What number n of a seed is depends on nothing else, so that a failure can be run again alone."""
    one, other = (mutated(seeds, random.Random("0/17")) for _ in range(2))
    assert one == other
    assert campaign(seeds, 5, 3, first=40).outcomes == campaign(seeds, 5, 3, first=40).outcomes


@pytest.mark.parametrize(
    ("raises", "outcome"),
    [
        (lambda _: time.sleep(9), "FAILURE: more than 0.1 s"),
        (lambda _: {}["x"], "FAILURE: KeyError: 'x' "),
        (lambda _: 1 / 0, "FAILURE: ZeroDivisionError: division by zero (test_fuzz_mp4.py:"),
    ],
    ids=["hang", "key", "division"],
)
def test_a_broken_promise_is_seen(monkeypatch, raises, outcome):
    """The program sees a hang and any exception that is no Mp4Error: it would not miss them."""
    monkeypatch.setattr(fuzz_mp4, "use", raises)
    assert run_one(VALID, {}, 0.1).startswith(outcome)


def test_the_record_says_what_was_run(seeds):
    """The record has command, seed, counts by outcome, the slowest input and the peak of memory."""
    report = campaign(seeds, 20, seed=5)
    text = fuzz_mp4.as_markdown(report, seeds, argparse.Namespace(count=20, seed=5, corpus=None))
    assert "`python tools/fuzz_mp4.py --count 20 --seed 5`" in text
    assert all(f"| {outcome} | {number} |" in text for outcome, number in report.outcomes.items())
    assert "- Broken promises: 0" in text
    assert f"input {report.slowest[1]}" in text


# The same promise, with inputs that hypothesis chooses


def answer(data: bytes, **options) -> None:
    """Assert that the parser answers ``data`` and that what it returns can be used."""
    assert run_one(data, options, 5.0) in GOOD


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=300))
def test_any_bytes_are_answered(noise):
    """Random bytes, alone, behind a file's head, and as a movie box."""
    answer(noise)
    answer(FTYP + noise)
    answer(FTYP + box(b"moov", noise))


BOXES = st.recursive(
    st.binary(max_size=40),
    lambda inner: st.lists(
        st.builds(
            lambda kind, parts, full: full_box(kind, 0, 0, *parts) if full else box(kind, *parts),
            st.sampled_from(
                [
                    *(
                        b"moov",
                        b"trak",
                        b"mdia",
                        b"minf",
                        b"stbl",
                        b"edts",
                        b"mvex",
                        b"moof",
                        b"traf",
                        b"stsd",
                    ),
                    *(
                        b"mvhd",
                        b"tkhd",
                        b"mdhd",
                        b"hdlr",
                        b"elst",
                        b"stsz",
                        b"stz2",
                        b"stco",
                        b"co64",
                        b"stsc",
                    ),
                    *(
                        b"stts",
                        b"ctts",
                        b"stss",
                        b"trex",
                        b"tfhd",
                        b"tfdt",
                        b"trun",
                        b"sidx",
                        b"mfra",
                        b"avc1",
                    ),
                ]
            ),
            st.lists(inner, max_size=4),
            st.booleans(),
        ),
        max_size=6,
    ).map(b"".join),
    max_leaves=25,
)


@settings(deadline=None, max_examples=300)
@given(BOXES, BOXES)
def test_any_boxes_are_answered(movie, rest):
    """Known boxes in any order and nest, with any bytes in them."""
    answer(FTYP + box(b"moov", movie) + rest)
    answer(VALID + rest)


@settings(deadline=None, max_examples=500)
@given(
    st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), max_size=6),
    st.integers(0, len(VALID)) | st.none(),
)
def test_a_valid_file_with_any_bytes_changed_is_answered(changes, stop):
    """Flipped bytes and a cut anywhere in a valid file."""
    data = bytearray(VALID)
    for at, value in changes:
        data[at] = value
    answer(bytes(data[:stop]))


@settings(deadline=None, max_examples=500)
@given(
    st.integers(0, (len(VALID) - 4) // 4),
    st.sampled_from(fuzz_mp4.NUMBERS) | st.integers(0, (1 << 32) - 1),
    st.integers(0, 3),
)
def test_a_valid_file_with_any_number_inflated_is_answered(word, number, shift):
    """Any 32 bits of a valid file set to any number: sizes, counts, times, offsets."""
    at = min(word * 4 + shift, len(VALID) - 4)
    answer(VALID[:at] + u32(number) + VALID[at + 4 :])


@settings(deadline=None, max_examples=200)
@given(st.integers(-5, len(VALID) + 5), st.integers(-5, len(VALID) + 5), st.integers(-2, 5) | st.none())
def test_any_hint_and_any_track_are_answered(start, stop, stream_index):
    """A hint of any range leads to the same index as none; a track that is none is an Mp4Error."""
    assert run_one(VALID, {"hint": ByteRange(start, stop)}) == "index, packet path"
    answer(VALID, stream_index=stream_index)


@settings(deadline=None)
@given(st.integers(8, 1 << 50), st.binary(min_size=16, max_size=64))
def test_a_file_of_any_size_asks_for_what_it_has(size, head):
    """Whatever a file says, no range outside it is asked for, and the first read is no longer than the head's."""
    steps = index_steps(Signature(size))
    wave = next(steps)
    try:
        for _ in range(50):
            assert all(0 <= start < stop <= size and stop - start <= 1 << 29 for start, stop in wave)
            if sum(r.size for r in wave) > 1 << 22:
                break
            wave = steps.send([(FTYP + head + bytes(r.size))[: r.size] for r in wave])
    except (Mp4Error, StopIteration):
        pass
    steps.close()
