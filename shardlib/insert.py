"""`Insert`: sees whole torch functions above autograd, puts `pvary` in, and refuses what pending values do not allow.

Where operands of one function differ in type, an invariant operand becomes replicated (`pvary`), so that its gradient
is summed over the ranks that used it. A pending value (a sum still to be made) may be added to one pending over the
same axes, scaled by what is equal over those axes, and moved around: `Flow` knows what keeps it pending (flow.py); a
function after which it no longer is one is an error here that names the collective missing.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _len_torch_function_stack  # the stack of function modes has no public view
from torch._C._functorch import is_functorch_wrapped_tensor  # plain autograd is told from torch.func by its tensors
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode  # to leave all function modes for a while
from torch.utils._python_dispatch import _disable_current_modes  # to look at values below all modes

from shardlib.collectives import _pvary, refuse_captured
from shardlib.errors import SpecError, pointed
from shardlib.flow import flowing
from shardlib.mesh import Mesh
from shardlib.types import NO_TENSOR, Region, inside, outside, paused, region, short, unknown, valueless, words


class _Kind(Enum):
    """What a torch function is to `Insert`."""

    OP = auto()  # all that is not listed below
    ASKS = auto()  # shapes, dtypes: no value is made
    APART = auto()  # each operand for itself, no values meet
    MAKES = auto()  # a tensor from Python or numpy values
    COPIES = auto()  # copy.deepcopy, which would copy the storage, unseen by Flow
    SHOWS = auto()  # print: ranks may show different values; the first run, on shapes, the type
    COUNTS = auto()  # one_hot: looks at values to check them
    LEAVES = auto()  # numpy: out of torch
    ASSIGNS = auto()  # x.data = y: another value behind a type
    AUTOGRAD = auto()  # torch.autograd.grad, backward


_KINDS = {
    _Kind.ASKS: "size dim numel stride is_floating_point is_complex is_contiguous element_size len "
    "storage_offset data_ptr requires_grad_ untyped_storage ndimension nelement is_same_size result_type hash can_cast "
    "get_device is_nested is_sparse broadcast_shapes is_view iter is_inference is_conj is_neg is_signed is_pinned "
    "is_shared names is_set_to",
    _Kind.APART: "broadcast_tensors meshgrid expand_as view_as reshape_as type_as",
    _Kind.MAKES: "tensor as_tensor asarray frombuffer",
    _Kind.COPIES: "deepcopy",
    _Kind.SHOWS: "repr str format",
    _Kind.COUNTS: "one_hot",
    _Kind.LEAVES: "numpy array dlpack",
    _Kind.AUTOGRAD: "grad backward",
}  # fmt: skip
_BY_NAME = {name: kind for kind, names in _KINDS.items() for name in names.split()}
_VALUES = frozenset("T mT H mH data real imag grad".split())  # properties that are tensors; others are asked
_IN_PLACE = frozenset(
    "setitem iadd isub imul itruediv imatmul ipow iand ior ixor ifloordiv imod ilshift irshift".split()
)


class _Rule(NamedTuple):
    name: str
    kind: _Kind
    inplace: bool


_rules: dict[Any, _Rule] = {}  # by function, once for all regions


def _rule(func: Any) -> _Rule:
    full = getattr(func, "__name__", str(func)).split(".")[0]
    dunder = full.startswith("__") and full.endswith("__")
    name = full.strip("_") if dunder else full.rstrip("_") or full
    if full == "__get__":
        name = getattr(func.__self__, "__name__", "get")
        kind = _Kind.OP if name in _VALUES else _Kind.ASKS
    elif full == "__set__":
        name = getattr(func.__self__, "__name__", "set")
        kind = _Kind.ASSIGNS if name in _VALUES else _Kind.ASKS
    else:
        kind = _BY_NAME.get(full if full == "requires_grad_" else name.lstrip("_"), _Kind.OP)
    inplace = name in _IN_PLACE if dunder else full.endswith("_") and kind is _Kind.OP
    return _rules.setdefault(func, _Rule(name, kind, inplace))


def _find(values: Iterable[Any], into: list[Tensor]) -> list[Tensor]:
    """The tensors among nested arguments."""
    for a in values:
        kind = type(a)
        if kind is Tensor:
            into.append(a)
        elif kind in NO_TENSOR:
            continue
        elif isinstance(a, Tensor):
            into.append(a)
        elif isinstance(a, (list, tuple)):
            _find(a, into)
        elif isinstance(a, dict):
            _find(a.values(), into)
    return into


def _targets(rule: _Rule, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a function writes into."""
    first = next(iter((*args, *kwargs.values())), None) if rule.inplace else None
    return _find((first, kwargs.get("out")), [])


class Insert(TorchFunctionMode):
    """The function mode of one region."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        here, kwargs = self.region, kwargs or {}
        rule = _rules.get(func) or _rule(func)
        if rule.kind is _Kind.ASKS or here.paused:
            return func(*args, **kwargs)
        tensors = _find(args, [])
        if kwargs:
            _find(kwargs.values(), tensors)
        if rule.kind is not _Kind.OP and rule.kind is not _Kind.APART:
            return _special(here, rule, func, args, kwargs, tensors)
        if not tensors:
            return func(*args, **kwargs)
        if here.reentered:
            refuse_captured(rule.name, tensors)
        kinds = []
        for t in tensors:
            kind = here.types.get(t)
            if kind is None:
                raise unknown(rule.name, t)
            kinds.append(kind)
        if rule.inplace or "out" in kwargs:
            for target in _targets(rule, args, kwargs):
                here.refuse_written(rule.name, target)
        first = kinds[0]
        if any(k != first for k in kinds) and rule.kind is _Kind.OP:
            args, kwargs = _aligned(here, rule, args, kwargs, kinds)
        try:
            out = func(*args, **kwargs)
        except RuntimeError as e:
            _note_cut(here, rule.name, tensors, e)
            raise
        if any("P" in k for k in kinds):
            _check_pending(here, rule.name, tensors, kinds, _find((out,), _targets(rule, args, kwargs)))
        return out


def _note_cut(here: Region, name: str, tensors: list[Tensor], e: Exception) -> None:
    """Say, where torch refuses shapes, which operands are leaves that are cut."""
    for leaf, x in ((here.leaves.get(t), t) for t in tensors):
        if leaf is not None and leaf.spec.split:
            axes = leaf.spec.split[0] if len(leaf.spec.split) == 1 else leaf.spec.split
            e.add_note(
                f"  {name}: an operand of shape {list(x.shape)} is this rank's piece of `{leaf.spec}`, whose global "
                f"shape is {list(leaf.shape)}: sl.gather(x, {axes!r}) first, or use sl.einsum"
            )


def _special(here: Region, rule: _Rule, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
    """Functions that are no ops on values."""
    if rule.kind is _Kind.AUTOGRAD:
        if tensors and not any(is_functorch_wrapped_tensor(t) for t in tensors):
            raise SpecError(
                f"plain autograd ({rule.name}) inside a per-device function is not typed: "
                "use sl.grad or torch.func.grad"
            )
        return func(*args, **kwargs)
    if rule.kind is _Kind.LEAVES:
        raise SpecError(
            f"{rule.name}: numpy cannot follow a per-device function; stay in torch, "
            "or use .item() on a value that is equal on all ranks"
        )
    if rule.kind is _Kind.ASSIGNS:
        raise SpecError(f"assigning `.{rule.name}` puts another value behind the type of a tensor: make a new tensor")
    if rule.kind is _Kind.COUNTS:
        classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
        if classes < 0:
            return func(*args, **kwargs)
        return (args[0].unsqueeze(-1) == torch.arange(classes, device=args[0].device)).to(torch.int64)
    if rule.kind is _Kind.COPIES:
        return args[0].clone()
    if rule.kind is _Kind.MAKES and tensors and not isinstance(args[0], Tensor):
        raise SpecError(f"torch.{rule.name} of a list of tensors reads their values: use torch.stack")
    if rule.kind is _Kind.MAKES and tensors:
        return func(*args, **kwargs)
    if rule.kind is _Kind.SHOWS and any(valueless(t) for t in tensors):
        return here.describe(tensors[0])
    with paused():
        out = func(*args, **kwargs)
    if rule.kind is _Kind.MAKES:
        here.set_type(out, here.invariant)
    return out


@lru_cache(maxsize=4096)
def _equal_where_others_are_not(kind: str, kinds: frozenset[str], axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes over which a value of type `kind` is invariant and one of `kinds` is not."""
    return tuple(a for a, k, *others in zip(axes, kind, *kinds, strict=True) if k == "I" and set(others) != {"I"})


def _aligned(here: Region, rule: _Rule, args: Any, kwargs: Any, kinds: list[str]) -> Any:
    """The arguments with `pvary` on float operands that are invariant over an axis where another operand is not."""
    axes, met, targets = here.mesh.axis_names, frozenset(kinds), _targets(rule, args, kwargs)

    def fix(a: Any) -> Any:
        if isinstance(a, Tensor):
            if any(a is t for t in targets):
                return a
            missing = _equal_where_others_are_not(here.type_of(a), met, axes)
            if not missing or not (a.is_floating_point() or a.is_complex()):
                return a
            return _pvary(a, missing, here.reduce if here.leaves.get(a) else None)
        if type(a) in (list, tuple):
            return type(a)(fix(b) for b in a)
        return {k: fix(v) for k, v in a.items()} if type(a) is dict else a

    for target in targets:
        for axis, held, *others in zip(here.mesh.shape, here.type_of(target), *kinds, strict=True):
            wider = max(others, key="IRVP".index)
            if held == "I" != wider:  # its gradient would miss a sum; that of a replicated target is pending anyhow
                is_ = words(here, here.make(**{wider: (axis,)}))
                raise SpecError(
                    f"{rule.name} writes in place a value that is {is_} into one that is equal there.\n"
                    f"  Make a new value instead, or start from sl.pvary(buffer, {axis!r})"
                )
    return tuple(fix(a) for a in args), {k: fix(v) for k, v in kwargs.items()}


_ADDS = frozenset("add sub rsub radd subtract iadd isub".split())
_SCALES = frozenset(
    "mul multiply rmul imul rdiv div true_divide truediv rtruediv itruediv divide matmul rmatmul mm bmm mv dot einsum "
    "linear outer tensordot inner".split()
)
_JOINS = frozenset("cat concat concatenate stack hstack vstack dstack".split())


def _check_pending(here: Region, name: str, tensors: list[Tensor], kinds: list[str], out: list[Tensor]) -> None:
    """Raise where a pending operand went in and something that varies came out: the sum was needed first."""
    for i, axis in enumerate(here.mesh.shape):
        letters = [k[i] for k in kinds]
        if "P" not in letters or not any(here.over(o, axis) == "V" for o in out):
            continue
        at = letters.index("P")
        said = f"a value that still waits for a sum over `{axis}` ({short(tensors[at])} {words(here, kinds[at])})"
        mend = f"Make the sum first: psum or psum_scatter it over `{axis}`"
        if name in _ADDS:
            what = f"{name}: {said} plus one that does not would add the second once per rank"
            mend = f"Make the sum first: sl.psum(a, {axis!r}) {'-' if 'sub' in name else '+'} b"
        elif name in _JOINS:
            what = f"{name} mixes {said} with one that does not"
        elif name in _SCALES and "V" in letters:
            what = f"{name}: {said} meets one that differs by rank there"
        elif "div" in name and (len(letters) > 1 or name[0] == "r") and letters[-1] == "P":
            what = f"{name}: the divisor is {said}: x / (a + b) is not x / a + x / b"
            mend = f"Make the sum first: psum the divisor over `{axis}`, then divide"
        elif name in _SCALES and letters.count("P") > 1:
            what = f"{name}: {said} times another: the product of two sums is not the sum of the products"
            mend = (
                f"psum one of them over `{axis}` first (the product then waits for the sum of the other), or both "
                "(then no sum is left to make)"
            )
        elif name == "linear" and len(tensors) > 2:
            what = f"{name}: {said} gets a bias once per rank"
        else:
            what = f"{name} of {said}: it is not linear"
        raise SpecError(f"{what}.\n  {mend}")


@contextmanager
def per_device(mesh: Mesh, typed: bool = True) -> Iterator[Region]:
    """Run a per-device function: types by `Flow`, `pvary` by `Insert`. With `typed=False`, which only a lone rank may
    ask for, and only for code that has been checked, neither is on."""
    with _quiet(), pointed(), flowing(mesh, typed) as region:
        if not typed:
            yield region
            return
        with Insert(region) as mode:
            region.insert = mode
            yield region


def refuse_autocast() -> None:
    """Raise inside torch.autocast, whose casts would depend on where and when a function is checked, traced and run."""
    if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
        raise SpecError("per-device functions do not run inside torch.autocast: enter it inside the function, or cast")


@contextmanager
def _quiet() -> Iterator[None]:
    """A first run on shapes raises what is wrong: torch need not log it, too."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    held, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = held


@contextmanager
def reentered(name: str) -> Iterator[None]:
    """Inside a Function or a backward, where torch has function modes off: the region's `Insert` on again, and no
    captured value may be one that is being differentiated. `name`: whose Function it is."""
    if not inside() or not region().typed:
        yield
        return
    here = region()
    held, here.reentered = here.reentered, name
    try:
        with torch._C._EnableTorchFunction(), here.insert:  # the public switch only turns off
            yield
    finally:
        here.reentered = held


@contextmanager
def hiding(levels: range) -> Iterator[None]:
    """Inside, values of these levels of transforms are of those that are off, though as many are on again."""
    if not inside():
        yield
        return
    here = region()
    held, here.hidden = here.hidden, levels
    try:
        yield
    finally:
        here.hidden = held


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
