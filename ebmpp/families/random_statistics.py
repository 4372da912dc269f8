# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Statistics of a few reproducible states, at which energies are probed."""

from collections.abc import Iterable, Mapping

import numpy as np

from jax import Array
import jax.numpy as jnp

from ebmpp.core import Eta
from ebmpp.core.compile import compiled
from ebmpp.families.family import Family


def random_statistics(families: Mapping[str, Family], blocks: Iterable[str], rows: int) -> Eta:
    """Return statistics of ``rows`` states, the same in every call.

    Units of finitely many values take them with proportions that differ between rows, and are nearly all
    equal in every second row. Others are initial draws, ten times as large in every second row where they are
    unbounded.
    """
    generator = np.random.default_rng(0)
    scope = tuple((b, families[b]) for b in blocks)
    return _statistics_of(scope, {b: _numbers(f, rows, generator) for b, f in scope})


def _numbers(family: Family, rows: int, generator: np.random.Generator) -> np.ndarray:
    """Return numbers of values, or random words where there are infinitely many values."""
    states = family.states()
    if states is None:
        shape = (rows, *family.shape, family.num_words)
        return generator.integers(0, 2**32, shape, np.uint32)
    shares = generator.dirichlet(np.full(len(states), 0.5), rows)
    shares[::2] = 0.05 * shares[::2] + 0.95 * np.eye(len(states))[np.arange(0, rows, 2) // 2 % len(states)]
    return np.stack([generator.choice(len(states), family.shape, p=p) for p in shares]).astype(np.int32)


@compiled(statics=1)
def _statistics_of(scope: tuple[tuple[str, Family], ...], numbers: dict[str, Array]) -> Eta:
    statistics = {}
    for b, family in scope:
        states = family.states()
        x = family.initial(numbers[b]) if states is None else states[numbers[b]]
        if np.isinf(family.statistic_bounds).any():
            far = jnp.where(jnp.arange(len(x)) % 2, 10, 1).reshape(-1, *(1,) * (x.ndim - 1))
            x = (x * far.astype(x.dtype)).astype(x.dtype)
        statistics[b] = family.statistics(x)
    return statistics
