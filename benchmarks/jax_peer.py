"""The GPT of benchmarks/models.py in JAX: a process and a CPU device per rank, joined by gloo, cut as the specs say."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np

import shardlib as sl
from benchmarks.models import ADAMW, EPS, Gpt, Size, angles, tokens, weights
from shardlib import tree


def jax_gpt(size: Size, rank: int, axis: str, ranks: int, split: bool = True) -> Callable[[int], float]:
    """A step over the mesh axis `axis`; parameters and their state are split over it where their specs name it.

    `split=False`: whole on every rank. Over `dp` the batch is split. On this rank's core alone, as torch's peers are.
    """
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.sched_setaffinity(0, {rank % len(os.sched_getaffinity(0))})
    import jax  # pyright: ignore[reportMissingImports]
    import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
    from jax.sharding import Mesh, NamedSharding, PartitionSpec  # pyright: ignore[reportMissingImports]

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", ranks, rank)
    mesh = Mesh(jax.devices(), (axis,))
    cos, sin = (x.numpy() for x in angles(size))
    b1, b2 = ADAMW["betas"]  # type: ignore[misc]

    def placed(x: Any, *axes: str | None) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])

    def leaf(x: Any, spec: Any) -> Any:
        return placed(x.numpy(), *(axis if split and axis in dim.axes else None for dim in spec.dims))

    flat = zip(tree.paths(sl.specs(Gpt)), tree.leaves(sl.specs(Gpt)), strict=True)
    specs = {path.split(".")[-1] if "blocks" in path else path: spec for path, spec in flat}
    first = weights(size)
    params = {k: leaf(getattr(first, k), specs[k]) for k in ("embed", "norm", "head")}
    params["blocks"] = [{k: leaf(x, specs[k]) for k, x in vars(block).items()} for block in first.blocks]

    def norm(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPS) * scale

    def rotated(x: Any) -> Any:
        a, b = jnp.split(x, 2, -1)
        c, s = cos[:, None], sin[:, None]
        return jnp.concatenate([a * c - b * s, b * c + a * s], -1)

    def loss(w: Any, x: Any, y: Any) -> Any:
        h = w["embed"][x]
        for b in w["blocks"]:
            g = norm(h, b["norm1"])
            q, k, v = (jnp.einsum("bsm,mhd->bshd", g, b[n]) for n in ("w_q", "w_k", "w_v"))
            o = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
            h = h + jnp.einsum("bshd,hdm->bsm", o, b["w_o"])
            g = norm(h, b["norm2"])
            h = h + (jax.nn.silu(g @ b["w_gate"]) * (g @ b["w_up"])) @ b["w_down"]
        logits = norm(h, w["norm"]) @ w["head"]
        right = jnp.take_along_axis(logits, y[..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - right).mean()

    def train(state: Any, x: Any, y: Any) -> Any:
        w, m, v, t = state
        value, grads = jax.value_and_grad(loss)(w, x, y)
        t = t + 1
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, m, grads)
        v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, v, grads)

        def new(w: Any, m: Any, v: Any) -> Any:
            change = m / (1 - b1**t) / (jnp.sqrt(v / (1 - b2**t)) + ADAMW["eps"])
            return w - ADAMW["lr"] * (change + ADAMW["weight_decay"] * w)

        return (jax.tree.map(new, w, m, v), m, v, t), value

    whole, layout = NamedSharding(mesh, PartitionSpec()), jax.tree.map(lambda x: x.sharding, params)
    zeros = jax.jit(lambda w: jax.tree.map(jnp.zeros_like, w), out_shardings=layout)
    held = [(params, zeros(params), zeros(params), placed(np.zeros((), np.float32)))]
    jitted = jax.jit(train, donate_argnums=0, out_shardings=((layout, layout, layout, whole), whole))

    def step(number: int) -> float:
        rows = ("dp",) if axis == "dp" else ()
        x, y = (placed(t.int().numpy(), *rows) for t in tokens(size, number, ranks))
        held[0], value = jitted(held[0], x, y)
        jax.block_until_ready(held[0])
        return float(value)

    return step
