# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Ladders from the host: as many places of a path as evenness asks for, and the path through those alone."""

import jax
from jax import Array

from ebmpp.annealing import systems
from ebmpp.annealing.path import Path
from ebmpp.annealing.systems import Ladder
from ebmpp.core.compile import compiled
from ebmpp.errors import DomainError
from ebmpp.graph import FactorGraph

_CAPACITY = 256  # places that a pilot has room for at first


@compiled(statics=5)
def _find(
    graph: FactorGraph, num: int, evenness: float, capacity: int, sweeps: int, path: Path, key: Array
) -> Ladder:
    del graph  # the path's: so that the programs of a few graphs are kept
    return systems.find_ladder(path, key, num, evenness, capacity, sweeps)


def adaptive(
    path: Path, key: Array, num: int, evenness: float, sweeps: int = 1, most: int | None = None
) -> Ladder:
    """A ladder found by a pilot system: see :func:`~ebmpp.annealing.systems.find_ladder`.

    :param num: particles of the pilot, whose draws are used for nothing else.
    :param most: look for no more places than so many; None for as many as it takes.
    :return: one that is not :meth:`~ebmpp.annealing.systems.Ladder.whole` where ``most`` are too few.
    :raises DomainError: where no step is even, however short, unless the number of places is limited.
    """
    capacity = _CAPACITY if most is None else min(most, _CAPACITY)
    while True:
        found = _find(path.graph, num, evenness, capacity, sweeps, path, key)
        if int(found.count) < len(found.places) or capacity == most:
            return found
        if _is_stuck(found):
            if most is not None:
                return found
            raise DomainError(
                f"weights are not even, or not finite, at place {float(found.places[-2]):g} of the path, "
                "however short a step is: a model there may not normalise, or natural parameters overflow. "
                "Look at the params, and at those of the path"
            )
        capacity = 2 * capacity if most is None else min(most, 2 * capacity)


def _is_stuck(found: Ladder) -> bool:
    """Whether the last steps are the shortest that a pilot tries, but for the very last, to the end."""
    return bool(found.places[-2] - found.places[-3] <= 2 * systems.SHORTEST)


def thinned(path: Path, key: Array, num: int, evenness: float, most: int) -> Path | None:
    """The path through as many knots as the model needs: the places of an adaptive ladder.

    :param num: particles of the pilot.
    :param evenness: the conditional effective sample size from each knot to the next, as a share.
    :param most: knots that there may be.
    :return: None where that takes more.
    """
    found = adaptive(path, key, num, evenness, most=most)
    if not found.whole():
        return None
    count = int(found.count)
    return jax.block_until_ready(path.cut(found.places[:count], found.count))
