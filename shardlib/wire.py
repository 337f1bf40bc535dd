"""What crosses the wire: collectives on plain tensors, by the name of a process group. No types, no gradients.

Only ops that every supported torch has (`_c10d_functional`) and three of our own, all of which trace to one node:
the rank of a process enters a graph as a value (`axis_index`, `own_slice`, `permute` read it when they run), so that
all ranks share one graph. Every function takes the group's size, so that tracing needs no process group.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlib.errors import MeshError, RankError, listing
from shardlib.mesh import Mesh

_ops = torch.ops._c10d_functional
wait = _ops.wait_tensor

_lib = torch.library.Library("shardlib", "FRAGMENT")
_lib.define("axis_index(str group, Device device) -> Tensor")
_lib.define("own_slice(Tensor x, int dim, int size, str group) -> Tensor")
_lib.define("permute(Tensor x, int[] source, str group) -> Tensor")
_lib.define("isend(Tensor x, int to, str group) -> Tensor")
_lib.define("irecv(int[] shape, ScalarType dtype, Device device, int source, str group) -> Tensor")
_lib.define("sent(Tensor handle) -> ()")


def resolve(group: str) -> dist.ProcessGroup:
    """The process group registered under a name."""
    registry: Any = dist.distributed_c10d  # where functional collectives look names up; there is no public way
    return registry._resolve_process_group(group)


def all_reduce(x: Tensor, group: str, op: str = "sum") -> Tensor:
    """The reduction over the group, on every rank."""
    return wait(_ops.all_reduce(x.contiguous(), op, group))


def all_gather(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    """The pieces of all ranks of the group, concatenated along `dim`."""
    out = wait(_ops.all_gather_into_tensor(_at_least_1d(x).contiguous(), size, group))
    if dim == 0:
        return out
    return out.view(size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    """The rank's piece along `dim` of the sum over the group."""
    if dim:
        x = x.unflatten(dim, (size, -1)).movedim(dim, 0).flatten(0, 1)
    out = wait(_ops.reduce_scatter_tensor(x.contiguous(), "sum", size, group))
    return out


def all_to_all(x: Tensor, split: int, concat: int, size: int, group: str) -> Tensor:
    """Piece `i` along `split` goes to rank `i`; what arrives is concatenated along `concat`, in rank order."""
    x = x.unflatten(split, (size, x.shape[split] // size)).movedim(split, 0).contiguous()
    x = wait(_ops.all_to_all_single(x, [1] * size, [1] * size, group))
    return x.movedim(0, concat).flatten(concat, concat + 1)


def permute(x: Tensor, source: list[int], group: str) -> Tensor:
    """The rank at index `d` of the group gets what index `source[d]` holds; zeros where it is -1."""
    return torch.ops.shardlib.permute(x.contiguous(), source, group)


def broadcast(x: Tensor, source: int, group: str) -> Tensor:
    """What the rank at index `source` of the group holds, on every rank."""
    return wait(_ops.broadcast(x.contiguous(), source, group))


def isend(x: Tensor, to: int, group: str) -> Tensor:
    """Start to send to index `to` of the group; a handle for `sent`."""
    return torch.ops.shardlib.isend(x.contiguous(), to, group)


def sent(handle: Tensor) -> None:
    """Wait until what was sent has left."""
    torch.ops.shardlib.sent(handle)


def irecv(shape: Sequence[int], dtype: torch.dtype, device: torch.device, source: int, group: str) -> Tensor:
    """Start to receive from index `source` of the group, in the order in which that sends; `wait` before it is read."""
    return torch.ops.shardlib.irecv(list(shape), dtype, device, source, group)


def axis_index(group: str, device: torch.device) -> Tensor:
    """The rank's index in the group, a 0-d int64 tensor."""
    return torch.ops.shardlib.axis_index(group, device)


def own_slice(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    """The rank's piece along `dim`, copied."""
    return torch.ops.shardlib.own_slice(x, dim, size, group)


def _at_least_1d(x: Tensor) -> Tensor:
    return x.reshape(1) if x.dim() == 0 else x


def slice_of(x: Tensor, dim: int, size: int, index: int) -> Tensor:
    """Piece `index` of `size` along `dim`, copied."""
    length = x.shape[dim] // size
    return x.narrow(dim, index * length, length).clone(memory_format=torch.contiguous_format)


def _axis_index(group: str, device: torch.device) -> Tensor:
    return torch.tensor(resolve(group).rank(), device=device)


def _own_slice(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    return slice_of(x, dim, size, resolve(group).rank())


def _permute(x: Tensor, source: list[int], group: str) -> Tensor:
    pg = resolve(group)
    me, ranks = pg.rank(), dist.get_process_group_ranks(pg)
    out = x.clone() if source[me] == me else torch.zeros_like(x) if source[me] < 0 else torch.empty_like(x)
    wire = [dist.P2POp(dist.isend, x, ranks[d], pg) for d, s in enumerate(source) if s == me and d != me]
    if source[me] >= 0 and source[me] != me:
        wire.append(dist.P2POp(dist.irecv, out, ranks[source[me]], pg))
    for work in dist.batch_isend_irecv(wire) if wire else ():
        work.wait()
    return out


def _isend(x: Tensor, to: int, group: str) -> Tensor:
    pg = resolve(group)
    return until(x.new_empty(0), [dist.isend(x, dist.get_process_group_ranks(pg)[to], pg)])


def _irecv(shape: list[int], dtype: torch.dtype, device: torch.device, source: int, group: str) -> Tensor:
    pg, out = resolve(group), torch.empty(shape, dtype=dtype, device=device)
    return until(out, [dist.irecv(out, dist.get_process_group_ranks(pg)[source], pg)])


def until(x: Tensor, works: Iterable[Any]) -> Tensor:
    """`x`, for which `wait` waits until all the works are done (which hold what they send)."""
    registry = torch._C._distributed_c10d  # type: ignore[attr-defined] # where functional collectives keep theirs
    for work in works:
        registry._register_work(x, work)
    return x


def _sent(handle: Tensor) -> None:
    wait(handle)


def _fake_slice(x: Tensor, dim: int, size: int, group: str) -> Tensor:
    return x.new_empty([n // size if i == dim else n for i, n in enumerate(x.shape)])


_lib.impl("axis_index", _axis_index, "CompositeExplicitAutograd")
_lib.impl("own_slice", _own_slice, "CompositeExplicitAutograd")
_lib.impl("permute", _permute, "CompositeExplicitAutograd")
_lib.impl("isend", _isend, "CompositeExplicitAutograd")
_lib.impl("irecv", _irecv, "CompositeExplicitAutograd")
_lib.impl("sent", _sent, "CompositeExplicitAutograd")
_lib.impl("own_slice", _fake_slice, "Meta")
_lib.impl("isend", lambda x, to, group: x.new_empty(0), "Meta")
_lib.impl("sent", lambda handle: None, "Meta")
_lib.impl("permute", lambda x, source, group: torch.empty_like(x), "Meta")


@torch.library.register_fake("shardlib::axis_index", lib=_lib)
def _fake_index(group: str, device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


@torch.library.register_fake("shardlib::irecv", lib=_lib)
def _fake_irecv(shape: list[int], dtype: torch.dtype, device: torch.device, source: int, group: str) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


# What the ops mean, for all members of a group at once: with these, simulate.py plays a mesh.

Args = Sequence[Any]
REDUCE = {"sum": torch.add, "avg": torch.add, "product": torch.mul, "max": torch.maximum, "min": torch.minimum}


def _reduced(args: Sequence[Args]) -> Tensor:
    x, op = args[0][:2]
    if op not in REDUCE:
        raise RankError(f"`{op}` is no reduction; use {listing(REDUCE)}")
    out = torch.empty_like(x)
    reduced((a[0] for a in args), op, out)
    return out


def reduced(xs: Iterable[Tensor], op: str, out: Tensor) -> None:
    """The reduction of some tensors, in their order, into `out`; of 16 bits in float32."""
    first, *rest = xs
    narrow = out.is_floating_point() and out.dtype.itemsize < 4
    wide = torch.empty_like(out, dtype=torch.float32) if narrow else out
    if not rest:
        wide.copy_(first)
    for i, x in enumerate(rest):
        REDUCE[op](wide if i else first.to(wide.dtype), x.to(wide.dtype), out=wide)
    if op == "avg":
        wide.div_(1 + len(rest))
    if wide is not out:
        out.copy_(wide)


def _each(x: Tensor, n: int) -> list[Tensor]:
    return [x, *(x.clone() for _ in range(n - 1))]


def _gathered(n: int, args: Sequence[Args]) -> list[Tensor]:
    if args[0][1] != n:
        raise RankError(f"all_gather over a group of {n} says that it has {args[0][1]} members")
    return _each(torch.cat([a[0] for a in args]), n)


def _scattered(n: int, args: Sequence[Args]) -> list[Tensor]:
    x, _, size = args[0][:3]
    if size != n:
        raise RankError(f"reduce_scatter over a group of {n} says that it has {size} members")
    if x.dim() == 0 or x.shape[0] % n:
        raise RankError(f"reduce_scatter cannot cut {list(x.shape)} in {n} along its first dim")
    return [piece.clone() for piece in _reduced(args).tensor_split(n)]


def _exchanged(n: int, args: Sequence[Args]) -> list[Tensor]:
    takes, gives = [list(a[1]) for a in args], [list(a[2]) for a in args]
    if any(len(g) != n for g in gives) or takes != [list(column) for column in zip(*gives, strict=True)]:
        raise RankError(f"all_to_all: the members send {gives} rows and wait for {takes}")
    pieces = [a[0].split(g) for a, g in zip(args, gives, strict=True)]
    return [torch.cat([p[i] for p in pieces]) for i in range(n)]


def _broadcast(n: int, args: Sequence[Args]) -> list[Tensor]:
    source = args[0][1]
    if not 0 <= source < n:
        raise RankError(f"broadcast from member {source} of {n}")
    return [args[source][0].clone() for _ in args]


def _permuted(n: int, args: Sequence[Args]) -> list[Tensor]:
    source = args[0][1]
    if len(source) != n or any(not -1 <= s < n for s in source):
        raise RankError(f"permute: {list(source)} does not name a source from -1 to {n - 1} for each of {n} members")
    return [torch.zeros_like(a[0]) if s < 0 else args[s][0].clone() for a, s in zip(args, source, strict=True)]


# where all members meet: from their number and the op's arguments on each, what each gets
MEET: dict[Any, Callable[[int, Sequence[Args]], list[Tensor]]] = {
    _ops.all_reduce.default: lambda n, args: _each(_reduced(args), n),
    _ops.all_gather_into_tensor.default: _gathered,
    _ops.reduce_scatter_tensor.default: _scattered,
    _ops.all_to_all_single.default: _exchanged,
    _ops.broadcast.default: _broadcast,
    torch.ops.shardlib.permute.default: _permuted,
}
# where nobody is waited for: from a member's index and the op's arguments, what it gets
OWN: dict[Any, Callable[..., Tensor]] = {
    torch.ops.shardlib.own_slice.default: lambda index, x, dim, size, group: slice_of(x, dim, size, index),
    torch.ops.shardlib.axis_index.default: lambda index, group, device: torch.tensor(index, device=device),
}


# from one member to another
SEND, RECEIVE = torch.ops.shardlib.isend.default, torch.ops.shardlib.irecv.default
SENT = torch.ops.shardlib.sent.default
PERMUTE = torch.ops.shardlib.permute.default  # done when it returns


def combine(target: Any, operands: Sequence[Args], ranks: Sequence[int] | None = None) -> list[Tensor]:
    """What an op of `MEET` or `OWN` gives to each member of one group; `wait` gives what it is given.

    `operands`: the op's arguments on each member, in the group's order; so are the results, each a tensor of its own.
    Sums run in that order, of 16-bit values in float32, so members get the same bits; `max` and `min` keep a NaN, which
    gloo may lose. `ranks` names the members in errors. Raises `RankError` when the members disagree on shape, dtype or
    arguments, or when these make no collective.
    """
    if target in OWN:
        return [OWN[target](i, *args) for i, args in enumerate(operands)]
    if target is wait.default:
        return [args[0] for args in operands]
    if target not in MEET:
        raise RankError(f"one process plays {listing([*MEET, *OWN])}, not `{target}`")
    if any(differ(target, operands[0], args) for args in operands[1:]):
        told = dict(zip(ranks or range(len(operands)), (describe(target, args) for args in operands), strict=True))
        raise disagreement(told)
    return MEET[target](len(operands), operands)


@lru_cache(maxsize=1024)
def _members(mesh: Mesh, group: str) -> tuple[tuple[int, ...], ...]:
    name, _, axes = group.rpartition("/")
    names = axes.split(",") if axes else []
    if name != mesh.name or any(a not in mesh.shape for a in names):
        raise MeshError(f"a collective runs over the group `{group}`, which is none of {mesh!r}")
    return tuple(mesh.members(r, names) for r in range(mesh.total))


def members_by_rank(mesh: Mesh, args: Args) -> tuple[tuple[int, ...], ...]:
    """By rank, the members of its group, which is the last string among an op's arguments and named by `Mesh.group`."""
    return _members(mesh, next(a for a in reversed(args) if isinstance(a, str)))


def differ(target: Any, a: Args, b: Args) -> bool:
    """Whether two members cannot meet in one op; the pieces of an all_to_all may differ by rank."""
    x, y = a[0], b[0]
    if target is _ops.all_to_all_single.default:
        return x.shape[1:] != y.shape[1:] or x.dtype != y.dtype or a[-1] != b[-1]
    return x.shape != y.shape or x.dtype != y.dtype or a[1:] != b[1:]


def describe(target: Any, args: Args) -> str:
    """``all_reduce(float32[4, 2], 'sum') over `dp` ``."""
    shape, dtype, *rest = (args[0].shape, args[0].dtype, *args[1:-1]) if isinstance(args[0], Tensor) else args[:-1]
    x = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
    rest = [repr(list(a) if isinstance(a, list) else a) for a in rest if not isinstance(a, torch.device)]
    axes = args[-1].rpartition("/")[2]
    return f"{target._schema.name.split('::')[1]}({', '.join([x, *rest])}) over {listing(axes.split(','))}"


def disagreement(told: Mapping[int, str]) -> RankError:
    """The error for what each rank is told to do."""
    return RankError(f"ranks disagree on a collective:\n{by_rank(told)}")


def by_rank(told: Mapping[int, str]) -> str:
    """One line for all ranks of which the same is told."""
    ranks: dict[str, list[int]] = {}
    for rank, line in sorted(told.items()):
        ranks.setdefault(line, []).append(rank)
    return "\n".join(f"  {named(r)}: {line}" for line, r in ranks.items())


def named(ranks: Iterable[int]) -> str:
    """`ranks 0, 2`."""
    names = [str(r) for r in sorted(ranks)]
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"


def difference(a: Any, b: Any) -> str:
    """How `a` differs from what is to hold the same bits, if it does."""
    if not isinstance(a, Tensor):
        return "" if a == b else f"is {a!r}, not {b!r} as on"
    a, b = a.reshape(-1).contiguous(), b.reshape(-1).contiguous()
    x, y = a.view(torch.uint8), b.view(torch.uint8)
    if torch.equal(x, y):
        return ""
    at = (x != y).view(-1, a.element_size()).any(1) & ~(a.isnan() & b.isnan())
    wide = torch.complex128 if a.is_complex() else torch.float64
    by = (a[at].to(wide) - b[at].to(wide)).abs()
    return f"differs by up to {by.max():.3g} in {len(by)} of {len(a)} elements from" if len(by) else ""
