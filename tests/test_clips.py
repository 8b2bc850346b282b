"""Which clips there are, and in which order they are read: pure tables and samplers."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fluxon_gop as fg
from fluxon_gop.handed_over import Addresses, HandedOver
from fluxon_gop.samplers import AheadBatch, Batches

COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=8).map(lambda c: np.array(c, np.int64))


def _listed(counts, ranges, length, stride, frameskip):
    """The windows, written out one by one."""
    found = []
    for video, (first, stop) in enumerate(ranges):
        start = first
        while start + (length - 1) * frameskip < stop:
            found.append((video, start))
            start += stride
    return found


@given(COUNTS, st.integers(1, 6), st.integers(1, 7), st.integers(1, 4), st.randoms())
def test_windows_are_the_explicit_list(counts, length, stride, frameskip, random):
    """Window numbers name the same videos and frames as the list of all pairs, with ranges and without."""
    whole = [(0, int(count)) for count in counts]
    parts = [tuple(sorted((random.randint(0, c), random.randint(0, c)))) for _, c in whole]
    for ranges, given_ranges in ((whole, None), (parts, parts)):
        pairs = _listed(counts, ranges, length, stride, frameskip)
        table = fg.Windows(length, stride, frameskip, ranges=given_ranges).of(counts)
        listed = fg.Pairs(np.array(pairs, np.int64).reshape(-1, 2), length, frameskip).of(counts)
        assert len(pairs) == len(table) == len(listed)
        numbers = np.arange(len(pairs))
        assert [video for video, _ in pairs] == table.video_of(numbers).tolist()
        assert [video for video, _ in pairs] == listed.video_of(numbers).tolist()
        for number, (_, start) in enumerate(pairs):
            frames = [start + frameskip * step for step in range(length)]
            assert (
                frames == table.frames_of(number, None).tolist() == listed.frames_of(number, None).tolist()
            )


def test_windows_cost_nothing_each():
    """21 million windows over 20,000 videos are 160 kB."""
    table = fg.Windows(8).of(np.full(20_000, 1057, np.int64))
    assert 21_000_000 == len(table)
    assert table.nbytes < 161_000
    assert 19_999 == int(table.video_of(np.array([20_999_999]))[0])
    assert list(range(1049, 1057)) == table.frames_of(20_999_999, None).tolist()


def test_pairs_are_kept_without_a_copy():
    """An int64 array (n, 2) is the table."""
    pairs = np.array([[0, 1], [1, 0]])
    assert np.shares_memory(pairs, fg.Pairs(pairs).of(np.array([5, 5])).arrays["pairs"])


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: fg.Windows(0), ValueError),
        (lambda: fg.Windows(True), TypeError),
        (lambda: fg.Windows(2, stride=0), ValueError),
        (lambda: fg.Windows(2**70), ValueError),
        (lambda: fg.Windows(2, 1, 2**62), ValueError),
        (lambda: fg.Pairs([[0, 0]], 3, 2**62), ValueError),
        (lambda: fg.FrameLists([0], [[2**63 - 1]]).of(np.array([5])), ValueError),
        (lambda: fg.Timestamps([0], [0.0], tolerance=-1), ValueError),
        (lambda: fg.ClipSampler(5, rank=2, world_size=2), ValueError),
        (lambda: fg.ClipSampler(5, rank=0.5), TypeError),
        (lambda: fg.ClipSampler(5).set_epoch(-1), ValueError),
        (lambda: fg.Windows(2, ranges=[[0, 1], [2, 1]]).of(np.array([5, 5])), ValueError),
        (lambda: fg.Windows(2, ranges=[[0, 1]]).of(np.array([5, 5])), ValueError),
        (lambda: fg.Windows(2, ranges=[[0, 1], [0, 6]]).of(np.array([5, 5])), IndexError),
        (lambda: fg.Windows(2).of(np.array([5, -1])), ValueError),
        (lambda: fg.Pairs([[0.0, 1.0]]), TypeError),
        (lambda: fg.Pairs([0, 1]), ValueError),
        (lambda: fg.Pairs([[0, 1, 2]]), ValueError),
        (lambda: fg.Pairs([[2, 0]]).of(np.array([5, 5])), ValueError),
        (lambda: fg.Pairs([[0, -1]]).of(np.array([5, 5])), ValueError),
        (lambda: fg.Pairs([[0, 3]], 3).of(np.array([5, 5])), IndexError),
        (lambda: fg.Pairs(np.array([[0, 2**63]], np.uint64)), ValueError),
        (lambda: fg.FrameLists([0], [[1, 2], [3, 4]]), ValueError),
        (lambda: fg.FrameLists([0], [[1, 5]]).of(np.array([5])), IndexError),
        (lambda: fg.FrameLists([0], [[1, -5]]).of(np.array([5])), ValueError),
        (lambda: fg.FrameLists([1], [[1, 2]]).of(np.array([5])), ValueError),
        (lambda: fg.Timestamps([0], [float("nan")]), ValueError),
        (lambda: fg.Timestamps([0, 1], [0.0]), ValueError),
        (lambda: fg.Timestamps([0], ["a"]), TypeError),
        (lambda: fg.Timestamps([1], [0.0]).of(np.array([5])), ValueError),
    ],
)
def test_wrong_clips_are_refused(make, error):
    """What no video can have is a typed error before anything is read."""
    with pytest.raises(error) as caught:
        make()
    assert isinstance(caught.value, fg.FluxonGopError) or error is TypeError


def test_an_error_of_millions_names_the_one():
    """The message says which pair, and why."""
    pairs = np.zeros((2_000_000, 2), np.int64)
    pairs[1_500_000] = (1, 9)
    with pytest.raises(
        fg.FrameIndexError, match=r"pairs\[1500000\] ends at frame 10 of video 1, which has 10 frames"
    ):
        fg.Pairs(pairs, 2).of(np.array([10, 10]))


@given(
    st.integers(0, 60),
    st.integers(1, 4),
    st.booleans(),
    st.booleans(),
    st.integers(0, 5),
    st.integers(0, 3),
)
def test_ranks_share_an_epoch(count, world, shuffle, drop, seed, epoch):
    """All ranks read equally many clips of one order; together all clips, or but for a rest all once."""
    shares = []
    for rank in range(world):
        sampler = fg.ClipSampler(
            count, shuffle=shuffle, seed=seed, rank=rank, world_size=world, drop_last=drop
        )
        sampler.set_epoch(epoch)
        shares.append(list(sampler))
        assert len(sampler) == len(shares[-1])
    assert 1 == len({len(share) for share in shares})
    read = [clip for turn in zip(*shares, strict=True) for clip in turn]
    if drop:
        assert len(set(read)) == len(read) == count // world * world
    else:
        assert set(range(count)) == set(read)
        assert len(read) < count + world
    if not shuffle:
        assert [place % count for place in range(len(read))] == read


def test_the_order_rests_on_seed_and_epoch():
    """The same seed and epoch give the same order again, another epoch another."""
    first, again, other = (fg.ClipSampler(100, seed=3) for _ in range(3))
    other.set_epoch(1)
    assert list(first) == list(again) != list(other)
    assert sorted(other) == list(range(100))


@given(st.integers(0, 30), st.integers(1, 5), st.integers(0, 4), st.integers(0, 3))
def test_looking_ahead_changes_no_batch(count, size, workers, depth):
    """The batches are the sampler's, in its order; ahead of each stand the next ones of the same worker."""
    below = Batches(fg.ClipSampler(count, seed=1), size)
    batches = list(fg.LookAhead(below, workers, depth=depth))
    assert list(below) == [list(batch) for batch in batches]
    assert len(below) == len(batches)
    turn = max(workers, 1)
    for place, batch in enumerate(batches):
        later = [tuple(b) for b in batches[place + turn :: turn][:depth]]
        assert later == list(batch.ahead)


def test_a_batch_keeps_what_is_ahead_when_it_is_sent_to_a_worker():
    """A pickle of a batch has its numbers and what is ahead."""
    batch = AheadBatch([3, 1])
    batch.ahead = ((5, 6),)
    copy = pickle.loads(pickle.dumps(batch))
    assert [3, 1] == copy
    assert ((5, 6),) == copy.ahead


def test_addresses_pickle_small():
    """20,000 addresses of one bucket are well under a megabyte, and come back."""
    uris = [f"s3://a-bucket/robots/arm/episode_{n:06}/camera_front/video.mp4" for n in range(20_000)]
    pickled = pickle.dumps(Addresses(uris))
    assert len(pickled) < 200_000
    copy = pickle.loads(pickled)
    assert uris == list(copy)
    assert uris[777] == copy[777]
    assert [] == list(pickle.loads(pickle.dumps(Addresses([]))))


def test_addresses_of_other_kinds_are_kept(tmp_path):
    """Sources stay as they are; paths become absolute text."""
    source = fg.MemorySource(b"x")
    assert source is Addresses([source, "a.mp4"])[0]
    assert str(tmp_path / "a.mp4") == Addresses([tmp_path / "a.mp4"])[0]


def test_a_mapped_array_travels_as_its_file(tmp_path):
    """A pickle of an array mapped from a file holds the file's name; a slice of it, or a plain one, its values."""
    pairs = np.arange(200_000).reshape(-1, 2)
    np.save(tmp_path / "pairs.npy", pairs)
    mapped = np.load(tmp_path / "pairs.npy", mmap_mode="r")
    pickled = pickle.dumps(HandedOver(mapped))
    assert len(pickled) < 1000
    assert np.array_equal(pairs, pickle.loads(pickled).array)
    np.save(tmp_path / "pairs.npy", pairs + 1)
    with pytest.raises(fg.SourceChangedError):
        pickle.loads(pickled)
    np.save(tmp_path / "pairs.npy", pairs)
    mapped = np.load(tmp_path / "pairs.npy", mmap_mode="r")
    for other in (mapped[10:], pairs, pairs[::2], np.asfortranarray(pairs)):
        assert np.array_equal(other, pickle.loads(pickle.dumps(HandedOver(other))).array)
