# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks of Gibbs as functions for NumPyro's HMCGibbs."""

from collections.abc import Callable, Mapping
from typing import Any

from jax import Array

from ebmpp.core import Rows
from ebmpp.errors import ArgumentError, IntractableError
from ebmpp.graph import FactorGraph
from ebmpp.moves import gibbs
from ebmpp.ppl.gibbs_block import GibbsBlock
from ebmpp.ppl.surroundings import Sites
from ebmpp.traced.block import Call
from ebmpp.traced.model_block import ModelBlock, ModelFunction


def gibbs_fn(
    graph: FactorGraph | ModelBlock,
    sites: Sites = None,
    params: Mapping[str, Any] | Callable[..., Any] | None = None,
    **options: Any,
) -> "GibbsFunction | ModelFunction":
    """The same update as a function for :class:`numpyro.infer.HMCGibbs`.

    HMCGibbs does not pass the model's arguments on, so functions among ``params`` are of the sibling sites'
    values alone, and there is no state but the sites: latent blocks are drawn afresh every time.

    :param graph: the declaration; or a block of :meth:`GibbsBlock.from_model`, which says all, and keeps the
        model's arguments that it was made for.
    :param sites: as for :class:`GibbsBlock`.
    :param params: as for :class:`GibbsBlock`, functions ``fn(sites)``.
    :param options: the other arguments of :class:`GibbsBlock`, but ``init``.
    :return: a function ``(rng_key, gibbs_sites, hmc_sites)`` of new values of the sites.
    :raises IntractableError: for latent blocks that interact: they cannot be drawn afresh in one go.

    **Example**

    >>> import jax, jax.numpy as jnp, ebmpp
    >>> rbm = ebmpp.layered(x=ebmpp.Bernoulli(6), h=ebmpp.Bernoulli(3))
    >>> update = ebmpp.ppl.gibbs_fn(rbm, ["x"], rbm.init(jax.random.key(0)))
    >>> update(rng_key=jax.random.key(1), gibbs_sites={"x": jnp.zeros(6)}, hmc_sites={})["x"].shape
    (6,)
    """
    if isinstance(graph, ModelBlock):
        if sites is not None or params is not None or options:
            raise ArgumentError(
                "gibbs_fn: a block of GibbsBlock.from_model has its sites and options already"
            )
        return ModelFunction(graph)
    block = GibbsBlock(graph, sites, params, **options)
    clash = graph.interacting(block.within.latents)
    if clash:
        raise IntractableError(
            f"latent blocks {clash[0]} interact, so they cannot be drawn afresh in one go, and HMCGibbs "
            "keeps no state for them; use GibbsBlock in numpyro.infer.Gibbs"
        )
    return GibbsFunction(block)


class GibbsFunction:
    """What :func:`gibbs_fn` returns."""

    def __init__(self, block: GibbsBlock) -> None:
        self.block = block

    def __call__(self, rng_key: Array, gibbs_sites: Rows, hmc_sites: Rows) -> dict[str, Array]:
        within = self.block.within
        made = within.bind(gibbs_sites, Call(hmc_sites, (), {}))
        drawn = gibbs.initial_rows(within.graph, within.latents, made.keys(rng_key, 0))
        x = within.to_rows(gibbs_sites, drawn, made)
        x = self.block.advance(made, x, made.keys(rng_key, 1)).x
        return within.to_sites(x, gibbs_sites, made.batch)
