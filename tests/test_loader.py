"""ClipLoader with real DataLoader workers: a whole epoch is exact however workers start, die, and go on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import fluxon_gop as fg
from tests.media import full_decode

torch = pytest.importorskip("torch")

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler  # noqa: E402

NAMES = ("bframes", "hevc", "av1", "opengop")


@pytest.fixture(scope="module")
def truth(media):
    return [full_decode(media[name]) for name in NAMES]


@pytest.fixture(scope="module")
def data(media):
    with fg.ClipDataset([media[name] for name in NAMES], fg.Windows(4, 3)) as data:
        yield data


def _check(batch, truth):
    """Hold each clip of a batch against the full decode; return the clips' numbers."""
    for frames, video, numbers in zip(batch["frames"], batch["video"], batch["frame_numbers"], strict=True):
        assert np.array_equal(truth[int(video)][numbers.numpy()], frames.numpy())
    return batch["clip"].tolist()


@pytest.mark.parametrize("start", [None, "fork", "spawn", "forkserver"])
def test_an_epoch_is_exact(data, truth, start):
    """Shuffled, every clip comes once, bit for bit, in the order of the seed; what it cost is counted over all workers."""
    loader = fg.ClipLoader(
        data, 8, shuffle=True, seed=5, num_workers=0 if start is None else 2, start_method=start
    )
    seen = [clip for batch in loader for clip in _check(batch, truth)]
    assert list(fg.ClipSampler(data, seed=5)) == seen
    cost = loader.cost()
    assert len(data) == cost["clips"] == sum(map(len, [seen]))
    workers = 1 if start is None else 2
    assert len(loader) - workers == cost["look_ahead_hits"]
    assert 0 == cost["look_ahead_dropped"]
    assert len(loader) == cost["media_waves"]
    assert (1, 0) == (loader.epoch, loader.state_dict()["batches_done"])


def test_workers_stay_for_epochs(data, truth):
    """Persistent workers read epoch after epoch, each in another order, also after a loop that was left early."""
    loader = fg.ClipLoader(
        data, 8, shuffle=True, num_workers=2, persistent_workers=True, start_method="fork"
    )
    orders = []
    for epoch in range(2):
        assert epoch == loader.epoch
        orders.append([clip for batch in loader for clip in _check(batch, truth)])
        assert sorted(orders[-1]) == list(range(len(data)))
    assert orders[0] != orders[1]
    for batch in loader:
        first = _check(batch, truth)
        break
    assert (2, 1) == (loader.epoch, loader.state_dict()["batches_done"])
    again = [_check(batch, truth) for batch in loader]
    assert 4 == loader.epoch
    assert first != again[0]
    assert sorted(clip for batch in again for clip in batch) == list(range(len(data)))


def test_a_killed_worker_and_the_epoch_resumed(data, truth):
    """A worker is killed in the middle: the loop ends with an error; a new loader with the state reads exactly the rest."""
    make = {"shuffle": True, "seed": 2, "num_workers": 2, "start_method": "forkserver"}
    loader = fg.ClipLoader(data, 4, **make)
    seen = []
    with pytest.raises(RuntimeError, match="killed by signal|exited unexpectedly"):  # noqa: PT012
        for batch in loader:
            seen += _check(batch, truth)
            state = loader.state_dict()
            if state["batches_done"] == 3:
                victim = next(p for p in multiprocessing.active_children() if "Process" in p.name)
                os.kill(victim.pid, signal.SIGKILL)
                time.sleep(0.2)
    assert state["batches_done"] < len(loader)
    resumed = fg.ClipLoader(data, 4, **make)
    resumed.load_state_dict(state)
    for batch in resumed:
        seen += _check(batch, truth)
    assert list(fg.ClipSampler(data, seed=2)) == seen
    assert 1 == resumed.epoch


@pytest.mark.parametrize("done", [0, 1, 5, 9, 10])
def test_resuming_anywhere_is_the_same_epoch(data, truth, done):
    """State taken after any batch gives the rest of that epoch, then the next one."""
    whole = fg.ClipLoader(data, 8, shuffle=True, seed=1)
    assert 10 == len(whole)
    first, second = ([batch["clip"].tolist() for batch in whole] for _ in range(2))
    loader = fg.ClipLoader(data, 8, shuffle=True, seed=1)
    state = loader.state_dict()
    for read, _ in enumerate(loader, 1):
        if read == done:
            state = loader.state_dict()
    resumed = fg.ClipLoader(data, 8, shuffle=True, seed=1)
    resumed.load_state_dict(state if done else whole.state_dict() | {"epoch": 0, "batches_done": 0})
    if done < len(whole):
        assert first[done:] == [batch["clip"].tolist() for batch in resumed]
    assert second == [batch["clip"].tolist() for batch in resumed]


def test_a_state_of_another_loader_is_refused(data):
    """Other clips, batch size or seed: what comes next would not be the rest of that epoch."""
    state = fg.ClipLoader(data, 8, shuffle=True, seed=1).state_dict()
    for other in (
        fg.ClipLoader(data, 4, shuffle=True, seed=1),
        fg.ClipLoader(data, 8, shuffle=True, seed=2),
    ):
        with pytest.raises(fg.InvalidRequestError):
            other.load_state_dict(state)


def test_samplers_of_others_keep_their_order(data):
    """A DistributedSampler's shares, a RandomSampler's order and a BatchSampler's batches come out as they are without us."""
    shares = []
    for rank in range(2):
        sampler = DistributedSampler(data, num_replicas=2, rank=rank, seed=4)
        loader = fg.ClipLoader(data, 4, sampler=sampler)
        for epoch in range(2):
            mine = [clip for batch in loader for clip in batch["clip"].tolist()]
            expected = DistributedSampler(data, num_replicas=2, rank=rank, seed=4)
            expected.set_epoch(epoch)
            assert list(expected) == mine
        shares += mine
    assert set(shares) == set(range(len(data)))
    orders = []
    for wrapped in (False, True):
        random = RandomSampler(data, generator=torch.Generator().manual_seed(9))
        if wrapped:
            loader = fg.ClipLoader(data, batch_sampler=BatchSampler(random, 5, drop_last=True))
            assert len(data) // 5 == len(loader)
            orders.append([batch["clip"].tolist() for batch in loader])
        else:
            orders.append(list(BatchSampler(random, 5, drop_last=True)))
    assert orders[0] == orders[1]


def test_ranks_of_our_own_sampler(data):
    """Two ranks read all clips between them."""
    seen = [
        clip
        for rank in range(2)
        for batch in fg.ClipLoader(data, 4, shuffle=True, rank=rank, world_size=2)
        for clip in batch["clip"].tolist()
    ]
    assert sorted(seen) == list(range(len(data)))


def test_plain_torch_loaders_work_too(data, truth):
    """A DataLoader without us batches by __getitems__; with a LookAhead as batch sampler it looks ahead."""
    seen = [clip for batch in DataLoader(data, 8, num_workers=2) for clip in _check(batch, truth)]
    assert list(range(len(data))) == seen
    batches = fg.LookAhead(BatchSampler(range(len(data)), 8, drop_last=False), num_workers=0)
    before = data.cost()["look_ahead_hits"]
    seen = [clip for batch in DataLoader(data, batch_sampler=batches) for clip in _check(batch, truth)]
    assert list(range(len(data))) == seen
    assert len(batches) - 1 == data.cost()["look_ahead_hits"] - before


@pytest.mark.parametrize("start", ["spawn", "forkserver"])
def test_workers_read_remote_files(server, media, truth, start):
    """Files behind HTTP, their rows built in the parent, are read by workers that are not forked."""
    uris = [server.url(f"{name}.mp4") for name in NAMES]
    with fg.ClipDataset(uris, fg.Windows(6, 6)) as data:
        loader = fg.ClipLoader(data, 4, shuffle=True, num_workers=2, start_method=start)
        seen = [clip for batch in loader for clip in _check(batch, truth)]
    assert sorted(seen) == list(range(len(data)))
    assert len(loader) == loader.cost()["media_waves"]
    assert 0 == loader.cost()["head_moov_requests"]


def test_fork_is_refused_where_it_cannot_work(server, media, tmp_path):
    """Remote files and Lance tables: an error at once from our loader, the same in the worker of a plain one."""
    uris = [server.url(f"{name}.mp4") for name in NAMES]
    with fg.ClipDataset(uris, fg.Windows(6)) as data:
        with pytest.raises(fg.ForkedProcessError, match="forkserver"):
            fg.ClipLoader(data, num_workers=1, start_method="fork")
        # A local table, but one of Lance's, which this process has opened.
        with pytest.raises(fg.ForkedProcessError, match="spawn"):
            list(DataLoader(data, num_workers=1, multiprocessing_context="fork"))
    table = fg.IndexTable.open(tmp_path / "t.lance", create=True)
    table.append([(str(media["hevc"]), fg.build_index(media["hevc"]))])
    with fg.ClipDataset(table, fg.Windows(6)) as data:
        with pytest.raises(fg.ForkedProcessError, match="Lance"):
            fg.ClipLoader(data, num_workers=1, start_method="fork")
        with pytest.raises(fg.ForkedProcessError, match="spawn"):
            list(DataLoader(data, num_workers=1, multiprocessing_context="fork"))
        assert len(data) == sum(len(b["clip"]) for b in fg.ClipLoader(data, 16, num_workers=1))


def _take_frames(samples):
    return torch.stack([torch.from_numpy(sample["frames"]) for sample in samples])


def test_collating_is_the_callers(data, truth):
    """A collate function of the caller's makes the batches, in the worker."""
    for workers in (0, 1):
        loader = fg.ClipLoader(data, 8, num_workers=workers, collate_fn=_take_frames, start_method=None)
        batch = next(iter(loader))
        assert np.array_equal(truth[0][:4], batch[0].numpy())


def test_a_large_list_of_pairs_is_shared_with_workers(media):
    """A worker that is spawned maps the parent's pairs: they are not in its pickle, and not its own memory."""
    pairs = np.stack([np.zeros(1 << 17, np.int64), np.arange(1 << 17) % 50], axis=1)
    with fg.ClipDataset([media["bframes"]], fg.Pairs(pairs, 2)) as data:
        sampler = list(range(5, 1 << 17, 1 << 14))
        for start in ("spawn", "forkserver"):
            loader = fg.ClipLoader(data, 4, sampler=sampler, num_workers=1, start_method=start)
            got = [n for batch in loader for n in batch["frame_numbers"][:, 0].tolist()]
            assert [int(pairs[n, 1]) for n in sampler] == got
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            assert not pool.apply(_owns, (data,))


def _owns(data):
    return bool(data._clips.pairs.flags.owndata)


def test_set_epoch_keeps_a_loaded_place(data):
    """The usual ``set_epoch`` at the top of a loop does not throw a resumed epoch's place away; another epoch's does."""
    whole = fg.ClipLoader(data, 8, shuffle=True)
    order = [batch["clip"].tolist() for batch in whole]
    state = fg.ClipLoader(data, 8, shuffle=True).state_dict() | {"batches_done": 4}
    resumed = fg.ClipLoader(data, 8, shuffle=True)
    resumed.load_state_dict(state)
    resumed.set_epoch(0)
    assert order[4:] == [batch["clip"].tolist() for batch in resumed]
    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    assert len(order) == sum(1 for _ in resumed)


@pytest.mark.parametrize(
    "arguments",
    [
        {"sampler": [1, 2], "shuffle": True},
        {"sampler": [1, 2], "world_size": 2},
        {"batch_sampler": [[1, 2]], "batch_size": 4},
        {"batch_sampler": [[1, 2]], "shuffle": True},
        {"in_order": False},
        {"multiprocessing_context": "fork"},
    ],
)
def test_arguments_without_a_meaning_are_refused(data, arguments):
    """What another argument rules out is an error, not ignored."""
    with pytest.raises(fg.InvalidRequestError):
        fg.ClipLoader(data, **arguments)


def test_only_the_loaders_own_reading_is_counted(data):
    """What was read before a loop, or between two, is not in the loader's cost."""
    data.__getitems__([0, 1, 2])
    loader = fg.ClipLoader(data, 8)
    for _ in range(2):
        assert sum(len(batch["clip"]) for batch in loader) == len(data)
        data[5]
    assert 2 * len(data) == loader.cost()["clips"]


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_none_are_left_out(media, tmp_path, truth, workers):
    """With skip, a batch whose clips all fail is not in the epoch, which goes on; where all do, the epoch is an error."""
    gone = tmp_path / "gone.mp4"
    gone.write_bytes(media["bframes"].read_bytes())
    videos = [media[NAMES[0]], gone, media[NAMES[2]]]
    with fg.ClipDataset(videos, fg.Windows(20, 20), on_error="skip") as data:
        gone.unlink()
        loader = fg.ClipLoader(data, 2, num_workers=workers)
        seen = [batch["clip"].tolist() for batch in loader]
        assert [[0, 1], [2], [6, 7], [8]] == seen
        assert 3 == loader.cost()["skipped_clips"]
        assert 5 == len(loader)
        with pytest.raises(fg.SourceError, match="not one clip"):
            list(fg.ClipLoader(data, 2, sampler=[3, 4, 5], num_workers=workers))


def test_pictures_of_several_sizes_are_told(media, tmp_path):
    """What torch's collate cannot stack is an error that says what to do."""
    from fluxon_gop.encode import Recipe
    from tests.media import make

    small = make(tmp_path / "small.mp4", Recipe(options={"preset": "ultrafast"}), width=64, height=48)
    with fg.ClipDataset([media["bframes"], small], fg.Windows(60)) as data:
        with pytest.raises(fg.InvalidRequestError, match="give height and width"):
            list(fg.ClipLoader(data, 2))


def test_what_workers_cannot_be_sent_is_refused_at_once(data, media):
    """A lambda with workers that are not forked, an unknown way to start, torch that is not there."""
    with fg.ClipDataset([media["bframes"]], fg.Windows(4), transform=lambda sample: sample) as own:
        assert fg.ClipLoader(own, 4, num_workers=1, start_method="fork")
        for start in ("spawn", "forkserver"):
            with pytest.raises(fg.InvalidRequestError, match="lambda"):
                fg.ClipLoader(own, 4, num_workers=1, start_method=start)
    with pytest.raises(fg.InvalidRequestError, match="start_method"):
        fg.ClipLoader(data, 4, num_workers=1, start_method="thread")
    with pytest.raises(fg.InvalidRequestError, match="not one batch"):
        fg.ClipLoader(data, 400, drop_last=True)


def test_a_script_without_a_guard_is_told(media, tmp_path):
    """A worker that imports a script which starts workers says what is missing."""
    script = tmp_path / "train.py"
    script.write_text(
        "import fluxon_gop as fg\n"
        f"data = fg.ClipDataset([{str(media['bframes'])!r}], fg.Windows(4))\n"
        "list(fg.ClipLoader(data, 4, num_workers=1, start_method='spawn'))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode
    assert "if __name__ == '__main__':" in done.stderr
