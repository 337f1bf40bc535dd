"""Tables of arrays, trees and layouts."""

import dataclasses
import re
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

import shardlib as sl
from shardlib.show import sent
from shardlib.spec import parse


def mesh(**axes: Any) -> sl.Mesh:
    return sl.make_mesh(axes, simulate=True)


def printed(capsys: pytest.CaptureFixture[str], *args: Any, **options: Any) -> list[list[str]]:
    """The cells of the table that `show` prints, row by row."""
    sl.show(*args, **options)
    lines = [line for line in capsys.readouterr().out.splitlines() if set(line) & set("│┃")]
    return [[cell.strip() for cell in line.replace("┃", "│").strip("│").split("│")] for line in lines]


def test_a_matrix_is_a_grid(capsys):
    x = sl.shard(torch.zeros(5, 8), "m/dp n/tp", mesh(dp=2, tp=2))
    assert printed(capsys, x) == [["", "0:4", "4:8"], ["0:3", "rank 0", "rank 1"], ["3:5", "rank 2", "rank 3"]]


def test_copies_and_vectors(capsys):
    m = mesh(dp=2, tp=2)
    assert printed(capsys, sl.shard(torch.zeros(5), "m/tp", m))[1:] == [["0:3", "ranks 0, 2"], ["3:5", "ranks 1, 3"]]
    assert printed(capsys, sl.shard(torch.zeros(()), "", m))[1:] == [["all", "ranks 0, 1, 2, 3"]]
    cube = printed(capsys, sl.shard(torch.zeros(2, 3, 4), "a b c/tp", m))
    assert cube[1:] == [["0:2, 0:3, 0:2", "ranks 0, 2"], ["0:2, 0:3, 2:4", "ranks 1, 3"]]
    many = printed(capsys, sl.shard(torch.zeros(2), "a", mesh(dp=16)))
    assert many[1] == ["0:2", "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 8 more"]


def test_a_tree_has_a_row_for_each_leaf(capsys):
    state = {"w": sl.shard(torch.zeros(6, 4), "m/dp n", mesh(dp=4)), "plain": torch.zeros(3), "n": 1}
    assert printed(capsys, state)[1:] == [
        ["n", "", "int", "", "", ""],
        ["plain", "(plain)", "f32[3]", "[3]", "12 B", "12 B"],
        ["w", "m/dp n", "f32[6, 4]", "[2, 4]", "96 B", "32 B"],
        ["all", "", "", "", "108 B", "44 B"],
    ]


SPECS = {"w": "m/dp n", "v": "n"}


@pytest.mark.parametrize("stage", range(4))
def test_a_layout_shows_what_each_arrow_sends(capsys, stage):
    params = sl.shard({"w": torch.zeros(8, 4), "v": torch.zeros(4)}, SPECS, mesh(dp=4))
    rows = {row[0]: row[2:] for row in printed(capsys, sl.zero(SPECS, stage=stage), params)}
    w = ["m/dp n" if cut else "m n" for cut in (stage > 2, stage > 2, stage > 1, stage > 0)]
    w[2] += " +dp" * (stage < 2)
    reduce = {2: "psum_scatter dp 96 B"}.get(stage, "")
    update = {0: "psum dp 192 B", 1: "psum_scatter dp 96 B"}.get(stage, "")
    leave = "all_gather dp 96 B" if 0 < stage < 3 else ""
    assert rows["w"] == [*w, "", reduce, update, leave]


def test_hybrid_layouts_and_axes(capsys):
    specs = {"w": "m/dp n"}
    m = mesh(dp=dict(node=2, gpu=4))
    hsdp = sl.zero(specs, "gpu", 1)
    with m:
        params = sl.abstract(lambda: sl.shard({"w": torch.zeros(16, 4)}, specs))
    row, more = printed(capsys, hsdp, params, axes="dp")[1:3]
    assert row[2:] == ["m n", "m n", "m n +gpu", "m/gpu n", "", "", "psum_scatter gpu 192 B", "all_gather gpu 192 B"]
    assert more[8] == "psum node 64 B"  # of the shard alone
    every = dataclasses.replace(hsdp, params=sl.split(specs, "gpu", "node"))
    row, more = printed(capsys, every, params, axes="dp")[1:3]
    assert row[6] == "all_gather node 32 B" and more[6] == "all_gather gpu 192 B"


@pytest.mark.parametrize(
    "src, dst", [("m/a/b n", "m n"), ("m/a n/b", "m n/a"), ("m n", "m/b n"), ("m n +a +b", "m/a n"), ("m/a n", "m n/a")]
)
def test_bytes_are_those_of_the_traced_program(src, dst):
    start, goal, m = parse(src), parse(dst), mesh(a=2, b=2)

    def body(x: Any) -> Any:
        return sl.pending(x * (1 + sl.axis_index(start.pending)), start.pending) if start.pending else x

    with m:
        x = sl.shard(torch.zeros(8, 6), start.without(start.pending))
        x = sl.shard_map(body, in_specs=None, out_specs=src)(x)
        found = [(c.axis, c.bytes) for c in sl.jit(lambda x: sl.reshard(x, dst)).lower(x).collectives()]
    assert found == [(",".join(move.axes), n) for move, n in sent(start, goal, (8, 6), 4, m) if n]


def test_a_notebook_gets_html_in_colour_that_is_not_cut(monkeypatch):
    shown = []
    display: Any = ModuleType("IPython.display")
    display.display = shown.append
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)

    def html(*args: Any) -> str:
        shown.clear()
        sl.show(*args)
        return "".join(x._repr_mimebundle_([], [])["text/html"] for x in shown)

    w = sl.shard(torch.arange(64.0).view(8, 8), "m/dp n/tp", mesh(dp=2, tp=4))
    said = html(w)
    assert "f32[8, 8] `m/dp n/tp` on dp=2,tp=4" in said
    colours = re.findall(r'<span style="color: (#\w+)[^>]*>rank (\d)</span>', said)
    assert [int(r) for _, r in colours] == list(range(8)) and len({c for c, _ in colours}) == 8
    wide = html(sl.zero({"w": "m/dp n/tp"}, stage=2), {"w": w})
    assert "psum_scatter dp 32 B" in wide and "all_gather dp 32 B" in wide and "…" not in wide
    assert "m/dp n/tp │ f32[8, 8] │ [4, 2] │ 256 B │ 32 B" in html({"a_longer_name": {"w": w}})


def test_refusals():
    with pytest.raises(sl.SpecError, match=r"show\(layout, params\): the arrays"):
        sl.show(sl.zero(SPECS))
    with pytest.raises(sl.SpecError, match="params are arrays"):
        sl.show(sl.zero(SPECS), {"w": torch.zeros(2)})
