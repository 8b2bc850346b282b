"""Any bytes either give a VideoIndex that can be asked and kept, or raise an Mp4Error, in bounded time and memory.

Mutates the structure of real files (never only their pictures) with a seeded generator and drives the parser
over the result, the check of entry points included. The whole campaign, with its record:
``python tools/fuzz_mp4.py --count 20000 --seed 0 --corpus DIR --out docs/evidence/01-fuzz-mp4.md``.
"""

from __future__ import annotations

import argparse
import platform
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fluxon_gop import index_rows
from fluxon_gop.encode import Recipe, numbered_picture, write_video
from fluxon_gop.errors import Mp4Error
from fluxon_gop.model import Signature, VideoIndex
from fluxon_gop.mp4_index import index_steps
from fluxon_gop.ranges import ByteRange

TIME_LIMIT_S = 5.0
MEMORY_LIMIT = 512 << 20
"""Growth of the process's resident memory over the whole campaign."""
MAX_SIZE = 4 << 20
"""Files beyond are no seeds: what is copied for each input costs time, and a head is a head."""
CONTAINERS = frozenset(
    b"moov trak mdia minf stbl edts dinf udta mvex moof traf mfra stsd avc1 hvc1 hev1 av01 vp09 mp4v encv".split()
)
SKIP = {
    b"stsd": 8,
    b"avc1": 78,
    b"hvc1": 78,
    b"hev1": 78,
    b"av01": 78,
    b"vp09": 78,
    b"mp4v": 78,
    b"encv": 78,
}
"""Bytes of fields in front of the boxes inside."""
NUMBERS = (0, 1, 2, 3, 7, 8, 9, 15, 16, 0xFF, 0x100, 0xFFFF, 0x10000, 1 << 20, (1 << 20) + 1, (1 << 25) + 1,
           0x3FFFFFFF, 0x40000000, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF)  # fmt: skip
_FAST = {"preset": "ultrafast", "g": "6"}
_DASH = "frag_keyframe+empty_moov+default_base_moof+global_sidx"
RECIPES = {
    "bframes": Recipe(options=_FAST | {"bf": "2"}, audio=True),
    "faststart": Recipe(options=_FAST, container_options={"movflags": "+faststart"}),
    "hevc": Recipe(
        codec="libx265", options={"preset": "ultrafast", "x265-params": "keyint=6:log-level=none"}
    ),
    "vp9": Recipe(codec="libvpx-vp9", options={"g": "6", "cpu-used": "8", "deadline": "realtime"}),
    "fragmented": Recipe(options=_FAST, container_options={"movflags": _DASH}),
    "hybrid": Recipe(options=_FAST, container_options={"movflags": "frag_keyframe"}),
}


class TooSlowError(BaseException):
    """An input ran past the time limit; no handler of the code under test may catch it."""


class Place(NamedTuple):
    """One box of a seed: its type and where it begins, its body begins, and it ends."""

    kind: bytes
    start: int
    body: int
    stop: int


@dataclass(frozen=True)
class Seed:
    """One real file: its bytes, its boxes, and where its key samples begin."""

    name: str
    data: bytes
    places: list[Place]
    heads: list[int]
    moov: ByteRange | None


@dataclass
class Report:
    """What the inputs of a campaign came to."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")
    seconds: float = 0.0
    grown: int = 0
    """Bytes by which the process's peak memory grew."""
    grown_by: str = ""


def boxes(data: bytes, start: int, stop: int, depth: int = 0) -> Iterator[Place]:
    """Yield the boxes of a file as far as they make sense; not the parser under test."""
    at = start
    while stop - at >= 8 and depth < 12:
        size, kind = struct.unpack_from(">I4s", data, at)
        body = at + 8
        if size == 1 and stop - at >= 16:
            (size,) = struct.unpack_from(">Q", data, body)
            body += 8
        end = stop if size == 0 else at + size
        if not body <= end <= stop:
            return
        yield Place(kind, at, body, end)
        if kind in CONTAINERS:
            yield from boxes(data, body + SKIP.get(kind, 0), end, depth + 1)
        at = end


def seed_of(name: str, data: bytes) -> Seed:
    """Return a seed; a file that the parser refuses is one, too."""
    places = list(boxes(data, 0, len(data)))
    heads: list[int] = []
    moov = None
    try:
        index = drive(data, check=False)
        heads = index.sample_offset[index.key_samples[:200]].tolist()
        moov = index.moov_range
    except Mp4Error:
        pass
    return Seed(name, data, places, [head for head in heads if 0 <= head < len(data)], moov)


def generated() -> Iterator[Seed]:
    """Make a few small videos of different shapes."""
    with tempfile.TemporaryDirectory() as folder:
        for name, recipe in RECIPES.items():
            path = Path(folder, f"{name}.mp4")
            write_video(path, (numbered_picture(n, 64, 48) for n in range(18)), recipe)
            yield seed_of(f"generated {name}", path.read_bytes())


def drive(
    data: bytes, *, check: bool = True, stream_index: int | None = None, hint: ByteRange | None = None
) -> VideoIndex:
    """Run the parser over ``data``; every wave gets exactly what it asks for."""
    view = memoryview(data)
    steps = index_steps(Signature(len(data)), stream_index=stream_index, check=check, hint=hint)
    try:
        wave = next(steps)
        while True:
            for start, stop in wave:
                if not 0 <= start < stop <= len(data):
                    text = f"asked for [{start}, {stop}) of {len(data)} bytes"
                    raise AssertionError(text)
            wave = steps.send([view[start:stop] for start, stop in wave])
    except StopIteration as stop:
        index: VideoIndex = stop.value
        return index


# Mutations: each takes the bytes and changes them in place.


Mutation = Callable[[bytearray, Seed, random.Random, Sequence[Seed]], None]


def _structure(seed: Seed, generator: random.Random) -> Place | None:
    """Return a box that is no media data, the small ones as often as the large."""
    places = [place for place in seed.places if place.kind not in {b"mdat", b"free"}]
    return generator.choice(places) if places else None


def flip_bytes(data: bytearray, seed: Seed, generator: random.Random, _: Sequence[Seed]) -> None:
    """Change a few bytes of one box, most of them near its head."""
    place = _structure(seed, generator)
    start, stop = (place.start, place.stop) if place else (0, len(data))
    for _n in range(generator.randint(1, 8)):
        reach = generator.choice([16, 64, stop - start])
        at = start + generator.randrange(max(1, min(reach, stop - start)))
        if at < len(data):
            data[at] = generator.choice(
                [0, 1, 0xFF, data[at] ^ 1 << generator.randrange(8), generator.randrange(256)]
            )


def set_number(data: bytearray, seed: Seed, generator: random.Random, _: Sequence[Seed]) -> None:
    """Put an interesting 32-bit number on a size, a count, or another aligned field of a box."""
    place = _structure(seed, generator)
    if place is None:
        return
    fields = [place.start, *(place.body + 4 * n for n in range(min(24, (place.stop - place.body) // 4)))]
    at = generator.choice(fields[:6] if generator.random() < 0.6 else fields)
    if at + 4 > len(data):
        return
    (old,) = struct.unpack_from(">I", data, at)
    near = (old - 1, old + 1, old * 2, old // 2, len(data), len(data) - at, place.stop - place.start)
    number = generator.choice(NUMBERS) if generator.random() < 0.6 else generator.choice(near)
    struct.pack_into(">I", data, at, number % (1 << 32))


def truncate(data: bytearray, seed: Seed, generator: random.Random, _: Sequence[Seed]) -> None:
    """Cut the file, often within a box."""
    place = _structure(seed, generator)
    start, stop = (place.start, place.stop) if place and generator.random() < 0.7 else (0, len(data))
    del data[generator.randint(start, stop) :]


def swap_boxes(data: bytearray, seed: Seed, generator: random.Random, _: Sequence[Seed]) -> None:
    """Let two boxes that do not hold one another change places."""
    one, other = (_structure(seed, generator) for _n in range(2))
    if one is None or other is None:
        return
    one, other = sorted((one, other), key=lambda place: place.start)
    if one.stop <= other.start:
        middle = data[one.stop : other.start]
        data[one.start : other.stop] = data[other.start : other.stop] + middle + data[one.start : one.stop]


def splice(data: bytearray, seed: Seed, generator: random.Random, seeds: Sequence[Seed]) -> None:
    """Put another file's box, mostly of the same type, in the place of one; sometimes mend the sizes around."""
    place = _structure(seed, generator)
    other = generator.choice(seeds)
    if place is None or place.stop > len(data):
        return
    alike = [p for p in other.places if p.kind == place.kind and p.stop - p.start < 1 << 20]
    source = generator.choice(alike) if alike and generator.random() < 0.8 else _structure(other, generator)
    if source is not None:
        replace(data, seed, place, other.data[source.start : source.stop], mend=generator.random() < 0.7)


def copy_or_drop(data: bytearray, seed: Seed, generator: random.Random, _: Sequence[Seed]) -> None:
    """Repeat a box, or leave it out, and mostly mend the sizes around."""
    place = _structure(seed, generator)
    if place is None or place.stop > len(data) or place.stop - place.start > 1 << 20:
        return
    times = generator.choice([0, 2, 3, 20])
    replace(data, seed, place, bytes(data[place.start : place.stop]) * times, mend=generator.random() < 0.8)


def replace(data: bytearray, seed: Seed, place: Place, new: bytes, *, mend: bool) -> None:
    """Put ``new`` in the place of a box; with ``mend`` the 32-bit sizes of the boxes around it follow."""
    data[place.start : place.stop] = new
    more = len(new) - (place.stop - place.start)
    for around in seed.places if mend else ():
        if around.start < place.start and place.stop <= around.stop and around.body == around.start + 8:
            (size,) = struct.unpack_from(">I", data, around.start)
            struct.pack_into(">I", data, around.start, (size + more) % (1 << 32))


def spoil_heads(data: bytearray, seed: Seed, generator: random.Random, _: Sequence[Seed]) -> None:
    """Change the first bytes of key samples: NAL lengths, parameter sets, picture headers."""
    for head in generator.sample(seed.heads, min(len(seed.heads), 4)):
        at = head + generator.randrange(48)
        if at < len(data):
            data[at] = generator.choice([0, 1, 0xFF, generator.randrange(256)])


def noise(data: bytearray, _seed: Seed, generator: random.Random, _: Sequence[Seed]) -> None:
    """Overwrite a stretch with random bytes."""
    at = generator.randrange(len(data) + 1)
    data[at : at + generator.randint(1, 400)] = generator.randbytes(generator.randint(1, 400))


MUTATIONS: tuple[Mutation, ...] = (flip_bytes, set_number, set_number, set_number, truncate, swap_boxes, splice,
                                   copy_or_drop, spoil_heads, noise)  # fmt: skip


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise TooSlowError in this thread after ``seconds``."""

    def ring(_number: int, _frame: object) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def peak_memory() -> int:
    """Return the most bytes that this process has ever held."""
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kib if sys.platform == "darwin" else kib * 1024


def use(index: VideoIndex) -> None:
    """Ask the index what a reader asks, and keep it as a row: none of it may fail."""
    if index.num_frames:
        index.frame_at(float(index.pts_seconds[0]))
        index.frames_between(0.0, 1.0)
    if index.container_reason is None:
        ends = index.sample_offset + index.sample_size
        if int(ends.max()) > index.signature.size or int(index.sample_offset.min()) < 0:
            text = "the packet path would read outside the file"
            raise AssertionError(text)
    (row,) = index_rows.rows_of(index_rows.encode([("key", index)]))
    there = index_rows.decode(row)
    if index.container_reason is None and not (
        np.array_equal(index.frame_pts, there.frame_pts)
        and np.array_equal(index.sample_offset, there.sample_offset)
    ):
        text = "the index changed on its way through a row"
        raise AssertionError(text)


def mutated(seeds: Sequence[Seed], generator: random.Random) -> tuple[str, bytes, dict[str, Any]]:
    """Return (what was done, the bytes, the parser's options) of one input."""
    seed = generator.choice(seeds)
    data = bytearray(seed.data)
    done = [seed.name]
    for mutate in generator.choices(MUTATIONS, k=generator.choice([1, 1, 1, 2, 3])):
        mutate(data, seed, generator, seeds)
        done.append(mutate.__name__)
    options: dict[str, Any] = {}
    if generator.random() < 0.1:
        options["stream_index"] = generator.randrange(4)
    if generator.random() < 0.2:
        start = generator.randrange(len(data) + 1)
        options["hint"] = seed.moov or ByteRange(start, start + generator.randrange(5000))
    return " ".join(done), bytes(data), options


def run_one(data: bytes, options: dict[str, Any], limit_s: float = TIME_LIMIT_S) -> str:
    """Return the outcome of one input; one that begins with "FAILURE" breaks the promise."""
    try:
        with deadline(limit_s):
            try:
                index = drive(data, **options)
            except Mp4Error as error:
                return type(error).__name__
            use(index)
    except TooSlowError:
        return f"FAILURE: more than {limit_s:g} s"
    except Exception as error:  # noqa: BLE001 - whatever escapes is what this program looks for
        frames = traceback.extract_tb(error.__traceback__)[-4:]
        where = " < ".join(f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in reversed(frames))
        return f"FAILURE: {type(error).__name__}: {error} ({where})"
    return "index, container path" if index.container_reason else "index, packet path"


def campaign(
    seeds: Sequence[Seed], count: int, seed: int, *, first: int = 0, limit_s: float = TIME_LIMIT_S
) -> Report:
    """Run inputs ``first`` to ``first + count`` of a seeded campaign; every input is its own seed's child."""
    report = Report()
    base = peak = peak_memory()
    begin = time.perf_counter()
    for number in range(first, first + count):
        what, data, options = mutated(seeds, random.Random(f"{seed}/{number}"))
        name = f"{number} ({what})"
        started = time.perf_counter()
        outcome = run_one(data, options, limit_s)
        report.slowest = max(report.slowest, (time.perf_counter() - started, name))
        if peak_memory() > peak:
            peak, report.grown_by = peak_memory(), name
        if outcome.startswith("FAILURE"):
            report.failures.append(f"input {name}: {outcome}")
            outcome = "FAILURE"
        report.outcomes[outcome] += 1
    report.seconds = time.perf_counter() - begin
    report.grown = peak - base
    if report.grown >= MEMORY_LIMIT:
        report.failures.append(f"memory grew by {report.grown >> 20} MiB, last by input {report.grown_by}")
    return report


def as_markdown(report: Report, seeds: Sequence[Seed], arguments: argparse.Namespace) -> str:
    """Return the record of a campaign."""
    files = sum(not seed.name.startswith("generated") for seed in seeds)
    corpus = " --corpus CORPUS/files" if arguments.corpus else ""
    versions = f"Python {platform.python_version()}, NumPy {np.__version__}, {platform.system()} {platform.machine()}"
    count = sum(report.outcomes.values())
    each = 1000 * report.seconds / max(1, count)
    lines = [
        "# Fuzzing the MP4 parser",
        "",
        (__doc__ or "").split("\n", 1)[0],
        "",
        f"- Command: `python tools/fuzz_mp4.py --count {arguments.count} --seed {arguments.seed}{corpus}`",
        f"- Date: {datetime.now(UTC):%Y-%m-%d}; {versions}, one core",
        f"- Seeds: {files} files of the corpus and {len(seeds) - files} generated videos",
        f"- Limits: {TIME_LIMIT_S:g} s an input; {MEMORY_LIMIT >> 20} MiB growth of resident memory in all",
        "",
        "| outcome | inputs |",
        "|---|---|",
        *(f"| {outcome} | {number} |" for outcome, number in sorted(report.outcomes.items())),
        "",
        f"- {count} inputs in {report.seconds:.0f} s ({each:.1f} ms each, the mutation included)",
        f"- Slowest: {report.slowest[0]:.2f} s, input {report.slowest[1]}",
        f"- Peak memory grew by {report.grown >> 20} MiB (last by input {report.grown_by or 'none'})",
        f"- Broken promises: {len(report.failures)}",
        *(f"  - {failure}" for failure in report.failures[:20]),
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a campaign; 0 where the promise held, 1 where it did not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=2000, help="inputs")
    parser.add_argument("--first", type=int, default=0, help="number of the first one, to run one again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--corpus", type=Path, help="a folder of real files; generated videos are always added"
    )
    parser.add_argument("--out", type=Path, help="write the record here; standard output without it")
    arguments = parser.parse_args(argv)
    seeds = list(generated())
    paths = sorted(arguments.corpus.iterdir()) if arguments.corpus else []
    seeds += [
        seed_of(p.name, p.read_bytes()) for p in paths if p.is_file() and p.stat().st_size <= MAX_SIZE
    ]
    report = campaign(seeds, arguments.count, arguments.seed, first=arguments.first)
    text = as_markdown(report, seeds, arguments)
    if arguments.out:
        arguments.out.write_text(text)
        print(f"{arguments.out}: {len(report.failures)} broken promises", file=sys.stderr)
    else:
        print(text)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
