# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""One visible and one latent block: the model and the programs behind :mod:`ebmpp.sklearn`."""

from collections.abc import Callable
from functools import lru_cache, partial
import math
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp
import optax

from ebmpp import families
from ebmpp.core import checks, random
from ebmpp.core.types import Params
from ebmpp.errors import ArgumentError
from ebmpp.estimators import Batch, Estimator
from ebmpp.families import Family
from ebmpp.graph import FactorGraph, energy, initialization, layered, tables
from ebmpp.graph.arrays import describe
from ebmpp.moves import Layer, Target

Units = str | Family | Callable[[int], Family]

NAMES: dict[str, type[Family]] = {
    "bernoulli": families.Bernoulli,
    "spin": families.Spin,
    "gaussian": families.Gaussian,
    "poisson": families.Poisson,
    "exponential": families.Exponential,
}


class Carried(NamedTuple):
    """What training carries from step to step beside the params."""

    optimizer: Any
    estimator: Any


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
def make_optimizer(
    make: Callable[[float], optax.GradientTransformation], rate: float
) -> optax.GradientTransformation:
    """``make(rate)``, the same object for the same arguments."""
    return make(rate)


@partial(jax.jit, static_argnums=(0, 1, 2))
def start(
    graph: FactorGraph,
    estimator: Estimator,
    batch_size: int,
    rng_key: Array,
    pair: Array,
    rows: Array,
    weights: Array | None = None,
) -> tuple[Params, Any]:
    """Params as :meth:`FactorGraph.init` makes them, and the estimator's first state.

    One program: step by step they are some eighty, of which each is compiled.

    :param rows: of the visibles, which may hold mean statistics.
    :param weights: of the rows in the base rates: one of weight 2 is two rows.
    """
    statistics, count = graph.families["v"].statistics(rows), len(rows) if weights is None else weights.sum()
    means = {"v": (jnp.average(statistics, axis=0, weights=weights), count)}
    scheme, keys = initialization.resolve("gaussian"), jax.random.split(rng_key, len(graph.factors))
    params = {
        factor.name: initialization.init_factor(factor, key, graph.families, scheme, means)
        for factor, key in zip(graph.factors, keys, strict=True)
    }
    return params, estimator.init(graph, params, {"v": rows}, batch_size, pair)


def batches(rows: np.ndarray, weights: np.ndarray | None, size: int, seed: list[int]) -> Batch:
    """An epoch of batches, in a random order; they have one size, and what fills up the last has weight 0.

    :param weights: one a row, of any sum; None for equal ones.
    """
    count = math.ceil(len(rows) / size)
    order = np.resize(np.random.default_rng(seed).permutation(len(rows)), (count, size))
    real = (np.arange(count * size) < len(rows)).reshape(count, size)
    shares = real / real.sum(1, keepdims=True)
    if weights is not None:
        shares = shares * (weights / weights.mean())[order]
    return Batch({"v": rows[order]}, shares.astype(jnp.result_type(float)))


@partial(jax.jit, static_argnums=(0, 1, 2))
def train(
    graph: FactorGraph,
    estimator: Estimator,
    optimizer: optax.GradientTransformation,
    params: Params,
    carried: Carried,
    batches: Batch,
    pair: Array,
    first: Array,
) -> tuple[Params, Carried, dict[str, Array]]:
    """Gradient steps, one batch after another in one program: small steps cost no more than their sums.

    :param batches: with a leading axis of batches.
    :param first: the number of the first step.
    :return: params, what is carried, and the metrics of each step.
    """

    def one(state: tuple[Params, Carried, Array], batch: Batch) -> tuple[tuple, dict[str, Array]]:
        params, carried, step = state
        made = estimator.estimate(graph, params, carried.estimator, batch, random.fold_in(pair, step))
        updates, moved = optimizer.update(made.gradient, carried.optimizer, params)
        metrics = {"gradient_norm": optax.tree.norm(made.gradient), **made.metrics}
        return (optax.apply_updates(params, updates), Carried(moved, made.state), step + 1), metrics

    steps = getattr(estimator, "steps_per_batch", 1)
    several = lambda state, batch: lax.scan(lambda s, _: one(s, batch), state, length=steps)
    (params, carried, _), metrics = lax.scan(several, (params, carried, first), batches)
    return params, carried, {name: v.ravel() for name, v in metrics.items()}


@partial(jax.jit, static_argnums=0)
def latent_means(graph: FactorGraph, params: Params, v: Array) -> Array:
    """Mean statistics of the latents given rows of the visibles, shape ``(rows, statistics)``."""
    eta = energy.natural_rows(graph, params, {"v": v}, ("h",))["h"]
    return graph.families["h"].mean(eta).reshape(len(v), -1)


@partial(jax.jit, static_argnums=0)
def log_density(graph: FactorGraph, params: Params, v: Array) -> Array:
    """log p(v) + log Z, row by row."""
    return jax.vmap(lambda row: energy.log_unnormalized(graph, params, {"v": row}, ("h",)))(v)


@partial(jax.jit, static_argnums=0)
def gibbs(graph: FactorGraph, params: Params, v: Array, pair: Array, count: Array) -> Array:
    """``count`` sweeps from rows of the visibles: latents first, then visibles."""
    rows = random.fold_in(pair, jnp.arange(len(v)))

    def one(i: Array, v: Array) -> Array:
        x = {"v": v}
        for index, block in enumerate(("h", "v")):
            key = random.fold_in(rows, i, index)
            x |= Layer((block,)).draw(Target(graph, params), x, key)[0]
        return x["v"]

    return lax.fori_loop(0, count, one, v)


# -- what the user gave ------------------------------------------------------------------------


def check_params(owner: Any) -> None:
    """:raises ArgumentError: for options of the transformer that are no such thing."""
    for name, least in (("n_components", 1), ("batch_size", 1), ("n_iter", 0)):
        check_count(owner, name, getattr(owner, name), least)
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


def check_count(owner: object, name: str, value: object, least: int = 1) -> None:
    """:raises ArgumentError: for another number."""
    checks.count(f"{type(owner).__name__}: {name}", value, least)


def check_values(owner: object, family: Family, values: np.ndarray) -> None:
    """Means stand for values where these are bounded and their own statistic.

    :raises ArgumentError: for values that the units do not take.
    """
    low, high = family.bounds
    means = not family.stat_shape and math.isfinite(high - low)
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
