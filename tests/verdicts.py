"""Generated per-device programs typed by shardlib and by spmd_types, step by step; test_verdicts.py runs this.

    python tests/verdicts.py SEED PROGRAMS

Prints one JSON object. `steps`: for every step of every program the op, its axis, the axes of the mesh, the operands'
types, and what either library says: the type of the result, a letter per axis, or "refused". `differences`: of what the
programs leave out, [name, operands' types, ours, theirs] on one axis. It is a process of its own since spmd_types needs
a process group (a fake one will do) and patches autograd while it checks.
"""

import json
import random
import sys
import warnings
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardlib as sl
from shardlib.insert import per_device

spmd: Any = import_module("spmd_types")  # whose stubs export nothing
typecheck = import_module("spmd_types.checker").typecheck

LOCAL: dict[str, tuple[int, Callable[..., Tensor]]] = {  # number of operands, and the op; all values are 4 x 4
    "neg": (1, torch.neg),
    "transpose": (1, torch.t),
    "sum": (1, lambda x: torch.sum(x, 0, keepdim=True).expand(4, 4)),
    "mean": (1, lambda x: torch.mean(x, 1, keepdim=True).expand(4, 4)),
    "cumsum": (1, lambda x: torch.cumsum(x, 0)),
    "narrow": (1, lambda x: torch.narrow(x, 0, 1, 1).expand(4, 4)),
    "flip": (1, lambda x: torch.flip(x, (0,))),
    "reshape": (1, lambda x: torch.reshape(x, (2, 8)).reshape(4, 4)),
    "scale": (1, lambda x: x * 3.0),
    "halve": (1, lambda x: x / 2.0),
    "shift": (1, lambda x: x + 1.0),
    "from_one": (1, lambda x: 1.0 - x),
    "one_over": (1, lambda x: 1.0 / x),
    "tanh": (1, torch.tanh),
    "relu": (1, torch.relu),
    "abs": (1, torch.abs),
    "exp": (1, torch.exp),
    "square": (1, lambda x: x**2),
    "softmax": (1, lambda x: torch.softmax(x, -1)),
    "amax": (1, lambda x: torch.amax(x, 0, keepdim=True).expand(4, 4)),
    "add": (2, torch.add),
    "sub": (2, torch.sub),
    "mul": (2, torch.mul),
    "div": (2, torch.div),
    "matmul": (2, torch.matmul),
    "einsum": (2, lambda x, y: torch.einsum("ij,kj->ik", x, y)),
    "cat": (2, lambda x, y: torch.narrow(torch.cat([x, y]), 0, 2, 4)),
    "maximum": (2, torch.maximum),
    "addmm": (3, torch.addmm),
}


class Over(NamedTuple):
    """A collective over an axis, in either library, from a value of 4 x 4 to one; `takes`: the types it is given."""

    ours: Callable[[Tensor, str], Tensor]
    theirs: Callable[[Tensor, Any], Tensor]
    takes: str = "IRVP"


def _top(x: Tensor) -> Tensor:
    return torch.narrow(x, 0, 0, 4)


def _twice(x: Tensor, n: int) -> Tensor:
    return torch.cat([x] * n)


COLLECTIVES = {
    "psum": Over(lambda x, a: sl.psum(x, a), lambda x, g: spmd.all_reduce(x, g, dst=spmd.I)),
    "psum_scatter": Over(
        lambda x, a: _twice(sl.psum_scatter(f"s b +{a} -> s/{a} b", x), sl.axis_size(a)),
        lambda x, g: _twice(spmd.reduce_scatter(x, g, dst=spmd.S(0)), g.size()),
    ),
    "all_gather": Over(
        lambda x, a: _top(sl.all_gather(f"g/{a} b -> g b", x)),
        lambda x, g: _top(spmd.all_gather(x, g, src=spmd.S(0), dst=spmd.R)),
    ),
    "all_gather_invariant": Over(
        lambda x, a: _top(sl.all_gather(f"g/{a} b -> g b", x, invariant=True)),
        lambda x, g: _top(spmd.all_gather(x, g, src=spmd.S(0), dst=spmd.I)),
    ),
    "all_to_all": Over(
        lambda x, a: sl.all_to_all(f"g/{a} b -> g b/{a}", x).reshape(4, 4),
        lambda x, g: spmd.all_to_all(x, g, src=spmd.S(0), dst=spmd.S(1)).reshape(4, 4),
    ),
    "pvary": Over(lambda x, a: sl.pvary(x, a), lambda x, g: spmd.convert(x, g, src=spmd.I, dst=spmd.R), "I"),
    "pending": Over(lambda x, a: sl.pending(x, a), lambda x, g: spmd.reinterpret(x, g, src=spmd.V, dst=spmd.P), "IRV"),
}

# What the two take differently, on one axis: name -> (ours, theirs), and the operands' types to try it with.
DIFFERENCES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[str, ...]]] = {
    "join": (torch.add, torch.add, ("IR", "IV")),
    "scaled by I": (torch.mul, torch.mul, ("PI",)),
    "cast": (lambda x: x.double(), lambda x: x.double(), ("P",)),
    "index": (lambda x: x[0], lambda x: x[0], ("P",)),
    "linear": (torch.nn.functional.linear, torch.nn.functional.linear, ("PR",)),
    "plus zero": (lambda x: x + 0.0, lambda x: x + 0.0, ("P",)),
    "pvary again": (COLLECTIVES["pvary"].ours, COLLECTIVES["pvary"].theirs, ("R", "V", "P")),
    "pending again": (COLLECTIVES["pending"].ours, COLLECTIVES["pending"].theirs, ("P",)),
    "constant": (lambda: torch.zeros(4), lambda: torch.zeros(4), ("",)),
}


def aligned(xs: list[Tensor], groups: list[Any]) -> list[Tensor]:
    """The operands with the conversions written out that joining inserts: invariant to replicated, per axis, where
    another operand is not invariant."""
    for g in groups:
        found = [spmd.get_axis_local_type(x, g) for x in xs]
        if set(found) != {spmd.I}:
            xs = [
                spmd.convert(x, g, src=spmd.I, dst=spmd.R) if t is spmd.I else x for x, t in zip(xs, found, strict=True)
            ]
    return xs


def typed(kind: str, groups: Iterable[Any]) -> Tensor:
    """An input of spmd_types: it has a gradient, without which that takes I for R."""
    types = dict(zip(groups, map(spmd.PerMeshAxisLocalSpmdType, kind), strict=True))
    return spmd.assert_type(torch.randn(4, 4, requires_grad=True), types)


class Step(NamedTuple):
    """An op of a program (over an axis of the mesh, if it is a collective) on values of the pool, by number."""

    op: str
    axis: str | None
    operands: tuple[int, ...]


def written(rng: random.Random, mesh: sl.Mesh, steps: int) -> tuple[list[str], list[Step], list[str], list[list[str]]]:
    """A program typed by shardlib: the inputs' types, the steps, a verdict on each, and its operands' types.

    The pool is the inputs and what each step gives; a refused step gives its first operand back.
    """
    axes = mesh.axis_names
    inputs = ["".join(rng.choice("IRVP") for _ in axes) for _ in range(5)]
    program, verdicts, taken = [], [], []
    with FakeTensorMode(), per_device(mesh) as here:
        pool = [here.set_type(torch.empty(4, 4), kind) for kind in inputs]
        while len(program) < steps:
            name, axis, count = rng.choice([*LOCAL, *COLLECTIVES]), None, 1
            if name in LOCAL:
                count = LOCAL[name][0]
            else:
                axis = rng.choice(axes)
            at = tuple(
                rng.randrange(rng.choice((len(inputs), len(pool)))) for _ in range(count)
            )  # inputs are of all types
            kinds = [here.type_of(pool[i]) for i in at]
            if axis and kinds[0][axes.index(axis)] not in COLLECTIVES[name].takes:
                continue
            try:
                x = (
                    LOCAL[name][1](*(pool[i] for i in at))
                    if axis is None
                    else COLLECTIVES[name].ours(pool[at[0]], axis)
                )
                verdicts.append(here.type_of(x))
            except sl.SpecError:
                x = pool[at[0]]
                verdicts.append("refused")
            pool.append(x)
            taken.append(kinds)
            program.append(Step(name, axis, at))
    return inputs, program, verdicts, taken


def checked(inputs: list[str], program: list[Step], groups: dict[str, Any]) -> list[str]:
    """The verdicts of spmd_types on the same program."""
    out = []
    with typecheck():
        pool = [typed(kind, groups.values()) for kind in inputs]
        for op, axis, at in program:
            xs = [pool[i] for i in at]
            try:
                if axis is None:
                    x = LOCAL[op][1](*aligned(xs, list(groups.values())))
                else:
                    x = COLLECTIVES[op].theirs(xs[0].contiguous(), groups[axis])  # as its kernels ask
                out.append("".join(spmd.get_axis_local_type(x, g).value for g in groups.values()))
            except spmd.SpmdTypeError:
                x = xs[0]
                out.append("refused")
            pool.append(x)
    return out


def differences(mesh: sl.Mesh, group: Any) -> list[list[str]]:
    """What either library says of what the programs leave out."""
    out = []
    for name, (ours, theirs, tries) in DIFFERENCES.items():
        for kinds in tries:
            over = name.endswith("again")  # a collective, which takes an axis
            with FakeTensorMode(), per_device(mesh) as here:
                xs = [here.set_type(torch.empty(4, 4), k) for k in kinds]
                try:
                    a = here.type_of(ours(*xs, *(["dp"] if over else [])))
                except sl.SpecError:
                    a = "refused"
            with typecheck(), spmd.set_current_mesh(frozenset({spmd.MeshAxis.of(group)})):
                xs = [typed(k, [group]) for k in kinds]
                try:
                    b = spmd.get_axis_local_type(theirs(*xs, *([group] if over else [])), group).value
                except spmd.SpmdTypeError:
                    b = "refused"
            out.append([name, kinds, a, b])
    return out


def main() -> None:
    seed, count = map(int, sys.argv[1:])
    warnings.simplefilter("ignore", FutureWarning)  # spmd_types calls functions that torch has renamed
    dist.init_process_group(backend="fake", rank=0, world_size=4, store=FakeStore())
    rng, out, differ = random.Random(seed), [], []
    for sizes in ({"dp": 4}, {"dp": 2, "tp": 2}):
        mesh = sl.make_mesh(sizes, simulate=True)
        devices = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        groups = {a: devices.get_group(a) for a in sizes}
        for _ in range(count // 2):
            inputs, program, ours, taken = written(rng, mesh, 8)
            theirs = checked(inputs, program, groups)
            for step, kinds, a, b in zip(program, taken, ours, theirs, strict=True):
                out.append(dict(op=step.op, axis=step.axis, axes=list(sizes), operands=kinds, ours=a, theirs=b))
        if len(sizes) == 1:
            differ = differences(mesh, groups["dp"])
    print(json.dumps(dict(steps=out, differences=differ)))


if __name__ == "__main__":
    main()
