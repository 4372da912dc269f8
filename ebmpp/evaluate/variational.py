# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Lower bounds on a row's unnormalised log-density for latents that cannot be summed out."""

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
from ebmpp.core.types import Eta, PerRow, Scalar
from ebmpp.evaluate.pseudo import row_keys
from ebmpp.exact import enumeration
from ebmpp.graph import FactorGraph, energy, states, tables
from ebmpp.moves import gibbs

_BATCH_SIZE = 256  # rows that are computed together


def mean_field_bound(
    graph: FactorGraph,
    params: Params,
    data: Any,
    *,
    passes: int = 30,
    num_draws: int | None = None,
    rng_key: Array | None = None,
) -> Float[Array, "*batch"]:
    r"""Return a lower bound on minus the free energy, log sum_h exp(-E(v, h)) r(v, h), of each row.

    This is for latents that interact given the visibles, as in a deep Boltzmann machine. Under independent
    latent units with natural parameters eta and means mu the energy, affine in each unit's statistics, has
    mean E(mu), and the base measures cancel. Coordinate ascent maximises the bound

    .. math:: \log r(v) - E(\mu) + \sum A(\eta) - \langle \eta, \mu \rangle,

    which equals minus the free energy if the latents are one layer. Minus log Z it is a lower bound on
    log p(v); take log Z from :func:`ebmpp.annealing.reverse_ais`, an upper bound.

    With ``num_draws`` the result is the log of the mean weight of as many draws from this distribution, with
    a largest independent set of blocks summed out (reference 2, equation 8). It is a lower bound on average,
    which increases with the number of draws and converges to minus the free energy.

    :param data: rows of the visible blocks, ``(*batch, *shape)``.
    :param passes: passes over the latent layers, at least 1.
    :param num_draws: draws per row, at least 1; None for none. A draw costs about half a pass.
    :param rng_key: a jax key, needed with ``num_draws``.
    :return: shape ``(*batch,)``.
    :raises StateError: data of a wrong name, shape or value.
    :raises ArgumentError: numbers of passes or draws out of range, or draws without a key.

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
    keys = row_keys("mean_field_bound: num_draws", num_draws, rng_key, rows)
    return _bounds(graph, passes, num_draws, params, rows, keys).reshape(batch)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _bounds(
    graph: FactorGraph, passes: int, num_draws: int | None, params: Params, rows: Blocks, keys: Keys
) -> PerRow:
    def bound(row: tuple[Blocks, Key]) -> Scalar:
        if num_draws is None:
            return _bound(graph, passes, params, row[0])
        return _weighted_bound(graph, passes, num_draws, params, *row)

    return lax.map(bound, (rows, keys), batch_size=_BATCH_SIZE)


@full_precision
def _bound(graph: FactorGraph, passes: int, params: Params, row: Blocks) -> Scalar:
    t, eta = energy.mean_field(graph, params, graph.statistics(row), passes)
    return energy.log_base_measure(graph, row) - energy.energy(graph, params, t) - _log_density(graph, eta, t)


def _log_density(graph: FactorGraph, eta: Eta, t: Blocks) -> Scalar:
    """Return log q of independent blocks without base measures, at a state or (of means) on average."""
    terms = (jnp.vdot(e, t[b]) - graph.families[b].log_normalizer(e).sum() for b, e in eta.items())
    return sum(terms, jnp.zeros(()))


@full_precision
def _weighted_bound(
    graph: FactorGraph, passes: int, num_draws: int, params: Params, row: Blocks, key: Key
) -> Scalar:
    visible = graph.statistics(row)
    summed = enumeration.largest_independent(graph, graph.latent)
    _, eta = energy.mean_field(graph, params, visible, passes)
    eta = {b: eta[b] for b in graph.latent if b not in summed}
    families = {b: graph.families[b] for b in eta}

    def log_weight(index: Array) -> Scalar:
        words = random.words(random.fold_in(key, index), gibbs.num_words(families))
        draws = gibbs.draw_rows(families, jax.tree.map(lambda e: e[None], eta), words[None])
        t = graph.statistics({b: x[0] for b, x in draws.items()})
        return energy.log_marginal(graph, params, visible | t, summed) - _log_density(graph, eta, t)

    weights = lax.map(log_weight, jnp.arange(num_draws))
    return energy.log_base_measure(graph, row) + logsumexp(weights) - math.log(num_draws)
