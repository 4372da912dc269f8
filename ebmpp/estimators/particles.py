# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased gradients from coupled particle systems."""

from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple

from jaxtyping import Float, Int32
import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import checks, random, sharding
from ebmpp.core.types import Eta, Key, Params, Rows, Scalar
from ebmpp.errors import ArgumentError
from ebmpp.estimators.base import Batch, Estimate, Estimator
from ebmpp.estimators.phases import batch_log_likelihood, signed_gradient, tractable_posterior
from ebmpp.estimators.ucd import UCD
from ebmpp.graph import FactorGraph
from ebmpp.sampling import annealing_path, independence, system_values, systems
from ebmpp.sampling.particle_pairs import LONG_STAY, check_max_systems
from ebmpp.sampling.path import Path
from ebmpp.sampling.systems import Ladder

_PATHS = ("line", "training")
#: A path is fitted anew where a rung was this many times less even than asked for.
_SLACK = 2.0
#: Of a rung: below this share of effective particles, params move faster than their path is fitted.
_UNEVEN = 0.1
#: So much less even is asked for where the rungs are too few.
_COARSER = 1.5
_OFTEN = 0.5  # of the steps: uneven at more of them is told of


class ParticleState(NamedTuple):
    """What :class:`ParticleUCD` carries."""

    eta0: Eta
    """Of the reference."""
    places: Float[Array, "rungs"]
    """Of the rungs on the line, or their betas on a path of training; the model itself is one more there."""
    knots: Params
    """Of the rungs on a path of training, ``(rungs, ...)`` each; nothing on the line."""
    count: Int32[Array, ""]
    """How many rungs there are, the reference's included."""
    asked: Scalar
    """How even they were made: ``evenness``, or less where ``max_rungs`` are too few."""
    even: Scalar
    """How even the least even rung of the last step was."""
    positive: Scalar
    """How far the pairs on the posterior run, where there are such."""
    seen: Int32[Array, ""]
    """Steps."""


@dataclasses.dataclass(frozen=True)
class ParticleUCD(Estimator):
    """Unbiased contrastive divergence whose negative phase does not wait for a Gibbs chain to mix.

    For models whose modes Gibbs chains do not leave, so that pairs of :class:`UCD` meet too late, and where a
    step may cost more than one of :class:`PCD`.

    It comes from coupled chains of particle systems (:func:`ebmpp.particle_expectation`), whose meeting time
    depends on the spread of their estimates of log Z. A step costs ``2 * num_particles`` particles carried
    along the path, and seldom more. Given the past the gradient is unbiased: the rungs come from pilot
    systems with draws of their own. The positive phase is exact where the latents given the visibles are one
    layer; elsewhere, and where entries are missing, it is that of ``posterior``: coupled Gibbs pairs, one a
    row.

    The history has ``meeting_time_mean``, ``meeting_time_max`` and ``num_unmet`` in systems, the
    ``acceptance`` of systems and the ``longest_stay`` of one, ``num_rungs``, and what the step's first
    systems say of ``log_partition`` and, in one layer, of the batch's ``log_likelihood``: too large on
    average by half the variance of log Z.

    :param num_particles: of each system, at least 2.
    :param path: "line": straight from independent units at the data's base rates, best for large models.
        "training": along the params that training has been through, best where modes are far apart; it keeps
        ``max_rungs`` params.
    :param num_pairs: pairs a step. Their mean is taken; devices of a mesh run them side by side.
    :param k: first time that counts.
    :param m: last time that counts, at least k. A step takes ``m + 1`` systems, and seldom more. Single steps
        that throw a run are corrections of pairs that met late, which ``k=1, m=3`` weighs less.
    :param num_sweeps: of blocked Gibbs at each rung.
    :param evenness: conditional effective sample size of each rung, between 0 and 1. The rungs are fitted
        anew once a step finds one that is clearly less even.
    :param refit_every: steps after which the rungs are fitted anew in any case.
    :param max_rungs: how many there may be. Where they are too few they are less even, which costs acceptance
        alone, and a warning.
    :param max_systems: stop a pair that has not met after so many systems. The default, no limit, is
        unbiased; a limit makes training stop with an error when a pair is unmet.
    :param posterior: how pairs on the posterior run, where they are needed.
    :raises ArgumentError: for numbers out of range or an unknown path.

    **References**

    1. Andrieu, Doucet, Holenstein (2010), *Particle Markov chain Monte Carlo methods*.
    2. Middleton, Deligiannidis, Doucet, Jacob (2019), *Unbiased smoothing using particle independent
       Metropolis-Hastings*, Algorithm 2.

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
    evenness: float = 0.95
    refit_every: int = 500
    max_rungs: int = 128
    max_systems: int | None = None
    posterior: UCD = UCD()
    takes_missing = True
    limit_name = "max_systems"

    def __post_init__(self) -> None:
        checks.set_counts(self, "num_particles", "max_rungs", least=2)
        checks.set_counts(self, "num_pairs", "num_sweeps", "refit_every")
        checks.set_counts(self, "k", "m", least=0)
        checks.choice("ParticleUCD: path", self.path, _PATHS)
        checks.number("ParticleUCD: evenness", self.evenness, above=0, below=1)
        checks.instance("ParticleUCD: posterior", self.posterior, UCD, "a UCD()")
        if self.m < self.k:
            raise ArgumentError(f"ParticleUCD: m is at least k; got k={self.k}, m={self.m}")
        limit = check_max_systems("ParticleUCD: max_systems", self.max_systems, self.m)
        object.__setattr__(self, "max_systems", limit)

    @property
    def max_sweeps(self) -> int | None:
        """The limit on systems."""
        return self.max_systems

    # -- the state -------------------------------------------------------------------------------

    def init(self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key) -> ParticleState:
        """The reference has the data's base rates; the first step finds the rungs."""
        eta0 = annealing_path.base_rates(graph, data)
        places = jnp.zeros(self.max_rungs)
        knots = {}
        if self.path == "training":
            knots = jax.tree.map(
                lambda a: jnp.zeros((self.max_rungs, *a.shape), a.dtype).at[0].set(a), params
            )
        one, zero = jnp.ones((), jnp.int32), jnp.zeros(())
        return ParticleState(eta0, places, knots, one, zero, zero, jnp.ones(()), jnp.zeros((), jnp.int32))

    def adopt(self, before: Any, fresh: ParticleState) -> ParticleState:
        """Go on along the path of another ParticleUCD that keeps as many rungs of its kind."""
        alike = isinstance(before, ParticleState) and jax.tree.structure(before) == jax.tree.structure(fresh)
        shapes = lambda state: jax.tree.map(jnp.shape, state)
        return before if alike and shapes(before) == shapes(fresh) else fresh

    def _rungs(self, graph: FactorGraph, params: Params, state: ParticleState) -> tuple[Path, Array, Array]:
        """The path to these params, and the places of its rungs."""
        if self.path == "line":
            return Path.line(graph, state.eta0, params), state.places, state.count
        put = lambda a, b: a.at[state.count].set(b)
        grown = lambda a: jnp.concatenate([a, a[-1:]])
        knots = jax.tree.map(lambda a, b: put(grown(a), b), state.knots, params)
        count = state.count + 1
        path = Path(graph, state.eta0, put(grown(state.places), 1.0), knots, count)
        return path, jnp.arange(self.max_rungs + 1, dtype=state.places.dtype), count

    def _fitted(self, graph: FactorGraph, params: Params, state: ParticleState, key: Key) -> ParticleState:
        """The state with rungs that are as even as asked for, at these params, or as even as there can be."""
        path, _, _ = self._rungs(graph, params, state)
        capacity = self.max_rungs + int(self.path == "training")

        def coarser(carry: tuple[Array, Array, Ladder]) -> tuple[Array, Array, Ladder]:
            first, asked, _ = carry
            asked = jnp.where(first, asked, 1 - _COARSER * (1 - asked))
            found = systems.find_ladder(path, key, self.num_particles, asked, capacity, self.num_sweeps)
            return jnp.array(False), asked, found

        # The first search is a turn of the loop: a copy before it would compile all of a system twice.
        none = Ladder(jnp.zeros(capacity), jnp.full((), capacity, jnp.int32))
        too_few = lambda carry: carry[0] | (~carry[2].whole() & (carry[1] > 0))
        start = jnp.array(True), jnp.asarray(self.evenness, jnp.result_type(float)), none
        _, asked, ladder = lax.while_loop(too_few, coarser, start)
        state = state._replace(asked=asked)
        if self.path == "line":
            return state._replace(places=ladder.places, count=ladder.count)
        cut = path.cut(ladder.places, ladder.count)  # its last knot is the model, which moves on
        short = lambda a: a[: self.max_rungs]
        knots = jax.tree.map(short, cut.knots)
        return state._replace(places=short(cut.betas), knots=knots, count=ladder.count - 1)

    # -- a step ----------------------------------------------------------------------------------

    def estimate(
        self, graph: FactorGraph, params: Params, state: ParticleState, batch: Batch, key: Key
    ) -> Estimate:
        """Positive minus negative phase, and the meeting times."""
        stale = state.even < 1 - _SLACK * (1 - state.asked)
        fit = lambda s: self._fitted(graph, params, s, random.fold_in(key, 1))
        state = lax.cond(stale | (state.seen % self.refit_every == 0), fit, lambda s: s, state)
        state = state._replace(seen=state.seen + 1)
        pairs = self._pairs(graph, params, state, random.fold_in(key, 0))
        negative = jax.tree.map(lambda g: g.mean(0) * batch.weights.sum(), pairs.total)
        metrics = self._told(pairs, state) | {"log_partition": self._log_z(graph, state, pairs)}
        metrics |= batch_log_likelihood(graph, params, batch, metrics["log_partition"])
        unmet = metrics["num_unmet"]
        if tractable_posterior(graph) and not batch.known:
            positive = signed_gradient(graph, params, batch.rows, batch.weights)
        else:
            past = (state.positive, state.seen)
            other = self.posterior.posterior_phase(graph, params, past, batch, random.fold_in(key, 7))
            positive, state = other.gradient, state._replace(positive=other.length)
            metrics |= {f"posterior_{name}": v for name, v in other.metrics.items()}
            unmet = unmet + (0 if self.posterior.allow_unmet else other.metrics["num_unmet"])
        bad = (unmet > 0) | pairs.broken.any()  # must not pass: training stops on what is not finite
        gradient = jax.tree.map(lambda p, n: jnp.where(bad, jnp.nan, p - n), positive, negative)
        systems_made = self.num_pairs * (1 + jnp.maximum(metrics["meeting_time_mean"], self.m))
        rungs = metrics["num_rungs"].astype(systems_made.dtype)
        sweeps = systems_made * (self.num_particles * self.num_sweeps) * rungs
        state = state._replace(even=pairs.even.min())
        return Estimate(gradient, state, metrics, sweeps / len(batch.weights))

    def _pairs(
        self, graph: FactorGraph, params: Params, state: ParticleState, key: Key
    ) -> independence.PairOutcome:
        """Pairs of chains of systems, with a leading axis; devices of a mesh run theirs."""

        def some(numbers: Array, shared: tuple, *_: Any) -> tuple[independence.PairOutcome, tuple]:
            path, places, count, params, key = shared

            def propose(keys: Array) -> tuple[Array, Params, Array]:
                made = systems.begin(path, keys, self.num_particles)
                made = systems.climb(path, places, 1, count, made, keys, self.num_sweeps)
                negative = system_values.energy_gradient(path, params, made)
                return systems.total_log_z(made), negative, made.even

            one = lambda i: independence.run_pair(
                propose, params, random.fold_in(key, i), self.k, self.m, self.max_systems
            )
            return lax.map(one, numbers), ()

        shared = (*self._rungs(graph, params, state), params, key)
        return sharding.apart(some, jnp.arange(self.num_pairs), shared, self.num_pairs)[0]

    def _log_z(self, graph: FactorGraph, state: ParticleState, pairs: independence.PairOutcome) -> Scalar:
        """log Z by the mean of each pair's first two systems."""
        value, _ = systems.pooled(pairs.log_z.ravel())
        return value + sum(f.log_normalizer(state.eta0[b]).sum() for b, f in graph.families.items())

    def _told(self, pairs: independence.PairOutcome, state: ParticleState) -> dict[str, Array]:
        met = pairs.meeting_time >= 0
        tau = jnp.where(met, pairs.meeting_time, 0)
        return {
            "meeting_time_mean": tau.sum() / jnp.maximum(met.sum(), 1),
            "meeting_time_max": tau.max(),
            "num_unmet": (~met).sum(),
            "acceptance": pairs.acceptance.mean(),
            "longest_stay": pairs.longest.max(),
            "num_rungs": state.count - int(self.path == "line"),
            "evenness": pairs.even.min(),
        }

    def caution(self, told: Mapping[str, np.ndarray]) -> str | None:
        """That a system held for long, that a step left the path behind, or that the rungs are too few."""
        longest = int(np.nanmax(told["longest_stay"], initial=0))
        if longest >= LONG_STAY:
            return (
                f"ParticleUCD: a chain held one system while it turned down {longest} others, at step "
                f"{int(np.nanargmax(told['longest_stay']))} of its stage: the tail of Z is heavy. Raise "
                "num_particles, num_sweeps or evenness, or take the other path"
            )
        least = float(np.nanmin(told["evenness"], initial=1))
        if least < _UNEVEN:
            return (
                f"ParticleUCD: at step {int(np.nanargmin(told['evenness']))} of its stage a rung left "
                f"{least:.1%} of the particles effective: the params had moved further than the path could "
                "follow. Take smaller steps or more particles"
            )
        uneven = told["evenness"] < 1 - _SLACK * (1 - self.evenness)
        if uneven.sum() <= _OFTEN * uneven.size:
            return None
        return (
            f"ParticleUCD: at {uneven.mean():.0%} of the steps rungs were less than half as even as asked "
            f"for (evenness={self.evenness:g}), at {np.nanmax(told['num_rungs']):.0f} rungs of at most "
            f"{self.max_rungs}: acceptance suffers, the gradient stays unbiased. Raise max_rungs or "
            "num_particles, or lower evenness"
        )
