"""`Recording`: plain ops become nodes of a traced graph by a short way.

`make_fx` asks of every op whether it may decompose, hold constants or symbols, and looks tensors up by slow keys; that
is most of the time it takes. This mode stands above its own: an op of tracked fake tensors that raises none of these
questions is made a node here, the same node; all others go on to `make_fx`.
"""

import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # what a trace computes with
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


class _Tracked(MutableMapping[Tensor, _ProxyTensor]):
    """What `make_fx` knows of each tensor, by identity as long as it lives."""

    def __init__(self, known: MutableMapping[Tensor, _ProxyTensor]) -> None:
        self.entries: dict[int, tuple[weakref.ref[Tensor], _ProxyTensor]] = {}
        for x, proxy in known.items():
            self[x] = proxy

    def __getitem__(self, x: Tensor) -> _ProxyTensor:
        return self.entries[id(x)][1]

    def __setitem__(self, x: Tensor, proxy: _ProxyTensor) -> None:
        key, entries = id(x), self.entries
        entries[key] = (weakref.ref(x, lambda _: entries.pop(key, None)), proxy)

    def __delitem__(self, x: Tensor) -> None:
        del self.entries[id(x)]

    def __contains__(self, x: object) -> bool:
        return id(x) in self.entries

    def __iter__(self) -> Iterator[Tensor]:
        return iter([x for ref, _ in self.entries.values() if (x := ref()) is not None])

    def __len__(self) -> int:
        return len(self.entries)


class _NotPlainError(Exception):
    """An argument that is left to `make_fx`."""


class Recording(TorchDispatchMode):
    """The mode of one trace. `create`: makes a node, as `Graph.create_node`."""

    supports_higher_order_operators = True  # which `make_fx` knows

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Dynamo never meets it, and the guard would cost some microseconds per op

    def __init__(self, tracer: Any, create: Callable[..., Node]) -> None:
        super().__init__()
        self.tracer, self.create = tracer, create
        self.tracked = tracer.tensor_tracker = _Tracked(tracer.tensor_tracker)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:
            return args[0].fake_device if type(args[0]) is FakeTensor else func(*args)
        mode = get_proxy_mode()
        name = _names.get(func) or _name(func)
        if not name or mode is None or mode.tracer is not self.tracer:
            return func(*args, **kwargs)
        try:
            given = tuple(map(self._given, args))
            words = {k: self._given(v) for k, v in kwargs.items()}
        except _NotPlainError:
            return func(*args, **kwargs)
        node = self.create("call_function", func, given, words, name)
        with disable_proxy_modes_tracing():
            out = func(*args, **kwargs)
        if type(out) is FakeTensor:
            node.meta["val"] = snapshot_fake(out)
            self.tracked[out] = _ProxyTensor(Proxy(node, self.tracer), None)
        else:
            track_tensor_tree(out, Proxy(node, self.tracer), constant=None, tracer=self.tracer)
        return out

    def _given(self, a: Any) -> Any:
        """An argument as a node has it."""
        kind = type(a)
        if kind is FakeTensor:
            known = self.tracked.entries.get(id(a))
            if known is not None and known[1].constant is None:
                return known[1].proxy.node
        elif kind in NO_TENSOR:
            return a
        elif kind is list or kind is tuple:
            return kind(map(self._given, a))
        raise _NotPlainError


_names: dict[Any, str] = {}  # what nodes of an op are called, once for all traces; "" for what is left to make_fx


def _name(func: Any) -> str:
    plain = isinstance(func, torch._ops.OpOverload) and not (
        func._schema.is_mutable
        or _ASKS & {*func.tags}
        or func.namespace == "prim"
        or "lift" in func._schema.name
        or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    )
    return _names.setdefault(func, torch.fx.Graph()._target_to_str(func.overloadpacket.__name__) if plain else "")
