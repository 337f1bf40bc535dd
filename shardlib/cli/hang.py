"""`shardlib hang DIR`: which rank of a hung run did not reach which collective, from the logs of `SHARDLIB_LOG`."""

import re
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardlib.log import Line, brief, read
from shardlib.mesh import Mesh
from shardlib.wire import named

Place = tuple[int, str, int]  # a collective: the number of the call, its axes, its number in it among those over them


def add(parser: ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("folder", type=Path, help="what SHARDLIB_LOG was when the run hung")


def run(args: Namespace) -> int:
    """Print the report; 1 where there is nothing to read."""
    logs = read(args.folder) if args.folder.is_dir() else {}
    if not any(logs.values()):
        print(f"{args.folder} holds no logs: start the run with SHARDLIB_LOG={args.folder}")
        return 1
    print("\n".join(report(logs)))
    return 0


def report(logs: Mapping[int, Sequence[Line]]) -> list[str]:
    """The findings, then the last line of every rank."""
    mesh = _mesh(logs)
    started = {r: _places(lines) for r, lines in logs.items()}
    waits = {r: _open(lines, started[r]) for r, lines in logs.items()}
    findings = []
    for place in sorted({p for ps in waits.values() for p in ps}, key=lambda p: min(_times(started, p))):
        those = [r for r, ps in waits.items() if place in ps]
        line = started[those[0]][place]
        members = {m for r in those for m in mesh.members(r, _axes(line))}
        others = {r for r in members if r in logs and place in started[r]}
        told = {r: brief(started[r][place].text) for r in others}
        where = f"{brief(line.text)} (#{line.number} of step {line.step} of {line.name})"
        if len(set(told.values())) > 1:
            findings += [f"ranks differ in #{line.number} of step {line.step} of {line.name}:"]
            findings += [f"  rank {r}: {text}" for r, text in sorted(told.items())]
        elif missing := sorted(members - others):
            findings += [f"rank {r} did not reach {where}; {_last(logs.get(r, ()))}" for r in missing]
        if findings:
            findings.append(f"{named(those)} wait{'s' * (len(those) == 1)} there")
            break
    if not findings:
        absent = sorted({*range(mesh.total)} - {*logs})
        findings = [f"{named(absent)} wrote no log"] if absent else []
        waiting = [r for r, ps in waits.items() if ps]
        say = f"{named(waiting)} wait for collectives that all have reached: the network, or a rank that died"
        findings.append(say if waiting else "no rank waits for a collective")
    return [*findings, "", *(f"rank {r}: {_last(logs.get(r, ()))}" for r in range(mesh.total))]


def _places(lines: Sequence[Line]) -> dict[Place, Line]:
    """Where a rank started each collective. Not what one rank sends to another, of which each has its own."""
    found: dict[Place, Line] = {}
    count = Counter[tuple[int, str]]()
    for x in lines:
        if x.event == "start" and not x.text.startswith("send "):
            over = x.call, ",".join(_axes(x))
            found[*over, count[over]] = x
            count[over] += 1
    return found


def _open(lines: Sequence[Line], started: Mapping[Place, Line]) -> list[Place]:
    """The collectives of its last call that a rank started and has not waited for."""
    done = {(x.call, x.number) for x in lines if x.event == "done"}
    last = lines[-1].call if lines else 0
    return [p for p, x in started.items() if x.call == last and (x.call, x.number) not in done]


def _times(started: Mapping[int, Mapping[Place, Line]], place: Place) -> list[float]:
    return [at[place].time for at in started.values() if place in at]


def _mesh(logs: Mapping[int, Sequence[Line]]) -> Mesh:
    """The mesh of the last calls."""
    names = [line.text for lines in logs.values() for line in lines if line.event == "call"]
    sizes = dict(pair.split("=") for pair in (names or [""])[-1].split(",") if pair)
    return Mesh({axis: int(n) for axis, n in sizes.items()}, simulate=True)


def _axes(line: Line) -> list[str]:
    return re.findall(r" over `([^`]*)`,", line.text)[-1].split(",")


def _last(lines: Sequence[Line]) -> str:
    """What a rank did last."""
    if not lines:
        return "it wrote no log"
    x = lines[-1]
    what = {"call": "began", "return": "finished", "start": "started", "done": "waited for"}[x.event]
    place = f" {x.text} (#{x.number})," if x.number else ""
    return f"last {what}{place} step {x.step} of {x.name}, at {x.time:.3f}"
