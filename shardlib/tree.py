"""Trees: `@pytree` classes whose fields carry specs, paths such as `blocks.3.w_in`, globs over paths.

optree (namespace `"shardlib"`) is the only flattener in the library; classes are registered with
`torch.utils._pytree` too, so that `torch.func` transforms take them.
"""

import dataclasses
import re
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar, dataclass_transform

import optree
import torch
import torch.utils._pytree as torch_pytree  # torch.func flattens with it, and has no public registration

from shardlib.errors import TreeError, listing, nearest
from shardlib.spec import Spec, as_spec, parse

NAMESPACE = "shardlib"
_KEY = "shardlib"
C = TypeVar("C", bound=type)
Chooser = str | Sequence[str] | Callable[[str, Any], bool]


@dataclass(frozen=True)
class Field:
    """What an annotation says of one leaf: its spec, and how `init` makes it."""

    spec: Spec
    dtype: torch.dtype | None = None
    init: Any = None


@dataclass(frozen=True)
class _Stack:
    dims: Spec


@dataclass(frozen=True)
class Each:
    """In a spec tree: what every element of a list (of any length) looks like."""

    item: Any


optree.register_pytree_node(
    Each, lambda e: ((e.item,), None, ("*",)), lambda _, children: Each(*children), namespace=NAMESPACE
)


def spec(text: str, *, dtype: torch.dtype | None = None, init: Any = None) -> Any:
    """A leaf of a `@pytree` class: `w: Tensor = sl.spec("model/dp hidden/tp")`.

    `init`: a float (the standard deviation), `"zeros"`, `"ones"`, or `f(key, shape, dtype, index=...)`; by default a
    normal of variance 1/fan-in for matrices and ones for vectors. `dtype`: default float32.
    """
    return dataclasses.field(metadata={_KEY: Field(parse(text), dtype, init)})


def stack(dims: Any, specs: Any = None) -> Any:
    """`blocks: Block = stack("layers")`: a leading dimension on every leaf; on a `list[Block]` field, a list.

    As a function of a spec tree, `stack(spec_tree, "layers")`, it gives the stacked spec tree.
    """
    if specs is not None:
        tree, lead = dims, parse(specs)
        return map_(lambda s: as_spec(s).prepend(lead), tree)
    return dataclasses.field(metadata={_KEY: _Stack(parse(dims))})


def static() -> Any:
    """A field that is part of the tree's structure, not a leaf; it must be hashable."""
    return dataclasses.field(metadata={_KEY: "static"})


@dataclass_transform(frozen_default=True, field_specifiers=(spec, stack, static, dataclasses.field))
def pytree(cls: C) -> C:
    """Make `cls` a frozen dataclass that is a pytree: its fields are children, `static()` fields are structure."""
    cls = dataclass(frozen=True, eq=False)(cls)  # type: ignore[assignment]
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    children = tuple(f.name for f in fields if f.metadata.get(_KEY) != "static")
    statics = tuple(f.name for f in fields if f.metadata.get(_KEY) == "static")
    stacks = frozenset(f.name for f in fields if isinstance(f.metadata.get(_KEY), _Stack))

    def entries(values: Sequence[Any]) -> tuple[str, ...]:
        listed = (list, tuple, Each)
        return tuple(f"{n}.*" if n in stacks and not isinstance(v, listed) else n for n, v in zip(children, values))

    def flatten(obj: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[str, ...]]:
        values = tuple(getattr(obj, n) for n in children)
        return values, tuple(getattr(obj, n) for n in statics), entries(values)

    def unflatten(meta: tuple[Any, ...], values: Iterable[Any]) -> Any:
        obj = object.__new__(cls)
        for name, value in zip(children, values, strict=True):
            object.__setattr__(obj, name, value)
        for name, value in zip(statics, meta, strict=True):
            object.__setattr__(obj, name, value)
        return obj

    optree.register_pytree_node(cls, flatten, unflatten, namespace=NAMESPACE)
    torch_pytree.register_pytree_node(
        cls,
        lambda obj: (list(flatten(obj)[0]), flatten(obj)[1]),
        lambda values, meta: unflatten(meta, values),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
    )
    return cls


def is_pytree_class(cls: Any) -> bool:
    """Whether `cls` was made by `@pytree`."""
    return isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls in _registered()


def _registered() -> Any:
    return torch_pytree.SUPPORTED_NODES


# ---- flatten and map


def flatten(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Leaves in order, and the structure. `None` is an empty subtree."""
    return optree.tree_flatten(tree, namespace=NAMESPACE)


def unflatten(treedef: optree.PyTreeSpec, leaves: Iterable[Any]) -> Any:
    """The inverse of `flatten`."""
    return optree.tree_unflatten(treedef, leaves)


def leaves(tree: Any) -> list[Any]:
    """The leaves of `tree`."""
    return optree.tree_leaves(tree, namespace=NAMESPACE)


def map_(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`fn` of every leaf; raises `TreeError` with the path where the trees differ."""
    if not rest:
        return optree.tree_map(fn, tree, namespace=NAMESPACE)
    flat, treedef = flatten(tree)
    return unflatten(treedef, [fn(*xs) for xs in zip(flat, *(match(tree, r) for r in rest), strict=True)])


def match(tree: Any, other: Any, what: str = "the second tree") -> list[Any]:
    """The leaves of `other`, which must have the structure of `tree`."""
    flat, treedef = flatten(other)
    if treedef != flatten(tree)[1]:
        a, b = set(paths(tree)), set(paths(other))
        missing, extra = sorted(a - b), sorted(b - a)
        detail = "".join(
            f"\n  {word}: {listing(names[:8])}" for word, names in (("missing", missing), ("unexpected", extra)) if names
        )
        raise TreeError(f"{what} does not have the structure of the first{detail or f': {treedef} for {flatten(tree)[1]}'}")
    return flat


def paths(tree: Any) -> list[str]:
    """The path of every leaf: `blocks.3.w_in`; `blocks.*.w_in` for a stacked leaf; `""` for a lone leaf."""
    return list(_paths(flatten(tree)[1]))


@lru_cache(maxsize=1024)
def _paths(treedef: optree.PyTreeSpec) -> tuple[str, ...]:
    return tuple(".".join(_entry(e) for e in accessor) for accessor in treedef.accessors())


def _entry(entry: Any) -> str:
    return entry.field if isinstance(entry, optree.NamedTupleEntry) else str(entry.entry)


def broadcast(prefix: Any, tree: Any, what: str = "specs") -> list[Any]:
    """For every leaf of `tree`, the leaf of `prefix` that stands for it; a leaf of `prefix` may stand for a subtree."""
    prefix = _expand(prefix, tree)
    try:
        return optree.broadcast_prefix(prefix, tree, namespace=NAMESPACE)
    except ValueError as e:
        errors = optree.prefix_errors(prefix, tree, namespace=NAMESPACE)
        detail = str(errors[0](what)) if errors else str(e)
        raise TreeError(f"{what} does not match the tree: {detail}") from None


def _expand(prefix: Any, tree: Any) -> Any:
    """`prefix` with every class replaced by its specs and every `Each` by as many elements as `tree` has there."""
    if is_pytree_class(prefix):
        prefix = specs(prefix)
    if isinstance(prefix, Each):
        if not isinstance(tree, (list, tuple)):
            raise TreeError(f"expected a list, as the annotation says, found {type(tree).__name__}")
        return type(tree)(_expand(prefix.item, t) for t in tree)
    if isinstance(prefix, dict) and isinstance(tree, dict):
        return {k: _expand(v, tree[k]) if k in tree else v for k, v in prefix.items()}
    if type(prefix) in (list, tuple) and isinstance(tree, (list, tuple)) and len(prefix) == len(tree):
        return type(prefix)(_expand(p, t) for p, t in zip(prefix, tree))
    if dataclasses.is_dataclass(prefix) and is_pytree_class(type(prefix)) and type(prefix) is type(tree):
        values = {f.name: _expand(getattr(prefix, f.name), getattr(tree, f.name)) for f in dataclasses.fields(prefix)}
        return rebuild(type(prefix), values)
    return prefix


def rebuild(cls: type, values: dict[str, Any]) -> Any:
    obj = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(obj, name, value)
    return obj


# ---- annotations


def specs(tree: Any) -> Any:
    """The spec tree of a `@pytree` class, or of a tree of arrays, specs or spec strings."""
    return map_(lambda f: f.spec, fields(tree)) if is_pytree_class(tree) else map_(_spec_of, tree)


def _spec_of(leaf: Any) -> Spec:
    found = leaf if isinstance(leaf, (str, Spec)) else getattr(leaf, "spec", None)
    if not isinstance(found, (str, Spec)):
        raise TreeError(f"{type(leaf).__name__} carries no spec; shard it first, or give the spec string")
    return as_spec(found)


def fields(cls: type) -> Any:
    """The tree of `Field`s of a `@pytree` class."""
    hints = typing.get_type_hints(cls)
    out: dict[str, Any] = {}
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        said, hint = f.metadata.get(_KEY), hints[f.name]
        where = f"{cls.__name__}.{f.name}"
        if said == "static":
            out[f.name] = None
        elif isinstance(said, Field):
            out[f.name] = said
        else:
            origin, inner = typing.get_origin(hint), hint
            if origin in (list, tuple) and isinstance(said, _Stack):
                inner = typing.get_args(hint)[0]
            if not is_pytree_class(inner):
                raise TreeError(f"{where} needs sl.spec(...), sl.stack(...) over a @pytree class, or sl.static()")
            item = fields(inner)
            if isinstance(said, _Stack):
                lead = said.dims
                item = (
                    Each(item)
                    if origin in (list, tuple)
                    else map_(lambda x: dataclasses.replace(x, spec=x.spec.prepend(lead)), item)
                )
            out[f.name] = item
    return rebuild(cls, out)


# ---- globs


@lru_cache(maxsize=1024)
def _glob(pattern: str) -> re.Pattern[str]:
    names = pattern.split(".")
    out = ""
    for i, name in enumerate(names):
        last = i == len(names) - 1
        if name == "**":
            out += r"[^.]+(?:\.[^.]+)*" if last else r"(?:[^.]+\.)*"
        else:
            out += re.escape(name).replace(r"\*", "[^.]*").replace(r"\?", "[^.]") + ("" if last else r"\.")
    return re.compile(out)


def choose(chooser: Chooser, where: Sequence[str], values: Sequence[Any] | None = None) -> list[bool]:
    """Which of the paths `where` a glob, a list of globs or `(path, value) -> bool` chooses.

    `*` stands for one name, `**` for any number of names. A glob that matches nothing raises `TreeError`.
    """
    if callable(chooser):
        return [bool(chooser(p, v)) for p, v in zip(where, values or [None] * len(where))]
    chosen = [False] * len(where)
    for pattern in [chooser] if isinstance(chooser, str) else chooser:
        hits = [bool(_glob(pattern).fullmatch(p)) for p in where]
        if not any(hits):
            raise TreeError(f"`{pattern}` matches no path{nearest(pattern, where)}; there are {listing(where[:12])}")
        chosen = [a or b for a, b in zip(chosen, hits)]
    return chosen
