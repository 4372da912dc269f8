# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Units in {-1, +1}, and their distribution, which NumPyro lacks."""

import dataclasses
from typing import Any

from jaxtyping import Bool, Float, Shaped
import numpyro.distributions as dist
from numpyro.distributions import constraints

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import PerUnit, Values, Words
from ebmpp.families.bernoulli import is_one
from ebmpp.families.family import Family, UnitValues


@jax.custom_jvp
def _log_normalizer(eta: PerUnit) -> PerUnit:
    """Return log(exp(eta) + exp(-eta)).

    Its derivative is one tanh; JAX's takes three exponentials.
    """
    return jnp.logaddexp(eta, -eta)


_log_normalizer.defjvps(lambda tangent, _, eta: jnp.tanh(eta) * tangent)


class SpinDistribution(dist.Distribution):
    """Distribution on {-1, +1} with ``p(x)`` proportional to ``exp(eta x)``."""

    arg_constraints = {"eta": constraints.real}
    pytree_data_fields = ("eta",)

    def __init__(
        self, eta: Float[ArrayLike, "*batch"], *, validate_args: bool | None = None
    ) -> None:
        self.eta = eta
        super().__init__(batch_shape=jnp.shape(eta), validate_args=validate_args)

    @constraints.dependent_property(is_discrete=True, event_dim=0)
    def support(self) -> constraints.Constraint:
        return spin_constraint

    def sample(
        self, key: Array | None, sample_shape: tuple[int, ...] = ()
    ) -> Float[Array, "*draws"]:
        assert key is not None  # as in NumPyro
        up = jax.random.bernoulli(
            key, jax.nn.sigmoid(2 * self.eta), sample_shape + self.batch_shape
        )
        return 2 * up.astype(float) - 1

    def log_prob(
        self, value: Values, intermediates: list[Any] | None = None
    ) -> PerUnit:
        """Return log sigmoid(2 eta x)."""
        return jax.nn.log_sigmoid(2 * self.eta * value)

    @property
    def mean(self) -> Float[Array, "*batch"]:
        return jnp.tanh(self.eta)

    @property
    def variance(self) -> Float[Array, "*batch"]:
        return 1 - self.mean**2


class _SpinConstraint(constraints.ParameterFreeConstraint):
    is_discrete = True

    def __call__(self, x: Shaped[Array, "*draws"]) -> Bool[Array, "*draws"]:
        return (x == -1) | (x == 1)

    def feasible_like(self, prototype: Array) -> Array:
        return jnp.ones_like(prototype)


spin_constraint = _SpinConstraint()


@dataclasses.dataclass(frozen=True, repr=False)
class Spin(Family):
    """Units in {-1, +1} with statistic x; P(x = 1) = sigmoid(2 eta).

    :param shape: shape of the block.
    """

    support = spin_constraint
    bounds = (-1.0, 1.0)
    num_words = num_couple_words = 1

    def log_normalizer(self, eta: PerUnit) -> PerUnit:
        return _log_normalizer(eta)

    def unit_log_ratio(
        self, eta: PerUnit, other: PerUnit, statistics: PerUnit
    ) -> PerUnit:
        # one logarithm, as for Bernoulli units; exp(-2 |eta|) is shared with the draw
        tail = jnp.exp(-jnp.abs(2 * eta))
        tail_other = jnp.exp(-jnp.abs(2 * other))
        change = jnp.abs(other) - jnp.abs(eta) + jnp.log((1 + tail_other) / (1 + tail))
        return (other - eta) * statistics - change

    def unit_distribution(self, eta: PerUnit) -> dist.Distribution:
        return SpinDistribution(eta)

    def from_mean(self, mean: PerUnit) -> PerUnit:
        return jnp.arctanh(mean)

    def mode(self, eta: PerUnit) -> PerUnit:
        return jnp.where(eta >= 0, 1.0, -1.0).astype(self.dtype)

    def sample(self, words: Words, eta: PerUnit) -> PerUnit:
        return 2 * is_one(words, 2 * eta).astype(self.dtype) - 1

    def states(self) -> UnitValues:
        return jnp.array([-1.0, 1.0])
