# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Gibbs sweeps and CD-1 steps of a declared RBM against the same written by hand in JAX.

``python benchmarks/handwritten.py`` prints one row a task: the minimum of interleaved repeats of both,
their ratio (target: at most 1.1), and the compile times. 784x500 units, 1000 chains or rows; and a
convolutional machine, 28x28 units under 32 filters of 7x7, 100 chains or rows.
"""

import argparse
from collections.abc import Callable
from functools import partial
import time

import jax
from jax import Array, lax
import jax.numpy as jnp

import ebmpp
from ebmpp.core import random
from ebmpp.moves import gibbs_sweep
from ebmpp.moves.move import draw_sweep
from ebmpp.moves.target import Target
from ebmpp.training.fitting import estimate_step

ROWS, SWEEPS = 1000, 10
FEWER_ROWS, FILTERS, WINDOW = 100, 32, 7


def model() -> tuple[ebmpp.FactorGraph, dict[str, Array]]:
    """A 784x500 RBM with weights of the size of trained ones."""
    rbm = ebmpp.layered(v=ebmpp.Bernoulli(784), h=ebmpp.Bernoulli(500))
    weights = 0.05 * jax.random.normal(jax.random.key(1), (784, 500))
    return rbm, rbm.init(jax.random.key(0)) | {"v:h": weights}


@partial(jax.jit, static_argnums=0)
def gibbs(rbm: ebmpp.FactorGraph, params: dict, v: Array, h: Array, pair: Array) -> dict:
    """Ours: sweeps derived from the energy."""
    rows = random.fold_in(pair, jnp.arange(len(v)))
    target, moves = Target(rbm, params), gibbs_sweep(rbm)
    one = lambda i, x: draw_sweep(target, x, moves, random.fold_in(rows, i))[0]
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


def convolutional() -> tuple[ebmpp.FactorGraph, dict[str, Array]]:
    """Filters over 28x28 units, a bias a map."""
    side = 28 - WINDOW + 1
    factors = [
        ebmpp.Bias("v"),
        ebmpp.Bias("h", shared=(1, 2)),
        ebmpp.Convolution("v", "h", window=(WINDOW, WINDOW)),
    ]
    blocks = {"v": ebmpp.Bernoulli((28, 28))}, {"h": ebmpp.Bernoulli((FILTERS, side, side))}
    machine = ebmpp.FactorGraph(*blocks, factors)
    filters = 0.05 * jax.random.normal(jax.random.key(1), (FILTERS, 1, WINDOW, WINDOW))
    return machine, machine.init(jax.random.key(0)) | {"v:h": filters}


def _up(params: dict, v: Array) -> Array:
    return lax.conv(v[:, None], params["v:h"], (1, 1), "VALID") + params["h"]


def _down(params: dict, h: Array) -> Array:
    turned = jnp.flip(params["v:h"], (2, 3)).transpose(1, 0, 2, 3)
    around = [(WINDOW - 1, WINDOW - 1)] * 2
    return lax.conv_general_dilated(h, turned, (1, 1), around)[:, 0] + params["v"]


@jax.jit
def convolution_by_hand(params: dict, v: Array, h: Array, key: Array) -> tuple:
    """Theirs: a convolution, its transpose, two sigmoids, two uniforms."""

    def one(i: Array, x: tuple) -> tuple:
        first, second = jax.random.split(jax.random.fold_in(key, i))
        v = jax.random.bernoulli(first, jax.nn.sigmoid(_down(params, x[1]))).astype(jnp.float32)
        h = jax.random.bernoulli(second, jax.nn.sigmoid(_up(params, v))).astype(jnp.float32)
        return v, h

    return jax.lax.fori_loop(0, SWEEPS, one, (v, h))


@jax.jit
def convolution_cd_by_hand(params: dict, data: Array, key: Array) -> dict:
    """CD-1's gradient: in the filters, a convolution of images with maps whose channels are the rows."""
    first, second = jax.random.split(key)
    mean = jax.nn.sigmoid(_up(params, data))
    h = jax.random.bernoulli(first, mean).astype(jnp.float32)
    v = jax.random.bernoulli(second, jax.nn.sigmoid(_down(params, h))).astype(jnp.float32)
    again = jax.nn.sigmoid(_up(params, v))
    filters = lambda v, h: lax.conv(v[None], h.transpose(1, 0, 2, 3), (1, 1), "VALID")
    return {
        "v": (v - data).mean(0),
        "h": (again - mean).mean(0).sum((1, 2), keepdims=True),
        "v:h": (filters(v, again) - filters(data, mean)).transpose(1, 0, 2, 3) / len(data),
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
    pair = random.key_pair(key)
    machine, filters = convolutional()
    image = v[:FEWER_ROWS].reshape(-1, 28, 28)
    maps = jnp.zeros((FEWER_ROWS, *machine.families["h"].shape))

    def cd(graph: ebmpp.FactorGraph, params: dict, data: Array) -> object:
        index = jnp.arange(len(data))
        return estimate_step(graph, ebmpp.CD(k=1), params, (), {"v": data}, index, pair, jnp.uint32(0))

    rows = [
        (
            f"Gibbs, {SWEEPS} sweeps",
            {
                "ours": lambda: gibbs(rbm, params, v, h, pair),
                "hand": lambda: gibbs_by_hand(params, v, h, key),
            },
        ),
        ("CD-1 gradient", {"ours": lambda: cd(rbm, params, v), "hand": lambda: cd_by_hand(params, v, key)}),
        (
            "Gibbs, convolution",
            {
                "ours": lambda: gibbs(machine, filters, image, maps, pair),
                "hand": lambda: convolution_by_hand(filters, image, maps, key),
            },
        ),
        (
            "CD-1, convolution",
            {
                "ours": lambda: cd(machine, filters, image),
                "hand": lambda: convolution_cd_by_hand(filters, image, key),
            },
        ),
    ]
    print(f"{'task':21} {'ours ms':>9} {'by hand ms':>11} {'ratio':>6} {'first call s':>20}")
    for name, tasks in rows:
        found = interleaved(tasks, repeats)
        (first, ours), (first_hand, hand) = found["ours"], found["hand"]
        print(
            f"{name:21} {1e3 * ours:9.1f} {1e3 * hand:11.1f} {ours / hand:6.2f} "
            f"{first:9.2f} / {first_hand:8.2f}"
        )


if __name__ == "__main__":
    main()
