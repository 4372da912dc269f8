# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Gibbs sweeps and CD-1 steps of a declared RBM against the same written by hand in JAX.

``python benchmarks/handwritten.py`` prints one row a task: the minimum of interleaved repeats of both,
their ratio (target: at most 1.1), and the compile times. 784x500 units, 1000 chains or rows.
"""

import argparse
from collections.abc import Callable
from functools import partial
import time

import jax
from jax import Array
import jax.numpy as jnp

import ebmpp
from ebmpp import bits, sweeps
from ebmpp.training import estimate_step

ROWS, SWEEPS = 1000, 10


def model() -> tuple[ebmpp.FactorGraph, dict[str, Array]]:
    """A 784x500 RBM with weights of the size of trained ones."""
    rbm = ebmpp.layered(v=ebmpp.Bernoulli(784), h=ebmpp.Bernoulli(500))
    weights = 0.05 * jax.random.normal(jax.random.key(1), (784, 500))
    return rbm, rbm.init(jax.random.key(0)) | {"v:h": weights}


@partial(jax.jit, static_argnums=0)
def gibbs(rbm: ebmpp.FactorGraph, params: dict, v: Array, h: Array, pair: Array) -> dict:
    """Ours: sweeps derived from the energy."""
    rows = bits.fold_in(pair, jnp.arange(ROWS))
    one = lambda i, x: sweeps.sweep_rows(rbm, params, x, sweeps.schedule(rbm), bits.fold_in(rows, i))  # noqa: E731
    return jax.lax.fori_loop(0, SWEEPS, one, {"v": v, "h": h})


@jax.jit
def gibbs_by_hand(params: dict, v: Array, h: Array, key: Array) -> tuple:
    """Theirs: two products, two sigmoids, two uniforms."""
    w, b, c = params["v:h"], params["v"], params["h"]

    def one(i: Array, x: tuple) -> tuple:
        first, second = jax.random.split(jax.random.fold_in(key, i))
        v = jax.random.bernoulli(first, jax.nn.sigmoid(x[1] @ w.T + b)).astype(jnp.float32)
        h = jax.random.bernoulli(second, jax.nn.sigmoid(v @ w + c)).astype(jnp.float32)
        return v, h

    return jax.lax.fori_loop(0, SWEEPS, one, (v, h))


@jax.jit
def cd_by_hand(params: dict, data: Array, key: Array) -> dict:
    """CD-1's gradient: data minus reconstruction, latent means in both phases."""
    w, b, c = params["v:h"], params["v"], params["h"]
    first, second = jax.random.split(key)
    mean = jax.nn.sigmoid(data @ w + c)
    h = jax.random.bernoulli(first, mean).astype(jnp.float32)
    v = jax.random.bernoulli(second, jax.nn.sigmoid(h @ w.T + b)).astype(jnp.float32)
    again = jax.nn.sigmoid(v @ w + c)
    return {
        "v": (v - data).mean(0),
        "h": (again - mean).mean(0),
        "v:h": (v.T @ again - data.T @ mean) / len(data),
    }


def interleaved(tasks: dict[str, Callable[[], object]], repeats: int) -> dict[str, tuple[float, float]]:
    """First-call time and minimum of interleaved later calls, in seconds."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(repeats + 1):
        for name, task in tasks.items():
            start = time.perf_counter()
            jax.block_until_ready(task())
            times[name].append(time.perf_counter() - start)
    return {name: (t[0], min(t[1:])) for name, t in times.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    rbm, params = model()
    v = jax.random.bernoulli(jax.random.key(2), 0.5, (ROWS, 784)).astype(jnp.float32)
    h = jax.random.bernoulli(jax.random.key(3), 0.5, (ROWS, 500)).astype(jnp.float32)
    key = jax.random.key(4)
    pair = bits.key_pair(key)
    index = jnp.arange(ROWS)
    cd = lambda: estimate_step(rbm, ebmpp.CD(k=1), params, (), {"v": v}, index, pair, jnp.uint32(0))  # noqa: E731
    rows = [
        (
            f"Gibbs, {SWEEPS} sweeps",
            {
                "ours": lambda: gibbs(rbm, params, v, h, pair),
                "hand": lambda: gibbs_by_hand(params, v, h, key),
            },
        ),
        ("CD-1 gradient", {"ours": cd, "hand": lambda: cd_by_hand(params, v, key)}),
    ]
    print(f"{'task':20} {'ours ms':>9} {'by hand ms':>11} {'ratio':>6} {'first call s':>20}")
    for name, tasks in rows:
        found = interleaved(tasks, repeats)
        (first, ours), (first_hand, hand) = found["ours"], found["hand"]
        print(
            f"{name:20} {1e3 * ours:9.1f} {1e3 * hand:11.1f} {ours / hand:6.2f} "
            f"{first:9.2f} / {first_hand:8.2f}"
        )


if __name__ == "__main__":
    main()
