# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased expectations from coupled chains of particle systems."""

from collections.abc import Callable, Mapping
from typing import Any
import warnings

import numpy as np
from tqdm.auto import tqdm

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.sharding import Mesh

from ebmpp.annealing import independence, system_values, systems
from ebmpp.annealing.log_partition import Data
from ebmpp.annealing.path import Path
from ebmpp.annealing.request import Paths, prepare
from ebmpp.annealing.systems import Ladder
from ebmpp.core import checks, random, sharding
from ebmpp.core.compile import compiled
from ebmpp.core.statistics import standard_error
from ebmpp.core.types import Blocks, Params
from ebmpp.coupling.accumulators import check_function
from ebmpp.coupling.expectation import UnbiasedEstimate
from ebmpp.errors import ArgumentError, DomainError, UnmetError
from ebmpp.graph import FactorGraph

#: Proposals turned down in a row, from which on it is told.
LONG_STAY = 20


def _shapes(graph: FactorGraph) -> dict[str, jax.ShapeDtypeStruct]:
    """Of one state."""
    return {b: jax.ShapeDtypeStruct(f.shape, f.dtype) for b, f in graph.families.items()}


@compiled(statics=7)
def _some_pairs(
    graph: FactorGraph,
    fn: Callable[[Blocks], Any],
    num: int,
    k: int,
    m: int,
    max_systems: int | None,
    sweeps: int,
    path: Path,
    params: Params,
    ladder: Ladder,
    keys: Array,
) -> independence.PairOutcome:
    """Pairs with a leading axis, as many as there are keys; devices of a mesh run theirs."""
    as_float = lambda s: jax.ShapeDtypeStruct(s.shape, jnp.result_type(float))
    like = jax.tree.map(as_float, jax.eval_shape(fn, _shapes(graph)))

    def some(keys: Array, shared: tuple, *_: Any) -> tuple[independence.PairOutcome, tuple]:
        path, params, ladder = shared

        def propose(keys: Array) -> tuple[Array, Any, Array]:
            made = systems.begin(path, keys, num)
            made = systems.climb(path, ladder.places, 1, ladder.count, made, keys, sweeps)
            x = system_values.states(path, params, made, keys)
            return systems.total_log_z(made), system_values.weighted_mean(fn, x, made), made.even

        return lax.map(lambda key: independence.run_pair(propose, like, key, k, m, max_systems), keys), ()

    return sharding.everywhere(sharding.apart(some, keys, (path, params, ladder), len(keys))[0])


def particle_expectation(
    graph: FactorGraph,
    params: Params,
    fn: Callable[[Mapping[str, Array]], Any],
    *,
    rng_key: Array,
    num_particles: int = 1000,
    num_pairs: int = 10,
    k: int = 0,
    m: int = 1,
    path: Paths = None,
    data: Data | None = None,
    ladder: str | Any = "adaptive",
    evenness: float = 0.95,
    num_sweeps: int = 1,
    max_systems: int | None = None,
    unmet: str = "raise",
    mesh: Mesh | None = None,
    progress_bar: bool = False,
) -> UnbiasedEstimate:
    """E[fn(state)] under the model, without bias, by H_{k:m} over coupled chains of particle systems.

    A chain holds a system of :func:`ebmpp.smc` and takes a fresh one with probability ``min(1, Z'/Z)``; the
    two chains of a pair are offered the same systems, and meet when both take one. That takes the longer, the
    wider the spread of log Z, and does not depend on how long a Gibbs chain takes to mix; all particles of a
    system count. Heavy tails of Z show as long meeting times.

    :param graph: the model.
    :param params: a dict keyed by factor name.
    :param fn: from one state (a dict of blocks, without batch axes) to a pytree of numbers.
    :param rng_key: a jax key. A pair's draws depend on it and on the pair's number alone.
    :param num_particles: of each system, at least 2.
    :param num_pairs: independent pairs, at least 1.
    :param k: first time that counts, at least 0: the chain has seen k fresh systems.
    :param m: last time that counts, at least k. 1 makes use of both first systems, for nothing; each more
        costs one.
    :param path: None or "line", ``fit.path``, or a list of params: as for :func:`ebmpp.smc`, like data,
        ladder ("adaptive", or places), evenness, and num_sweeps.
    :param max_systems: stop an unmet pair after so many systems, more than m; None: no limit.
    :param unmet: what to do about pairs that are stopped: "raise", or "drop" them from the mean, with a
        warning, because **that is biased**.
    :param mesh: devices to share the pairs, over the mesh's first axis: take a multiple of them. The pairs
        are those of one device.
    :param progress_bar: show one.
    :return: an :class:`~ebmpp.coupling.UnbiasedEstimate` of lag 1, whose times are in systems, and ``cost``
        in sweeps of one chain.
    :raises UnmetError: when pairs are unmet and ``unmet`` is "raise".
    :raises ArgumentError: as :func:`ebmpp.smc`, and for a function that cannot be traced.
    :warns UserWarning: where a chain turned down 20 systems in a row or more: the tail of Z is heavy.

    **References**

    1. Middleton, Deligiannidis, Doucet, Jacob (2019), *Unbiased smoothing using particle independent
       Metropolis-Hastings*.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> params = rbm.init(jax.random.key(0))
    >>> made = ebmpp.particle_expectation(rbm, params, lambda x: x["v"], rng_key=jax.random.key(1),
    ...                                   num_particles=100)
    >>> made.value.shape, bool(made.acceptance > 0.9)
    ((4,), True)
    """
    name = "particle_expectation"
    num = checks.count(f"{name}: num_particles", num_particles, 2)
    pairs = checks.count(f"{name}: num_pairs", num_pairs)
    k, m = checks.count(f"{name}: k", k, 0), checks.count(f"{name}: m", m, 0)
    if m < k:
        raise ArgumentError(f"{name}: m is at least k; got k={k}, m={m}")
    check_max_systems(f"{name}: max_systems", max_systems, m)
    checks.choice(f"{name}: unmet", unmet, ("raise", "drop"))
    checks.flag(f"{name}: progress_bar", progress_bar)
    key = random.key_pair(checks.key(f"{name}: rng_key", rng_key))
    options = {"path": path, "data": data, "ladder": ladder, "evenness": evenness, "num_sweeps": num_sweeps}
    made = []
    with sharding.over(f"{name}: mesh", mesh):
        run = prepare(name, graph, sharding.place(params), key, num, **options)
        check_function(f"{name}: fn", fn, _shapes(graph))
        statics = (graph, fn, num, k, m, max_systems, run.num_sweeps)
        keys = random.fold_in(random.fold_in(key, 0, 1), np.arange(pairs))
        hidden = not (progress_bar and sharding.is_first())
        with tqdm(total=pairs, disable=hidden, desc="pairs", unit="pair") as bar:
            for own in np.split(keys, range(sharding.width(), pairs, sharding.width())):
                made.append(jax.device_get(_some_pairs(*statics, run.path, run.params, run.ladder, own)))
                bar.update(len(own))
    outcome = jax.tree.map(lambda *each: np.concatenate(each), *made)
    return _estimate(outcome, num * (len(run.places) - 1) * run.num_sweeps, k, m, max_systems, unmet)


def check_max_systems(name: str, value: int | None, m: int) -> int | None:
    """A limit on the systems of a pair, or None for no limit.

    :raises ArgumentError: for a limit that the window needs more than.
    """
    made = checks.optional_count(name, value)
    if made is not None and made < m + 2:
        raise ArgumentError(f"{name} is at least m + 2, {m + 2}, or None for no limit; got {made}")
    return made


def _estimate(
    outcome: independence.PairOutcome, sweeps: int, k: int, m: int, limit: int | None, unmet: str
) -> UnbiasedEstimate:
    """The mean over the pairs that met.

    :param sweeps: of one system, over all its particles.
    """
    if outcome.broken.any():
        raise DomainError(
            "particle_expectation: a system's weights are not finite: a model on the way may not normalise, "
            "or natural parameters overflow. Look at the params, and at those of the path"
        )
    met = outcome.meeting_time >= 0
    missing = int((~met).sum())
    if missing:
        told = f"{missing} of {len(met)} pairs of particle systems had not met after {limit} systems"
        if unmet == "raise" or not met.any():
            raise UnmetError(
                f"{told}: raise max_systems (None is no limit), num_particles, num_sweeps or evenness, or "
                'pass unmet="drop" to leave them out, which is biased'
            )
        warnings.warn(f"{told} and were dropped: the estimate is biased", stacklevel=3)
    longest = int(outcome.longest.max())
    if longest >= LONG_STAY:
        warnings.warn(
            f"a chain held one system while it turned down {longest} others: the tail of Z is heavy, and a "
            "mean over few pairs may miss it. Raise num_particles, num_sweeps or evenness, or give another "
            "path",
            stacklevel=3,
        )
    kept = jax.tree.map(lambda h: h[met].astype(float), outcome.total)
    axis_last = lambda h: np.moveaxis(h, 0, -1)
    return UnbiasedEstimate(
        value=jax.tree.map(lambda h: h.mean(0), kept),
        standard_error=jax.tree.map(lambda h: standard_error(axis_last(h)), kept),
        meeting_time=np.where(met, outcome.meeting_time, np.inf),
        met=np.asarray(met),
        cost=np.where(met, outcome.num_systems * float(sweeps), np.inf),
        k=k,
        m=m,
        lag=1,
        max_sweeps=limit,
        num_unmet=missing,
        trials=1.0,
        acceptance=float(outcome.acceptance.mean()),
    )
