"""Shared fixtures: media made once, the corpus where it lies beside the checkout, the --full switch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.media import RECIPES, make
from tests.seaweed import SeaweedFS
from tools.range_server import RangeServer

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT.parent / "shared" / "corpus"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the long campaigns too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("full") and not config.getoption("--full"):
            item.add_marker(pytest.mark.skip(reason="a long campaign: run with --full"))
        if item.get_closest_marker("corpus") and not CORPUS.is_dir():
            item.add_marker(pytest.mark.skip(reason="the corpus of real files is not beside the checkout"))


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def media(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One small video for each recipe, 60 frames of 128x96."""
    folder = tmp_path_factory.mktemp("media")
    return {name: make(folder / f"{name}.mp4", recipe) for name, recipe in RECIPES.items()}


@pytest.fixture
def server(media: dict[str, Path]):
    """The media over HTTP, with the right headers and no latency."""
    with RangeServer(next(iter(media.values())).parent) as running:
        yield running


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory):
    """A real S3 server with one bucket."""
    with SeaweedFS(tmp_path_factory.mktemp("seaweed")) as running:
        yield running
