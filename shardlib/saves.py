"""Folders of saves: each appears by one rename, so that a torn save is never taken for a whole one.

    runs/a/step-00000100                one save
    runs/a/.step-00000200.tmp-3f9a01bc  one that is being written, or torn
    runs/a/.step-00000100.old-77ab20e1  one that is being replaced: it counts until its successor is there

One process at a time writes here; any number may read.
"""

import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MARK = "shardlib.json"  # written last
_ROOM = "make room there, or keep fewer saves (keep=)"
_ALLOW = "let this user write there, or save into another folder"
_MEND = {errno.ENOSPC: _ROOM, errno.EDQUOT: _ROOM, errno.EROFS: _ALLOW, errno.EACCES: _ALLOW, errno.EPERM: _ALLOW}
_NAME = re.compile(r"step-(\d{8,})|\.step-(\d{8,})\.old-\w+")


@contextmanager
def mended() -> Iterator[None]:
    """Errors of the disk say in a note how to mend them."""
    try:
        yield
    except OSError as e:
        if e.errno in _MEND:
            e.add_note(_MEND[e.errno])
        raise


def folder(root: Path, step: int) -> Path:
    """Where a whole save of `step` is."""
    return root / f"step-{step:08d}"


def whole(root: Path) -> list[Path]:
    """The whole saves in `root`, oldest step first."""
    found: dict[int, Path] = {}
    for p in sorted(root.iterdir() if root.is_dir() else ()):  # `.step-1.old-x` sorts before `step-1`, which so wins
        if (match := _NAME.fullmatch(p.name)) and (p / MARK).exists():
            found[int(match[1] or match[2])] = p
    return [found[step] for step in sorted(found)]


def torn(root: Path) -> list[Path]:
    """What is being written in `root`, or was when its process ended."""
    held = whole(root)
    return [p for p in sorted(root.glob(".step-*")) if p not in held]


@mended()
def begin(target: Path) -> Path:
    """An empty folder to write the save `target` into; removes what torn saves left beside it."""
    tidy(target.parent)
    aside = _beside(target, "tmp")
    aside.mkdir(parents=True)
    return aside


def write(path: Path, text: str) -> None:
    """A small file, on the disk when this returns."""
    path.write_text(text)
    _sync(path)


@mended()
def publish(aside: Path, target: Path, text: str) -> None:
    """Mark a finished save with `text` and make it appear as `target`, at once; an older one of that name goes."""
    write(aside / MARK, text)
    _sync(aside)
    if target.exists():
        target.rename(_beside(target, "old"))
    aside.rename(target)
    _sync(target.parent)


def prune(target: Path, keep: int) -> None:
    """Remove the saves of steps before `target` but the last `keep - 1`."""
    older = whole(target.parent)
    older = older[: older.index(target)]
    for p in older[: max(0, len(older) - keep + 1)]:
        gone = _beside(p, "tmp")
        p.rename(gone)  # it disappears at once, too
        discard(gone)


def tidy(root: Path) -> None:
    """Remove what torn saves left; put back a save whose successor did not appear."""
    for p in sorted(root.glob(".step-*")):
        target = root / p.name[1:].split(".")[0]
        if ".old-" in p.name and not target.exists():
            p.rename(target)
        else:
            discard(p)


def discard(p: Path) -> None:
    """Remove a folder as far as possible."""
    shutil.rmtree(p, ignore_errors=True)


def _beside(target: Path, why: str) -> Path:
    return target.with_name(f".{target.name}.{why}-{uuid.uuid4().hex[:8]}")


def _sync(path: Path) -> None:
    """Bring a file or a folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
