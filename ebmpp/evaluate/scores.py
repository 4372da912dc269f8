# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Scores of rows that need no log Z: the pseudo-likelihood, and mean-field bounds."""

from functools import partial
import math

import jax
from jax import Array, lax
import jax.numpy as jnp
from jax.scipy.special import logsumexp

from ebmpp.core import (
    Blocks,
    Eta,
    Key,
    Keys,
    Params,
    PerRow,
    PerState,
    Rows,
    Scalar,
    StateLike,
    checks,
    full_precision,
    num_rows,
    random,
    select,
)
from ebmpp.errors import IntractableError
from ebmpp.exact import enumeration
from ebmpp.families.family import draw_rows, num_words
from ebmpp.graph import FactorGraph, energy, states, tables

_BATCH_SIZE = 256  # rows whose bounds are computed together


def pseudo_log_likelihood(
    graph: FactorGraph,
    params: Params,
    rows: StateLike,
) -> PerState:
    r"""Return the pseudo-log-likelihood of each row, with the latents summed out.

    .. math:: \sum_i \log p(v_i \mid v_{-i})

    In a model with latents every visible family must have finitely many values: a
    unit's conditional is then a normalised sum of exp(-free energy) over them. Without
    latents a unit's natural parameter is minus the gradient of the energy, which is
    affine in the unit's statistics, and every family is supported.

    **It is not a bound on the log-likelihood**, and can rise while that falls: with
    strong interactions a unit given its neighbours is nearly certain, even if the
    model's modes are misplaced. Compare it along one run, not across models, and
    estimate log Z (:func:`ebmpp.ais`) where possible.

    :param graph: a model without latents, or whose latents given the visibles are one
        layer.
    :param rows: values of the visible blocks, ``(*batch, *shape)``.
        A unit costs as many free energies as it has values.
    :return: shape ``(*batch,)``.
    :raises IntractableError: latents that cannot be summed out, or, with latents, a
        visible family of infinitely many values.
    :raises StateError: rows of a wrong name, shape or value.

    **References**

    1. Besag (1975), *Statistical analysis of non-lattice data*.
    2. Marlin, Swersky, Chen, de Freitas (2010), *Inductive principles for restricted
       Boltzmann machine learning*.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> rows = ebmpp.data.bars_and_stripes(3)
    >>> fair = jax.tree.map(lambda a: 0 * a, rbm.init(jax.random.key(0)))
    >>> print(f"{pseudo_log_likelihood(rbm, fair, rows).mean():.4f}")  # -9 log 2
    -6.2383
    """
    name = "pseudo_log_likelihood"
    checks.instance(f"{name}: graph", graph, FactorGraph)
    states.check_params(graph.param_shapes, params)
    rows, _, batch = tables.as_data(graph, rows, name)
    check_conditionals(graph)
    return pseudo_rows(graph, params, rows).reshape(batch)


def check_conditionals(graph: FactorGraph) -> None:
    """Refuse latents that cannot be summed out, and units whose values cannot be listed."""
    states.check_summable(graph, graph.latent)
    for b, family in graph.visible.items():
        if graph.latent and family.states() is None:
            raise IntractableError(
                f"pseudo-likelihood: {b!r} ({family!r}) must have finitely many values "
                "in a model with latents, which take its conditional out of the "
                "family. Use monitors.reconstruction"
            )


@partial(jax.jit, static_argnums=0)
def pseudo_rows(graph: FactorGraph, params: Params, rows: Rows) -> PerRow:
    """Return the value of each row, without checks."""
    if not graph.latent:
        return jax.vmap(partial(_closed_form, graph, params))(dict(rows))
    current = energy.summed_out(graph, params, rows, tuple(graph.latent))
    scores = [_block_score(graph, params, rows, b, current) for b in graph.visible]
    return jnp.stack(scores).sum(0)


def _closed_form(graph: FactorGraph, params: Params, row: Blocks) -> Scalar:
    """Return the sum of log p(unit | rest) over the units of a model without latents."""
    eta = energy.contributed(graph, None, params, graph.statistics(row))
    log_probs = (
        family.unit_log_prob(eta[b], row[b]).sum()
        for b, family in graph.families.items()
    )
    return sum(log_probs, jnp.zeros(()))


def _block_score(
    graph: FactorGraph, params: Params, rows: Rows, block: str, current: PerRow
) -> PerRow:
    """Return the sum of log p(unit | other visible units) over the units of a block.

    :param current: log unnormalised density of each row.
    """
    family = graph.families[block]
    by_unit = rows[block].reshape(-1, family.size)

    def log_density_at(unit, value):
        changed = by_unit.at[:, unit].set(value.astype(by_unit.dtype))
        x = {**rows, block: changed.reshape(rows[block].shape)}
        return energy.summed_out(graph, params, x, tuple(graph.latent))

    def score(unit):  # of every row
        at_values = jax.vmap(partial(log_density_at, unit))
        log_densities = at_values(enumeration.unit_values(family))
        return current - logsumexp(log_densities, axis=0)

    return lax.map(score, jnp.arange(family.size)).sum(0)


def mean_field_bound(
    graph: FactorGraph,
    params: Params,
    rows: StateLike,
    *,
    passes: int = 30,
    num_draws: int | None = None,
    rng_key: Array | None = None,
) -> PerState:
    r"""Return a lower bound on each row's minus free energy.

    The bounded quantity is :math:`\log \sum_h \exp(-E(v, h)) r(v, h)`, for latents that
    interact given the visibles, as in a deep Boltzmann machine. Under independent
    latent units with natural parameters eta and means mu the energy, affine in each
    unit's statistics, has mean E(mu), and the base measures cancel. Coordinate ascent
    maximises the bound

    .. math:: \log r(v) - E(\mu) + \sum A(\eta) - \langle \eta, \mu \rangle,

    which equals minus the free energy if the latents are one layer. Minus log Z it is a
    lower bound on log p(v); take log Z from :func:`ebmpp.annealing.reverse_ais`, an
    upper bound.

    With ``num_draws`` the result is the log of the mean weight of as many draws from
    this distribution, with a largest independent set of blocks summed out (reference 2,
    equation 8). It is a lower bound on average, which increases with the number of
    draws and converges to minus the free energy.

    :param rows: values of the visible blocks, ``(*batch, *shape)``.
    :param passes: passes over the latent layers, at least 1.
    :param num_draws: draws per row, at least 1; None for none. A draw costs about half
        a pass.
    :param rng_key: a jax key, needed with ``num_draws``.
    :return: shape ``(*batch,)``.
    :raises StateError: rows of a wrong name, shape or value.
    :raises ArgumentError: numbers of passes or draws out of range, or draws without a
        key.

    **References**

    1. Salakhutdinov, Hinton (2009), *Deep Boltzmann machines*, sections 3.1 and 4.
    2. Burda, Grosse, Salakhutdinov (2016), *Importance weighted autoencoders*.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> params, v = rbm.init(jax.random.key(0)), jax.numpy.ones((2, 4))
    >>> gap = -rbm.free_energy(params, {"v": v}) - mean_field_bound(rbm, params, v)
    >>> bool((abs(gap) < 1e-5).all())
    True
    """
    checks.instance("mean_field_bound: graph", graph, FactorGraph)
    passes = checks.count("mean_field_bound: passes", passes)
    states.check_params(graph.param_shapes, params)
    rows, _, batch = tables.as_data(graph, rows, "mean_field_bound")
    keys = draw_keys("mean_field_bound: num_draws", num_draws, rng_key, rows)
    return _bounds(graph, passes, num_draws, params, rows, keys).reshape(batch)


def draw_keys(name: str, number: int | None, rng_key: Array | None, rows: Rows) -> Keys:
    """Return one key per row for a checked ``number`` of draws, which may be None."""
    size = num_rows(rows)
    if number is None:
        return jnp.zeros((size, 2), jnp.uint32)
    checks.count(name, number)
    rng_key = checks.key(f"{name} needs a key: rng_key", rng_key)
    return random.fold_in(random.key_pair(rng_key), jnp.arange(size))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _bounds(
    graph: FactorGraph,
    passes: int,
    num_draws: int | None,
    params: Params,
    rows: Blocks,
    keys: Keys,
) -> PerRow:
    def bound(row):
        if num_draws is None:
            return _bound(graph, passes, params, row[0])
        return _weighted_bound(graph, passes, num_draws, params, *row)

    return lax.map(bound, (rows, keys), batch_size=_BATCH_SIZE)


@full_precision
def _bound(graph: FactorGraph, passes: int, params: Params, row: Blocks) -> Scalar:
    t, eta = energy.mean_field(graph, params, graph.statistics(row), passes)
    log_density = energy.log_base_measure(graph, row) - energy.energy(graph, params, t)
    return log_density - _log_density(graph, eta, t)


def _log_density(graph: FactorGraph, eta: Eta, t: Blocks) -> Scalar:
    """Return log q of independent blocks without base measures, at a state or at means."""
    terms = (
        jnp.vdot(e, t[b]) - graph.families[b].log_normalizer(e).sum()
        for b, e in eta.items()
    )
    return sum(terms, jnp.zeros(()))


@full_precision
def _weighted_bound(
    graph: FactorGraph,
    passes: int,
    num_draws: int,
    params: Params,
    row: Blocks,
    key: Key,
) -> Scalar:
    visible = graph.statistics(row)
    summed = enumeration.largest_independent(graph, graph.latent)
    _, eta = energy.mean_field(graph, params, visible, passes)
    eta = {b: eta[b] for b in graph.latent if b not in summed}
    families = select(graph.families, eta)

    def log_weight(index):
        words = random.words(random.fold_in(key, index), num_words(families))
        rows = {b: e[None] for b, e in eta.items()}
        draws = draw_rows(families, rows, words[None])
        t = graph.statistics({b: x[0] for b, x in draws.items()})
        log_density = energy.log_marginal(graph, params, visible | t, summed)
        return log_density - _log_density(graph, eta, t)

    log_weights = lax.map(log_weight, jnp.arange(num_draws))
    log_base = energy.log_base_measure(graph, row)
    return log_base + logsumexp(log_weights) - math.log(num_draws)
