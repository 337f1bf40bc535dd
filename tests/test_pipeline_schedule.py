"""Schedules as data: what the papers say of them, what cannot run, how they are drawn."""

import itertools
import xml.etree.ElementTree as ET

import pytest

from benchmarks import pipeline_bubble
from shardlib.errors import ScheduleError
from shardlib.pipeline import schedules
from shardlib.pipeline.actions import COMPUTE, Action
from shardlib.pipeline.schedule import Schedule

RECIPES = {
    "gpipe": schedules.gpipe,
    "one_f_one_b": schedules.one_f_one_b,
    "interleaved": lambda m: schedules.interleaved(m, 2),
    "zero_bubble": schedules.zero_bubble,
    "zbv": schedules.zbv,
    "dualpipe_v": schedules.dualpipe_v,
}


@pytest.mark.parametrize("name", RECIPES)
def test_every_schedule_is_proven_on_any_number_of_ranks(name: str) -> None:
    for p in range(1, 6):
        for m in (1, 2, 4, 7, 13):
            made = RECIPES[name](m)(p)
            assert (made.ranks, made.microbatches, made.stages % p) == (p, m, 0)
            done = [a for row in made.lists for a in row if a.kind in COMPUTE]
            assert len(done) == made.stages * m * (3 if any(a.kind == "W" for a in done) else 2) or name == "dualpipe_v"


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 12)])
def test_idle_time_and_live_activations_are_the_theorys(p: int, m: int) -> None:
    made = {name: recipe(m)(p) for name, recipe in RECIPES.items()}
    idle = {"gpipe": m, "one_f_one_b": m, "interleaved": 2 * m, "zero_bubble": 3 * m, "zbv": 6 * m, "dualpipe_v": 6 * m}
    for name, n in idle.items():
        assert made[name].idle() == pytest.approx((p - 1) / (n + p - 1), abs=1e-12), name
    assert made["gpipe"].live() == (m,) * p
    assert made["one_f_one_b"].live() == tuple(range(p, 0, -1))
    assert made["zero_bubble"].live() == (p,) * p
    assert made["zbv"].live() == (2 * p,) * p
    assert made["zbv"].bubble() == 0 and made["zero_bubble"].bubble() == p - 1 and made["gpipe"].bubble() == 3 * (p - 1)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 9), (4, 8)])
def test_the_benchmark_finds_all_as_the_theory_has_it(p: int, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle time and live activations of all six, interleaved with two and three stages on a rank."""
    monkeypatch.setattr("sys.argv", ["pipeline_bubble", "--ranks", str(p), "--microbatches", str(m)])
    pipeline_bubble.main()  # exits where one is not


def test_costs_and_transfers_take_time() -> None:
    made = schedules.gpipe(1)(2)
    spans = made.timeline(forward=2, input=3, weight=4, send=0.5)
    assert [spans[Action(*a)] for a in (("F", 0, 0), ("F", 1, 0), ("B", 1, 0), ("B", 0, 0))] == [
        (0, 2),
        (2.5, 4.5),
        (4.5, 11.5),
        (12, 19),
    ]
    assert made.idle(forward=2, input=3, weight=4, send=0.5) == pytest.approx(1 - 18 / 38)


def test_a_stage_may_cost_more_than_the_others() -> None:
    """By hand: of 15 units rank 0 works 6, rank 1 with its stage twice as slow 12; of 17, with a slow forward of the
    last of four stages, rank 0 works 12 and rank 1 14."""
    made = schedules.gpipe(2)(2)
    slow = dict(forward=[1, 2], input=[1, 2], weight=[1, 2])
    assert made.idle(**slow) == pytest.approx(1 - 18 / 30)
    assert schedules.interleaved(2, 2)(2).idle(forward=[1, 1, 1, 2]) == pytest.approx(1 - 26 / 34)
    assert made.bubble(**slow) == 9 and made.idle(forward=(1, 1), send=[0, 0]) == made.idle()
    assert made.as_text(**slow).splitlines() == [
        "  0 F0 F1 " + "·" * 21 + "B0    " + "·" * 6 + "B1",
        "  1    F0    F1    B0          B1",
    ]
    spans = schedules.gpipe(1)(2).timeline(send=[3, 0.5])
    assert [spans[Action(*a)].start for a in (("F", 1, 0), ("B", 1, 0), ("B", 0, 0))] == [4, 5, 7.5]
    with pytest.raises(ScheduleError, match="input= lists 3 costs, and gpipe on 2 ranks has 2 stages: give one for"):
        made.idle(input=[1, 2, 3])


def test_what_is_computed_is_enough_and_receives_come_early() -> None:
    made = Schedule([["F0.0", "F0.1", "B0.0", "B0.1"], ["F1.0", "B1.0", "F1.1", "B1.1"]])
    assert [" ".join(map(str, row)) for row in made.lists] == [
        "F0.0 SF0.0 F0.1 SF0.1 RB0.0 RB0.1 B0.0 B0.1",
        "RF1.0 RF1.1 F1.0 B1.0 SB1.0 F1.1 B1.1 SB1.1",
    ]
    assert Schedule(made.lists) == made, "a whole table says the same"


ONE = ["F0.0", "SF0.0", "F0.1", "SF0.1", "RB0.0", "B0.0", "RB0.1", "B0.1"]
TWO = ["RF1.0", "F1.0", "B1.0", "SB1.0", "RF1.1", "F1.1", "B1.1", "SB1.1"]


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        ([["F0.0", "G0.0"]], r"rank 0, step 1: 'G0.0' is no action"),
        ([["F0.0", "F0.0", "B0.0"]], r"rank 0, step 1: F0.0 stands twice, first at rank 0, step 0"),
        ([["F0.0"], ["F1.0", "B1.0"]], r"rank 0, step 0: F0.0 is there, B0.0 is missing; micro-batches: 1$"),
        ([["F0.0", "I0.0"]], r"rank 0, step 0: F0.0 is there, W0.0 is missing"),
        ([["F0.0", "B0.0", "B0.1"]], r"rank 0, step 2: B0.1 is there, F0.1 is missing"),
        ([["F0.0", "B0.0", "F0.2", "B0.2"]], r"rank 0, F0.1 is missing; micro-batches: 3"),
        ([[], []], r"a schedule has actions; these lists are empty"),
        ([["F0.0", "B0.0", "W0.0"]], r"rank 0, step 1: B0.0 stands beside I or W"),
        ([["F0.0", "B0.0", "F1.0"], ["B1.0"]], r"rank 1, step 0: B1.0 is an action of stage 1, which rank 0 holds"),
        ([["F0.0", "B0.0", "F1.0", "B1.0"], []], r"stages 0 to 1 lie on ranks `0` and `0`; each of 2 ranks"),
        ([["F0.0", "B0.0"], ["F2.0", "B2.0"]], r"rank 1, step 0: F2.0 is of stage 2, but no action is of stage 1"),
        (
            [["B0.0", "F0.0"], ["F1.0", "B1.0"]],
            r"cannot go on:\n  rank 0, step 0: B0.0 waits for F0.0, step 1 of rank 0 and B1.0, step 1 of rank 1\n"
            r"  rank 1, step 0: F1.0 waits for F0.0, step 1 of rank 0",
        ),
        ([ONE, ["RF1.1", "F1.0", "B1.0", "SB1.0", "RF1.0", *TWO[5:]]], r"rank 0 to 1 differ at number 0:\n.*SF0.0"),
        ([ONE, [a for a in TWO if a != "SB1.1"]], r"from rank 1 to 0 differ at number 1:\n  rank 1: nothing\n.*RB0.1"),
        ([ONE, ["F1.0", "RF1.0", *TWO[2:]]], r"rank 1, step 0: F1.0 waits for RF1.0, step 1 of rank 1"),
        ([[*ONE, "SB0.0"], TWO], r"rank 0, step 8: SB0.0 has no other rank at its end"),
        ([["F0.0", "B0.0", "R0.0"], ["F1.0", "B1.0"]], r"rank 1, step 1: no R1.0 comes after B1.0: where some grad"),
        ([["F0.0", "R0.0", "B0.0"]], r"rank 0, step 2: no R0.0 comes after B0.0"),
        ([["GF0.0", "F0.0", "B0.0"], ["F1.0", "GB1.0", "B1.0"]], r"rank 1, step 0: F1.0 comes before GF1.0: where"),
    ],
)
def test_what_cannot_run_says_rank_step_and_action(lists: list[list[str]], said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        Schedule(lists)


def test_two_whole_lists_run() -> None:
    assert Schedule([ONE, TWO]).idle() == pytest.approx(1 / 3)


def test_numbers_of_micro_batches_and_ranks() -> None:
    with pytest.raises(ScheduleError, match="gpipe: microbatches is a whole number from 1, not 0"):
        schedules.gpipe(0)
    with pytest.raises(ScheduleError, match="interleaved: v is how many stages a rank holds"):
        schedules.interleaved(4, 0)
    with pytest.raises(ScheduleError, match="a pipeline has a whole number of ranks from 1, not 0"):
        schedules.zbv(4)(0)


def test_drawn(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    made = schedules.one_f_one_b(3)(2)
    made.show(str(tmp_path / "picture.svg"))
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["  0 F0 F1 ······B0    F2 B1    ···B2", "  1    F0 B0    F1 B1    F2 B2"]
    assert printed[2] == "one_f_one_b: idle 25.0%; live activations by rank: 2 1"
    boxes = [e for e in ET.parse(tmp_path / "picture.svg").getroot() if e.get("fill-opacity")]
    assert len(boxes) == 12 and {e.get("width") for e in boxes} == {"26.0", "52.0"}


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_drawn_lies_beside_each_other_in_the_picture(name: str) -> None:
    made = Schedule(RECIPES[name](7)(3).lists, "1 < 2 & 3")
    picture = ET.fromstring(made.as_svg(forward=2, input=1, weight=1.5, send=0.25))
    wide, rows = float(picture.get("width", 0)), dict[str, list[tuple[float, float]]]()
    for e in picture:
        if e.get("fill-opacity"):
            x = float(e.get("x", 0))
            rows.setdefault(e.get("y", ""), []).append((x, x + float(e.get("width", 0))))
    assert len(rows) == 3 and sum(map(len, rows.values())) == sum(a.kind in COMPUTE for r in made.lists for a in r)
    for row in rows.values():
        assert all(a[1] <= b[0] + 0.2 for a, b in itertools.pairwise(row)) and row[-1][1] < wide
