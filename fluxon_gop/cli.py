"""The command line: a thin skin over the library.

Data goes to stdout (text, or JSON with ``--json``), progress and remarks to stderr. A library error is one
line and an exit code, never a traceback.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from PIL import Image
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from fluxon_gop import __version__
from fluxon_gop.batch_plan import BatchPlan, count_of
from fluxon_gop.demo import run_demo
from fluxon_gop.errors import FluxonGopError, InvalidRequestError
from fluxon_gop.facts import one_line, outcome, plan_facts, row_of, table_facts, video_facts
from fluxon_gop.index_build import BuildReport, Built, build_index, build_table, find_videos
from fluxon_gop.index_table import IndexTable
from fluxon_gop.lance_video_writer import add_index_columns
from fluxon_gop.picture import sheet_of
from fluxon_gop.pool import VideoReaderPool
from fluxon_gop.reader import VideoReader
from fluxon_gop.requests import VideoReadRequest
from fluxon_gop.sources import uri_of

EXIT_CODES = """\b
Exit codes:
  0  all right
  1  some videos failed (build), or a read failed
  2  bad usage"""
BATCH = 128
"""Frames that ``read`` holds in memory at once."""

_NAME = "fluxon-gop"
_PLAIN: dict[str, Any] = {
    "add_completion": False,
    "no_args_is_help": True,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
}


class Check(StrEnum):
    """How a build checks the container's claims of where decoding may start."""

    NONE = "none"
    ENTRY_POINTS = "entry-points"
    DECODE = "decode"


Json = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]
Frames = Annotated[
    str,
    typer.Option("--frames", metavar="NUMBERS", help="Numbers and start:stop[:step], with commas between."),
]
Table = Annotated[
    str | None, typer.Option("--table", metavar="TABLE", help="Index table; without it indexes are built.")
]


def _example(*lines: str) -> str:
    """Return an epilog that help prints line by line."""
    return "\b\nExample:\n" + "\n".join(f"  {_NAME} {line}" for line in lines) + "\n\n" + EXIT_CODES


app = typer.Typer(epilog=_example("demo", "index build videos/ --to index.lance"), **_PLAIN)
index_app = typer.Typer(
    help="Build index tables and look at them.",
    epilog=_example("index build videos/ --to index.lance", "index show --table index.lance"),
    **_PLAIN,
)
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


@index_app.command(
    "build",
    epilog=_example(
        "index build videos/ 'more/*.mp4' https://host/clip.mp4 --to index.lance",
        "index build videos/ --to index.arrow --json > outcomes.jsonl",
    ),
)
def index_build(
    src: Annotated[
        list[str],
        typer.Argument(metavar="SRC", help="Files, folders, globs, addresses, prefixes of buckets."),
    ],
    to: Annotated[
        str, typer.Option(metavar="TABLE", help="Lance data set, or Arrow file if it ends in .arrow.")
    ],
    check: Annotated[
        Check, typer.Option(help="Prove where decoding may start, or take the container's word.")
    ] = Check.ENTRY_POINTS,
    rebuild: Annotated[bool, typer.Option(help="Build the rows of unchanged files again.")] = False,
    as_json: Json = False,
) -> None:
    """Index videos into a table.

    Of a folder, or a prefix of a bucket (s3://bucket/videos/), files that are named like MP4 are taken (.mp4, .m4v, .mov, .3gp, .3g2, .m4s, .avif). Files that have not changed since their row was built, and checked as asked, are skipped; failures are listed at the end. With --json one line a video, as each is done, then a line with the sums.
    """
    videos = list(find_videos(src))
    with IndexTable.open(to, create=True) as table, _progress("indexing", len(videos)) as advance:

        def tell(built: Built) -> None:
            advance()
            if as_json:
                _print_json(outcome(built))

        report = build_table(videos, table, check=check.value, rebuild=rebuild, progress=tell)
    _tell_build(to, report, as_json)


def _tell_build(to: str, report: BuildReport, as_json: bool) -> None:
    """Print what a build did; exit with 1 where it failed for some videos."""
    requests, nbytes = report.stats.total_requests, report.stats.total_bytes
    if as_json:
        sums = {"built": report.built, "skipped": report.skipped, "failed": len(report.failures)}
        _print_json({"table": to, **sums, "requests": requests, "bytes": nbytes})
    else:
        for uri, error in report.failures:
            _remark(f"failed: {type(error).__name__}: {_about(uri, error)}")
        print(
            f"{to}: {report.built} built, {report.skipped} skipped, {len(report.failures)} failed; "
            f"{requests:,} requests, {nbytes:,} bytes"
        )
    if report.failures:
        raise typer.Exit(1)


@index_app.command(
    "add-columns",
    epilog=_example(
        "index add-columns episodes_videos.lance", "index add-columns s3://bucket/videos.lance --json"
    ),
)
def index_add_columns(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="A Lance table of videos.")],
    check: Annotated[
        bool, typer.Option(help="Prove where decoding may start, or take the container's word.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Give a Lance table of videos its index columns, in place.

    The table has a row a video: episode_idx, video_key, and the MP4 bytes as the blob video_bytes. Rows that have their columns are skipped, no row moves, no other column is written; videos that have no index keep null columns and are listed at the end.
    """
    with _progress("indexing", None) as advance:
        report = add_index_columns(
            table, check=check, progress=lambda rows: [advance() for _ in range(rows)]
        )
    _tell_build(table, report, as_json)


@index_app.command(
    "show",
    epilog=_example(
        "index show clip.mp4", "index show clip.mp4 --table index.lance", "index show --table index.lance"
    ),
)
def index_show(
    video: Annotated[str | None, typer.Argument(metavar="VIDEO", help="A path or address.")] = None,
    table: Table = None,
    as_json: Json = False,
) -> None:
    """Show the index of one video, or what a table holds."""
    if video is None:
        if table is None:
            text = "give a VIDEO, a --table, or both"
            raise typer.BadParameter(text)
        with IndexTable.open(table) as opened:
            _show(table_facts(opened), as_json)
    elif table is None:
        _show(video_facts(uri_of(video), build_index(video)), as_json)
    else:
        with IndexTable.open(table) as opened:
            _show(video_facts(uri_of(video), row_of(opened, video)), as_json)


@app.command(
    epilog=_example(
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
    with _opened(table) as index, VideoReaderPool(len(video), index=index) as pool:
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
        _print_json(plan_facts(whole))
    else:
        print(whole)


@app.command(
    epilog=_example(
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
        _opened(table) as index,
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
        _print_json({"uri": reader.source.name, "frames": numbers, "files": files, "cost": stats.as_dict()})
    else:
        print("\n".join(files))
        waves = sum(stats.waves.values())
        _remark(
            f"{count_of(waves, 'wave')}, {count_of(stats.total_requests, 'request')}, {stats.total_bytes:,} bytes"
        )
        if stats.stale_rows or stats.damaged_rows:
            _remark(f"{table}: its row of this video does not fit the file; build it again (index build)")


@app.command(epilog=_example("demo", "demo my.mp4 --latency-ms 100 --out demo-of-mine --json"))
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
    report = run_demo(file or [], out, latency_s=latency_ms / 1000, remark=_remark)
    if as_json:
        _print_json(report.as_dict())
    else:
        print(report)
    if not report.exact:
        raise typer.Exit(1)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code; see ``EXIT_CODES``."""
    try:
        typer.main.get_command(app)(args=argv, prog_name=_NAME)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except InvalidRequestError as error:
        _remark(f"{type(error).__name__}: {one_line(error)}")
        return 2
    except (FluxonGopError, OSError) as error:
        _remark(f"{type(error).__name__}: {one_line(error)}")
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


@contextmanager
def _opened(table: str | None) -> Iterator[IndexTable | None]:
    if table is None:
        yield None
        return
    with IndexTable.open(table) as opened:
        yield opened


@contextmanager
def _progress(title: str, total: int | None) -> Iterator[Any]:
    """Give a function to call after each step; draws only where stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    # Redirected, what is printed to stdout would come out on stderr.
    with Progress(
        *columns, console=Console(stderr=True), redirect_stdout=False, redirect_stderr=False
    ) as progress:
        task = progress.add_task(title, total=total)
        yield lambda: progress.advance(task)


def _save(image: Image.Image, path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, format="PNG")
    return str(path)


def _show(facts: dict[str, Any], as_json: bool) -> None:
    """Print facts as JSON, or a line each."""
    if as_json:
        _print_json(facts)
        return
    for name, value in facts.items():
        shown = [value]
        if name == "reasons":
            shown = [f"{count} x {reason}" for reason, count in value.items()] or [None]
        elif isinstance(value, dict):
            shown = [", ".join(f"{key} {_words(item)}" for key, item in value.items()) or "-"]
        for number, line in enumerate(shown):
            head = "" if number else f"{name.replace('_', ' ')}:"
            print(f"{head:16}{_words(line)}")


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['rows']} ({value['share']:.0%})"
    if value is None or isinstance(value, bool):
        return "-" if value is None else "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _about(uri: str, error: FluxonGopError) -> str:
    text = one_line(error)
    return text if text.startswith(uri) else f"{uri}: {text}"


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def _remark(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
