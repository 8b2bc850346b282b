"""Servers in processes of their own, for benchmarks: their work is not on the reader's interpreter."""

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

TOOLS = Path(__file__).resolve().parent


@contextmanager
def served(folder: Path, latency_ms: float) -> Iterator[str]:
    """Serve the folder; yield the address."""
    with _running("range_server.py", str(folder), "--latency-ms", str(latency_ms)) as port:
        yield f"http://127.0.0.1:{port}"


@contextmanager
def far(target: int, rtt_ms: float) -> Iterator[int]:
    """Run a link with a round-trip time to a port of this machine (``tools/far_link.py``); yield its own port."""
    with _running("far_link.py", str(target), "--rtt-ms", str(rtt_ms)) as port:
        yield port


@contextmanager
def _running(program: str, *arguments: str) -> Iterator[int]:
    """Run one of the servers on a free port until it is let go; yield the port when it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, str(TOOLS / program), *arguments, "--port", str(port)]
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
                text = f"{program} did not come up at port {port}"
                raise RuntimeError(text)
            yield port
        finally:
            process.terminate()


def place(path: Path, target: Path) -> None:
    """Have a file under another name too: linked where that works, else copied."""
    try:
        os.link(path, target)
    except OSError:
        shutil.copyfile(path, target)
