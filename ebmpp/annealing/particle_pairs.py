# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
r"""Coupled particle independent Metropolis-Hastings: unbiased means from particle systems.

A chain of systems proposes a new system and accepts it with probability
``min(1, Z'/Z)``, where Z is a system's estimate of the partition function. Two such
chains, the second one step behind, get the same proposals and the same uniforms, so
they meet as soon as both accept the same system.

With independent systems S_0, S_1, ... the chains start at X_0 = S_0 and Y_0 = S_1. X_1
is S_1 or X_0. At t >= 2 the transitions from X_{t-1} to X_t and from Y_{t-2} to Y_{t-1}
use S_t and one uniform. With :math:`\tau` the first t >= 1 at which X_t = Y_{t-1}, the
estimate is

.. math::

    H_{k:m} = \frac{1}{m-k+1} \sum_{t=k}^{m} f(X_t)
        + \sum_{t=k+1}^{\tau-1} \min\Big(1, \frac{t-k}{m-k+1}\Big) (f(X_t) - f(Y_{t-1})),

where f of a system is its weighted mean of f. Memory does not grow with :math:`\tau`.

**References**

1. Andrieu, Doucet, Holenstein (2010), *Particle Markov chain Monte Carlo methods*,
   section 2.4.2.
2. Middleton, Deligiannidis, Doucet, Jacob (2019), *Unbiased smoothing using particle
   independent Metropolis-Hastings*, Algorithm 2 and eq. 5.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeVar
import warnings

from jaxtyping import Bool, Float, PyTree
import numpy as np
from numpy.typing import ArrayLike
from tqdm.auto import tqdm

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.sharding import Mesh

from ebmpp.annealing import systems
from ebmpp.annealing.ladder import Ladder
from ebmpp.annealing.log_partition import not_finite
from ebmpp.annealing.particles import Options, PathSpec, prepare, run_keys
from ebmpp.annealing.path import Path
from ebmpp.core import (
    Blocks,
    Count,
    Key,
    Keys,
    Params,
    PerRow,
    Scalar,
    StateLike,
    at_index,
    checks,
    compiled,
    random,
    sharding,
    statistics,
)
from ebmpp.coupling.accumulators import blocks_of, check_function
from ebmpp.coupling.expectation import UnbiasedEstimate, check_unmet
from ebmpp.graph import FactorGraph
from ebmpp.moves.sweeps import MovesLike

#: Number of consecutive rejections that causes a warning.
LONG_STAY = 20
_BATCH = 2  # systems that run side by side: every pair needs the first two

#: From keys of systems to log Z, values (a pytree) and lowest conditional effective
#: sample size of each.
Propose = Callable[
    [systems.IslandKeys], tuple[systems.PerIsland, PyTree, systems.PerIsland]
]
_Tree = TypeVar("_Tree")


class Chain(NamedTuple):
    """The current system of a chain."""

    log_z: Scalar
    value: PyTree


class PairOutcome(NamedTuple):
    """Result of a pair of chains of systems."""

    total: PyTree
    """H_{k:m}."""
    meeting_time: Count
    """-1 where unmet."""
    num_systems: Count
    """Number of systems that the estimate needs."""
    acceptance: Scalar
    """Mean acceptance probability of the leading chain."""
    longest: Count
    """Largest number of consecutive rejections by the leading chain."""
    log_z: Float[Array, "2"]
    """Estimates of log Z by the first two systems, relative to that of the reference."""
    min_cess: Scalar
    """Lowest of all systems; see :class:`~ebmpp.annealing.systems.Systems`."""
    broken: Bool[Array, ""]
    """True if a system's Z is NaN or infinite."""


class _Pair(NamedTuple):
    x: Chain
    y: Chain
    rejections: Array  # in a row
    result: PairOutcome  # so far, with the sum of acceptance probabilities


def proposal(
    value: Callable[[Blocks, PerRow], PyTree],
    num: int,
    path: Path,
    ladder: Ladder,
    sweeps: Array | int = 1,
) -> Propose:
    """Return the run of systems of ``num`` particles, with values of states and weights."""

    def propose(keys):
        system = systems.draw_initial(path, keys, num)
        system = systems.run_rungs(
            path, ladder.places, 1, ladder.count, system, keys, sweeps
        )
        x = systems.all_blocks(path, system, keys)
        split = systems.split_islands(system._replace(x=x))
        values = jax.vmap(value)(split.x, split.weights)
        return systems.total_log_z(system), values, system.min_cess

    return propose


def run_pair(
    propose: Propose,
    key: Key,
    k: int,
    m: int,
    max_systems: int | None = None,
) -> PairOutcome:
    """Run one pair of chains until they meet, and at least to time m.

    :param key: of the pair; system t draws from ``fold_in(key, t)``, its acceptance
        from ``fold_in(key, t, 1)``.
    :param max_systems: number of systems after which an unmet pair stops; None for no
        limit.
    """
    length = m - k + 1
    dtype = jnp.result_type(float)

    def is_running(pair):
        result = pair.result
        is_needed = (result.meeting_time < 0) | (result.num_systems <= m)
        is_open = is_needed & ~result.broken
        return is_open & (result.num_systems < (max_systems or checks.LARGEST))

    def transition(pair, new, cess):
        result = pair.result
        t = result.num_systems
        is_unmet = result.meeting_time < 0
        log_u = jnp.log(random.uniforms(random.fold_in(key, t, 1), 1)[0])
        log_ratio_x = new.log_z - pair.x.log_z
        log_ratio_y = new.log_z - pair.y.log_z
        accept_x = (t == 0) | (log_u < log_ratio_x)
        accept_y = is_unmet & ((t == 1) | ((t > 1) & (log_u < log_ratio_y)))
        x = _select(accept_x, new, pair.x)
        y = _select(accept_y, new, pair.y)
        meets = is_unmet & (t > 0) & accept_x & accept_y
        tau = jnp.where(meets, t, result.meeting_time)
        average = jnp.where((t >= k) & (t <= m), 1 / length, 0)
        correction = jnp.minimum(1, (t - k) / length)
        correction = jnp.where((tau < 0) & (t > k), correction, 0)

        def add(total, a, b):
            weight_x = (average + correction).astype(a.dtype)
            return total + weight_x * a - correction.astype(a.dtype) * b

        probability = jnp.where(t > 0, jnp.exp(jnp.minimum(0, log_ratio_x)), 0)
        rejections = jnp.where(accept_x, 0, pair.rejections + 1)
        is_broken = jnp.isnan(new.log_z) | (new.log_z == jnp.inf)
        result = PairOutcome(
            total=jax.tree.map(add, result.total, x.value, y.value),
            meeting_time=tau,
            num_systems=t + 1,
            acceptance=result.acceptance + probability,
            longest=jnp.maximum(result.longest, rejections),
            log_z=jnp.where(jnp.arange(2) == t, new.log_z, result.log_z),
            min_cess=jnp.minimum(result.min_cess, cess),
            broken=result.broken | is_broken,
        )
        return _Pair(x, y, rejections, result)

    def body(pair):
        times = pair.result.num_systems + jnp.arange(_BATCH)
        keys = random.materialize(random.fold_in(key, times))
        log_z, values, cess = propose(keys)
        for i in range(_BATCH):
            new = Chain(log_z[i], at_index(values, i))
            after = transition(pair, new, cess[i])
            pair = after if i == 0 else _select(is_running(pair), after, pair)
        return pair

    zero = jnp.zeros((), dtype)
    count = jnp.zeros((), jnp.int32)
    _, values, _ = jax.eval_shape(propose, key[None])
    empty = jax.tree.map(lambda s: jnp.zeros(s.shape[1:], s.dtype), values)
    start = Chain(zero, empty)
    result = PairOutcome(
        total=start.value,
        meeting_time=count - 1,
        num_systems=count,
        acceptance=zero,
        longest=count,
        log_z=jnp.zeros(2),
        min_cess=zero + 1,
        broken=count > 0,
    )
    pair = _Pair(start, start, count, result)
    result = lax.while_loop(is_running, body, pair).result
    num_transitions = jnp.maximum(result.num_systems - 1, 1).astype(dtype)
    return result._replace(acceptance=result.acceptance / num_transitions)


def _select(condition: Array, new: _Tree, old: _Tree) -> _Tree:
    return jax.tree.map(partial(jnp.where, condition), new, old)


@compiled(statics=3, key=lambda *args: args[3].graph, unbounded=True)
def _run_pairs(
    fn: Callable[[Blocks], PyTree],
    num: int,
    window: tuple[int, int, int | None],
    path: Path,
    ladder: Ladder,
    sweeps: Array,
    keys: Keys,
) -> PairOutcome:
    """Run one pair per key, sharded over the devices of a mesh; leading axis: pairs.

    :param num: particles per system.
    :param window: k, m and the largest number of systems.
    """

    def run(keys, shared, *_):
        propose = proposal(partial(systems.weighted_mean, fn), num, *shared)
        return lax.map(lambda key: run_pair(propose, key, *window), keys), ()

    outcome, _ = sharding.shard_jobs(run, keys, (path, ladder, sweeps), len(keys))
    return sharding.replicate(outcome)


def particle_expectation(
    graph: FactorGraph,
    params: Params,
    fn: Callable[[Mapping[str, Array]], PyTree],
    *,
    rng_key: Array,
    num_particles: int = 1000,
    num_pairs: int = 100,
    k: int = 0,
    m: int = 1,
    path: PathSpec = None,
    data: StateLike | None = None,
    ladder: str | ArrayLike = "adaptive",
    cess_threshold: float = 0.95,
    num_sweeps: int | None = None,
    moves: MovesLike = None,
    max_systems: int | None = None,
    unmet: str = "raise",
    mesh: Mesh | None = None,
    progress_bar: bool = False,
) -> UnbiasedEstimate:
    """Estimate E[fn(state)] under the model without bias, by coupled chains of particle systems.

    A chain holds a system of :func:`ebmpp.smc` and accepts a new one with probability
    ``min(1, Z'/Z)``. Both chains of a pair get the same proposals and meet when both
    accept one; the estimate is :math:`H_{k:m}`. Meeting takes longer the wider the
    spread of log Z, and does not depend on how fast a Gibbs chain mixes.

    :param fn: from one state (a dict of blocks, without batch axes) to a pytree of
        numbers.
    :param rng_key: a jax key; a pair's draws depend on it and on the pair's number.
    :param num_particles: particles per system, at least 2.
    :param num_pairs: independent pairs, at least 1; the default is a tenth of
        :func:`~ebmpp.unbiased_expectation`'s, since each holds systems of particles. The
        standard error of few is noisy:
        1.96 of it held the truth in 0.75 to 0.94 of the runs with ten pairs, and in
        0.94 with 100.
    :param k: first time that counts, at least 0: the first system is near the model, so
        that nothing need be left out.
    :param m: last time that counts, at least k. 1 costs nothing, since pairs meet there
        at the earliest, and each unit beyond costs one system.
    :param path: None or "line", ``fit.path``, or a list of params: as for
        :func:`ebmpp.smc`, like data, ladder ("adaptive", or places), cess_threshold,
        num_sweeps and moves.
    :param max_systems: number of systems after which an unmet pair stops, more than m;
        None: no limit.
    :param unmet: treatment of stopped pairs: "raise", or "drop" them from the mean with
        a warning, because **that is biased**.
    :param mesh: devices over whose first axis the pairs are sharded, best a divisor of
        their number.
    :return: an :class:`~ebmpp.coupling.UnbiasedEstimate` of lag 1, with times in
        systems and ``cost`` in sweeps of one chain.
    :raises UnmetError: when pairs are unmet and ``unmet`` is "raise".
    :raises ArgumentError: as :func:`ebmpp.smc` does, and for a function that cannot be
        traced.
    :warns UserWarning: where a chain rejected 20 systems in a row or more: the tail of
        Z is heavy.

    **References**

    1. Middleton, Deligiannidis, Doucet, Jacob (2019), *Unbiased smoothing using
       particle independent Metropolis-Hastings*.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> params = rbm.init(jax.random.key(0))
    >>> result = ebmpp.particle_expectation(rbm, params, lambda x: x["v"],
    ...     rng_key=jax.random.key(1), num_particles=100, num_pairs=20)
    >>> result.value.shape, bool(result.acceptance > 0.9)
    ((4,), True)
    """
    num = checks.count("particle_expectation: num_particles", num_particles, 2)
    pairs = checks.count("particle_expectation: num_pairs", num_pairs)
    k = checks.count("particle_expectation: k", k, 0)
    m = checks.count("particle_expectation: m", m, k)
    checks.optional_count("particle_expectation: max_systems", max_systems, m + 2)
    checks.choice("particle_expectation: unmet", unmet, ("raise", "drop"))
    checks.flag("particle_expectation: progress_bar", progress_bar)
    options = Options(path, data, ladder, cess_threshold, num_sweeps, moves)
    outcomes = []
    with sharding.use_mesh("particle_expectation: mesh", mesh):
        params = sharding.place(params)
        run = prepare(
            "particle_expectation", graph, params, rng_key, num, options, shifted=False
        )
        check_function("particle_expectation: fn", fn, blocks_of(graph))
        statics = fn, num, (k, m, max_systems)
        shared = run.path, run.ladder, np.int32(run.num_sweeps)
        keys = run_keys(run.key, pairs)
        hidden = not (progress_bar and sharding.is_first())
        shards = sharding.num_shards()
        with tqdm(total=pairs, disable=hidden, desc="pairs", unit="pair") as bar:
            for batch in np.split(keys, range(shards, pairs, shards)):
                outcome = _run_pairs(*statics, *shared, batch)
                outcomes.append(jax.device_get(outcome))
                bar.update(len(batch))
    outcome = jax.tree.map(lambda *values: np.concatenate(values), *outcomes)
    sweeps = num * (len(run.places) - 1) * run.num_sweeps
    return _estimate(outcome, sweeps, k, m, max_systems, unmet)


def _estimate(
    outcome: PairOutcome, sweeps: int, k: int, m: int, limit: int | None, unmet: str
) -> UnbiasedEstimate:
    """Return the mean over the pairs that met.

    :param sweeps: of all particles of one system.
    """
    if outcome.broken.any():
        raise not_finite("particle_expectation: the weights of a system")
    met = np.asarray(outcome.meeting_time >= 0)
    cause = f"of particle systems had not met after {limit} systems"
    remedy = (
        "Raise max_systems (None is no limit), num_particles, num_sweeps or "
        "cess_threshold"
    )
    num_unmet = check_unmet(met, cause, remedy, unmet)
    if (longest := int(outcome.longest.max())) >= LONG_STAY:
        warnings.warn(
            f"a chain kept one system while it rejected {longest} others: the tail of "
            "Z is heavy, and a mean over few pairs may miss it. Raise num_particles, "
            "num_sweeps or cess_threshold, or give another path.",
            stacklevel=3,
        )
    totals = jax.tree.map(lambda h: h[met].astype(float), outcome.total)
    value = jax.tree.map(lambda h: h.mean(0), totals)

    def error_of(h):
        error = statistics.standard_error(np.moveaxis(h, 0, -1))
        return np.where(np.ptp(h, axis=0) == 0, np.nan, error)

    error = jax.tree.map(error_of, totals)
    return UnbiasedEstimate(
        value=value,
        standard_error=error,
        meeting_time=np.where(met, outcome.meeting_time, np.inf),
        met=met,
        cost=np.where(met, outcome.num_systems * float(sweeps), np.inf),
        k=k,
        m=m,
        lag=1,
        max_sweeps=limit,
        num_unmet=num_unmet,
        trials=1.0,
        acceptance=float(outcome.acceptance.mean()),
    )
