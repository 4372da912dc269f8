# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Layers of interacting units of a model, by primitive.

Tests traced/sweep/layers.py.
"""

from collections.abc import Callable
import itertools
from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import jax
import jax.numpy as jnp

from ebmpp import GibbsBlock

N = 6
ADJACENT = np.diag(np.ones(N - 1), 1) + np.diag(np.ones(N - 1), -1)
INDEX = np.array([3, 0, 5])
ROWS = np.arange(12.0).reshape(2, 6)
TABLE = np.sin(np.arange(16.0)).reshape(4, 4)
PAIRS = np.kron(np.eye(3), np.ones((1, 2)))


def scan(z: Any) -> Any:
    """Neighbours, by a carry of the last unit."""
    return jax.lax.scan(lambda last, new: (new, jnp.exp(last * new)), 0.0, z)[1].sum()


def accumulating_scan(z: Any) -> Any:
    """A carry that reads ever more."""
    return jax.lax.scan(lambda total, new: (total + new, jnp.exp(total * new)), 0.0, z)[
        1
    ].sum()


def backward_scan(z: Any) -> Any:
    """Neighbours from the end, picked by a counter."""
    body = lambda carry, _: (
        (carry[0] - 1, z[carry[0]]),
        jnp.cos(carry[1] + z[carry[0]]),
    )
    return jax.lax.scan(body, (N - 1, 0.0), None, N)[1].sum()


def rows_of_table(z: Any) -> Any:
    index = z[1:, None].astype(int)
    return jnp.take_along_axis(jnp.asarray(TABLE)[z[:-1].astype(int)], index, 1).sum()


#: a function of units in {0, 1} as floats, and the most layers that it may take
FUNCTIONS: dict[str, tuple[Callable, int]] = {
    "sum": (lambda z: 2 * z.sum() - z.mean(), 1),
    "elementwise": (
        lambda z: (jnp.exp(z) * jnp.arange(6.0) + jnp.maximum(z, 0.3) + z * z).sum(),
        1,
    ),
    "slices": (lambda z: (z[1:] * z[:-1]).sum(), 2),
    "roll": (lambda z: jnp.cos(z + jnp.roll(z, 1)).sum(), 2),
    "strides": (lambda z: jnp.exp(z[::2] + z[1::2]).sum(), 2),
    "reverse": (lambda z: jnp.exp(z * z[::-1]).sum(), 2),
    "split": (lambda z: jnp.exp(jnp.split(z, 2)[0] * jnp.split(z, 2)[1]).sum(), 2),
    "pad": (
        lambda z: jnp.exp(
            jnp.pad(z, (1, 0)) * jnp.pad(z, (0, 1), constant_values=2.0)
        ).sum(),
        2,
    ),
    "reshape and transpose": (
        lambda z: jnp.exp(z.reshape(2, 3) * z.reshape(3, 2).T).sum(),
        2,
    ),
    "reduce": (
        lambda z: jnp.exp(z.reshape(3, 2).sum(1)).sum() + z.reshape(3, 2).max(1).sum(),
        2,
    ),
    "stack": (lambda z: jax.nn.logsumexp(jnp.stack([z[:3], z[3:]]), 0).sum(), 2),
    "gather": (lambda z: jnp.exp(z[INDEX] * z[INDEX - 1]).sum(), 2),
    "take": (
        lambda z: jnp.exp(
            jnp.take(z, INDEX, mode="fill", fill_value=0.0) + z[:3]
        ).sum(),
        2,
    ),
    "set": (lambda z: jnp.exp(z[:3].at[1].set(0.5) * z[3:]).sum(), 2),
    "segments": (
        lambda z: jnp.exp(
            jax.ops.segment_sum(z, np.array([0, 1, 2, 0, 1, 0]), 3)
        ).sum(),
        3,
    ),
    "known zeros": (
        lambda z: z @ ADJACENT @ z + (jnp.outer(z, z) * np.triu(ADJACENT)).sum(),
        2,
    ),
    "unknown factor of zeros": (
        lambda z: z @ (jnp.exp(z[:1].sum() * 0 + 0.5) * ADJACENT) @ z,
        2,
    ),
    "regression": (
        lambda z: (jnp.asarray(ROWS) @ z - 1.0) @ (jnp.asarray(ROWS) @ z),
        6,
    ),
    "dummies": (lambda z: jnp.exp(PAIRS @ z).sum(), 2),
    "cumulative": (lambda z: jnp.exp(jnp.cumsum(z.reshape(2, 3), 1)).sum(), 3),
    "where": (lambda z: jnp.where(z[1:] > 0, z[:-1], 0.0).sum(), 2),
    "lookup": (
        lambda z: jnp.asarray(TABLE)[z[1:].astype(int), z[:-1].astype(int)].sum(),
        2,
    ),
    "lookup in rows": (rows_of_table, 2),
    "convolution": (
        lambda z: (jnp.convolve(z, jnp.array([1.0, 0, 1]), "same") * z).sum(),
        2,
    ),
    "scan": (scan, 2),
    "backward scan": (backward_scan, 2),
    "accumulating scan": (accumulating_scan, 6),
    "custom derivatives": (lambda z: jax.jit(jax.nn.relu)(z[1:] - z[:-1]).sum(), 2),
    "products of three": (lambda z: (z[2:] * z[1:-1] * z[:-2]).sum(), 3),
    "centred squares": (lambda z: ((z - z.mean()) ** 2).sum(), 6),
    "equal neighbours": (lambda z: (z[1:] == z[:-1]).sum() * 0.5, 2),
    "overflowing integers": (
        lambda z: (z.astype(jnp.int8) * jnp.int8(100)).sum(dtype=jnp.int8) * 0.5,
        6,
    ),
    "rounding": (
        lambda z: jnp.floor(z.sum() / 2) + (z.astype(int).sum() // 2) * 0.5,
        6,
    ),
    "sorting": (lambda z: (jnp.sort(z) * jnp.arange(6.0)).sum(), 6),
    "loop": (
        lambda z: jax.lax.fori_loop(0, N, lambda i, a: a + z[i] * z[i - 1], 0.0),
        6,
    ),
    "while loop": (
        lambda z: jax.lax.while_loop(lambda a: a < z.sum(), lambda a: a + 1.0, 0.0),
        6,
    ),
    "branch": (lambda z: jax.lax.cond(z[0] > 0, lambda: z[1] * 2, lambda: z[1] * 0), 6),
}


def layers(fn: Callable) -> np.ndarray:
    def model() -> None:
        z = numpyro.sample("z", dist.Bernoulli(0.5).expand([N]).to_event(1))
        numpyro.factor("f", fn(1.0 * z))

    return GibbsBlock.from_model(model, ["z"], joint="units").layers["z"]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_interacting_units_are_in_different_layers(name: str) -> None:
    """Units a and b interact where f(11) - f(10) - f(01) + f(00) is not 0."""
    fn, num_layers = FUNCTIONS[name]
    states = np.array(list(itertools.product([0.0, 1.0], repeat=N)), np.float32)
    values = np.asarray(jax.jit(jax.vmap(fn))(states), float).reshape((2,) * N)
    layer = layers(fn)
    for a, b in itertools.combinations(range(N), 2):
        if layer[a] == layer[b]:
            f = np.moveaxis(values, (a, b), (0, 1))
            np.testing.assert_allclose(
                f[1, 1] - f[1, 0] - f[0, 1] + f[0, 0], 0, atol=1e-4
            )
    assert layer.max() + 1 <= num_layers, "more units interact than necessary"


def block_with_sibling(fn: Callable, *args: Any) -> GibbsBlock:
    def model(*args: Any) -> None:
        s = numpyro.sample("s", dist.Normal(0, 1))
        z = numpyro.sample("z", dist.Bernoulli(0.5).expand([N]).to_event(1))
        numpyro.factor("f", fn(1.0 * z, s, *args))

    return GibbsBlock.from_model(model, ["z"], *args, joint="units")


def test_interaction_at_other_values_of_a_sibling_counts() -> None:
    block = block_with_sibling(
        lambda z, s: jnp.where(s > 1e9, z[1:] * z[:-1], 0.0).sum()
    )
    assert (np.diff(block.layers["z"]) != 0).all()


def test_zeros_of_a_matrix_argument_are_relied_upon() -> None:
    block = block_with_sibling(lambda z, s, a: z @ (s * a) @ z, ADJACENT)
    layer = block.layers["z"]
    assert layer.max() == 1 and (np.diff(layer) != 0).all()


@pytest.mark.nightly
def test_lookup_at_unknown_places_reads_all_units() -> None:
    block = block_with_sibling(
        lambda z, s: jnp.exp(
            z[(jnp.abs(s) * 2).astype(int) % 2 + np.arange(2)] * z[:2]
        ).sum()
    )
    assert block.layers["z"].max() >= 2
