# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Positive reals."""

import dataclasses
import math

import numpyro.distributions as dist
from numpyro.distributions import constraints

from jax import Array
import jax.numpy as jnp

from ebmpp.core.random import open_uniform
from ebmpp.families.family import Family


@dataclasses.dataclass(frozen=True, repr=False)
class Exponential(Family):
    """Positive reals with statistic x; the rate is -eta, so eta must be negative.

    :param shape: the block's shape.
    """

    support = constraints.nonnegative
    bounds = (0.0, math.inf)
    num_words = num_couple_words = 1
    domain = "negative"

    def log_normalizer(self, eta: Array) -> Array:
        return -jnp.log(-eta)

    def in_domain(self, eta: Array) -> Array:
        return jnp.isfinite(eta) & (eta < 0)

    def default_eta(self) -> Array:
        return jnp.full(self.shape, -1.0)

    def unit_distribution(self, eta: Array) -> dist.Distribution:
        return dist.Exponential(-eta)

    def from_mean(self, mean: Array) -> Array:
        return -1 / mean

    def mode(self, eta: Array) -> Array:
        return jnp.zeros_like(eta)

    def sample(self, bits: Array, eta: Array) -> Array:
        return jnp.log(open_uniform(bits[..., 0])) / eta
