"""What is alive while a step runs, counted from storages: what `.memory()` says, and the bounds that passes keep."""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib import passes
from shardlib.errors import SpecError
from shardlib.graph.memory import Point, alive
from shardlib.jit import Jitted

F64 = torch.float64
SIZES = dict(layers=3, model=24, hidden=36, classes=6)


@sl.pytree
class Layer:
    w_in: Tensor = sl.spec("model/dp hidden/tp", dtype=F64)
    bias: Tensor = sl.spec("hidden/tp", dtype=F64)
    w_out: Tensor = sl.spec("hidden/tp model/dp", dtype=F64)


@sl.pytree
class Listed:
    head: Tensor = sl.spec("model/dp classes", dtype=F64)
    layers: list[Layer] = sl.stack("layers")


@sl.pytree
class Stacked:
    head: Tensor = sl.spec("model/dp classes", dtype=F64)
    layers: Layer = sl.stack("layers")


def block(x: Tensor, w: Layer) -> tuple[Tensor, None]:
    w = sl.gather(w, "dp")
    h = sl.einsum("batch/dp model, model hidden/tp -> batch/dp hidden/tp", x, w.w_in) + w.bias
    y = sl.einsum("batch/dp hidden/tp, hidden/tp model -> batch/dp model +tp", torch.tanh(h), w.w_out)
    return x + sl.psum("batch/dp model +tp -> batch/dp model", y), None


def loss(w: Any, batch: Tensor) -> sl.Mean:
    head, x = sl.gather(w.head, "dp"), batch  # gathered here, used last
    if isinstance(w, Stacked):
        x, _ = sl.scan(block, x, w.layers)
    else:
        for layer in w.layers:
            x, _ = block(x, layer)
    return sl.Mean.of("batch/dp classes", torch.tanh(x @ head) ** 2)


def limited(limit: int) -> list[passes.Pass]:
    """The default passes with another limit."""
    limits = (passes.bucket, passes.overlap, passes.join)
    return [partial(p, limit=limit) if p in limits else p for p in passes.default]  # type: ignore[call-arg]


def made(cls: Any, stage: int, limit: int, model: int = 24, **options: Any) -> tuple[Jitted, Any, Any]:
    """A jitted step with its arguments, on the current mesh."""
    train = sl.step(loss, sl.optim.adamw(0.1), layout=sl.zero(sl.specs(cls), stage=stage), **options)
    state = train.init(sl.init(cls, sizes=SIZES | dict(model=model), key=sl.random.key(1)))
    batch = sl.shard(torch.linspace(-1, 1, 24 * model, dtype=F64).view(24, model), "batch/dp model")
    return sl.jit(train, donate_argnums=0, passes=limited(limit)), state, batch  # type: ignore[return-value]


def measured(cls: Any, stage: int, limit: int, **options: Any) -> tuple[list[Point], list[int]]:
    """What is alive at every node, which `.memory()` knows, and the bytes of every gather's result in order."""
    f, state, batch = made(cls, stage, limit, **options)
    program = f.lower(state, batch)
    said = alive(program.running())
    found = sl.testing.memory(f, state, batch)
    assert found == said
    assert max(found, key=lambda p: p.total) == program.memory()
    size = {n: program.mesh.size(n) for n in program.mesh.shape}
    gathers = [c for c in program.collectives() if c.op == "all_gather"]
    return found, [torch.Size(c.shape).numel() * c.dtype.itemsize * size[c.axis] for c in gathers]


@pytest.mark.parametrize(
    "mesh, limit, options",
    [
        (dict(dp=2, tp=2), 1, {}),
        (dict(dp=2, tp=2), 1 << 20, {}),
        (dict(dp=3, tp=1), 16000, {}),
        (dict(dp=2, tp=1), 16000, dict(accumulate=3)),
        (dict(dp=2, tp=2), 1, dict(model=25)),
    ],
    ids=str,
)
@pytest.mark.parametrize("cls", [Listed, Stacked])
def test_two_groups_of_weights_are_whole(cls, mesh, limit, options):
    """A group is what one collective gathers, or what a turn of a loop needs; or one is, and its copy in order. Of
    uneven leaves too, whose padding is gathered with them."""
    with sl.make_mesh(mesh, simulate=True):
        found, groups = measured(cls, 3, limit, **options)
    if cls is Stacked:
        model = -(-options.get("model", 24) // mesh["dp"]) * mesh["dp"]
        groups = [(2 * model + 1) * 36 * 8 // mesh["tp"]] * SIZES["layers"]
    whole = max(p.bytes["copies"] for p in found)
    assert max(groups) < whole <= max(2 * max(groups), *(a + b for a, b in pairwise(groups)))


@pytest.mark.parametrize(
    "cls, stage, limit, options",
    [
        (Listed, 0, 1, {}),
        (Listed, 1, 8000, {}),
        (Stacked, 2, 1, {}),
        (Stacked, 3, 8000, {}),
        (Stacked, 3, 8000, dict(accumulate=3)),
        (Listed, 3, 8000, dict(model=25)),
    ],
    ids=str,
)
def test_state_is_held_once(cls, stage, limit, options):
    """From the first update on there are the state and one bucket, and a new count."""
    with sl.make_mesh(dp=2, tp=2, simulate=True):
        found, groups = measured(cls, stage, limit, clip=0.5, **options)
    state = sum(found[0].bytes[k] for k in ("parameters", "optimizer"))
    after = found[next(i for i, p in enumerate(found) if p.node.startswith("adamw")) :]
    kinds = ("parameters", "optimizer", "copies", "buckets")
    assert state <= max(sum(p.bytes[k] for k in kinds) for p in after) <= state + max(groups, default=0) + 8


def test_micro_batches_count_within_their_step():
    with sl.make_mesh(dp=2, tp=2, simulate=True):
        found, _ = measured(Stacked, 3, 16000, accumulate=2)
    assert {"microbatch", "step", "layer"} <= {p.graph for p in found}


def test_an_operand_goes_within_the_call_that_reads_it_last():
    """Alone on its mesh, a rank runs the code that processes run."""
    with sl.make_mesh(dp=1, tp=1, simulate=True):
        found, _ = measured(Stacked, 0, 1)
    at = next(i for i, p in enumerate(found) if p.graph.startswith("layer_backward"))
    end = next(i for i, p in enumerate(found[at:], at) if p.node == "output")
    assert found[at].bytes["activations"] > found[end].bytes["activations"]
    assert found[end].graph == found[at].graph


def test_nodes_that_give_nothing_are_passed_by():
    with sl.make_mesh(dp=2, tp=1, simulate=True):
        _, state, batch = made(Stacked, 3, 1)
        step = sl.step(loss, sl.optim.adamw(0.1), layout=sl.zero(sl.specs(Stacked), stage=3))
        f = sl.jit(step, passes=[*passes.default, passes.check_finite])
        said = alive(f.lower(state, batch).running())
        assert sl.testing.memory(f, state, batch) == said


def test_processes_hold_what_is_said():
    """gloo: sums in place, messages, also of tensors that are sent from where they are, operands kept to the wait."""

    def body() -> list[int]:
        sizes = []
        with sl.make_mesh(dp=2, tp=1):
            for cls, stage, model in ((Listed, 0, 24), (Listed, 1, 24), (Stacked, 3, 24), (Listed, 2, 2000)):
                found, groups = measured(cls, stage, 16000 if model == 24 else 4 << 20, model=model)
                assert stage < 3 or max(p.bytes["copies"] for p in found) <= 2 * max(groups)
                sizes.append(max(p.total for p in found))
        return sizes

    first, second = sl.testing.ranks(2)(body)()
    assert first == second


def test_memory_wants_a_jitted_function():
    with pytest.raises(SpecError, match=r"testing\.memory takes what `sl.jit` returns"):
        sl.testing.memory(print)
