"""A range server in a process of its own, for benchmarks: its work is not on the reader's interpreter."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAM = Path(__file__).resolve().parent / "range_server.py"


@contextmanager
def served(folder: Path, latency_ms: float) -> Iterator[str]:
    """Serve the folder; yield the address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        str(PROGRAM),
        str(folder),
        "--port",
        str(port),
        "--latency-ms",
        str(latency_ms),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(200):
                time.sleep(0.05)
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=1).close()
                    break
                except OSError:
                    continue
            else:
                text = f"the server did not come up at port {port}"
                raise RuntimeError(text)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def place(path: Path, target: Path) -> None:
    """Have a file under another name too: linked where that works, else copied."""
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)
