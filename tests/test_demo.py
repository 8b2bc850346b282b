"""The demo, its pictures, its server, and the plain readings that it compares with."""

from __future__ import annotations

import http.client
import json
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

import fluxon_gop as fg
from fluxon_gop.cli import main
from fluxon_gop.demo import RECIPES, run_demo
from fluxon_gop.demo_server import DemoServer, Traffic
from fluxon_gop.picture import BAR_HEIGHT, FETCHED, MARGIN, PLAN_WIDTH, Strip, contact_sheet, plan_picture
from fluxon_gop.reference import full_decode, plain_read
from tests import media as tests_media

BLUE = np.array(FETCHED)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Run the demo on its own videos, two seconds long, once."""
    out = tmp_path_factory.mktemp("demo")
    said = []
    return out, run_demo([], out, latency_s=0.01, seconds=2, remark=said.append), said


def test_the_planned_read_is_exact_and_one_wave(made):
    """All frames of the batch are FFmpeg's, in one round trip, over four kinds of video."""
    _, report, said = made
    built, planned, plain = report.ways
    assert (built.name, planned.name, plain.name) == ("index build", "planned read", "plain PyAV")
    assert (planned.exact, planned.frames, planned.wrong) == (128, 128, {})
    assert report.exact
    assert planned.waves == 1
    assert built.waves <= 3
    assert built.exact is None
    assert plain.waves == plain.requests > planned.requests
    assert planned.bytes < sum(video["bytes"] for video in report.videos)
    assert [video["codec"] for video in report.videos] == ["h264", "hevc", "h264", "h264"]
    assert [video["frames"] for video in report.videos] == [50, 50, 50, 60]
    assert said[0] == "encoding 4 videos of 2 s"


def test_plain_pyav_errs_where_the_rate_varies(made):
    """A loop that divides by the average rate errs on a variable rate, and not on closed GOPs at a constant one."""
    _, report, _ = made
    plain = report.ways[2]
    assert "variable-rate.mp4" in plain.wrong
    assert not {"bframes-edit-list.mp4", "long-gop-audio.mp4"} & set(plain.wrong)
    assert plain.exact + sum(plain.wrong.values()) == plain.frames == 128


def test_the_demo_leaves_videos_and_pictures(made):
    """The folder holds the four videos, the contact sheet and the picture of the plan."""
    out, report, _ = made
    assert sorted(RECIPES) == sorted(path.name for path in (out / "videos").iterdir())
    assert (str(out / "contact-sheet.png"), str(out / "plan.png")) == report.files
    with Image.open(report.files[0]) as sheet, Image.open(report.files[1]) as plan:
        assert (sheet.width, plan.width) == (2 * MARGIN + 8 * 120 + 7 * 8, PLAN_WIDTH)
    text = str(report)
    assert text.startswith("4 videos: 1 wave, ")
    assert re.search(r"planned read +\d+ +1 +[\d,]+ +\d+\.\d\d  yes \(128 of 128 frames\)\n", text)


def test_demo_takes_files(tmp_path, media, capsys):
    """``demo FILE... --json`` compares on these files and prints one JSON value."""
    out = tmp_path / "out"
    files = [str(media["audio"]), str(media["rotated"])]
    assert main(["demo", *files, "--latency-ms", "1", "--out", str(out), "--json"]) == 0
    said, err = capsys.readouterr()
    report = json.loads(said)
    assert files == [video["file"] for video in report["videos"]]
    assert [video["frames"] for video in report["videos"]] == [60, 60]
    assert [way["exact"] for way in report["ways"]] == [None, 64, 64]
    assert report["latency_ms"] == 1.0
    assert sorted(report["files"]) == sorted(map(str, out.iterdir()))
    assert err.splitlines()[0] == "building the index table"
    assert main(["demo", files[0], "--latency-ms", "0", "--out", str(out)]) == 0
    assert "yes (32 of 32 frames)" in capsys.readouterr().out


def test_the_demos_server_speaks_http(tmp_path):
    """Ranges, versions and errors are answered as HTTP says, and bodies are counted."""
    file = tmp_path / "a b.bin"
    file.write_bytes(bytes(range(200)))
    with DemoServer({"x/a b.bin": file, "gone": tmp_path / "gone"}) as server:
        address, path = server.url("x/a b.bin").removeprefix("http://").split("/", 1)
        link = http.client.HTTPConnection(address)

        def ask(method, path, **headers):
            link.request(method, "/" + path, headers={k.replace("_", "-"): v for k, v in headers.items()})
            answer = link.getresponse()
            return answer.status, answer.headers, answer.read()

        status, headers, body = ask("GET", path)
        assert (200, "200", bytes(range(200))) == (status, headers["Content-Length"], body)
        etag = headers["ETag"]
        status, headers, body = ask("GET", path, Range="bytes=10-19", If_Match=etag)
        assert (206, "bytes 10-19/200", bytes(range(10, 20))) == (status, headers["Content-Range"], body)
        assert (206, bytes(range(190, 200))) == ask("GET", path, Range="bytes=190-")[::2]
        assert (206, bytes(range(190, 200))) == ask("GET", path, Range="bytes=190-999")[::2]
        status, headers, body = ask("GET", path, Range="bytes=200-")
        assert (status, headers["Content-Range"], body) == (416, "bytes */200", b"")
        assert ask("GET", path, If_Match='"other"')[::2] == (412, b"")
        assert ask("GET", "gone")[::2] == (404, b"")
        assert ask("GET", "no-such")[::2] == (404, b"")
        status, headers, body = ask("HEAD", path, Connection="close")
        assert (
            status,
            headers["Content-Length"],
            headers["Connection"],
            body,
        ) == (200, "200", "close", b"")
        assert Traffic(requests=9, bytes=230, depth=9) == server.traffic()
        server.reset()
        assert Traffic(requests=0, bytes=0, depth=0) == server.traffic()


def test_the_demos_server_waits_side_by_side(tmp_path):
    """Requests sent together share the latency and are one in depth; in series each pays it."""
    file = tmp_path / "a.bin"
    file.write_bytes(b"x" * 100)
    with DemoServer({"a.bin": file}, latency_s=0.2) as server, ThreadPoolExecutor(8) as threads:
        sources = [fg.ObjectStoreSource(server.url("a.bin")) for _ in range(8)]
        assert [len(d) for d in threads.map(lambda s: s.read(0, 10), sources)] == [10] * 8
        assert Traffic(8, 80, 1) == server.traffic()
        sources[0].read(0, 1)
        sources[0].read(0, 1)
        assert server.traffic().depth == 3


def test_plain_read_is_exact_at_a_constant_rate(media):
    """Where times are multiples of the rate, a plain loop gets FFmpeg's frames; behind the end it gets none."""
    truth = full_decode(media["bframes"])
    (first, second) = plain_read(str(media["bframes"]), [[3, 5, 30], [58, 59, 60]])
    assert np.array_equal(truth[[3, 5, 30]], np.stack(first))
    assert np.array_equal(truth[[58, 59]], np.stack(second[:2]))
    assert second[2] is None


def test_full_decode_names_what_it_cannot_give(media, tmp_path):
    """Frames come in the order asked, scaled as asked; a missing one or a file that is none is a DecodeError."""
    truth = tests_media.full_decode(media["audio"], 48, 64)
    assert np.array_equal(truth, full_decode(media["audio"], 48, 64))
    assert np.array_equal(truth[[7, 2, 7]], full_decode(media["audio"], 48, 64, frames=[7, 2, 7]))
    with pytest.raises(fg.DecodeError, match="no picture for frame 60, 99") as caught:
        full_decode(media["audio"], frames=[1, 60, 99])
    assert caught.value.frames == (60, 99)
    text = tmp_path / "notes.txt"
    text.write_text("no video")
    with pytest.raises(fg.DecodeError, match=r"notes\.txt: FFmpeg: Invalid data"):
        full_decode(text)


def test_a_contact_sheet_holds_each_picture_over_its_label():
    """Pictures are pasted unscaled where they fit, shrunk where they do not, with ink under each."""
    small = np.full((20, 80, 3), 90, np.uint8)
    large = np.full((200, 400, 3), (10, 200, 30), np.uint8)
    sheet = np.asarray(contact_sheet([Strip("", [("7", small), ("8", large)])], columns=2, cell_width=100))
    assert sheet.shape == (2 * MARGIN + 50 + 24, 2 * MARGIN + 2 * 100 + 8, 3)
    assert np.array_equal(small, sheet[MARGIN : MARGIN + 20, MARGIN + 10 : MARGIN + 90])
    assert np.array_equal(large[:50, :100], sheet[MARGIN : MARGIN + 50, MARGIN + 108 : MARGIN + 208])
    for left, top in ((MARGIN, MARGIN + 20), (MARGIN + 108, MARGIN + 50)):
        assert sheet[top : top + 22, left : left + 100].min() < 150
    assert contact_sheet([Strip("nothing here", [])]).height > 2 * MARGIN


def test_the_plans_picture_is_to_scale(media):
    """The longest file fills the width, and the coloured share of each bar is the share of bytes fetched."""
    names = ["allintra", "bframes", "mpeg4"]
    indexes = {str(media[name]): fg.build_index(media[name]) for name in names[:2]}
    with fg.VideoReaderPool() as pool:
        requests = [fg.VideoReadRequest(str(media[name]), [50]) for name in names]
        pool.read_many([fg.VideoReadRequest(str(media[name]), []) for name in names])
        plan = pool.explain(requests)
    image = np.asarray(plan_picture(plan, indexes))
    full = PLAN_WIDTH - 2 * MARGIN
    longest = max(index.signature.size for index in indexes.values())
    for number, video in enumerate(plan.videos[:2]):
        row = image[84 + 68 * number + 22 + BAR_HEIGHT // 2]
        blue = int((row == BLUE).all(axis=1).sum())
        assert abs(blue - full * video.nbytes / longest) <= 1 + len(video.plan.ranges)
        size = indexes[video.name].signature.size
        inked = np.flatnonzero((row != 255).any(axis=1))
        assert abs(inked[-1] + 1 - MARGIN - full * size / longest) <= 1
    # A video without an index is named and has no bar.
    assert (image[84 + 68 * 2 + 22 + BAR_HEIGHT // 2] == 255).all()
