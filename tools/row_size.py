"""Measure what index rows cost on disk, over a folder of files and over made long ones.

    python tools/row_size.py --corpus DIR --out docs/evidence/01-row-size.md

Each row is written into a table of its own (Lance, Arrow IPC with zstd); the per-sample columns are measured
as a table of those columns alone.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
import tempfile
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.ipc

import fluxon_gop as fg
from fluxon_gop import index_rows, packed_row
from fluxon_gop.encode import Recipe, numbered_picture, write_video

GOP = ["moov_range", "gop_frame_idx", "gop_byte_offset"]
SAMPLES = [
    "sample_size",
    "sample_gap",
    "sample_duration",
    "composition_offset",
    "sample_entry",
    "hidden_samples",
]


def lance_bytes(table: pa.Table, folder: Path) -> int:
    """Return the bytes of the data files of a Lance data set that holds ``table``."""
    target = folder / f"{np.random.default_rng().integers(1 << 60)}.lance"
    lance.write_dataset(table, str(target))
    return sum(file.stat().st_size for file in (target / "data").iterdir())


def arrow_bytes(table: pa.Table) -> int:
    """Return the bytes of an Arrow IPC file with zstd that holds ``table``."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as out:
        out.write_table(table)
    return int(sink.getvalue().size)


def sizes(table: pa.Table, folder: Path) -> tuple[int, int]:
    """Return (Lance, Arrow) bytes of the rows, those of a table without rows taken off."""
    empty = table.slice(0, 0)
    base = pa.BufferOutputStream()
    with pa.ipc.new_file(base, table.schema) as out:
        out.write_table(empty)
    return lance_bytes(table, folder), arrow_bytes(table) - int(base.getvalue().size)


def made(folder: Path) -> dict[str, Path]:
    """Encode the long files: an hour with interleaved audio, and twenty minutes of VFR, both with B-frames."""
    generator = np.random.default_rng(1)

    def pictures(count: int) -> object:
        noise = generator.integers(0, 40, (72, 128, 3), dtype=np.uint8)
        return (numbered_picture(n, 128, 72) + np.roll(noise, n * 7, 0) for n in range(count))

    options = {"preset": "ultrafast", "g": "128", "bf": "2"}
    times = np.cumsum(generator.integers(1, 5, 36_000)).tolist()
    files = {
        "1 h, 30 fps, interleaved audio": (108_000, Recipe(rate=30, options=options, audio=True), None),
        "20 min VFR, B-frames": (36_000, Recipe(rate=90, options=options), times),
        "35 GOPs of 128 (an episode)": (35 * 128, Recipe(rate=30, options=options), None),
        "10 min, GOP 2": (
            18_000,
            Recipe(rate=30, options={"preset": "ultrafast", "g": "2", "bf": "0"}),
            None,
        ),
    }
    result = {}
    for number, (name, (count, recipe, when)) in enumerate(files.items()):
        path = folder / f"long{number}.mp4"
        write_video(path, pictures(count), recipe, times=when)  # type: ignore[arg-type]
        result[name] = path
    return result


def row(name: str, index: fg.VideoIndex, folder: Path) -> str:
    """Return one line of the table."""
    table = index_rows.encode([(name, index)])
    plain = 16 + 12 * len(index.key_samples)
    samples, whole = sizes(table.select(SAMPLES), folder), sizes(table, folder)
    frames = max(index.num_samples, 1)
    value, numbers = packed_bytes(table)
    return (
        f"| {name} | {index.num_samples:,} | {len(index.key_samples):,} | {plain:,} "
        f"| {samples[0] / frames:.2f} / {samples[1] / frames:.2f} | {numbers / frames:.2f} | {value:,} "
        f"| {whole[0] + value:,} / {whole[1]:,} |"
    )


def packed_bytes(table: pa.Table) -> tuple[int, int]:
    """Return the bytes of the rows' packed values, and of the long lists in them."""
    values = packed_row.fitted(table, packed_row.PACKED_SCHEMA.names).column(packed_row.PACKED).to_pylist()
    heads = sum(20 + int.from_bytes(value[16:20], "little") for value in values)
    return sum(map(len, values)), sum(map(len, values)) - heads


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--corpus", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines = [
        "# Size of index rows on disk",
        "",
        f"`python tools/row_size.py --corpus DIR`, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}; Python "
        f"{platform.python_version()}, pyarrow {pa.__version__}, pylance {lance.__version__}.",
        "Lance / Arrow IPC (zstd), each row in a table of its own, whose fixed part (Lance: the whole data file's)",
        "is counted in. GOP columns as plain Arrow values: 16 bytes, and 4 + 8 a GOP. Lance tables have each row packed",
        "too, in one value: its long lists are the second number of bytes a sample.",
        "",
        "| file | samples | GOPs | GOP columns, bytes | per-sample columns, bytes a sample | packed, bytes a sample "
        "| packed row, bytes | whole row, bytes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, path in made(folder).items():
            lines.append(row(name, fg.build_index(path), folder))
        packet: list[tuple[str, fg.VideoIndex]] = []
        for file in sorted(args.corpus.iterdir()) if args.corpus else ():
            try:
                index = fg.build_index(file)
            except fg.Mp4Error:
                continue
            if index.container_reason is None:
                packet.append((file.name, index))
        for name, index in sorted(packet, key=lambda item: -item[1].num_samples)[:8]:
            lines.append(row(name, index, folder))
        if packet:
            table = index_rows.encode(packet)
            samples = sum(index.num_samples for _, index in packet)
            part, whole = sizes(table.select(SAMPLES), folder), sizes(table, folder)
            gops = sizes(table.select(GOP), folder)
            value, numbers = packed_bytes(table)
            lines += [
                "",
                f"All {len(packet)} corpus files of the packet path in one table ({samples:,} samples): per-sample "
                f"part {part[0] / samples:.2f} / {part[1] / samples:.2f} bytes a sample; GOP columns "
                f"{gops[0] // len(packet)} / {gops[1] // len(packet)} bytes a row; whole table "
                f"{whole[0]:,} / {whole[1]:,} bytes; packed rows in Lance {value:,} bytes more, of which the long "
                f"lists {numbers / samples:.2f} bytes a sample.",
            ]
    text = "\n".join(lines) + "\n"
    print(text, file=sys.stderr)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
