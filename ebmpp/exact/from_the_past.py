# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Coupling from the past: runs that begin ever earlier, until all that come from there agree at time 0.

And what its two ways, of single units and of the bonds between them, ask of a graph: how pairs of units pull.
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


def from_the_past(
    step: Callable[[Array, State], State],
    met: Callable[[State], Bool[Array, "rows"]],
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


def check_edges(graph: FactorGraph, who: str) -> None:
    """:raises IntractableError: for factors that join other than two blocks, or two units of a block."""
    for factor in graph.factors:
        if len(factor.blocks) > 2:
            raise IntractableError(
                f"factor {factor.name!r} is over {len(factor.blocks)} blocks; {who} takes factors of one or "
                "two blocks, whose interactions have one sign in every state"
            )
    for block, split in graph.splits.items():
        for factor in split.own:
            if not isinstance(factor, Pairwise):
                raise IntractableError(
                    f"units of block {block!r} interact by {factor!r}; {who} takes Pairwise factors inside a "
                    "block"
                )


def slopes(
    graph: FactorGraph, params: Params, edges: Iterable[tuple[str, str]]
) -> dict[tuple[str, str], Float[Array, "..."]]:
    """How the natural parameters of one block grow with the statistics of another, for every edge."""
    zero = {b: jnp.zeros(f.statistic_shape, jnp.result_type(float)) for b, f in graph.families.items()}
    made = {}
    for a, b in edges:
        # constant in the state: the energy is affine in each unit and factors join two blocks at most
        of = lambda t, a=a, b=b: energy.natural(graph, params, zero | {b: t}, [a])[a]
        made[a, b] = jax.jacobian(of)(zero[b])
    return made
