"""The file format of torch.distributed.checkpoint: chunks of global tensors in `.distcp` files, indexed by `.metadata`.

Written by its own planner and writer, read by us, with a checksum of every chunk beside each file. Importing this
module loads torch.distributed.checkpoint, which takes a second: import it where it is used.
"""

import io
import json
import math
import pickle
import zlib
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from shardlib.errors import TreeError, listing

METADATA = ".metadata"
Exchange = Callable[[Callable[[], Any], Callable[[list[Any]], list[Any]]], Any]


@dataclass(frozen=True)
class Piece:
    """A box of the global tensor `name`, from `at`; `shape` is the global shape. Or, with no `shape`, a plain value."""

    name: str
    data: Any
    at: tuple[int, ...] = ()
    shape: tuple[int, ...] | None = None


def chunk(at: Sequence[int], x: Tensor) -> ChunkStorageMetadata:
    """The box that `x` fills from `at`."""
    return ChunkStorageMetadata(torch.Size(at), x.shape)


def write_item(name: str, shape: Sequence[int], at: Sequence[int], x: Tensor) -> WriteItem:
    """The plan to write `x` as the chunk from `at` of a tensor of global `shape`."""
    data = TensorWriteData(chunk(at, x), TensorProperties(dtype=x.dtype), torch.Size(shape))
    return WriteItem(MetadataIndex(name, torch.Size(at)), WriteItemType.SHARD, tensor_data=data)


class _Planner(DefaultSavePlanner):
    """Plans the pieces of this process; a chunk that several hold is written by the one with the least to write."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces = pieces
        self.held: dict[MetadataIndex, Any] = {}

    def create_local_plan(self) -> SavePlan:
        items = []
        for p in self.pieces:
            item = WriteItem(MetadataIndex(p.name), WriteItemType.BYTE_IO)
            if p.shape is not None:
                item = write_item(p.name, p.shape, p.at, p.data)
            self.held[item.index] = p.data
            items.append(item)
        return SavePlan(items)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.held[index]


class _Writer(FileSystemWriter):
    """Writes a checksum of every chunk beside each file."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        done = super().write_data(plan, planner)
        sums: dict[str, dict[int, int]] = {}
        for result in done.wait():
            file, offset, length = _place(result.storage_data)
            sums.setdefault(file, {})[offset] = zlib.crc32(_bytes(Path(self.path) / file, offset, length))
        for file, found in sums.items():
            _sums_of(Path(self.path) / file).write_text(json.dumps(found))
        return done


def write(folder: Path, pieces: Iterable[Piece], exchange: Exchange) -> None:
    """Write what this process holds; all processes call it, and all return once everything is written.

    `exchange(f, g)` runs `f` on every process, `g` on the list of results on the first one, and gives each process its
    item of what `g` returns; it raises everywhere what one of them raises.
    """
    planner, writer = _Planner(pieces), _Writer(folder)
    indexed: list[Metadata] = []

    def whole(plans: list[SavePlan]) -> list[SavePlan]:
        plans, metadata = planner.create_global_plan(plans)
        indexed.append(metadata)
        return writer.prepare_global_plan(plans)

    def local() -> SavePlan:
        writer.set_up_storage_writer(True)
        return writer.prepare_local_plan(planner.create_local_plan())

    plan = exchange(local, whole)

    def finish(results: list[list[WriteResult]]) -> list[None]:
        writer.finish(indexed[0], results)
        return [None] * len(results)

    exchange(lambda: writer.write_data(planner.finish_plan(plan), planner).wait(), finish)


def index(folder: Path, crc: int) -> Metadata:
    """What the checkpoint in `folder` holds and where, `crc` being the checksum of its `.metadata`."""
    try:
        data = (folder / METADATA).read_bytes()
    except FileNotFoundError:
        raise TreeError(f"{folder / METADATA} is missing, which says where every leaf is") from None
    if zlib.crc32(data) != crc:
        raise TreeError(f"{folder / METADATA} is damaged: its checksum is not the one that was written")
    return pickle.loads(data)


def damaged(folder: Path, metadata: Metadata, names: Set[str]) -> list[str]:
    """One line for every file that is missing or cut short, with those of the leaves `names` that it holds."""
    ends: dict[str, int] = {}
    holds: dict[str, dict[str, None]] = {}
    for at, info in metadata.storage_data.items():
        if at.fqn in names:
            file, offset, length = _place(info)
            ends[file] = max(ends.get(file, 0), offset + length)
            holds.setdefault(file, {})[at.fqn] = None
    lines = []
    for file, end in sorted(ends.items()):
        path = folder / file
        for need, size in ((path, end), (_sums_of(path), 1)):
            if not need.exists() or need.stat().st_size < size:
                state = "is cut short" if need.exists() else "is missing"
                lines.append(f"{need.name} {state}; it is needed for {listing(holds[file])}")
    return lines


def read(folder: Path, metadata: Metadata, wanted: Iterable[Piece]) -> list[Any]:
    """Fill the tensors of the pieces `wanted` with what the files hold there; gives the values of those that are plain.

    Each chunk is read once, whatever the number of pieces it serves, and its checksum compared.
    """
    uses: dict[MetadataIndex, list[tuple[Tensor, tuple[slice, ...]]]] = {}
    plain: list[MetadataIndex] = []
    for p in wanted:
        if p.shape is None:
            plain.append(MetadataIndex(p.name))
            continue
        saved: Any = metadata.state_dict_metadata[p.name]
        reads = create_read_items_for_chunk_list(p.name, saved, [chunk(p.at, p.data)])
        if sum(math.prod(r.lengths) for r in reads) != p.data.numel():
            raise TreeError(f"`{p.name}`: the files hold only some of its elements")
        for r in reads:
            target = p.data[_slices(r.dest_offsets, r.lengths)]
            uses.setdefault(r.storage_index, []).append((target, _slices(r.storage_offsets, r.lengths)))
    values: dict[MetadataIndex, Any] = {}

    def place(at: MetadataIndex) -> tuple[str, int, int]:
        return _place(metadata.storage_data[at])

    for file, chunks in groupby(sorted({*uses, *plain}, key=place), key=lambda at: place(at)[0]):
        sums = _sums(folder / file)
        for at in chunks:
            _, offset, length = place(at)
            data = _bytes(folder / file, offset, length)
            if zlib.crc32(data) != sums.get(str(offset)):
                raise TreeError(f"`{at.fqn}`: {folder / file} is damaged: the checksum of the {length} bytes from byte "
                                f"{offset} is not the one that was written")  # fmt: skip
            values[at] = value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            if at in uses:
                for target, part in uses[at]:
                    target.copy_(value[part])
                del values[at]
    return [values[at] for at in plain]


def _sums(path: Path) -> dict[str, int]:
    """The checksums of a file's pieces, by offset."""
    try:
        return dict(json.loads(_sums_of(path).read_text()))
    except (ValueError, TypeError) as e:
        raise TreeError(f"{_sums_of(path)} is damaged: {e}") from None


def _slices(start: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, lengths, strict=True))


def _place(info: Any) -> tuple[str, int, int]:
    return info.relative_path, info.offset, info.length


def _bytes(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        return file.read(length)


def _sums_of(path: Path) -> Path:
    return path.with_name(path.name + ".crc32")
