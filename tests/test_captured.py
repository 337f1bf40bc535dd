"""A program captured: what stays, what is copied, what is handed out, with a stand-in for CUDA graphs on the CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardlib as sl
from shardlib.graph.captured import Captured, refuse_uncapturable, state_in_place
from shardlib.graph.program import runner


class Tape(TorchDispatchMode):
    """A CUDA graph on the CPU: the ops of a run with their operands, at their addresses. What the run wrote is undone,
    what it made is NaN until it is replayed."""

    made = 0

    def first(self, run: Callable[[], list[Tensor]]) -> list[Tensor]:
        return run()

    def capture(self, run: Callable[[], list[Tensor]]) -> list[Tensor]:
        Tape.made += 1
        self.ops: list[Any] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        with self:
            results = run()
        for *_, out in self.ops:
            for y in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(y, Tensor) and y.is_floating_point() and y.data_ptr() not in self.before:
                    y.fill_(torch.nan)
        for x, old in self.before.values():
            x.copy_(old)
        return results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for given in (*args, *kwargs.values()):
            for x in given if isinstance(given, (tuple, list)) else [given]:
                if isinstance(x, Tensor):
                    self.before.setdefault(x.data_ptr(), (x, x.clone()))
        out = func(*args, **kwargs)
        self.ops.append((func, args, kwargs, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.ops:
            new = func(*args, **kwargs)
            pairs = zip(out, new, strict=True) if isinstance(out, (tuple, list)) else [(out, new)]
            for y, value in pairs:
                if isinstance(y, Tensor) and y.data_ptr() != value.data_ptr():
                    y.copy_(value)


def loss(w: Any, batch: Tensor) -> sl.Mean:
    return sl.Mean.of("batch/dp out", torch.tanh(batch @ w["a"]) @ w["b"] - 1)


PASSES = sl.passes.for_backend(sl.passes.default, "cudagraph")


def program(use: Any = PASSES) -> tuple[Any, list[Tensor], Any]:
    """A train step, its inputs, batches of which are last, and how to make others."""
    g = torch.Generator().manual_seed(0)
    step = sl.jit(sl.step(loss, sl.optim.adamw(1e-2)), donate_argnums=0, passes=use)
    params = {"a": torch.randn(3, 5, generator=g), "b": torch.randn(5, 7, generator=g)}
    state = step.init(sl.shard(params, {"a": "in hidden", "b": "hidden out"}))
    lowered, (inputs,) = step.given(state, sl.shard(torch.zeros(2, 3), "batch/dp in"))
    return lowered.module, inputs, lambda: torch.randn(2, 3, generator=g)


@pytest.mark.parametrize("use", (PASSES, ()), ids=("in place", "nothing in place"))
def test_captured_once_and_equal_to_the_program(use: Any) -> None:
    Tape.made = 0
    with sl.make_mesh(dp=1):
        module, inputs, batch = program(use)
        plain, captured = runner(module, "graph"), Captured(runner(module, "graph"), state_in_place(module), Tape)
    n = len(inputs) - 1
    a, b = [x.clone() for x in inputs[:n]], [x.clone() for x in inputs[:n]]
    at = [b[i].data_ptr() for i in captured.stays]
    assert len(at) == (7 if use else 1)  # two parameters, their moments, the key
    told = []
    for _ in range(5):
        x = batch()
        wanted, found = plain([*a, x]), captured([*b, x.clone()])
        a, b = wanted[:n], found[:n]
        told.append((found, [y.clone() for y in found]))
        assert all(map(torch.equal, found, wanted))
    assert Tape.made == 1 and [b[i].data_ptr() for i in captured.stays] == at
    for found, values in told[:-1]:  # what was handed out stays, but for the state that was donated
        assert all(map(torch.equal, found[n:], values[n:]))


def test_a_state_elsewhere_is_run_then_captured_too_and_the_other_stays_as_it_was() -> None:
    Tape.made = 0
    with sl.make_mesh(dp=1):
        module, inputs, batch = program()
        plain, captured = runner(module, "graph"), Captured(runner(module, "graph"), state_in_place(module), Tape)
    n = len(inputs) - 1
    states = [[x + k if x.is_floating_point() else x.clone() for x in inputs[:n]] for k in (0, 1)]
    copies = [[x.clone() for x in s] for s in states]
    for i in (0, 0, 1, 0, 1, 1, 0):
        x = batch()
        copies[i], states[i] = plain([*copies[i], x])[:n], captured([*states[i], x])[:n]
        for one, other in zip(states, copies, strict=True):
            assert all(map(torch.equal, one, other))
    assert Tape.made == 2
    moved = [x.clone() for x in states[0]]
    for _ in range(12):  # remembered are only so many
        moved = [x.clone() for x in captured([*moved, batch()])[:n]]
    assert Tape.made == 2 and len(captured.seen) <= 8


def test_refused_before_tracing_without_a_gpu() -> None:
    def never(x: Tensor) -> Tensor:
        raise AssertionError("traced")

    with (
        sl.make_mesh(dp=1),
        pytest.raises(
            sl.SpecError,
            match='never: backend="cudagraph" captures CUDA graphs, and this mesh is on the cpu: use backend="g',
        ),
    ):
        sl.jit(never, backend="cudagraph")(torch.ones(2))


def test_programs_that_a_graph_cannot_hold_are_refused() -> None:
    def shown(x: Tensor) -> Tensor:
        sl.debug.print("{}", x)
        return x + 1

    with sl.make_mesh(dp=1):
        with pytest.raises(
            sl.SpecError, match="the program has `print`, which looks at values on the host at every run"
        ):
            refuse_uncapturable(sl.jit(shown).lower(torch.ones(2)).module)
        with pytest.raises(sl.SpecError, match="input `0` is on the cpu, where a CUDA graph would read it once"):
            refuse_uncapturable(sl.jit(lambda x: x + 1).lower(torch.ones(2)).module)
