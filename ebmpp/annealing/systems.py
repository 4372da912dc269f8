# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Particle systems: particles that are reweighted, resampled and moved along a path of models.

A system, called an island where there are several, gives weighted particles and an
estimate of Z that is unbiased for any path, number of particles and number of sweeps.
At each rung of the ladder the particles are reweighted from the previous model to this
one, resampled if fewer than half of them are effective, and moved by Gibbs sweeps of
this model. A particle's draws depend only on its island's key, its number and the
number of the rung.

**References**

1. Del Moral, Doucet, Jasra (2006), *Sequential Monte Carlo samplers*, section 3.
2. Dai, Heng, Jacob, Whiteley (2022), *An invitation to sequential Monte Carlo
   samplers*.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from jaxtyping import Float, Int32, PyTree, UInt32

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.annealing.path import Path, Rung, draw_reference
from ebmpp.core import (
    Blocks,
    Keys,
    Params,
    PerRow,
    Scalar,
    at_index,
    full_precision,
    merge_axes,
    random,
    select,
)
from ebmpp.graph import energy
from ebmpp.moves.rungs import Evaluation

_RESAMPLE_BELOW = 0.5  # effective sample size, as a share of the particles

PerParticle = Float[Array, "islands particles"]
PerIsland = Float[Array, "islands"]
IslandKeys = UInt32[Array, "islands 2"]


class Systems(NamedTuple):
    """Particles of one or more systems; the rows of a system are contiguous."""

    x: Blocks
    """The kept blocks, ``(islands * particles, *shape)``."""
    log_weights: PerParticle
    """Log-weights since the system was last resampled."""
    log_z: PerIsland
    """Log of the estimate of Z at the last resampling, relative to that of the reference."""
    ancestors: Int32[Array, "rows"]
    """Number of each particle's ancestor in the initial system."""
    offspring_variance: PerIsland
    """Variance of a particle's number of children, summed over resamplings."""
    min_ess: PerIsland
    """Lowest effective sample size of all rungs, before resampling."""
    min_cess: PerIsland
    """Lowest conditional effective sample size of all rungs, as a share of the particles."""

    @property
    @jax.jit
    def weights(self) -> PerParticle:
        """Weights that sum to 1 in each system."""
        return jax.nn.softmax(self.log_weights, axis=-1)


def split_islands(system: Systems) -> Systems:
    """Give every array a leading axis of islands."""

    def split(a):
        return a.reshape(*system.log_weights.shape, *a.shape[1:])

    return system._replace(
        x=jax.tree.map(split, system.x), ancestors=split(system.ancestors)
    )


def merge_islands(system: Systems) -> Systems:
    """Undo :func:`split_islands`."""
    x, ancestors = merge_axes((system.x, system.ancestors))
    return system._replace(x=x, ancestors=ancestors)


def effective_sample_size(log_weights: PerParticle) -> PerIsland:
    """Return (sum w)**2 / sum w**2."""
    first = jax.nn.logsumexp(log_weights, -1)
    second = jax.nn.logsumexp(2 * log_weights, -1)
    return jnp.exp(2 * first - second)


def conditional_ess(log_weights: PerParticle, gain: PerParticle) -> PerIsland:
    """Return the conditional effective sample size of a reweighting.

    Zhou, Johansen, Aston (2016).
    """
    before = jax.nn.log_softmax(log_weights, axis=-1)
    first = jax.nn.logsumexp(before + gain, -1)
    second = jax.nn.logsumexp(before + 2 * gain, -1)
    return jnp.exp(2 * first - second)


def distinct_ancestors(system: Systems) -> PerIsland:
    """Return the share of the initial particles that have descendants."""
    ancestors = jnp.sort(system.ancestors.reshape(system.log_weights.shape), axis=-1)
    return (jnp.diff(ancestors, prepend=-1) > 0).mean(-1)


def relative_ancestry(system: Systems) -> PerIsland:
    """Return the share of distinct ancestors, over that of particles that forget their ancestors.

    Of these, resamplings leave a share of about :math:`1 / (1 + v / 2)` where numbers
    of children have variances that sum to v (Kingman 1982, *The coalescent*). Less is
    left where lineages that found a mode grow.
    """
    return distinct_ancestors(system) * (1 + system.offspring_variance / 2)


def _log_mean_weight(log_weights: PerParticle) -> PerIsland:
    return jax.nn.logsumexp(log_weights, -1) - jnp.log(log_weights.shape[-1])


@jax.jit
def total_log_z(system: Systems) -> PerIsland:
    """Return the log of each system's estimate of Z, relative to the Z of the reference."""
    return system.log_z + _log_mean_weight(system.log_weights)


def pooled(log_z: PerIsland) -> tuple[Scalar, Scalar]:
    """Return the log of the mean of independent estimates of Z, and its standard error."""
    count = len(log_z)
    top = log_z.max()
    z = jnp.exp(log_z - top)
    mean = z.mean()
    # by the delta method
    error = z.std() / mean / jnp.sqrt(max(count - 1, 1))
    return jnp.log(mean) + top, error


def particle_keys(keys: IslandKeys, num: int) -> Keys:
    """Return the keys of the particles of systems with these keys."""
    row_keys = random.fold_in(keys[:, None], jnp.arange(num)).reshape(-1, 2)
    return random.materialize(row_keys)


def draw_initial(path: Path, keys: IslandKeys, num: int) -> Systems:
    """Draw systems of ``num`` particles from the reference."""
    islands = len(keys)
    row_keys = random.materialize(random.fold_in(particle_keys(keys, num), 0))
    zero = jnp.zeros(islands)
    return Systems(
        x=draw_reference(path, row_keys),
        log_weights=jnp.zeros((islands, num)),
        log_z=zero,
        ancestors=jnp.tile(jnp.arange(num, dtype=jnp.int32), islands),
        offspring_variance=zero,
        min_ess=zero + num,
        min_cess=zero + 1,
    )


def _resample(
    system: Systems, evaluation: Evaluation, keys: IslandKeys
) -> tuple[Systems, Evaluation]:
    """Resample systematically the systems with few effective particles.

    :return: the systems, and the evaluations of their particles.
    """
    islands, num = system.log_weights.shape
    ess = effective_sample_size(system.log_weights)
    is_low = ess < _RESAMPLE_BELOW * num

    def draw(state):
        system, evaluation = state
        cumulated = jnp.cumsum(system.weights, axis=-1)
        u = random.uniforms(keys, 1)
        levels = (jnp.arange(num, dtype=u.dtype)[None] + u) / num * cumulated[:, -1:]
        search = jax.vmap(partial(jnp.searchsorted, side="right"))
        parents = jnp.minimum(search(cumulated, levels), num - 1)
        parents = jnp.where(is_low[:, None], parents, jnp.arange(num)[None])
        rows = (parents + num * jnp.arange(islands)[:, None]).reshape(-1)
        x, ancestors, evaluation = at_index(
            (system.x, system.ancestors, evaluation), rows
        )
        gain = jnp.where(is_low, _log_mean_weight(system.log_weights), 0)
        system = system._replace(
            x=x,
            ancestors=ancestors,
            log_z=system.log_z + gain,
            log_weights=jnp.where(is_low[:, None], 0, system.log_weights),
        )
        return system, evaluation

    variance = system.offspring_variance + jnp.where(is_low, num / ess - 1, 0)
    system = system._replace(
        offspring_variance=variance, min_ess=jnp.minimum(system.min_ess, ess)
    )
    return lax.cond(is_low.any(), draw, lambda state: state, (system, evaluation))


def reweight(
    path: Path,
    low: Rung,
    high: Rung,
    here: Evaluation,
    system: Systems,
    keys: IslandKeys,
) -> tuple[Systems, Evaluation]:
    """Reweight systems from one rung to the next, and resample those with few effective particles.

    :param here: evaluation of the lower rung's model at the particles.
    :param keys: of the systems at the upper rung.
    :return: the systems, and the evaluation of the upper rung's model at their
        particles.
    """
    there = path.evaluate_at(high, here, system.x)
    gain = path.gain(low, high, here, there).reshape(system.log_weights.shape)
    cess = jnp.minimum(system.min_cess, conditional_ess(system.log_weights, gain))
    system = system._replace(log_weights=system.log_weights + gain, min_cess=cess)
    return _resample(system, there, random.fold_in(keys, 0, 1))


def move(
    path: Path,
    rung: Rung,
    evaluation: Evaluation,
    system: Systems,
    keys: IslandKeys,
    sweeps: Array | int,
) -> Systems:
    """Move systems by Gibbs sweeps of a rung; arguments are as for :func:`reweight`."""
    row_keys = particle_keys(keys, system.log_weights.shape[1])

    # the first sweep is an iteration: outside of the loop it would compile twice
    def sweep(i, x):
        sweep_keys = jnp.where(i == 0, row_keys, random.fold_in(row_keys, i, 1))
        eta = lax.cond(
            i == 0,
            lambda x: evaluation.eta,
            lambda x: energy.natural_rows(path.graph, rung.params, x, path.summed),
            x,
        )
        return path.sweep(rung, x, eta, random.materialize(sweep_keys))

    return system._replace(x=lax.fori_loop(0, sweeps, sweep, system.x))


def run_rungs(
    path: Path,
    places: Float[Array, "places"],
    first: Array | int,
    last: Array | int,
    system: Systems,
    keys: IslandKeys,
    sweeps: Array | int = 1,
) -> Systems:
    """Carry systems to the rungs ``first`` to ``last - 1``, which may be traced.

    :param places: of the rungs on the path; rung 0 is the reference.
    :param sweeps: Gibbs sweeps per rung; may be traced.
    """

    def body(index, system):
        low = path.at(places[index - 1])
        high = path.at(places[index])
        here = path.evaluate(low.params, system.x)
        rung_keys = random.materialize(random.fold_in(keys, index))
        system, evaluation = reweight(path, low, high, here, system, rung_keys)
        return move(path, high, evaluation, system, rung_keys, sweeps)

    return lax.fori_loop(first, last, body, system)


@full_precision
def energy_gradient(path: Path, params: Params, system: Systems) -> Params:
    """Return each system's mean of dE/dparams, with the other blocks summed out."""

    def mean_gradient(weights, x):
        def marginal(p):
            return -(weights @ energy.summed_out(path.graph, p, x, path.summed))

        return jax.grad(marginal)(params)

    return jax.vmap(mean_gradient)(system.weights, split_islands(system).x)


def all_blocks(path: Path, system: Systems, keys: IslandKeys) -> Blocks:
    """Draw the summed blocks given the kept ones, and return all, as rows."""
    evaluation = path.evaluate(path.params, system.x)
    row_keys = random.fold_in(particle_keys(keys, system.log_weights.shape[1]), 0, 2)
    drawn = path.draw(path.summed, evaluation.eta, jnp.ones(()), row_keys)
    x = system.x | drawn
    return select(x, path.graph.families)


@full_precision
def weighted_mean(fn: Callable[[Blocks], PyTree], x: Blocks, weights: PerRow) -> PyTree:
    """Return the mean of ``fn`` over a system's particles."""

    def mean(values):
        return jnp.tensordot(weights, values.astype(weights.dtype), 1)

    return jax.tree.map(mean, jax.vmap(fn)(dict(x)))
