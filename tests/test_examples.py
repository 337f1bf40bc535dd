"""The examples: each runs, and each does on a mesh what it does on one rank."""

import importlib
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gpt
import hessian
import hybrid_sharding
import lora
import pipeline_3d
import shardlib as sl
import tied_gpt
from matmul_25d import matmul_25d, test_matmul_25d, test_summa, test_traffic  # noqa: F401  # as a user's repository has them
from shardlib import tree

F64 = torch.float64
SAYS = dict(
    ring_attention="dv: largest difference to one process",
    ulysses="largest difference to one process",
    matmul_25d="equal to one process: True",
    hybrid_sharding="HSDP    221,184 bytes over gpu, 6,144 bytes over node",
    lora="1.weight_ema.lora.*.b",
    moe="step 20: loss",
)


@pytest.mark.parametrize("name", SAYS)
def test_it_runs_as_a_program(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module(name).main()
    assert SAYS[name] in capsys.readouterr().out


# ---- a GPT with tied ends


def test_tied_gpt_is_what_it_is_on_one_rank() -> None:
    """With dropout and rematerialization, in 8 micro-batches."""
    layout = sl.zero(sl.specs(tied_gpt.GPT), axis="dp", stage=1)
    mesh, sizes = sl.make_mesh(dp=2, tp=2, simulate=True), tied_gpt.gpt.sizes(vocab=32, layers=2, model=8, heads=2)
    with mesh:
        params = sl.init(tied_gpt.GPT, sizes=sizes, key=sl.random.key(0), dtype=F64)
    sl.testing.check_loss(tied_gpt.loss, params, tied_gpt.data(3, 16), mesh=mesh, layout=layout, accumulate=8)


def test_tied_gpt_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """2 steps, and 1 + save + restore + 1 with the same masks: bitwise."""
    mesh = sl.make_mesh(dp=2, tp=1, simulate=True)
    whole = tied_gpt.train(tmp_path, mesh, 2, save_every=1).value
    shutil.rmtree(sl.latest(tmp_path) or "")  # as if it had stopped before
    again = tied_gpt.train(tmp_path, mesh, 2, save_every=1).value
    assert torch.equal(again, whole) and torch.isfinite(whole) and sl.latest(tmp_path) == tmp_path / "step-00000002"


# ---- three axes


def test_pipeline_3d_is_what_it_is_on_one_rank() -> None:
    """Two steps with dropout and clipping, in float32."""
    meshes = (sl.make_mesh(dp=2, tp=2, pp=2, simulate=True), sl.make_mesh(dp=1, tp=1, pp=1, simulate=True))
    found, wanted = (pipeline_3d.train(mesh, pipeline_3d.SCHEDULES["one_f_one_b"], 2) for mesh in meshes)
    assert found == pytest.approx(wanted, rel=1e-4) and found[1] < found[0]


@pytest.mark.slow
def test_pipeline_3d_under_a_launcher() -> None:
    """Four processes, tp=1."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", pipeline_3d.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    begin, end = re.findall(r"dp=2,tp=1,pp=2: loss (\S+) -> (\S+)", done.stdout)[0]
    assert float(end) < float(begin)


# ---- derivatives of second order


def test_the_top_eigenvalue_is_that_of_one_rank() -> None:
    meshes = (sl.make_mesh(dp=dp, tp=tp, simulate=True) for dp, tp in ((2, 2), (1, 1)))
    (found, turned, v), (wanted, _, want) = (hessian.top(mesh, 8) for mesh in meshes)
    assert found == pytest.approx(wanted, rel=1e-9) and found > 0 and turned < 1e-2
    for x, y in zip(tree.leaves(v), tree.leaves(want), strict=True):
        assert torch.allclose(x, y, rtol=0, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")  # torch's own, on the first jvp
def test_the_slope_of_the_demo_model_in_forward_mode() -> None:
    """jvp through scan, remat and all collectives under jit: the gradient times the direction."""

    def slopes(w: gpt.GPT, v: gpt.GPT, batch: gpt.Batch) -> Any:
        ahead = torch.func.jvp(lambda w: gpt.loss(w, batch).value, (w,), (v,))  # type: ignore[misc]
        return *ahead, sl.grad(gpt.loss)(w, batch)

    numbers = torch.arange(4 * 8).view(4, 8)
    with sl.make_mesh(dp=2, tp=2, simulate=True):
        w, v = (sl.init(gpt.GPT, sizes=hessian.SIZES, key=sl.random.key(k), dtype=F64) for k in (0, 1))
        batch = sl.shard(gpt.Batch(tokens=numbers * 7 % 32, targets=numbers * 5 % 31))
        f = sl.jit(sl.shard_map(slopes, in_specs=None, out_specs=("", "", sl.specs(gpt.GPT))))
        value, slope, grads = sl.gather(f(w, v, batch))
        along = sum((g * x).sum().item() for g, x in zip(tree.leaves(grads), tree.leaves(sl.gather(v)), strict=True))
    assert value > 0 and abs(slope) > 1e-3 and slope == pytest.approx(along, rel=1e-10)


# ---- layouts for nodes of GPUs


@pytest.mark.parametrize("name", hybrid_sharding.LAYOUTS)
def test_hybrid_layouts_are_what_they_are_on_one_rank(name: str) -> None:
    mesh, sizes = sl.make_mesh(dp=dict(node=2, gpu=2), simulate=True), dict(layers=2, model=8, hidden=5)
    x, y = torch.arange(2 * 8 * 8, dtype=F64).sin().view(2, 8, 8)
    with mesh:
        params = sl.init(hybrid_sharding.Net, sizes=sizes, key=sl.random.key(0), dtype=F64)
    batch = hybrid_sharding.Batch(x=x, y=y)
    layout = hybrid_sharding.LAYOUTS[name]
    sl.testing.check_loss(hybrid_sharding.loss, params, batch, mesh=mesh, layout=layout, accumulate=2)


# ---- a part that is trained


def tuned(mesh: sl.Mesh, steps: int = 3) -> dict[str, Tensor]:
    """The parameters, averages and losses of some steps in float64."""
    numbers = torch.arange(8)
    with mesh:
        params = sl.init(lora.Tuned, sizes=lora.SIZES, key=sl.random.key(0), dtype=F64)
        params = replace(params, base=lora.tied(params.base))
        start, state = sl.gather(params.base), lora.step.init(params)
        batch, losses = sl.shard(lora.Batch(tokens=numbers, targets=(numbers * 5 + 3) % 16)), []
        for _ in range(steps):
            state, metrics = lora.step(state, batch)
            losses.append(metrics["loss"])
        mean = sl.optim.get(state, "weight_ema")
        found = {"params": sl.gather(state.params), "mean": sl.gather(mean), "loss": lora.valid(mean, batch)[0].value}
    for a, b in zip(tree.leaves(start), tree.leaves(found["params"].base), strict=True):
        assert torch.equal(a, b), "what is not trained stays bitwise as it is"
    assert not any("base" in path for path in tree.paths(state.opt)), "nor has it state of the optimizer"
    found["losses"] = torch.stack(losses)
    return dict(zip(tree.paths(found), tree.leaves(found), strict=True))


def test_lora_is_what_it_is_on_one_rank() -> None:
    found, wanted = (tuned(sl.make_mesh(dp=dp, tp=tp, simulate=True)) for dp, tp in ((2, 2), (1, 1)))
    assert wanted["losses"][0] > wanted["losses"][-1] and found.keys() == wanted.keys()
    for path, x in wanted.items():
        assert (found[path] - x).abs().max() <= 1e-8 * max(1, x.abs().max()), path
