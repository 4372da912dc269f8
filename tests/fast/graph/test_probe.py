# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What is no product of statistics is refused, though between two states it may look like one."""

from collections.abc import Callable

import numpy as np
import pytest

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp import (
    Bernoulli,
    Binomial,
    Categorical,
    Factor,
    FactorGraph,
    Family,
    Gaussian,
    Poisson,
    Spin,
    exact,
)
from ebmpp.errors import NotMultiAffineError

TABLE = jnp.array([[2.0, 0.0], [0.0, 2.0]])

# The first few are exp(-E) of a != b at the units' values, and of independent units by their gradient at 0.
OF_TWO: dict[str, tuple[Family, Callable[..., Array]]] = {
    "equal bits": (Bernoulli(1), lambda w, a, b: -w * (a == b).sum()),
    "equal spins": (Spin(1), lambda w, a, b: -w * (a == b).sum()),
    "a sign": (Spin(1), lambda w, a, b: -w * (a * b > 0).sum()),
    "a choice": (Spin(3), lambda w, a, b: jnp.where(a == b, -w, w).sum()),
    "a look-up": (Bernoulli(1), lambda w, a, b: -w * TABLE[a.astype(int)[0], b.astype(int)[0]]),
    "equal categories": (Categorical(1, 3), lambda w, a, b: -w * jnp.all(a == b, -1).sum()),
    "categories looked up": (
        Categorical(2, 2),
        lambda w, a, b: -w * TABLE[a.argmax(-1), b.argmax(-1)].sum(),
    ),
    "gated by a comparison": (Bernoulli(2), lambda w, a, b: -w * (a * (b > 0)).sum()),
    "both": (Bernoulli(1), lambda w, a, b: -w * jnp.logical_and(a, b).sum()),
    "the smaller": (Bernoulli(2), lambda w, a, b: -w * jnp.minimum(a, b).sum()),
    "most of fifty": (Bernoulli(50), lambda w, a, b: -w * jnp.where(a.sum() > 45, b[0], b[1])),
}
OF_ONE: dict[str, tuple[Family, Callable[..., Array]]] = {
    "relu of bits": (Bernoulli(2), lambda w, v: w * jax.nn.relu(v).sum()),
    "relu of spins": (Spin(2), lambda w, v: w * jax.nn.relu(v).sum()),
    "clip": (Bernoulli(2), lambda w, v: w * jnp.clip(v, 0, 1).sum()),
    "whole numbers": (Bernoulli(2), lambda w, v: w * v.astype(int).sum()),
    "sign": (Spin(2), lambda w, v: w * jnp.sign(v).sum()),
    "size": (Spin(2), lambda w, v: w * jnp.abs(v).sum()),
    "relu of reals": (Gaussian(1), lambda w, v: w * jax.nn.relu(v).sum()),
    "a far kink": (Gaussian(3), lambda w, v: w * jax.nn.relu(v - 4).sum()),
    "a count above two": (Poisson(2), lambda w, v: w * jnp.maximum(v, 2).sum()),
    "a count that is full": (Binomial(2, 9), lambda w, v: w * (v == 9).sum()),
}


@pytest.mark.parametrize("name", OF_TWO)
def test_blocks_that_meet_in_a_kink_are_refused(name: str) -> None:
    family, energy = OF_TWO[name]
    factor = Factor("a", "b", energy=energy, init=jnp.float32(1.3))
    with pytest.raises(NotMultiAffineError, match=r"not affine in the sufficient statistics of block '[ab]'"):
        FactorGraph({"a": family, "b": family}, factors=[factor])


@pytest.mark.parametrize("name", OF_ONE)
def test_a_kink_of_one_block_is_refused(name: str) -> None:
    family, energy = OF_ONE[name]
    with pytest.raises(NotMultiAffineError, match="comparisons, jnp.where, look-ups and relu"):
        FactorGraph({"v": family}, factors=[Factor("v", energy=energy, init=jnp.float32(1.3))])


@pytest.mark.parametrize(
    "rest", [lambda v: -1000 * v[2], lambda v: 5000 + 0 * v[2], lambda v: -100 * v.sum()], ids="abc"
)
def test_a_small_interaction_beside_large_numbers_is_found(rest: Callable[[Array], Array]) -> None:
    energy = lambda w, v: rest(v) + 0.3 * v[0] * v[1]
    with pytest.raises(NotMultiAffineError, match="interact with one another"):
        FactorGraph({"v": Bernoulli(3)}, factors=[Factor("v", energy=energy)])


def test_pairs_that_are_named_are_tried_at_states_too() -> None:
    pairs = {"x": np.array([[0, 1]])}
    right = lambda w, x: -w * (x[0] * x[1] + jnp.round(0 * x[2]) * jnp.float32(0))
    wrong = lambda w, x: -w * ((x[0] == x[1]) + x[2])
    graph = FactorGraph({"x": Bernoulli(3)}, factors=[Factor("x", energy=right, init=1.3, lateral=pairs)])
    assert np.isclose(exact.log_partition(graph, {"x": jnp.float32(1.3)}), np.log(2 * (3 + np.exp(1.3))))
    with pytest.raises(NotMultiAffineError, match="statistics of units of block 'x'"):
        FactorGraph({"x": Bernoulli(3)}, factors=[Factor("x", energy=wrong, init=1.3, lateral=pairs)])


def test_sums_of_many_numbers_pass() -> None:
    """Though they are rounded: no form is known of this one."""
    scale = lambda w: jnp.exp(jnp.tanh(w))
    energy = lambda w, v, h: -jnp.sort(jnp.stack([v @ scale(w) @ h, jnp.float32(1e9)]))[0]
    FactorGraph(
        {"v": Bernoulli(784)},
        {"h": Spin(500)},
        [Factor("v", "h", energy=energy, init=jnp.zeros((784, 500)))],
    )
