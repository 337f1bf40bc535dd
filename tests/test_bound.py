"""The list schedule of benchmarks/bound.py against schedules by hand."""

import pytest

from benchmarks.bound import PACKET, Block, bounds, rate_of, schedule

BLOCKS = [Block(name, forward=1.0, backward=2.0, update=0.5, bytes=1) for name in ("one", "two")]


@pytest.mark.parametrize(
    "stage, rate, seconds",
    [
        (0, 1e9, 2 + 4 + 1),  # nothing but compute
        (1, 1e9, 2 + 4 + 0.5),  # half of the updates
        (0, 1.0, 6 + 1 + 0.5),  # the last sum and its update are exposed
        (1, 1.0, 0.5 + 6 + 0.5 + 0.25),  # the first gather, too
        (2, 1.0, 0.5 + 6 + 0.5 + 0.25),
        (3, 1.0, 0.5 + 6 + 0.5 + 0.25),
        (0, 0.1, 4 + 2 * 10 + 0.5),  # sums follow each other
        (3, 0.1, 10 + 1 + 2 + 2 * 5 + 0.25),  # two gathers, two scatters; no block gathers again
    ],
)
def test_by_hand(stage: int, rate: float, seconds: float):
    assert schedule(BLOCKS, stage, rate) == pytest.approx(seconds, abs=1e-6)


def test_in_steps_of_one_process():
    assert rate_of("1gbit") == 125e6 and rate_of("107mbit") == 107e6 / 8
    assert bounds(BLOCKS, 14.0, "1000gbit") == pytest.approx(
        {"data parallel": 1.0, "ZeRO-1": 13 / 14, "ZeRO-2": 13 / 14, "ZeRO-3": 13 / 14}
    )
    alone = schedule(BLOCKS, 2, 1 / 8 / PACKET) / 7.0  # of packets, a part is headers
    assert bounds(BLOCKS, 7.0, "0.000001mbit")["ZeRO-2"] == pytest.approx(alone)
    assert bounds(BLOCKS, 7.0, "1000gbit", compute=1.5)["data parallel"] == pytest.approx(1.5)
