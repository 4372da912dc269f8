# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Particle systems: draws of independent units that are weighed, resampled and swept along a path of models.

A system (an *island*, where there are several) returns weighted particles and an estimate of Z that is
unbiased whatever the path, the number of particles and the sweeps. At each rung: weigh from the law before to
the law of the rung, resample where fewer than half of the particles are effective, sweep under the rung's
law. A particle's draws depend on its island's key, its number and the rung's number alone.

**References**

1. Del Moral, Doucet, Jasra (2006), *Sequential Monte Carlo samplers*, section 3.
2. Dai, Heng, Jacob, Whiteley (2022), *An invitation to sequential Monte Carlo samplers*.
"""

from typing import NamedTuple

from jaxtyping import Bool, Float, Int32, UInt32

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.annealing.path import Path, Rung, Slope
from ebmpp.core import random
from ebmpp.core.types import Blocks, Keys, Rows, Scalar

#: Resample where the effective sample size is below this share of the particles.
_FEW = 0.5
_GROW, _SHRINK = 1.3, 0.75  # of the steps that a pilot tries
SHORTEST = 1e-6  # of them

Weights = Float[Array, "islands particles"]
PerIsland = Float[Array, "islands"]
IslandKeys = UInt32[Array, "islands 2"]


class Systems(NamedTuple):
    """Particles of one or more systems; the rows of a system follow one another."""

    x: Blocks
    """The kept blocks, ``(islands * particles, *shape)``."""
    log_weights: Weights
    """Since the system was last resampled."""
    log_z: PerIsland
    """Log of the estimate of Z over that of the reference."""
    ancestors: Int32[Array, "rows"]
    """Which particle of its system each began as."""
    resampled: PerIsland
    """At how many rungs."""
    least: PerIsland
    """The least effective sample size of all rungs, before resampling."""
    even: PerIsland
    """The least conditional effective sample size of all rungs, as a share of the particles."""

    @property
    def weights(self) -> Weights:
        """Of sum 1 in each system."""
        return jax.nn.softmax(self.log_weights, axis=-1)


def by_island(made: Systems) -> Systems:
    """The same with a leading axis of islands everywhere."""
    each = made.log_weights.shape
    apart = lambda a: a.reshape(*each, *a.shape[1:])
    return made._replace(x=jax.tree.map(apart, made.x), ancestors=apart(made.ancestors))


def in_rows(made: Systems) -> Systems:
    """What :func:`by_island` was given."""
    flat = lambda a: a.reshape(-1, *a.shape[2:])
    return made._replace(x=jax.tree.map(flat, made.x), ancestors=flat(made.ancestors))


def effective(log_weights: Weights) -> PerIsland:
    """(sum w)**2 / sum w**2."""
    return jnp.exp(2 * jax.nn.logsumexp(log_weights, -1) - jax.nn.logsumexp(2 * log_weights, -1))


def _conditional_effective(log_weights: Weights, gain: Weights) -> PerIsland:
    """How even the weights of a step are under those before it, at most 1 (Zhou, Johansen, Aston 2016)."""
    before = jax.nn.log_softmax(log_weights, axis=-1)
    first, second = (jax.nn.logsumexp(before + n * gain, -1) for n in (1, 2))
    return jnp.exp(2 * first - second)


def _mean_weight(log_weights: Weights) -> PerIsland:
    return jax.nn.logsumexp(log_weights, -1) - jnp.log(log_weights.shape[-1])


def begin(path: Path, keys: IslandKeys, num: int) -> Systems:
    """Systems of ``num`` particles at the reference.

    :param keys: of the systems, ``(systems, 2)``.
    """
    islands = len(keys)
    number = jnp.tile(jnp.arange(num, dtype=jnp.int32), islands)
    x = path.start(random.fold_in(particle_keys(keys, num), 0))
    none = jnp.zeros(islands)
    return Systems(x, jnp.zeros((islands, num)), none, number, none, none + num, none + 1)


def particle_keys(keys: IslandKeys, num: int) -> Keys:
    """Keys of the particles of systems, from those of the systems."""
    return random.fold_in(keys[:, None], jnp.arange(num)).reshape(-1, 2)


def _resample(made: Systems, slope: Slope, keys: IslandKeys) -> tuple[Systems, Slope]:
    """Systematic resampling of systems in which few particles are effective; slopes move with the rows."""
    islands, num = made.log_weights.shape
    ess = effective(made.log_weights)
    few = ess < _FEW * num

    def draw(given: tuple[Systems, Slope]) -> tuple[Systems, Slope]:
        made, slope = given
        cumulated = jnp.cumsum(made.weights, axis=-1)
        u = random.uniform(random.words(keys, 1))
        wanted = (jnp.arange(num, dtype=u.dtype)[None] + u) / num * cumulated[:, -1:]
        chosen = jax.vmap(lambda c, w: jnp.searchsorted(c, w, side="right"))(cumulated, wanted)
        chosen = jnp.where(few[:, None], jnp.minimum(chosen, num - 1), jnp.arange(num)[None])
        rows = (chosen + num * jnp.arange(islands)[:, None]).reshape(-1)
        x, ancestors, slope = jax.tree.map(lambda a: a[rows], (made.x, made.ancestors, slope))
        log_z = made.log_z + jnp.where(few, _mean_weight(made.log_weights), 0)
        left = jnp.where(few[:, None], 0, made.log_weights)
        return made._replace(x=x, ancestors=ancestors, log_z=log_z, log_weights=left), slope

    made = made._replace(resampled=made.resampled + few.astype(ess.dtype), least=jnp.minimum(made.least, ess))
    return lax.cond(few.any(), draw, lambda given: given, (made, slope))


def _climb(
    path: Path,
    ends: tuple[Rung, Rung],
    slopes: tuple[Slope, Slope],
    made: Systems,
    keys: IslandKeys,
    sweeps: int,
) -> Systems:
    """One rung: weigh, resample, sweep.

    :param slopes: of the models of both ends at the particles.
    :param keys: of the systems at this rung.
    """
    gain = path.gain(*ends, *slopes).reshape(made.log_weights.shape)
    even = jnp.minimum(made.even, _conditional_effective(made.log_weights, gain))
    made = made._replace(log_weights=made.log_weights + gain, even=even)
    made, there = _resample(made, slopes[1], random.fold_in(keys, 0, 1))
    own = particle_keys(keys, gain.shape[1])
    x = path.sweep(ends[1], made.x, there.eta, own)
    if sweeps > 1:
        more = lambda i, x: path.sweep(ends[1], x, None, random.fold_in(own, i, 1))
        x = lax.fori_loop(1, sweeps, more, x)
    return made._replace(x=x)


def _slopes(path: Path, ends: tuple[Rung, Rung], x: Rows) -> tuple[Slope, Slope]:
    here = path.slope(ends[0].params, x)
    return here, here if path.is_line else path.slope(ends[1].params, x)


def climb(
    path: Path,
    places: Float[Array, "places"],
    first: Array | int,
    last: Array | int,
    made: Systems,
    keys: IslandKeys,
    sweeps: int = 1,
) -> Systems:
    """Systems from rung ``first`` to before rung ``last``.

    :param places: of the rungs, from 0; rung 0 is the reference. How many rungs there are may be traced.
    :param keys: of the systems.
    :param sweeps: at each rung.
    """

    def one(index: Array, made: Systems) -> Systems:
        ends = path.at(places[index - 1]), path.at(places[index])
        slopes = _slopes(path, ends, made.x)
        return _climb(path, ends, slopes, made, random.fold_in(keys, index), sweeps)

    return lax.fori_loop(first, last, one, made)


def total_log_z(made: Systems) -> PerIsland:
    """Log of each system's estimate of Z over that of the reference."""
    return made.log_z + _mean_weight(made.log_weights)


def pooled(log_z: PerIsland) -> tuple[Scalar, Scalar]:
    """log of the mean of independent estimates of Z, and its standard error by the delta method."""
    count, top = len(log_z), log_z.max()
    each = jnp.exp(log_z - top)
    mean = each.mean()
    return jnp.log(mean) + top, each.std() / mean / jnp.sqrt(max(count - 1, 1))


class Ladder(NamedTuple):
    """The places of a path at which a system stops."""

    places: Float[Array, "places"]
    count: Int32[Array, ""]
    """How many of them count, the reference's included."""

    def whole(self) -> Bool[Array, ""]:
        """Whether there was room for all: if not, the last step is a long one."""
        return self.count < len(self.places)


def find_ladder(
    path: Path, key: UInt32[Array, "2"], num: int, least: ArrayLike, capacity: int, sweeps: int = 1
) -> Ladder:
    """Places between which the weights of a step are even: by a pilot system, whose draws are used for
    nothing else.

    :param least: the conditional effective sample size of each step as a share of the particles, below 1; but
        for the last step where the capacity is reached.
    :param capacity: how many places there may be.

    **References**

    1. Zhou, Johansen, Aston (2016), *Toward automatic model comparison: an adaptive sequential Monte Carlo
       approach*, section 3.4.
    """
    keys = key[None]

    class State(NamedTuple):
        places: Array
        count: Array
        step: Array
        made: Systems

    def climb_one(state: State) -> State:
        s, made = state.places[state.count - 1], state.made
        low = path.at(s)
        here = path.slope(low.params, made.x)
        up = lambda step: path.at(jnp.minimum(s + step, path.end))
        there = lambda high: here if path.is_line else path.slope(high.params, made.x)

        def uneven(step: Array) -> Array:
            high = up(step)
            gain = path.gain(low, high, here, there(high)).reshape(made.log_weights.shape)
            return ~(_conditional_effective(made.log_weights, gain)[0] >= least) & (step > SHORTEST)

        step = lax.while_loop(uneven, lambda step: _SHRINK * step, _GROW * state.step)
        step = jnp.where(state.count == capacity - 1, path.end, step)
        high = up(step)
        own = random.fold_in(keys, state.count)
        made = _climb(path, (low, high), (here, there(high)), made, own, sweeps)
        places = state.places.at[state.count].set(jnp.minimum(s + step, path.end))
        return State(places, state.count + 1, step, made)

    start = State(jnp.zeros(capacity), jnp.ones((), jnp.int32), jnp.full((), 0.1), begin(path, keys, num))
    state = lax.while_loop(lambda c: c.places[c.count - 1] < path.end, climb_one, start)
    return Ladder(state.places, state.count)
