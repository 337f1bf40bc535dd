"""What `Recording` makes: node for node the graph of `make_fx` alone, whether an op is seen first or again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import shardlib as sl
from shardlib.graph.nodes import clean
from shardlib.graph.trace import meta, trace


def several(x: Tensor, y: Tensor, i: Tensor) -> list[Tensor]:
    """Views, several results, lists of tensors, numbers, keywords, writes in place, constants, factories."""
    a, b = x.split([2, 3], dim=1)
    value, at = torch.max(y, dim=0, keepdim=True)
    wide = torch.cat([a, b, value.expand(4, 5)], 1).transpose(0, 1)
    mean, rest = torch.var_mean(wide, dim=0), torch.where(x > 0, x, y[:4, :5] * 2)
    held = rest.clone()
    held[1:].mul_(3.0)
    one = torch.tensor(1.5)
    drawn = torch.arange(5, dtype=torch.float32) + torch.full((5,), 2.0) * one * one.item()
    norm = torch.native_layer_norm(x, [5], None, None, 1e-5)
    counted = torch.nn.functional.one_hot(i, 7).to(torch.float64).sum(0, dtype=torch.float32)
    return [
        wide,
        *mean,
        held,
        drawn,
        *norm,
        counted,
        at,
        x.to(torch.bfloat16),
        x[i % 4],
        x.as_strided((3, 2), (5, 2), 1),
    ]


def differentiated(x: Tensor, y: Tensor, i: Tensor) -> list[Tensor]:
    def f(x: Tensor, y: Tensor) -> Tensor:
        h = torch.nn.functional.gelu(torch.nn.functional.rms_norm(x @ y[:5], [5]))
        return torch.log_softmax(h, -1).gather(1, i[:4, None] % 5).sum()

    return [*torch.func.grad(f, argnums=(0, 1))(x, y)]


def numbers(x: Tensor, y: Tensor, i: Tensor) -> list[Tensor]:
    """Calls that differ by the type of a number alone."""
    return [i * 2, i * 2.0, i * True, i / 2, i.sum(), torch.div(i, 2, rounding_mode="floor")]


def told(module: GraphModule) -> list[Any]:
    """All that a graph says, storages by the order in which they come."""
    storages: dict[int, int] = {}

    def layout(v: Any) -> Any:
        if isinstance(v, (list, tuple)):
            return [layout(x) for x in v]
        if not isinstance(v, Tensor):
            return v
        number = storages.setdefault(v.untyped_storage()._cdata, len(storages))
        return v.shape, v.stride(), v.storage_offset(), v.dtype, v.device, v.untyped_storage().nbytes(), number

    nodes = module.graph.nodes
    return [(n.op, n.name, str(n.target), str(n.args), str(n.kwargs), layout(n.meta.get("val"))) for n in nodes]


@pytest.mark.parametrize("f", [several, differentiated, numbers])
def test_the_graph_is_that_of_make_fx(f: Callable[..., list[Tensor]]):
    inputs = torch.randn(4, 5), torch.randn(6, 5), torch.arange(6)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in inputs]
    wanted = told(clean(make_fx(lambda *xs: f(*xs), tracing_mode="fake")(*fakes)))
    for _ in range(2):
        assert told(trace(f, [meta(x) for x in inputs], "f")) == wanted


def test_the_default_dtype_counts():
    def f(i: Tensor) -> list[Tensor]:
        return [i / 2]

    def dtype() -> Any:
        return trace(f, [meta(torch.arange(3))], "f").graph.output_node().args[0][0].meta["val"].dtype  # type: ignore[index, union-attr]

    assert dtype() is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_ops_of_others_are_run_each_time():
    """Their shapes may depend on what is not seen."""
    size = [2]

    @torch.library.custom_op("test_record::sized", mutates_args=())
    def sized(x: Tensor) -> Tensor:
        return x.new_zeros(size[0])

    sized.register_fake(lambda x: x.new_empty(size[0]))
    for n in (2, 3):
        size[0] = n
        module = trace(lambda x: [sized(x)], [meta(torch.ones(4))], "f")
        assert module.graph.output_node().args[0][0].meta["val"].shape == (n,)  # type: ignore[index, union-attr]


def test_what_looks_at_a_value_is_told():
    with pytest.raises(sl.SpecError, match="f takes a Python decision on a tensor's value"):
        trace(lambda x: [x * x.item()], [meta(torch.ones(()))], "f")
