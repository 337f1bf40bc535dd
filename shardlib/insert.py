"""`Insert`: sees whole torch functions above autograd, puts `pvary` in, and refuses what a pending value does not allow.

Where operands of one op differ in type, an invariant operand becomes replicated (`pvary`), so that its gradient is summed
over the ranks that used it. A pending value (a sum still to be made) may be added to one pending over the same axes,
scaled by what is equal over those axes, and moved around; anything else is an error that names the collective missing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, maybe_current_level, maybe_get_level  # closures in remat
from torch._C import _len_torch_function_stack  # the stack of function modes has no public view
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

from shardlib.collectives import _pvary
from shardlib.errors import SpecError, listing
from shardlib.mesh import Mesh
from shardlib.types import Region, flowing, inside, outside, region, unknown

# What a pending value may pass through, by the name of the torch function (`__add__`, `add_` and `radd` count as `add`).
_MOVES = frozenset(
    "neg negative positive view reshape transpose t permute sum expand expand_as unsqueeze squeeze flatten unflatten "
    "contiguous to chunk split tensor_split getitem movedim moveaxis clone detach view_as reshape_as unbind cat concat "
    "stack mean select narrow float double half bfloat16 type swapaxes swapdims mT mH T H index_select gather roll flip "
    "diagonal unfold pad repeat tile cumsum trace ravel get real conj data atleast_1d atleast_2d".split()
)
_ASKS = frozenset(
    "size dim numel stride is_floating_point is_complex is_contiguous element_size len storage_offset data_ptr "
    "requires_grad_ requires_grad untyped_storage ndimension nelement type is_same_size result_type hash repr str format "
    "can_cast get_device is_nested is_sparse broadcast_shapes format_ _is_view broadcast_tensors iter".split()
)
_ADDS = frozenset("add sub rsub subtract".split())
_SCALES = frozenset("mul multiply div true_divide truediv divide matmul mm bmm mv dot einsum linear outer tensordot inner".split())
_CREATES_LIKE = frozenset("zeros_like ones_like empty_like full_like new_zeros new_ones new_full new_empty".split())
_AUTOGRAD = frozenset({"grad", "backward"})
_CACHE: dict[Any, tuple[str, bool]] = {}


def _normal(func: Any) -> tuple[str, bool]:
    """The function's name without decoration, and whether it writes in place."""
    found = _CACHE.get(func)
    if found is None:
        name = getattr(func, "__name__", str(func))
        dunder = name.startswith("__") and name.endswith("__")
        core = name.strip("_") if dunder else name
        inplace = core == "setitem" or (dunder and core in ("iadd", "isub", "imul", "itruediv")) or (
            not dunder and core.endswith("_") and core not in ("requires_grad_",)
        )
        core = core.rstrip("_") if not dunder else core
        if dunder and core not in ("getitem", "get", "repr", "len", "hash", "rsub", "iter", "str", "format"):
            core = core[1:] if core[:1] in "ri" and core[1:] in _ADDS | _SCALES | {"add", "sub"} else core
        found = _CACHE[func] = (core, inplace)
    return found


class Insert(TorchFunctionMode):
    """The function mode of one region."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        here, tensors = self.region, []
        for a in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(a, Tensor):
                tensors.append(a)
            elif isinstance(a, (list, tuple)):
                tensors.extend(b for b in a if isinstance(b, Tensor))
        if not tensors or here.paused:
            return func(*args, **kwargs)
        name, inplace = _normal(func)
        if name in _AUTOGRAD:
            if not any(is_functorch_wrapped_tensor(t) for t in tensors):
                raise SpecError(f"plain autograd ({name}) inside a per-device function is not typed: use sl.grad or torch.func.grad")
            return func(*args, **kwargs)
        if name in _ASKS:
            return func(*args, **kwargs)
        kinds = [here.types.get(t) for t in tensors]
        first = kinds[0]
        if len(kinds) > 1 or None in kinds or "P" in first:  # type: ignore[operator]
            for t, k in zip(tensors, kinds):
                if k is None:
                    self._check_level(name, t)
                    raise unknown(name, t)
        level = maybe_current_level() or 0
        for t in tensors:
            if is_functorch_wrapped_tensor(t) and maybe_get_level(t) > level:
                self._check_level(name, t)
        pending: tuple[str, ...] = ()
        if any("P" in k for k in kinds if k):
            pending = _pending_result(here, name, args, tensors, kinds)  # type: ignore[arg-type]
        if any(k != first for k in kinds):
            args, kwargs = self._align(name, inplace, args, kwargs, kinds)  # type: ignore[arg-type]
        out = func(*args, **kwargs)
        if pending:
            for o in (out,) if isinstance(out, Tensor) else out if isinstance(out, (tuple, list)) else ():
                if isinstance(o, Tensor):
                    here.retype(o, here.type_of(o), pending, "P")
        return out

    def _check_level(self, name: str, x: Tensor) -> None:
        if is_functorch_wrapped_tensor(x) and maybe_get_level(x) > (maybe_current_level() or 0):
            raise SpecError(
                f"{name}: remat (or custom_vjp) captured a value that is being differentiated; its gradient would be lost.\n"
                "  Pass it as an argument: remat(f)(w, x)"
            )

    def _align(self, name: str, inplace: bool, args: Any, kwargs: Any, kinds: list[str]) -> Any:
        """Insert `pvary` on float operands that are invariant over an axis where another operand is not."""
        here = self.region
        need = "".join("I" if set(letters) == {"I"} else "x" for letters in zip(*kinds))

        def fix(a: Any) -> Any:
            if isinstance(a, Tensor) and (a.is_floating_point() or a.is_complex()):
                missing = tuple(x for x, k, n in zip(here.mesh.shape, here.type_of(a), need) if k == "I" and n == "x")
                return _pvary(a, missing) if missing else a
            if isinstance(a, (list, tuple)) and any(isinstance(b, Tensor) for b in a):
                return type(a)(fix(b) for b in a) if type(a) in (list, tuple) else a
            return a

        if inplace:
            target, others = kinds[0], kinds[1:]
            wider = [a for a, k, *os in zip(here.mesh.shape, target, *others) if k in "IR" and any(o in "VP" for o in os)]
            if wider:
                raise SpecError(
                    f"{name} writes a value that varies over {listing(wider)} into one that is equal there.\n"
                    f"  Write `x = x.{name}(...)` out of place, or start from sl.pvary(buffer, {wider[0]!r})"
                )
            return (args[0], *(fix(a) for a in args[1:])), {k: fix(v) for k, v in kwargs.items()}
        return tuple(fix(a) for a in args), {k: fix(v) for k, v in kwargs.items()}


def _pending_result(here: Region, name: str, args: Any, tensors: list[Tensor], kinds: list[str]) -> tuple[str, ...]:
    """The axes over which the result of `name` is pending, or an error."""
    if name in _CREATES_LIKE:
        return ()
    out = []
    for i, axis in enumerate(here.mesh.shape):
        letters = [k[i] for k in kinds]
        if "P" not in letters:
            continue
        culprit = here.describe(tensors[letters.index("P")])
        mend = f"Make the sum first: psum or psum_scatter it over `{axis}`"
        if name in _ADDS:
            number = next((a for a in args if isinstance(a, (int, float)) and a != 0), None)
            if set(letters) != {"P"} or number is not None:
                raise SpecError(
                    f"{name}: a value that still waits for a sum over `{axis}` ({culprit}) plus one that does not would add "
                    f"the second once per rank.\n  {mend}, or add it after the sum"
                )
        elif name in _SCALES:
            divided_by = name in ("div", "true_divide", "truediv", "divide") and len(tensors) > 1 and letters[1] == "P"
            reciprocal = name in ("rtruediv", "rdiv")
            biased = name == "linear" and len(tensors) > 2
            if letters.count("P") > 1 or "V" in letters or divided_by or reciprocal or biased:
                why = (
                    "times one that varies there" if "V" in letters
                    else "is divided by" if divided_by or reciprocal
                    else "gets a bias once per rank" if biased
                    else "meets another pending one"
                )  # fmt: skip
                raise SpecError(f"{name}: a value that still waits for a sum over `{axis}` ({culprit}) {why}.\n  {mend}")
        elif name not in _MOVES:
            raise SpecError(f"{name} of a value that still waits for a sum over `{axis}` ({culprit}): it is not linear.\n  {mend}")
        elif name in ("cat", "concat", "stack") and set(letters) != {"P"}:
            raise SpecError(f"{name} mixes a value that still waits for a sum over `{axis}` ({culprit}) with one that does not.\n  {mend}")
        out.append(axis)
    return tuple(out)


@contextmanager
def per_device(mesh: Mesh) -> Iterator[Region]:
    """Run a per-device function: types by `Flow`, `pvary` by `Insert`."""
    with flowing(mesh) as region, Insert(region) as mode:
        region.insert = mode
        yield region


@contextmanager
def reentered() -> Iterator[None]:
    """Inside a Function or a backward, where torch has function modes off: the region's `Insert` on again."""
    if not inside():
        yield
        return
    with torch._C._EnableTorchFunction(), region().insert:  # the public switch only turns off
        yield


@contextmanager
def isolated() -> Iterator[None]:
    """Leave the region and every torch mode for a while: inside, shapes can be traced as if nothing were running."""
    held = [_pop_mode() for _ in range(_len_torch_function_stack())]
    try:
        with outside(), _disable_current_modes():
            yield
    finally:
        for mode in reversed(held):
            _push_mode(mode)
