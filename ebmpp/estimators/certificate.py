# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""How biased an estimator's gradient is for one model, measured against an unbiased one."""

from collections.abc import Iterator, Mapping
import dataclasses
import math
from typing import Any
import warnings

from jaxtyping import Float
import numpy as np
from tqdm.auto import tqdm

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import checks, random, statistics
from ebmpp.core.display import Card, Grid, Measured, Shown
from ebmpp.core.programs import compiled
from ebmpp.core.types import Key, Params, Rows
from ebmpp.errors import ArgumentError, DomainError, StateError, UnmetError
from ebmpp.estimators.base import Batch, Estimate, Estimator, Repeats, check_estimator
from ebmpp.estimators.particles import ParticleUCD
from ebmpp.graph import FactorGraph, tables

_LEAST = 3  # with one left out there must be two to multiply


@dataclasses.dataclass(frozen=True)
class Squares:
    """Squared norms over the params of a factor, or of all: unbiased, so they may come out below 0."""

    squared_bias: float
    """|E[the estimator's gradient] - the gradient|^2."""
    standard_error: float
    """Of that."""
    squared_gradient: float
    """|the gradient|^2."""
    gradient_error: float
    """Standard error of that."""

    @property
    def bias_norm(self) -> float:
        """Its root; nan where the estimate is below 0, so that the bias is too small to be seen."""
        return math.sqrt(self.squared_bias) if self.squared_bias >= 0 else math.nan

    @property
    def gradient_norm(self) -> float:
        """Likewise of the gradient."""
        return math.sqrt(self.squared_gradient) if self.squared_gradient >= 0 else math.nan


@dataclasses.dataclass(frozen=True, repr=False)
class GradientBias(Shown):
    """What :func:`gradient_bias` found."""

    estimator: Estimator
    factors: Mapping[str, Squares]
    """By the factor's name."""
    total: Squares
    """Over all params."""
    bias: Params
    """Coordinate by coordinate, like the params: mean gradient of the estimator minus the reference's."""
    bias_error: Params
    """Its standard errors."""
    num_repeats: int
    chains: int | None
    """In each repeat, where these are groups of persistent chains; None where all begin in one state."""
    num_references: int

    @property
    def given(self) -> str:
        """What is held, and so counts as bias, in words."""
        if self.chains is None:
            return f"{self.num_repeats} repeats from one state"
        return f"{self.num_repeats} groups of {self.chains} of its last chains"

    def __repr__(self) -> str:
        made, name = self.total, type(self.estimator).__name__
        return (
            f"The gradient of {name} has a squared bias of {made.squared_bias:.3g} +- "
            f"{made.standard_error:.2g}, beside a squared norm of the gradient of "
            f"{made.squared_gradient:.3g} +- {made.gradient_error:.2g} ({self.given})"
        )

    def _card(self) -> Card:
        rows = [
            (name, Measured(s.squared_bias, s.standard_error), Measured(s.squared_gradient, s.gradient_error))
            for name, s in (*self.factors.items(), ("all params", self.total))
        ]
        title = f"Bias of the gradient of {type(self.estimator).__name__} ({self.given})"
        return Card(title, [Grid(("factor", "squared bias", "squared norm of the gradient"), rows)])


def gradient_bias(
    graph: FactorGraph,
    params: Params,
    data: Any,
    estimator: Estimator,
    state: Any = None,
    *,
    rng_key: Array,
    num_repeats: int = 20,
    reference: Estimator = ParticleUCD(),
    num_references: int = 20,
    progress_bar: bool = False,
) -> GradientBias:
    """How far the mean of an estimator's gradient is from the gradient, at given params and rows.

    The estimator's step is done again with keys of its own each time, never applied, and so is that of an
    unbiased reference; all see the same rows. The bias is the difference of the two means. Its squared norm
    comes from products of different repeats, so that noise does not add to it: it is unbiased, and below 0
    about half of the time where there is no bias. Its noise comes from that of both means: the more repeats
    and references, the smaller a bias is seen; of :class:`PCD` there are as many draws as chains.

    **What is held.** The params, the rows, and what the estimator carries:

    * nothing for :class:`CD`: all of its bias shows.
    * the last chains for :class:`PCD`, :class:`FPCD` and :class:`TemperedPCD`. They are split into
      ``num_repeats`` groups, of which each makes a step of its own (chains that are left over are in none).
      So the law that a chain has after this run is judged, and not the noise of so many chains. The groups
      count as independent given the way of the params, the fast weights and the temperatures; these owe
      something to every chain, a share of one in ``num_chains``, which is left out of account. What all
      chains have in common, a mode that none of them has found, counts as bias.
    * the whole state for all others, persistent chains of :class:`UCD` (which is unbiased given them) and the
      weighted ones of :class:`WeightedPCD` included: these share ancestors, cannot be split, and their noise
      counts as bias.

    :class:`~ebmpp.estimators.Centered` and :class:`~ebmpp.estimators.Discriminative` are judged by the
    estimator inside them. Both phases count: where the latents given the visibles are not one layer, the
    bias of a ``posterior`` that stands in for the exact one is a part of it, and the reference's positive
    phase is that of coupled pairs.

    The answer is as good as the reference: what none of its systems finds, it cannot tell. It warns where a
    system held for long.

    :param graph: the model.
    :param params: a dict keyed by factor name: the last ones, where the state has chains.
    :param data: rows of the visible blocks, the batch of each repeat; some of the training data will do.
    :param estimator: whose gradient; ``fit.estimator``.
    :param state: what it carries, ``fit.estimator_state``. By default what it begins with, which will do for
        estimators without persistent chains.
    :param rng_key: a jax key. A repeat's draws depend on it and on the repeat's number alone.
    :param num_repeats: of the estimator's step, at least 3; fewer where there are fewer chains.
    :param reference: an unbiased estimator, of the cost of a step each. Its first step finds the rungs, or
        how far pairs run, and does not count.
    :param num_references: of its steps, at least 3.
    :param progress_bar: show one.
    :return: a :class:`GradientBias`.
    :raises ArgumentError: for numbers out of range, an estimator whose gradient is not the likelihood's
        (:class:`~ebmpp.estimators.Herding`), or one with persistent chains and no state; under ``jit``.
    :raises StateError: for data of a wrong name, shape or value, entries that are missing, or a state that
        the estimator does not carry with a batch of so many rows.
    :raises ParameterError: for params that do not fit.
    :raises UnmetError: for a gradient that lacks unmet pairs.
    :raises DomainError: for a gradient that is not finite.
    :warns UserWarning: where the reference says that it did not do what it is for.

    **References**

    1. Chen, Qin (2010), *A two-sample test for high-dimensional data with applications to gene-set testing*,
       section 2.

    **Example**

    >>> import jax, ebmpp
    >>> rbm, data = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4)), ebmpp.data.bars_and_stripes(3)
    >>> fit = ebmpp.fit(rbm, data, rng_key=jax.random.key(0), num_steps=5, progress_bar=False,
    ...                 estimator=ebmpp.PCD(num_chains=100))
    >>> made = ebmpp.estimators.gradient_bias(
    ...     rbm, fit.params, data, fit.estimator, fit.estimator_state, rng_key=jax.random.key(1),
    ...     reference=ebmpp.ParticleUCD(num_particles=50), num_references=5)
    >>> sorted(made.factors), made.given
    (['h', 'v', 'v:h'], '20 groups of 5 of its last chains')
    """
    name = "gradient_bias"
    checks.instance(f"{name}: graph", graph, FactorGraph, "a FactorGraph")
    check_estimator(f"{name}: estimator", estimator, "an estimator such as CD(k=1)")
    check_estimator(f"{name}: reference", reference, "an unbiased estimator such as ParticleUCD()")
    count = checks.count(f"{name}: num_repeats", num_repeats, _LEAST)
    num_references = checks.count(f"{name}: num_references", num_references, _LEAST)
    checks.flag(f"{name}: progress_bar", progress_bar)
    key = random.key_pair(checks.key(f"{name}: rng_key", rng_key))
    checks.on_host(name, key, params)
    graph.check(params)
    rows, _ = tables.check_rows(graph, data, name)
    batch = Batch.of(rows)
    again = _repeats(graph, params, rows, estimator, state, count, random.fold_in(key, 0, 0))
    with tqdm(total=len(again.states) + num_references + 1, disable=not progress_bar, unit="step") as bar:
        own = _steps(graph, params, batch, again, random.fold_in(key, 1))
        made = [_kept(estimator, one, bar) for one in own]
        unbiased = _references(graph, params, batch, reference, num_references, key, bar)
    return _compared(tuple(graph.param_shapes), estimator, again, made, unbiased)


# -- steps ---------------------------------------------------------------------------------------


@compiled(statics=2, quick=lambda graph, estimator, *_, **__: estimator.quick(graph))
def _step(
    graph: FactorGraph, estimator: Estimator, params: Params, state: Any, batch: Batch, key: Key
) -> Estimate:
    return estimator.estimate(graph, params, state, batch, key)


def carries(graph: FactorGraph, params: Params, rows: Rows, estimator: Estimator, state: Any) -> bool:
    """Whether a state is one of an estimator, with such rows for a batch."""
    size, key = len(next(iter(rows.values()))), jnp.zeros(2, jnp.uint32)
    fresh = jax.eval_shape(lambda p: estimator.init(graph, p, rows, size, key), params)
    shapes = lambda tree: (jax.tree.structure(tree), [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)])
    return shapes(fresh) == shapes(state)


def _repeats(
    graph: FactorGraph, params: Params, rows: Rows, estimator: Estimator, state: Any, count: int, key: Key
) -> Repeats:
    """What is repeated, from a state that fits.

    :raises ArgumentError: where chains are needed, or there are fewer than three.
    :raises StateError: for a state of another make.
    """
    size = len(next(iter(rows.values())))
    if state is None:
        again = estimator.repeats(estimator.init(graph, params, rows, size, key), count)
        if again.chains is not None:
            raise ArgumentError(
                f"gradient_bias: what is judged of {estimator!r} is its last chains; give "
                "state=fit.estimator_state"
            )
        return again
    if not carries(graph, params, rows, estimator, state):
        raise StateError(
            f"gradient_bias: the state is not one that {estimator!r} carries with batches of {size} rows: "
            "give fit.estimator_state of the same estimator, and where it has a chain a row, as many rows as "
            "a batch of the run had"
        )
    again = estimator.repeats(state, count)
    if len(again.states) < _LEAST:
        raise ArgumentError(
            f"gradient_bias: {estimator!r} has {len(again.states)} chains; {_LEAST} are the fewest that tell"
        )
    return again


def _steps(graph: FactorGraph, params: Params, batch: Batch, again: Repeats, key: Key) -> Iterator[Estimate]:
    for i, state in enumerate(again.states):
        yield _step(graph, again.estimator, params, state, batch, random.fold_in(key, i))


def _references(
    graph: FactorGraph,
    params: Params,
    batch: Batch,
    reference: Estimator,
    count: int,
    key: Key,
    bar: tqdm,
) -> list[Params]:
    """Gradients of the reference, all from the state that its first step left."""
    state = reference.init(graph, params, batch.rows, len(batch.weights), random.fold_in(key, 0, 1))
    pilot = _step(graph, reference, params, state, batch, random.fold_in(key, 0, 2))
    _kept(reference, pilot, bar)
    made, told = [], []
    again = Repeats(reference, (pilot.state,) * count)
    for one in _steps(graph, params, batch, again, random.fold_in(key, 2)):
        made.append(_kept(reference, one, bar))
        told.append(jax.device_get(one.metrics))
    caution = reference.caution({name: np.stack([t[name] for t in told]) for name in told[0]})
    if caution is not None:
        warnings.warn(f"gradient_bias: of the reference: {caution}", stacklevel=3)
    return made


def _kept(estimator: Estimator, made: Estimate, bar: tqdm) -> Params:
    """The gradient on the host.

    :raises UnmetError: where a pair is unmet, and the gradient not finite for it.
    :raises DomainError: where it is not finite for another reason.
    """
    gradient = jax.device_get(made.gradient)
    bar.update()
    if all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient)):
        return gradient
    if float(sum(jnp.sum(v) for n, v in made.metrics.items() if n.endswith("num_unmet"))):
        raise UnmetError(
            f"gradient_bias: a pair of {estimator!r} was unmet after {estimator.limit_name}="
            f"{estimator.max_sweeps}: raise that, or give None for no limit"
        )
    raise DomainError(
        f"gradient_bias: the gradient of {estimator!r} is not finite: look at the params, under which the "
        "model may not normalise or natural parameters overflow"
    )


# -- what they tell ------------------------------------------------------------------------------


def _compared(
    factors: tuple[str, ...],
    estimator: Estimator,
    again: Repeats,
    made: list[Params],
    unbiased: list[Params],
) -> GradientBias:
    stack = lambda *each: np.stack(each).astype(float)
    own, others = jax.tree.map(stack, *made), jax.tree.map(stack, *unbiased)
    count, size = len(made), len(made) + len(unbiased)
    grams = {name: _gram(own[name], others[name], size) for name in factors}
    error = lambda a: statistics.standard_error(np.moveaxis(a, 0, -1))
    return GradientBias(
        estimator=estimator,
        factors={name: _squares(gram, count) for name, gram in grams.items()},
        total=_squares(sum(grams.values(), np.zeros((size, size))), count),
        bias=jax.tree.map(lambda a, b: a.mean(0) - b.mean(0), own, others),
        bias_error=jax.tree.map(lambda a, b: np.hypot(error(a), error(b)), own, others),
        num_repeats=count,
        chains=again.chains,
        num_references=len(unbiased),
    )


def _gram(own: Any, others: Any, size: int) -> Float[np.ndarray, "draws draws"]:
    """The products of all gradients with one another, over the params of a factor."""
    total = np.zeros((size, size))
    for a, b in zip(jax.tree.leaves(own), jax.tree.leaves(others), strict=True):
        each = np.concatenate([a, b]).reshape(size, -1)
        total += each @ each.T
    return total


def _squares(gram: Float[np.ndarray, "draws draws"], count: int) -> Squares:
    bias = statistics.squared_distance(gram, count)
    gradient = statistics.squared_norm(gram[count:, count:])
    return Squares(bias.value, bias.standard_error, gradient.value, gradient.standard_error)
