# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Probability zero: a barrier in place of infinite energies, and its softening along a path.

A state of infinite energy has the energy of a barrier that no finite energy outweighs.
Products with zero statistics and derivatives then stay finite, energies of possible
states are exact, and exp(-barrier) is zero. The barrier is a power of two, so that sums
count the violated constraints exactly: sweeps from an impossible state lower this
number.
"""

from typing import Any, NamedTuple

from jax import Array
import jax.numpy as jnp

from ebmpp.core import Natural
from ebmpp.families.family import Family

#: Energy of an impossible state, per violated constraint.
BARRIER = 2.0**100
_FAR = 2.0**60  # magnitudes that only a barrier reaches, also at small temperatures
#: A natural parameter at which a unit has one value, whose digits are not lost beside it:
#: exp(-256) is zero in float32, and 1e-111 in float64.
CERTAIN = 256.0
#: Energy of a violated constraint at inverse temperature b: this over 1 - b.
_SOFT = 4.0


class Softened(NamedTuple):
    """Params of a factor whose impossible states have a finite energy."""

    params: Any
    height: Array


def unwrap(params: Any) -> tuple[Any, Array | float]:
    """Return the params of a factor, and the energy of a violated constraint."""
    return params if isinstance(params, Softened) else (params, BARRIER)


def soften(params: Any, beta: Array) -> Softened:
    """Return params at an inverse temperature, under which only 1 has impossible states.

    Few states of the reference are possible, so most particles would die at the first
    rung.
    """
    height = jnp.where(beta < 1, _SOFT / jnp.maximum(1 - beta, 1e-6), BARRIER)
    return Softened(params, height)


def is_impossible(energy: Array) -> Array:
    """Return True where an energy contains a barrier."""
    return energy > _FAR


def saturate(family: Family, eta: Natural, limit: float = CERTAIN) -> Natural:
    """Replace natural parameters that contain a barrier by ones with the same distribution.

    Differences of log-normalisers would lose all digits beside a barrier.
    """
    if not family.stat_shape:
        return jnp.where(abs(eta) > _FAR, limit * jnp.sign(eta), eta)
    top = eta.max(-1, keepdims=True)
    return jnp.where(eta < top - _FAR, top - limit, eta)
