"""A function that runs again with some of its results kept: `Record` notes and keeps them, `Replay` hands them out.

Both work below functorch, on the ops that really run. So derivatives of every order see a function that was computed:
what is handed out has the value, and nothing else, of what would have been.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef  # no public way to hold a storage weakly
from torch.utils._python_dispatch import TorchDispatchMode  # the layer below functorch has no public name
from torch.utils.weak import TensorWeakRef

from shardlib.errors import SpecError
from shardlib.policy import SAVE_NAME, is_product
from shardlib.types import NO_TENSOR, base

_UNSAFE_VIEW, _WAIT = torch.ops.aten._unsafe_view.default, torch.ops._c10d_functional.wait_tensor.default
_DETACH, _CLONE = torch.ops.aten.detach.default, torch.ops.aten.clone.default


_TENSOR = object()  # where a tensor stands among results


class Kept:
    """The results of one op. `written`: something writes into them later: they are copies, to be copied again."""

    def __init__(self, out: Any) -> None:
        self.many, self.written = isinstance(out, (tuple, list)), False
        self.results: list[Any] = list(out) if self.many else [out]

    def copy(self) -> None:
        """Copy what is about to be written into."""
        self.results = [_CLONE(y) if isinstance(y, Tensor) else y for y in self.results]
        self.written = True

    def taken(self) -> list[Tensor]:
        """The tensors among the results, which are then no longer held here."""
        found = _tensors(self.results)
        self.results = [_TENSOR if isinstance(y, Tensor) else y for y in self.results]
        return found

    def given(self, tensors: Iterator[Tensor]) -> Any:
        """The results anew, with the next of `tensors` in place of those that were taken."""
        fresh = _CLONE if self.written else _DETACH
        made = [fresh(next(tensors)) if y is _TENSOR else y for y in self.results]
        return tuple(made) if self.many else made[0]


class Record(TorchDispatchMode):
    """Notes the ops that run inside, by what they are given, and keeps results: those of products where `dots` is
    wanted, and those under the names that are. `names`: all that were given. `count`: of the results of what ran, which
    its caller sets.
    """

    def __init__(self, wanted: frozenset[str]) -> None:
        super().__init__()
        self.wanted, self.names, self.count = wanted, set[str](), 0
        self.ops: list[Any] = []
        self.kept: dict[int, Kept] = {}  # by number of the op
        # by storage: itself (weakly, so that its address is not used again), which op made it, how to get its results
        self._made: dict[int, tuple[StorageWeakRef, int, Callable[[], Any]]] = {}

    def taken(self) -> list[Tensor]:
        """The tensors that are kept, which are no longer held here; so are those that were not."""
        self._made.clear()
        return [y for kept in self.kept.values() for y in kept.taken()]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for x in _written(func, args, kwargs):
            self._write(_storage(x))
        out, at = func(*args, **kwargs), len(self.ops)
        if func is _WAIT and (made := self._made.get(_storage(args[0]))):
            self._make(out, made[1])
        if not _computes(func):
            return out
        operands = _tensors((*args, *kwargs.values()))
        self.ops.append(_signature(func, operands))
        if func is SAVE_NAME:
            self._name(args[0], args[1], out, at)
        elif not {*map(_storage, _tensors((out,)))} & {*map(_storage, operands)}:
            self._make(out, at)
            if "dots" in self.wanted and is_product(func):
                self.kept[at] = Kept(out)
        return out

    def _make(self, out: Any, at: int) -> None:
        """Note which op made a storage. A single tensor is not kept alive by that."""
        results = TensorWeakRef(out) if isinstance(out, Tensor) else lambda: out
        for y in _tensors((out,)):
            self._made[_storage(y)] = StorageWeakRef(y.untyped_storage()), at, results

    def _name(self, x: Tensor, name: str, out: Tensor, at: int) -> None:
        """Keep what the op gave that made `x`; where that is gone or was written into, `x` itself. What is not made
        here is an argument, which is kept anyhow."""
        self.names.add(name)
        made = self._made.get(_storage(x))
        if name in self.wanted and made is not None:
            results = made[2]()
            self.kept.setdefault(*((at, Kept(out)) if results is None else (made[1], Kept(results))))

    def _write(self, storage: int) -> None:
        """Before something writes into a storage."""
        for kept in self.kept.values():
            if any(_storage(y) == storage for y in _tensors(kept.results)):
                kept.copy()
        if storage in self._made:
            self._made[storage] = (*self._made[storage][:2], lambda: None)


class Replay(TorchDispatchMode):
    """What ran under a `Record` runs again inside, and `tensors`, those that were kept, are given in place of computing
    them. After the first op that is another one than it was (transforms choose some), everything is computed."""

    def __init__(self, record: Record, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.record, self.at, self.same = record, 0, True
        fresh = iter(map(base, tensors))
        self.tensors = {at: [next(fresh) for y in kept.results if y is _TENSOR] for at, kept in record.kept.items()}
        self.waited: list[Tensor] = []
        self.held = {_storage(y) for at, ys in self.tensors.items() if not record.kept[at].written for y in ys}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(_storage(x) in self.held for x in _written(func, args, kwargs)):
            raise SpecError(f"remat: {func} writes into a value that is kept, which it did not when it ran first")
        if func is _WAIT and any(args[0] is y for y in self.waited):
            return args[0]
        if not _computes(func):
            return func(*args, **kwargs)
        at, ops = self.at, self.record.ops
        self.at += 1
        said = _signature(func, _tensors((*args, *kwargs.values())))
        self.same = self.same and at < len(ops) and ops[at] == said
        if not self.same or at not in self.tensors:
            return func(*args, **kwargs)
        out = self.record.kept[at].given(iter(self.tensors[at]))
        self.waited += _tensors((out,)) if func.namespace == _WAIT.namespace else ()
        return out


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among the arguments or results of an op."""
    found: list[Tensor] = []
    for a in values:
        if type(a) in (list, tuple):
            found += [b for b in a if isinstance(b, Tensor)]
        elif type(a) not in NO_TENSOR and isinstance(a, Tensor):
            found.append(a)
    return found


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call of an op writes into."""
    if not op._schema.is_mutable:
        return []
    given = [*zip(op._schema.arguments, args, strict=False)]
    given += [(a, kwargs[a.name]) for a in op._schema.arguments if a.name in kwargs]
    return _tensors(x for a, x in given if a.alias_info is not None and a.alias_info.is_write)


@cache
def _computes(op: Any) -> bool:
    """Whether an op makes values, not only looks at memory another way. Transforms add ops of other kinds, which do not
    count."""
    if op in (SAVE_NAME, _WAIT, _UNSAFE_VIEW):
        return op is SAVE_NAME
    infos = [r.alias_info for r in op._schema.returns if "Tensor" in str(r.type)]
    return bool(infos) and all(i is None or i.is_write for i in infos)


def _signature(op: Any, operands: list[Tensor]) -> Any:
    return op, tuple(x.shape for x in operands)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
