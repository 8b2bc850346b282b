"""Read epochs with DataLoader workers that are killed, loops that are left, and states that are taken up again.

    python tools/chaos_loader.py --epochs 60 --seed 11

Each epoch draws how workers start, how many there are, batch size, look-ahead, local files or HTTP with latency, which
videos; kills a worker, or leaves the loop, after a random batch, and goes on in a new loader with the last state. Every
clip must come exactly once, in the sampler's order, every frame equal to FFmpeg's full decode.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import av
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import fluxon_gop as fg  # noqa: E402
from fluxon_gop.encode import Recipe, numbered_picture, write_video  # noqa: E402
from tools.range_server import RangeServer  # noqa: E402

X264 = {"preset": "ultrafast", "bf": "2", "sc_threshold": "0"}
RECIPES = {
    "closed": Recipe(options={**X264, "g": "12"}),
    "gop2": Recipe(options={"preset": "ultrafast", "g": "2", "bf": "0"}),
    "open": Recipe(
        options={"preset": "veryfast", "x264-params": "open-gop=1:keyint=12:min-keyint=12:bframes=3"}
    ),
    "long": Recipe(options={"preset": "ultrafast", "g": "1000"}),
    "hevc": Recipe(
        codec="libx265",
        tag="hvc1",
        options={"preset": "ultrafast", "x265-params": "keyint=12:log-level=none"},
    ),
    "fragments": Recipe(
        options={**X264, "g": "12"}, container_options={"movflags": "frag_keyframe+empty_moov"}
    ),
}


def decoded(path: Path) -> np.ndarray[Any, Any]:
    """Return FFmpeg's every frame."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.thread_type = "NONE"
        return np.stack(
            [
                frame.reformat(format="rgb24", interpolation="BILINEAR", threads=1).to_ndarray()
                for frame in container.decode(stream)
            ]
        )


def epoch(
    draw: random.Random,
    uris: list[str],
    truth: list[np.ndarray[Any, Any]],
    *,
    local: bool,
    told: Counter[str],
) -> None:
    """Read one epoch through whatever happens; raises AssertionError where a clip or a frame is wrong."""
    chosen = draw.sample(range(len(uris)), draw.randint(2, len(uris)))
    clips = fg.Windows(draw.randint(1, 6), draw.randint(2, 9), draw.randint(1, 3))
    data = fg.ClipDataset([uris[n] for n in chosen], clips)
    workers = draw.randint(0, 3)
    make: dict[str, Any] = {
        "batch_size": draw.randint(1, 9),
        "shuffle": draw.random() < 0.8,
        "seed": draw.randrange(1000),
        "num_workers": workers,
        "look_ahead": draw.randint(0, 2),
        "start_method": draw.choice(["fork", "spawn", "forkserver"] if local else ["spawn", "forkserver"]),
        "persistent_workers": workers > 0 and draw.random() < 0.5,
    }
    told[f"{'local' if local else 'http'}, {make['start_method'] if workers else 'here'}"] += 1
    seen: list[int] = []
    state = None
    while True:
        loader = fg.ClipLoader(data, **make)
        if state is not None:
            loader.load_state_dict(state)
        state = loader.state_dict()
        fault = draw.choice(["kill", "leave", "none"]) if told["faults"] < told["epochs"] * 3 else "none"
        after = draw.randint(1, max(len(loader), 1))
        ended = True
        try:
            for number, batch in enumerate(loader, 1):
                for frames, video, numbers in zip(
                    batch["frames"], batch["video"], batch["frame_numbers"], strict=True
                ):
                    assert np.array_equal(truth[chosen[int(video)]][numbers.numpy()], frames.numpy()), (
                        make,
                        batch["clip"],
                    )
                seen += batch["clip"].tolist()
                told["batches"] += 1
                state = loader.state_dict()
                if number == after and fault == "leave":
                    told["faults"] += 1
                    told["loops left"] += 1
                    ended = False
                    break
                if number == after and fault == "kill" and workers:
                    told["faults"] += 1
                    told["workers killed"] += 1
                    victims = [
                        p for p in multiprocessing.active_children() if p.pid and "Process" in p.name
                    ]
                    if victims:
                        os.kill(draw.choice(victims).pid or 0, signal.SIGKILL)
                        time.sleep(0.05)
        except RuntimeError as error:
            if "killed" not in str(error) and "exited unexpectedly" not in str(error):
                raise
            ended = False
        del loader
        if ended or state["epoch"] == 1:
            break
    expected = fg.ClipSampler(data, shuffle=make["shuffle"], seed=make["seed"])
    assert list(expected) == seen, f"{make}: {len(seen)} clips came of {len(data)}"
    told["clips"] += len(seen)
    data.close()


def campaign(epochs: int, seed: int) -> dict[str, int]:
    """Read epochs; return what was read and what happened. Raises where a clip or a frame is wrong."""
    started = time.monotonic()
    told: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, recipe in RECIPES.items():
            write_video(folder / f"{name}.mp4", (numbered_picture(n, 128, 96) for n in range(60)), recipe)
        truth = [decoded(folder / f"{name}.mp4") for name in RECIPES]
        for number in range(epochs):
            told["epochs"] += 1
            draw = random.Random(f"{seed} {number}")
            local = draw.random() < 0.6
            with nullcontext() if local else RangeServer(folder, latency_s=0.005) as server:
                place = "" if server is None else server.url("")
                uris = [f"{place}{name}.mp4" if place else str(folder / f"{name}.mp4") for name in RECIPES]
                epoch(draw, uris, truth, local=local, told=told)
    told["seconds"] = round(time.monotonic() - started)
    return dict(told)


def main(argv: list[str] | None = None) -> int:
    """Run epochs and print what was read."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=11)
    given = parser.parse_args(argv)
    warnings.filterwarnings("ignore", "This DataLoader will create")
    print(json.dumps(campaign(given.epochs, given.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
