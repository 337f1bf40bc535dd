"""What jit traces again and what it does not: arguments, static ones, constants, meshes, settings."""

from typing import Any

import pytest
import torch
from jitted import F64, arange, doubled, mesh
from torch import Tensor

import shardlib as sl


def test_what_is_traced_again(capsys):
    f = sl.jit(doubled)
    with mesh(dp=2):
        for x in (arange(4, spec="n/dp"), arange(4, spec="n/dp"), {"a": arange(4, spec="n/dp")}):
            f(x)
        assert len(f.traces) == 2
        for changed in (
            arange(6, spec="n/dp"),
            arange(4, spec="n"),
            arange(4, spec="m/dp"),
            arange(4, spec="n/dp", dtype=torch.float32),
        ):
            before = len(f.traces)
            for _ in range(2):
                f(changed)
            assert len(f.traces) == before + 1
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "shardlib: doubled was traced again: the arguments have another structure",
        "shardlib: doubled was traced again: the arguments have another structure",
        "shardlib: doubled was traced again: argument 0 is float64[4] `n`, it was float64[6] `n/dp`",
        "shardlib: doubled was traced again: argument 0 is float64[4] `m/dp`, it was float64[4] `n`",
        "shardlib: doubled was traced again: argument 0 is float32[4] `n/dp`, it was float64[4] `m/dp`",
    ]
    with mesh(dp=2):
        f(arange(4, spec="n/dp"))
        assert len(f.traces) == 6  # another mesh of the same axes has the same program
    with mesh(dp=4):
        f(arange(4, spec="n/dp"))
        assert len(f.traces) == 7
    assert capsys.readouterr().err == "shardlib: doubled was traced again: the mesh is dp=4, it was dp=2\n"


def test_meshes_that_differ_in_groups_only():
    def gathered(x: Tensor) -> Tensor:
        return sl.gather(x, "some").sum() * sl.axis_index(("a", "b"))

    f = sl.jit(sl.shard_map(gathered, in_specs=None, out_specs="+a +b"))
    gathers = []
    for groups in ({"some": "a"}, {"some": "a/b"}):
        with sl.make_mesh(a=2, b=2, groups=groups, simulate=True) as m:
            x = sl.shard(torch.ones(4, 4), "n/a m/b", m)
            gathers.append(sorted(c.axis for c in f.lower(x).collectives()))
    assert gathers == [["a"], ["a", "b"]]


def test_settings_are_part_of_the_signature():
    f = sl.jit(sl.shard_map(lambda x: x + torch.ones(()), in_specs=None, out_specs=None))
    with mesh(dp=1):
        x = arange(2, dtype=torch.float32)
        assert f(x).dtype == torch.float32
        try:
            torch.set_default_dtype(F64)
            f(x)
        finally:
            torch.set_default_dtype(torch.float32)
        assert len(f.traces) == 2


def test_static_arguments_and_constants():
    seen = []

    def scaled(x: Any, how: str, by: float) -> Any:
        seen.append((how, by))
        return (
            sl.shard_map(lambda y: y * by if how == "times" else y / by, in_specs=None, out_specs="n/dp")(x),
            how,
            by,
            None,
        )

    f = sl.jit(scaled, static_argnums=1)
    with mesh(dp=2):
        x = arange(4, spec="n/dp")
        out, *rest = f(x, "times", 2.0)
        assert rest == ["times", 2.0, None]
        assert torch.equal(sl.gather(out), 2 * torch.arange(4.0, dtype=F64))
        assert torch.equal(sl.gather(f(x, "over", 2.0)[0]), torch.arange(4.0, dtype=F64) / 2)
        for how, by in (("times", 2.0), ("times", 3.0), ("times", 2), ("over", 0.5)):
            f(x, how, by)
        assert seen == [("times", 2.0), ("over", 2.0), ("times", 3.0), ("times", 2), ("over", 0.5)]
        zero = f(x, "over", 0.0)[0], f(x, "over", -0.0)[0]
        assert [z.local(1)[1].item() for z in zero] == [torch.inf, -torch.inf]


def test_static_arguments_in_any_order_and_defaults_left_out():
    def f(x: Any, a: int, b: int = 1, c: int = 0, *, flag: bool = False) -> Any:
        return x * a + 10 * b + 100 * c + 1000 * flag

    with mesh(dp=1):
        for numbers in ((2, 1), (3, 1, 2), (-1, 1)):
            g = sl.jit(f, static_argnums=numbers)
            for args, words in (((3,), {}), ((3, 2), {}), ((3,), {"c": 4}), ((3, 2), {"c": 4})):
                assert torch.equal(g(torch.ones(2), *args, **words), f(torch.ones(2), *args, **words))
        with pytest.raises(sl.SpecError, match="`flag` is taken by keyword alone"):
            sl.jit(f)(torch.ones(2), 3, flag=True)


def test_constants_are_known_by_type_and_value():
    """1, True, 1.0, 0.0 and -0.0 are programs of their own, NaN one; so they are in static arguments."""
    said = [1, True, 1.0, 0.0, -0.0, 1j, float("nan"), (1,), (1.0,)]
    for static in ((), 1):
        f = sl.jit(lambda x, by: x * (by[0] if isinstance(by, tuple) else by), static_argnums=static, max_traces=9)
        with mesh(dp=1):
            for _ in range(2):
                for by in [*said, float("nan")]:
                    want, got = f.f(torch.ones(1, dtype=torch.int64), by), f(torch.ones(1, dtype=torch.int64), by)
                    assert got.dtype == want.dtype and repr(got) == repr(want)
            assert len(f.traces) == 9
    with mesh(dp=1):
        same = sl.jit(lambda x: (x, 1, True, 1.0, 0.0, -0.0))(torch.ones(1))
        assert repr(same[1:]) == repr(doubled_constants(torch.ones(1))[1:]) == "(1, True, 1.0, 0.0, -0.0)"


def doubled_constants(x: Tensor) -> Any:
    return sl.shard_map(lambda x: (x, 1, True, 1.0, 0.0, -0.0), in_specs=None, out_specs=None)(x)


def test_arguments_by_keyword_default_and_number():
    def f(x: Any, by: float = 2.0, how: str = "times") -> Any:
        return x * by if how == "times" else x / by

    x = torch.full((2,), 3.0)
    with mesh(dp=1):
        run = sl.jit(f, static_argnums=-1)
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
            ((x,), {}),
            ((), {"x": x}),
            ((x, 2.0, "times"), {}),
            ((x,), {"how": "over"}),
        ]
        for args, words in calls:
            for _ in range(2):
                assert torch.equal(run(*args, **words), f(*args, **words))
        assert len(run.traces) == 3 and run.lower(x, how="over") is run.traces[-1]
        with pytest.raises(TypeError, match="unexpected keyword argument 'b'"):
            run(x, b=2)
        with pytest.raises(sl.SpecError, match="`by` is taken by keyword alone: bind it with functools"):
            sl.jit(lambda x, *, by: x * by)(x, by=2)
        with pytest.raises(sl.SpecError, match="the static argument 0 holds a tensor"):
            sl.jit(f, static_argnums=0)(x)
        donating = sl.jit(lambda n, x: doubled(x), donate_argnums=-1)
        gone = arange(4)
        donating(1, gone)
        with pytest.raises(sl.DonatedError):
            sl.gather(gone)
    wrong: list[tuple[dict[str, Any], str]] = [
        (dict(static_argnums=3), r"static_argnums=3: the function takes arguments 0 to 2"),
        (dict(donate_argnums=(0, -4)), r"donate_argnums=\(0, -4\): the function takes arguments 0 to 2"),
        (dict(donate_argnums=(0, 1), static_argnums=-2), "argument 1 is static, so that there is nothing of it to don"),
    ]
    for options, said in wrong:
        with pytest.raises(sl.SpecError, match=said):
            sl.jit(f, **options)
    with pytest.raises(sl.SpecError, match=r"static_argnums=-1: .* takes any number of arguments"):
        sl.jit(lambda *xs: xs, static_argnums=-1)


def test_too_many_traces():
    f = sl.jit(doubled, max_traces=2)
    with mesh(dp=1):
        f(arange(1))
        f(arange(2))
        with pytest.raises(sl.ShardError, match="doubled was traced for 2 signatures, which is max_traces"):
            f(arange(3))


def test_arguments_that_are_not_hashable():
    import numpy

    with mesh(dp=1), pytest.raises(sl.SpecError, match=r"doubled: argument 0, `a`, is a ndarray; jit takes tensors"):
        sl.jit(doubled)({"a": numpy.ones(2)})
    with mesh(dp=1):
        with pytest.raises(sl.SpecError, match=r"layout torch.sparse_coo goes into jit, which takes strided ones"):
            sl.jit(lambda x: x * 2)(torch.eye(2).to_sparse())
        with pytest.raises(
            sl.SpecError, match=r"<lambda>: result `a\.1` is a set; jit gives tensors, arrays and hashable"
        ):
            sl.jit(lambda x: {"a": [x, {x}]})(torch.ones(2))
        with pytest.raises(sl.SpecError, match="the pass `<lambda>` returns None: a pass returns the GraphModule"):
            sl.jit(lambda x: x * 2, passes=[lambda module: None])(torch.ones(2))  # type: ignore[arg-type, return-value]
