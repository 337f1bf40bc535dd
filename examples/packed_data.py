"""Data for a long run: memory-mapped files of tokens, documents packed into rows, a position that outlives the run.

    python examples/packed_data.py          reads on two ranks, goes on with four, and compares with a run on one

torchdata's `StatefulDataLoader` reads ahead in a process of its own; its position is what the train loop has taken, not
what has been read. It counts rows of all ranks, so any number of ranks may go on from it: save
`{"state": state, "data": json.dumps(loader.state_dict())}`.
"""

import tempfile
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore # pip install torchdata


def write(path: Path, documents: Sequence[Sequence[int]]) -> None:
    """`path.bin`: the tokens of all documents; `path.ends`: where each ends."""
    np.concatenate([np.asarray(d, dtype=np.uint16) for d in documents]).tofile(path.with_suffix(".bin"))
    np.cumsum([len(d) for d in documents], dtype=np.int64).tofile(path.with_suffix(".ends"))


class Packed(IterableDataset):
    """Batches of `rows` rows of `seq` tokens over all ranks, of which this is rank `rank` of `of`: without end.

    An epoch is all documents in an order of its own, end to end, cut into rows. `document` numbers the documents of a
    row, for masks; the target is -1 where one ends, since what comes next is no part of it.
    """

    def __init__(self, path: Path, rows: int, seq: int, rank: int = 0, of: int = 1, seed: int = 0) -> None:
        self.tokens = np.memmap(path.with_suffix(".bin"), dtype=np.uint16, mode="r")
        self.ends = np.fromfile(path.with_suffix(".ends"), dtype=np.int64)
        self.rows, self.seq, self.seed, self.taken = rows, seq, seed, 0
        self.share = range(rows * rank // of, rows * (rank + 1) // of)
        self.order = lru_cache(1)(self._order)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            found = [self.row(self.taken + i) for i in self.share]
            self.taken += self.rows
            yield {name: torch.stack([row[name] for row in found]) for name in found[0]}

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The documents of an epoch, and where each ends in it."""
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.ends))
        return order, np.diff(self.ends, prepend=0)[order].cumsum()

    def row(self, number: int) -> dict[str, Tensor]:
        """One row of all that there ever are."""
        epoch, at = divmod(number, (len(self.tokens) - 1) // self.seq)
        order, ends = self.order(epoch)
        place = at * self.seq + np.arange(self.seq + 1)
        document = np.searchsorted(ends, place, side="right")  # in the epoch's order
        tokens = torch.from_numpy(self.tokens[self.ends[order[document]] - ends[document] + place].astype(np.int64))
        document = torch.from_numpy(document - document[0])
        targets = tokens[1:].where(document[1:] == document[:-1], -1)
        return dict(tokens=tokens[:-1], targets=targets, document=document[:-1])

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


def loader(data: Packed, state: dict[str, Any] | None = None, workers: int = 1) -> StatefulDataLoader:
    """Batches of `data`, from where `state` was taken; it is the same on all ranks. At most one worker per rank."""
    generator = torch.Generator().manual_seed(data.seed)  # else the states of ranks differ in a seed
    made = StatefulDataLoader(data, batch_size=None, num_workers=workers, generator=generator)
    if state:
        made.load_state_dict(state)
    return made


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokens")
        write(path, [[n % 997] * (5 + n * 7 % 23) for n in range(300)])

        def read(of: int, steps: int, state: dict[str, Any] | None = None) -> tuple[list[Tensor], dict[str, Any]]:
            """The tokens of some steps, all ranks' shares side by side, and the position after them."""
            loaders = [loader(Packed(path, rows=8, seq=32, rank=r, of=of), state) for r in range(of)]
            batches = [[next(it)["tokens"] for it in its] for its in [list(map(iter, loaders))] for _ in range(steps)]
            return list(map(torch.cat, batches)), loaders[0].state_dict()

        whole, _ = read(1, steps=40)  # more than an epoch
        first, state = read(2, steps=25)
        rest, _ = read(4, steps=15, state=state)
        same = all(map(torch.equal, whole, first + rest))
        print(f"25 steps on two ranks and 15 on four read what 40 on one do: {same}")


if __name__ == "__main__":
    main()
