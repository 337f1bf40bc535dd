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
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import gpu
from benchmarks import kernels as compiler
from benchmarks.kernel_checks import (
    DTYPES,
    EPS,
    SHAPES,
    assert_rounded_once,
    buffers,
    check_bad_logits,
    check_first_update,
    check_scores,
    check_several,
    check_triton,
    check_triton_adamw,
    check_triton_scores,
    check_triton_threefry,
    in_float64,
    operands,
    scored,
)
from shardlib.kernels import adamw, cross_entropy
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_adamw_is_the_same_wherever_an_element_lies(dtype):
    """In leaves of any length, at any place in them, written in place or not."""
    *operands, rate, count, b1, b2, eps, decay = buffers((100,), dtype)
    for op in (adamw.adamw, adamw.adamw_):
        whole = [x.clone() for x in operands]
        update = op(*whole, rate, count, b1, b2, eps, decay)
        for n in range(1, 36):
            for at in (0, 3, 64 - n):
                part = [x[at : at + n].clone() for x in operands]
                found = op(*part, rate, count, b1, b2, eps, decay)
                for x, y in zip(found or part, update or whole, strict=True):
                    assert torch.equal(x, y[at : at + n]), (n, at)


SCORES = cross_entropy.token_scores, cross_entropy.token_scores_backward, cross_entropy.token_scores_backward_


@pytest.mark.parametrize("chunk", [cross_entropy.CHUNK, 200, 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores_on_the_cpu(shape, dtype, chunk, monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK", chunk)
    check_scores(SCORES, shape, dtype, "cpu")
    dpicked, dlse, logits, at = scored(shape, dtype)
    plain = cross_entropy.reference(logits, at)
    torch.testing.assert_close(cross_entropy.token_scores(logits, at), plain)
    pulled = cross_entropy.reference_backward(dpicked, dlse, logits, at, plain[1])
    torch.testing.assert_close(cross_entropy.token_scores_backward(dpicked, dlse, logits, at, plain[1]), pulled)


def test_scores_of_any_strides():
    dpicked, dlse, logits, at = scored((4, 6), torch.float64)
    for turned in (logits.T.contiguous().T, torch.cat((logits, logits), 1)[:, :6]):
        assert not turned.is_contiguous()
        picked, lse = cross_entropy.token_scores(turned, at)
        assert torch.equal(picked, cross_entropy.token_scores(logits, at)[0])
        wanted = cross_entropy.token_scores_backward(dpicked, dlse, logits, at, lse)
        assert torch.equal(cross_entropy.token_scores_backward(dpicked, dlse, turned, at, lse), wanted)
        cross_entropy.token_scores_backward_(dpicked, dlse, turned, at, lse)
        assert torch.equal(turned, wanted)


def test_scores_beyond_the_row_and_of_what_is_no_number():
    _, _, logits, at = scored((5, 37), torch.float32)
    logits[1, 3], logits[3, 2] = torch.nan, torch.inf
    picked, lse = cross_entropy.token_scores(logits, at)
    dlogits = cross_entropy.token_scores_backward(torch.ones_like(lse), torch.ones_like(lse), logits, at, lse)
    nan = [False, True, False, True, False]
    assert lse.isnan().tolist() == dlogits.isnan().all(-1).tolist() == nan
    assert picked[1:].isnan().tolist() == nan[1:] and picked[0] == 0
    at[0] = 37
    with pytest.raises(IndexError, match="Target 37 is out of bounds"):
        cross_entropy.token_scores(logits, at)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_on_the_cpu_take_little_memory(dtype, monkeypatch):
    """No tensor is made but for the results, a chunk of rows in float32, and numbers per row."""
    monkeypatch.setattr(cross_entropy, "CHUNK", 4000)
    dpicked, dlse, logits, at = scored((50, 1000), dtype)
    lse, out, made = cross_entropy.reference(logits, at)[1], torch.empty_like(logits), dict[int, int]()
    known = {x.untyped_storage().data_ptr() for x in (logits, out)}

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            for x in found if isinstance(found, (list, tuple)) else (found,):
                if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
                    made[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return found

    with Sizes():
        cross_entropy._scores(logits, at)
        cross_entropy._pull(dpicked, dlse, logits, at, lse, out)
    assert 50 * 4 in made.values() and max(made.values()) <= 4000 * 4


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
        dpicked, dlse, logits, at = scored(shape, dtype)
        lse = cross_entropy.token_scores(logits, at)[1]
        torch.library.opcheck(SCORES[0], (logits, at), test_utils=checks)
        for op in SCORES[1:]:
            torch.library.opcheck(op, (dpicked, dlse, logits, at, lse), test_utils=checks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_update_of_several_leaves_is_that_of_each(dtype):
    check_several(adamw.adamw_, adamw.adamw_all_, dtype, "cpu")


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
    program = "from benchmarks.kernel_checks import SHAPES, check; check('cpu', [s for s in SHAPES if s != (4, 128)])"
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
    check_triton_scores(shape, dtype, "cuda")


@pytest.mark.gpu
def test_first_update_bad_logits_and_randomness_on_a_gpu():
    check_first_update("cuda")
    check_bad_logits("cuda")
    check_triton_threefry("cuda")


@needs_triton
def test_bodies_compile_ahead_of_time_and_spill_nothing(tmp_path):
    """For sm_80 and sm_90, without a GPU; in a process of its own, where bodies are not interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "benchmarks.kernels", "--quick", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [r["kernel"] for r in rows] == [c.name for c in compiler.cases()]
    assert {r["target"] for r in rows} == {f"sm_{t}" for t in compiler.TARGETS}
    assert {r["kernel"].split()[0] for r in rows} == {
        *("rms_norm", "rms_norm_backward", "adamw", "adamw_", "adamw_all_"),
        *("token_scores", "token_scores_backward", "threefry"),
    }
    assert not [r for r in rows if r["spilled"] or not 0 < r["registers"] <= 255]


def test_gpu_benchmark_runs_on_the_cpu():
    """All of `make gpu` but the GPU, at sizes of nothing; its last line is JSON."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert gpu.main(["--device", "cpu", "--tiny", "--json"]) == 0
    lines = said.getvalue().splitlines()
    rows = json.loads(lines[-1])["rows"]
    assert len(lines) == len(rows) + 3 and all(line.count("|") == len(gpu.COLUMNS) + 1 for line in lines[:-1])
    kernels = {"rms_norm", "rms_norm_backward", "adamw_", "token_scores", "token_scores_backward_"}
    assert {r["what"] for r in rows} == {*kernels, "train step, graph"}
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
