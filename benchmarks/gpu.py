"""What a GPU makes of the library, in minutes: kernels against float64, then their bandwidth beside torch's own ops and
compiled ones, then the train step of examples/gpt.py in bfloat16, as generated code, as a CUDA graph and compiled.

    make gpu
    python -m benchmarks.gpu [--json] [--device cpu --tiny]

Prints one table. GB/s count every operand and result once. TFLOP/s of a step are those of the model: 6 per weight and
token, and causal attention; what remat computes again counts for nothing. The share is of what the maker states for
dense bfloat16 and for memory. Exit status 2 without a GPU.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import shardlib as sl
from benchmarks import kernel_checks
from shardlib import tree
from shardlib.kernels import adamw, cross_entropy, rms_norm

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import gpt

EPS = 1e-6
PEAKS = {  # bytes/s, dense bfloat16 flop/s: from the data sheets of the SXM boards
    "H200": (4.8e12, 989e12),
    "H100": (3.35e12, 989e12),
    "A100": (2.04e12, 312e12),
}
SIZES = dict(vocab=32768, layers=8, model=2048, heads=16)
COLUMNS = "what size dtype unit shardlib torch compiled share".split()
Row = dict[str, Any]


def peaks(device: str) -> tuple[float | None, float | None]:
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return next((v for k, v in PEAKS.items() if k in name), (None, None))


def seconds(run: Callable[[], Any], device: str, rounds: int) -> float:
    """The median time of a call whose operands are not in the cache."""
    times = []
    if device != "cuda":
        for _ in range(rounds):
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        return statistics.median(times)
    other = torch.empty(256 << 20, dtype=torch.uint8, device=device)  # more than any cache
    for _ in range(rounds + 3):
        other.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[3:])


def tried(make: Callable[[], Callable[[], Any]], device: str, rounds: int) -> float | None:
    """The time of what `make` gives; None, with the reason on stderr, where torch cannot do it here."""
    try:
        run = make()
        run()
        return seconds(run, device, rounds)
    except Exception as e:
        print(f"left out: {e!r:.200}", file=sys.stderr)
        return None


def compiled(f: Callable[..., Any], tiny: bool) -> Any:
    return torch.compile(f, backend="eager" if tiny else "inductor", dynamic=False)


def norm_runs(rows: int, n: int, dtype: torch.dtype, device: str, tiny: bool) -> Iterator[tuple[str, int, list[Any]]]:
    """RMSNorm both ways: name, bytes moved, what makes ours, torch's, the compiled one."""
    x, dy = (torch.randn(rows, n, device=device).to(dtype) for _ in range(2))
    scale, once = torch.ones(n, device=device, dtype=dtype), x.numel() * x.element_size()

    def own(x: Tensor, scale: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], scale, EPS)

    def forward() -> Callable[[], Any]:
        f = compiled(own, tiny)
        return lambda: f(x, scale)

    def autograd() -> Callable[[], Any]:
        leaves = x.clone().requires_grad_(), scale.clone().requires_grad_()
        y = own(*leaves)
        return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)

    def backward(op: Callable[..., Any]) -> Callable[[], Any]:
        rstd = rms_norm.rms_norm(x, scale, EPS)[1]
        return lambda: op(dy, x, scale, rstd)

    yield (
        "rms_norm",
        2 * once,
        [lambda: lambda: rms_norm.rms_norm(x, scale, EPS), lambda: lambda: own(x, scale), forward],
    )
    formula = compiled(rms_norm.reference_backward, tiny)
    yield (
        "rms_norm_backward",
        3 * once,
        [lambda: backward(rms_norm.rms_norm_backward), autograd, lambda: backward(formula)],
    )


def adamw_runs(n: int, dtype: torch.dtype, device: str, tiny: bool) -> Iterator[tuple[str, int, list[Any]]]:
    """AdamW in place; moments are float32."""
    p, g = (torch.randn(n, device=device).to(dtype) for _ in range(2))
    m, v = (torch.zeros(n, device=device) for _ in range(2))
    lr, count = torch.tensor(1e-3, dtype=torch.float64, device=device), torch.ones((), dtype=torch.int64, device=device)
    options = lr, count, 0.9, 0.999, 1e-8, 0.1

    def own() -> None:
        words: dict[str, Any] = dict(beta1=0.9, beta2=0.999, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False)
        torch.ops.aten._fused_adamw_([p], [g], [m], [v], [], [count.float()], lr=1e-3, **words)

    def formula(*operands: Any) -> None:
        update, *moments = adamw.reference(*operands)
        for old, new in zip(operands[:4:2] + operands[3:4], (operands[0] + update, *moments), strict=True):
            old.copy_(new)

    def written() -> Callable[[], Any]:
        f = compiled(formula, tiny)
        return lambda: f(p, g, m, v, *options)

    yield (
        "adamw_",
        n * (3 * p.element_size() + 16),
        [lambda: lambda: adamw.adamw_(p, g, m, v, *options), lambda: own, written],
    )


def loss_runs(rows: int, n: int, dtype: torch.dtype, device: str, tiny: bool) -> Iterator[tuple[str, int, list[Any]]]:
    """Cross-entropy both ways; ours goes back in place, torch's and the compiled one into new memory."""
    x, at = torch.randn(rows, n, device=device).to(dtype), torch.arange(rows, device=device) % n
    once, gone = x.numel() * x.element_size(), x.clone()
    picked, lse = cross_entropy.token_scores(x, at)
    zero = torch.zeros_like(lse)

    def own(x: Tensor) -> Tensor:
        return F.cross_entropy(x, at, reduction="none")

    def forward() -> Callable[[], Any]:
        f = compiled(own, tiny)
        return lambda: f(x)

    def autograd(f: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
        leaf = x.clone().requires_grad_()
        y = f(leaf)
        return lambda: torch.autograd.grad(y, leaf, torch.ones_like(y), retain_graph=True)

    yield "token_scores", once, [lambda: lambda: cross_entropy.token_scores(x, at), lambda: lambda: own(x), forward]
    yield (
        "token_scores_backward_",
        2 * once,
        [
            lambda: lambda: cross_entropy.token_scores_backward_(picked, zero, gone, at, lse),
            lambda: autograd(own),
            lambda: autograd(compiled(own, tiny)),
        ],
    )


def kernel_rows(device: str, tiny: bool) -> Iterator[Row]:
    """Bandwidth of every kernel."""
    peak, rounds = peaks(device)[0], 2 if tiny else 30
    norms = [(3, 8)] if tiny else [(16384, 1024), (16384, 4096), (8192, 8192)]
    scores = [(3, 8)] if tiny else [(8192, 8192), (8192, 32768), (4096, 131072)]
    lengths = [37] if tiny else [1 << 20, 1 << 24, 1 << 27]
    for dtype in (torch.bfloat16, torch.float32):
        runs = [(f"{r} x {n}", norm_runs(r, n, dtype, device, tiny)) for r, n in norms]
        runs += [(f"{r} x {n}", loss_runs(r, n, dtype, device, tiny)) for r, n in scores]
        runs += [(str(n), adamw_runs(n, dtype, device, tiny)) for n in lengths]
        for size, found in runs:
            for name, count, makers in found:
                times = [tried(make, device, rounds) for make in makers]
                if times[0] is None:
                    raise RuntimeError(f"{name} does not run: see above")
                ours, *others = (None if t is None else count / t / 1e9 for t in times)
                share = ours * 1e9 / peak if peak and ours else None
                values = name, size, str(dtype).removeprefix("torch."), "GB/s", ours, *others, share
                yield dict(zip(COLUMNS, values, strict=True))


def flops_per_token(params: gpt.GPT, seq: int) -> float:
    """Of the forward and the backward pass: 6 per weight that is multiplied; causal attention."""
    blocks = params.blocks
    weights = sum(x.numel() for x in (blocks.w_qkv, blocks.w_o, blocks.w_in, blocks.w_out, params.head))
    layers, _, _, heads, head = blocks.w_qkv.shape
    return 6.0 * weights + 6.0 * layers * heads * head * seq


def step_row(device: str, tiny: bool, backend: str, losses: list[float]) -> Row:
    """The train step of the example on one device: model flop/s. `losses`: those of its steps, which every backend must
    give within 1 %, a CUDA graph within 0.01 % (it runs the kernels of `graph`); none yet: they are put there."""
    sizes = gpt.sizes(**(dict(vocab=32, layers=1, model=16, heads=2) if tiny else SIZES))
    rows, seq = (2, 8) if tiny else (8, 2048)
    optimizer = sl.optim.adamw(3e-4, b2=0.95, weight_decay=0.1, mask=sl.optim.matrices)
    step = sl.jit(sl.step(gpt.loss, optimizer, clip=1.0), donate_argnums=0, backend=backend)
    with sl.make_mesh(dp=1, tp=1) as mesh:
        state = step.init(sl.init(gpt.GPT, sizes=sizes, key=sl.random.key(0), dtype=torch.bfloat16))
        flops = flops_per_token(state.params, seq) * rows * seq
        tokens = torch.randint(sizes["vocab"], (rows, seq + 1), generator=torch.Generator().manual_seed(0))
        batch = sl.shard(gpt.Batch(tokens=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous()))
        held, times, found = [state], [], []
        del state
        for _ in range(3 if tiny else 13):
            began = time.perf_counter()
            new, metrics = step(held.pop(), batch)
            held.append(new)
            found.append(metrics["loss"].item())  # waits for the device
            times.append(time.perf_counter() - began)
        assert all(map(math.isfinite, found)) and mesh.device.type == device, (found, mesh.device)
        weights = sum(x.numel() for x in tree.leaves(held[0].params))
    losses.extend(found if not losses else ())
    close = all(
        math.isclose(a, b, rel_tol=1e-4 if backend == "cudagraph" else 1e-2) for a, b in zip(losses, found, strict=True)
    )
    assert close, f"{backend} gives other losses than the first backend: {found}, {losses}"
    rate, peak = flops / statistics.median(times[-10:]), peaks(device)[1]
    size = f"{weights / 1e6:.0f}M weights, {rows} x {seq} tokens, {1e3 * statistics.median(times[-10:]):.1f} ms"
    values = (
        f"train step, {backend}",
        size,
        "bfloat16",
        "TFLOP/s",
        rate / 1e12,
        None,
        None,
        rate / peak if peak else None,
    )
    return dict(zip(COLUMNS, values, strict=True))


def shown(row: Row) -> str:
    cells = [row[k] for k in COLUMNS]
    cells[-1] = "" if cells[-1] is None else f"{cells[-1]:.0%}"
    return "| " + " | ".join("" if c is None else f"{c:.4g}" if isinstance(c, float) else c for c in cells) + " |"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that everything runs")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.gpu: no CUDA device here (torch.cuda.is_available() is False)", file=sys.stderr)
        return 2
    checks = 0
    if args.device == "cuda":
        checks = kernel_checks.check("cuda", [*kernel_checks.SHAPES, (1000, 1024), (3, 5000)])
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {checks} checks of kernels passed\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    rows: list[Row] = []
    for row in kernel_rows(args.device, args.tiny):
        rows.append(row)
        print(shown(row), flush=True)
    losses: list[float] = []
    for backend in ("graph",) if args.tiny else ("graph", "cudagraph", "inductor"):
        rows.append(step_row(args.device, args.tiny, backend, losses))
        print(shown(rows[-1]), flush=True)
    if args.json:
        print(json.dumps(dict(device=args.device, torch=torch.__version__, checks=checks, rows=rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
