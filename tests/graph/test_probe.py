# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Energies that are accepted or refused as multi-affine; tests/bad_inputs refuses more of them.

Tests graph/factors/probe.py.
"""

import dataclasses
import math

import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints
import pytest

from jax import Array
import jax.numpy as jnp
from jax.scipy.special import betaln

from ebmpp import (
    Bernoulli,
    Categorical,
    Factor,
    FactorGraph,
    Family,
    Gaussian,
    Spin,
)
from ebmpp.errors import NotMultiAffineError
from ebmpp.graph.factors.probe import far_statistics
from helpers import nightly


def test_affine_energies_are_accepted() -> None:
    blocks = {"v": Bernoulli(2), "h": Bernoulli(3)}
    mixed = Factor("v", "h", energy=lambda p, v, h: v.sum() * h.sum() - 2 * v[0] + 1.0)
    assert FactorGraph(blocks, factors=[mixed]).edges == {("v", "h")}
    # x**2 is a statistic
    squared = Factor("x", "h", energy=lambda p, x, h: (x[:, 1] * h[:2]).sum())
    graph = FactorGraph(
        {"x": Gaussian(2, "learned"), "h": Bernoulli(3)}, factors=[squared]
    )
    assert graph.layers == (("x",), ("h",))


def test_declared_pairs_are_probed_at_states() -> None:
    """The product of a declared pair is accepted, a comparison of the pair is not."""
    factor = lambda energy: Factor(
        "x", energy=energy, init=1.3, lateral={"x": np.array([[0, 1]])}
    )
    declare = lambda energy: FactorGraph({"x": Bernoulli(3)}, factors=[factor(energy)])
    declare(lambda w, x: -w * (x[0] * x[1] + jnp.round(0 * x[2])))
    with pytest.raises(NotMultiAffineError, match="block 'x'"):
        declare(lambda w, x: -w * ((x[0] == x[1]) + x[2]))


def test_rounding_of_large_sums_is_tolerated() -> None:
    energy = lambda w, v, h: (
        -jnp.sort(jnp.stack([v @ jnp.exp(jnp.tanh(w)) @ h, jnp.float32(1e9)]))[0]
    )
    factor = Factor("v", "h", energy=energy, init=np.zeros((784, 500), np.float32))
    FactorGraph({"v": Bernoulli(784)}, {"h": Spin(500)}, [factor])


@dataclasses.dataclass(frozen=True, repr=False)
class Proportion(Family):
    """Numbers between 0 and 1 with statistics log x and log(1 - x), of closed or of
    open support."""

    is_open: bool = False

    stat_shape = (2,)
    bounds = (-math.inf, 0.0)

    @property
    def support(self) -> constraints.Constraint:
        return (
            constraints.open_interval(0, 1)
            if self.is_open
            else constraints.unit_interval
        )

    def statistics(self, x: Array) -> Array:
        return jnp.stack([jnp.log(x), jnp.log1p(-x)], -1)

    def log_normalizer(self, eta: Array) -> Array:
        return betaln(eta[..., 0] + 1, eta[..., 1] + 1)

    def unit_distribution(self, eta: Array) -> dist.Distribution:
        return dist.Beta(eta[..., 0] + 1, eta[..., 1] + 1)

    def in_domain(self, eta: Array) -> Array:
        return (eta > -1).all(-1)


@pytest.mark.parametrize("is_open", [nightly(False), True])
def test_units_between_0_and_1_are_probed_inside_their_support(is_open: bool) -> None:
    """No integer is inside, and ten times a draw is outside."""
    blocks = {"x": Proportion(3, is_open), "h": Bernoulli(2)}
    statistics = far_statistics(blocks["x"])
    assert len(statistics) > 100 and np.isfinite(statistics).all()
    declare = lambda energy: FactorGraph(
        blocks, factors=[Factor("x", "h", energy=energy)]
    )
    declare(lambda w, t, h: -t.sum() * h.sum())
    # not a polynomial by its primitives
    declare(
        lambda w, t, h: -(h.sum() * t.sum(0) @ jnp.maximum(jnp.ones(2), t[0, 0] * 0))
    )
    with pytest.raises(NotMultiAffineError, match="block 'x'"):
        declare(lambda w, t, h: -h.sum() * jnp.exp(t[:, 0]).sum())
    with pytest.raises(NotMultiAffineError, match="block 'x'"):
        declare(lambda w, t, h: -h.sum() * jnp.minimum(t[0, 0], -5.0))


def test_table_look_ups_are_refused() -> None:
    """A table in the params too, which jax may not index as a numpy array."""
    blocks = {"c": Categorical(3, 4)}
    factor = Factor(
        "c", init=jnp.arange(4.0), energy=lambda table, c: table[c.argmax(-1)].sum()
    )
    with pytest.raises(NotMultiAffineError, match="block 'c'"):
        FactorGraph(blocks, factors=[factor])
