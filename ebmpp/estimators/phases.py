# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The positive and the negative phase, which all estimators share."""

from collections.abc import Iterable
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import checks, random
from ebmpp.core.types import Keep, Params, Rows
from ebmpp.errors import IntractableError, clash
from ebmpp.estimators.base import Batch
from ebmpp.graph import FactorGraph, energy
from ebmpp.graph.declaration import schedule
from ebmpp.graph.energy import gradient_at, weighted_gradient
from ebmpp.moves.gibbs import hold, initial_rows, sweep_rows


@runtime_checkable
class Posterior(Protocol):
    """An approximation of the posterior, for graphs whose latents are not one layer; a hashable value."""

    def statistics(self, graph: FactorGraph, params: Params, rows: Rows) -> Rows:
        """Mean statistics of every block given the rows, ``(rows, *statistic_shape)`` each."""


def tractable_posterior(graph: FactorGraph) -> bool:
    """Whether the latents given the visibles are one layer, so that they can be summed out."""
    return not graph.interacting(graph.latent)


def check_posterior(graph: FactorGraph, name: str, posterior: Posterior | None) -> None:
    """:raises IntractableError: where the exact positive phase is asked for and there is none."""
    if posterior is not None:
        checks.instance(f"{name}: posterior", posterior, Posterior, "one such as MeanField()")
    if posterior is None and not tractable_posterior(graph):
        a, b = graph.interacting(graph.latent)[0]
        raise IntractableError(
            f"{name} needs an exact positive phase, and latent {clash(a, b)} given the "
            "visible ones; UCD() runs a second set of coupled chains on the posterior, and "
            f"{name}(posterior=MeanField()) takes a variational one"
        )


def row_pairs(pair: Array, rows: int) -> Array:
    """A key pair a row."""
    return random.fold_in(pair, jnp.arange(rows))


@partial(jax.jit, static_argnums=(0, 1))  # in one program: op by op it compiles for seconds
def fresh_chains(graph: FactorGraph, count: int, pair: Array) -> Rows:
    """Chains at initial draws of every block."""
    return initial_rows(graph, graph.families, row_pairs(pair, count))


@runtime_checkable
class Chained(Protocol):
    """What an estimator carries that has chains and something else."""

    chains: Any


@runtime_checkable
class Tempered(Protocol):
    """What an estimator carries of whose chains some alone are the model's."""

    coldest: Rows


def carried_chains(state: Any) -> Any:
    """The model's chains in what an estimator carries, or all of that where nothing is called so."""
    if isinstance(state, Tempered):
        return state.coldest
    return state.chains if isinstance(state, Chained) else state


def sweep_chains(
    graph: FactorGraph,
    params: Params,
    x: Rows,
    count: int,
    pair: Array,
    clamped: Iterable[str] = (),
    keep: Keep = MappingProxyType({}),
) -> Rows:
    """``count`` sweeps of every chain.

    :param clamped: blocks that are held.
    :param keep: units that are held.
    """
    rows, layers = len(next(iter(x.values()))), schedule(graph, clamped)

    def one(i: Array, x: Rows) -> Rows:
        return sweep_rows(graph, params, x, layers, row_pairs(random.fold_in(pair, i), rows), keep)

    # One sweep is not worth a loop: without it XLA drops the last latent draw, which nothing reads.
    return one(0, x) if count == 1 else lax.fori_loop(0, count, one, x)


def sample_latents(
    graph: FactorGraph, params: Params, v: Rows, pair: Array, known: Keep = MappingProxyType({})
) -> Rows:
    """States at the rows of ``v``: the latents drawn given them, and given initial draws of what is missing.

    Exact where the posterior is one layer and nothing is missing; else one sweep over the latents from
    initial draws, which is a start and not a posterior draw.

    :param known: see :class:`~ebmpp.estimators.base.Batch`.
    """
    rows = len(next(iter(v.values())))
    first, second = (row_pairs(random.fold_in(pair, i), rows) for i in range(2))
    drawn = initial_rows(graph, known, row_pairs(random.fold_in(pair, 2), rows)) if known else {}
    state = {**v, **hold(known, v, drawn), **initial_rows(graph, graph.latent, first)}
    return sweep_rows(graph, params, state, schedule(graph, clamped=graph.visible), second)


def whole_visible(graph: FactorGraph, batch: Batch) -> tuple[str, ...]:
    """The visible blocks that lack no unit, so that they are held on the posterior."""
    return tuple(b for b in graph.visible if b not in batch.known)


def complete_batch(
    graph: FactorGraph,
    params: Params,
    batch: Batch,
    count: int,
    pair: Array,
    posterior: Posterior | None = None,
) -> Batch:
    """The batch with its missing entries drawn given the others, by ``count`` Gibbs sweeps; the draws are
    biased as those of CD(count) are.

    :raises IntractableError: beside a posterior that stands in for the exact one.
    """
    if not batch.known:
        return batch
    if posterior is not None and not tractable_posterior(graph):
        raise IntractableError(
            f"{posterior!r} stands in for the posterior of the latents, and {sorted(batch.known)} have "
            "missing entries, which it does not know; UCD() runs coupled chains on the posterior of both, "
            "and ebmpp.complete fills the entries in"
        )
    start = sample_latents(graph, params, batch.rows, random.fold_in(pair, 0), batch.known)
    held = whole_visible(graph, batch)
    x = sweep_chains(graph, params, start, count, random.fold_in(pair, 1), held, batch.known)
    return batch._replace(rows={b: x[b] for b in batch.rows}, known={})


def signed_gradient(graph: FactorGraph, params: Params, x: Rows, weights: Array) -> Params:
    """Gradient of ``sum_i w_i E`` over rows, the latents summed out where that is exact.

    With weights 1/n on data rows and -1/N on model rows this is the gradient of the mean negative
    log-likelihood (Qiu et al. 2020, eq. 2): one product a weight matrix for both phases.
    """
    if not tractable_posterior(graph):
        return weighted_gradient(graph, params, x, weights)
    return jax.grad(lambda p: _weighted_free_energy(graph, p, x, weights))(params)


def _weighted_free_energy(graph: FactorGraph, params: Params, x: Rows, weights: Array) -> Array:
    v, latents = {b: x[b] for b in graph.visible}, tuple(graph.latent)
    return -(weights @ jax.vmap(lambda row: energy.log_unnormalized(graph, params, row, latents))(v))


def two_phases(
    graph: FactorGraph,
    params: Params,
    batch: Batch,
    model: Rows,
    *,
    weights: Array | None = None,
    posterior: Posterior | None = None,
) -> Params:
    """Gradient of the batch's loss, with rows ``model`` for draws of the model.

    :param weights: of the model rows, of the same sum as those of the batch; equal ones by default.
    :param posterior: where the latents cannot be summed out.
    """
    if weights is None:
        size = len(next(iter(model.values())))
        weights = jnp.broadcast_to(batch.weights.sum() / size, size)
    if tractable_posterior(graph):
        # Two terms, not one over joined rows: XLA then sees that the products of the data, or of the chains,
        # are those that their latents were drawn with, which saves one in six.
        terms = ((batch.rows, batch.weights), (model, -weights))
        return jax.grad(lambda p: sum(_weighted_free_energy(graph, p, *term) for term in terms))(params)
    signed = jnp.concatenate([batch.weights, -weights])
    join = lambda a, b: {n: jnp.concatenate([a[n], b[n]]) for n in b if n in a}
    if posterior is None:
        return signed_gradient(graph, params, join(batch.rows, model), signed)
    data = posterior.statistics(graph, params, batch.rows)
    return gradient_at(graph, params, join(data, graph.statistics(model)), signed)
