# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Bias of an estimator's gradient for one model, measured against an unbiased estimator."""

from collections.abc import Mapping, Sequence
import dataclasses
import warnings

from jaxtyping import PyTree
import numpy as np
from tqdm.auto import tqdm

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.annealing.reference import check_model
from ebmpp.core import (
    Key,
    Params,
    Rows,
    StateLike,
    checks,
    compiled,
    num_rows,
    random,
    statistics,
)
from ebmpp.core.display import Card, Grid, Measured, Shown
from ebmpp.errors import DomainError, UnmetError
from ebmpp.estimators.base import (
    Batch,
    Estimate,
    Estimator,
    Repeats,
    shapes,
    total_unmet,
)
from ebmpp.estimators.particles import ParticleUCD
from ebmpp.graph import FactorGraph, tables

# two repeats remain to multiply when one is left out
_MIN_REPEATS = 3


@dataclasses.dataclass(frozen=True)
class Squares:
    """Squared norms over the params of a factor or of all: unbiased, so they may be below 0.

    :param squared_bias: estimate of ``|E[estimator's gradient] - gradient|^2``.
    :param squared_gradient: estimate of ``|gradient|^2``.
    :param gradient_error: standard error of ``squared_gradient``.
    """

    squared_bias: float
    standard_error: float
    squared_gradient: float
    gradient_error: float


@dataclasses.dataclass(frozen=True, repr=False)
class GradientBias(Shown):
    """Result of :func:`~ebmpp.estimators.gradient_bias`.

    :param factors: by factor name.
    :param total: over all params.
    :param bias: mean gradient of the estimator minus the reference's, like the params.
    :param bias_error: standard errors of ``bias``.
    :param chains: number of chains per repeat, for groups of persistent chains; None if
        all start in one state.
    """

    estimator: Estimator
    factors: Mapping[str, Squares]
    total: Squares
    bias: Params
    bias_error: Params
    num_repeats: int
    chains: int | None
    num_references: int

    @property
    def conditioning(self) -> str:
        """State that is held fixed, and so counts as bias, in words."""
        if self.chains is None:
            return f"{self.num_repeats} repeats from one state"
        return f"{self.num_repeats} groups of {self.chains} of its last chains"

    def __repr__(self) -> str:
        total = self.total
        name = type(self.estimator).__name__
        return (
            f"The gradient of {name} has a squared bias of {total.squared_bias:.3g} +- "
            f"{total.standard_error:.2g}, beside a squared norm of the gradient of "
            f"{total.squared_gradient:.3g} +- {total.gradient_error:.2g} ({self.conditioning})"
        )

    def _card(self) -> Card:
        rows = [
            (
                name,
                Measured(s.squared_bias, s.standard_error),
                Measured(s.squared_gradient, s.gradient_error),
            )
            for name, s in (*self.factors.items(), ("all params", self.total))
        ]
        title = f"Bias of the gradient of {type(self.estimator).__name__} ({self.conditioning})"
        return Card(
            title,
            [Grid(("factor", "squared bias", "squared norm of the gradient"), rows)],
        )


def gradient_bias(
    graph: FactorGraph,
    params: Params,
    data: StateLike,
    estimator: Estimator,
    state: PyTree = None,
    *,
    rng_key: Array,
    num_repeats: int = 20,
    reference: Estimator = ParticleUCD(),
    num_references: int = 20,
    progress_bar: bool = False,
) -> GradientBias:
    """Measure the bias of an estimator's gradient at given params and rows.

    Steps of the estimator and of an unbiased reference are repeated with different keys
    on the same rows; the bias is the difference of their means. Its squared norm is a
    mean of products of different repeats, so that noise does not add to it: it is
    unbiased, and without a bias it is below 0 about half of the time.

    The params, the rows and the estimator's state are held fixed. The last chains of
    :class:`PCD`, :class:`TemperedPCD` and ``FPCD`` are split into ``num_repeats``
    groups, each of which makes its own step, so that their noise does not count, but a
    mode that none has found does. Other states are fixed as a whole, so the noise of
    persistent chains of :class:`UCD` and of :class:`WeightedPCD` counts as bias.
    :class:`~ebmpp.Centered` and :class:`~ebmpp.estimators.Discriminative`
    are judged by their inner estimator. A mode that no system of the reference finds
    cannot show.

    :param params: a dict keyed by factor name: the last ones, where the state has
        chains.
    :param data: rows of the visible blocks, the batch of each repeat; some of the
        training data suffice.
    :param estimator: such as ``fit.estimator``.
    :param state: such as ``fit.estimator_state``; the default needs an estimator
        without persistent chains.
    :param rng_key: a jax key. A repeat's draws depend on it and on the repeat's number
        alone.
    :param num_repeats: steps of the estimator, at least 3; fewer where there are fewer
        chains.
    :param reference: an unbiased estimator. Its first step adapts its rungs or lengths,
        and does not count.
    :param num_references: steps of the reference, at least 3.
    :raises ArgumentError: for numbers out of range, an estimator whose gradient is not
        the likelihood's, or one with persistent chains and no state; under ``jit``.
    :raises StateError: for invalid data, missing entries, or a state that does not fit.
    :raises DomainError: for a gradient that is not finite; UnmetError where a pair is
        unmet.
    :warns UserWarning: if the reference diagnoses a problem.

    **References**

    1. Chen, Qin (2010), *A two-sample test for high-dimensional data with applications
       to gene-set testing*, section 2.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> data = ebmpp.data.bars_and_stripes(3)
    >>> fit = ebmpp.fit(rbm, data, rng_key=jax.random.key(0), num_steps=5, progress_bar=False,
    ...                 estimator=ebmpp.PCD(num_chains=100))
    >>> result = ebmpp.estimators.gradient_bias(
    ...     rbm, fit.params, data, fit.estimator, fit.estimator_state, rng_key=jax.random.key(1),
    ...     reference=ebmpp.ParticleUCD(num_particles=50), num_references=5)
    >>> sorted(result.factors), result.conditioning
    (['h', 'v', 'v:h'], '20 groups of 5 of its last chains')
    """
    key = check_model("gradient_bias", graph, params, rng_key)
    count, num_references = check_repeats(
        estimator, num_repeats, reference, num_references
    )
    checks.flag("gradient_bias: progress_bar", progress_bar)
    rows, _ = tables.check_rows(graph, data, "gradient_bias")
    batch = Batch.uniform(rows)
    plan = _plan(
        graph, params, rows, estimator, state, count, random.fold_in(key, 0, 0)
    )

    def run(plan, key):
        """Yield gradient and metrics of each repeat."""
        bar = tqdm(
            plan.states,
            type(plan.estimator).__name__,
            disable=not progress_bar,
            unit="step",
        )
        for i, state in enumerate(bar):
            step_key = random.fold_in(key, i)
            step = _step(graph, plan.estimator, params, state, batch, step_key)
            yield _gradient(plan.estimator, step), jax.device_get(step.metrics)

    gradients = [gradient for gradient, _ in run(plan, random.fold_in(key, 1))]
    first = reference.init_state(
        graph, params, rows, batch.num_rows, random.fold_in(key, 0, 1)
    )
    # the first step adapts its state, from which all references start
    pilot = _step(graph, reference, params, first, batch, random.fold_in(key, 0, 2))
    _gradient(reference, pilot)
    references = Repeats(reference, (pilot.state,) * num_references)
    unbiased, metrics = zip(*run(references, random.fold_in(key, 2)), strict=True)
    columns = {name: np.stack([m[name] for m in metrics]) for name in metrics[0]}
    message = reference.diagnose(columns)
    if message is not None:
        warnings.warn(f"gradient_bias: the reference: {message}", stacklevel=2)
    return _compare(graph, estimator, plan, gradients, unbiased)


def check_repeats(
    estimator: Estimator, num_repeats: int, reference: Estimator, num_references: int
) -> tuple[int, int]:
    """Return the numbers of repeats and references; raise ArgumentError for invalid arguments."""
    expected = "an estimator such as CD(k=1)"
    checks.instance("gradient_bias: estimator", estimator, Estimator, expected)
    expected = "an unbiased estimator such as ParticleUCD()"
    checks.instance("gradient_bias: reference", reference, Estimator, expected)
    return (
        checks.count("gradient_bias: num_repeats", num_repeats, _MIN_REPEATS),
        checks.count("gradient_bias: num_references", num_references, _MIN_REPEATS),
    )


@compiled(
    statics=2,
    fast_compile=lambda graph, estimator, *_, **__: estimator.fast_compile(graph),
)
def _step(
    graph: FactorGraph,
    estimator: Estimator,
    params: Params,
    state: PyTree,
    batch: Batch,
    key: Key,
) -> Estimate:
    return estimator.estimate(graph, params, state, batch, key)


def state_shapes(
    graph: FactorGraph, params: Params, rows: Rows, estimator: Estimator
) -> PyTree:
    """Return the shapes of an estimator's first state, with such rows for a batch."""
    size = num_rows(rows)
    key = jnp.zeros(2, jnp.uint32)
    return jax.eval_shape(
        lambda p: estimator.init_state(graph, p, rows, size, key), params
    )


def _plan(
    graph: FactorGraph,
    params: Params,
    rows: Rows,
    estimator: Estimator,
    state: PyTree,
    count: int,
    key: Key,
) -> Repeats:
    """Return the steps to repeat."""
    name = "gradient_bias: state"
    size = num_rows(rows)
    is_missing = state is None
    if is_missing:
        state = estimator.init_state(graph, params, rows, size, key)
    elif shapes(state) != shapes(state_shapes(graph, params, rows, estimator)):
        raise checks.state_error(
            name,
            f"one of {estimator!r} with batches of {size} rows",
            state,
            hint="Pass fit.estimator_state, and as many rows as a batch had if the "
            "estimator has a chain per row.",
        )
    plan = estimator.repeats(state, count)
    has_chains = plan.chains is not None
    if is_missing and has_chains or len(plan.states) < _MIN_REPEATS:
        raise checks.error(
            name,
            f"one with {_MIN_REPEATS} or more chains of {estimator!r}",
            None if is_missing else f"{len(plan.states)} chains",
            hint="Pass state=fit.estimator_state.",
        )
    return plan


def _gradient(estimator: Estimator, step: Estimate) -> Params:
    """Return the gradient on the host; raise UnmetError or DomainError if it is not finite."""
    gradient = jax.device_get(step.gradient)
    if all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient)):
        return gradient
    failure = f"gradient_bias: the gradient of {estimator!r} is not finite, since "
    if total_unmet(step.metrics) > 0:
        raise UnmetError(f"{failure}a pair was unmet. Raise or remove its limit.")
    raise DomainError(f"{failure}params overflow. Check them.")


def _compare(
    graph: FactorGraph,
    estimator: Estimator,
    plan: Repeats,
    gradients: Sequence[Params],
    unbiased: Sequence[Params],
) -> GradientBias:
    def stack(*leaves):
        return np.stack(leaves).astype(float)

    def squares(gram):
        return Squares(
            *statistics.squared_distance(gram, count),
            *statistics.squared_norm(gram[count:, count:]),
        )

    def bias(leaf):
        return leaf[:count].mean(0) - leaf[count:].mean(0)

    def error(leaf):
        last = np.moveaxis(leaf, 0, -1)
        ends = (last[..., :count], last[..., count:])
        return np.hypot(*map(statistics.standard_error, ends))

    def products(params):
        """Return inner products of all gradients over the params of a factor."""
        leaves = (leaf.reshape(size, -1) for leaf in jax.tree.leaves(params))
        return sum((a @ a.T for a in leaves), np.zeros((size, size)))

    count = len(gradients)
    size = count + len(unbiased)
    draws = jax.tree.map(stack, *gradients, *unbiased)
    grams = {name: products(draws[name]) for name in graph.param_shapes}
    return GradientBias(
        estimator,
        factors={name: squares(gram) for name, gram in grams.items()},
        total=squares(products(draws)),
        bias=jax.tree.map(bias, draws),
        bias_error=jax.tree.map(error, draws),
        num_repeats=count,
        chains=plan.chains,
        num_references=len(unbiased),
    )
