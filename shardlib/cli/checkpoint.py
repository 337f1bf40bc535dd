"""`shardlib checkpoint`: what saves hold, how they differ, whether they are whole; to and from safetensors."""

import re
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardlib import saves
from shardlib.contents import contents
from shardlib.entries import say
from shardlib.errors import ShardError, TreeError, amount
from shardlib.interop import safetensors


def add(parser: ArgumentParser) -> None:
    """The arguments."""
    verbs = parser.add_subparsers(dest="verb", required=True)

    def verb(name: str, help_: str, *paths: str) -> ArgumentParser:
        found = verbs.add_parser(name, help=help_, description=help_)
        for path in paths:
            found.add_argument(path, type=Path, help="a save, or a folder of saves: the newest")
        return found

    verb("ls", "the saves of a folder").add_argument("folder", type=Path)
    verb("inspect", "the leaves of a save: dtype, shape, and how they were cut", "path")
    verb("diff", "which leaves of two saves differ, and by how much; exit code 1 if any does", "first", "second")
    verb("verify", "read all, and compare checksums; exit code 1 where something is damaged").add_argument(
        "paths", type=Path, nargs="+", metavar="PATH", help="saves, or folders of saves: all of them"
    )
    convert = verb("convert", "a save as safetensors, or safetensors as a save")
    convert.add_argument(
        "source", type=Path, help="a save, a folder of saves, or .safetensors files or a folder of them"
    )
    convert.add_argument(
        "target", type=Path, help="a .safetensors file, or a folder for several; or a folder for saves"
    )
    convert.add_argument("--names", type=Path, metavar="FILE", help="a pair of patterns on each line: ours, theirs")
    convert.add_argument("--only", nargs="+", metavar="GLOB", help="leaves to write as safetensors: 'params.**'")
    convert.add_argument("--dtype", metavar="D", help="what floating-point leaves are cast to for safetensors: float32")
    convert.add_argument("--step", type=int, metavar="N", help="the step of the save that is made")


def run(args: Namespace) -> int:
    """Do it; 1 where saves differ or are damaged, 2 for what cannot be done."""
    verbs = {"ls": _ls, "inspect": _inspect, "diff": _diff, "verify": _verify, "convert": _convert}
    try:
        return verbs[args.verb](args)
    except (ShardError, OSError) as e:
        print(f"shardlib checkpoint {args.verb}: {e}", file=sys.stderr)
        return 2


def _ls(args: Namespace) -> int:
    rows = []
    for path in _saves(args.folder):
        try:
            found = contents(path)
            state = "; ".join(found.damaged(found.leaves)) or "whole"
            rows.append((f"step {found.step}", amount(found.size), _when(path), found.mesh or "no mesh", state))
        except TreeError as e:
            rows.append((path.name, "", _when(path), "", str(e)))
    for path in saves.torn(args.folder):
        size = sum(p.stat().st_size for p in path.iterdir())
        rows.append(
            (path.name, amount(size), _when(path), "", "torn: being written, or cut off; the next save removes it")
        )
    print("\n".join(_columns(rows)))
    return 0


def _inspect(args: Namespace) -> int:
    found = contents(_save(args.path))
    print(f"{found.folder}: step {found.step}, {amount(found.size)}, saved on {found.mesh or 'no mesh'}")
    rows: dict[tuple[str, ...], int] = {}
    for name, what in found.leaves.items():  # layers that are alike are one line
        tied = f"tied to {found.tied[name]}" if name in found.tied else ""
        alike = (name if tied else re.sub(r"(?<=\.)\d+(?=\.)", "*", name), say(what), found.specs.get(name, ""), tied)
        rows[alike] = rows.get(alike, 0) + 1
    print("\n".join(_columns([(*row[:2], f"x {n}" if n > 1 else "", *row[2:]) for row, n in rows.items()])))
    return 0


def _diff(args: Namespace) -> int:
    one, two = contents(_save(args.first)), contents(_save(args.second))
    rows = [(name, f"only in {one.folder}") for name in one.leaves if name not in two.leaves]
    rows += [(name, f"only in {two.folder}") for name in two.leaves if name not in one.leaves]
    alike = []
    for name in (n for n in one.leaves if n in two.leaves):
        if one.leaves[name] == two.leaves[name]:
            alike.append(name)
        else:
            rows.append((name, f"{say(one.leaves[name])}, then {say(two.leaves[name])}"))
    for (name, x), (_, y) in zip(one.values(alike), two.values(alike), strict=True):
        if said := difference(x, y):
            rows.append((name, said))
    print("\n".join(_columns(rows)) or f"{len(alike)} leaves, all equal")
    return int(bool(rows))


def difference(x: Any, y: Any) -> str:
    """How two values of one dtype and shape differ; empty where they are equal. NaNs are equal to each other."""
    if not isinstance(x, Tensor):
        return "" if repr(x) == repr(y) else f"{x!r}, then {y!r}"
    differ = (x != y) & ~((x != x) & (y != y))
    if not (count := int(differ.sum())):
        return ""
    if x.dtype == torch.bool:
        return f"{count} of {x.numel()} differ"
    n = x.numel()
    x, y = (v[differ] if v.dtype.is_complex else v[differ].double() for v in (x, y))
    apart, size = (x - y).abs(), torch.stack([x.abs(), y.abs()]).amax(0)
    return f"{count} of {n} differ, by at most {apart.max():.3g}, relatively {(apart / size).max():.3g}"


def _verify(args: Namespace) -> int:
    paths, damaged = [p for given in args.paths for p in _saves(given)], False
    if not paths:
        raise TreeError("there are torn saves only")
    for path in paths:
        try:
            found = contents(path)
            lines = found.verify()
            said = f"whole: {len(found.leaves)} leaves, {amount(found.size)}"
        except TreeError as e:
            lines, said = [str(e)], ""
        damaged |= bool(lines)
        print("\n  ".join([f"{path}: {'damaged' if lines else said}", *lines]))
    return int(damaged)


def _convert(args: Namespace) -> int:
    source = args.source
    if source.suffix == ".safetensors" or (not _holds(source) and any(source.glob("*.safetensors"))):
        if args.only or args.dtype:
            raise TreeError("--only and --dtype choose what is written as safetensors; restore takes only= instead")
        print(safetensors.load(source, args.target, args.names, step=args.step))
        return 0
    dtype = getattr(torch, args.dtype or "", None)
    if args.dtype and not isinstance(dtype, torch.dtype):
        raise TreeError(f"--dtype {args.dtype}: write one of torch's, such as float32")
    if args.step is not None:
        raise TreeError("--step says what step a save is of that is made from safetensors")
    print(*safetensors.save(_save(source), args.target, args.names, only=args.only, dtype=dtype), sep="\n")
    return 0


def _saves(path: Path) -> list[Path]:
    """The save at `path`, or all of a folder."""
    if not path.is_dir():
        raise TreeError(f"{path} is no folder")
    found = _holds(path)
    if not found and not saves.torn(path):
        raise TreeError(f"{path} holds no saves")
    return found


def _holds(path: Path) -> list[Path]:
    return [path] if (path / saves.MARK).exists() else saves.whole(path)


def _save(path: Path) -> Path:
    """The save at `path`, or the newest of a folder."""
    return (_saves(path) or [path])[-1]


def _when(path: Path) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))


def _columns(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(text.ljust(n) for text, n in zip(row, widths, strict=True)).rstrip()
