"""Kernels: the ops against their references and float64, the fakes, the wheel; where Triton is, the Triton bodies:
interpreted, compiled ahead of time, on a GPU."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks import kernels as compiler
from shardlib.kernels import adamw
from shardlib.kernels import rms_norm as kernel

ROOT = Path(__file__).parents[1]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(3, 5, 96), (4, 128), (1, 1), (0, 8), (7,)]
EPS = 1e-5


def operands(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """dy, x and scale."""
    make = torch.Generator().manual_seed(0)
    dy, x = (torch.randn(shape, generator=make, dtype=torch.float64).to(device, dtype) for _ in range(2))
    return dy, x, (torch.rand(shape[-1], generator=make, dtype=torch.float64) + 0.5).to(device, dtype)


def buffers(shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> tuple[Any, ...]:
    """p and g of a dtype, m and v, the rate, the count, and numbers that decay."""
    make = torch.Generator().manual_seed(1)
    p, g, m, v = (torch.randn(shape, generator=make, dtype=torch.float64).to(device) for _ in range(4))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rate, count = torch.tensor(0.02, dtype=torch.float64, device=device), torch.tensor(3, device=device)
    return p.to(dtype), g.to(dtype), m.to(wide), v.square().to(wide), rate, count, 0.8, 0.95, 1e-6, 0.1


def in_float64(dy: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx and dscale by torch's own RMSNorm and autograd."""
    x, scale = x.double().requires_grad_(), scale.double().requires_grad_()
    y = F.rms_norm(x, x.shape[-1:], scale, EPS)
    dx, dscale = torch.autograd.grad(y, (x, scale), dy.double())
    return y.detach(), dx, dscale


def assert_rounded_once(got: Tensor, exact: Tensor) -> None:
    """As close to the exact value as its dtype can be, but for the last bits of the computation in float32."""
    unit = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), exact, rtol=unit, atol=16 * min(unit, 1.2e-7))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cpu_op_equals_reference_and_float64(shape, dtype):
    dy, x, scale = operands(shape, dtype)
    y, rstd = torch.ops.shardlib.rms_norm(x, scale, EPS)
    dx, dscale = torch.ops.shardlib.rms_norm_backward(dy, x, scale, rstd)
    assert rstd.dtype == kernel.compute_dtype(x) and rstd.shape == shape[:-1]
    plain = (*kernel.reference(x, scale, EPS), *kernel.reference_backward(dy, x, scale, rstd))
    for got, said in zip((y, rstd, dx, dscale), plain, strict=True):
        assert_rounded_once(got, said.double())
    for got, exact in zip((y, dx, dscale), in_float64(dy, x, scale), strict=True):
        assert got.dtype == dtype
        assert_rounded_once(got, exact)


def test_transposed_operands():
    dy, x, scale = operands((6, 4), torch.float64)
    dy, x, scale = dy.T, x.T, operands((1, 6), torch.float64)[2]
    y, rstd = kernel.rms_norm(x, scale, EPS)
    dx, dscale = kernel.rms_norm_backward(dy, x, scale, rstd)
    for got, exact in zip((y, dx, dscale), in_float64(dy, x, scale), strict=True):
        assert_rounded_once(got, exact)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_registration(shape):
    """torch's own checks: the schema is true, the fakes agree with the ops in shape, dtype and stride."""
    for dtype in (torch.float64, torch.bfloat16):
        dy, x, scale = operands(shape, dtype)
        rstd = kernel.rms_norm(x, scale, EPS)[1]
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(kernel.rms_norm, (x, scale, EPS), test_utils=checks)
        torch.library.opcheck(kernel.rms_norm_backward, (dy, x, scale, rstd), test_utils=checks)
        for op in (adamw.adamw, adamw.adamw_):
            torch.library.opcheck(op, buffers(shape, dtype), test_utils=checks)


def test_trace_keeps_each_op_whole():
    def both(dy, x, scale):
        y, rstd = kernel.rms_norm(x, scale, EPS)
        return y, *kernel.rms_norm_backward(dy, x, scale, rstd)

    graph = make_fx(both, tracing_mode="fake")(*operands((4, 8), torch.float32)).graph
    ops = [str(node.target) for node in graph.nodes if node.op == "call_function" and "getitem" not in str(node.target)]
    assert ops == ["shardlib.rms_norm.default", "shardlib.rms_norm_backward.default"]


def check_triton(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    dy, x, scale = operands(shape, dtype, device)
    y, rstd = kernel.triton_forward(x, scale, EPS)
    dx, dscale = kernel.triton_backward(dy, x, scale, rstd)
    for got, exact in zip((y, dx, dscale), in_float64(dy, x, scale), strict=True):
        assert got.dtype == dtype
        assert_rounded_once(got, exact)


def check_triton_adamw(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    p, g, m, v, *options = buffers(shape, dtype, device)
    update, *moments = adamw.triton_adamw(p, g, m, v, *options)
    exact = adamw.reference(*(x.double() for x in (p, g, m, v)), *options)
    rtol = 1e-13 if dtype == torch.float64 else 2e-6
    for got, wanted in zip((update, *moments), exact, strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=rtol, atol=rtol / 10)
    new = (p.to(m.dtype) + update).to(dtype)
    adamw.triton_adamw_(p, g, m, v, *options)
    torch.testing.assert_close(p, new, rtol=torch.finfo(dtype).eps, atol=1e-8)
    assert torch.equal(m, moments[0]) and torch.equal(v, moments[1])


def check_first_update(device: str) -> None:
    """Where b is 0 its power is 0, and m and v are those of the gradient alone."""
    p, g, m, v, rate, *_ = buffers((5,), torch.float32, device)
    count = torch.ones((), dtype=torch.int64, device=device)
    got = adamw.triton_adamw(p, g, m, v, rate, count, 0.0, 0.0, 0.0, 0.0)
    torch.testing.assert_close(got, (-0.02 * g.sign(), g, g * g), rtol=1e-6, atol=0)


needs_triton = pytest.mark.skipif(not hasattr(kernel, "triton_forward"), reason="Triton is not installed")


@needs_triton
def test_triton_in_its_interpreter():
    """In a process of its own: Triton reads TRITON_INTERPRET where a body is decorated."""
    checks = "t.check_triton(s, d, 'cpu'), t.check_triton_adamw(s, d, 'cpu')"
    program = f"import test_kernels as t; [({checks}) for s in t.SHAPES for d in t.DTYPES]; t.check_first_update('cpu')"
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (1000, 1024), (3, 5000)], ids=str)
def test_triton_on_a_gpu(shape, dtype):
    check_triton(shape, dtype, "cuda")
    check_triton_adamw(shape, dtype, "cuda")


@pytest.mark.gpu
def test_first_update_on_a_gpu():
    check_first_update("cuda")


@needs_triton
def test_bodies_compile_ahead_of_time_and_spill_nothing(tmp_path):
    """For sm_80 and sm_90, without a GPU; in a process of its own, where bodies are not interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "benchmarks.kernels", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert {(r["kernel"], r["target"]) for r in rows} == {
        (c.name, f"sm_{t}") for c in compiler.cases() for t in compiler.TARGETS
    }
    assert {r["kernel"].split()[0] for r in rows} == {"rms_norm", "rms_norm_backward", "adamw", "adamw_"}
    assert not [r for r in rows if r["spilled"] or not 0 < r["registers"] <= 255]


def test_wheel_holds_the_kernels(tmp_path):
    """The symbolic link shardlib/kernels becomes real files in the wheel, and no package `kernels` comes of it."""
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    for folder in ("shardlib", "kernels"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / file, source)
    build = [sys.executable, "-m", "pip", "wheel", source, "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", wheels], check=True, capture_output=True)
    names = zipfile.ZipFile(next(wheels.iterdir())).namelist()
    assert "shardlib/kernels/rms_norm.py" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"shardlib"}
