"""Types against those of spmd_types, on generated programs (tests/verdicts.py makes and runs them).

Both libraries give every value one of I, R, V, P per axis of the mesh. Where both speak of the same thing they must say
the same: a step is refused by both or by neither, and its result has the same type over every axis. The programs are
straight lines of the local ops and collectives in `ACCEPTS`, on operands of all types over one or two axes. They are
written for either library as it wants them, which differs in this: where an invariant operand meets another, shardlib
inserts `pvary`; for spmd_types `convert(src=I, dst=R)` is written out, for that operand and axis.

Left out is what `DIFFERENCES` lists, where the verdicts differ and are meant to (each is tried here), and what one of
the two lacks (`LACKS`). Types of gradients are not compared: they are the duals, by one table in either library.
"""

import json
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

# Operands' types on one axis, shardlib's verdict, that of spmd_types, and why they differ.
DIFFERENCES = [
    ("join", "IR", "R", "refused", "shardlib inserts pvary"),
    ("join", "IV", "V", "refused", "shardlib inserts pvary"),
    ("scaled by I", "PI", "P", "refused", "shardlib inserts pvary"),
    (
        "cast",
        "P",
        "P",
        "refused",
        "linear; spmd_types has no rule for Tensor.to and refuses P in what it does not know",
    ),
    ("index", "P", "P", "refused", "the same for x[0]"),
    ("linear", "PR", "P", "refused", "the same for F.linear"),
    ("plus zero", "P", "P", "refused", "spmd_types does not look at the number"),
    ("pvary again", "R", "R", "refused", "states what holds: shardlib's pvary changes I alone; `convert` asks for it"),
    ("pvary again", "V", "V", "refused", "as above"),
    ("pvary again", "P", "P", "refused", "as above"),
    ("pending again", "P", "P", "refused", "states what holds; `reinterpret` asks for V"),
    ("constant", "", "I", "R", "a constant has no gradient, in which alone I and R differ"),
]
LACKS = {
    "spmd_types": "ppermute, pmax, pbroadcast, ragged_all_to_all, axis_index; types over axes of size 1",
    "shardlib": "all_reduce to R; convert of I or R to V or P, of V to P by zeros, and of R to I",
}
# What a step accepts, over each axis alone: the types of its operands.
ONE, TWO = [*"IRVP"], [a + b for a in "IRV" for b in "IRV"]
SCALED = [*TWO, "PI", "PR", "IP", "RP"]
LINEAR = "neg transpose sum mean cumsum narrow flip reshape scale halve".split()
GROUPS = [
    (LINEAR, ONE),
    ("shift from_one one_over tanh relu abs exp square softmax amax".split(), [*"IRV"]),
    (["add", "sub", "cat"], [*TWO, "PP"]),
    (["mul", "matmul", "einsum"], SCALED),
    (["div"], [*TWO, "PI", "PR"]),
    (["maximum"], TWO),
    (["addmm"], [a + b for a in "IRV" for b in TWO] + ["P" + b for b in SCALED if "P" in b]),
    (["psum", "psum_scatter"], ["V", "P"]),
    (["all_gather", "all_gather_invariant", "all_to_all", "pending"], ["V"]),
    (["pvary"], ["I"]),
]
ACCEPTS = {op: kinds for ops, kinds in GROUPS for op in ops}
PROGRAMS, STEPS = 300, 8


@cache
def verdicts() -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).parent / "verdicts.py"), "0", str(PROGRAMS)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def over(step: dict[str, Any]) -> list[str]:
    """The operands' types over each axis that the step looks at."""
    at = [step["axes"].index(step["axis"])] if step["axis"] else range(len(step["axes"]))
    return ["".join(kind[i] for kind in step["operands"]) for i in at]


def test_both_say_the_same_of_every_step():
    steps = verdicts()["steps"]
    assert len(steps) == PROGRAMS * STEPS
    assert not [s for s in steps if s["ours"] != s["theirs"]]


def test_what_is_accepted_is_what_the_table_says():
    for step in verdicts()["steps"]:
        accepted = all(kinds in ACCEPTS[step["op"]] for kinds in over(step))
        assert (step["ours"] != "refused") == accepted, step


def test_the_programs_are_not_vacuous():
    steps = verdicts()["steps"]
    refused = Counter(s["op"] for s in steps if s["ours"] == "refused")
    accepted = Counter(s["op"] for s in steps if s["ours"] != "refused")
    assert set(accepted) == set(ACCEPTS) and min(accepted.values()) >= 10
    assert set(refused) == set(ACCEPTS) - {*LINEAR, "pvary"} and min(refused.values()) >= 10
    assert sum(refused.values()) > len(steps) / 5
    assert {len(s["axes"]) for s in steps} == {1, 2}
    seen = {(s["op"], kinds) for s in steps for kinds in over(s)}
    for ops in (["add", "sub", "cat"], ["mul", "matmul", "einsum"]):
        assert {a + b for a in "IRVP" for b in "IRVP"} <= {kinds for op, kinds in seen if op in ops}
    assert {(op, kind) for op in ("tanh", "neg", "psum", "all_gather", "all_to_all") for kind in ONE} <= seen


def test_what_is_left_out_differs_as_stated():
    assert verdicts()["differences"] == [list(row[:4]) for row in DIFFERENCES]
