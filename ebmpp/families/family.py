# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What an exponential family is.

A family is its sufficient statistics t, base measure r and log-normaliser A,
``p(x | eta) = r(x) exp(<eta, t(x)> - A(eta))``. Everything else (mean, layer conditional, coupling
ratio, free energy) follows from these three. Arrays of one block have shape ``(*batch, *shape)``;
statistics and natural parameters have ``(*batch, *shape, *stat_shape)``.
"""

from collections.abc import Iterable, Mapping
import dataclasses
import math
from typing import ClassVar

from jaxtyping import Bool, Float, Real, Shaped, UInt32
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import checks, sharding
from ebmpp.core.types import Draws, Natural, PerUnit, Truths, Values, Words
from ebmpp.errors import ArgumentError
from ebmpp.families import finite


def _as_shape(family: str, shape: int | tuple[int, ...]) -> tuple[int, ...]:
    if not isinstance(shape, tuple | list):
        return (checks.count(f"{family}: shape", shape),)
    if not shape:
        raise ArgumentError(f"{family}: shape is an int or a tuple of ints, not the empty {shape!r}")
    return tuple(checks.count(f"{family}: shape", n) for n in shape)


def as_float(x: ArrayLike) -> Float[Array, "..."]:
    return jnp.asarray(x, jnp.result_type(float))


class Shape:
    """What a type checker is told: a family takes an int or a tuple of ints, and has a tuple."""

    def __get__(self, family: "Family", kind: type) -> tuple[int, ...]:
        raise NotImplementedError

    def __set__(self, family: "Family", given: int | tuple[int, ...]) -> None: ...


#: Two draws of a block, and in which rows they are one.
Reflection = tuple[Shaped[Array, "rows *shape"], Shaped[Array, "rows *shape"], Bool[Array, "rows"]]
#: Natural parameters or statistics, by block.
Stack = Mapping[str, Float[Array, "rows *natural"]]


@dataclasses.dataclass(frozen=True)
class Family:
    """A block of units of one exponential family.

    To add a family, subclass with ``support``, ``log_normalizer`` and ``unit_distribution``; override
    the others where the defaults (identity statistic, base measure 1, all of R as the domain, draws
    through the NumPyro distribution) do not hold. With ``states`` it has all that a visible block needs;
    units of infinitely many values need ``bounds``, ``from_mean`` and ``mode`` as well. Methods take arrays
    of any leading axes. CONTRIBUTING has an example, "A family".

    :param shape: the block's shape, an int or a tuple of ints.
    :raises ArgumentError: for a shape that is not made of positive ints.
    """

    shape: Shape

    stat_shape: ClassVar[tuple[int, ...]] = ()
    support: ClassVar[constraints.Constraint] = constraints.real
    #: whether the statistics are bounded below and above: what decides whether a model normalises.
    bounds: ClassVar[tuple[float, float]] = (-math.inf, math.inf)
    #: how many random words a unit's draw takes.
    num_words: ClassVar[int] = 2
    #: how many its coupled draw takes.
    num_couple_words: ClassVar[int] = 2
    #: where A(eta) is finite, in words: what an error tells.
    domain: ClassVar[str] = "any real number"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _as_shape(type(self).__name__, self.shape))

    def __repr__(self) -> str:
        shape = self.shape[0] if len(self.shape) == 1 else self.shape
        options = (f.name for f in dataclasses.fields(self) if f.name != "shape")
        extra = "".join(f", {name}={getattr(self, name)!r}" for name in options)
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

    def statistics(self, x: Values) -> Natural:
        """Sufficient statistics t(x)."""
        return as_float(x)

    def log_base_measure(self, x: Values) -> PerUnit:
        """log r(x), one number a unit."""
        return jnp.zeros_like(as_float(x))

    def log_normalizer(self, eta: Natural) -> PerUnit:
        """A(eta), one number a unit."""
        raise NotImplementedError(f"{type(self).__name__} must define log_normalizer")

    def unit_distribution(self, eta: Natural) -> dist.Distribution:
        """The NumPyro distribution of units with natural parameter ``eta``, elementwise."""
        raise NotImplementedError(f"{type(self).__name__} must define unit_distribution")

    def in_domain(self, eta: Natural) -> Truths:
        """Whether A(eta) is finite, unit by unit."""
        return jnp.isfinite(eta)

    def default_eta(self) -> Natural:
        """The natural parameter of initial draws and of an empty bias (uniform where that exists)."""
        return jax.device_put(np.zeros(self.statistic_shape, self.dtype))  # compiles nothing

    def from_mean(self, mean: Natural) -> Natural:
        """The natural parameter whose mean statistics are ``mean`` (the inverse of :meth:`mean`).

        By Newton's method from :meth:`states`, unless overridden; infinite or nan where no natural parameter
        has this mean.

        :raises NotImplementedError: for a family of infinitely many values that does not define it.
        """
        table = self._table("from_mean(mean), the natural parameter whose mean statistics these are")
        return finite.from_mean(self._flat(as_float(mean)), *table[1:]).reshape(jnp.shape(mean))

    def mode(self, eta: Natural) -> Draws:
        """The most probable value, unit by unit: of :meth:`states`, unless overridden.

        :raises NotImplementedError: for a family of infinitely many values that does not define it.
        """
        made = finite.mode(self._flat(eta), *self._table("mode(eta), the most probable value of each unit"))
        return made.reshape(eta.shape[: eta.ndim - len(self.stat_shape)]).astype(self.dtype)

    def _flat(self, statistics: Natural) -> Float[Array, "units statistics"]:
        return statistics.reshape(-1, math.prod(self.stat_shape))

    def _table(
        self, wanted: str
    ) -> tuple[Real[Array, "values"], Float[Array, "values statistics"], Float[Array, "values"]]:
        """States of one unit, their statistics and log base measures."""
        states = self.states()
        if states is None:
            raise NotImplementedError(
                f"{type(self).__name__} must define {wanted}; or, where a unit takes finitely many values, "
                "states(), from which it follows"
            )
        return states, self._flat(self.statistics(states)), self.log_base_measure(states)

    # -- what follows ----------------------------------------------------------------------------

    def mean(self, eta: Float[ArrayLike, "*natural"]) -> Natural:
        """E[t(x)] = dA/deta, by autodiff."""
        return jax.grad(lambda e: self.log_normalizer(e).sum())(eta)

    def distribution(self, eta: Natural) -> dist.Distribution:
        """The block's conditional: a NumPyro distribution whose event is the whole block."""
        return self.unit_distribution(eta).to_event(len(self.shape))

    def log_ratio(self, eta: Natural, other: Natural, statistics: Natural) -> Float[Array, "*batch"]:
        """log p(x | other) - log p(x | eta) summed over units; the base measure cancels."""
        rows = lambda a: {"": a.reshape(-1, *self.statistic_shape)}
        made = LogRatio({"": self}, rows(eta), rows(other))(rows(statistics))
        return made.reshape(eta.shape[: eta.ndim - len(self.statistic_shape)])

    def log_normalizer_difference(self, eta: Natural, other: Natural) -> PerUnit:
        """A(other) - A(eta), unit by unit.

        Values of one function: what it is off by at a parameter cancels from step to step of a path. A closed
        form of both does not: with one logarithm of a ratio, 10,000 steps of 784 Bernoulli units were 0.05
        nats too many.
        """
        return self.log_normalizer(other) - self.log_normalizer(eta)

    def unit_log_ratio(self, eta: Natural, other: Natural, statistics: Natural) -> PerUnit:
        """log p(x | other) - log p(x | eta), unit by unit: what :meth:`log_ratio` sums."""
        slope = (other - eta) * statistics
        own = slope.ndim - len(self.stat_shape)
        return slope.sum(range(own, slope.ndim)) - self.log_normalizer_difference(eta, other)

    def sample(self, words: Words, eta: Natural) -> Draws:
        """A draw as a function of random words, :attr:`num_words` a unit."""
        rows = words.reshape(-1, 2)
        flat = eta.reshape(-1, *self.stat_shape)
        # the words are Threefry keys, whatever jax's default generator
        keys = jax.random.wrap_key_data(rows, impl="threefry2x32")
        # NumPyro's samplers promote, whatever jax is told to refuse
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            draw = lambda key, e: jnp.asarray(self.unit_distribution(e).sample(key))
            drawn = jax.vmap(draw)(keys, flat)
        return drawn.reshape(words.shape[:-1]).astype(self.dtype)

    def couple(self, words: Words, eta: Natural, other: Natural) -> tuple[Draws, Draws]:
        """Two draws from the same random words: unitwise maximal where the family knows how.

        Equal natural parameters give equal draws. It takes :attr:`num_couple_words` a unit.
        """
        return self.sample(words, eta), self.sample(words, other)

    def reflect(
        self, words: UInt32[Array, "rows *shape words"], u: Float[Array, "rows"], eta: Natural, other: Natural
    ) -> Reflection:
        """Two draws of the block that are equal as often as can be, where the family knows how.

        :meth:`couple` for the others.

        :param u: uniforms.
        """
        return *self.couple(words, eta, other), jnp.zeros(len(u), bool)

    def initial(self, words: Words) -> Draws:
        """Initial values: draws at :meth:`default_eta`."""
        batch = words.shape[: words.ndim - 1 - len(self.shape)]
        # Without the barrier XLA folds constants of the size of all draws, for seconds where units have many
        # categories.
        eta = lax.optimization_barrier(self.default_eta())
        return self.sample(words, jnp.broadcast_to(eta, batch + self.statistic_shape))

    def in_support(self, x: Values) -> Truths | Bool[np.ndarray, "*units"]:
        """Whether each value is one that a unit can take; of numpy's arrays on the host, at once."""
        if isinstance(x, np.ndarray):  # a step that the device is at would be waited for
            x = x.astype(jnp.result_type(float))
            with np.errstate(invalid="ignore"):
                return np.asarray(self.support(x)) & np.isfinite(x)
        x = as_float(x)
        return jnp.asarray(self.support(x)) & jnp.isfinite(x)

    def states(self) -> Real[Array, "values"] | None:
        """Every value of one unit, or None where there are infinitely many."""
        return None

    @property
    def statistic_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """The least and the largest value of each statistic, of shape ``stat_shape``.

        Those of :meth:`states`, else :attr:`bounds` for each; override it where these differ.
        """
        states = self.states()
        if states is None:
            low, high = (np.full(self.stat_shape, bound) for bound in self.bounds)
            return low, high
        with sharding.at_once():  # known, also where a trace asks
            each = np.asarray(self.statistics(states))
        return each.min(0), each.max(0)

    def interaction(self, statistics: Natural) -> Float[Array, "*interacting"]:
        """The statistics that :func:`~ebmpp.Bilinear` couples (all of them, unless overridden)."""
        return statistics

    @property
    def interaction_shape(self) -> tuple[int, ...]:
        """Shape of :meth:`interaction`."""
        return self.statistic_shape


class LogRatio:
    """log p(x | other) - log p(x | eta) of blocks of independent units, row by row; the base measures cancel.

    Each unit's own ratio is made first, near 0 where its laws are alike, and all are summed once: sums over
    units of <slope, t> and of A are large, and would cancel. The noise that float32 leaves, at slopes of 1
    (and of 0.01): 1e-5 (3e-6) for 784 Bernoulli units, 3e-5 (9e-6) for Categorical(784, 4), 3e-5 (4e-5) for
    Binomial(5, 100), 2e-4 (1e-5) for 100 Poisson units of rate 3, and for 100 Gaussian ones 1e-5 (1e-7) where
    means are up to ten standard deviations from 0, 1e-3 (2e-5) where they are a thousand.

    :param families: of the blocks.
    :param eta: natural parameters, ``(rows, *shape, *stat_shape)`` a block.
    :param other: likewise.
    """

    def __init__(self, families: Mapping[str, Family], eta: Stack, other: Stack) -> None:
        self.families, self.eta, self.other = families, eta, other

    def __call__(self, statistics: Stack) -> Float[Array, "rows"]:
        """At values of these statistics."""
        return self._sum(self._unit(b, statistics) for b in self.families)

    def checked(self, statistics: Stack, same: Bool[Array, "rows"]) -> Float[Array, "rows"]:
        """The same, 0 in rows of one law, and nan where a natural parameter is outside its domain: one sum
        over units tells both, where a reduction of truths for each check took a sixth of all kernels of a
        sweep.

        :param same: rows in which the two laws are one, whatever the last bits say.
        """
        return self._sum(self._unit_checked(b, statistics, same) for b in self.families)

    def _unit(self, b: str, statistics: Stack) -> Float[Array, "rows *shape"]:
        return self.families[b].unit_log_ratio(self.eta[b], self.other[b], statistics[b])

    def _unit_checked(
        self, b: str, statistics: Stack, same: Bool[Array, "rows"]
    ) -> Float[Array, "rows *shape"]:
        each, family = self._unit(b, statistics), self.families[b]
        inside = family.in_domain(self.eta[b]) & family.in_domain(self.other[b])
        if inside.ndim > each.ndim:  # a truth a statistic
            inside = inside.all(range(each.ndim, inside.ndim))
        same = same.reshape(-1, *(1,) * (each.ndim - 1))
        return jnp.where(inside, jnp.where(same, 0.0, each), jnp.nan)

    def _sum(self, each: Iterable[Float[Array, "rows *shape"]]) -> Float[Array, "rows"]:
        return jnp.concatenate([_rows(ratio) for ratio in each], -1).sum(-1)


def _rows(a: Shaped[Array, "rows *shape"]) -> Shaped[Array, "rows units"]:
    return a.reshape(len(a), -1)
