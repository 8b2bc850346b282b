"""Write docs/cli.md from the commands' own help; ``--check`` says whether it is up to date.

python tools/gen_cli_docs.py
python tools/gen_cli_docs.py --check
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
COMMANDS = [[], ["index"], ["index", "build"], ["index", "show"], ["plan"], ["read"], ["demo"]]


def page() -> str:
    """Return the page's text."""
    parts = [
        "# Command line\n\nData goes to stdout (text, or JSON with `--json`), progress and remarks to stderr. "
        "Made by `python tools/gen_cli_docs.py` from the commands' own help.\n"
    ]
    environment = {**os.environ, "COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
    for command in COMMANDS:
        text = subprocess.run(
            [sys.executable, "-m", "fluxon_gop", *command, "--help"],
            check=True,
            capture_output=True,
            text=True,
            env=environment,
        ).stdout
        title = " ".join(["fluxon-gop", *command])
        body = "\n".join(line.rstrip() for line in text.strip().splitlines())
        parts.append(f"## `{title}`\n\n```text\n{body}\n```\n")
    return "\n".join(parts)


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    text = page()
    if args.check:
        if not PAGE.exists() or PAGE.read_text() != text:
            print("docs/cli.md is stale: run python tools/gen_cli_docs.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
