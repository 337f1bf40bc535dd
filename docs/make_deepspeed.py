"""Writes the table of keys in docs/deepspeed.md, from the one that the reader of configs uses.

python docs/make_deepspeed.py
"""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from shardlib.interop.deepspeed.keys import HONOURED, KEYS, NOT_NEEDED, PARTS, REJECTED, Key, keys_of

PAGE = Path(__file__).with_name("deepspeed.md")
HEAD = "## Every key\n"


def row(keys: Sequence[Key]) -> str:
    """Keys of which the same is said."""
    first = keys[0]
    unless = " or ".join(f"`{x}`" for x in ("null" if v is None else str(v).lower() for v in first.harmless))
    status = f"{first.status} unless {unless}" if unless else first.status
    return f"| {', '.join(f'`{k.path}`' for k in keys)} | {status} | {first.text.replace('|', chr(92) + '|')} |"


def table() -> str:
    """A table for each part, after the numbers of keys."""
    counts = [f"{sum(k.status == s for k in KEYS.values())} {s}" for s in (HONOURED, NOT_NEEDED, REJECTED)]
    lines = [f"{len(KEYS)} keys: {', '.join(counts)}. `python docs/make_deepspeed.py` writes what follows.", ""]
    for name, text in PARTS.items():
        lines += [f"### {name}", "", "| key | | |", "|---|---|---|"]
        same = groupby(keys_of(text), key=lambda k: (k.status, k.text, k.harmless))
        lines += [*(row(list(keys)) for _, keys in same), ""]
    return "\n".join(lines)


def page() -> str:
    """The page as it stands, with the table as it is now."""
    return PAGE.read_text().split(HEAD)[0] + f"{HEAD}\n{table()}"


if __name__ == "__main__":
    PAGE.write_text(page())
