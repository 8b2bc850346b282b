"""Attacks on exports: paths that lead out, identities that may not, sizes that no one means. All refused, nothing told."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import threading
import time
import traceback
from pathlib import Path

import numpy as np
import pytest

import fluxon_gop as fg
from fluxon_gop.fluxonfs import FluxonFsExport, FluxonFsPatcher, Users, beneath, hash_password
from fluxon_gop.fluxonfs.relpath import check_relpath
from tests.fluxonfs import NAMES, opened, patcher, request
from tests.media import RECIPES, full_decode, make
from tools.range_server import RangeServer

PASSWORD, OTHER = "correct horse battery staple", "tr0ub4dor-and-3"
SECRET = "hunter" + str(2)
"""Made here, so that a traceback's quoted line does not show it."""
ALICE, BOB = ("alice", PASSWORD), ("bob", OTHER)

ESCAPES = [
    "../secret.mp4",
    "a/../../secret.mp4",
    "a/b/../../../secret.mp4",
    "a/./b/sample.mp4",
    "./a/b/sample.mp4",
    "a/b/../b/sample.mp4",
    "..",
    ".",
    "a/..",
    "a/b/sample.mp4/..",
    "/etc/passwd",
    "//etc/passwd",
    "/a/b/sample.mp4",
    "a//b/sample.mp4",
    "a/b/",
    "/",
    "",
    "\\etc\\passwd",
    "..\\secret.mp4",
    "a\\..\\..\\secret.mp4",
    "\\\\server\\share\\x",
    "C:\\secret.mp4",
    "C:/secret.mp4",
    "c:secret.mp4",
    "a/b/sample.mp4\0",
    "a/b/sample.mp4\0.txt",
    "\0",
    "a/b\n/sample.mp4",
    "a/b/sample.mp4\r\nHost: evil",
    "a\x7f/b",
    "%2e%2e/secret.mp4",
    "%2E%2E%2Fsecret.mp4",
    "..%2fsecret.mp4",
    "..%5csecret.mp4",
    "a/%2e%2e/%2e%2e/secret.mp4",
    "%252e%252e%252fsecret.mp4",
    "%25252e%25252e/secret.mp4",
    "%2525252e%2525252e/secret.mp4",
    "%2fetc%2fpasswd",
    "%5c%5cserver%5cshare",
    "a/b/sample.mp4%00",
    "%00",
    "a/b/sample.mp4%0d%0aX: y",
    "a%2f..%2f..%2fsecret.mp4",
    "C%3A/secret.mp4",
    "a/" * 3000 + "x",
    "x" * 5000,
    "a/\ud800.mp4",
    "link-out.mp4",
    "link-absolute.mp4",
    "folder-out/secret.mp4",
    "a/link-up-twice",
    "circle/a.mp4",
    "fifo.mp4",
    "null.mp4",
]


@pytest.fixture
def root(tmp_path) -> Path:
    folder = tmp_path / "export"
    (folder / "a" / "b").mkdir(parents=True)
    make(folder / NAMES[1], RECIPES["bframes"], 30)
    shutil.copy(folder / NAMES[1], tmp_path / "secret.mp4")
    (folder / "link-out.mp4").symlink_to("../secret.mp4")
    (folder / "link-absolute.mp4").symlink_to(tmp_path / "secret.mp4")
    (folder / "folder-out").symlink_to("..")
    (folder / "a" / "link-up-twice").symlink_to("../../secret.mp4")
    (folder / "circle").symlink_to("circle")
    os.mkfifo(folder / "fifo.mp4")
    (folder / "null.mp4").symlink_to("/dev/null")
    (folder / "inside.mp4").symlink_to("a/b/sample.mp4")
    return folder


@pytest.fixture(scope="module")
def users() -> Users:
    return Users({name: hash_password(password) for name, password in (ALICE, BOB)})


def _told(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)) + repr(error) + repr(getattr(error, "numbers", ""))


@pytest.mark.parametrize("walks", [False, True], ids=["openat2", "walk"])
@pytest.mark.parametrize("escape", ESCAPES, ids=range(len(ESCAPES)))
def test_no_form_of_path_leads_out_of_a_local_export(root, escape, walks, monkeypatch):
    """Each is refused by a typed error at open, by the pool, and by stat; nothing of the secret's place is read."""
    if walks:
        monkeypatch.setattr(beneath, "_openat2_works", False)
    with patcher(root, cache={"disk_path": root.parent / "disk"}) as one:
        for attempt in (
            lambda: opened(one, escape),
            lambda: one.open_video_reader_pool().read_many_numpy_with_stats([request(escape, ())]),
            lambda: one.stat(NAMES[0], escape),
            lambda: one.build_index(NAMES[0], escape),
        ):
            with pytest.raises((fg.InvalidRequestError, fg.SourceError)):
                attempt()
        one.flush()
    assert [] == list((root.parent / "disk").rglob("*.piece"))


def test_there_are_fifty_of_them():
    """The list has the fifty forms that were promised, and none twice."""
    assert len(set(ESCAPES)) == len(ESCAPES) >= 50


@pytest.mark.parametrize("escape", ESCAPES[:48], ids=range(48))
def test_no_form_of_path_reaches_a_remote_origin(root, escape):
    """What is no plain relative path is refused before any request."""
    with RangeServer(root) as server, patcher(server.base_url) as one:
        with pytest.raises(fg.InvalidRequestError):
            opened(one, escape)
        assert [] == server.requests


@pytest.mark.parametrize(
    "relpath",
    ["a b/ü/日本.mp4", "100%.mp4", "%41.mp4", "a%20b.mp4", "...", "..a/b..", "q?x=1#y.mp4", "ab:c"],
)
def test_names_that_only_look_odd_are_read(root, relpath, tmp_path):
    """Spaces, Unicode, percent signs, question marks and dots within names name files, locally and over HTTP."""
    (root / relpath).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(root / NAMES[1], root / relpath)
    assert relpath == check_relpath(relpath)
    wanted = full_decode(root / NAMES[1])[[7]]
    with RangeServer(root) as server:
        for place in (root, server.base_url):
            with patcher(place) as one, opened(one, relpath) as reader:
                assert np.array_equal(wanted, reader.read_frames_numpy([7]))


def test_a_link_that_stays_inside_is_followed(root):
    """A relative symlink beneath the root names the file that it leads to."""
    with patcher(root) as one, opened(one, "inside.mp4") as reader:
        assert np.array_equal(full_decode(root / NAMES[1])[[7]], reader.read_frames_numpy([7]))


def test_where_the_kernel_cannot_resolve_beneath_links_are_refused(root, monkeypatch):
    """The fallback follows no link at all, and says so."""
    monkeypatch.setattr(beneath, "_openat2_works", False)
    with patcher(root) as one:
        for relpath in ("inside.mp4", "folder-out/export/a/b/sample.mp4"):
            with pytest.raises(PermissionError, match="symlink"):
                opened(one, relpath)
        opened(one).close()


@pytest.mark.parametrize("walks", [False, True], ids=["openat2", "walk"])
def test_a_link_swapped_meanwhile_never_leads_out(root, tmp_path, walks, monkeypatch):
    """A folder and a link to one outside change places all the time: what is read is the file inside, or refused."""
    if walks:
        monkeypatch.setattr(beneath, "_openat2_works", False)
    outside = tmp_path / "outside"
    outside.mkdir()
    inside_bytes = (root / NAMES[1]).read_bytes()
    (outside / "sample.mp4").write_bytes(b"SECRET" + inside_bytes[6:])
    real, link, place = root / "a" / "real", root / "a" / "link", root / "a" / "b"
    place.rename(real)
    link.symlink_to(outside)
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            for one in (real, link):
                one.rename(place)
                place.rename(one)

    swapper = threading.Thread(target=swap)
    swapper.start()
    seen = {"inside": 0, "refused": 0}
    try:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            source = beneath.BeneathSource(str(root), NAMES[1])
            try:
                head = bytes(source.read(0, 6))
            except fg.SourceError:
                seen["refused"] += 1
            else:
                assert inside_bytes[:6] == head
                seen["inside"] += 1
            finally:
                source.close()
    finally:
        stop.set()
        swapper.join()
    assert seen["inside"] > 10
    assert seen["refused"] > 10


@pytest.mark.parametrize("tiers", [{}, {"memory_bytes": 0}], ids=["memory", "disk"])
def test_what_one_identity_cached_another_without_the_right_does_not_get(root, users, tmp_path, tiers):
    """Reader, pool, memory and disk are warm under alice; bob, a wrong password and nobody are refused, each way."""
    cache = {"disk_path": tmp_path / "disk"} | tiers
    one = patcher(root, cache=cache, readers=["alice"], users=users, request_identity=ALICE)
    pool = one.open_video_reader_pool()
    wanted = pool.read_many_numpy_with_stats([request(indices=(3, 9))])[0].array
    one.flush()
    strangers = [
        BOB,
        None,
        ("alice", OTHER),
        ("alice", ""),
        ("Alice", PASSWORD),
        ("alice\0", PASSWORD),
        ("", ""),
    ]
    for _ in range(2):
        for stranger in strangers:
            one.request_identity = stranger
            for attempt in (
                lambda: pool.read_many_numpy_with_stats([request(indices=(3, 9))]),
                lambda: pool.read_many_numpy_with_stats([request(indices=())]),
                lambda: pool.read_many_numpy_with_stats([request(indices=(10_000,))]),
                lambda: opened(one),
                lambda: one.stat(*NAMES),
                lambda: one.build_index(*NAMES),
                lambda: pickle.loads(pickle.dumps(pool)).read_many_numpy_with_stats([request()]),
            ):
                with pytest.raises(
                    PermissionError, match=r"export 'train-videos', 'a/b/sample.mp4'"
                ) as caught:
                    attempt()
                told = _told(caught.value)
                assert PASSWORD not in told
                assert OTHER not in told
        one.request_identity = ALICE
        assert np.array_equal(wanted, pool.read_many_numpy_with_stats([request(indices=(3, 9))])[0].array)


def test_a_right_that_is_taken_away_ends_within_the_ttl_also_when_all_is_warm(root, tmp_path):
    """The file of users changes: an open, warm reader and pool are refused once the metadata TTL is over."""
    book = tmp_path / "users.toml"
    book.write_text(f'alice = "{hash_password(PASSWORD)}"\n')
    one = patcher(
        root, readers=["alice"], users=Users(book), request_identity=ALICE, metadata_cache_ttl_ms=400
    )
    reader, pool = opened(one), one.open_video_reader_pool()
    reader.read_frames_numpy([3])
    pool.read_many_numpy_with_stats([request()])
    book.write_text(f'alice = "{hash_password("another one")}"\n')
    time.sleep(0.45)
    for attempt in (
        lambda: reader.read_frames_numpy([3]),
        lambda: pool.read_many_numpy_with_stats([request()]),
    ):
        with pytest.raises(PermissionError):
            attempt()
    with pytest.raises(PermissionError):
        reader.read_frames_numpy([3])


def test_no_secret_is_shown_by_anything(root, users, tmp_path, caplog):
    """Repr, str, logs, errors and rows hold no password, no signed query, no credential of a root."""
    caplog.set_level(logging.DEBUG)
    with RangeServer(root) as server:
        signed = server.base_url.replace("http://", f"http://user:{SECRET}@") + f"?sig={SECRET}"
        with fg.IndexTable.open(tmp_path / "rows.arrow", create=True) as rows:
            one = FluxonFsPatcher(
                [
                    FluxonFsExport(
                        "train-videos",
                        signed,
                        readers=["alice"],
                        storage_options={"default_headers": {"x": SECRET}},
                    ),
                    FluxonFsExport(
                        "dead", f"http://127.0.0.1:1/?sig={SECRET}", storage_options={"timeout": "1s"}
                    ),
                ],
                users=users,
                request_identity=ALICE,
                index=rows,
            )
            rows.append([(NAMES, one.build_index(*NAMES))])
            pool = one.open_video_reader_pool()
            result = pool.read_many_numpy_with_stats([request()])[0]
            reader = opened(one)
            things = [
                one,
                pool,
                reader,
                reader._inner.reader,
                result,
                one.agent,
                users,
                rows,
                one.exports,
                one._file(*NAMES),
            ]
            things += [
                one._file_system,
                pool.explain([request()]),
                one._file(*NAMES).open_source(),
                reader.stats(),
            ]
            told = "".join(f"{thing!r}{thing!s}" for thing in things) + (
                tmp_path / "rows.arrow"
            ).read_bytes().decode("latin1")
            for attempt in (
                lambda: opened(one, "missing.mp4"),
                lambda: one.stat("dead", "x.mp4"),
                lambda: FluxonFsExport("x", f"bogus://user:{SECRET}@h/?sig={SECRET}"),
                lambda: FluxonFsExport("x", f"http://user:{SECRET}@:bad/?sig={SECRET}"),
                lambda: setattr(one, "request_identity", ["alice", PASSWORD]),
                lambda: setattr(one, "request_identity", ("alice", 7)),
            ):
                with pytest.raises((fg.FluxonGopError, TypeError)) as caught:
                    attempt()
                told += _told(caught.value)
    told += caplog.text
    assert SECRET not in told
    assert PASSWORD not in told


@pytest.mark.parametrize("field", ["height", "width", "num_threads", "indices"])
def test_oversize_and_negative_numbers_are_refused_before_any_read(root, field):
    """Sizes, threads and frame numbers beyond anything real, or below 0, are typed errors at once."""
    with RangeServer(root) as server, patcher(server.base_url) as one:
        for value in (-1, -(1 << 70), 1 << 40, 1 << 70):
            wanted = {field: (value,) if field == "indices" else value}
            opened(one).close()
            server.reset()
            with pytest.raises((fg.InvalidRequestError, fg.FrameIndexError)):
                one.open_video_reader_pool().read_many_numpy_with_stats([request(**wanted)])
            if field != "indices":
                with pytest.raises(fg.InvalidRequestError):
                    opened(one, **wanted)
            assert len(server.requests) <= 2


def test_huge_reads_of_the_byte_source_are_bounded_by_the_file(root):
    """A read of 2**62 bytes returns the file, one from 2**62 returns nothing, negative ones are refused."""
    with patcher(root) as one:
        source = one._file(*NAMES).open_source()
        assert (root / NAMES[1]).read_bytes() == source.read_at(0, 1 << 62)
        assert b"" == source.read_at(1 << 62, 1 << 62)
        for bad in ((-1, 4), (0, -4), (-(1 << 62), 1)):
            with pytest.raises(fg.InvalidRequestError):
                source.read_at(*bad)
        with pytest.raises(fg.ShortReadError):
            source.read(0, 1 << 62)


def test_passwords_are_kept_as_salted_hashes_and_a_bad_book_of_users_is_refused(tmp_path):
    """Two hashes of one password differ; what is no scrypt hash is refused by the user's name alone."""
    first, second = hash_password("x"), hash_password("x")
    assert first != second
    assert Users({"u": first}).knows(("u", "x"))
    assert not Users({"u": first}).knows(("u", "y"))
    for bad in (
        "x",
        "scrypt$1$8$1$AA==$AA==",
        f"{first}$more",
        first.replace("16384", "1073741824"),
        7,
        "md5$x",
    ):
        with pytest.raises(fg.InvalidRequestError, match="user 'u' is no scrypt hash") as caught:
            Users({"u": bad})
        assert str(bad) not in str(caught.value) or bad in {"x", 7}
    (tmp_path / "bad.toml").write_text(f'u = "{SECRET}\n')
    with pytest.raises(fg.InvalidRequestError) as caught:
        Users(tmp_path / "bad.toml")
    assert SECRET not in _told(caught.value)
