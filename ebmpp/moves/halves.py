# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Draws of units of few values, two from one hash: what :func:`~ebmpp.moves.gibbs.draw_rows` makes, sooner.

A hash has two words, and :func:`ebmpp.core.random.words` keeps one, for XLA would otherwise not vectorise the
loop that it fuses with. Here both are used in one loop, by two units whose values share a number of 16 bits.
"""

import numpy as np

from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import random, sharding
from ebmpp.core.loops import apart
from ebmpp.core.types import Keys, Natural
from ebmpp.families import Family

_FEW = 16  # rows: of so few the units are what XLA's loops run over


def suits(family: Family) -> bool:
    """Whether a unit takes one word, and its values a byte."""
    if family.num_words != 1:
        return False
    with sharding.at_once():  # known, also where a trace asks
        states = family.states()
        return states is not None and bool((np.abs(np.asarray(states)) < 128).all())


def draw(family: Family, eta: Natural, keys: Keys) -> Array:
    """Draws of a block, from the words that a row's key has for it.

    :param family: of one axis.
    :param eta: units first, ``(units, rows, *stat_shape)``.
    :return: ``(units, rows)``.
    """
    size, half, few = family.size, (family.size + 1) // 2, len(keys) <= _FEW
    turn = lambda a: jnp.swapaxes(a, 0, 1) if few else a

    def both(eta: Array) -> Array:
        number = jnp.arange(half, dtype=jnp.uint32)[:, None]
        words = random.threefry(turn(keys[None]), turn(number), turn(number + jnp.uint32(half)))
        rest = [(0, 2 * half - size), *[(0, 0)] * (eta.ndim - 1)]
        each = zip(words, (eta[:half], jnp.pad(eta[half:], rest)), strict=True)
        low, high = (family.sample(w[..., None], turn(e)).astype(jnp.int8) for w, e in each)
        return _bits(low) | (_bits(high) << jnp.uint16(8))

    made = turn(apart(both, eta))
    made = jnp.concatenate([made, made >> jnp.uint16(8)])[:size].astype(jnp.uint8)
    return lax.bitcast_convert_type(made, jnp.int8).astype(family.dtype)


def _bits(values: Array) -> Array:
    return lax.bitcast_convert_type(values, jnp.uint8).astype(jnp.uint16)
