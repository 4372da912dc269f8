# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Units with a few unordered values."""

import dataclasses

from jaxtyping import Float, Int
import numpyro.distributions as dist
from numpyro.distributions import constraints

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import PerUnit, Values, Words, checks
from ebmpp.core.random import inverse_cdf, uniform
from ebmpp.families.family import Family, UnitValues

Categories = Int[Array, "*units"]
PerCategory = Float[Array, "*units categories"]


@dataclasses.dataclass(frozen=True, repr=False)
class Categorical(Family):
    """Units in {0, ..., num_categories - 1} with one-hot statistics.

    :param shape: shape of the block's values; statistics have one more axis.
    :param num_categories: K, at least 2.
    :raises ArgumentError: for K below 2.
    """

    num_categories: int

    num_words = 1
    num_couple_words = 3
    bounds = (0.0, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.set_counts(self, "num_categories", least=2)

    @property
    def stat_shape(self) -> tuple[int, ...]:
        return (self.num_categories,)

    @property
    def support(self) -> constraints.Constraint:
        return constraints.integer_interval(0, self.num_categories - 1)

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.int32)

    def statistics(self, x: Values) -> PerCategory:
        return jax.nn.one_hot(x, self.num_categories, dtype=float)

    def log_normalizer(self, eta: PerCategory) -> PerUnit:
        return jax.nn.logsumexp(eta, axis=-1)

    def unit_distribution(self, eta: PerCategory) -> dist.Distribution:
        return dist.Categorical(logits=eta)

    def from_mean(self, mean: PerCategory) -> PerCategory:
        return jnp.log(mean)

    def mode(self, eta: PerCategory) -> Categories:
        return eta.argmax(-1).astype(self.dtype)

    def sample(
        self, words: Words, eta: Float[Array, "*#units categories"]
    ) -> Categories:
        return inverse_cdf(uniform(words[..., 0]), jax.nn.softmax(eta, axis=-1))

    def initial(self, words: Words) -> Categories:
        # one unit's eta for all: XLA would fold a constant with all rows for seconds
        return self.sample(words, jnp.zeros((1,) * (words.ndim - 1) + self.stat_shape))

    def couple(
        self, words: Words, eta: PerCategory, other: PerCategory
    ) -> tuple[Categories, Categories]:
        """Return a maximally coupled pair for each unit.

        With probability min(1, q(x)/p(x)) y is x; otherwise y is drawn from the
        residual (q - p)+.
        """
        p = jax.nn.softmax(eta, axis=-1)
        q = jax.nn.softmax(other, axis=-1)
        x = inverse_cdf(uniform(words[..., 0]), p)

        def at_x(prob):
            return jnp.take_along_axis(prob, x[..., None], -1)[..., 0]

        is_same = uniform(words[..., 1]) * at_x(p) < at_x(q)
        residual = inverse_cdf(uniform(words[..., 2]), jnp.maximum(q - p, 0))
        return x, jnp.where(is_same, x, residual)

    def states(self) -> UnitValues:
        return jnp.arange(self.num_categories, dtype=self.dtype)
