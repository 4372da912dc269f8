# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Mean-field passes: coordinate ascent on a bound of the log-density of the visible blocks, for one row."""

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core.types import Blocks, Eta, Params
from ebmpp.graph import energy
from ebmpp.graph.declaration import Declaration, schedule

#: Mean statistics of all blocks, and natural parameters of the latent ones.
Means = tuple[Blocks, Eta]


def mean_field(graph: Declaration, params: Params, known: Blocks, start: Eta, passes: int) -> Means:
    """Independent latent units that fit a row best, after so many passes over the latent layers.

    :param known: statistics of the visible blocks.
    :param start: natural parameters of the latent blocks.
    """
    layers = schedule(graph, clamped=graph.visible)

    def one_pass(_: Array, now: Means) -> Means:
        for blocks in layers:
            now = mean_layer(graph, params, blocks, *now)
        return now

    means = {b: graph.families[b].mean(e) for b, e in start.items()}
    return lax.fori_loop(0, passes, one_pass, (known | means, start))


def mean_layer(graph: Declaration, params: Params, blocks: tuple[str, ...], t: Blocks, eta: Eta) -> Means:
    """``t`` and ``eta`` with the ``blocks`` of a layer set to their conditional at the means of the others.

    Of units that interact, part after part.
    """

    def conditional(t: Blocks) -> Means:
        made = energy.natural(graph, params, t, blocks)
        return {b: graph.families[b].mean(e).astype(t[b].dtype) for b, e in made.items()}, made

    if graph.splits.keys().isdisjoint(blocks):
        means, made = conditional(t)
        return t | means, eta | made
    (block,) = blocks
    split, family = graph.splits[block], graph.families[block]
    colors = jnp.asarray(split.colors).reshape(*family.shape, *(1,) * len(family.stat_shape))

    def step(part: Array, now: Means) -> Means:
        new = conditional(t | now[0])
        return jax.tree.map(lambda new, old: jnp.where(colors == part, new, old), new, now)

    means, made = split.each(step, ({block: t[block]}, {block: eta[block]}))
    return t | means, eta | made
