# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased gradients from coupled particle systems."""

import dataclasses
from typing import NamedTuple

from jaxtyping import Float, Int32, PyTree
import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.annealing import Path, reference, systems
from ebmpp.annealing.ladder import Ladder, find_ladder
from ebmpp.annealing.particle_pairs import LONG_STAY, PairOutcome, run_pair
from ebmpp.core import Eta, Key, Params, Rows, Scalar, checks, random, sharding
from ebmpp.estimators.base import (
    Batch,
    Columns,
    Estimate,
    Estimator,
    PairMetrics,
    StepMetrics,
    shapes,
    total_unmet,
)
from ebmpp.estimators.pairs import AdaptiveLength, ChainUCD, CoupledPairs
from ebmpp.estimators.phases import batch_log_likelihood, reference_log_partition
from ebmpp.graph import FactorGraph
from ebmpp.moves.sweeps import MovesLike, as_moves, single_moves

# the path is refitted where a rung's 1 - CESS is so many times larger than requested
_SLACK = 2.0
# below this share of effective particles, params move faster than their path is fitted
_MIN_CESS = 0.1
# factor of the requested 1 - CESS where the rungs are too few
_COARSER = 1.5
# share of steps with poor rungs that causes a warning
_POOR_SHARE = 0.5


class ParticleState(NamedTuple):
    """State of :class:`ParticleUCD`.

    :param eta0: natural parameters of the reference.
    :param places: rungs on the line; on a training path their betas, without the model
        itself.
    :param knots: params of the rungs of a training path, ``(rungs, ...)`` each; empty
        on the line.
    :param count: number of rungs, including the reference.
    :param requested: CESS that the rungs were fitted to: ``cess_threshold``, or less
        where ``max_rungs`` are too few.
    :param cess: lowest CESS of a rung in the last step.
    :param positive: adaptive length of the pairs on the posterior, if there are any.
    :param seen: number of steps.
    :param gibbs: adaptive length of Gibbs pairs, for :class:`UCD` to return to; 0 if
        there were none.
    """

    eta0: Eta
    places: Float[Array, "rungs"]
    knots: Params
    count: Int32[Array, ""]
    requested: Scalar
    cess: Scalar
    positive: Scalar
    seen: Int32[Array, ""]
    gibbs: Scalar


class ParticleMetrics(StepMetrics):
    """Metrics of :class:`ParticleUCD`; meeting times are in systems.

    :param acceptance: of systems.
    :param longest_stay: most systems that were rejected in turn.
    :param min_cess: lowest CESS of a rung.
    :param log_partition: estimate by the first two systems of each pair.
    :param log_likelihood: of the batch, with one layer of latents.
    :param posterior: of the pairs on the posterior, if there are any.
    :param cost: sweeps of all chains of the step, in units of a Gibbs sweep.
    """

    meeting_time_mean: Array
    meeting_time_max: Array
    num_unmet: Array
    acceptance: Array
    longest_stay: Array
    num_rungs: Array
    min_cess: Array
    log_partition: Array
    log_likelihood: Array | None
    posterior: PairMetrics | None
    cost: Array


class _Rungs(NamedTuple):
    """Path to the current params, and the places and number of its rungs."""

    path: Path
    places: Array
    count: Array


class _Search(NamedTuple):
    """Search for a ladder whose rungs are enough."""

    is_first: Array
    requested: Array
    ladder: Ladder


@dataclasses.dataclass(frozen=True)
class ParticleUCD(Estimator):
    """Unbiased contrastive divergence by coupled chains of particle systems.

    For models whose modes Gibbs chains do not leave, so that pairs of :class:`UCD` meet
    too late, and where a step may cost more than one of :class:`PCD`.

    The negative phase is that of :func:`ebmpp.particle_expectation`; a step usually
    moves ``2 * num_particles`` particles along the path, with rungs from pilot systems.
    The positive phase is exact where the latents given the visibles are one layer.
    Elsewhere, and where entries are missing, it is that of ``posterior``: coupled Gibbs
    pairs, one per row.

    The history has meeting times in systems, the ``acceptance`` of systems, the
    ``longest_stay`` of one, ``num_rungs``, and estimates by the step's first systems of
    ``log_partition`` and, with one layer of latents, of the batch's ``log_likelihood``,
    too large on average by half the variance of log Z.

    :param num_particles: particles per system, at least 2.
    :param path: "line": straight from independent units at the data's base rates, for
        large models. "training": along ``max_rungs`` params of the training so far, for
        modes that are far apart.
    :param num_pairs: pairs per step, of which the mean is taken; devices of a mesh run
        them in parallel. One is enough, since its systems average over particles.
    :param k: first time that counts.
    :param m: last time that counts, at least k. A step usually takes ``m + 1`` systems.
        ``k=1, m=3`` reduces the weight of corrections of pairs that met late.
    :param num_sweeps: sweeps of blocked Gibbs per rung.
    :param cess_threshold: conditional effective sample size (CESS) of each rung as a
        share of the particles, between 0 and 1. The rungs are refitted when a step
        finds a rung that is clearly worse.
    :param refit_every: number of steps after which the rungs are refitted in any case.
    :param max_rungs: largest number of rungs. Where they are too few, acceptance
        suffers, with a warning.
    :param max_systems: stop a pair that has not met after so many systems. The default,
        no limit, is unbiased; with a limit training stops with an error if a pair is
        unmet.
    :param posterior: settings of the pairs on the posterior, where they are needed.
    :param moves: moves of a sweep; default: Gibbs draws of all layers, or
        :func:`~ebmpp.moves.informed_sweep` where these are costly.
    :raises ArgumentError: for numbers out of range or an unknown path.

    **References**

    1. Andrieu, Doucet, Holenstein (2010), *Particle Markov chain Monte Carlo methods*.
    2. Middleton, Deligiannidis, Doucet, Jacob (2019), *Unbiased smoothing using
       particle independent Metropolis-Hastings*, Algorithm 2.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> fit = ebmpp.fit(rbm, ebmpp.data.bars_and_stripes(3), rng_key=jax.random.key(0), num_steps=5,
    ...                 estimator=ebmpp.ParticleUCD(num_particles=50), progress_bar=False)
    >>> fit.history.meeting_time_max.values.tolist()
    [1, 1, 1, 1, 1]
    """

    num_particles: int = 1000
    path: str = "line"
    num_pairs: int = 1
    k: int = 0
    m: int = 1
    num_sweeps: int = 1
    cess_threshold: float = 0.95
    refit_every: int = 500
    max_rungs: int = 128
    max_systems: int | None = None
    posterior: CoupledPairs = ChainUCD()
    moves: MovesLike = None
    takes_missing = True

    def __post_init__(self) -> None:
        checks.set_counts(self, "num_particles", "max_rungs", least=2)
        checks.set_counts(self, "num_pairs", "num_sweeps", "refit_every")
        checks.set_counts(self, "k", least=0)
        checks.set_counts(self, "m", least=self.k)
        checks.choice("ParticleUCD: path", self.path, ("line", "training"))
        checks.number(
            "ParticleUCD: cess_threshold", self.cess_threshold, above=0, below=1
        )
        checks.instance(
            "ParticleUCD: posterior", self.posterior, CoupledPairs, "a UCD()"
        )
        checks.set_counts(self, "max_systems", least=self.m + 2, optional=True)
        moves = as_moves("ParticleUCD: moves", self.moves)
        object.__setattr__(self, "moves", moves)

    def init_state(
        self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key
    ) -> ParticleState:
        """Put the reference at the data's base rates; the first step fits the rungs."""
        knots = {}
        if self.path == "training":

            def with_capacity(a):
                return jnp.zeros((self.max_rungs, *a.shape), a.dtype).at[0].set(a)

            knots = jax.tree.map(with_capacity, params)
        return ParticleState(
            eta0=reference.base_rates(graph, data),
            places=jnp.zeros(self.max_rungs),
            knots=knots,
            count=jnp.int32(1),
            requested=jnp.zeros(()),
            cess=jnp.zeros(()),
            positive=jnp.ones(()),
            seen=jnp.int32(0),
            gibbs=jnp.zeros(()),
        )

    def adopt(self, before: PyTree, fresh: ParticleState) -> ParticleState:
        """Continue along the path of another ParticleUCD of the same shapes."""
        return before if shapes(before) == shapes(fresh) else fresh

    def _rungs(
        self, graph: FactorGraph, params: Params, state: ParticleState
    ) -> _Rungs:
        """Return the rungs up to these params."""
        moves = single_moves("ParticleUCD: moves", graph, self.moves)
        if self.path == "line":
            path = Path.line(graph, state.eta0, params, moves)
            return _Rungs(path, state.places, state.count)

        def append(a, value):
            return jnp.concatenate([a, a[-1:]]).at[state.count].set(value)

        knots = jax.tree.map(append, state.knots, params)
        count = state.count + 1
        betas = append(state.places, 1.0)
        path = Path(graph, state.eta0, betas, knots, count, moves)
        places = jnp.arange(self.max_rungs + 1, dtype=state.places.dtype)
        return _Rungs(path, places, count)

    def _fit_rungs(
        self, graph: FactorGraph, params: Params, state: ParticleState, key: Key
    ) -> ParticleState:
        """Refit the rungs at these params, to a lower CESS where they are too few."""
        path = self._rungs(graph, params, state).path
        capacity = self.max_rungs + int(self.path == "training")

        def is_incomplete(carry):
            is_short = ~carry.ladder.is_complete() & (carry.requested > 0)
            return carry.is_first | is_short

        def search(carry):
            lower = 1 - _COARSER * (1 - carry.requested)
            requested = jnp.where(carry.is_first, carry.requested, lower)
            ladder = find_ladder(
                path, key, self.num_particles, requested, capacity, self.num_sweeps
            )
            return _Search(jnp.array(False), requested, ladder)

        # The first search is an iteration of the loop: outside it would compile the
        # system's code twice.
        no_ladder = Ladder(jnp.zeros(capacity), jnp.full((), capacity, jnp.int32))
        requested = jnp.asarray(self.cess_threshold, float)
        start = _Search(jnp.array(True), requested, no_ladder)
        _, requested, ladder = lax.while_loop(is_incomplete, search, start)
        state = state._replace(requested=requested)
        if self.path == "line":
            return state._replace(places=ladder.places, count=ladder.count)
        # the last knot is the model, which moves on
        cut = path.cut(ladder.places, ladder.count)
        return state._replace(
            places=cut.betas[: self.max_rungs],
            knots=jax.tree.map(lambda a: a[: self.max_rungs], cut.knots),
            count=ladder.count - 1,
        )

    def estimate(
        self,
        graph: FactorGraph,
        params: Params,
        state: ParticleState,
        batch: Batch,
        key: Key,
    ) -> Estimate:
        key = random.materialize(key)

        def fit(state):
            return self._fit_rungs(graph, params, state, random.fold_in(key, 1))

        is_stale = state.cess < 1 - _SLACK * (1 - state.requested)
        is_due = is_stale | (state.seen % self.refit_every == 0)
        state = lax.cond(is_due, fit, lambda state: state, state)
        state = state._replace(seen=state.seen + 1)
        pairs = self._run_pairs(graph, params, state, random.fold_in(key, 0))
        weight = batch.weights.sum()
        negative = jax.tree.map(lambda g: g.mean(0) * weight, pairs.total)
        past = AdaptiveLength(state.positive, state.seen)
        positive = self.posterior.posterior_phase(
            graph, params, past, batch, random.fold_in(key, 7)
        )
        metrics = self._metrics(graph, params, state, batch, pairs, positive.metrics)
        unmet = (
            metrics.num_unmet if self.posterior.allow_unmet else total_unmet(metrics)
        )
        # training stops at a gradient that is not finite
        is_bad = (unmet > 0) | pairs.broken.any()
        gradient = jax.tree.map(
            lambda p, n: jnp.where(is_bad, jnp.nan, p - n), positive.gradient, negative
        )
        sweeps = self._sweeps(metrics.meeting_time_mean, metrics.num_rungs)
        state = state._replace(cess=metrics.min_cess, positive=positive.length)
        return Estimate(gradient, state, metrics, sweeps / batch.num_rows)

    def _run_pairs(
        self, graph: FactorGraph, params: Params, state: ParticleState, key: Key
    ) -> PairOutcome:
        """Run pairs of chains of systems, distributed over the devices of a mesh.

        The outcome has a leading axis of pairs.
        """

        def run(numbers, shared, *_):
            rungs, params, key = shared

            def propose(keys):
                system = systems.draw_initial(rungs.path, keys, self.num_particles)
                system = systems.run_rungs(
                    rungs.path,
                    rungs.places,
                    1,
                    rungs.count,
                    system,
                    keys,
                    self.num_sweeps,
                )
                negative = systems.energy_gradient(rungs.path, params, system)
                return systems.total_log_z(system), negative, system.min_cess

            def run_one(number):
                pair_key = random.materialize(random.fold_in(key, number))
                return run_pair(propose, pair_key, self.k, self.m, self.max_systems)

            return lax.map(run_one, numbers), ()

        shared = (self._rungs(graph, params, state), params, key)
        outcome, _ = sharding.shard_jobs(
            run, jnp.arange(self.num_pairs), shared, self.num_pairs
        )
        return outcome

    def _metrics(
        self,
        graph: FactorGraph,
        params: Params,
        state: ParticleState,
        batch: Batch,
        pairs: PairOutcome,
        posterior: PairMetrics | None,
    ) -> ParticleMetrics:
        met = pairs.meeting_time >= 0
        tau = jnp.where(met, pairs.meeting_time, 0)
        # of each pair's first two systems
        log_z, _ = systems.pooled(pairs.log_z.ravel())
        log_z += reference_log_partition(graph, state.eta0)
        mean = tau.sum() / jnp.maximum(met.sum(), 1)
        num_rungs = state.count - int(self.path == "line")
        per_row = 0.0 if posterior is None else posterior.sweeps
        return ParticleMetrics(
            meeting_time_mean=mean,
            meeting_time_max=tau.max(),
            num_unmet=(~met).sum(),
            acceptance=pairs.acceptance.mean(),
            longest_stay=pairs.longest.max(),
            num_rungs=num_rungs,
            min_cess=pairs.min_cess.min(),
            log_partition=log_z,
            log_likelihood=batch_log_likelihood(graph, params, batch, log_z),
            posterior=posterior,
            cost=self._sweeps(mean, num_rungs) + batch.num_rows * per_row,
        )

    def _sweeps(self, meeting_time: Array, num_rungs: Array) -> Array:
        """Return the sweeps of all particles of the negative phase."""
        num_systems = self.num_pairs * (1 + jnp.maximum(meeting_time, self.m))
        per_rung = num_systems * (self.num_particles * self.num_sweeps)
        return per_rung * num_rungs.astype(num_systems.dtype)

    def diagnose(self, history: Columns) -> str | None:
        """Report a system that was kept for long, a path left behind, and too few rungs."""
        stay = history["longest_stay"]
        cess = history["min_cess"]
        longest = int(np.nanmax(stay, initial=0))
        if longest >= LONG_STAY:
            return (
                f"ParticleUCD: a chain kept one system while it rejected {longest} "
                f"others, at step {int(np.nanargmax(stay))} of its stage: the tail of "
                "Z is heavy. Raise num_particles, num_sweeps or cess_threshold, or use "
                "the other path."
            )
        lowest = np.nanmin(cess, initial=1)
        if lowest < _MIN_CESS:
            return (
                f"ParticleUCD: at step {int(np.nanargmin(cess))} of its stage a rung "
                f"left {lowest:.1%} of the particles effective: the params moved "
                "further than the path could follow. Take smaller steps or more "
                "particles."
            )
        poor = cess < 1 - _SLACK * (1 - self.cess_threshold)
        if poor.sum() <= _POOR_SHARE * poor.size:
            return None
        return (
            f"ParticleUCD: at {poor.mean():.0%} of the steps rungs missed "
            f"cess_threshold={self.cess_threshold:g} by a factor of two, with "
            f"{np.nanmax(history['num_rungs']):.0f} of at most {self.max_rungs} rungs: "
            "acceptance suffers, the gradient stays unbiased. Raise max_rungs or "
            "num_particles, or lower cess_threshold."
        )
