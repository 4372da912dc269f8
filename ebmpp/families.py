# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Exponential families: the units that blocks are made of.

A family is its sufficient statistics t, base measure r and log-normaliser A,
``p(x | eta) = r(x) exp(<eta, t(x)> - A(eta))``. Everything else (mean, layer conditional, coupling
ratio, free energy) follows from these three. Arrays of one block have shape ``(*batch, *shape)``;
statistics and natural parameters have ``(*batch, *shape, *stat_shape)``.
"""

import dataclasses
import math
from typing import ClassVar

import numpyro.distributions as dist
from numpyro.distributions import constraints

import jax
from jax import Array
import jax.numpy as jnp
from jax.scipy.special import gammaln

from ebmpp.bits import open_uniform, uniform


def _as_shape(shape: int | tuple[int, ...]) -> tuple[int, ...]:
    given = (shape,) if isinstance(shape, int) else tuple(shape)
    if not all(isinstance(n, int) and n > 0 for n in given):
        raise ValueError(f"a block's shape is a positive int or a tuple of them, not {shape!r}")
    return given


def _float(x: Array) -> Array:
    return jnp.asarray(x, jnp.result_type(float))


@dataclasses.dataclass(frozen=True)
class Family:
    """A block of units of one exponential family.

    To add a family, subclass with ``support``, ``log_normalizer`` and ``unit_distribution``; override
    the others where the defaults (identity statistic, base measure 1, all of R as the domain, draws
    through the NumPyro distribution) do not hold. See ``docs`` in the README, "Your own family".

    :param shape: the block's shape, an int or a tuple of ints.
    :raises ValueError: for a shape that is not made of positive ints.
    """

    shape: tuple[int, ...]

    stat_shape: ClassVar[tuple[int, ...]] = ()
    support: ClassVar[constraints.Constraint] = constraints.real
    #: whether the statistics are bounded below and above: what decides whether a model normalises.
    bounds: ClassVar[tuple[float, float]] = (-math.inf, math.inf)
    #: how many random words a unit's draw takes, and its coupled draw.
    num_words: ClassVar[int] = 2
    num_couple_words: ClassVar[int] = 2
    #: whether ``couple`` makes a unit's pair equal with the largest possible probability
    domain: ClassVar[str] = "any real number"

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _as_shape(self.shape))

    def __repr__(self) -> str:
        shape = self.shape[0] if len(self.shape) == 1 else self.shape
        extra = "".join(
            f", {f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.name != "shape"
        )
        return f"{type(self).__name__}({shape}{extra})"

    @property
    def size(self) -> int:
        """Number of units."""
        return math.prod(self.shape)

    @property
    def statistic_shape(self) -> tuple[int, ...]:
        """Shape of the block's sufficient statistics, ``shape + stat_shape``."""
        return self.shape + self.stat_shape

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of drawn values: floats, so that a value is its own statistic."""
        return jnp.result_type(float)

    # -- the family itself -----------------------------------------------------------------------

    def statistics(self, x: Array) -> Array:
        """Sufficient statistics t(x)."""
        return _float(x)

    def log_base_measure(self, x: Array) -> Array:
        """log r(x), one number a unit."""
        return jnp.zeros_like(_float(x))

    def log_normalizer(self, eta: Array) -> Array:
        """A(eta), one number a unit."""
        raise NotImplementedError(f"{type(self).__name__} must define log_normalizer")

    def unit_distribution(self, eta: Array) -> dist.Distribution:
        """The NumPyro distribution of units with natural parameter ``eta``, elementwise."""
        raise NotImplementedError(f"{type(self).__name__} must define unit_distribution")

    def in_domain(self, eta: Array) -> Array:
        """Whether A(eta) is finite, unit by unit."""
        return jnp.isfinite(eta)

    def default_eta(self) -> Array:
        """The natural parameter of initial draws and of an empty bias (uniform where that exists)."""
        return jnp.zeros(self.statistic_shape, self.dtype)

    def from_mean(self, mean: Array) -> Array:
        """The natural parameter whose mean statistics are ``mean`` (the inverse of :meth:`mean`)."""
        raise NotImplementedError(f"{type(self).__name__} has no inverse mean map")

    def mode(self, eta: Array) -> Array:
        """The most probable value, unit by unit."""
        raise NotImplementedError(f"{type(self).__name__} has no mode")

    # -- what follows ----------------------------------------------------------------------------

    def mean(self, eta: Array) -> Array:
        """E[t(x)] = dA/deta, by autodiff."""
        return jax.grad(lambda e: self.log_normalizer(e).sum())(eta)

    def distribution(self, eta: Array) -> dist.Distribution:
        """The block's conditional: a NumPyro distribution whose event is the whole block."""
        return self.unit_distribution(eta).to_event(len(self.shape))

    def log_ratio(self, eta: Array, other: Array, statistics: Array) -> Array:
        """log p(x | other) - log p(x | eta) summed over units; the base measure cancels.

        :param eta: shape ``(*batch, *shape, *stat_shape)``.
        :param other: the same shape.
        :param statistics: t(x), the same shape.
        :return: shape ``(*batch,)``.
        """
        inner = ((other - eta) * statistics).reshape(*eta.shape[: -len(self.stat_shape) or None], -1)
        per_unit = inner.sum(-1) - self.log_normalizer_difference(eta, other)
        return per_unit.sum(tuple(range(-len(self.shape), 0)))

    def log_normalizer_difference(self, eta: Array, other: Array) -> Array:
        """A(other) - A(eta), unit by unit."""
        return self.log_normalizer(other) - self.log_normalizer(eta)

    def sample(self, bits: Array, eta: Array) -> Array:
        """A draw as a function of random words.

        :param bits: ``uint32``, shape ``(*batch, *shape, num_words)``.
        :param eta: natural parameters.
        :return: values, shape ``(*batch, *shape)``.
        """
        rows = bits.reshape(-1, 2)
        flat = eta.reshape(-1, *self.stat_shape)
        # the words are Threefry keys, whatever jax's default generator
        keys = jax.random.wrap_key_data(rows, impl="threefry2x32")
        drawn = jax.vmap(lambda key, e: self.unit_distribution(e).sample(key))(keys, flat)
        return drawn.reshape(bits.shape[:-1]).astype(self.dtype)

    def couple(self, bits: Array, eta: Array, other: Array) -> tuple[Array, Array]:
        """Two draws from the same random words: unitwise maximal where the family knows how.

        Equal natural parameters give equal draws.

        :param bits: ``uint32``, shape ``(*batch, *shape, num_couple_words)``.
        """
        return self.sample(bits, eta), self.sample(bits, other)

    def initial(self, bits: Array) -> Array:
        """Initial values: draws at :meth:`default_eta`."""
        batch = bits.shape[: bits.ndim - 1 - len(self.shape)]
        return self.sample(bits, jnp.broadcast_to(self.default_eta(), batch + self.statistic_shape))

    def in_support(self, x: Array) -> Array:
        """Whether each value is one that a unit can take."""
        return self.support(_float(x)) & jnp.isfinite(_float(x))

    def states(self) -> Array | None:
        """Every value of one unit, or None where there are infinitely many."""
        return None

    def interaction(self, statistics: Array) -> Array:
        """The statistics that :func:`~ebmpp.Bilinear` couples (all of them, unless overridden)."""
        return statistics

    @property
    def interaction_shape(self) -> tuple[int, ...]:
        """Shape of :meth:`interaction`."""
        return self.statistic_shape


@dataclasses.dataclass(frozen=True, repr=False)
class Bernoulli(Family):
    """Units in {0, 1} with statistic x.

    :param shape: the block's shape.

    **Example**

    >>> from ebmpp import Bernoulli
    >>> Bernoulli(3).mean(jnp.zeros(3)).tolist()
    [0.5, 0.5, 0.5]
    """

    support = constraints.boolean
    bounds = (0.0, 1.0)
    num_words = num_couple_words = 1

    def log_normalizer(self, eta: Array) -> Array:
        return jax.nn.softplus(eta)

    def log_normalizer_difference(self, eta: Array, other: Array) -> Array:
        # One logarithm instead of two softplus: 1.3 to 1.5 times less time a coupled step.
        tail, tail_other = jnp.exp(-jnp.abs(eta)), jnp.exp(-jnp.abs(other))
        positive = jnp.maximum(other, 0) - jnp.maximum(eta, 0)
        return positive + jnp.log((1 + tail_other) / (1 + tail))

    def unit_distribution(self, eta: Array) -> dist.Distribution:
        return dist.Bernoulli(logits=eta)

    def from_mean(self, mean: Array) -> Array:
        return jax.scipy.special.logit(mean)

    def mode(self, eta: Array) -> Array:
        return (eta > 0).astype(self.dtype)

    def sample(self, bits: Array, eta: Array) -> Array:
        # u < sigmoid(eta) without the division; exp(-|eta|) is shared with the coupling ratio.
        tail = jnp.exp(-jnp.abs(eta))
        hit = uniform(bits[..., 0]) * (1 + tail) < jnp.where(eta >= 0, 1.0, tail)
        return hit.astype(self.dtype)

    def states(self) -> Array:
        return jnp.array([0.0, 1.0])


class SpinDistribution(dist.Distribution):
    """Units in {-1, +1}: ``p(x)`` proportional to ``exp(eta x)``.

    :param eta: natural parameter, any shape.
    """

    arg_constraints = {"eta": constraints.real}
    pytree_data_fields = ("eta",)

    def __init__(self, eta: Array, *, validate_args: bool | None = None) -> None:
        self.eta = eta
        super().__init__(batch_shape=jnp.shape(eta), validate_args=validate_args)

    @constraints.dependent_property(is_discrete=True, event_dim=0)
    def support(self) -> constraints.Constraint:
        return spin_constraint

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        up = jax.random.bernoulli(key, jax.nn.sigmoid(2 * self.eta), sample_shape + self.batch_shape)
        return 2 * up.astype(jnp.result_type(float)) - 1

    def log_prob(self, value: Array) -> Array:
        return jax.nn.log_sigmoid(2 * self.eta * value)

    @property
    def mean(self) -> Array:
        return jnp.tanh(self.eta)

    @property
    def variance(self) -> Array:
        return 1 - jnp.tanh(self.eta) ** 2


class _SpinConstraint(constraints.ParameterFreeConstraint):
    """Values in {-1, +1}."""

    is_discrete = True

    def __call__(self, x: Array) -> Array:
        return (x == -1) | (x == 1)

    def feasible_like(self, prototype: Array) -> Array:
        return jnp.ones_like(prototype)


spin_constraint = _SpinConstraint()


@dataclasses.dataclass(frozen=True, repr=False)
class Spin(Family):
    """Units in {-1, +1} with statistic x; P(x = 1) = sigmoid(2 eta).

    :param shape: the block's shape.
    """

    support = spin_constraint
    bounds = (-1.0, 1.0)
    num_words = num_couple_words = 1

    def log_normalizer(self, eta: Array) -> Array:
        return jnp.logaddexp(eta, -eta)

    def unit_distribution(self, eta: Array) -> dist.Distribution:
        return SpinDistribution(eta)

    def from_mean(self, mean: Array) -> Array:
        return jnp.arctanh(mean)

    def mode(self, eta: Array) -> Array:
        return jnp.where(eta > 0, 1.0, -1.0).astype(self.dtype)

    def sample(self, bits: Array, eta: Array) -> Array:
        return 2 * Bernoulli.sample(self, bits, 2 * eta) - 1

    def states(self) -> Array:
        return jnp.array([-1.0, 1.0])


@dataclasses.dataclass(frozen=True, repr=False)
class Categorical(Family):
    """Units in {0, ..., num_categories - 1} with one-hot statistics.

    :param shape: the block's shape (of the values; statistics have one more axis).
    :param num_categories: K, at least 2.
    :raises ValueError: when K is below 2.
    """

    num_categories: int

    num_words = 1
    num_couple_words = 3
    bounds = (0.0, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.num_categories, int) or self.num_categories < 2:
            raise ValueError(f"num_categories is an int of at least 2, not {self.num_categories!r}")

    @property
    def stat_shape(self) -> tuple[int, ...]:
        return (self.num_categories,)

    @property
    def support(self) -> constraints.Constraint:
        return constraints.integer_interval(0, self.num_categories - 1)

    @property
    def dtype(self) -> jnp.dtype:
        return jnp.dtype(jnp.int32)

    def statistics(self, x: Array) -> Array:
        return jax.nn.one_hot(x, self.num_categories, dtype=jnp.result_type(float))

    def log_base_measure(self, x: Array) -> Array:
        return jnp.zeros(jnp.shape(x))

    def default_eta(self) -> Array:
        return jnp.zeros(self.statistic_shape)

    def log_normalizer(self, eta: Array) -> Array:
        return jax.nn.logsumexp(eta, axis=-1)

    def unit_distribution(self, eta: Array) -> dist.Distribution:
        return dist.Categorical(logits=eta)

    def from_mean(self, mean: Array) -> Array:
        return jnp.log(mean)

    def mode(self, eta: Array) -> Array:
        return eta.argmax(-1).astype(self.dtype)

    def sample(self, bits: Array, eta: Array) -> Array:
        return _inverse_cdf(uniform(bits[..., 0]), jax.nn.softmax(eta, axis=-1))

    def couple(self, bits: Array, eta: Array, other: Array) -> tuple[Array, Array]:
        # Unitwise maximal: keep x for y with probability min(1, q(x)/p(x)), else draw y from (q - p)+.
        p, q = jax.nn.softmax(eta, axis=-1), jax.nn.softmax(other, axis=-1)
        x = _inverse_cdf(uniform(bits[..., 0]), p)
        at_x = lambda prob: jnp.take_along_axis(prob, x[..., None], -1)[..., 0]  # noqa: E731
        kept = uniform(bits[..., 1]) * at_x(p) < at_x(q)
        return x, jnp.where(kept, x, _inverse_cdf(uniform(bits[..., 2]), jnp.maximum(q - p, 0)))

    def states(self) -> Array:
        return jnp.arange(self.num_categories, dtype=self.dtype)


def _inverse_cdf(u: Array, weights: Array) -> Array:
    """The first category whose cumulated weight exceeds ``u`` times the total."""
    cumulated = jnp.cumsum(weights, axis=-1)
    # u < 1, so the threshold stays below the last sum and a category of weight 0 is never chosen
    threshold = u[..., None] * cumulated[..., -1:]
    return (cumulated <= threshold).sum(-1).clip(0, weights.shape[-1] - 1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True, repr=False)
class Binomial(Family):
    """Counts in {0, ..., total_count} with statistic x and base measure C(n, x).

    :param shape: the block's shape.
    :param total_count: n, at least 1.
    :raises ValueError: when n is below 1.
    """

    total_count: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.total_count, int) or self.total_count < 1:
            raise ValueError(f"total_count is an int of at least 1, not {self.total_count!r}")

    @property
    def bounds(self) -> tuple[float, float]:
        return (0.0, float(self.total_count))

    @property
    def support(self) -> constraints.Constraint:
        return constraints.integer_interval(0, self.total_count)

    def log_base_measure(self, x: Array) -> Array:
        n, x = self.total_count, _float(x)
        return gammaln(n + 1.0) - gammaln(x + 1) - gammaln(n - x + 1)

    def log_normalizer(self, eta: Array) -> Array:
        return self.total_count * jax.nn.softplus(eta)

    def unit_distribution(self, eta: Array) -> dist.Distribution:
        return dist.Binomial(self.total_count, logits=eta)

    def from_mean(self, mean: Array) -> Array:
        return jax.scipy.special.logit(mean / self.total_count)

    def mode(self, eta: Array) -> Array:
        top = jnp.floor((self.total_count + 1) * jax.nn.sigmoid(eta))
        return jnp.minimum(top, self.total_count)

    def states(self) -> Array:
        return jnp.arange(self.total_count + 1, dtype=self.dtype)


@dataclasses.dataclass(frozen=True, repr=False)
class Poisson(Family):
    """Counts 0, 1, 2, ... with statistic x and base measure 1 / x!; the rate is exp(eta).

    :param shape: the block's shape.
    """

    support = constraints.nonnegative_integer
    bounds = (0.0, math.inf)

    def log_base_measure(self, x: Array) -> Array:
        return -gammaln(_float(x) + 1)

    def log_normalizer(self, eta: Array) -> Array:
        return jnp.exp(eta)

    def unit_distribution(self, eta: Array) -> dist.Distribution:
        return dist.Poisson(jnp.exp(eta))

    def from_mean(self, mean: Array) -> Array:
        return jnp.log(mean)

    def mode(self, eta: Array) -> Array:
        return jnp.floor(jnp.exp(eta))


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


@dataclasses.dataclass(frozen=True, repr=False)
class Gaussian(Family):
    """Reals. ``variance="unit"``: statistic x, eta is the mean. ``variance="learned"``: statistics
    x and x**2 (last axis), natural parameter ``(mean / variance, -1 / (2 variance))``.

    A :func:`~ebmpp.Bilinear` factor couples x; the precision then comes from the block's bias.

    :param shape: the block's shape.
    :param variance: "unit" or "learned".
    :raises ValueError: for another ``variance``.
    """

    variance: str = "unit"

    num_words = num_couple_words = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variance not in ("unit", "learned"):
            raise ValueError(f"variance is 'unit' or 'learned', not {self.variance!r}")

    @property
    def learned(self) -> bool:
        """Whether the variance is a parameter."""
        return self.variance == "learned"

    @property
    def domain(self) -> str:
        return "negative in its second entry (-1 / (2 variance))" if self.learned else "any real number"

    @property
    def stat_shape(self) -> tuple[int, ...]:
        return (2,) if self.learned else ()

    @property
    def interaction_shape(self) -> tuple[int, ...]:
        return self.shape

    def interaction(self, statistics: Array) -> Array:
        return statistics[..., 0] if self.learned else statistics

    def statistics(self, x: Array) -> Array:
        x = _float(x)
        return jnp.stack([x, x**2], axis=-1) if self.learned else x

    def log_base_measure(self, x: Array) -> Array:
        x = _float(x)
        return -0.5 * math.log(2 * math.pi) - (jnp.zeros_like(x) if self.learned else 0.5 * x**2)

    def moments(self, eta: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of each unit."""
        if not self.learned:
            return eta, jnp.ones_like(eta)
        variance = -0.5 / eta[..., 1]
        return eta[..., 0] * variance, jnp.sqrt(variance)

    def log_normalizer(self, eta: Array) -> Array:
        if not self.learned:
            return 0.5 * eta**2
        return -(eta[..., 0] ** 2) / (4 * eta[..., 1]) - 0.5 * jnp.log(-2 * eta[..., 1])

    def in_domain(self, eta: Array) -> Array:
        if not self.learned:
            return jnp.isfinite(eta)
        return jnp.isfinite(eta).all(-1) & (eta[..., 1] < 0)

    def default_eta(self) -> Array:
        zero = jnp.zeros(self.shape)
        return jnp.stack([zero, zero - 0.5], axis=-1) if self.learned else zero

    def unit_distribution(self, eta: Array) -> dist.Distribution:
        return dist.Normal(*self.moments(eta))

    def from_mean(self, mean: Array) -> Array:
        if not self.learned:
            return mean
        variance = mean[..., 1] - mean[..., 0] ** 2
        return jnp.stack([mean[..., 0] / variance, -0.5 / variance], axis=-1)

    def mode(self, eta: Array) -> Array:
        return self.moments(eta)[0]

    def sample(self, bits: Array, eta: Array) -> Array:
        centre, scale = self.moments(eta)
        return centre + scale * jax.scipy.special.ndtri(open_uniform(bits[..., 0]))
