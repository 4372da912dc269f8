# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Sequential Monte Carlo: log Z by independent particle systems, and weighted draws."""

from collections.abc import Callable, Sequence
import dataclasses
from functools import partial
import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from tqdm.auto import tqdm

from jax import Array
import jax.numpy as jnp
from jax.sharding import Mesh

from ebmpp.annealing import (
    ladder as ladders,
    log_partition as estimates,
    modes,
    systems,
)
from ebmpp.annealing.ladder import Ladder, adaptive_ladder, find_ladder
from ebmpp.annealing.log_partition import ParticleSystem, summarize, warn
from ebmpp.annealing.path import Path, check_models
from ebmpp.annealing.reference import (
    Pilot,
    check_model,
    log_partition,
    reference,
    run_pilot,
)
from ebmpp.annealing.systems import Systems
from ebmpp.core import (
    Blocks,
    Eta,
    Params,
    StateLike,
    checks,
    compiled,
    random,
    sharding,
)
from ebmpp.exact.shifted import Shifted, shift_origin
from ebmpp.graph import FactorGraph
from ebmpp.moves import Target
from ebmpp.moves.sweeps import MovesLike, single_moves

#: A path as the user gives it.
PathSpec = str | Path | Sequence[Params] | None

_MIN_ISLANDS = 10  # fewer make the standard error too noisy
# of systems that start or restart during training
_START_CESS = 0.9
_MOST_PLACES = 1024
#: Correlation of the pilot's log-densities above which a rung takes more sweeps.
_CORRELATED = 0.3
_MOST_SWEEPS = 20  # per rung, of a number that is not given
_RUNGS = 25  # per call of the device, after which a progress bar is updated
_ADVICE = "Raise num_particles, num_sweeps or cess_threshold, or give another path."


class Options(NamedTuple):
    """Arguments of :func:`smc` that say where particles go, as the user gives them."""

    path: PathSpec
    data: StateLike | None
    ladder: str | ArrayLike
    cess_threshold: float
    num_sweeps: int | None
    moves: MovesLike = None


class Run(NamedTuple):
    """Checked arguments of a run of particle systems."""

    key: Array
    path: Path
    ladder: Ladder
    num_sweeps: int
    model: Shifted
    chains: Pilot
    """Short chains of the model."""
    pilot: Callable[..., Ladder]
    """:func:`adaptive_ladder` with the run's options."""

    @property
    def places(self) -> np.ndarray:
        """Places of the rungs."""
        return np.asarray(self.ladder.places)[: int(self.ladder.count)]


def prepare(
    name: str,
    graph: FactorGraph,
    params: Params,
    rng_key: Array,
    num: int,
    options: Options,
    shifted: bool,
) -> Run:
    """Check arguments of particle systems, and find their path, ladder and sweeps.

    :param num: particles per system.
    :param shifted: True if a line may be shifted: see
        :class:`~ebmpp.exact.shifted.Shifted`.
    """
    path, data, ladder, cess_threshold, num_sweeps, moves = options
    key = check_model(name, graph, params, rng_key)
    moves = single_moves(f"{name}: moves", graph, moves)
    checks.number(f"{name}: cess_threshold", cess_threshold, above=0, below=1)
    sweeps = checks.optional_count(f"{name}: num_sweeps", num_sweeps) or 1
    is_trained = isinstance(path, Path) and not path.is_line
    model = Shifted(params, {})
    if shifted and path in (None, "line"):
        model = shift_origin(graph, params)
    measure = num >= estimates.MIN_PER_ISLAND
    pilot = partial(
        adaptive_ladder, num=num, cess_threshold=cess_threshold, measure=measure
    )
    chains = run_pilot(Target(graph, model.params), key, moves)
    start = partial(reference, graph, model, key, data, pilot=chains)
    eta0 = path.eta0 if isinstance(path, Path) else start()
    path = _as_path(name, graph, eta0, model.params, path)
    path = dataclasses.replace(path, moves=moves)
    if not isinstance(ladder, str):
        places = ladders.given_places(f"{name}: ladder", ladder, int(path.num) - 1)
        count = jnp.full((), len(places), jnp.int32)
        result = Ladder(jnp.asarray(places), count)
        return Run(key, path, result, sweeps, model, chains, pilot)
    others = "places from 0 to the path's end"
    checks.choice(f"{name}: ladder", ladder, ("adaptive",), others)
    pilot_key = random.fold_in(key, 1, 1)
    result = pilot(path, pilot_key, sweeps=sweeps)
    if is_trained:
        line = Path.line(graph, start(), params, moves)
        straight = pilot(line, pilot_key, sweeps=sweeps)
        if _noise(straight) < _noise(result):
            path = line
            result = straight
    correlation = _correlation(result)
    if num_sweeps is None and correlation > _CORRELATED:
        needed = math.ceil(math.log(_CORRELATED) / math.log(correlation))
        sweeps = min(needed, _MOST_SWEEPS)
        result = pilot(path, pilot_key, sweeps=sweeps)
        if float(result.correlation) > estimates.MAX_CORRELATION:
            sweeps = _MOST_SWEEPS
    return Run(key, path, result, sweeps, model, chains, pilot)


def _correlation(ladder: Ladder) -> float:
    return min(np.nan_to_num(float(ladder.correlation)), 0.999)


def _noise(ladder: Ladder) -> float:
    """Return the variance of log Z by correlated rungs, up to a factor."""
    correlation = _correlation(ladder)
    return (int(ladder.count) - 1) * (1 + correlation) / (1 - correlation)


def _as_path(
    name: str, graph: FactorGraph, eta0: Eta, params: Params, path: PathSpec
) -> Path:
    """Return a path that ends at ``params``."""
    if isinstance(path, Path):
        if path.graph != graph:
            raise checks.error(f"{name}: graph of path", f"{graph!r}", path.graph)
        return path.to(params)
    if path is None or isinstance(path, str):
        kind = "line" if path is None else path
        checks.choice(f"{name}: path", kind, ("line",), "fit.path, or a list of params")
        return Path.line(graph, eta0, params)
    check_models(
        name, graph, checks.sequence(f"{name}: path", path, 'params, or "line"')
    )
    return Path.through(graph, eta0, [*path, params])


def run_keys(key: Array, num: int) -> Array:
    """Return the keys of independent systems, or of pairs of chains of systems."""
    return random.fold_in(random.fold_in(key, 0, 1), np.arange(num))


@compiled(statics=1, key=lambda num, path, keys: path.graph)
def _draw_initial(num: int, path: Path, keys: Array) -> Systems:
    def run(keys, path, *_):
        return systems.split_islands(systems.draw_initial(path, keys, num)), ()

    system, _ = sharding.shard_jobs(run, keys, path, len(keys))
    return systems.merge_islands(system)


@compiled(key=lambda path, *_: path.graph, unbounded=True)
def _run_rungs(
    path: Path,
    ladder: Ladder,
    sweeps: Array,
    first: Array,
    system: Systems,
    keys: Array,
) -> Systems:
    def run(jobs, shared, *_):
        path, ladder, sweeps, first = shared
        last = jnp.minimum(first + _RUNGS, ladder.count)
        system, keys = jobs
        system = systems.merge_islands(system)
        system = systems.run_rungs(
            path, ladder.places, first, last, system, keys, sweeps
        )
        return systems.split_islands(system), ()

    jobs = systems.split_islands(system), keys
    shared = path, ladder, sweeps, first
    system, _ = sharding.shard_jobs(run, jobs, shared, len(keys))
    return systems.merge_islands(system)


class _Final(NamedTuple):
    """Results of systems that have reached the model."""

    x: Blocks
    log_z: Array
    log_weights: Array
    distinct_ancestors: Array
    relative_ancestry: Array


@compiled(statics=0, key=lambda path, *_: path.graph)
def _finish(path: Path, system: Systems, keys: Array) -> _Final:
    x = systems.all_blocks(path, system, keys)
    shares = systems.distinct_ancestors(system), systems.relative_ancestry(system)
    numbers = sharding.replicate((system.log_z, system.log_weights, *shares))
    return _Final(x, *numbers)


def _run(
    path: Path, ladder: Ladder, sweeps: int, keys: Array, num: int, progress_bar: bool
) -> Systems:
    """Run systems of ``num`` particles from the reference to the model."""
    system = _draw_initial(num, path, keys)
    count = int(ladder.count)
    hidden = not (progress_bar and sharding.is_first())
    with tqdm(total=count - 1, disable=hidden, desc="particles", unit="rung") as bar:
        for first in range(1, count, _RUNGS):
            numbers = np.int32(sweeps), np.int32(first)
            system = _run_rungs(path, ladder, *numbers, system, keys)
            bar.update(min(_RUNGS, count - first))
    return system


def start_systems(path: Path, key: Array, islands: int, num: int) -> Systems:
    """Run systems along a path, with a ladder of their own pilot."""
    ladder = adaptive_ladder(path, random.fold_in(key, 1, 1), num, _START_CESS)
    return _run(path, ladder, 1, run_keys(key, islands), num, progress_bar=False)


def fresh_systems(
    path: Path, key: Array, islands: int, num: int, sweeps: int
) -> tuple[Systems, Array]:
    """Run systems along a path inside a compiled program; return them, and the number of rungs.

    A path that needs more than 1,024 rungs ends with a long one, which the systems'
    errors show.
    """
    ladder = find_ladder(
        path, random.fold_in(key, 1, 1), num, _START_CESS, _MOST_PLACES, sweeps
    )
    keys = run_keys(key, islands)
    system = systems.draw_initial(path, keys, num)
    system = systems.run_rungs(
        path, ladder.places, 1, ladder.count, system, keys, sweeps
    )
    return system, ladder.count - 1


def smc(
    graph: FactorGraph,
    params: Params,
    *,
    rng_key: Array,
    num_particles: int = 1000,
    num_islands: int = _MIN_ISLANDS,
    path: PathSpec = None,
    data: StateLike | None = None,
    ladder: str | ArrayLike = "adaptive",
    cess_threshold: float = 0.95,
    num_sweeps: int | None = None,
    moves: MovesLike = None,
    mesh: Mesh | None = None,
    progress_bar: bool = False,
) -> ParticleSystem:
    """Estimate log Z and draw weighted samples of any graph by sequential Monte Carlo.

    Particles follow a path of models from independent units, as in :func:`ebmpp.ais`,
    and are resampled at rungs where fewer than half of an island's particles are
    effective. Each island's estimate of Z is **unbiased** for any path and rungs, and
    so is their mean; its log is too small on average. The standard error is that of
    independent islands. No forward estimate shows a mode that no particle has found:
    with an adaptive ladder two more pilots start from modes in which short chains of
    the model end, and what they find and the particles miss is reported
    (``log_missed``).

    :param rng_key: a jax key; a particle's draws depend on it and on the particle's
        number.
    :param num_particles: of all islands, a multiple of their number.
    :param num_islands: independent systems, at least 10.
    :param path: None or "line": straight from independent units. ``fit.path``: along a
        training run, or straight (``betas`` then end at 1) where pilots of both find
        less noise there. A list of params: straight to the first, and through the
        others to the model.
    :param data: rows of the visible blocks, at whose base rates the particles start; by
        default at the means of a pilot.
    :param ladder: "adaptive", by a pilot system whose draws are used for nothing else,
        or places from 0 to the path's end (1 for the line, otherwise the number of
        params, including this model's).
    :param cess_threshold: conditional effective sample size of each rung of an adaptive
        ladder, as a share of the particles, between 0 and 1.
    :param num_sweeps: of blocked Gibbs per rung. None: 1, or up to 20 where the pilot's
        particles need them to forget their old log-densities to a correlation of 0.3,
        and 20 where they do not forget their ancestors (``relative_ancestry`` below
        0.9). Where islands differ much (``log_z`` has a long upper tail), modes are
        found late and the stated error is too small: fewer particles with more sweeps
        find them at the same cost. On a 784x500 machine log Z by 20 sweeps, which
        warned, had a root mean square error of 0.43, and by 100 sweeps of 0.08.
    :param moves: moves of a sweep; see :class:`~ebmpp.BlockedGibbs`. Default where
        Gibbs sweeps are costly or have no closed form:
        :func:`~ebmpp.moves.informed_sweep`.
    :param mesh: devices over whose first axis the islands are sharded, best a divisor
        of their number.
    :raises ArgumentError: for numbers out of range, a path or places that do not fit,
        or under ``jit``.
    :raises ParameterError: for params that do not fit.
    :raises StateError: data of a wrong name, shape or value.
    :raises DomainError: where a model on the path does not normalise.
    :warns UserWarning: where less than a quarter of the particles is effective, the
        standard error exceeds 0.3, islands have fewer than 20 particles, the particles
        miss a mode that would raise log Z by more than its standard error, sweeps leave
        the pilot's log-densities correlated by more than 0.5, or ``relative_ancestry``
        is below 0.9.

    **References**

    1. Del Moral, Doucet, Jasra (2006), *Sequential Monte Carlo samplers*.
    2. Zhou, Johansen, Aston (2016), *Toward automatic model comparison: an adaptive
       sequential Monte Carlo approach*: the rungs.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(20), h=ebmpp.Bernoulli(8))
    >>> params = rbm.init(jax.random.key(0))
    >>> system = ebmpp.smc(rbm, params, rng_key=jax.random.key(1))
    >>> bool(abs(system.log_partition - ebmpp.exact.log_partition(rbm, params)) < 0.01)
    True
    """
    islands = checks.count("smc: num_islands", num_islands, _MIN_ISLANDS)
    total = checks.count("smc: num_particles", num_particles, 2 * islands)
    if total % islands != 0:
        raise checks.error(
            "smc: num_particles", f"a multiple of num_islands, {islands}", total
        )
    checks.flag("smc: progress_bar", progress_bar)
    num = total // islands
    options = Options(path, data, ladder, cess_threshold, num_sweeps, moves)
    with sharding.use_mesh("smc: mesh", mesh):
        params = sharding.place(params)
        run = prepare("smc", graph, params, rng_key, num, options, shifted=True)
        ancestry = float(run.ladder.relative_ancestry)
        if num_sweeps is None and ancestry < estimates.MIN_ANCESTRY:
            run = run._replace(num_sweeps=_MOST_SWEEPS)
        keys = run_keys(run.key, islands)
        system = _run(run.path, run.ladder, run.num_sweeps, keys, num, progress_bar)
        result = _as_result(run, params, system, keys)
        if run.ladder.system is not None and sharding.processes() == 1:
            result = _with_missed(result, run)
    warn(_ADVICE, result.doubt)
    return result


def _as_result(
    run: Run, params: Params, system: Systems, keys: Array
) -> ParticleSystem:
    final = _finish(run.path, system, keys)
    log_z = np.asarray(final.log_z, float)
    log_weights = np.asarray(final.log_weights, float) + log_z[:, None]
    log_z0 = log_partition(run.path.graph, run.path.eta0)
    log_weights += log_z0 + run.model.log_factor
    summary = summarize("smc", log_weights)
    ancestry = float(np.asarray(final.relative_ancestry).mean())
    if log_weights.shape[1] < estimates.MIN_PER_ISLAND:
        ancestry = math.nan
    return ParticleSystem(
        log_partition=summary.log_mean,
        standard_error=summary.standard_error,
        effective_sample_size=summary.effective_sample_size,
        log_weights=log_weights.ravel(),
        betas=run.places,
        bound="lower",
        unbiased=True,
        graph=run.path.graph,
        params=params,
        particles=run.model.shift(final.x, 1),
        weights=summary.weights.ravel(),
        log_z=summary.log_island_means,
        num_rungs=len(run.places) - 1,
        distinct_ancestors=float(np.asarray(final.distinct_ancestors).mean()),
        num_sweeps=run.num_sweeps,
        correlation=float(run.ladder.correlation),
        relative_ancestry=ancestry,
    )


def _with_missed(result: ParticleSystem, run: Run) -> ParticleSystem:
    """Return the result with the size of the modes that its particles miss."""
    key = random.fold_in(run.key, 6, 1)
    pilot = partial(run.pilot, key=key, sweeps=run.num_sweeps, most=_MOST_PLACES)
    missed = modes.log_missed(
        run.path,
        run.chains,
        pilot,
        run.model.shift(result.particles),
        result.weights,
        result.log_partition - run.model.log_factor,
    )
    return dataclasses.replace(result, log_missed=missed)
