# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks of a Gibbs sampler as functions for NumPyro's HMCGibbs."""

from collections.abc import Callable
from functools import partial
from typing import Any

from jax import Array

from ebmpp.core import Rows, checks, random
from ebmpp.errors import IntractableError
from ebmpp.graph import FactorGraph
from ebmpp.ppl.binding import Params, Sites
from ebmpp.ppl.gibbs_block import GibbsBlock
from ebmpp.traced import ModelBlock
from ebmpp.traced.block import Block, Call


def gibbs_fn(
    graph: FactorGraph | ModelBlock, sites: Sites = None, params: Params = None, **options: Any
) -> Callable[..., dict[str, Array]]:
    """Return a block as a function for :class:`numpyro.infer.HMCGibbs`.

    HMCGibbs does not pass the model's arguments, so functions among ``params`` are of the sibling sites'
    values alone, and it has no state but the sites, so latent blocks are drawn afresh at each step.

    :param graph: the declaration; or a block of :meth:`GibbsBlock.from_model`, as the only argument, which
        keeps the model's arguments that it was made for.
    :param params: as for :class:`GibbsBlock`, functions ``fn(sites)``. The other arguments are its too.
    :return: a function ``(rng_key, gibbs_sites, hmc_sites)`` to new values of the sites.
    :raises IntractableError: for latent blocks that interact: they cannot be drawn afresh at once.

    **Example**

    >>> import jax, jax.numpy as jnp, ebmpp
    >>> rbm = ebmpp.layered(x=ebmpp.Bernoulli(6), h=ebmpp.Bernoulli(3))
    >>> update = ebmpp.ppl.gibbs_fn(rbm, ["x"], rbm.init(jax.random.key(0)))
    >>> update(rng_key=jax.random.key(1), gibbs_sites={"x": jnp.zeros(6)}, hmc_sites={})["x"].shape
    (6,)
    """
    if isinstance(graph, ModelBlock):
        is_alone = sites is None and params is None and not options
        arguments, expected = (sites, params, options), "left away for a block of from_model"
        checks.require(is_alone, "gibbs_fn: sites and options", expected, arguments)
        graph.info.check_data(graph.call)
        return partial(_update, graph, graph.call)
    block = GibbsBlock(graph, sites, params, **options)
    clash = graph.interacting(block.latents)
    hint = "HMCGibbs keeps no state for others: use GibbsBlock in numpyro.infer.Gibbs."
    checks.require(not clash, "latent blocks", "without interaction", clash, IntractableError, hint)
    return partial(_update, block, Call({}, (), {}))


def _update(block: Block, call: Call, rng_key: Array, gibbs_sites: Rows, hmc_sites: Rows) -> dict:
    call, words = call._replace(siblings=hmc_sites), random.key_pair(rng_key)
    if isinstance(block, GibbsBlock):
        gibbs_sites, words = block.begin(gibbs_sites, call, rng_key).z, rng_key
    z = block.advance(gibbs_sites, call, words).z
    return {site: z[site] for site in block.sites}
