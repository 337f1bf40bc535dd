"""Programs as text: what can be written, and that a text names ops and values only."""

import json
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

import shardlib as sl
from shardlib.graph.stored import Unstorable, lines, program, text, value

MESH = sl.make_mesh(dp=2, simulate=True)


def module_of(target: Any, *args: Any) -> GraphModule:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output([graph.call_function(target, (x, *args))])
    return GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize(
    "x",
    [1, -0.0, float("inf"), True, None, "a", [1, (2, [3])], torch.float16, torch.strided, torch.channels_last,
     torch.device("cpu"), torch.device("cuda", 1), slice(1, None, 2)],
)  # fmt: skip
def test_values(x):
    said = json.loads(json.dumps(text(x, MESH)))
    assert repr(value(said, MESH)) == repr(x)


def test_the_device_of_the_mesh_is_a_word():
    assert text(MESH.device, MESH) == {"device": "mesh"}


def test_infinities_constants_and_views_come_back():
    module = module_of(torch.ops.aten.clamp.default, float("-inf"), 2.5)
    assert program(list(lines(module, MESH)), MESH)(torch.tensor([3.0, -1.0]))[0].tolist() == [2.5, -1.0]


def test_what_has_no_text():
    with pytest.raises(Unstorable, match="a call of 'sin', which is no op that torch knows by name"):
        list(lines(module_of(torch.sin), MESH))
    with pytest.raises(Unstorable, match="a complex, which has no text"):
        list(lines(module_of(torch.ops.aten.sin.default, 1j), MESH))


def changed(at: int, to: Any) -> list[str]:
    """The text of a program with something else in its call."""
    said = list(lines(module_of(torch.ops.aten.mul.Tensor, 2), MESH))
    call = json.loads(said[2])
    call[at] = to
    return [*said[:2], json.dumps(call), *said[3:]]


@pytest.mark.parametrize(
    ("at", "to"),
    [
        (2, "os::system"),
        (2, "aten::from_file"),
        (2, "aten::__class__"),
        (2, "os.system"),
        (1, "x = __import__('os')"),
        (4, {"a=print(1)": 1}),
        (3, [{"dtype": "load"}]),
        (3, [{"call": "print"}]),
    ],
)
def test_a_text_names_ops_and_values_only(at, to):
    with pytest.raises(Unstorable):
        program(changed(at, to), MESH)


def test_lines_of_code_that_would_end_a_comment_are_dropped():
    good, bad = 'File "m.py", line 3\n  x', 'File "m.py\rprint(1)", line 3'
    for said, kept in ((good, good), (bad, None)):
        made = program(changed(6, {"stack_trace": said}), MESH)
        assert [n.stack_trace for n in made.graph.nodes if n.op == "call_function"] == [kept]
