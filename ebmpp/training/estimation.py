# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Maximum likelihood with standard errors: :func:`estimate`."""

from collections.abc import Callable
import dataclasses
from functools import partial
import math
from typing import NamedTuple
import warnings

from jaxtyping import Float, Integer
import numpy as np

import jax
from jax import Array
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import (
    Blocks,
    Key,
    Keys,
    Params,
    PerRow,
    Rows,
    StateLike,
    checks,
    compiled,
    num_rows,
    random,
)
from ebmpp.coupling.accumulators import Scores, ScoreSums, scores_and_slope
from ebmpp.coupling.covariance import mean_of_others
from ebmpp.coupling.engine import run_pairs
from ebmpp.coupling.slots import Fresh, Window
from ebmpp.errors import DivergenceError, IntractableError, UnmetError
from ebmpp.estimators import Batch
from ebmpp.estimators.phases import check_rows
from ebmpp.exact import enumeration, perfect
from ebmpp.graph import FactorGraph, tables
from ebmpp.moves import Move, Target
from ebmpp.moves.sweeps import CouplingLike, mixture_of, resolve_moves, with_pool
from ebmpp.training.estimates import Estimates

Vector = Float[np.ndarray, "params"]
Matrix = Float[np.ndarray, "params params"]
Samples = Float[np.ndarray, "samples params"]

_MOST_RUNS = 300
_MOST_RETREATS = 3
_LENGTH = 3  # last sweep of a window, in lags
#: Largest change of a param by one step, in 1 / standard deviation of its score where
#: that was largest.
_REACH = 4.0
#: Share of the complete information that a step assumes at least.
_LEAST = 0.1
#: Gain in nats of a step below which params are near the maximum.
_NEAR = 0.04  # with pairs
#: Lag of pairs in sweeps from which chains may stay in a phase.
_SLOW = 20
#: Bimodality from which states form two phases: 0.33 for a normal distribution, 0.56 for
#: a uniform or an exponential one, 1 for two points.
_BIMODAL = 0.7
#: Square of the Monte Carlo error in standard errors that is not reduced further.
_ENOUGH = 1e-4
_ROUNDING = 1e-5  # of scores in float32
_TINY = 1e-8
#: States to enumerate up to which sums over them replace pairs.
_MOST_STATES = 2**12


def estimate(
    graph: FactorGraph,
    data: StateLike,
    *,
    rng_key: Array,
    weights: ArrayLike | None = None,
    prior: Callable[[Params], ArrayLike] | None = None,
    params: Params | None = None,
    num_pairs: int = 1000,
    num_steps: int = 10,
    coupling: CouplingLike = None,
    max_sweeps: int = 1000,
) -> Estimates:
    r"""Estimate up to some hundred params by maximum likelihood, with standard errors.

    Newton's method with unbiased gradients and covariances from coupled pairs. With
    :math:`s` the gradient of the complete log density in the params, Louis' identity
    gives the information of rows :math:`v_i` with weights :math:`w_i`,

    .. math:: I = \sum_i w_i \, [\mathrm{Cov}(s) - \mathrm{Cov}(s \mid v_i)],

    and where :math:`s` depends on the params the means of its derivative. Conditional
    covariances are exact. All are exact, and the Monte Carlo error is 0, where at most
    4096 states remain once one set of blocks is summed out, as in small machines and
    mixtures. Elsewhere steps shrink by the share of noise in them, and the number of
    runs per step doubles while it prevails, up to ``num_steps``. The spread of pairs in
    the last step is the Monte Carlo error. A step after which the likelihood is lower
    is halved.

    The **verdict** is

    * "converged";
    * "undetermined", with a warning that names params: the information about them is
      not larger than 0 by two Monte Carlo errors, as with few rows or more units than
      these determine. Their standard errors are inf, and errors of other params lower
      bounds;
    * "boundary", with a warning that names params: statistics of the data are at an
      extreme that the model reaches only as these params go to infinity, so no finite
      maximum exists. Their standard errors are inf, and errors of other params by pairs
      may be lower bounds;
    * "degenerate", with a warning: pairs stay in two separate phases, such as near-empty
      and near-full networks, which the data do not have. Means are then matched by a
      mixture that resembles no data. If pairs did not meet, errors are nan.

    :param graph: any graph whose latents can be summed out given a row.
    :param data: rows of the visible blocks, ``(rows, *shape)`` each, or one row: a
        single network is one row of its dyads.
        Several networks of one size are several rows.
    :param weights: number of times that each row counts, not negative; default 1.
    :param prior: a function of the params to their log density up to a constant, which
        is added to the log-likelihood.
    :param params: initial params, default ``graph.init(rng_key, data)``. With latents
        the likelihood has several maxima, and the params of :func:`ebmpp.fit` are
        better.
    :param num_pairs: coupled pairs per run, several times the number of params.
    :param num_steps: most runs whose mean is a step, at least 2, whose spread is an
        error; fewer if the Monte Carlo error is a hundredth of the standard error.
    :param coupling: see :func:`ebmpp.unbiased_expectation`. None: exact sums where
        possible, "common" for units of a block that interact and have finitely many
        values, and "maximal" elsewhere. Where these pairs do not meet and there are
        latents, "mixture", whose pool is the data.
    :param max_sweeps: sweeps after which a pair counts as unmet.
    :warns UserWarning: for every verdict but "converged".
    :raises UnmetError: if pairs do not meet, though there are no two phases.
    :raises DivergenceError: after 300 runs; it carries the last params.
    :raises IntractableError: for latents that cannot be summed out, or moves that do
        not fit.
    :raises StateError: for invalid data or weights, and for missing entries.
    :raises ParameterError: for params that do not fit the graph.
    :raises ArgumentError: for other invalid arguments, and under ``jit``.

    **References**

    1. Louis (1982), *Finding the observed information matrix when using the EM
       algorithm*.
    2. Hunter, Handcock (2006), *Inference in curved exponential family models for
       networks*.
    3. Handcock (2003), *Assessing degeneracy in statistical models of social networks*.

    **Example**

    >>> import jax, ebmpp
    >>> coins = ebmpp.FactorGraph({"x": ebmpp.Bernoulli(2)}, factors=[ebmpp.Bias("x")])
    >>> rows = jax.numpy.array([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 1.0]])
    >>> result = ebmpp.estimate(coins, rows, rng_key=jax.random.key(0))
    >>> print(result.verdict, result.standard_error["x"].round(1))  # 1 / sqrt(4 * 3/16)
    converged [1.2 1.2]

    A prior is a penalty:

    >>> def log_prior(params):
    ...     return -(params["x"] ** 2).sum() / 2
    >>> result = ebmpp.estimate(coins, rows, rng_key=jax.random.key(0), prior=log_prior)
    >>> print(result.params["x"].round(2))  # log(3) = 1.1 without it
    [0.51 0.51]
    """
    rng_key = checks.key("estimate: rng_key", rng_key)
    checks.on_host("estimate", rng_key, params, weights, data)
    checks.instance("estimate: graph", graph, FactorGraph)
    num_pairs = checks.count("estimate: num_pairs", num_pairs, least=2)
    num_steps = checks.count("estimate: num_steps", num_steps, least=2)
    max_sweeps = checks.count("estimate: max_sweeps", max_sweeps, least=2)
    rows = tables.as_data(graph, data, "estimate").rows
    weights = np.asarray(np.ones(num_rows(rows)) if weights is None else weights, float)
    tables.check_weights(weights, num_rows(rows))
    init_key, key = random.split(rng_key, 2)
    if params is None:
        params = graph.init(init_key, rows, weights=weights)
    graph.check(params)
    check_rows(graph, params, Batch.uniform(rows))
    params = graph.effective_params(params)
    flat, unravel = ravel_pytree(jax.tree.map(lambda p: jnp.asarray(p, float), params))
    prior = prior or (lambda params: 0.0)
    checks.function("estimate: prior", prior, "the params", arguments=1)

    def log_prior(flat):
        return jnp.asarray(prior(unravel(flat)), float)

    search = _Search(
        graph,
        rows,
        weights,
        jax.jit(lambda flat: (jax.grad(log_prior)(flat), jax.hessian(log_prior)(flat))),
        unravel,
        _resolve(graph, coupling),
        num_pairs,
        random.key_pair(key),
    )
    run = num_steps, max_sweeps
    theta = np.asarray(flat, float)
    try:
        result = search.run(theta, *run)
    except UnmetError:
        # Gibbs chains stay in one of several separate classes. The mixture's short
        # windows leave more noise where they do not.
        if coupling is not None or not graph.latent:
            raise
        moves = resolve_moves(graph, "mixture")
        result = dataclasses.replace(search, moves=moves).run(theta, *run)
    if result.verdict != "converged":
        warnings.warn(f"estimate: {result.message}", stacklevel=2)
    return result


class _Point(NamedTuple):
    """Derivatives of a log posterior, and what its pairs show."""

    gradient: Vector
    noise: Matrix  # covariance of the gradient over keys
    #: minus the second derivative by each run; unbiased, so perhaps indefinite
    information: Float[np.ndarray, "runs params params"]
    scoring: Matrix  # positive semidefinite substitute: covariance of the scores
    penalty: Matrix  # part of the information that the prior adds
    samples: Samples  # scores of states of the model
    rows: Samples  # scores of the data
    meeting_time: Integer[np.ndarray, "pairs"]  # -1 if unmet

    def axes(self) -> tuple[Matrix, Vector, Vector]:
        """Return the eigenvectors of the information, in columns, and its eigenvalues.

        They are in units of the scoring matrix. Directions in which no score varies are
        left out, as different params are then the same model.

        :return: eigenvectors, eigenvalues, and the least eigenvalues that differ clearly
            from 0. These are two Monte Carlo errors by the spread of runs, which is 0
            for exact sums.
        """
        diagonal = self.scoring.diagonal()
        scale = np.where(diagonal > 0, diagonal, np.inf) ** -0.5
        values, vectors = np.linalg.eigh(self.scoring * np.outer(scale, scale))
        counts = values > _TINY
        basis = scale[:, None] * vectors[:, counts] * values[counts] ** -0.5
        runs = basis.T @ self.information @ basis
        shares, axes = np.linalg.eigh(runs.mean(0))
        spread = (axes.T @ runs @ axes).diagonal(0, 1, 2).std(0)
        errors = spread / max(len(runs) - 1, 1) ** 0.5
        return basis @ axes, shares, np.maximum(2 * errors, _TINY)

    def inverse(self, least: float | Vector) -> Matrix:
        """Return a positive definite inverse, with eigenvalues raised to ``least``."""
        basis, shares, _ = self.axes()
        return basis / np.maximum(shares, least) @ basis.T

    def undetermined(self) -> np.ndarray:
        """Return the params, by number, that the data do not determine.

        Their variances come from directions in which the information does not differ
        clearly from 0. The largest part of all and parts above its half count.
        """
        basis, shares, floor = self.axes()
        variances = basis**2 / np.maximum(shares, floor)
        total = variances.sum(1)
        parts = variances @ (shares < floor) / np.where(total > 0, total, np.inf)
        return np.flatnonzero((parts > 0) & (parts >= parts.max() / 2))

    def extremes(self, step: Vector, widest: Vector) -> np.ndarray:
        """Return the params, by number, that grow without limit, alone or along a step.

        In that direction the scores of all rows are equal, no state of the model has
        a larger one, and no prior holds the params. A score that has varied, by the
        variances ``widest``, may vary no more.
        """
        units = np.eye(len(step))
        directions = np.concatenate([units, -units, step[None]])
        data = self.rows @ directions.T
        model = self.samples @ directions.T
        slack = _ROUNDING * np.ptp(model, 0)
        is_extreme = (data.min(0) >= model.max(0) - slack) & (np.ptp(data, 0) <= slack)
        is_held = ((directions @ self.penalty) * directions).sum(1) > 0
        has_varied = np.concatenate([widest, widest, slack[-1:]]) > 0
        numbers = np.flatnonzero(is_extreme & ~is_held & has_varied)
        if len(step) * 2 in numbers[:1]:
            return np.flatnonzero(np.abs(step) >= np.abs(step).max() / 2)
        return np.unique(numbers[numbers < len(step) * 2] % len(step))

    def has_two_phases(self) -> bool:
        """Return True if states of the model are of two kinds, and the rows are not.

        It is Sarle's coefficient of the first principal component of the scores.
        """
        spread = self.samples.std(0)
        spread[spread == 0] = np.inf
        mean = self.samples.mean(0)
        scores = (self.samples - mean) / spread
        axis = np.linalg.eigh(scores.T @ scores)[1][:, -1]
        x = scores @ axis
        rows = (self.rows - mean) / spread @ axis
        skewness, kurtosis = ((x**n).mean() / x.std() ** n for n in (3, 4))
        is_bimodal = skewness**2 + 1 > _BIMODAL * kurtosis
        return is_bimodal and rows.var() < x.var() / 4


@compiled(statics=1)
def _row_scores(
    graph: FactorGraph, params: Params, rows: Rows, weights: PerRow
) -> tuple[Array, Array]:
    """Return the score of each row, other blocks summed out, and the slope of their sum."""
    plan = enumeration.make_plan(graph, rows)

    def log_sum(params, row):
        return enumeration.log_sum_states(graph, params, row, plan)

    return scores_and_slope(log_sum, params, rows, weights)


@compiled(statics=1)
def _sum_states(
    graph: FactorGraph, params: Params, keys: Keys
) -> tuple[ScoreSums, Array]:
    """Return scores of independent draws, with exact means and covariances.

    These do not vary, as if each draw were of a pair that has met at once.
    """
    target = Target(graph, params)
    count = len(keys)
    x, is_valid = perfect.draw_perfect(target, keys, "enumerate")
    scores, _ = _row_scores(graph, params, x, jnp.ones(count))
    mean, slope = _row_scores(graph, params, {}, jnp.ones(1))
    total = ScoreSums(mean.repeat(count, 0), scores, count * slope)
    return total, is_valid - 1


def _resolve(graph: FactorGraph, coupling: CouplingLike) -> tuple[Move, ...]:
    """Return the moves of the pairs, none if the states can be summed instead."""
    if coupling is not None:
        return resolve_moves(graph, coupling)
    try:
        plan = enumeration.make_plan(graph)
        count = enumeration.num_states(graph, plan.enumerated)
        if count <= _MOST_STATES and not plan.integrated:
            return ()
    except IntractableError:
        pass
    # rejected trials of maximal couplings took 0.8 of the time in networks of 120 dyads
    is_finite = all(f.states() is not None for f in graph.families.values())
    return resolve_moves(graph, "common" if graph.splits and is_finite else None)


@dataclasses.dataclass(frozen=True)
class _Search:
    """Search for the maximum of a log-likelihood of weighted rows plus a log prior."""

    graph: FactorGraph
    rows: Blocks
    weights: Float[np.ndarray, "rows"]
    prior_slopes: Callable[[Array], tuple[Array, Array]]  # first and second
    unravel: Callable[[Array], Params]
    moves: tuple[Move, ...]
    num_pairs: int
    key: Key

    def at(self, theta: Vector, window: Window, first: int, count: int) -> _Point:
        """Return the derivatives by the mean of runs ``first`` to ``first + count - 1``."""
        flat = jnp.asarray(theta, float)
        params = self.unravel(flat)
        self.graph.check(params)
        run = partial(self._run_once, Target(self.graph, params), window)
        arrays = (
            *_row_scores(self.graph, params, self.rows, self.weights),
            *self.prior_slopes(flat),
            *jax.tree.map(
                lambda *a: np.stack(a),
                *(run(number) for number in range(first, first + count)),
            ),
        )
        rows, slope, slant, penalty, sums, tau = jax.tree.map(
            lambda a: np.asarray(a, float), arrays
        )
        samples = np.concatenate(sums.samples)
        width = window.m - window.k + 1
        runs = sums.scores / width
        means = np.concatenate(runs)
        total = self.weights.sum()
        products = sums.products / width
        if self.moves:
            products -= [run.T @ mean_of_others(run) for run in runs]
        return _Point(
            gradient=self.weights @ rows - total * means.mean(0) + slant,
            noise=total**2 / len(means) * np.atleast_2d(np.cov(means.T)),
            information=total / self.num_pairs * products - slope - penalty,
            scoring=total * np.atleast_2d(np.cov(samples.T)) - penalty,
            penalty=-penalty,
            samples=samples,
            rows=rows[self.weights > 0],
            meeting_time=tau.ravel().astype(int),
        )

    def _run_once(
        self, target: Target, window: Window, number: int
    ) -> tuple[ScoreSums, Array]:
        """Return sums of scores, and meeting times."""
        key = random.fold_in(self.key, number)
        pairs = np.arange(self.num_pairs)
        x, y = (Fresh(random.fold_in(key, i, pairs), {}, "uniform") for i in (0, 1))
        if not self.moves:
            return _sum_states(self.graph, target.params, x.keys)
        group = enumeration.largest_independent(self.graph, self.graph.latent)
        pool = self.rows if mixture_of(self.moves) else None
        key, pool_key = random.fold_in(key, np.arange(2, 4))
        target = with_pool("estimate", target, self.moves, pool, pool_key)
        return run_pairs(target, self.moves, Scores(group), None, x, y, key, window)[:2]

    def run(self, theta: Vector, num_steps: int, max_sweeps: int) -> Estimates:
        """Climb by steps of ever more runs, and return the result of the last one."""
        window = Window(1, 1, 1, max_sweeps)
        widest = np.zeros(len(theta))
        last = theta
        old = None
        number = 0
        count = 1
        retreats = 0
        fraction = 1.0
        enough = _ENOUGH * len(theta)
        least = _LEAST if self.moves else _ENOUGH
        near = _NEAR if self.moves else enough
        while number < _MOST_RUNS:
            point = self.at(theta, window, number, count)
            number += count
            is_unmet = point.meeting_time.min() < 0
            old = old or point
            path = theta - last
            # twice the change of the likelihood, by the trapezoidal rule
            rise = path @ (point.gradient + old.gradient)
            error = path @ (point.noise + old.noise) @ path
            retreats += is_unmet  # these runs are expensive
            may_retreat = path.any() and retreats <= _MOST_RETREATS
            if may_retreat if is_unmet else rise < -2 * error**0.5:
                fraction /= 2
                theta = (theta + last) / 2
                continue
            inverse = point.inverse(least / count)
            step = inverse @ point.gradient
            gain = step @ point.gradient
            noise = np.trace(inverse @ point.noise)
            widest = np.maximum(widest, point.scoring.diagonal())
            reach = (widest * step**2).max() / _REACH**2
            size = max(step @ point.scoring @ step, reach) / self.weights.sum()
            is_near = size <= 1 and gain <= max(near, 4 * noise)
            # chains near a boundary may be too slow to come closer
            if is_near or is_unmet:
                extremes = point.extremes(step, widest)
                if len(extremes):
                    return self._result(theta, point, "boundary", extremes, np.inf)
            if is_unmet:
                if point.has_two_phases():
                    unknown = slice(None)
                    return self._result(theta, point, "degenerate", unknown, np.nan)
                share = (point.meeting_time < 0).mean()
                raise UnmetError(
                    f"estimate: {share:.1%} of the pairs did not meet in {max_sweeps} "
                    "sweeps. Increase max_sweeps, or pass another coupling, params "
                    "closer to the estimates, or a prior."
                )
            # few late pairs make most of the variance, hence the longest time
            if self.moves:
                window, _ = window.after(point.meeting_time, level=1.0, length=_LENGTH)
                if number == 1:
                    continue  # a pilot
            if is_near:
                is_precise = noise <= enough and (count > 1 or not self.moves)
                if is_precise or count == num_steps:
                    is_split = window.lag >= _SLOW and point.has_two_phases()
                    weak = point.undetermined()
                    verdict = "undetermined" if len(weak) else "converged"
                    verdict = "degenerate" if is_split else verdict
                    return self._result(theta + step, point, verdict, weak, np.inf)
                count = min(2 * count, num_steps)
            last = theta
            old = point
            fraction = min(2 * fraction, 1)
            # noise adds as much to the gain as it takes from the likelihood
            share = max(gain - noise, 0) / max(gain, _TINY)
            theta = theta + fraction * share * step / max(math.sqrt(size), 1)
        raise DivergenceError(
            f"estimate: no maximum was found in {number} runs. Pass params closer to "
            "one, more num_pairs, or a prior.",
            self._as_tree(theta),
            None,
            number,
        )

    def _result(
        self,
        theta: Vector,
        point: _Point,
        verdict: str,
        unknown: np.ndarray | slice,
        error: float,
    ) -> Estimates:
        """Return a result; the params of ``unknown`` numbers have the given error."""
        covariance = point.inverse(point.axes()[2])
        unseen = np.flatnonzero(point.scoring.diagonal() == 0)
        errors = []
        for matrix in (covariance, covariance @ point.noise @ covariance):
            matrix[unseen, unseen] = np.inf
            matrix[unknown, unknown] = error
            errors.append(self._as_tree(np.sqrt(matrix.diagonal())))
        return Estimates(self._as_tree(theta), *errors, verdict, covariance)

    def _as_tree(self, vector: Vector) -> Params:
        return self.unravel(jnp.asarray(vector, float))
