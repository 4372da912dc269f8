# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Counts up to a total."""

import dataclasses

import numpyro.distributions as dist
from numpyro.distributions import constraints

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln

from ebmpp.core import PerUnit, Values, checks
from ebmpp.families.bernoulli import softplus
from ebmpp.families.family import Family, UnitValues, as_float


@dataclasses.dataclass(frozen=True, repr=False)
class Binomial(Family):
    """Counts in {0, ..., total_count} with statistic x and base measure C(n, x).

    :param shape: shape of the block.
    :param total_count: n, at least 1.
    :raises ArgumentError: for n below 1.
    """

    total_count: int

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.set_counts(self, "total_count")

    @property
    def bounds(self) -> tuple[float, float]:
        return (0.0, float(self.total_count))

    @property
    def support(self) -> constraints.Constraint:
        return constraints.integer_interval(0, self.total_count)

    def log_base_measure(self, x: Values) -> PerUnit:
        n = self.total_count
        x = as_float(x)
        return gammaln(n + 1.0) - gammaln(x + 1) - gammaln(n - x + 1)

    def log_normalizer(self, eta: PerUnit) -> PerUnit:
        return self.total_count * softplus(eta)

    def unit_distribution(self, eta: PerUnit) -> dist.Distribution:
        return dist.Binomial(self.total_count, logits=eta)

    def from_mean(self, mean: PerUnit) -> PerUnit:
        return jax.scipy.special.logit(mean / self.total_count)

    def mode(self, eta: PerUnit) -> PerUnit:
        return jnp.minimum(
            jnp.floor((self.total_count + 1) * jax.nn.sigmoid(eta)), self.total_count
        )

    def states(self) -> UnitValues:
        return jnp.arange(self.total_count + 1, dtype=self.dtype)
