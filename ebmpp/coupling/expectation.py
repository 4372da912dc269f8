# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased estimates of expectations under a model, from coupled pairs of chains."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
from typing import Any, NamedTuple
import warnings

from jaxtyping import Bool, Float
import numpy as np
from scipy import special

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import Mesh

from ebmpp.core import checks, random, sharding
from ebmpp.core.display import Card, Grid, Measured, Shown
from ebmpp.coupling.accumulators import Function, check_function
from ebmpp.coupling.engine import Outcome, Window, run_pairs
from ebmpp.coupling.pairs import Fresh
from ebmpp.coupling.pools import with_pool
from ebmpp.errors import ArgumentError, StateError, UnmetError
from ebmpp.graph import FactorGraph
from ebmpp.graph.states import Observed, as_clamped, as_rows
from ebmpp.moves.couplings import MOST_TRIALS
from ebmpp.moves.move import Move
from ebmpp.moves.search import STARTS
from ebmpp.moves.sweeps import check_params, resolve_moves
from ebmpp.moves.target import Pool, Target
from ebmpp.moves.tempering import Tempered

Pooled = Pool | Mapping[str, Array] | None
Init = Mapping[str, Array] | Callable[[Array], Mapping[str, Array]] | str | None
Coupling = str | Sequence[str] | Move | Sequence[Move] | Tempered | None


_SHOWN = 10  # numbers of a value, above which it is told in short


def _told(value: Any, error: Any) -> str:
    """A value and its standard error, in words; of many numbers their range."""
    errors = [np.asarray(e) for e in jax.tree.leaves(error)]
    values = {jax.tree_util.keystr(p): np.asarray(v) for p, v in jax.tree_util.tree_leaves_with_path(value)}
    if not values:
        return "no value"
    if (count := sum(v.size for v in values.values())) > _SHOWN:
        low, high = min(v.min() for v in values.values()), max(v.max() for v in values.values())
        most = max(e.max() for e in errors)
        return f"{count} numbers from {low:.4g} to {high:.4g}, standard errors at most {most:.2g}"
    show = lambda a, digits: np.array2string(a, separator=", ", formatter={"all": f"{{:.{digits}g}}".format})
    told = zip(values.items(), errors, strict=True)
    return ", ".join(f"{n}{': ' * bool(n)}{show(v, 4)} +- {show(e, 2)}" for (n, v), e in told)


def _values(value: Any, error: Any) -> Grid:
    """A row a number; of many numbers one a leaf, with their range."""
    both = zip(jax.tree_util.tree_leaves_with_path(value), jax.tree.leaves(error), strict=True)
    leaves = [(jax.tree_util.keystr(p, simple=True), np.asarray(v), np.asarray(e)) for (p, v), e in both]
    if sum(v.size for _, v, _ in leaves) > _SHOWN:
        told = [
            (n or "value", str(v.shape), float(v.min()), float(v.max()), float(e.max()))
            for n, v, e in leaves
            if v.size
        ]
        return Grid(("block by block", "shape", "lowest", "highest", "standard errors at most"), told)
    each = [
        (f"{n or 'value'}{list(at) if at else ''}", Measured(v[at], e[at]))
        for n, v, e in leaves
        for at in np.ndindex(v.shape)
    ]
    return Grid(("", "value +- standard error"), each)


@dataclasses.dataclass(frozen=True)
class UnbiasedEstimate(Shown):
    """An unbiased estimate; see :func:`unbiased_expectation`."""

    value: Any
    """Mean over the pairs, a pytree shaped like the function's value."""
    standard_error: Any
    """Of ``value``: the pairs are independent, so no autocorrelation enters; nan where one pair alone met."""
    meeting_time: Float[np.ndarray, "pairs"]
    """First t with X_t = Y_{t - lag}; inf where unmet."""
    met: Bool[np.ndarray, "pairs"]
    cost: Float[np.ndarray, "pairs"]
    """Sweeps of both chains; inf where unmet."""
    k: int
    m: int
    lag: int
    max_sweeps: int | None
    num_unmet: int
    trials: float
    """Coupled draws of a layer, those of residuals included, over draws: at least 1."""
    acceptance: float
    """Share of the Metropolis proposals that a chain accepted; nan without Metropolis moves."""

    @property
    def late(self) -> float:
        """Estimated P(tau > lag): the share of pairs that did not meet at once."""
        return float((~self.met | (self.meeting_time > self.lag)).mean())

    @property
    def late_upper(self) -> float:
        """The upper end of a one-sided 95 % interval (Clopper and Pearson) for P(tau > lag)."""
        count, pairs = int((~self.met | (self.meeting_time > self.lag)).sum()), len(self.met)
        return 1.0 if count == pairs else float(special.betaincinv(count + 1, pairs - count, 0.95))

    def __repr__(self) -> str:
        mean = self.meeting_time[self.met].mean() if self.met.any() else np.inf
        told = (
            ""
            if np.isnan(self.acceptance)
            else (
                f", acceptance {self.acceptance:.3g}, P(tau > {self.lag}) {self.late:.3g} "
                f"(at most {self.late_upper:.2g})"
            )
        )
        return (
            f"UnbiasedEstimate({_told(self.value, self.standard_error)}; {len(self.met)} pairs, "
            f"{self.num_unmet} unmet, k={self.k}, m={self.m}, lag={self.lag}, "
            f"mean meeting time {mean:.4g}{told})"
        )

    def _card(self) -> Card:
        times, pairs = np.sort(self.meeting_time[self.met]), len(self.met)
        rows = [("pairs", pairs), ("unmet", self.num_unmet), ("k, m, lag", f"{self.k}, {self.m}, {self.lag}")]
        if len(times):
            told = f"{times.mean():.4g}, {np.median(times):.4g}, {times[-1]:.4g}"
            rows += [("meeting time, in sweeps: mean, median, longest", told)]
            rows += [("sweeps of both chains, mean of a pair that met", f"{self.cost[self.met].mean():.4g}")]
        if not np.isnan(self.acceptance):
            rows += [("acceptance of Metropolis proposals", f"{self.acceptance:.3g}")]
            rows += [(f"P(tau > {self.lag})", f"{self.late:.3g} (at most {self.late_upper:.2g})")]
        title = f"Unbiased estimate from {pairs} coupled pairs of chains"
        title += f", {self.num_unmet} of them dropped: biased" if self.num_unmet else ""
        return Card(title, (_values(self.value, self.standard_error), Grid(("", ""), rows)))


def unbiased_expectation(
    graph: FactorGraph,
    params: Any,
    fn: Callable[[dict[str, Array]], Any],
    *,
    rng_key: Array,
    num_pairs: int = 1000,
    k: int = 1,
    m: int | None = None,
    lag: int = 1,
    coupling: Coupling = None,
    pool: Pooled = None,
    init: Init = None,
    independent_starts: bool = False,
    max_sweeps: int | None = None,
    unmet: str = "raise",
    num_slots: int | None = None,
    mesh: Mesh | None = None,
    **clamped: Array | Observed | Mapping[str, Array | Observed],
) -> UnbiasedEstimate:
    """E[fn(state)] under the model, without bias, by H_{k:m} over coupled chains.

    Each pair's estimate is ``1/(m - k + 1)`` times the sum of fn(X_t) for t = k, ..., m plus weighted
    corrections fn(X_t) - fn(Y_{t - lag}) until the pair meets.

    :param graph: the model.
    :param params: its params.
    :param fn: from one state (a dict of blocks, without batch axes) to a pytree of numbers.
    :param rng_key: a jax key. A pair's draws depend on it and on the pair's number alone.
    :param num_pairs: independent pairs, at least 1.
    :param k: first sweep that counts, at least 0.
    :param m: last sweep that counts, at least k (the default).
    :param lag: sweeps that the leading chain is ahead, at least 1.
    :param coupling: "maximal" (the default), "maximal_independent", "common", "reflection" or "independent"
        for every layer, or a sequence of these, one a layer; "metropolis", "mixture",
        :func:`~ebmpp.moves.tempered`, or moves: see
        :func:`ebmpp.moves.sweeps.resolve_moves`. With Metropolis moves the estimate tells their acceptance,
        and warns when every pair met at once: then nothing was corrected, and it is unbiased in name only.
        "mixture" adds proposals from a ``pool`` to the layers' draws
        (:func:`ebmpp.moves.mixture_sweep`): where these are accepted, pairs meet within a few sweeps
        however slowly the layers mix; where hardly any is, a warning says so.
    :param pool: states for "mixture" to propose from, which look like the model's draws: rows of data, or of
        chains that ran before, ``(rows, *shape)`` a block. What is needed of other blocks is drawn given
        these, once. Another pool compiles nothing, and the estimate is unbiased whatever the pool.
    :param init: starts: values of some or all blocks (shape ``(*shape,)``, or ``(num_pairs, *shape)``: rows
        of data, say), a function of a jax key to such a dict for one pair, "local_mode" for one Gibbs sweep
        from a local mode found from uniform draws, or None; what is not given is drawn uniformly.
    :param independent_starts: draw what ``init`` leaves to chance anew for the following chain. By default
        both chains of a pair start at one state, and so in one mode, where they soon meet: what is estimated
        is the same, and that chains do not leave a mode shows in a few very long times only. Apart, it shows
        in many, which is what one wants of a report on mixing, and costs more.
    :param max_sweeps: stop an unmet pair when its leading chain has made so many sweeps, more than ``lag``,
        or when one draw takes 1024 trials for each of them; None: no limit.
    :param unmet: what to do about pairs stopped by ``max_sweeps``, or because a draw cannot be made: "raise",
        or "drop" them from the mean, with a warning, because **that is biased** (pairs that meet early are
        not like the others). With "raise", and more than 2^22 numbers of all pairs together, sums over 128
        blocks of pairs are kept in place of a row a pair, and the standard error is by their spread.
    :param num_slots: pairs at once, on each device: for speed, but for rounding. By default as many as
        suit the device: on a CPU 8 (of up to 100 pairs) or 64, elsewhere 4096.
    :param mesh: devices to share the pairs, over the mesh's first axis: the pairs are those of one device,
        their meeting times the same and their means but for rounding. Params may be cut over other axes.
    :param clamped: blocks held at values, without a batch axis or one value a pair: expectations under the
        posterior. An :class:`~ebmpp.Observed` block (without a batch axis) is held at its known units. A
        block whose name is that of an argument is given in a dict: ``clamped={"k": ...}``.
    :return: an :class:`UnbiasedEstimate`.
    :raises UnmetError: when pairs are unmet and ``unmet`` is "raise"; the error says how many.
    :raises ArgumentError: for numbers out of range, a pool and no move for it, or the reverse; under ``jit``.
    :raises IntractableError: for "mixture" and a graph whose free blocks are not two layers.
    :raises StateError: for states, a pool or clamped values that do not fit the graph.
    :raises ParameterError: for params that do not fit, or that a move does not take.

    **References**

    1. Jacob, O'Leary, Atchade (2020), *Unbiased Markov chain Monte Carlo with couplings*.
    2. Biswas, Jacob, Vanetti (2019), *Estimating convergence of Markov chains with L-lag couplings*.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> params = rbm.init(jax.random.key(0))
    >>> est = ebmpp.unbiased_expectation(rbm, params, lambda x: x["v"], rng_key=jax.random.key(1),
    ...                                  num_pairs=50)
    >>> est.value.shape, est.met.all().item()
    ((4,), True)
    """
    checks.instance("unbiased_expectation: graph", graph, FactorGraph, "a FactorGraph")
    rng_key = checks.key("unbiased_expectation: rng_key", rng_key)
    checks.on_host("unbiased_expectation", rng_key, params, clamped, init)
    checks.flag("unbiased_expectation: independent_starts", independent_starts)
    asked = asked_for("unbiased_expectation", k, m, lag, max_sweeps, unmet)
    num_pairs = checks.count("unbiased_expectation: num_pairs", num_pairs)
    num_slots = checks.optional_count("unbiased_expectation: num_slots", num_slots)
    if isinstance(coupling, Tempered):
        graph, params, fn, coupling, init, clamped = coupling.replicate(graph, params, fn, init, clamped)
    with sharding.over("unbiased_expectation: mesh", mesh):
        graph.check(params)
        target = Target(graph, sharding.place(params), as_clamped(graph.families, clamped))
        if not target.free:
            raise StateError("every block is clamped: there is nothing to sample")
        own, moves = random.key_pair(rng_key), resolve_moves(graph, coupling, target.clamped)
        check_params(target, moves)
        target = with_pool("unbiased_expectation", target, moves, pool, random.fold_in(own, 2))
        begin = lambda second, key: _starts(target, init, random.fold_in(own, 0, second), num_pairs, key)
        x = begin(1, rng_key)
        y = begin(2, jax.random.fold_in(rng_key, 2)) if independent_starts else None
        shapes = tuple((b, family.shape, str(family.dtype)) for b, family in graph.families.items())
        window, sums = asked.window(), Function(fn, shapes)
        check_function("unbiased_expectation: fn", fn, sums.state())
        sums = sums.in_blocks(num_pairs) if unmet == "raise" else sums
        made = run_pairs(target, moves, sums, num_slots, x, y, random.fold_in(own, 1, 1), window)
        estimate = estimate_from(made, asked, sums)
    if target.pool is not None:
        if estimate.acceptance < FEW:
            warnings.warn(few_accepted("unbiased_expectation", estimate.acceptance), stacklevel=2)
    elif estimate.acceptance < 1 and not (estimate.meeting_time > lag).any():
        warnings.warn(
            f"all {num_pairs} pairs met at once, so no correction was seen (P(tau > {lag}) is at most "
            f"{estimate.late_upper:.2g}) at an acceptance of {estimate.acceptance:.2g}: the estimate is "
            f"unbiased in name, and is what {lag} Metropolis steps make of the starts",
            stacklevel=2,
        )
    return estimate


#: Acceptance of proposals from a pool below which they hardly help.
FEW = 0.01


def few_accepted(who: str, acceptance: float) -> str:
    """What an acceptance below :data:`FEW` means, in words."""
    return (
        f"{who}: {acceptance:.2g} of the proposals from the pool were accepted, so pairs meet by the layers' "
        "moves as they would without it, at a higher price; the estimate is unbiased all the same. Give a "
        "pool of more states, or of states more like the model's, or coupling=None"
    )


def _starts(target: Target, init: Init, key: Array, num_pairs: int, rng_key: Array) -> Fresh:
    """One start a pair, checked, to be made when the pair is to run."""
    given, held, kind = init, target.given, "uniform"
    if isinstance(init, str):
        kind = checks.choice("init", init, STARTS, also="states, a function of a key or None")
        given = None
    if callable(init):
        checks.function("init", init, "a jax key", arguments=1)
        given = jax.vmap(init)(jax.random.split(jax.random.fold_in(rng_key, 1), num_pairs))
    if given is not None and not isinstance(given, Mapping):
        raise StateError(f"init gives a dict of blocks, not {checks.tell(given)}")
    rows, batch = as_rows(target.graph.families, {} if given is None else given)
    clash = sorted(set(rows) & set(held.whole))
    if clash:
        raise StateError(f"block {clash[0]!r} is clamped and in init: give it once")
    for axes, name in ((batch, "starts"), (held.batch, "clamped blocks")):
        if axes not in ((), (num_pairs,)):
            raise StateError(f"{name} have leading axes {axes}, expected none or ({num_pairs},), one a pair")
    if held.keep and held.batch:
        raise StateError("observed units are the same in all pairs: give Observed without leading axes")
    return Fresh(random.fold_in(key, np.arange(num_pairs)), rows, kind)


def check_max_sweeps(name: str, value: object, lag: int) -> int | None:
    """A limit on the sweeps of the leading chain, or None for no limit.

    :raises ArgumentError: for a limit at which no pair could have met.
    """
    made = checks.optional_count(name, value)
    if made is not None and made <= lag:
        raise ArgumentError(
            f"{name} is more than the lag, {lag}, or None for no limit; got {made}: the leading chain has "
            f"made {lag} sweeps when a pair's first coupled one begins"
        )
    return made


class Asked(NamedTuple):
    """What an estimate was asked for."""

    k: int
    m: int
    lag: int
    max_sweeps: int | None
    unmet: str

    def window(self) -> Window:
        """Which states of a path count, for the engine."""
        numbers = (self.k, self.m, self.lag, self.max_sweeps or 0)
        return Window(*(jnp.asarray(n, jnp.int32) for n in numbers))


def asked_for(who: str, k: int, m: int | None, lag: int, max_sweeps: int | None, unmet: str) -> Asked:
    """The numbers of an estimate, checked; see :func:`unbiased_expectation`.

    :raises ArgumentError: for one that is out of range.
    """
    k = checks.count(f"{who}: k", k, least=0)
    m = k if m is None else checks.count(f"{who}: m", m, least=k)
    lag = checks.count(f"{who}: lag", lag)
    limit = check_max_sweeps(f"{who}: max_sweeps", max_sweeps, lag)
    return Asked(k, m, lag, limit, checks.choice(f"{who}: unmet", unmet, ("raise", "drop")))


def estimate_from(outcome: Outcome, asked: Asked, sums: Function) -> UnbiasedEstimate:
    """The mean over the pairs that met, and what became of the others.

    :param sums: what the outcome's total is of: a pair or a block of them a row, whose spread is the error.
    :raises UnmetError: when pairs are unmet and ``asked.unmet`` is "raise".
    """
    tau = np.asarray(outcome.meeting_time)
    met = tau >= 0
    missing = int((~met).sum())
    if missing:
        told = f"{missing} of {len(tau)} pairs had not met{_told_broken(int(outcome.broken))}"
        if asked.unmet == "raise" or not met.any():
            raise UnmetError(
                f"{told}: raise max_sweeps (None is no limit), take a larger lag or another coupling, or "
                'pass unmet="drop" to leave them out, which is biased'
            )
        warnings.warn(f"{told} and were dropped: the estimate is biased", stacklevel=4)
    pairs, count = sums.pairs(met), int(met.sum())
    used = int((pairs > 0).sum())
    others = count * (used - 1) / used if used > 1 else math.nan  # of one alone no error is known
    value, spread = _average(outcome.total, pairs, asked.m - asked.k + 1, count, others)
    time = np.where(met, tau, np.inf)
    cost = np.maximum(asked.m, time) + time - asked.lag
    acceptance = math.nan if outcome.acceptance is None else float(outcome.acceptance)
    return UnbiasedEstimate(
        value, spread, time, met, cost, *asked[:4], missing, float(outcome.trials), acceptance
    )


def _average(total: Any, pairs: np.ndarray, width: int, count: int, others: float) -> tuple[Any, Any]:
    """The mean and its standard error, on the host in float64.

    :param total: sums over ``width`` states, of as many pairs a row as ``pairs`` says, ``count`` in all.
    :param others: what the sum of squares is to be divided by, for the variance of the mean.
    """
    rows = np.flatnonzero(pairs)
    dtypes = jax.tree.map(lambda h: h.dtype, total)
    each = jax.tree.map(lambda h: np.asarray(h, float)[rows] / width, sharding.to_host(total))

    def error(h: np.ndarray, mean: np.ndarray) -> np.ndarray:
        size = pairs[rows].reshape(-1, *(1,) * (h.ndim - 1))
        return np.sqrt(((h - size * mean) ** 2).sum(0) / count / others)

    with np.errstate(all="ignore"):  # a function's values may be infinite
        value = jax.tree.map(lambda h: h.sum(0) / count, each)
        spread = jax.tree.map(error, each, value)
    narrow = lambda tree: jax.tree.map(lambda a, dtype: jax.device_put(a.astype(dtype)), tree, dtypes)
    return narrow(value), narrow(spread)


def _told_broken(number: int) -> str:
    """Why pairs were stopped before any limit of sweeps, in words."""
    if not number:
        return ""
    return (
        f" ({number} of them because a draw could not be made: params are outside a family's domain or not "
        f"finite, or conditionals differ by less than float32 can tell, so that a draw took "
        f"{MOST_TRIALS} trials, or 1024 for each of max_sweeps)"
    )
