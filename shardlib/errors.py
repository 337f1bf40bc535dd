"""The library's exceptions and the wording they share. No torch."""

import difflib
import inspect
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any


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


class ScheduleError(ShardError, ValueError):
    """A pipeline schedule cannot run; the message names the rank, the step and the action."""


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
    """Errors raised inside name, in a note, the innermost line that is the user's, and the one that called it."""
    try:
        yield
    except Exception as e:
        lines = [f for f in traceback.extract_tb(e.__traceback__) if is_users(f.filename)]
        if lines and not _placed(e):
            said = dict.fromkeys(f"{f.filename}:{f.lineno}, in {f.name}: {f.line}" for f in reversed(lines))
            e.add_note("  at " + "\n  called from ".join([*said][:2]))
        raise


@contextmanager
def defined(f: Callable[..., Any]) -> Iterator[None]:
    """Errors of the library raised inside, about what `f` returned, name in a note where it is defined."""
    try:
        yield
    except ShardError as e:
        code = getattr(f, "__code__", None)
        if inspect.iscode(code) and is_users(code.co_filename) and not _placed(e):
            file, line = code.co_filename, code.co_firstlineno
            e.add_note(f"  at {file}:{line}, the definition of {f.__name__}: {linecache.getline(file, line).strip()}")
        raise


def _placed(e: Exception) -> bool:
    return any(n.startswith("  at ") for n in getattr(e, "__notes__", ()))


@cache
def is_users(file: str) -> bool:
    """Whether a file of code is the user's: neither shardlib's nor that of a library below it."""
    return not any(part in file for part in _NOT_USERS)


def users_frame() -> FrameType | None:
    """The innermost call of a function of the user's, if there is one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


_PACKAGES = tuple(os.sep + name + os.sep for name in ("torch", "optree", "einops"))
_NOT_USERS = (os.path.dirname(__file__), *_PACKAGES, os.sep + "contextlib.py", "<")


def caret(text: str, start: int, end: int, note: str = "", label: str = "pattern") -> str:
    """`text` on one line and a caret line below it: `label: text` / `       ^^^ note`."""
    head = f"  {label + ':':<8} "
    line = re.sub(r"\s", " ", text)  # a pattern over several lines is shown on one
    return f"{head}{line}\n{' ' * (len(head) + start)}{'^' * max(1, end - start)} {note}".rstrip()


def sizes(bound: Mapping[str, int]) -> str:
    """`batch=8 seq=512`."""
    return " ".join(f"{k}={v}" for k, v in bound.items()) or "none"


def dimensions(n: int) -> str:
    """`1 dimension`, `2 dimensions`."""
    return f"{n} dimension{'s' * (n != 1)}"


def amount(n: int) -> str:
    """Bytes in words: `1.5 MB`; powers of 1000."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n} B"


def listing(items: Iterable[object]) -> str:
    """`a`, `b` and `c`."""
    names = [f"`{i}`" for i in items]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + f" and {names[-1]}" if names else "nothing"


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean `x`?)` for a near miss among `known`, else nothing."""
    match = difflib.get_close_matches(name, list(known), 1)
    return f" (did you mean `{match[0]}`?)" if match else ""
