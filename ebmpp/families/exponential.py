# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Positive real numbers."""

import dataclasses
import math

import numpyro.distributions as dist
from numpyro.distributions import constraints

import jax.numpy as jnp

from ebmpp.core import PerUnit, UnitMask, Words, random
from ebmpp.families.family import Family


@dataclasses.dataclass(frozen=True, repr=False)
class Exponential(Family):
    """Positive real numbers with statistic x and rate -eta, so that eta must be negative.

    :param shape: shape of the block.
    """

    support = constraints.nonnegative
    bounds = (0.0, math.inf)
    num_words = num_couple_words = 1
    domain = "negative"

    def log_normalizer(self, eta: PerUnit) -> PerUnit:
        return -jnp.log(-eta)

    def in_domain(self, eta: PerUnit) -> UnitMask:
        return jnp.isfinite(eta) & (eta < 0)

    def default_eta(self) -> PerUnit:
        return jnp.full(self.shape, -1.0)

    def unit_distribution(self, eta: PerUnit) -> dist.Distribution:
        return dist.Exponential(-eta)

    def from_mean(self, mean: PerUnit) -> PerUnit:
        return -1 / mean

    def mode(self, eta: PerUnit) -> PerUnit:
        return jnp.zeros_like(eta)

    def sample(self, words: Words, eta: PerUnit) -> PerUnit:
        return jnp.log(random.open_uniform(words[..., 0])) / eta
