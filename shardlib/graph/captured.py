"""A program captured as a CUDA graph: what stays at its address, what is copied in, what is handed out.

A CUDA graph reads and writes the addresses that it was captured with, and holds what it makes in memory of its own,
which every replay writes anew. So a donated input that the program writes new state into stays where it is, the
caller's before and after; every other input has a buffer here that it is copied into; every other result is copied out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import GraphModule

from shardlib.errors import SpecError
from shardlib.graph.nodes import acts, inputs, op_name, outputs

_MOST = 8  # sets of addresses that are remembered


class Recording(Protocol):
    """What captures: `CudaGraph`, or anything that does as it does."""

    def first(self, run: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Run for real, so that libraries set themselves up."""
        ...

    def capture(self, run: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Note what `run` would do, without doing it; its results, without values yet."""
        ...

    def replay(self) -> None:
        """Do it, with what is now at the addresses."""
        ...


@cache
def _pool() -> Any:
    """The memory that all graphs of this process share: they run one after the other, and results are copied out."""
    return torch.cuda.graph_pool_handle()


@cache
def _stream() -> Any:
    """The stream on which graphs are captured: by then libraries have their workspaces there."""
    return torch.cuda.Stream()


class CudaGraph:
    """A `torch.cuda.CUDAGraph`."""

    def first(self, run: Callable[[], list[Tensor]]) -> list[Tensor]:
        here, side = torch.cuda.current_stream(), _stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            out = run()
        here.wait_stream(side)
        for x in out:
            x.record_stream(here)
        return out

    def capture(self, run: Callable[[], list[Tensor]]) -> list[Tensor]:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=_pool(), stream=_stream()):
            return run()

    def replay(self) -> None:
        self.graph.replay()


@dataclass
class _Capture:
    """One capture: the buffers of the inputs that are copied in, by position, and the results that are copied out, None
    for those in place of an input."""

    recording: Recording
    buffers: dict[int, Tensor]
    results: list[Tensor | None]


class Captured:
    """`run`, a program, captured the second time that its state lies at the same addresses. Until then it just runs,
    and so does one whose state moves from call to call. `in_place`: as `state_in_place` gives it."""

    def __init__(
        self,
        run: Callable[[list[Tensor]], list[Tensor]],
        in_place: Sequence[int | None],
        recording: Callable[[], Recording] = CudaGraph,
    ) -> None:
        self.run, self.in_place, self.recording = run, in_place, recording
        self.stays = sorted({i for i in in_place if i is not None})
        self.seen: dict[tuple[int, ...], _Capture | None] = {}

    def __call__(self, boxed: list[Tensor]) -> list[Tensor]:
        """The results for inputs whose list is emptied."""
        given = [*boxed]
        boxed.clear()
        addresses = tuple(given[i].data_ptr() for i in self.stays)
        if addresses not in self.seen:
            self.seen[addresses] = None
            if len(self.seen) > _MOST:
                del self.seen[next(iter(self.seen))]
            return self.recording().first(lambda: self.run(given))
        found = self.seen[addresses] = self.seen[addresses] or self._capture(given)
        for i, buffer in found.buffers.items():
            buffer.copy_(given[i])
        found.recording.replay()
        return [given[i or 0] if x is None else x.clone() for i, x in zip(self.in_place, found.results, strict=True)]

    def _capture(self, given: Sequence[Tensor]) -> _Capture:
        """Holds no input: who gives and gets the state may ask whether anybody else does."""
        buffers = {i: x.clone() for i, x in enumerate(given) if i not in self.stays}
        recording, full = self.recording(), [buffers.get(i, x) for i, x in enumerate(given)]
        results = recording.capture(lambda: self.run(full))
        pairs = zip(self.in_place, results, strict=True)
        return _Capture(recording, buffers, [x if i is None else None for i, x in pairs])


def state_in_place(module: GraphModule) -> list[int | None]:
    """For each result the number of the donated input that it is, written into or not; None for any other value."""
    given = {n: i for i, n in enumerate(inputs(module.graph)) if "donated" in n.meta}
    return [given.get(end) for end in outputs(module.graph)]


def refuse_uncapturable(module: GraphModule) -> None:
    """Raise where a program does what a CUDA graph cannot hold: it looks at values on the host, or takes some there."""
    what, use = 'backend="cudagraph"', 'use backend="graph", "regional" or "inductor"'
    for child in module.modules():
        for node in child.graph.nodes if isinstance(child, GraphModule) else ():
            if acts(node):
                raise SpecError(
                    f"{what}: the program has `{op_name(node)}`, which looks at values on the host at every run: "
                    f"leave debug.print and passes.check_finite out, or {use}"
                )
    for node in inputs(module.graph):
        device = node.meta["val"].device.type
        if device != "cuda":
            raise SpecError(
                f"{what}: input `{node.meta.get('path', node.name)}` is on the {device}, where a CUDA graph would read "
                f"it once, when it is captured: sl.shard it, or {use}"
            )
