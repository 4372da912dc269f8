# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Samplers and gradients of plain JAX, as a user without the package would write them."""

from collections.abc import Callable

import networkx as nx
import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

Params = dict[str, Array]
WINDOW = 7  # side of a convolution filter


def gibbs(
    params: Params, v: Array, h: Array, key: Array, sweeps: int
) -> tuple[Array, Array]:
    """Gibbs sweeps of a restricted Boltzmann machine: two products, two sigmoids, two uniforms."""
    w = params["v:h"]
    b = params["v"]
    c = params["h"]
    return _sweeps(lambda h: h @ w.T + b, lambda v: v @ w + c, v, h, key, sweeps)


def cd_gradient(params: Params, data: Array, key: Array) -> Params:
    """CD-1 gradient with the latents' means in both phases."""
    w = params["v:h"]
    b = params["v"]
    c = params["h"]
    first, second = jax.random.split(key)
    positive = jax.nn.sigmoid(data @ w + c)
    h = jax.random.bernoulli(first, positive).astype(jnp.float32)
    v = jax.random.bernoulli(second, jax.nn.sigmoid(h @ w.T + b)).astype(jnp.float32)
    negative = jax.nn.sigmoid(v @ w + c)
    return {
        "v": (v - data).mean(0),
        "h": (negative - positive).mean(0),
        "v:h": (v.T @ negative - data.T @ positive) / len(data),
    }


def convolution_gibbs(
    params: Params, v: Array, h: Array, key: Array, sweeps: int
) -> tuple[Array, Array]:
    """Gibbs sweeps of a convolutional machine: a convolution and its transpose per sweep."""
    return _sweeps(
        lambda h: _down(params, h), lambda v: _up(params, v), v, h, key, sweeps
    )


def convolution_cd_gradient(params: Params, data: Array, key: Array) -> Params:
    """CD-1 gradient; that of the filters is a convolution whose channels are the rows."""
    first, second = jax.random.split(key)
    positive = jax.nn.sigmoid(_up(params, data))
    h = jax.random.bernoulli(first, positive).astype(jnp.float32)
    v = jax.random.bernoulli(second, jax.nn.sigmoid(_down(params, h))).astype(
        jnp.float32
    )
    negative = jax.nn.sigmoid(_up(params, v))

    def filters(v, h):
        return lax.conv(v[None], h.transpose(1, 0, 2, 3), (1, 1), "VALID")

    return {
        "v": (v - data).mean(0),
        "h": (negative - positive).mean(0).sum((1, 2), keepdims=True),
        "v:h": (filters(v, negative) - filters(data, positive)).transpose(1, 0, 2, 3)
        / len(data),
    }


def ising(lattice: nx.Graph, sweeps: int) -> Callable[[Array, Array, Array], Array]:
    """Return a function of coupling, states and key: checkerboard sweeps, neighbours
    gathered by index."""
    number = {node: i for i, node in enumerate(lattice.nodes)}
    neighbours = np.array([[number[m] for m in lattice[n]] for n in lattice.nodes])
    color = np.array([(a + b) % 2 for a, b in lattice.nodes])
    units = [np.flatnonzero(color == c) for c in range(2)]

    def run(coupling: Array, x: Array, key: Array) -> Array:
        def sweep(i: Array, x: Array) -> Array:
            for c, at in enumerate(units):
                field = coupling * x[:, neighbours[at]].sum(-1)
                u = jax.random.uniform(jax.random.fold_in(key, 2 * i + c), field.shape)
                x = x.at[:, at].set(jnp.where(u < jax.nn.sigmoid(2 * field), 1.0, -1.0))
            return x

        return lax.fori_loop(0, sweeps, sweep, x)

    return run


def _sweeps(
    down: Callable[[Array], Array],
    up: Callable[[Array], Array],
    v: Array,
    h: Array,
    key: Array,
    sweeps: int,
) -> tuple[Array, Array]:
    """Draw ``v`` given ``h``, then ``h`` given ``v``, by their logits."""

    def sweep(i: Array, x: tuple[Array, Array]) -> tuple[Array, Array]:
        first, second = jax.random.split(jax.random.fold_in(key, i))
        v = jax.random.bernoulli(first, jax.nn.sigmoid(down(x[1]))).astype(jnp.float32)
        h = jax.random.bernoulli(second, jax.nn.sigmoid(up(v))).astype(jnp.float32)
        return v, h

    return lax.fori_loop(0, sweeps, sweep, (v, h))


def _up(params: Params, v: Array) -> Array:
    return lax.conv(v[:, None], params["v:h"], (1, 1), "VALID") + params["h"]


def _down(params: Params, h: Array) -> Array:
    transposed = jnp.flip(params["v:h"], (2, 3)).transpose(1, 0, 2, 3)
    padding = [(WINDOW - 1, WINDOW - 1)] * 2
    return lax.conv_general_dilated(h, transposed, (1, 1), padding)[:, 0] + params["v"]
