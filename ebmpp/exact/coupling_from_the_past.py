# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Coupling from the past: chains that start ever earlier, until all of them agree at time 0.

Also the checks and derivatives of interactions that both of its uses share: single units
(:mod:`ebmpp.exact.perfect`) and the bonds between units (:mod:`ebmpp.exact.random_cluster`).
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from jaxtyping import Bool, Float

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core.types import Params
from ebmpp.errors import IntractableError
from ebmpp.graph import FactorGraph, Pairwise, energy

State = TypeVar("State")


def couple_from_the_past(
    step: Callable[[Array, State], State],
    met: Callable[[State], Bool[Array, "rows"]],
    start: State,
    max_sweeps: int,
    is_worthwhile: Any = True,
) -> State:
    """Return the state at time 0 of runs from ``start``, of 1, 2, 4, ... sweeps, until all rows have met.

    Rows that have met run again with the others, with the same result. Propp, Wilson (1996), *Exact sampling
    with coupled Markov chains and applications to statistical mechanics*.

    :param step: one sweep at a given time before 0, with random words of that time, so that a longer run ends
        with the sweeps of the shorter one.
    :param is_worthwhile: False to skip the runs; may be traced.
    """

    def run(length: Array) -> State:
        return jax.lax.fori_loop(0, length, lambda i, x: step(length - i, x), start)

    longer = lambda length: jnp.maximum(1, 2 * length)
    is_running = lambda c: is_worthwhile & ~met(c[1]).all() & (longer(c[0]) <= max_sweeps)
    body = lambda c: (longer(c[0]), run(longer(c[0])))
    # starts at length 0, where no row has met, so that the run is compiled once
    return jax.lax.while_loop(is_running, body, (jnp.int32(0), start))[1]


def check_graph(graph: FactorGraph, method: str, expected: str, accepts: Callable[[str], bool]) -> None:
    """Refuse other blocks, and factors that join more than two blocks, or more than two units of a block."""
    lateral = [factor for split in graph.splits.values() for factor in split.inner_factors]
    wide = [factor for factor in graph.factors if len(factor.blocks) > 2]
    wide += [factor for factor in lateral if not isinstance(factor, Pairwise)]
    wrong = [f"block {b!r} ({family!r})" for b, family in graph.families.items() if not accepts(b)]
    wrong += [f"factor {factor.name!r} ({factor!r})" for factor in wide]
    if wrong:
        raise IntractableError(
            f"{method} takes {expected} units, factors of one or two blocks, and Pairwise factors inside a "
            f"block, got {wrong[0]}."
        )


def slopes(
    graph: FactorGraph, params: Params, edges: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], Float[Array, "..."]]:
    """Return the derivative of one block's natural parameters in another's statistics, for every edge."""
    zero = {b: jnp.zeros(f.statistic_shape, jnp.result_type(float)) for b, f in graph.families.items()}
    result = {}
    for a, b in edges:
        # constant in the state: the energy is affine in each unit and factors join two blocks at most
        natural = lambda t, a=a, b=b: energy.natural(graph, params, zero | {b: t}, [a])[a]
        result[a, b] = jax.jacobian(natural)(zero[b])
    return result
