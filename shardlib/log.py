"""What a rank is doing: a line in a file of its own when a collective starts and when it has been waited for.

Every line is written at once, so that it outlives the process. A file holds the last lines only: at a megabyte it
becomes `rank3.old.log`, and the next begins. `shardlib hang` reads them. Without a folder nothing is written: what is
known is for `watch`, which asks where a rank is. What blocks is marked for `meter`, too.
"""

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from shardlib.graph.digests import titles
from shardlib.graph.nodes import WAIT, waits
from shardlib.graph.program import graphs
from shardlib.mesh import Mesh
from shardlib.meter import meter
from shardlib.switch import Switch
from shardlib.watch import Place, blamed, watch
from shardlib.wire import PERMUTE, SENT

LIMIT = 1 << 20  # bytes of a file
Run = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Line:
    """One line: at `time` (seconds since 1970), in call number `call` of this process, the `step`-th of `name`, what
    happened (`call`, `start`, `done`, `return`), to collective number `number` of the call, and what that is.

    The text of a `call` line is the mesh: `dp=2,tp=2`.
    """

    time: float
    call: int
    name: str
    step: int
    event: str
    number: int = 0
    text: str = ""


def brief(title: str) -> str:
    """Of a collective's title the op, name and axis."""
    found = re.match(r".* over `[^`]*`", title)
    return found[0] if found else title.split(", ")[0]


class Log:
    """A rank's file in a folder; without a folder, only where the rank is."""

    def __init__(self, folder: str, rank: int) -> None:
        self.call, self.steps, self.number = 0, dict[str, int](), 0
        self.name, self.running = "", dict[str, list[int]]()
        self.path = Path(folder, f"rank{rank}.log") if folder else None
        self.file, self.size = -1, 0
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.with_suffix(".old.log").unlink(missing_ok=True)
            self._open()

    def _open(self) -> None:
        assert self.path is not None
        self.file, self.size = os.open(self.path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND), 0

    def write(self, event: str, number: int = 0, text: str = "") -> None:
        """A line."""
        if self.path is None:
            return
        if self.size > LIMIT:
            os.close(self.file)
            self.path.replace(self.path.with_suffix(".old.log"))
            self._open()
        line = (f"{time.time():.6f}", self.call, self.name, self.steps[self.name], event, number, text)
        self.size += os.write(self.file, ("\t".join(map(str, line)) + "\n").encode())

    def start(self, text: str) -> None:
        """A collective starts."""
        self.number += 1
        self.running.setdefault(text, []).append(self.number)
        self.write("start", self.number, text)

    def done(self, text: str) -> None:
        """It has been waited for."""
        first, *rest = self.running.pop(text)  # of a graph that is called again before it is waited for
        self.running |= {text: rest} if rest else {}
        self.write("done", first, text)

    def place(self) -> Place:
        """Where the programs of this rank are."""
        for text, (number, *_) in self.running.copy().items():
            waits = f"{brief(text)} (#{number} of step {self.steps[self.name]} of {self.name})"
            return Place(self.call, self.number, number, waits)
        return Place(self.call, self.number)

    def around(self, run: Run, name: str, mesh: str) -> Run:
        """`run`, a program whose collectives tell this log; where one is lost, the error says who is to blame."""

        def logged(inputs: list[Tensor]) -> list[Tensor]:
            self.call, self.name, self.number = self.call + 1, name, 0
            self.steps[name] = self.steps.get(name, 0) + 1
            self.running.clear()
            self.write("call", 0, mesh)
            with blamed():
                out = run(inputs)
            self.write("return")
            return out

        return logged


@cache
def log_of(folder: str, rank: int, pid: int) -> Log:
    """The log of this process, whose id is `pid` (a fork has its own)."""
    return Log(folder, rank)


def wanted(mesh: Mesh) -> Log | None:
    """The log of a mesh of several processes: in `SHARDLIB_LOG`'s folder, if any."""
    if mesh.simulate or mesh.total == 1:
        return None
    log = log_of(mesh.log, mesh.rank, os.getpid())
    if others := watch():
        others.place = log.place
    return log


def telling(module: GraphModule, log: Log) -> GraphModule:
    """The program with a call of the log before each collective, and one after it has been waited for."""
    ends = waits(module)
    named = _named(titles(module))
    for node, text in named.items():
        with node.graph.inserting_before(node):
            node.graph.call_function(log.start, (text,))
    alone = {node: node for node in named if node not in ends.values()}  # done when they return
    for end, node in (ends | alone).items():
        with end.graph.inserting_after(end):
            end.graph.call_function(log.done, (named[node],))
    return module


def marked(module: GraphModule) -> GraphModule:
    """The program with marks of the meter before and after each node that waits for other ranks."""
    mark = meter().mark
    for _, each in graphs(module):
        for graph in each.turns if isinstance(each, Switch) else (each.graph,):
            for node in [n for n in graph.nodes if n.target in (WAIT, SENT, PERMUTE)]:
                with graph.inserting_before(node):
                    graph.call_function(mark, ())
                with graph.inserting_after(node):
                    graph.call_function(mark, ())
    return module


def _named(said: Mapping[Node, str]) -> dict[Node, str]:
    """Every title once: of several equal ones the second is `... [2]`."""
    seen: dict[str, int] = {}
    out: dict[Node, str] = {}
    for node, text in said.items():
        seen[text] = seen.get(text, 0) + 1
        out[node] = text if seen[text] == 1 else f"{text} [{seen[text]}]"
    return out


def read(folder: Path) -> dict[int, list[Line]]:
    """The lines of every rank, in order; a last line that was cut off is left out."""
    out: dict[int, list[Line]] = {}
    for path in sorted(folder.glob("rank*.log"), key=lambda p: not p.name.endswith(".old.log")):
        rank = int(path.name.removeprefix("rank").split(".")[0])
        lines = path.read_text(errors="replace").split("\n")[:-1]
        out.setdefault(rank, []).extend(_parsed(line.split("\t")) for line in lines if line.count("\t") == 6)
    return out


def _parsed(fields: list[Any]) -> Line:
    when, call, name, step, event, number, text = fields
    return Line(float(when), int(call), name, int(step), event, int(number), text)
