# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased estimates of expectations under a model, from coupled pairs of chains."""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import math
from typing import Any, NamedTuple
import warnings

from jaxtyping import Bool, Float, PyTree
import numpy as np
from scipy import special

import jax
from jax import Array
from jax.sharding import Mesh

from ebmpp.core import BatchShape, Blocks, Key, Rows, checks, expand, random, sharding
from ebmpp.core.display import Card, Grid, Shown
from ebmpp.coupling.accumulators import Function, blocks_of, check_function
from ebmpp.coupling.engine import run_pairs
from ebmpp.coupling.overlap import THRESHOLD, run_leading_chains, warning_of
from ebmpp.coupling.slots import Fresh, Outcome, Window, check_window
from ebmpp.coupling.unmet import describe_unmet
from ebmpp.errors import UnmetError
from ebmpp.graph import FactorGraph
from ebmpp.graph.states import Observed
from ebmpp.moves import Move, Pool, Target, Tempered
from ebmpp.moves.couplings import MOST_TRIALS
from ebmpp.moves.search import STARTS, check_starts
from ebmpp.moves.sweeps import (
    check_params,
    free_rows,
    mixture_of,
    resolve_moves,
    with_pool,
)
from ebmpp.moves.tempering import states_of

Pooled = Pool | Mapping[str, Array] | None
InitLike = Mapping[str, Array] | Callable[[Array], Mapping[str, Array]] | str | None
Coupling = (
    str
    | Sequence[str]
    | Move
    | Sequence[Move]
    | Callable[..., Sequence[Move]]
    | Tempered
    | None
)

_MAX_SHOWN = 10  # values that are printed; of more values the range
NEVER = 2**30  # first sweep that counts in a pilot, which sums nothing


def _describe(value: PyTree, error: PyTree) -> str:
    """Return a value and its standard error as text, or the range of many values."""
    values = {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(value)
    }
    errors = [np.asarray(leaf) for leaf in jax.tree.leaves(error)]
    if sum(leaf.size for leaf in values.values()) > _MAX_SHOWN:
        return _describe_range([*values.values()], errors)
    parts = []
    for (name, leaf), spread in zip(values.items(), errors):
        label = f"{name}: " if name else ""
        known = _format(spread, 2) if (spread > 0).any() else "not known"
        parts.append(f"{label}{_format(leaf, 4)} +- {known}")
    return ", ".join(parts)


def _describe_range(values: list[np.ndarray], errors: list[np.ndarray]) -> str:
    numbers = np.concatenate([leaf.ravel() for leaf in values])
    known = np.concatenate([leaf[leaf > 0] for leaf in errors])
    largest = f"at most {known.max():.2g}" if len(known) else "not known"
    return (
        f"{numbers.size} numbers from {numbers.min():.4g} to {numbers.max():.4g}, "
        f"standard errors {largest}"
    )


def _format(array: np.ndarray, digits: int) -> str:
    return np.array2string(
        array, separator=", ", formatter={"all": f"{{:.{digits}g}}".format}
    )


@dataclasses.dataclass(frozen=True)
class UnbiasedEstimate(Shown):
    """An unbiased estimate; see :func:`unbiased_expectation`."""

    value: Any
    """Mean over the pairs, a pytree like the value of the function."""
    standard_error: Any
    """Standard error of ``value`` over independent pairs; nan, and printed as not known,
    where all pairs agree or only one pair met."""
    meeting_time: Float[np.ndarray, "pairs"]
    """First t at which X at t equals Y at t - lag; inf if unmet."""
    met: Bool[np.ndarray, "pairs"]
    cost: Float[np.ndarray, "pairs"]
    """Sweeps of both chains; inf if unmet."""
    k: int
    m: int
    lag: int
    max_sweeps: int | None
    num_unmet: int
    trials: float
    """Mean number of coupled trials per draw of a layer, trials of residuals included."""
    acceptance: float
    """Acceptance probability of Metropolis proposals in equilibrium, measured on single
    chains after the longest meeting time; nan without Metropolis moves."""
    overlap: float = math.nan
    """z-score of the resemblance of starts and ends of chains: above 5 the pairs met
    without mixing; inf if a block is where it started in all chains. It is nan where it
    was not tested: with independent starts, unmet pairs, fewer than 7 pairs, pairs with
    clamped values of their own, equal starts, or a few pairs that are very late."""
    largest_weight: float = math.nan
    """Largest weight, target over proposal, of the states that single chains reached and
    of proposals from a pool, over the mean of the proposals': about the number of
    proposals that a chain in that state rejects. It is nan without a pool."""

    @property
    def late(self) -> float:
        """Fraction of pairs that did not meet at the first coupled sweep: P(tau > lag)."""
        return float((self.meeting_time > self.lag).mean())

    @property
    def late_upper(self) -> float:
        """Upper end of the one-sided 95 % Clopper-Pearson interval for P(tau > lag)."""
        count = int((self.meeting_time > self.lag).sum())
        on_time = len(self.met) - count
        if not on_time:
            return 1.0
        return float(special.betaincinv(count + 1, on_time, 0.95))

    def __repr__(self) -> str:
        mean = self.meeting_time[self.met].mean() if self.met.any() else np.inf
        overlap = "" if np.isnan(self.overlap) else f", overlap z {self.overlap:.1f}"
        return (
            f"UnbiasedEstimate({_describe(self.value, self.standard_error)}; "
            f"{len(self.met)} pairs, {self.num_unmet} unmet, k={self.k}, m={self.m}, "
            f"lag={self.lag}, mean meeting time {mean:.4g}{overlap})"
        )

    def _card(self) -> Card:
        times = np.sort(self.meeting_time[self.met])
        pairs = len(self.met)
        rows = {
            "value": _describe(self.value, self.standard_error),
            "pairs": pairs,
            "unmet": self.num_unmet,
            "k, m, lag": f"{self.k}, {self.m}, {self.lag}",
        }
        if len(times):
            summary = f"{times.mean():.4g}, {np.median(times):.4g}, {times[-1]:.4g}"
            rows["meeting time in sweeps: mean, median, longest"] = summary
            cost = f"{self.cost[self.met].mean():.4g}"
            rows["mean sweeps of both chains of a met pair"] = cost
        if not np.isnan(self.overlap):
            label = f"overlap of starts and ends (z, at most {THRESHOLD:g})"
            rows[label] = f"{self.overlap:.1f}"
        if not np.isnan(self.acceptance):
            rows["acceptance of Metropolis proposals"] = f"{self.acceptance:.3g}"
            if not np.isnan(self.largest_weight):
                rows["largest weight of a state"] = f"{self.largest_weight:.3g}"
            late = f"{self.late:.3g} (at most {self.late_upper:.2g})"
            rows[f"P(tau > {self.lag})"] = late
        title = f"Unbiased estimate from {pairs} coupled pairs of chains"
        title += f", {self.num_unmet} of them dropped: biased" if self.num_unmet else ""
        return Card(title, [Grid(("", ""), [*rows.items()])])


def unbiased_expectation(
    graph: FactorGraph,
    params: Any,
    fn: Callable[[Blocks], Any],
    *,
    rng_key: Array,
    num_pairs: int = 1000,
    k: int | None = None,
    m: int | None = None,
    lag: int | None = None,
    coupling: Coupling = None,
    pool: Pooled = None,
    init: InitLike = None,
    independent_starts: bool = False,
    max_sweeps: int | None = None,
    unmet: str = "raise",
    num_slots: int | None = None,
    mesh: Mesh | None = None,
    **clamped: Array | Observed | Mapping[str, Array | Observed],
) -> UnbiasedEstimate:
    r"""Return an unbiased estimate of E[fn(state)] under the model, from coupled chains.

    Each pair estimates, with :math:`w_t` the correction of lag ``lag`` until the pair
    meets,

    .. math::

        H_{k:m} = \frac{1}{m - k + 1}
            \left[\sum_{t=k}^m f(X_t) + \sum_t w_t (f(X_t) - f(Y_{t - \mathrm{lag}}))\right].

    :param fn: from one state (a dict of blocks, without batch axes) to a pytree of
        numbers.
    :param rng_key: a jax key. The draws of a pair depend on it and on the number of the
        pair only.
    :param num_pairs: number of independent pairs, at least 1.
    :param k: first sweep of the average, at least 0. If k, m and lag are all None, a
        pilot of as many other pairs chooses k = lag = the 0.95 quantile of its meeting
        times and m = 2 lag; a warning names a window that ``max_sweeps`` cut. Otherwise
        None is 1.
    :param m: last sweep of the average, at least k (the default).
    :param lag: sweeps that the leading chain is ahead, at least 1 (the default).
    :param coupling: "maximal" (the default), "maximal_independent", "common",
        "reflection" or "independent" for every layer, or a sequence with one of these
        per layer; "mixture", :func:`~ebmpp.moves.tempered`, moves, or a function that
        returns moves: see :func:`ebmpp.moves.resolve_moves`. With Metropolis
        moves a warning is given if all pairs met at the first coupled sweep, since then
        no correction was observed. "mixture" adds proposals from a ``pool``
        (:func:`ebmpp.moves.mixture_sweep`): pairs that accept them meet within a few
        sweeps, however slowly the layers mix. A warning reports an acceptance below
        0.01. Where proposed units interact, starts are independent, so that a mode that
        the pool lacks shows in meeting times.
    :param pool: states from which "mixture" proposes, which should resemble draws of
        the model: rows of data, or of earlier chains, ``(rows, *shape)`` for each
        block. Other blocks are drawn given these, once. The estimate is unbiased for
        any pool.
    :param init: starting states: values of some or all blocks, ``(*shape,)`` or
        ``(num_pairs, *shape)``; a function of a jax key that returns the dict for one
        pair; "local_mode" for one Gibbs sweep from a local mode; or None for uniform
        draws. Blocks without a value are drawn given those with one.
    :param independent_starts: draw the start of the following chain independently,
        unless ``init`` holds values of all blocks.
        Otherwise a pair may meet in a mode that it does not leave: up to 200 chains are
        then run for twice the longest meeting time, and a warning is given if they
        resemble their starts (``overlap`` above 5). Independent starts show such modes
        in meeting times, and cost more.
    :param max_sweeps: stop an unmet pair after this number of sweeps of its leading
        chain, more than ``lag``, or when one draw takes 1024 times as many trials.
        None: no limit.
    :param unmet: "raise" an error for pairs that ``max_sweeps`` or a failed draw
        stopped, or "drop" them with a warning, because **that is biased**: pairs that
        meet early differ from the others. With "raise" and more than 2^22 values of all
        pairs together, sums over 128 blocks of pairs replace the rows of single pairs,
        and their spread gives the standard error.
    :param num_slots: pairs that run at once on each device; affects speed and rounding
        only. By default 8 (up to 100 pairs) or 64 on a CPU, and 4096 on an accelerator.
    :param mesh: devices to shard the pairs over, by its first axis; params may be
        sharded over other axes.
    :param clamped: values of clamped blocks, without a batch axis or one per pair, for
        expectations under the posterior. An :class:`~ebmpp.Observed` block (without a
        batch axis) is clamped at its known units. A block with the name of an argument
        is passed in a dict: ``clamped={"k": ...}``.
    :raises UnmetError: if pairs are unmet and ``unmet`` is "raise".
    :raises ArgumentError: for numbers out of range, a pool without a mixture move or
        the reverse; in ``jit``.
    :raises IntractableError: for "mixture" and a graph whose free units do not
        interact.
    :raises StateError: for states, a pool or clamped values that do not fit the graph.
    :raises ParameterError: for params that do not fit the graph or a move.

    **References**

    1. Jacob, O'Leary, Atchade (2020), *Unbiased Markov chain Monte Carlo with
       couplings*.
    2. Biswas, Jacob, Vanetti (2019), *Estimating convergence of Markov chains with
       L-lag couplings*.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> params = rbm.init(jax.random.key(0))
    >>> est = ebmpp.unbiased_expectation(rbm, params, lambda x: x["v"], rng_key=jax.random.key(1),
    ...                                  num_pairs=50)
    >>> est.value.shape, est.met.all().item()
    ((4,), True)
    """
    rng_key = checks.key("unbiased_expectation: rng_key", rng_key)
    checks.on_host("unbiased_expectation", rng_key, params, clamped, init)
    checks.flag("unbiased_expectation: independent_starts", independent_starts)
    window = check_window("unbiased_expectation", k, m, lag, max_sweeps)
    checks.choice("unbiased_expectation: unmet", unmet, ("raise", "drop"))
    num_pairs = checks.count("unbiased_expectation: num_pairs", num_pairs)
    num_slots = checks.optional_count("unbiased_expectation: num_slots", num_slots)
    with sharding.use_mesh("unbiased_expectation: mesh", mesh):
        target = Target.checked("unbiased_expectation", graph, params, clamped)
        target = states_of(coupling, target)
        target = dataclasses.replace(target, params=sharding.place(target.params))
        key = np.asarray(random.key_pair(rng_key))
        moves = resolve_moves(target.graph, coupling, target.clamped)
        check_params(target, moves)
        mixture = mixture_of(moves)
        independent_starts |= mixture is not None and mixture.is_informed(graph)
        target = with_pool(
            "unbiased_expectation", target, moves, pool, random.fold_in(key, 2)
        )

        sums = Function(fn, blocks_of(target.graph))
        check_function("unbiased_expectation: fn", fn, sums.blocks)
        sums = sums.in_blocks(num_pairs) if unmet == "raise" else sums

        is_given = isinstance(init, Mapping) and {*init} >= {*target.free}

        def starts(run):
            pair_key = random.fold_in(key, 0, run)
            init_key = rng_key if run == 1 else jax.random.fold_in(rng_key, run)
            return _starts(target, init, pair_key, num_pairs, init_key)

        def pairs(run):
            x = starts(run)
            y = starts(run + 1) if independent_starts and not is_given else None
            run_key = random.fold_in(key, 1, run)
            return PairRun(target, moves, sums, num_slots, x, y, run_key)

        quantile = 0
        if k is None and m is None and lag is None:
            # the pilot has the estimate's shapes, and so its program
            pilot = pairs(3).outcome(window._replace(k=NEVER))
            window, quantile = window.after(np.asarray(pilot.meeting_time))
        return estimate_pairs("unbiased_expectation", pairs(1), window, unmet, quantile)


def _diagnose(
    who: str, estimate: UnbiasedEstimate, quantile: int, has_pool: bool
) -> Iterator[str]:
    """Yield warnings of pairs that met without mixing, or hardly by the pool."""
    if quantile > estimate.lag:
        yield (
            f"{who}: max_sweeps={estimate.max_sweeps} cut the window to "
            f"k={estimate.k}, m={estimate.m}, lag={estimate.lag}, where the pilot's "
            f"meeting times ask for lag={quantile}, so the standard error is larger. "
            "Increase max_sweeps."
        )
    acceptance = estimate.acceptance
    if has_pool and acceptance < MIN_ACCEPTANCE:
        yield low_acceptance(who, acceptance)
    is_late = estimate.meeting_time > estimate.lag
    if not has_pool and acceptance < 1 and not is_late.any():
        yield (
            f"all {len(is_late)} pairs met at the first coupled sweep, at an acceptance "
            f"of {acceptance:.2g}, so no correction was observed (P(tau > "
            f"{estimate.lag}) is at most {estimate.late_upper:.2g}): the estimate may "
            "reflect the starts. Increase num_pairs or lag."
        )
    elif estimate.overlap > THRESHOLD:
        yield warning_of(who, estimate.overlap)


#: Acceptance of pool proposals below which a warning is given.
MIN_ACCEPTANCE = 0.01


def low_acceptance(who: str, acceptance: float) -> str:
    """Return the warning for an acceptance below :data:`MIN_ACCEPTANCE`."""
    return (
        f"{who}: only {acceptance:.2g} of the proposals from the pool were accepted, "
        "so the pool costs time and hardly helps pairs to meet; the estimate is "
        "unbiased. Pass a pool of more states, of states closer to draws of the model, "
        "or coupling=None."
    )


def _starts(
    target: Target, init: InitLike, key: Array, num_pairs: int, rng_key: Array
) -> Fresh:
    """Check the starts of all pairs, to be drawn when a pair starts."""
    kind = "uniform"
    values = {} if init is None else init
    if isinstance(init, str):
        also = "states, a function of a key or None"
        kind = checks.choice("init", init, STARTS, also=also)
        values = {}
    elif callable(init):
        checks.function("init", init, "a jax key", arguments=1)
        keys = jax.random.split(jax.random.fold_in(rng_key, 1), num_pairs)
        values = jax.vmap(init)(keys)
    rows, axes = free_rows("init", target, values)
    one_or_all = (), (num_pairs,)
    _check_axes("init", axes, one_or_all)
    # all pairs share the observed units
    allowed = ((),) if target.fixed.keep else one_or_all
    _check_axes("clamped blocks", target.fixed.batch, allowed)
    starts = Fresh(random.fold_in(key, np.arange(num_pairs)), rows, kind)
    if target.graph.has_zeros and (
        text := check_starts("init", target, _drawn(starts, target))
    ):
        raise UnmetError(f"pairs would never meet: {text}")
    return starts


#: A function of starts and the target.
_drawn = jax.jit(Fresh.rows)


def _check_axes(name: str, axes: BatchShape, allowed: Sequence[BatchShape]) -> None:
    if axes not in allowed:
        raise checks.state_error(f"leading axes of {name}", f"one of {allowed}", axes)


def check_unmet(met: np.ndarray, cause: str, remedy: str, unmet: str) -> int:
    """Return the number of unmet pairs, with a warning.

    :raises UnmetError: if ``unmet`` is "raise", or no pair met.
    """
    if not (missing := int((~met).sum())):
        return 0
    message = f"{missing} of {len(met)} pairs {cause}"
    if unmet == "raise" or not met.any():
        raise UnmetError(
            f'{message}. {remedy}, or pass unmet="drop" to drop them, which is biased.'
        )
    warnings.warn(f"{message} and were dropped: the estimate is biased.", stacklevel=4)
    return missing


class PairRun(NamedTuple):
    """Arguments of :func:`~ebmpp.coupling.engine.run_pairs` but for the window."""

    target: Target
    moves: tuple[Move, ...]
    sums: Function
    num_slots: int | None
    x: Rows | Fresh
    y: Rows | Fresh | None
    key: Key

    def outcome(self, window: Window) -> Outcome:
        """Run the pairs."""
        return run_pairs(*self, window)

    def describe_unmet(self, window: Window, met: np.ndarray) -> str:
        """Say how the chains of unmet pairs differ; see :func:`describe_unmet`."""
        chains = self.x, self.y, self.key
        return describe_unmet(self.target, self.moves, *chains, window, met)


def estimate_pairs(
    who: str, run: PairRun, window: Window, unmet: str, quantile: int
) -> UnbiasedEstimate:
    """Run pairs, and return the mean over met pairs with what leading chains show.

    :param who: the public function that calls this one, for warnings.
    :param quantile: lag that a pilot asked for, or 0.
    """
    outcome = run.outcome(window)
    tau = np.asarray(outcome.meeting_time)
    met = tau >= 0
    remedy = "Increase max_sweeps (None is no limit) or lag, use another coupling"
    cause = cause_of(int(outcome.broken))
    if not outcome.broken:
        cause += run.describe_unmet(window, met)
    num_unmet = check_unmet(met, cause, remedy, unmet)
    value, spread = _average(
        outcome.total, run.sums.pairs(met), width=window.m - window.k + 1
    )
    time = np.where(met, tau, np.inf)
    cost = np.maximum(window.m, time) + time - window.lag
    overlap, acceptance, weight = run_leading_chains(
        run.target,
        run.moves,
        run.x,
        run.key,
        longest=int(tau.max()),
        total_sweeps=cost[met].sum(),
        compare=run.y is None and not num_unmet,
    )
    estimate = UnbiasedEstimate(
        value=value,
        standard_error=spread,
        meeting_time=time,
        met=met,
        cost=cost,
        k=window.k,
        m=window.m,
        lag=window.lag,
        max_sweeps=window.max_sweeps or None,
        num_unmet=num_unmet,
        trials=float(outcome.trials),
        acceptance=acceptance,
        overlap=overlap,
        largest_weight=weight,
    )
    has_pool = run.target.pool is not None
    for message in _diagnose(who, estimate, quantile, has_pool):
        warnings.warn(message, stacklevel=3)
    return estimate


def cause_of(broken: int) -> str:
    """Return what pairs did that are not met, ``broken`` of which by a failed draw."""
    if not broken:
        return "did not meet"
    return (
        f"did not meet ({broken} because a draw failed: params are outside a family's "
        "domain or not finite, or two conditionals are equal to float32 precision, so "
        f"that a draw took {MOST_TRIALS} trials or 1024 times max_sweeps)"
    )


def _average(total: PyTree, pairs: np.ndarray, width: int) -> tuple[PyTree, PyTree]:
    """Return the mean and its standard error, computed on the host in float64.

    :param total: sums over ``width`` states of ``pairs`` pairs in each row.
    """
    rows = np.flatnonzero(pairs)
    sizes = pairs[rows].astype(float)
    count = sizes.sum()
    # one row has no spread
    freedom = count * (len(rows) - 1) / len(rows) if len(rows) > 1 else math.nan

    def moments(leaf):
        h = np.asarray(leaf, float)[rows] / width
        size = expand(sizes, h)
        mean = h.sum(0) / count
        is_constant = np.ptp(h / size, axis=0) == 0
        variance = ((h - size * mean) ** 2).sum(0) / count / freedom
        error = np.where(is_constant, math.nan, np.sqrt(variance))
        return mean.astype(leaf.dtype), error.astype(leaf.dtype)

    total = sharding.to_host(total)
    with np.errstate(all="ignore"):  # values may be infinite
        results = jax.device_put(jax.tree.map(moments, total))
    return jax.tree.transpose(jax.tree.structure(total), None, results)
