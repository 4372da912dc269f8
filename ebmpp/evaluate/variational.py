# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Bounds of a row's unnormalised log-density where its latents cannot be summed out."""

from functools import partial
import math
from typing import Any

from jaxtyping import Float

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from ebmpp.core import Blocks, Key, Keys, Params, checks, random
from ebmpp.core.precision import full_precision
from ebmpp.core.types import Eta, Scalar
from ebmpp.errors import ArgumentError
from ebmpp.exact import enumeration
from ebmpp.graph import FactorGraph, energy, states, tables
from ebmpp.graph.mean_field import mean_field
from ebmpp.moves import gibbs


def mean_field_bound(
    graph: FactorGraph,
    params: Params,
    data: Any,
    *,
    passes: int = 30,
    num_draws: int | None = None,
    rng_key: Array | None = None,
) -> Float[Array, "*batch"]:
    """A lower bound of minus the free energy, log sum_h exp(-E(v, h)) r(v, h), row by row.

    For latents that interact given the visibles, as in a deep Boltzmann machine. Under independent latent
    units at natural parameters eta with means mu the energy, affine in each unit's statistics, has the mean
    E(mu), and the base measures cancel, so the bound is ``log r(v) - E(mu) + sum A(eta) - <eta, mu>``,
    raised by coordinate ascent. It is the free energy's own value where the latents are one layer. Less log Z
    it bounds log p(v) from below; log Z is estimated, so take :func:`ebmpp.annealing.reverse_ais`'s.

    With ``num_draws`` it is the log of the mean weight of so many draws of that law, of all latent blocks but
    a largest set that is summed out (reference 2, equation 8): a lower bound on average, never a worse one
    with more draws, and with infinitely many minus the free energy itself.

    :param graph: the model.
    :param params: a dict keyed by factor name.
    :param data: rows of the visible blocks, ``(*batch, *shape)``.
    :param passes: over the latent layers, at least 1.
    :param num_draws: of each row, at least 1; none by default. A draw costs about half a pass.
    :param rng_key: a jax key, needed with ``num_draws``.
    :return: shape ``(*batch,)``.
    :raises StateError: for data of a wrong name, shape or value.
    :raises ArgumentError: for other numbers of passes and draws, or draws without a key.

    **References**

    1. Salakhutdinov, Hinton (2009), *Deep Boltzmann machines*, sections 3.1 and 4.
    2. Burda, Grosse, Salakhutdinov (2016), *Importance weighted autoencoders*.

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
    if num_draws is None:
        return _bounds(graph, passes, params, rows).reshape(batch)
    num_draws = checks.count("mean_field_bound: num_draws", num_draws)
    if rng_key is None:
        raise ArgumentError("mean_field_bound: num_draws draws latents: give rng_key=jax.random.key(...)")
    key = random.key_pair(checks.key("mean_field_bound: rng_key", rng_key))
    keys = random.fold_in(key, jnp.arange(len(next(iter(rows.values())))))
    return _weighted_bounds(graph, passes, num_draws, params, rows, keys).reshape(batch)


_AT_ONCE = 256  # rows


@partial(jax.jit, static_argnums=(0, 1))
def _bounds(graph: FactorGraph, passes: int, params: Params, rows: Blocks) -> Float[Array, "rows"]:
    return lax.map(partial(_bound, graph, passes, params), rows, batch_size=_AT_ONCE)


@full_precision
def _bound(graph: FactorGraph, passes: int, params: Params, row: Blocks) -> Float[Array, ""]:
    known, base = graph.statistics(row), energy.log_base_measure(graph, row)
    if not graph.latent:
        return base - energy.energy(graph, params, known)
    t, eta = mean_field(graph, params, known, passes)
    return base - energy.energy(graph, params, t) - _log_law(graph, eta, t)


def _log_law(graph: FactorGraph, eta: Eta, t: Blocks) -> Scalar:
    """log q of independent blocks at ``eta``, of states or on average, their base measures left out."""
    each = (jnp.vdot(e, t[b]) - graph.families[b].log_normalizer(e).sum() for b, e in eta.items())
    return sum(each, jnp.zeros(()))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _weighted_bounds(
    graph: FactorGraph, passes: int, num_draws: int, params: Params, rows: Blocks, keys: Keys
) -> Float[Array, "rows"]:
    one = lambda row: _weighted_bound(graph, passes, num_draws, params, *row)
    return lax.map(one, (rows, keys), batch_size=_AT_ONCE)


@full_precision
def _weighted_bound(
    graph: FactorGraph, passes: int, num_draws: int, params: Params, row: Blocks, key: Key
) -> Float[Array, ""]:
    known = graph.statistics(row)
    summed = enumeration.largest_independent(graph, graph.latent)
    _, eta = mean_field(graph, params, known, passes)
    eta = {b: eta[b] for b in graph.latent if b not in summed}

    def log_weight(index: Array) -> Scalar:
        words = random.words(random.fold_in(key, index), gibbs.num_words(graph, eta))
        drawn = gibbs.draw_rows(graph, eta, jax.tree.map(lambda e: e[None], eta), words[None])
        t = graph.statistics({b: x[0] for b, x in drawn.items()})
        return energy.log_marginal(graph, params, known | t, summed) - _log_law(graph, eta, t)

    each = lax.map(log_weight, jnp.arange(num_draws))
    return energy.log_base_measure(graph, row) + logsumexp(each) - math.log(num_draws)
