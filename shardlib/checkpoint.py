"""Checkpoints: what any mesh saved, any other restores, bit for bit.

    runs/a/step-00000100/             one save, published by one rename after every process has written
        shardlib.json                 version, step, mesh, shape and dtype of every leaf, which are tied
        .metadata  __0_0.distcp ...   the tensors, in the format of torch.distributed.checkpoint: its readers open them
        __0_0.distcp.crc32 ...        a checksum of every chunk

Files hold global leaves by path, without padding, a stacked leaf as one leaf per layer, a tied one once: meshes, specs,
ZeRO stages and stacking do not show. One run at a time saves into a folder; any number may read.
"""

import importlib.metadata
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # what `abstract` makes leaves of

from shardlib import layout, saves, tree
from shardlib.array import Array
from shardlib.errors import MeshError, TreeError, listing
from shardlib.mesh import Mesh, current_mesh
from shardlib.parts import part_of, places
from shardlib.processes import Processes

if TYPE_CHECKING:
    from shardlib.chunks import Piece  # `chunks` loads torch.distributed.checkpoint, which takes a second: at first use

_PLAIN = (bool, int, float, complex, str, bytes)


def save(dir: str | os.PathLike[str], state: Any, *, step: int | None = None, keep: int | None = None) -> Path:
    """Save a tree as `dir/step-00000100`, which it returns. All ranks call it; what one of them raises, all raise.

    Leaves are arrays, plain tensors and plain values (equal on all ranks). `step`: by default `state.step`. An older
    save of the same step is replaced. `keep`: how many saves to leave, up to this step. Raises `TreeError` for leaves
    that cannot be saved, `RankError` when ranks pass different trees or one cannot write (a lone process: its error).
    """
    ranks, mesh, root = Processes(_mesh(state)), _mesh(state), Path(dir)

    def look() -> tuple[tuple[int, list[_Leaf]], list[str]]:
        if keep is not None and keep < 1:
            raise ValueError(f"save: keep={keep}; the new save at least is kept")
        if step is not None and not (isinstance(step, int) and step >= 0):
            raise ValueError(f"save: step={step!r}; a step is an int from 0")
        number = _step(state) if step is None else step
        leaves = _leaves(tree.paths(state), tree.leaves(state))
        for leaf in leaves:
            leaf.check()
        return (number, leaves), [f"step {number}", *(leaf.line for leaf in leaves)]

    number, leaves = ranks.agree("save: the tree", look)
    what = {name: leaf.what for leaf in leaves for name in leaf.names}
    where = mesh.name if mesh else ""
    tied = {name: own for leaf in leaves if leaf.first for name, own in zip(leaf.names, leaf.first.names, strict=True)}
    info = dict(shardlib=_version(), torch=torch.__version__, step=number, mesh=where, leaves=what, tied=tied)
    target = saves.folder(root, number)
    aside = ranks.first(lambda: saves.begin(target))
    from shardlib import chunks

    def publish() -> None:
        crc = zlib.crc32((aside / chunks.METADATA).read_bytes())
        saves.publish(aside, target, json.dumps({**info, "crc32": crc}, indent=1))
        saves.tidy(root)
        if keep is not None:
            saves.prune(target, keep)

    try:
        chunks.write(aside, (p for leaf in leaves for p in leaf.pieces(leaf.names)), ranks.exchange)
        ranks.first(publish)
    except BaseException as e:
        if ranks.rank == 0:
            saves.discard(aside)
        e.add_note(
            f"while {target} was saved ({shutil.disk_usage(root).free >> 20} MB are free there); "
            "older saves are as they were"
        )
        raise
    return target


def latest(dir: str | os.PathLike[str]) -> Path | None:
    """The newest whole save in `dir`, or None. On a mesh of processes all ranks call it and get what the first sees."""
    found = Processes(_mesh(None)).first(lambda: saves.whole(Path(dir))[-1:])
    return found[0] if found else None


def restore(
    path: str | os.PathLike[str],
    like: Any,
    *,
    only: tree.Chooser | None = None,
    rename: Mapping[str, str] | None = None,
) -> Any:
    """The tree saved at `path` (as `save` and `latest` return it) with the structure, specs, mesh and device of `like`.

    `like` gives no values and is left alone; abstract arrays (`sl.abstract`) will do. `only`: a glob, globs or
    `(path, spec) -> bool`: restore these leaves and take the others from `like`. `rename={"new.path": "old.path"}`:
    leaves, or subtrees, that the files know by another name; a `*` stands for one name in both. Raises one `TreeError`
    that lists all that is missing, unexpected (unless `only`) or of another shape or dtype, before anything is read.
    One array at several places of `like` is one in the result, and must be one in the files.
    """
    ranks, folder = Processes(_mesh(like)), Path(path)
    flat, treedef = tree.flatten(like)
    paths = tree.paths(like)

    def look() -> tuple[tuple[list[bool], list[_Leaf]], list[str]]:
        chosen = [at is not None for at in part_of(like, only, "restore: only").sources]
        for at, x, yes in zip(paths, flat, chosen, strict=True):
            if not yes and _is_abstract(x):
                raise TreeError(f"restore: `only` leaves `{at}` out, but `like` is abstract and has no value to take")
        leaves = _leaves(_kept(paths, chosen), _kept(flat, chosen), rename)
        return (chosen, leaves), [f"path {folder}", *(leaf.line for leaf in leaves)]

    chosen, leaves = ranks.agree("restore: `like`", look)

    def check() -> tuple[int, dict[str, str], list[str]]:
        info = _info(folder)
        return info["crc32"], info.get("tied", {}), _mismatches(folder, info, leaves, whole=only is None)

    crc, tied, problems = ranks.first(check)
    if problems:
        hint = 'only="params.**" restores some leaves, rename={"new.path": "old.path"} finds them by other names'
        raise TreeError("\n  ".join([f"{folder} does not fit `like`:", *problems, hint]))
    ranks.all(lambda: _fill(folder, leaves, crc, tied))
    made = iter(leaves)
    return tree.unflatten(treedef, [next(made).value if yes else x for yes, x in zip(chosen, flat, strict=True)])


def compare(path: str | os.PathLike[str], like: Any) -> list[str]:
    """What keeps `path` from being restored as `like`, one line per leaf or file. A rank may ask alone."""
    leaves = _leaves(tree.paths(like), tree.leaves(like))
    return _mismatches(Path(path), _info(Path(path)), leaves, whole=True)


def _kept(xs: Sequence[Any], chosen: Sequence[bool]) -> list[Any]:
    return [x for x, yes in zip(xs, chosen, strict=True) if yes]


def _mesh(like: Any) -> Mesh | None:
    """The mesh of a tree's arrays, else the current one."""
    for x in tree.leaves(like):
        if isinstance(x, Array):
            return x.mesh
    with suppress(MeshError):
        return current_mesh()


def _step(state: Any) -> int:
    if getattr(state, "step", None) is None:
        raise TreeError("save: the tree has no `step`; say save(dir, tree, step=100)")
    return int(state.step)


def _version() -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("shardlib")
    return "not installed"


# ---- leaves as files see them


@dataclass
class _Leaf:
    """A leaf and its names in files: its path or, of a stacked leaf, one per layer. `first`: the same, at the first of
    several places."""

    path: str
    value: Any
    rename: Mapping[str, str]
    first: "_Leaf | None" = None

    @cached_property
    def stacked(self) -> int:
        """How many leading dimensions count layers."""
        return self.value.spec.stacked if isinstance(self.value, Array) and "*" in self.path.split(".") else 0

    @cached_property
    def names(self) -> list[str]:
        """In row-major order of layers. Each `*` counts along one stacked dimension, the last along all the others."""
        if not self.stacked:
            return [self.path]
        parts, layers = self.path.split("."), self.value.shape[: self.stacked]
        stars = [i for i, p in enumerate(parts) if p == "*"][: self.stacked]
        lengths = [*layers[: len(stars) - 1], math.prod(layers[len(stars) - 1 :])]
        out = []
        for place in product(*map(range, lengths)):
            numbers = dict(zip(stars, map(str, place), strict=True))
            out.append(".".join(numbers.get(i, p) for i, p in enumerate(parts)))
        return out

    @cached_property
    def saved(self) -> list[str]:
        """What files call them: the same, but for `rename`."""
        return [_renamed(n, self.rename) for n in self.names]

    @cached_property
    def what(self) -> dict[str, Any]:
        """The dtype and shape of each, or the Python type."""
        if not isinstance(self.value, Tensor):
            return {"type": type(self.value).__name__}
        return {"dtype": str(self.value.dtype).removeprefix("torch."), "shape": list(self.value.shape[self.stacked :])}

    @property
    def line(self) -> str:
        """What all ranks must agree on."""
        value = "" if isinstance(self.value, Tensor) else f" {self.value!r}"
        value += f" tied to `{self.first.path}`" if self.first else ""
        return f"`{self.path}` ({_say(self.what)}{value}{f' x {len(self.names)}' if self.stacked else ''})"

    def check(self) -> None:
        """Refuse what cannot be saved."""
        x = self.value
        if isinstance(x, Array) and x.spec.pending:
            waits = f"waits for a sum over {listing(x.spec.pending)}; sl.reshard it first"
            raise TreeError(f"save: `{self.path}` (`{x.spec}`) {waits}")
        if isinstance(x, Array):
            _ = x.shards  # raises where it was donated
        if _is_abstract(x):
            raise TreeError(f"save: `{self.path}` is abstract: it has no values")
        if not isinstance(x, Tensor) and type(x) not in _PLAIN:
            kinds = listing(t.__name__ for t in _PLAIN)
            raise TreeError(f"save: `{self.path}` is {type(x).__name__}; files hold tensors and {kinds}")

    def pieces(self, names: Sequence[str]) -> "Iterator[Piece]":
        """What this process holds of it, layer by layer, which the files call `names`; nothing where it is tied."""
        from shardlib.chunks import Piece

        x, k = self.value, self.stacked
        if self.first:
            return
        if not isinstance(x, Tensor):
            yield Piece(names[0], x)
            return
        for at, piece in (x.pieces() if isinstance(x, Array) else {(0,) * x.dim(): x.detach()}).items():
            for place in product(*map(range, piece.shape[:k])):
                number = 0
                for n, start, i in zip(x.shape[:k], at[:k], place, strict=True):
                    number = number * n + start + i
                yield Piece(names[number], piece[place], at[k:], tuple(x.shape[k:]))


def _leaves(paths: Sequence[str], values: Sequence[Any], rename: Mapping[str, str] | None = None) -> list[_Leaf]:
    leaves: list[_Leaf] = []
    for i, (path, x, at) in enumerate(zip(paths, values, places(values), strict=True)):
        leaves.append(_Leaf(path, x, rename or {}, leaves[at] if at < i else None))
    owner: dict[str, str] = {}
    for leaf in leaves:
        for name in leaf.names:
            if name in owner:
                raise TreeError(f"`{owner[name]}` and `{leaf.path}` both have the path `{name}`")
            owner[name] = leaf.path
    for new, old in (rename or {}).items():
        if new.count("*") != old.count("*"):
            raise TreeError(f"rename: `{new}` and `{old}` must have as many `*`")
        if not any(_match(new, name) for name in owner):
            raise TreeError(f"rename: `{new}` matches no path; there are {listing(list(owner)[:12])}")
    return leaves


def _match(pattern: str, name: str) -> re.Match[str] | None:
    """`pattern` as the first names of `name`; a `*` stands for one of them."""
    parts = ["([^.]+)" if p == "*" else re.escape(p) for p in pattern.split(".")]
    return re.match(r"\.".join(parts) + r"(?=\.|$)", name)


def _renamed(name: str, rename: Mapping[str, str]) -> str:
    for new, old in rename.items():
        if match := _match(new, name):
            stars = iter(match.groups())
            return ".".join(next(stars) if p == "*" else p for p in old.split(".")) + name[match.end() :]
    return name


def _is_abstract(x: Any) -> bool:
    shards = x._shards or () if isinstance(x, Array) else (x,)
    return any(isinstance(s, FakeTensor) for s in shards)


# ---- restoring


def _info(folder: Path) -> dict[str, Any]:
    try:
        info = json.loads((folder / saves.MARK).read_text())
        return {**info, "crc32": info["crc32"], "leaves": info["leaves"]}
    except (ValueError, KeyError, TypeError) as e:
        raise TreeError(f"{folder / saves.MARK} is damaged: {e}") from None
    except FileNotFoundError:
        inside = [p.name for p in saves.whole(folder)[-3:]]
        hint = f"it holds {listing(inside)}; sl.latest gives the newest" if inside else f"it has no {saves.MARK}"
        raise TreeError(f"{folder} is not a save: {hint if folder.exists() else 'it does not exist'}") from None


def _say(what: Mapping[str, Any]) -> str:
    return what.get("type") or f"{what['dtype']} {tuple(what['shape'])}"


def _mismatches(folder: Path, info: dict[str, Any], leaves: Sequence[_Leaf], whole: bool) -> list[str]:
    from shardlib import chunks

    found, tied, lines, used = info["leaves"], info.get("tied", {}), [], set()
    for leaf in leaves:
        for name, old, first in zip(leaf.names, leaf.saved, (leaf.first or leaf).saved, strict=True):
            label = f"`{name}`" + (f" (`{old}` in the files)" if old != name else "")
            used |= {old, tied.get(old, old)}
            if old in found and tied.get(old, old) != tied.get(first, first):
                lines.append(f"{label}: found a leaf of its own, expected one tensor with `{first}`")
            if old not in found:
                lines.append(f"{label}: missing, expected {_say(leaf.what)}")
            elif found[old] != leaf.what:
                lines.append(f"{label}: found {_say(found[old])}, expected {_say(leaf.what)}")
    if whole:
        lines += [f"`{name}`: unexpected, found {_say(what)}" for name, what in found.items() if name not in used]
    try:
        return lines + chunks.damaged(folder, chunks.index(folder, info["crc32"]), used)
    except TreeError as e:
        return [*lines, str(e)]


def _fill(folder: Path, leaves: Sequence[_Leaf], crc: int, tied: Mapping[str, str]) -> None:
    """Give every leaf new storage and read it from the save whose index has the checksum `crc`."""
    from shardlib import chunks

    for leaf in leaves:
        leaf.value = leaf.first.value if leaf.first else _empty(leaf.value)
    pieces = (p for leaf in leaves for p in leaf.pieces([tied.get(name, name) for name in leaf.saved]))
    try:
        values = iter(chunks.read(folder, chunks.index(folder, crc), pieces))
    finally:
        if _info(folder)["crc32"] != crc:
            raise TreeError(f"{folder} was replaced while it was read: restore it again")
    for leaf in leaves:
        if not isinstance(leaf.value, Tensor):
            leaf.value = next(values)


def _empty(x: Any) -> Any:
    """New storage for what `x` describes, zero because padding is."""
    if not isinstance(x, Array):
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device) if isinstance(x, Tensor) else x
    mesh, made, shards = x.mesh, {}, []
    for rank in range(mesh.total) if mesh.simulate else (mesh.rank,):
        at = layout.slices(x.spec, x.shape, mesh.shape, mesh.coordinates(rank))
        key = tuple((s.start, s.stop) for s in at)
        if key not in made:
            made[key] = torch.zeros(layout.padded_shape(x.spec, x.shape, mesh.shape), dtype=x.dtype, device=x.device)
        shards.append(made[key])
    return Array(shards, x.spec, x.shape, mesh)
