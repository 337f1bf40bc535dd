"""`Flow`: types of every tensor by data flow, below functorch and autograd.

Equal operands give equal results; anything that touches a varying value varies. A value pending over an axis stays so
through ops that are linear in it where all else is equal over that axis (the tables below, by the name of the aten op)
and becomes varying through any other: in a backward pass that is right, in user code `Insert` refuses it.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # the layer below functorch has no public name

from shardlib.errors import SpecError
from shardlib.mesh import Mesh
from shardlib.types import NO_TENSOR, Region, entered, unknown, words

_LIKE = frozenset(
    "ones_like zeros_like empty_like full_like new_zeros new_ones new_full new_empty new_empty_strided "
    "_efficientzerotensor".split()
)
_KEEPS_LEAF = frozenset(
    "zeros_like ones_like empty_like full_like _to_copy clone detach alias view_as save_name".split()
)
_KEEPS_PADDING = _LIKE | frozenset("detach alias view_as wait_tensor _to_copy clone device".split())
UNDECLARED = frozenset("native_batch_norm cudnn_batch_norm miopen_batch_norm".split())  # write args 3, 4 if args[5]
_PLAIN, _FACTORY, _FROM_VALUE, _LIFTED, _MUTATES, _RANDOM = range(6)

# What is linear, by the name of the aten op. `_MOVES`: in its first operand, the others being equal on all ranks;
# `_ADDS`: in all of its values together (`_INDICES`: which operands are none); `_SCALES`: in one of its two factors.
_MOVES = frozenset(
    "view _unsafe_view _reshape_alias _reshape_copy view_copy transpose t permute expand unsqueeze squeeze alias "
    "detach clone lift_fresh _conj _neg_view neg real view_as_real view_as_complex as_strided slice select split "
    "unbind split_with_sizes unsafe_split diagonal unfold flip roll repeat tril triu sum mean cumsum trace index "
    "index_select gather take embedding _to_copy constant_pad_nd reflection_pad1d replication_pad1d masked_fill "
    "pixel_shuffle diag_embed zero wait_tensor slice_backward select_backward save_name".split()
)
_ADDS = frozenset(
    "add sub rsub cat stack where index_add index_put slice_scatter select_scatter scatter_add copy".split()
)
_INDICES = {"where": slice(0, 1), "index_add": slice(1, 2), "scatter_add": slice(1, 2), "index_put": slice(1, -1)}
_SCALES = frozenset("mul div mm bmm mv dot".split())
_ADDS_PRODUCT = frozenset("addmm baddbmm addmv".split())


def _linear(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], letters: list[str]) -> bool:
    """Whether an op is linear in those of its tensors (`letters`: their types over one axis) that are pending there."""
    if name in _MOVES:
        number = args[2] if len(args) > 2 else 0
        dtype = kwargs.get("dtype")
        return (
            letters[0] == "P"
            and not any(isinstance(a, torch.dtype) for a in args)  # view(dtype): other bits for the same number
            and not set(letters[1:]) & set("VP")
            and not (name in ("masked_fill", "constant_pad_nd") and (isinstance(number, Tensor) or number != 0))
            and (dtype is None or dtype.is_floating_point or dtype.is_complex)
        )
    if name in _ADDS:
        at = _INDICES.get(name, slice(0, 0))
        indices, values = letters[at], letters[: at.start] + letters[at.stop :]
        numbers = (
            [a for a in args[:2] if isinstance(a, (int, float, complex)) and a != 0]
            if name in ("add", "sub", "rsub")
            else []
        )
        return set(values) == {"P"} and not set(indices) & set("VP") and not numbers
    if name in _SCALES:
        divides = name == "div" and (letters[0] != "P" or kwargs.get("rounding_mode") is not None)
        return letters.count("P") == 1 and "V" not in letters and not divides
    return name in _ADDS_PRODUCT and letters[0] == "P" and letters[1:].count("P") == 1 and "V" not in letters


_ZEROS = frozenset("zeros zeros_like new_zeros _efficientzerotensor".split())


def _stays_zero(name: str, operands: list[Tensor], zeros: dict[int, Any]) -> bool:
    """Whether a plain op gives zero since its operands are."""
    if name in _SCALES and name != "div":
        return any(id(a) in zeros for a in operands)
    whole = (
        operands if name in ("add", "sub", "cat", "stack") else operands[:1] if name in _MOVES or name == "div" else ()
    )
    return bool(whole) and all(id(a) in zeros for a in whole)


class _Rule(NamedTuple):
    """How `Flow` treats an op. `keeps`: its result is still the same leaf (a copy, a cast, zeros like it). `writes`:
    the arguments that it writes into, by position and name."""

    name: str
    kind: int
    keeps: bool
    writes: tuple[tuple[int, str], ...]


_rules: dict[Any, _Rule] = {}  # by op, once for all regions


def _rule(func: Any) -> _Rule:
    if not isinstance(func, torch._ops.OpOverload):
        raise SpecError(
            f"{func} runs functions of its own, which types do not see through: use torch.where for torch.cond, a "
            "Python loop or sl.scan for loops, and give a kernel to torch.library.custom_op"
        )
    name, tags = func._schema.name.split("::")[1], func.tags
    ours = func.namespace in ("shardlib", "profiler", "_c10d_functional")
    declared = enumerate(func._schema.arguments)
    writes = tuple((i, a.name) for i, a in declared if a.alias_info is not None and a.alias_info.is_write)
    if name in UNDECLARED:
        writes = ((3, "running_mean"), (4, "running_var"))
    kind = _MUTATES if writes else _PLAIN
    if torch.Tag.nondeterministic_seeded in tags and not ours:
        kind = _RANDOM
    elif name in _LIKE:
        kind = _FACTORY
    elif torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags or name == "is_nonzero":
        kind = _FROM_VALUE
    elif name in ("lift_fresh", "lift_fresh_copy"):
        kind = _LIFTED
    return _rules.setdefault(func, _Rule(name, kind, name in _KEEPS_LEAF, writes))


_ORDER = "IRVP"


class _Joins(dict[tuple[str, str], str]):
    """The type of what touches two values, before linearity is looked at: per axis the later of I, R, V, P."""

    def __missing__(self, key: tuple[str, str]) -> str:
        self[key] = "".join(max(pair, key=_ORDER.index) for pair in zip(*key, strict=True))
        return self[key]


_joined = _Joins()


class Flow(TorchDispatchMode):
    """The dispatch mode of one region."""

    supports_higher_order_operators = True  # to refuse them in our own words

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Dynamo never meets it, and the guard would cost some microseconds per op

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        here = self.region
        if here.paused:
            return func(*args, **kwargs) if kwargs else func(*args)
        rule = _rules.get(func) or _rule(func)
        operands: list[Tensor] = []
        for a in (*args, *kwargs.values()) if kwargs else args:
            kind = type(a)
            if kind is list or kind is tuple:
                operands.extend(b for b in a if isinstance(b, Tensor))
            elif kind not in NO_TENSOR and isinstance(a, Tensor):
                operands.append(a)
        entries, joined = here.types.entries, ""
        for a in operands:
            entry = entries.get(id(a))
            if entry is None:
                if rule.kind != _LIFTED:
                    raise unknown(rule.name, a)
            elif not joined:
                joined = entry[1]
            elif entry[1] != joined:
                joined = _joined[joined, entry[1]]
        joined = joined or here.invariant
        if rule.kind != _PLAIN or "P" in joined:
            joined = self._special(func, rule, joined, args, kwargs or {}, operands)
        padded = self._padding(rule, operands) if here.padded.entries else ()
        here.paused = True  # what runs below is not the user's: `Insert` lets it pass
        try:
            out = func(*args, **kwargs) if kwargs else func(*args)
        finally:
            here.paused = False
        for o in (out,) if isinstance(out, Tensor) else out if isinstance(out, (tuple, list)) else ():
            if isinstance(o, Tensor):
                if not (rule.kind == _MUTATES and any(o is a for a in operands)):
                    here.types.put(o, joined)
                if padded and o.shape in padded:
                    here.padded.set(o, True)
        zeros = here.zeros
        makes_zero = rule.name in _ZEROS or (zeros.entries and _stays_zero(rule.name, operands, zeros.entries))
        if makes_zero and isinstance(out, Tensor):
            zeros.set(out, True)
        if rule.keeps and here.leaves.entries and isinstance(out, Tensor) and out.shape == operands[0].shape:
            leaf = here.leaves.entries.get(id(operands[0]))
            if leaf is not None:
                here.leaves.set(out, leaf[1])
        return out

    def _special(
        self, func: Any, rule: _Rule, joined: str, args: Any, kwargs: dict[str, Any], operands: list[Tensor]
    ) -> str:
        """The type of what an op gives that is no plain function of its operands, or has a pending one."""
        here, name = self.region, rule.name
        if rule.kind == _FACTORY:
            return here.invariant
        if rule.kind == _RANDOM and not (name.startswith("_scaled_dot") and not _drops(func, args, kwargs)):
            raise SpecError(
                f"{name} draws from torch's generator, whose numbers differ by rank and layout.\n  Draw by a key, "
                "which step gives `def loss(params, batch, key)`: sl.dropout('batch/dp model', x, key, 0.1) for "
                "F.dropout, sl.random.normal(key, shape) for torch.randn"
            )
        if rule.kind == _FROM_VALUE and (name != "index" or _masked(args)):
            self._read(name, joined)
        if "P" in joined:
            core, kinds = name.rstrip("_"), [here.types.get(a) or here.invariant for a in operands]
            joined = "".join(
                "V" if letter == "P" and not _linear(core, args, kwargs, list(letters)) else letter
                for letter, letters in zip(joined, zip(*kinds, strict=True), strict=True)
            )
        if name in UNDECLARED and not args[5]:
            return joined
        for i, written in rule.writes:
            target = args[i] if i < len(args) else kwargs.get(written)
            for x in target if isinstance(target, (list, tuple)) else (target,):
                if isinstance(x, Tensor):
                    self._written(name, x, joined)
        return joined

    def _read(self, name: str, kind: str) -> None:
        if kind.strip("IR"):
            reads = name in ("_local_scalar_dense", "is_nonzero")
            raise SpecError(
                f"{'if, bool() or .item()' if reads else f'{name}, whose shape or result depends on values,'} of a "
                f"value that is {words(self.region, kind)}: ranks would go different ways. Reduce it first (psum, "
                "pmax), or keep it a tensor (torch.where)"
            )

    def _written(self, name: str, target: Tensor, joined: str) -> None:
        """An in-place write changes the type of its target and of everything that shares memory with it."""
        here = self.region
        here.refuse_written(name, target)
        here.leaves.discard(target)
        held = here.types.get(target)
        if held is None or held == joined:
            here.types.set(target, joined)
            return
        storage = target.untyped_storage()._cdata
        for reference, _ in list(here.types.entries.values()):
            x = reference()
            if x is not None and x.untyped_storage()._cdata == storage:
                here.types.set(x, joined)

    def _padding(self, rule: _Rule, operands: list[Tensor]) -> list[torch.Size]:
        """The shapes of padded operands; an error where the op computes with one."""
        padded = [a for a in operands if id(a) in self.region.padded.entries]
        if padded and rule.name not in _KEEPS_PADDING:
            self.region.refuse_padded(rule.name, padded[0])
        return [a.shape for a in padded]


def _drops(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether attention drops weights, which takes random numbers."""
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    return bool(named.get("dropout_p", 0.0))


def _masked(args: Any) -> bool:
    """Whether an index holds a mask, so that the shape depends on its values."""
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])


@contextmanager
def flowing(mesh: Mesh, typed: bool = True) -> Iterator[Region]:
    """Run a per-device function with `Flow` on. A backward runs in this thread, where the region is."""
    threads = torch.autograd.set_multithreading_enabled(False)
    with entered(Region(mesh, typed)) as made, threads, Flow(made) if typed else nullcontext():
        yield made
