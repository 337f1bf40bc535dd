"""Data for a long run: token files in memory maps, documents packed into rows, a position that outlives the run.

    python examples/packed_data.py          reads on two ranks, goes on with four, and compares with one

torchdata's `StatefulDataLoader` reads ahead in a process of its own; its position is what the train loop has taken. It
counts batches of all ranks, so that any number of ranks goes on from it.
"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore # pip install torchdata

import shardlib as sl


class Packed(IterableDataset):
    """Batches of `rows` rows of `seq` tokens, of which rank `rank` of `of` gets its share: without end.

    `path.bin` holds the tokens of all documents (uint16), `path.ends` where each ends (int64). An epoch is all of them
    in an order of its own, end to end, cut into batches. `document` numbers those of a row, for masks; the target is
    -1 where one ends, since what comes next is no part of it.
    """

    def __init__(self, path: Path, rows: int, seq: int, rank: int = 0, of: int = 1) -> None:
        self.tokens = np.memmap(path.with_suffix(".bin"), dtype=np.uint16, mode="r")
        self.ends = np.fromfile(path.with_suffix(".ends"), dtype=np.int64)
        self.share = np.arange(rows * rank // of, rows * (rank + 1) // of)
        self.rows, self.seq, self.taken = rows, seq, 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        batches = (len(self.tokens) - 1) // (self.rows * self.seq)  # of an epoch
        while True:
            order = np.random.default_rng(self.taken // batches).permutation(len(self.ends))
            ends = np.diff(self.ends, prepend=0)[order].cumsum()
            for batch in range(self.taken % batches, batches):
                start = (batch * self.rows + self.share) * self.seq
                place = start[:, None] + np.arange(self.seq + 1)  # in the epoch
                document = np.searchsorted(ends, place, side="right")
                tokens = self.tokens[place - ends[document] + self.ends[order[document]]].astype(np.int64)
                targets = np.where(document[:, 1:] == document[:, :-1], tokens[:, 1:], -1)
                row = dict(tokens=tokens[:, :-1], targets=targets, document=document[:, :-1] - document[:, :1])
                self.taken += 1
                yield {name: torch.from_numpy(x) for name, x in row.items()}

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


def write(path: Path, documents: Sequence[Sequence[int]]) -> None:
    np.concatenate([np.asarray(d, dtype=np.uint16) for d in documents]).tofile(path.with_suffix(".bin"))
    np.cumsum([len(d) for d in documents], dtype=np.int64).tofile(path.with_suffix(".ends"))


def loader(data: Packed, position: str = "") -> StatefulDataLoader:
    """`position`: the `state_dict` of another as JSON, which is the same on all ranks."""
    generator = torch.Generator().manual_seed(0)  # else each rank has a seed of its own in it
    made = StatefulDataLoader(data, batch_size=None, num_workers=1, generator=generator)
    if position:
        made.load_state_dict(json.loads(position))
    return made


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokens")
        write(path, [[n % 997] * (5 + n * 7 % 23) for n in range(300)])

        def read(of: int, steps: int, position: str = "") -> tuple[Tensor, str]:
            """What some ranks take in some steps, and the position after them."""
            loaders = [loader(Packed(path, 8, 32, rank, of), position) for rank in range(of)]
            taken = [batch["tokens"] for _, *batches in zip(range(steps), *loaders, strict=False) for batch in batches]
            return torch.cat(taken), json.dumps(loaders[0].state_dict())

        first, position = read(2, 25)
        saved = sl.save(folder, {"data": position}, step=25)  # beside the state: {"train": state, "data": position}
        rest, _ = read(4, 15, sl.restore(saved, like={"data": ""})["data"])
        same = torch.equal(torch.cat([first, rest]), read(1, 40)[0])
        print(f"25 steps on two ranks and 15 on four read what 40 on one do: {same}")


if __name__ == "__main__":
    main()
