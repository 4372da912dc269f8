# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased contrastive divergence."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import checks, random
from ebmpp.core.types import Key, Params, PerRow, Rows, Scalar
from ebmpp.errors import ArgumentError, IntractableError, StateError, clash
from ebmpp.estimators import lengths, pooling
from ebmpp.estimators.base import Batch, Estimate, Estimator
from ebmpp.estimators.pairs import Phase, metrics_of
from ebmpp.estimators.phases import (
    as_many,
    carried_chains,
    fresh_chains,
    posterior_of,
    row_keys,
    sample_latents,
    signed_gradient,
    tractable_posterior,
)
from ebmpp.graph import FactorGraph
from ebmpp.graph.states import as_rows
from ebmpp.moves.layer import gibbs_sweep
from ebmpp.moves.move import Move, draw_sweep
from ebmpp.moves.sweeps import resolve_moves
from ebmpp.moves.target import Target
from ebmpp.sampling import search
from ebmpp.sampling.accumulators import EnergyGradient, MarginalGradient
from ebmpp.sampling.engine import Accumulator, Outcome, Window, run_pairs
from ebmpp.sampling.expectation import FEW, check_max_sweeps, few_accepted
from ebmpp.sampling.pairs import quick
from ebmpp.sampling.pools import mixture_of

Start = str | Callable[[Array], Mapping[str, Array]]
_STARTS = ("data", "persistent", "uniform", "local_mode")


class UCDState(NamedTuple):
    """What :class:`UCD` carries."""

    negative: Scalar
    """How far the pairs of the next step run, if that is adaptive."""
    positive: Scalar
    """The same for the pairs on the posterior, where there are such."""
    chains: Rows
    """Persistent chains, with ``start="persistent"``; else none."""
    seen: Array
    """Steps whose times to meet went into the first two."""
    pool: Rows
    """States that the pairs' proposals come from, with ``coupling="mixture"``; else none."""


@dataclasses.dataclass(frozen=True, repr=False)
class UCD(Estimator):
    """Unbiased contrastive divergence: pairs of chains that run until they meet.

    The one to begin with: exact wherever Gibbs chains mix, and its meeting times tell where they do not. Then
    take ``coupling="mixture"``, or :class:`ParticleUCD`.

    The negative phase is H_{k:m} of the energy's gradient over coupled pairs, and its expectation is the
    model's own. Its variance depends on k, m and the lag, so by default these follow the times to meet in the
    steps *before*, which keeps the gradient unbiased given the past and its variance held (with k = lag = 1
    single steps with meeting times in the hundreds can wreck a model): k = lag, and m = 2 lag, since the
    sweeps after k are made anyway while a pair meets.

    The positive phase is exact where the latents given the visibles are one layer; elsewhere, and where
    entries are missing, a second set of coupled pairs, one a row, runs on the posterior of latents and
    missing entries, and is unbiased too.

    :param num_pairs: pairs a step; the batch's rows are reused in turn. Default: one a row.
    :param k: first sweep that counts. Default: adaptive.
    :param m: last sweep that counts, at least k; default k. With an adaptive k: how many sweeps after k count
        too; default as many as the lag, 0 for the state at k alone.
    :param lag: sweeps that the leading chain is ahead. Default: adaptive with k; 1 where only k is given.
    :param coupling: "maximal" (the default), "maximal_independent", "common", "reflection" or "independent"
        for every layer, or a tuple of these, one a layer; "metropolis", "mixture", or moves: see
        :func:`ebmpp.moves.sweeps.resolve_moves`. One that is a single name holds for the posterior too, but
        for "mixture": its proposals are from the model, and pairs on the posterior move layer by layer.
    :param pool: with "mixture", what the proposals come from: "data" (rows of the data, chosen once, with
        latents drawn anew at each step) or "persistent" (chains that start there and go on from step to step
        by one sweep each). Known before a step's pairs begin, so the gradient stays unbiased given the past.
        The history's ``acceptance`` tells whether it helps, and :func:`~ebmpp.fit` warns where it does not.
    :param pool_size: states in the pool: enough to hit every mode, few enough that a proposal stays cheap.
    :param start: where pairs start: "data" (the batch's rows), "persistent" (chains that go on from step to
        step by one sweep each, as in :class:`PCD`), "uniform", "local_mode" (one Gibbs sweep from a local
        mode that is searched from uniform draws), or a function of a jax key to values of some or all blocks
        of one pair, the others being drawn uniformly. Pairs on the posterior start at latents that fit the
        row, at uniform ones or at local modes. The estimate is unbiased whatever the start; its variance and
        its cost depend on it.
    :param marginalize: sum blocks out of the energy before its gradient is taken: a tuple of blocks that do
        not interact, or "layers" for the mean over all layers, each summed out in turn (Taniguchi et al.
        2023, eq. 27). Unbiased too.
    :param quantile: which quantile of the times to meet the adaptive k and lag follow.
    :param target_variance: instead, take the least k = lag that keeps the variance that the times to meet
        predict at this multiple of that of independent draws of the model; with m=0 above 1. The prediction
        is pessimistic without m=0: see :mod:`ebmpp.estimators.lengths`.
    :param target_cost: instead, spend so many sweeps a pair on average: k = lag is what meeting leaves of
        them, at least 1.
    :param smoothing: weight of the past in what the adaptive k and lag follow, in [0, 1). Steps weigh alike
        until there are enough for that, so that the second step has the length of the first one's times.
    :param max_sweeps: stop a pair that has not met after so many sweeps, more than the lag (an adaptive lag
        stays below it), or in a draw of 1024 trials for each. The default, no limit, is unbiased; a limit
        makes training stop with an error when a pair is unmet, unless ``allow_unmet``.
    :param allow_unmet: go on with truncated pairs. **This biases the gradient**; the history counts them.
    :param num_slots: pairs at once, on each device: for speed, but for rounding; by default what suits.
    :raises ArgumentError: for numbers out of range, an unknown start, or a target beside a k, a lag or an m.

    **References**

    1. Qiu, Zhang, Wang (2020), *Unbiased contrastive divergence*, Algorithms 2 and 3.
    2. Jacob, O'Leary, Atchade (2020); Biswas, Jacob, Vanetti (2019) for lags above 1.

    **Example**

    >>> from ebmpp import UCD
    >>> UCD(k=1, lag=1).adaptive, UCD(start="persistent", target_variance=1.5).adaptive
    (False, True)
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
    start: Start = "data"
    marginalize: str | tuple[str, ...] = ()
    target_variance: float | None = None
    target_cost: float | None = None
    pool: str = "data"
    pool_size: int = 300
    takes_missing = True

    def __post_init__(self) -> None:
        checks.set_counts(self, "num_pairs", "lag", "num_slots", optional=True)
        checks.set_counts(self, "k", "m", least=0, optional=True)
        checks.set_counts(self, "pool_size")
        checks.choice("UCD: pool", self.pool, pooling.POOLS)
        checks.flag("UCD: allow_unmet", self.allow_unmet)
        if self.k is not None and self.m is not None and self.m < self.k:
            raise ArgumentError(f"UCD: m is at least k; got k={self.k}, m={self.m}")
        check_max_sweeps("UCD: max_sweeps", self.max_sweeps, self.lag or 1)
        checks.number("UCD: quantile", self.quantile, above=0, below=1)
        checks.number("UCD: smoothing", self.smoothing, least=0, below=1)
        if not callable(self.start):
            checks.choice("UCD: start", self.start, _STARTS, also="a function of a key")
        self._check_targets()
        for name, value in (("coupling", self.coupling), ("marginalize", self.marginalize)):
            if value is not None and not isinstance(value, str | Move):
                object.__setattr__(self, name, tuple(checks.sequence(f"UCD: {name}", value, "names")))
        if isinstance(self.marginalize, str) and self.marginalize != "layers":
            object.__setattr__(self, "marginalize", (self.marginalize,))

    def _check_targets(self) -> None:
        given = {"target_variance": self.target_variance, "target_cost": self.target_cost}
        given = {n: v for n, v in given.items() if v is not None}
        if len(given) > 1 or (given and not self.adaptive):
            raise ArgumentError(
                f"UCD: {given} with k={self.k}: give one target, and leave k and the lag to follow it"
            )
        fixed = {"lag": self.lag, "m": self.m or None}  # m = 0 more sweeps is a window that lengths knows
        fixed = {n: v for n, v in fixed.items() if v is not None}
        if given and fixed:
            raise ArgumentError(
                f"UCD: {given} with {fixed}: a target is met by k = lag and m = 2 lag, or m = k, and what it "
                "predicts holds for these alone; leave out lag and m, or give m=0, or quantile=... in place "
                "of the target"
            )
        for name, value in given.items():
            above = 0 if name == "target_variance" and self._averages else 1
            checks.number(f"UCD: {name}", value, above=above)

    def __repr__(self) -> str:
        fields = {f.name: (getattr(self, f.name), f.default) for f in dataclasses.fields(self)}
        given = ", ".join(f"{name}={value!r}" for name, (value, usual) in fields.items() if value != usual)
        return f"{type(self).__name__}({given})"

    @property
    def adaptive(self) -> bool:
        """Whether k and the lag follow past meeting times."""
        return self.k is None

    @property
    def _averages(self) -> bool:
        """Whether an adaptive window holds as many more sweeps as the lag."""
        return self.m is None

    # -- the state -------------------------------------------------------------------------------

    def init(self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key) -> UCDState:
        """Pairs run one sweep at first; persistent chains start at initial draws of every block."""
        move = mixture_of(resolve_moves(graph, self.coupling))
        self._check_marginals(graph)
        chains: Rows = {}
        if self.start == "persistent":
            chains = fresh_chains(graph, self.num_pairs or batch, key)
        pool = {} if move is None else pooling.begin(graph, params, data, self.pool_size, key)
        return UCDState(jnp.ones(()), jnp.ones(()), chains, jnp.zeros((), jnp.int32), pool)

    def adopt(self, before: Any, fresh: UCDState) -> UCDState:
        """Go on with the chains of another estimator, as many as fit, and from the times of another UCD.

        Persistent chains of a pool go on too; a pool of data rows is chosen from those of the stage.
        """
        chains, pool = carried_chains(before), {}
        if isinstance(before, UCDState):
            fresh = before._replace(chains=fresh.chains, pool=fresh.pool)
            pool = before.pool
        if self.start == "persistent":
            fresh = fresh._replace(chains=as_many(chains, fresh.chains))
        if self.pool == "persistent":
            fresh = fresh._replace(pool=as_many(pool or chains, fresh.pool))
        return fresh

    def caution(self, told: Mapping[str, np.ndarray]) -> str | None:
        """Where hardly any proposal from the pool is accepted, or a few late pairs hold all the cost."""
        if self.adaptive and self.lag is None and (trapped := lengths.trapped(told)) is not None:
            return f"UCD: {trapped}"
        given = (self.coupling,) if isinstance(self.coupling, Move) else self.coupling or ()
        if self.coupling != "mixture" and (isinstance(given, str) or mixture_of(given) is None):
            return None
        accepted = told["acceptance"]
        mean = float(accepted[len(accepted) // 2 :].mean()) if len(accepted) else 1.0
        return few_accepted("UCD", mean) if mean < FEW else None

    def _check_marginals(self, graph: FactorGraph) -> None:
        """:raises IntractableError: for blocks that cannot be summed out together."""
        given = () if isinstance(self.marginalize, str) else self.marginalize
        unknown = [b for b in given if b not in graph.families]
        if unknown:
            raise ArgumentError(
                f"UCD: marginalize names {unknown}, and the blocks are {list(graph.families)}"
            )
        for a, b in graph.interacting(given):
            raise IntractableError(
                f"UCD: {clash(a, b)}, so they cannot be summed out together; "
                'marginalize="layers" sums out every layer in turn'
            )

    def window(self, length: Scalar) -> Window:
        """k, m, lag and the limit, as arrays."""
        limit = self.max_sweeps or 0
        if self.adaptive:
            k = jnp.maximum(1, jnp.round(length)).astype(jnp.int32)
            lag = k if self.lag is None else self.lag
            if self.lag is None and limit:  # any lag is unbiased, and at the limit no pair could have met
                lag = jnp.minimum(lag, limit - 1)
            m = k + (lag if self.m is None else self.m)
        else:
            k, lag = self.k, self.lag or 1
            m = k if self.m is None else self.m
        return Window(*(jnp.asarray(n, jnp.int32) for n in (k, m, lag, limit)))

    # -- a step ----------------------------------------------------------------------------------

    def estimate(
        self, graph: FactorGraph, params: Params, state: UCDState, batch: Batch, key: Key
    ) -> Estimate:
        """Positive minus negative phase, and the meeting times."""
        state = state._replace(seen=state.seen + 1, pool=self._pool_on(graph, params, state, batch, key))
        negative = self._negative(graph, params, state, batch, key)
        metrics, unmet = dict(negative.metrics), negative.metrics["num_unmet"]
        state = state._replace(negative=negative.length, chains=self._go_on(graph, params, state, key))
        if tractable_posterior(graph) and not batch.known:
            positive = signed_gradient(graph, params, batch.rows, batch.weights)
        else:
            past = (state.positive, state.seen)
            other = self.posterior_phase(graph, params, past, batch, random.fold_in(key, 7))
            positive, state = other.gradient, state._replace(positive=other.length)
            metrics |= {f"posterior_{name}": v for name, v in other.metrics.items()}
            unmet = unmet + other.metrics["num_unmet"]
        gradient = jax.tree.map(jnp.subtract, positive, negative.gradient)
        if not self.allow_unmet:  # an unmet pair must not pass: training stops on what is not finite
            gradient = jax.tree.map(lambda g: jnp.where(unmet > 0, jnp.nan, g), gradient)
        pairs = self.num_pairs or len(batch.weights)
        sweeps = metrics["sweeps"] * pairs / len(batch.weights) + metrics.get("posterior_sweeps", 0.0)
        return Estimate(gradient, state, metrics, sweeps)

    def quick(self, graph: FactorGraph) -> bool:
        """Whether the pairs of the model are: those of the posterior are of the same units."""
        accumulator = self._accumulator(graph, set(graph.families), False)
        return quick(graph, resolve_moves(graph, self.coupling), accumulator)

    def _negative(self, graph: FactorGraph, params: Params, state: UCDState, batch: Batch, key: Key) -> Phase:
        pairs, moves = self.num_pairs or len(batch.weights), resolve_moves(graph, self.coupling)
        target = Target(graph, params)
        if (move := mixture_of(moves)) is not None:
            target = pooling.with_pool(target, move, state.pool, random.fold_in(key, 6))
        if self.start == "persistent":
            start = state.chains
        elif self.start == "data":
            turn = jnp.arange(pairs) % len(batch.weights)
            tile = lambda x: {b: jnp.take(v, turn, axis=0) for b, v in x.items()}
            own = random.fold_in(key, 0)
            start = sample_latents(graph, params, Batch.of(tile(batch.rows), tile(batch.known)), own)
        else:
            start = self._anywhere(target, pairs, random.fold_in(key, 0))
        weights = jnp.broadcast_to(batch.weights.sum() / pairs, pairs)
        past = (state.negative, state.seen)
        return self._phase(target, start, moves, weights, past, random.fold_in(key, 1))

    def posterior_phase(
        self, graph: FactorGraph, params: Params, past: tuple[Scalar, Array], batch: Batch, key: Key
    ) -> Phase:
        """The positive phase by coupled pairs, one a row, on the posterior of the latents and of what is
        missing; for estimators that have another negative phase too.

        :param past: how far pairs run, if that is adaptive (1 at first, then ``length`` of the phase of the
            step before), and how many steps there are with this one.
        """
        target = posterior_of(graph, params, batch)
        if callable(self.start) or self.start in ("data", "persistent"):
            start = sample_latents(graph, params, batch, random.fold_in(key, 0))
        else:
            start = self._anywhere(target, target.num_rows, random.fold_in(key, 0))
        named = isinstance(self.coupling, str) and self.coupling != "mixture"
        coupling = self.coupling if named else None
        moves = resolve_moves(graph, coupling, target.clamped)
        return self._phase(target, start, moves, batch.weights, past, random.fold_in(key, 1))

    def _anywhere(self, target: Target, rows: int, key: Key) -> Rows:
        """Starts that owe nothing to the data, but for the units that are held."""
        keys, given = row_keys(key, rows), {}
        if not isinstance(self.start, str):
            made = jax.vmap(self.start)(jax.random.wrap_key_data(keys, impl="threefry2x32"))
            given, _ = as_rows(target.graph.families, made)
        kind = "local_mode" if self.start == "local_mode" else "uniform"
        return search.start(target, keys, given, kind)

    def _go_on(self, graph: FactorGraph, params: Params, state: UCDState, key: Key) -> Rows:
        """The persistent chains, a sweep on."""
        if self.start != "persistent":
            return state.chains
        rows = len(next(iter(state.chains.values())))
        keys = row_keys(random.fold_in(key, 3), rows)
        return draw_sweep(Target(graph, params), state.chains, gibbs_sweep(graph), keys)[0]

    def _pool_on(self, graph: FactorGraph, params: Params, state: UCDState, batch: Batch, key: Key) -> Rows:
        """The pool of this step, which owes nothing to its pairs."""
        if not state.pool:
            return state.pool
        if self.pool == "data" and batch.known:
            raise StateError(
                f"UCD: blocks {sorted(batch.known)} of the data have missing entries, so no pool is made of "
                'them; give pool="persistent"'
            )
        held = graph.visible if self.pool == "data" else ()
        return pooling.go_on(graph, params, state.pool, tuple(held), random.fold_in(key, 5))

    def _phase(
        self,
        target: Target,
        start: Rows,
        moves: tuple[Move, ...],
        weights: PerRow,
        past: tuple[Array, Array],
        key: Key,
    ) -> Phase:
        window = self.window(past[0])
        free = {b for move in moves for b in move.blocks if b not in target.keep}
        accumulator = self._accumulator(target.graph, free, bool(target.keep))
        statics = moves, accumulator, self.num_slots
        outcome = run_pairs(target, *statics, start, None, key, window, weights)
        gradient = jax.tree.map(lambda g: g / jnp.asarray(window.m - window.k + 1, g.dtype), outcome.total)
        return Phase(gradient, self._follow(*past, outcome, window), metrics_of(outcome, window))

    def _accumulator(self, graph: FactorGraph, free: set[str], missing: bool) -> Accumulator:
        groups = (self.marginalize,)
        if missing and not self.marginalize and tractable_posterior(graph):
            groups = (tuple(graph.latent),)  # so that a row that lacks nothing counts without noise
        if self.marginalize == "layers":  # those that can be summed out
            groups = tuple(layer for layer in graph.block_layers if layer[0] not in graph.splits)
        groups = tuple(left for group in groups if (left := tuple(b for b in group if b in free)))
        return MarginalGradient(groups) if groups else EnergyGradient()

    def _follow(self, before: Scalar, seen: Array, outcome: Outcome, window: Window) -> Scalar:
        """The next length; an unmet pair counts as the limit it was stopped at."""
        met = outcome.meeting_time >= 0
        times = jnp.where(met, outcome.meeting_time, window.max_sweeps) - window.lag
        if self.target_variance is not None:
            now = lengths.for_variance(times, self.target_variance, self._averages)
        elif self.target_cost is not None:
            now = lengths.for_cost(times, self.target_cost, self._averages)
        else:
            now = lengths.quantile(times, self.quantile)
        share = jnp.maximum(1 - self.smoothing, 1 / seen)
        return before + share * (now - before)
