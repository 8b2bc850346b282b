"""Pictures for people: frames side by side with their numbers, and a plan drawn over its files.

Pillow only. Arrays are uint8 (H, W, 3) RGB.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from fluxon_gop.batch_plan import BatchPlan, PlannedVideo
from fluxon_gop.model import Verdict, VideoIndex

UInt8Array = npt.NDArray[np.uint8]
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
Colour = tuple[int, int, int]

PAPER: Colour = (255, 255, 255)
INK: Colour = (31, 41, 55)
FAINT: Colour = (107, 114, 128)
LINE: Colour = (209, 213, 219)
UNREAD: Colour = (226, 232, 240)
FETCHED: Colour = (37, 99, 235)
MOVIE_BOX: Colour = (217, 119, 6)

MARGIN = 24
GAP = 8
PLAN_WIDTH = 1080
BAR_HEIGHT = 26
MIN_CELL = 64
"""Narrower cells have no room for a frame number."""


class Strip(NamedTuple):
    """Pictures under one title, each with its label."""

    title: str
    cells: Iterable[tuple[str, UInt8Array]]


def contact_sheet(strips: Iterable[Strip], *, columns: int = 8, cell_width: int = 160) -> Image.Image:
    """Return one image of all pictures, ``columns`` a row, each with its label underneath.

    Larger pictures are shrunk to ``cell_width`` as they come, so that only small ones are held.
    """
    label_font, title_font = _font(13), _font(17)
    drawn = [(s.title, [(label, _thumbnail(p, cell_width)) for label, p in s.cells]) for s in strips]
    pictures = [picture for _, cells in drawn for _, picture in cells]
    cell = max([MIN_CELL, *(p.width for p in pictures)])
    across = min(columns, max([1, *(len(cells) for _, cells in drawn)]))
    width = 2 * MARGIN + across * cell + (across - 1) * GAP
    title_height, label_height = 30, 24
    rows = [
        (title if start == 0 else "", cells[start : start + columns])
        for title, cells in drawn
        for start in range(0, max(len(cells), 1), columns)
    ]
    heights = [
        (title_height if title else 0) + max([0, *(p.height for _, p in cells)]) + label_height
        for title, cells in rows
    ]
    sheet = Image.new("RGB", (width, sum(heights) + 2 * MARGIN), PAPER)
    draw = ImageDraw.Draw(sheet)
    top = MARGIN
    for (title, cells), height in zip(rows, heights, strict=True):
        place = top
        if title:
            draw.text(
                (MARGIN, place), _fitted(draw, title, title_font, width - 2 * MARGIN), INK, title_font
            )
            place += title_height
        for column, (label, picture) in enumerate(cells):
            left = MARGIN + column * (cell + GAP) + (cell - picture.width) // 2
            sheet.paste(picture, (left, place))
            middle = left + picture.width / 2
            draw.text((middle, place + picture.height + 3), label, FAINT, label_font, anchor="ma")
        top += height
    return sheet


def sheet_of(title: str, numbers: Sequence[int], pictures: Iterable[UInt8Array]) -> Image.Image:
    """Return the contact sheet of frames of one video, labelled with their numbers."""
    return contact_sheet([Strip(title, ((str(n), p) for n, p in zip(numbers, pictures, strict=True)))])


def plan_picture(plan: BatchPlan, indexes: Mapping[str, VideoIndex]) -> Image.Image:
    """Return the picture of a plan: a bar a file, as long as the file is large, its fetched ranges coloured.

    Args:
        plan: see ``VideoReaderPool.explain``.
        indexes: by the videos' names in the plan; a video without one is listed without a bar.
    """
    row_height, head_height, foot_height = 68, 84, 56
    height = head_height + row_height * len(plan.videos) + foot_height
    image = Image.new("RGB", (PLAN_WIDTH, height), PAPER)
    draw = ImageDraw.Draw(image)
    frames = sum(video.frames for video in plan.videos)
    sizes = [index.signature.size for v in plan.videos if (index := indexes.get(v.name))]
    draw.text(
        (MARGIN, 18), f"{_count(frames, 'frame')} of {_count(len(plan.videos), 'video')}", INK, _font(22)
    )
    totals = (
        f"{_count(plan.waves, 'wave')}   ·   {_count(plan.requests, 'request')}   ·   {plan.nbytes:,} of {sum(sizes):,} bytes "
        f"({_share(plan.nbytes, sum(sizes))})   ·   {plan.over_read:.2f} of what is needed"
    )
    draw.text((MARGIN, 50), totals, FAINT, _font(15))
    longest = max([1, *sizes])
    for number, video in enumerate(plan.videos):
        _draw_video(draw, head_height + number * row_height, video, indexes.get(video.name), longest)
    bottom = height - foot_height + 20
    left = MARGIN
    for colour, words in (
        (FETCHED, "fetched"),
        (UNREAD, "not read"),
        (MOVIE_BOX, "movie box: the index holds it, not read"),
    ):
        draw.rectangle((left, bottom, left + 15, bottom + 15), colour)
        draw.text((left + 23, bottom - 1), words, INK, _font(14))
        left += 23 + int(draw.textlength(words, _font(14))) + 32
    note = "a bar is as long as its file"
    draw.text((PLAN_WIDTH - MARGIN, bottom - 1), note, FAINT, _font(14), anchor="ra")
    return image


def _draw_video(
    draw: ImageDraw.ImageDraw, top: int, video: PlannedVideo, index: VideoIndex | None, longest: int
) -> None:
    """Draw one video's line of text and its bar."""
    full = PLAN_WIDTH - 2 * MARGIN
    cost = f"{_count(video.frames, 'frame')}   {_count(video.requests, 'request')}   {video.nbytes:,} bytes"
    if index is not None:
        cost += f" of {index.signature.size:,} ({_share(video.nbytes, index.signature.size)})"
    draw.text((PLAN_WIDTH - MARGIN, top), cost, FAINT, _font(14), anchor="ra")
    name = PurePosixPath(video.name).name + (f"   ({video.note})" if video.note else "")
    room = full - draw.textlength(cost, _font(14)) - 2 * GAP
    draw.text((MARGIN, top - 1), _fitted(draw, name, _font(15), room), INK, _font(15))
    if index is None:
        return
    scale, bar = full / longest, top + 22

    def stretch(start: int, stop: int, colour: Colour) -> None:
        left, right = MARGIN + start * scale, MARGIN + stop * scale
        # A range of a few bytes is still seen.
        draw.rectangle((left, bar, max(left + 1, right - 1), bar + BAR_HEIGHT - 1), colour)

    stretch(0, index.signature.size, UNREAD)
    stretch(*index.moov_range, MOVIE_BOX)
    for wanted in video.plan.ranges if video.plan else ():
        stretch(*wanted, FETCHED)
    right = MARGIN + index.signature.size * scale
    draw.rectangle((MARGIN, bar, right - 1, bar + BAR_HEIGHT - 1), outline=LINE)


def _thumbnail(picture: UInt8Array, width: int) -> Image.Image:
    image = Image.fromarray(picture)
    if image.width > width:
        height = max(round(image.height * width / image.width), 1)
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    return image


def _font(size: int) -> Font:
    return ImageFont.load_default(size)


def _fitted(draw: ImageDraw.ImageDraw, text: str, font: Font, room: float) -> str:
    """Cut text that is longer than ``room`` pixels, with dots at its end."""
    if draw.textlength(text, font) <= room:
        return text
    while text and draw.textlength(text + "...", font) > room:
        text = text[:-1]
    return text + "..."


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


PROVEN: Colour = (22, 163, 74)
UNPROVEN: Colour = (202, 138, 4)
REFUTED: Colour = (220, 38, 38)
MAP_COLUMNS = 120
"""Samples of a line of a GOP map."""


def gop_map(name: str, index: VideoIndex) -> Image.Image:
    """Return a picture of a video's GOPs: a cell a sample in decode order, key samples coloured by their verdict.

    Green: proven; amber: not checked; red: refuted, so that decoding starts before it. O(samples).
    """
    cell, first, stop = 7, *index.stream
    lines = max(-(-(stop - first) // MAP_COLUMNS), 1)
    lengths = index.gop_lengths
    font = _font(13)
    image = Image.new(
        "RGB", (2 * MARGIN + MAP_COLUMNS * (cell + 1), 2 * MARGIN + 44 + lines * (cell + 3)), PAPER
    )
    draw = ImageDraw.Draw(image)
    draw.text((MARGIN, MARGIN), name, INK, _font(17))
    shortest, longest = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
    text = f"{index.num_samples} samples, {len(lengths)} GOPs of {shortest} to {longest}; {MAP_COLUMNS} samples a line"
    draw.text((MARGIN, MARGIN + 22), text, FAINT, font)
    for sample in range(first, stop):
        line, column = divmod(sample - first, MAP_COLUMNS)
        left, top = MARGIN + column * (cell + 1), MARGIN + 48 + line * (cell + 3)
        verdict = index.verdict_of(sample)
        colour = UNREAD
        if verdict is not None:
            colour = {Verdict.UNCHECKED: UNPROVEN, Verdict.REFUSED: REFUTED}.get(verdict, PROVEN)
        draw.rectangle((left, top, left + cell - 1, top + cell - 1), colour)
    return image


def gop_text(index: VideoIndex, *, columns: int = 64) -> str:
    """Return the same in characters: ``#`` proven, ``?`` not checked, ``x`` refuted, ``.`` any other sample."""
    first, stop = index.stream
    marks = np.full(stop - first, ".", "U1")
    for sample, verdict in zip(index.key_samples.tolist(), index.verdicts.tolist(), strict=True):
        if first <= sample < stop:
            marks[sample - first] = {Verdict.UNCHECKED: "?", Verdict.REFUSED: "x"}.get(
                Verdict(verdict), "#"
            )
    text = "".join(marks)
    return "\n".join(f"{first + at:8}  {text[at : at + columns]}" for at in range(0, len(text), columns))
