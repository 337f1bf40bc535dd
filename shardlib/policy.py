"""What `remat` and `passes.recompute` keep: names given to values, and policies."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode  # the layer below functorch has no public name

from shardlib.errors import SpecError, listing

PRODUCTS = frozenset(
    "mm bmm addmm baddbmm addbmm mv addmv dot vdot _scaled_mm _grouped_mm _scaled_grouped_mm "
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention".split()
)
WORDS = ("nothing", "everything", "dots")
Policy = str | Collection[str]

_lib = torch.library.Library("shardlib", "FRAGMENT")
_lib.define("save_name(Tensor(a) x, str name) -> Tensor(a)")
_lib.impl("save_name", lambda x, name: x.view_as(x), "CompositeExplicitAutograd")
SAVE_NAME = torch.ops.shardlib.save_name.default


def save_name(x: Tensor, name: str) -> Tensor:
    """`x`, with a name by which a policy can choose it: `remat(f, ("attention",))`, `passes.recompute(("attention",))`.

    Where it is kept, the op that made it is not run again: what that gave is kept whole (attention's statistics with
    its result). Otherwise the identity. As JAX's `checkpoint_name`. Raises `SpecError` for a word of policies.
    """
    if has_torch_function((x,)):  # function modes, so that `Insert` sees it as one function
        return handle_torch_function(save_name, (x,), x, name)
    if not isinstance(name, str) or not name or name in WORDS:
        raise SpecError(f"save_name takes a name other than {listing(WORDS)}; found {name!r}")
    with _Naming(name):
        return torch.ops.aten.alias(x)


class _Naming(TorchDispatchMode):
    """Below transforms, which know what to do with `alias`, it is the op that has the name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return SAVE_NAME(*args, self.name) if func is torch.ops.aten.alias.default else func(*args, **(kwargs or {}))


def chosen(policy: Policy, what: str) -> frozenset[str]:
    """The names that a policy keeps, with `dots` where it does. Raises `SpecError`; `what` was given the policy."""
    if policy == "nothing":
        return frozenset()
    said = ("dots",) if policy == "dots" else policy
    names = isinstance(said, Collection) and not isinstance(said, str)
    if not names or not all(isinstance(n, str) and n not in WORDS[:2] for n in said):
        mend = f": ({policy!r},)" if isinstance(policy, str) else ", and `dots`"
        raise SpecError(
            f"{what}: unknown policy {policy!r}; there are {listing(WORDS)}.\n"
            f"  Names given by sl.save_name stand in a tuple{mend}"
        )
    return frozenset(said)


def is_product(op: Any) -> bool:
    """Whether an op's result is what the policy `dots` keeps: that of a product of matrices, or of attention."""
    said_by = getattr(op, "_schema", None)
    return said_by is not None and said_by.name.partition("::")[2] in PRODUCTS and not said_by.is_mutable


def refuse_missing(what: str, wanted: Collection[str], found: Collection[str]) -> None:
    """Raise where a policy has a name that no `save_name` gave."""
    missing = sorted({*wanted} - {*found} - {"dots"})
    if missing:
        there = f"; it names {listing(sorted(found))}" if found else ""
        raise SpecError(f"{what}: the policy keeps {listing(missing)}, a name that no sl.save_name gives there{there}")
