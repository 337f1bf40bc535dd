"""What a save holds, read without a tree to fill: its leaves, their values, and what is damaged."""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from shardlib import saves
from shardlib.errors import TreeError, listing

FORMAT = 2  # of what is in the files


@dataclass(frozen=True)
class Contents:
    """The save in `folder`. `crc`: the checksums of its small files, by name; `leaves`: the dtype and shape, or Python
    type, of each, by name; `specs`: how arrays were cut; `tied`: the first name of tensors that have several."""

    folder: Path
    step: int
    mesh: str
    crc: dict[str, int]
    leaves: dict[str, dict[str, Any]]
    specs: dict[str, str]
    tied: dict[str, str]

    @cached_property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(p.stat().st_size for p in self.folder.iterdir())

    @cached_property
    def index(self) -> Any:
        """Which leaf is where in the files. Raises `TreeError` where it is missing or damaged."""
        from shardlib import chunks

        return chunks.index(self.folder, self.crc)

    def values(self, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """The whole values of these leaves, one at a time, each checked. Raises `TreeError` where one is damaged."""
        from shardlib import chunks

        for name in names:
            what, own = self.leaves[name], self.tied.get(name, name)
            if "type" in what:
                yield name, *chunks.read(self.folder, self.index, self.crc, [chunks.Piece(own, None)])
            else:
                x = torch.empty(what["shape"], dtype=getattr(torch, what["dtype"]))
                chunks.read(self.folder, self.index, self.crc, [chunks.Piece(own, x, (0,) * x.dim(), tuple(x.shape))])
                yield name, x

    def damaged(self, names: Iterable[str]) -> list[str]:
        """One line for each file that these leaves need and that is missing, cut short, or small and not as it was
        written: large ones are read by `verify`, and by who restores."""
        from shardlib import chunks

        try:
            return chunks.damaged(self.folder, self.index, self.crc, {*names})
        except TreeError as e:
            return [str(e)]

    def verify(self) -> list[str]:
        """One line for each file or part of one that is not as it was written. Reads all."""
        from shardlib import chunks

        own = {self.tied.get(name, name) for name in self.leaves}
        if lines := self.damaged(own):
            return lines
        return chunks.verify(self.folder, self.index, self.crc)


def contents(path: Path) -> Contents:
    """What the save at `path` says of itself. Raises `TreeError` where it is none, or its description is damaged."""
    mark = path / saves.MARK
    try:
        info = json.loads(mark.read_bytes())
        if info.pop("sum") != _sum(info):
            raise ValueError("its checksum is not the one that was written")
        if (kind := info.get("format", 1)) == FORMAT:
            return Contents(path, *(info[k] for k in ("step", "mesh", "crc", "leaves", "specs", "tied")))
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise TreeError(f"{mark} is damaged: {e}; restore an older save") from None
    except NotADirectoryError:
        raise TreeError(f"{path} is not a save: it is a file") from None
    except FileNotFoundError:
        inside = [p.name for p in saves.whole(path)[-3:]]
        hint = f"it holds {listing(inside)}; sl.latest gives the newest" if inside else f"it has no {saves.MARK}"
        raise TreeError(f"{path} is not a save: {hint if path.exists() else 'it does not exist'}") from None
    mend = f"restore it with shardlib {info.get('shardlib')}, which wrote it"
    raise TreeError(f"{path} is in format {kind}, and this shardlib reads format {FORMAT}: {mend}")


def described(info: Mapping[str, Any]) -> str:
    """The text of a save's description, with its own checksum."""
    info = {"format": FORMAT, **info}
    return json.dumps({**info, "sum": _sum(info)}, indent=1)


def _sum(info: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(info, sort_keys=True).encode())
