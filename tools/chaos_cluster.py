"""Client processes that read through two agents and a shared KV, while both are killed, started again, slowed and filled.

    python tools/chaos_cluster.py --processes 8 --batches 200 --seed 13 [--markdown FILE]

Each client reads random batches; every frame is FFmpeg's own, or the batch ends with a typed error; no batch lasts longer
than the deadlines of its calls. Exit code 0 where that held. Agents are processes of the command line with TLS off, the store a
Valkey with a password; relays in front of them make them slow or silent.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import redis

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fluxon_gop.errors import FluxonGopError
from fluxon_gop.fluxonfs import (
    FluxonFsCache,
    FluxonFsExport,
    FluxonFsPatcher,
    FluxonFsVideoReadRequest,
    hash_password,
)
from tests.agents import start_agent
from tests.valkey import PASSWORD, Valkey, free_port
from tools.chaos_pieces import HEIGHT, PIECE, WIDTH, make_videos, random_batch
from tools.slow_relay import SlowRelay

CALL_SECONDS, KV_SECONDS = 3.0, 0.2
LIMIT_SECONDS = 4 * CALL_SECONDS + 8.0
"""Of a batch: a stat and up to three waves, each within its deadline; decoding on a machine that is busy with eight."""
IDENTITY = ("alice", "sesame")


@dataclass(frozen=True)
class Plan:
    """What a client is told."""

    folder: str
    nodes: tuple[str, ...]
    kv_url: str
    seed: int
    batches: int
    videos: int


def work(plan: Plan, number: int) -> None:
    """Read random batches, and write down how each went."""
    truth = [np.load(Path(plan.folder) / f"{n}.npy", mmap_mode="r") for n in range(plan.videos)]
    cache = FluxonFsCache(
        memory_bytes=(0, 16 * PIECE)[number % 2],
        piece_bytes=PIECE,
        kv_url=plan.kv_url,
        kv_timeout_ms=int(KV_SECONDS * 1000),
        kv_retry_seconds=0.5,
    )
    export = FluxonFsExport(
        "chaos",
        static_nodes=plan.nodes[number % 2 :] + plan.nodes[: number % 2],
        agent_timeout_ms=int(CALL_SECONDS * 1000),
        metadata_cache_ttl_ms=500,
        miss_policy=("RemoteRead", "StageToKvThenRead")[number % 3 == 0],  # type: ignore[arg-type]
    )
    with (
        (Path(plan.folder) / f"client-{number}.jsonl").open("w") as book,
        FluxonFsPatcher([export], cache=cache, request_identity=IDENTITY) as patcher,
        patcher.open_video_reader_pool(max_readers=4) as pool,
    ):
        for batch in range(plan.batches):
            generator = random.Random(f"{plan.seed} {number} {batch}")
            wanted = random_batch(generator, plan.videos)
            requests = [
                FluxonFsVideoReadRequest("chaos", f"{video}.mp4", HEIGHT, WIDTH, 1, frames)
                for video, frames in wanted
            ]
            started, hits = time.monotonic(), 0
            try:
                results = pool.read_many_numpy_with_stats(requests)
                exact = all(
                    np.array_equal(result.array, truth[video][frames])
                    for result, (video, frames) in zip(results, wanted, strict=True)
                )
                outcome = "exact" if exact else "WRONG"
                hits = sum(result.reader_stats["kv_hits"] for result in results)
            except FluxonGopError as error:
                outcome = type(error).__name__
            line = {"outcome": outcome, "seconds": time.monotonic() - started, "kv_hits": hits}
            book.write(json.dumps(line) + "\n")
            book.flush()
            time.sleep(generator.uniform(0, 0.3))
        (Path(plan.folder) / f"stats-{number}.json").write_text(json.dumps(patcher.stats()))


class Cluster:
    """Two agents and a store, each behind a relay, and what is done to them."""

    def __init__(self, folder: Path, videos: Path) -> None:
        """Start them."""
        (folder / "users.toml").write_text(f'{IDENTITY[0]} = "{hash_password(IDENTITY[1])}"\n')
        self._configs, self._agents, self.relays = [], [], []
        for n in range(2):
            port = free_port()
            config = folder / f"agent-{n}.toml"
            config.write_text(
                f'users = "users.toml"\n[agent]\nport = {port}\nstop_seconds = 1\n'
                f'[exports.chaos]\nroot = "{videos}"\nreaders = ["{IDENTITY[0]}"]\n'
            )
            self._configs.append(config)
            self._agents.append(start_agent(config)[0])
            self.relays.append(SlowRelay(port))
        self.valkey = Valkey(folder)
        self.relays.append(SlowRelay(self.valkey.port))
        self.did: Counter[str] = Counter()

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the agents' addresses, the relays'."""
        return tuple(f"grpc://127.0.0.1:{relay.port}" for relay in self.relays[:2])

    @property
    def kv_url(self) -> str:
        """Return the store's address, the relay's."""
        return f"redis://:{PASSWORD}@127.0.0.1:{self.relays[2].port}/0"

    def torment(self, generator: random.Random) -> None:
        """Do one bad thing, for a while, and undo it."""
        deed = generator.choice(
            [
                "kill agent",
                "kill agent",
                "stop agent",
                "both agents",
                "kill KV",
                "slow",
                "slow",
                "silent",
                "fill KV",
                "corrupt KV",
            ]
        )
        self.did[deed] += 1
        if generator.random() < 0.7:
            # So that agents are asked for bytes too.
            with suppress(redis.RedisError):
                self.valkey.client.flushall()
        which, pause = generator.randrange(2), generator.uniform(0.2, 1.5)
        if deed in {"kill agent", "stop agent", "both agents"}:
            for n in (0, 1) if deed == "both agents" else (which,):
                self._end(n, kindly=deed == "stop agent")
            time.sleep(pause)
            for n in (0, 1):
                if self._agents[n].poll() is not None:
                    self._agents[n] = start_agent(self._configs[n])[0]
        elif deed == "kill KV":
            self.valkey.kill()
            time.sleep(pause)
            self.valkey.start()
        elif deed in {"slow", "silent"}:
            relay = generator.choice(self.relays)
            relay.delay_s = 1e9 if deed == "silent" else generator.uniform(0.05, 1.0)
            time.sleep(pause)
            relay.delay_s = 0.0
        else:
            with suppress(redis.RedisError):
                client = self.valkey.client
                if deed == "fill KV":
                    client.config_set("maxmemory", 1)
                    time.sleep(pause)
                    client.config_set("maxmemory", 0)
                for key in generator.sample(
                    sorted(client.keys()), 0 if deed == "fill KV" else min(20, client.dbsize())
                ):
                    client.hset(key, "bytes", generator.randbytes(generator.choice([0, 100, PIECE])))

    def _end(self, n: int, *, kindly: bool) -> None:
        process: subprocess.Popen[str] = self._agents[n]
        process.terminate() if kindly else process.kill()
        process.communicate()

    def close(self) -> None:
        """End them."""
        for n in range(2):
            self._end(n, kindly=False)
        self.valkey.kill()
        for relay in self.relays:
            relay.close()


def campaign(processes: int, batches: int, seed: int, videos: int = 16) -> dict[str, Any]:
    """Run it and return what was seen; ``held`` says whether everything did."""
    with tempfile.TemporaryDirectory(prefix="chaos-cluster-") as name:
        folder = Path(name)
        make_videos(folder, videos)
        cluster = Cluster(folder, folder / "videos")
        try:
            plan = Plan(name, cluster.nodes, cluster.kv_url, seed, batches, videos)
            context = multiprocessing.get_context("spawn")
            clients = [context.Process(target=work, args=(plan, n)) for n in range(processes)]
            for client in clients:
                client.start()
            generator = random.Random(seed)
            until = time.monotonic() + batches * LIMIT_SECONDS
            while any(client.is_alive() for client in clients) and time.monotonic() < until:
                time.sleep(generator.uniform(0.1, 1.0))
                cluster.torment(generator)
            hung = sum(client.is_alive() for client in clients)
            for client in clients:
                client.kill()
                client.join()
        finally:
            cluster.close()
        books = [
            json.loads(line)
            for n in range(processes)
            for line in (folder / f"client-{n}.jsonl").read_text().splitlines()
        ]
        tiers: Counter[str] = Counter()
        for path in folder.glob("stats-*.json"):
            tiers.update(json.loads(path.read_text()))
    outcomes = Counter(book["outcome"] for book in books)
    slowest = max((book["seconds"] for book in books), default=0.0)
    return {
        "held": len(books) == processes * batches
        and not outcomes["WRONG"]
        and not hung
        and slowest < LIMIT_SECONDS,
        "batches": len(books),
        "outcomes": dict(outcomes),
        "slowest batch, s": round(slowest, 2),
        "limit, s": LIMIT_SECONDS,
        "clients that hung": hung,
        "pieces from the KV": sum(book["kv_hits"] for book in books),
        "KV": {name: number for name, number in tiers.items() if name.startswith("kv_")},
        "deeds": dict(cluster.did),
    }


def main() -> int:
    """Run the campaign and print what was seen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--seed", type=int, default=13)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    started = time.monotonic()
    seen = campaign(options.processes, options.batches, options.seed)
    seen["seconds"] = round(time.monotonic() - started, 1)
    print(json.dumps(seen, indent=2))
    if options.markdown is not None:
        command = f"python tools/chaos_cluster.py --processes {options.processes} --batches {options.batches} --seed {options.seed}"
        text = f"# Agents and shared KV, tormented\n\n`{command}`, {datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, "
        text += f"{os.cpu_count()} cores.\n\n| what | seen |\n|---|---|\n"
        for name, value in seen.items():
            shown = ", ".join(f"{k}: {v:,}" for k, v in value.items()) if isinstance(value, dict) else value
            text += f"| {name} | {shown} |\n"
        options.markdown.write_text(text)
    return 0 if seen["held"] else 1


if __name__ == "__main__":
    sys.exit(main())
