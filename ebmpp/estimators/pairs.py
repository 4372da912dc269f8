# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased gradients from coupled pairs of chains."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import checks, random
from ebmpp.core.types import Key, Params, PerRow, Rows, Scalar
from ebmpp.coupling import accumulators, expectation, overlap, slots
from ebmpp.coupling.engine import Window, run_pairs
from ebmpp.errors import StateError
from ebmpp.estimators import phases
from ebmpp.estimators.base import Batch, Estimate, Estimator, History
from ebmpp.estimators.lengths import Length, Quantile, diagnose_late_pairs
from ebmpp.estimators.phases import Phase
from ebmpp.graph import FactorGraph
from ebmpp.graph.states import as_rows
from ebmpp.moves import Target, search
from ebmpp.moves.move import Move, refuse_interacting
from ebmpp.moves.sweeps import as_coupling, mixture_of, resolve_moves

Start = str | Callable[[Array], Mapping[str, Array]]
#: Adaptive length of a step's pairs, and the number of steps including this one.
Past = tuple[Scalar, Array]
_CHAINS = 100  # that are compared with their starts, for pairs per row


class UCDState(NamedTuple):
    """State of :class:`UCD`.

    :param negative: adaptive length of the next step's pairs.
    :param positive: adaptive length of the pairs on the posterior, if there are any.
    :param chains: persistent chains, with ``start="persistent"``; else empty.
    :param seen: number of steps whose meeting times entered the lengths.
    :param pool: states that mixture proposals come from, with ``coupling="mixture"``;
        else empty.
    :param gibbs: adaptive length of Gibbs pairs, to return to from mixture proposals; 0
        if there were none.
    """

    negative: Scalar
    positive: Scalar
    chains: Rows
    seen: Array
    pool: Rows
    gibbs: Scalar


@dataclasses.dataclass(frozen=True, repr=False)
class ChainUCD(Estimator):
    """Gradients by coupled pairs of chains; :class:`ebmpp.UCD` documents the arguments."""

    num_pairs: int | None = None
    k: int | None = None
    m: int | None = None
    lag: int | None = None
    coupling: str | tuple[str, ...] | None = None
    max_sweeps: int | None = None
    allow_unmet: bool = False
    length: Length = Quantile()
    num_slots: int | None = None
    start: Start = "data"
    marginalize: str | tuple[str, ...] = ()
    pool: str = "data"
    pool_size: int = 300
    takes_missing = True
    uses_chains = True
    """False if the negative phase is not by pairs of chains."""

    def __post_init__(self) -> None:
        checks.set_counts(self, "num_pairs", "lag", "num_slots", optional=True)
        checks.set_counts(self, "k", least=0, optional=True)
        checks.set_counts(self, "m", least=self.k or 0, optional=True)
        checks.set_counts(self, "pool_size")
        checks.choice("UCD: pool", self.pool, ("data", "persistent"))
        checks.flag("UCD: allow_unmet", self.allow_unmet)
        checks.optional_count("UCD: max_sweeps", self.max_sweeps, (self.lag or 1) + 1)
        if not callable(self.start):
            starts = "data", "persistent", "uniform", "local_mode"
            checks.choice("UCD: start", self.start, starts, also="a function of a key")
        checks.instance(
            "UCD: length", self.length, Length, "a rule such as Quantile(0.95)"
        )
        self.length.check(self.k, self.m, self.lag)
        object.__setattr__(
            self, "coupling", as_coupling("UCD: coupling", self.coupling)
        )
        if self.marginalize != "layers":
            blocks = (
                (self.marginalize,)
                if isinstance(self.marginalize, str)
                else self.marginalize
            )
            blocks = tuple(checks.sequence("UCD: marginalize", blocks, "names"))
            object.__setattr__(self, "marginalize", blocks)

    def __repr__(self) -> str:
        fields = {
            f.name: (getattr(self, f.name), f.default) for f in dataclasses.fields(self)
        }
        changed = ", ".join(
            f"{name}={value!r}"
            for name, (value, usual) in fields.items()
            if value != usual
        )
        return f"{type(self).__name__}({changed})"

    def init(
        self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key
    ) -> UCDState:
        """Begin with a length of one sweep, and initial draws of persistent chains."""
        move = mixture_of(resolve_moves(graph, self.coupling))
        blocks = () if isinstance(self.marginalize, str) else self.marginalize
        checks.names("block in UCD: marginalize", blocks, graph.families)
        refuse_interacting(
            graph, blocks, 'summed out by marginalize, other than by "layers",'
        )
        is_persistent = self.start == "persistent"
        chains = (
            phases.fresh_chains(graph, self.num_pairs or batch, key)
            if is_persistent
            else {}
        )
        pool = (
            {}
            if move is None
            else phases.init_pool(graph, params, data, self.pool_size, key)
        )
        return UCDState(
            jnp.ones(()),
            jnp.ones(()),
            chains,
            jnp.zeros((), jnp.int32),
            pool,
            jnp.zeros(()),
        )

    def adopt(self, before: Any, fresh: UCDState) -> UCDState:
        """Continue the chains of another estimator, and the lengths of another UCD.

        A persistent pool continues too; a pool of data rows is chosen from the stage's
        data.
        """
        chains = phases.carried_chains(before)
        pool = {}
        if isinstance(before, UCDState):
            fresh = before._replace(chains=fresh.chains, pool=fresh.pool)
            pool = before.pool
        if self.start == "persistent":
            fresh = fresh._replace(chains=phases.cycle_chains(chains, fresh.chains))
        if self.pool == "persistent":
            fresh = fresh._replace(pool=phases.cycle_chains(pool or chains, fresh.pool))
        return fresh

    def diagnose(self, history: History) -> str | None:
        """Report pools whose proposals are hardly ever accepted, and late pairs that make all corrections."""
        if (
            self.k is None
            and self.lag is None
            and (message := diagnose_late_pairs(history)) is not None
        ):
            return f"UCD: {message}"
        moves = self.coupling if isinstance(self.coupling, tuple) else (self.coupling,)
        if self.coupling != "mixture" and mixture_of(moves) is None:
            return None
        accepted = history["acceptance"]
        mean = float(accepted[len(accepted) // 2 :].mean()) if len(accepted) else 1.0
        return (
            expectation.low_acceptance("UCD", mean)
            if mean < expectation.MIN_ACCEPTANCE
            else None
        )

    def diagnose_chains(
        self, graph: FactorGraph, params: Params, data: Rows, history: History, key: Key
    ) -> str | None:
        """Report chains that resemble their starts after twice the longest meeting time of the last steps.

        Half of the steps count, and the test takes at most a tenth of their sweeps.
        """
        moves = resolve_moves(graph, self.coupling)
        steps = len(history["sweeps"])
        if (
            not steps
            or callable(self.start)
            or mixture_of(moves) is not None
            or history["num_unmet"].any()
        ):
            return None
        count = min(len(next(iter(data.values()))), self.num_pairs or _CHAINS)
        kind = "local_mode" if self.start == "local_mode" else "uniform"
        init = (
            {b: v[:count] for b, v in data.items()}
            if self.start in ("data", "persistent")
            else {}
        )
        longest = int(history["meeting_time_max"][steps // 2 :].max())
        total = float(history["sweeps"].sum()) * count / 100
        starts = slots.Fresh(random.fold_in(key, 0, np.arange(count)), init, kind)
        target = Target(graph, params)
        words = random.fold_in(key, 1)
        z, _ = overlap.run_leading_chains(target, moves, starts, words, longest, total)
        return overlap.warning_of("UCD", z) if z > overlap.THRESHOLD else None

    def window(self, length: Scalar) -> Window:
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
        return Window(*(jnp.asarray(n, jnp.int32) for n in (k, m, lag, limit)))

    def estimate(
        self,
        graph: FactorGraph,
        params: Params,
        state: UCDState,
        batch: Batch,
        key: Key,
    ) -> Estimate:
        """Return the positive minus the negative phase, and the meeting times."""
        pool = state.pool
        if pool:  # that of this step, which does not depend on its pairs
            if self.pool == "data" and batch.known:
                raise checks.error(
                    "blocks",
                    'without missing entries where UCD has pool="data"',
                    sorted(batch.known),
                    StateError,
                    'Give pool="persistent".',
                )
            clamped = graph.visible if self.pool == "data" else ()
            pool = phases.sweep_pool(
                graph, params, pool, clamped, random.fold_in(key, 5)
            )
        state = state._replace(seen=state.seen + 1, pool=pool)
        negative = self._negative(graph, params, state, batch, key)
        chains = state.chains and phases.sweep_pool(
            graph, params, state.chains, (), random.fold_in(key, 3)
        )
        past = (state.positive, state.seen)
        positive = self.posterior_phase(
            graph, params, past, batch, random.fold_in(key, 7)
        )
        state = state._replace(
            negative=negative.length, positive=positive.length, chains=chains
        )
        metrics = negative.metrics | positive.metrics
        gradient = jax.tree.map(jnp.subtract, positive.gradient, negative.gradient)
        if not self.allow_unmet:  # training stops at a gradient that is not finite
            unmet = metrics["num_unmet"] + metrics.get("posterior_num_unmet", 0)
            gradient = jax.tree.map(
                lambda g: jnp.where(unmet > 0, jnp.nan, g), gradient
            )
        rows = len(batch.weights)
        pairs = self.num_pairs or rows
        posterior = metrics.get("posterior_sweeps", 0.0)
        move = mixture_of(resolve_moves(graph, self.coupling))
        sizes = (
            () if move is None else [graph.families[b].size for b in move.marginalize]
        )
        # by the figures of Mixture
        price = 1.0 if move is None else 1.5 + 0.4 * move.components / sum(sizes)
        metrics["cost"] = price * pairs * metrics["sweeps"] + rows * posterior
        return Estimate(
            gradient, state, metrics, metrics["sweeps"] * pairs / rows + posterior
        )

    def _negative(
        self,
        graph: FactorGraph,
        params: Params,
        state: UCDState,
        batch: Batch,
        key: Key,
    ) -> Phase:
        pairs = self.num_pairs or len(batch.weights)
        moves = resolve_moves(graph, self.coupling)
        target = Target(graph, params)
        if (move := mixture_of(moves)) is not None:
            target = phases.with_pool(target, move, state.pool, random.fold_in(key, 6))
        if self.start == "persistent":
            start = state.chains
        elif self.start == "data":
            index = jnp.arange(pairs) % len(batch.weights)

            def tile(x):
                return {b: jnp.take(v, index, axis=0) for b, v in x.items()}

            tiled = Batch.uniform(tile(batch.rows), tile(batch.known))
            start = phases.sample_latents(graph, params, tiled, random.fold_in(key, 0))
        else:
            start = self._independent_start(target, pairs, random.fold_in(key, 0))
        weights = jnp.broadcast_to(batch.weights.sum() / pairs, pairs)
        past = (state.negative, state.seen)
        return self._phase(target, start, moves, weights, past, random.fold_in(key, 1))

    def posterior_phase(
        self, graph: FactorGraph, params: Params, past: Past, batch: Batch, key: Key
    ) -> Phase:
        """Return the positive phase: exact, or by coupled pairs on the posterior where it is intractable."""
        if phases.tractable_posterior(graph) and not batch.known:
            gradient = phases.signed_gradient(graph, params, batch.rows, batch.weights)
            return Phase(gradient, past[0], {})
        target = phases.posterior_of(graph, params, batch)
        if callable(self.start) or self.start in ("data", "persistent"):
            start = phases.sample_latents(graph, params, batch, random.fold_in(key, 0))
        else:
            start = self._independent_start(
                target, target.num_rows, random.fold_in(key, 0)
            )
        fits = self.coupling != "mixture" and (
            isinstance(self.coupling, str) or callable(self.coupling)
        )
        moves = resolve_moves(graph, self.coupling if fits else None, target.clamped)
        phase = self._phase(
            target, start, moves, batch.weights, past, random.fold_in(key, 1)
        )
        return phase._replace(
            metrics={f"posterior_{name}": v for name, v in phase.metrics.items()}
        )

    def _independent_start(self, target: Target, rows: int, key: Key) -> Rows:
        """Return starts that do not depend on the data, except for clamped units."""
        keys = phases.row_keys(key, rows)
        values = {}
        if not isinstance(self.start, str):
            draws = jax.vmap(self.start)(random.as_key(keys))
            values, _ = as_rows(target.graph.families, draws)
        kind = "local_mode" if self.start == "local_mode" else "uniform"
        return search.initial_states(target, keys, values, kind, conditional=True)

    def _phase(
        self,
        target: Target,
        start: Rows,
        moves: tuple[Move, ...],
        weights: PerRow,
        past: Past,
        key: Key,
    ) -> Phase:
        """Run pairs, and choose the next length; an unmet pair counts with its limit."""
        window = self.window(past[0])
        free = {b for move in moves for b in move.blocks if b not in target.keep}
        accumulator = self._accumulator(target.graph, free, bool(target.keep))
        outcome = run_pairs(
            target,
            moves,
            accumulator,
            self.num_slots,
            start,
            None,
            key,
            window,
            weights,
        )
        gradient = jax.tree.map(
            lambda g: g / jnp.asarray(window.m - window.k + 1, g.dtype), outcome.total
        )
        times = (
            jnp.where(
                outcome.meeting_time >= 0, outcome.meeting_time, window.max_sweeps
            )
            - window.lag
        )
        length = self.length.update(*past, times, self.m is None)
        return Phase(gradient, length, phases.pair_metrics(outcome, window))

    def _accumulator(
        self, graph: FactorGraph, free: set[str], missing: bool
    ) -> accumulators.Accumulator:
        groups = (self.marginalize,)
        if missing and not self.marginalize and phases.tractable_posterior(graph):
            groups = (tuple(graph.latent),)  # so that complete rows contribute no noise
        if self.marginalize == "layers":  # only layers that can be summed out
            groups = tuple(
                layer for layer in graph.block_layers if layer[0] not in graph.splits
            )
        groups = tuple(
            rest for group in groups if (rest := tuple(b for b in group if b in free))
        )
        return (
            accumulators.MarginalGradient(groups)
            if groups
            else accumulators.EnergyGradient()
        )


def uses_fast_compile(graph: FactorGraph, estimator: Estimator) -> bool:
    """Return True if a step is a run of coupled pairs that compiles by the older emitters."""
    inner = getattr(estimator, "estimator", estimator)  # of Centered
    if not isinstance(inner, ChainUCD) or not inner.uses_chains:
        return False
    accumulator = inner._accumulator(graph, set(graph.families), False)
    return accumulators.uses_fast_compile(
        graph, resolve_moves(graph, inner.coupling), accumulator
    )
