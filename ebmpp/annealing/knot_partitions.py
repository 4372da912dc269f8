# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""log Z at every knot of a path: bridges from each to the next, by particle systems that cross them all."""

import dataclasses
import warnings

from jaxtyping import Float
import numpy as np

from jax import Array, lax
import jax.numpy as jnp

from ebmpp.annealing import annealing_path, ladders, systems
from ebmpp.annealing.path import Path
from ebmpp.annealing.systems import Ladder
from ebmpp.core import checks, random
from ebmpp.core.compile import compiled
from ebmpp.core.statistics import standard_error
from ebmpp.errors import ArgumentError, DomainError
from ebmpp.graph import FactorGraph

_ISLANDS = 10  # of fewer systems a standard error is a guess
_FEW = 0.25  # of the islands: where fewer make the mean, it is told


@dataclasses.dataclass(frozen=True, repr=False)
class Bridges:
    """log Z along a path; see :func:`ebmpp.annealing.bridges`."""

    log_partition: Float[np.ndarray, "knots"]
    """Of the knots: that of the reference first, which is exact, that of the model last."""
    standard_error: Float[np.ndarray, "knots"]
    log_z: Float[np.ndarray, "islands knots"]
    """What each island says: the log of their mean is ``log_partition``."""
    num_rungs: int

    def __repr__(self) -> str:
        islands, knots = self.log_z.shape
        return (
            f"Bridges({self.log_partition[-1]:.6g} +- {self.standard_error[-1]:.2g} at the last of {knots} "
            f"knots, from {islands} islands, {self.num_rungs} rungs)"
        )

    def difference(self, first: int, last: int) -> tuple[float, float]:
        """log Z of knot ``last`` less that of knot ``first``, and its standard error.

        Less than that of either where the two are near, since the same systems tell both.
        """
        w = np.exp(self.log_z[:, [first, last]] - self.log_partition[[first, last]])
        value = self.log_partition[last] - self.log_partition[first]
        return float(value), float(standard_error(w[:, 1] - w[:, 0]))


@compiled(statics=3)
def _cross(graph: FactorGraph, num: int, sweeps: int, path: Path, ladder: Ladder, keys: Array) -> Array:
    """Log of every island's estimate of Z over that of the reference, at every rung."""
    del graph

    def one(index: Array, carry: tuple) -> tuple:
        made, told = carry
        made = systems.climb(path, ladder.places, index, index + 1, made, keys, sweeps)
        return made, told.at[index].set(systems.total_log_z(made))

    start = systems.begin(path, keys, num), jnp.zeros((len(ladder.places), len(keys)))
    return lax.fori_loop(1, ladder.count, one, start)[1]


def _at_knots(found: Ladder, num: int) -> tuple[Ladder, np.ndarray]:
    """A ladder with a rung at each knot too, and the numbers of these."""
    places = np.unique([*np.asarray(found.places)[: int(found.count)], *np.arange(num)])
    room = len(found.places) + num  # so that the next ladder needs no other program
    padded = np.pad(places, (0, room - len(places)), mode="edge").astype(np.float32)
    return Ladder(jnp.asarray(padded), jnp.full((), len(places), jnp.int32)), np.searchsorted(
        places, np.arange(num)
    )


def bridges(
    path: Path,
    *,
    rng_key: Array,
    num_particles: int = 1000,
    num_islands: int = _ISLANDS,
    evenness: float = 0.95,
    num_sweeps: int = 1,
) -> Bridges:
    """log Z of every model on a path, by one run of :func:`ebmpp.smc` along all of it.

    Each island's estimate of Z is **unbiased** at each knot, and so is their mean; its log is too small on
    average. Standard errors are those of independent islands. Like any forward estimate it does not know of a
    mode that no particle has found.

    :param path: ``fit.path``, say.
    :param rng_key: a jax key; an island's draws depend on it and on the island's number alone.
    :param num_particles: of all islands together, a multiple of their number.
    :param num_islands: independent systems, at least 10.
    :param evenness: as for :func:`ebmpp.smc`. Each knot is a rung, whatever the evenness.
    :param num_sweeps: of blocked Gibbs at each rung.
    :return: :class:`~ebmpp.annealing.Bridges`.
    :raises ArgumentError: for no path, numbers out of range, or under ``jit``.
    :raises DomainError: where a model on the way does not normalise.
    :warns UserWarning: where few islands make the mean.

    **References**

    1. Del Moral, Doucet, Jasra (2006), *Sequential Monte Carlo samplers*.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> fit = ebmpp.fit(rbm, ebmpp.data.bars_and_stripes(3), rng_key=jax.random.key(0), num_steps=50,
    ...                 estimator=ebmpp.PCD(), keep_path=True, progress_bar=False)
    >>> made = bridges(fit.path, rng_key=jax.random.key(1))
    >>> exact = ebmpp.exact.log_partition(rbm, fit.params)
    >>> made.log_partition.shape == (len(fit.path),), bool(abs(made.log_partition[-1] - exact) < 0.05)
    (True, True)
    """
    checks.instance("bridges: path", path, Path, "a Path, such as fit(..., keep_path=True) has")
    path.check("bridges")
    islands = checks.count("bridges: num_islands", num_islands, _ISLANDS)
    total = checks.count("bridges: num_particles", num_particles, 2 * islands)
    if total % islands:
        raise ArgumentError(
            f"bridges: num_particles is a multiple of num_islands; got {total} particles in {islands} islands"
        )
    checks.number("bridges: evenness", evenness, above=0, below=1)
    sweeps = checks.count("bridges: num_sweeps", num_sweeps)
    checks.on_host("bridges", rng_key, path)
    key, num = random.key_pair(checks.key("bridges: rng_key", rng_key)), total // islands
    found = ladders.adaptive(path, random.fold_in(key, 1, 1), num, evenness, sweeps)
    ladder, at = _at_knots(found, len(path))
    keys = random.fold_in(random.fold_in(key, 0, 1), np.arange(islands))
    told = np.asarray(_cross(path.graph, num, sweeps, path, ladder, keys), float)[at]
    log_z = told.T + annealing_path.log_partition_of(path.graph, path.eta0)
    return _combined(log_z, int(ladder.count) - 1)


def _combined(log_z: np.ndarray, rungs: int) -> Bridges:
    wrong = np.flatnonzero(~np.isfinite(log_z).all(0))
    if len(wrong):
        raise DomainError(
            f"bridges: weights are not finite from knot {wrong[0]} on: a model on the way there may not "
            "normalise, or natural parameters overflow. Look at path.params_at(...)"
        )
    top = log_z.max(0)
    w = np.exp(log_z - top)
    effective = w.sum(0) ** 2 / (w**2).sum(0)
    if effective.min() < _FEW * len(w):
        worst = int(effective.argmin())
        warnings.warn(
            f"at knot {worst} {effective[worst]:.1f} of {len(w)} islands make the mean: too few for the "
            "standard error to be trusted. Raise num_particles, num_sweeps or evenness",
            stacklevel=3,
        )
    mean = w.mean(0)
    error = np.array([standard_error(each) for each in w.T]) / mean
    return Bridges(np.log(mean) + top, error, log_z, rungs)
