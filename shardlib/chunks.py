"""The file format of torch.distributed.checkpoint: chunks of global tensors in `.distcp` files, indexed by `.metadata`.

Written by its own planner and writer, read by us, with a checksum of every chunk beside each file. Importing this
module loads torch.distributed.checkpoint, which takes a second: import it where it is used.
"""

import io
import json
import math
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from shardlib import saves
from shardlib.chunk import MEND, Chunk
from shardlib.errors import TreeError, listing
from shardlib.stream import Stream

METADATA = ".metadata"
_SUMS = ".crc32"
_ALIGNED = 64  # bytes at whose multiples copies begin
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
        held = self.held[index]
        if isinstance(held, Tensor):  # as its bytes say, so that `read` need not ask for strides and signs
            held = held.resolve_conj().resolve_neg().contiguous()
        return held


class _Files(FileSystem):
    """Files whose checksums are noted. `soon`: somebody waits for them. `error`: what one of them raised, which torch
    tells in words of its own."""

    def __init__(self) -> None:
        self.streams, self.soon = list[Stream](), True

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as file:
            self.streams.append(stream := Stream(file, self.soon))
            try:
                yield stream
            finally:
                stream.end()

    @property
    def error(self) -> OSError | None:
        return next((s.error for s in self.streams if s.error), None)


class _Writer(FileSystemWriter):
    """Writes a checksum of every chunk beside each file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs: Any = _Files()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        try:
            done = super().write_data(plan, planner)
        except Exception as e:
            raise self.fs.error or e from None
        for stream in self.fs.streams:
            saves.write(_sums_of(Path(stream.file.name)), json.dumps(stream.sums))
        return done


class Plan:
    """What this process shall write into `folder` of the `pieces` it holds: one process writes what several hold.

    All processes make it, and write it, together: `exchange(f, g)` runs `f` on every process, `g` on the list of
    results on the first one, and gives each process its item of what `g` returns; it raises everywhere what one raises.
    """

    def __init__(self, folder: Path, pieces: Iterable[Piece], exchange: Exchange) -> None:
        self.folder, self.planner, self.writer = folder, _Planner(pieces), _Writer(folder)
        self.indexed: list[Metadata] = []
        self.own: SavePlan = exchange(self._local, self._whole)

    def _local(self) -> SavePlan:
        self.writer.set_up_storage_writer(True)
        return self.writer.prepare_local_plan(self.planner.create_local_plan())

    def _whole(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans, metadata = self.planner.create_global_plan(plans)
        self.indexed.append(metadata)
        return self.writer.prepare_global_plan(plans)

    def copy(self) -> None:
        """Copy it into the host's memory: what happens to the tensors later does not change what is written. Nobody
        waits for it then, and it is written at the least cost."""
        self.writer.fs.soon = False
        own = [item.index for item in self.own.items]
        self.planner.held = dict(zip(own, _copied([self.planner.held[at] for at in own]), strict=True))

    def write(self, exchange: Exchange) -> None:
        """Write it; all processes return once everything is written."""
        exchange(self._written, self._finish)

    @saves.mended()
    def _written(self) -> list[WriteResult]:
        return self.writer.write_data(self.planner.finish_plan(self.own), self.planner).wait()

    @saves.mended()
    def _finish(self, results: list[list[WriteResult]]) -> list[None]:
        files = {result.storage_data.relative_path for some in results for result in some}
        if lost := sorted(file for file in files if not _sums_of(self.folder / file).exists()):
            raise TreeError(
                f"{self.folder}: the first rank does not see {listing(lost)}, which others wrote; save into one folder "
                "that all ranks share"
            )
        self.writer.finish(self.indexed[0], results)
        return [None] * len(results)


def _copied(xs: Sequence[Any]) -> list[Any]:
    """Copies of the tensors among `xs`, on the CPU."""
    starts = [0, *accumulate(-(-x.nbytes // _ALIGNED) * _ALIGNED if isinstance(x, Tensor) else 0 for x in xs)]
    memory, copies = _memory(starts[-1]), []
    for x, start in zip(xs, starts, strict=False):
        if isinstance(x, Tensor) and x.numel():  # in storage of its own, as torch's writer wants it
            x = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=start).view(x.shape).copy_(x)
        copies.append(x)
    return copies


@lru_cache(maxsize=1)
def _memory(size: int) -> bytearray:
    """Memory for copies. It stays for the next save of that size: to be given new memory takes longer than to copy."""
    return bytearray(size)


def sums(folder: Path) -> dict[str, int]:
    """The checksums of the small files: the index, and the lists of checksums of the chunks of the others."""
    small = [folder / METADATA, *sorted(folder.glob("*" + _SUMS))]
    return {p.name: zlib.crc32(p.read_bytes()) for p in small}


def index(folder: Path, crc: Mapping[str, int]) -> Metadata:
    """What the checkpoint in `folder` holds and where; `crc` is what `sums` said of it."""
    return pickle.loads(_checked(folder / METADATA, crc))


def _checked(path: Path, crc: Mapping[str, int]) -> bytes:
    """A small file as it was written."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise TreeError(f"{path} is missing; {MEND}") from None
    if zlib.crc32(data) != crc.get(path.name):
        raise TreeError(f"{path} is damaged: its checksum is not the one that was written; {MEND}")
    return data


def damaged(folder: Path, metadata: Metadata, crc: Mapping[str, int], names: Set[str]) -> list[str]:
    """One line for every file that is missing or cut short, with those of the leaves `names` that it holds, and for
    every list of checksums that is damaged."""
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
        if not path.exists() or path.stat().st_size < end:
            state = "is cut short" if path.exists() else "is missing"
            lines.append(f"{file} {state}; it is needed for {listing(holds[file])}")
        try:
            _checked(_sums_of(path), crc)
        except TreeError as e:
            lines.append(str(e))
    return lines


def verify(folder: Path, metadata: Metadata, crc: Mapping[str, int]) -> list[str]:
    """One line for every chunk that is not as it was written. Reads all."""
    lines, sums = [], dict[str, dict[str, int]]()
    for at, info in sorted(metadata.storage_data.items(), key=lambda item: _place(item[1])):
        file, offset, length = _place(info)
        try:
            sums[file] = sums.get(file) or _sums(folder / file, crc)
            with (folder / file).open("rb", buffering=0) as opened:
                Chunk(at.fqn, opened, offset, length, sums[file]).check()
        except TreeError as e:
            lines.append(str(e))
    return lines


def read(folder: Path, metadata: Metadata, crc: Mapping[str, int], wanted: Iterable[Piece]) -> list[Any]:
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

    for file, held in groupby(sorted({*uses, *plain}, key=place), key=lambda at: place(at)[0]):
        sums = _sums(folder / file, crc)
        with (folder / file).open("rb", buffering=0) as opened:
            for at in held:
                found = Chunk(at.fqn, opened, *place(at)[1:], sums)
                if at not in uses:
                    values[at] = torch.load(io.BytesIO(found.value()), map_location="cpu", weights_only=True)
                    continue
                whole = _room(metadata.state_dict_metadata[at.fqn], at, [target for target, _ in uses[at]])
                found.fill(whole)
                for target, part in uses[at]:
                    if target is not whole:
                        target.copy_(whole[part])
    return [values[at] for at in plain]


def _room(saved: Any, at: MetadataIndex, targets: Sequence[Tensor]) -> Tensor:
    """Where a chunk is read to: the one place that takes all of it, else new memory, from which it is copied."""
    sizes = next(c.sizes for c in saved.chunks if c.offsets == at.offset)
    fits = [x for x in targets if x.device.type == "cpu" and x.is_contiguous() and x.shape == sizes]
    return fits[0] if fits else torch.empty(sizes, dtype=targets[0].dtype)


def _sums(path: Path, crc: Mapping[str, int]) -> dict[str, int]:
    """The checksums of a file's chunks, by offset."""
    return json.loads(_checked(_sums_of(path), crc))


def _slices(start: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(start, lengths, strict=True))


def _place(info: Any) -> tuple[str, int, int]:
    return info.relative_path, info.offset, info.length


def _sums_of(path: Path) -> Path:
    return path.with_name(path.name + _SUMS)
