"""Remote reads: faults, limits, renewals, versions, calling off; S3 and Lance in one wave or call."""

from __future__ import annotations

import pickle
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import fluxon_gop as fg
from fluxon_gop.sources.options import parse_options
from fluxon_gop.sources.range_source import GroupRead
from tests.media import RECIPES, full_decode, make
from tools.range_server import Fault, RangeServer, RequestInfo

VIDEOS = 16
QUICK = {"timeout": "400ms", "retry_timeout": "3s", "max_retries": 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("remote")
    make(folder / "0.mkv", RECIPES["bframes"], 30)
    for n in range(VIDEOS):
        make(folder / f"{n}.mp4", RECIPES[("bframes", "faststart", "hevc", "opengop")[n % 4]], 30)
    return folder


@pytest.fixture(scope="module")
def truth(folder) -> list[np.ndarray]:
    return [full_decode(folder / f"{n}.mp4") for n in range(VIDEOS)]


def clips(seed: int = 3) -> list[list[int]]:
    generator = random.Random(seed)
    return [sorted(generator.sample(range(30), 8)) for _ in range(VIDEOS)]


def batch(sources, wanted) -> list[fg.VideoReadRequest]:
    return [fg.VideoReadRequest(source, clip) for source, clip in zip(sources, wanted, strict=True)]


def exact(results, wanted, truth) -> bool:
    return all(np.array_equal(p[c], r.array) for r, c, p in zip(results, wanted, truth, strict=True))


# ------------------------------------------------------------- one wave, one call


def test_sixteen_files_of_eight_frames_are_one_wave_on_s3(folder, truth, s3, tmp_path):
    """With rows in memory: as many requests as the plan says, one wave, no HEAD, exact frames, planned bytes only."""
    uris = [s3.put(f"sixteen/{n}.mp4", (folder / f"{n}.mp4").read_bytes()) for n in range(VIDEOS)]
    with fg.IndexTable.open(tmp_path / "rows.arrow", create=True) as rows:
        rows.append([(uri, fg.build_index(uri, storage_options=s3.options)) for uri in uris])
        rows.lookup(uris)
        with fg.VideoReaderPool(index=rows, storage_options=s3.options) as pool:
            requests = batch(uris, clips())
            plan = pool.explain(requests)
            results = pool.read_many(requests)
            stats = pool.stats()
    assert exact(results, clips(), truth)
    assert (1, 0) == (stats.depth, stats.unplanned_requests)
    assert {fg.WaveKind.MEDIA: plan.requests} == stats.requests
    assert plan.nbytes == stats.total_bytes


def test_sixteen_blobs_of_eight_frames_are_one_call(folder, truth, tmp_path, monkeypatch):
    """The planned ranges of all rows of a blob column come in one ``read_blob_ranges`` call; an append changes no row."""
    import lance
    import pyarrow as pa

    schema = pa.schema([pa.field("id", pa.int64()), lance.blob_field("video")])

    def table(data: list[bytes]):
        return pa.table({"id": pa.array(range(len(data))), "video": lance.blob_array(data)}, schema=schema)

    uri = str(tmp_path / "videos.lance")
    files = [(folder / f"{n}.mp4").read_bytes() for n in range(VIDEOS)]
    lance.write_dataset(table(files), uri, enable_stable_row_ids=True, data_storage_version="2.2")
    uris = [f"lance://{uri}?column=video&row={n}" for n in range(VIDEOS)]
    with fg.IndexTable.open(tmp_path / "rows.arrow", create=True) as rows:
        rows.append([(one, fg.build_index(one)) for one in uris])
        rows.lookup(uris)
        lance.write_dataset(table([b"more"]), uri, mode="append")
        calls = []
        read = lance.LanceDataset.read_blob_ranges
        monkeypatch.setattr(
            lance.LanceDataset, "read_blob_ranges", lambda *a, **k: calls.append(len(a[2])) or read(*a, **k)
        )
        from fluxon_gop.sources import lance_blob

        lance_blob._newest.clear()
        with fg.VideoReaderPool(index=rows) as pool:
            results = pool.read_many(batch(uris, clips()))
            stats = pool.stats()
    assert exact(results, clips(), truth)
    assert [stats.requests[fg.WaveKind.MEDIA]] == calls
    assert (0, 0) == (stats.stale_rows, stats.index_builds)


# ------------------------------------------------------------- faults


FAULTS = {
    "503": Fault(status=503),
    "500": Fault(status=500),
    "429": Fault(status=429),
    "425": Fault(status=425),
    "408": Fault(status=408),
    "reset": Fault(reset=True),
    "stall": Fault(delay_s=2),
    "short body": Fault(truncate_to=5),
    "wrong range": Fault(headers={"Content-Range": "bytes 7-16/100000"}),
    "200 for 206": Fault(ignore_range=True),
    "403": Fault(status=403),
    "404": Fault(status=404),
    "416": Fault(status=416),
}
FOR_THE_MOMENT = {"503", "500", "429", "425", "408", "reset", "stall", "short body", "wrong range"}
PHASES = ["index build", "planned wave", "unplanned read"]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("lasts", [False, True], ids=["once", "for ever"])
def test_a_fault_is_outlived_or_a_typed_error_in_time(folder, truth, fault, phase, lasts):
    """Each fault in each phase, once and for ever: exact frames, or the typed error; nothing left behind."""
    armed, hits = threading.Event(), []

    def hook(info: RequestInfo) -> Fault | None:
        if armed.is_set() and info.method == "GET" and (lasts or not hits):
            hits.append(info)
            return FAULTS[fault]
        return None

    options = {**QUICK, "max_retries": 1} if lasts else QUICK
    with RangeServer(folder, hook=hook) as server:
        uri = server.url("0.mp4")
        index = fg.build_index(uri)
        if phase == "index build":
            armed.set()
            attempt = lambda: fg.VideoReader.open(uri, storage_options=options).read_frames_numpy([3, 20])
        else:
            if phase == "unplanned read":
                # No MP4: each of its reads is made on demand.
                reader = fg.VideoReader.open(server.url("0.mkv"), storage_options=options)
            else:
                reader = fg.VideoReader.open(uri, index=index, storage_options=options)
            armed.set()
            attempt = lambda: reader.read_frames_numpy([3, 20])
        started = time.monotonic()
        if lasts or fault not in FOR_THE_MOMENT:
            with pytest.raises(fg.SourceError):
                attempt()
        else:
            assert np.array_equal(truth[0][[3, 20]], attempt())
        assert time.monotonic() - started < 30
        assert hits
        armed.clear()
        if phase != "index build":
            # The reader is as good as before.
            assert np.array_equal(truth[0][[3, 20]], reader.read_frames_numpy([3, 20]))
            assert (phase == "unplanned read") == (reader.stats().unplanned_requests > 0)
            reader.close()


def test_a_stall_is_a_deadline_error_within_the_limit_of_all_tries(folder):
    """A server that never answers: DeadlineError, builtin TimeoutError too, after retry_timeout."""
    with RangeServer(folder, hook=lambda _: Fault(delay_s=5)) as server:
        source = fg.open_source(
            server.url("0.mp4"), {"timeout": "200ms", "retry_timeout": "700ms", "max_retries": 99}
        )
        started = time.monotonic()
        with pytest.raises(TimeoutError, match="limit of all tries"):
            source.read(0, 10)
        assert time.monotonic() - started < 4


@pytest.mark.parametrize("skip", [False, True], ids=["raise", "skip"])
def test_a_batch_ends_at_its_limit_and_leaves_nothing(folder, truth, skip):
    """One of four servers' files stalls: DeadlineError for it, the others' frames with skip; requests are called off."""
    stalled = threading.Event()

    def hook(info: RequestInfo) -> Fault | None:
        return Fault(delay_s=20) if stalled.is_set() and info.path == "2.mp4" else None

    with RangeServer(folder, hook=hook) as server, fg.VideoReaderPool(timeout=1.5) as pool:
        requests = batch([server.url(f"{n}.mp4") for n in range(4)], clips()[:4])
        pool.read_many(requests)
        stalled.set()
        started = time.monotonic()
        if not skip:
            with pytest.raises(fg.DeadlineError, match="2.mp4: not read within the call's limit"):
                pool.read_many(requests)
        else:
            results = pool.read_many(requests, on_error="skip")
            assert [False, False, True, False] == [isinstance(r.error, fg.DeadlineError) for r in results]
            assert exact(
                [results[n] for n in (0, 1, 3)],
                [clips()[n] for n in (0, 1, 3)],
                [truth[n] for n in (0, 1, 3)],
            )
        assert time.monotonic() - started < 10
        stalled.clear()
        assert exact(pool.read_many(requests), clips()[:4], truth[:4])
        assert 0 == pool.counts()["active_readers"]


def test_one_readers_call_ends_at_its_limit(folder):
    """The same for a reader by itself."""
    stalled = threading.Event()
    with RangeServer(folder, hook=lambda _: Fault(delay_s=20) if stalled.is_set() else None) as server:
        with fg.VideoReader.open(server.url("0.mp4"), timeout=1.0) as reader:
            reader.read_frames_numpy([0])
            stalled.set()
            with pytest.raises(fg.DeadlineError, match="call's limit"):
                reader.read_frames_numpy([25])
    for bad, error in (
        (0, ValueError),
        (-1, ValueError),
        (True, TypeError),
        ("3", TypeError),
        (float("nan"), ValueError),
    ):
        with pytest.raises(error, match="timeout"):
            fg.VideoReaderPool(timeout=bad)


# ------------------------------------------------------------- renewals


def test_an_address_that_ran_out_is_renewed_once_for_many_waiters(folder, truth):
    """Signed addresses expire: 403 on all ranges of a wave, one renewal, exact frames; no query in any message."""
    valid = ["sig=old"]
    renewals = []

    with RangeServer(folder) as server:

        def hook(info: RequestInfo) -> Fault | None:
            return None if query_of(info) in valid else Fault(status=403)

        def query_of(info: RequestInfo) -> str:
            return info.headers.get("x-sig") or ""

        server.hook = hook

        def renew(name: str) -> dict:
            renewals.append(name)
            time.sleep(0.1)
            return {"default_headers": {"x-sig": valid[0]}}

        options = {"default_headers": {"x-sig": "sig=old"}, "renew": renew}
        uri = server.url("0.mp4")
        with fg.VideoReader.open(uri, storage_options=options) as reader:
            reader.read_frames_numpy([0])
            valid[0] = "sig=new"
            assert np.array_equal(truth[0], reader.read_frames_numpy(range(30)))
            assert [reader.source.name] == renewals
        valid[0] = "sig=never"
        with pytest.raises(PermissionError, match="refuses the read") as caught:
            fg.open_source(
                uri,
                {
                    "default_headers": {"x-sig": "sig=x"},
                    "renew": lambda _: {"default_headers": {"x-sig": "sig=y"}},
                },
            ).read(0, 4)
        assert "sig" not in str(caught.value)


def test_a_renewed_address_is_used_from_then_on(folder):
    """``renew`` may return a fresh address; the source keeps its name."""
    with RangeServer(folder) as server:
        server.hook = lambda info: Fault(status=403) if info.path == "0.mp4" else None
        source = fg.open_source(server.url("0.mp4"), {"renew": lambda _: server.url("1.mp4")})
        assert (folder / "1.mp4").read_bytes()[:9] == bytes(source.read(0, 9))
        assert source.name.endswith("0.mp4")


# ------------------------------------------------------------- versions


def test_a_file_replaced_between_waves_is_a_typed_error_with_every_kind_of_version(folder):
    """Strong etag (412), weak etag, Last-Modified alone: never bytes of two versions."""
    for kind in ({}, {"weak_etag": True}, {"send_etag": False}):
        files = {"v.bin": b"a" * 5000}
        with RangeServer(files, **kind) as server:
            source = fg.open_source(server.url("v.bin"), QUICK)
            source.read(0, 10)
            files["v.bin"] = b"b" * 5001
            with pytest.raises(fg.SourceChangedError):
                source.read(10, 20)


# ------------------------------------------------------------- options and pickles


def test_storage_options_take_the_names_of_obstore_and_of_lance():
    """Durations, flags and counts in their several spellings; what makes no sense is refused without its value."""
    options = parse_options(
        {
            "timeout": "1m 30s",
            "client_max_retries": "7",
            "retry_timeout": 12,
            "allow_http": "true",
            "aws_region": "x",
            "latency_ms": 20,
            "bandwidth_mbps": "50",
        }
    )
    assert (90.0, 7, 12.0, 0.02, 50e6) == (
        options.attempt_seconds,
        options.max_retries,
        options.retry_seconds,
        options.latency_seconds,
        options.bandwidth,
    )
    assert ({"allow_http": True}, {"aws_region": "x"}) == (options.client, options.store)
    for bad in (
        {"timeout": "soon"},
        {"max_retries": -1},
        {"latency_ms": 0},
        {"retry_timeout": True},
        {"max_requests_in_flight": 0},
    ):
        with pytest.raises(fg.InvalidRequestError, match=next(iter(bad))):
            parse_options(bad)
    with pytest.raises(TypeError, match="renew"):
        parse_options({"renew": "me"})


def test_addresses_with_credentials_and_without_a_key_are_refused(s3):
    """Secrets belong into the options; a bucket alone is no file; an unknown option is named, its value is not."""
    for uri in (
        "s3://key:secret2@bucket/x",
        "s3://bucket",
        "s3://bucket/",
        "s3:///x",
        "s3://bucket/a/../b",
    ):
        with pytest.raises(fg.InvalidRequestError) as caught:
            fg.open_source(uri, s3.options)
        assert "secret2" not in str(caught.value)
    with pytest.raises(fg.InvalidRequestError, match="colour") as caught:
        fg.open_source("s3://bucket/x", {**s3.options, "colour": "secret2"})
    assert "secret2" not in str(caught.value)


def test_a_pickled_pool_reads_with_its_options(folder, truth, s3):
    """The copy has what the store needs."""
    uri = s3.put("spawned/0.mp4", (folder / "0.mp4").read_bytes())
    pool = pickle.loads(pickle.dumps(fg.VideoReaderPool(storage_options=s3.options)))
    (result,) = pool.read_many([fg.VideoReadRequest(uri, [4])])
    assert np.array_equal(truth[0][[4]], result.array)
    pool.close()


# ------------------------------------------------------------- processes, closing, reports


def _read_for_ever(uri: str) -> None:
    with fg.VideoReaderPool() as pool:
        while True:
            pool.read_many([fg.VideoReadRequest(uri, [0, 20])])


def test_a_worker_killed_in_the_middle_of_a_wave_leaves_the_parent_working(folder, truth):
    """kill -9 while its requests are in flight: the parent's pool reads on."""
    import multiprocessing

    with RangeServer(folder, latency_s=0.2) as server, fg.VideoReaderPool() as pool:
        requests = [fg.VideoReadRequest(server.url("0.mp4"), [0, 20])]
        pool.read_many(requests)
        child = multiprocessing.get_context("spawn").Process(
            target=_read_for_ever, args=(server.url("1.mp4"),)
        )
        child.start()
        until = time.monotonic() + 60
        while not any(record.path == "1.mp4" for record in server.requests) and time.monotonic() < until:
            time.sleep(0.02)
        child.kill()
        child.join(10)
        assert child.exitcode == -9
        assert exact(pool.read_many(requests), [[0, 20]], truth[:1])


def test_a_pool_closed_in_the_middle_of_a_wave_ends_it_at_once_and_leaves_nothing(folder, truth):
    """The batch ends with ClosedError long before its answers, its requests are called off, and others read on."""
    slow = threading.Event()
    with RangeServer(folder, hook=lambda _: Fault(delay_s=15) if slow.is_set() else None) as server:
        pool = fg.VideoReaderPool()
        requests = batch([server.url(f"{n}.mp4") for n in range(4)], clips()[:4])
        pool.read_many(requests)
        slow.set()
        errors: list[BaseException] = []

        def read() -> None:
            try:
                pool.read_many(requests)
            except fg.ClosedError as error:
                errors.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        time.sleep(0.3)
        started = time.monotonic()
        pool.close()
        thread.join(10)
        assert time.monotonic() - started < 5
        assert 1 == len(errors)
        assert 0 == pool.counts()["active_readers"]
        slow.clear()
        with fg.VideoReaderPool() as other:
            assert exact(other.read_many(requests), clips()[:4], truth[:4])


def test_a_report_says_in_one_sentence_why_a_plan_missed(folder, media):
    """Nothing where all went by plan; else what happened and why, or the error."""
    uri = str(folder / "0.mp4")
    with fg.VideoReaderPool(index=fg.build_index(uri)) as pool:
        assert "" == pool.read_many([fg.VideoReadRequest(uri, [3])])[0].report
    with fg.VideoReaderPool(path="container") as pool:
        (result,) = pool.read_many([fg.VideoReadRequest(uri, [3])])
        assert result.report.startswith(
            "The index was built on the fly; FFmpeg's demuxer read it, because "
        )
        (missing,) = pool.read_many([fg.VideoReadRequest(str(folder / "none.mp4"), [3])], on_error="skip")
        assert "no such file" in missing.report


def test_further_tries_are_logged_without_secrets(folder, caplog):
    """The module's logger tells of each further try; the query of the address is not in it."""
    import logging

    caplog.set_level(logging.INFO, "fluxon_gop")
    hits: list[int] = []
    with RangeServer(
        folder, hook=lambda _: hits.append(1) or (Fault(status=503) if len(hits) == 1 else None)
    ) as server:
        fg.open_source(server.url("0.mp4") + "?sig=sesame").read(0, 10)
    assert "another try" in caplog.text
    assert "sesame" not in caplog.text
    assert "fluxon_gop.sources.remote" == caplog.records[0].name


def test_an_export_may_lie_on_s3(folder, truth, s3, tmp_path):
    """A FluxonFS root is a bucket's prefix; keys are taken as they are."""
    from tests.fluxonfs import patcher

    s3.put("exported/a b%20+é.mp4", (folder / "0.mp4").read_bytes())
    one = patcher(
        "s3://videos/exported", storage_options=s3.options, cache={"disk_path": tmp_path / "disk"}
    )
    with one, one.open_video_reader_pool() as pool:
        array = pool.read_frames_numpy(
            export_name="train-videos",
            relpath="a b%20+é.mp4",
            height=96,
            width=128,
            num_threads=1,
            indices=[3, 20],
        )
    assert np.array_equal(truth[0][[3, 20]], array)


# ------------------------------------------------------------- found by attack


@pytest.mark.parametrize("status", [403, 405, 501])
def test_a_server_that_refuses_head_is_asked_by_the_first_byte(folder, status):
    """Addresses signed for GET, servers without HEAD: the version comes with a GET; an empty file has one too."""
    files = {"v.bin": b"abc", "empty.bin": b""}
    with RangeServer(files, hook=lambda i: Fault(status=status) if i.method == "HEAD" else None) as server:
        assert 3 == fg.open_source(server.url("v.bin"), QUICK).signature.size
        assert 0 == fg.open_source(server.url("empty.bin"), QUICK).signature.size
        assert b"" == bytes(fg.open_source(server.url("empty.bin"), QUICK).read_head(10))
        assert len(server.requests) < 12


@pytest.mark.parametrize("kind", [{}, {"weak_etag": True}])
def test_a_file_replaced_by_a_shorter_one_is_read_anew_by_a_pool(folder, truth, kind):
    """Also where the range lies beyond its end: SourceChangedError once, then the new file's frames."""
    files = {"v.mp4": (folder / "0.mp4").read_bytes()}
    make(folder / "short.mp4", RECIPES["allintra"], 4)
    with RangeServer(files, **kind) as server, fg.VideoReaderPool(storage_options=QUICK) as pool:
        requests = [fg.VideoReadRequest(server.url("v.mp4"), [29])]
        assert exact(pool.read_many(requests), [[29]], truth[:1])
        files["v.mp4"] = (folder / "short.mp4").read_bytes()
        with pytest.raises(fg.SourceChangedError):
            pool.read_many([fg.VideoReadRequest(server.url("v.mp4"), [20])])
        wanted = full_decode(folder / "short.mp4")
        (result,) = pool.read_many([fg.VideoReadRequest(server.url("v.mp4"), [3])])
    assert np.array_equal(wanted[[3]], result.array)


def test_a_limit_holds_for_reads_that_no_wave_foresaw(folder):
    """On the container path without a row every read is unplanned: the call still ends at its limit."""
    stalled = threading.Event()
    with RangeServer(folder, hook=lambda _: Fault(delay_s=20) if stalled.is_set() else None) as server:
        for wrap in (fg.VideoReader, None):
            stalled.clear()
            if wrap is not None:
                reader = fg.VideoReader.open(server.url("0.mp4"), path="container", timeout=1.0)
                attempt = lambda: reader.read_frames_numpy([29])  # noqa: B023
            else:
                pool = fg.VideoReaderPool(path="container", timeout=1.0)
                attempt = lambda: pool.read_many([fg.VideoReadRequest(server.url("0.mp4"), [29])])  # noqa: B023
            stalled.set()
            started = time.monotonic()
            with pytest.raises(fg.DeadlineError):
                attempt()
            assert time.monotonic() - started < 8


def test_what_has_come_when_the_time_is_over_is_still_decoded(folder, truth):
    """A prefetched batch that is read after its limit: all its bytes are here, all its frames come."""
    with RangeServer(folder) as server, fg.VideoReaderPool(timeout=0.6) as pool:
        requests = batch([server.url(f"{n}.mp4") for n in range(4)], clips()[:4])
        handle = pool.prefetch(requests)
        time.sleep(1.0)
        assert exact(pool.read_many(handle), clips()[:4], truth[:4])


def test_sixteen_files_renew_once(folder, truth):
    """All of a batch's requests are refused at once: one renewal serves all its files."""
    valid, renewals = ["old"], []

    def renew(name: str) -> dict:
        renewals.append(name)
        time.sleep(0.1)
        return {"default_headers": {"x-sig": valid[0]}}

    def hook(info: RequestInfo) -> Fault | None:
        return None if info.headers.get("x-sig") == valid[0] else Fault(status=403)

    with RangeServer(folder, hook=hook) as server:
        options = {"default_headers": {"x-sig": "old"}, "renew": renew}
        with fg.VideoReaderPool(storage_options=options) as pool:
            requests = batch([server.url(f"{n}.mp4") for n in range(VIDEOS)], clips())
            valid[0] = "new"
            assert exact(pool.read_many(requests), clips(), truth)
    assert 1 == len(renewals)


@pytest.mark.parametrize("bad", ["raises", "number", "options"])
def test_a_renewal_that_fails_is_a_refusal_that_tells_no_secret(folder, bad):
    """It raises, returns rubbish, or options that make no sense: PermissionError, and the old options stay."""

    def renew(name: str):
        if bad == "raises":
            raise KeyError(name, "sesame")
        return 7 if bad == "number" else {"timeout": "soon"}

    with RangeServer(folder, hook=lambda _: Fault(status=403)) as server:
        source = fg.open_source(server.url("0.mp4"), {"renew": renew})
        for _ in range(2):
            with pytest.raises((PermissionError, fg.InvalidRequestError)) as caught:
                source.read(0, 4)
            assert "sesame" not in str(caught.value)
        assert len(server.requests) == 2


def test_a_blocking_read_on_the_loops_own_thread_is_refused(folder):
    """An obspec store whose coroutine reads through us would wait for itself: an error, and the process reads on."""
    with RangeServer(folder) as server:
        url = server.url("0.mp4")

        class Nested:
            async def get_async(self, path, *, options=None):
                return fg.open_source(url).read(0, 4)

            async def head_async(self, path):
                raise NotImplementedError

        with pytest.raises(fg.SourceError):
            fg.ObspecSource(Nested(), "x", storage_options={"max_retries": 0}).read(0, 4)
        assert 4 == len(fg.open_source(url).read(0, 4))


def test_a_server_that_echoes_the_request_puts_no_query_into_a_message(folder):
    """A 500 with the address in its body: the message tells the status alone."""
    with RangeServer(
        folder, hook=lambda _: Fault(status=500, body=b"failed: GET /0.mp4?sig=sesame")
    ) as server:
        with pytest.raises(fg.SourceError) as caught:
            fg.open_source(server.url("0.mp4") + "?sig=sesame", {"max_retries": 0}).read(0, 4)
    assert "sesame" not in str(caught.value)


def test_an_fsspec_file_system_that_breaks_hangs_nobody(monkeypatch):
    """CancelledError, SystemExit, values instead of errors, too few answers: each is a SourceError."""
    import asyncio

    import fsspec

    system = fsspec.filesystem("memory")
    system.pipe_file("/broken/a.bin", b"0123456789")
    answers = [asyncio.CancelledError(), SystemExit(), [FileNotFoundError()], [], None]
    for answer in answers:

        def cat(*_: object, answer=answer, **__: object):
            if isinstance(answer, BaseException):
                raise answer
            return answer

        with monkeypatch.context() as broken:
            broken.setattr(type(system), "cat_ranges", cat)
            source = fg.FsspecSource("memory://broken/a.bin")
            (future,) = source.group.start([GroupRead(source, 0, 4)])
            with pytest.raises(fg.SourceError):
                future.result(10)


def test_a_blob_of_a_data_set_that_was_written_again_is_another_version(tmp_path):
    """Deleted and made anew, its rows have the same numbers; a column that holds no blobs is refused by name."""
    import shutil

    import lance
    import pyarrow as pa

    from fluxon_gop.sources import lance_blob

    schema = pa.schema([pa.field("id", pa.int64()), lance.blob_field("video")])
    seen = []
    for content in (b"a" * 100, b"b" * 100):
        shutil.rmtree(tmp_path / "t.lance", ignore_errors=True)
        table = pa.table({"id": pa.array([0]), "video": lance.blob_array([content])}, schema=schema)
        lance.write_dataset(
            table, str(tmp_path / "t.lance"), enable_stable_row_ids=True, data_storage_version="2.2"
        )
        lance_blob._newest.clear()
        seen.append(fg.LanceBlobSource(str(tmp_path / "t.lance"), "video", 0).signature)
    assert not seen[0].fits(seen[1])
    with pytest.raises(fg.InvalidRequestError, match="'id' is no column of blobs"):
        fg.LanceBlobSource(str(tmp_path / "t.lance"), "id", 0).read(0, 4)
    with pytest.raises(fg.InvalidRequestError, match="credentials"):
        fg.LanceBlobSource("s3://KEY:SECRET@bucket/x.lance", "video", 0)


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_requests_are_in_flight_than_the_host_may_have(folder, limit):
    """Forty reads of four sources at once: never more than ``max_requests_in_flight`` of them at the server."""
    with RangeServer(folder, latency_s=0.02) as server:
        options = {"max_requests_in_flight": limit}
        sources = [fg.open_source(server.url(f"{n}.mp4"), options) for n in range(4)]
        reads = [GroupRead(sources[n % 4], 100 * n, 100 * n + 50) for n in range(40)]
        for future in sources[0].group.start(reads):
            assert 50 == len(future.result(30))
        events = sorted(
            [(r.started, 1) for r in server.requests] + [(r.ended, -1) for r in server.requests]
        )
    running = most = 0
    for _, change in events:
        running += change
        most = max(most, running)
    assert most <= limit


@pytest.mark.parametrize("status", [304, 400, 403, 404, 412, 416, 500])
def test_no_error_leads_to_the_address_as_it_was_given(folder, status):
    """Neither message, cause nor context, however deep, shows the query of a signed address."""
    with RangeServer(folder, hook=lambda _: Fault(status=status)) as server:
        for ask in (lambda source: source.read(0, 4), lambda source: source.signature):
            with pytest.raises(fg.SourceError) as caught:
                ask(fg.open_source(server.url("0.mp4") + "?sig=sesame", {"max_retries": 0}))
            error: BaseException | None = caught.value
            seen = []
            while error is not None:
                seen.append(repr(error) + str(error))
                error = error.__cause__ or error.__context__
            assert "sesame" not in "".join(seen)


def test_a_presigned_address_of_s3_is_read_and_not_shown(folder, truth, s3):
    """Signed for GET alone: version, ranges and frames come; its signature is in no name."""
    from datetime import timedelta

    import obstore

    s3.put("signed/0.mp4", (folder / "0.mp4").read_bytes())
    url = obstore.sign(s3.store, "GET", "signed/0.mp4", timedelta(minutes=5))
    assert "Signature" in url
    with fg.VideoReader.open(url) as reader:
        assert np.array_equal(truth[0][[3, 20]], reader.read_frames_numpy([3, 20]))
        assert "Signature" not in repr(reader) + reader.source.name
    assert (folder / "0.mp4").stat().st_size == fg.open_source(url).signature.size


def _read_there(pool, requests, answers) -> None:
    answers.put([result.array for result in pool.read_many(requests)])


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_remote_pool_works_in_a_fresh_process(folder, truth, method):
    """The parent has read from the store; a spawned worker and one of a fork server read all the same."""
    import multiprocessing

    context = multiprocessing.get_context(method)
    with RangeServer(folder) as server, fg.VideoReaderPool() as pool:
        requests = batch([server.url(f"{n}.mp4") for n in range(4)], clips()[:4])
        pool.read_many(requests)
        answers = context.Queue()
        child = context.Process(target=_read_there, args=(pool, requests, answers))
        child.start()
        arrays = answers.get(timeout=60)
        child.join(30)
    assert 0 == child.exitcode
    assert all(np.array_equal(p[c], a) for a, c, p in zip(arrays, clips()[:4], truth[:4], strict=True))


@pytest.mark.parametrize("place", ["read_many", "reader"])
def test_an_interrupt_in_the_middle_of_a_wave_leaves_nothing(folder, truth, place):
    """Ctrl-C while answers are awaited: it comes out at once, the readers are back, and the next read is right."""
    import signal

    slow = threading.Event()
    with RangeServer(folder, hook=lambda _: Fault(delay_s=10) if slow.is_set() else None) as server:
        pool, uri = fg.VideoReaderPool(), server.url("0.mp4")
        reader = fg.VideoReader.open(uri)
        read = {
            "read_many": lambda: pool.read_many([fg.VideoReadRequest(uri, [3, 20])])[0].array,
            "reader": lambda: reader.read_frames_numpy([3, 20]),
        }[place]
        read()
        slow.set()
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            started = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                reader.read_frames_numpy([0, 29]) if place == "reader" else pool.read_many(
                    [fg.VideoReadRequest(uri, [0, 29])]
                )
            assert time.monotonic() - started < 8
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        slow.clear()
        assert np.array_equal(truth[0][[3, 20]], read())
        assert 0 == pool.counts()["active_readers"]
        pool.close()
        reader.close()
