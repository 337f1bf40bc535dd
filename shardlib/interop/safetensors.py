"""Saves as safetensors files, and such files as saves. `pip install shardlib[safetensors]`."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardlib import checkpoint, tree
from shardlib.contents import Contents, contents
from shardlib.entries import say
from shardlib.errors import ShardError, TreeError, listing
from shardlib.interop.names import Names
from shardlib.saving import finish

Table = Mapping[str, str] | str | os.PathLike[str]
_PLAIN = (bool, int, float, str)


def save(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    names: Table | None = None,
    *,
    only: tree.Chooser | None = None,
    dtype: torch.dtype | None = None,
    limit: int = 5 << 30,
) -> list[Path]:
    """Write the save at `path` as `out`: a `.safetensors` file, or a folder for files with an index.

    No file of a folder holds more than `limit` bytes, unless a leaf does; their names are Hugging Face's. Returns the
    files. For one process.

    `names`: pairs of patterns, ours and theirs, as a mapping or a file (see `Names`). `only`: a glob or globs of the
    leaves to write. `dtype`: what floating-point leaves are cast to; others stay. Plain values and the step stand in
    the files' metadata; tied leaves are written once, under the first name. Leaves are read one by one, with their
    checksums. Raises `TreeError` for what is damaged, or cannot be named or written.
    """
    tensors = _library()
    finish()
    found, target = contents(Path(path)), Path(out)
    every = [*found.leaves]
    chosen = tree.choose(only or "**", every, [found.specs.get(name) for name in every])
    kept = [name for name, yes in zip(every, chosen, strict=True) if yes]
    plain = dict(found.values(name for name in kept if "type" in found.leaves[name]))
    for name, value in plain.items():
        if type(value) not in _PLAIN:
            raise TreeError(
                f"`{name}` is {type(value).__name__}, which has no place in safetensors: leave it out, only="
            )
    tied = {name: own for name, own in found.tied.items() if name in kept and own in kept}
    theirs = Names.of(names).theirs([name for name in kept if name not in plain and name not in tied])
    for name, held in theirs.items():
        kinds = sorted({say(found.leaves[n]) for n in ([held] if isinstance(held, str) else held)})
        if len(kinds) > 1:
            raise TreeError(f"`{name}` would stack layers of {listing(kinds)}: give them a pattern that names each")
        if kinds[0].startswith("complex128"):
            raise TreeError(f"`{name}` is complex128, which has no place in safetensors: leave it out, only=")
    about = {"step": found.step, "plain": plain, "tied": tied}
    metadata = {"format": "pt", "shardlib": json.dumps(about)}
    parts, files = _parts(found, theirs, dtype, limit), []
    alone = target.suffix == ".safetensors"
    if not alone and any(target.glob("*.safetensors*")):
        raise TreeError(f"{target} holds safetensors files, which would be read with these: name another folder")
    if alone and len(parts) > 1:
        raise TreeError(f"{target} would hold more than {limit} bytes: name a folder, or give a larger limit=")
    (target.parent if alone else target).mkdir(parents=True, exist_ok=True)
    for i, part in enumerate(parts, 1):
        name = f"model-{i:05d}-of-{len(parts):05d}.safetensors" if len(parts) > 1 else "model.safetensors"
        file = target if alone else target / name
        aside = file.with_name(f".{file.name}.tmp")
        try:
            tensors.torch.save_file({n: _value(found, held, dtype) for n, held in part.items()}, aside, metadata)
            aside.rename(file)
        finally:
            aside.unlink(missing_ok=True)
        files.append(file)
    if len(files) > 1:
        map_ = {name: file.name for file, part in zip(files, parts, strict=True) for name in part}
        total = sum(_size(found, held, dtype) for held in theirs.values())
        index = {"metadata": {"total_size": total}, "weight_map": map_}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return files


def load(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    dir: str | os.PathLike[str],
    names: Table | None = None,
    *,
    step: int | None = None,
) -> Path:
    """Save what safetensors `files` hold (one, several, or a folder of them) as `dir/step-...`, which it returns.

    `names` is the table that `save` takes. What `save` has noted in the files' metadata is part of it; `step`: by
    default the one noted, else 0. `sl.restore` then reads it into any mesh and specs. Raises `TreeError`.
    """
    tensors = _library()
    given = [files] if isinstance(files, (str, os.PathLike)) else files
    paths = [f for p in map(Path, given) for f in (sorted(p.glob("*.safetensors")) if p.is_dir() else [p])]
    if not paths:
        raise TreeError(f"there is no .safetensors file in {given[0] if given else 'an empty list'}")
    values: dict[str, Any] = {}
    about: dict[str, Any] = {}
    for path in paths:
        try:
            with tensors.safe_open(path, "pt") as file:
                about = json.loads((file.metadata() or {}).get("shardlib", "{}")) or about
                values |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except tensors.SafetensorError as e:
            raise TreeError(f"{path} is no whole safetensors file: {e}") from None
    state: dict[str, Any] = {}
    for theirs, ours in Names.of(names).ours([*values]).items():
        if "*" in (parts := ours.split(".")):
            for i, layer in enumerate(values[theirs]):
                state[".".join(str(i) if p == "*" else p for p in parts)] = layer.clone()
        else:
            state[ours] = values[theirs]
    state |= about.get("plain", {}) | {name: state[own] for name, own in about.get("tied", {}).items()}
    return checkpoint.save(dir, state, step=about.get("step", 0) if step is None else step)


def _library() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError:
        raise ShardError("safetensors is not installed: pip install safetensors") from None
    return safetensors


Held = str | list[str]  # a leaf, or the layers that are stacked in one tensor


def _size(found: Contents, held: Held, dtype: torch.dtype | None) -> int:
    """Bytes of it."""
    first, count = (held, 1) if isinstance(held, str) else (held[0], len(held))
    what = found.leaves[first]
    return torch.Size(what["shape"]).numel() * count * _cast(getattr(torch, what["dtype"]), dtype).itemsize


def _cast(kind: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype and kind.is_floating_point else kind


def _parts(found: Contents, theirs: Mapping[str, Held], dtype: torch.dtype | None, limit: int) -> list[dict[str, Held]]:
    """What each file holds."""
    parts, free = list[dict[str, Held]]([{}]), limit
    for name, held in theirs.items():
        size = _size(found, held, dtype)
        if size > free and parts[-1]:
            parts.append({})
            free = limit
        parts[-1][name] = held
        free -= size
    return parts


def _value(found: Contents, held: Held, dtype: torch.dtype | None) -> Tensor:
    xs: list[Tensor] = [x for _, x in found.values([held] if isinstance(held, str) else held)]
    x = xs[0] if isinstance(held, str) else torch.stack(xs)
    return x.to(_cast(x.dtype, dtype))
