"""`as_text`: a program as a listing."""

import ast
import re
from typing import Any

import torch
from torch import Tensor

import shardlib as sl


def loss(params: Any, batch: Tensor) -> sl.Mean:
    w = sl.gather(params, "dp")
    h = torch.tanh(batch @ w["first"]["w"])
    return sl.Mean.of("batch/dp n", h @ w["last"])


def lowered(accumulate: int, passes: Any = sl.passes.default) -> Any:
    with sl.make_mesh(dp=2, simulate=True):
        params = {"first": {"w": sl.shard(torch.ones(6, 4), "m/dp h")}, "last": sl.shard(torch.ones(4, 2), "h/dp n")}
        step = sl.step(loss, sl.optim.sgd(0.1), accumulate=accumulate)
        state, batch = step.init(params), sl.shard(torch.ones(12, 6), "batch/dp m")
        return sl.jit(step, donate_argnums=0, passes=passes).lower(state, batch)


def test_a_listing_is_python_with_a_line_for_each_node():
    for accumulate, passes in ((1, []), (3, sl.passes.default), (2, [*sl.passes.default, sl.passes.check_finite])):
        program = lowered(accumulate, passes)
        functions = {f.name: f for f in ast.parse(program.as_text()).body if isinstance(f, ast.FunctionDef)}
        assert list(functions) == list(reversed(program.program))
        for name, module in program.program.items():
            f = functions[name]
            nodes = [n for n in module.graph.nodes if n.op not in ("placeholder", "output")]
            assert len(f.body) == len(nodes) + 1 and isinstance(f.body[-1], ast.Return)
            inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
            names = [a.arg for a in f.args.args]
            assert len(names) == len(set(names)) == len(inputs)
            used = {n.id for n in ast.walk(f) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
            made = {n.id for n in ast.walk(f) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            assert {n.name for n in nodes if n.users} <= made and {*names} & used
            assert max(map(len, program.as_text().splitlines())) < 1000


def test_what_lines_say():
    text = lowered(1).as_text()
    assert "    params_first_w,  # f32[3, 4] 0.params.first.w donated\n" in text
    sent = r"all_gather\(pack_default\)  # f32\[32\] over dp: 0.params.first.w, 0.params.last, 64 B sent\n"
    assert re.search(sent, text)
    assert re.search(r" = unpack\w*\[0\]  # f32\[2, 3, 4\] of params_first_w\n", text)
    assert re.search(r"    # forward, test_listing.py:\d+: h = torch.tanh\(batch @ w\[\"first\"\]\[\"w\"\]\)\n", text)
    assert re.search(r"    # backward, test_listing.py:\d+: return sl.Mean.of", text)
    assert re.search(r"psum_scatter\(.*over dp: the gradient of \w", text)
    assert re.search(r"        \w+,  # 0.params.last\n", text) and "_c10d" not in text and "dp=2" not in text


def test_calls_are_calls():
    text = lowered(3).as_text()
    assert text.startswith("# 3 times a step\ndef microbatch(\n") and text.count(" = microbatch(") == 3
    inner, outer = text.split("\n\n\n")
    assert "    params_first_w,  # f32[3, 4]" in inner and outer.startswith("def step(")
