"""Files x readers, in random order, against FFmpeg's full decode: exact, another picture, raised, or hung.

    python tools/conformance.py --corpus DIR --generated --out docs/conformance.md

Readers: ours with a table's row, without one, and on the container path; and, where they are installed,
torchcodec (exact, approximate, with custom frame mappings), decord and OpenCV. Each file and reader runs in a
process of its own with a time limit. A picture is "another" where its RGB differs from the truth's by more than
a reader's own colour conversion explains: it is nearer to another frame, or far from its own.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import multiprocessing
import pickle
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import numpy.typing as npt

import fluxon_gop as fg
from fluxon_gop import index_rows

Pictures = dict[int, npt.NDArray[np.uint8]]
MAX_FRAMES = 120
"""Frames of one file that are asked for, in random order."""
TIME_LIMIT = 45.0
JOBS = 2
"""Files at a time."""
LARGE = 2_000_000
"""Bytes of a picture beyond which a quarter of the frames is asked for."""
NEAR = 24
"""Frames around one that it may be mistaken for."""
FAR = 12.0
"""Mean absolute difference of RGB beyond which a picture is not its frame under another colour conversion."""


def decoded(path: str) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """Yield (number, RGB) of every frame of FFmpeg's full decode; raises where it breaks off."""
    with av.open(path, metadata_errors="ignore") as container:
        stream: Any = container.streams.best("video")
        if stream is None or stream.codec_context is None:
            return
        stream.thread_type = "NONE"
        stream.codec_context.thread_count = 1
        frame: Any
        for number, frame in enumerate(container.decode(stream)):
            yield number, frame.reformat(format="rgb24", interpolation="BILINEAR", threads=1).to_ndarray()


def truth(path: str, keep: set[int]) -> tuple[Pictures, int, bool]:
    """Return (pictures kept, number of frames, damaged)."""
    pictures: Pictures = {}
    count = 0
    try:
        for number, picture in decoded(path):
            count = number + 1
            if number in keep:
                pictures[number] = picture
    except av.error.FFmpegError:
        return pictures, count, True
    return pictures, count, False


# --------------------------------------------------------------------------- readers: path -> frame -> RGB

Reader = Callable[[str], tuple[int, Callable[[int], npt.NDArray[np.uint8]]]]


def ours(path: str, *, table: bool = False, container: bool = False) -> Any:
    """Read with this package."""
    index = None
    if table:
        with contextlib.suppress(fg.NotMp4Error, fg.BoxError, fg.UnsupportedMp4Error, fg.TruncatedMp4Error):
            # What has no index has no row: it is read without one.
            built = fg.build_index(path)
            index = index_rows.decode(index_rows.rows_of(index_rows.encode([("key", built)]))[0])
    reader = fg.VideoReader.open(
        path, index=index, apply_rotation=False, path="container" if container else None
    )
    return reader.num_frames, lambda frame: reader.read_frames_numpy([frame])[0]


def torchcodec(path: str, *, mode: str) -> Any:
    """Read with torchcodec's VideoDecoder."""
    from torchcodec.decoders import VideoDecoder

    options: dict[str, Any] = {"seek_mode": mode}
    if mode == "custom_frame_mappings":
        options = {"custom_frame_mappings": frame_mappings(path)}
    decoder = VideoDecoder(path, dimension_order="NHWC", num_ffmpeg_threads=1, **options)
    return len(decoder), lambda frame: decoder.get_frame_at(frame).data.numpy()


def frame_mappings(path: str) -> str:
    """Return the JSON that torchcodec takes, from PyAV's demuxer (as ffprobe -show_frames would tell it)."""
    frames = []
    with av.open(path, metadata_errors="ignore") as container:
        stream = container.streams.best("video")
        for packet in container.demux(stream):
            if packet.pts is not None and not packet.is_discard:
                frames.append(
                    {
                        "pts": packet.pts,
                        "duration": packet.duration or 1,
                        "key_frame": int(packet.is_keyframe),
                    }
                )
    frames.sort(key=lambda frame: frame["pts"])
    return json.dumps({"frames": frames})


def decord(path: str) -> Any:
    """Read with decord's VideoReader."""
    from decord import VideoReader, cpu

    reader = VideoReader(path, ctx=cpu(0), num_threads=1)
    return len(reader), lambda frame: reader[frame].asnumpy()


def opencv(path: str) -> Any:
    """Read with OpenCV's VideoCapture, seeking by frame number."""
    import cv2  # type: ignore[import-not-found]

    capture = cv2.VideoCapture(path, cv2.CAP_FFMPEG)
    capture.set(cv2.CAP_PROP_ORIENTATION_AUTO, 0)

    def read(frame: int) -> npt.NDArray[np.uint8]:
        capture.set(cv2.CAP_PROP_POS_FRAMES, frame)
        ok, picture = capture.read()
        if not ok:
            text = "no picture"
            raise RuntimeError(text)
        return np.asarray(cv2.cvtColor(picture, cv2.COLOR_BGR2RGB))

    if not capture.isOpened():
        text = "will not open"
        raise RuntimeError(text)
    return int(capture.get(cv2.CAP_PROP_FRAME_COUNT)), read


READERS: dict[str, Any] = {
    "ours": ours,
    "ours, table": lambda path: ours(path, table=True),
    "ours, container": lambda path: ours(path, container=True),
    "torchcodec exact": lambda path: torchcodec(path, mode="exact"),
    "torchcodec approximate": lambda path: torchcodec(path, mode="approximate"),
    "torchcodec mappings": lambda path: torchcodec(path, mode="custom_frame_mappings"),
    "decord": decord,
    "opencv": opencv,
}


MODULES = {"torchcodec.decoders": "torchcodec", "decord": "decord", "cv2": "opencv"}


class Truth(NamedTuple):
    """What FFmpeg's full decode gives of one file."""

    frames: int
    damaged: bool
    numbers: list[int]
    """Frames to ask for, in random order."""
    pictures: Pictures
    near: Pictures
    """Every fourth row and column of the frames around them."""


def prepare(path: str, seed: int, target: str) -> None:
    """Decode one file and keep what judging it needs."""
    _, count, _ = truth(path, set())
    numbers = list(range(count))
    random.Random(seed).shuffle(numbers)
    first, _, _ = truth(path, {0}) if count else ({}, 0, False)
    large = bool(first) and first[0].size > LARGE
    numbers = numbers[: MAX_FRAMES // 4 if large else MAX_FRAMES]
    around = {other for n in numbers for other in range(n - NEAR, n + NEAR + 1)}
    pictures, near, damaged = {}, {}, False
    try:
        for number, picture in decoded(path):
            if number in around:
                near[number] = picture[::4, ::4].copy()
            if number in set(numbers):
                pictures[number] = picture
    except av.error.FFmpegError:
        damaged = True
    with Path(target).open("wb") as file:
        pickle.dump(Truth(count, damaged, numbers, pictures, near), file)


def judge(name: str, path: str, prepared: str, pipe: Any) -> None:
    """Read one file with one reader, in this process, and send what came of it."""
    with Path(prepared).open("rb") as file:
        known: Truth = pickle.load(file)
    result: dict[str, Any] = {"frames": known.frames, "damaged": known.damaged, "length": None}
    tally: Counter[str] = Counter()
    try:
        length, read = READERS[name](path)
        result["length"] = length
    except Exception as error:  # noqa: BLE001 - whatever a reader raises is its answer
        pipe.send({**result, "open": f"{type(error).__name__}: {str(error)[:120]}"})
        return
    for number in known.numbers:
        try:
            got = read(number)
        except Exception:  # noqa: BLE001 - see above
            tally["raised"] += 1
            continue
        tally[compare(known, number, got)] += 1
    pipe.send({**result, **tally, "asked": len(known.numbers)})


def compare(known: Truth, number: int, got: npt.NDArray[np.uint8]) -> str:
    """Return "exact" (bit for bit), "exact up to colour", "resized" or "wrong" for one picture."""
    want = known.pictures[number]
    if got.shape != want.shape:
        # Where the size changes in mid-stream a reader may give all pictures the first one's.
        frame = av.VideoFrame.from_ndarray(want, format="rgb24")
        scaled = frame.reformat(got.shape[1], got.shape[0], interpolation="BILINEAR").to_ndarray()
        return "resized" if np.abs(got.astype(np.int16) - scaled).mean() < FAR else "wrong"
    if np.array_equal(got, want):
        return "exact"
    small = got[::4, ::4].astype(np.int16)

    def distance(other: int) -> float:
        picture = known.near.get(other)
        if picture is None or picture.shape != small.shape:
            return 1e9
        return float(np.abs(small - picture).mean())

    mine = distance(number)
    others = [other for step in range(1, NEAR) for other in (number - step, number + step)]
    return "wrong" if mine > FAR or any(distance(n) + 0.5 < mine for n in others) else "exact up to colour"


def run(name: str, path: str, prepared: str) -> dict[str, Any]:
    """Judge one pair in a process of its own, within the time limit."""
    # Forked off a server that has imported the readers and used none of them.
    context = multiprocessing.get_context("forkserver")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=judge, args=(name, path, prepared, sending))
    process.start()
    sending.close()
    answer: dict[str, Any] = {"open": "hung"}
    if receiving.poll(TIME_LIMIT):
        try:
            answer = receiving.recv()
        except EOFError:
            answer = {"open": "crashed"}
    process.kill()
    process.join()
    return answer


def run_file(path: Path, readers: list[str], seed: int) -> dict[str, dict[str, Any]]:
    """Judge one file with all readers."""
    with tempfile.TemporaryDirectory() as folder:
        prepared = str(Path(folder) / "truth")
        process = multiprocessing.get_context("forkserver").Process(
            target=prepare, args=(str(path), seed, prepared)
        )
        process.start()
        process.join(4 * TIME_LIMIT)
        process.kill()
        if not Path(prepared).exists():
            with Path(prepared).open("wb") as file:
                pickle.dump(Truth(0, True, [], {}, {}), file)
        return {name: run(name, str(path), prepared) for name in readers}


def word(result: dict[str, Any]) -> str:
    """Return one cell."""
    if "open" in result:
        return str(result["open"]).split(":", 1)[0]
    right = result.get("exact", 0) + result.get("exact up to colour", 0) + result.get("resized", 0)
    wrong = result.get("wrong", 0)
    parts = [] if right == result["asked"] else [f"{right} right"]
    parts += [f"**{wrong} wrong**"] * (wrong > 0) + [f"{result.get('raised', 0)} raise"] * (
        result.get("raised", 0) > 0
    )
    if result["length"] != result["frames"] and not result["damaged"]:
        parts.append(f"len {result['length']}")
    return ", ".join(parts) or ("exact" if result.get("exact", 0) == result["asked"] else "right")


def installed() -> dict[str, str]:
    """Return the readers that can be tried, with their versions."""
    versions = {name: fg.__version__ for name in READERS if name.startswith("ours")}
    for package, prefix in (
        ("torchcodec", "torchcodec"),
        ("decord", "decord"),
        ("opencv-python-headless", "opencv"),
    ):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        versions |= {name: version for name in READERS if name.startswith(prefix)}
    return versions


def generated(folder: Path) -> list[Path]:
    """Make the generated cases of the tests."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.cases import make_cases  # the tests' own inputs

    return list(make_cases(folder).values())


def main() -> None:
    """Judge all pairs and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--generated", action="store_true")
    parser.add_argument("--only", nargs="*", help="names of the corpus's files to judge")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--readers", nargs="*")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    versions = installed()
    preload = ["numpy", "av", "fluxon_gop"]
    preload += [m for m, prefix in MODULES.items() if any(name.startswith(prefix) for name in versions)]
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    readers = [name for name in args.readers or READERS if name in versions]
    with tempfile.TemporaryDirectory() as temporary:
        groups: list[tuple[str, list[Path]]] = []
        if args.generated:
            groups.append(("Generated cases", generated(Path(temporary))))
        if args.corpus:
            groups.append(
                (
                    "Corpus",
                    sorted(
                        p
                        for p in args.corpus.iterdir()
                        if p.is_file() and (not args.only or p.name in args.only)
                    ),
                )
            )
        lines = header(args, versions)
        for title, files in groups:
            lines += section(title, files, readers, args.seed)
    text = "\n".join(lines) + "\n"
    if args.out:
        args.out.write_text(text)
    else:
        print(text)


def header(args: argparse.Namespace, versions: dict[str, str]) -> list[str]:
    """Return the page's head: what was run, with which versions."""
    libraries = ".".join(map(str, av.library_versions["libavcodec"]))
    names = ", ".join(
        sorted({f"{name.split(',')[0].split(' ')[0]} {version}" for name, version in versions.items()})
    )
    return [
        "# Conformance",
        "",
        f"`python tools/conformance.py --generated --corpus DIR --seed {args.seed}`, "
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}; {names}; PyAV {av.__version__} (libavcodec {libraries}).",
        "",
        f"Single frames in random order, at most {MAX_FRAMES} a file, against FFmpeg's full decode on one thread. "
        "*exact*: every picture bit for bit. *right*: every picture is its frame, up to the reader's own colour "
        "conversion (or scaled to the first one's size, where it changes in mid-stream). *wrong*: another frame's picture, or none of this file's. *raise*: an error. *len*: the reader's "
        "count where it is not FFmpeg's. A class name or *hung*: the file does not open.",
        "",
    ]


def section(title: str, files: list[Path], readers: list[str], seed: int) -> list[str]:
    """Judge one group of files and return its table and sums."""
    rows, sums = [], {name: Counter[str]() for name in readers}
    jobs = ThreadPoolExecutor(JOBS)
    pending = {path: jobs.submit(run_file, path, readers, seed) for path in files}
    for path in files:
        cells = []
        frames = "?"
        for name in readers:
            result = pending[path].result()[name]
            cells.append(word(result))
            if "frames" in result:
                frames = f"{result['frames']}{' (damaged)' if result['damaged'] else ''}"
            if "open" in result:
                sums[name]["does not open"] += 1
            elif result.get("wrong", 0):
                sums[name]["wrong pictures"] += 1
            elif result.get("raised", 0):
                sums[name]["raises"] += 1
            else:
                sums[name]["all right"] += 1
        print(path.name, *cells, sep=" | ", file=sys.stderr)
        rows.append(f"| {path.name} | {frames} | " + " | ".join(cells) + " |")
    head = "| file | frames | " + " | ".join(readers) + " |"
    rule = "|---" * (len(readers) + 2) + "|"
    total = [
        f"| **{kind}** (files) | | " + " | ".join(str(sums[name][kind]) for name in readers) + " |"
        for kind in ("all right", "wrong pictures", "raises", "does not open")
    ]
    return [f"## {title}", "", head, rule, *total, *rows, ""]


if __name__ == "__main__":
    main()
