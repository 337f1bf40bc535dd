"""Trees: `@pytree` classes whose fields carry specs, paths such as `blocks.3.w_in`, globs over paths.

optree (namespace `"shardlib"`) is the only flattener in the library; classes are registered with
`torch.utils._pytree` too, so that `torch.func` transforms take them.
"""

import copy
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

from shardlib.errors import SpecError, TreeError, listing, nearest
from shardlib.spec import Spec, as_spec, parse

NAMESPACE = "shardlib"
_KEY = "shardlib"
C = TypeVar("C", bound=type)
_node: Any = optree.register_pytree_node  # typed as for collections only
Chooser = str | Sequence[str] | Callable[[str, Any], bool]


@dataclass(frozen=True)
class Field:
    """What an annotation says of one leaf: its spec, and how `init` makes it. `levels`: the number of dimensions that
    each `stack` around it adds, from the outside."""

    spec: Spec
    dtype: torch.dtype | None = None
    init: Any = None
    levels: tuple[int, ...] = ()


@dataclass(frozen=True)
class Stack:
    """What `stack` says of a field: the dimensions that lead, or the length of a list."""

    dims: Spec


@dataclass(frozen=True)
class Each:
    """In a spec tree: what every element of a list (of any length) looks like; `dim` names its length, for `init`."""

    item: Any
    dim: str
    kind: type = list


_node(Each, lambda e: ((e.item,), (e.dim, e.kind), ("*",)), lambda meta, item: Each(*item, *meta), namespace=NAMESPACE)


def spec(text: str, *, dtype: torch.dtype | None = None, init: Any = None, matrix: str | None = None) -> Any:
    """A leaf of a `@pytree` class: `w: Tensor = sl.spec("model/dp hidden/tp")`.

    `init`: a float (the standard deviation), `"zeros"`, `"ones"`, or `f(key, shape, dtype, index=...)`; by default a
    normal of variance 1/fan-in for matrices and ones for vectors. `matrix="model -> heads head"`: a matrix's inputs and
    outputs, for `init` and `optim.muon`; along other dimensions lie matrices of their own. By default the input is the
    first of two dimensions, for `init` the largest of more. `dtype`: default float32.
    """
    parsed = parse(text) if matrix is None else parse(text).as_matrix(matrix)
    if not (init is None or isinstance(init, (int, float)) or callable(init) or init in ("zeros", "ones")):
        raise SpecError(f"spec({text!r}): init is a number, 'zeros', 'ones' or a function, not {init!r}")
    return dataclasses.field(metadata={_KEY: Field(parsed, dtype, init)})


def stack(what: Any, dims: str | None = None) -> Any:
    """`blocks: Block = stack("layers")`: a leading dimension on every leaf; on a `list[Block]` field, a list.

    As a function of a spec tree or a `@pytree` class, `stack(spec_tree, "layers/pp")`, it gives the stacked spec tree.
    """
    if dims is None:
        return dataclasses.field(metadata={_KEY: Stack(_lead(what))})
    lead = _lead(dims)
    return map_(lambda s: s.prepend(lead), specs(what))


def _lead(text: str) -> Spec:
    dims = parse(text)
    if not dims.dims or dims.has_ellipsis or dims.pending or dims.memory != "device":
        raise dims.error('stack takes the dimensions that lead, such as "layers" or "layers/pp"')
    return dims


def static(*, default: Any = dataclasses.MISSING) -> Any:
    """A field that is part of the tree's structure, not a leaf; it must be hashable. `init` takes it from `sizes`."""
    return dataclasses.field(default=default, metadata={_KEY: "static"})


@dataclass_transform(frozen_default=True, field_specifiers=(spec, stack, static, dataclasses.field))
def pytree(cls: C) -> C:
    """Make `cls` a frozen dataclass that is a pytree: its fields are children, `static()` fields are structure."""
    return registered(dataclass(frozen=True, eq=False)(cls))  # type: ignore[return-value]


def registered(cls: C) -> C:
    """The second half of `pytree`: what a class that came from another process still needs there."""
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    children = tuple(f.name for f in fields if f.metadata.get(_KEY) != "static")
    statics = tuple(f.name for f in fields if f.metadata.get(_KEY) == "static")
    stacks = frozenset(f.name for f in fields if isinstance(f.metadata.get(_KEY), Stack))

    def entries(values: Sequence[Any]) -> tuple[str, ...]:
        listed = (list, tuple, Each)
        pairs = zip(children, values, strict=True)
        return tuple(f"{n}.*" if n in stacks and not isinstance(v, listed) else n for n, v in pairs)

    def flatten(obj: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[str, ...]]:
        values = tuple(getattr(obj, n) for n in children)
        meta = tuple(getattr(obj, n) for n in statics)
        for name, value in zip(statics, meta, strict=True):
            if value.__hash__ is None:
                raise TreeError(f"{cls.__name__}.{name} is static, hence hashable; found a {type(value).__name__}")
        return values, meta, entries(values)

    def unflatten(meta: tuple[Any, ...], values: Iterable[Any]) -> Any:
        obj = object.__new__(cls)
        for name, value in zip(children, values, strict=True):
            object.__setattr__(obj, name, value)
        for name, value in zip(statics, meta, strict=True):
            object.__setattr__(obj, name, value)
        return obj

    def flatten_for_torch(obj: Any) -> tuple[list[Any], tuple[Any, ...]]:
        values, meta, _ = flatten(obj)
        return list(values), meta

    def flatten_with_keys(obj: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        values, meta, _ = flatten(obj)
        return [(torch_pytree.GetAttrKey(n), v) for n, v in zip(children, values, strict=True)], meta

    _node(cls, flatten, unflatten, namespace=NAMESPACE)
    torch_pytree.register_pytree_node(
        cls,
        flatten_for_torch,
        lambda values, meta: unflatten(meta, values),
        flatten_with_keys_fn=flatten_with_keys,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
    )
    cls.__pytree__ = children  # type: ignore[attr-defined]
    return cls


def register(cls: type, flatten: Callable[[Any], Sequence[Any]], unflatten: Callable[[Iterable[Any]], Any]) -> None:
    """Make a class that is not a `@pytree` a node of trees, with `flatten(obj)` as its children."""
    _node(cls, lambda obj: (tuple(flatten(obj)), None), lambda _, values: unflatten(values), namespace=NAMESPACE)
    torch_pytree.register_pytree_node(
        cls,
        lambda obj: (list(flatten(obj)), None),
        lambda values, _: unflatten(values),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
    )


def is_pytree_class(cls: Any) -> bool:
    """Whether `cls` was made by `@pytree`."""
    return isinstance(cls, type) and "__pytree__" in vars(cls)


def children_of(cls: Any) -> tuple[str, ...]:
    """The fields of a `@pytree` class that are not static."""
    return cls.__pytree__


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
        raise TreeError(f"{what} does not match the first: {_difference(other, tree) or _difference(tree, other)}")
    return flat


def match_or_none(tree: Any, other: Any, what: str) -> list[Any]:
    """The leaves of `other`, which must have the structure of `tree`, or a None in place of a leaf or subtree, which
    stands for each leaf of it."""
    try:
        found = optree.broadcast_prefix(other, tree, none_is_leaf=True, namespace=NAMESPACE)
    except ValueError as e:
        raise TreeError(f"{what} does not match: {_difference(other, tree) or e}") from None
    whole = optree.tree_leaves(tree, none_is_leaf=True, namespace=NAMESPACE)
    flat = [x for x, t in zip(found, whole, strict=True) if t is not None]
    if len(leaves(other)) != sum(x is not None for x in flat):
        raise TreeError(f"{what} does not match: a leaf stands for a subtree")
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
        raise TreeError(f"{what} does not match the tree: {_difference(prefix, tree) or e}") from None


def _expand(prefix: Any, tree: Any) -> Any:
    """`prefix` with every class replaced by its specs, every `Each` by as many elements as `tree` has there, and static
    fields, which specs do not have, by those of `tree`."""
    if is_pytree_class(prefix):
        prefix = specs(prefix)
    kind = type(prefix)
    if kind is Each and type(tree) in (list, tuple):
        return type(tree)(_expand(prefix.item, t) for t in tree)
    if kind is not type(tree) or kind is Spec:
        return prefix
    if is_pytree_class(kind):
        inner = {n: _expand(getattr(prefix, n), getattr(tree, n)) for n in children_of(kind)}
        return rebuild(kind, {**vars(tree), **inner})
    if kind in (list, tuple):
        return kind(map(_expand, prefix, tree)) if len(prefix) == len(tree) else prefix
    if optree.is_namedtuple(prefix):
        return kind(*map(_expand, prefix, tree))
    if isinstance(prefix, dict):
        changed = copy.copy(prefix)
        changed.update((k, _expand(v, tree[k])) for k, v in prefix.items() if k in tree)
        return changed
    return prefix


def _difference(prefix: Any, tree: Any, path: str = "") -> str | None:
    """The first place where `prefix` cannot stand for `tree`."""
    if _is_leaf(prefix):
        return None
    at = f"at `{path}`" if path else "at the root"
    if type(prefix) is not type(tree):
        return f"{at}: {_said(prefix)} for {_said(tree)}"
    (p, p_meta, p_names, _), (t, t_meta, t_names, _) = (
        optree.tree_flatten_one_level(x, namespace=NAMESPACE) for x in (prefix, tree)
    )
    if p_names != t_names and not is_pytree_class(type(tree)):  # whose names tell lists from stacks
        lack, more = ([n for n in a if n not in b] for a, b in ((t_names, p_names), (p_names, t_names)))
        told = [f"{word} {listing(n)}" for word, n in (("missing", lack), ("unexpected", more)) if n]
        return f"{at}: {_said(prefix)} for {_said(tree)}; {', '.join(told)}"
    names = prefix._fields if optree.is_namedtuple(prefix) else t_names
    inner = (_difference(a, b, f"{path}.{n}".lstrip(".")) for a, b, n in zip(p, t, names, strict=True))
    return next(filter(None, inner), None if p_meta == t_meta else f"{at}: static fields {p_meta} for {t_meta}")


def _is_leaf(x: Any) -> bool:
    return optree.tree_is_leaf(x, namespace=NAMESPACE)


def _said(x: Any) -> str:
    kind = type(x).__name__
    if x is None or _is_leaf(x):
        return "None" if x is None else f"a leaf ({kind})"
    if isinstance(x, Each):
        return "a list"
    return f"a {kind} of {len(x)}" if isinstance(x, (list, tuple, dict)) else f"a {kind}"


def rebuild(cls: type, values: dict[str, Any]) -> Any:
    """An instance with these fields, without its checks: a spec tree has specs where the object has tensors."""
    obj = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(obj, name, value)
    return obj


# ---- annotations


def specs(tree: Any) -> Any:
    """The spec tree of a `@pytree` class, or of a tree of classes, arrays, specs or spec strings."""
    return map_(lambda f: f.spec, fields(tree)) if is_pytree_class(tree) else map_(_spec_of, tree)


def _spec_of(leaf: Any) -> Any:
    if is_pytree_class(leaf):
        return specs(leaf)
    found = leaf if isinstance(leaf, (str, Spec)) else getattr(leaf, "spec", None)
    if not isinstance(found, (str, Spec)):
        if isinstance(leaf, type):
            raise TreeError(f"{leaf.__name__} is not a @pytree class (a subclass of one needs the decorator, too)")
        raise TreeError(
            f"a leaf of type {type(leaf).__name__} carries no spec: sl.shard it first, or give the spec string"
        )
    return as_spec(found)


def fields(cls: type) -> Any:
    """The tree of `Field`s of a `@pytree` class, None for static fields."""
    try:
        hints = typing.get_type_hints(cls)
    except NameError as e:
        raise TreeError(f"{cls.__name__}: {e}. Annotations given as strings must name classes of the module") from None
    all_ = dataclasses.fields(cls)  # type: ignore[arg-type]
    return rebuild(cls, {f.name: _field(cls, f, hints[f.name]) for f in all_})


def _field(cls: type, f: dataclasses.Field[Any], hint: Any) -> Any:
    said = f.metadata.get(_KEY)
    if said == "static" or isinstance(said, Field):
        return None if said == "static" else said
    kind, of = typing.get_origin(hint), typing.get_args(hint)
    if said is None and kind is tuple and all(map(is_pytree_class, of)):
        return tuple(map(fields, of))
    listed = isinstance(said, Stack) and kind in (list, tuple)
    inner: Any = next(iter(of), None) if listed else hint
    if not is_pytree_class(inner):
        what = (
            "sl.spec(...), sl.static(), or as its annotation a @pytree class, a tuple[A, B] of them, or list[A] with "
        )
        raise TreeError(f"{cls.__name__}.{f.name} needs {what}sl.stack(...); found {hint!r}")
    if not isinstance(said, Stack):
        return fields(inner)
    if listed:
        if len(said.dims.dims) > 1 or said.dims.axes:
            raise said.dims.error(f"{cls.__name__}.{f.name} is a list: it has one length, and no axis splits it")
        return Each(fields(inner), said.dims.names[0], kind)
    lead, n = said.dims, len(said.dims.dims)
    return map_(lambda x: dataclasses.replace(x, spec=x.spec.prepend(lead), levels=(n, *x.levels)), fields(inner))


# ---- globs


@lru_cache(maxsize=1024)
def _glob(pattern: str) -> re.Pattern[str]:
    if pattern == "**":
        return re.compile(".*")  # the path of a lone leaf, too, which is empty
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
        return [bool(chooser(p, v)) for p, v in zip(where, values or [None] * len(where), strict=True)]
    if not isinstance(chooser, (str, list, tuple)) or not all(isinstance(p, str) for p in chooser):
        raise TreeError(f"leaves are chosen by a glob, a list of globs or (path, spec) -> bool, not by {chooser!r}")
    chosen = [False] * len(where)
    for pattern in [chooser] if isinstance(chooser, str) else chooser:
        hits = [bool(_glob(pattern).fullmatch(p)) for p in where]
        if not any(hits):
            raise TreeError(f"`{pattern}` matches no path{nearest(pattern, where)}; there are {listing(where[:12])}")
        chosen = [a or b for a, b in zip(chosen, hits, strict=True)]
    return chosen
