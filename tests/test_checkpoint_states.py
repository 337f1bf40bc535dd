"""checkpoint.py: whole train states on other meshes and ZeRO stages; a run goes on as if nothing had been."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks
from saved import DOUBLE, KEY, SIZES, Block, Model, same, simulated, whole
from torch import Tensor

import shardlib as sl
from shardlib import tree as trees


@sl.pytree
class Batch:
    tokens: Tensor = sl.spec("batch/dp seq")
    targets: Tensor = sl.spec("batch/dp seq")


def block(w: Block, x: Tensor) -> Tensor:
    w = sl.gather(w, "dp")
    h = F.rms_norm(x, x.shape[-1:]) * w.norm
    h = F.gelu(sl.einsum("batch/dp seq model, model hidden/tp -> batch/dp seq hidden/tp", h, w.w_in))
    h = sl.einsum("batch/dp seq hidden/tp, hidden/tp model -> batch/dp seq model +tp", h, w.w_out)
    return x + sl.psum("batch/dp seq model +tp -> batch/dp seq model", h)


def loss(model: Model, batch: Batch, key: Tensor) -> sl.Mean:
    embed = sl.gather(model.embed, "dp")
    x = F.embedding(batch.tokens, embed) * (1 + 0.1 * sl.random.normal(key, (), DOUBLE))
    for w in model.blocks:
        x = block(w, x)
    logits = sl.einsum("batch/dp seq model, vocab model -> batch/dp seq vocab", x, embed)
    logits = logits + sl.gather(model.nothing, "dp").sum()
    return sl.token_loss("batch/dp seq vocab, batch/dp seq", logits, batch.targets)


def batches(count: int) -> list[Batch]:
    g = torch.Generator().manual_seed(0)
    draws = [torch.randint(0, 16, (2, 4, 6), generator=g) for _ in range(count)]
    return [Batch(tokens=t, targets=y) for t, y in draws]


def trainer(stage: int) -> Any:
    layout = sl.zero(sl.specs(Model), axis="dp", stage=stage)
    return sl.jit(sl.step(loss, sl.optim.adamw(0.01, weight_decay=0.1), layout=layout))


def start(step: Any) -> Any:
    return step.init(sl.init(Model, sizes=SIZES | dict(layers=1), key=KEY), key=sl.random.key(5))


def train(step: Any, state: Any, data: list[Batch]) -> Any:
    for b in data:
        state, _ = step(state, sl.shard(b))
    return state


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """Three steps on dp=2, tp=2 with ZeRO-3: the save, the state gathered, and the arrays after three steps more."""
    with simulated(dp=2, tp=2):
        step = trainer(3)
        state = train(step, start(step), batches(3))
        path = sl.save(tmp_path_factory.mktemp("trained"), state)
        return path, trees.map_(whole, state), train(step, state, batches(6)[3:])


TARGETS = [
    (dict(dp=4, tp=1), 1),
    (dict(dp=1, tp=1), 0),
    (dict(dp=1, tp=4), 3),
    (dict(dp=3, tp=1), 2),
    (dict(dp=2, tp=2), 3),
]


@pytest.mark.parametrize(("axes", "stage"), TARGETS)
def test_train_state_restores_under_other_meshes_and_stages(trained: Any, axes: dict[str, int], stage: int) -> None:
    path, want, _ = trained
    assert path.name == "step-00000003"
    with simulated(**axes):
        step = trainer(stage)
        fresh = start(step)
        got = sl.restore(path, sl.abstract(lambda: start(step)))
        assert same(got, want)
        for x, y in zip(trees.leaves(got), trees.leaves(fresh), strict=True):
            assert (x.spec, x.shape, len(x.shards)) == (y.spec, y.shape, len(y.shards))


def test_six_steps_are_three_and_three(trained: Any, tmp_path: Path) -> None:
    """The second three from the save, and from what four processes with ZeRO-1 made of it."""
    saved = trained[0]

    def run() -> str:
        with sl.make_mesh(dp=2, tp=2):
            step = trainer(1)
            return str(sl.save(tmp_path, sl.restore(saved, sl.abstract(lambda: start(step)))))

    paths = {saved, *map(Path, on_ranks(4, run))}
    assert len(paths) == 2
    with simulated(dp=2, tp=2):
        step = trainer(3)
        like = sl.abstract(lambda: start(step))
        for path in paths:
            resumed = train(step, sl.restore(path, like), batches(6)[3:])
            for x, y in zip(trees.leaves(trained[2]), trees.leaves(resumed), strict=True):
                assert all(torch.equal(a, b) for a, b in zip(x.shards, y.shards, strict=True))
