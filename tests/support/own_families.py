# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Families as a user would write them: what must be written, and no more."""

import dataclasses
import math

import numpyro.distributions as dist
from numpyro.distributions import constraints

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp import Family


@dataclasses.dataclass(frozen=True, repr=False)
class Ternary(Family):
    """The values 0, 1 and 2."""

    support = constraints.integer_interval(0, 2)
    bounds = (0.0, 2.0)

    def log_normalizer(self, eta: Array) -> Array:
        return jax.nn.logsumexp(self._logits(eta), axis=-1)

    def unit_distribution(self, eta: Array) -> dist.Distribution:
        return dist.CategoricalLogits(self._logits(eta))

    def _logits(self, eta: Array) -> Array:
        return jnp.stack([0 * eta, eta, 2 * eta], -1)

    def states(self) -> Array:
        return jnp.arange(3.0)


@dataclasses.dataclass(frozen=True, repr=False)
class Ordinal(Family):
    """The values 0 to 3 with statistics x and x**2 and a base measure; no bounds are said."""

    stat_shape = (2,)
    support = constraints.integer_interval(0, 3)

    def statistics(self, x: Array) -> Array:
        x = jnp.asarray(x, jnp.result_type(float))
        return jnp.stack([x, x**2], -1)

    def log_base_measure(self, x: Array) -> Array:
        return -0.2 * jnp.asarray(x, jnp.result_type(float))

    def log_normalizer(self, eta: Array) -> Array:
        return jax.nn.logsumexp(self._logits(eta), axis=-1)

    def unit_distribution(self, eta: Array) -> dist.Distribution:
        return dist.CategoricalLogits(self._logits(eta))

    def _logits(self, eta: Array) -> Array:
        values = self.states()
        return eta @ self.statistics(values).T + jnp.broadcast_to(
            self.log_base_measure(values), (*eta.shape[:-1], 4)
        )

    def states(self) -> Array:
        return jnp.arange(4.0)


@dataclasses.dataclass(frozen=True, repr=False)
class Geometric(Family):
    """Counts 0, 1, 2, ... with p(x) proportional to exp(eta x), eta < 0."""

    support = constraints.nonnegative_integer
    bounds = (0.0, math.inf)
    domain = "negative"

    def log_normalizer(self, eta: Array) -> Array:
        return -jnp.log(-jnp.expm1(eta))

    def unit_distribution(self, eta: Array) -> dist.Distribution:
        return dist.GeometricProbs(-jnp.expm1(eta))

    def in_domain(self, eta: Array) -> Array:
        return eta < 0

    def default_eta(self) -> Array:
        return jnp.full(self.shape, -1.0)


@dataclasses.dataclass(frozen=True, repr=False)
class Narrow(Family):
    """Normal units of standard deviation 0.5."""

    def log_base_measure(self, x: Array) -> Array:
        return -2.0 * jnp.asarray(x, jnp.result_type(float)) ** 2

    def log_normalizer(self, eta: Array) -> Array:
        return eta**2 / 8 + 0.5 * math.log(math.pi / 2)

    def unit_distribution(self, eta: Array) -> dist.Distribution:
        return dist.Normal(eta / 4, 0.5)


@dataclasses.dataclass(frozen=True, repr=False)
class Loss(Family):
    """Negative reals with statistic x: eta is positive."""

    support = constraints.interval(-math.inf, 0.0)
    bounds = (-math.inf, 0.0)
    domain = "positive"

    def log_normalizer(self, eta: Array) -> Array:
        return -jnp.log(eta)

    def unit_distribution(self, eta: Array) -> dist.Distribution:
        return dist.TransformedDistribution(
            dist.Exponential(eta), dist.transforms.AffineTransform(0.0, -1.0)
        )

    def in_domain(self, eta: Array) -> Array:
        return eta > 0

    def default_eta(self) -> Array:
        return jnp.ones(self.shape)
