"""spec.py and errors.py: the grammar round trips, and every error shows the string with a caret under the culprit."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlib import errors
from shardlib.errors import SpecError
from shardlib.spec import Dim, Spec, as_spec, parse, parse_list, parse_pattern

NAMES = st.sampled_from(["a", "B", "_", "d_model", "x9", "_y", "0", "3", "12"])
SLOW_MACHINE = settings(deadline=None)
AXES = st.sampled_from(["dp", "tp", "pp", "cp_1", "X"])


@st.composite
def specs(draw, most=4):
    axes = draw(st.lists(AXES, unique=True))
    names = draw(st.lists(NAMES, max_size=most))
    dims = [[] for _ in names]
    pending = []
    for a in axes:
        where = draw(st.integers(0, len(names)))
        (dims[where] if where < len(names) else pending).append(a)
    parsed = [Dim(n, tuple(chain)) for n, chain in zip(names, dims, strict=True)]
    if draw(st.booleans()):
        parsed.insert(draw(st.integers(0, len(parsed))), Dim("..."))
    return Spec(tuple(parsed), tuple(pending), draw(st.sampled_from(["device", "host", "disk"])))


@SLOW_MACHINE
@given(specs())
def test_what_is_printed_parses_to_the_same(spec):
    assert parse(str(spec)) == spec
    assert str(parse(str(spec))) == str(spec)


@SLOW_MACHINE
@given(specs(), st.text(" \t\n", min_size=1, max_size=3))
def test_spaces_do_not_matter(spec, space):
    again = parse(space + str(spec).replace(" ", space) + space)
    assert again == spec
    begin, end = again.span
    assert again.text[begin:end].split() == str(spec).split()


@SLOW_MACHINE
@given(st.lists(specs(), min_size=1, max_size=3), st.lists(specs(), min_size=1, max_size=3))
def test_patterns_round_trip(left, right):
    text = ", ".join(map(str, left)) + " -> " + ", ".join(map(str, right))
    pattern = parse_pattern(text, len(left), len(right))
    assert pattern.inputs == tuple(left) and pattern.outputs == tuple(right)
    assert pattern.axes == {a for s in left + right for a in s.axes}
    for spec in (*pattern.inputs, *pattern.outputs):  # spans count in the whole pattern
        for d in spec.dims:
            assert text[slice(*d.span)] == str(d)
    assert parse_list(text.partition(" -> ")[0], len(left)) == tuple(left)


@SLOW_MACHINE
@given(st.text("ab/+@. ,->()\t1é", max_size=12))
def test_every_string_parses_or_is_refused_with_a_caret(text):
    for parser in (parse, parse_pattern):
        try:
            parser(text)
        except SpecError as e:
            _, line, marks = str(e).split("\n")
            assert line[11:].rstrip() == re.sub(r"\s", " ", text).rstrip() and marks.lstrip(" ").startswith("^")


def test_parts_of_a_spec():
    spec = parse("vocab/tp/dp 3 ... +pp +cp @host")
    assert spec.names == ("vocab", "3", "...")
    assert spec.chains == (("tp", "dp"), (), ())
    assert (spec.split, spec.pending, spec.axes) == (("tp", "dp"), ("pp", "cp"), ("tp", "dp", "pp", "cp"))
    assert spec.memory == "host" and spec.ndim == 3 and spec.has_ellipsis
    assert repr(spec) == "Spec('vocab/tp/dp 3 ... +pp +cp @host')"
    assert repr(parse("a").prepend(parse("l"))) == "Spec('l a', stacked=1)"
    assert parse("") == Spec(()) and as_spec(spec) is spec
    assert parse_pattern("(h d)/tp s -> h/tp d s").inputs[0].dims[0] == Dim("(h d)", ("tp",), ("h", "d"))


def test_changes_of_a_spec():
    spec = parse("a/x/y b +z")
    assert str(spec.without(["y", "z"])) == "a/x b"
    assert str(spec.with_pending(["z", "w"])) == "a/x/y b +z +w"
    assert str(spec.resolve(lambda a: ("p", "q") if a == "y" else (a,))) == "a/x/p/q b +z"
    assert str(parse("a ... b/x").expand(4)) == "a _ _ b/x"
    assert str(parse("... b/x").expand(1)) == "b/x"
    stack = spec.prepend(parse("v layers/pp"))
    assert str(stack) == "v layers/pp a/x/y b +z" and stack.stacked == 2
    assert stack.unstack(2) == spec and stack.unstack(1).stacked == 1


S, P = "  spec:    ", "  pattern: "


@pytest.mark.parametrize(
    ("text", "message", "caret"),
    [
        ("a/", "expected the name of a mesh axis after `/`, found the end", "  ^"),
        ("a//b", "expected the name of a mesh axis after `/`, found `/`", "  ^"),
        ("a/ x", "expected the name of a mesh axis after `/`, found a space", "  ^"),
        ("a/1", "expected the name of a mesh axis after `/`, found `1`", "  ^"),
        ("a /x", "expected a dimension name, found `/`", "  ^ no space may stand before `/`"),
        ("a/b/b", "axis `b` splits the same dimension twice", "    ^"),
        (
            "a/b c/b",
            "axis `b` splits two dimensions, `a` and `c`",
            "    ^^^ one axis can split one dimension of a tensor",
        ),
        ("a+x", "unexpected `+`", " ^ a space is missing?"),
        ("a@host", "unexpected `@`", " ^ a space is missing?"),
        ("1a", "unexpected `a`", " ^ a space is missing?"),
        ("...a", "unexpected `a`", "   ^ a space is missing?"),
        ("a, b", "unexpected `,`", " ^ one spec stands here, without commas"),
        ("a b -> c", "one spec is expected here, not a pattern", "    ^^"),
        ("a b/ -> c", "one spec is expected here, not a pattern", "     ^^"),
        ("é", "expected a dimension name, found `é`", "^"),
        ("a ..", "expected a dimension name, found `.`", "  ^"),
        ("a +", "expected the name of a mesh axis after `+`, found the end", "   ^"),
        ("a +x +x", "axis `x` is pending twice", "      ^"),
        ("a/x +x", "axis `x` splits `a`; it cannot also be pending", "     ^"),
        ("a +x b ", "nothing may follow the pending sums and the memory", "     ^"),
        ("a @host +x", "nothing may follow the pending sums and the memory", "        ^^"),
        ("a @", "expected a memory after `@`, found the end", "   ^"),
        ("a @hots", "unknown memory `hots` (did you mean `host`?)", "   ^^^^ host or disk"),
        ("... ...", "`...` can stand once in a spec", "    ^^^"),
        (".../x", "`...` stands for unsplit dimensions and takes no axis", "^^^^^"),
        ("(a b", "expected a dimension name or `)`, found the end", "    ^"),
        ("(a (b c))", "expected a dimension name or `)`, found `(`", "   ^"),
        (
            "(a b)/x c",
            "parentheses stand in the patterns of `rearrange` only",
            "^^^^^^^ name the product",
        ),
        ("\ta/x\n b/", "expected the name of a mesh axis after `/`, found the end", "        ^"),
    ],
)
def test_errors_of_specs(text, message, caret):
    with pytest.raises(SpecError) as e:
        parse(text)
    shown = re.sub(r"\s", " ", text)
    assert str(e.value) == f"{message}\n{P if '->' in text else S}{shown}\n{' ' * 11}{caret}"


NO_ARROW = "a pattern says how a value is split before and after, `before -> after`; this one has no `->`"


@pytest.mark.parametrize(
    ("text", "inputs", "outputs", "message", "caret"),
    [
        ("a b", 1, 1, NO_ARROW, "   ^ write `->` and how"),
        ("a/x +y", 1, 1, NO_ARROW, "      ^ write `-> a/x`"),
        ("a -> b -> c", 1, 1, "a pattern has one `->`", "       ^^"),
        ("a, b -> c", 1, 1, "one spec on the left of `->` expected, found 2", "^^^^"),
        ("a -> b, c", 1, 1, "one spec on the right of `->` expected, found 2", "     ^^^^"),
        ("a -> b", 2, 1, "2 specs on the left of `->` expected, found 1", "^"),
        ("a/x/ -> b", 1, 1, "expected the name of a mesh axis after `/`, found a space", "    ^"),
        ("a +x b -> a b", 1, 1, "nothing may follow the pending sums and the memory", "     ^"),
        ("a b/x, b/x c/x -> a", 2, 1, "axis `x` splits two dimensions, `b` and `c`", "           ^^^ one axis can"),
    ],
)
def test_errors_of_patterns(text, inputs, outputs, message, caret):
    with pytest.raises(SpecError) as e:
        parse_pattern(text, inputs, outputs)
    assert str(e.value).startswith(f"{message}\n{P}{text}\n{' ' * 11}{caret}")


def test_a_list_of_specs_has_the_number_expected():
    with pytest.raises(
        SpecError, match="2 specs expected, separated by commas, found 1\n  spec:    a b\n           \\^\\^\\^"
    ):
        parse_list("a b", 2)


@pytest.mark.parametrize("wrong", [None, 3, ["a"], ("a", "b"), b"a"])
def test_a_spec_is_a_string(wrong):
    with pytest.raises(SpecError, match=re.escape(f"a spec is a string such as 'd_model/dp heads/tp', not {wrong!r}")):
        as_spec(wrong)


def test_errors_point_at_a_dimension_an_axis_or_all():
    spec = parse(" a/x b/y/z +w")
    assert str(spec.error("no", 1, "mend")) == f"no\n{S} a/x b/y/z +w\n{' ' * 11}     ^^^^^ mend"
    assert str(spec.error("no", "z")).endswith(f"\n{' ' * 11}     ^^^^^")
    assert str(spec.error("no", "w")).endswith(f"\n{' ' * 11}           ^^")
    assert str(spec.error("no")).endswith(f"\n{' ' * 11} ^^^^^^^^^^^^")
    assert str(spec.without(["x"]).error("no", "w")) == f"no\n{S}a b/y/z +w\n{' ' * 11}        ^^"
    assert str(spec.prepend(parse("l")).error("no", 1)) == f"no\n{S}l a/x b/y/z +w\n{' ' * 11}  ^^^"
    two = parse_pattern("a +w, a b/v +w -> a", 2).inputs[1]
    assert str(two.error("no", "w")) == f"no\n{P}a +w, a b/v +w -> a\n{' ' * 11}            ^^"
    assert str(parse("a ...").expand(3).error("no", 2)).endswith(f"a ...\n{' ' * 11}  ^^^")


def test_an_axis_cannot_be_in_a_leaf_and_in_the_stack():
    with pytest.raises(SpecError) as e:
        parse("a/tp").prepend(parse("layers/pp/tp"))
    told = "a leaf `a/tp` cannot be stacked along `layers/pp/tp`: it names `tp` already"
    assert str(e.value) == f"{told}\n{S}layers/pp/tp\n{' ' * 11}^^^^^^^^^^^^"


def test_wording():
    assert errors.listing([]) == "nothing"
    assert errors.listing("a") == "`a`" and errors.listing("ab") == "`a` and `b`"
    assert errors.listing("abc") == "`a`, `b` and `c`"
    assert errors.sizes({}) == "none" and errors.sizes({"a": 1, "b": 2}) == "a=1 b=2"
    assert errors.nearest("hiden", ["model", "hidden"]) == " (did you mean `hidden`?)"
    assert errors.nearest("q", ["model"]) == ""
    with pytest.raises(SpecError, match=r"^here: there: no$"), errors.located("here"), errors.located("there"):
        raise SpecError("no")
