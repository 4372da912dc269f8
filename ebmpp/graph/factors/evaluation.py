# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
r"""Natural parameters of units under any energy, by evaluation.

The energy of a factor that is not affine has one multi-affine extension from the states
of its finite units to all of their statistics. With :math:`t_k` the statistics of value
k of a unit and :math:`E_k` the energy with the unit at that value, its natural
parameter :math:`\eta` solves

.. math:: -E_k = c + \langle \eta, t_k \rangle, \qquad k = 1, \dots, K.

:func:`extended` is the energy with this derivative at states, also under autodiff of
any order. Statistics that are no states, such as means, are no valid inputs.
"""

from collections.abc import Callable
from functools import lru_cache, partial
import math
from typing import NamedTuple

import numpy as np

import jax
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero
import jax.numpy as jnp

from ebmpp.core import Statistics, full_precision, select, sharding
from ebmpp.families.family import Families, Family
from ebmpp.graph.factors.factor import Factor, FactorParams
from ebmpp.graph.factors.zeros import BARRIER

# floats of changed states that are evaluated at once
_MOST_IN_FLIGHT = 2**24


class Values(NamedTuple):
    """All values of a unit."""

    statistics: np.ndarray
    """Their statistics, ``(values, statistics)``."""
    solve: np.ndarray
    """From log weights of the values to natural parameters, ``(statistics, values)``."""


@lru_cache(maxsize=256)
def values_of(family: Family) -> Values | None:
    """Return the values of a unit whose distributions are all of its family, else None."""
    with sharding.eager():  # concrete, also under a trace
        states = family.states()
        if states is None or len(states) > math.prod(family.stat_shape) + 1:
            return None
        statistics = np.asarray(family.statistics(states), float)
    table = statistics.reshape(len(statistics), -1)
    if np.linalg.matrix_rank(table) == len(table) == table.shape[1]:
        return Values(table, np.linalg.inv(table))
    centered = table - table.mean(0)
    if np.linalg.matrix_rank(centered) < len(table) - 1:
        return None
    return Values(table, np.linalg.pinv(centered))


def natural_of_energies(family: Family, energies: Array) -> Array:
    """Return natural parameters, ``(statistics, ...)``, from energies ``(values, ...)``."""
    values = values_of(family)
    assert values is not None
    # impossible values have infinite energies
    drops = energies.min(0, keepdims=True) - energies
    return jnp.tensordot(jnp.asarray(values.solve, drops.dtype), drops, 1)


def natural_of_units(
    energy_at: Callable[[Array], Array],
    family: Family,
    statistics: Array,
    units: Array | np.ndarray,
    rows: int = 1,
) -> Array:
    """Return the natural parameters of some units of one block at one state.

    :param energy_at: the energy as a function of the block's statistics.
    :param units: numbers of units.
    :param rows: how many states a caller maps over.
    :return: ``(units, *stat_shape)``.
    """
    values = values_of(family)
    assert values is not None
    flat = statistics.reshape(family.size, -1)
    table = jnp.asarray(values.statistics, flat.dtype)

    def natural_at(unit):
        def energy_of(value):
            moved = flat.at[unit].set(value, mode="drop")
            return energy_at(moved.reshape(statistics.shape))

        return natural_of_energies(family, jax.vmap(energy_of)(table))

    count = max(1, _MOST_IN_FLIGHT // (flat.size * len(table) * rows))
    eta = lax.map(natural_at, jnp.asarray(units), batch_size=count)
    return eta.reshape(-1, *family.stat_shape)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def extended(
    factor: Factor, families: Families, params: FactorParams, statistics: Statistics
) -> Array:
    """Return the energy at one state, with the derivatives of its multi-affine extension.

    An infinite energy is that of a barrier.

    :param statistics: of the blocks of the factor alone.
    """
    return jnp.minimum(factor.energy_at(params, statistics, families), BARRIER)


@partial(extended.defjvp, symbolic_zeros=True)
@full_precision
def _extended_jvp(
    factor: Factor, families: Families, primals: tuple, tangents: tuple
) -> tuple[Array, Array]:
    params, statistics = primals
    real = {b: t for b, t in statistics.items() if values_of(families[b]) is None}

    def written_at(params, moved):
        return factor.energy_at(params, {**statistics, **moved}, families)

    def energy_at(moved):
        return extended(factor, families, params, {**statistics, **moved})

    directions = tangents[0], select(tangents[1], real)
    change = _change(written_at, (params, real), directions)
    for block, direction in tangents[1].items():
        if block in real or isinstance(direction, SymbolicZero):
            continue
        family = families[block]
        eta = natural_of_units(
            lambda t, block=block: energy_at({block: t}),
            family,
            statistics[block],
            np.arange(family.size),
        )
        change = change - jnp.vdot(eta.reshape(direction.shape), direction)
    return energy_at({}), change


def _change(fn: Callable[..., Array], primals: tuple, tangents: tuple) -> Array:
    """Return the change of a function along the tangents that are not zero."""
    leaves, structure = jax.tree.flatten(primals)
    directions = [
        None if isinstance(direction, SymbolicZero) else direction
        for direction in jax.tree.leaves(tangents)
    ]
    starts = [v if d is not None else None for v, d in zip(leaves, directions)]

    def value_at(starts):
        merged = [v if s is None else s for v, s in zip(leaves, starts)]
        return fn(*jax.tree.unflatten(structure, merged))

    return jax.jvp(value_at, [starts], [directions])[1]
