# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Mean-field passes: coordinate ascent on a bound of the log-density of the visible blocks, for one row."""

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core.types import Blocks, Eta, Params
from ebmpp.graph import energy
from ebmpp.graph.declaration import Declaration

#: Mean statistics of all blocks, and natural parameters of the latent ones.
Means = tuple[Blocks, Eta]


def mean_field(graph: Declaration, params: Params, known: Blocks, passes: int) -> Means:
    """Independent latent units that fit a row best, after so many passes over the latent blocks.

    At first the latents are at the means of their families' default laws. A pass visits the blocks next to
    the visible ones first: upper layers begin from what the row has told the lower ones. (From their own
    biases, or from above, a deep machine on digits ended a hundred nats below the bound it reaches so.)

    :param known: statistics of the visible blocks.
    """
    start = {b: f.default_eta() for b, f in graph.latent.items()}
    order = _upward(graph)

    def one_pass(_: Array, now: Means) -> Means:
        for block in order:
            now = mean_layer(graph, params, (block,), *now)
        return now

    means = {b: graph.families[b].mean(e) for b, e in start.items()}
    return lax.fori_loop(0, passes, one_pass, (known | means, start))


def _upward(graph: Declaration) -> list[str]:
    """The latent blocks by their distance from the visible ones, then as they are declared."""
    seen, order = set(graph.visible), []
    while near := [b for b in graph.latent if b not in seen and not seen.isdisjoint(graph.neighbours([b]))]:
        seen.update(near)
        order += near
    return order + [b for b in graph.latent if b not in seen]


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
