"""What every Triton body compiles to, without a GPU: registers and spills on sm_80 and sm_90, for the usual sizes.

python -m benchmarks.kernels [--quick] [--json]
"""

import argparse
import json
import math
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

TARGETS = (80, 90)
WIDTHS = (1024, 4096, 8192)
VOCABULARIES = (1000, 32768)


class Case(NamedTuple):
    """A body and one way to call it: types of its operands, then its constants."""

    name: str
    body: Any
    operands: str
    constants: dict[str, Any]
    warps: int


def cases() -> Iterator[Case]:
    """Every body of `kernels/`, in bfloat16 with float32 inside; AdamW and cross-entropy in float32, too."""
    from shardlib.kernels import adamw, cross_entropy, rms_norm, threefry

    for n in WIDTHS:
        layout = rms_norm.blocks(n)
        warps, sizes = layout["num_warps"], dict(N=n, BLOCK=layout["BLOCK"])
        forward, backward = "*bf16 *bf16 *bf16 *fp32", "*bf16 *bf16 *bf16 *fp32 *bf16 *fp32 i32 i32"
        yield Case(f"rms_norm {n}", rms_norm.forward_body, forward, sizes | dict(EPS=1e-6), warps)
        yield Case(f"rms_norm_backward {n}", rms_norm.backward_body, backward, sizes | dict(TURNS=16), warps)
    for n in VOCABULARIES:
        layout = cross_entropy.blocks(n)
        sizes = dict(N=n, LOWEST=torch.finfo(torch.float32).min, BLOCK=layout["BLOCK"])
        for x in ("bf16", "fp32"):
            forward, backward = f"*{x} *i64 *fp32 *fp32", f"*fp32 *fp32 *{x} *i64 *fp32 *{x}"
            bodies = (("", cross_entropy.forward_body, forward), ("_backward", cross_entropy.backward_body, backward))
            for suffix, body, kinds in bodies:
                yield Case(f"token_scores{suffix} {n} {x}", body, kinds, sizes, layout["num_warps"])
    hyper = dict(B1=0.9, B2=0.999, LOG_B1=math.log(0.9), LOG_B2=math.log(0.999), EPS=1e-8, DECAY=0.1)
    for p, whole in (("fp32", False), ("fp32", True), ("bf16", True)):
        kinds = f"*{p} *{p} *fp32 *fp32 *fp64 *i64 *{p if whole else 'fp32'} *fp32 *fp32 i32"
        constants = hyper | dict(WHOLE=whole, BLOCK=adamw.BLOCK)
        yield Case(f"adamw{'_' * whole} {p}", adamw.body, kinds, constants, adamw.WARPS)
        if whole:
            several = f"*i64 *{p} *{p} *fp32 *fp64 *i64"
            yield Case(f"adamw_all_ {p}", adamw.body_all, several, constants, adamw.WARPS)
    for width, keep, keys in ((32, 23, False), (64, 52, False), (64, 64, True)):
        kinds = f"*i64 *i64 *{'i64' if width == 64 else 'i32'} i32"
        constants = dict(KEYS=keys, WIDTH=width, KEEP=keep, BLOCK=threefry.BLOCK)
        yield Case(f"threefry {width}{' keys' * keys}", threefry.body, kinds, constants, threefry.WARPS)


def compiled(case: Case, target: int) -> dict[str, int]:
    """Registers per thread, and bytes of them that spill to memory."""
    import triton  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    names, kinds = case.body.arg_names, case.operands.split()
    constants = {(names.index(k),): v for k, v in case.constants.items()}
    signature = dict(zip(names, kinds, strict=False)) | dict.fromkeys(case.constants, "constexpr")
    divisible = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(kinds) if kind[0] == "*"}
    source = ASTSource(case.body, signature, constants, divisible)
    options = dict(num_warps=case.warps, enable_fp_fusion=True)
    made = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    found = dict(re.findall(r"(REG|STACK):(\d+)", said))
    return dict(registers=int(found["REG"]), spilled=int(found["STACK"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="each case for one of the targets, in turn")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [
        dict(kernel=c.name, target=f"sm_{t}", **compiled(c, t))
        for i, c in enumerate(cases())
        for j, t in enumerate(TARGETS)
        if not args.quick or j == i % len(TARGETS)
    ]
    print("| kernel | target | registers | bytes spilled |\n|---|---|---:|---:|")
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
