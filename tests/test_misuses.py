"""Forty mistakes: each raises before anything is sent, and says what, where and how to mend it."""

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl

EAGER, JIT = sys.modules["shardlib.shard_map"], sys.modules["shardlib.jit"]  # sl.jit is the function
SGD = sl.optim.sgd(0.1)
X, W, V = torch.ones(4, 6), torch.ones(6, 8), torch.ones(8, 6)
SPECS = {"w": "model hidden/tp", "v": "hidden/tp model", "s": "model"}
PARAMS = {"w": W, "v": V, "s": torch.ones(6)}


def hidden(w: Any, x: Tensor) -> Tensor:
    return sl.einsum("batch/dp model, model hidden/tp -> batch/dp hidden/tp", x, w["w"])


def terms(w: Any, x: Tensor) -> Tensor:
    """The second product, whose sum over tp is still to be made."""
    return sl.einsum("batch/dp hidden/tp, hidden/tp model -> batch/dp model +tp", hidden(w, x), w["v"])


def mean(x: Tensor) -> sl.Mean:
    return sl.Mean.of("batch/dp model", x)


def summed(x: Tensor) -> Tensor:
    return sl.psum("batch/dp model +tp -> batch/dp model", x)


def losing(f: Callable[[Any, Tensor], Any], **options: Any) -> Callable[[], Any]:
    """A step of the loss `f(params, x)`."""

    def run() -> Any:
        step = sl.step(lambda w, b: f(w, b["x"]), SGD, **options)
        return step(step.init(sl.shard(PARAMS, SPECS)), sl.shard({"x": X}, "batch/dp model"))

    return run


def mapped(f: Callable[..., Any], *args: tuple[Tensor, str], out: Any = None) -> Callable[[], Any]:
    return lambda: sl.shard_map(f, in_specs=None, out_specs=out)(*(sl.shard(x, s) for x, s in args))


def donated() -> Any:
    step = sl.jit(sl.step(lambda w, b: mean(summed(terms(w, b["x"]))), SGD), donate_argnums=0)
    state = step.init(sl.shard(PARAMS, SPECS))
    state.params["w"].donate()
    return step(state, sl.shard({"x": X}, "batch/dp model"))


MISUSES: dict[str, tuple[Callable[[], Any], str]] = {
    # specs and patterns
    "a spec that cannot be read": (lambda: sl.shard(X, "batch//dp model"), r"spec:.*batch//dp model\n +\^"),
    "an axis that the mesh does not have": (lambda: sl.shard(X, "batch/ddp model"), "no axis `ddp` .did you mean `dp`"),
    "too few names": (
        lambda: sl.shard(X, "batch/dp"),
        r"names 1 dimension, the tensor has 2: \(4, 6\)\n.*\^ one name for each",
    ),
    "one axis twice": (
        lambda: sl.shard(X, "batch/dp model/dp"),
        r"axis `dp` splits two dimensions, `batch` and `model`\n.*\^ one axis can split one",
    ),
    "no arrow": (
        mapped(lambda x: sl.psum("batch/dp model +tp", x), (X, "batch/dp model")),
        r"this one has no `->`\n.*\n +\^ write `-> batch/dp model`",
    ),
    "another name for a split": (
        mapped(lambda x: sl.einsum("batch model/dp -> batch model/dp", x), (X, "batch/dp model")),
        r"holds 2 of its 4: the value is a piece of `batch/dp model`\n.*\^ write `batch/dp`; all_to_all moves a split",
    ),
    "operands of two sizes": (
        mapped(lambda x, w: sl.einsum("b m, m h -> b h", x, w), (X, "p q"), (V, "r s")),
        r"`m` is 8 in this operand, of shape \(8, 6\), and 6 elsewhere in this pattern",
    ),
    "a group that does not divide": (
        mapped(lambda x: sl.rearrange("b (h d)/tp -> b h/tp d", x, d=4), (X, "batch model/tp")),
        r"is 6 in all, 3 on each of the 2 ranks of tp, and 3 does not divide by d=4\n.*or make it a multiple of 8\n",
    ),
    "a collective in the middle of a chain": (
        mapped(lambda x: sl.all_gather("n/dp/tp m -> n/tp m", x), (X, "n/dp/tp m")),
        r"cut over dp, then over tp; .*can make `n/dp` or `n`; sl.reshard\(x, 'n/tp m'\).*\n  at .*test_misuses.py:\d+",
    ),
    # sums
    "the sum is not written": (
        losing(
            lambda w, x: mean(sl.einsum("batch/dp hidden/tp, hidden/tp model -> batch/dp model", hidden(w, x), w["v"]))
        ),
        "contracts `hidden`, split over `tp`, .*write `.tp` here",
    ),
    "the sum is not made": (
        losing(lambda w, x: mean(F.gelu(terms(w, x)))),
        "gelu of a value that still waits for a sum over `tp`",
    ),
    "the sum is made twice": (
        losing(lambda w, x: mean(summed(summed(terms(w, x))))),
        "but none waits: .*it has been made already",
    ),
    "a sum of what is equal": (
        losing(lambda w, x: mean(x * sl.psum(w["s"], "dp"))),
        r"leave the psum out; if 2 times .*sl.axis_size\('dp'\)",
    ),
    "a bias once per rank": (
        losing(lambda w, x: mean(summed(terms(w, x) + w["s"]))),
        r"would add the second once per rank.\n  Make the sum first: sl.psum\(a, 'tp'\) \+ b",
    ),
    "a product of two sums": (
        losing(lambda w, x: mean(summed(terms(w, x) * terms(w, x)))),
        "the product of two sums is not the sum of the products.*psum one of them over `tp` first",
    ),
    "divided by a sum": (losing(lambda w, x: mean(summed(x / terms(w, x)))), "psum the divisor over `tp`, then divide"),
    "a plain product over a split dimension": (
        losing(lambda w, x: mean((x @ w["w"]) @ w["v"])),
        r"its sizes are whole: probably terms of a sum, .*in mean\n  called from .*test_misuses.py:\d+, in <lambda>$",
    ),
    "a maximum over a split dimension": (
        mapped(lambda x: sl.reduce("batch model/tp -> batch", x, "max"), (X, "batch model/tp")),
        r"then over ranks: sl.pmax\(x.amax\(1\), 'tp'\)",
    ),
    # gathers
    "a gather forgotten that fits": (
        losing(lambda w, x: mean(sl.einsum("batch/dp model, model model2 -> batch/dp model2", x, w["w"])[:, :6])),
        r"holds 4 of its 8: .* `model hidden/tp`\n.*\^ write `model2/tp` wherever it stands, or sl.gather\(x, 'tp'\)",
    ),
    "a gather forgotten that does not": (
        mapped(lambda x, w: x @ w, (X, "batch model"), (W, "model/dp hidden"), out="batch hidden"),
        "must have same reduction dim.*this rank's piece of `model/dp hidden`.*sl.gather.x, 'dp'. first",
    ),
    "a gather of a computed value": (
        losing(lambda w, x: mean(sl.gather(w["s"] * 2, "tp") * x)),
        r"gather: f32\[6\] equal on all ranks is a computed value.*there is nothing to gather\n  at .*test_misuses.py",
    ),
    "a length that does not divide": (
        mapped(lambda x: x * 2, (torch.ones(5, 6), "batch/dp model"), out="batch/dp model"),
        "`batch` is 5, which does not divide over dp=2.*sl.gather it first, or make the size 6",
    ),
    # losses
    "a loss that varies": (
        losing(lambda w, x: (x * w["s"]).sum()),
        r"say how the ranks of `dp` combine.*sl.pmean\(total, 'dp'\)",
    ),
    "a loss that is no scalar": (losing(lambda w, x: x * w["s"]), r"one number, found a tensor of shape \(2, 6\)"),
    "a metric that varies": (
        losing(lambda w, x: (mean(x * w["s"]), sl.Aux({"m": x.sum()}))),
        r"metric `m` is .* varying over dp.*sl.pending\(m, 'dp'\)",
    ),
    "a weight of parameters": (
        losing(lambda w, x: sl.Mean.of("batch/dp model", x, w["s"])),
        r"depends on parameters \(`s`\).*sl.Mean.of\(spec, x \* s\)",
    ),
    # Python and torch
    "a Python decision": (
        losing(lambda w, x: mean(x * w["s"]) if x.sum() > 0 else mean(x)),
        r"^if, bool\(\) or .item\(\) of a value .*ranks would go different ways",
    ),
    "torch's random numbers": (
        losing(lambda w, x: mean(F.dropout(x * w["s"]))),
        r"sl.dropout\('batch/dp model', x, key, 0.1\)",
    ),
    "a captured tensor": (losing(lambda w, x: mean(x * w["s"] + X[:2])), "has no type: .*Pass it as an argument"),
    "plain autograd": (
        losing(lambda w, x: mean(torch.autograd.grad((x * w["s"].requires_grad_()).sum(), x)[0])),
        r"plain autograd \(grad\) .* use sl.grad or torch.func.grad",
    ),
    "a write into an argument": (losing(lambda w, x: mean(x.mul_(2) * w["s"])), "writes in place into an argument"),
    "remat of a closure": (
        losing(lambda w, x: mean(sl.remat(lambda x: x * w["s"])(x))),
        "remat captured a value that is being differ",
    ),
    "numpy": (losing(lambda w, x: mean(torch.as_tensor(x.numpy()) * w["s"])), "numpy cannot follow"),
    # at rest
    "arithmetic on a leaf at rest": (lambda: sl.shard(X, "batch/dp model") + 1, "arrays take no arithmetic"),
    "a batch that is not sharded": (
        lambda: sl.shard_map(lambda x: x, in_specs="batch/dp model", out_specs="batch/dp model")(X),
        "sl.shard.x, 'batch/dp model'. first",
    ),
    "specs of another tree": (lambda: sl.shard(PARAMS, {"w": "m n", "v": "m n"}), "missing `s`"),
    "a mesh too large": (lambda: sl.make_mesh(dp=64), r"needs 64 rank\(s\), there is 1: start it with `torchrun"),
    "a donated state": (donated, "was donated to a jitted function and is gone"),
    "state of another mesh": (
        lambda: sl.shard_map(lambda x: x, in_specs=None, out_specs=None, mesh=sl.make_mesh(dp=4, simulate=True))(
            sl.shard(X, "b/dp m")
        ),
        r"it lies on .*dp=2.* the function has mesh=Mesh\(dp=4.*Leave mesh= out",
    ),
    "micro-batches that do not fit": (
        losing(lambda w, x: mean(x * w["s"]), accumulate=3),
        "accumulate=1 or 2, or a number .* multiple of 6",
    ),
    "a glob that matches nothing": (
        losing(lambda w, x: mean(x * w["s"]), trainable="lora.**"),
        "`lora...` matches no path",
    ),
    "another ZeRO stage": (lambda: sl.zero(SPECS, stage=4), "stage is 0, 1, 2 or 3"),
    "integers with gradients": (
        mapped(
            lambda n: sl.grad(lambda n: sl.pmean(n.sum().float(), "dp"))(n), (torch.ones(4, dtype=torch.int64), "b/dp")
        ),
        "^grad: argument 0 is torch.int64; only floating-point tensors have gradients.*argnums=",
    ),
}


class Sent(AssertionError):
    """The ranks were started, after which something may be sent."""


def started(*_: Any, **__: Any) -> None:
    raise Sent


@pytest.mark.parametrize("name", MISUSES)
def test_a_mistake_is_named_before_anything_is_sent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, said = MISUSES[name]
    step = sl.step

    def guarded(*args: Any, **options: Any) -> Any:
        """`step`, which may start ranks in `init` and not after."""
        made = step(*args, **options)
        init = made.init

        def first(*a: Any, **o: Any) -> Any:
            with monkeypatch.context() as free:
                free.setattr(EAGER, "run_threads", run_threads)
                return init(*a, **o)

        made.init = first
        return made

    run_threads = EAGER.run_threads
    monkeypatch.setattr(EAGER, "run_threads", started)
    monkeypatch.setattr(JIT, "run_lockstep", started)
    monkeypatch.setattr(sl, "step", guarded)
    with sl.make_mesh(dp=2, tp=2, simulate=True), pytest.raises(Exception) as error:
        program()
    assert not isinstance(error.value, Sent)
    notes = [re.sub(r"(, in \S+): .*", r"\1", note) for note in getattr(error.value, "__notes__", ())]
    assert re.search(f"(?s){said}", "\n".join([str(error.value), *notes]))  # lines of code may hold what is said


def test_there_are_forty() -> None:
    assert len(MISUSES) >= 40
