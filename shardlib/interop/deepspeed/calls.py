"""Calls of the library as data: what `load` makes and `explain` prints is one thing."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from shardlib import optim
from shardlib.loss_scale import dynamic_scale
from shardlib.monitor import monitor
from shardlib.precision import precision
from shardlib.zero import Layout, split, zero

NAMES = {
    "optim": optim,
    "dynamic_scale": dynamic_scale,
    "monitor": monitor,
    "precision": precision,
    "Layout": Layout,
    "split": split,
    "zero": zero,
}
WIDTH = 120


@dataclass(frozen=True)
class Call:
    """`sl.name(*args, **kwargs)`; arguments are literals, lists and dicts of such, `Name`s and `Call`s. `field`: of
    what it returns, this attribute."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    field: str = ""


@dataclass(frozen=True)
class Name:
    """A variable of the code around."""

    name: str


def call(name: str, *args: Any, field: str = "", **kwargs: Any) -> Call:
    """A call that passes on every argument that is not None."""
    return Call(name, args, {k: v for k, v in kwargs.items() if v is not None}, field)


def value(x: Any, scope: Mapping[str, Any]) -> Any:
    """What the expression evaluates to, where `scope` has its variables."""
    if isinstance(x, Name):
        return scope[x.name]
    if isinstance(x, list):
        return [value(item, scope) for item in x]
    if isinstance(x, dict):
        return {value(k, scope): value(v, scope) for k, v in x.items()}
    if not isinstance(x, Call):
        return x
    first, *rest = x.name.split(".")
    function = reduce(getattr, rest, NAMES[first])
    made = function(*value(list(x.args), scope), **{k: value(v, scope) for k, v in x.kwargs.items()})
    return getattr(made, x.field) if x.field else made


def code(x: Any, indent: int = 0, used: int = 0) -> str:
    """The expression as source, broken into lines where it is longer than a line that begins with `used` characters."""
    if isinstance(x, Name):
        return x.name
    if isinstance(x, Call):
        items = [("", a) for a in x.args] + [(f"{k}=", v) for k, v in x.kwargs.items()]
        return _bracketed(f"sl.{x.name}(", items, f").{x.field}" if x.field else ")", indent, used)
    if isinstance(x, list):
        return _bracketed("[", [("", a) for a in x], "]", indent, used)
    if isinstance(x, dict):
        return _bracketed("{", [(f"{code(k)}: ", v) for k, v in x.items()], "}", indent, used)
    return json.dumps(x, ensure_ascii=False) if isinstance(x, str) else repr(x)


def _bracketed(head: str, items: list[tuple[str, Any]], tail: str, indent: int, used: int) -> str:
    line = head + ", ".join(label + code(v) for label, v in items) + tail
    if max(indent, used) + len(line) <= WIDTH and "\n" not in line:
        return line
    inner = indent + 4
    lines = [f"{' ' * inner}{label}{code(v, inner, inner + len(label))},\n" for label, v in items]
    return f"{head}\n{''.join(lines)}{' ' * indent}{tail}"
