# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Mean-field passes: coordinate ascent on a lower bound of the log-density of one row."""

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core.types import Blocks, Eta, Params
from ebmpp.graph import energy
from ebmpp.graph.declaration import Declaration

#: Mean statistics of all blocks, and natural parameters of the latent ones.
Means = tuple[Blocks, Eta]


def mean_field(graph: Declaration, params: Params, known: Blocks, passes: int) -> Means:
    """Return independent latent units fitted to statistics of the visible blocks by some passes.

    Latents start at the means of their families' defaults. A pass visits the blocks next to the visible ones
    first, so that upper layers start from lower ones that have seen the row. (Starting from their own biases,
    or from above, a deep machine on digits ended a hundred nats below the bound it reaches this way.)
    """
    start = {b: f.default_eta() for b, f in graph.latent.items()}
    order: list[str] = []
    while near := [b for b in graph.neighbours((*graph.visible, *order)) if b in graph.latent]:
        order += near
    order += [b for b in graph.latent if b not in order]

    def one_pass(_: Array, state: Means) -> Means:
        for block in order:
            state = mean_layer(graph, params, (block,), *state)
        return state

    means = {b: graph.families[b].mean(e) for b, e in start.items()}
    return lax.fori_loop(0, passes, one_pass, (known | means, start))


def mean_layer(graph: Declaration, params: Params, blocks: tuple[str, ...], t: Blocks, eta: Eta) -> Means:
    """Update the blocks of one layer, part by part, to their conditional given the means of the others."""

    def conditional(t: Blocks) -> Means:
        new = energy.natural(graph, params, t, blocks)
        return {b: graph.families[b].mean(e).astype(t[b].dtype) for b, e in new.items()}, new

    if graph.splits.keys().isdisjoint(blocks):
        means, new_eta = conditional(t)
        return t | means, eta | new_eta
    (block,) = blocks
    split, family = graph.splits[block], graph.families[block]
    colors = jnp.asarray(split.colors).reshape(*family.shape, *(1,) * len(family.stat_shape))

    def step(part: Array, state: Means) -> Means:
        new = conditional(t | state[0])
        return jax.tree.map(lambda new, old: jnp.where(colors == part, new, old), new, state)

    means, new_eta = split.visit(step, ({block: t[block]}, {block: eta[block]}))
    return t | means, eta | new_eta
