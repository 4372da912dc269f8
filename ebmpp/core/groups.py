# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Items in groups, such as units in the parts of a block: positions, ranks, pairs and loops."""

from collections.abc import Callable
from typing import TypeVar

from jaxtyping import Integer
import numpy as np

from jax import Array, lax
import jax.numpy as jnp

_Carry = TypeVar("_Carry")
#: Number of parts up to which they are unrolled; 128 parts would compile for half a
#: minute.
UNROLLED = 4
#: Pairs of units by number.
Edges = Integer[np.ndarray, "edges 2"]


def positions_by_group(
    groups: Integer[np.ndarray, "items"], count: int
) -> list[np.ndarray]:
    """Return the positions of the items of each group, in order."""
    ends = np.cumsum(np.bincount(groups, minlength=count))
    return np.split(np.argsort(groups, kind="stable"), ends[:-1])


def ranks_in_groups(
    groups: Integer[np.ndarray, "items"],
) -> Integer[np.ndarray, "items"]:
    """Return the number of each item among the items of its group, in order."""
    counts = np.bincount(groups)
    starts = np.cumsum(counts) - counts
    position = np.argsort(np.argsort(groups, kind="stable"))
    return position - starts[groups]


def induced_edges(
    edges: Edges, units: Integer[np.ndarray, "units"], size: int
) -> Edges:
    """Return the pairs among some of ``size`` units, by their places in ``units``."""
    place = np.full(size, -1)
    place[units] = np.arange(len(units))
    renumbered = place[edges]
    return renumbered[(renumbered >= 0).all(1)]


def fold_parts(count: int, step: Callable[..., _Carry], carry: _Carry) -> _Carry:
    """Apply ``carry = step(part, carry)`` to each part in order; few are unrolled, as ints."""
    if count > UNROLLED:
        return lax.fori_loop(0, count, step, carry)
    for part in range(count):
        carry = step(part, carry)
    return carry


def sum_by_halves(x: Array) -> Array:
    """Return the sum along the first axis, whose rounding does not add up.

    Successively, 20,000 equal numbers around 1 have a sum that is 0.02 off in float32.
    XLA would merge sums of blocks.
    """
    while len(x) > 1:
        half = len(x) // 2
        x = jnp.concatenate([x[:half] + x[half : 2 * half], x[2 * half :]])
    return x.sum(0)
