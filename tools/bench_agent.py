"""How fast an agent gives bytes: ranges of 1 MiB by one client over loopback, without TLS and with it.

    python tools/bench_agent.py --out agent.json [--mib 512]

The agent is a process of the command line, the file lies in the system's cache. Beside it: a stat, a wave of 16 ranges of
64 KiB (one call), and what is read is compared with the file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fluxon_gop.fluxonfs.agent_client import AgentClient
from fluxon_gop.fluxonfs.agent_wire import AgentRead
from tests.agents import certificate, start_agent
from tools.bench_about import about

MIB = 1 << 20


def measure(folder: Path, mib: int, *, tls: bool) -> dict[str, Any]:
    """Return one agent's figures."""
    lines, roots = "", None
    if tls:
        pem, key = certificate(folder)
        lines, roots = f'tls_certificate = "{pem}"\ntls_key = "{key}"\n', pem.read_bytes()
    config = folder / "agent.toml"
    config.write_text(f'[agent]\nport = 0\n{lines}[exports.e]\nroot = "{folder}"\n')
    process, address = start_agent(config)
    try:
        client = AgentClient((address,), 60.0, roots)
        data = np.fromfile(folder / "large.bin", np.uint8)
        now = client.stat("e", "large.bin", None)
        reads = [AgentRead("e", "large.bin", now, n * MIB, (n + 1) * MIB) for n in range(mib)]
        small = [AgentRead("e", "large.bin", now, n * MIB, n * MIB + 65536) for n in range(16)]
        rates, waves, stats, exact = [], [], [], True
        for _ in range(5):
            started = time.perf_counter()
            got = list(client.read_many(reads, None))
            rates.append(mib * MIB / 1e6 / (time.perf_counter() - started))
            exact &= all(
                not isinstance(part, Exception)
                and bool((np.frombuffer(part, np.uint8) == data[n * MIB : (n + 1) * MIB]).all())
                for n, part in got
            )
        for _ in range(200):
            started = time.perf_counter()
            list(client.read_many(small, None))
            waves.append(time.perf_counter() - started)
            started = time.perf_counter()
            client.stat("e", "large.bin", None)
            stats.append(time.perf_counter() - started)
    finally:
        process.terminate()
        process.communicate()
    return {
        "tls": tls,
        "MB_per_s": round(statistics.median(rates)),
        "slowest_of_5": round(min(rates)),
        "wave_of_16_ms": round(statistics.median(waves) * 1e3, 2),
        "stat_ms": round(statistics.median(stats) * 1e3, 2),
        "exact": exact,
    }


def main() -> int:
    """Measure and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rng = np.random.default_rng(1)
        rng.integers(0, 256, given.mib * MIB, np.uint8).tofile(folder / "large.bin")
        for tls in (False, True):
            rows.append(measure(folder, given.mib, tls=tls))
            print(json.dumps(rows[-1]), flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps({"about": about("fluxon-gop", "pyarrow"), "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
