"""The example of data: rows of packed documents, split by rank, resumed on any number of ranks."""

import json
from itertools import pairwise
from pathlib import Path

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
    rows, seq = 3, 5
    batches = iter(packed_data.Packed(path, rows, seq))
    for epoch in range(2):
        order = np.random.default_rng(epoch).permutation(len(DOCUMENTS))
        stream = [(t, n) for n in order for t in DOCUMENTS[n]]
        for _ in range((len(stream) - 1) // (rows * seq)):
            batch = next(batches)
            for i in range(rows):
                row, piece = {name: x[i] for name, x in batch.items()}, stream[: seq + 1]
                assert row["tokens"].tolist() == [t for t, _ in piece[:-1]]
                assert row["targets"].tolist() == [b if m == n else -1 for (_, n), (b, m) in pairwise(piece)]
                changes = [m != n for (_, n), (_, m) in pairwise(piece[:-1])]
                assert row["document"].diff().tolist() == changes and row["document"][0] == 0
                del stream[:seq]


def test_any_number_of_ranks_goes_on(path):
    """With shares that differ by a row, from the position of any rank, in another epoch."""

    def read(of: int, steps: int, position: str = "") -> tuple[list[torch.Tensor], list[str]]:
        loaders = [packed_data.loader(packed_data.Packed(path, 5, 4, rank, of), position) for rank in range(of)]
        its = list(map(iter, loaders))
        batches = [torch.cat([next(i)["tokens"] for i in its]) for _ in range(steps)]
        return batches, [json.dumps(x.state_dict()) for x in loaders]

    whole, _ = read(1, 7)
    first, positions = read(2, 3)
    saved = sl.save(path.parent / "saves", {"data": positions[1]}, step=3)
    rest, _ = read(3, 4, sl.restore(saved, {"data": ""})["data"])
    assert all(map(torch.equal, whole, first + rest)) and positions[0] == positions[1]
    assert not torch.equal(whole[0], whole[2]), "45 tokens are two batches: an order of its own for each epoch"


def test_it_runs_as_a_program(capsys):
    packed_data.main()
    assert capsys.readouterr().out.endswith("read what 40 on one do: True\n")
