"""A config as code of the library."""

from shardlib.interop.deepspeed.calls import code
from shardlib.interop.deepspeed.config import Config


def explain(config: Config) -> str:
    """Source that makes what `config` has, then, as comments, what was left out and why.

    It defines MESH and BATCH, and functions: `train_step(loss, specs)`, which gives the compiled step, is the last.
    """
    rows = f"{config.accumulate} x {config.microbatch} rows"
    lines = [
        "import shardlib as sl",
        "",
        f"MESH = {code(config.mesh)}  # for sl.make_mesh(MESH)",
        f"BATCH = {config.batch}  # rows of a step: on each of {config.dp} ranks {rows}",
    ]
    lines += [f"EVERY = {config.every}  # steps from one report to the next"] if config.every else []
    for name in ("schedule", "optimizer", "precision"):
        if config.calls[name] is not None:
            lines += ["", f"{name} = {code(config.calls[name], used=len(name) + 3)}"]
    lines += ["", "", "def layout(specs):", f"    return {code(config.calls['layout'], 4, 11)}"]
    if config.calls["monitors"]:
        lines += ["", "", "def monitors():", f"    return {code(config.calls['monitors'], 4, 11)}"]
    options = ["layout=layout(specs)", f"accumulate={config.accumulate}"]
    options += [] if config.calls["precision"] is None else ["precision=precision"]
    options += [] if config.clip is None else [f"clip={config.clip}"]
    taken = "loss, specs, optimizer" if config.calls["optimizer"] is None else "loss, specs"
    lines += [
        "",
        "",
        f"def train_step({taken}):",
        f"    step = sl.step(loss, optimizer, {', '.join(options)})",
        "    return sl.jit(step, donate_argnums=0)",
    ]
    if config.notes:
        lines += ["", "", "# Left out, or not as it is written:"]
        lines += [f"# {code(path)[1:-1]}: {why}" for path, why in sorted(config.notes.items())]
    return "\n".join(lines) + "\n"
