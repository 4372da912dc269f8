# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased gradients from coupled pairs of chains."""

from collections.abc import Callable, Collection, Mapping
import dataclasses
from typing import NamedTuple

from jaxtyping import PyTree
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import (
    Key,
    Keys,
    Params,
    PerRow,
    Rows,
    Scalar,
    checks,
    num_rows,
    random,
    select,
)
from ebmpp.coupling import accumulators, engine, expectation, overlap, slots
from ebmpp.estimators import phases
from ebmpp.estimators.base import (
    Batch,
    Columns,
    Estimate,
    Estimator,
    PairMetrics,
    total_unmet,
)
from ebmpp.estimators.lengths import Length, Quantile, diagnose_late_pairs
from ebmpp.estimators.phases import Phase
from ebmpp.graph import FactorGraph
from ebmpp.graph.states import as_rows
from ebmpp.moves import Target, gibbs_sweep, mixture, search
from ebmpp.moves.couplings import where_states
from ebmpp.moves.mixture import has_costly_sweeps
from ebmpp.moves.move import Move, refuse_interacting
from ebmpp.moves.sweeps import as_coupling, mixture_of, resolve_moves

#: Where pairs start: a name, or a function of a jax key to some or all blocks.
PairInit = str | Callable[[Array], Mapping[str, Array]]
# chains that are compared with their starts, where there is a pair per row
_NUM_COMPARED = 100


class AdaptiveLength(NamedTuple):
    """Adaptive length of a step's pairs, and the number of steps including this one."""

    length: Scalar
    steps: Array


class UCDState(NamedTuple):
    """State of :class:`UCD`.

    :param negative: adaptive length of the next step's pairs.
    :param positive: adaptive length of the pairs on the posterior, if there are any.
    :param chains: persistent chains, with ``init="persistent"``; else empty.
    :param seen: number of steps whose meeting times entered the lengths.
    :param pool: states that mixture proposals come from; empty without these.
    :param gibbs: adaptive length of Gibbs pairs, to return to from mixture proposals; 0
        if there were none.
    """

    negative: Scalar
    positive: Scalar
    chains: Rows
    seen: Array
    pool: Rows
    gibbs: Scalar

    @property
    def model_chains(self) -> Rows:
        """Persistent chains."""
        return self.chains


class UCDMetrics(PairMetrics):
    """Metrics of coupled chains.

    :param posterior: of the pairs on the posterior, if there are any.
    :param cost: sweeps of all chains of the step, in units of a Gibbs sweep.
    """

    posterior: PairMetrics | None
    cost: Array


@dataclasses.dataclass(frozen=True, repr=False)
class CoupledPairs(Estimator):
    """Settings of coupled pairs, and the phases that they make.

    :class:`ebmpp.UCD` documents the arguments.
    """

    num_pairs: int | None = None
    k: int | None = None
    m: int | None = None
    lag: int | None = None
    coupling: str | tuple[str, ...] | None = None
    max_sweeps: int | None = None
    allow_unmet: bool = False
    length: Length = Quantile()
    num_slots: int | None = None
    init: PairInit = "data"
    marginalize: str | tuple[str, ...] = ()
    pool: str = "data"
    pool_size: int = 300
    takes_missing = True

    def __post_init__(self) -> None:
        checks.set_counts(self, "num_pairs", "lag", "num_slots", optional=True)
        checks.set_counts(self, "k", least=0, optional=True)
        checks.set_counts(self, "m", least=self.k or 0, optional=True)
        checks.set_counts(self, "pool_size")
        checks.choice("UCD: pool", self.pool, ("data", "persistent"))
        checks.flag("UCD: allow_unmet", self.allow_unmet)
        checks.optional_count("UCD: max_sweeps", self.max_sweeps, (self.lag or 1) + 1)
        if not callable(self.init):
            names = ("data", "persistent", "uniform", "local_mode")
            checks.choice("UCD: init", self.init, names, also="a function of a key")
        checks.instance(
            "UCD: length", self.length, Length, "a rule such as Quantile(0.95)"
        )
        self.length.check(self.k, self.m, self.lag)
        coupling = as_coupling("UCD: coupling", self.coupling)
        object.__setattr__(self, "coupling", coupling)
        if self.marginalize != "layers":
            blocks = self.marginalize
            blocks = (blocks,) if isinstance(blocks, str) else blocks
            blocks = tuple(checks.sequence("UCD: marginalize", blocks, "names"))
            object.__setattr__(self, "marginalize", blocks)

    def __repr__(self) -> str:
        changed = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                changed.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(changed)})"

    def window(self, length: Scalar) -> engine.Window:
        """Return k, m, lag and the limit as arrays, for an adaptive length."""
        limit = self.max_sweeps or 0
        if self.k is None:
            k = jnp.maximum(1, jnp.round(length)).astype(jnp.int32)
            lag = k if self.lag is None else self.lag
            # any lag is unbiased, but at the limit no pair could have met
            if self.lag is None and limit:
                lag = jnp.minimum(lag, limit - 1)
            m = k + (lag if self.m is None else self.m)
        else:
            k = self.k
            lag = self.lag or 1
            m = k if self.m is None else self.m
        return engine.Window(*(jnp.asarray(n, jnp.int32) for n in (k, m, lag, limit)))

    def posterior_phase(
        self,
        graph: FactorGraph,
        params: Params,
        past: AdaptiveLength,
        batch: Batch,
        key: Key,
    ) -> Phase:
        """Return the positive phase.

        It is exact, or by coupled pairs on the posterior where that is intractable.
        """
        if phases.tractable_posterior(graph) and not batch.known:
            gradient = phases.signed_gradient(graph, params, batch.rows, batch.weights)
            return Phase(gradient, past.length, None)
        target = phases.posterior_of(graph, params, batch)
        start_key = random.fold_in(key, 0)
        if callable(self.init) or self.init in ("data", "persistent"):
            start = phases.sample_latents(graph, params, batch, start_key)
        else:
            start = self._independent_start(target, target.num_rows, start_key)
        is_common = isinstance(self.coupling, str) or callable(self.coupling)
        fits = is_common and self.coupling != "mixture"
        moves = resolve_moves(graph, self.coupling if fits else None, target.clamped)
        run_key = random.fold_in(key, 1)
        return self.run_phase(target, start, moves, batch.weights, past, run_key)

    def _independent_start(self, target: Target, rows: int, key: Key) -> Rows:
        """Return starts that do not depend on the data, except for clamped units."""
        keys = phases.row_keys(key, rows)
        values = {}
        if not isinstance(self.init, str):
            draws = jax.vmap(self.init)(random.as_key(keys))
            values, _ = as_rows(target.graph.families, draws)
        kind = "local_mode" if self.init == "local_mode" else "uniform"
        return search.initial_states(target, keys, values, kind)

    def run_phase(
        self,
        target: Target,
        start: Rows,
        moves: tuple[Move, ...],
        weights: PerRow,
        past: AdaptiveLength,
        key: Key,
        follower: Rows | None = None,
    ) -> Phase:
        """Run pairs, and choose the next length; an unmet pair counts with its limit.

        :param follower: starts of the following chains; None for ``start``.
        """
        window = self.window(past.length)
        free = {b for move in moves for b in move.blocks if b not in target.keep}
        accumulator = self.accumulator(target.graph, free, bool(target.keep))
        outcome = engine.run_pairs(
            target,
            moves,
            accumulator,
            self.num_slots,
            start,
            follower,
            key,
            window,
            weights,
        )
        num_states = window.m - window.k + 1
        gradient = jax.tree.map(
            lambda g: g / jnp.asarray(num_states, g.dtype), outcome.total
        )
        met = outcome.meeting_time >= 0
        times = jnp.where(met, outcome.meeting_time, window.max_sweeps) - window.lag
        length = self.length.update(*past, times, self.m is None)
        return Phase(gradient, length, phases.pair_metrics(outcome, window))

    def accumulator(
        self, graph: FactorGraph, free: Collection[str], has_missing: bool
    ) -> accumulators.Accumulator:
        """Return the sum of energy gradients over pairs that move the ``free`` blocks."""
        groups = (self.marginalize,)
        if self.marginalize == "layers":  # only layers that can be summed out
            layers = graph.block_layers
            groups = tuple(layer for layer in layers if layer[0] not in graph.splits)
        elif has_missing and not self.marginalize and phases.tractable_posterior(graph):
            groups = (tuple(graph.latent),)  # so that complete rows contribute no noise
        moving = (tuple(b for b in group if b in free) for group in groups)
        groups = tuple(group for group in moving if group)
        if groups:
            return accumulators.MarginalGradient(groups)
        return accumulators.EnergyGradient()


@dataclasses.dataclass(frozen=True, repr=False)
class ChainUCD(CoupledPairs):
    """Gradients by coupled pairs of chains."""

    def init_state(
        self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key
    ) -> UCDState:
        """Begin with a length of one sweep, and initial draws of persistent chains."""
        move = mixture_of(resolve_moves(graph, self.coupling))
        blocks = () if isinstance(self.marginalize, str) else self.marginalize
        checks.names("block in UCD: marginalize", blocks, graph.families)
        refuse_interacting(
            graph, blocks, 'summed out by marginalize, other than by "layers",'
        )
        chains = {}
        if self.init == "persistent":
            chains = phases.fresh_chains(graph, self.num_pairs or batch, key)
        pool = {}
        if move is not None:
            pool = phases.init_pool(graph, params, data, self.pool_size, key)
        return UCDState(
            negative=jnp.ones(()),
            positive=jnp.ones(()),
            chains=chains,
            seen=jnp.int32(0),
            pool=pool,
            gibbs=jnp.zeros(()),
        )

    def adopt(self, before: PyTree, fresh: UCDState) -> UCDState:
        """Continue the chains of another estimator, and the lengths of another UCD.

        A persistent pool continues too; a pool of data rows is chosen from the stage's
        data.
        """
        chains = phases.carried_chains(before)
        pool = {}
        if isinstance(before, UCDState):
            fresh = before._replace(chains=fresh.chains, pool=fresh.pool)
            pool = before.pool
        if self.init == "persistent":
            fresh = fresh._replace(chains=phases.cycle_chains(chains, fresh.chains))
        if self.pool == "persistent":
            fresh = fresh._replace(pool=phases.cycle_chains(pool or chains, fresh.pool))
        return fresh

    def diagnose(self, history: Columns) -> str | None:
        """Report late pairs that make all corrections, and pools that are of no use.

        These are pools whose proposals are hardly ever accepted.
        """
        if self.k is None and self.lag is None:
            message = diagnose_late_pairs(history)
            if message is not None:
                return f"UCD: {message}"
        moves = self.coupling if isinstance(self.coupling, tuple) else (self.coupling,)
        if self.coupling != "mixture" and mixture_of(moves) is None:
            return None
        accepted = history["acceptance"]
        mean = float(accepted[len(accepted) // 2 :].mean()) if len(accepted) else 1.0
        if mean < expectation.MIN_ACCEPTANCE:
            return expectation.low_acceptance("UCD", mean)
        return None

    def diagnose_chains(
        self, graph: FactorGraph, params: Params, data: Rows, history: Columns, key: Key
    ) -> str | None:
        """Report chains that resemble their starts after long runs.

        These take twice the longest meeting time of the last steps. Half of the steps
        count, and the test takes at most a tenth of their sweeps.
        """
        moves = resolve_moves(graph, self.coupling)
        steps = len(history["sweeps"])
        if not steps or callable(self.init) or mixture_of(moves) is not None:
            return None
        if history["num_unmet"].any():
            return None
        count = min(num_rows(data), self.num_pairs or _NUM_COMPARED)
        kind = "local_mode" if self.init == "local_mode" else "uniform"
        init = {}
        if self.init in ("data", "persistent"):
            init = {b: v[:count] for b, v in data.items()}
        longest = int(history["meeting_time_max"][steps // 2 :].max())
        total = float(history["sweeps"].sum()) * count / 100
        starts = slots.Fresh(random.fold_in(key, 0, np.arange(count)), init, kind)
        target = Target(graph, params)
        words = random.fold_in(key, 1)
        z, *_ = overlap.run_leading_chains(target, moves, starts, words, longest, total)
        return overlap.warning_of("UCD", z) if z > overlap.THRESHOLD else None

    def estimate(
        self,
        graph: FactorGraph,
        params: Params,
        state: UCDState,
        batch: Batch,
        key: Key,
    ) -> Estimate:
        """Return the positive minus the negative phase, and the meeting times."""
        # the pool of this step does not depend on its pairs
        target = Target(graph, params)
        moves = resolve_moves(graph, self.coupling)
        pool = self._next_pool(target, moves, state.pool, batch, key)
        state = state._replace(seen=state.seen + 1, pool=pool)
        negative = self._negative_phase(target, moves, state, batch, key)
        chains = state.chains
        if chains:
            chains_key = random.fold_in(key, 3)
            chains = phases.sweep_pool(target, chains, gibbs_sweep(graph), chains_key)
        past = AdaptiveLength(state.positive, state.seen)
        positive = self.posterior_phase(
            graph, params, past, batch, random.fold_in(key, 7)
        )
        rows = batch.num_rows
        pairs = self.num_pairs or rows
        per_row = 0.0 if positive.metrics is None else positive.metrics.sweeps
        pair_metrics = negative.metrics
        assert pair_metrics is not None  # pairs have run
        sweeps = pair_metrics.sweeps
        metrics = UCDMetrics(
            **pair_metrics,
            posterior=positive.metrics,
            cost=_sweep_cost(graph, moves) * pairs * sweeps + rows * per_row,
        )
        gradient = jax.tree.map(jnp.subtract, positive.gradient, negative.gradient)
        if not self.allow_unmet:  # training stops at a gradient that is not finite
            is_unmet = total_unmet(metrics) > 0
            gradient = jax.tree.map(lambda g: jnp.where(is_unmet, jnp.nan, g), gradient)
        state = state._replace(
            negative=negative.length, positive=positive.length, chains=chains
        )
        return Estimate(gradient, state, metrics, sweeps * pairs / rows + per_row)

    def _next_pool(
        self,
        target: Target,
        moves: tuple[Move, ...],
        pool: Rows,
        batch: Batch,
        key: Key,
    ) -> Rows:
        """Move the pool of mixture proposals by one sweep, if there is one."""
        if not pool:
            return pool
        if self.pool == "data" and batch.known:
            raise checks.state_error(
                "blocks",
                'without missing entries where UCD has pool="data"',
                sorted(batch.known),
                hint='Give pool="persistent".',
            )
        graph = target.graph
        clamped = graph.visible if self.pool == "data" else ()
        sweep = gibbs_sweep(graph, clamped)
        proposal = mixture_of(moves)
        assert proposal is not None  # there is a pool
        if not clamped and proposal.is_informed(graph):
            sweep = tuple(move for move in moves if move is not proposal)
        key = random.fold_in(key, 5)
        return phases.sweep_pool(target, pool, sweep, key)

    def _negative_phase(
        self,
        target: Target,
        moves: tuple[Move, ...],
        state: UCDState,
        batch: Batch,
        key: Key,
    ) -> Phase:
        graph = target.graph
        pairs = self.num_pairs or batch.num_rows
        move = mixture_of(moves)
        if move is not None:
            pool_key = random.fold_in(key, 6)
            target = phases.attach_pool(target, move, state.pool, pool_key)
        start_key = random.fold_in(key, 0)
        if self.init == "persistent":
            start = state.chains
        elif self.init == "data":
            index = jnp.arange(pairs) % batch.num_rows
            tiled = Batch.uniform(
                phases.take_rows(batch.rows, index),
                phases.take_rows(batch.known, index),
            )
            start = phases.sample_latents(graph, target.params, tiled, start_key)
        else:
            start = self._independent_start(target, pairs, start_key)
        weights = jnp.broadcast_to(batch.weights.sum() / pairs, pairs)
        past = AdaptiveLength(state.negative, state.seen)
        run_key = random.fold_in(key, 1)
        follower = None
        largest = None
        if move is not None:
            start_keys = phases.row_keys(random.fold_in(key, 8), pairs)
            largest = mixture.largest_weight(target, move, start, start_keys)
            if move.is_informed(graph):
                start, follower = _opposite_starts(target, start, start_keys)
        phase = self.run_phase(target, start, moves, weights, past, run_key, follower)
        assert phase.metrics is not None  # pairs have run
        metrics = dataclasses.replace(phase.metrics, largest_weight=largest)
        return phase._replace(metrics=metrics)

    def fast_compile(self, graph: FactorGraph) -> bool:
        moves = resolve_moves(graph, self.coupling)
        accumulator = self.accumulator(graph, graph.families, False)
        return engine.uses_fast_compile(graph, moves, accumulator)


def _opposite_starts(target: Target, start: Rows, keys: Keys) -> tuple[Rows, Rows]:
    """Return starts of both chains: one of a pair is ``start``, the other has independent units.

    Which one is random, so both have one distribution. A mode that is neither in the
    pool nor in ``start`` then shows in meeting times.
    """
    fresh = search.initial_states(target, random.fold_in(keys, 1))
    is_first = random.uniform(random.words(keys, 1)[:, 0]) < 0.5
    fresh = select(fresh, start)
    swapped = where_states(is_first, start, fresh)
    return swapped, where_states(is_first, fresh, start)


def _sweep_cost(graph: FactorGraph, moves: tuple[Move, ...]) -> float:
    """Return the cost of a sweep in Gibbs sweeps, by the figures of Mixture.

    That of an informed mixture is the share of multiplications, of which an evaluation
    of the energy takes about one per param.
    """
    move = mixture_of(moves)
    if move is None:
        return 1.0
    if not move.is_informed(graph):
        num_summed = sum(graph.sizes(move.marginalize))
        return 1.5 + 0.4 * move.components / num_summed
    evaluation = sum(leaf.size for leaf in jax.tree.leaves(graph.param_shapes))
    proposal = move.tries * (evaluation + move.components * graph.num_units)
    if has_costly_sweeps(graph):
        return proposal / (graph.num_units * evaluation)
    return 1.0 + proposal / evaluation
