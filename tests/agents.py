"""Agents for the tests: in this process, where their counters can be read, or as processes of the command line."""

from __future__ import annotations

import datetime as dt
import ipaddress
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fluxon_gop.fluxonfs import FluxonFsExport
from fluxon_gop.fluxonfs.agent_config import AgentConfig
from fluxon_gop.fluxonfs.agent_server import AgentServer
from fluxon_gop.fluxonfs.agent_wire import AgentLimits
from fluxon_gop.fluxonfs.file_system import FileSystem, FluxonFsCache
from fluxon_gop.fluxonfs.users import Users


@contextmanager
def agent_over(
    *exports: FluxonFsExport, users: Users | None = None, limits: dict[str, Any] | None = None, **more: Any
) -> Iterator[AgentServer]:
    """Serve exports from this process, at a free port."""
    files = FileSystem(exports, FluxonFsCache(memory_bytes=0), users)
    server = AgentServer(files, users, AgentConfig(port=0, limits=AgentLimits(**limits or {}), **more))
    thread = threading.Thread(target=server.serve, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(10)


def start_agent(config: Path) -> tuple[subprocess.Popen[str], str]:
    """Start an agent's process; return it and its address."""
    command = [sys.executable, "-m", "fluxon_gop", "agent", "--config", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    address = process.stdout.readline().strip()
    if not address:
        _, told = process.communicate()
        raise AssertionError(told)
    return process, address


def certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate of its own for 127.0.0.1, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "agent")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=2))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "agent.pem", folder / "agent.key"
    paths[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return paths
