"""The spec grammar: `"d_model/dp heads/tp d_head"`. Pure strings and tuples; knows nothing of tensors or meshes.

    spec    :=  (dim | "..." )*  ("+" axis)*  ["@" memory]
    dim     :=  name ("/" axis)*  |  "(" name* ")" ("/" axis)*        parentheses only in `rearrange`
    pattern :=  spec ("," spec)* "->" spec ("," spec)*

The name `_` binds nothing: it is what the dimensions of `...` are called.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from shardlib.errors import SpecError, caret, dimensions, nearest

Chains = tuple[tuple[str, ...], ...]  # by dimension, the axes that split it, major to minor
MEMORIES = ("device", "host", "disk")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]+")
_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class Dim:
    """One dimension: its name, the mesh axes it is split over (major to minor), its parts if it is a `(a b)` group."""

    name: str
    axes: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    span: tuple[int, int] = field(default=(0, 0), compare=False)

    def __str__(self) -> str:
        return "/".join((self.name, *self.axes))


ELLIPSIS = "..."


@dataclass(frozen=True)
class Cut:
    """What a layout says of a leaf before its sizes and the mesh are known: it is cut over `axes`.

    The place is where the leaf names one of `over`, or a group that holds one, in whose stead `axes` then stand; for a
    leaf that names none, its largest dimension that they divide. No `axes`, or fewer than `least` elements: whole.
    """

    over: tuple[str, ...]
    axes: tuple[str, ...]
    least: int = 0


@dataclass(frozen=True, repr=False)
class Spec:
    """A parsed spec.

    `cuts` are made, in order, when it meets a tensor and a mesh (`zero`, `split`). `stacked` counts leading dimensions
    that `stack` added: optimizers and files see each slice as a leaf. `matrix`: the dimensions that are inputs and
    those that are outputs of a matrix, where said; each slice along the others is a matrix of its own.
    `text[span]` is what it was parsed from, for messages; no text where it was computed.
    """

    dims: tuple[Dim, ...]
    pending: tuple[str, ...] = ()
    memory: str = "device"
    cuts: tuple[Cut, ...] = ()
    stacked: int = 0
    matrix: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    text: str = field(default="", compare=False)
    span: tuple[int, int] = field(default=(0, 0), compare=False)

    def __str__(self) -> str:
        tail = [f"+{a}" for a in self.pending] + [f"@{self.memory}"] * (self.memory != "device")
        return " ".join([str(d) for d in self.dims] + tail)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(d.name for d in self.dims)

    def __repr__(self) -> str:
        more = f", cuts={self.cuts}" * bool(self.cuts) + f", stacked={self.stacked}" * bool(self.stacked)
        more += f", matrix={self.matrix}" * any(self.matrix)
        return f"Spec({str(self)!r}{more})"

    @property
    def ndim(self) -> int:
        return len(self.dims)

    @cached_property
    def chains(self) -> Chains:
        return tuple(d.axes for d in self.dims)

    @cached_property
    def split(self) -> tuple[str, ...]:
        """The axes over which some dimension is split, in order of appearance."""
        return tuple(a for d in self.dims for a in d.axes)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Every axis the spec names: splits, then pending sums."""
        return self.split + self.pending

    @cached_property
    def has_ellipsis(self) -> bool:
        return any(d.name == ELLIPSIS for d in self.dims)

    def error(self, message: str, at: int | str | None = None, note: str = "") -> SpecError:
        """An error that shows the string, with a caret under a dimension (by number), an axis, or all of the spec."""
        shown = self if self.text else _Scanner(str(self), 0, len(str(self))).spec()
        span = shown.span
        if isinstance(at, int):
            span = shown.dims[at].span
        elif at is not None:
            pending = re.compile(rf"\+{at}\b").search(shown.text, *shown.span)
            spans = [pending.span()] if pending else [d.span for d in shown.dims if at in d.axes]
            span = spans[0] if spans else span
        return SpecError(f"{message}\n{caret(shown.text, *span, note, _label(shown.text))}")

    def expand(self, ndim: int) -> "Spec":
        """The spec for a tensor of `ndim` dimensions: `...` becomes as many unsplit, unnamed dimensions as needed."""
        if not self.has_ellipsis:
            return self
        at, count = self.names.index(ELLIPSIS), ndim - len(self.dims) + 1
        if count < 0:
            raise self.error(f"`{self}` names {dimensions(len(self.dims) - 1)} beside `...`, the tensor has {ndim}")
        free = (Dim("_", span=self.dims[at].span),) * count
        return replace(self, dims=self.dims[:at] + free + self.dims[at + 1 :])

    def without(self, axes: Iterable[str]) -> "Spec":
        """The spec with `axes` removed from every dimension and from the pending sums."""
        drop = frozenset(axes)

        def keep(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(a for a in names if a not in drop)

        dims = tuple(replace(d, axes=keep(d.axes)) for d in self.dims)
        return replace(self, dims=dims, pending=keep(self.pending), text="")

    def with_pending(self, axes: Iterable[str]) -> "Spec":
        """The spec with `axes` as further pending sums."""
        return replace(self, pending=self.pending + tuple(a for a in axes if a not in self.pending), text="")

    def as_matrix(self, sides: str) -> "Spec":
        """The spec with inputs and outputs named: `"model -> heads head"`."""
        parsed = parse_pattern(sides, 1)
        inputs, outputs = parsed.inputs[0].names, parsed.outputs[0].names
        named = inputs + outputs
        if not (inputs and outputs) or len(set(named)) < len(named) or not set(named) <= set(self.names):
            raise self.error(f"matrix={sides!r} must name dimensions of the leaf on both sides, each once")
        return replace(self, matrix=(inputs, outputs))

    def noting(self, other: "Spec") -> "Spec":
        """The spec with what `other` says of the leaf beside how it is cut: `stacked` and `matrix`."""
        return replace(self, stacked=other.stacked, matrix=other.matrix)

    def resolve(self, fn: Callable[[str], tuple[str, ...]]) -> "Spec":
        """The spec with every axis replaced by the axes `fn` gives for it (a group by its axes)."""

        def flat(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(b for a in names for b in fn(a))

        if all(fn(a) == (a,) for a in self.axes):
            return self
        dims = tuple(replace(d, axes=flat(d.axes)) for d in self.dims)
        return replace(self, dims=dims, pending=flat(self.pending))

    def prepend(self, dims: "Spec") -> "Spec":
        """The spec of a stack of such leaves: `dims` (as from `stack`) in front."""
        twice = next((a for a in dims.split if a in self.axes), None)
        if twice is not None:
            raise dims.error(f"a leaf `{self}` cannot be stacked along `{dims}`: it names `{twice}` already", twice)
        return replace(self, dims=dims.dims + self.dims, stacked=self.stacked + len(dims.dims), text="")

    def unstack(self, count: int = 1) -> "Spec":
        """The spec of one slice along the first `count` dimensions."""
        return replace(self, dims=self.dims[count:], stacked=max(0, self.stacked - count), text="")


@dataclass(frozen=True)
class Pattern:
    """`inputs -> outputs`, with the text for messages."""

    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    text: str

    @property
    def axes(self) -> frozenset[str]:
        """Every axis that the string names anywhere."""
        return frozenset(a for s in self.inputs + self.outputs for a in s.axes)


def _label(text: str) -> str:
    return "pattern" if "->" in text else "spec"


def _fail(text: str, start: int, end: int, message: str, note: str = "") -> SpecError:
    return SpecError(f"{message}\n{caret(text, start, end, note, _label(text))}")


class _Scanner:
    """A cursor over one string; every error it makes shows the string."""

    def __init__(self, text: str, start: int, end: int):
        self.text, self.at, self.end = text, start, end

    def skip(self) -> None:
        match = _SPACE.match(self.text, self.at, self.end)
        self.at = match.end() if match else self.at

    def word(self, pattern: re.Pattern[str], what: str) -> str:
        match = pattern.match(self.text, self.at, self.end)
        if not match:
            got = self.text[self.at] if self.at < self.end else ""
            got = "a space" if got.isspace() else f"`{got}`" if got else "the end"
            note = "no space may stand before `/`" if got == "`/`" and what == "a dimension name" else ""
            raise _fail(self.text, self.at, self.at + 1, f"expected {what}, found {got}", note)
        self.at = match.end()
        return match.group()

    def eat(self, token: str) -> bool:
        hit = self.text.startswith(token, self.at, self.end)
        self.at += len(token) * hit
        return hit

    def chain(self) -> tuple[str, ...]:
        axes: list[str] = []
        while self.eat("/"):
            start = self.at
            axes.append(self.word(_AXIS, "the name of a mesh axis after `/`"))
            if axes[-1] in axes[:-1]:
                raise _fail(self.text, start, self.at, f"axis `{axes[-1]}` splits the same dimension twice")
        return tuple(axes)

    def dims(self) -> Iterator[Dim]:
        self.skip()
        while self.at < self.end and self.text[self.at] not in "+@":
            start = self.at
            if self.eat(ELLIPSIS):
                name, parts = ELLIPSIS, ()
            elif self.eat("("):
                self.skip()
                inner: list[str] = []
                while not self.eat(")"):
                    inner.append(self.word(_NAME, "a dimension name or `)`"))
                    self.skip()
                parts = tuple(inner)
                name = f"({' '.join(inner)})"
            else:
                name, parts = self.word(_NAME, "a dimension name"), ()
            axes = self.chain()
            if name == ELLIPSIS and axes:
                raise _fail(self.text, start, self.at, "`...` stands for unsplit dimensions and takes no axis")
            if self.at < self.end and not self.text[self.at].isspace():
                found = self.text[self.at]
                note = "one spec stands here, without commas" if found == "," else "a space is missing?"
                raise _fail(self.text, self.at, self.at + 1, f"unexpected `{found}`", note)
            yield Dim(name, axes, parts, (start, self.at))
            self.skip()

    def spec(self) -> Spec:
        self.skip()
        begin, dims, seen = self.at, tuple(self.dims()), {}
        for d in dims:
            for a in d.axes:
                if a in seen:
                    raise _fail(self.text, *d.span, f"axis `{a}` splits two dimensions, `{seen[a]}` and `{d.name}`",
                                "one axis can split one dimension of a tensor")  # fmt: skip
                seen[a] = d.name
        if sum(d.name == ELLIPSIS for d in dims) > 1:
            raise _fail(self.text, *dims[-1].span, "`...` can stand once in a spec")
        pending: list[str] = []
        while self.eat("+"):
            start = self.at
            axis = self.word(_AXIS, "the name of a mesh axis after `+`")
            if axis in pending or axis in seen:
                how = "is pending twice" if axis in pending else f"splits `{seen[axis]}`; it cannot also be pending"
                raise _fail(self.text, start, self.at, f"axis `{axis}` {how}")
            pending.append(axis)
            self.skip()
        memory = "device"
        if self.eat("@"):
            start, memory = self.at, self.word(_AXIS, "a memory after `@`")
            if memory not in MEMORIES:
                raise _fail(self.text, start, self.at, f"unknown memory `{memory}`{nearest(memory, MEMORIES)}",
                            "host or disk")  # fmt: skip
            self.skip()
        stop = len(self.text[: self.end].rstrip())
        if self.at < self.end:
            raise _fail(self.text, self.at, stop, "nothing may follow the pending sums and the memory")
        return Spec(dims, tuple(pending), memory, text=self.text, span=(min(begin, stop), stop))


def parse(text: str) -> Spec:
    """Parse one spec, as annotations and borders take it. Raises `SpecError` with a caret under the culprit."""
    if not isinstance(text, str):
        raise SpecError(f"a spec is a string such as 'd_model/dp heads/tp', not {text!r}")
    return _parse(text)


@lru_cache(maxsize=4096)
def _parse(text: str) -> Spec:
    arrow = text.find("->")
    if arrow >= 0:
        raise _fail(text, arrow, arrow + 2, "one spec is expected here, not a pattern")
    spec = _Scanner(text, 0, len(text)).spec()
    for d in spec.dims:
        if d.name.startswith("("):
            raise _fail(text, *d.span, "parentheses stand in the patterns of `rearrange` only", "name the product")
    return spec


def as_spec(spec: "str | Spec") -> Spec:
    """A parsed spec from either form."""
    return spec if isinstance(spec, Spec) else parse(spec)


def _specs(text: str, start: int, end: int) -> tuple[Spec, ...]:
    out = []
    while True:
        comma = text.find(",", start, end)
        out.append(_Scanner(text, start, end if comma < 0 else comma).spec())
        if comma < 0:
            return tuple(out)
        start = comma + 1


@lru_cache(maxsize=4096)
def parse_pattern(text: str, inputs: int | None = None, outputs: int | None = 1) -> Pattern:
    """Parse `"a b/x, b/x c -> a c +x"`. `inputs` and `outputs`: how many specs each side must have."""
    arrow = text.find("->")
    if arrow < 0:
        what = "a pattern says how a value is split before and after, `before -> after`; this one has no `->`"
        given = text.split("+")[0].strip()
        note = f"write `-> {given}`" if "+" in text and "," not in text else "write `->` and how the result is split"
        raise SpecError(f"{what}\n{caret(text, len(text), len(text) + 1, note)}")
    if text.find("->", arrow + 2) >= 0:
        at = text.find("->", arrow + 2)
        raise _fail(text, at, at + 2, "a pattern has one `->`")
    left, right = _specs(text, 0, arrow), _specs(text, arrow + 2, len(text))
    for side, want, got in (("left", inputs, left), ("right", outputs, right)):
        if want is not None and len(got) != want:
            raise _fail(
                text,
                got[0].span[0],
                got[-1].span[1],
                f"{_count(want)} on the {side} of `->` expected, found {len(got)}",
            )
    return Pattern(left, right, text)


@lru_cache(maxsize=4096)
def parse_list(text: str, count: int) -> tuple[Spec, ...]:
    """Parse `"batch/dp seq vocab/tp, batch/dp seq"`: `count` specs separated by commas."""
    found = _specs(text, 0, len(text))
    if len(found) != count:
        raise _fail(text, 0, len(text), f"{_count(count)} expected, separated by commas, found {len(found)}")
    return found


def _count(n: int) -> str:
    return "one spec" if n == 1 else f"{n} specs"
