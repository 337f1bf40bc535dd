"""The example of data: rows of packed documents, split by rank, resumed on any number of ranks."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("torchdata")
# torchdata 0.11 calls what torch 2.13 will drop
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

import packed_data  # noqa: E402
import shardlib as sl  # noqa: E402

DOCUMENTS = [[100 * n + i for i in range(1 + 5 * n % 7)] for n in range(11)]  # 45 tokens, from 1 to 7 each


@pytest.fixture
def path(tmp_path: Path) -> Path:
    packed_data.write(tmp_path / "tokens", DOCUMENTS)
    return tmp_path / "tokens"


def test_rows_are_the_documents_end_to_end(path):
    data, seq = packed_data.Packed(path, rows=3, seq=5, seed=4), 5
    length = sum(map(len, DOCUMENTS))
    per_epoch = (length - 1) // seq
    for epoch in range(2):
        order = np.random.default_rng((4, epoch)).permutation(len(DOCUMENTS))
        stream = [(t, n) for n in order for t in DOCUMENTS[n]]
        for at in range(per_epoch):
            row, piece = data.row(epoch * per_epoch + at), stream[at * seq : at * seq + seq + 1]
            assert row["tokens"].tolist() == [t for t, _ in piece[:-1]]
            assert row["targets"].tolist() == [b if m == n else -1 for (_, n), (b, m) in pairwise(piece)]
            changes = [m != n for (_, n), (_, m) in pairwise(piece[:-1])]
            assert row["document"].diff().tolist() == changes and row["document"][0] == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_any_number_of_ranks_goes_on(path, workers):
    def read(of: int, steps: int, state: Any = None) -> tuple[list[torch.Tensor], list[Any]]:
        loaders = [
            packed_data.loader(packed_data.Packed(path, rows=6, seq=4, rank=r, of=of), state, workers)
            for r in range(of)
        ]
        its = list(map(iter, loaders))
        batches = [torch.cat([next(i)["tokens"] for i in its]) for _ in range(steps)]
        return batches, [x.state_dict() for x in loaders]

    whole, _ = read(1, 7)
    first, states = read(2, 3)
    saved = sl.save(path.parent / "saves", {"data": json.dumps(states[1])}, step=3)
    rest, _ = read(3, 4, json.loads(sl.restore(saved, {"data": ""})["data"]))
    assert all(map(torch.equal, whole, first + rest)) and states[0] == states[1]


def test_it_runs_as_a_program(capsys):
    packed_data.main()
    assert capsys.readouterr().out.endswith("read what 40 on one do: True\n")
