"""Patterns against values: errors show the pattern and the fix; names of a layer are its own."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from patterned import run
from torch import Tensor

import shardlib as sl

NOT_A_TENSOR: Any = 3

SIZES = r"\n  sizes:   b=4 s=6 d=8 e=5; mesh dp=2 tp=2\n  at .*test_patterns.py:\d+, in <lambda>: "
ERRORS: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "no arrow": (
        lambda x, w: sl.einsum("b s d", x),
        r"this one has no `->`\n.*b s d\n +\^ write `->` and how the result",
    ),
    "operands": (lambda x, w: sl.einsum("b d, d e -> b e", x), "on the left of `->` expected, found 2"),
    "dimensions": (
        lambda x, w: sl.einsum("b/dp d/tp -> b/dp +tp", x),
        r"`b/dp d/tp` names 2 dimensions, the value has 3: \(2, 6, 4\)\n  pattern: b/dp d/tp -> b/dp \+tp\n +\^{9}"
        + SIZES,
    ),
    "not a tensor": (lambda x, w: sl.einsum("b -> b", NOT_A_TENSOR), "a tensor is needed for `b`, found int"),
    "not split": (
        lambda x, w: sl.einsum("d/tp e -> e +tp", w),
        r"`d/tp` says split over `tp`, the value is f64\[8, 5\] equal on all ranks\n  pattern: d/tp e -> e .tp\n"
        r"           \^{4} sl.shard the argument it came from",
    ),
    "split and not said": (
        lambda x, w: sl.all_gather("b s/tp d -> b s d", x),
        "`b` is written whole, but this rank holds 2 of its 4: the value is a piece of `b/dp s d/tp`\n"
        r".*\^ write `b/dp` wherever it stands, or sl.gather\(x, 'dp'\) first",
    ),
    "axis left out": (
        lambda x, w: sl.einsum("b/dp s d, d e/tp -> b/dp s e/tp", x, w),
        r"`d` is written whole, but this rank holds 4 of its 8: .*\n.*\n +\^ write `d/tp` wherever it stands",
    ),
    "pending and not said": (
        lambda x, w: sl.einsum("b/dp s d, e/tp d -> b/dp s e/tp", sl.pending(x, "tp"), w),
        r"`b/dp s d` says equal over `tp`, the value is f64\[2, 6, 4\] varying over dp, pending over tp\n"
        ".*psum or psum_scatter it over `tp` first",
    ),
    "split and pending": (
        lambda x, w: sl.einsum("b/dp s d/tp -> b/dp s +tp", sl.pending(x, "tp")),
        r"`d/tp` says split over `tp`, the value is .* varying over dp, pending over tp\n.*psum or psum_scatter it",
    ),
    "no sum to make": (
        lambda x, w: sl.psum("d e +tp -> d e", w),
        r"still to be made, but none waits: the value is f64\[8, 5\] equal on all ranks\n.*it has been made already",
    ),
    "second sum": (
        lambda x, w: sl.psum("b/dp s d +tp -> b/dp s d", sl.psum(x, "tp")),
        r"none waits: the value is .* varying over dp, equal over tp\n.*it has been made already",
    ),
    "sizes differ": (
        lambda x, w: sl.einsum("b/dp s d/tp, d/tp e -> b/dp s e +tp", x, sl.all_gather("i/tp e -> i e", x[0, :5].t())),
        r"`d/tp e` says equal over `dp`, the value is f64\[8, 5\] varying over dp, replicated over tp\n"
        ".*probably terms of a sum.*If a dimension is split: write `/dp` on it, or all_gather it first",
    ),
    "sizes differ across patterns": (
        lambda x, w: sl.einsum("d/dp s b/tp -> d/dp s b/tp", x),
        r"`d` is 4 in this operand, of shape \(2, 6, 4\), and 8 in an argument\n  pattern: d/dp s b/tp -> d/dp s b/tp\n"
        r" +\^{4} 2 on this rank, split over dp" + SIZES,
    ),
    "sizes differ within a pattern": (
        lambda x, w: sl.einsum("q q -> q", w),
        r"`q` is 5 in this operand, of shape \(8, 5\), and 8 elsewhere in this pattern",
    ),
    "contracted": (
        lambda x, w: sl.einsum("b/dp s d/tp -> b/dp s", x),
        "einsum contracts `d`, split over `tp`, so its result still waits for a sum over `tp`\n"
        r"  pattern: b/dp s d/tp -> b/dp s\n +\^ write `\+tp` here, then psum\(\"... \+tp -> ...\"\) or psum_scatter it"
        + SIZES,
    ),
    "nothing contracted": (
        lambda x, w: sl.einsum("b/dp s d/tp -> b/dp s d/tp +dp", x),
        "axis `dp` splits `b`; it cannot also be pending",
    ),
    "sum from nowhere": (
        lambda x, w: sl.einsum("d e -> d e +tp", w),
        "`.tp` on the right, but no dimension split over `tp` is contracted",
    ),
    "carried": (
        lambda x, w: sl.einsum("b/dp s q +tp -> b/dp s q", x),
        "an operand waits for a sum over `tp`; so does the result\n.*write `.tp` here",
    ),
    "only on the right": (lambda x, w: sl.einsum("d e -> d q", w), "`q` stands on the right of `->` only"),
    "split changed": (
        lambda x, w: sl.einsum("b/dp s d/tp -> b s d/tp", x),
        "`b` is split as `b/dp` elsewhere in the pattern, as `b` here",
    ),
    "two names contracted over one axis": (
        lambda x, w: sl.einsum("b/dp s d/tp, i s q/tp -> b/dp i s +tp", x, sl.all_gather("i/dp s d/tp -> i s d/tp", x)),
        "`d` and `q` are both split over `tp` and summed over: products .*\n.*all_gather one of them over `tp`",
    ),
    "group in einsum": (
        lambda x, w: sl.einsum("(b s) d -> d", x),
        r"`\(b s\)` groups dimensions, which only rearrange and reduce do",
    ),
    "unknown axis": (lambda x, w: sl.einsum("b/fsdp s d/tp -> b/fsdp s d/tp", x), "no axis `fsdp`"),
    "all_gather of nothing": (
        lambda x, w: sl.all_gather("b/dp s d/tp -> b/dp s d/tp", x),
        "all_gather does not do that\n.*no axis leaves a dimension",
    ),
    "all_gather that joins": (
        lambda x, w: sl.all_gather("d e -> d/tp e", w),
        "an axis leaves a dimension, none joins one: see all_to_all",
    ),
    "all_gather that sums": (
        lambda x, w: sl.all_gather("b/dp s q +tp -> b s q", x),
        "pending sums stay as they are: psum makes them",
    ),
    "all_gather in the middle": (
        lambda x, w: sl.all_gather("q/dp/tp s i -> q/tp s i", x * 2),
        "`q/dp/tp` -> `q/tp`: `q` is cut over dp, then over tp; a collective takes away the last of these axes",
    ),
    "dimensions permuted": (
        lambda x, w: sl.all_gather("b/dp s d/tp -> s b d/tp", x),
        "the dimensions must stay as they are: `b s d` on the left\n.*sl.rearrange does",
    ),
    "psum_scatter of nothing": (
        lambda x, w: sl.psum_scatter("b/dp s q +tp -> b/dp s q", x),
        "no axis joins a dimension: psum makes the whole sum",
    ),
    "psum_scatter of another axis": (
        lambda x, w: sl.psum_scatter("q s d/tp +dp -> q s/tp d/tp", x),
        "splits two dimensions",
    ),
    "psum_scatter that leaves": (
        lambda x, w: sl.psum_scatter("b/dp s q +tp -> b s/tp q", x),
        "an axis goes from `.axis` to a dimension, none leaves one",
    ),
    "psum_scatter that does not divide": (
        lambda x, w: sl.psum_scatter("b/dp s q +tp -> b/dp s q/tp", x[..., :3]),
        "`q` is 3 here, which does not divide by 2, the size of tp\n.*pad the dimension, or choose another",
    ),
    "all_to_all of one": (
        lambda x, w: sl.all_to_all("b/dp s d/tp -> b/dp s d", x),
        "the axes that leave one dimension must join another",
    ),
    "all_to_all that does not divide": (
        lambda x, w: sl.all_to_all("b/dp q d/tp -> b/dp q/tp d", x[:, :3]),
        "`q` is 3 here, which does not divide by 2",
    ),
    "psum of nothing": (lambda x, w: sl.psum("b/dp s d/tp -> b/dp s d/tp", x), "no `.axis` goes"),
    "psum that gathers": (
        lambda x, w: sl.psum("b/dp s q +tp -> b s q", x),
        "dimensions keep their axes; only `.axes` go",
    ),
    "rearrange, heads": (
        lambda x, w: sl.rearrange("b/dp s (h c)/tp -> b/dp s h/tp c", x, c=8),
        r"`\(h c\)/tp` is 8 in all: `h` would be 1, which does not divide over tp=2\n.*or make it a multiple of 16",
    ),
    "rearrange, a size too long": (
        lambda x, w: sl.rearrange("b/dp s (h c)/tp -> b/dp s h/tp c", x, c=3),
        r"is 8 in all, 4 on each of the 2 ranks of tp, and 4 does not divide by c=3\n.*or make it a multiple of 6",
    ),
    "rearrange, named heads": (
        lambda x, w: sl.rearrange("b/dp s (h c)/tp -> b/dp s h/tp c", x, h=1),
        "`h` is 1, which does not divide by 2, the size of `tp`",
    ),
    "rearrange, unknown size": (
        lambda x, w: sl.rearrange("b/dp s d/tp -> b/dp d/tp s", x, q=3),
        "size given for `q`, which the pattern does not name",
    ),
    "rearrange, split moved": (
        lambda x, w: sl.rearrange("b/dp s (h c)/tp -> b/dp s h c/tp", x, c=2),
        "`h` is split as `h/tp` on the left, as `h` on the right\n.*the first name of a `.a b.` group carries its axes",
    ),
    "reduce, no sum": (
        lambda x, w: sl.reduce("b/dp s d/tp -> b/dp s", x, "sum"),
        "a sum over a dimension split over `tp` still waits for a sum over `tp`\n.*write `.tp` here, then psum it",
    ),
    "reduce, split maximum": (
        lambda x, w: sl.reduce("b/dp s d/tp -> b/dp s", x, "max"),
        r"max over `d/tp`, which is split\n.*then over ranks: sl.pmax\(x.amax\(2\), 'tp'\)",
    ),
    "reduce, split minimum": (
        lambda x, w: sl.reduce("b/dp s d/tp -> b/dp", x, "min"),
        r"then over ranks: -sl.pmax\(-x.amin\(\(1, 2\)\), 'tp'\)",
    ),
    "reduce, sum from nowhere": (
        lambda x, w: sl.reduce("d e -> d +tp", w, "sum"),
        "`.tp` on the right, but no dimension split over `tp` is reduced",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    body, message = ERRORS[name]
    with pytest.raises((sl.SpecError, sl.MeshError)) as e:
        run(body)
    notes = [re.sub(r"(, in \S+: ).*", r"\1", note) for note in e.value.__notes__]  # the line may hold the message
    assert re.search(f"(?s){message}", "\n".join([str(e.value), *notes]))
    assert "^" in str(e.value) or name == "unknown axis"


def test_names_of_a_layer_are_its_own():
    """A function that is called twice, with other sizes; within one call a name has one size."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        a = sl.all_gather("m/row k/col -> m/row k", a)
        b = sl.all_gather("k/row n/col -> k n/col", b)
        return sl.einsum("m/row k, k n/col -> m/row n/col", a, b)

    def swapped(a: Tensor) -> Tensor:
        return sl.einsum("j i -> j i", sl.einsum("i j -> i j", a))

    specs = ("p/row q/col", "q/row r/col", "r/row s/col")
    with sl.make_mesh(row=2, col=2, simulate=True):
        a, b, c = (torch.arange(float(n * k)).view(n, k) for n, k in ((4, 6), (6, 10), (10, 8)))
        f = sl.shard_map(lambda a, b, c: product(product(a, b), c), in_specs=specs, out_specs="p/row s/col")
        assert torch.equal(sl.gather(f(*(sl.shard(x, s) for x, s in zip((a, b, c), specs, strict=True)))), a @ b @ c)
        with pytest.raises(sl.SpecError, match=r"`j` is 4 in this operand, of shape .4, 6., and 6 in `i j -> i j`"):
            sl.shard_map(swapped, in_specs="u v", out_specs="u v")(sl.shard(a, "u v"))
