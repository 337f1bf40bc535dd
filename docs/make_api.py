"""Writes docs/api.md: every public name, its signature, the first line of its docstring.

python docs/make_api.py
"""

import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import shardlib as sl

HEAD = """# Every public name

Signatures, and the first line of each docstring: `help(sl.step)` has the rest, with shapes, units and errors.
`python docs/make_api.py` writes this page.
"""
MODULES = {"optim": sl.optim, "random": sl.random, "schedules": sl.schedules, "debug": sl.debug, "testing": sl.testing}


def signature(name: str, x: Any) -> str:
    """`name(parameters)`, without types and defaults that are objects."""
    if isinstance(x, type) and issubclass(x, BaseException):
        return name
    try:
        parameters = inspect.signature(x).parameters.values()
    except (TypeError, ValueError):
        return name
    said, starred = [], False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not starred:
            said.append("*")
        starred |= p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        plain = p.default in ((), None) or isinstance(p.default, (int, float, str))
        default = "" if p.default is p.empty else f"={p.default!r}" if plain else "=..."
        said.append(f"{stars}{p.name}{default}")
    return f"{name}({', '.join(said)})"


def row(name: str, x: Any) -> str:
    doc = (inspect.getdoc(x) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
    first = re.split(r"(?<=\.) (?=[A-Z`])", doc)[0]
    return f"| `{signature(name, x)}` | {first} |"


def table(prefix: str, names: list[str], module: ModuleType) -> list[str]:
    return ["| name | |", "|---|---|", *(row(f"{prefix}{n}", getattr(module, n)) for n in names), ""]


def page() -> str:
    """The page: the areas of the package's docstring, then the modules."""
    lines, seen = [HEAD], set()
    for line in re.sub(r"\n {10,}", " ", inspect.getdoc(sl) or "").splitlines()[2:]:
        area, rest = line[:18].strip(), line[18:]
        names = [n for n in re.findall(r"\w+", rest) if hasattr(sl, n) and not inspect.ismodule(getattr(sl, n))]
        names = [n for n in dict.fromkeys(names) if n not in seen and area not in ("testing", "random numbers")]
        seen |= set(names)
        lines += [f"## {area.capitalize()}", "", *table("sl.", names, sl)] if names else []
    for name, module in MODULES.items():
        home = "shardlib." if hasattr(module, "__path__") else module.__name__  # a package exports what others define
        ours = [n for n, x in vars(module).items() if getattr(x, "__module__", "").startswith(home)]
        public = [n for n in ours if not n.startswith("_")]
        lines += [f"## sl.{name}", "", *table(f"sl.{name}.", sorted(public), module)]
    return "\n".join(lines)


if __name__ == "__main__":
    Path(__file__).with_name("api.md").write_text(page())
