# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Bounds of a row's unnormalised log-density where its latents cannot be summed out."""

from functools import partial
from typing import Any

from jaxtyping import Float

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import Blocks, Params, checks
from ebmpp.core.precision import in_full
from ebmpp.graph import FactorGraph, energy, states, tables
from ebmpp.graph.mean_field import mean_field


def mean_field_bound(
    graph: FactorGraph, params: Params, data: Any, *, passes: int = 30
) -> Float[Array, "*batch"]:
    """A lower bound of minus the free energy, log sum_h exp(-E(v, h)) r(v, h), row by row.

    For latents that interact given the visibles, as in a deep Boltzmann machine. Under independent latent
    units at natural parameters eta with means mu the energy, affine in each unit's statistics, has the mean
    E(mu), and the base measures cancel, so the bound is ``log r(v) - E(mu) + sum A(eta) - <eta, mu>``,
    raised by coordinate ascent. It is the free energy's own value where the latents are one layer. Less log Z
    it bounds log p(v) from below; log Z is estimated, so take :func:`ebmpp.evaluate.reverse_ais`'s.

    :param graph: the model.
    :param params: a dict keyed by factor name.
    :param data: rows of the visible blocks, ``(*batch, *shape)``.
    :param passes: over the latent layers, at least 1.
    :return: shape ``(*batch,)``.
    :raises StateError: for data of a wrong name, shape or value.
    :raises ArgumentError: for another number of passes.

    **References**

    1. Salakhutdinov, Hinton (2009), *Deep Boltzmann machines*, sections 3.1 and 4.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> params, v = rbm.init(jax.random.key(0)), jax.numpy.ones((2, 4))
    >>> bool((abs(mean_field_bound(rbm, params, v) + rbm.free_energy(params, {"v": v})) < 1e-5).all())
    True
    """
    passes = checks.count("mean_field_bound: passes", passes)
    states.check_params(graph.param_shapes, params)
    rows, _, batch = tables.as_data(graph, data, "mean_field_bound")
    return _bounds(graph, passes, params, rows).reshape(batch)


@partial(jax.jit, static_argnums=(0, 1))
def _bounds(graph: FactorGraph, passes: int, params: Params, rows: Blocks) -> Float[Array, "rows"]:
    return lax.map(partial(_bound, graph, passes, params), rows, batch_size=256)


@in_full
def _bound(graph: FactorGraph, passes: int, params: Params, row: Blocks) -> Float[Array, ""]:
    known, base = graph.statistics(row), energy.log_base_measure(graph, row)
    if not graph.latent:
        return base - energy.energy(graph, params, known)
    t, eta = mean_field(graph, params, known, passes)
    entropy = sum(f.log_normalizer(eta[b]).sum() - jnp.vdot(eta[b], t[b]) for b, f in graph.latent.items())
    return base - energy.energy(graph, params, t) + entropy
