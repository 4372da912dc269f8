# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Particle systems from the host: log Z with an error from independent systems, and unbiased expectations."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import math
from typing import Any, NamedTuple
import warnings

from jaxtyping import Float
import numpy as np
from tqdm.auto import tqdm

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import checks, random
from ebmpp.core.programs import compiled
from ebmpp.core.statistics import standard_error
from ebmpp.core.types import Blocks, Params
from ebmpp.errors import ArgumentError, DomainError, UnmetError
from ebmpp.graph import FactorGraph
from ebmpp.graph.states import is_concrete
from ebmpp.sampling import annealing_path, independence, ladders, system_values, systems
from ebmpp.sampling.accumulators import check_function
from ebmpp.sampling.expectation import Estimate
from ebmpp.sampling.log_partition import Data, LogPartition
from ebmpp.sampling.path import Path
from ebmpp.sampling.systems import Ladder, Systems

Paths = str | Path | Sequence[Params] | None

_ISLANDS = 10  # of fewer systems a standard error is a guess
_RUNGS = 25  # in one call of the device: what a progress bar waits for
_FEW = 0.25  # of the particles: an effective sample size below is told
#: Proposals turned down in a row, from which on it is told.
LONG_STAY = 20


class Run(NamedTuple):
    """What particle systems are asked for, checked."""

    path: Path
    params: Params
    ladder: Ladder
    log_z0: float
    """log Z of the reference."""
    num_sweeps: int

    @property
    def graph(self) -> FactorGraph:
        return self.path.graph

    @property
    def places(self) -> np.ndarray:
        """Of the rungs."""
        return np.asarray(self.ladder.places)[: int(self.ladder.count)]


def _prepare(
    name: str,
    graph: FactorGraph,
    params: Params,
    key: Array,
    num: int,
    *,
    path: Paths,
    data: Data | None,
    ladder: Any,
    evenness: float,
    num_sweeps: int,
) -> Run:
    checks.instance(f"{name}: graph", graph, FactorGraph, "a FactorGraph")
    if not all(map(is_concrete, jax.tree.leaves(params))):
        raise ArgumentError(
            f"{name} runs from the host and takes known params; under jit, or in a function that is a "
            "monitor of fit, it cannot be traced: call it on params that were kept"
        )
    graph.check(params)
    checks.number(f"{name}: evenness", evenness, above=0, below=1)
    sweeps = checks.count(f"{name}: num_sweeps", num_sweeps)
    eta0 = (
        path.eta0
        if isinstance(path, Path)
        else annealing_path.reference(graph, params, random.fold_in(key, 4, 1), data)
    )
    way = as_path(name, graph, eta0, params, path)
    log_z0 = annealing_path.log_partition_of(graph, eta0)
    if isinstance(ladder, str):
        checks.choice(f"{name}: ladder", ladder, ("adaptive",), "places from 0 to the path's end")
        found = ladders.adaptive(way, random.fold_in(key, 1, 1), num, evenness, sweeps)
    else:
        found = _given(f"{name}: ladder", ladder, int(way.num) - 1)
    return Run(way, params, found, log_z0, sweeps)


def _given(name: str, places: Any, end: int) -> Ladder:
    wanted = f"{name}: places increase from 0 to {end}, the path's end"
    try:
        made = np.asarray(places, np.float32)
    except (TypeError, ValueError):
        raise ArgumentError(f"{wanted}; got {places!r}") from None
    if made.ndim != 1 or len(made) < 2 or made[0] != 0 or made[-1] != end or not (np.diff(made) > 0).all():
        raise ArgumentError(f"{wanted}; got {checks.tell(places)}")
    return Ladder(jnp.asarray(made), jnp.full((), len(made), jnp.int32))


def as_path(name: str, graph: FactorGraph, eta0: Blocks, params: Params, path: Paths) -> Path:
    """The path that a user asks for, which ends at ``params``.

    :param path: None or "line", a :class:`~ebmpp.sampling.Path`, or a list of params.
    :raises ArgumentError: for anything else, or a path of another graph.
    :raises ParameterError: for params of the list that do not fit.
    """
    if path is None or (isinstance(path, str) and path == "line"):
        return Path.line(graph, eta0, params)
    if isinstance(path, Path):
        if path.graph != graph:
            raise ArgumentError(f"{name}: the path is one of {path.graph!r}, and the graph is {graph!r}")
        return path.to(params)
    if isinstance(path, str):
        raise ArgumentError(f'{name}: path is "line", fit.path or a list of params; got {path!r}')
    each = checks.sequence(f"{name}: path", path, 'params, or "line"')
    for made in each:
        graph.check(made)
    return Path.through(graph, eta0, [*each, params])


# -- log Z -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, repr=False)
class ParticleSystem(LogPartition):
    """Weighted particles at a model, and an estimate of log Z; see :func:`ebmpp.smc`.

    ``betas`` are the places of the rungs on the path: inverse temperatures where it is the line.
    """

    particles: Blocks
    """All blocks, ``(num_particles, *shape)`` each, the islands one after another."""
    weights: Float[np.ndarray, "num_particles"]
    """Of sum 1 over all islands; they make means over the model, of an error of order 1/num_particles."""
    log_z: Float[np.ndarray, "num_islands"]
    """What each island says of log Z: the log of their mean is ``log_partition``."""
    num_rungs: int
    distinct_ancestors: float
    """The share of the first particles that have descendants among the last, at most 1."""

    def __repr__(self) -> str:
        return (
            f"ParticleSystem({self.log_partition:.6g} +- {self.standard_error:.2g} from {len(self.log_z)} "
            f"islands, {self.effective_sample_size:.1f} of {len(self.log_weights)} particles effective, "
            f"{self.distinct_ancestors:.2g} of them distinct ancestors, {self.num_rungs} rungs)"
        )


@compiled(statics=2)
def _begin(graph: FactorGraph, num: int, path: Path, keys: Array) -> Systems:
    del graph
    return systems.begin(path, keys, num)


@compiled(statics=2)
def _climb(
    graph: FactorGraph, sweeps: int, path: Path, ladder: Ladder, first: Array, made: Systems, keys: Array
) -> Systems:
    del graph
    last = jnp.minimum(first + _RUNGS, ladder.count)
    return systems.climb(path, ladder.places, first, last, made, keys, sweeps)


def start_systems(
    graph: FactorGraph,
    params: Params,
    eta0: Blocks,
    key: Array,
    islands: int,
    num: int,
    evenness: float = 0.9,
) -> Systems:
    """Systems at a model, straight from the reference, by a ladder of their own pilot.

    :param key: ``(2,)``.
    """
    path = Path.line(graph, eta0, params)
    ladder = ladders.adaptive(path, random.fold_in(key, 1, 1), num, evenness, 1)
    keys = random.fold_in(random.fold_in(key, 0, 1), jnp.arange(islands))
    made, count = _begin(graph, num, path, keys), int(ladder.count)
    for first in range(1, count, _RUNGS):
        made = _climb(graph, 1, path, ladder, np.int32(first), made, keys)
    return made


@compiled(statics=1)
def _finish(graph: FactorGraph, path: Path, params: Params, made: Systems, keys: Array) -> tuple:
    del graph
    return system_values.states(path, params, made, keys), made.log_z, made.log_weights, made.ancestors


def smc(
    graph: FactorGraph,
    params: Params,
    *,
    rng_key: Array,
    num_particles: int = 1000,
    num_islands: int = _ISLANDS,
    path: Paths = None,
    data: Data | None = None,
    ladder: str | Any = "adaptive",
    evenness: float = 0.95,
    num_sweeps: int = 1,
    progress_bar: bool = False,
) -> ParticleSystem:
    """log Z and weighted draws by sequential Monte Carlo, for any graph.

    Particles start from independent units and are carried along a path of models: weighed at each rung,
    resampled where fewer than half of an island's are effective, swept by blocked Gibbs. Each island's
    estimate of Z is **unbiased**, and so is their mean, whatever the path and the rungs; its log is too small
    on average. The standard error is that of independent islands, right for any resampling. Like any forward
    estimate it does not know of a mode that no particle has found.

    The weights are those of the marginal law of as few units as can be, as in :func:`ebmpp.ais`, which goes
    the same way without resampling.

    :param graph: the model.
    :param params: a dict keyed by factor name.
    :param rng_key: a jax key; a particle's draws depend on it and on the particle's number alone.
    :param num_particles: of all islands together, a multiple of their number.
    :param num_islands: independent systems, at least 10.
    :param path: None or "line": straight from independent units. ``fit.path``: along a training run. A list
        of params: straight to the first, and on through the others to the model.
    :param data: rows of the visible blocks: start from their base rates. By default from those of a pilot.
    :param ladder: "adaptive": rungs of equal ``evenness``, found by a system of one island whose draws are
        used for nothing else. Or places from 0 to the path's end (1 for the line; else the number of params,
        this model's included).
    :param evenness: the conditional effective sample size of each rung, between 0 and 1: nearer to 1 are more
        rungs.
    :param num_sweeps: of blocked Gibbs at each rung.
    :param progress_bar: show one.
    :return: a :class:`ParticleSystem`.
    :raises ArgumentError: for numbers out of range, a path or places that do not fit, or under ``jit``.
    :raises ParameterError: for params that do not fit.
    :raises StateError: data of a wrong name, shape or value.
    :raises DomainError: where a model on the way does not normalise.
    :warns UserWarning: where less than a quarter of the particles is effective.

    **References**

    1. Del Moral, Doucet, Jasra (2006), *Sequential Monte Carlo samplers*.
    2. Zhou, Johansen, Aston (2016), *Toward automatic model comparison: an adaptive sequential Monte Carlo
       approach*: the rungs.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(20), h=ebmpp.Bernoulli(8))
    >>> params = rbm.init(jax.random.key(0))
    >>> made = ebmpp.smc(rbm, params, rng_key=jax.random.key(1))
    >>> bool(abs(made.log_partition - ebmpp.exact.log_partition(rbm, params)) < 0.01)
    True
    """
    islands = checks.count("smc: num_islands", num_islands, _ISLANDS)
    total = checks.count("smc: num_particles", num_particles, 2 * islands)
    if total % islands:
        raise ArgumentError(
            f"smc: num_particles is a multiple of num_islands; got {total} particles in {islands} islands"
        )
    checks.flag("smc: progress_bar", progress_bar)
    key, num = random.key_pair(checks.key("smc: rng_key", rng_key)), total // islands
    options = {"path": path, "data": data, "ladder": ladder, "evenness": evenness, "num_sweeps": num_sweeps}
    run = _prepare("smc", graph, params, key, num, **options)
    keys = random.fold_in(random.fold_in(key, 0, 1), jnp.arange(islands))
    made, count = _begin(graph, num, run.path, keys), int(run.ladder.count)
    with tqdm(total=count - 1, disable=not progress_bar, desc="particles", unit="rung") as bar:
        for first in range(1, count, _RUNGS):
            made = _climb(graph, run.num_sweeps, run.path, run.ladder, np.int32(first), made, keys)
            bar.update(min(_RUNGS, count - first))
    result = _as_result(run, made, keys)
    _tell_few(result)
    return result


def _as_result(run: Run, made: Systems, keys: Array) -> ParticleSystem:
    x, log_z, log_weights, ancestors = _finish(run.graph, run.path, run.params, made, keys)
    each = np.asarray(log_weights, float) + np.asarray(log_z, float)[:, None] + run.log_z0
    if not np.isfinite(each.max()) or np.isnan(each).any():
        raise DomainError(
            f"smc: {np.isnan(each).sum() or each.size} of {each.size} particles have weights that are not "
            "finite: a model on the way may not normalise, or natural parameters overflow. Look at the "
            "params, and at those of the path; data=... starts nearer to the model"
        )
    top = each.max()
    w = np.exp(each - top)
    of_island = w.mean(1)
    mean = of_island.mean()
    ancestors = np.asarray(ancestors).reshape(each.shape)
    return ParticleSystem(
        log_partition=float(math.log(mean) + top),
        standard_error=float(standard_error(of_island) / mean),
        effective_sample_size=float(w.sum() ** 2 / (w**2).sum()),
        log_weights=each.ravel(),
        betas=run.places,
        bound="lower",
        sound=True,
        graph=run.graph,
        params=run.params,
        particles=x,
        weights=(w / w.sum()).ravel(),
        log_z=np.log(of_island) + top,
        num_rungs=len(run.places) - 1,
        distinct_ancestors=sum(len(np.unique(a)) for a in ancestors) / ancestors.size,
    )


def _tell_few(made: ParticleSystem) -> None:
    total = len(made.log_weights)
    if made.effective_sample_size < _FEW * total:
        warnings.warn(
            f"the effective sample size is {made.effective_sample_size:.1f} of {total} particles in "
            f"{len(made.log_z)} islands (standard error {made.standard_error:.2g}): too small for the "
            "standard error to be trusted. Raise num_particles, num_sweeps or evenness, or give another path",
            stacklevel=3,
        )


def _shapes(graph: FactorGraph) -> dict[str, jax.ShapeDtypeStruct]:
    """Of one state."""
    return {b: jax.ShapeDtypeStruct(f.shape, f.dtype) for b, f in graph.families.items()}


# -- expectations ----------------------------------------------------------------------------------


@compiled(statics=7)
def _pair(
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
    key: Array,
) -> independence.PairOutcome:
    def propose(keys: Array) -> tuple[Array, Any, Array]:
        made = systems.begin(path, keys, num)
        made = systems.climb(path, ladder.places, 1, ladder.count, made, keys, sweeps)
        x = system_values.states(path, params, made, keys)
        return systems.total_log_z(made), system_values.weighted_mean(fn, x, made), made.even

    as_float = lambda s: jax.ShapeDtypeStruct(s.shape, jnp.result_type(float))
    like = jax.tree.map(as_float, jax.eval_shape(fn, _shapes(graph)))
    return independence.run_pair(propose, like, key, k, m, max_systems)


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
    progress_bar: bool = False,
) -> Estimate:
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
    :param path: as for :func:`ebmpp.smc`, like data, ladder, evenness, and num_sweeps.
    :param max_systems: stop an unmet pair after so many systems, more than m; None: no limit.
    :param unmet: what to do about pairs that are stopped: "raise", or "drop" them from the mean, with a
        warning, because **that is biased**.
    :param progress_bar: show one.
    :return: an :class:`~ebmpp.sampling.Estimate` of lag 1, whose times are in systems, and ``cost`` in
        sweeps of one chain.
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
    run = _prepare(name, graph, params, key, num, **options)
    check_function(f"{name}: fn", fn, _shapes(graph))
    statics = (graph, fn, num, k, m, max_systems, run.num_sweeps)
    made, own = [], random.fold_in(key, 0, 1)
    for pair in tqdm(range(pairs), disable=not progress_bar, desc="pairs", unit="pair"):
        found = _pair(*statics, run.path, run.params, run.ladder, random.fold_in(own, pair))
        made.append(jax.device_get(found))
    outcome = jax.tree.map(lambda *each: np.stack(each), *made)
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
) -> Estimate:
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
    return Estimate(
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
