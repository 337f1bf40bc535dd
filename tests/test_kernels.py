"""Kernels: the ops against their references and float64, the fakes, the wheel; where Triton is, the Triton bodies:
interpreted, compiled ahead of time, on a GPU."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks import gpu
from benchmarks import kernels as compiler
from benchmarks.kernel_checks import (
    DTYPES,
    EPS,
    SHAPES,
    assert_rounded_once,
    buffers,
    check_first_update,
    check_triton,
    check_triton_adamw,
    in_float64,
    operands,
)
from shardlib.kernels import adamw
from shardlib.kernels import rms_norm as kernel

ROOT = Path(__file__).parents[1]


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


needs_triton = pytest.mark.skipif(not hasattr(kernel, "triton_forward"), reason="Triton is not installed")


@needs_triton
def test_triton_in_its_interpreter():
    """In a process of its own: Triton reads TRITON_INTERPRET where a body is decorated."""
    program = "from benchmarks.kernel_checks import check; check('cpu')"
    path = os.pathsep.join([str(ROOT), *sys.path])
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


def test_gpu_benchmark_runs_on_the_cpu():
    """All of `make gpu` but the GPU, at sizes of nothing; its last line is JSON."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert gpu.main(["--device", "cpu", "--tiny", "--json"]) == 0
    lines = said.getvalue().splitlines()
    rows = json.loads(lines[-1])["rows"]
    assert len(lines) == len(rows) + 3 and all(line.count("|") == len(gpu.COLUMNS) + 1 for line in lines[:-1])
    assert {r["what"] for r in rows} == {"rms_norm", "rms_norm_backward", "adamw_", "train step, graph"}
    assert all(r["shardlib"] > 0 for r in rows)
    assert all(r["torch"] and r["compiled"] for r in rows if r["unit"] == "GB/s" and r["dtype"] == "float32")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_benchmark_says_that_there_is_no_gpu(capsys):
    assert gpu.main([]) == 2
    assert capsys.readouterr().err == "benchmarks.gpu: no CUDA device here (torch.cuda.is_available() is False)\n"


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
