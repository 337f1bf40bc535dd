"""`Recording`: plain ops become nodes of a traced graph by a short way.

`make_fx` asks of every op whether it may decompose, hold constants or symbols, and runs it on fake tensors, which ask
much again; that is most of the time it takes. This mode stands above its own: an op of tracked fake tensors that raises
none of these questions becomes the same node here, and one that was run on the same shapes before is not run again.
All others go on to `make_fx`.
"""

import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _DisableTorchDispatch  # to make a fake tensor below all modes
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # what a trace computes with
from torch.fx import Node, Proxy
from torch.fx.experimental.proxy_tensor import (  # how make_fx notes which node made a tensor
    _ProxyTensor,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    snapshot_fake,
    track_tensor_tree,
)
from torch.utils._python_dispatch import TorchDispatchMode  # the layer below functorch has no public name

from shardlib.types import NO_TENSOR

_DEVICE = torch.ops.prim.device.default
_ASKS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_BY_SHAPE = frozenset("aten _c10d_functional shardlib".split())  # whose results' shapes depend on nothing but arguments


class _Layout(NamedTuple):
    """How a plain fake tensor lies in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


class _Result(NamedTuple):
    """One result of an op: its layout, and which of the op's tensors it is a view of (-1: none)."""

    layout: _Layout
    source: int


class _Known(NamedTuple):
    """What an op gives: a tensor, or several in a list or tuple (`several`: which)."""

    several: Any
    results: list[_Result]


_known: dict[Any, _Known] = {}  # by op and arguments, once for all traces
_names: dict[Any, str] = {}  # what nodes of an op are called, once for all traces; "" for what is left to make_fx


class _NotPlainError(Exception):
    """An argument that is left to `make_fx`."""


class _Tracked(MutableMapping[Tensor, _ProxyTensor]):
    """What `make_fx` knows of each tensor, by identity as long as it lives; and its layout, once that is known."""

    def __init__(self, known: MutableMapping[Tensor, _ProxyTensor]) -> None:
        self.entries: dict[int, tuple[weakref.ref[Tensor], _ProxyTensor, _Layout | None]] = {}
        for x, proxy in known.items():
            self[x] = proxy

    def put(self, x: Tensor, proxy: _ProxyTensor, layout: _Layout | None) -> None:
        key, entries = id(x), self.entries
        entries[key] = (weakref.ref(x, lambda _: entries.pop(key, None)), proxy, layout)

    def __setitem__(self, x: Tensor, proxy: _ProxyTensor) -> None:
        self.put(x, proxy, None)

    def __getitem__(self, x: Tensor) -> _ProxyTensor:
        return self.entries[id(x)][1]

    def __delitem__(self, x: Tensor) -> None:
        del self.entries[id(x)]

    def __contains__(self, x: object) -> bool:
        return id(x) in self.entries

    def __iter__(self) -> Iterator[Tensor]:
        return iter([x for ref, *_ in self.entries.values() if (x := ref()) is not None])

    def __len__(self) -> int:
        return len(self.entries)


def track(xs: Sequence[Tensor], node: Node, tracer: Any, create: Callable[..., Node]) -> None:
    """Have a trace know fake tensors as what a node gives, each by a node of its own, as `track_tensor_tree` does."""
    node.meta["val"] = type(xs)([snapshot_fake(x) for x in xs])  # type: ignore[call-arg]
    for i, x in enumerate(xs):
        item = create("call_function", getitem, (node, i), {})
        item.meta["val"] = node.meta["val"][i]
        tracer.tensor_tracker[x] = _ProxyTensor(Proxy(item, tracer), None)


class Recording(TorchDispatchMode):
    """The mode of one trace. `fake`: the mode of its tensors; `create`: makes a node, as `Graph.create_node`."""

    supports_higher_order_operators = True  # which `make_fx` knows

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Dynamo never meets it, and the guard would cost some microseconds per op

    def __init__(self, fake: FakeTensorMode, tracer: Any, create: Callable[..., Node]) -> None:
        super().__init__()
        self.fake, self.tracer, self.create = fake, tracer, create
        self.tracked = tracer.tensor_tracker = _Tracked(tracer.tensor_tracker)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:
            return args[0].fake_device if type(args[0]) is FakeTensor else func(*args)
        mode = get_proxy_mode()
        name = _names.get(func) or _name(func)
        if not name or mode is None or mode.tracer is not self.tracer:
            return func(*args, **kwargs)
        key: list[Any] = [func, torch.get_default_dtype(), len(args)]
        tensors: list[Tensor] = []
        try:
            given = tuple([self._given(a, key, tensors) for a in args])
            words = {}
            for word, a in kwargs.items():
                key.append(word)
                words[word] = self._given(a, key, tensors)
        except _NotPlainError:
            return func(*args, **kwargs)
        node = self.create("call_function", func, given, words, name)
        found = _known.get(tuple(key))
        if found is None:
            with disable_proxy_modes_tracing():
                out = func(*args, **kwargs)
            if tensors and func.namespace in _BY_SHAPE:
                self._remember(tuple(key), out, tensors)
        else:
            with _DisableTorchDispatch():
                made = [self._made(layout, tensors[i] if i >= 0 else None) for layout, i in found.results]
            out = made[0] if found.several is None else found.several(made)
        proxy = Proxy(node, self.tracer)
        if type(out) is FakeTensor:
            node.meta["val"] = snapshot_fake(out)
            self.tracked.put(out, _ProxyTensor(proxy, None), found and found.results[0].layout)
        elif isinstance(out, (list, tuple)) and all(type(x) is FakeTensor for x in out):
            track(out, node, self.tracer, self.create)
        else:
            track_tensor_tree(out, proxy, constant=None, tracer=self.tracer)
        return out

    def _given(self, a: Any, key: list[Any], tensors: list[Tensor]) -> Any:
        """An argument as a node has it; its layout or value is added to `key`."""
        kind = type(a)
        if kind is FakeTensor:
            entry = self.tracked.entries.get(id(a))
            if entry is None or entry[1].constant is not None:
                raise _NotPlainError
            _, proxy, layout = entry
            if layout is None:
                layout = self._layout(a)
                self.tracked.put(a, proxy, layout)
            key.append(layout)
            tensors.append(a)
            return proxy.proxy.node
        key.append(kind)
        if kind in NO_TENSOR:
            key.append(a)
            return a
        if kind is list or kind is tuple:
            key.append(len(a))
            return kind([self._given(b, key, tensors) for b in a])
        raise _NotPlainError

    def _layout(self, x: FakeTensor) -> _Layout:
        if x.layout is not torch.strided or x.is_conj() or x.is_neg() or x.requires_grad or x.is_inference():
            raise _NotPlainError
        if x.fake_mode is not self.fake or x.constant is not None:
            raise _NotPlainError
        return _Layout(tuple(x.shape), x.stride(), x.storage_offset(), x.dtype, x.fake_device)  # type: ignore[arg-type]

    def _remember(self, key: Any, out: Any, tensors: Sequence[Tensor]) -> None:
        """Note what an op gives, if that is tensors with storages of their own, or views of its operands."""
        several = type(out) if isinstance(out, (tuple, list)) else None
        sources = {x.untyped_storage()._cdata: i for i, x in enumerate(tensors)}
        fresh, results = set[int](), list[_Result]()
        for y in out if several else (out,):
            if type(y) is not FakeTensor or any(y is x for x in tensors):
                return
            try:
                layout, storage = self._layout(y), y.untyped_storage()
            except _NotPlainError:
                return
            source = sources.get(storage._cdata, -1)
            if source < 0:
                with _DisableTorchDispatch():
                    usual = self._made(layout, None).untyped_storage().nbytes()
                if storage._cdata in fresh or layout.offset or storage.nbytes() != usual:
                    return
            fresh.add(storage._cdata)
            results.append(_Result(layout, source))
        _known[key] = _Known(several, results)

    def _made(self, layout: _Layout, source: Tensor | None) -> FakeTensor:
        """A fake tensor, in the storage of `source` where that is given. To be called below all modes."""
        shape, stride, offset, dtype, device = layout
        x = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if source is not None:
            x.set_(source.untyped_storage(), offset, shape, stride)  # type: ignore[call-overload]
        return FakeTensor(self.fake, x, device)


def _name(func: Any) -> str:
    """What nodes of an op are called; nothing for an op that is left to `make_fx`."""
    plain = isinstance(func, torch._ops.OpOverload) and not (
        func._schema.is_mutable
        or _ASKS & {*func.tags}
        or func.namespace == "prim"
        or "lift" in func._schema.name
        or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    )
    return _names.setdefault(func, torch.fx.Graph()._target_to_str(func.overloadpacket.__name__) if plain else "")
