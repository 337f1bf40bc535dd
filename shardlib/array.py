"""`Array`: a leaf at rest. A wrapper tensor that holds this rank's shard (on a simulated mesh, every rank's)."""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardlib import layout, tree
from shardlib.errors import DonatedError, MeshError, ShardError
from shardlib.mesh import Mesh
from shardlib.spec import Spec

_READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default}


def _alone(x: Tensor) -> bool:
    """Whether a list, and a loop over it, are all that holds a tensor, and the tensor all that holds its storage."""
    used = torch._C._storage_Use_Count(x.untyped_storage()._cdata)  # by tensors; there is no public way to know
    return sys.getrefcount(x) == 4 and used == 2  # this function's and getrefcount's own; the storage's object


class Array(Tensor):
    """A global tensor, cut over a mesh as its spec says.

    Its shape is the global one. It takes no arithmetic: pass it to a step or a `shard_map`-ed function, or `gather` it.
    Shards are kept padded to the nested ceiling, so that all ranks hold equal shapes; `local` gives them without it.
    """

    spec: Spec
    mesh: Mesh
    _shards: list[Tensor] | None

    @staticmethod
    def __new__(cls, shards: Sequence[Tensor], spec: Spec, shape: Sequence[int], mesh: Mesh) -> "Array":
        first = shards[0]
        made: Array = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,assignment]
            cls, tuple(shape), dtype=first.dtype, device=first.device, requires_grad=False
        )
        made.spec, made.mesh, made._shards = spec, mesh, list(shards)
        return made

    @property
    def shards(self) -> list[Tensor]:
        """The padded shards: one, or on a simulated mesh one per rank. Raises `DonatedError` after donation."""
        if self._shards is None:
            raise DonatedError(
                f"this array (`{self.spec}`, shape {tuple(self.shape)}) was donated to a jitted function and is gone: "
                "use what the function returned, or leave donate_argnums out"
            )
        if self._shards[0].is_inference() and not torch.is_inference_mode_enabled():
            own = {id(s): s.clone() for s in self._shards}  # torch would neither differentiate it nor write into it
            self._shards = [own[id(s)] for s in self._shards]
        return self._shards

    @property
    def padded(self) -> bool:
        """Whether some rank's shard is shorter than what it keeps in memory."""
        return not layout.is_even(self.spec, self.shape, self.mesh.shape)

    def local(self, rank: int | None = None) -> Tensor:
        """The shard of this rank (on a simulated mesh, of `rank`), without padding."""
        if rank is None and self.mesh.simulate and self.mesh.total > 1:
            raise MeshError("on a simulated mesh one process holds every rank's shard: say which, local(tree, rank=5)")
        rank = self.mesh.rank if rank is None else rank
        if rank not in (range(self.mesh.total) if self.mesh.simulate else (self.mesh.rank,)):
            raise MeshError(f"{self.mesh!r} does not hold the shard of rank {rank} in this process")
        shard = self.shards[rank if len(self.shards) > 1 else 0]  # an abstract array has one on a simulated mesh, too
        true = layout.local_shape(self.spec, self.shape, self.mesh.shape, self.mesh.coordinates(rank))
        for dim, n in enumerate(true):
            shard = shard.narrow(dim, 0, n)
        return shard

    def pieces(self) -> dict[tuple[int, ...], Tensor]:
        """The distinct shards that this process holds, without padding, by where they start in the whole.

        Empty shards are left out, but a tensor without elements is one piece.
        """
        if not self.numel():
            return {(0,) * self.dim(): self.shards[0].new_empty(self.shape)}
        out: dict[tuple[int, ...], Tensor] = {}
        for rank in range(self.mesh.total) if self.mesh.simulate else (self.mesh.rank,):
            at = layout.slices(self.spec, self.shape, self.mesh.shape, self.mesh.coordinates(rank))
            if all(s.stop > s.start for s in at):
                out.setdefault(tuple(s.start for s in at), self.local(rank))
        return out

    # What the planners of torch.distributed.checkpoint ask of a tensor in chunks; `chunks` loads it, which takes long.

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from shardlib import chunks

        return [chunks.write_item(fqn, self.shape, at, x) for at, x in self.pieces().items()]

    def __create_chunk_list__(self) -> list[Any]:
        from shardlib import chunks

        return [chunks.chunk(at, x) for at, x in self.pieces().items()]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self.pieces()[tuple(index.offset or ())]

    def donate(self) -> list[Tensor]:
        """Take the shards out, to be written into; the array cannot be used again.

        A shard that somebody else holds too (a view from `local`, another array, another simulated rank) is copied.
        """
        shards, self._shards = self.shards, None
        return [s if _alone(s) else s.clone() for s in shards]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in _READS and isinstance(args[0], Array) and not args[0].spec.axes:
            return func(args[0].shards[0])
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0]
        first = next(a for a in tree.leaves((args, kwargs)) if isinstance(a, Array))
        raise first._refusal(func._schema.name.split("::")[1])

    def _refusal(self, name: str) -> ShardError:
        return ShardError(
            f"{name} on an array at rest (`{self.spec}`, shape {tuple(self.shape)}): nothing is communicated "
            "silently, so arrays take no arithmetic.\n"
            "  Pass it to a step or a shard_map-ed function, or sl.gather it first"
        )

    def tolist(self) -> Any:
        raise self._refusal("tolist")

    def numpy(self, **_: Any) -> Any:
        raise self._refusal("numpy")

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        dtype = str(self.dtype).removeprefix("torch.")
        gone = ", donated" if self._shards is None else ""
        return f"Array('{self.spec}', shape={tuple(self.shape)}, {dtype}, mesh {self.mesh.name}{gone})"

    def __deepcopy__(self, memo: Any) -> "Array":
        return Array([s.clone() for s in self.shards], self.spec, self.shape, self.mesh)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardError("an array at rest cannot be pickled: use sl.save, or sl.gather it first")
