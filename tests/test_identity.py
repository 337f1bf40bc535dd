"""The digest of a function: what changes it, what does not, and what has none."""

import dataclasses
import enum
import functools
import math
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import einops
import pytest
import torch
from torch import Tensor

import shardlib as sl
from shardlib.identity import Unknown, identity


def made(text: str, name: str = "f", **given: Any) -> Any:
    """A function of a module of one's own, from its text."""
    module = types.ModuleType("of_a_user")
    vars(module).update(given)
    exec(compile(text, "of_a_user.py", "exec"), vars(module))
    return getattr(module, name)


HELPED = "import math, torch\ndef helper(x):\n    return x * {}\ndef f(x):\n    return {}\n"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (made(HELPED.format(2, "helper(x)")), made(HELPED.format(3, "helper(x)"))),
        (made(HELPED.format(2, "[helper(y) for y in x]")), made(HELPED.format(3, "[helper(y) for y in x]"))),
        (made(HELPED.format(2, "torch.sin(x)")), made(HELPED.format(2, "torch.cos(x)"))),
        (made(HELPED.format(2, "x * math.pi")), made(HELPED.format(2, "x * math.e"))),
        (made("def f(x, n=2):\n    return n * x"), made("def f(x, n=3):\n    return n * x")),
        (made("def f(x, *, n=2):\n    return n * x"), made("def f(x, *, n=3):\n    return n * x")),
        (made("def f(x):\n    return n * x", n=2.0), made("def f(x):\n    return n * x", n=2)),
        (made("def f(x):\n    return n * x", n=0.0), made("def f(x):\n    return n * x", n=-0.0)),
        (made("def f(x):\n    return x"), made("\ndef f(x):\n    return x")),  # traces know their lines
        (functools.partial(pow, 2), functools.partial(pow, 3)),
        (sl.optim.adamw(1e-3), sl.optim.adamw(1e-4)),
        (sl.optim.adamw(1e-3, mask="*.w"), sl.optim.adamw(1e-3, mask="*.b")),
        (sl.optim.sgd(lambda n: n * 2), sl.optim.sgd(lambda n: n * 3)),
        (sl.passes.default, sl.passes.default[1:]),
        (functools.partial(sl.passes.bucket, limit=1), functools.partial(sl.passes.bucket, limit=2)),
        (sl.zero({"w": "m/dp"}, stage=2), sl.zero({"w": "m/dp"}, stage=3)),
        ((1, (2,)), (1, 2)),
        ({1, 2}, {1, 3}),
        ([True], [1]),
    ],
)
def test_what_changes_it(one, other):
    assert identity(one) != identity(other)


class Scale:
    """An object with a method, a property and a base."""

    factor = 2

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.by * self.whole

    @functools.cached_property
    def whole(self) -> int:
        return self.factor


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Config:
    rate: float
    color: Color = Color.RED


def test_objects_count_by_class_and_state():
    a, b = Scale(2.0), Scale(2.0)
    assert identity(a) == identity(b)
    assert a.whole and identity(a) == identity(b)  # what is remembered is no state
    assert identity(a) != identity(Scale(3.0))
    assert identity(a.__call__) == identity(b.__call__) != identity(a)
    before = identity(a)
    Scale.factor = 3
    try:
        assert identity(a) != before
    finally:
        Scale.factor = 2
    assert identity(a) == before
    configs = [Config(0.1), Config(0.2), Config(0.1, Color.BLUE)]
    assert len({identity(c) for c in configs}) == 3 and identity(Config(0.1)) == identity(configs[0])


def test_what_is_made_by_a_library_counts_by_what_it_was_made_of(monkeypatch):
    def of(by: int) -> Any:
        made = dataclasses.make_dataclass("Made", ["x"], namespace={"scaled": lambda self: self.x * by})
        return made(1)

    assert identity(of(2)) == identity(of(2)) != identity(of(3))  # its module is said to be `types`
    text = "import contextlib\n@contextlib.contextmanager\ndef scaled(x):\n    yield x * {}\n"
    text += "def f(x):\n    with scaled(x) as y:\n        return y\n"
    two, three = made(text.format(2)), made(text.format(3))
    assert identity(two) == identity(made(text.format(2))) != identity(three)

    def used(x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x)

    before = identity(used)
    monkeypatch.setattr(torch.nn.functional, "silu", Scale(2.0))
    assert identity(used) != before


def loss(p: Any, batch: Tensor) -> sl.Mean:
    return sl.Mean.of("batch/dp n", Scale(2.0)(batch @ sl.gather(p["w"], "dp")))


def test_a_step_is_the_same_before_and_after_it_ran():
    step = sl.step(loss, sl.optim.adamw(0.1), clip=1.0)
    before = identity(step)
    with sl.make_mesh(dp=2, simulate=True):
        state = step.init(sl.shard({"w": torch.ones(4, 3)}, {"w": "m/dp n"}))
        step(state, sl.shard(torch.ones(4, 4), "batch/dp m"))
    assert identity(step) == before
    others = [sl.step(loss, sl.optim.adamw(0.2), clip=1.0), sl.step(loss, sl.optim.adamw(0.1), clip=2.0)]
    others += [sl.step(loss, sl.optim.adamw(0.1)), sl.step(lambda p, b: loss(p, b), sl.optim.adamw(0.1), clip=1.0)]
    assert len({before, *map(identity, others)}) == 5
    assert identity(sl.step(loss, sl.optim.adamw(0.1), clip=1.0)) == before


def recursive(n: int) -> Any:
    return recursive(n - 1) if n in {1, 2, 3, "a", None} else math.cos(n) + len([torch.nn.functional.gelu, einops])


def of_many() -> str:
    return identity([recursive, Config(0.1), Scale, loss, sl.step(loss, sl.optim.adamw(1.0))])


def test_it_is_the_same_in_every_process():
    """Also in one whose strings hash otherwise."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path}
    code = f"import {__name__} as t; print(t.of_many())"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{of_many()}\n"


def unknown(f: Any) -> str:
    with pytest.raises(Unknown) as e:
        identity(f, "`f`")
    return str(e.value)


TABLE = torch.ones(2)


def helper(x: Tensor) -> Tensor:
    return x * TABLE


def test_what_has_none():
    assert unknown(lambda x: helper(x)) == (
        "`TABLE` in `helper` in `f` is a tensor, whose values no key holds: pass it as an argument"
    )
    table = torch.ones(2)
    assert unknown(lambda x: x * table).startswith("`table` in `f` is a tensor, whose")
    clock = time.time
    mend = "pass what it gives as an argument"
    assert unknown(lambda x: x * time.time()) == f"what `time.time` (`time` in `f`) gives no key can know: {mend}"
    assert unknown(lambda x: x * clock()) == f"what `clock` in `f` (`time.time`) gives no key can know: {mend}"
    assert "what `os.environ` (`os` in `f`) gives" in unknown(lambda x: x * float(os.environ["A"]))
    assert "what `open` in `f` gives" in unknown(lambda x: open(x).read())  # noqa: SIM115
    assert "sl.axis_index gives the rank as a value" in unknown(lambda x: x * torch.distributed.get_rank())
    assert "is a torch.nn.modules.linear.Linear" in unknown(torch.nn.Linear(1, 1))
    assert "is a _thread.lock, whose state no key can hold" in unknown({"a": __import__("threading").Lock()})
    assert "`f` uses `not_there`, which is not defined yet" in unknown(made("def f(x):\n    return not_there(x)"))
    assert "is the module of_a_user, used as a value" in unknown(made("def f(x):\n    return m", m=module_of_a_user()))
    local = made("def f(x):\n    import ranks\n    return ranks.g(x)")
    assert "imports ranks in its body: import it at the top of the file" in unknown(local)


def module_of_a_user() -> types.ModuleType:
    return types.ModuleType("of_a_user")
