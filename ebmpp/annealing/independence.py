# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Particle independent Metropolis-Hastings, coupled: an unbiased mean from particle systems.

A chain of systems proposes a fresh one and takes it with probability ``min(1, Z'/Z)``, Z being what the
systems say of the partition function. Two such chains, the second one step behind, are given the same
proposals and the same uniforms, so they are one as soon as both take the same system. How soon depends on the
spread of log Z alone, not on how a Gibbs chain mixes.

    S_0, S_1, ... independent systems; X_0 = S_0, Y_0 = S_1, and X_1 takes S_1 or stays
    t >= 2: X_{t-1} -> X_t and Y_{t-2} -> Y_{t-1} are given S_t and one uniform
    tau: the first t >= 1 with X_t = Y_{t-1}
    H_{k:m} = mean of f(X_k), ..., f(X_m) + sum_{t=k+1}^{tau-1} min(1, (t-k)/(m-k+1)) (f(X_t) - f(Y_{t-1}))

f of a system is its weighted mean of f. Memory does not grow with tau.

**References**

1. Andrieu, Doucet, Holenstein (2010), *Particle Markov chain Monte Carlo methods*, section 2.4.2.
2. Middleton, Deligiannidis, Doucet, Jacob (2019), *Unbiased smoothing using particle independent
   Metropolis-Hastings*, Algorithm 2 and eq. 5.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Int32, UInt32

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.annealing.systems import IslandKeys, PerIsland
from ebmpp.core import random
from ebmpp.core.types import Scalar

#: Systems that run side by side: the first two are always wanted.
TOGETHER = 2

#: From keys of systems to log Z of each, its values (a pytree with a leading axis of systems), and how even
#: the weights of its rungs are.
Propose = Callable[[IslandKeys], tuple[PerIsland, Any, PerIsland]]


class Chain(NamedTuple):
    """The system that a chain holds."""

    log_z: Scalar
    value: Any


class PairOutcome(NamedTuple):
    """What became of a pair of chains of systems."""

    total: Any
    """H_{k:m}."""
    meeting_time: Int32[Array, ""]
    """-1 where unmet."""
    num_systems: Int32[Array, ""]
    """How many were run that count."""
    acceptance: Scalar
    """Mean probability with which the leading chain took a proposal."""
    longest: Int32[Array, ""]
    """Most proposals in a row that the leading chain turned down."""
    log_z: Float[Array, "2"]
    """Of the first two systems, over that of the reference."""
    even: Scalar
    """The least of all systems: see :class:`~ebmpp.annealing.systems.Systems`."""
    broken: Bool[Array, ""]
    """Whether a system's Z was no number."""


class _State(NamedTuple):
    t: Array  # how many systems have been seen
    x: Chain
    y: Chain
    total: Any
    tau: Array
    chance: Array
    refused: Array
    longest: Array
    first: Array
    even: Array
    broken: Array


def run_pair(
    propose: Propose, like: Any, key: UInt32[Array, "2"], k: int, m: int, max_systems: int | None = None
) -> PairOutcome:
    """One pair of chains until they meet, and to time m.

    :param propose: makes :data:`TOGETHER` systems.
    :param like: shapes of a system's values.
    :param key: of the pair; system t draws from ``fold_in(key, t)``, what is done about it from
        ``fold_in(key, t, 1)``.
    :param k: first time that counts.
    :param m: last time that counts, at least k.
    :param max_systems: after how many an unmet pair stops.
    """
    window, dtype = m - k + 1, jnp.result_type(float)
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), like)
    none, count = jnp.zeros((), dtype), jnp.zeros((), jnp.int32)
    held = Chain(none, zero)
    start = _State(count, held, held, zero, count - 1, none, count, count, jnp.zeros(2), none + 1, count > 0)

    def going(s: _State) -> Array:
        wanted = (s.tau < 0) | (s.t <= m)
        late = jnp.array(False) if max_systems is None else s.t >= max_systems
        return wanted & ~s.broken & ~late

    def see(s: _State, new: Chain, even: Array) -> _State:
        t, unmet = s.t, s.tau < 0
        log_u = jnp.log(random.uniform(random.words(random.fold_in(key, t, 1), 1))[0])
        takes = lambda held: log_u < new.log_z - held.log_z
        take_x = (t == 0) | takes(s.x)
        take_y = unmet & ((t == 1) | ((t > 1) & takes(s.y)))
        x, y = _choose(take_x, new, s.x), _choose(take_y, new, s.y)
        tau = jnp.where(unmet & (t > 0) & take_x & take_y, t, s.tau)
        inside = jnp.where((t >= k) & (t <= m), 1 / window, 0)
        late = jnp.where((tau < 0) & (t > k), jnp.minimum(1, (t - k) / window), 0)
        add = lambda total, a, b: total + (inside + late).astype(a.dtype) * a - late.astype(a.dtype) * b
        chance = jnp.where(t > 0, jnp.exp(jnp.minimum(0, new.log_z - s.x.log_z)), 0)
        refused = jnp.where(take_x, 0, s.refused + 1)
        return _State(
            t + 1,
            x,
            y,
            jax.tree.map(add, s.total, x.value, y.value),
            tau,
            s.chance + chance,
            refused,
            jnp.maximum(s.longest, refused),
            jnp.where(jnp.arange(2) == t, new.log_z, s.first),
            jnp.minimum(s.even, even),
            s.broken | jnp.isnan(new.log_z) | (new.log_z == jnp.inf),
        )

    def more(s: _State) -> _State:
        log_z, values, even = propose(random.fold_in(key, s.t + jnp.arange(TOGETHER)))
        for i in range(TOGETHER):
            new = Chain(log_z[i], jax.tree.map(lambda v, i=i: v[i], values))
            seen = see(s, new, even[i])
            s = seen if i == 0 else _choose(going(s), seen, s)
        return s

    s = lax.while_loop(going, more, start)
    acceptance = s.chance / jnp.maximum(s.t - 1, 1).astype(dtype)
    return PairOutcome(s.total, s.tau, s.t, acceptance, s.longest, s.first, s.even, s.broken)


def _choose(take: Array, new: Any, held: Any) -> Any:
    return jax.tree.map(lambda n, h: jnp.where(take, n, h), new, held)
