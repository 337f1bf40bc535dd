"""What a pipeline is given: schedules of any kind."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import shardlib as sl
from shardlib import schedules


@dataclass
class Doubled:
    """As many micro-batches as there are ranks; it compares by value, and so has no hash."""

    numbers: list[int]

    def __call__(self, ranks: int) -> sl.Schedule:
        return schedules.gpipe(len(self.numbers) * ranks)(ranks)


def test_a_schedule_without_a_hash():
    def last(params: Any, x: Tensor, batch: Tensor) -> sl.Mean:
        return sl.Mean.of("batch", x)

    piped = sl.pipeline(lambda p, b: b, lambda w, x, b: x * w["w"].prod(), last, Doubled([1, 2]))
    with sl.make_mesh(pp=2, simulate=True):
        params = sl.shard({"w": torch.tensor([2.0, 3.0])}, sl.stack({"w": ""}, "layers/pp"))
        step = sl.step(piped, sl.optim.sgd(0.1))
        state, metrics = step(step.init(params), sl.shard(torch.arange(8.0), "batch"))
        assert metrics["loss"] == 6 * 3.5
        assert torch.allclose(sl.gather(state.params)["w"], torch.tensor([2 - 3 * 0.35, 3 - 2 * 0.35]))
