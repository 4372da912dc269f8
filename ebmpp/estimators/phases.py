# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The positive and the negative phase, which all estimators share."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import checks, random, sharding
from ebmpp.core.precision import full_precision
from ebmpp.core.types import Blocks, Key, Keys, Params, PerRow, Rows, Scalar, Statistics
from ebmpp.errors import IntractableError, clash
from ebmpp.estimators.base import Batch
from ebmpp.graph import FactorGraph, energy
from ebmpp.graph.energy import gradient_at, weighted_gradient
from ebmpp.graph.states import Clamped
from ebmpp.moves.gibbs import hold, initial_rows
from ebmpp.moves.layer import gibbs_sweep
from ebmpp.moves.move import Move, draw_sweep
from ebmpp.moves.target import Target


@runtime_checkable
class Posterior(Protocol):
    """An approximation of the posterior, for graphs whose latents are not one layer; a hashable value."""

    def statistics(self, graph: FactorGraph, params: Params, rows: Rows) -> Statistics:
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


def row_keys(key: Key, rows: int) -> Keys:
    """A key a row."""
    return random.fold_in(key, jnp.arange(rows))


@partial(jax.jit, static_argnums=(0, 1))  # in one program: op by op it compiles for seconds
def fresh_chains(graph: FactorGraph, count: int, key: Key) -> Rows:
    """Chains at initial draws of every block."""
    return sharding.rows(initial_rows(graph, graph.families, row_keys(key, count)))


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


def as_many(given: Any, fresh: Rows) -> Rows:
    """The chains of ``given`` in turn, as many as ``fresh`` has; ``fresh`` where they are of other blocks."""
    if not isinstance(given, dict) or not fresh or set(given) != set(fresh):
        return fresh
    return _in_turn(len(next(iter(fresh.values()))), given)


@partial(jax.jit, static_argnums=0)
def _in_turn(count: int, given: Blocks) -> Blocks:
    turn = jnp.arange(count) % len(next(iter(given.values())))
    return sharding.rows({b: jnp.take(v, turn, axis=0) for b, v in given.items()})  # cut as fresh ones are


def sweep_chains(
    target: Target, x: Rows, count: int, key: Key, moves: Sequence[Move] = ()
) -> tuple[Rows, dict[str, Array]]:
    """``count`` sweeps of every chain, and how many proposals were taken where moves make any.

    :param moves: Gibbs draws of all layers unless given.
    """
    rows, moves = len(next(iter(x.values()))), moves or gibbs_sweep(target.graph, target.clamped)

    def one(i: Array | int, carry: tuple[Rows, Array]) -> tuple[Rows, Array]:
        moved, taken = draw_sweep(target, carry[0], moves, row_keys(random.fold_in(key, i), rows))
        return moved, carry[1] + taken.sum()

    start = dict(x), jnp.zeros((), jnp.int32)
    # One sweep is not worth a loop: without it XLA drops the last latent draw, which nothing reads.
    x, taken = one(0, start) if count == 1 else lax.fori_loop(0, count, one, start)
    proposals = count * rows * sum(move.proposes for move in moves)
    return x, {"acceptance": taken / proposals} if proposals else {}


def posterior_of(graph: FactorGraph, params: Params, batch: Batch) -> Target:
    """The latents, and what rows lack, given what is known of the rows."""
    whole = {b: v for b, v in batch.rows.items() if b not in batch.known}
    partial_ = {b: batch.rows[b] for b in batch.known}
    return Target(graph, params, Clamped(whole, partial_, dict(batch.known), (len(batch.weights),)))


def sample_latents(graph: FactorGraph, params: Params, batch: Batch, key: Key) -> Rows:
    """States at the rows: the latents drawn given them, and given initial draws of what is missing.

    Exact where the posterior is one layer and nothing is missing; else one sweep over the latents from
    initial draws, which is a start and not a posterior draw.
    """
    own = [row_keys(random.fold_in(key, i), len(batch.weights)) for i in range(3)]
    drawn = initial_rows(graph, batch.known, own[2]) if batch.known else {}
    v = {**batch.rows, **hold(batch.known, batch.rows, drawn)}
    target = Target(graph, params, Clamped(v))
    return draw_sweep(target, v | initial_rows(graph, graph.latent, own[0]), gibbs_sweep(graph, v), own[1])[0]


def whole_visible(graph: FactorGraph, batch: Batch) -> tuple[str, ...]:
    """The visible blocks that lack no unit, so that they are held on the posterior."""
    return tuple(b for b in graph.visible if b not in batch.known)


def complete_batch(
    graph: FactorGraph,
    params: Params,
    batch: Batch,
    count: int,
    key: Key,
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
    start = sample_latents(graph, params, batch, random.fold_in(key, 0))
    target = posterior_of(graph, params, batch)
    x, _ = sweep_chains(target, start, count, random.fold_in(key, 1))
    return batch._replace(rows={b: x[b] for b in batch.rows}, known={})


def signed_gradient(graph: FactorGraph, params: Params, x: Rows, weights: PerRow) -> Params:
    """Gradient of ``sum_i w_i E`` over rows, the latents summed out where that is exact.

    With weights 1/n on data rows and -1/N on model rows this is the gradient of the mean negative
    log-likelihood (Qiu et al. 2020, eq. 2): one product a weight matrix for both phases.
    """
    if not tractable_posterior(graph):
        return weighted_gradient(graph, params, x, weights)
    return jax.grad(lambda p: _weighted_free_energy(graph, p, x, weights))(params)


def positive_gradient(
    graph: FactorGraph, params: Params, batch: Batch, posterior: Posterior | None
) -> Params:
    """Gradient of ``sum_i w_i E`` over the batch, by the posterior where the latents cannot be summed out."""
    if posterior is None or tractable_posterior(graph):
        return signed_gradient(graph, params, batch.rows, batch.weights)
    return gradient_at(graph, params, posterior.statistics(graph, params, batch.rows), batch.weights)


@full_precision
def batch_log_likelihood(
    graph: FactorGraph, params: Params, batch: Batch, log_partition: Scalar
) -> dict[str, Scalar]:
    """The weighted mean of log p of the batch's rows as a metric, where it has a closed form."""
    if not tractable_posterior(graph) or batch.known:
        return {}
    each = energy.summed_out(graph, params, {b: batch.rows[b] for b in graph.visible}, tuple(graph.latent))
    return {"log_likelihood": (each @ batch.weights) / batch.weights.sum() - log_partition}


@full_precision
def _weighted_free_energy(graph: FactorGraph, params: Params, x: Rows, weights: PerRow) -> Scalar:
    v, latents = {b: x[b] for b in graph.visible}, tuple(graph.latent)
    return -(weights @ jax.vmap(lambda row: energy.log_unnormalized(graph, params, row, latents))(v))


def two_phases(
    graph: FactorGraph,
    params: Params,
    batch: Batch,
    model: Rows,
    *,
    weights: PerRow | None = None,
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
