# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased contrastive divergence."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp import bits
from ebmpp.accumulators import EnergyGradient
from ebmpp.engine import DEFAULT_SLOTS, Outcome, Window, run_pairs
from ebmpp.estimators.base import Batch, Estimate, Params, Rows
from ebmpp.estimators.phases import sample_latents, signed_gradient, tractable_posterior
from ebmpp.plan import resolve_moves

if TYPE_CHECKING:
    from ebmpp.graph import FactorGraph


@dataclasses.dataclass(frozen=True)
class UCD:
    """Unbiased contrastive divergence: pairs of chains from the data rows, run until they meet.

    The negative phase is H_{k:m} of the energy's gradient over coupled pairs, and its expectation is the
    model's own. Its variance depends on k and the lag, so by default both follow a smoothed quantile of
    the times to meet in the steps *before*, which keeps the gradient unbiased given the past and its
    variance held (with k = lag = 1 single steps with meeting times in the hundreds can wreck a model).

    The positive phase is exact where the latents given the visibles are one layer; elsewhere a second
    set of coupled pairs runs on the posterior, and is unbiased too.

    :param num_pairs: pairs a step; the batch's rows are reused in turn. Default: one a row.
    :param k: first sweep that counts. Default: adaptive.
    :param m: last sweep that counts, at least k; default k. With an adaptive k: how many more sweeps.
    :param lag: sweeps that the leading chain is ahead. Default: adaptive with k; 1 where only k is given.
    :param coupling: see :func:`ebmpp.plan.resolve_moves`.
    :param max_sweeps: stop a pair after so many sweeps. The default, no limit, is unbiased; a limit makes
        training stop with an error when a pair is unmet, unless ``allow_unmet``.
    :param allow_unmet: go on with truncated pairs. **This biases the gradient**; the history counts them.
    :param quantile: which quantile of the times to meet the adaptive k and lag follow.
    :param smoothing: weight of the past in that quantile, in [0, 1).
    :param num_slots: pairs that run at once; only speed depends on it.
    :raises ValueError: for numbers out of range.

    **References**

    1. Qiu, Zhang, Wang (2020), *Unbiased contrastive divergence*, Algorithms 2 and 3.
    2. Jacob, O'Leary, Atchade (2020); Biswas, Jacob, Vanetti (2019) for lags above 1.

    **Example**

    >>> from ebmpp import UCD
    >>> UCD(k=1, lag=1).adaptive
    False
    """

    num_pairs: int | None = None
    k: int | None = None
    m: int | None = None
    lag: int | None = None
    coupling: str | tuple[str, ...] | None = None
    max_sweeps: int | None = None
    allow_unmet: bool = False
    quantile: float = 0.95
    smoothing: float = 0.9
    num_slots: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_pairs", 1), ("k", 0), ("m", 0), ("lag", 1), ("max_sweeps", 1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise ValueError(f"UCD: {name} is an int of at least {least}, not {value!r}")
        if self.k is not None and self.m is not None and self.m < self.k:
            raise ValueError(f"UCD: m is at least k; got k={self.k}, m={self.m}")
        if not 0 < self.quantile < 1 or not 0 <= self.smoothing < 1:
            raise ValueError("UCD: quantile is in (0, 1) and smoothing in [0, 1)")
        if self.coupling is not None and not isinstance(self.coupling, str):
            object.__setattr__(self, "coupling", tuple(self.coupling))

    @property
    def adaptive(self) -> bool:
        """Whether k and the lag follow past meeting times."""
        return self.k is None

    def init(self, graph: "FactorGraph", params: Params, data: Rows, batch: int, pair: Array) -> dict:
        """The smoothed time to meet of each phase, 1 at first."""
        resolve_moves(graph, self.coupling)
        phases = ("negative",) if tractable_posterior(graph) else ("negative", "positive")
        return {phase: jnp.ones(()) for phase in phases}

    def window(self, time_to_meet: Array) -> Window:
        """k, m, lag and the limit, as arrays."""
        limit = self.max_sweeps or 0
        if self.adaptive:
            follow = jnp.maximum(1, jnp.round(time_to_meet)).astype(jnp.int32)
            k, extra = follow, self.m or 0
            m, lag = k + extra, follow if self.lag is None else self.lag
        else:
            k, lag = self.k, self.lag or 1
            m = k if self.m is None else self.m
        return Window(*(jnp.asarray(n, jnp.int32) for n in (k, m, lag, limit)))

    def estimate(
        self, graph: "FactorGraph", params: Params, state: dict, batch: Batch, pair: Array
    ) -> Estimate:
        """Positive minus negative phase, and the meeting times."""
        pairs = self.num_pairs or len(batch.weights)
        turn = jnp.arange(pairs) % len(batch.weights)
        tiled = {b: jnp.take(v, turn, axis=0) for b, v in batch.rows.items()}
        equal = jnp.broadcast_to(batch.weights.sum() / pairs, pairs)
        negative, outcome, window = self._phase(graph, params, tiled, equal, state["negative"], pair, ())
        state = {**state, "negative": self._follow(state["negative"], outcome, window)}
        metrics = _metrics(outcome, window)
        unmet = metrics["num_unmet"]
        if tractable_posterior(graph):
            positive = signed_gradient(graph, params, batch.rows, batch.weights)
        else:
            held, other = tuple(graph.visible), bits.fold_in(pair, 7)
            positive, outcome, window = self._phase(
                graph, params, batch.rows, batch.weights, state["positive"], other, held
            )
            state["positive"] = self._follow(state["positive"], outcome, window)
            metrics |= {f"posterior_{name}": v for name, v in _metrics(outcome, window).items()}
            unmet = unmet + metrics["posterior_num_unmet"]
        gradient = jax.tree.map(jnp.subtract, positive, negative)
        if not self.allow_unmet:  # an unmet pair must not pass: training stops on what is not finite
            gradient = jax.tree.map(lambda g: jnp.where(unmet > 0, jnp.nan, g), gradient)
        return Estimate(gradient, state, metrics)

    def _phase(
        self,
        graph: "FactorGraph",
        params: Params,
        v: Rows,
        weights: Array,
        time_to_meet: Array,
        pair: Array,
        clamped: tuple[str, ...],
    ) -> tuple[Params, Outcome, Window]:
        window = self.window(time_to_meet)
        start = sample_latents(graph, params, v, bits.fold_in(pair, 0))
        moves = resolve_moves(graph, None if clamped else self.coupling, clamped)
        slots = self.num_slots or DEFAULT_SLOTS
        args = (graph, moves, EnergyGradient(), slots, params, start, start)
        outcome = run_pairs(*args, bits.fold_in(pair, 1), window, job_weights=weights)
        count = window.m - window.k + 1
        return jax.tree.map(lambda g: g / count, outcome.total), outcome, window

    def _follow(self, before: Array, outcome: Outcome, window: Window) -> Array:
        """The next smoothed time to meet; an unmet pair counts as the limit it was stopped at."""
        met = outcome.meeting_time >= 0
        times = jnp.where(met, outcome.meeting_time, window.max_sweeps) - window.lag
        now = jnp.quantile(times.astype(jnp.result_type(float)), self.quantile)
        return self.smoothing * before + (1 - self.smoothing) * now


def _metrics(outcome: Outcome, window: Window) -> dict[str, Any]:
    met = outcome.meeting_time >= 0
    tau = jnp.where(met, outcome.meeting_time, 0)
    return {
        "meeting_time_mean": tau.sum() / jnp.maximum(met.sum(), 1),
        "meeting_time_max": tau.max(),
        "num_unmet": (~met).sum(),
        "lag": window.lag,
        "k": window.k,
        "trials": outcome.trials,
    }
