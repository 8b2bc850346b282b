"""The command line: whole outputs, exit codes, and one line for each error."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import typer
from PIL import Image

import fluxon_gop as fg
from fluxon_gop.cli import EXIT_CODES, app, main
from tests.media import full_decode


def commands(group, words=()):
    """Yield the words of each command and group."""
    yield words
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, (*words, name))


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def folder(tmp_path, media, monkeypatch):
    """Work in a directory with two videos of 60 frames and a file that is none."""
    for name in ("bframes", "allintra"):
        (tmp_path / f"{name}.mp4").write_bytes(media[name].read_bytes())
    (tmp_path / "notes.txt").write_text("no video")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def table(folder, capsys):
    """Build the index table of the two videos."""
    assert main(["index", "build", ".", "--to", "t.arrow"]) == 0
    capsys.readouterr()
    return folder / "t.arrow"


@pytest.mark.parametrize("words", list(commands(typer.main.get_command(app))), ids=" ".join)
def test_every_help_has_an_example_and_the_exit_codes(words, capsys):
    """Each command's help shows how it is called and what its exit codes mean."""
    assert main([*words, "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"Example:\n    fluxon-gop {' '.join(words)}".rstrip() in out
    assert [line.strip() for line in EXIT_CODES.splitlines()[1:]] == [
        line.strip() for line in out.rstrip().splitlines()[-4:]
    ]


def test_build_counts_skips_and_lists_failures(folder, capsys):
    """A build tells each video's outcome and cost, skips what it has, and fails with 1 where one failed."""
    costs = {}
    for name in ("allintra", "bframes"):
        source = fg.TracedSource(fg.LocalSource(folder / f"{name}.mp4"))
        fg.build_index(source)
        source.close()
        costs[name] = (len(source.trace.requests), source.trace.nbytes)
    assert main(["index", "build", "allintra.mp4", "--to", "t.lance"]) == 0
    requests, nbytes = costs["allintra"]
    assert capsys.readouterr() == (
        f"t.lance: 1 built, 0 skipped, 0 failed; {requests} requests, {nbytes:,} bytes\n",
        "",
    )
    assert main(["index", "build", "*.mp4", "notes.txt", "gone.mp4", "--to", "t.lance", "--json"]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    *outcomes, sums = lines(out)
    nothing = {"frames": None, "gops": None, "requests": 0, "bytes": 0, "error": None}
    requests, nbytes = costs["bframes"]
    by_name = {outcome["uri"].rsplit("/", 1)[-1]: outcome for outcome in outcomes}
    bad = by_name.pop("notes.txt")
    assert by_name == {
        "allintra.mp4": nothing | {"uri": str(folder / "allintra.mp4"), "status": "skipped"},
        "bframes.mp4": {
            "uri": str(folder / "bframes.mp4"),
            "status": "built",
            "frames": 60,
            "gops": 5,
            "requests": requests,
            "bytes": nbytes,
            "error": None,
        },
        "gone.mp4": nothing
        | {
            "uri": f"{folder}/gone.mp4",
            "status": "failed",
            "requests": 1,
            "error": {"class": "SourceNotFoundError", "message": f"{folder}/gone.mp4: no such file"},
        },
    }
    assert (
        bad["status"],
        bad["error"]["class"],
        bad["requests"],
        bad["bytes"],
    ) == ("failed", "NotMp4Error", 1, 8)
    total = {"requests": requests + 2, "bytes": nbytes + 8}
    assert sums.pop("seconds") > 0
    assert sums == {
        "table": "t.lance",
        "built": 1,
        "skipped": 1,
        "failed": 2,
        "failed_before": 0,
        "by_class": {"NotMp4Error": 1, "SourceNotFoundError": 1},
        "deleted": 0,
        "pruned": 0,
        **total,
    }


def test_failures_come_last_on_stderr(folder, capsys):
    """In text, stdout is the sum and stderr names class, file and reason of each failure."""
    assert main(["index", "build", ".", "gone.mp4", "notes.txt", "--to", "t.arrow", "--check", "none"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("t.arrow: 2 built, 0 skipped, 2 failed; ")
    by_class, first, second = sorted(err.splitlines())
    assert {"NotMp4Error 1", "SourceNotFoundError 1"} == set(
        by_class.removeprefix("failed by class: ").split(", ")
    )
    assert first.startswith(f"failed: NotMp4Error: {folder}/notes.txt: ")
    assert second == f"failed: SourceNotFoundError: {folder}/gone.mp4: no such file"


def test_progress_keeps_to_stderr(folder, capsys, monkeypatch):
    """On a terminal the progress is drawn on stderr, and stdout is still JSON alone."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["index", "build", ".", "--to", "t.arrow", "--json"]) == 0
    out, err = capsys.readouterr()
    assert [line.get("status") for line in lines(out)] == ["built", "built", None]
    assert "2 videos, " in err


def test_show_tells_of_one_video(folder, table, capsys):
    """The facts of a video are the same from its table row and built afresh."""
    path = folder / "bframes.mp4"
    index = fg.build_index(path)
    facts = {
        "uri": str(path),
        "codec": "h264",
        "height": 96,
        "width": 128,
        "frames": 60,
        "frames_certain": True,
        "seconds": 2.4,
        "fps": 25.0,
        "gops": {"count": 5, "min": 12, "median": 12.0, "max": 12},
        "key_samples": {"proven": 5, "decoded": 0, "unchecked": 0, "refused": 0},
        "path": "packet",
        "reason": None,
        "index_bytes": index.nbytes,
    }
    assert main(["index", "show", "bframes.mp4", "--json"]) == 0
    assert lines(capsys.readouterr().out) == [facts]
    assert main(["index", "show", "bframes.mp4", "--table", "t.arrow", "--json"]) == 0
    assert lines(capsys.readouterr().out) == [facts]
    assert main(["index", "show", "bframes.mp4"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"uri:            {path}",
        "codec:          h264",
        "height:         96",
        "width:          128",
        "frames:         60",
        "frames certain: yes",
        "seconds:        2.4",
        "fps:            25",
        "gops:           count 5, min 12, median 12, max 12",
        "key samples:    proven 5, decoded 0, unchecked 0, refused 0",
        "path:           packet",
        "reason:         -",
        f"index bytes:    {index.nbytes}",
    ]


def test_show_tells_of_a_table(table, capsys):
    """Without a video the table's rows, frames and shares are shown."""
    assert main(["index", "show", "--table", "t.arrow"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [
        "table:          t.arrow",
        "rows:           2",
        "looked at:      2",
        "frames:         120",
    ] == out[:4]
    assert any(
        line.startswith("gop lengths:    min 1, median 1, ") and line.endswith("max 12") for line in out
    )
    assert "paths:          packet 2 (100%)" in out
    assert out[-1].startswith("advice:         2 videos of 2 have the movie box behind the media")
    assert main(["index", "show", "--table", "t.arrow", "--window", "12", "--json"]) == 0
    (facts,) = lines(capsys.readouterr().out)
    forecast = facts.pop("forecast")
    assert 12 == forecast["window"]
    assert 1.0 <= forecast["decoded_per_frame"] < 2.0
    assert (facts["rows"], facts["frames"], facts["reasons"]) == (2, 120, {})
    assert facts["paths"] == {"packet": {"rows": 2, "share": 1.0}}


def test_show_refuses_a_row_of_another_version(folder, table, capsys):
    """A row that does not fit its file any more is an error with exit code 1."""
    (folder / "bframes.mp4").write_bytes((folder / "allintra.mp4").read_bytes())
    assert main(["index", "show", "bframes.mp4", "--table", "t.arrow"]) == 1
    said = f"t.arrow: the row of {folder}/bframes.mp4 is of another version of the file; build it again"
    assert capsys.readouterr() == ("", f"StaleIndexError: {said}\n")


def test_plan_is_the_pools(folder, table, capsys):
    """With a table, what is printed is the pool's plan of the batch, and its JSON has the ranges."""
    with fg.IndexTable.open(table) as index, fg.VideoReaderPool(index=index) as pool:
        whole = pool.explain(
            [fg.VideoReadRequest(name, [0, 8, 16, 40]) for name in ("bframes.mp4", "allintra.mp4")]
        )
    words = ["plan", "bframes.mp4", "allintra.mp4", "--frames", "0:20:8,40", "--table", "t.arrow"]
    assert main(words) == 0
    assert capsys.readouterr() == (f"{whole}\n", "")
    assert main([*words, "--json"]) == 0
    (facts,) = lines(capsys.readouterr().out)
    assert (1, whole.requests, whole.nbytes) == (facts["waves"], facts["requests"], facts["bytes"])
    assert [
        {
            "uri": video.name,
            "frames": 4,
            "path": "packet",
            "note": None,
            "requests": video.requests,
            "bytes": video.nbytes,
            "ranges": [list(r) for r in video.plan.ranges],
        }
        for video in whole.videos
    ] == facts["videos"]


def test_plan_without_a_row_counts_the_index_waves(media, server, capsys):
    """Without a row the plan is known all the same, and says that a read takes two waves more."""
    url = server.url("bframes.mp4")
    with fg.VideoReader.open(url) as reader:
        nbytes = reader.plan(np.array([30])).nbytes
    assert main(["plan", url, "--frames", "30", "--json"]) == 0
    (facts,) = lines(capsys.readouterr().out)
    assert (3, nbytes) == (facts["waves"], facts["bytes"])
    assert facts["videos"][0]["note"].startswith("no row: head and movie box first; holes up to ")


def test_build_and_read_over_http(media, server, tmp_path, capsys):
    """A table built from an address serves reads of it: one wave of media, nothing else."""
    url, table = server.url("bframes.mp4"), str(tmp_path / "t.arrow")
    assert main(["index", "build", url, "--to", table]) == 0
    capsys.readouterr()
    server.reset()
    out = str(tmp_path / "frames")
    assert main(["read", url, "--frames", "59,7", "--out", out, "--table", table, "--json"]) == 0
    (facts,) = lines(capsys.readouterr().out)
    assert (url, [59, 7]) == (facts["uri"], facts["frames"])
    assert [f"{out}/frame_000059.png", f"{out}/frame_000007.png"] == facts["files"]
    assert (facts["cost"]["media_waves"], facts["cost"]["head_moov_waves"]) == (1, 0)
    assert facts["cost"]["media_requests"] == len(server.requests)
    truth = full_decode(media["bframes"])
    for frame, file in zip([59, 7], facts["files"], strict=True):
        assert np.array_equal(truth[frame], np.asarray(Image.open(file)))


def test_read_writes_files_here_by_default(folder, capsys):
    """Without --out and --sheet each frame is a file in the working directory, repeats once."""
    assert main(["read", "allintra.mp4", "--frames", "3,1,3", "--height", "48", "--width", "64"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == ["frame_000003.png", "frame_000001.png"]
    assert err.startswith("2 waves, 2 requests, ")
    truth = full_decode(folder / "allintra.mp4", 48, 64)
    assert np.array_equal(truth[1], np.asarray(Image.open("frame_000001.png")))


def test_read_makes_one_sheet(folder, capsys):
    """With --sheet alone there is one picture, the frames in rows of eight, unscaled where small."""
    assert main(["read", "allintra.mp4", "--frames", "0:20:2", "--sheet", "new/sheet.png"]) == 0
    assert capsys.readouterr().out == "new/sheet.png\n"
    sheet = np.asarray(Image.open("new/sheet.png"))
    truth = full_decode(folder / "allintra.mp4")
    assert sheet.shape == (2 * 24 + 30 + 2 * (96 + 24), 2 * 24 + 8 * 128 + 7 * 8, 3)
    assert np.array_equal(truth[2], sheet[54:150, 160:288])
    assert np.array_equal(truth[16], sheet[174:270, 24:152])
    assert not list(folder.glob("*.png"))


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["index", "show", "gone.mp4"], 1, "SourceNotFoundError: {}/gone.mp4: no such file\n"),
        (["index", "show", "gone.mp4", "--table", "t.arrow"], 1, "IndexMissingError: t.arrow: no row for"),
        (
            ["index", "show", "--table", "gone.arrow"],
            1,
            "IndexTableError: gone.arrow: no index table there",
        ),
        (["index", "show", "notes.txt"], 1, "NotMp4Error: "),
        (["index", "show"], 2, "Usage: fluxon-gop index show"),
        (["index", "build", "*.nothing", "--to", "x.arrow"], 2, "InvalidRequestError: *.nothing: no video"),
        (["index", "build", ".", "--to", "x.arrow", "--check", "all"], 2, "Usage: "),
        (["index", "build", "."], 2, "Usage: "),
        (["plan", "gone.mp4", "--frames", "0"], 1, "SourceNotFoundError: {}/gone.mp4: no such file\n"),
        (["plan", "bframes.mp4", "--frames", "60"], 1, "FrameIndexError: "),
        (["plan", "bframes.mp4", "--frames", "0:8:0"], 2, "Usage: "),
        (["plan", "bframes.mp4", "--frames", "8:8"], 2, "Usage: "),
        (["plan", "bframes.mp4", "--frames", "-1"], 2, "Usage: "),
        (["read", "bframes.mp4", "--frames", "0:x"], 2, "Usage: "),
        (["read", "bframes.mp4", "--frames", "1:2:3:4"], 2, "Usage: "),
        (["read", "bframes.mp4", "--frames", "60"], 1, "FrameIndexError: "),
        (["read", "bframes.mp4", "--frames", "0", "--height", "8"], 2, "InvalidRequestError: height=8"),
        (["read", "bframes.mp4", "--frames", "0", "--out", "notes.txt"], 2, "Usage: "),
        (["demo", "gone.mp4", "--out", "x"], 1, "SourceNotFoundError: {}/gone.mp4: no such file\n"),
        (["demo", "notes.txt", "--out", "x"], 1, "building the index table\nNotMp4Error: "),
        (["demo", "--latency-ms", "-1", "--out", "x"], 2, "InvalidRequestError: latency"),
        (["bogus"], 2, "Usage: "),
        ([], 2, "Usage: "),
    ],
)
def test_errors_are_a_line_and_a_code(folder, table, capsys, words, code, said):
    """What cannot be done is told on stderr, with nothing on stdout and no traceback."""
    assert main(words) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(said.format(folder))
    assert said.startswith("Usage") or len(err.splitlines()) <= 2


def test_a_container_path_is_told_with_its_reason(tmp_path, media, capsys):
    """Plan and table name the path and why, for a video whose packets are not cut."""
    path = media["mpeg4"]
    index = fg.build_index(path)
    reason = index.container_reason
    table = str(tmp_path / "t.arrow")
    assert reason is not None
    assert main(["index", "build", str(path), "--to", table]) == 0
    capsys.readouterr()
    assert main(["index", "show", "--table", table, "--json"]) == 0
    (facts,) = lines(capsys.readouterr().out)
    assert ({"container": {"rows": 1, "share": 1.0}}, {reason: 1}) == (facts["paths"], facts["reasons"])
    assert main(["index", "show", "--table", table]) == 0
    out = capsys.readouterr().out
    assert f"container 1 (100%)\nreasons:        1 x {reason}\n" in out
    assert "go through FFmpeg's demuxer" in out
    assert main(["plan", str(path), "--frames", "3", "--json"]) == 0
    (facts,) = lines(capsys.readouterr().out)
    (video,) = facts["videos"]
    assert ("container", f"no row: head and movie box first; {reason}") == (video["path"], video["note"])


def test_python_m_runs_it():
    """``python -m fluxon_gop`` is the same program."""
    ran = subprocess.run(
        [sys.executable, "-m", "fluxon_gop", "--version"], check=True, capture_output=True, text=True
    )
    assert (f"{fg.__version__}\n", "") == (ran.stdout, ran.stderr)


def test_a_stricter_check_builds_unchanged_rows_again(tmp_path, media, capsys):
    """Rows checked as asked are skipped; a stricter check, or --rebuild, builds them again."""
    table = str(tmp_path / "t.arrow")
    words = ["index", "build", str(media["hev1"]), "--to", table]
    for more, said in (
        (["--check", "none"], "1 built, 0 skipped"),
        (["--check", "none"], "0 built, 1 skipped"),
        ([], "1 built, 0 skipped"),
        (["--check", "none"], "0 built, 1 skipped"),
        (["--check", "decode"], "1 built, 0 skipped"),
        (["--check", "decode"], "0 built, 1 skipped"),
        (["--check", "none", "--rebuild"], "1 built, 0 skipped"),
    ):
        assert main([*words, *more]) == 0
        assert said in capsys.readouterr().out


def test_a_stale_row_is_told(tmp_path, media, capsys):
    """Plan and read say that the table's row is of another version of the file."""
    path = tmp_path / "v.mp4"
    path.write_bytes(media["bframes"].read_bytes())
    table = str(tmp_path / "t.arrow")
    assert main(["index", "build", str(path), "--to", table]) == 0
    path.write_bytes(media["vp9"].read_bytes())
    capsys.readouterr()
    assert main(["plan", str(path), "--frames", "3", "--table", table]) == 0
    assert "another version of the file, build it again" in capsys.readouterr().out
    assert main(["read", str(path), "--frames", "3", "--out", str(tmp_path), "--table", table]) == 0
    assert "does not fit the file; build it again" in capsys.readouterr().err
