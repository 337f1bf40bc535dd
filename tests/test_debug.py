"""debug.print: a line per rank, in eager code and in traces, in order."""

import contextlib
import io
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor

import shardlib as sl

F64 = torch.float64


def loss(params: Any, batch: Tensor) -> sl.Mean:
    sl.debug.print("in {}", batch.sum())
    y = batch @ sl.gather(params["w"], "dp")
    sl.debug.print("out {:.1f} of layer {}", y[0], 7)
    return sl.Mean.of("batch/dp n", y)


def started(mesh: sl.Mesh, accumulate: int) -> Any:
    step = sl.step(loss, sl.optim.sgd(0.1), accumulate=accumulate)
    w = {"w": sl.shard(torch.eye(2, 3, dtype=F64), "m/dp n")}
    return step, step.init(w), sl.shard(torch.arange(8 * mesh.total, dtype=F64).view(-1, 2), "batch/dp m")


def wanted(rank: int, accumulate: int) -> list[str]:
    """What a rank prints: it holds four rows of consecutive numbers."""
    lines, rows = [], torch.arange(8 * rank, 8 * rank + 8, dtype=F64).view(4, 2)
    for part in rows.chunk(accumulate):
        a, b = part[0].tolist()
        lines += [
            f"rank {rank}: in {part.sum().item():g}",
            f"rank {rank}: out f64[3] [{a:.1f}, {b:.1f}, 0.0] of layer 7",
        ]
    return lines


def lines_of(said: str, rank: int) -> list[str]:
    return [line for line in said.splitlines() if line.startswith(f"rank {rank}:")]


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_simulated_ranks_print_in_order(accumulate: int, jitted: bool, capsys):
    with sl.make_mesh(dp=2, simulate=True) as mesh:
        step, state, batch = started(mesh, accumulate)
        run = sl.jit(step, donate_argnums=0) if jitted else step
        if jitted:
            run.lower(state, batch)
            assert capsys.readouterr().out == "", "nothing has a value while a program is traced"
        run(state, batch)
    said = capsys.readouterr().out
    assert [lines_of(said, r) for r in range(2)] == [wanted(r, accumulate) for r in range(2)]
    assert len(said.splitlines()) == 4 * accumulate


def test_processes_print():
    def body() -> list[str]:
        out = []
        with sl.make_mesh(dp=2) as mesh:
            step, state, batch = started(mesh, 2)
            for run in (step, sl.jit(step)):
                with contextlib.redirect_stdout(io.StringIO()) as said:
                    run(state, batch)
                out.append(said.getvalue())
            if mesh.rank == 1:  # no rank waits for another
                with contextlib.redirect_stdout(io.StringIO()) as said:
                    sl.debug.print("{}", batch)
                out.append(said.getvalue())
        return out

    for rank, (eager, traced, *alone) in enumerate(on_ranks(2, body)):
        assert eager.splitlines() == traced.splitlines() == wanted(rank, 2)
        assert alone == ["rank 1: f64[4, 2] [[8, 9], [10, 11], [12, 13], [14, 15]]\n"] * rank


def test_what_is_printed_of_arrays_at_rest_and_by_transforms(capsys):
    def total(x: Tensor) -> Tensor:
        def inner(y: Tensor) -> Tensor:
            sl.debug.print("y {}", y)
            return (y * y).sum()

        return torch.func.grad(inner)(x) + torch.func.vmap(lambda row: (sl.debug.print("row {}", row), row)[1])(x)

    with sl.make_mesh(dp=2, simulate=True):
        x = sl.shard(torch.arange(4.0).view(4, 1), "n/dp m")
        sl.debug.print("{}", x)
        for f in (total, sl.remat(total)):
            sl.jit(sl.shard_map(f, in_specs=None, out_specs="n/dp m"))(x)
    sl.debug.print("alone {}", torch.ones(1))
    held = ["f32[2, 1] [[0], [1]]", "f32[2, 1] [[2], [3]]"]
    each = [f"rank {r}: {what} {held[r]}" for r in range(2) for what in ("y", "row")]
    want = [*(f"rank {r}: {held[r]}" for r in range(2)), *each, *each, "rank 0: alone f32[1] [1]"]
    assert capsys.readouterr().out.splitlines() == want


def test_recomputation_prints_again(capsys):
    def f(x: Tensor) -> Tensor:
        sl.debug.print("x {}", x[0])
        return x.sin()

    def run(x: Tensor) -> Tensor:
        return sl.grad(lambda y: sl.remat(f)(y).sum())(x)

    with sl.make_mesh(dp=1, simulate=True):
        sl.jit(sl.shard_map(run, in_specs=None, out_specs="n"))(sl.shard(torch.ones(3), "n"))
    assert capsys.readouterr().out.splitlines() == ["rank 0: x 1"] * 2


def test_passes_keep_prints_in_order(capsys):
    """What follows the backward pass is sorted by the reductions that it needs."""

    def train(params: Any, batch: Tensor) -> Any:
        grads = sl.grad(lambda p: loss_of(p, batch))(params)
        for name in ("c", "a", "b"):
            sl.debug.print(name + " {:.0f}", grads[name].sum())
        return grads

    def loss_of(p: Any, batch: Tensor) -> Tensor:
        w = sl.gather(p, "dp")
        return sl.psum(sl.pending((batch * w["a"]).sum() + (batch * 2 * w["b"]).sum() + (w["c"]).sum(), "dp"), "dp")

    with sl.make_mesh(dp=2, simulate=True):
        params = {k: sl.shard(torch.ones(4, dtype=F64), "n/dp") for k in "abc"}
        batch = sl.shard(torch.arange(8, dtype=F64).view(2, 4), "batch/dp n")
        run = sl.jit(sl.shard_map(train, in_specs=None, out_specs=None), passes=[sl.passes.dedupe, sl.passes.overlap])
        run(params, batch)
    said = capsys.readouterr().out
    assert [[line[8] for line in lines_of(said, rank)] for rank in range(2)] == [["c", "a", "b"]] * 2


ODD = torch.arange(20.0)
ODD[:3] = torch.tensor([torch.nan, torch.nan, -torch.inf])
SHOWN = [
    ("{}", torch.tensor(0.25), "0.25"),
    ("{}", torch.tensor(3), "3"),
    ("{:.3f}", torch.tensor(2.0), "2.000"),
    ("{}", torch.tensor([True, False]), "bool[2] [True, False]"),
    ("{}", torch.arange(20.0).bfloat16(), "bf16[20] mean 9.5 std 5.91608 min 0 max 19"),
    ("{:.1f}", ODD, "f32[20] mean 11.0 std 5.0 min 3.0 max 19.0 2 NaN 1 inf"),
    ("{}", torch.full((5, 5), torch.nan), "f32[5, 5] 25 NaN"),
    ("{}", torch.ones(0, 3), "f32[0, 3] []"),
    ("{{}} {1} {0}", torch.ones(1), "{} b f32[1] [1]"),
]


@pytest.mark.parametrize("fmt, x, want", SHOWN)
def test_how_values_are_shown(fmt: str, x: Tensor, want: str, capsys):
    sl.debug.print(fmt, x, *["b"] * ("{1}" in fmt))
    assert capsys.readouterr().out == f"rank 0: {want}\n"


def test_errors():
    with pytest.raises(sl.SpecError, match=r"'\{\} \{\}' wants 2 or more values, there are 1"):
        sl.debug.print("{} {}", 1)
    with pytest.raises(sl.SpecError, match=r"'\{\}' has 1 places for 2 values"):
        sl.debug.print("{}", 1, 2)
    with pytest.raises(sl.SpecError, match=r"`\{x\}` in '\{x\}': values are taken in order"):
        sl.debug.print("{x}", 1)
