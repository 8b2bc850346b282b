"""What once went wrong under threads, forks, faults and changes, and must not again."""

from __future__ import annotations

import os
import random
import threading

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest

import fluxon_gop as fg
from fluxon_gop import index_rows
from fluxon_gop.encode import Recipe
from fluxon_gop.table_rows import Damaged
from tests.cases import BASE, remux
from tests.media import full_decode, make
from tools.range_server import Fault

FORK = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # Lance's own, at a fork
]


class FlakySource(fg.MemorySource):
    """Bytes whose reads fail when ``failing`` says so."""

    def __init__(self, data, name=None):
        super().__init__(data, name)
        self.failing = lambda start: False

    def read(self, start, stop):
        if self.failing(start):
            text = "a passing fault"
            raise fg.SourceError(text, source=self.name)
        return super().read(start, stop)

    def read_head(self, size):
        return self.read(0, min(size, self.signature.size))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("close", [True, False])
def test_frame_threads_that_are_left_in_the_midst_end(media, close):
    """A decoder with packets under way is dropped, over and over, and nothing waits for anything."""
    for _ in range(60):
        reader = fg.VideoReader.open(media["bframes"], num_threads=3)
        for number, _ in reader.iter_frames(10):
            if number == 13:
                break
        if close:
            reader.close()


def _answer_of_a_child(work) -> int:
    child = os.fork()
    if child == 0:
        try:
            held = work()
        finally:
            os._exit(0 if held else 1)
    return os.waitpid(child, 0)[1]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("path_choice", [None, "container"])
@pytest.mark.parametrize("threads", [1, 3])
class TestForkedChild:
    """What a child of a process that has read may do."""

    pytestmark = FORK

    def test_reads_and_closes_what_the_parent_used(self, media, threads, path_choice):
        """Readers and pools with frame threads work in a child, and close in both."""
        truth = full_decode(media["bframes"])
        request = fg.VideoReadRequest(media["bframes"], [3])
        with (
            fg.VideoReader.open(media["bframes"], num_threads=threads, path=path_choice) as reader,
            fg.VideoReaderPool(num_threads=threads, path=path_choice) as pool,
        ):
            reader.read_frames_numpy([3])
            pool.read_many([request])

            def work() -> bool:
                right = np.array_equal(truth[[50, 4]], reader.read_frames_numpy([50, 4]))
                right &= np.array_equal(truth[[3]], pool.read_many([request])[0].array)
                reader.close()
                pool.close()
                return bool(right)

            assert 0 == _answer_of_a_child(work)
            assert np.array_equal(truth[[9]], reader.read_frames_numpy([9]))

    def test_takes_no_lock_of_the_parents_other_threads(self, media, threads, path_choice):
        """A fork while another thread is inside the reader leaves the child free to read."""
        with fg.VideoReader.open(media["bframes"], num_threads=threads, path=path_choice) as reader:
            inside, go = threading.Event(), threading.Event()

            def hold() -> None:
                with reader._lock:
                    inside.set()
                    go.wait(20)

            thread = threading.Thread(target=hold)
            thread.start()
            inside.wait(20)
            try:
                assert 0 == _answer_of_a_child(lambda: len(reader.read_frames_numpy([5])) == 1)
            finally:
                go.set()
                thread.join()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_iterator_of_the_parent_refuses_to_go_on_in_a_child(media):
    """It says so, and how to start anew."""
    with fg.VideoReader.open(media["bframes"]) as reader:
        frames = reader.iter_frames()
        next(frames)

        def work() -> bool:
            try:
                next(frames)
            except fg.ForkedProcessError as error:
                return "start a new one" in str(error)
            return False

        assert 0 == _answer_of_a_child(work)
        assert 1 == next(frames)[0]


def test_a_passing_fault_loses_no_count(media, tmp_path):
    """After a failed read a counted file starts over: no shifted frame, no false end, the right count."""
    whole = make(tmp_path / "v.mp4", Recipe(options={**BASE.options, "crf": "4"}), 60, 320, 240)
    path = remux(whole, tmp_path / "v.ts", format="mpegts")
    truth = full_decode(path)
    assert path.stat().st_size > 600_000
    source = FlakySource(path.read_bytes())
    with fg.VideoReader.open(source) as reader:
        source.failing = lambda start: start > 0
        with pytest.raises(fg.SourceError, match="a passing fault"):
            reader.num_frames  # noqa: B018 - the count reads the file
        for attempt in range(3):
            source.failing = lambda start, attempt=attempt: start > 150_000 * (attempt + 1)
            with pytest.raises(fg.SourceError, match="a passing fault"):
                reader.read_frames_numpy([58])
            source.failing = lambda start: False
            assert np.array_equal(truth[[20, 40]], reader.read_frames_numpy([20, 40]))
        assert 60 == reader.num_frames


def test_a_relative_path_means_the_file_of_the_present_folder(media, tmp_path, monkeypatch):
    """After a change of folder the same words name another video."""
    for name in ("bframes", "vp9"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "v.mp4").write_bytes(media[name].read_bytes())
    with fg.VideoReaderPool() as pool:
        for name in ("bframes", "vp9"):
            monkeypatch.chdir(tmp_path / name)
            (result,) = pool.read_many([fg.VideoReadRequest("v.mp4", [7])])
            assert np.array_equal(full_decode(media[name])[[7]], result.array)


def test_equal_requests_get_arrays_of_their_own(media):
    """What one caller does to its pictures is nobody else's."""
    with fg.VideoReaderPool() as pool:
        one, two = pool.read_many([fg.VideoReadRequest(media["bframes"], [1, 2])] * 2)
    assert not np.shares_memory(one.array, two.array)
    assert np.array_equal(one.array, two.array)


def test_a_callers_source_stays_open(media):
    """Neither eviction nor closing the pool closes a source that was passed in."""
    sources = [fg.LocalSource(media[name]) for name in ("bframes", "vp9")]
    with fg.VideoReaderPool(max_readers=1) as pool:
        for source in (*sources, *sources):
            pool.read_many([fg.VideoReadRequest(source, [0])])
    assert all(len(source.read(0, 4)) == 4 for source in sources)
    for source in sources:
        source.close()


@pytest.mark.timeout(30)
def test_an_iterator_may_go_on_in_another_thread(media):
    """No lock is held between two frames."""
    with fg.VideoReader.open(media["bframes"]) as reader:
        frames = reader.iter_frames()
        first = next(frames)[0]
        rest: list[int] = []
        thread = threading.Thread(target=lambda: rest.extend(number for number, _ in frames))
        thread.start()
        thread.join()
        assert list(range(60)) == [first, *rest]
        assert 1 == len(reader.read_frames_numpy([3]))


@pytest.mark.timeout(30)
def test_a_pipe_is_no_file(tmp_path):
    """A FIFO and a device are refused, not waited for."""
    os.mkfifo(tmp_path / "pipe.mp4")
    for path in (tmp_path / "pipe.mp4", "/dev/zero"):
        with pytest.raises(fg.SourceError, match="no regular file"):
            fg.VideoReader.open(path)


def test_a_damaged_arrow_table_is_an_error_and_not_the_end(media, tmp_path):
    """Random bytes changed in the table: its rows fail, or it does not open; the process lives."""
    path = tmp_path / "t.arrow"
    with fg.IndexTable.open(path, create=True) as table:
        table.append([(name, fg.build_index(media[name])) for name in ("bframes", "hevc", "vp9")])
    data = path.read_bytes()
    generator = random.Random(3)
    opened = 0
    for _ in range(200):
        mutant = bytearray(data)
        for _ in range(generator.choice([1, 3])):
            mutant[generator.randrange(len(mutant))] ^= 1 << generator.randrange(8)
        path.write_bytes(mutant)
        try:
            with fg.IndexTable.open(path) as table:
                table.lookup(["bframes", "hevc", "vp9"])
                opened += 1
        except fg.IndexTableError:
            continue
    assert opened


def test_a_folder_is_no_arrow_table(tmp_path):
    """Nor does a table with a version but without its columns pass."""
    (tmp_path / "t.arrow").mkdir()
    with pytest.raises(fg.IndexTableError):
        fg.IndexTable.open(tmp_path / "t.arrow")
    metadata = {index_rows.VERSION_KEY: index_rows.INDEX_VERSION.encode()}
    table = pa.table({"row_checksum": ["x"]}).replace_schema_metadata(metadata)
    with pa.OSFile(str(tmp_path / "u.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as out:
        out.write_table(table)
    with pytest.raises(fg.IndexTableError, match="columns missing or of another type: uri"):
        fg.IndexTable.open(tmp_path / "u.arrow")


@pytest.mark.parametrize("moov", [[-5, 10], [0, 0], [100, -5], [0, 1 << 62], [None, 3], [7], None])
def test_an_impossible_hint_is_damage(media, tmp_path, moov):
    """It is counted and not followed."""
    table = pa.table({"uri": [str(media["bframes"])], "moov_range": pa.array([moov], pa.list_(pa.int64()))})
    with pa.OSFile(str(tmp_path / "s.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as out:
        out.write_table(table)
    with fg.IndexTable.open(tmp_path / "s.arrow") as opened:
        assert isinstance(opened.lookup([str(media["bframes"])])[0], Damaged)
        with fg.VideoReader.open(media["bframes"], index=opened) as reader:
            assert (1, 60) == (reader.stats().damaged_rows, reader.num_frames)


def test_a_number_beyond_a_stale_rows_end_is_read_from_the_longer_file(tmp_path, server):
    """Before a row says "beyond the end", one byte asks whether the file is still its version."""
    path = server.root / "growing.mp4"
    try:
        make(path, BASE, 60)
        uri = server.url("growing.mp4")
        with fg.IndexTable.open(tmp_path / "t.arrow", create=True) as table:
            table.append([(uri, fg.build_index(uri))])
            make(path, BASE, 90)
            os.utime(path, (2_000_000_000, 2_000_000_000))
            with fg.VideoReader.open(uri, index=table) as reader:
                assert np.array_equal(full_decode(path)[[80]], reader.read_frames_numpy([80]))
                with pytest.raises(fg.FrameIndexError, match="90 frames"):
                    reader.read_frames_numpy([90])
    finally:
        path.unlink()


def test_a_file_that_changed_is_read_anew_at_the_next_batch(media, tmp_path):
    """A changed file fails one batch with a typed error and does not poison its reader's place in the pool."""
    path = tmp_path / "v.mp4"
    path.write_bytes(media["bframes"].read_bytes())
    with fg.VideoReaderPool() as pool:
        pool.read_many([fg.VideoReadRequest(path, [3])])
        path.write_bytes(media["vp9"].read_bytes())
        with pytest.raises(fg.SourceChangedError):
            pool.read_many([fg.VideoReadRequest(path, [3])])
        (result,) = pool.read_many([fg.VideoReadRequest(path, [3])])
    assert np.array_equal(full_decode(path)[[3]], result.array)


def test_one_bad_address_spoils_its_own_request_only(media):
    """With on_error="skip" an address that nothing opens is that request's error."""
    uris = [
        "bogus://x/y",
        "bad\0name",
        "http://[",
        "http://host:99999/x",
        "http://host/../x",
        media["bframes"],
    ]
    with fg.VideoReaderPool() as pool:
        results = pool.read_many([fg.VideoReadRequest(uri, [0]) for uri in uris], on_error="skip")
    assert [True] * 5 + [False] == [isinstance(result.error, fg.InvalidRequestError) for result in results]


@pytest.mark.parametrize("status", [412, 416, 500, 404, 403])
def test_any_answer_is_a_typed_error(media, server, status):
    """Whatever status comes first, one video's request fails with a SourceError and the batch goes on."""
    server.hook = lambda info: Fault(status=status) if info.path == "vp9.mp4" else None
    with fg.VideoReaderPool(storage_options={"timeout": "9s", "max_retries": 0}) as pool:
        requests = [fg.VideoReadRequest(server.url(f"{name}.mp4"), [0]) for name in ("vp9", "bframes")]
        bad, good = pool.read_many(requests, on_error="skip")
    assert isinstance(bad.error, fg.SourceError)
    assert good.error is None


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        ([1 << 70], "beyond the end of any video"),
        ([-(1 << 70)], "negative"),
        (range(1 << 70), "more frames than a video has"),
        (range(10**14), "more frames than a video has"),
        (np.array([1], "timedelta64[s]"), "timedelta64"),
    ],
)
def test_absurd_numbers_are_refused(media, indices, words):
    """Before any memory is taken."""
    with (
        fg.VideoReader.open(media["bframes"]) as reader,
        pytest.raises((ValueError, TypeError), match=words),
    ):
        reader.read_frames_numpy(indices)


@pytest.mark.parametrize(
    "options",
    [{"height": 1 << 31, "width": 1 << 31}, {"num_threads": 1 << 40}, {"stream_index": -1}],
)
def test_absurd_choices_are_refused(media, options):
    """Sizes, threads and streams that nothing has."""
    with pytest.raises(fg.InvalidRequestError):
        fg.VideoReader.open(media["bframes"], **options)
    with pytest.raises(TypeError):
        fg.VideoReader.open(media["bframes"], stream_index="x")
