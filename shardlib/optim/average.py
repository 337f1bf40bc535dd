"""Averages of parameters over the steps, and what else optimizers keep."""

from typing import Any

from torch import Tensor

from shardlib import tree
from shardlib.errors import TreeError
from shardlib.optim.base import Optimizer, kept, needs_master, wide
from shardlib.optim.options import check
from shardlib.parts import once, places
from shardlib.shard_map import shard_map
from shardlib.tree import pytree
from shardlib.types import padding_allowed


@pytree
class WeightEmaState:
    """The average of the parameters, in float32 or wider."""

    weight_ema: Any


def weight_ema(decay: float) -> Optimizer:
    """Keeps `average = decay average + (1 - decay) p` of the parameters `p` after each update; changes no update.

    It stands last in a `chain`: `chain(adamw(3e-4), weight_ema(0.999))`. The average starts as the parameters, without
    bias correction, and is kept in float32 or wider. `optim.get` gives it. Polyak and Juditsky 1992.
    """
    check("weight_ema", 0, 1, decay=decay)

    def init(params: Any) -> WeightEmaState:
        return WeightEmaState(weight_ema=tree.map_(lambda p: p.to(wide(p.dtype), copy=True), params))

    def update(updates: Any, state: WeightEmaState, params: Any) -> tuple[Any, WeightEmaState]:
        def averaged(mean: Tensor, p: Tensor, u: Tensor) -> Tensor:
            return decay * mean + (1 - decay) * (p.to(mean.dtype) + u.to(mean.dtype))

        return updates, WeightEmaState(weight_ema=tree.map_(averaged, state.weight_ema, params, updates))

    return Optimizer(init, update)


def get(state: Any, name: str) -> Any:
    """What an optimizer keeps under `name`: `"weight_ema"`, `"mu"`, `"count"`.

    Of a train step's `State` a tree like the parameters comes whole, ready for `evaluate`: in their dtypes, with the
    parameters themselves where they are not trained. Of an optimizer's state it comes as it is kept. Raises `TreeError`
    where no optimizer has it, or several have what is no part of such a tree.
    """
    params = getattr(state, "params", None)
    found = kept(state if params is None else state.opt, name)
    values = {p: x for t in found for p, x in zip(tree.paths(t), tree.leaves(t), strict=True)}
    if not found:
        raise TreeError(f"optim.get: no optimizer keeps `{name}`")
    where = tree.paths(params)
    if params is None or not values.keys() <= set(where):
        if len(found) > 1:
            raise TreeError(f"optim.get: {len(found)} optimizers keep `{name}`; take it from the state of one")
        return found[0]
    flat, treedef = tree.flatten(params)
    own = [values.get(where[at], flat[at]) for at in places(flat)]
    if wider := [i for i, x in enumerate(own) if x.dtype != flat[i].dtype]:
        for i, x in zip(wider, _cast([own[i] for i in wider], [flat[i] for i in wider]), strict=True):
            own[i] = x
    return tree.unflatten(treedef, own)


def float32(state: Any) -> Any:
    """The parameters of a train step's `State` in float32, to be exported: of a 16-bit leaf its master, where the
    optimizer keeps one, else the leaf, cast. Integers, booleans and wider leaves as they are.

    A master is cut as the optimizer's state is: `sl.gather` and `sl.save` take both.
    """
    flat, treedef = tree.flatten(state.params)
    found = {p: x for t in kept(state.opt, "master") for p, x in zip(tree.paths(t), tree.leaves(t), strict=True)}
    where = tree.paths(state.params)
    own = [found.get(where[at], flat[at]) for at in places(flat)]
    return tree.unflatten(treedef, _widened(own))


def _wide(values: list[Tensor]) -> list[Tensor]:
    with padding_allowed():
        return list(map(once(lambda x: x.to(wide(x.dtype)) if needs_master(x) else x), values))


_widened = shard_map(_wide, in_specs=None, out_specs=None)


def _as(values: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    with padding_allowed():
        return list(map(once(lambda x, y: x.to(y.dtype)), values, like))


_cast = shard_map(_as, in_specs=None, out_specs=None)
