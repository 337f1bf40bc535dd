"""The library's exceptions and the wording they share. No torch."""

import difflib
import os
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager


class ShardError(Exception):
    """Base of every error that shardlib raises on purpose."""


class SpecError(ShardError, ValueError):
    """A spec or pattern is malformed, or a value does not have the type that it states."""


class MeshError(ShardError, ValueError):
    """A mesh cannot be made, or an axis is not one of the current mesh."""


class TreeError(ShardError, ValueError):
    """Trees do not match; the message names the path."""


class RankError(ShardError, RuntimeError):
    """Ranks disagree, one of them failed, or none can go on."""


class DonatedError(ShardError, RuntimeError):
    """A donated tree is used again."""


@contextmanager
def located(where: str) -> Iterator[None]:
    """Errors of the library that are raised inside say first where: a path, an argument."""
    try:
        yield
    except ShardError as e:
        raise type(e)(f"{where}: {e}") from None


@contextmanager
def pointed() -> Iterator[None]:
    """Errors raised inside name, in a note, the innermost line that is the user's."""
    try:
        yield
    except Exception as e:
        lines = [f for f in traceback.extract_tb(e.__traceback__) if not any(part in f.filename for part in _NOT_USERS)]
        if lines and not any(n.startswith("  at ") for n in getattr(e, "__notes__", ())):
            e.add_note(f"  at {lines[-1].filename}:{lines[-1].lineno}, in {lines[-1].name}: {lines[-1].line}")
        raise


_HERE = os.path.dirname(__file__)
_NOT_USERS = (_HERE, os.sep + "torch" + os.sep, os.sep + "contextlib.py", "<")


def caret(text: str, start: int, end: int, note: str = "", label: str = "pattern") -> str:
    """`text` on one line and a caret line below it: `label: text` / `       ^^^ note`."""
    head = f"  {label + ':':<8} "
    line = re.sub(r"\s", " ", text)  # a pattern over several lines is shown on one
    return f"{head}{line}\n{' ' * (len(head) + start)}{'^' * max(1, end - start)} {note}".rstrip()


def sizes(bound: Mapping[str, int]) -> str:
    """`batch=8 seq=512`."""
    return " ".join(f"{k}={v}" for k, v in bound.items()) or "none"


def listing(items: Iterable[object]) -> str:
    """`a`, `b` and `c`."""
    names = [f"`{i}`" for i in items]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + f" and {names[-1]}" if names else "nothing"


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean `x`?)` for a near miss among `known`, else nothing."""
    match = difflib.get_close_matches(name, list(known), 1)
    return f" (did you mean `{match[0]}`?)" if match else ""
