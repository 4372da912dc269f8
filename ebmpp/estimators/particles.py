# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased gradients from coupled particle systems."""

import dataclasses
from typing import Any, NamedTuple

from jaxtyping import Float, Int32
import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.annealing import Path, reference, systems
from ebmpp.annealing.ladder import Ladder, find_ladder
from ebmpp.annealing.particle_pairs import LONG_STAY, PairOutcome, run_pair
from ebmpp.core import checks, random, sharding
from ebmpp.core.types import Eta, Key, Params, Rows, Scalar
from ebmpp.estimators.base import Batch, Estimate, Estimator, History, shapes
from ebmpp.estimators.pairs import ChainUCD
from ebmpp.estimators.phases import batch_log_likelihood
from ebmpp.graph import FactorGraph

_SLACK = 2.0  # the path is refitted where a rung's 1 - CESS is so many times larger than requested
# below this share of effective particles, params move faster than their path is fitted
_MIN_CESS = 0.1
_COARSER = 1.5  # factor of the requested 1 - CESS where the rungs are too few
_OFTEN = 0.5  # share of steps with poor rungs that causes a warning


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
        them in parallel.
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
    posterior: ChainUCD = ChainUCD()
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
        checks.instance("ParticleUCD: posterior", self.posterior, ChainUCD, "a UCD()")
        checks.set_counts(self, "max_systems", least=self.m + 2, optional=True)

    def init(
        self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key
    ) -> ParticleState:
        """Put the reference at the data's base rates; the first step fits the rungs."""
        eta0 = reference.base_rates(graph, data)
        places = jnp.zeros(self.max_rungs)

        def first(a):
            return jnp.zeros((self.max_rungs, *a.shape), a.dtype).at[0].set(a)

        knots = jax.tree.map(first, params) if self.path == "training" else {}
        count = jnp.ones((), jnp.int32)
        zero = jnp.zeros(())
        return ParticleState(
            eta0, places, knots, count, zero, zero, zero + 1, count - 1, zero
        )

    def adopt(self, before: Any, fresh: ParticleState) -> ParticleState:
        """Continue along the path of another ParticleUCD of the same shapes."""
        return before if shapes(before) == shapes(fresh) else fresh

    def _rungs(
        self, graph: FactorGraph, params: Params, state: ParticleState
    ) -> tuple[Path, Array, Array]:
        """Return the path to these params, and the places and number of its rungs."""
        if self.path == "line":
            return Path.line(graph, state.eta0, params), state.places, state.count

        def put(a, b):
            return a.at[state.count].set(b)

        def grown(a):
            return jnp.concatenate([a, a[-1:]])

        knots = jax.tree.map(lambda a, b: put(grown(a), b), state.knots, params)
        count = state.count + 1
        path = Path(graph, state.eta0, put(grown(state.places), 1.0), knots, count)
        return path, jnp.arange(self.max_rungs + 1, dtype=state.places.dtype), count

    def _fitted(
        self, graph: FactorGraph, params: Params, state: ParticleState, key: Key
    ) -> ParticleState:
        """Refit the rungs at these params, to a lower CESS where they are too few."""
        path, _, _ = self._rungs(graph, params, state)
        capacity = self.max_rungs + int(self.path == "training")

        def search(carry: tuple[Array, Array, Ladder]) -> tuple[Array, Array, Ladder]:
            first, requested, _ = carry
            requested = jnp.where(first, requested, 1 - _COARSER * (1 - requested))
            ladder = find_ladder(
                path, key, self.num_particles, requested, capacity, self.num_sweeps
            )
            return jnp.array(False), requested, ladder

        # The first search is an iteration of the loop: outside it would compile the
        # system's code twice.
        none = Ladder(
            jnp.zeros(capacity),
            jnp.full((), capacity, jnp.int32),
            jnp.zeros(()),
            jnp.ones(()),
        )

        def too_few(carry):
            return carry[0] | (~carry[2].is_complete() & (carry[1] > 0))

        start = (
            jnp.array(True),
            jnp.asarray(self.cess_threshold, jnp.result_type(float)),
            none,
        )
        _, requested, ladder = lax.while_loop(too_few, search, start)
        state = state._replace(requested=requested)
        if self.path == "line":
            return state._replace(places=ladder.places, count=ladder.count)
        # its last knot is the model, which moves on
        cut = path.cut(ladder.places, ladder.count)

        def short(a):
            return a[: self.max_rungs]

        knots = jax.tree.map(short, cut.knots)
        return state._replace(
            places=short(cut.betas), knots=knots, count=ladder.count - 1
        )

    def estimate(
        self,
        graph: FactorGraph,
        params: Params,
        state: ParticleState,
        batch: Batch,
        key: Key,
    ) -> Estimate:
        stale = state.cess < 1 - _SLACK * (1 - state.requested)

        def fit(s):
            return self._fitted(graph, params, s, random.fold_in(key, 1))

        state = lax.cond(
            stale | (state.seen % self.refit_every == 0), fit, lambda s: s, state
        )
        state = state._replace(seen=state.seen + 1)
        pairs = self._pairs(graph, params, state, random.fold_in(key, 0))
        negative = jax.tree.map(lambda g: g.mean(0) * batch.weights.sum(), pairs.total)
        # of each pair's first two systems
        log_z, _ = systems.pooled(pairs.log_z.ravel())
        log_z += sum(
            f.log_normalizer(state.eta0[b]).sum() for b, f in graph.families.items()
        )
        metrics = self._metrics(pairs, state) | {"log_partition": log_z}
        metrics |= batch_log_likelihood(graph, params, batch, log_z)
        past = (state.positive, state.seen)
        positive = self.posterior.posterior_phase(
            graph, params, past, batch, random.fold_in(key, 7)
        )
        metrics |= positive.metrics
        unmet = (
            0 if self.posterior.allow_unmet else metrics.get("posterior_num_unmet", 0)
        )
        # training stops at a gradient that is not finite
        bad = (metrics["num_unmet"] + unmet > 0) | pairs.broken.any()
        gradient = jax.tree.map(
            lambda p, n: jnp.where(bad, jnp.nan, p - n), positive.gradient, negative
        )
        num_systems = self.num_pairs * (
            1 + jnp.maximum(metrics["meeting_time_mean"], self.m)
        )
        rungs = metrics["num_rungs"].astype(num_systems.dtype)
        sweeps = num_systems * (self.num_particles * self.num_sweeps) * rungs
        metrics["cost"] = sweeps + len(batch.weights) * metrics.get(
            "posterior_sweeps", 0.0
        )
        state = state._replace(cess=pairs.min_cess.min(), positive=positive.length)
        return Estimate(gradient, state, metrics, sweeps / len(batch.weights))

    def _pairs(
        self, graph: FactorGraph, params: Params, state: ParticleState, key: Key
    ) -> PairOutcome:
        """Run pairs of chains of systems, distributed over the devices of a mesh; leading axis: pairs."""

        def run(numbers: Array, shared: tuple, *_: Any) -> tuple[PairOutcome, tuple]:
            path, places, count, params, key = shared

            def propose(keys: Array) -> tuple[Array, Params, Array]:
                system = systems.begin(path, keys, self.num_particles)
                system = systems.climb(
                    path, places, 1, count, system, keys, self.num_sweeps
                )
                negative = systems.energy_gradient(path, params, system)
                return systems.total_log_z(system), negative, system.min_cess

            window = self.k, self.m, self.max_systems
            return lax.map(
                lambda i: run_pair(propose, params, random.fold_in(key, i), *window),
                numbers,
            ), ()

        shared = (*self._rungs(graph, params, state), params, key)
        return sharding.shard_jobs(
            run, jnp.arange(self.num_pairs), shared, self.num_pairs
        )[0]

    def _metrics(self, pairs: PairOutcome, state: ParticleState) -> dict[str, Array]:
        met = pairs.meeting_time >= 0
        tau = jnp.where(met, pairs.meeting_time, 0)
        return {
            "meeting_time_mean": tau.sum() / jnp.maximum(met.sum(), 1),
            "meeting_time_max": tau.max(),
            "num_unmet": (~met).sum(),
            "acceptance": pairs.acceptance.mean(),
            "longest_stay": pairs.longest.max(),
            "num_rungs": state.count - int(self.path == "line"),
            "min_cess": pairs.min_cess.min(),
        }

    def diagnose(self, history: History) -> str | None:
        """Report a system that was kept for long, params that outran their path, and too few rungs."""
        stay = history["longest_stay"]
        cess = history["min_cess"]
        if (longest := int(np.nanmax(stay, initial=0))) >= LONG_STAY:
            return (
                f"ParticleUCD: a chain kept one system while it rejected {longest} "
                f"others, at step {int(np.nanargmax(stay))} of its stage: the tail of "
                "Z is heavy. Raise num_particles, num_sweeps or cess_threshold, or use "
                "the other path."
            )
        if (lowest := float(np.nanmin(cess, initial=1))) < _MIN_CESS:
            return (
                f"ParticleUCD: at step {int(np.nanargmin(cess))} of its stage a rung "
                f"left {lowest:.1%} of the particles effective: the params moved "
                "further than the path could follow. Take smaller steps or more "
                "particles."
            )
        poor = cess < 1 - _SLACK * (1 - self.cess_threshold)
        if poor.sum() <= _OFTEN * poor.size:
            return None
        return (
            f"ParticleUCD: at {poor.mean():.0%} of the steps rungs missed "
            f"cess_threshold={self.cess_threshold:g} by a factor of two, with "
            f"{np.nanmax(history['num_rungs']):.0f} of at most {self.max_rungs} rungs: "
            "acceptance suffers, the gradient stays unbiased. Raise max_rungs or "
            "num_particles, or lower cess_threshold."
        )
