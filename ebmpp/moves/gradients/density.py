# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Density of some blocks given the others, and checks of the moves that use it."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp

from ebmpp.core import Eta, PerRow, Rows, Scalar, checks, num_rows, select
from ebmpp.errors import IntractableError
from ebmpp.families import Family
from ebmpp.graph import FactorGraph, energy
from ebmpp.graph.states import check_names
from ebmpp.moves.move import Move
from ebmpp.moves.target import Target


def check_blocks(
    move: Move,
    graph: FactorGraph,
    suits: Callable[[Family], bool],
    expected: str,
    hint: str,
) -> None:
    """Refuse unknown blocks of a move, and families that do not suit."""
    for b in check_names(move.blocks, graph.families):
        family = graph.families[b]
        if not suits(family):
            name = f"{type(move).__name__}: block {b!r}"
            raise checks.error(name, expected, family, IntractableError, hint)


def local_density(
    target: Target, blocks: Sequence[str]
) -> Callable[[Eta, Eta, Scalar], Scalar]:
    """Return the log density of the blocks of one row given the others, without base measures.

    :return: a function of the statistics of the blocks, of their neighbours' statistics,
        and of the inverse temperature.
    """
    graph = target.graph
    factors = graph.touching(blocks)
    reference = None if target.tempering is None else target.tempering.reference

    def log_density_at(t, around, beta):
        t_all = {**around, **t}
        value = -energy.energy(graph, target.params, t_all, factors, as_written=True)
        value = beta * value
        if reference is None:
            return value
        products = [(reference[b] * v).sum() for b, v in t.items()]
        return value + (1 - beta) * jnp.stack(products).sum()

    return log_density_at


def surroundings(target: Target, x: Rows, blocks: Sequence[str]) -> tuple[Eta, PerRow]:
    """Return statistics of the neighbours of blocks, and the inverse temperature, of each row."""
    graph = target.graph
    around = graph.statistics(select(x, graph.neighbours(blocks)))
    beta = jnp.atleast_1d(target.beta)
    return around, jnp.tile(beta, num_rows(x) // len(beta))
