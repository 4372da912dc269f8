# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
r"""Coupled particle independent Metropolis-Hastings: unbiased means from particle systems.

A chain of systems proposes a new system and accepts it with probability ``min(1, Z'/Z)``, where Z is a
system's estimate of the partition function. Two such chains, the second one step behind, get the same
proposals and the same uniforms, so they meet as soon as both accept the same system.

With independent systems S_0, S_1, ... the chains start at X_0 = S_0 and Y_0 = S_1. X_1 is S_1 or X_0. At
t >= 2 the transitions from X_{t-1} to X_t and from Y_{t-2} to Y_{t-1} use S_t and one uniform. With
:math:`\tau` the first t >= 1 at which X_t = Y_{t-1}, the estimate is

.. math::

    H_{k:m} = \frac{1}{m-k+1} \sum_{t=k}^{m} f(X_t)
        + \sum_{t=k+1}^{\tau-1} \min\Big(1, \frac{t-k}{m-k+1}\Big) (f(X_t) - f(Y_{t-1})),

where f of a system is its weighted mean of f. Memory does not grow with :math:`\tau`.

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

_BATCH = 2  # systems that run side by side: every pair needs the first two

#: From keys of systems to log Z, values (a pytree) and lowest conditional effective sample size of each.
Propose = Callable[[IslandKeys], tuple[PerIsland, Any, PerIsland]]


class Chain(NamedTuple):
    """The current system of a chain."""

    log_z: Scalar
    value: Any


class PairOutcome(NamedTuple):
    """Result of a pair of chains of systems."""

    total: Any
    """H_{k:m}."""
    meeting_time: Int32[Array, ""]
    """-1 where unmet."""
    num_systems: Int32[Array, ""]
    """Number of systems that the estimate needs."""
    acceptance: Scalar
    """Mean acceptance probability of the leading chain."""
    longest: Int32[Array, ""]
    """Largest number of consecutive rejections by the leading chain."""
    log_z: Float[Array, "2"]
    """Estimates of log Z by the first two systems, relative to that of the reference."""
    min_cess: Scalar
    """Lowest of all systems; see :class:`~ebmpp.annealing.systems.Systems`."""
    broken: Bool[Array, ""]
    """True if a system's Z is NaN or infinite."""


class _State(NamedTuple):
    x: Chain
    y: Chain
    rejections: Array  # in a row
    result: PairOutcome  # so far, with the sum of acceptance probabilities


def run_pair(
    propose: Propose, shapes: Any, key: UInt32[Array, "2"], k: int, m: int, max_systems: int | None = None
) -> PairOutcome:
    """Run one pair of chains until they meet, and at least to time m; the times from k on count.

    :param propose: makes two systems.
    :param shapes: of a system's values.
    :param key: of the pair; system t draws from ``fold_in(key, t)``, its acceptance from
        ``fold_in(key, t, 1)``.
    :param max_systems: number of systems after which an unmet pair stops; None for no limit.
    """
    window, dtype = m - k + 1, jnp.result_type(float)
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    none, count = jnp.zeros((), dtype), jnp.zeros((), jnp.int32)
    empty = Chain(none, zero)
    result = PairOutcome(zero, count - 1, count, none, count, jnp.zeros(2), none + 1, count > 0)

    def is_running(s: _State) -> Array:
        r = s.result
        is_over = jnp.array(False) if max_systems is None else r.num_systems >= max_systems
        return ((r.meeting_time < 0) | (r.num_systems <= m)) & ~r.broken & ~is_over

    def transition(s: _State, new: Chain, cess: Array) -> _State:
        r, t, unmet = s.result, s.result.num_systems, s.result.meeting_time < 0
        log_u = jnp.log(random.uniform(random.words(random.fold_in(key, t, 1), 1))[0])
        accepts = lambda chain: log_u < new.log_z - chain.log_z
        accept_x = (t == 0) | accepts(s.x)
        accept_y = unmet & ((t == 1) | ((t > 1) & accepts(s.y)))
        x, y = _select(accept_x, new, s.x), _select(accept_y, new, s.y)
        tau = jnp.where(unmet & (t > 0) & accept_x & accept_y, t, r.meeting_time)
        inside = jnp.where((t >= k) & (t <= m), 1 / window, 0)
        late = jnp.where((tau < 0) & (t > k), jnp.minimum(1, (t - k) / window), 0)
        add = lambda total, a, b: total + (inside + late).astype(a.dtype) * a - late.astype(a.dtype) * b
        probability = jnp.where(t > 0, jnp.exp(jnp.minimum(0, new.log_z - s.x.log_z)), 0)
        rejections = jnp.where(accept_x, 0, s.rejections + 1)
        result = PairOutcome(
            jax.tree.map(add, r.total, x.value, y.value),
            tau,
            t + 1,
            r.acceptance + probability,
            jnp.maximum(r.longest, rejections),
            jnp.where(jnp.arange(2) == t, new.log_z, r.log_z),
            jnp.minimum(r.min_cess, cess),
            r.broken | jnp.isnan(new.log_z) | (new.log_z == jnp.inf),
        )
        return _State(x, y, rejections, result)

    def body(s: _State) -> _State:
        log_z, values, cess = propose(random.fold_in(key, s.result.num_systems + jnp.arange(_BATCH)))
        for i in range(_BATCH):
            new = Chain(log_z[i], jax.tree.map(lambda v, i=i: v[i], values))
            after = transition(s, new, cess[i])
            s = after if i == 0 else _select(is_running(s), after, s)
        return s

    r = lax.while_loop(is_running, body, _State(empty, empty, count, result)).result
    return r._replace(acceptance=r.acceptance / jnp.maximum(r.num_systems - 1, 1).astype(dtype))


def _select(condition: Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)
