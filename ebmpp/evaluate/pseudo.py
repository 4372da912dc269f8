# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Pseudo-likelihood, which needs no log Z."""

from functools import partial
from typing import Any

from jaxtyping import Float, Integer

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import Blocks, Keys, Params, Rows, checks, random
from ebmpp.core.types import PerRow
from ebmpp.errors import IntractableError
from ebmpp.exact import enumeration
from ebmpp.graph import FactorGraph, energy, states, tables


def pseudo_log_likelihood(
    graph: FactorGraph,
    params: Params,
    data: Any,
    *,
    num_units: int | None = None,
    rng_key: Array | None = None,
) -> Float[Array, "*batch"]:
    r"""Return the pseudo-log-likelihood of each row, with the latents summed out.

    .. math:: \sum_i \log p(v_i \mid v_{-i})

    In a model with latents every visible family must have finitely many values: a unit's conditional is then
    a normalised sum of exp(-free energy) over them. Without latents a unit's natural parameter is minus the
    gradient of the energy, which is affine in the unit's statistics, and every family is supported.

    **It is not a bound on the log-likelihood**, and can rise while that falls: with strong interactions a
    unit given its neighbours is nearly certain, even if the model's modes are misplaced. Compare it along one
    run, not across models, and estimate log Z (:func:`ebmpp.ais`) where possible.

    :param graph: a model without latents, or whose latents given the visibles are one layer.
    :param data: rows of the visible blocks, ``(*batch, *shape)``.
    :param num_units: number of units per row, drawn with replacement and scaled to all units, which is
        unbiased; None for all. A unit costs as many free energies as it has values.
    :param rng_key: a jax key, needed with ``num_units``.
    :return: shape ``(*batch,)``.
    :raises IntractableError: latents that cannot be summed out, or, with latents, a visible family of
        infinitely many values.
    :raises StateError: data of a wrong name, shape or value.
    :raises ArgumentError: ``num_units`` that is not a positive int, or without a key.

    **References**

    1. Besag (1975), *Statistical analysis of non-lattice data*.
    2. Marlin, Swersky, Chen, de Freitas (2010), *Inductive principles for restricted Boltzmann machine
       learning*.

    **Example**

    >>> import jax, ebmpp
    >>> rbm, data = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4)), ebmpp.data.bars_and_stripes(3)
    >>> fair = jax.tree.map(lambda a: 0 * a, rbm.init(jax.random.key(0)))
    >>> print(f"{pseudo_log_likelihood(rbm, fair, data).mean():.4f}")  # -9 log 2
    -6.2383
    """
    states.check_params(graph.param_shapes, params)
    rows, _, batch = tables.as_data(graph, data, "pseudo_log_likelihood")
    keys = check_units(graph, num_units, rng_key, rows)
    return by_row(graph, num_units, params, rows, keys).reshape(batch)


def check_units(graph: FactorGraph, num_units: int | None, rng_key: Array | None, rows: Rows) -> Keys:
    """Check the model and ``num_units``, and return one key per row."""
    states.check_summable(graph, graph.latent)
    for b, family in graph.visible.items():
        if graph.latent and family.states() is None:
            raise IntractableError(
                f"pseudo-likelihood: {b!r} ({family!r}) must have finitely many values in a model with "
                "latents, which take its conditional out of the family. Use monitors.reconstruction"
            )
    return row_keys("num_units", num_units, rng_key, rows)


def row_keys(name: str, number: int | None, rng_key: Array | None, rows: Rows) -> Keys:
    """Return one key per row for ``number`` draws, checked; without a number nothing is drawn from them."""
    size = len(next(iter(rows.values())))
    if number is None:
        return jnp.zeros((size, 2), jnp.uint32)
    checks.count(name, number)
    rng_key = checks.key(f"{name} needs a key: rng_key", rng_key)
    return random.fold_in(random.key_pair(rng_key), jnp.arange(size))


@partial(jax.jit, static_argnums=(0, 1))
def by_row(graph: FactorGraph, num_units: int | None, params: Params, rows: Rows, keys: Keys) -> PerRow:
    """Return the value of each row, without checks."""
    total = sum(f.size for f in graph.visible.values())
    units = jnp.broadcast_to(jnp.arange(total), (len(keys), total))
    if num_units is not None:
        units = (random.uniform(random.words(keys, num_units)) * total).astype(jnp.int32)
    if graph.latent:  # one unit of every row at a time
        values = lax.map(lambda unit: jax.vmap(partial(_one_unit, graph, params))(dict(rows), unit), units.T)
    else:
        values = jax.vmap(partial(_closed_form, graph, params))(dict(rows))
        values = jnp.take_along_axis(values, units, 1).T
    return values.mean(0) * total


def _closed_form(graph: FactorGraph, params: Params, row: Blocks) -> Float[Array, "units"]:
    """Return log p(unit | rest) of every unit in a model without latents."""
    t = graph.statistics(row)
    eta = jax.grad(lambda t: -energy.energy(graph, params, t))(t)
    values = []
    for b, family in graph.families.items():
        inner = (eta[b] * t[b]).reshape(*family.shape, -1).sum(-1)
        values.append((inner - family.log_normalizer(eta[b]) + family.log_base_measure(row[b])).ravel())
    return jnp.concatenate(values)


def _one_unit(graph: FactorGraph, params: Params, row: Blocks, unit: Integer[Array, ""]) -> Float[Array, ""]:
    """Return log p(unit | other visible units), with units of all visible blocks numbered in order."""
    value, start = jnp.zeros(()), 0
    current = energy.log_unnormalized(graph, params, row, tuple(graph.latent))
    for b, family in graph.visible.items():
        index = jnp.clip(unit - start, 0, family.size - 1)

        def log_density_at(state: Array, b: str = b, index: Array = index) -> Array:
            flat = row[b].reshape(-1)
            flat = flat.at[index].set(state.astype(flat.dtype)).reshape(graph.families[b].shape)
            return energy.log_unnormalized(graph, params, row | {b: flat}, tuple(graph.latent))

        in_block = (unit >= start) & (unit < start + family.size)
        log_densities = jax.vmap(log_density_at)(enumeration.values_of(family))
        value = jnp.where(in_block, current - jax.scipy.special.logsumexp(log_densities), value)
        start += family.size
    return value
