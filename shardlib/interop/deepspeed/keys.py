"""The table of keys as values: what each key takes, and what becomes of it."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardlib.errors import listing
from shardlib.interop.deepspeed import sections, table

HONOURED, NOT_NEEDED, REJECTED = "honoured", "not needed", "rejected"
AUTO = "auto"


@dataclass(frozen=True)
class Key:
    """A row of the table, for one key. `kind`: what a value is. `harmless`: values at which a rejected key is not.
    `auto`: the name under which `load(auto=)` gives what the config leaves open (None: nothing to give); `optional`:
    it may also stay open. `under`: the key with which this one stands and falls."""

    path: str
    kind: str
    status: str
    text: str
    harmless: tuple[Any, ...] = ()
    auto: str | None = None
    optional: bool = False
    under: str = ""

    def rejects(self, value: Any) -> bool:
        """Whether a config with this value cannot be honoured."""
        return self.status == REJECTED and not self.under and not any(_same(value, x) for x in self.harmless)

    def expected(self, value: Any) -> str:
        """What the key takes, in words, where `value` is something else; empty where it is right."""
        kind = self.kind.removesuffix("?")
        if (value is None and kind != self.kind) or kind == "any":
            return ""
        for form, (fits, words) in FORMS.items():
            if found := re.fullmatch(form, kind):
                return "" if fits(value, *found.groups()) else words.format(*found.groups())
        choices = kind.split("|")
        fits = not isinstance(value, bool) and str(value).lower() in [c.lower() for c in choices]
        return "" if fits else f"one of {listing(choices)}"


def _same(a: Any, b: Any) -> bool:
    """JSON's equality: `false` is not 0."""
    if isinstance(a, str) and isinstance(b, str):
        return a.lower() == b.lower()
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _at_least(value: Any, sign: str | None, bound: str | None) -> bool:
    return not sign or (value > float(bound or 0) if sign == ">" else value >= float(bound or 0))


FORMS = {  # a kind: whether a value is of it, and how it is called
    "bool": (lambda v: isinstance(v, bool), "true or false"),
    r"int(?:(>=?)(\d+))?": (
        lambda v, sign, n: _number(v) and v == int(v) and _at_least(v, sign, n),
        "a whole number {0} {1}",
    ),
    r"number(?:(>=?)(\d+))?": (lambda v, sign, n: _number(v) and _at_least(v, sign, n), "a number {0} {1}"),
    "pair": (
        lambda v: isinstance(v, list | tuple) and len(v) == 2 and all(_number(x) and 0 <= x < 1 for x in v),
        "two numbers from 0 to below 1",
    ),
    "text": (lambda v: isinstance(v, str), "a string"),
    "list": (lambda v: isinstance(v, list), "a list"),
}


def keys_of(text: str) -> Iterator[Key]:
    """The keys of a part of the table."""
    for line in re.sub(r"\n +", " ", text).strip().splitlines():
        names, kind, status, how = (cell.strip() for cell in f"{line} ".split(" | ", 3))
        kind, given, auto = kind.partition(" auto=")
        status, _, harmless = status.partition(" unless ")
        under = status.removeprefix("with ") if status.startswith("with ") else ""
        for path in expanded(names):
            yield Key(
                path,
                kind,
                REJECTED if under else status,
                f"with `{under}`" if under else how,
                harmless=tuple(json.loads(x) for x in harmless.split("|") if x),
                auto=auto.removesuffix("?") if given else None,
                optional=auto.endswith("?"),
                under=under,
            )


def expanded(names: str) -> list[str]:
    """`a.{b,c}.d` as its two paths."""
    head, brace, rest = names.partition("{")
    if not brace:
        return [names]
    inner, _, tail = rest.partition("}")
    return [head + name + end for name in inner.split(",") for end in expanded(tail)]


PARTS = {
    "Batch and gradients": table.BATCH,
    "Optimizer and schedule": table.OPTIMIZER,
    "Precision": table.PRECISION,
    "ZeRO": table.ZERO,
    "The run": sections.RUN,
    "The model": sections.MODEL,
    "Data, tuning, and what DeepSpeed has removed": sections.DATA,
}
KEYS = {key.path: key for text in PARTS.values() for key in keys_of(text)}
