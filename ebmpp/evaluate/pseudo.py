# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Pseudo-likelihood: each unit given all others, which needs no log Z."""

from functools import partial
from typing import Any

from jaxtyping import Float, Integer

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import Blocks, Keys, Params, Rows, checks, random
from ebmpp.errors import ArgumentError, IntractableError
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
    """sum_i log p(v_i | the other visible units), row by row, the latents summed out.

    With latents every visible family must have finitely many values: a unit's conditional is then a sum over
    these of exp(-free energy). Without latents the natural parameter of each unit is minus the gradient of
    the energy, which is affine in it, and any family will do.

    **It is no bound of the log-likelihood** unless the units are independent, where it is equal, and it can
    rise while that falls: a unit given all its neighbours is nearly certain in any model with strong
    interactions, however badly it places its modes. Compare it with itself along one run, not across models,
    and where log Z can be estimated (:func:`ebmpp.ais`), do so.

    :param graph: a model whose latents given the visibles are one layer, or that has none.
    :param params: a dict keyed by factor name.
    :param data: rows of the visible blocks, ``(*batch, *shape)``.
    :param num_units: so many units of each row, drawn with replacement, scaled to all: unbiased. A unit costs
        as many free energies as it has values.
    :param rng_key: a jax key, needed with ``num_units``.
    :return: shape ``(*batch,)``.
    :raises IntractableError: where the latents cannot be summed out, or a visible unit with latents has
        infinitely many values.
    :raises StateError: for data of a wrong name, shape or value.
    :raises ArgumentError: for ``num_units`` that is not a positive int, or without a key.

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
    """Checks of what is asked for; a key a row.

    :raises IntractableError: where a unit's conditional is not available.
    :raises ArgumentError: for ``num_units`` that is not a positive int, or without a key.
    """
    _check_tractable(graph)
    size = len(next(iter(rows.values())))
    if num_units is None:
        return jnp.zeros((size, 2), jnp.uint32)  # nothing is drawn
    checks.count("num_units", num_units)
    if rng_key is None:
        raise ArgumentError("num_units draws units at random: give rng_key=jax.random.key(...)")
    rng_key = checks.key("rng_key", rng_key)
    return random.fold_in(random.key_pair(rng_key), jnp.arange(size))


def _check_tractable(graph: FactorGraph) -> None:
    """:raises IntractableError: where a unit's conditional is not available."""
    for a, b in graph.interacting(graph.latent):
        raise IntractableError(
            f"pseudo-likelihood: latent blocks {a!r} and {b!r} interact given the visible ones, so the free "
            "energy has no closed form; monitors.reconstruction needs none"
        )
    for b, family in graph.visible.items():
        if graph.latent and family.states() is None:
            raise IntractableError(
                f"pseudo-likelihood: a unit of {b!r} ({family!r}) takes infinitely many values, and the "
                "latents make its conditional none of its family; monitors.reconstruction needs none"
            )


@partial(jax.jit, static_argnums=(0, 1))
def by_row(
    graph: FactorGraph, num_units: int | None, params: Params, rows: Rows, keys: Keys
) -> Float[Array, "rows"]:
    """The value of every row; nothing is checked.

    :param num_units: None for all.
    :param keys: unused for all units.
    """
    total = sum(f.size for f in graph.visible.values())
    chosen = jnp.broadcast_to(jnp.arange(total), (len(keys), total))
    if num_units is not None:
        chosen = (random.uniform(random.words(keys, num_units)) * total).astype(jnp.int32)
    if not graph.latent:
        each = jax.vmap(partial(_closed_form, graph, params))(dict(rows))
        return each.sum(1) if num_units is None else jnp.take_along_axis(each, chosen, 1).mean(1) * total
    # a unit of every row at a time
    each = lax.map(lambda units: jax.vmap(partial(_one_unit, graph, params))(dict(rows), units), chosen.T)
    return each.mean(0) * total


def _closed_form(graph: FactorGraph, params: Params, row: Blocks) -> Float[Array, "units"]:
    """log p(unit | rest) of every unit, without latents."""
    t = graph.statistics(row)
    eta = jax.grad(lambda t: -energy.energy(graph, params, t))(t)
    made = []
    for b, family in graph.families.items():
        inner = (eta[b] * t[b]).reshape(*family.shape, -1).sum(-1)
        made.append((inner - family.log_normalizer(eta[b]) + family.log_base_measure(row[b])).ravel())
    return jnp.concatenate(made)


def _one_unit(graph: FactorGraph, params: Params, row: Blocks, unit: Integer[Array, ""]) -> Float[Array, ""]:
    """log p(unit | the other visible ones), units of all visible blocks counted in their order."""
    value, start = jnp.zeros(()), 0
    here = energy.log_unnormalized(graph, params, row, tuple(graph.latent))
    for b, family in graph.visible.items():
        index = jnp.clip(unit - start, 0, family.size - 1)

        def at(state: Array, b: str = b, index: Array = index) -> Array:
            flat = row[b].reshape(-1)
            flat = flat.at[index].set(state.astype(flat.dtype)).reshape(graph.families[b].shape)
            return energy.log_unnormalized(graph, params, row | {b: flat}, tuple(graph.latent))

        mine = (unit >= start) & (unit < start + family.size)
        every = jax.vmap(at)(enumeration.values_of(family))
        value = jnp.where(mine, here - jax.scipy.special.logsumexp(every), value)
        start += family.size
    return value
