"""Seeded faults and swapped files under remote and local reads: exact frames of one version, or a typed error in time.

``python tools/chaos.py --schedules 1000 --swaps 500 --seed 7``: each schedule draws faults for the requests of one
index build, planned batch or unplanned read; each swap replaces a file by another one of the same size at a drawn
moment between stat, index, plan, wave and unplanned read. Exit code 0 where every try held.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import av
import numpy as np

import fluxon_gop as fg
from fluxon_gop.encode import Recipe, numbered_picture, write_video
from fluxon_gop.reference import full_decode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.range_server import Fault, RangeServer, RequestInfo

FRAMES = 40
LIMIT_SECONDS = 2.0
"""Of a call; the sources' own limits are below it."""
SLACK_SECONDS = 6.0
"""What a busy machine may add before a call counts as late."""
OPTIONS = {"timeout": "250ms", "retry_timeout": "1500ms", "max_retries": 3}
RECIPES = [
    Recipe(options={"preset": "ultrafast", "g": "10", "bf": "2", "sc_threshold": "0"}),
    Recipe(options={"preset": "ultrafast", "g": "4"}, container_options={"movflags": "+faststart"}),
    Recipe(
        codec="libx265",
        tag="hvc1",
        options={"preset": "ultrafast", "x265-params": "keyint=10:log-level=none"},
    ),
    Recipe(codec="mpeg4", options={"g": "10", "bf": "2"}),
]
PHASES = ("index build", "planned batch", "unplanned read")


class Media:
    """Two versions of a few videos, of the same size, and the truth about both."""

    def __init__(self, folder: Path) -> None:
        """Make them."""
        self.versions: list[tuple[bytes, bytes]] = []
        self.truth: list[tuple[Any, Any]] = []
        for n, recipe in enumerate(RECIPES):
            data, frames = [], []
            for version in range(2):
                path = folder / f"{n}-{version}.mp4"
                write_video(
                    path, (numbered_picture(k + 97 * version, 128, 96) for k in range(FRAMES)), recipe
                )
                data.append(path.read_bytes())
                frames.append(full_decode(path))
            size = max(map(len, data)) + 8
            padded = [
                one + (size - len(one)).to_bytes(4, "big") + b"free" + bytes(size - len(one) - 8)
                for one in data
            ]
            self.versions.append((padded[0], padded[1]))
            self.truth.append((frames[0], frames[1]))


def drawn_fault(generator: random.Random) -> Fault:
    """Return one of the faults, drawn."""
    kind = generator.randrange(12)
    if kind < 5:
        return Fault(status=generator.choice([500, 502, 503, 504, 429, 425, 408]))
    if kind == 5:
        return Fault(reset=True)
    if kind == 6:
        return Fault(delay_s=generator.choice([0.05, 0.1, 1.0]))
    if kind == 7:
        return Fault(truncate_to=generator.randrange(1000))
    if kind == 8:
        return Fault(
            headers={
                "Content-Range": f"bytes {generator.randrange(99)}-{generator.randrange(100, 999)}/5000"
            }
        )
    if kind == 9:
        return Fault(ignore_range=True)
    if kind == 10:
        return Fault(headers={"ETag": '"another"'})
    return Fault(status=generator.choice([403, 404, 416, 412]))


def schedules(count: int, seed: int) -> dict[str, Any]:
    """Run ``count`` schedules of faults and return what was seen."""
    outcomes: Counter[str] = Counter()
    bad: list[str] = []
    slowest = 0.0
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        media = Media(Path(name))
        files = {f"{n}.mp4": versions[0] for n, versions in enumerate(media.versions)}
        with RangeServer(files) as server:
            indexes = {n: fg.build_index(server.url(f"{n}.mp4")) for n in range(len(RECIPES))}
            threads = set(threading.enumerate())
            for number in range(count):
                generator = random.Random(f"{seed} {number}")
                phase = PHASES[number % 3]
                rate = generator.choice([0.1, 0.3, 0.6, 1.0])
                lock = threading.Lock()

                def hook(
                    _: RequestInfo,
                    generator: random.Random = generator,
                    rate: float = rate,
                    lock: Any = lock,
                ) -> Fault | None:
                    with lock:
                        return drawn_fault(generator) if generator.random() < rate else None

                wanted = {
                    n: sorted(generator.sample(range(FRAMES), 5)) for n in generator.sample(range(4), 3)
                }
                server.hook = hook
                started = time.monotonic()
                results = _tried(phase, wanted, server, indexes)
                seconds = time.monotonic() - started
                slowest = max(slowest, seconds)
                server.hook = None
                for n, outcome in results.items():
                    if isinstance(outcome, fg.FluxonGopError):
                        outcomes[type(outcome).__name__] += 1
                    elif isinstance(outcome, BaseException):
                        bad.append(f"schedule {number}, {phase}: untyped {outcome!r}")
                    elif np.array_equal(outcome, media.truth[n][0][wanted[n]]):
                        outcomes["exact"] += 1
                    else:
                        bad.append(f"schedule {number}, {phase}: WRONG frames of {n}")
                if seconds > LIMIT_SECONDS + SLACK_SECONDS:
                    bad.append(f"schedule {number}, {phase}: {seconds:.1f} s")
            left = [
                one.name
                for one in set(threading.enumerate()) - threads
                if not one.name.startswith("fluxon_gop")
            ]
            left = [one for one in left if "_serve" not in one and "asyncio" not in one]
    return {
        "schedules": count,
        "outcomes": dict(outcomes),
        "slowest, s": round(slowest, 2),
        "threads left": left,
        "bad": bad,
    }


def rows_of(server: RangeServer, indexes: dict[int, Any]) -> fg.IndexTable:
    """Return a table with the rows of all videos, in memory."""
    table = fg.IndexTable.open(Path(tempfile.gettempdir()) / f"chaos-{os.getpid()}.arrow", create=True)
    keys = [server.url(f"{n}.mp4") for n in indexes]
    missing = [(key, indexes[n]) for n, key in enumerate(keys) if key not in table]
    if missing:
        table.append(missing)
    table.lookup(keys)
    return table


def _tried(
    phase: str, wanted: dict[int, list[int]], server: RangeServer, indexes: dict[int, Any]
) -> dict[int, Any]:
    """Read in one of the three ways; return frames or error by video."""
    answers: dict[int, Any] = {}
    if phase == "planned batch":
        with (
            rows_of(server, indexes) as rows,
            fg.VideoReaderPool(index=rows, storage_options=OPTIONS, timeout=LIMIT_SECONDS) as pool,
        ):
            requests = [fg.VideoReadRequest(server.url(f"{n}.mp4"), frames) for n, frames in wanted.items()]
            try:
                results = pool.read_many(requests, on_error="skip")
            except Exception as error:  # noqa: BLE001 - what must not come is told
                return dict.fromkeys(wanted, error)
            if pool.counts()["active_readers"]:
                return dict.fromkeys(wanted, AssertionError("readers left behind"))
            return {
                n: r.array if r.error is None else r.error for n, r in zip(wanted, results, strict=True)
            }
    for n, frames in wanted.items():
        index, path = (None, None) if phase == "index build" else (indexes[n], "container")
        try:
            with fg.VideoReader.open(
                server.url(f"{n}.mp4"),
                index=index,
                path=path,
                storage_options=OPTIONS,
                timeout=LIMIT_SECONDS,
            ) as reader:
                answers[n] = reader.read_frames_numpy(frames)
        except Exception as error:  # noqa: BLE001 - what must not come is told
            answers[n] = error
    return answers


def swaps(count: int, seed: int) -> dict[str, Any]:
    """Swap a file at ``count`` drawn moments and return what was seen."""
    outcomes: Counter[str] = Counter()
    bad: list[str] = []
    with tempfile.TemporaryDirectory(prefix="swaps-") as name:
        folder = Path(name)
        media = Media(folder)
        for number in range(count):
            generator = random.Random(f"{seed} swap {number}")
            n = generator.randrange(4)
            frames = sorted(generator.sample(range(FRAMES), 6))
            moment = generator.randrange(9)
            path = generator.choice([None, None, "container"])
            kind = ("local", "http", "http weak")[number % 3]
            opened = _swapping_local if kind == "local" else _swapping_http
            with opened(folder, media.versions[n], weak=kind == "http weak") as (uri, swap):
                outcome = _swapped(uri, swap, frames, moment, path)
            told = f"swap {number} of {kind} at {moment}, path {path}"
            old, new = (version[frames] for version in media.truth[n])
            if isinstance(outcome, fg.FluxonGopError):
                outcomes[f"{kind}: {type(outcome).__name__}"] += 1
            elif isinstance(outcome, BaseException):
                bad.append(f"{told}: untyped {outcome!r}")
            elif np.array_equal(outcome, new):
                outcomes[f"{kind}: all of the new version"] += 1
            elif np.array_equal(outcome, old) and moment and not swap.late:
                outcomes[f"{kind}: all of the old version"] += 1
            else:
                bad.append(f"{told}: {'STALE' if np.array_equal(outcome, old) else 'MIXED'} frames")
    return {"swaps": count, "outcomes": dict(sorted(outcomes.items())), "bad": bad}


def _swapped(uri: str, swap: Any, frames: list[int], moment: int, path: str | None) -> Any:
    """Read with the swap at the given moment: 0 before the call, else at that read of the file."""
    try:
        with fg.VideoReader.open(
            uri, storage_options=None if "://" not in uri else OPTIONS, path=path
        ) as reader:
            if moment == 0:
                swap()
            elif moment < 3:
                # Between two calls.
                reader.read_frames_numpy(frames[:1])
                swap.at(moment - 1)
            else:
                swap.at(moment - 3)
            return reader.read_frames_numpy(frames)
    except Exception as error:  # noqa: BLE001 - what must not come is told
        return error


class _Swap:
    """Replaces the file now, or at a later read of it."""

    def __init__(self, replace: Any) -> None:
        self._replace = replace
        self._left: int | None = None
        self._done = False
        self.late = 0
        """Reads made after it was replaced."""
        self._lock = threading.Lock()

    def __call__(self) -> None:
        self._replace()
        self._done = True

    def at(self, reads: int) -> None:
        """Replace it after ``reads`` more reads."""
        self._left = reads

    def tick(self) -> None:
        """Count a read that is about to be made."""
        with self._lock:
            self.late += self._done
            if self._left is not None:
                if self._left == 0:
                    self._left = None
                    self()
                    self.late += 1
                else:
                    self._left -= 1


@contextmanager
def _swapping_http(
    folder: Path, versions: tuple[bytes, bytes], *, weak: bool
) -> Iterator[tuple[str, _Swap]]:
    del folder
    files = {"v.mp4": versions[0]}
    swap = _Swap(lambda: files.__setitem__("v.mp4", versions[1]))

    def hook(_: RequestInfo) -> None:
        swap.tick()

    with RangeServer(files, hook=hook, weak_etag=weak) as server:
        yield server.url("v.mp4"), swap


@contextmanager
def _swapping_local(
    folder: Path, versions: tuple[bytes, bytes], *, weak: bool
) -> Iterator[tuple[str, _Swap]]:
    del weak
    place, new = folder / "swapped.mp4", folder / "new.mp4"
    place.write_bytes(versions[0])
    new.write_bytes(versions[1])
    swap = _Swap(lambda: new.replace(place) if new.exists() else None)
    pread = os.pread

    def counted(descriptor: int, size: int, offset: int) -> bytes:
        swap.tick()
        return pread(descriptor, size, offset)

    os.pread = counted
    try:
        yield str(place), swap
    finally:
        os.pread = pread


def main(argv: list[str] | None = None) -> int:
    """Run both campaigns and print what was seen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--swaps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args(argv)
    started = time.monotonic()
    parts = [schedules(options.schedules, options.seed), swaps(options.swaps, options.seed)]
    for part in parts:
        print(part)
    if options.markdown is not None:
        command = f"python tools/chaos.py --schedules {options.schedules} --swaps {options.swaps} --seed {options.seed}"
        text = f"# Faults and swapped files\n\n`{command}`, {datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}, "
        text += f"PyAV {av.__version__}, {os.cpu_count()} cores; {time.monotonic() - started:.0f} s.\n"
        for part in parts:
            text += "\n| what | seen |\n|---|---|\n"
            for what, seen in part.items():
                told = (
                    ", ".join(f"{k}: {v:,}" for k, v in seen.items())
                    if isinstance(seen, dict)
                    else seen or "none"
                )
                text += f"| {what} | {told} |\n"
        options.markdown.write_text(text)
    return int(any(part["bad"] for part in parts))


if __name__ == "__main__":
    sys.exit(main())
