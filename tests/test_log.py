"""The log of a rank, and `shardlib hang`, which reads the logs of all."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor
from torch.fx import GraphModule

import shardlib as sl
from shardlib import log, watch
from shardlib.cli import main
from shardlib.cli.hang import report
from shardlib.graph.digests import place

AXES = dict(dp=2)


def two(p: dict[str, Tensor], batch: Tensor) -> Tensor:
    w = sl.gather(p["w"], "dp")
    return sl.psum(batch @ w, "dp")


def inputs() -> Any:
    params = sl.shard({"w": torch.ones(4, 3)}, {"w": "m/dp n"})
    return params, sl.shard(torch.ones(2, 4), "batch/dp m")


def run_of(stop: Any = None) -> Any:
    """The function jitted; `stop()` runs before its second collective."""

    def stopping(module: GraphModule) -> GraphModule:
        node = next(n for n in module.graph.nodes if "all_reduce" in n.name)
        with module.graph.inserting_before(node):
            module.graph.call_function(stop, ())
        return module

    passes = [] if stop is None else [stopping]
    return sl.jit(sl.shard_map(two, in_specs=None, out_specs="batch m"), passes=passes)


def test_every_collective_starts_and_is_waited_for(monkeypatch, tmp_path):
    def body() -> int:
        with sl.make_mesh(AXES):
            f, args = run_of(), inputs()
            for _ in range(2):
                f(*args)
            return os.getpid()

    monkeypatch.setenv("SHARDLIB_LOG", str(tmp_path / "logs"))
    on_ranks(2, body)
    logs = log.read(tmp_path / "logs")
    assert sorted(logs) == [0, 1]
    for lines in logs.values():
        said = [(x.call, x.name, x.step, x.event, x.number) for x in lines]
        once = [("call", 0), ("start", 1), ("done", 1), ("start", 2), ("done", 2), ("return", 0)]
        assert said == [(step, "two", step, *what) for step in (1, 2) for what in once]
        assert lines[0].text == "dp=2"
        assert lines[1].text.startswith("all_gather `0.w` over `dp`, float32[2, 3]")
        assert lines[3].text.startswith("psum `") and [x.time for x in lines] == sorted(x.time for x in lines)
    assert report(logs)[0] == "no rank waits for a collective"


def test_a_killed_rank_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(watch, "ANSWER", 0.5)

    def body() -> None:
        with sl.make_mesh(AXES) as mesh:
            steps = []

            def stop() -> None:
                steps.append(1)
                if mesh.rank == 1 and len(steps) == 3:
                    os.kill(os.getpid(), signal.SIGKILL)

            f, args = run_of(stop), inputs()
            for _ in range(3):
                f(*args)

    monkeypatch.setenv("SHARDLIB_LOG", str(tmp_path))
    with pytest.raises(AssertionError, match=r"rank 1 of 2 died with exit code -9") as failed:
        on_ranks(2, body, seconds=30)
    assert main(["hang", str(tmp_path)]) == 0
    first, second, _, *last = capsys.readouterr().out.splitlines()
    assert first.startswith("rank 1 did not reach psum `"), first
    assert "over `dp` (#2 of step 3 of two); last waited for all_gather `0.w` over `dp`, float32[2, 3]" in first
    assert second == "rank 0 waits there"
    assert [line.split(":")[0] for line in last] == ["rank 0", "rank 1"]
    assert "; rank 0 waited for psum `" in str(failed.value) and "(#2 of step 3 of two)" in str(failed.value)


def test_the_command_and_an_empty_folder(tmp_path, capsys):
    assert main(["hang", str(tmp_path)]) == 1
    assert "holds no logs: start the run with SHARDLIB_LOG=" in capsys.readouterr().out


def lines(*events: tuple[str, int, str], call: int = 1) -> list[log.Line]:
    return [log.Line(float(i), call, "f", call, event, n, text) for i, (event, n, text) in enumerate(events)]


def test_who_did_not_come_on_two_axes():
    begun = ("call", 0, "dp=2,tp=2")
    over_tp = [("start", 1, "psum `a` over `tp`, float32[2], m.py:3"), ("done", 1, "psum `a` over `tp`, float32[2]")]
    gather = ("start", 2, "all_gather `b` over `dp`, float32[2], m.py:4")
    logs = {0: lines(begun, *over_tp, gather), 1: lines(begun, *over_tp, gather), 2: lines(begun, *over_tp, gather)}
    logs[3] = lines(begun, over_tp[0], over_tp[1])
    said = report(logs)
    assert said[:2] == [
        "rank 3 did not reach all_gather `b` over `dp` (#2 of step 1 of f); last waited for psum `a` over `tp`, "
        "float32[2] (#1), step 1 of f, at 2.000",
        "ranks 0, 1, 2 wait there",
    ]
    logs[3] = lines(begun, *over_tp, ("start", 2, "psum `c` over `dp`, float32[2], m.py:5"))
    assert report(logs)[:5] == [
        "ranks differ in #2 of step 1 of f:",
        "  rank 0: all_gather `b` over `dp`",
        "  rank 1: all_gather `b` over `dp`",
        "  rank 2: all_gather `b` over `dp`",
        "  rank 3: psum `c` over `dp`",
    ]
    logs[3] = lines(begun, *over_tp, gather)
    assert report(logs)[0].startswith("ranks 0, 1, 2, 3 wait for collectives that all have reached")
    del logs[3]
    assert report(logs)[0].startswith("rank 3 did not reach all_gather `b`") and "it wrote no log" in report(logs)[0]


def test_ranks_of_a_pipeline_send_on_their_own():
    """Each numbers what it sends, so the same collective has another number on each."""
    sends = [(event, n, f"send `F0.{n}` over `pp`, float32[2]") for n in (1, 2) for event in ("start", "done")]
    first = ("psum `a` over `pp`, float32[2], m.py:3", "psum `b` over `pp`, float32[2], m.py:4")
    begun = ("call", 0, "dp=1,pp=2")
    ahead = [("start", 1, first[0]), ("done", 1, first[0]), ("start", 2, first[1])]
    logs = {0: lines(begun, *sends, ("start", 3, first[0]), ("done", 3, first[0])), 1: lines(begun, *ahead)}
    said = report(logs)
    assert said[0].startswith("rank 0 did not reach psum `b` over `pp` (#2 of step 1 of f); last waited for psum `a`")
    assert said[1] == "rank 1 waits there"


def test_a_file_is_a_ring(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "LIMIT", 2000)
    one = log.Log(str(tmp_path), 5)

    def summed(xs: list[Tensor]) -> list[Tensor]:
        one.start("psum `a` over `dp`")
        one.done("psum `a` over `dp`")
        return xs

    run = one.around(summed, "f", "dp=2")
    for _ in range(100):
        run([])
    files = sorted(tmp_path.iterdir(), key=str)
    assert [f.name for f in files] == ["rank5.log", "rank5.old.log"] and sum(f.stat().st_size for f in files) < 5000
    read = log.read(tmp_path)[5]
    assert read[-1].event == "return" and read[-1].step == 100
    assert [x.time for x in read] == sorted(x.time for x in read) and len({x.step for x in read}) > 10
    Path(tmp_path, "rank5.log").write_text(Path(tmp_path, "rank5.log").read_text() + "12.5\t101\tf")  # cut off
    assert log.read(tmp_path)[5] == read


def test_the_place_of_a_node_is_the_innermost_line_of_the_user():
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    assert place(node) == []
    node.stack_trace = 'File "/home/me/model.py", line 31, in block\n  File "/x/torch/functional.py", line 5, in f\n'
    assert place(node) == ["model.py:31"]


@pytest.mark.parametrize(
    "title, short",
    [
        ("psum `w` over `dp`, float32[2], a.py:3", "psum `w` over `dp`"),
        (
            "all_gather `0.a, 0.b and 3 more` over `dp,tp`, float32[4, 2]",
            "all_gather `0.a, 0.b and 3 more` over `dp,tp`",
        ),
        ("send 1 to 2, float32[3]", "send 1 to 2"),
    ],
)
def test_of_a_title_the_op_and_the_names(title, short):
    assert log.brief(title) == short
