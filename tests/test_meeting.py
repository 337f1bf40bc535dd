"""Before a program first runs on several processes, they compare what they call and what it sends."""

import contextlib
import io
import re
from functools import partial
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor

import shardlib as sl

WORDS = "batch/dp m"


def raised(f: Any) -> str:
    """What a call raises; nothing where it raises nothing."""
    try:
        f()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return ""


def summed(name: str = "total") -> Any:
    def total(x: Tensor) -> Tensor:
        return sl.psum(x, "dp")

    total.__name__ = name
    return sl.jit(sl.shard_map(total, in_specs="n/dp", out_specs="n"))


def ones(rows: int = 4) -> Any:
    return sl.shard(torch.ones(rows), "n/dp")


def test_other_shapes_other_keys_and_then_the_same():
    def body() -> list[Any]:
        with sl.make_mesh(dp=2, timeout=20) as mesh:
            f, odd = summed(), mesh.rank == 1
            tree = sl.jit(lambda t: t)
            out = [raised(lambda: f(ones(6 if odd else 4)))]
            out += [raised(lambda: tree({"w": ones(), ("b" if odd else "a"): ones()}))]
            return [*out, sl.gather(f(ones(8))).tolist()]

    (first, *a), (second, *b) = on_ranks(2, body)
    want = "RankError: ranks call `total` with different arguments:\n"
    want += "  rank 0: argument 0 is float32[4] `n/dp`\n  rank 1: argument 0 is float32[6] `n/dp`"
    assert first == second == want
    assert a == b and a[1] == [2.0] * 4
    assert a[0].endswith(
        "rank 0: argument 0, `a`, is float32[4] `n/dp`; argument 0, `w`, is the array of argument 0, `a`,\n"
        "  rank 1: argument 0, `b`, is float32[4] `n/dp`; argument 0, `w`, is the array of argument 0, `b`,"
    ) or a[0].endswith("rank 0: argument 0, `a`, is float32[4] `n/dp`\n  rank 1: argument 0, `b`, is float32[4] `n/dp`")


@pytest.mark.parametrize("debug", [True, False])
def test_a_reordered_pair_of_the_same_shape(debug, monkeypatch):
    """What each computes counts in the debug mode; the order always."""

    def body() -> list[str]:
        with sl.make_mesh(dp=2, timeout=20) as mesh:

            def swapped(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
                first, second = (b, a) if mesh.rank else (a, b)
                one, two = sl.psum(first, "dp"), sl.psum(second, "dp")
                return (two, one) if mesh.rank else (one, two)

            def computed(x: Tensor) -> Tensor:
                return sl.psum(x * (3.0 if mesh.rank else 2.0), "dp")

            run = sl.jit(sl.shard_map(swapped, in_specs="n/dp", out_specs="n"), passes=[])
            other = sl.jit(sl.shard_map(computed, in_specs="n/dp", out_specs="n"), passes=[])
            return [raised(lambda: run(ones(), ones())), raised(lambda: other(ones()))]

    monkeypatch.setenv("SHARDLIB_DEBUG", "1" if debug else "")
    (pair, scaled), other = on_ranks(2, body)
    assert [pair, scaled] == other
    assert re.sub(r", test_meeting.py:\d+", "", pair) == (
        "RankError: ranks disagree on the collectives of `swapped`; number 1 is\n"
        "  rank 0: psum `0` over `dp`, float32[2]\n  rank 1: psum `1` over `dp`, float32[2]"
    )
    assert scaled.count("psum `0` over `dp`, float32[2]") == scaled.count("(computed as ") == 2 * debug


def scaled(by: float, how: str, x: Tensor) -> Tensor:
    if how == "in place":
        return sl.psum(torch.exp(torch.sin(x) * by + 1), "dp")
    if how == "beside":
        y = torch.sin(x) * 2
        return sl.psum(y + torch.exp(x) * by, "dp")
    return sl.psum(sl.scan(lambda c, w: (torch.sin(c * by) + w, None), x, torch.ones(3))[0], "dp")


@pytest.mark.parametrize("how", ["in place", "beside", "in a turn"])
def test_the_debug_mode_sees_what_is_computed_in_place(how, monkeypatch):
    """After the default passes, which write over values."""

    def body() -> str:
        with sl.make_mesh(dp=2, timeout=20) as mesh:
            f = partial(scaled, 3.0 if mesh.rank else 2.0, how)
            return raised(lambda: sl.jit(sl.shard_map(f, in_specs="n/dp", out_specs="n"))(ones()))

    monkeypatch.setenv("SHARDLIB_DEBUG", "1")
    first, second = on_ranks(2, body)
    assert first == second and first.count("(computed as ") == 2


def test_collectives_that_cannot_meet():
    def body() -> str:
        with sl.make_mesh(dp=2, timeout=20) as mesh:

            def widened(x: Tensor) -> Tensor:
                return sl.psum(torch.cat([x, x]) if mesh.rank else x, "dp").sum()

            return raised(lambda: sl.jit(sl.shard_map(widened, in_specs="n/dp", out_specs=""))(ones()))

    first, second = on_ranks(2, body)
    assert first == second and "number 1 is\n  rank 0: psum `" in first
    assert re.search(r"rank 1: psum `\w+` over `dp`, float32\[4\]", first)


MISMATCHES: dict[str, tuple[Any, ...]] = {
    "order": (
        lambda x: sl.pmax(x, "dp") + sl.psum(x[:1], "dp"),
        lambda x: sl.psum(x[:1], "dp") + sl.pmax(x, "dp"),
        r"pmax `\w+` over `dp`, float32\[2\]",
        r"psum `\w+` over `dp`, float32\[1\]",
    ),
    "op": (
        lambda x: sl.psum(x, "dp"),
        lambda x: sl.pmax(x, "dp"),
        r"psum `0` over `dp`, float32\[2\]",
        r"pmax `0` over `dp`, float32\[2\]",
    ),
    "axis": (
        lambda x: sl.psum(x + sl.axis_index("tp"), ("dp", "tp")),
        lambda x: sl.psum(sl.psum(x + sl.axis_index("tp"), "tp"), "dp"),
        r"psum `\w+` over `dp,tp`, float32\[2\]",
        r"psum `\w+` over `tp`, float32\[2\]",
    ),
    "dtype": (
        lambda x: sl.psum(x.double(), "dp").float(),
        lambda x: sl.psum(x, "dp"),
        r"psum `0` over `dp`, float64\[2\]",
        r"psum `0` over `dp`, float32\[2\]",
    ),
    "shape": (
        lambda x: sl.psum(x.sum(), "dp") + x,
        lambda x: sl.psum(x, "dp"),
        r"psum `0` over `dp`, float32\[\]",
        r"psum `0` over `dp`, float32\[2\]",
    ),
    "who sends to whom": (
        lambda x: sl.ppermute(x, "dp", [(0, 1)]),
        lambda x: sl.ppermute(x, "dp", [(1, 0)]),
        r"ppermute `0` over `dp`, float32\[2\](, test_meeting.py:\d+)? \(with \[\[-1, 0\]\]\)",
        r"ppermute `0` over `dp`, float32\[2\](, test_meeting.py:\d+)? \(with \[\[1, -1\]\]\)",
    ),
    "a turn of a loop": (
        lambda x: sl.scan(lambda c, _: (sl.psum(c, "dp") + x, None), x, None, length=3)[0],
        lambda x: sl.scan(lambda c, _: (sl.psum(c, "dp") + x, None), x, None, length=4)[0],
        r"psum `0` over `dp`, float32\[2\].* 2 times in layer\w*\)",
        r"psum `0` over `dp`, float32\[2\].* 3 times in layer\w*\)",
    ),
}


def test_mismatches_are_refused_before_anything_is_sent(tmp_path):
    """Each kind on all ranks at once, without the debug mode; with programs from files, too."""
    cases = [(name, None) for name in MISMATCHES] + [("a turn of a loop", tmp_path)] * 2

    def body() -> list[str]:
        said = []
        with sl.make_mesh(dp=2, tp=2, timeout=30) as mesh, contextlib.redirect_stderr(io.StringIO()):
            for name, cache in cases:
                f = MISMATCHES[name][int(mesh.rank == 3)]
                run = sl.jit(sl.shard_map(f, in_specs="n/dp", out_specs="n/dp"), cache=cache)
                said.append(raised(lambda run=run: run(ones())))
        return said

    first, *others = on_ranks(4, body)
    assert others == [first] * 3
    for (name, _), text in zip(cases, first, strict=True):
        want = "RankError: ranks disagree on the collectives of `<lambda>`; number [12] is\n"
        want += "  ranks 0, 1, 2: {}.*\n  rank 3: {}".format(*MISMATCHES[name][2:])
        assert re.match(want, text), (name, text)


def test_one_rank_fails_while_it_traces():
    def body() -> list[str]:
        with sl.make_mesh(dp=2, timeout=20) as mesh:
            out = []
            for bad in range(2):

                def f(x: Tensor, bad: int = bad) -> Tensor:
                    if mesh.rank == bad:
                        raise ValueError("a rank's own")
                    return sl.psum(x, "dp")

                out.append(raised(lambda f=f: sl.jit(sl.shard_map(f, in_specs="n/dp", out_specs="n"))(ones())))
            return out

    told = "RankError: rank {} failed in its first call of `f`: ValueError: a rank's own"
    own = "ValueError: a rank's own"
    assert on_ranks(2, body) == [[own, told.format(1)], [told.format(0), own]]


def test_another_function_or_another_order():
    def body() -> str:
        with sl.make_mesh(dp=2, timeout=20) as mesh:
            f, g = summed("f"), summed("g")
            return raised(lambda: (g if mesh.rank else f)(ones()))

    said = "RankError: ranks call different functions, or in another order; they wait in\n  rank 0: `f`\n  rank 1: `g`"
    assert on_ranks(2, body) == [said, said]


@pytest.mark.parametrize("alone", [0, 1])
def test_a_rank_that_traces_again_alone(alone):
    def body() -> str:
        with sl.make_mesh(dp=2, timeout=2) as mesh:
            f = summed()
            f(ones())
            return raised(lambda: f(ones(6 if mesh.rank == alone else 4)))

    out = on_ranks(2, body)
    assert out[alone].startswith(
        f"RankError: rank {alone} calls `total` with arguments that it was not traced for, rank {1 - alone} does not; "
        "what it last traced is `total`:\n"
    )
    assert f"rank {alone}: argument 0 is float32[6] `n/dp`" in out[alone]
    assert f"rank {1 - alone}: argument 0 is float32[4] `n/dp`" in out[alone] and " within 2 s" in out[alone]


def test_lower_meets_nobody():
    def body() -> int:
        with sl.make_mesh(dp=2, timeout=20) as mesh:
            f = summed()
            n = len(f.lower(ones()).collectives()) if mesh.rank == 0 else 1
            return n * int(sl.gather(f(ones())).sum().item())

    assert on_ranks(2, body) == [4, 4]
