"""Checkpoints: what any mesh saved, any other restores, bit for bit.

    runs/a/step-00000100/             one save, published by one rename after every process has written
        shardlib.json                 version, step, mesh, shape and dtype of every leaf, which are tied, checksums
        .metadata  __0_0.distcp ...   the tensors, in the format of torch.distributed.checkpoint: its readers open them
        __0_0.distcp.crc32 ...        a checksum of every chunk

Files hold global leaves by path, without padding, a stacked leaf as one leaf per layer, a tied one once: meshes, specs,
ZeRO stages and stacking do not show. One run at a time saves into a folder; any number may read.
"""

import importlib.metadata
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from shardlib import saves, saving, tree
from shardlib.array import Array
from shardlib.contents import Contents, contents, described
from shardlib.entries import Entry, empty, entries, is_abstract, say
from shardlib.errors import MeshError, TreeError
from shardlib.mesh import Mesh, current_mesh
from shardlib.parts import part_of
from shardlib.processes import Processes
from shardlib.saving import Saving

if TYPE_CHECKING:
    from shardlib.chunks import Plan  # `chunks` loads torch.distributed.checkpoint, which takes a second: at first use


@overload
def save(
    dir: str | os.PathLike[str],
    state: Any,
    *,
    step: int | None = ...,
    keep: int | None = ...,
    wait: Literal[True] = True,
) -> Path: ...
@overload
def save(
    dir: str | os.PathLike[str], state: Any, *, step: int | None = ..., keep: int | None = ..., wait: Literal[False]
) -> Saving: ...
def save(
    dir: str | os.PathLike[str], state: Any, *, step: int | None = None, keep: int | None = None, wait: bool = True
) -> Path | Saving:
    """Save a tree as `dir/step-00000100`, which it returns. All ranks call it; what one of them raises, all raise.

    Leaves are arrays, plain tensors and plain values (equal on all ranks). `step`: by default `state.step`. An older
    save of the same step is replaced. `keep`: how many saves to leave, up to this step. `wait=False`: copy what this
    rank writes into memory of the host, which stays for the next save, let a thread write it, and return a `Saving`,
    whose `.wait()` gives the path; the state may be donated at once. One save goes on at a time: the next call of
    `save`, `latest`, `restore` or `compare` waits for it and raises what it raised, and so does the end of the process.
    Raises `TreeError` for leaves that cannot be saved, `RankError` when ranks pass different trees or one cannot write
    (a lone process: its error).
    """
    saving.finish()
    mesh, root = _mesh(state), Path(dir)
    ranks = Processes(mesh)

    def look() -> tuple[tuple[int, list[Entry]], list[str]]:
        if keep is not None and keep < 1:
            raise ValueError(f"save: keep={keep}; the new save at least is kept")
        if step is not None and not (isinstance(step, int) and step >= 0):
            raise ValueError(f"save: step={step!r}; a step is an int from 0")
        number = _step(state) if step is None else step
        leaves = entries(tree.paths(state), tree.leaves(state))
        for leaf in leaves:
            leaf.check()
        return (number, leaves), [f"path {root}", f"step {number}", f"wait {wait}", *(leaf.line for leaf in leaves)]

    number, leaves = ranks.agree("save: the tree", look)
    target = saves.folder(root, number)
    pieces = (p for leaf in leaves for p in leaf.pieces(leaf.names))
    info = _described(number, mesh, leaves)
    aside = ranks.first(lambda: saves.begin(target))
    from shardlib import chunks

    with _undone(ranks, aside, target):
        plan = chunks.Plan(aside, pieces, ranks.exchange)
        if not wait:
            ranks.all(plan.copy)
            ranks = Processes(mesh, apart=True)
    if wait:
        _write(ranks, plan, target, info, keep)
        return target
    return saving.begin(target, partial(_write, ranks, plan, target, info, keep))


def _described(number: int, mesh: Mesh | None, leaves: Sequence[Entry]) -> dict[str, Any]:
    """What a save says of itself."""
    named = [(name, leaf) for leaf in leaves for name in leaf.names]
    tied = {name: own for leaf in leaves if leaf.tied for name, own in zip(leaf.names, leaf.tied.names, strict=True)}
    return dict(
        shardlib=_version(),
        torch=torch.__version__,
        step=number,
        mesh=mesh.name if mesh else "",
        leaves={name: leaf.what for name, leaf in named},
        specs={name: leaf.spec for name, leaf in named if leaf.spec},
        tied=tied,
    )


def _write(ranks: Processes, plan: "Plan", target: Path, info: Mapping[str, Any], keep: int | None) -> None:
    """Write the save `target`, and publish it. All processes call it."""
    from shardlib import chunks

    def publish() -> None:
        saves.publish(plan.folder, target, described({**info, "crc": chunks.sums(plan.folder)}))
        saves.tidy(target.parent)
        if keep is not None:
            saves.prune(target, keep)

    with _undone(ranks, plan.folder, target):
        plan.write(ranks.exchange)
        ranks.first(publish)


@contextmanager
def _undone(ranks: Processes, aside: Path, target: Path) -> Iterator[None]:
    """Where the save `target` fails inside, what is in the folder `aside` goes, and the error says so."""
    try:
        yield
    except BaseException as e:
        if ranks.rank == 0:
            saves.discard(aside)
        free = ""
        with suppress(OSError):
            free = f" ({shutil.disk_usage(target.parent).free >> 20} MB are free there)"
        e.add_note(f"while {target} was saved{free}; older saves are as they were")
        raise


def latest(dir: str | os.PathLike[str]) -> Path | None:
    """The newest whole save in `dir`, or None. On a mesh of processes all ranks call it and get what the first sees."""
    saving.finish()
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
    saving.finish()
    ranks, folder = Processes(_mesh(like)), Path(path)
    flat, treedef = tree.flatten(like)
    paths = tree.paths(like)

    def look() -> tuple[tuple[list[bool], list[Entry]], list[str]]:
        chosen = [at is not None for at in part_of(like, only, "restore: only").sources]
        for at, x, yes in zip(paths, flat, chosen, strict=True):
            if not yes and is_abstract(x):
                raise TreeError(f"restore: `only` leaves `{at}` out, but `like` is abstract and has no value to take")
        leaves = entries(_kept(paths, chosen), _kept(flat, chosen), rename)
        return (chosen, leaves), [f"path {folder}", *(leaf.line for leaf in leaves)]

    chosen, leaves = ranks.agree("restore: `like`", look)

    def check() -> tuple[Contents, list[str]]:
        found = contents(folder)
        problems = _mismatches(found, leaves, whole=only is None)
        return replace(found), problems  # without the index, which may be long

    found, problems = ranks.first(check)
    if problems:
        hint = 'only="params.**" restores some leaves, rename={"new.path": "old.path"} finds them by other names'
        raise TreeError("\n  ".join([f"{folder} does not fit `like`:", *problems, hint]))
    ranks.all(lambda: _fill(found, leaves))
    made = iter(leaves)
    return tree.unflatten(treedef, [next(made).value if yes else x for yes, x in zip(chosen, flat, strict=True)])


def compare(path: str | os.PathLike[str], like: Any) -> list[str]:
    """What keeps `path` from being restored as `like`, one line per leaf or file. A rank may ask alone."""
    saving.finish()
    return _mismatches(contents(Path(path)), entries(tree.paths(like), tree.leaves(like)), whole=True)


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


@cache
def _version() -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("shardlib")
    return "not installed"


def _mismatches(found: Contents, leaves: Sequence[Entry], whole: bool) -> list[str]:
    lines, used, tied = [], set[str](), found.tied
    for leaf in leaves:
        for name, old, first in zip(leaf.names, leaf.saved, (leaf.tied or leaf).saved, strict=True):
            label = f"`{name}`" + (f" (`{old}` in the files)" if old != name else "")
            used |= {old, tied.get(old, old)}
            if old in found.leaves and tied.get(old, old) != tied.get(first, first):
                lines.append(f"{label}: found a leaf of its own, expected one tensor with `{first}`")
            if old not in found.leaves:
                lines.append(f"{label}: missing, expected {say(leaf.what)}")
            elif found.leaves[old] != leaf.what:
                lines.append(f"{label}: found {say(found.leaves[old])}, expected {say(leaf.what)}")
    if whole:
        lines += [f"`{name}`: unexpected, found {say(what)}" for name, what in found.leaves.items() if name not in used]
    return lines + found.damaged(used)


def _fill(found: Contents, leaves: Sequence[Entry]) -> None:
    """Give every leaf new storage and read it from a save, which must still be the one that was `found`."""
    from shardlib import chunks

    for leaf in leaves:
        leaf.value = leaf.first.value if leaf.first else empty(leaf.value)
    pieces = (p for leaf in leaves for p in leaf.pieces([found.tied.get(name, name) for name in leaf.saved]))
    try:
        values = iter(chunks.read(found.folder, found.index, found.crc, pieces))
    finally:
        if contents(found.folder).crc != found.crc:
            raise TreeError(f"{found.folder} was replaced while it was read: restore it again")
    for leaf in leaves:
        if not isinstance(leaf.value, Tensor):
            leaf.value = next(values)
