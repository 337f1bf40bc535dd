"""Idle time and live activations of every schedule by the simulator, beside what the papers give.

    python -m benchmarks.pipeline_bubble [--ranks 4] [--microbatches 8] [--forward 1 --input 1 --weight 1] [--json]

A stage's forward, the gradients of its input and those of its weights take one unit each (a rank's stages share it, so
that all schedules do the same work); sending takes none. Exits with 1 where a figure is not the theory's.
"""

import argparse
import json
import sys

from shardlib.pipeline import schedules


def rows(p: int, m: int) -> list[tuple[schedules.Recipe, float, int]]:
    """Each schedule with the idle fraction and the most live stages of a rank that the theory gives (costs equal)."""
    return [
        (schedules.gpipe(m), (p - 1) / (m + p - 1), m),
        (schedules.one_f_one_b(m), (p - 1) / (m + p - 1), min(m, p)),
        (schedules.interleaved(m, 2), (p - 1) / (2 * m + p - 1), 3 * p - 1),
        (schedules.interleaved(m, 3), (p - 1) / (3 * m + p - 1), 4 * p - 1),
        (schedules.zero_bubble(m), (p - 1) / (3 * m + p - 1), min(m, p)),
        (schedules.zbv(m), (p - 1) / (6 * m + p - 1), 2 * p),
        (schedules.dualpipe_v(m), (p - 1) / (6 * m + p - 1), 2 * p + 1),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    for name in ("forward", "input", "weight", "send"):
        parser.add_argument(f"--{name}", type=float, default=float(name != "send"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    p, m = args.ranks, args.microbatches
    costs = {k: getattr(args, k) for k in ("forward", "input", "weight", "send")}
    uniform = costs == dict(forward=1, input=1, weight=1, send=0) and m >= 2 * p and m % p == 0
    print(f"{'schedule':<16}{'stages':>7}{'idle':>9}{'theory':>9}{'waits':>7}{'live':>6}{'bound':>7}")
    out, wrong = {}, []
    for recipe, theory, bound in rows(p, m):
        schedule = recipe(p)
        v = schedule.stages // p
        each = {k: c if k == "send" else c / v for k, c in costs.items()}
        idle, live = schedule.idle(**each), max(schedule.live())
        name = f"{schedule.name}{f' v={v}' * (v > 1)}"
        print(
            f"{name:<16}{schedule.stages:>7}{idle:>9.4f}{theory:>9.4f}{schedule.bubble(**each):>7.2f}{live:>6}{bound:>7}"
        )
        out[name] = {"idle": idle, "theory": theory, "waits": schedule.bubble(**each), "live": live, "bound": bound}
        if uniform and (abs(idle - theory) > 1e-9 or live > bound):
            wrong.append(name)
    if args.json:
        print(json.dumps({"ranks": p, "microbatches": m, "schedules": out}))
    if wrong:
        sys.exit(f"not as the theory has it: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
