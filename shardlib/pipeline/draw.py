"""Timelines as text and as SVG. Plain data."""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from shardlib.pipeline.actions import MEANS

COLOURS = {"F": "#4c78a8", "B": "#54a24b", "I": "#72b7b2", "W": "#eeca3b"}


class Box(NamedTuple):
    """One action of a row: its kind, which of the rank's stages, the micro-batch, from when to when."""

    kind: str
    chunk: int
    microbatch: int
    start: float
    end: float


def text(rows: Sequence[Sequence[Box]]) -> str:
    """A line for each row, a column for each unit of time: `F0`, `B0`; `f0`, `b0` for the stages after the first."""
    least = min((b.end - b.start for row in rows for b in row if b.end > b.start), default=1.0)
    width = 2 + max((len(str(b.microbatch)) for row in rows for b in row), default=1)
    lines = []
    for number, row in enumerate(rows):
        line = f"{number:>3} "
        for b in row:
            label = (b.kind.lower() if b.chunk % 2 else b.kind) + str(b.microbatch)
            begin, cells = 4 + round(b.start / least) * width, max(1, round((b.end - b.start) / least)) * width
            line = line.ljust(begin, " " if not line.strip() else "·" if len(line) > 4 else " ") + label.ljust(cells)
        lines.append(line.rstrip())
    return "\n".join(lines)


def svg(rows: Sequence[Sequence[Box]], title: str, unit: int = 26, height: int = 26) -> str:
    """Boxes in the colour of their kind, paler for the stages after the first, in a picture of its own."""
    end = max((b.end for row in rows for b in row), default=1.0)
    least = min((b.end - b.start for row in rows for b in row if b.end > b.start), default=1.0)
    scale, left, top = unit / least, 54, 34
    kinds = [k for k in COLOURS if any(b.kind == k for row in rows for b in row)]
    wide, tall = int(left + end * scale + 12), top + len(rows) * (height + 4) + 34
    wide = max(wide, 8 * len(title) + 20, left + 150 * len(kinds) + 210)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{tall}" font-family="sans-serif" '
        f'font-size="12"><rect width="{wide}" height="{tall}" fill="white"/>',
        f'<text x="8" y="20" font-size="13">{escape(title)}</text>',
    ]
    for number, row in enumerate(rows):
        y = top + number * (height + 4)
        out.append(f'<text x="8" y="{y + height * 0.7:.0f}">rank {number}</text>')
        out.append(f'<rect x="{left}" y="{y}" width="{end * scale:.1f}" height="{height}" fill="#eeeeee"/>')
        for b in row:
            x, w = left + b.start * scale, (b.end - b.start) * scale
            shade = 0.95 if b.chunk == 0 else 0.55
            out.append(
                f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="{height}" fill="{COLOURS[b.kind]}" '
                f'fill-opacity="{shade}" stroke="white"/>'
                f'<text x="{x + w / 2:.1f}" y="{y + height * 0.68:.0f}" text-anchor="middle">{b.microbatch}</text>'
            )
    for i, kind in enumerate(kinds):
        x, y = left + i * 150, tall - 24
        out.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{COLOURS[kind]}"/>')
        out.append(f'<text x="{x + 20}" y="{y + 12}">{MEANS[kind]}</text>')
    if any(b.chunk for row in rows for b in row):
        out.append(f'<text x="{left + 150 * len(kinds)}" y="{tall - 12}">paler: a later stage of the rank</text>')
    return "\n".join([*out, "</svg>\n"])
