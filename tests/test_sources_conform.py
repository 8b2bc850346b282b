"""One suite over all sources and wrappers: exact bytes of one version, or a typed error."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import obstore
import pytest
from obstore.store import LocalStore, MemoryStore

import fluxon_gop as fg
from fluxon_gop.sources import uri_of
from tools.range_server import Fault, RangeServer

DATA = bytes(range(256)) * 40


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "a b%20c.bin"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def http(file):
    with RangeServer(file.parent) as server:
        yield server


def _lance_blob(folder: Path, data: bytes, *, stable: bool) -> fg.LanceBlobSource:
    import lance
    import pyarrow as pa

    schema = pa.schema([pa.field("id", pa.int64()), lance.blob_field("video")])
    table = pa.table(
        {"id": pa.array([0, 1]), "video": lance.blob_array([b"another one", data])}, schema=schema
    )
    uri = str(folder / f"blobs-{stable}.lance")
    lance.write_dataset(table, uri, enable_stable_row_ids=stable, data_storage_version="2.2")
    return fg.LanceBlobSource(uri, "video", 1)


def _fsspec(data: bytes) -> fg.FsspecSource:
    import fsspec

    fsspec.filesystem("memory").pipe_file("/conform/a.bin", data)
    return fg.FsspecSource("memory://conform/a.bin")


def _obspec(folder: Path, data: bytes, *, only_blocking: bool = False) -> fg.ObspecSource:
    if only_blocking:
        return fg.ObspecSource(_blocking_again(), "a.bin")
    (folder / "stored").mkdir()
    (folder / "stored" / "a.bin").write_bytes(data)
    return fg.ObspecSource(LocalStore(folder / "stored"), "a.bin")


class _Blocking:
    """Another project's store: obspec's blocking methods, nothing else."""

    def __init__(self, store) -> None:
        self.get, self.head = store.get, store.head

    def __reduce__(self):
        return (_blocking_again, ())


def _blocking_again() -> _Blocking:
    store = MemoryStore()
    obstore.put(store, "a.bin", DATA)
    return _Blocking(store)


def _exported(file: Path) -> fg.RangeSource:
    from tests.fluxonfs import patcher

    return patcher(file.parent)._file("train-videos", file.name).open_source()


@pytest.fixture(
    params=[
        "local",
        "memory",
        "http",
        "traced",
        "s3",
        "lance",
        "lance stable",
        "fsspec",
        "obspec",
        "obspec blocking",
        "export",
        "traced s3",
    ]
)
def source(request, file, http, tmp_path):
    if request.param in {"s3", "traced s3"}:
        s3 = request.getfixturevalue("s3")
        made_s3 = fg.open_source(s3.put("conform/a b%20c.bin", DATA), s3.options)
        yield fg.TracedSource(made_s3) if "traced" in request.param else made_s3
        made_s3.close()
        return
    made = {
        "lance": lambda: _lance_blob(tmp_path, DATA, stable=False),
        "lance stable": lambda: _lance_blob(tmp_path, DATA, stable=True),
        "fsspec": lambda: _fsspec(DATA),
        "obspec": lambda: _obspec(tmp_path, DATA),
        "obspec blocking": lambda: _obspec(tmp_path, DATA, only_blocking=True),
        "export": lambda: _exported(file),
        "local": lambda: fg.LocalSource(file),
        "memory": lambda: fg.MemorySource(DATA, name="bytes"),
        "http": lambda: fg.ObjectStoreSource(http.url(file.name)),
        "traced": lambda: fg.TracedSource(fg.LocalSource(file)),
    }[request.param]()
    yield made
    made.close()


def test_a_source_is_a_range_source(source):
    """Every source meets the protocol."""
    assert isinstance(source, fg.RangeSource)


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (5, 900), (len(DATA) - 3, len(DATA)), (0, len(DATA))])
def test_read_gives_exactly_the_bytes_asked_for(source, start, stop):
    """A read returns bytes [start, stop)."""
    assert DATA[start:stop] == bytes(source.read(start, stop))


def test_read_head_gives_the_start_or_the_whole_of_a_shorter_file(source):
    """The head is what there is, up to the size asked for."""
    assert DATA[:100] == bytes(source.read_head(100))
    assert DATA == bytes(source.read_head(10 * len(DATA)))


def test_the_signature_states_the_size(source):
    """A source states its size and a version."""
    assert len(DATA) == source.signature.size
    assert source.signature.fits(source.signature)


def test_a_read_past_the_end_is_a_short_read(source):
    """A range beyond the file raises, and says how far the file goes."""
    with pytest.raises(fg.SourceError, match=r"asked for bytes|Requested"):
        source.read(len(DATA) - 5, len(DATA) + 5)


@pytest.mark.parametrize(("start", "stop"), [(5, 5), (9, 5), (-1, 5)])
def test_a_senseless_range_is_refused_before_any_io(source, start, stop):
    """Empty, backwards and negative ranges are the caller's fault."""
    with pytest.raises(fg.InvalidRequestError, match="no range to read"):
        source.read(start, stop)


def test_a_pin_of_another_version_is_refused(source):
    """Pinning a version that the file does not have says what was expected and what there is."""
    assert source.signature.size == len(DATA)
    with pytest.raises(fg.SourceChangedError, match=r"expected 7 bytes, etag x, got 10240 bytes"):
        source.pin(fg.Signature(7, "x", 1))


def test_a_closed_source_refuses_reads(source):
    """Use after close says so."""
    source.close()
    with pytest.raises(fg.ClosedError, match="closed"):
        source.read(0, 4)


def test_a_pickle_opens_the_same_file_again(source):
    """A pickle is a recipe."""
    source.read(0, 4)
    copy = pickle.loads(pickle.dumps(source))
    assert DATA[3:9] == bytes(copy.read(3, 9))
    copy.close()


def test_open_source_takes_paths_file_uris_and_http(file, http):
    """The same bytes come by path, by file:// and by http://."""
    uris = [
        file,
        str(file),
        f"file://{str(file).replace('%', '%25').replace(' ', '%20')}",
        http.url(file.name),
    ]
    for uri in uris:
        source = fg.open_source(uri)
        assert DATA[10:20] == bytes(source.read(10, 20))
        source.close()
    assert uri_of(str(file)) == str(file)


@pytest.mark.parametrize(
    ("uri", "error"), [("", fg.InvalidRequestError), (3, TypeError), ("bogus://x/y", ValueError)]
)
def test_open_source_refuses_what_it_cannot_open(uri, error):
    """An empty address, a number and an unknown scheme are refused by name."""
    with pytest.raises(error, match=r"want a path"):
        fg.open_source(uri)


def test_a_missing_file_is_not_found(tmp_path, http):
    """Missing locally or at the server is the builtin's FileNotFoundError too."""
    with pytest.raises(FileNotFoundError, match="no such file"):
        fg.LocalSource(tmp_path / "missing").read(0, 1)
    with pytest.raises(fg.SourceNotFoundError, match="no such file"):
        fg.ObjectStoreSource(http.url("missing")).read(0, 1)


def test_a_folder_is_no_file(tmp_path):
    """A folder is refused by name."""
    with pytest.raises(fg.SourceError, match="is a directory"):
        fg.LocalSource(tmp_path).read(0, 1)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_forbidden_local_file_is_a_permission_error(file):
    """A file without read permission is the builtin's PermissionError too."""
    file.chmod(0)
    with pytest.raises(PermissionError, match="permission denied"):
        fg.LocalSource(file).read(0, 1)


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusing_server_is_a_permission_error(http, file, status):
    """401 and 403 are the builtin's PermissionError too."""
    http.hook = lambda _: Fault(status=status)
    with pytest.raises(fg.SourcePermissionError, match="refuses the read"):
        fg.ObjectStoreSource(http.url(file.name)).read(0, 1)


def test_a_local_file_changed_in_place_is_found_at_the_next_read(file):
    """Size and mtime are compared at every read."""
    source = fg.LocalSource(file)
    source.read(0, 4)
    file.write_bytes(DATA + b"more")
    with pytest.raises(fg.SourceChangedError, match="the file changed"):
        source.read(0, 4)
    source.close()


@pytest.mark.parametrize("kind", ["strong etag", "weak etag", "last modified"])
def test_a_file_changed_behind_http_is_found_at_the_next_read(file, kind):
    """By If-Match, by the answer's weak etag, or by its date: two versions never mix."""
    with RangeServer(
        file.parent, weak_etag=kind == "weak etag", send_etag=kind != "last modified"
    ) as server:
        source = fg.ObjectStoreSource(server.url(file.name))
        source.read(0, 4)
        file.write_bytes(DATA[::-1])
        os.utime(file, (2_000_000_000, 2_000_000_000))
        with pytest.raises(fg.SourceChangedError, match="the file changed"):
            source.read(0, 4)


def test_a_pinned_source_needs_no_head_request(http, file):
    """With the version from an index row the first request is the read itself."""
    known = fg.ObjectStoreSource(http.url(file.name))
    signature = known.signature
    http.reset()
    source = fg.ObjectStoreSource(http.url(file.name))
    source.pin(signature)
    source.read(5, 50)
    assert ["GET"] == [request.method for request in http.requests]


def test_secrets_in_an_address_are_never_shown(http, file):
    """User, password and query are in no name, repr or error."""
    url = http.url(file.name).replace("http://", "http://user:secret@") + "?token=secret"
    source = fg.ObjectStoreSource(url)
    assert "secret" not in repr(source) + source.name
    http.hook = lambda _: Fault(status=404)
    with pytest.raises(fg.SourceError) as caught:
        source.read(0, 4)
    assert "secret" not in str(caught.value) + repr(caught.value)


def test_a_cut_answer_is_an_error(http, file):
    """A body shorter than promised never comes back as data."""
    http.hook = lambda _: Fault(truncate_to=3)
    source = fg.ObjectStoreSource(http.url(file.name), {"timeout": "2s"})
    with pytest.raises(fg.SourceError):
        source.read(0, 100)


def test_a_silent_server_is_a_deadline_error(http, file):
    """No answer within the time limit is the builtin's TimeoutError too."""
    http.hook = lambda _: Fault(delay_s=1)
    source = fg.ObjectStoreSource(http.url(file.name), {"timeout": "300ms", "max_retries": 0})
    with pytest.raises(fg.DeadlineError, match="no answer within"):
        source.read(0, 100)


def _in_child(work) -> str:
    """Run ``work`` in a forked child and return what it wrote, or "hung"."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = work()
        except BaseException as error:  # noqa: BLE001 - the child's answer
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(child, 0)
    return answer


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Lance's own, at a fork
def test_a_local_source_works_in_a_forked_child(file):
    """pread shares no file position: a child reads through the parent's open file."""
    source = fg.LocalSource(file)
    source.read(0, 4)
    assert "ok" == _in_child(lambda: "ok" if bytes(source.read(7, 99)) == DATA[7:99] else "wrong")
    source.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Lance's own, at a fork
def test_a_remote_source_in_a_forked_child_raises_at_once(http, file):
    """After the parent read remotely, a child's remote read raises ForkedProcessError with the way out."""
    source = fg.ObjectStoreSource(http.url(file.name))
    source.read(0, 4)
    other = fg.ObjectStoreSource(http.url(file.name))
    for used in (source, other):
        answer = _in_child(lambda used=used: str(bytes(used.read(0, 4))))
        assert answer.startswith("ForkedProcessError: ")
        assert "spawn" in answer


def test_the_trace_counts_requests_bytes_and_depth(file):
    """Two reads one after another are two requests in series; the sums are in the repr."""
    trace = fg.Trace()
    source = fg.TracedSource(fg.LocalSource(file), trace)
    source.read(0, 10)
    source.read(50, 60)
    with pytest.raises(fg.ShortReadError):
        source.read(0, 10**6)
    assert (3, 20, 3) == (len(trace.requests), trace.nbytes, trace.depth)
    assert "3 requests, 20 bytes, depth 3" in repr(trace)
    assert trace.seconds >= 0
    trace.reset()
    assert (0, 0.0, 0) == (trace.nbytes, trace.seconds, trace.depth)
    source.close()
