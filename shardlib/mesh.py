"""Meshes: named axes over ranks, groups of axes, and the process groups behind them."""

import math
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from shardlib.errors import MeshError, listing, nearest
from shardlib.spec import Spec
from shardlib.watch import blamed, watch

Axes = str | Sequence[str]


@dataclass(frozen=True, eq=False)
class Mesh:
    """Ranks laid out row-major over named axes, outermost first.

    `groups` names tuples of axes; a group may stand wherever an axis may. On a simulated mesh this process plays
    every rank, otherwise it is the rank that the process group says. `debug`: jitted programs that ranks do not share
    are refused; `log`: the folder of logs ("": none).
    """

    shape: dict[str, int]
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    simulate: bool = False
    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout: timedelta | None = None
    debug: bool = False
    log: str = ""

    @cached_property
    def axis_names(self) -> tuple[str, ...]:
        return tuple(self.shape)

    @cached_property
    def total(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape.values())

    @cached_property
    def name(self) -> str:
        """`dp=2,tp=4`: meshes of equal names and sizes have equal process groups."""
        return ",".join(f"{a}={n}" for a, n in self.shape.items())

    @cached_property
    def _strides(self) -> dict[str, int]:
        sizes = list(self.shape.values())
        return {a: math.prod(sizes[i + 1 :]) for i, a in enumerate(self.shape)}

    def expand(self, axes: Axes) -> tuple[str, ...]:
        """Axes and groups as plain axes, in the order given, groups major to minor."""
        out: list[str] = []
        for a in (axes,) if isinstance(axes, str) else axes:
            if a not in self.shape and a not in self.groups:
                names = [*self.shape, *self.groups]
                raise MeshError(f"the mesh has no axis `{a}`{nearest(a, names)}; its axes are {listing(names)}")
            out.extend((a,) if a in self.shape else self.groups[a])
        if len(set(out)) < len(out):
            raise MeshError(f"{listing([axes] if isinstance(axes, str) else axes)} name an axis twice: {listing(out)}")
        return tuple(out)

    def resolve(self, spec: Spec) -> Spec:
        """`spec` with groups as plain axes. Raises `MeshError` for an unknown axis, `SpecError` for one named twice."""
        if all(a in self.shape for a in spec.axes):
            return spec
        for axis in spec.axes:
            try:
                self.expand(axis)
            except MeshError as e:
                raise MeshError(str(spec.error(str(e), axis))) from None
        out = spec.resolve(self.expand)
        twice = [a for i, a in enumerate(out.axes) if a in out.axes[:i]]
        if twice:
            through = next(a for a in reversed(spec.axes) if twice[0] in self.expand(a))
            raise spec.error(f"`{spec}` names axis `{twice[0]}` twice; the mesh is {self!r}", through)
        return out

    def ordered(self, axes: Sequence[str]) -> tuple[str, ...]:
        """`axes` in mesh order."""
        return tuple(a for a in self.shape if a in axes)

    def size(self, axes: Axes) -> int:
        """The number of ranks along an axis, a group or a tuple of them."""
        return math.prod(self.shape[a] for a in self.expand(axes))

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of `rank` along every axis."""
        return {a: rank // self._strides[a] % n for a, n in self.shape.items()}

    def index(self, axes: Axes) -> int:
        """This process's coordinate along an axis; along several, the row-major index."""
        if self.simulate and self.size(axes) > 1:
            raise MeshError("on a simulated mesh one process plays all ranks and has no index; shard() global data")
        return self.index_of(self.rank, self.expand(axes))

    def index_of(self, rank: int, axes: Sequence[str]) -> int:
        """The row-major index of `rank` along plain `axes`, in the order given."""
        at, out = self.coordinates(rank), 0
        for a in axes:
            out = out * self.shape[a] + at[a]
        return out

    def members(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axes` only, ordered by their index along `axes` as given."""
        base = rank - sum(self.coordinates(rank)[a] * self._strides[a] for a in axes)
        out = [base]
        for a in axes:
            out = [r + i * self._strides[a] for r in out for i in range(self.shape[a])]
        return tuple(out)

    def group(self, axes: Sequence[str]) -> str:
        """The name under which the process group over `axes` (in mesh order) is known to collectives.

        A name is enough to trace; where this process is a rank, the group is made and registered at first use.
        """
        name = f"{self.name}/{','.join(axes)}"
        if not self.simulate and dist.is_initialized():
            _register(self, name, tuple(axes))
        return name

    @cached_property
    def device_mesh(self) -> Any:
        """The same mesh as a `torch.distributed.DeviceMesh`."""
        from torch.distributed.device_mesh import init_device_mesh

        if self.simulate:
            raise MeshError("a simulated mesh has no DeviceMesh")
        if not dist.is_initialized():
            raise MeshError("a DeviceMesh needs a process group: start it with `shardlib run --nproc 1 ...`")
        return init_device_mesh(self.device.type, tuple(self.shape.values()), mesh_dim_names=self.axis_names)

    def __enter__(self) -> "Mesh":
        _current.append(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        self._leave()
        if isinstance(error, Exception) and not self.simulate and (others := watch()):
            if explained := others.explained(error):
                raise explained from None
            if not _current:
                others.tell(error)

    def _leave(self) -> None:
        if self in _current:  # not after use_mesh inside the block
            del _current[len(_current) - 1 - _current[::-1].index(self)]

    def __repr__(self) -> str:
        return f"Mesh({self.name}{', simulated' if self.simulate else f', rank {self.rank}'})"


@dataclass(frozen=True, eq=False, repr=False)
class TracedMesh(Mesh):
    """A mesh while a program is traced. `asked`: whether the program holds the rank of this process."""

    asked: bool = False

    @classmethod
    def of(cls, mesh: Mesh) -> "TracedMesh":
        return cls(**{f.name: getattr(mesh, f.name) for f in fields(Mesh)})

    def group(self, axes: Sequence[str]) -> str:
        """Its name alone: a process group is made by all of its ranks, once they have agreed on the program."""
        return f"{self.name}/{','.join(axes)}"

    def index(self, axes: Axes) -> int:
        """As on any mesh; it is noted."""
        object.__setattr__(self, "asked", True)
        return super().index(axes)


@dataclass(frozen=True, eq=False, repr=False)
class Inner(Mesh):
    """A mesh as code knows it that only some of the ranks along `hidden` run: without that axis. Groups of ranks are
    those of the `outer` mesh."""

    outer: Any = None
    hidden: str = ""

    @classmethod
    def of(cls, mesh: Mesh, hidden: str) -> "Inner":
        shape = {a: n for a, n in mesh.shape.items() if a != hidden}
        groups = {g: axes for g, axes in mesh.groups.items() if hidden not in axes}
        return cls(shape, groups, mesh.simulate, mesh.rank, mesh.device, mesh.timeout, outer=mesh, hidden=hidden)

    @cached_property
    def name(self) -> str:
        return self.outer.name

    def expand(self, axes: Axes) -> tuple[str, ...]:
        for a in (axes,) if isinstance(axes, str) else axes:
            if a == self.hidden or self.hidden in self.outer.groups.get(a, ()):
                raise MeshError(
                    f"`{a}`: inside a function of the pipeline over `{self.hidden}` nothing runs over that axis: each "
                    "of its ranks runs another function"
                )
        return super().expand(axes)

    def coordinates(self, rank: int) -> dict[str, int]:
        return {a: i for a, i in self.outer.coordinates(rank).items() if a != self.hidden}

    def index(self, axes: Axes) -> int:
        return self.outer.index(self.expand(axes))

    def members(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        return self.outer.members(rank, axes)

    def group(self, axes: Sequence[str]) -> str:
        return self.outer.group(axes)


_current: list[Mesh] = []
_registered: dict[str, dist.ProcessGroup] = {}


def current_mesh() -> Mesh:
    """The innermost `with mesh:`, or what `use_mesh` set."""
    if not _current:
        raise MeshError("no mesh: use `with sl.make_mesh(dp=2, tp=2):` or sl.use_mesh(mesh)")
    return _current[-1]


def use_mesh(mesh: Mesh) -> Mesh:
    """Make `mesh` the current mesh until changed."""
    _current[:] = [mesh]
    return mesh


@contextmanager
def entered(mesh: Mesh | None):
    """Inside: `mesh`, or the current one where it is None. An error in here is not yet the end of this rank."""
    m = mesh or current_mesh()
    _current.append(m)
    try:
        with blamed():
            yield m
    finally:
        m._leave()


def _register(mesh: Mesh, name: str, axes: tuple[str, ...]) -> None:
    held = _registered.get(name)
    if held is not None and held in dist.distributed_c10d._world.pg_map:
        return
    ranks = mesh.members(mesh.rank, axes)
    # local synchronization: only the members meet, so that ranks of a pipeline may make different groups
    group = dist.new_group(list(ranks), timeout=mesh.timeout, use_local_synchronization=True)
    registry = torch._C._distributed_c10d  # type: ignore[attr-defined] # the registry that functional collectives look names up in
    if held is not None:
        registry._unregister_process_group(name)
    registry._register_process_group(name, group)
    _registered[name] = group  # type: ignore[assignment]


@dataclass(frozen=True)
class _Launch:
    """What a launcher's variables say of this process."""

    rank: int
    world: int
    local: int  # its number on this host
    ranks_here: int  # on this host
    where: str  # to meet the others, for `init_process_group`


def _launched() -> _Launch | None:
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:  # torchrun's
        local = int(env.get("LOCAL_RANK", 0))
        return _Launch(int(env["RANK"]), int(env["WORLD_SIZE"]), local, int(env.get("LOCAL_WORLD_SIZE", 0)), "env://")
    if int(env.get("WORLD_SIZE", 1)) > 1:
        raise MeshError(f"WORLD_SIZE={env['WORLD_SIZE']} is set and RANK is not: a launcher sets both (torchrun, srun)")
    if "SLURM_STEP_NUM_TASKS" in env:  # srun's; what sbatch sets says how many tasks one may start
        first = re.sub(r"\[(\w+).*", r"\1", env.get("SLURM_STEP_NODELIST", "localhost").split(",")[0])
        port = 15000 + int(env.get("SLURM_JOB_ID", 0)) % 10000
        where = f"tcp://{env.get('MASTER_ADDR', first)}:{env.get('MASTER_PORT', port)}"
        here = int(env.get("SLURM_STEP_TASKS_PER_NODE", "0").split("(")[0].split(",")[0])
        rank, world, local = (int(env[f"SLURM_{n}"]) for n in ("PROCID", "STEP_NUM_TASKS", "LOCALID"))
        return _Launch(rank, world, local, here, where)
    return None


def _warn_straddling(shape: Mapping[str, int], here: int) -> None:
    """The innermost axis carries the most traffic: its ranks should share a host."""
    wide = [a for a, n in shape.items() if n > 1]
    if len(wide) > 1 and here and math.prod(shape.values()) > here and here % shape[wide[-1]]:
        warnings.warn(
            f"the innermost axis `{wide[-1]}` of size {shape[wide[-1]]} straddles hosts of {here} rank(s) each: its "
            "collectives cross the slow network. Put an axis innermost whose size divides the ranks of a host",
            stacklevel=3,
        )


def _sizes(
    axes: Mapping[str, int | Mapping[str, int]], world: int | None
) -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    """The axes with their sizes and the groups among `axes`; `world` fills a size of -1."""
    shape: dict[str, int] = {}
    groups: dict[str, tuple[str, ...]] = {}
    for name, size in axes.items():
        inner = size if isinstance(size, Mapping) else {name: size}
        for a, n in inner.items():
            if a in shape or (a in axes and inner is size):
                raise MeshError(f"axis `{a}` is named twice; a group and an axis need names of their own")
            if not a.isidentifier():
                raise MeshError(f"`{a}` cannot name an axis: use letters, digits and _")
            if type(n) is not int or (n < 1 and n != -1):
                raise MeshError(f"axis `{a}` has size {n!r}: sizes are whole numbers from 1, or one -1, what is left")
            shape[a] = n
        if inner is size:
            if not inner:
                raise MeshError(f"group `{name}` has no axes")
            groups[name] = tuple(inner)
    open_ = [a for a, n in shape.items() if n == -1]
    if open_:
        if world is None or len(open_) > 1:
            why = "two axes cannot both take what is left" if world is not None else "a simulated mesh leaves nothing"
            raise MeshError(f"{listing(open_)} = -1: {why}; give the size")
        rest = math.prod(n for n in shape.values() if n != -1)
        if world % rest:
            raise MeshError(f"{world} ranks do not divide by {rest}, the product of the sizes given")
        shape[open_[0]] = world // rest
    return shape, groups


def make_mesh(
    axes: Mapping[str, int | Mapping[str, int]] | None = None,
    /,
    *,
    timeout: float | None = None,
    simulate: bool = False,
    groups: Mapping[str, str] | None = None,
    **named: int | Mapping[str, int],
) -> Mesh:
    """Lay the ranks out over named axes, outermost first, and start the process group where there is none yet.

    `make_mesh(dp=2, tp=4)`; `make_mesh(dp=dict(replica=2, fsdp=8))` names a group `dp` of two axes; one size may be -1,
    what the world leaves. `groups=dict(cp_dp="dp/cp")` names further groups. Reads torchrun's and srun's variables;
    gloo on CPU, nccl on CUDA. `timeout` (seconds): how long a collective may wait for a rank that does not come, which
    the `RankError` that all then raise names (by default as torch says: 30 minutes on CPU). `simulate=True`: all ranks
    in this process, no launcher. Raises `MeshError` when the sizes do not multiply to the number of ranks.
    """
    if (axes is not None and not isinstance(axes, Mapping)) or {*(axes or ())} & {*named}:
        raise MeshError(f"make_mesh(dp=2, tp=4), or a mapping of axes that are not named beside it; found {axes!r}")
    launched = None if simulate else _launched()
    world = None if simulate else dist.get_world_size() if dist.is_initialized() else launched.world if launched else 1
    shape, named_groups = _sizes({**(axes or {}), **named}, world)
    for name, chain in (groups or {}).items():
        if name in shape or name in named_groups or not name.isidentifier():
            raise MeshError(f"group `{name}`: a group needs a name of its own, of letters, digits and _")
        named_groups[name] = tuple(a for part in chain.split("/") for a in named_groups.get(part, (part,)))
        for a in named_groups[name]:
            if a not in shape:
                raise MeshError(f"group `{name}` names `{a}`, which is no axis{nearest(a, shape)}; write it 'dp/cp'")
            if named_groups[name].count(a) > 1:
                raise MeshError(f"group `{name}` (`{chain}`) names axis `{a}` twice")
    total = math.prod(shape.values())
    if simulate:
        return Mesh(shape, named_groups, simulate=True)
    if total != world:
        raise MeshError(
            f"the mesh {' x '.join(f'{a}={n}' for a, n in shape.items()) or 'of no axes'} needs {total} rank(s), there "
            f"{'is' if world == 1 else 'are'} {world}: start it with `torchrun --nproc-per-node {total} ...`, or pass "
            "simulate=True to play all ranks in this process"
        )
    local = launched.local if launched else 0
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    wait = timedelta(seconds=timeout) if timeout is not None else None
    if not dist.is_initialized() and launched and total > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, launched.where, timeout=wait, rank=launched.rank, world_size=launched.world)
    if others := watch():  # from now on this rank answers when others have lost one
        others.holds = (
            bool(launched) and launched.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        )
    _warn_straddling(shape, launched.ranks_here if launched else 0)
    rank = dist.get_rank() if dist.is_initialized() else 0
    debug, log = os.environ.get("SHARDLIB_DEBUG", "") not in ("", "0"), os.environ.get("SHARDLIB_LOG", "")
    return Mesh(shape, named_groups, rank=rank, device=device, timeout=wait, debug=debug, log=log)
