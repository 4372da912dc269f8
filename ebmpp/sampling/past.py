# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Coupling from the past: runs that begin ever earlier, until all that come from there agree at time 0."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import Array
import jax.numpy as jnp

State = TypeVar("State")


def from_the_past(
    step: Callable[[Array, State], State],
    met: Callable[[State], Array],
    start: State,
    max_sweeps: int,
    goes: Any = True,
) -> State:
    """The state at time 0 of runs from ``start``, of 1, 2, 4, ... sweeps, until all rows have met.

    Rows that have met are run again with the others, and come out the same.

    :param step: one sweep at a time before 0, whose random words are that time's own: a longer run ends with
        the sweeps of the shorter one.
    :param met: which rows have.
    :param max_sweeps: how long a run may be.
    :param goes: whether it is worth a run; may be traced.

    **References**

    1. Propp, Wilson (1996), *Exact sampling with coupled Markov chains and applications to statistical
       mechanics*.
    """

    def run(length: Array) -> State:
        return jax.lax.fori_loop(0, length, lambda i, x: step(length - i, x), start)

    longer = lambda length: jnp.maximum(1, 2 * length)
    unfinished = lambda c: goes & ~met(c[1]).all() & (longer(c[0]) <= max_sweeps)
    again = lambda c: (longer(c[0]), run(longer(c[0])))
    # from length 0, where no row has met, so that a run is compiled once
    return jax.lax.while_loop(unfinished, again, (jnp.int32(0), start))[1]
