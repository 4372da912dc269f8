# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbounded counts."""

import dataclasses
import math

import numpyro.distributions as dist
from numpyro.distributions import constraints

import jax.numpy as jnp
from jax.scipy.special import gammaln

from ebmpp.core import PerUnit, Values
from ebmpp.families.family import Family, as_float


@dataclasses.dataclass(frozen=True, repr=False)
class Poisson(Family):
    """Unbounded counts with statistic x, base measure 1 / x! and rate exp(eta).

    :param shape: shape of the block.
    """

    support = constraints.nonnegative_integer
    bounds = (0.0, math.inf)

    def log_base_measure(self, x: Values) -> PerUnit:
        return -gammaln(as_float(x) + 1)

    def log_normalizer(self, eta: PerUnit) -> PerUnit:
        return jnp.exp(eta)

    def unit_distribution(self, eta: PerUnit) -> dist.Distribution:
        return dist.Poisson(jnp.exp(eta))

    def from_mean(self, mean: PerUnit) -> PerUnit:
        return jnp.log(mean)

    def mode(self, eta: PerUnit) -> PerUnit:
        return jnp.floor(jnp.exp(eta))
