"""Nodes of a program know the user's lines that made them, those of a backward pass what they are derived from."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib.graph.lines import line_of, said_at
from shardlib.graph.nodes import op_name


def product(x: Tensor, w: Tensor) -> Tensor:
    return sl.einsum("batch/dp m, m n -> batch/dp n", x, w)  # one


def layer(w: Any, x: Tensor) -> Tensor:
    return torch.tanh(product(x, sl.gather(w, "dp")))  # two


def loss(params: Any, batch: Tensor) -> sl.Mean:
    y = sl.remat(layer)(params["a"], batch)  # three
    return sl.Mean.of("batch/dp n", torch.sin(y) * params["scale"])  # four


def lines() -> dict[str, int]:
    """By the comment at its end, the number of each line above."""
    with open(__file__) as file:
        found = {line.rpartition("  # ")[2].strip(): i for i, line in enumerate(file, 1) if "  # " in line}
    return {name: found[name] for name in "one two three four".split()}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lines_of_a_step(accumulate: int):
    with sl.make_mesh(dp=2, simulate=True):
        step = sl.step(loss, sl.optim.sgd(0.1), accumulate=accumulate)
        params = {"a": sl.shard(torch.ones(6, 6), "m/dp n"), "scale": sl.shard(torch.ones(6), "n")}
        program = sl.jit(step).lower(step.init(params), sl.shard(torch.ones(8, 6), "batch/dp m")).program
    nodes = [n for m in program.values() for n in m.graph.nodes if n.op == "call_function"]
    at = lines()

    def found(op: str, part: str) -> set[int]:
        places = [line_of(n) for n in nodes if op_name(n) == op and part in n.meta]
        assert places and all(p is not None and p[0] == __file__ for p in places)
        return {p[1] for p in places if p}

    assert found("mm", "forward") == found("mm", "backward") == found("mm", "remat") == {at["one"]}
    assert found("tanh", "forward") == found("tanh_backward", "backward") == {at["two"]}
    assert found("all_gather", "forward") == found("psum_scatter", "backward") == {at["two"]}
    assert found("sin", "forward") == found("cos", "backward") == {at["four"]}
    (first, *_) = (n for n in nodes if op_name(n) == "mm")
    calls = [line.rpartition(", in ")[2] for line in first.stack_trace.splitlines()]
    assert calls == ["loss", "layer", "product"], "from the outermost of the user's calls in"
    source = inspect.getsource(product).splitlines()[1].strip()
    assert said_at(first) == f" at {__file__}:{at['one']}: {source}"
    assert all(line_of(n) is None for n in nodes if op_name(n) == "threefry"), "the library's own"


def test_calls_outside_the_function_are_not_its_lines():
    def derived(x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: (y**3).sum())(x)

    with sl.make_mesh(dp=1, simulate=True):
        nodes = sl.jit(derived).lower(torch.ones(3)).module.graph.nodes
    assert {line_of(n) for n in nodes if n.op == "call_function"} == {(__file__, derived.__code__.co_firstlineno + 1)}
