# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Particle systems from the host: log Z with an error from independent systems, and weighted draws."""

import dataclasses
import math
from typing import Any
import warnings

from jaxtyping import Float
import numpy as np
from tqdm.auto import tqdm

from jax import Array
import jax.numpy as jnp
from jax.sharding import Mesh

from ebmpp.annealing import ladders, system_values, systems
from ebmpp.annealing.log_partition import Data, LogPartition
from ebmpp.annealing.path import Path
from ebmpp.annealing.request import Paths, Run, prepare
from ebmpp.annealing.systems import Ladder, Systems
from ebmpp.core import checks, random, sharding
from ebmpp.core.compile import compiled
from ebmpp.core.display import Card, Grid, Measured
from ebmpp.core.statistics import standard_error
from ebmpp.core.types import Blocks, Params
from ebmpp.errors import ArgumentError, DomainError
from ebmpp.graph import FactorGraph

_ISLANDS = 10  # of fewer systems a standard error is a guess
_RUNGS = 25  # in one call of the device: what a progress bar waits for
_FEW = 0.25  # of the particles: an effective sample size below is told


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

    def _card(self) -> Card:
        particles = f"{self.effective_sample_size:.1f} of {len(self.log_weights)}"
        rows = [
            ("log Z (nats)", str(Measured(self.log_partition, self.standard_error))),
            ("effective particles", particles),
            ("share of distinct ancestors", f"{self.distinct_ancestors:.3g}"),
            ("islands", str(len(self.log_z))),
            ("rungs", str(self.num_rungs)),
        ]
        blocks = [(b, str(v.shape[1:]), str(v.dtype)) for b, v in self.particles.items()]
        grids = Grid(("", ""), rows), Grid(("block", "shape of a particle", "dtype"), blocks)
        return Card("Weighted particles, and an estimate of log Z", grids)


@compiled(statics=2)
def _begin(graph: FactorGraph, num: int, path: Path, keys: Array) -> Systems:
    del graph
    some = lambda keys, path, *_: (systems.by_island(systems.begin(path, keys, num)), ())
    return systems.in_rows(sharding.apart(some, keys, path, len(keys))[0])


@compiled(statics=2)
def _climb(
    graph: FactorGraph, sweeps: int, path: Path, ladder: Ladder, first: Array, made: Systems, keys: Array
) -> Systems:
    del graph

    def some(jobs: tuple[Systems, Array], shared: tuple, *_: Any) -> tuple[Systems, tuple]:
        path, ladder, first = shared
        last, (made, keys) = jnp.minimum(first + _RUNGS, ladder.count), jobs
        made = systems.climb(path, ladder.places, first, last, systems.in_rows(made), keys, sweeps)
        return systems.by_island(made), ()

    jobs = systems.by_island(made), keys
    return systems.in_rows(sharding.apart(some, jobs, (path, ladder, first), len(keys))[0])


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
    keys = random.fold_in(random.fold_in(key, 0, 1), np.arange(islands))
    made, count = _begin(graph, num, path, keys), int(ladder.count)
    for first in range(1, count, _RUNGS):
        made = _climb(graph, 1, path, ladder, np.int32(first), made, keys)
    return made


@compiled(statics=1)
def _finish(graph: FactorGraph, path: Path, params: Params, made: Systems, keys: Array) -> tuple:
    del graph
    x = system_values.states(path, params, made, keys)
    return x, *sharding.everywhere((made.log_z, made.log_weights, made.ancestors))


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
    mesh: Mesh | None = None,
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
    :param num_sweeps: of blocked Gibbs at each rung. Where islands differ much (``log_z`` with a long upper
        tail), modes are found late, and the stated error is too small: fewer particles of more sweeps find
        them at the same cost. On a 784x500 machine 1,000 particles of 20 sweeps agreed with annealing of
        10,000 temperatures, where 10,000 of one sweep stayed 0.8 below at a stated 0.2.
    :param mesh: devices to share the islands, over the mesh's first axis: take a multiple of them. The
        islands are those of one device, but for rounding.
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
    with sharding.over("smc: mesh", mesh):
        run = prepare("smc", graph, sharding.place(params), key, num, **options)
        keys = random.fold_in(random.fold_in(key, 0, 1), np.arange(islands))
        made, count = _begin(graph, num, run.path, keys), int(run.ladder.count)
        hidden = not (progress_bar and sharding.is_first())
        with tqdm(total=count - 1, disable=hidden, desc="particles", unit="rung") as bar:
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
