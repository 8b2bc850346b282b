"""What the command line prints, and how: data to stdout, people's text and progress to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fluxon_gop.errors import FluxonGopError, one_line
from fluxon_gop.index_table import IndexTable

NAME = "fluxon-gop"
EXIT_CODES = """\b
Exit codes:
  0  all right
  1  some videos failed (build, verify), or a read failed
  2  bad usage"""
PLAIN: dict[str, Any] = {
    "add_completion": False,
    "no_args_is_help": True,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
}

Json = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]
Table = Annotated[
    str | None, typer.Option("--table", metavar="TABLE", help="Index table; without it indexes are built.")
]


def example(*lines: str) -> str:
    """Return an epilog that help prints line by line."""
    return "\b\nExample:\n" + "\n".join(f"  {NAME} {line}" for line in lines) + "\n\n" + EXIT_CODES


@contextmanager
def opened(table: str | None) -> Iterator[IndexTable | None]:
    """Open a table, where one is named."""
    if table is None:
        yield None
        return
    with IndexTable.open(table) as opened:
        yield opened


@contextmanager
def progress(title: str, total: int | None) -> Iterator[Any]:
    """Give a function to call after a step, or some, with what to show; draws only where stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda *_: None
        return
    columns = (
        *Progress.get_default_columns()[:2],
        TextColumn("{task.fields[note]}"),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    # Redirected, what is printed to stdout would come out on stderr.
    with Progress(
        *columns, console=Console(stderr=True), redirect_stdout=False, redirect_stderr=False
    ) as drawn:
        task = drawn.add_task(title, total=total, note="")
        yield lambda note="", steps=1: drawn.update(task, advance=steps, note=note)


def show(facts: dict[str, Any], as_json: bool) -> None:
    """Print facts as JSON, or a line each."""
    if as_json:
        print_json(facts)
        return
    for name, value in facts.items():
        shown = [value]
        if name == "reasons":
            shown = [f"{count} x {reason}" for reason, count in value.items()] or [None]
        elif isinstance(value, list):
            shown = value or [None]
        elif isinstance(value, dict):
            shown = [", ".join(f"{key} {words(item)}" for key, item in value.items()) or "-"]
        for number, line in enumerate(shown):
            head = "" if number else f"{name.replace('_', ' ')}:"
            print(f"{head:16}{words(line)}")


def words(value: Any) -> str:
    """Return a value in words."""
    if isinstance(value, dict):
        return f"{value['rows']} ({value['share']:.0%})"
    if value is None or isinstance(value, bool):
        return "-" if value is None else "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def about(uri: str, error: FluxonGopError) -> str:
    """Return an error's text with the video that it is about."""
    text = one_line(error)
    return text if text.startswith(uri) else f"{uri}: {text}"


def print_json(value: dict[str, Any]) -> None:
    """Print one line of JSON."""
    print(json.dumps(value), flush=True)


def remark(text: str) -> None:
    """Print a line for people."""
    print(text, file=sys.stderr, flush=True)
