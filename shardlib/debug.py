"""Looking at values while a program runs: `debug.print`."""

import string
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor  # the value below transforms
from torch._subclasses.fake_tensor import FakeTensor  # where there is no value to print
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.node import has_side_effect

from shardlib import wire
from shardlib.array import Array
from shardlib.errors import SpecError
from shardlib.mesh import Mesh, current_mesh
from shardlib.types import inside, paused, region, short

SMALL = 16  # a tensor of so many elements is printed whole

_lib = torch.library.Library("shardlib", "FRAGMENT")
_lib.define("print(Tensor rank, Tensor[] xs, str[] texts, str[] specs) -> ()")


def print(fmt: str, *values: Any) -> None:
    """Print a line on every rank that starts with the rank, when the program gets there: `sl.debug.print("x {}", x)`.

    In eager code, in per-device functions and in what `jit` traces, where prints keep their order. `{}` takes a value
    as `str.format` does (`{0}`, and `{:.3f}` for the numbers of a tensor): a 0-d tensor is its number, one of up to 16
    elements its dtype, shape and numbers, a larger one the mean, standard deviation, minimum and maximum of its finite
    elements, and how many are NaN or infinite. A tensor is what the rank holds of it, an array its shard; under
    `torch.func.vmap` all rows at once. On a simulated mesh each rank prints. What `remat` computes again prints again.
    Raises `SpecError` where `fmt` does not fit.
    """
    texts, specs, tensors = _parsed(fmt, values)
    arrays = [x for x in tensors if isinstance(x, Array)]
    traced = get_proxy_mode() is not None
    if inside() or traced:
        with torch._C.DisableTorchFunction(), paused() if inside() else nullcontext():
            mesh = region().mesh if inside() else current_mesh()
            xs = [_bare(x.shards[0] if isinstance(x, Array) else x).detach() for x in tensors]
            torch.ops.shardlib.print(_rank(mesh, traced), xs, texts, specs)
        return
    if arrays and arrays[0].mesh.simulate:
        ranks: Sequence[int] = range(arrays[0].mesh.total)
    else:
        ranks = [dist.get_rank() if dist.is_initialized() else 0]
    for rank in ranks:
        _write(rank, [x.local(rank) if isinstance(x, Array) else _bare(x) for x in tensors], texts, specs)


def _parsed(fmt: str, values: Sequence[Any]) -> tuple[list[str], list[str], list[Tensor]]:
    """The text before, between and after the tensors, how each is formatted, and the tensors."""
    texts, specs, tensors = [""], list[str](), list[Tensor]()
    taken = 0
    for text, name, spec, _ in string.Formatter().parse(fmt):
        texts[-1] += text
        if name is None:
            continue
        if name and not name.isdecimal():
            raise SpecError(f"debug.print: `{{{name}}}` in {fmt!r}: values are taken in order, by {{}} or {{0}}")
        at = int(name) if name else taken
        taken += 1
        if at >= len(values):
            raise SpecError(f"debug.print: {fmt!r} wants {at + 1} or more values, there are {len(values)}")
        if isinstance(values[at], Tensor):
            tensors.append(values[at])
            specs.append(spec or "")
            texts.append("")
        else:
            texts[-1] += format(values[at], spec or "")
    if taken < len(values):
        raise SpecError(f"debug.print: {fmt!r} has {taken} places for {len(values)} values: write {{}} for each")
    return texts, specs, tensors


def _bare(x: Tensor) -> Tensor:
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def _rank(mesh: Mesh, traced: bool) -> Tensor:
    """The rank as a value: a program is the same on all of them."""
    if mesh.total == 1 or not (mesh.simulate or traced):
        return torch.full((), mesh.rank, dtype=torch.int64)
    return wire.axis_index(mesh.group(mesh.axis_names), mesh.device)


def _print(rank: Tensor, xs: Sequence[Tensor], texts: Sequence[str], specs: Sequence[str]) -> None:
    if not any(isinstance(x, FakeTensor) for x in (rank, *xs)):
        _write(int(rank), xs, texts, specs)


def _write(rank: int, xs: Sequence[Tensor], texts: Sequence[str], specs: Sequence[str]) -> None:
    said = texts[0] + "".join(_shown(x, s) + text for x, s, text in zip(xs, specs, texts[1:], strict=True))
    sys.stdout.write(f"rank {rank}: {said}\n")  # at once, so that lines of several processes stay whole
    sys.stdout.flush()


def _shown(x: Tensor, spec: str = "") -> str:
    """A tensor's values in a line; `spec`: how numbers are formatted."""
    spec = spec or (".6g" if x.is_floating_point() or x.is_complex() else "")
    if not x.dim():
        return format(x.item(), spec)
    if x.numel() <= SMALL or x.is_complex():
        return f"{short(x)} {_listed(x.tolist(), spec)}"
    wide = x.detach().double().flatten()
    finite = wide[wide.isfinite()]
    found = [(name, getattr(finite, name)().item()) for name in ("mean", "std", "min", "max") if len(finite) > 1]
    odd = [f"{n} {what}" for n, what in ((int(wide.isnan().sum()), "NaN"), (int(wide.isinf().sum()), "inf")) if n]
    return " ".join([short(x), *(f"{name} {value:{spec or '.6g'}}" for name, value in found), *odd])


def _listed(x: Any, spec: str) -> str:
    return f"[{', '.join(_listed(y, spec) for y in x)}]" if isinstance(x, list) else format(x, spec)


_lib.impl("print", _print, "CompositeExplicitAutograd")
_lib.impl("print", lambda *_: None, "Meta")
PRINT = has_side_effect(torch.ops.shardlib.print.default)
