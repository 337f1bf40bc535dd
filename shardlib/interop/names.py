"""Names of leaves in files of other tools: a table of pairs, ours and theirs, that is read in both directions."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardlib.errors import TreeError, listing, nearest


@dataclass(frozen=True)
class Names:
    """Pairs of patterns, such as `params.blocks.*.w_in` and `model.layers.*.mlp.weight`: a `*` stands for one name, a
    `**` for any. What fits no pair keeps its name. Ours may have one `*` more: then theirs is one tensor, and ours its
    layers along the first dimension, which the last `*` counts."""

    pairs: Sequence[tuple[str, str]] = ()

    @classmethod
    def of(cls, table: Mapping[str, str] | str | os.PathLike[str] | None) -> "Names":
        """From a mapping, ours to theirs, or a file: a pair on each line, blanks between, `#` before a comment."""
        if isinstance(table, (str, os.PathLike)):
            lines = [line.split("#")[0].split() for line in Path(table).read_text().splitlines()]
            for number, words in enumerate(lines, 1):
                if len(words) not in (0, 2):
                    raise TreeError(f"line {number} of {table} is `{' '.join(words)}`; write two patterns: ours theirs")
            pairs = [(words[0], words[1]) for words in lines if words]
        else:
            pairs = [*(table or {}).items()]
        for ours, theirs in pairs:
            one, other = _stars(ours), _stars(theirs)
            if one != other and (not one or one[-1] != "*" or one[:-1] != other):
                raise TreeError(
                    f"names: `{ours}` and `{theirs}` must have the same `*` and `**`, or ours a last `*` more"
                )
        return cls(pairs)

    def theirs(self, names: Sequence[str]) -> dict[str, str | list[str]]:
        """Their names, each with our name, or with those of the layers that it holds, in order."""
        self._used([ours for ours, _ in self.pairs], names)
        out: dict[str, str | list[str]] = {}
        layers: dict[str, dict[int, str]] = {}
        for name in names:
            pairs = ((ours, theirs, m) for ours, theirs in self.pairs if (m := _match(ours, name)))
            ours, theirs, match = next(pairs, (name, name, None))
            found = _filled(theirs, match.groups()) if match else name
            if match and len(_stars(ours)) > len(_stars(theirs)):
                layers.setdefault(found, {})[_number(match.groups()[-1], name, ours)] = name
            elif found in out:
                raise TreeError(f"names: {listing([out[found], name])} would both be `{found}`")
            else:
                out[found] = name
        for found, held in layers.items():
            if sorted(held) != [*range(len(held))] or found in out:
                raise TreeError(f"names: `{found}` would hold {listing(held.values())}, which are not layers from 0 on")
            out[found] = [held[i] for i in range(len(held))]
        return out

    def ours(self, names: Sequence[str]) -> dict[str, str]:
        """Our name for each of theirs; a `*` is left in it where theirs holds layers."""
        self._used([theirs for _, theirs in self.pairs], names)
        out: dict[str, str] = {}
        for name in names:
            pairs = ((ours, match) for ours, theirs in self.pairs if (match := _match(theirs, name)))
            ours, match = next(pairs, (name, None))
            out[name] = _filled(ours, match.groups()) if match else name
        for name in out:
            if same := [other for other in out if other != name and out[other] == out[name]]:
                raise TreeError(f"names: {listing([name, *same])} would all be `{out[name]}`")
        return out

    def _used(self, patterns: Iterable[str], names: Sequence[str]) -> None:
        for p in patterns:
            if not any(_match(p, name) for name in names):
                raise TreeError(f"names: `{p}` fits no leaf{nearest(p, names)}; there are {listing(names[:12])}")


def _stars(pattern: str) -> list[str]:
    return [p for p in pattern.split(".") if p in ("*", "**")]


def _match(pattern: str, name: str) -> re.Match[str] | None:
    kinds = {"*": r"([^.]+)", "**": r"(.+)"}
    return re.fullmatch(r"\.".join(kinds.get(p) or re.escape(p) for p in pattern.split(".")), name)


def _filled(pattern: str, groups: Sequence[str]) -> str:
    """Without its stars, as far as there are groups for them."""
    rest = iter(groups)
    return ".".join(next(rest, p) if p in ("*", "**") else p for p in pattern.split("."))


def _number(text: str, name: str, pattern: str) -> int:
    if not text.isdigit():
        raise TreeError(f"names: the last `*` of `{pattern}` counts layers; `{name}` has `{text}` there")
    return int(text)
