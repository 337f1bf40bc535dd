"""`timeline`: when each node of a program runs and each collective is on the wire, under a stated model of the machine.

One stream computes, one communicates. A node takes its floating-point operations at the rate of the machine or its
bytes at that of the memory, whichever is longer; what is only another view takes no time. A collective starts when it
is issued and the wire is free, and takes a latency and the bytes that a rank sends at the rate of the link; its wait
ends no earlier. Left out: launching kernels, caches, other programs, ranks that are late, several links at once.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from operator import getitem
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry

from shardlib.errors import SpecError, listing, nearest
from shardlib.graph.lines import line_of, said_at
from shardlib.graph.nodes import STARTS, WAIT, aliased, arg, op_name, outputs, roots
from shardlib.graph.program import Collective, sends
from shardlib.phases import part_of


@dataclass(frozen=True)
class Hardware:
    """What one rank computes and sends with: `flops` per second of matrix products in the dtype that is trained in,
    bytes per second of `memory` and of the `link` to its peers (what a rank sends), seconds of `latency` of a
    collective."""

    flops: float
    memory: float
    link: float
    latency: float

    def __post_init__(self) -> None:
        wrong = [f.name for f in fields(self) if not getattr(self, f.name) >= (0 if f.name == "latency" else 1)]
        if wrong:
            raise SpecError(
                f"Hardware: {listing(wrong)} of {self}: rates are per second and above 1, latency is not < 0"
            )


# Peak rates of the makers' data sheets: dense bfloat16 products, memory, and half of the two-way link to peers of one
# host. Latencies are of the order that NCCL needs on one host. "cpu" is no data sheet's: the order of magnitude of one
# core and of gloo between processes of one host.
HARDWARE: Mapping[str, Hardware] = {
    "b200": Hardware(flops=2250e12, memory=8e12, link=900e9, latency=1e-5),  # NVIDIA DGX B200: HBM3e, NVLink 5
    "h200": Hardware(flops=989e12, memory=4.8e12, link=450e9, latency=1e-5),  # NVIDIA H200 SXM: HBM3e, NVLink 4
    "h100": Hardware(flops=989e12, memory=3.35e12, link=450e9, latency=1e-5),  # NVIDIA H100 SXM: HBM3, NVLink 4
    "a100": Hardware(flops=312e12, memory=2.039e12, link=300e9, latency=1e-5),  # NVIDIA A100 SXM 80GB: HBM2e, NVLink 3
    "mi300x": Hardware(flops=1307e12, memory=5.3e12, link=448e9, latency=1e-5),  # AMD Instinct MI300X: 7 links of 64
    "cpu": Hardware(flops=5e10, memory=1e10, link=1e9, latency=1e-4),
}


def hardware_of(said: str | Hardware) -> Hardware:
    """The machine of a name, or the one given. Raises `SpecError` for a name that is not known."""
    if isinstance(said, Hardware):
        return said
    if said not in HARDWARE:
        raise SpecError(
            f"unknown hardware `{said}`{nearest(said, HARDWARE)}; there are {listing(HARDWARE)}, or give "
            "sl.Hardware(flops=, memory=, link=, latency=)"
        )
    return HARDWARE[said]


# ---- what a timeline is made of


@dataclass(frozen=True)
class Span:
    """Something that takes time on one of a rank's two streams. Times in seconds from the start of the step."""

    name: str
    start: float
    end: float
    wire: bool = False
    rank: int = 0
    told: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Sent(Collective):
    """A collective as often as it is made: when it is on the wire, for how long its wait holds compute up, and the
    user's line that asks for it. Seconds from the start of the step; `times` is 1."""

    start: float = 0.0
    end: float = 0.0
    exposed: float = 0.0
    line: str = ""


@dataclass(frozen=True)
class Timeline:
    """The schedule of one step on one rank. Seconds: the whole, of compute, and of communication that compute waits for
    (`exposed`) or that runs behind it (`hidden`)."""

    hardware: Hardware
    total: float
    compute: float
    exposed: float
    hidden: float
    collectives: list[Sent]
    spans: list[Span]

    def save(self, path: str | Path) -> None:
        """Write the trace as JSON for ui.perfetto.dev or chrome://tracing: a row of compute and one of the wire."""
        save_spans(path, self.spans)

    def __str__(self) -> str:
        def ms(x: float) -> str:
            return f"{x * 1e3:.3g} ms"

        lines = [
            f"{ms(self.total)} a step: compute {ms(self.compute)}, exposed communication {ms(self.exposed)} "
            f"({ms(self.hidden)} more is hidden)"
        ]
        exposed = sorted((c for c in self.collectives if c.exposed > 0), key=lambda c: -c.exposed)
        for c in exposed[:5]:
            where = ", ".join(said for said in (c.name, c.part, Path(c.line).name) if said)
            lines.append(f"  {ms(c.exposed)} waits for {c.op} over {c.axis} of {where}")
        return "\n".join(lines) + (f"\n  and {len(exposed) - 5} more" if len(exposed) > 5 else "")


def save_spans(path: str | Path, spans: Iterable[Span]) -> None:
    """Write spans in the Trace Event Format: a process for each rank, a thread for each of its streams."""
    spans = list(spans)
    rows = sorted({(span.rank, span.wire) for span in spans})
    names = [
        {"ph": "M", "pid": rank, "tid": int(wire), "name": name, "args": {"name": said}}
        for rank, wire in rows
        for name, said in (
            ("process_name", f"rank {rank}"),
            ("thread_name", "communication" if wire else "compute"),
        )
    ]
    events = [
        {
            "ph": "X",
            "pid": s.rank,
            "tid": int(s.wire),
            "name": s.name,
            "ts": s.start * 1e6,
            "dur": (s.end - s.start) * 1e6,
            "args": dict(s.told or {}),
        }
        for s in spans
    ]
    Path(path).write_text(json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"}))


def told(node: Node, graph: str, sent: Collective | None = None) -> dict[str, Any]:
    """What a trace says of a node: its graph and part, the user's line, and of a collective what it sends."""
    out: dict[str, Any] = {"node": node.name, "graph": graph}
    if (part := part_of(node)) != "":
        out["part"] = part
    if (at := said_at(node)) != "":
        out["line"] = at.removeprefix(" at ")
    if sent is not None:
        out |= {"leaf": sent.name, "axis": sent.axis, "bytes": sent.bytes}
    return out


# ---- the model


def flops(node: Node) -> int:
    """The floating-point operations of a matrix product, an attention or a convolution; of others none."""
    packet = getattr(node.target, "_overloadpacket", None)
    name = getattr(packet, "__name__", "")
    if name.endswith("_for_cpu") or "_for_cpu_" in name:  # torch counts those of its other kernels for attention
        packet = getattr(torch.ops.aten, name.replace("_for_cpu", ""), packet)
    if packet not in flop_registry:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])  # type: ignore[misc]
    return int(flop_registry[packet](*args, **kwargs, out_val=node.meta.get("val")))


def moved(node: Node, held: Mapping[Node, set[Node]]) -> int:
    """The bytes that a node reads and writes; none where its value is another view. `held`: `roots` of the graph."""
    written = aliased(node, written=True)
    if node.op != "call_function" or node.target is getitem or (held[node] != {node} and not written):
        return 0
    made = [] if written else node.meta.get("val")
    made = made if isinstance(made, (list, tuple)) else [made]
    return sum(map(_bytes, [*(n.meta.get("val") for n in [*node.all_input_nodes, *written]), *made]))


def _bytes(x: Any) -> int:
    """Of an expanded tensor, those that there are."""
    return min(x.numel() * x.dtype.itemsize, x.untyped_storage().nbytes()) if isinstance(x, Tensor) else 0


class _Clock:
    """Both streams: until when they are busy, and what ran."""

    def __init__(self, hardware: Hardware, sent: Mapping[Node, Collective]) -> None:
        self.hardware, self.sent = hardware, sent
        self.compute = self.wire = self.busy = 0.0
        self.spans: list[Span] = []
        self.starts: list[Node] = []
        self.collectives: list[Sent] = []
        self.costs: dict[str, dict[Node, float]] = {}  # by graph: one is called several times

    def run(self, module: Any, graph: str) -> list[int | None]:
        """Run a graph; for each of its results the place among the collectives, where it is still on the wire."""
        if graph not in self.costs:
            self.costs[graph] = _costs(module.graph, self.hardware)
        at: dict[Node, int] = {}
        called: dict[Node, list[int | None]] = {}
        for node in module.graph.nodes:
            if node.op == "call_module":
                called[node] = self.run(module.get_submodule(node.target), str(node.target))
            elif node.target is getitem and arg(node) in called:
                place = called[arg(node)][arg(node, 1)]
                at |= {} if place is None else {node: place}
            elif node.target in STARTS:
                at[node] = self.start(node, graph)
                if STARTS[node.target] == "ppermute":  # comes back when it is done
                    self.wait(at.pop(node))
            elif node.target is WAIT and arg(node) in at:
                self.wait(at[arg(node)])
            else:
                self.work(node, graph, self.costs[graph][node])
        return [at.get(x) for x in outputs(module.graph)]

    def start(self, node: Node, graph: str) -> int:
        c = self.sent[node]
        begun = max(self.compute, self.wire)
        self.wire = begun + self.hardware.latency + c.bytes / self.hardware.link
        self.busy += self.wire - begun
        self.spans.append(Span(c.op, begun, self.wire, True, told=told(node, graph, c)))
        said: dict[str, Any] = vars(c) | {"times": 1, "line": ":".join(map(str, line_of(node) or ()))}
        self.starts.append(node)
        self.collectives.append(Sent(**said, start=begun, end=self.wire))
        return len(self.collectives) - 1

    def wait(self, at: int) -> None:
        node, c = self.starts[at], self.collectives[at]
        if c.end > self.compute:
            self.spans.append(Span(f"wait for {c.op}", self.compute, c.end, told=told(node, c.graph, c)))
            self.collectives[at] = replace(c, exposed=c.end - self.compute)
            self.compute = c.end

    def work(self, node: Node, graph: str, seconds: float) -> None:
        if seconds > 0:
            self.spans.append(Span(op_name(node), self.compute, self.compute + seconds, told=told(node, graph)))
            self.compute += seconds


def _costs(graph: Graph, hardware: Hardware) -> dict[Node, float]:
    """The seconds that each node computes for."""
    held = roots(graph)
    return {n: max(flops(n) / hardware.flops, moved(n, held) / hardware.memory) for n in graph.nodes}


def timeline(module: GraphModule, hardware: str | Hardware) -> Timeline:
    """The schedule of a program on each rank, under the model that this module states; called graphs at each call."""
    machine = hardware_of(hardware)
    clock = _Clock(machine, sends(module))
    clock.run(module, "step")
    total, exposed = max(clock.compute, clock.wire), math.fsum(c.exposed for c in clock.collectives)
    compute = clock.compute - exposed
    return Timeline(machine, total, compute, exposed, clock.busy - exposed, clock.collectives, clock.spans)
