# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased estimates of expectations under a model, from coupled pairs of chains."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple
import warnings

import numpy as np
from scipy import stats

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp import bits
from ebmpp.accumulators import Function
from ebmpp.engine import DEFAULT_SLOTS, Outcome, Window, run_pairs
from ebmpp.errors import StateError, UnmetError
from ebmpp.moves import Move
from ebmpp.plan import check_params, resolve_moves
from ebmpp.search import near_modes
from ebmpp.states import Given, Observed, as_given, as_rows
from ebmpp.sweeps import initial_rows, schedule

if TYPE_CHECKING:
    from ebmpp.graph import FactorGraph

Init = Mapping[str, Array] | Callable[[Array], Mapping[str, Array]] | str | None
Coupling = str | Sequence[str] | Move | Sequence[Move] | None


@dataclasses.dataclass(frozen=True)
class Estimate:
    """An unbiased estimate; see :func:`unbiased_expectation`."""

    value: Any
    """Mean over the pairs, a pytree shaped like the function's value."""
    standard_error: Any
    """Of ``value``: the pairs are independent, so no autocorrelation enters."""
    meeting_time: np.ndarray
    """First t with X_t = Y_{t - lag}, shape ``(num_pairs,)``; inf where unmet."""
    met: np.ndarray
    """Shape ``(num_pairs,)``."""
    cost: np.ndarray
    """Sweeps of both chains, shape ``(num_pairs,)``; inf where unmet."""
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
        return 1.0 if count == pairs else float(stats.beta.ppf(0.95, count + 1, pairs - count))

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
            f"Estimate({len(self.met)} pairs, {self.num_unmet} unmet, k={self.k}, m={self.m}, "
            f"lag={self.lag}, mean meeting time {mean:.4g}{told})"
        )


def unbiased_expectation(
    graph: "FactorGraph",
    params: Any,
    fn: Callable[[dict[str, Array]], Any],
    *,
    rng_key: Array,
    num_pairs: int = 1000,
    k: int = 1,
    m: int | None = None,
    lag: int = 1,
    coupling: Coupling = None,
    init: Init = None,
    independent_starts: bool = False,
    max_sweeps: int | None = None,
    unmet: str = "raise",
    num_slots: int = DEFAULT_SLOTS,
    **clamped: Array | Observed,
) -> Estimate:
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
    :param coupling: a kind for every layer, or one a layer, or "metropolis", or moves: see
        :func:`ebmpp.plan.resolve_moves`. With Metropolis moves the estimate tells their acceptance, and
        warns when every pair met at once: then nothing was corrected, and it is unbiased in name only.
    :param init: starts: values of some or all blocks (shape ``(*shape,)``, or ``(num_pairs, *shape)``: rows
        of data, say), a function of a jax key to such a dict for one pair, "local_mode" for one Gibbs sweep
        from a local mode found from uniform draws, or None; what is not given is drawn uniformly.
    :param independent_starts: draw what ``init`` leaves to chance anew for the following chain. By default
        both chains of a pair start at one state, and so in one mode, where they soon meet: what is estimated
        is the same, and that chains do not leave a mode shows in a few very long times only. Apart, it shows
        in many, which is what one wants of a report on mixing, and costs more.
    :param max_sweeps: stop an unmet pair when its leading chain has made so many sweeps; None: no limit.
    :param unmet: what to do about pairs stopped by ``max_sweeps``: "raise", or "drop" them from the mean,
        with a warning, because **that is biased** (pairs that meet early are not like the others).
    :param num_slots: pairs that run at once; only speed depends on it.
    :param clamped: blocks held at values, without a batch axis or one value a pair: expectations under the
        posterior. An :class:`~ebmpp.Observed` block (without a batch axis) is held at its known units.
    :return: an :class:`Estimate`.
    :raises UnmetError: when pairs are unmet and ``unmet`` is "raise"; the error says how many.
    :raises ValueError: for numbers out of range.
    :raises StateError: for states or clamped values that do not fit the graph.
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
    m = k if m is None else m
    check_numbers(k=(k, 0), m=(m, k), lag=(lag, 1), num_pairs=(num_pairs, 1), max_sweeps=(max_sweeps or 1, 1))
    if unmet not in ("raise", "drop"):
        raise ValueError(f'unmet is "raise" or "drop", not {unmet!r}')
    graph.check(params)
    given = as_given(graph.families, clamped)
    if not schedule(graph, given.whole):
        raise StateError("every block is clamped: there is nothing to sample")
    moves = resolve_moves(graph, coupling, given.whole)
    check_params(graph, params, moves)
    pair = bits.key_pair(rng_key)
    begin = lambda second, key: _starts(  # noqa: E731
        graph, params, init, given, bits.fold_in(pair, 0, second), num_pairs, key
    )
    x = begin(1, rng_key)
    y = begin(2, jax.random.fold_in(rng_key, 2)) if independent_starts else x
    shapes = tuple((b, v.shape[1:], str(v.dtype)) for b, v in x.items())
    window = Window(*(jnp.asarray(n, jnp.int32) for n in (k, m, lag, max_sweeps or 0)))
    jobs = bits.fold_in(pair, 1, 1)
    made = run_pairs(graph, moves, Function(fn, shapes), num_slots, params, x, y, jobs, window, given.keep)
    estimate = estimate_from(made, Asked(k, m, lag, max_sweeps, unmet))
    if estimate.acceptance < 1 and not (estimate.meeting_time > lag).any():
        warnings.warn(
            f"all {num_pairs} pairs met at once, so no correction was seen (P(tau > {lag}) is at most "
            f"{estimate.late_upper:.2g}) at an acceptance of {estimate.acceptance:.2g}: the estimate is "
            f"unbiased in name, and is what {lag} Metropolis steps make of the starts",
            stacklevel=2,
        )
    return estimate


_initial_rows = jax.jit(initial_rows, static_argnums=(0, 1))
_near_modes = jax.jit(near_modes, static_argnums=(0, 3))


def _starts(
    graph: "FactorGraph",
    params: Any,
    init: Init,
    held: Given,
    pair: Array,
    num_pairs: int,
    rng_key: Array,
) -> dict[str, Array]:
    """One start a pair, checked: shapes ``(num_pairs, *shape)``."""
    given = init
    if isinstance(init, str):
        if init not in ("uniform", "local_mode"):
            raise ValueError(f'init={init!r} is unknown; give "uniform", "local_mode", states or a function')
        given = None
    if callable(init):
        given = jax.vmap(init)(jax.random.split(jax.random.fold_in(rng_key, 1), num_pairs))
    clash = sorted(set(given or {}) & set(held.whole))
    if clash:
        raise StateError(f"block {clash[0]!r} is clamped and in init: give it once")
    rows, batch = as_rows(graph.families, given or {})
    for axes, name in ((batch, "starts"), (held.batch, "clamped blocks")):
        if axes not in ((), (num_pairs,)):
            raise StateError(f"{name} have leading axes {axes}, expected none or ({num_pairs},), one a pair")
    if held.keep and held.batch:
        raise StateError("observed units are the same in all pairs: give Observed without leading axes")
    pairs = bits.fold_in(pair, jnp.arange(num_pairs))
    drawn = _initial_rows(graph, tuple(graph.families), pairs)
    for b, v in (rows | held.whole).items():
        drawn[b] = jnp.broadcast_to(v, drawn[b].shape).astype(drawn[b].dtype)
    for b, known in held.keep.items():
        drawn[b] = jnp.where(known, held.partial[b], drawn[b])
    if init == "local_mode":
        return _near_modes(graph, params, drawn, schedule(graph, held.whole), pairs, held.keep)
    return drawn


def check_numbers(**numbers: tuple[int, int]) -> None:
    """:raises ValueError: for a number that is no int, or below its least."""
    for name, (value, least) in numbers.items():
        if not isinstance(value, (int, np.integer)) or value < least:
            raise ValueError(f"{name} is an int of at least {least}, not {value!r}")


class Asked(NamedTuple):
    """What an estimate was asked for."""

    k: int
    m: int
    lag: int
    max_sweeps: int | None
    unmet: str


def estimate_from(outcome: Outcome, asked: Asked) -> Estimate:
    """The mean over the pairs that met, and what became of the others.

    :raises UnmetError: when pairs are unmet and ``asked.unmet`` is "raise".
    """
    tau = np.asarray(outcome.meeting_time)
    met = tau >= 0
    missing = int((~met).sum())
    if missing:
        told = f"{missing} of {len(tau)} pairs had not met"
        if asked.unmet == "raise" or not met.any():
            raise UnmetError(
                f"{told}: raise max_sweeps (None is no limit), take a larger lag or another coupling, or "
                'pass unmet="drop" to leave them out, which is biased'
            )
        warnings.warn(f"{told} and were dropped: the estimate is biased", stacklevel=4)
    used = jnp.asarray(met)
    count = int(met.sum())

    def mean(h: Array) -> Array:
        mask = used.reshape(-1, *(1,) * (h.ndim - 1))
        return jnp.where(mask, h, 0).sum(0) / count

    each = jax.tree.map(lambda h: h / (asked.m - asked.k + 1), outcome.total)
    value = jax.tree.map(mean, each)
    spread = jax.tree.map(lambda h, v: jnp.sqrt(mean((h - v[None]) ** 2) / max(count - 1, 1)), each, value)
    time = np.where(met, tau, np.inf)
    cost = np.maximum(asked.m, time) + time - asked.lag
    acceptance = math.nan if outcome.acceptance is None else float(outcome.acceptance)
    return Estimate(value, spread, time, met, cost, *asked[:4], missing, float(outcome.trials), acceptance)
