"""Which of the user's lines made each node of a traced graph."""

import linecache
import re
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr  # the number of an operation has no public name
from torch.fx import Node

from shardlib.errors import is_users

_PLACE = re.compile(r'File "(.+?)", line (\d+)')
_ENGINE = ("_engine_run_backward", torch.autograd.graph.__file__)
_LIBRARY, _USERS, _AUTOGRAD = range(3)  # whose code a frame runs


class Lines:
    """The user's calls since a frame, noted on nodes as they are made: `stack_trace`, innermost last.

    A node of a backward pass has those of what it is the derivative of: autograd numbers operations as they are made,
    and says for which one it runs.
    """

    def __init__(self, start: FrameType) -> None:
        self.start = start
        self.made: dict[int, str] = {}
        self.whose: dict[CodeType, int] = {}
        self.counted = _get_sequence_nr()

    def noted(self, create: Callable[..., Node]) -> Callable[..., Node]:
        """`create`, which makes a node, and notes."""

        def create_node(*args: Any, **kwargs: Any) -> Node:
            node = create(*args, **kwargs)
            said = _users_calls(sys._getframe(1), self.start, self.whose)
            if said is None:
                said = self.made.get(torch._C._current_autograd_node()._sequence_nr(), "")
            now = _get_sequence_nr()
            self.made.update(dict.fromkeys(range(self.counted, now), said))
            self.counted = now
            if said:
                node.stack_trace = said
            return node

        return create_node


def _users_calls(frame: FrameType | None, start: FrameType, whose: dict[CodeType, int]) -> str | None:
    """The user's calls between two frames; None where autograd's engine runs further in than all of them.

    There are a hundred frames for every node: `whose` keeps what is known of their code.
    """
    said: list[str] = []
    while frame is not None and frame is not start:
        code = frame.f_code
        kind = whose.get(code)
        if kind is None:
            engine = (code.co_name, code.co_filename) == _ENGINE
            kind = whose[code] = _AUTOGRAD if engine else _USERS if is_users(code.co_filename) else _LIBRARY
        if kind == _AUTOGRAD and not said:
            return None
        if kind == _USERS:
            said.append(f'File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}')
        frame = frame.f_back
    return "\n".join(reversed(said))


def line_of(node: Node) -> tuple[str, int] | None:
    """The file and number of the innermost of the user's lines that made a node."""
    places = [(file, int(line)) for file, line in _PLACE.findall(node.stack_trace or "") if is_users(file)]
    return places[-1] if places else None


def said_at(node: Node) -> str:
    """` at model.py:31: x @ w`, or nothing where no line of the user's made it."""
    place = line_of(node)
    if place is None:
        return ""
    text = linecache.getline(*place).strip()
    return f" at {place[0]}:{place[1]}" + (f": {text}" if text else "")
