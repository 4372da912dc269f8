# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
r"""Base class of exponential families.

A family is defined by its sufficient statistics t, base measure r and log-normaliser A:

.. math:: p(x \mid \eta) = r(x) \exp(\langle \eta, t(x) \rangle - A(\eta))

Means, conditionals, coupling ratios and free energies follow from these. Arrays of one
block have shape ``(*batch, *shape)``; statistics and natural parameters have
``(*batch, *shape, *stat_shape)``.
"""

import abc
from collections.abc import Mapping
import dataclasses
from functools import lru_cache
import math
from typing import ClassVar, Protocol

from jaxtyping import Bool, Float, Real, Shaped
import numpy as np
import numpyro.distributions as dist
from numpyro.distributions import constraints

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import (
    Blocks,
    Draws,
    Natural,
    PerRow,
    PerUnit,
    RowMask,
    Rows,
    UnitMask,
    Values,
    Words,
    checks,
    expand,
    random,
    sharding,
)
from ebmpp.families import finite


def as_float(x: ArrayLike) -> Float[Array, "..."]:
    """Convert to jax's default floats."""
    return jnp.asarray(x, float)


class Shape(Protocol):
    """Annotation of a field that accepts an int or a tuple of ints, and holds a tuple."""

    def __get__(self, family: "Family", kind: type) -> tuple[int, ...]: ...

    def __set__(self, family: "Family", value: int | tuple[int, ...]) -> None: ...


#: Two draws of a block, and True in rows where they are equal.
Reflection = tuple[
    Shaped[Array, "rows *shape"], Shaped[Array, "rows *shape"], Bool[Array, "rows"]
]
#: All values of one unit.
UnitValues = Real[Array, "values"]
#: Natural parameters or statistics, by block.
Stack = Mapping[str, Float[Array, "rows *natural"]]


@dataclasses.dataclass(frozen=True)
class Family(abc.ABC):
    """A block of units of one exponential family.

    To add a family, define ``support``, ``log_normalizer`` and ``unit_distribution``,
    and override the other methods where the defaults do not hold: identity statistic,
    base measure 1, domain R, draws from the NumPyro distribution. With ``states`` a
    family is complete for visible blocks; units of infinitely many values also need
    ``bounds``, ``from_mean`` and ``mode``. Methods take arrays with any leading axes.

    :param shape: shape of the block, an int or a tuple of ints.
    :raises ArgumentError: for a shape that is not made of positive ints.
    """

    shape: Shape

    stat_shape: ClassVar[tuple[int, ...]] = ()
    support: ClassVar[constraints.Constraint] = constraints.real
    #: lower and upper bound of the statistics, which decide whether a model normalises.
    bounds: ClassVar[tuple[float, float]] = (-math.inf, math.inf)
    #: number of random words per draw of a unit.
    num_words: ClassVar[int] = 2
    #: number of random words per coupled draw of a unit.
    num_couple_words: ClassVar[int] = 2
    #: description of the domain of A, for error messages.
    domain: ClassVar[str] = "any real number"

    def __post_init__(self) -> None:
        name = f"{type(self).__name__}: shape"
        shape = self.shape
        sizes = shape if isinstance(shape, tuple | list) else (shape,)
        if not sizes:
            raise checks.error(name, "an int or a tuple of ints", shape)
        object.__setattr__(self, "shape", tuple(checks.count(name, n) for n in sizes))

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
        """Dtype of draws: floats, so that a value is its own statistic."""
        return jnp.result_type(float)

    def statistics(self, x: Values) -> Natural:
        """Return the sufficient statistics t(x)."""
        return as_float(x)

    def log_base_measure(self, x: Values) -> PerUnit:
        """Return log r(x) of each unit."""
        return jnp.zeros_like(as_float(x))

    @abc.abstractmethod
    def log_normalizer(self, eta: Natural) -> PerUnit:
        """Return A(eta) of each unit."""

    @abc.abstractmethod
    def unit_distribution(self, eta: Natural) -> dist.Distribution:
        """Return the NumPyro distribution of units with natural parameters ``eta``, elementwise."""

    def in_domain(self, eta: Natural) -> UnitMask:
        """Return True where A(eta) is finite, per unit."""
        return jnp.isfinite(eta)

    def default_eta(self) -> Natural:
        """Return the natural parameter of initial draws and empty biases, uniform if possible."""
        # compiles nothing
        return jax.device_put(np.zeros(self.statistic_shape))

    def from_mean(self, mean: Natural) -> Natural:
        """Return the natural parameter whose :meth:`mean` is ``mean``.

        The default uses Newton's method on :meth:`states`; infinite or nan where no
        natural parameter has this mean.

        :raises NotImplementedError: for a family of infinitely many values that does
            not define it.
        """
        _, statistics, log_base = self._table("from_mean(mean)")
        flat = self._flat(as_float(mean))
        eta = finite.from_mean(flat, statistics, log_base)
        return eta.reshape(jnp.shape(mean))

    def mode(self, eta: Natural) -> Draws:
        """Return the most probable value of each unit, by default among :meth:`states`.

        :raises NotImplementedError: for a family of infinitely many values that does
            not define it.
        """
        values = finite.mode(self._flat(eta), *self._table("mode(eta)"))
        units = eta.shape[: eta.ndim - len(self.stat_shape)]
        return values.reshape(units).astype(self.dtype)

    def _sum_statistics(self, products: Natural) -> PerUnit:
        leading = products.ndim - len(self.stat_shape)
        return products.sum(range(leading, products.ndim))

    def _flat(self, statistics: Natural) -> Float[Array, "units statistics"]:
        return statistics.reshape(-1, math.prod(self.stat_shape))

    def _table(self, method: str) -> tuple[Array, Array, Array]:
        """Return states of one unit, their statistics and log base measures."""
        states = self.states()
        name = type(self).__name__
        if states is None:
            raise NotImplementedError(
                f"{name} must define {method}, or states() if they are finite"
            )
        return (
            states,
            self._flat(self.statistics(states)),
            self.log_base_measure(states),
        )

    def mean(self, eta: Float[ArrayLike, "*natural"]) -> Natural:
        """Return E[t(x)] = dA/deta, by autodiff."""
        return jax.grad(lambda e: self.log_normalizer(e).sum())(eta)

    def distribution(self, eta: Natural) -> dist.Distribution:
        """Return the NumPyro distribution of the block, whose event is the whole block."""
        return self.unit_distribution(eta).to_event(len(self.shape))

    def log_normalizer_difference(self, eta: Natural, other: Natural) -> PerUnit:
        """Return A(other) - A(eta) of each unit.

        Both are values of one function, so that rounding errors at a parameter cancel
        between the steps of a path. They do not in a closed form of the difference:
        with one logarithm of a ratio, 10,000 steps of 784 Bernoulli units added 0.05
        nats.
        """
        return self.log_normalizer(other) - self.log_normalizer(eta)

    def unit_log_ratio(
        self, eta: Natural, other: Natural, statistics: Natural
    ) -> PerUnit:
        """Return log p(x | other) - log p(x | eta) of each unit."""
        inner = self._sum_statistics((other - eta) * statistics)
        return inner - self.log_normalizer_difference(eta, other)

    def unit_log_prob(self, eta: Natural, x: Values) -> PerUnit:
        """Return log p(x | eta) of each unit."""
        inner = self._sum_statistics(eta * self.statistics(x))
        return inner - self.log_normalizer(eta) + self.log_base_measure(x)

    def sample(self, words: Words, eta: Natural) -> Draws:
        """Draw as a function of random words, :attr:`num_words` per unit."""
        keys = random.as_key(words.reshape(-1, 2))
        flat = eta.reshape(-1, *self.stat_shape)

        def draw(key, eta):
            return jnp.asarray(self.unit_distribution(eta).sample(key))

        # NumPyro's samplers promote, whatever jax is set to refuse
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            drawn = jax.vmap(draw)(keys, flat)
        return drawn.reshape(words.shape[:-1]).astype(self.dtype)

    def couple(self, words: Words, eta: Natural, other: Natural) -> tuple[Draws, Draws]:
        """Return two draws from the same words, maximally coupled if known.

        There are :attr:`num_couple_words` words per unit. Equal natural parameters give
        equal draws.
        """
        return self.sample(words, eta), self.sample(words, other)

    def reflect(
        self, words: Words, u: PerRow, eta: Natural, other: Natural
    ) -> Reflection:
        """Return two draws of the block that are equal with the largest probability, if known.

        The default is :meth:`couple`.

        :param words: ``(rows, *shape, words)``.
        :param u: uniforms.
        """
        return *self.couple(words, eta, other), jnp.zeros(len(u), bool)

    def initial(self, words: Words) -> Draws:
        """Return initial values, draws at :meth:`default_eta`."""
        batch = words.shape[: words.ndim - 1 - len(self.shape)]
        # Without the barrier XLA folds constants with all rows, for seconds where units
        # have many categories.
        eta = lax.optimization_barrier(self.default_eta())
        return self.sample(words, jnp.broadcast_to(eta, batch + self.statistic_shape))

    def in_support(self, x: Values) -> UnitMask | Bool[np.ndarray, "*units"]:
        """Return True for values that a unit can take; numpy arrays are checked on the host."""
        if isinstance(x, np.ndarray):  # does not wait for the device
            x = x.astype(jnp.result_type(float))
            with np.errstate(invalid="ignore"):
                return np.asarray(self.support(x)) & np.isfinite(x)
        x = as_float(x)
        return jnp.asarray(self.support(x)) & jnp.isfinite(x)

    def states(self) -> UnitValues | None:
        """Return all values of one unit, None if there are infinitely many."""
        return None

    @property
    def statistic_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Least and largest value of each statistic, of shape ``stat_shape``.

        Taken from :meth:`states`, else :attr:`bounds` for each; override it if these
        differ.
        """
        with sharding.eager():  # concrete, also under a trace
            states = self.states()
            if states is None:
                low, high = self.bounds
                return np.full(self.stat_shape, low), np.full(self.stat_shape, high)
            statistics = np.asarray(self.statistics(states))
        return statistics.min(0), statistics.max(0)

    @property
    def is_two_valued(self) -> bool:
        """True if units have two values that are their own statistics, equally probable at 0."""
        table = _plain_table(self)
        return table is not None and len(table[0]) == 2 and np.array_equal(*table)

    @property
    def is_exact_in_bfloat16(self) -> bool:
        """True if the statistics of all states are numbers of 8 significant bits."""
        with sharding.eager():  # concrete, also under a trace
            states = self.states()
            if states is None:
                return False
            statistics = np.asarray(self.statistics(states))
        return np.array_equal(statistics, statistics.astype(jnp.bfloat16))

    @property
    def is_one_hot(self) -> bool:
        """True if units are in {0, ..., K - 1} with one-hot statistics, equally probable at 0."""
        table = _plain_table(self)
        if table is None:
            return False
        states, statistics = table
        is_counted = np.array_equal(states, np.arange(len(states)))
        return is_counted and np.array_equal(statistics, np.eye(len(states)))

    @property
    def is_quadratic(self) -> bool:
        """True if units are real and their log density is quadratic in x, as a Gaussian's is."""
        return _is_quadratic(self)

    def interaction(self, statistics: Natural) -> Float[Array, "*interacting"]:
        """Return the statistics that :func:`~ebmpp.Bilinear` couples, all by default."""
        return statistics

    @property
    def interaction_shape(self) -> tuple[int, ...]:
        """Shape of :meth:`interaction`."""
        return self.statistic_shape


@lru_cache(maxsize=256)
def _plain_table(family: Family) -> tuple[np.ndarray, np.ndarray] | None:
    """Return values of a unit and their statistics, if few and of equal base measure."""
    with sharding.eager():  # concrete, also under a trace
        states = family.states()
        if states is None:
            return None
        log_base = np.asarray(family.log_base_measure(states))
        if not (log_base == log_base[0]).all():
            return None
        return np.asarray(states), np.asarray(family.statistics(states))


@lru_cache(maxsize=256)
def _is_quadratic(family: Family) -> bool:
    if family.support is not constraints.real:
        return False

    def log_density(x):
        return family.statistics(x), family.log_base_measure(x)

    # op by op it takes a hundred programs
    curvature_at = jax.jit(jax.vmap(jax.jacfwd(jax.jacfwd(log_density))))
    with sharding.eager():  # concrete, also under a trace
        curvature = curvature_at(np.array([-2.3, -0.7, 0.4, 1.9]))
        return all(
            np.allclose(c, c[0], 1e-4, 1e-4)
            for c in map(np.asarray, jax.tree.leaves(curvature))
        )


#: Families by block.
Families = Mapping[str, Family]


def log_ratio(
    families: Families,
    eta: Stack,
    other: Stack,
    statistics: Stack,
    same: RowMask | None = None,
) -> PerRow:
    """Return log p(x | other) - log p(x | eta) of independent units, per row; base measures cancel.

    Ratios are formed per unit, near 0 where the distributions agree, and then summed
    once: separate sums of <slope, t> and of A are large, and would cancel. Noise in
    float32 at slopes of 1 (and of 0.01): 1e-5 (3e-6) for 784 Bernoulli units, 3e-5
    (9e-6) for Categorical(784, 4), 3e-5 (4e-5) for Binomial(5, 100), 2e-4 (1e-5) for
    100 Poisson units of rate 3, and for 100 Gaussian units 1e-5 (1e-7) with means up to
    ten standard deviations from 0, 1e-3 (2e-5) with a thousand.

    :param same: rows whose two distributions are equal up to rounding; their ratio is
        0. With it, the ratio is nan where a natural parameter is outside its domain.
        (One sum over units covers both checks: a reduction for each took a sixth of all
        kernels of a sweep.)
    """
    ratios = []
    for b, family in families.items():
        ratio = family.unit_log_ratio(eta[b], other[b], statistics[b])
        if same is not None:
            inside = family.in_domain(eta[b]) & family.in_domain(other[b])
            if inside.ndim > ratio.ndim:  # one truth per statistic
                inside = inside.all(range(ratio.ndim, inside.ndim))
            inner = jnp.where(expand(same, target=ratio), 0.0, ratio)
            ratio = jnp.where(inside, inner, jnp.nan)
        ratios.append(ratio.reshape(len(ratio), -1))
    return jnp.concatenate(ratios, -1).sum(-1)


def num_words(families: Families, *, coupled: bool = False) -> int:
    """Return the number of random words of a row's draw of the blocks."""
    return sum(
        f.size * (f.num_couple_words if coupled else f.num_words)
        for f in families.values()
    )


def split_words(families: Families, words: Array, *, coupled: bool = False) -> Blocks:
    """Return the words of each block, of shape ``(rows, *shape, words per unit)``."""
    parts = {}
    start = 0
    for b, family in families.items():
        count = family.num_couple_words if coupled else family.num_words
        stop = start + family.size * count
        parts[b] = words[:, start:stop].reshape(-1, *family.shape, count)
        start = stop
    return parts


def draw_rows(families: Families, eta: Rows, words: Array) -> Blocks:
    """Draw blocks from their families at ``eta``."""
    parts = split_words(families, words)
    return {b: family.sample(parts[b], eta[b]) for b, family in families.items()}
