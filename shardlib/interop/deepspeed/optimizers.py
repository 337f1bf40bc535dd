"""DeepSpeed's optimizers and schedulers by their names, as calls of `sl.optim`."""

from functools import partial
from typing import Any

from shardlib.errors import listing, nearest
from shardlib.interop.deepspeed.calls import Call, Name, call
from shardlib.interop.deepspeed.read import Settings
from shardlib.spec import Spec

ADAM = "lr betas eps weight_decay adam_w_mode torch_adam"
TAKEN = {  # the honoured parameters of each optimizer, by its name in lower case
    "adam": ADAM,
    "adamw": ADAM,
    "lamb": "lr betas eps weight_decay min_coeff max_coeff",
    "lion": "lr betas weight_decay",
    "muon": f"{ADAM} momentum muon_lr adam_lr",
    "sgd": "lr weight_decay momentum nesterov",
}
NAMES = {"adam": "Adam", "adamw": "AdamW", "lamb": "Lamb", "lion": "Lion", "muon": "Muon", "sgd": "SGD"}
BETAS = dict.fromkeys(("adam", "adamw", "lamb", "lion"), (0.9, 0.999)) | {"muon": (0.9, 0.95)}
REJECTED = {
    "adagrad": "there is no Adagrad",
    "muadam": "it needs the package mup; give every part of the parameters its rate with `sl.optim.by_path`",
    "onebitadam": "removed from DeepSpeed; `communication_data_type` of 16 bits halves what gradients send",
}
REJECTED |= dict.fromkeys(("muadamw", "musgd"), REJECTED["muadam"])
REJECTED |= dict.fromkeys(("onebitlamb", "zerooneadam"), REJECTED["onebitadam"])


def matrices(path: str, spec: Spec) -> bool:
    """The leaves that DeepSpeed trains with Muon: of two and more dimensions, "embed" and "lm_head" not in the name."""
    named = any(word in path.lower() for word in ("embed", "lm_head"))
    return len(spec.dims) - spec.stacked >= 2 and not named


MATRICES = Name("sl.interop.deepspeed.matrices")


def optimizer(settings: Settings) -> tuple[Call | None, Call | None]:
    """The optimizer, which takes a schedule from the variable `schedule`, and the schedule; None where none is given.

    What they cannot do is added to the problems.
    """
    said = settings.get("optimizer.type")
    kind, lr = (said or "").lower(), settings.get("optimizer.params.lr")
    if said and kind not in TAKEN:
        known = [NAMES[k] for k in TAKEN]
        why = REJECTED.get(kind) or f"there are {listing(known)}{nearest(said, known)}"
        settings.problems.append(f'`optimizer.type` = "{said}" is rejected: {why}')
    elif said:
        _only(settings, "optimizer", NAMES[kind], TAKEN[kind])
        if kind == "muon":
            lr = _param(settings, "muon_lr", 0.02 if lr is None else lr)
        lr = 1e-3 if lr is None else lr
    else:
        for name in settings.under("optimizer"):
            settings.problems.append(f"`optimizer.{name}`: `optimizer.type` is missing")
    made = schedule(settings, lr)
    if kind not in TAKEN:
        return None, made
    return _OPTIMIZERS[kind](settings, kind, lr if made is None else Name("schedule")), made


def _only(settings: Settings, section: str, kind: str, taken: str) -> None:
    """A problem for every parameter that this type does not take."""
    for name in settings.under(f"{section}.params"):
        if name not in taken.split():
            path = f"{section}.params.{name}"
            settings.problems.append(f"`{path}`: {kind} takes {listing(taken.split())}{nearest(name, taken.split())}")


def _param(settings: Settings, name: str, default: Any) -> Any:
    return settings.get(f"optimizer.params.{name}", default)


def _adam(settings: Settings, kind: str, rate: Any) -> Call:
    decoupled = kind == "adamw" or _param(settings, "adam_w_mode", True)
    own = 0.01 if decoupled and _param(settings, "torch_adam", False) and kind != "muon" else 0.0
    b1, b2 = _param(settings, "betas", BETAS[kind])
    if _cycles(settings):
        b1, b2 = _cycled(settings, kind, b1), 0.99
    return call(
        "optim.adamw" if decoupled else "optim.adam",
        rate,
        b1=b1,
        b2=b2,
        eps=_param(settings, "eps", 1e-10 if kind == "muon" else 1e-8),
        weight_decay=_param(settings, "weight_decay", own),
    )


def _lion(settings: Settings, kind: str, rate: Any) -> Call:
    b1, b2 = _param(settings, "betas", BETAS[kind])
    if _cycles(settings):
        _cycled(settings, kind, b1)
    return call("optim.lion", rate, b1=b1, b2=b2, weight_decay=_param(settings, "weight_decay", 0.0))


def _lamb(settings: Settings, kind: str, rate: Any) -> Call:
    b1, b2 = _param(settings, "betas", BETAS[kind])
    if _cycles(settings):
        _cycled(settings, kind, b1)
    settings.notes["optimizer.type"] = (
        "Lamb: norms are those of whole leaves under every ZeRO stage, DeepSpeed's of what a rank holds of all"
    )
    low, high = _param(settings, "min_coeff", 0.01), _param(settings, "max_coeff", 10.0)
    if low > high:
        settings.problems.append(f"`optimizer.params.min_coeff` = {low} is above `optimizer.params.max_coeff` = {high}")
    return call(
        "optim.lamb",
        rate,
        b1=b1,
        b2=b2,
        eps=_param(settings, "eps", 1e-8),
        weight_decay=_param(settings, "weight_decay", 0.0),
        min_coeff=low,
        max_coeff=high,
        correct="rate",
    )


def _sgd(settings: Settings, kind: str, rate: Any) -> Call:
    for name in ("cycle_momentum", "cycle_min_mom", "cycle_max_mom", "decay_mom_rate"):
        if f"scheduler.params.{name}" in settings.given:
            settings.notes[f"scheduler.params.{name}"] = (
                "SGD's momentum stays, as in DeepSpeed, which moves betas alone"
            )
    momentum, decay = _param(settings, "momentum", 0.0), _param(settings, "weight_decay", 0.0)
    nesterov = _param(settings, "nesterov", False)
    if nesterov and not momentum:
        settings.problems.append("`optimizer.params.nesterov` is true without `optimizer.params.momentum`")
    made = call("optim.sgd", rate, momentum=momentum, nesterov=nesterov)
    return call("optim.chain", call("optim.add_decayed_weights", decay), made) if decay else made


def _muon(settings: Settings, kind: str, rate: Any) -> Call:
    lr = _param(settings, "adam_lr", _param(settings, "lr", 3e-4))
    adam = _adam(settings, kind, schedule(settings, lr) or lr)
    momentum, decay = _param(settings, "momentum", 0.95), _param(settings, "weight_decay", 0.0)
    muon = call("optim.muon", rate, momentum=momentum, weight_decay=decay, eps=1e-7)
    settings.notes["optimizer.type"] = (
        "Muon: `optim.muon` corrects the bias of its momentum and iterates in float32, so that the first updates differ"
        " from DeepSpeed's; `spec(matrix=)` says which dimensions are inputs and outputs"
    )
    return call("optim.by_path", {MATRICES: muon, "**": adam})


_OPTIMIZERS = {"adam": _adam, "adamw": _adam, "lamb": _lamb, "lion": _lion, "sgd": _sgd, "muon": _muon}

# ---- schedules

WARMUP = "warmup_num_steps warmup_type"
SCHEDULES = {  # what each takes
    "WarmupLR": f"warmup_min_lr warmup_max_lr {WARMUP}",
    "WarmupDecayLR": f"total_num_steps warmup_min_lr warmup_max_lr {WARMUP}",
    "WarmupCosineLR": f"total_num_steps warmup_min_ratio cos_min_ratio {WARMUP}",
    "OneCycle": "cycle_min_lr cycle_max_lr cycle_first_step_size cycle_second_step_size cycle_first_stair_count "
    "cycle_second_stair_count decay_lr_rate decay_step_size cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate",
    "LRRangeTest": "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase",
}
NEEDED = {
    "WarmupDecayLR": "total_num_steps",
    "WarmupCosineLR": "total_num_steps",
    "OneCycle": "cycle_min_lr cycle_max_lr",
}


def schedule(settings: Settings, lr: float | None) -> Call | None:
    """The schedule for an optimizer of rate `lr` (None: not known): the rates that DeepSpeed's engine trains with."""
    said = settings.get("scheduler.type")
    if said is None:
        for name in settings.under("scheduler"):
            settings.problems.append(f"`scheduler.{name}`: `scheduler.type` is missing")
        return None
    kind = next(k for k in SCHEDULES if k.lower() == said.lower())
    before = len(settings.problems)
    _only(settings, "scheduler", kind, SCHEDULES[kind])
    for name in NEEDED.get(kind, "").split():
        if f"scheduler.params.{name}" not in settings.given:
            settings.problems.append(f"`scheduler.params.{name}` is missing: {kind} needs it")
    if len(settings.problems) > before:
        return None
    if kind == "OneCycle":
        peak, start = (_get(settings, f"cycle_{x}_lr") for x in ("max", "min"))
        return _cycle(settings, "optim.one_cycle", peak, start=start, decay_rate=_get(settings, "decay_lr_rate"))
    return _range_test(settings) if kind == "LRRangeTest" else _warmup(settings, kind, lr)


def _get(settings: Settings, name: str, default: Any = None) -> Any:
    return settings.get(f"scheduler.params.{name}", default)


def _warmup(settings: Settings, kind: str, lr: float | None) -> Call | None:
    get = partial(_get, settings)
    n, total = max(2, int(get("warmup_num_steps", 1000))), get("total_num_steps")
    shape = get("warmup_type", "log").lower()
    start, peak, first = get("warmup_min_lr", 0.0), get("warmup_max_lr"), None
    if kind == "WarmupDecayLR" and peak is None and "scheduler.params.warmup_max_lr" not in settings.open:
        peak = 0.001
    peak = lr if peak is None else peak
    if peak is None:
        settings.problems.append(
            f"`scheduler.type` = {kind}: the optimizer's rate is not known; give optimizer.params.lr"
        )
        return None
    if total is not None and total <= n:
        settings.problems.append(
            f"`scheduler.params.total_num_steps` = {total}: a number above the {n} of the warm-up is expected"
        )
        return None
    steps = None if total is None else int(total)
    if kind == "WarmupCosineLR":
        start, end = (
            float(f"{get(name, ratio) * peak:.15g}")  # without the last digit's noise
            for name, ratio in (("warmup_min_ratio", 0.0), ("cos_min_ratio", 0.0001))
        )
        first, name = 0.0, "optim.warmup_cosine"
        made = call(name, peak, warmup=n, steps=steps, start=start, end=end, kind=shape, last_at_end=True)
    else:
        name = "optim.warmup" if kind == "WarmupLR" else "optim.warmup_decay"
        made = call(name, peak, warmup=n, steps=steps, start=start, kind=shape)
    # The engine moves a warm-up on after an update: the second update has the rate of its iteration 0.
    return call("optim.join", [start if first is None else first, made], [1])


def _cycle(settings: Settings, name: str, first: float, **own: Any) -> Call:
    """A schedule of OneCycle's shape, with what is its `own`."""

    def whole(name: str, default: int | None = None) -> int | None:
        found = _get(settings, name, default)
        return None if found is None else int(found)

    return call(
        name,
        first,
        **own,
        up=whole("cycle_first_step_size", 2000),
        down=whole("cycle_second_step_size"),
        up_stairs=whole("cycle_first_stair_count"),
        down_stairs=whole("cycle_second_stair_count"),
        decay_steps=whole("decay_step_size"),
    )


def _cycles(settings: Settings) -> bool:
    """Whether OneCycle moves the momentum of an optimizer that has betas."""
    one = (settings.get("scheduler.type") or "").lower() == "onecycle"
    return one and _get(settings, "cycle_momentum", True)


def _cycled(settings: Settings, kind: str, b1: float) -> Any:
    """The schedule of Adam's `b1`; others' are constants, which is a problem."""
    path = "scheduler.params.cycle_momentum"
    if kind not in ("adam", "adamw"):
        settings.problems.append(
            f"`{path}` is true{'' if path in settings.given else ' where it is not given'}, and rejected: "
            f"{NAMES[kind]}'s b1 is a constant here"
        )
        return b1
    settings.notes[path] = (
        "the first update has the greatest momentum of the cycle, DeepSpeed's the least; b2 is 0.99, as there"
    )
    low, high = (_get(settings, f"cycle_{x}_mom", bound) for x, bound in (("min", 0.8), ("max", 0.9)))
    decay = _get(settings, "decay_mom_rate")
    return _cycle(settings, "optim.one_cycle_momentum", low, high=high, decay_rate=decay)


def _range_test(settings: Settings) -> Call:
    def get(name: str, default: Any) -> Any:
        return settings.get(f"scheduler.params.lr_range_test_{name}", default)

    steps, rate = int(get("step_size", 2000)), get("step_rate", 1.0)
    return call("optim.lr_range_test", get("min_lr", 1e-3), steps=steps, rate=rate, staircase=get("staircase", False))
