"""The command line: a thin skin over the library.

Data goes to stdout (text, or JSON with ``--json``), progress and remarks to stderr. A library error is one
line and an exit code, never a traceback.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from PIL import Image

from fluxon_gop import __version__
from fluxon_gop.batch_plan import BatchPlan, count_of
from fluxon_gop.cli_index import index_app
from fluxon_gop.cli_output import EXIT_CODES, NAME, PLAIN, Json, Table, example, opened, print_json, remark
from fluxon_gop.demo import run_demo
from fluxon_gop.errors import FluxonGopError, InvalidRequestError, one_line
from fluxon_gop.facts import plan_facts
from fluxon_gop.fluxonfs.config import read_config
from fluxon_gop.fluxonfs.file_system import FileSystem, FluxonFsCache
from fluxon_gop.picture import sheet_of
from fluxon_gop.pool import VideoReaderPool
from fluxon_gop.reader import VideoReader
from fluxon_gop.requests import VideoReadRequest

__all__ = ["EXIT_CODES", "app", "main"]

BATCH = 128
"""Frames that ``read`` holds in memory at once."""

Frames = Annotated[
    str,
    typer.Option("--frames", metavar="NUMBERS", help="Numbers and start:stop[:step], with commas between."),
]
app = typer.Typer(epilog=example("demo", "index build videos/ --to index.lance"), **PLAIN)
app.add_typer(index_app, name="index")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Exact video frames from remote storage, by planned byte ranges."""


@app.command(
    epilog=example(
        "plan clip.mp4 --frames 0,8,16", "plan a.mp4 b.mp4 --frames 0:64:8 --table index.lance --json"
    )
)
def plan(
    video: Annotated[list[str], typer.Argument(metavar="VIDEO", help="Paths or addresses.")],
    frames: Frames,
    table: Table = None,
    as_json: Json = False,
) -> None:
    """Show what a read will cost, before it runs.

    Waves, requests and bytes; of each video its path and the reason for it. Of a video without a row in the table, head and movie box are read to know.
    """
    numbers = _numbers(frames)
    with opened(table) as index, VideoReaderPool(len(video), index=index) as pool:
        uris = list(dict.fromkeys(video))
        no_frames = [VideoReadRequest(uri, []) for uri in uris]
        bare = pool.explain(no_frames)
        # Reading no frames gives each reader its index; the plan then rests on it.
        pool.read_many(no_frames)
        known = pool.explain([VideoReadRequest(uri, numbers) for uri in uris])
    planned = tuple(
        replace(after, note="; ".join(dict.fromkeys(filter(None, (before.note, after.note)))))
        for before, after in zip(bare.videos, known.videos, strict=True)
    )
    whole = BatchPlan(planned, bare.waves)
    if as_json:
        print_json(plan_facts(whole))
    else:
        print(whole)


@app.command(
    epilog=example(
        "read clip.mp4 --frames 0,8,16 --out frames/",
        "read https://host/clip.mp4 --frames 0:64:8 --sheet sheet.png --table index.lance",
    )
)
def read(
    video: Annotated[str, typer.Argument(metavar="VIDEO", help="A path or address.")],
    frames: Frames,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="For frame_000012.png and so on. [default: .]")
    ] = None,
    sheet: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="One picture of all frames.")
    ] = None,
    height: Annotated[int | None, typer.Option(help="Of the pictures; with --width or neither.")] = None,
    width: Annotated[int | None, typer.Option(help="Of the pictures; with --height or neither.")] = None,
    table: Table = None,
    as_json: Json = False,
) -> None:
    """Read exact frames into PNG files or a sheet."""
    numbers = _numbers(frames)
    for place, wrong, want in ((out, Path.is_file, "a folder"), (sheet, Path.is_dir, "a file")):
        if place is not None and wrong(place):
            said = f"{place}: want {want}"
            raise typer.BadParameter(said)
    folder = Path() if out is None and sheet is None else out
    files: list[str] = []
    with (
        opened(table) as index,
        VideoReader.open(video, index=index, height=height, width=width) as reader,
    ):
        if reader.index is not None and reader.index.container_reason is None:
            # Before a file is written.
            reader.index.check_frames(np.array(numbers), reader.source.name)

        def pictures() -> Iterator[Any]:
            for start in range(0, len(numbers), BATCH):
                some = numbers[start : start + BATCH]
                for number, picture in zip(some, reader.read_frames_numpy(some), strict=True):
                    if folder is not None:
                        files.append(_save(Image.fromarray(picture), folder / f"frame_{number:06}.png"))
                    yield picture

        if sheet is None:
            for _ in pictures():
                pass
        else:
            files.append(_save(sheet_of(reader.source.name, numbers, pictures()), sheet))
        stats = reader.stats()
    if as_json:
        print_json({"uri": reader.source.name, "frames": numbers, "files": files, "cost": stats.as_dict()})
    else:
        print("\n".join(files))
        waves = sum(stats.waves.values())
        remark(
            f"{count_of(waves, 'wave')}, {count_of(stats.total_requests, 'request')}, {stats.total_bytes:,} bytes"
        )
        if stats.stale_rows or stats.damaged_rows:
            remark(f"{table}: its row of this video does not fit the file; build it again (index build)")


@app.command(epilog=example("demo", "demo my.mp4 --latency-ms 100 --out demo-of-mine --json"))
def demo(
    file: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE", help="Local videos; none: four are made.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="For videos and pictures.")] = Path(
        "fluxon-gop-demo"
    ),
    latency_ms: Annotated[float, typer.Option(help="Of each request to the local server.")] = 50.0,
    as_json: Json = False,
) -> None:
    """Compare planned reads with plain PyAV.

    Makes four videos, or takes FILEs, serves them with a latency, reads the same clips both ways, and holds
    every frame against FFmpeg's full decode.
    """
    report = run_demo(file or [], out, latency_s=latency_ms / 1000, remark=remark)
    if as_json:
        print_json(report.as_dict())
    else:
        print(report)
    if not report.exact:
        raise typer.Exit(1)


@app.command(epilog=example("agent --config fluxonfs.toml"))
def agent(
    config: Annotated[
        Path,
        typer.Option("--config", metavar="FILE", help="The TOML file that describes exports and agent."),
    ],
) -> None:
    """Give the files of a configuration's exports to other machines, until SIGTERM or SIGINT.

    What is under way then may end for stop_seconds. Prints its address when it serves; a line for each refused call goes to stderr.
    """
    from fluxon_gop.fluxonfs.agent_server import AgentServer, run_agent

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    given = read_config(config)
    files = FileSystem(given.exports, FluxonFsCache(memory_bytes=0), given.users)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    server = AgentServer(files, given.users, given.agent)
    print(server.address, flush=True)
    run_agent(server, stop)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code; see ``EXIT_CODES``."""
    try:
        typer.main.get_command(app)(args=argv, prog_name=NAME)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except InvalidRequestError as error:
        remark(f"{type(error).__name__}: {one_line(error)}")
        return 2
    except (FluxonGopError, OSError) as error:
        remark(f"{type(error).__name__}: {one_line(error)}")
        return 1
    return 0


# ------------------------------------------------------------------- helpers


def _numbers(text: str) -> list[int]:
    """Return the frame numbers that ``0,8,16`` or ``0:64:8`` name, each once, in the order given."""
    numbers: dict[int, None] = {}
    for part in text.split(","):
        try:
            pieces = [int(piece) for piece in part.split(":")]
        except ValueError:
            pieces = []
        if not 1 <= len(pieces) <= 3 or min(pieces) < 0 or 0 in pieces[2:]:
            said = f"{part!r} names no frames: want numbers like 0,8,16 or a range like 0:64:8"
            raise typer.BadParameter(said, param_hint="--frames")
        numbers |= dict.fromkeys(range(*pieces) if len(pieces) > 1 else pieces)
    if not numbers:
        said = f"{text!r} names no frames"
        raise typer.BadParameter(said, param_hint="--frames")
    return list(numbers)


def _save(image: Image.Image, path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, format="PNG")
    return str(path)
