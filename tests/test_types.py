"""The table of types, the letters that data flow gives, what a region knows and says."""

import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

import shardlib as sl
from shardlib import types
from shardlib.flow import _joined, flowing
from shardlib.insert import per_device
from shardlib.mesh import Mesh
from shardlib.types import Region, TensorTable, base, region

MESH = Mesh(dict(dp=2, tp=2), simulate=True)


def test_a_table_forgets_what_is_gone() -> None:
    table: TensorTable[str] = TensorTable()
    kept = torch.ones(1)
    table.set(kept, "a")
    for i in range(100):
        table.set(torch.ones(i), "b")
    gc.collect()
    assert len(table.entries) == 1 and table.get(kept) == "a"
    table.set(kept, "c")
    assert table.get(kept) == "c" and table.get(torch.ones(1)) is None
    table.discard(kept)
    assert not table.entries


def test_a_table_knows_the_innermost_tensor() -> None:
    table: TensorTable[str] = TensorTable()
    x = torch.ones(3, 2)
    table.set(x, "x")
    found = []

    def f(y: Tensor) -> Tensor:
        found.append(table.get(y))
        z = vmap(lambda r: found.append(table.get(r)) or r.sum())(y)
        return grad(lambda w: found.append(table.get(w)) or w.sum())(y).sum() + z.sum()

    grad(f)(x)
    assert found == ["x"] * 3 and base(x) is x


def test_a_saved_tensor_keeps_its_type() -> None:
    """C++ alone holds it between forward and backward."""

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(x):  # type: ignore[override]
            return x.sin()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs, output)

        @staticmethod
        def backward(ctx, g):  # type: ignore[override]
            assert [region().type_of(x) for x in ctx.saved_tensors] == ["VI", "VI"]
            return g

    with per_device(MESH) as here:
        x, seen = here.set_type(torch.ones(3), "VI"), []

        def f(x: Tensor) -> Tensor:
            y = x * 2
            out = Keeps.apply(y).sum()
            del y
            gc.collect()
            seen.append(1)
            return out

        grad(f)(x)
    assert seen


def test_joins() -> None:
    order = "IRVP"
    for a in order:
        for b in order:
            assert _joined[a + "I", b + "R"] == max(a, b, key=order.index) + "R"


def test_flow_alone() -> None:
    """Without `Insert`: equal operands give equal results, what touches a varying value varies."""
    with flowing(MESH) as here:
        i, v = here.set_type(torch.ones(3), "II"), here.set_type(torch.ones(3), "IV")
        r = here.set_type(torch.ones(3), "RI")
        assert [here.type_of(y) for y in (i + i, i + v, r + v, i * 2, torch.stack([i, r]))] == [
            "II",
            "IV",
            "RV",
            "II",
            "RI",
        ]
        out = torch.empty(3)
        torch.add(i, v, out=out)
        assert here.type_of(out) == "IV"
        buffer = torch.zeros(2, 3)
        row, other = buffer[0], buffer[1]
        row.copy_(v)
        assert here.type_of(buffer) == here.type_of(other) == "IV"
        values, at = v.sort()
        assert here.type_of(values) == here.type_of(at) == "IV"


def test_a_region_ends_with_its_function() -> None:
    with per_device(MESH):
        assert types.inside()
        with (
            pytest.raises(
                sl.SpecError, match="a per-device function is already running: shard_map and step do not nest"
            ),
            per_device(MESH),
        ):
            pass
        seen: list[Any] = []
        thread = threading.Thread(target=lambda: seen.append(types.inside()))
        thread.start()
        thread.join()
        assert seen == [False]
    assert not types.inside()
    with pytest.raises(ZeroDivisionError), per_device(MESH):
        raise ZeroDivisionError
    assert not types.inside()


def test_letters() -> None:
    here = Region(Mesh(dict(a=2, b=2, c=2), simulate=True))
    assert here.make(V=("b",), P=("a", "c")) == "PVP" and here.make() == "III"
    assert here.with_letter("PVP", ("c",), "R") == "PVR" and here.with_letter("PVP", (), "R") == "PVP"
    assert here.axes_of("PVR", "VR") == ("b", "c")


def test_typeof_and_messages() -> None:
    x, w = torch.arange(8.0).view(4, 2), torch.ones(2, dtype=torch.float64)
    said: list[str] = []

    def body(x: Tensor, w: Tensor) -> Tensor:
        said[:] = [
            sl.typeof(x),
            sl.typeof(w),
            sl.typeof(x * 2),
            sl.typeof(sl.pending(x.bfloat16(), "dp")),
            sl.typeof(sl.pvary(w, "tp").to(torch.int8)),
            sl.typeof(torch.ones(()) + sl.axis_index("tp") + x[0, 0].half()),
            sl.typeof(x > 0),
        ]
        return w

    with sl.make_mesh(dp=2, tp=2, simulate=True):
        sl.shard_map(body, in_specs=("b/dp d", "d"), out_specs="d")(sl.shard(x, "b/dp d"), w)
    assert said == [
        "f32[2, 2] varying over dp (`b/dp d`)",
        "f64[2] invariant (`d`)",
        "f32[2, 2] varying over dp",
        "bf16[2, 2] pending over dp",
        "i8[2] replicated over tp",
        "f32[] varying over dp, tp",
        "bool[2, 2] varying over dp",
    ]


def test_leaves_keep_their_spec_through_copies() -> None:
    def body(x: Tensor) -> Tensor:
        leaves = region().leaves
        for y in (x.detach(), x.clone(), x.double(), torch.zeros_like(x), x.contiguous()):
            assert leaves.get(y) is not None, y
        for y in (x + 1, x[0], x.view(-1), torch.zeros_like(x[0])):
            assert leaves.get(y) is None
        return sl.gather(x.double(), "dp").sum(0) * 0

    with sl.make_mesh(dp=2, tp=2, simulate=True):
        f = sl.shard_map(lambda x: sl.psum(sl.axis_index("dp") * body(x), "dp"), in_specs=None, out_specs="d")
        f(sl.shard(torch.ones(4, 2), "b/dp d"))


def test_padded_leaves_are_stored_not_computed_with() -> None:
    def run(body: Any) -> Any:
        with sl.make_mesh(dp=2, simulate=True):
            return sl.gather(sl.shard_map(body, in_specs=None, out_specs=None)(sl.shard(torch.arange(3.0), "n/dp")))

    for body in (lambda x: x + 1, lambda x: x.sum(), lambda x: sl.psum(x, "dp"), lambda x: x[0]):
        with pytest.raises(
            sl.SpecError,
            match=r"padded to f32.2. \(`n/dp` of .*`n` is 3, which does not divide over dp=2\.\n.*make the size 4",
        ):
            run(body)
    assert torch.equal(run(lambda x: x.clone().detach()), torch.arange(3.0))
    assert torch.equal(run(lambda x: torch.zeros_like(x)), torch.zeros(3))

    def gathered(x: Tensor) -> Tensor:
        whole = sl.gather(x, "dp")
        assert whole.shape == (3,)
        return x

    assert torch.equal(run(gathered), torch.arange(3.0))


def test_backward_runs_in_this_thread() -> None:
    """The region is one thread's: on a GPU autograd would otherwise run backwards in threads of its own."""
    with per_device(MESH):
        assert not torch._C._is_multithreading_enabled()
    assert torch._C._is_multithreading_enabled()


def test_private_parts_of_torch() -> None:
    """What types.py, flow.py, insert.py and collectives.py use beyond torch's public interface."""
    from torch._C import _functorch, _len_torch_function_stack  # type: ignore[attr-defined]  # noqa: F401
    from torch.autograd import forward_ad
    from torch.overrides import _pop_mode, _push_mode  # noqa: F401

    assert callable(_functorch.get_unwrapped) and callable(_functorch.is_functorch_wrapped_tensor)
    assert callable(_functorch.maybe_get_level) and _functorch.maybe_current_level() is None
    assert forward_ad._current_level == -1
    assert torch.Tag.nondeterministic_seeded in torch.ops.aten.bernoulli.default.tags
    assert torch.Tag.data_dependent_output in torch.ops.aten._local_scalar_dense.default.tags
    assert torch.Tag.dynamic_output_shape in torch.ops.aten.nonzero.default.tags
    assert isinstance(torch.ones(1).untyped_storage()._cdata, int)
