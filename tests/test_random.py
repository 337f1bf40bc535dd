"""Random numbers: JAX's values, shards equal to slices of the whole, one node per draw, batching, statistics."""

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardlib import random
from shardlib.kernels import threefry

GOLDEN = json.loads((Path(__file__).parent / "golden" / "threefry.json").read_text())
FLOATS = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PATTERNS = {8: torch.int64, 4: torch.int32, 2: torch.int16}
WIDTHS = {"uint8": 8, "uint16": 16, "uint32": 32, "uint64": 64}
KEY = torch.tensor([256, 7])


def name(case: dict) -> str:
    return f"{case['fn']}-{case['dtype']}-{case['key'][1]}-{'x'.join(map(str, case['shape']))}-{case['params']}"


def draw(case: dict) -> Tensor:
    """The draw that a golden case describes, by the public function."""
    key, fn, shape, params = torch.tensor(case["key"]), case["fn"], case["shape"], case["params"]
    if fn == "split":
        return random.split(key, params["num"])
    if fn == "fold_in":
        return random.fold_in(key, params["data"])
    if fn == "bits":
        return random.bits(key, shape, WIDTHS[case["dtype"]])
    if fn == "bernoulli":
        p = params["p"] if case["dtype"] == "float32" else torch.tensor(params["p"], dtype=FLOATS[case["dtype"]])
        return random.bernoulli(key, p, shape)
    if fn == "randint":
        return random.randint(key, shape, **params, dtype=getattr(torch, case["dtype"]))
    dtype = FLOATS[case["dtype"]]
    if fn == "normal_u":
        return random.uniform(key, shape, dtype, torch.finfo(dtype).eps / 2 - 1, 1.0)
    return getattr(random, fn)(key, shape=shape, dtype=dtype, **params)


def floats(case: dict, field: str, shape: list[int]) -> Tensor:
    """Golden bit patterns as floats."""
    dtype = FLOATS[case["dtype"]]
    pattern = PATTERNS[dtype.itemsize]
    return torch.tensor([signed(x, 8 * dtype.itemsize) for x in case[field]], dtype=pattern).view(dtype).view(shape)


def signed(x: int, width: int) -> int:
    return x - 2**width if x >> (width - 1) else x


def unsigned(x: Tensor, width: int) -> list[int]:
    pattern = x.view(PATTERNS[x.dtype.itemsize]) if x.is_floating_point() else x
    return [v % 2**width for v in pattern.reshape(-1).tolist()]


def little_endian(case: dict, x: Tensor) -> bytes:
    """The bytes that JAX's array of the case's type has: words and bits are int64 here, unsigned there."""
    if case["fn"] in ("bits", "split"):
        width = WIDTHS[case["dtype"]] // 8
        return x.contiguous().view(torch.uint8).view(-1, 8)[:, :width].contiguous().numpy().tobytes()
    return x.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("case", GOLDEN["blocks"], ids=str)
def test_blocks_equal_the_published_answers(case: dict) -> None:
    (k0, k1), (c0, c1), (a, b) = case["key"], case["counter"], case["out"]
    index = torch.tensor(signed(c0 << 32 | c1, 64))
    for copies in (1, 100):  # integers, then tensors
        x = random.bits(torch.tensor([k0, k1]), (), 64, index=index.expand(copies))
        assert unsigned(x, 64) == [a << 32 | b] * copies


@pytest.mark.parametrize("case", GOLDEN["seeds"], ids=str)
def test_key_equals_jax(case: dict) -> None:
    assert random.key(case["seed"]).tolist() == case["key"]


@pytest.mark.parametrize("data, word", [(7, 7), (-1, 2**32 - 1), (2**32 - 1, 2**32 - 1), (2**32 + 5, 5)])
def test_fold_in_counts_32_bits_of_ints_and_tensors(data: int, word: int) -> None:
    want = random.split(KEY, 8)[word] if word < 8 else random.bits(KEY, (), 64, index=torch.tensor(word))
    got = [random.fold_in(KEY, data), random.fold_in(KEY, torch.tensor(data))]
    if -(2**31) <= data < 2**31:
        got.append(random.fold_in(KEY, torch.tensor(data, dtype=torch.int32)))
    for key in got:
        assert torch.equal(key if word < 8 else key[0] << 32 | key[1], want)


EXACT = [case for case in GOLDEN["cases"] if "normal" not in case["fn"]]


@pytest.mark.parametrize("case", EXACT, ids=name)
def test_exact_values_equal_jax(case: dict) -> None:
    got = draw(case)
    width = 8 * got.dtype.itemsize if case["fn"] in ("uniform", "randint") else 64
    assert list(got.shape) == case["shape"]
    assert unsigned(got, width) == case["ints"]


@pytest.mark.parametrize("case", GOLDEN["hashes"], ids=name)
def test_large_draws_equal_jax(case: dict) -> None:
    assert hashlib.sha256(little_endian(case, draw(case))).hexdigest() == case["sha256"]


@pytest.mark.parametrize("case", [case for case in GOLDEN["cases"] if case["fn"] == "normal"], ids=name)
def test_normal_is_near_jax(case: dict) -> None:
    assert unsigned(draw({**case, "fn": "normal_u"}), 8 * FLOATS[case["dtype"]].itemsize) == case["u_ints"]
    rtol = {"float32": 5e-7, "float64": 5e-15}[case["dtype"]]
    torch.testing.assert_close(draw(case), floats(case, "ints", case["shape"]), rtol=rtol, atol=0)


@pytest.mark.parametrize("case", [case for case in GOLDEN["cases"] if case["fn"] == "truncated_normal"], ids=name)
def test_truncated_normal_is_near_jax(case: dict) -> None:
    got, want = draw(case), floats(case, "ints", case["shape"])
    eps = torch.finfo(want.dtype).eps
    assert got.dtype == want.dtype
    assert (got - want).abs().le(8 * eps * (want.abs() + 0.25)).all()


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-math.inf, -1.0), (2.0, math.inf), (-1e-3, 1e-3), (5.0, 6.0)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS.values(), ids=str)
def test_truncated_normal_stays_strictly_inside(bounds: tuple[float, float], dtype: torch.dtype) -> None:
    lower, upper = bounds
    x = random.truncated_normal(KEY, lower, upper, (1000,), dtype)
    rounded = torch.tensor(bounds, dtype=torch.float64).to(dtype)
    assert x.dtype == dtype
    assert ((x > rounded[0]) & (x < rounded[1])).all()


DRAWS: dict[str, Callable[..., Tensor]] = {
    "bits8": lambda key, shape, **kw: random.bits(key, shape, 8, **kw),
    "bits64": lambda key, shape, **kw: random.bits(key, shape, 64, **kw),
    "uniform": lambda key, shape, **kw: random.uniform(key, shape, torch.float32, -1.5, 2.5, **kw),
    "bfloat16": lambda key, shape, **kw: random.uniform(key, shape, torch.bfloat16, **kw),
    "normal": random.normal,
    "normal64": lambda key, shape, **kw: random.normal(key, shape, torch.float64, **kw),
    "truncated": lambda key, shape, **kw: random.truncated_normal(key, -2.0, 1.0, shape, **kw),
    "bernoulli": lambda key, shape, **kw: random.bernoulli(key, 0.25, shape, **kw),
    "randint": lambda key, shape, **kw: random.randint(key, shape, -5, 100, **kw),
    "randint32": lambda key, shape, **kw: random.randint(key, shape, 0, 1 << 20, torch.int32, **kw),
}
BLOCKS = [  # shape, starts, sizes
    ((7,), (0,), (7,)),
    ((101,), (13,), (50,)),
    ((13, 17), (5, 3), (8, 11)),
    ((13, 17), (0, 16), (13, 1)),
    ((4, 5, 6), (1, 0, 2), (2, 5, 3)),
    ((4, 5), (4, 0), (0, 5)),
    ((3, 0), (1, 0), (2, 0)),
    ((), (), ()),
]


@pytest.mark.parametrize("shape, starts, sizes", BLOCKS, ids=str)
@pytest.mark.parametrize("fn", DRAWS)
def test_shard_equals_slice_of_whole(fn: str, shape: tuple, starts: tuple, sizes: tuple) -> None:
    whole = DRAWS[fn](KEY, shape)
    for known in (starts, [torch.tensor(start) for start in starts]):
        shard = DRAWS[fn](KEY, shape, index=random.global_index(shape, known, sizes))
        assert shard.dtype == whole.dtype
        assert torch.equal(shard, whole[tuple(slice(a, a + n) for a, n in zip(starts, sizes, strict=True))])


def test_global_index_values() -> None:
    flat = torch.arange(4 * 5 * 6).view(4, 5, 6)
    assert torch.equal(random.global_index((4, 5, 6), (1, 2, 3), (3, 2, 1)), flat[1:4, 2:4, 3:4])
    far = random.global_index((2**20, 2**20), (2**20 - 1, torch.tensor(2**20 - 2)), (1, 2))
    assert far.tolist() == [[2**40 - 2, 2**40 - 1]]  # beyond 32 bits


def test_blocked_kernel_equals_small_calls() -> None:
    """Several cache blocks, the last one ragged, against calls of one element."""
    n = threefry._BLOCK * torch.get_num_threads() * 2 + 77
    for dtype in (torch.float32, torch.float64):
        whole = random.normal(KEY, (n,), dtype)
        for at in (0, 1, n // 2 - 40, n // 2, n - 78, n - 77, n - 1):
            assert torch.equal(random.normal(KEY, (n,), dtype, index=torch.tensor([at])), whole[at : at + 1])


@pytest.mark.parametrize("count", [threefry._FEW, threefry._FEW + 1])
@pytest.mark.parametrize("fn", DRAWS)
def test_few_and_many_elements_agree(fn: str, count: int) -> None:
    assert torch.equal(DRAWS[fn](KEY, (count,)), DRAWS[fn](KEY, (200,))[:count])


def traced(fn: Callable, *args: Tensor) -> tuple[torch.fx.GraphModule, list[str]]:
    graph = make_fx(fn, tracing_mode="fake")(*args)
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert not any(target._schema.is_mutable for target in targets if isinstance(target, torch._ops.OpOverload))
    return graph, [str(target) for target in targets]


@pytest.mark.parametrize(
    "fn, count", [("bits64", 1), ("uniform", 4), ("normal", 6), ("truncated", 7), ("bernoulli", 4), ("randint32", 22)]
)
def test_trace_has_few_nodes_and_equal_values(fn: str, count: int) -> None:
    def block(rank: Tensor) -> Tensor:
        return random.global_index((6, 8), (rank * 3, 0), (3, 8))

    def shard(key: Tensor, rank: Tensor) -> Tensor:
        return DRAWS[fn](random.fold_in(key, 3), (6, 8), index=block(rank))

    whole = DRAWS[fn](random.fold_in(KEY, 3), (6, 8))
    graph, nodes = traced(shard, KEY, torch.tensor(0))
    assert nodes.count("shardlib.threefry.default") == (4 if fn == "randint32" else 2)
    assert nodes.count("shardlib.erfinv.default") == (fn in ("normal", "truncated"))
    inputs = traced(lambda key, rank: (random.fold_in(key, 3), block(rank)), KEY, torch.tensor(0))[1]
    assert len(nodes) - len(inputs) == count
    for rank in (0, 1):  # the rank is a value of the graph, not a constant
        assert torch.equal(graph(KEY, torch.tensor(rank)), whole[3 * rank : 3 * rank + 3])


def test_trace_of_keys() -> None:
    def keys(key: Tensor, step: Tensor) -> Tensor:
        return random.split(random.fold_in(random.fold_in(key, step), random.key(5)[1]), 3)

    graph, nodes = traced(keys, KEY, torch.tensor(1))
    assert len(nodes) < 25
    assert torch.equal(graph(KEY, torch.tensor(9)), keys(KEY, torch.tensor(9)))


@pytest.mark.parametrize("fn", DRAWS)
def test_fake_tensors_have_the_real_metadata(fn: str) -> None:
    real = DRAWS[fn](KEY, (3, 50))
    with FakeTensorMode():
        fake = DRAWS[fn](random.split(random.key(3))[0], (3, 50))
    assert (fake.shape, fake.dtype, fake.stride(), fake.device) == (real.shape, real.dtype, real.stride(), real.device)


@pytest.mark.parametrize("op", ["threefry", "erfinv"])
def test_operator_registration(op: str) -> None:
    args: tuple[Any, ...] = (KEY, torch.arange(40).view(5, 8), 64, 52) if op == "threefry" else (torch.rand(5, 8),)
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.shardlib, op).default, args, test_utils=utils)


@pytest.mark.parametrize("many", [3, 40])
@pytest.mark.parametrize("fn", DRAWS)
def test_vmap_over_keys_equals_a_loop(fn: str, many: int) -> None:
    keys = random.split(KEY, 6)
    want = torch.stack([DRAWS[fn](k, (many,)) for k in keys])
    assert torch.equal(torch.vmap(lambda k: DRAWS[fn](k, (many,)))(keys), want)
    nested = torch.vmap(torch.vmap(lambda k: DRAWS[fn](k, (many,))), in_dims=1)(keys.view(2, 3, 2))
    assert torch.equal(nested, want.view(2, 3, many).transpose(0, 1))


def test_vmap_over_ranks_and_data() -> None:
    def shard(rank: Tensor) -> Tensor:
        return random.normal(KEY, (6, 8), index=random.global_index((6, 8), (rank * 2, 0), (2, 8)))

    assert torch.equal(torch.vmap(shard)(torch.arange(3)).view(6, 8), random.normal(KEY, (6, 8)))
    folded = torch.vmap(random.fold_in, in_dims=(None, 0))(KEY, torch.arange(5))
    assert torch.equal(folded, random.split(KEY, 5))
    both = torch.vmap(random.fold_in)(random.split(KEY, 5), torch.arange(5))
    assert torch.equal(both[4], random.fold_in(random.fold_in(KEY, 4), 4))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own, in its jvp
def test_grad_and_jvp_pass_around_a_draw() -> None:
    noise = random.normal(KEY, (64,))
    x = torch.linspace(1, 2, 64)
    assert torch.equal(torch.func.grad(lambda x: (x * random.normal(KEY, (64,))).sum())(x), noise)
    assert torch.equal(torch.func.jvp(lambda x: x * random.normal(KEY, (64,)), (x,), (torch.ones(64),))[1], noise)
    rows = torch.vmap(torch.func.grad(lambda x, k: (x * random.normal(k, (64,))).sum()), (None, 0))(
        x, torch.stack((KEY, KEY))
    )
    assert torch.equal(rows[1], noise)


class CountOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class CountFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [CountOps, CountFunctions])
def test_modes_see_one_operator_per_draw(mode: Any) -> None:
    want = random.normal(random.fold_in(KEY, 1), (100,))
    with mode() as seen:
        got = random.normal(random.fold_in(KEY, 1), (100,))
    assert torch.equal(got, want)
    assert sum("threefry" in op for op in seen.names) == 2
    assert len(seen.names) < 30


def test_torch_generators_are_left_alone() -> None:
    before = torch.get_rng_state()
    random.normal(random.key(1), (100,))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=str)
def test_normal_statistics(dtype: torch.dtype) -> None:
    n = 100_000
    x = random.normal(random.key(42), (n,), dtype).double()
    coarse = 0.01 if dtype == torch.bfloat16 else 0  # 128 values only, all shifted by half a step
    assert abs(x.mean()) < 4 / n**0.5 + coarse
    assert abs(x.var() - 1) < 4 * (2 / n) ** 0.5 + 2 * coarse
    for sigmas, share in ((1, 0.6826895), (2, 0.9544997)):
        assert abs((x.abs() < sigmas).double().mean() - share) < 0.01
    assert torch.isfinite(x).all()
    assert abs(torch.corrcoef(torch.stack((x[1:], x[:-1])))[0, 1]) < 4 / n**0.5


def test_erfinv_inverts_erf() -> None:
    u = torch.cat((torch.linspace(-0.999999, 0.999999, 1001, dtype=torch.float64), 1 - 10.0 ** -torch.arange(1, 15)))
    torch.testing.assert_close(torch.erf(torch.ops.shardlib.erfinv.default(u)), u, rtol=1e-14, atol=1e-16)
    edges = torch.ops.shardlib.erfinv.default(torch.tensor([-1.0, 0.0, 1.0]))
    assert edges.tolist() == [-math.inf, 0.0, math.inf]


words = st.integers(0, 2**32 - 1)


@settings(max_examples=40, deadline=None)
@given(k0=words, k1=words, few=st.integers(0, 40), more=st.integers(0, 40))
def test_split_prefix(k0: int, k1: int, few: int, more: int) -> None:
    key = torch.tensor([k0, k1])
    keys = random.split(key, few + more)
    assert torch.equal(random.split(key, few), keys[:few])
    assert torch.equal(random.split(key, (2, few)).view(-1, 2)[:few], keys[:few])
    assert ((keys >= 0) & (keys < 2**32)).all()
    if few + more:
        assert torch.equal(random.fold_in(key, few + more - 1), keys[-1])


@settings(max_examples=60, deadline=None)
@given(
    lo=st.integers(-(2**63), 2**63 - 1), hi=st.integers(-(2**63) + 1, 2**63), narrow=st.booleans(), n=st.integers(1, 50)
)
@example(lo=-(2**61), hi=2**62 + 2**60, narrow=False, n=50)  # sums that pass 2**63
@example(lo=-(2**63), hi=2**63, narrow=False, n=50)
@example(lo=-(2**63), hi=2**63, narrow=True, n=50)
def test_randint_equals_integer_arithmetic(lo: int, hi: int, narrow: bool, n: int) -> None:
    width, dtype = (32, torch.int32) if narrow else (64, torch.int64)
    lo, hi = (lo >> 32, hi >> 32) if narrow else (lo, hi)
    lo, hi = min(lo, hi), max(lo, hi)
    if lo == hi:
        return
    span, wrap = hi - lo, 2**width
    high, low = (unsigned(random.bits(k, (n,), width), width) for k in random.split(KEY))
    carry = (2 ** (width // 2) % span) ** 2 % wrap % span
    want = [lo + ((h % span) * carry + m % span) % wrap % span for h, m in zip(high, low, strict=True)]
    assert random.randint(KEY, (n,), lo, hi, dtype).tolist() == want


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: random.uniform(random.split(KEY), (3,)), TypeError, r"\(2, 2\).*k1, k2 = split\(key\)"),
        (lambda: random.uniform(KEY.int(), (3,)), TypeError, "int64 tensor of shape"),
        (lambda: random.uniform(KEY, (3,), torch.int32), TypeError, "random floats are torch.float64.*got torch.int32"),
        (lambda: random.uniform(KEY, (3,), minval=2.0), ValueError, "minval=2.0 is above maxval=1.0"),
        (lambda: random.normal(KEY, (3,), torch.complex64), TypeError, "got torch.complex64"),
        (lambda: random.normal(KEY, (3,), index=torch.ones(2)), TypeError, "got torch.float32"),
        (lambda: random.truncated_normal(KEY, 1.0, 1.0, (3,)), ValueError, "lower < upper"),
        (lambda: random.bernoulli(KEY, torch.tensor(1), (3,)), TypeError, "got torch.int64"),
        (lambda: random.bits(KEY, (3,), 24), ValueError, "got width=24"),
        (lambda: random.randint(KEY, (3,), 5, 5), ValueError, "minval < maxval"),
        (lambda: random.randint(KEY, (3,), 0, 300, torch.uint8), ValueError, "maxval <= 256"),
        (lambda: random.randint(KEY, (3,), 0, 2, torch.bool), TypeError, "got torch.bool"),
        (lambda: random.key(2**64), ValueError, "a seed has 64 bits"),
        (lambda: random.fold_in(KEY, torch.arange(2)), TypeError, "0-d integer tensor"),
        (lambda: random.fold_in(KEY, torch.tensor(0.5)), TypeError, "got torch.float32"),
        (lambda: random.global_index((4, 6), (0, 4), (4, 3)), ValueError, "dim 1 .* start=4 size=3 of 6"),
        (lambda: random.global_index((4, 6), (0,), (4, 3)), ValueError, "differ in length"),
    ],
)
def test_errors_say_what_is_wrong(call: Callable, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_stochastic_rounding() -> None:
    """Neighbours only, right in the mean, by the index alone; what is a bfloat16, or no number, stays."""
    x = torch.tensor([1.0, -1.0, 1e-30, 3e38, 0.1]).repeat_interleave(20_000) * 1.0009
    found = random.stochastic_round(KEY, x)
    low = (x.view(torch.int32) & -(2**16)).view(torch.float32)
    high = (low.view(torch.int32) + 2**16).view(torch.float32)
    assert found.dtype == torch.bfloat16 and bool(((found == low) | (found == high)).all())
    off = (found.double() - x.double()).view(5, -1).mean(1).abs()
    assert bool((off < 4 * (high.double() - low.double()).abs().view(5, -1)[:, 0] / 20_000**0.5).all())
    assert torch.equal(random.stochastic_round(KEY, x[7:11], index=torch.arange(7, 11)), found[7:11])
    stays = torch.tensor([0.0, -0.0, 1.5, -3.0, math.inf, -math.inf, math.nan])
    assert torch.equal(random.stochastic_round(KEY, stays).float().view(torch.int32)[:6], stays.view(torch.int32)[:6])
    assert random.stochastic_round(KEY, stays)[6].isnan()
    with pytest.raises(TypeError, match=r"rounds float32 to bfloat16, got torch\.int64"):
        random.stochastic_round(KEY, KEY)


@pytest.mark.gpu
@pytest.mark.parametrize("fn", DRAWS)
def test_gpu_equals_cpu(fn: str) -> None:
    want = DRAWS[fn](KEY, (300, 1001))
    got = DRAWS[fn](KEY.cuda(), (300, 1001))
    assert got.is_cuda
    if "normal" in fn or fn == "truncated":
        torch.testing.assert_close(got.cpu(), want, rtol=1e-6 if want.dtype == torch.float32 else 1e-14, atol=1e-6)
    else:
        assert torch.equal(got.cpu(), want)
