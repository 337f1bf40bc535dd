"""run_threads: a thread per rank, one at a time; derivatives, the caller's state, errors, deadlocks, interrupts."""

import contextvars
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, hessian, jacrev, vjp, vmap
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from wired import PSum, PVary, problem, rank_grads, rank_loss, simulated, uneven_exchange, whole_loss
from wired import nothing_left as nothing_left

from shardlib import wire
from shardlib.errors import MeshError, RankError, SpecError
from shardlib.mesh import Mesh
from shardlib.simulate import current_rank, run_threads


def line_of(marker: str) -> str:
    """`file:line` of the line of this file that ends in `# marker`."""
    lines = Path(__file__).read_text().splitlines()
    return f"{__file__}:{next(i for i, line in enumerate(lines, 1) if line.endswith(f'# {marker}'))}"


def test_gradients_of_functions_over_wire_ops():
    mesh = simulated(dp=2, tp=2)
    (w, v, x), pieces = problem(mesh)
    dw, dv = grad(whole_loss, argnums=(0, 1))(w, v, x)
    want = [(dw.chunk(2)[d].chunk(2, 1)[t], dv.chunk(2)[t]) for d in range(2) for t in range(2)]

    def plain(*p: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in p]
        rank_loss(mesh, *leaves).backward()
        return tuple(t.grad for t in leaves[:2] if t.grad is not None)

    def pulled(*p: Tensor) -> tuple[Tensor, ...]:
        value, pull, *_ = vjp(lambda w, v, x: rank_loss(mesh, w, v, x), *p)
        return pull(torch.ones_like(value))[:2]

    for way in (lambda *p: rank_grads(mesh, *p), plain, pulled):
        for got, ref in zip(run_threads(mesh, way, pieces), want, strict=True):
            torch.testing.assert_close(got, ref, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch.func imports it
def test_transforms_nest():
    mesh = simulated(dp=2, tp=2)
    g = mesh.group(("dp", "tp"))
    torch.manual_seed(0)
    xs, w = torch.randn(4, 5, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)

    def whole(w: Tensor) -> Tensor:
        return torch.tanh(xs @ w).pow(3).sum()

    def mine(w: Tensor, x: Tensor) -> Tensor:
        return PSum.apply(torch.tanh(x @ PVary.apply(w, g)).pow(3).sum(), g)

    def run(f: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        return run_threads(mesh, f, [(w, x) for x in xs])

    def twice(w: Tensor, x: Tensor) -> Tensor:
        return grad(lambda w: grad(mine)(w, x).sin().sum())(w)

    def per_row(w: Tensor, x: Tensor) -> Tensor:
        rows = vmap(lambda y: torch.tanh(y @ PVary.apply(w, g)).pow(3))(x)
        return PSum.apply(rows.sum(), g)

    many = torch.stack([w, 2 * w])
    rows = torch.stack([grad(whole)(w), grad(whole)(2 * w)])
    cases = {
        "grad of grad": (run(twice), grad(lambda w: grad(whole)(w).sin().sum())(w)),
        "hessian": (run(lambda w, x: jacrev(grad(mine))(w, x)), hessian(whole)(w)),
        "vmap of grad": (run(lambda w, x: vmap(grad(mine), (0, None))(many, x)), rows),
        "grad of vmap": (run(grad(per_row)), grad(whole)(w)),
    }
    for case, (got, want) in cases.items():
        for y in got:
            torch.testing.assert_close(y, want, rtol=1e-12, atol=1e-12, msg=case)


def test_ranks_may_take_their_own_branches_and_shapes():
    mesh = simulated(dp=4)
    g = mesh.group(("dp",))

    def fn(rows: Tensor) -> Tensor:
        total = rows.sum(0) * 10 if current_rank() == 0 else rows.mean(0)
        return wire.all_reduce(total, g)

    rows = [torch.full((r + 1, 2), float(r + 1)) for r in range(4)]
    assert all(torch.equal(y, torch.full((2,), 10.0 + 2 + 3 + 4)) for y in run_threads(mesh, fn, [(x,) for x in rows]))
    pieces = run_threads(mesh, lambda r: uneven_exchange(mesh, r), [(r,) for r in range(4)])
    assert all(torch.equal(y[:, 0], torch.arange(4.0).repeat_interleave(r + 1)) for r, y in enumerate(pieces))


def test_an_own_slice_waits_for_nobody():
    mesh = simulated(dp=2, tp=2)
    g = mesh.group(("dp", "tp"))
    got = run_threads(mesh, lambda: wire.own_slice(torch.arange(4), 0, 4, g) if current_rank() == 2 else None, [()] * 4)
    assert got[2].item() == 2 and got[3] is None


def test_current_rank_also_in_nested_runs():
    outer, inner = simulated(dp=2), simulated(tp=3)

    def fn(x: Tensor) -> tuple[Any, ...]:
        def nested() -> tuple[Any, ...]:
            return current_rank(), wire.all_reduce(x, inner.group(("tp",))).item()

        below = run_threads(inner, nested, [()] * 3)
        return current_rank(), below, wire.all_reduce(x, outer.group(("dp",))).item()

    assert current_rank() is None
    got = run_threads(outer, fn, [(torch.tensor(1.0),), (torch.tensor(2.0),)])
    assert got == [(r, [(i, 3.0 * (r + 1)) for i in range(3)], 3.0) for r in range(2)]
    assert current_rank() is None


class Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_of_the_function_see_plain_collectives():
    mesh = simulated(dp=2)

    def fn(x: Tensor) -> tuple[list[str], Tensor]:
        with Log() as log:
            y = wire.all_reduce(x, mesh.group(("dp",)))
        return log.seen, y

    for seen, y in run_threads(mesh, fn, [(torch.ones(2),)] * 2):
        assert seen == ["_c10d_functional.all_reduce.default", "_c10d_functional.wait_tensor.default"]
        assert y.tolist() == [2, 2]


def test_a_fake_run_inside_one_rank_sends_nothing():
    mesh = simulated(dp=2)

    def fn() -> Any:
        if current_rank() == 0:
            with FakeTensorMode():
                return wire.all_gather(torch.zeros(3), 0, 2, mesh.group(("dp",))).shape
        return None

    assert run_threads(mesh, fn, [(), ()]) == [(6,), None]


def test_torchs_global_flag_is_restored_whatever_the_order_of_ranks():
    mesh = simulated(dp=2)

    def fn(x: Tensor) -> Tensor:
        with Log():
            return wire.all_reduce(wire.all_reduce(x, mesh.group(("dp",))), mesh.group(("dp",)))

    for _ in range(2):
        run_threads(mesh, fn, [(torch.ones(2),)] * 2)
    assert not _python_dispatch.is_in_torch_dispatch_mode()


name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="none")


def test_threads_have_the_callers_state():
    mesh = simulated(dp=2)

    def fn() -> tuple[Any, ...]:
        token = name.set(name.get() + "!")  # on the first rank; the second must not see it
        wire.all_reduce(torch.ones(1, device="cpu"), mesh.group(("dp",)))
        name.reset(token)
        return (
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
            torch.get_num_threads(), torch.empty(1).device.type, name.get(),
        )  # fmt: skip

    state = run_threads(mesh, fn, [(), ()])
    assert state == [(True, False, torch.float32, torch.get_num_threads(), "cpu", "none")] * 2
    token = name.set("mine")
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(3)
    try:
        with torch.no_grad(), torch.device("meta"):
            assert run_threads(mesh, fn, [(), ()]) == [(False, False, torch.float64, 3, "meta", "mine")] * 2
        with torch.inference_mode():
            assert run_threads(mesh, fn, [(), ()]) == [(False, True, torch.float64, 3, "cpu", "mine")] * 2
    finally:
        torch.set_default_dtype(torch.float32)
        name.reset(token)


# ---- errors


def fails_on(rank: int, error: BaseException, mesh: Mesh, cleaned: list[Any]) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor) -> Tensor:
        try:
            x = wire.all_reduce(x, mesh.group(("dp",)))
            if current_rank() == rank:
                raise error
            return grad(lambda x: PSum.apply(PVary.apply(x, mesh.group(("dp",))).sum(), mesh.group(("dp",))))(x)
        except Exception as e:
            cleaned.append(e)  # must not see the stop of the others
            raise
        finally:
            cleaned.append(current_rank())

    return fn


@pytest.mark.parametrize("rank", [0, 2])
def test_a_failing_rank_is_named_and_stops_the_others(rank):
    mesh, error, cleaned = simulated(dp=3), ValueError("boom"), []
    with pytest.raises(RankError, match=rf"^rank {rank} raised ValueError: boom$") as e:
        run_threads(mesh, fails_on(rank, error, mesh, cleaned), [(torch.ones(2),)] * 3)
    assert e.value.__cause__ is error
    assert set(cleaned) == {error, 0, 1, 2}


def test_an_error_of_the_library_keeps_its_type():
    mesh, error = simulated(dp=3), SpecError("bad spec")
    with pytest.raises(SpecError) as e:
        run_threads(mesh, fails_on(1, error, mesh, []), [(torch.ones(2),)] * 3)
    assert e.value is error and e.value.__notes__ == ["on rank 1"]


def test_exit_goes_through():
    mesh = simulated(dp=3)
    with pytest.raises(SystemExit) as e:
        run_threads(mesh, fails_on(1, SystemExit(3), mesh, []), [(torch.ones(2),)] * 3)
    assert e.value.code == 3


def test_ranks_not_started_never_are():
    started = []

    def fn() -> None:
        started.append(current_rank())
        raise ValueError("at once")

    with pytest.raises(RankError, match="rank 0 raised ValueError: at once"):
        run_threads(simulated(dp=8), fn, [()] * 8)
    assert started == [0]


def disagree(kind: str, g: str, x: Tensor) -> Any:
    if current_rank() != 1:
        return wire.all_reduce(x, g)  # first
    if kind == "op":
        return wire.all_gather(x, 0, 3, g)  # op
    if kind == "reduction":
        return wire.all_reduce(x, g, "max")  # reduction
    return wire.all_reduce(x[:1] if kind == "shape" else x.double(), g)  # tensor


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("op", "all_gather_into_tensor(float32[2], 3)"),
        ("reduction", "all_reduce(float32[2], 'max')"),
        ("shape", "all_reduce(float32[1], 'sum')"),
        ("dtype", "all_reduce(float64[2], 'sum')"),
    ],
)
def test_ranks_that_disagree_are_listed_with_their_lines(kind, told):
    mesh = simulated(dp=3)
    with pytest.raises(RankError) as e:
        run_threads(mesh, lambda x: disagree(kind, mesh.group(("dp",)), x), [(torch.ones(2),)] * 3)
    assert str(e.value).splitlines() == [
        "ranks disagree on a collective:",
        f"  rank 0: all_reduce(float32[2], 'sum') over `dp` at {line_of('first')}",
        f"  rank 1: {told} over `dp` at {line_of(kind if kind in ('op', 'reduction') else 'tensor')}",
    ]


def test_a_deadlock_is_seen_at_once():
    mesh = simulated(dp=2, tp=2)
    dp, tp = mesh.group(("dp",)), mesh.group(("tp",))

    def fn(x: Tensor) -> Any:
        if current_rank() == 3:
            return x
        if current_rank() == 1:
            return grad(lambda x: PSum.apply(x.sum(), dp))(x)  # alone
        return wire.all_reduce(wire.all_reduce(x, dp), tp)  # pair

    start = time.perf_counter()
    with pytest.raises(RankError) as e:
        run_threads(mesh, fn, [(torch.ones(4),)] * 4)
    assert time.perf_counter() - start < 2
    assert str(e.value).splitlines() == [
        "deadlock: no rank can go on",
        f"  rank 0: all_reduce(float32[4], 'sum') over `tp` at {line_of('pair')}, waits for rank 1",
        f"  rank 1: all_reduce(float32[], 'sum') over `dp` at {psum_line()}, waits for rank 3",
        f"  rank 2: all_reduce(float32[4], 'sum') over `tp` at {line_of('pair')}, waits for rank 3",
        "  rank 3: finished",
    ]


def psum_line() -> str:
    """Where PSum, which is code of the user here, calls the wire."""
    code = PSum.forward.__code__
    return f"{code.co_filename}:{code.co_firstlineno + 2}"


def test_a_deadlock_across_groups():
    mesh = simulated(dp=2, tp=2)
    order = [("dp", "tp"), ("tp", "dp"), ("tp", "dp"), ("dp", "tp")]

    def fn(x: Tensor) -> Tensor:
        for a in order[current_rank() or 0]:
            x = wire.all_reduce(x, mesh.group((a,)))
        return x

    with pytest.raises(RankError, match=r"deadlock: no rank can go on\n  rank 0: .* over `dp` .* waits for rank 2\n"):
        run_threads(mesh, fn, [(torch.ones(1),)] * 4)


def test_a_group_of_another_mesh_is_refused():
    other = simulated(dp=4).group(("dp",))
    with pytest.raises(MeshError, match=r"the group `dp=4/dp`, which is none of Mesh\(dp=2, simulated\)"):
        run_threads(simulated(dp=2), lambda x: wire.all_reduce(x, other), [(torch.ones(1),)] * 2)
    with pytest.raises(MeshError, match="arguments for 1 ranks"):
        run_threads(simulated(dp=2), lambda x: x, [(1,)])


@pytest.mark.parametrize("where", ["computing", "waiting"])
def test_an_interrupt_stops_all(where):
    mesh, cleaned = simulated(dp=3), []

    def fn(x: Tensor) -> None:
        try:
            if current_rank() == 1:
                os.kill(os.getpid(), signal.SIGINT)
                end = time.monotonic() + 20
                while time.monotonic() < end:
                    x = x + 1 if where == "computing" else wire.all_reduce(x, mesh.group(()))
            wire.all_reduce(x, mesh.group(("dp",)))
        finally:
            cleaned.append(current_rank())

    start = time.monotonic()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with it ignored
    with pytest.raises(KeyboardInterrupt):
        run_threads(mesh, fn, [(torch.ones(1),)] * 3)
    assert time.monotonic() - start < 10 and {0, 1} <= set(cleaned)
