"""What the documents show works: each Python block and each command is run, each TOML file is there."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import fluxon_gop as fg
from tests.agents import certificate
from tests.conftest import ROOT
from tests.media import RECIPES, make
from tests.valkey import PASSWORD, Valkey

PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if "evidence" not in p.parts)]
BLOCK = re.compile(r"^```(python|bash|toml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def servers():
    """What a page starts and leaves running."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.terminate()
        process.communicate()
        assert 0 == process.returncode


@pytest.fixture
def valkey(tmp_path_factory):
    with Valkey(tmp_path_factory.mktemp("valkey")) as running:
        yield running


def _started(line: str, path: str) -> subprocess.Popen[str]:
    """Start what serves, and wait until it says so."""
    process = subprocess.Popen(
        shlex.split(line),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PATH": path},
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_a_page_runs(page, tmp_path, monkeypatch, request):
    """Commands and Python blocks in the page's order, in a folder with a few videos and the page's TOML files."""
    (tmp_path / "videos").mkdir()
    for name in ("a", "b"):
        make(tmp_path / "videos" / f"{name}.mp4", RECIPES["bframes"])
    if page.name == "training.md":
        pytest.importorskip("torch")
        # Workers have the environment of the server that forks them: one that another test has started knows no store.
        multiprocessing.forkserver._forkserver._stop()
    if page.name in {"remote.md", "training.md"}:
        s3 = request.getfixturevalue("s3")
        s3.put("robot/a.mp4", (tmp_path / "videos" / "a.mp4").read_bytes())
        s3.put("robot/b.mp4", (tmp_path / "videos" / "b.mp4").read_bytes())
        keys = {
            "ENDPOINT_URL": s3.endpoint,
            "ACCESS_KEY_ID": "key",
            "SECRET_ACCESS_KEY": "secret",
            "REGION": "us-east-1",
        }
        for name, value in keys.items():
            monkeypatch.setenv(f"AWS_{name}", value)
    text = page.read_text()
    if page.name == "fluxonfs.md":
        certificate(tmp_path)
        valkey = request.getfixturevalue("valkey")
        text = text.replace(
            "redis://:open-sesame@kv.example:6379", f"redis://:{PASSWORD}@127.0.0.1:{valkey.port}"
        )
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(text)
    for kind, text in blocks:
        if kind == "toml":
            # Its first line is its name.
            (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    names: dict[str, object] = {"__name__": "__main__"}
    for kind, text in blocks:
        for line in text.splitlines() if kind == "bash" else ():
            # Installing is what CI does before it runs this test.
            if line.endswith("&"):
                request.getfixturevalue("servers").append(_started(line.removesuffix("&"), path))
            elif line.startswith("fluxon-gop"):
                subprocess.run(
                    shlex.split(line), check=True, capture_output=True, env={**os.environ, "PATH": path}
                )
        if kind == "python":
            exec(compile(text, str(page), "exec"), names)


def test_a_table_is_read_with_pandas_and_no_code_of_ours(tmp_path):
    """By the format page's rules alone, pandas finds each frame's bytes; they are FFmpeg's packets."""
    import av
    import numpy as np
    import pyarrow as pa

    path = make(tmp_path / "v.mp4", RECIPES["audio"])
    with fg.IndexTable.open(tmp_path / "t.arrow", create=True) as table:
        table.append([(str(path), fg.build_index(path))])
    with pa.memory_map(str(tmp_path / "t.arrow")) as file:
        row = pa.ipc.open_file(file).read_all().to_pandas().iloc[0]
    count = int(row.sample_count)
    spread = lambda values, n: np.repeat(values, n) if len(values) == 1 else np.asarray(values)
    size, gap = spread(row.sample_size, count), spread(row.sample_gap, count - 1)
    offset = row.first_offset + np.concatenate([[0], np.cumsum(size[:-1] + gap)])
    duration = spread(row.sample_duration, count).astype(np.int64)
    pts = row.first_dts + np.cumsum(duration) - duration + spread(row.composition_offset, count)
    with av.open(str(path)) as container:
        packets = [p for p in container.demux(container.streams.video[0]) if p.size]
    assert [(p.pos, p.size, p.pts) for p in packets] == list(zip(offset, size, pts, strict=True))
    assert row.frame_count == 60


def test_links_between_pages_lead_somewhere():
    """Each relative link of a page names a file that is there."""
    missing = [
        f"{page.name}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert [] == missing


def test_the_pages_of_errors_name_every_class():
    """docs/errors.md has a row for each error that the package exports."""
    text = (ROOT / "docs" / "errors.md").read_text()
    errors = [n for n in fg.__all__ if n.endswith("Error") and n != "FluxonGopError"]
    assert [] == [name for name in errors if f"`{name}`" not in text]


def test_the_page_of_commands_is_what_the_commands_say():
    """docs/cli.md is made from the help texts and is not stale."""
    subprocess.run(
        [sys.executable, str(ROOT / "tools" / "gen_cli_docs.py"), "--check"], check=True, cwd=ROOT
    )


def test_readme_has_the_two_commands():
    """The marked commands are what .ci/run and a new user run."""
    text = (ROOT / "README.md").read_text()
    assert 1 == text.count("<!-- demo command -->") == text.count("<!-- test command -->")


def test_no_page_names_this_machine():
    """Committed text names no absolute path of a workplace."""
    tracked = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    words = ("/wo" + "rk/", "/ro" + "ot/", "/tm" + "p/")
    named = [
        name
        for name in tracked
        if name.endswith((".md", ".py", ".toml", "run"))
        and any(w in (ROOT / name).read_text() for w in words)
    ]
    assert [] == named
