"""Parts of trees: frozen leaves, tied leaves, and every kind of leaf that may stand among parameters."""

from typing import Any

import pytest
import torch
from models import Net
from ranks import on_ranks
from torch import Tensor

import shardlib as sl
from shardlib import tree
from shardlib.parts import Part, firsts, once, part_of, places

F64 = torch.float64


def mesh(**axes: int) -> sl.Mesh:
    return sl.make_mesh(axes, simulate=True)


def arange(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=F64).reshape(shape)


def same(a: Any, b: Any) -> bool:
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.match(a, b), strict=True))


# ---- the tools


def test_a_part_is_taken_and_put_back():
    w, v = torch.ones(2), torch.ones(3)
    whole = {"a": w, "b": {"c": v, "d": w}, "e": None, "f": torch.ones(1)}
    part = part_of(whole, ["b.*"])
    assert part == Part((0, 1, 0, None)), "a tied leaf belongs where one of its places is chosen"
    taken = part.take(whole)
    assert tree.paths(taken) == ["a", "b.c"] and taken["f"] is None
    back = part.put(tree.map_(lambda x: -x, taken), whole)
    assert back["a"] is back["b"]["d"] and back["f"] is whole["f"] and torch.equal(back["b"]["c"], -v)
    assert part_of(whole) == Part((0, 1, 0, 3))
    with pytest.raises(sl.TreeError, match=r"a test: `b\.x` matches no path"):
        part_of(whole, "b.x", "a test")


def test_places_and_once():
    x, y = torch.ones(1), torch.ones(1)
    assert firsts("abca") == (0, 1, 2, 0)
    assert places([x, 1, y, x, 1]) == (0, 1, 2, 0, 4)
    negated = once(lambda x, k: k * x)
    assert negated(x, 1) is negated(x, 1) and negated(x, 1) is not negated(x, 2) is not negated(y, 2)


# ---- frozen leaves


def is_trained(path: str) -> bool:
    return path in ("embed", "temperature") or path.endswith((".w_in", ".scale"))


TRAINED = ["embed", "temperature", "blocks.**.w_in", "blocks.**.scale"]
CASES = [(0, True, 2, False), (1, True, 1, True), (2, True, 2, True), (3, True, 1, False), (3, False, 1, False)]


@pytest.mark.parametrize("stage, jit, accumulate, listed", CASES)
def test_c32_frozen_leaves(stage, jit, accumulate, listed, tmp_path):
    """C32: half of the tree, under remat and scan: bitwise the same after 5 steps with decay; the rest as in torch."""
    net = Net(layers=2, listed=listed, remat="nothing")
    values = net.params() | {"positions": torch.tensor([1, 4097]), "mask": torch.tensor([True, False])}
    shapes = net.shapes()
    block = {k: spec for k, (spec, _) in shapes.pop("block").items()}
    specs: Any = {k: spec for k, (spec, _) in shapes.items()} | {"positions": "two", "mask": "two/dp"}
    specs["blocks"] = [block] * 2 if listed else sl.stack(block, "layers")
    batches = [net.batch(4, 3, seed) for seed in range(5)]

    with mesh(dp=2, tp=2) if jit else mesh(dp=2, tp=1):
        adamw = sl.optim.adamw(0.1, weight_decay=0.5, mask=sl.optim.matrices)
        layout = sl.zero(specs, stage=stage)
        step = sl.step(net.loss, adamw, layout=layout, accumulate=accumulate, clip=0.5, trainable=TRAINED)
        step = sl.jit(step, donate_argnums=0) if jit else step
        state = step.init(sl.shard(values, specs))
        for batch in batches:
            state, metrics = step(state, sl.shard(batch, net.batch_spec))
        assert tree.paths(state.opt.mu) == [p for p in tree.paths(values) if is_trained(p)]
        new = sl.gather(state.params)
        found = sl.restore(sl.save(tmp_path, state), like=sl.abstract(lambda: step.init(sl.shard(values, specs))))
        assert same(sl.gather(found), sl.gather(state))

    leaves = dict(zip(tree.paths(values), tree.leaves(values), strict=True))
    own = {p: x.clone().requires_grad_() for p, x in leaves.items() if is_trained(p)}
    full = tree.unflatten(tree.flatten(values)[1], [own.get(p, x) for p, x in leaves.items()])
    matrices = [x for p, x in own.items() if p == "embed" or p.endswith("w_in")]
    groups = [{"params": matrices}, {"params": [x for x in own.values() if all(x is not m for m in matrices)]}]
    ref = torch.optim.AdamW([groups[0] | {"weight_decay": 0.5}, groups[1] | {"weight_decay": 0.0}], lr=0.1)
    for batch in batches:
        ref.zero_grad()
        net.plain(full, batch)[0].backward()
        norm = torch.stack([x.grad.norm() for x in own.values()]).norm()
        for x in own.values():
            x.grad *= min(1.0, 0.5 / norm.item())
        ref.step()
    assert metrics["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-9)
    for (p, old), x in zip(leaves.items(), tree.leaves(new), strict=True):
        if is_trained(p):
            assert torch.allclose(x, own[p], rtol=0, atol=1e-10) and not torch.equal(x, old), p
        else:
            assert x.dtype == old.dtype and torch.equal(x, old), p


# ---- tied leaves


def product(p: Any, batch: Tensor) -> sl.Mean:
    """The product of the weight's two places: W * W."""
    emb, head = sl.gather((p["emb"], p["head"]), "dp")
    return sl.Mean.of("batch/dp", batch * (emb * head).sum())


W = torch.tensor([2.0], dtype=F64)


def tied(x: Tensor = W, spec: str = "n/dp") -> Any:
    return sl.shard({"emb": x, "head": x}, spec)


def is_tied(params: Any) -> bool:
    return params["emb"] is params["head"]


def c15(m: sl.Mesh, stage: int, folder: str, jit: bool = True) -> list[Any]:
    """Two steps of AdamW from W = 2, saved and restored in between: norms, decay, and what stays one leaf."""
    with m:
        adamw, layout = sl.optim.adamw(0.1, weight_decay=0.5), sl.zero({"emb": "n/dp", "head": "n/dp"}, stage=stage)
        step = sl.step(product, adamw, layout=layout, accumulate=2)
        step = sl.jit(step, donate_argnums=0) if jit else step
        batch, found = sl.shard(torch.ones(4, dtype=F64), "batch/dp"), []
        state = step.init(sl.init(lambda key: {"emb": W, "head": W}, "n/dp", key=sl.random.key(0)))
        for _ in range(2):
            found += [is_tied(state.params), len(tree.leaves(state.opt.mu))]
            state, metrics = step(state, batch)
            found += [metrics["grad_norm"].item(), sl.gather(state.params)["head"].item()]
            like = sl.abstract(lambda: step.init(tied()))
            state = sl.restore(sl.save(folder, state), like=like)
        return [*found, is_tied(state.params), not jit or len(step.traces) == 1]


@pytest.mark.parametrize("stage, jit", [(0, True), (1, True), (2, True), (3, True), (0, False), (3, False)])
def test_c15_a_leaf_at_two_places_is_one(stage, jit, tmp_path):
    found = c15(mesh(dp=2), stage, str(tmp_path), jit)
    w = 2 - 0.1 * (1 + 0.5 * 2)  # one update of 1 and one decay
    assert found[:3] + found[4:7] + found[8:] == [True, 1, 4.0, True, 1, pytest.approx(2 * w, rel=1e-6), True, True]
    assert found[3] == pytest.approx(w, rel=1e-6)


def test_c15_on_real_ranks(tmp_path):
    simulated = c15(mesh(dp=2), 3, str(tmp_path / "simulated"))
    assert on_ranks(2, lambda: c15(sl.make_mesh(dp=2), 3, str(tmp_path))) == [simulated] * 2


def test_what_moves_state_keeps_ties():
    x = arange(4, 3)
    with mesh(dp=2, tp=3):
        params = tied(x, "m/dp n/tp")
        moved = sl.reshard(params, "m n/tp/dp")
        assert is_tied(params) and is_tied(moved) and is_tied(sl.gather(params, "tp"))
        whole = sl.gather(moved)
        assert is_tied(whole) and torch.equal(whole["emb"], x) and is_tied(tied(whole["emb"], "m n"))
        other = sl.shard({"emb": x, "head": x}, {"emb": "m/dp n", "head": "m n/tp"})
        assert not is_tied(other), "another cut is another array"

        def inside(p: Any) -> Any:
            q = sl.reshard(p, "m n")
            return p, is_tied(p), is_tied(q), is_tied(sl.gather(p, "dp")), sl.global_norm(p), sl.global_sum(p)

        for run in (
            sl.shard_map(inside, in_specs=None, out_specs=None),
            sl.jit(sl.shard_map(inside, in_specs=None, out_specs=None)),
        ):
            out, *same_inside, norm, total = run(params)
            assert is_tied(out) and all(same_inside)
            assert sl.gather(norm).item() == pytest.approx(x.norm().item()) and sl.gather(total).item() == x.sum()


def test_an_argument_that_is_tied_is_another_signature(capsys):
    f = sl.jit(lambda t: t, donate_argnums=0)
    with mesh(dp=2):
        assert is_tied(f(tied())) and is_tied(f(tied()))
        apart = f({"emb": sl.shard(W, "n/dp"), "head": sl.shard(W + 1, "n/dp")})
        assert sl.gather(apart)["emb"].item() == 2 and sl.gather(apart)["head"].item() == 3
        assert "traced again: other arguments are one and the same array" in capsys.readouterr().err


def test_a_tied_leaf_is_gathered_and_reduced_once():
    with mesh(dp=2):
        specs = {"emb": "n/dp", "head": "n/dp"}
        step = sl.jit(sl.step(product, sl.optim.sgd(1.0), layout=sl.zero(specs)))
        program = step.lower(step.init(tied(torch.ones(6))), sl.shard(torch.ones(4), "batch/dp"))
        sent = [c.op for c in program.collectives() if c.bytes > 4]
        assert sorted(sent) == ["all_gather", "psum_scatter"], program.collectives()


@pytest.mark.parametrize("chosen, value", [("emb", -2), ("head", -2), ("*", -2), ("other", 2)])
def test_a_tied_leaf_is_trained_where_one_of_its_places_is(chosen, value):
    with mesh(dp=2):
        step = sl.step(product, sl.optim.sgd(1.0), trainable=chosen)
        state = step.init(tied(spec="n") | {"other": sl.shard(W, "n")})
        state, _ = step(state, sl.shard(torch.ones(2, dtype=F64), "batch/dp"))
        assert is_tied(state.params) and sl.gather(state.params)["head"].item() == value


def test_a_layout_must_cut_a_tied_leaf_one_way():
    with mesh(dp=2):
        layout = sl.Layout(compute="n", params="n", grads="n", opt={"emb": "n/dp", "head": "n"})
        step = sl.step(product, sl.optim.sgd(1.0), layout=layout)
        said = (
            r"layout\.opt: `head` is the same array as `emb`, hence cut the same way: found `n` for the one and `n/dp`"
        )
        with pytest.raises(sl.SpecError, match=said):
            step.init(tied(arange(2)))


def test_files_hold_a_tied_leaf_once(tmp_path):
    with mesh(dp=2):
        params, apart = tied(arange(4)), {"emb": sl.shard(arange(4), "n"), "head": sl.shard(-arange(4), "n")}
        one, two = sl.save(tmp_path / "tied", params, step=0), sl.save(tmp_path / "apart", apart, step=0)
        assert is_tied(sl.restore(one, like=tied(0 * arange(4), "n"), only="head"))
        found = sl.restore(one, like=apart)
        assert not is_tied(found) and all(torch.equal(x, arange(4)) for x in tree.leaves(sl.gather(found)))
        with pytest.raises(sl.TreeError, match="`head`: found a leaf of its own, expected one tensor with `emb`"):
            sl.restore(two, like=params)
        assert sl.compare(one, params) == sl.compare(one, apart) == sl.compare(two, apart) == []
        both = {"old": params["emb"], "head": params["emb"]}
        assert sl.restore(one, like=both, rename={"old": "emb"})["old"].shape == (4,)


# ---- every kind of leaf


def odd(trained: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Leaves that are 0-d, empty, not contiguous, expanded, uneven, unused, absent, and subtrees without leaves."""
    values = {
        "w": arange(4, 6)[:, ::2],
        "t": arange(3, 5).T,
        "expanded": torch.full((1, 1), 2.0, dtype=F64).expand(5, 3),
        "scalar": torch.tensor(3.0, dtype=F64),
        "one": arange(1),
        "empty": torch.zeros(4, 0, dtype=F64),
        "short": torch.zeros(0, dtype=F64),
        "unused": arange(7),
        "none": None,
        "tree": {"none": None, "list": [], "dict": {}},
    }
    specs: dict[str, Any] = {"w": "a b/dp", "t": "c/dp d", "expanded": "e/dp f", "scalar": "", "one": "g/dp"}
    specs |= {"empty": "h/dp i", "short": "j/dp", "unused": "k/dp", "none": None, "tree": values["tree"]}
    rest = {} if trained else {"ids": torch.arange(5), "flags": torch.tensor([True, False, True])}
    return values | rest, specs | ({} if trained else {"ids": "l/dp", "flags": "m"})


def squares(p: Any, batch: Tensor) -> sl.Mean:
    p = sl.gather({k: x for k, x in p.items() if k not in ("unused", "tree")}, "dp")
    assert p["none"] is None
    total = sum((p[k] ** 2).sum() for k in ("w", "t", "expanded", "scalar", "one", "empty", "short"))
    return sl.Mean.of("batch/dp", batch * total)


SOME = ["w", "scalar", "empty", "unused"]
KINDS = [*((stage, True, None) for stage in range(4)), *((stage, False, SOME) for stage in range(4))]
KINDS += [(0, False, None), (3, True, SOME)]


@pytest.mark.parametrize(("stage", "jit", "trainable"), KINDS)
def test_leaves_of_every_kind(stage, jit, trainable):
    """One step of SGD with momentum, clipped to a quarter: 0.95 p; the structure and what is frozen as before."""
    values, specs = odd(trainable is None)
    chosen = trainable or [k for k, x in values.items() if isinstance(x, Tensor)]
    norm = sum((2 * values[k]).square().sum().item() for k in chosen if k != "unused") ** 0.5
    with mesh(dp=3):
        layout = sl.zero(specs, stage=stage)
        step = sl.step(squares, sl.optim.sgd(0.1, momentum=0.9), layout=layout, clip=norm / 4, trainable=trainable)
        step = sl.jit(step, donate_argnums=0) if jit else step
        state = step.init(sl.shard(values, specs))
        structure = tree.paths(state), [(x.shape, x.dtype) for x in tree.leaves(state)]
        state, metrics = step(state, sl.shard(torch.ones(3, dtype=F64), "batch/dp"))
        assert structure == (tree.paths(state), [(x.shape, x.dtype) for x in tree.leaves(state)])
        assert sorted(tree.paths(state.opt.trace)) == sorted(chosen)
        new = sl.gather(state.params)
    assert metrics["grad_norm"].item() == pytest.approx(norm, rel=1e-12)
    for k in tree.paths(values):
        factor = 0.95 if k in chosen and k != "unused" else 1
        assert torch.allclose(new[k], factor * values[k], rtol=0, atol=1e-12) if factor < 1 else same(new[k], values[k])


def test_a_weight_may_depend_on_what_is_frozen():
    def loss(p: Any, batch: Tensor) -> sl.Mean:
        return sl.Mean.of("batch/dp", p["w"] * batch, p["counts"][batch.long()])

    with mesh(dp=2):
        params = sl.shard({"w": W[0], "counts": torch.tensor([0, 3, 1])}, {"w": "", "counts": "n"})
        step = sl.step(loss, sl.optim.sgd(1.0), trainable="w")
        state, metrics = step(step.init(params), sl.shard(torch.tensor([0.0, 1, 2, 2], dtype=F64), "batch/dp"))
        assert metrics["tokens"].item() == 5 and metrics["loss"].item() == pytest.approx(2 * 7 / 5)
        assert sl.gather(state.params["w"]).item() == pytest.approx(2 - 7 / 5)


def test_what_is_trained_must_be_there():
    with mesh(dp=2):
        for chooser in ("x", ["emb", "x.**"]):
            with pytest.raises(
                sl.TreeError, match=r"step: trainable: `x.*` matches no path; there are `emb` and `head`"
            ):
                sl.step(product, sl.optim.sgd(1.0), trainable=chooser).init(tied())
        step = sl.step(product, sl.optim.sgd(1.0), trainable=lambda path, spec: spec.split == ("tp",))
        state, metrics = step(step.init(tied(spec="n")), sl.shard(torch.ones(2, dtype=F64), "batch/dp"))
        assert metrics["loss"].item() == 4 and metrics["grad_norm"].item() == 0
        assert sl.gather(state.params)["emb"].item() == 2
