"""The same per-device programs as JAX 0.10.2: values, gradients, types (golden/collectives.json, type_rules.json)."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import on_ranks
from torch import Tensor

import shardlib as sl
from shardlib.spec import parse
from shardlib.types import region

GOLDEN = Path(__file__).parent / "golden"
CASES = {c["name"]: c for c in json.loads((GOLDEN / "collectives.json").read_text())["cases"]}
RULES = json.loads((GOLDEN / "type_rules.json").read_text())


def numbers(text: str, shape: list[int], dtype: str = "float64") -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy())


def copies(x: Tensor) -> Tensor:
    return x.unsqueeze(0)


def gelu(z: Tensor) -> Tensor:
    return 0.5 * z * (1 + torch.tanh(0.7978845608028654 * (z + 0.044715 * z**3)))


def norm(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (sl.psum((a * a).sum(), ("dp", "tp")) + sl.psum((b * b).sum(), "tp") + (c * c).sum()).sqrt()


def cross_entropy(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    z = sl.einsum("b/dp s d, d v/tp -> b/dp s v/tp", x, w)
    each = sl.token_loss("b/dp s v/tp, b/dp s", z, y, per_token=True)
    return each, sl.pmean(each.mean(), "dp")


def column_row(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    h = gelu(sl.einsum("s/dp d, d f/tp -> s/dp f/tp", x, w1) + b1)
    return sl.psum("s/dp d +tp -> s/dp d", sl.einsum("s/dp f/tp, f/tp d -> s/dp d +tp", h, w2)) + b2


def sequence_parallel(x: Tensor, w1: Tensor, w2: Tensor, g: Tensor) -> Tensor:
    h = sl.all_gather("b/dp s/tp d -> b/dp s d", x * g)
    h = gelu(sl.einsum("b/dp s d, d f/tp -> b/dp s f/tp", h, w1))
    y = sl.einsum("b/dp s f/tp, f/tp d -> b/dp s d +tp", h, w2)
    return x + sl.psum_scatter("b/dp s d +tp -> b/dp s/tp d", y)


def scattered(pattern: str) -> Callable[[Tensor], Tensor]:
    return lambda x: sl.psum_scatter(pattern, x[0])


def gathered(pattern: str) -> Callable[[Tensor], Tensor]:
    return lambda x: copies(sl.all_gather(pattern, x))


UP = [(0, 1), (1, 2), (2, 3), (3, 0)]
PROGRAMS: dict[str, Callable[..., Any]] = {
    "all_gather_tp_dim0_dp2tp4": gathered("s/tp d -> s d"),
    "all_gather_tp_dim0_dp1tp8": gathered("s/tp d -> s d"),
    "all_gather_tp_dim1_dp2tp4": gathered("s/dp d/tp -> s/dp d"),
    "all_gather_two_dp_tp_dp2tp4": gathered("s/dp/tp d -> s d"),
    "all_gather_two_tp_dp_dp2tp4": gathered("s/tp/dp d -> s d"),
    "all_gather_minor_only_dp2tp4": gathered("s/dp/tp d -> s/dp d"),
    "all_gather_invariant_tp_dp2tp4": lambda x: sl.all_gather("s/dp d/tp -> s/dp d", x, invariant=True),
    "psum_tp_dp2tp4": lambda x: sl.psum(x, "tp"),
    "psum_dp_tp_dp2tp4": lambda x: sl.psum(x, ("dp", "tp")),
    "pmean_dp_dp4tp2": lambda x: sl.pmean(x, "dp"),
    "psum_scalar_loss_a2b2c2": lambda x: sl.psum((x.sin() * x).sum(), ("a", "b", "c")),
    "pmax_tp_dp2tp4": lambda x: sl.pmax(x, "tp"),
    "psum_scatter_tp_dim1_dp2tp4": scattered("s/dp d +tp -> s/dp d/tp"),
    "psum_scatter_dp_tp_dim0_dp2tp4": scattered("s d +dp +tp -> s/dp/tp d"),
    "psum_scatter_then_all_gather_dp2tp4": lambda x: sl.all_gather(
        "s/tp d -> s d", sl.psum_scatter("s d +tp -> s/tp d", x[0] ** 2), invariant=True
    ),
    "all_to_all_tp_split1_concat2_dp2tp4": lambda x: sl.all_to_all("s/dp h d/tp -> s/dp h/tp d", x),
    "all_to_all_dp_split1_concat0_dp8": lambda x: sl.all_to_all("s/dp h -> s h/dp", x),
    "ppermute_ring_up_tp_dp2tp4": lambda x: sl.ppermute(x, "tp", UP),
    "ppermute_partial_shift_dp_dp8": lambda x: sl.ppermute(x, "dp", [(i, i + 1) for i in range(7)]),
    "axis_index_scale_dp2tp4": lambda x: x * (1 + sl.axis_index("tp") + 10 * sl.axis_index("dp")),
    "pending_matmul_dp2tp4": lambda x, w: sl.einsum("s/dp k/tp, k/tp d -> s/dp d +tp", x, w),
    "pending_to_psum_scatter_dp2tp4": lambda x, w: sl.psum_scatter("s/dp d +tp -> s/dp d/tp", x).tanh() * w,
    "pending_bias_after_psum_dp2tp4": lambda x, w, b: (
        sl.psum("s/dp d +tp -> s/dp d", sl.einsum("s/dp k/tp, k/tp d -> s/dp d +tp", x, w)) + b
    ),
    "mlp_column_row_dp2tp4": column_row,
    "mlp_sequence_parallel_dp2tp4": sequence_parallel,
    "softmax_xent_vocab_parallel_dp2tp4": cross_entropy,
    "invariant_weight_auto_psum_dp2tp4": lambda x, w: (x * w).sin(),
    "fsdp_linear_dp2tp4": lambda x, w: (x @ sl.all_gather("d f/tp/dp -> d f/tp", w)).tanh(),
    "global_norm_mixed_dp4tp2": norm,
}
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "all_gather_major_only_dp2tp4": (
        gathered("s/dp/tp d -> s/tp d"),
        "cut over dp, then over tp; a collective takes away the last of these axes",
    ),
    "psum_of_invariant_dp2tp4": (lambda x: sl.psum(x, "tp"), "equal on all ranks has no sum to make"),
}


def enters_as(given: dict[str, Any]) -> tuple[str, Tensor]:
    """The spec and value with which an input enters: a pending one as its summands, along a leading dimension."""
    spec, data = given["spec"], given.get("summands") or given["data"]
    if "summands" not in given:
        return spec, numbers(data, given["shape"], given.get("dtype", "float64"))
    axes = parse(spec).pending
    return f"summands/{'/'.join(axes)} {parse(spec).without(axes)}", numbers(data, [4, *given["shape"]])


def run(name: str, simulate: bool = True) -> tuple[list[Tensor], list[Tensor]]:
    """Global outputs, and gradients of the cotangents' dot product with the outputs."""
    case, program = CASES[name], PROGRAMS[name]
    inputs = [enters_as(i) for i in case["inputs"]]
    pending = [parse(i["spec"]).pending for i in case["inputs"]]
    at = [i for i, x in enumerate(case["inputs"]) if "grad" in x]
    outs = [parse(o["spec"]) for o in case["outputs"]]
    duals = [numbers(o["cotangent"], o["shape"]) for o in case["outputs"] if "cotangent" in o]

    def body(args: tuple[Tensor, ...], duals: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
        def value(*args: Tensor) -> list[Tensor]:
            out = program(*(sl.pending(x[0], p) if p else x for x, p in zip(args, pending, strict=True)))
            return list(out) if isinstance(out, tuple) else [out]

        def total(*args: Tensor) -> Tensor:
            dots = [(y * d).sum() for y, d in zip(value(*args), duals, strict=True)]
            return sum(sl.psum(dot, out.axes) if out.axes else dot for dot, out in zip(dots, outs, strict=True))  # type: ignore[return-value]

        return value(*args), list(sl.grad(total, argnums=at)(*args)) if at else []

    with sl.make_mesh(case["mesh"], simulate=simulate):
        args = tuple(sl.shard(x, spec) for spec, x in inputs)
        cot = tuple(sl.shard(d, str(o.without(o.pending))) for d, o in zip(duals, outs, strict=False))
        specs = [str(o) for o in outs], [inputs[i][0] for i in at]
        values, grads = sl.gather(sl.shard_map(body, in_specs=None, out_specs=specs)(args, cot))
    return values, grads


def check(name: str, values: list[Tensor], grads: list[Tensor]) -> None:
    case = CASES[name]
    for got, said in zip(values, case["outputs"], strict=True):
        torch.testing.assert_close(got, numbers(said["data"], said["shape"]), rtol=1e-12, atol=1e-12)
    for got, said in zip(grads, (i for i in case["inputs"] if "grad" in i), strict=True):
        wanted = numbers(said["grad"], said["shape"]).expand(got.shape)  # the same for every summand
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_every_case_is_here() -> None:
    assert PROGRAMS.keys() | REFUSED.keys() == CASES.keys()


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_jax(name: str) -> None:
    check(name, *run(name))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_here(name: str) -> None:
    program, message = REFUSED[name]
    case = CASES[name]
    with sl.make_mesh(case["mesh"], simulate=True), pytest.raises(sl.SpecError, match=message):
        args = [sl.shard(torch.zeros(i["shape"], dtype=torch.float64), i["spec"]) for i in case["inputs"]]
        sl.shard_map(program, in_specs=None, out_specs=case["outputs"][0]["spec"])(*args)


ON_GLOO = (
    *("all_gather_two_tp_dp_dp2tp4", "all_to_all_tp_split1_concat2_dp2tp4", "ppermute_partial_shift_dp_dp8"),
    *("mlp_sequence_parallel_dp2tp4", "softmax_xent_vocab_parallel_dp2tp4", "fsdp_linear_dp2tp4"),
)


def test_as_jax_on_gloo() -> None:
    for each in on_ranks(8, lambda: [run(n, simulate=False) for n in ON_GLOO]):
        for name, (values, grads) in zip(ON_GLOO, each, strict=True):
            check(name, values, grads)


# ---- types


def to_pending(x: Tensor) -> Tensor:
    return sl.pending(x, "tp")


def branch(x: Tensor, w: Tensor) -> Tensor:
    return torch.where(x.sum() > 0, w * 2, w)


BODIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x": lambda x, w: x,
    "w": lambda x, w: w,
    "psum(x,'tp')": lambda x, w: sl.psum(x, "tp"),
    "psum(w,'tp')": lambda x, w: sl.psum(w, "tp"),
    "pmax(x,'tp')": lambda x, w: sl.pmax(x, "tp"),
    "all_gather(x,'tp')": lambda x, w: sl.all_gather("s d/tp -> s d", x),
    "psum_scatter(x,'tp')": lambda x, w: sl.psum_scatter("s e +tp -> s/tp e", x),
    "all_to_all(x,'tp')": lambda x, w: sl.all_to_all("s d/tp -> s/tp d", x),
    "ppermute(w,'tp')": lambda x, w: sl.ppermute(w, "tp", UP),
    "axis_index('tp')": lambda x, w: sl.axis_index("tp"),
    "to_pending(x)": lambda x, w: to_pending(x),
    "psum(to_pending(x),'tp')": lambda x, w: sl.psum(to_pending(x), "tp"),
    "psum_scatter(to_pending(x),'tp')": lambda x, w: sl.psum_scatter("s e +tp -> s/tp e", to_pending(x)),
    "2.0*to_pending(x)": lambda x, w: 2.0 * to_pending(x),
    "w*to_pending(x)": lambda x, w: w * to_pending(x),
    "to_pending(x)+w": lambda x, w: to_pending(x) + w,
    "to_pending(x)+x": lambda x, w: to_pending(x) + x,
    "tanh(to_pending(x))": lambda x, w: to_pending(x).tanh(),
    "-to_pending(x)": lambda x, w: -to_pending(x),
    "sum(to_pending(x))": lambda x, w: to_pending(x).sum(),
    "all_gather(to_pending(x),'tp')": lambda x, w: sl.all_gather("s d/tp -> s d", to_pending(x)),
    "ppermute(to_pending(x),'tp')": lambda x, w: sl.ppermute(to_pending(x), "tp", UP),
    "pmax(to_pending(x),'tp')": lambda x, w: sl.pmax(to_pending(x), "tp"),
    "psum(x,'nope')": lambda x, w: sl.psum(x, "nope"),
    "psum(psum(x,'tp'),'tp')": lambda x, w: sl.psum(sl.psum(x, "tp"), "tp"),
    "scan: carry made varying first": lambda x, w: sl.scan(lambda c, r: (c + r, None), sl.pvary(w, "tp"), x)[0],
    "cond on varying predicate, invariant branches": branch,
    "cond branches: one varying, one invariant": lambda x, w: torch.where(w.sum() > 0, x[0], w),
    "where(x>0, w, 0)": lambda x, w: torch.where(x > 0, w, 0.0),
    "grad of psum(sum(x*w)) w.r.t. to_varying(w)": lambda x, w: torch.func.grad(lambda v: sl.psum((x * v).sum(), "tp"))(
        sl.pvary(w, "tp")
    ),
}
HERE = {  # where we differ on purpose: golden/README.md
    "psum(w,'tp')": None,
    "psum(psum(x,'tp'),'tp')": None,
    "all_gather(x,'tp')": "replicated",
    "2.0*to_pending(x)": "pending",
    "w*to_pending(x)": "pending",
    "-to_pending(x)": "pending",
    "cond on varying predicate, invariant branches": "varying",
    "cond branches: one varying, one invariant": "varying",
}
NO_SUCH_THING = {"to_varying(x)"}  # sl.pvary takes a varying value as it is


def types_over_tp(body: Callable[[Tensor, Tensor], Tensor], out_specs: Any) -> tuple[str, list[int], Any]:
    """The type and the local shape of what the body gives, and the result."""
    found: list[Any] = []

    def noting(x: Tensor, w: Tensor) -> Tensor:
        y = body(x, w)
        found[:] = [region().over(y, "tp"), list(y.shape)]
        return y if out_specs is not None else w

    with sl.make_mesh(dp=2, tp=4, simulate=True):
        x = sl.shard(torch.arange(64.0, dtype=torch.float64).view(8, 8), "s d/tp")
        w = sl.shard(torch.tensor([3.0, 5.0], dtype=torch.float64), "two")
        result = sl.shard_map(noting, in_specs=None, out_specs=out_specs or "two")(x, w)
    return {"I": "invariant", "R": "replicated", "V": "varying", "P": "pending"}[found[0]], found[1], result


@pytest.mark.parametrize("rule", [r for r in RULES["programs"] if r[0] not in NO_SUCH_THING], ids=lambda r: r[0])
def test_type_as_jax(rule: list[Any]) -> None:
    program, accepted, kind, shape = rule
    wanted = HERE.get(program, kind if accepted else None)
    if wanted is None:
        with pytest.raises((sl.SpecError, sl.MeshError)):
            types_over_tp(BODIES[program], None)
        return
    found, local, _ = types_over_tp(BODIES[program], None)
    assert found == wanted
    assert shape is None or local == shape


OUT: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "return x with out spec '' (drops tp)": (lambda x, w: x, "s d"),
    "return all_gather(x) with an out spec that drops tp": (lambda x, w: sl.all_gather("s d/tp -> s d", x), "s d"),
    "return psum(x) with out spec ''": (lambda x, w: sl.psum(x, "tp"), "s d"),
    "return invariant w with out spec d/tp": (lambda x, w: w, "d/tp"),
    "return axis_index with out spec ''": (lambda x, w: sl.axis_index("tp"), ""),
    "return x with out spec +tp (implicit cast)": (lambda x, w: x, "s d +tp"),
    "return invariant w with out spec +tp": (lambda x, w: w, "d +tp"),
    "return to_pending(x) with out spec without +tp": (lambda x, w: to_pending(x), "s d"),
}


@pytest.mark.parametrize("rule", RULES["out_specs"], ids=lambda r: r[0])
def test_borders_as_jax(rule: list[Any]) -> None:
    program, accepted, shape = rule
    body, spec = OUT[program]
    if not accepted:
        with pytest.raises(sl.SpecError):
            types_over_tp(body, spec)
        return
    assert list(types_over_tp(body, spec)[2].shape) == shape
