"""The third layer of the seed's section 10: windows beside decord's, with their conditions."""

from __future__ import annotations

import importlib.util
import json
import sys
import venv
from pathlib import Path

import pytest

from tests.media import RECIPES, make
from tools.compare_decord import CACHES, main

FILE = {"file_bytes", "codec", "width", "height", "frames"}
"""视频文件大小、编码格式、分辨率、帧数"""
PLACE = {"export", "storage", "cache"}
"""export 位置和底层存储类型; cache 冷启动 / 热启动"""
COSTS = {"open_ms", "read_at_calls", "read_at_returned_bytes", "read_ms"}
"""reader open 时间; range read 次数和总读取 bytes; read_frames_numpy 端到端耗时"""
TIERS = {f"{tier}_{what}" for tier in ("kv", "memory", "disk") for what in ("hits", "misses")}
"""KV cache hit / miss; FluxonFS 内部缓存 hit / miss"""


@pytest.fixture(scope="module")
def videos(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("compared")
    return [str(make(folder / f"{name}.mp4", RECIPES[name])) for name in ("bframes", "rotated")]


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory) -> str:
    """An interpreter without any package."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True)
    return str(next(folder.glob("*/python*")))


def run(videos, tmp_path: Path, *options: str) -> dict:
    """The tool succeeds on the videos; what its JSON says."""
    told = tmp_path / "told.json"
    assert 0 == main([*videos, "--windows=2", "--length=5", f"--json={told}", *options])
    return json.loads(told.read_text())


def test_windows_are_the_truth_and_each_row_has_its_conditions(videos, bare_python, tmp_path, capsys):
    """Local and HTTP, cold and warm; without decord a line says so, and its columns are empty."""
    page = tmp_path / "told.md"
    options = ["--latency-ms=1", f"--decord-python={bare_python}", f"--markdown={page}"]
    told = run(videos, tmp_path, *options)
    said = capsys.readouterr().out
    assert said.startswith(
        f"decord cannot be imported by {bare_python}: FluxonFS is compared with the truth only."
    )
    assert said.strip() in page.read_text()
    rows = told["rows"]
    places = [
        (name, export, cache)
        for name in ("bframes", "rotated")
        for export in ("local", "http")
        for cache in CACHES
    ]
    assert places == [(Path(row["video"]).stem, row["export"], row["cache"]) for row in rows]
    for row in rows:
        assert set() == {name for name in FILE | PLACE | COSTS | TIERS if row.get(name) is None}
        assert (True, "") == (row["exact"], row["note"])
        assert (row["cache"] == "cold") == (row["remote_read_calls"] > 0)
    tiers = [(row["disk_hits"] > 0, row["memory_misses"] > 0) for row in rows[:3]]
    assert [(False, True), (True, True), (False, False)] == tiers
    assert ["uint8 5x96x128x3"] * 2 + ["uint8 5x128x96x3"] * 2 == [
        window["shape"] for window in told["windows"]
    ]
    assert {(True, None, None)} == {
        (w["exact"], w["decord_exact"], w["identical_share"]) for w in told["windows"]
    }


def test_a_reader_that_does_not_answer_in_time_is_told_and_fails(videos, bare_python, capsys):
    """It is killed; the tool goes on."""
    assert 1 == main([*videos, "--timeout-s=0.001", f"--decord-python={bare_python}"])
    assert 6 == capsys.readouterr().out.count("timeout ")


@pytest.mark.skipif(importlib.util.find_spec("decord") is None, reason="decord is not installed here")
def test_decords_frames_stand_beside_ours(videos, tmp_path):
    """Shape, type and pixels of the two made videos are the same."""
    told = run(videos, tmp_path, f"--decord-python={sys.executable}")
    assert told["conditions"]["decord"]
    assert {("decord", True)} <= {(row["reader"], row["exact"]) for row in told["rows"]}
    for window in told["windows"]:
        assert window["shape"] == window["decord_shape"]
        assert (1.0, 0) == (window["identical_share"], window["max_difference"])
