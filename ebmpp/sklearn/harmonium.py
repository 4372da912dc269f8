# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""One visible and one latent block: the model and the programs behind :mod:`ebmpp.sklearn`."""

from collections.abc import Callable
from functools import lru_cache, partial
import math
from numbers import Real
from typing import Any

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp
import optax

from ebmpp.core import Params, checks, random
from ebmpp.errors import ArgumentError
from ebmpp.estimators import Estimator
from ebmpp.families import Bernoulli, Exponential, Family, Gaussian, Poisson, Spin
from ebmpp.families.values import describe
from ebmpp.graph import FactorGraph, energy, initialization, layered, tables
from ebmpp.moves import Layer, Target
from ebmpp.training.batches import Selection

Units = str | Family | Callable[[int], Family]
Optimizer = optax.GradientTransformation

NAMES = {kind.__name__.lower(): kind for kind in (Bernoulli, Spin, Gaussian, Poisson, Exponential)}


def family_of(role: str, units: Units, size: int) -> Family:
    """The family that ``units`` says, of ``size`` units.

    :param role: what an error calls it.
    :raises ArgumentError: for an unknown name, or a family of another size.
    """
    if isinstance(units, str):
        if units not in NAMES:
            raise ArgumentError(f"{role}={units!r} is unknown; the names are {', '.join(NAMES)}")
        return NAMES[units](size)
    made = units(size) if callable(units) else units
    if not isinstance(made, Family):
        raise ArgumentError(
            f"{role} is a name, a family such as ebmpp.Poisson(10), or a function of the number of units "
            f"that returns one, not {units!r}"
        )
    if made.size != size:
        raise ArgumentError(f"{role}={made!r} has {made.size} units, and {size} are needed")
    return made


@lru_cache(maxsize=32)  # a declaration probes its factors, which takes tenths of a second
def harmonium(visible: Family, latent: Family) -> FactorGraph:
    """Blocks "v" and "h", biases and a bilinear factor."""
    return layered(v=visible, h=latent)


@lru_cache(maxsize=32)  # optax makes a new function each time, and with it a new program
def make_optimizer(make: Callable[[float], Optimizer], rate: float) -> Optimizer:
    """``make(rate)``, the same object for the same arguments."""
    return make(rate)


@partial(jax.jit, static_argnums=0)  # one program: step by step they are some eighty, each compiled
def start(graph: FactorGraph, rng_key: Array, rows: Array, weights: Array | None = None) -> Params:
    """Params as :meth:`FactorGraph.init` makes them.

    :param rows: of the visibles, which may hold mean statistics.
    :param weights: of the rows in the base rates: one of weight 2 is two rows.
    """
    mean, count = initialization.mean_statistics(graph.families["v"], rows, None, weights)
    means = {"v": (mean, count if weights is None else weights.sum())}
    return initialization.init_params(graph.factors, graph.families, rng_key, "gaussian", means)


class Epoch:
    """A pass over the rows in a random order, for the training loop.

    Batches have one size, and what fills up the last has weight 0. The rows may hold mean statistics.

    :param weights: one a row, of any sum; None for equal ones.
    :param seed: of the order.
    :param first: the number of the first batch.
    """

    def __init__(
        self, rows: np.ndarray, weights: np.ndarray | None, size: int, seed: list[int], first: int
    ) -> None:
        self.batch_size, self.first, self.num_batches = size, first, math.ceil(len(rows) / size)
        shape = (self.num_batches, size)
        real = (np.arange(math.prod(shape)) < len(rows)).reshape(shape)
        index = np.resize(np.random.default_rng(seed).permutation(len(rows)), shape)
        shares = real * size / real.sum(1, keepdims=True)
        if weights is not None:
            shares = shares * (weights / weights.mean())[index]
        self._rows = {"v": jnp.asarray(rows)}
        self._index, self._shares = index.astype(np.int32), shares.astype(jnp.result_type(float))

    def sample(self) -> Selection:
        """All of them."""
        return Selection(self._rows)

    def batch(self, number: int) -> Selection:
        """An index, and weights."""
        at = number - self.first
        return Selection(self._rows, self._index[at], self._shares[at])

    def identity(self) -> dict[str, Any]:
        """Nothing: no checkpoint is made."""
        return {}


@partial(jax.jit, static_argnums=0)
def latent_means(graph: FactorGraph, params: Params, v: Array) -> Array:
    """Mean statistics of the latents given rows of the visibles, shape ``(rows, statistics)``."""
    eta = energy.natural_rows(graph, params, {"v": v}, ("h",))["h"]
    return graph.families["h"].mean(eta).reshape(len(v), -1)


@partial(jax.jit, static_argnums=0)
def log_density(graph: FactorGraph, params: Params, v: Array) -> Array:
    """log p(v) + log Z, row by row."""
    return energy.summed_out(graph, params, {"v": v}, ("h",))


@partial(jax.jit, static_argnums=0)
def gibbs(graph: FactorGraph, params: Params, v: Array, key: Array, count: Array) -> Array:
    """``count`` sweeps from rows of the visibles: latents first, then visibles."""
    keys = random.fold_in(key, jnp.arange(len(v)))

    def one(i: Array, v: Array) -> Array:
        x = {"v": v}
        for index, block in enumerate(("h", "v")):
            x |= Layer((block,)).draw(Target(graph, params), x, random.fold_in(keys, i, index))[0]
        return x["v"]

    return lax.fori_loop(0, count, one, v)


# -- what the user gave ------------------------------------------------------------------------


def check_params(owner: Any) -> None:
    """:raises ArgumentError: for options of the transformer that are no such thing."""
    for name, least in (("n_components", 1), ("batch_size", 1), ("n_iter", 0)):
        checks.count(f"{type(owner).__name__}: {name}", getattr(owner, name), least)
    rate = owner.learning_rate
    auto = isinstance(rate, str) and rate == "auto"
    if not (auto or (isinstance(rate, Real) and 0 < rate < math.inf)):
        raise ArgumentError(f'{type(owner).__name__}: learning_rate is positive or "auto", not {rate!r}')
    made = owner.estimator
    if made is not None and (isinstance(made, type) or not isinstance(made, Estimator)):
        raise ArgumentError(
            f"{type(owner).__name__}: estimator is one of ebmpp's, such as ebmpp.UCD(), or None, not {made!r}"
        )
    if not (owner.optimizer is None or callable(owner.optimizer) or hasattr(owner.optimizer, "update")):
        raise ArgumentError(
            f"{type(owner).__name__}: optimizer is None, a function of the learning rate such as "
            f"optax.adam, or an optax transformation, not {owner.optimizer!r}"
        )


def check_values(owner: object, family: Family, values: np.ndarray) -> None:
    """Means stand for values where these are bounded and their own statistic.

    :raises ArgumentError: for values that the units do not take.
    """
    low, high = family.bounds
    means = not family.stat_shape and math.isfinite(high - low) and _is_own_statistic(family)
    good = (values >= low) & (values <= high) if means else np.asarray(family.in_support(values))
    if not good.all():
        row, column = (int(i) for i in np.argwhere(~good)[0])
        wanted = f"values from {low:g} to {high:g}" if means else describe(family)
        raise ArgumentError(
            f"{type(owner).__name__}: X has {values[row, column]:g} at row {row}, column {column} "
            f"({(~good).sum()} such values), and units {family!r} take {wanted}. Scale X "
            "before, such as by MinMaxScaler(clip=True), or choose another family by visible=..., such "
            'as "gaussian" for reals'
        )


def _is_own_statistic(family: Family) -> bool:
    values = family.states()
    values = np.linspace(*family.bounds, 5) if values is None else np.asarray(values)
    return np.array_equal(family.statistics(values), values)


def weighted(values: np.ndarray, sample_weight: Any) -> tuple[np.ndarray, np.ndarray | None]:
    """The rows that count, and their weights; None where nobody gave weights.

    :raises StateError: for weights of a wrong shape, negative, not finite or all zero.
    """
    if sample_weight is None:
        return values, None
    tables.check_weights(sample_weight, len(values))
    weights = np.asarray(sample_weight, float)
    return values[weights > 0], weights[weights > 0]


def check_one_statistic(name: str, found: bool, family: Family) -> None:
    """:raises AttributeError: where units have several statistics each."""
    if not found:
        raise AttributeError(f"no {name}: units {family!r} have several statistics each; see params_")
