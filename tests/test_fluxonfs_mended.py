"""Faults that were found in FluxonFS's rooms by attack and by reading, each as the sentence that must hold instead."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import fluxon_gop as fg
from fluxon_gop.fluxonfs import (
    FluxonFsExport,
    FluxonFsPatcher,
    FluxonFsVideoReaderPool,
    MissPolicy,
    piece_cache,
)
from fluxon_gop.fluxonfs.backfill import Backfill
from fluxon_gop.fluxonfs.disk_tier import HEAD_BYTES, DiskTier
from fluxon_gop.fluxonfs.file_lock import FileLock
from fluxon_gop.fluxonfs.piece_key import FilePieces
from fluxon_gop.fluxonfs.relpath import check_relpath
from fluxon_gop.lazily import lazily
from tests.fluxonfs import NAMES, opened, patcher, request, totals
from tests.media import RECIPES, full_decode, make
from tools.range_server import RangeServer


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    (folder / "a" / "b").mkdir(parents=True)
    make(folder / NAMES[1], RECIPES["bframes"])
    make(folder / "v.mkv", RECIPES["bframes"])
    return folder


@pytest.fixture(scope="module")
def truth(root) -> np.ndarray:
    return full_decode(root / NAMES[1])


def key(n: int = 0, size: int = 4096):
    return FilePieces("p", "f", "e", f"v{n}", fg.Signature(size, None, n), 4096).key(0)


def test_an_open_reader_is_of_one_version_with_an_index_row_too(root, truth, tmp_path):
    """The file is replaced: the reader that was opened before says so, whether or not it had a row."""
    shutil.copy(root / NAMES[1], tmp_path / "v.mp4")
    with fg.IndexTable.open(tmp_path / "rows.arrow", create=True) as rows:
        with patcher(tmp_path) as one:
            rows.append([(("train-videos", "v.mp4"), one.build_index("train-videos", "v.mp4"))])
        one = patcher(tmp_path, index=rows, metadata_cache_ttl_ms=0)
        with opened(one, "v.mp4") as reader:
            assert np.array_equal(truth[[4]], reader.read_frames_numpy([4]))
            make(tmp_path / "new.mp4", RECIPES["allintra"]).replace(tmp_path / "v.mp4")
            with pytest.raises(fg.SourceChangedError):
                reader.read_frames_numpy([4])


def test_a_stuck_process_of_the_node_is_waited_for_once_not_once_a_piece(
    root, truth, tmp_path, monkeypatch
):
    """Another process holds the claims on all pieces: one wait for all of them, then one request for the run."""
    monkeypatch.setattr(piece_cache, "CLAIM_SECONDS", 0.2)
    with RangeServer(root) as server:
        one = patcher(server.base_url, cache={"disk_path": tmp_path / "disk", "memory_bytes": 0})
        source = one._file(*NAMES).open_source()
        assert source.size > 5 * 4096
        with FileLock(str(tmp_path / "disk" / "claims")) as stuck:
            for index in source.pieces.indices(0, source.size):
                assert stuck.try_lock(source.pieces.key(index).number)
            data = source.read(0, source.size)
        assert (root / NAMES[1]).read_bytes() == bytes(data)
        assert 1 == source.counters()["remote_read_calls"]
        assert ["HEAD", "GET"] == [record.method for record in server.requests]


def test_what_a_stopped_process_holds_of_the_book_hangs_no_read(root, truth, tmp_path):
    """Another process holds the lock of the usage file: a read that stages is exact, and its piece is not kept."""
    one = patcher(
        root, cache={"disk_path": tmp_path / "disk"}, miss_policy=MissPolicy.STAGE_TO_KV_THEN_READ
    )
    with FileLock(str(tmp_path / "disk" / "usage")) as stopped:
        assert stopped.try_lock(0)
        with opened(one) as reader:
            assert np.array_equal(truth[[4]], reader.read_frames_numpy([4]))
    assert [] == list((tmp_path / "disk").rglob("*.p*"))


def test_flush_waits_for_what_every_answered_read_has_brought(root, tmp_path):
    """After a read and a flush each piece of it is on disk."""
    for n in range(20):
        one = patcher(root, cache={"disk_path": tmp_path / str(n)})
        source = one._file(*NAMES).open_source()
        source.read(0, source.size)
        assert one.flush(10)
        assert len(source.pieces.indices(0, source.size)) == len(list((tmp_path / str(n)).rglob("*.piece")))


def test_what_waits_for_the_disk_is_served_meanwhile(root, tmp_path, monkeypatch):
    """Without a memory tier, pieces that are being stored are read from there: no second request, no wait."""
    go_on = threading.Event()
    put = DiskTier.put
    monkeypatch.setattr(DiskTier, "put", lambda *arguments: go_on.wait(10) and put(*arguments))
    one = patcher(root, cache={"disk_path": tmp_path / "disk", "memory_bytes": 0})
    first, second = (one._file(*NAMES).open_source() for _ in range(2))
    assert bytes(first.read(0, first.size)) == bytes(second.read(0, first.size))
    assert 0 == second.counters()["remote_read_calls"]
    go_on.set()
    assert one.close()


def test_a_relative_root_is_the_folder_of_the_moment_when_it_was_named(root, tmp_path, monkeypatch):
    """Two folders of one name never share a key, and a change of folder moves no export."""
    exports = []
    for name in ("x", "y"):
        (tmp_path / name / "videos").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / name)
        exports.append(FluxonFsExport("e", "videos"))
    assert exports[0].key_prefix != exports[1].key_prefix
    shutil.copy(root / NAMES[1], tmp_path / "x" / "videos" / "v.mp4")
    assert FluxonFsPatcher(exports[:1]).stat("e", "v.mp4").size > 0


def test_a_folder_that_others_made_meanwhile_is_not_used(root, tmp_path):
    """The tier's folder is deleted and made again with everybody's right to write: nothing is read or written there."""
    disk = tmp_path / "disk"
    with patcher(root, cache={"disk_path": disk, "memory_bytes": 0, "disk_retry_seconds": 0}) as one:
        shutil.rmtree(disk)
        disk.mkdir()
        disk.chmod(0o777)
        for _ in range(2):
            one.open_video_reader_pool().read_many_numpy_with_stats([request()])
            one.flush()
        assert one.stats()["disk_errors"] > 0
    assert [] == list(disk.iterdir())


def test_a_dropped_patcher_holds_no_claim_and_no_descriptor(root, tmp_path):
    """Never closed, its backfills are worked off, and others may claim its pieces."""

    def held() -> list[str]:
        """Return the files of the tier and of the export that are open; other threads of the process have theirs."""
        found = []
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                found.append(os.readlink(descriptor))  # noqa: PTH115 - a socket's is no path
        return [name for name in found if name.startswith((str(tmp_path), str(root)))]

    one = patcher(root, cache={"disk_path": tmp_path / "disk"})
    one.open_video_reader_pool().read_many_numpy_with_stats([request()])
    del one
    gc.collect()
    until = time.monotonic() + 10
    while held() and time.monotonic() < until:
        time.sleep(0.05)
        gc.collect()
    assert not held()
    assert list((tmp_path / "disk").rglob("*.piece"))


def test_a_job_that_raises_ends_neither_the_others_nor_the_thread():
    """What follows a backfill that failed is done all the same; flush ends."""
    done, backfill = [], Backfill(1000)

    def bad(wanted: bool) -> None:
        raise MemoryError

    for job in (bad, done.append, bad, done.append):
        backfill.submit(10, job)
    assert backfill.flush(10)
    assert [True, True] == done
    assert 2 == backfill.dropped


@pytest.mark.parametrize("where", ["assembled", "put"])
@pytest.mark.parametrize("policy", list(MissPolicy))
def test_out_of_memory_in_the_middle_is_an_error_and_no_hang(
    root, truth, tmp_path, monkeypatch, where, policy
):
    """Whatever a step raises, the read ends, and the next one is right."""
    from fluxon_gop.fluxonfs.piece_reads import PieceRead

    one = patcher(root, cache={"disk_path": tmp_path / "disk"}, miss_policy=policy)
    kind, name = (PieceRead, "_assembled") if where == "assembled" else (DiskTier, "put")
    with monkeypatch.context() as broken, opened(one) as reader:
        assert one.flush(10)
        one._file_system.pieces.memory.clear()

        def fail(*_: object) -> None:
            raise MemoryError

        broken.setattr(kind, name, fail)
        shutil.rmtree(tmp_path / "disk")
        if where == "assembled" or policy is MissPolicy.STAGE_TO_KV_THEN_READ:
            with pytest.raises(MemoryError):
                reader.read_frames_numpy([4])
        else:
            assert np.array_equal(truth[[4]], reader.read_frames_numpy([4]))
        assert one.flush(10)
    with opened(one) as reader:
        assert np.array_equal(truth[[4]], reader.read_frames_numpy([4]))


def test_no_pages_are_kept_where_none_are_wanted(root, truth):
    """``page_cache_pages=0`` turns the page cache off: unplanned reads work, and are read again."""
    with patcher(root, cache={"page_cache_pages": 0, "memory_bytes": 0}) as one:
        source = one._file(*NAMES).open_source()
        for _ in range(2):
            assert (root / NAMES[1]).read_bytes()[5:9] == source.read_at(5, 4)
        assert (0, 2) == (source.counters()["page_cache_hits"], source.counters()["remote_read_calls"])
        with opened(one, "v.mkv") as reader:
            assert np.array_equal(truth[[4]], reader.read_frames_numpy([4]))


async def _deny(*_: object) -> bool:
    return False


def _raise(identity, export, relpath) -> bool:
    raise KeyError(identity)


@pytest.mark.parametrize(
    "rule", [_deny, _raise, lambda *_: "no", lambda *_: 1, lambda *_: None], ids=range(5)
)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_only_true_itself_allows(root, rule):
    """A coroutine, a word, a number, nothing, an error: each is a refusal that does not tell the identity."""
    one = patcher(root, readers=rule, request_identity=("alice", "sesame"))
    with pytest.raises(PermissionError) as caught:
        opened(one)
    told = str(caught.value) + repr(caught.value.__cause__)
    assert "sesame" not in told
    # Its traceback holds the coroutine, whose warning belongs to this test.
    del caught
    gc.collect()


@pytest.mark.parametrize("relpath", [NAMES[1], "v.mkv"])
def test_a_right_that_is_gone_ends_reads_that_need_no_bytes_too(root, relpath):
    """Frames at hand, no frames, the number of frames, the plan of a batch: all refused."""
    allowed = [True]
    one = patcher(root, readers=lambda *_: allowed[0], metadata_cache_ttl_ms=0)
    pool = one.open_video_reader_pool()
    with opened(one, relpath) as reader:
        reader.read_frames_numpy(range(10))
        pool.read_many_numpy_with_stats([request(relpath, range(10))])
        allowed[0] = False
        for attempt in (
            lambda: reader.read_frames_numpy([]),
            lambda: reader.read_frames_numpy([10]),
            lambda: reader.num_frames,
            lambda: pool.read_many_numpy_with_stats([request(relpath, ())]),
            lambda: pool.read_many_numpy_with_stats([request(relpath, (10,))]),
            lambda: pool.explain([request(relpath, (10,))]),
        ):
            with pytest.raises(PermissionError, match="export 'train-videos'"):
                attempt()


def test_a_piece_that_is_used_outlives_those_that_are_not(tmp_path):
    """The least recently used go first: an old piece that was just read stays, younger ones that were not go."""
    tier = DiskTier(tmp_path / "d", 10 * (4096 + HEAD_BYTES))
    for n in range(10):
        assert tier.put(key(n), bytes([n]) * 4096)
    for path in (tmp_path / "d").rglob("*.piece"):
        os.utime(path, (time.time() - 1000,) * 2)
    assert tier.get(key(0)) is not None
    for n in range(10, 16):
        assert tier.put(key(n), bytes([n]) * 4096)
    assert tier.get(key(0)) is not None
    assert sum(tier.get(key(n)) is not None for n in range(1, 10)) < 5


def test_one_piece_is_counted_once(tmp_path):
    """The book of bytes in use says what lies on disk."""
    tier = DiskTier(tmp_path / "d", 1 << 20)
    for n in range(8):
        tier.put(key(n), bytes(4096))
    lying = sum(path.stat().st_size for path in (tmp_path / "d").rglob("*.piece"))
    assert str(lying) == (tmp_path / "d" / "usage").read_text().split()[0]


def test_a_source_that_is_closed_in_the_middle_of_a_read_returns_no_other_files_bytes(
    root, tmp_path, monkeypatch
):
    """The descriptor's number is given to another file before the read: the read says that the source is closed."""
    (tmp_path / "other").write_bytes(b"other" * 100)
    source = fg.LocalSource(root / NAMES[1])
    source.read(0, 4)
    pread = os.pread

    def late(descriptor: int, size: int, offset: int) -> bytes:
        source.close()
        again = os.open(tmp_path / "other", os.O_RDONLY)
        try:
            assert again == descriptor
            return pread(descriptor, size, offset)
        finally:
            os.close(again)

    monkeypatch.setattr(os, "pread", late)
    with pytest.raises(fg.ClosedError):
        source.read(0, 4)


def test_a_foreign_reader_that_broke_is_not_kept():
    """After an error that is not the caller's, the next call opens another reader."""

    class Broken:
        def read_frames_numpy(self, indices):
            text = "broken"
            raise OSError(text)

        def stats(self):
            return {}

        def close(self) -> None:
            raise OSError

    class Agent:
        opened = 0

        def open_video_reader(self, *_: object) -> Broken:
            self.opened += 1
            return Broken()

    agent = Agent()
    pool = FluxonFsVideoReaderPool(agent=agent)
    for n in (1, 2):
        with pytest.raises(OSError, match="broken"):
            pool.read_many_numpy_with_stats([request()])
        assert (n, 0) == (agent.opened, pool.stats()["current_readers"])


@pytest.mark.parametrize(
    "escape",
    ["%" + "25" * 9 + "2e%2e/x", "%c0%ae%c0%ae/x", "a/%c0%afb", "a/%ff", "%25252525252525252525" + "2e./x"],
)
def test_escapes_are_decoded_as_often_as_they_can_be(escape):
    """However often it is escaped, and overlong forms too."""
    with pytest.raises(fg.InvalidRequestError, match="percent escapes"):
        check_relpath(escape)


def test_a_read_that_fails_for_one_reader_is_made_again_by_those_who_joined_it(root, monkeypatch):
    """Two readers want one piece; the first one's request fails: it gets the error, the second one the bytes."""
    inside, go_on = threading.Event(), threading.Event()
    with patcher(root) as one:
        first, second = (one._file(*NAMES).open_source() for _ in range(2))

        def fail(start: int, stop: int) -> bytes:
            inside.set()
            assert go_on.wait(10)
            text = "broken"
            raise fg.SourceError(text)

        monkeypatch.setattr(first, "read_origin", fail)
        outcomes: dict[str, object] = {}

        def read(name: str, source) -> None:
            try:
                outcomes[name] = bytes(source.read(0, 10))
            except fg.SourceError as error:
                outcomes[name] = str(error)

        threads = [
            threading.Thread(target=read, args=pair) for pair in (("first", first), ("second", second))
        ]
        threads[0].start()
        assert inside.wait(10)
        threads[1].start()
        while not second.counters()["shared_reads"]:
            time.sleep(0.005)
        go_on.set()
        for thread in threads:
            thread.join(10)
    assert {"first": "broken", "second": (root / NAMES[1]).read_bytes()[:10]} == outcomes
    assert (0, 1) == (first.counters()["remote_read_calls"], second.counters()["remote_read_calls"])


def test_a_lazy_property_is_computed_once_and_needs_no_lock():
    """The value stays in the object; the class shows the property; no lock is there to be forked in a held state."""

    class Thing:
        calls = 0

        @lazily
        def value(self) -> list[int]:
            """Say so."""
            self.calls += 1
            return []

    thing = Thing()
    assert thing.value is thing.value
    assert (1, "Say so.") == (thing.calls, Thing.value.__doc__)
    assert not any("lock" in name for name in vars(Thing.value))


def test_many_slow_backfills_take_no_descriptors(root, tmp_path, monkeypatch):
    """With every write slow, claims on hundreds of pieces cost one descriptor."""
    go_on = threading.Event()
    monkeypatch.setattr(DiskTier, "put", lambda *_: go_on.wait(10))
    for n in range(100):
        os.link(root / NAMES[1], tmp_path / f"{n}.mp4")
    with patcher(tmp_path, cache={"disk_path": tmp_path / "disk"}) as one:
        pool = one.open_video_reader_pool(max_readers=4)
        before = len(list(Path("/proc/self/fd").iterdir()))
        results = pool.read_many_numpy_with_stats([request(f"{n}.mp4", (3,)) for n in range(100)])
        assert totals(results)["remote_read_calls"] > 0
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 8
        go_on.set()
