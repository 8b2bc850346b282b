"""Index tables built at scale: what is listed, skipped, failed, gone; killed and resumed; by one engine or another."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import fluxon_gop as fg
from fluxon_gop import table_build
from fluxon_gop.build_shards import LocalEngine
from fluxon_gop.cli import main
from fluxon_gop.failed_videos import FailedVideos, uri_beside
from fluxon_gop.index_rows import SCHEMA
from fluxon_gop.table_build import BuildOptions, build_table, engine_of
from fluxon_gop.table_check import verify_table
from fluxon_gop.table_files import export_parquet, merge_tables
from fluxon_gop.table_report import table_facts
from fluxon_gop.video_listing import list_videos
from tests.media import full_decode
from tools.range_server import RangeServer

NAMES = ("bframes", "hevc", "allintra", "faststart")


@pytest.fixture
def folder(media, tmp_path) -> Path:
    """Twelve videos in two folders, one file that is none, one of another kind."""
    place = tmp_path / "videos"
    for n in range(12):
        path = place / f"part{n % 2}" / f"{n:02}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(media[NAMES[n % 4]], path)
    (place / "bad.mp4").write_bytes(b"no video at all, but long enough to be looked at")
    (place / "notes.md").write_text("nothing")
    return place


def contents(uri) -> list[dict]:
    """A table's rows, without order."""
    with fg.IndexTable.open(uri) as table:
        rows = table.encoded(table.keys()).to_pylist()
    return sorted(rows, key=lambda row: row["uri"])


@pytest.mark.parametrize("name", ["t.lance", "t.arrow"])
def test_a_build_is_incremental(folder, tmp_path, name):
    """A second build reads nothing; a changed file is built again, a new one added, a failed one not tried again."""
    table = fg.IndexTable.open(tmp_path / name, create=True)
    first = build_table([str(folder)], table)
    assert (12, 0, {"NotMp4Error": 1}) == (first.built, first.skipped, dict(first.failed))
    assert first.stats.total_requests <= 12 * 4 + 1
    again = build_table([str(folder)], table)
    assert (0, 12, 0, 1) == (again.built, again.skipped, again.stats.total_requests, again.failed_before)
    assert not again.is_whole
    shutil.copyfile(folder / "part0" / "00.mp4", folder / "part1" / "01.mp4")
    shutil.copyfile(folder / "part0" / "00.mp4", folder / "new.mp4")
    third = build_table([str(folder)], table)
    assert (2, 11) == (third.built, third.skipped)
    assert 13 == len(table)
    retried = build_table([str(folder)], table, BuildOptions(retry_failed=True))
    assert {"NotMp4Error": 1} == dict(retried.failed)
    # Mended, it is tried again by itself, and is a failure no more.
    shutil.copyfile(folder / "part0" / "00.mp4", folder / "bad.mp4")
    mended = build_table([str(folder)], table)
    assert (1, True) == (mended.built, mended.is_whole)
    assert 0 == len(FailedVideos(table.uri))
    assert fg.IndexTable.open(tmp_path / name).keys() == table.keys()


def test_what_is_gone_is_told_and_pruned(folder, tmp_path):
    """Rows of deleted files are told of, and removed where asked for; of files outside the folder nothing is said."""
    uri = str(tmp_path / "t.lance")
    table = fg.IndexTable.open(uri, create=True)
    build_table([str(folder / "part0"), str(folder / "part1" / "01.mp4")], table)
    (folder / "part0" / "02.mp4").unlink()
    (folder / "part1" / "01.mp4").unlink()
    report = build_table([str(folder / "part0")], table)
    assert [str(folder / "part0" / "02.mp4")] == report.deleted
    assert (7, 0) == (len(table), report.pruned)
    pruned = build_table([str(folder / "part0")], table, BuildOptions(prune=True))
    assert (1, 6) == (pruned.pruned, len(table))
    assert [] == build_table([str(folder / "part0")], table).deleted


def test_failures_are_rows(folder, tmp_path):
    """The table beside has address, class, message, bytes and time of each failure, for anybody to read."""
    (folder / "short.mp4").write_bytes((folder / "part0" / "00.mp4").read_bytes()[:300])
    table = fg.IndexTable.open(tmp_path / "t.arrow", create=True)
    for _ in range(2):
        build_table([str(folder), str(folder / "gone.mp4")], table, BuildOptions(retry_failed=True))
    assert str(tmp_path / "t.failures.arrow") == uri_beside(table.uri)
    with pa.memory_map(str(tmp_path / "t.failures.arrow")) as file:
        rows = {Path(row["uri"]).name: row for row in pa.ipc.open_file(file).read_all().to_pylist()}
    assert {"bad.mp4", "short.mp4", "gone.mp4"} == set(rows)
    assert "NotMp4Error" == rows["bad.mp4"]["error_class"]
    assert "SourceNotFoundError" == rows["gone.mp4"]["error_class"]
    assert rows["short.mp4"]["bytes"] > 0
    assert abs(rows["bad.mp4"]["time"].timestamp() - time.time()) < 60


def test_lists_are_read(folder, tmp_path):
    """Text, CSV and Parquet lists, globs and files name the same videos, each once, however often they are named."""
    uris = [str(p) for p in sorted(folder.rglob("??.mp4"))]
    (tmp_path / "a.txt").write_text("\n".join(["# a remark", *uris, "", uris[0]]))
    (tmp_path / "a.csv").write_text(
        "n,video_path\n" + "\n".join(f"{n},{uri}" for n, uri in enumerate(uris))
    )
    pa.parquet.write_table(pa.table({"n": range(len(uris)), "uri": uris}), tmp_path / "a.parquet")
    for name in ("a.txt", "a.csv", "a.parquet"):
        assert uris == [listed.uri for listed in list_videos([f"@{tmp_path / name}"])]
    globbed = list_videos([str(folder / "part*" / "*.mp4"), str(folder), uris[3]])
    assert [*uris, str(folder / "bad.mp4")] == sorted(
        (listed.uri for listed in globbed), key=lambda u: ("bad" in u, u)
    )
    with pytest.raises(fg.SourceError, match="cannot be read as a list"):
        list(list_videos([f"@{tmp_path / 'none.csv'}"]))
    with pytest.raises(fg.InvalidRequestError):
        list(list_videos([str(tmp_path / "*.none")]))


def test_a_bucket_and_a_table_of_blobs(folder, tmp_path, s3, monkeypatch):
    """A prefix of a bucket and a column of a Lance table: listed with versions, so that a second build reads nothing."""
    for path in sorted(folder.rglob("*.mp4")):
        s3.put(f"scale/{path.relative_to(folder)}", path.read_bytes())
    options = BuildOptions(storage_options=s3.options)
    table = fg.IndexTable.open(tmp_path / "t.lance", create=True)
    first = build_table(["s3://videos/scale/"], table, options)
    assert (12, {"NotMp4Error": 1}) == (first.built, dict(first.failed))
    again = build_table(["s3://videos/scale/"], table, options)
    assert (0, 12, 1, 0) == (again.built, again.skipped, again.failed_before, again.stats.total_requests)
    with fg.LanceVideoWriter(tmp_path / "v.lance") as writer:
        for n, path in enumerate(sorted(folder.rglob("??.mp4"))):
            writer.write(n, "a", path.read_bytes())
    blobs = fg.IndexTable.open(tmp_path / "b.lance", create=True)
    source = f"lance://{tmp_path / 'v.lance'}?column=video_bytes"
    assert 12 == build_table([source], blobs).built
    assert 12 == build_table([source], blobs).skipped
    with fg.VideoReaderPool(index=blobs) as pool:
        (result,) = pool.read_many([fg.VideoReadRequest(f"{source}&row=0", [7])])
        assert not result.stats.index_builds
        assert np.array_equal(full_decode(folder / "part0" / "00.mp4")[[7]], result.array)


def test_a_table_on_a_plain_endpoint(folder, tmp_path, s3, monkeypatch):
    """An index table and a video table lie on an S3 server without TLS that the environment names, and nothing more is said."""
    for name, value in (
        ("ENDPOINT_URL", s3.endpoint),
        ("ACCESS_KEY_ID", "key"),
        ("SECRET_ACCESS_KEY", "secret"),
        ("REGION", "us-east-1"),
    ):
        monkeypatch.setenv(f"AWS_{name}", value)
    table = fg.IndexTable.open("s3://videos/tables/t.lance", create=True)
    assert 6 == build_table([str(folder / "part0")], table).built
    assert 6 == len(fg.IndexTable.open("s3://videos/tables/t.lance"))
    with fg.LanceVideoWriter("s3://videos/tables/v.lance") as writer:
        writer.write(0, "a", (folder / "part0" / "00.mp4").read_bytes())
    with fg.LanceVideoTable.open("s3://videos/tables/v.lance").clips(fg.Windows(4, 8)) as data:
        assert np.array_equal(full_decode(folder / "part0" / "00.mp4")[:4], data[0]["frames"]["a"])


def test_listings_say_why_they_fail(s3):
    """A wrong secret, a bucket that is not there: each its own error, without the secret."""
    wrong = {**s3.options, "secret_access_key": "not the secret"}
    with pytest.raises(fg.SourcePermissionError, match="credentials") as caught:
        list(list_videos(["s3://videos/scale/"], wrong))
    assert "not the secret" not in str(caught.value)
    with pytest.raises(fg.SourceNotFoundError, match="no such bucket"):
        list(list_videos(["s3://no-such-bucket-here/scale/"], s3.options))


def test_an_address_without_a_listing_costs_one_request(media, tmp_path):
    """Of a file behind HTTP that has a row, one request tells whether it is the same; nothing else is read."""
    with RangeServer(media["bframes"].parent) as server:
        uris = [server.url(f"{name}.mp4") for name in NAMES]
        table = fg.IndexTable.open(tmp_path / "t.lance", create=True)
        assert 4 == build_table(uris, table).built
        server.reset()
        report = build_table(uris, table)
        assert (0, 4) == (report.built, report.skipped)
        assert 4 == len(server.requests)


def test_versions_are_asked_side_by_side(media, tmp_path):
    """Asking many addresses whether they are the same takes one round trip, not one for each."""
    with RangeServer(media["bframes"].parent, latency_s=0.15) as server:
        uris = [server.url(f"{name}.mp4") for name in NAMES]
        table = fg.IndexTable.open(tmp_path / "t.lance", create=True)
        build_table(uris, table)
        server.reset()
        assert 4 == build_table(uris, table).skipped
        assert (4, 1) == (len(server.requests), server.summary()["depth"])


def test_rows_are_committed_by_bytes_too(folder, tmp_path, monkeypatch):
    """Rows of long videos do not wait in memory until there are a thousand: a version for each shard here."""
    monkeypatch.setattr(table_build, "COMMIT_BYTES", 1)
    monkeypatch.setattr(LocalEngine, "shard", 4)
    table = fg.IndexTable.open(tmp_path / "t.lance", create=True)
    assert 12 == build_table([str(folder)], table).built
    assert lance.dataset(tmp_path / "t.lance").version >= 4


@pytest.mark.parametrize("how", ["processes", "ray"])
def test_engines_build_the_same_table(folder, tmp_path, how):
    """One process, several, and Ray tasks write the same rows."""
    if how == "ray":
        pytest.importorskip("ray")
    plain = fg.IndexTable.open(tmp_path / "a.lance", create=True)
    build_table([str(folder)], plain)
    other = fg.IndexTable.open(tmp_path / "b.lance", create=True)
    report = build_table(
        [str(folder)], other, engine=engine_of("ray", 1, other) if how == "ray" else LocalEngine(2)
    )
    assert (12, {"NotMp4Error": 1}) == (report.built, dict(report.failed))
    assert contents(tmp_path / "a.lance") == contents(tmp_path / "b.lance")
    assert 12 == build_table([str(folder)], other).skipped
    shutil.copyfile(folder / "part0" / "00.mp4", folder / "part1" / "01.mp4")
    for table in (plain, other):
        engine = engine_of("ray", 1, table) if how == "ray" and table is other else LocalEngine(1)
        assert 1 == build_table([str(folder)], table, engine=engine).built
    assert contents(tmp_path / "a.lance") == contents(tmp_path / "b.lance")
    with pytest.raises(fg.InvalidRequestError):
        engine_of("spark", 1, other)


@pytest.mark.parametrize("name", ["t.lance", "t.arrow"])
def test_a_killed_build_goes_on(folder, tmp_path, name, monkeypatch):
    """kill -9 at some moments: the table can be read each time, has no row twice, and the resumed one is the undisturbed one."""
    build_table([str(folder)], fg.IndexTable.open(tmp_path / f"whole-{name}", create=True))
    draw = random.Random(name)
    program = (
        "import sys; import fluxon_gop.table_build as b; b.COMMIT_ROWS = 2; b.CHUNK = 3\n"
        "import fluxon_gop.build_shards as s\n"
        "from fluxon_gop.cli import main\n"
        "print('ready', flush=True)\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    with RangeServer(folder, latency_s=0.02) as server:
        uris = [server.url(str(path.relative_to(folder))) for path in sorted(folder.rglob("*.mp4"))]
        (tmp_path / "list.txt").write_text("\n".join(uris))
        command = [
            sys.executable,
            "-c",
            program,
            "index",
            "build",
            f"@{tmp_path / 'list.txt'}",
            "--to",
            str(tmp_path / name),
        ]
        for _ in range(4):
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
                assert process.stdout.readline()
                time.sleep(draw.uniform(0.0, 0.35))
                process.send_signal(signal.SIGKILL)
            table = fg.IndexTable.open(tmp_path / name, create=True)
            keys = table.keys()
            assert len(keys) == len(set(keys)) == len(table)
            assert all(isinstance(row, fg.VideoIndex) for row in table.lookup(keys))
        assert 1 == subprocess.run(command, capture_output=True, check=False, timeout=60).returncode
        got = contents(tmp_path / name)
        wanted = contents(tmp_path / f"whole-{name}")
        assert 12 == len(got)
        assert [row["sample_size"] for row in wanted] == [row["sample_size"] for row in got]
        assert 1 == len(FailedVideos(str(tmp_path / name)))


def test_a_killed_build_leaves_no_process(folder, tmp_path):
    """The processes of a build that is killed end with it."""
    mark = f"FLUXON_GOP_TEST={tmp_path}"
    with RangeServer(folder, latency_s=0.5) as server:
        uris = [server.url(str(path.relative_to(folder))) for path in sorted(folder.rglob("??.mp4"))]
        (tmp_path / "list.txt").write_text("\n".join(uris))
        command = [sys.executable, "-m", "fluxon_gop", "index", "build", f"@{tmp_path / 'list.txt'}"]
        command += ["--to", str(tmp_path / "t.lance"), "--processes", "2"]
        environment = {**os.environ, "FLUXON_GOP_TEST": str(tmp_path)}
        with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
            end = time.monotonic() + 60
            while not server.requests:
                assert time.monotonic() < end, "waited in vain"
                time.sleep(0.01)
            assert len(_marked(mark)) > 2
            process.send_signal(signal.SIGKILL)
        end = time.monotonic() + 20
        while left := _marked(mark):
            assert time.monotonic() < end, f"still there: {left}"
            time.sleep(0.05)


def _marked(mark: str) -> list[str]:
    """The processes whose environment has this line."""
    found = []
    for place in Path("/proc").iterdir():
        try:
            if place.name.isdecimal() and mark.encode() in (place / "environ").read_bytes().split(b"\0"):
                found.append(place.name)
        except OSError:
            continue
    return found


def test_a_script_without_a_guard_is_told(folder, tmp_path):
    """A program whose processes would build again ends with what to do, and with no more processes."""
    script = tmp_path / "script.py"
    script.write_text(
        "import fluxon_gop as fg\n"
        "from fluxon_gop.build_shards import LocalEngine\n"
        "from fluxon_gop.table_build import build_table\n"
        f"build_table([{str(folder)!r}], fg.IndexTable.open({str(tmp_path / 't.lance')!r}, create=True), "
        "engine=LocalEngine(2))\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=120
    )
    assert 1 == done.returncode
    assert "InvalidRequestError: no process can be started" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "t.lance").exists()


def test_two_builders_on_one_table(folder, tmp_path):
    """Two builds of one folder into one table at once: both end well, and each video has one row."""
    command = [
        sys.executable,
        "-m",
        "fluxon_gop",
        "index",
        "build",
        str(folder),
        "--to",
        str(tmp_path / "t.lance"),
        "--json",
    ]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    for process in running:
        out, err = process.communicate(timeout=60)
        assert 1 == process.returncode, err
        assert out, err
        assert json.loads(out.splitlines()[-1])["built"] + json.loads(out.splitlines()[-1])["skipped"] == 12
    table = fg.IndexTable.open(tmp_path / "t.lance")
    assert 12 == build_table([str(folder)], table).skipped
    assert 12 == len(table) == len(set(table.keys()))
    assert all(isinstance(row, fg.VideoIndex) for row in table.lookup(table.keys()))


def test_verify_finds_what_is_wrong(folder, tmp_path, media):
    """Rows whose file is gone, changed, or not what the row says are found, each at its level."""
    table = fg.IndexTable.open(tmp_path / "t.lance", create=True)
    build_table([str(folder / "part0"), str(folder / "part1")], table)
    for level in ("signature", "counts", "entry-points", "pixels"):
        assert {"ok"} == {row.status for row in verify_table(table, level=level)}
    assert 5 == len(list(verify_table(table, sample=5)))
    (folder / "part0" / "00.mp4").unlink()
    shutil.copyfile(media["hevc"], folder / "part0" / "04.mp4")
    found = {Path(row.uri).name: row.status for row in verify_table(table)}
    assert ("gone", "stale") == (found.pop("00.mp4"), found.pop("04.mp4"))
    assert {"ok"} == set(found.values())
    # A row of another file of the same size and time.
    path, other = folder / "part0" / "02.mp4", folder / "part1" / "01.mp4"
    liar = fg.IndexTable.open(tmp_path / "l.lance", create=True)
    from dataclasses import replace

    index = fg.build_index(other)
    liar.append([(str(path), replace(index, signature=fg.build_index(path).signature))])
    assert ["ok"] == [row.status for row in verify_table(liar)]
    assert ["wrong"] == [row.status for row in verify_table(liar, level="counts")]
    with pytest.raises(fg.InvalidRequestError):
        list(verify_table(table, level="all"))


def test_merge_and_export(folder, tmp_path):
    """Two tables merged are the table of both; a Parquet file has its rows, readable without us."""
    for name in ("part0", "part1", ""):
        build_table(
            [str(folder / name)], fg.IndexTable.open(tmp_path / f"{name or 'both'}.lance", create=True)
        )
    to = fg.IndexTable.open(tmp_path / "merged.lance", create=True)
    sources = [tmp_path / "part0.lance", tmp_path / "part1.lance"]
    assert (12, 0) == merge_tables(sources, to)
    assert contents(tmp_path / "both.lance") == contents(tmp_path / "merged.lance")
    assert (0, 0) == merge_tables(sources, to)
    # A damaged row is not taken over, and is replaced by a sound one.

    damaged = to.encoded(to.keys()).set_column(4, SCHEMA.field(4), pa.array([7] * 12, pa.int64()))
    with pa.OSFile(str(tmp_path / "d.arrow"), "wb") as file, pa.ipc.new_file(file, SCHEMA) as out:
        out.write_table(damaged.cast(SCHEMA))
    broken = fg.IndexTable.open(tmp_path / "d.arrow")
    assert (0, 0) == merge_tables([tmp_path / "d.arrow"], to)
    assert (0, 12) == merge_tables(sources, broken)
    assert {"ok"} == {row.status for row in verify_table(broken)}
    assert 12 == export_parquet(to, tmp_path / "t.parquet")
    rows = pa.parquet.read_table(tmp_path / "t.parquet")
    assert SCHEMA.names == rows.schema.names
    assert contents(tmp_path / "both.lance") == sorted(rows.to_pylist(), key=lambda row: row["uri"])


def test_a_table_tells_what_reading_costs(folder, tmp_path):
    """The forecast of bytes and pictures is what planned windows cost; long GOPs are advised against."""
    table = fg.IndexTable.open(tmp_path / "t.lance", create=True)
    build_table([str(folder)], table)
    facts = table_facts(table, window=8)
    assert (12, 720, 12) == (facts["rows"], facts["frames"], facts["looked_at"])
    assert {"min": 1, "max": 15} == {name: facts["gop_lengths"][name] for name in ("min", "max")}
    keys = table.keys()
    with fg.VideoReaderPool(index=table) as pool:
        rng = np.random.default_rng(0)
        cost = [
            pool.explain([fg.VideoReadRequest(key, range(at, at + 8))]).nbytes / 8
            for key in keys
            for at in rng.integers(0, 52, 40).tolist()
        ]
    assert 0.75 < facts["forecast"]["bytes_per_frame"] / np.mean(cost) < 1.33
    assert any("re-encode" in text for text in table_facts(table, window=1)["advice"])
    assert not any("re-encode" in text for text in table_facts(table, window=24)["advice"])


def test_the_commands(folder, tmp_path, capsys, monkeypatch):
    """build with its switches, show with map and text, verify, merge, export: outputs and exit codes."""
    monkeypatch.chdir(tmp_path)
    assert 1 == main(["index", "build", "videos", "--to", "t.lance", "--processes", "1"])
    assert "failed: NotMp4Error" in capsys.readouterr().err
    assert 1 == main(["index", "build", "videos", "--to", "t.lance"])
    assert "1 failed in an earlier build and have not changed" in capsys.readouterr().err
    (folder / "bad.mp4").unlink()
    (folder / "part0" / "00.mp4").unlink()
    assert 0 == main(["index", "build", "videos", "--to", "t.lance", "--prune", "--json"])
    sums = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (1, 1, 0) == (sums["deleted"], sums["pruned"], sums["failed_before"])
    video = str(folder / "part0" / "04.mp4")
    assert 0 == main(["index", "show", video, "--gops", "--map", "m.png"])
    out = capsys.readouterr().out
    assert 5 == out.count("#")
    assert Path("m.png").stat().st_size > 500
    assert 0 == main(["index", "verify", "t.lance", "--level", "pixels", "--sample", "2"])
    assert "t.lance: 2 ok\n" == capsys.readouterr().out
    Path(video).unlink()
    assert 1 == main(["index", "verify", "t.lance", "--json"])
    assert {"gone": 1, "ok": 10} == {
        k: v for k, v in json.loads(capsys.readouterr().out.splitlines()[-1]).items() if k in {"ok", "gone"}
    }
    assert 0 == main(["index", "merge", "t.lance", "--to", "m.arrow"])
    assert "m.arrow: 11 added, 0 replaced\n" == capsys.readouterr().out
    assert 0 == main(["index", "export", "m.arrow", "--to", "m.parquet"])
    assert "m.parquet: 11 rows\n" == capsys.readouterr().out


def test_large_tables_are_asked_by_query(folder, tmp_path, monkeypatch):
    """With an index of its keys a table is asked without loading them: the same answers, also for rows added since."""
    from fluxon_gop import lance_rows, table_keys

    monkeypatch.setattr(table_keys, "QUERIED_ROWS", 4)
    monkeypatch.setattr(lance_rows, "INDEXED_ROWS", 4)
    uri = tmp_path / "t.lance"
    table = fg.IndexTable.open(uri, create=True)
    build_table([str(folder / "part0")], table)
    paths = sorted(folder.rglob("??.mp4"))
    exported = [
        (("videos", "a'b/c.mp4"), fg.build_index(paths[0])),
        (("other", "c.mp4"), fg.build_index(paths[1])),
    ]
    table.append(exported)
    build_table([str(folder / "part1")], table)
    opened = fg.IndexTable.open(uri)
    assert isinstance(opened._keys(), table_keys.QueriedKeys)
    assert 14 == len(opened)
    assert str(paths[0]) in opened
    assert ("videos", "a'b/c.mp4") in opened
    assert "nowhere" not in opened
    asked = [str(paths[3]), "nowhere", ("videos", "a'b/c.mp4"), ("other", "a'b/c.mp4"), str(paths[0])]
    rows = opened.lookup(asked)
    assert [True, False, True, False, True] == [isinstance(row, fg.VideoIndex) for row in rows]
    assert rows[0].same_samples(fg.build_index(paths[3]))
    assert rows[2].same_samples(fg.build_index(paths[0]))
    assert [60, -1, 60, -1, 60] == opened.frame_counts(asked).tolist()
    assert set(map(str, paths)) <= set(opened.keys())
    assert opened.signature(str(paths[0])).size == paths[0].stat().st_size
    monkeypatch.setattr(table_keys, "_MANY", 2)
    assert [60] * 12 == opened.frame_counts([str(path) for path in paths]).tolist()
    with fg.VideoReaderPool(index=opened) as pool:
        (result,) = pool.read_many([fg.VideoReadRequest(paths[5], [9])])
        assert np.array_equal(full_decode(paths[5])[[9]], result.array)
        assert not result.stats.index_builds


def test_pruning_removes_only_what_is_gone(folder, tmp_path, monkeypatch):
    """Not what a listing does not name but is there, not what another builder has added, nothing where a folder fails."""
    table = fg.IndexTable.open(tmp_path / "t.lance", create=True)
    odd = folder / "x.bin"
    shutil.copyfile(folder / "part0" / "00.mp4", odd)
    (tmp_path / "elsewhere").mkdir()
    shutil.copyfile(odd, tmp_path / "elsewhere" / "b.mp4")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    build_table([str(folder), str(odd), str(folder / "link" / "b.mp4")], table)
    rows = len(table)
    report = build_table([str(folder)], table, BuildOptions(prune=True))
    assert ([], 0, rows) == (report.deleted, report.pruned, len(table))
    later = folder / "later.mp4"

    class Meanwhile(LocalEngine):
        def run(self, shards):
            yield from super().run(shards)
            shutil.copyfile(odd, later)
            build_table([str(later)], fg.IndexTable.open(tmp_path / "t.lance"))

    report = build_table([str(folder)], table, BuildOptions(prune=True, rebuild=True), engine=Meanwhile(1))
    assert ([], 0) == (report.deleted, report.pruned)
    assert str(later) in fg.IndexTable.open(tmp_path / "t.lance")
    plain = os.scandir

    def failing(path="."):
        if str(path).endswith("part1"):
            raise OSError(5, "Input/output error", str(path))
        return plain(path)

    monkeypatch.setattr(os, "scandir", failing)
    with pytest.raises(fg.SourceError, match="cannot be listed"):
        build_table([str(folder)], fg.IndexTable.open(tmp_path / "t.lance"), BuildOptions(prune=True))
    assert rows + 1 == len(fg.IndexTable.open(tmp_path / "t.lance"))


def test_failures_of_the_way_are_tried_again(media, tmp_path):
    """A file that was missing, or whose version nobody knows, is read when it is there; only the same bad bytes are not."""
    place = tmp_path / "served"
    place.mkdir()
    shutil.copyfile(media["bframes"], place / "good.mp4")
    table = fg.IndexTable.open(tmp_path / "t.arrow", create=True)
    (tmp_path / "list.txt").write_text(str(place / "late.mp4"))
    with RangeServer(place) as server:
        sources = [f"@{tmp_path / 'list.txt'}", server.url("web.mp4"), server.url("good.mp4")]
        first = build_table(sources, table)
        assert {"SourceNotFoundError": 2} == dict(first.failed)
        shutil.copyfile(media["hevc"], place / "late.mp4")
        (place / "web.mp4").write_bytes(b"junk that is no video")
        second = build_table(sources, table)
        assert (1, {"NotMp4Error": 1}) == (second.built, dict(second.failed))
        shutil.copyfile(media["hevc"], place / "web.mp4")
        third = build_table(sources, table)
        assert (1, 2, True) == (third.built, third.skipped, third.is_whole)


def test_builders_beside_one_another_keep_each_others_rows(folder, tmp_path):
    """Two tables open on one Arrow file, written in turn: no row is lost, none is there twice."""
    one, other = (fg.IndexTable.open(tmp_path / "t.arrow", create=True) for _ in range(2))
    build_table([str(folder / "part0")], one)
    build_table([str(folder / "part1"), str(folder / "part0" / "00.mp4")], other)
    build_table([str(folder / "part0")], one)
    assert 12 == len(set(contents_keys(tmp_path / "t.arrow"))) == len(contents_keys(tmp_path / "t.arrow"))


def contents_keys(uri):
    return [row["uri"] for row in contents(uri)]


def test_names_that_are_odd(media, tmp_path):
    """A name that is no UTF-8, one that is too long, one with a secret: failures of their own, without the secret; the rest is built."""
    (tmp_path / "odd").mkdir()
    place = os.fsencode(tmp_path / "odd")
    for name in (b"good.mp4", b"b\xff\xfe.mp4", b"it's 100% \xc3\xbc #1?.mp4"):
        shutil.copyfile(media["bframes"], os.path.join(place, name))
    table = fg.IndexTable.open(tmp_path / "t.lance", create=True)
    sources = [
        str(tmp_path / "odd"),
        "x" * 300 + ".mp4",
        "s3://AK:S3CRET@bucket/c.mp4",
        f"file://{tmp_path / 'odd' / 'good.mp4'}",
    ]
    told = []
    report = build_table(sources, table, progress=told.append)
    assert 2 == report.built
    assert 3 == sum(report.failed.values())
    everything = repr(told) + repr(FailedVideos(table.uri).all()) + "".join(str(one.error) for one in told)
    assert "S3CRET" not in everything
    assert 2 == build_table(sources, table).skipped


def test_a_process_that_dies_costs_its_video_only(folder, tmp_path):
    """A video on which its process dies is a failure; all others of the build are rows."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, sys\n"
        "import fluxon_gop.build_shards as shards\n"
        "from fluxon_gop.cli import main\n"
        "plain = shards.open_source\n"
        "def opening(uri, options=None):\n"
        "    if uri.endswith('05.mp4'):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return plain(uri, options)\n"
        "shards.open_source = opening\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(main(sys.argv[1:]))\n"
    )
    command = [
        sys.executable,
        str(program),
        "index",
        "build",
        str(folder),
        "--to",
        str(tmp_path / "t.lance"),
    ]
    command += ["--processes", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert 1 == done.returncode, done.stderr
    sums = json.loads(done.stdout.splitlines()[-1])
    assert (11, {"NotMp4Error": 1, "SourceError": 1}) == (sums["built"], sums["by_class"])


def test_lists_with_and_without_a_head(folder, tmp_path):
    """A CSV without names of columns is refused, not read without its first line; texts stay texts; a BOM is no part of a name."""
    uri = str(folder / "part0" / "00.mp4")
    (tmp_path / "bare.csv").write_text(f"{uri}\n{uri}\n")
    with pytest.raises(fg.SourceError, match="no names of columns"):
        list(list_videos([f"@{tmp_path / 'bare.csv'}"]))
    (tmp_path / "n.csv").write_text("path,n\n0001,2\n2024-01-01,3\n")
    assert ["0001", "2024-01-01"] == [
        Path(listed.uri).name for listed in list_videos([f"@{tmp_path / 'n.csv'}"])
    ]
    (tmp_path / "bom.txt").write_text("\ufeff" + uri, encoding="utf-8")
    assert [uri] == [listed.uri for listed in list_videos([f"@{tmp_path / 'bom.txt'}"])]


def test_tables_beside_that_are_something_else(folder, tmp_path):
    """A failures table of another kind, a data set without its versions: typed errors, and nothing is written over."""
    import lance

    lance.write_dataset(pa.table({"a": [1]}), str(tmp_path / "t.failures.lance"))
    with pytest.raises(fg.IndexTableError, match="no table of failures"):
        build_table([str(folder)], fg.IndexTable.open(tmp_path / "t.lance", create=True))
    build_table([str(folder / "part0")], fg.IndexTable.open(tmp_path / "h.lance", create=True))
    shutil.rmtree(tmp_path / "h.lance" / "_versions")
    with pytest.raises(fg.IndexTableError, match="cannot be opened"):
        fg.IndexTable.open(tmp_path / "h.lance", create=True)
    table = fg.IndexTable.open(tmp_path / "g.lance", create=True)
    build_table([str(folder / "part0")], table)
    for path in (tmp_path / "g.lance" / "data").iterdir():
        path.write_bytes(b"torn")
    with pytest.raises(fg.IndexTableError, match="cannot be read or written"):
        fg.IndexTable.open(tmp_path / "g.lance").keys()
    assert "/x/t.failures.lance" == uri_beside("/x/t.lance/")
