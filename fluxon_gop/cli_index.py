"""The command line's ``index`` commands: build tables, look at them, verify, merge, export."""

from __future__ import annotations

import time
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fluxon_gop.build_shards import Outcome
from fluxon_gop.cli_output import PLAIN, Json, Table, about, example, print_json, progress, remark, show
from fluxon_gop.errors import FluxonGopError
from fluxon_gop.facts import outcome_facts, row_of, video_facts
from fluxon_gop.failed_videos import uri_beside
from fluxon_gop.index_build import build_index
from fluxon_gop.index_table import IndexTable
from fluxon_gop.lance_video_writer import ColumnsReport, add_index_columns
from fluxon_gop.picture import gop_map, gop_text
from fluxon_gop.sources import uri_of
from fluxon_gop.table_build import BuildOptions, TableReport, build_table, engine_of
from fluxon_gop.table_check import verify_table
from fluxon_gop.table_files import export_parquet, merge_tables
from fluxon_gop.table_report import table_facts
from fluxon_gop.threads import usable_cores

index_app = typer.Typer(
    help="Build index tables and look at them.",
    epilog=example("index build videos/ --to index.lance", "index show --table index.lance"),
    **PLAIN,
)


class Check(StrEnum):
    """How a build checks the container's claims of where decoding may start."""

    NONE = "none"
    ENTRY_POINTS = "entry-points"
    DECODE = "decode"


class EngineName(StrEnum):
    """Where a build runs."""

    LOCAL = "local"
    RAY = "ray"


class Level(StrEnum):
    """What ``verify`` holds rows against."""

    SIGNATURE = "signature"
    COUNTS = "counts"
    ENTRY_POINTS = "entry-points"
    PIXELS = "pixels"


@index_app.command(
    "build",
    epilog=example(
        "index build videos/ 'more/*.mp4' https://host/clip.mp4 --to index.lance",
        "index build s3://bucket/videos/ @more.csv --to index.lance --processes 8",
        "index build videos/ --to index.arrow --json > outcomes.jsonl",
    ),
)
def index_build(
    src: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC",
            help="Files, folders, globs, addresses, prefixes of buckets (s3://bucket/videos/), lists (@videos.txt, .csv, .parquet), columns of blobs (lance://TABLE?column=NAME).",
        ),
    ],
    to: Annotated[
        str, typer.Option(metavar="TABLE", help="Lance data set, or Arrow file if it ends in .arrow.")
    ],
    check: Annotated[
        Check, typer.Option(help="Prove where decoding may start, or take the container's word.")
    ] = Check.ENTRY_POINTS,
    rebuild: Annotated[bool, typer.Option(help="Build the rows of unchanged files again.")] = False,
    retry_failed: Annotated[
        bool, typer.Option(help="Try unchanged files again that failed in an earlier build.")
    ] = False,
    prune: Annotated[
        bool, typer.Option(help="Remove rows of files that are gone from the folders and buckets named.")
    ] = False,
    processes: Annotated[
        int, typer.Option(min=0, help="That parse side by side; 0 for as many as there are cores.")
    ] = 1,
    engine: Annotated[EngineName, typer.Option(help="This machine, or a Ray cluster.")] = EngineName.LOCAL,
    as_json: Json = False,
) -> None:
    """Index videos into a table.

    Of a folder, or a prefix of a bucket, files that are named like MP4 are taken (.mp4, .m4v, .mov, .3gp, .3g2, .m4s, .avif). Files that have not changed since their row was built, and checked as asked, are skipped; what fails is listed in a table beside, and not tried again until it changes. Killed, the same command goes on. With --json one line a video, when its row is committed, then a line with the sums.
    """
    options = BuildOptions(check=check.value, rebuild=rebuild, retry_failed=retry_failed, prune=prune)
    started, done = time.monotonic(), [0, 0]
    failures: list[Outcome] = []
    with IndexTable.open(to, create=True) as table, progress("indexing", None) as advance:

        def tell(outcome: Outcome) -> None:
            done[0] += 1
            done[1] += outcome.nbytes
            rate = done[0] / max(time.monotonic() - started, 1e-3)
            advance(f"{done[0]:,} videos, {rate:,.0f}/s, {done[1] / 1e6:,.1f} MB, {len(failures)} failed")
            if outcome.error is not None:
                failures.append(outcome)
            if as_json:
                print_json(outcome_facts(outcome))

        report = build_table(
            src,
            table,
            options,
            engine=engine_of(engine.value, processes or usable_cores(), table),
            progress=tell,
        )
    _tell_table(to, report, failures, as_json)
    if not report.is_whole:
        raise typer.Exit(1)


def _tell_table(to: str, report: TableReport, failures: list[Outcome], as_json: bool) -> None:
    failed = sum(report.failed.values())
    if as_json:
        print_json(
            {
                "table": to,
                "built": report.built,
                "skipped": report.skipped,
                "failed": failed,
                "failed_before": report.failed_before,
                "by_class": dict(report.failed.most_common()),
                "deleted": len(report.deleted),
                "pruned": report.pruned,
                "requests": report.stats.total_requests,
                "bytes": report.stats.total_bytes,
                "seconds": round(report.seconds, 3),
            }
        )
        return
    _tell_failures((outcome.uri, outcome.error) for outcome in failures if outcome.error is not None)
    if len(report.failed) > 1:
        remark(
            "failed by class: "
            + ", ".join(f"{name} {count}" for name, count in report.failed.most_common())
        )
    if report.failed_before:
        remark(
            f"{report.failed_before} failed in an earlier build and have not changed: --retry-failed tries them again; "
            f"why is in {uri_beside(to)}"
        )
    for uri in report.deleted[:10]:
        remark(f"{'removed' if report.pruned else 'gone (--prune removes its row)'}: {uri}")
    if len(report.deleted) > 10:
        remark(f"... and {len(report.deleted) - 10} more")
    _tell_sums(to, report, failed)


def _tell_failures(failures: Iterable[tuple[str, FluxonGopError]]) -> None:
    for uri, error in failures:
        remark(f"failed: {type(error).__name__}: {about(uri, error)}")


def _tell_sums(to: str, report: TableReport | ColumnsReport, failed: int) -> None:
    print(
        f"{to}: {report.built} built, {report.skipped} skipped, {failed} failed; "
        f"{report.stats.total_requests:,} requests, {report.stats.total_bytes:,} bytes"
    )


@index_app.command(
    "add-columns",
    epilog=example(
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
    with progress("indexing", None) as advance:
        report = add_index_columns(table, check=check, progress=lambda rows: advance("", rows))
    _tell_columns(table, report, as_json)


def _tell_columns(to: str, report: ColumnsReport, as_json: bool) -> None:
    """Print what a build did; exit with 1 where it failed for some videos."""
    if as_json:
        sums = {"built": report.built, "skipped": report.skipped, "failed": len(report.failures)}
        costs = {"requests": report.stats.total_requests, "bytes": report.stats.total_bytes}
        print_json({"table": to, **sums, **costs})
    else:
        _tell_failures(report.failures)
        _tell_sums(to, report, len(report.failures))
    if report.failures:
        raise typer.Exit(1)


@index_app.command(
    "show",
    epilog=example(
        "index show clip.mp4",
        "index show clip.mp4 --map gops.png",
        "index show --table index.lance --window 32",
    ),
)
def index_show(
    video: Annotated[str | None, typer.Argument(metavar="VIDEO", help="A path or address.")] = None,
    table: Table = None,
    gops: Annotated[
        bool, typer.Option(help="Print the video's samples, key samples by their verdict.")
    ] = False,
    map_to: Annotated[
        Path | None, typer.Option("--map", metavar="FILE.png", help="Draw the video's GOPs.")
    ] = None,
    window: Annotated[
        int, typer.Option(min=1, help="Frames in a row that a table's forecast is for.")
    ] = 16,
    as_json: Json = False,
) -> None:
    """Show the index of one video, or what a table holds.

    Of a table: GOP lengths, how many videos take which path and why, what a window at a random place will cost (bytes, and pictures decoded, for each wanted frame), and advice. Of a large table, 2,000 rows stand for all.
    """
    if video is None:
        if table is None:
            text = "give a VIDEO, a --table, or both"
            raise typer.BadParameter(text)
        with IndexTable.open(table) as opened:
            show(table_facts(opened, window=window), as_json)
        return
    if table is None:
        index = build_index(video)
    else:
        with IndexTable.open(table) as opened:
            index = row_of(opened, video)
    show(video_facts(uri_of(video), index), as_json)
    if gops:
        print(gop_text(index))
    if map_to is not None:
        gop_map(uri_of(video), index).save(map_to, format="PNG")


@index_app.command(
    "verify",
    epilog=example(
        "index verify index.lance", "index verify index.lance --level pixels --sample 100 --json"
    ),
)
def index_verify(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="An index table.")],
    level: Annotated[
        Level, typer.Option(help="What rows are held against; each includes those before.")
    ] = Level.SIGNATURE,
    sample: Annotated[int | None, typer.Option(min=1, help="Rows to look at; all by default.")] = None,
    seed: Annotated[int, typer.Option(help="Of the sample, and of the frames compared.")] = 0,
    as_json: Json = False,
) -> None:
    """Hold the rows of a table against the files.

    signature: the file is there, of the row's version. counts: its boxes name the same samples. entry-points: the bitstream bears the row out. pixels: frames read by the row are FFmpeg's. Rows that do not stand are listed; a build mends stale ones, with --rebuild the others too.
    """
    counts: dict[str, int] = {}
    with IndexTable.open(table) as opened, progress("verifying", None) as advance:
        for row in verify_table(opened, level=level.value, sample=sample, seed=seed):
            counts[row.status] = counts.get(row.status, 0) + 1
            advance(", ".join(f"{count:,} {status}" for status, count in counts.items()))
            if as_json:
                print_json({"uri": row.uri, "status": row.status, "why": row.why or None})
            elif row.status != "ok":
                remark(f"{row.status}: {row.uri}: {' '.join(row.why.split())}")
    if as_json:
        print_json({"table": table, "level": level.value, **counts})
    else:
        print(
            f"{table}: " + (", ".join(f"{count} {status}" for status, count in counts.items()) or "no rows")
        )
    if set(counts) - {"ok"}:
        raise typer.Exit(1)


@index_app.command("merge", epilog=example("index merge monday.lance tuesday.lance --to all.lance"))
def index_merge(
    tables: Annotated[list[str], typer.Argument(metavar="TABLE", help="Index tables.")],
    to: Annotated[str, typer.Option(metavar="TABLE", help="The table that gains their rows.")],
    as_json: Json = False,
) -> None:
    """Add the rows of tables to another one; of a video in several, the last one's row counts."""
    with IndexTable.open(to, create=True) as target:
        added, replaced = merge_tables(tables, target)
    if as_json:
        print_json({"table": to, "added": added, "replaced": replaced})
    else:
        print(f"{to}: {added} added, {replaced} replaced")


@index_app.command("export", epilog=example("index export index.lance --to index.parquet"))
def index_export(
    table: Annotated[str, typer.Argument(metavar="TABLE", help="An index table.")],
    to: Annotated[
        Path, typer.Option(metavar="FILE.parquet", help="The file, written whole or not at all.")
    ],
    as_json: Json = False,
) -> None:
    """Write a table's rows into a Parquet file."""
    with IndexTable.open(table) as opened:
        count = export_parquet(opened, to)
    if as_json:
        print_json({"file": str(to), "rows": count})
    else:
        print(f"{to}: {count} rows")
