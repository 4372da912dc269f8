# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Positive and negative phases, shared by all estimators.

A pool of mixture proposals is a set of states of the whole graph. A step moves it
before its pairs begin, by keys of its own: the pairs' draws do not enter it, so given
the past the pairs are unbiased.
"""

from collections.abc import Collection, Sequence
import dataclasses
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import checks, random, sharding
from ebmpp.core.backend import full_precision
from ebmpp.core.types import Blocks, Key, Keys, Params, PerRow, Rows, Scalar, Statistics
from ebmpp.coupling.engine import Outcome, Window
from ebmpp.errors import IntractableError, clash
from ebmpp.estimators.base import Batch
from ebmpp.graph import FactorGraph, energy
from ebmpp.graph.states import Clamped
from ebmpp.moves import Layer, Move, Target, gibbs, gibbs_sweep, mixture
from ebmpp.moves.move import draw_sweep
from ebmpp.moves.sweeps import complete_rows


@runtime_checkable
class Posterior(Protocol):
    """Approximation of the posterior, for graphs whose latents are not one layer; a hashable value."""

    def statistics(self, graph: FactorGraph, params: Params, rows: Rows) -> Statistics:
        """Return mean statistics of every block given the rows, ``(rows, *statistic_shape)`` each."""


@dataclasses.dataclass(frozen=True)
class MeanField:
    """Mean-field posterior: a product of independent units, by coordinate ascent on the lower bound.

    For deep machines, as ``posterior=`` of the biased estimators, unused where the
    posterior is one layer. A pass sets the mean statistics of each block, those next to
    the visible ones first, to the conditional's at the means of the others, which
    maximises the bound in that block. **Biased**: it climbs the bound, not the
    likelihood.

    :param passes: number of passes over the latent layers.
    :raises ArgumentError: for numbers out of range.

    **References**

    1. Salakhutdinov, Hinton (2009), *Deep Boltzmann machines*, section 3.1.

    **Example**

    >>> import jax, ebmpp
    >>> deep = ebmpp.layered(v=ebmpp.Bernoulli(9), h1=ebmpp.Bernoulli(4), h2=ebmpp.Bernoulli(3))
    >>> fit = ebmpp.fit(deep, ebmpp.data.bars_and_stripes(3), rng_key=jax.random.key(0), num_steps=3,
    ...                 estimator=ebmpp.PCD(num_chains=10, posterior=ebmpp.MeanField(10)),
    ...                 progress_bar=False)
    >>> sorted(fit.params)
    ['h1', 'h1:h2', 'h2', 'v', 'v:h1']
    """

    passes: int = 20

    def __post_init__(self) -> None:
        checks.set_counts(self, "passes")

    def statistics(self, graph: FactorGraph, params: Params, rows: Rows) -> Statistics:
        """Return mean statistics of every block given the rows, exact for visible blocks."""

        def one_row(row):
            return energy.mean_field(graph, params, graph.statistics(row), self.passes)[
                0
            ]

        return jax.vmap(one_row)(dict(rows))


def tractable_posterior(graph: FactorGraph) -> bool:
    """Return True if the latents given the visibles are one layer, so that they can be summed out."""
    return not graph.interacting(graph.latent)


def check_posterior(graph: FactorGraph, name: str, posterior: Posterior | None) -> None:
    """Raise IntractableError without a posterior where the exact positive phase is intractable."""
    if posterior is not None:
        checks.instance(
            f"{name}: posterior", posterior, Posterior, "one such as MeanField()"
        )
        return
    for a, b in graph.interacting(graph.latent):
        raise IntractableError(
            f"{name} has no exact positive phase: latent {clash(a, b)} given the "
            "visible ones. Use UCD(), which couples chains on the posterior, or a "
            f"variational one, {name}(posterior=MeanField())."
        )


def row_keys(key: Key, rows: int) -> Keys:
    """Return one key per row."""
    return random.fold_in(key, jnp.arange(rows))


@partial(jax.jit, static_argnums=(0, 1))  # op by op it compiles for seconds
def fresh_chains(graph: FactorGraph, count: int, key: Key) -> Rows:
    """Draw initial states of every block."""
    return sharding.rows(
        gibbs.initial_rows(graph, graph.families, row_keys(key, count))
    )


def carried_chains(state: Any) -> Any:
    """Return the model's chains in an estimator's state, or the state itself if it has no such field."""
    # of tempered chains only the coldest are the model's
    return getattr(state, "coldest", getattr(state, "chains", state))


def cycle_chains(chains: Any, fresh: Rows) -> Rows:
    """Repeat ``chains`` cyclically to the number of ``fresh`` ones; ``fresh`` if they are of other blocks."""
    if not isinstance(chains, dict) or not fresh or set(chains) != set(fresh):
        return fresh
    return _cycle(len(next(iter(fresh.values()))), chains)


@partial(jax.jit, static_argnums=0)
def _cycle(count: int, chains: Blocks) -> Blocks:
    index = jnp.arange(count) % len(next(iter(chains.values())))
    # sharded as fresh ones
    return sharding.rows({b: jnp.take(v, index, axis=0) for b, v in chains.items()})


def sweep_chains(
    target: Target, x: Rows, count: int, key: Key, moves: Sequence[Move] = ()
) -> tuple[Rows, dict[str, Array]]:
    """Move every chain by ``count`` sweeps; return also the acceptance rate if the moves have proposals.

    :param moves: default: Gibbs draws of all layers.
    """
    rows = len(next(iter(x.values())))
    moves = moves or gibbs_sweep(target.graph, target.clamped)

    def sweep_once(i: Array | int, carry: tuple[Rows, Array]) -> tuple[Rows, Array]:
        moved, accepted = draw_sweep(
            target, carry[0], moves, row_keys(random.fold_in(key, i), rows)
        )
        return moved, carry[1] + accepted.sum()

    start = dict(x), jnp.zeros((), jnp.int32)
    # Without a loop XLA drops the last latent draw, which nothing reads.
    x, accepted = (
        sweep_once(0, start)
        if count == 1
        else lax.fori_loop(0, count, sweep_once, start)
    )
    proposals = count * rows * sum(move.proposes for move in moves)
    return x, {"acceptance": accepted / proposals} if proposals else {}


def posterior_of(graph: FactorGraph, params: Params, batch: Batch) -> Target:
    """Make the target of the latents and missing entries given the known entries of the rows."""
    complete = {b: v for b, v in batch.rows.items() if b not in batch.known}
    incomplete = {b: batch.rows[b] for b in batch.known}
    return Target(
        graph,
        params,
        Clamped(complete, incomplete, dict(batch.known), (len(batch.weights),)),
    )


def sample_latents(graph: FactorGraph, params: Params, batch: Batch, key: Key) -> Rows:
    """Draw the latents given the rows, with missing entries at initial draws.

    Exact where the posterior is one layer and no entry is missing; else one sweep from
    initial draws.
    """
    keys = [row_keys(random.fold_in(key, i), len(batch.weights)) for i in range(3)]
    drawn = gibbs.initial_rows(graph, batch.known, keys[2]) if batch.known else {}
    v = {**batch.rows, **gibbs.keep_observed(batch.known, batch.rows, drawn)}
    start = v | gibbs.initial_rows(graph, graph.latent, keys[0])
    return draw_sweep(
        Target(graph, params, Clamped(v)), start, gibbs_sweep(graph, v), keys[1]
    )[0]


def complete_batch(
    graph: FactorGraph,
    params: Params,
    batch: Batch,
    count: int,
    key: Key,
    posterior: Posterior | None,
) -> Batch:
    """Draw missing entries given the known ones by ``count`` Gibbs sweeps, biased like CD(count).

    :raises IntractableError: with an approximate posterior.
    """
    if not batch.known:
        return batch
    if posterior is not None and not tractable_posterior(graph):
        raise checks.error(
            "blocks with missing entries",
            f"none with posterior={posterior!r}",
            sorted(batch.known),
            IntractableError,
            "Use UCD(), which couples chains on the posterior of both, or fill them in "
            "with ebmpp.complete.",
        )
    start = sample_latents(graph, params, batch, random.fold_in(key, 0))
    x, _ = sweep_chains(
        posterior_of(graph, params, batch), start, count, random.fold_in(key, 1)
    )
    return batch._replace(rows={b: x[b] for b in batch.rows}, known={})


def signed_gradient(
    graph: FactorGraph, params: Params, x: Rows, weights: PerRow
) -> Params:
    """Return the gradient of ``sum_i w_i E`` over rows, with the latents summed out where that is exact.

    With weights 1/n on data rows and -1/N on model rows this is the gradient of the
    mean negative log-likelihood (Qiu et al. 2020, eq. 2), with one product per weight
    matrix for both phases.
    """
    if not tractable_posterior(graph):
        return energy.weighted_gradient(graph, params, x, weights)
    return jax.grad(lambda p: _weighted_free_energy(graph, p, x, weights))(params)


def positive_gradient(
    graph: FactorGraph, params: Params, batch: Batch, posterior: Posterior | None
) -> Params:
    """Return the gradient of ``sum_i w_i E`` over the batch, by ``posterior`` where it is intractable."""
    if posterior is None or tractable_posterior(graph):
        return signed_gradient(graph, params, batch.rows, batch.weights)
    return energy.gradient_at(
        graph, params, posterior.statistics(graph, params, batch.rows), batch.weights
    )


@full_precision
def batch_log_likelihood(
    graph: FactorGraph, params: Params, batch: Batch, log_partition: Scalar
) -> dict[str, Scalar]:
    """Return the weighted mean of log p of the batch's rows as a metric, if it has a closed form."""
    if not tractable_posterior(graph) or batch.known:
        return {}
    values = energy.summed_out(graph, params, batch.rows, tuple(graph.latent))
    return {
        "log_likelihood": (values @ batch.weights) / batch.weights.sum() - log_partition
    }


@full_precision
def _weighted_free_energy(
    graph: FactorGraph, params: Params, x: Rows, weights: PerRow
) -> Scalar:
    return -(weights @ energy.summed_out(graph, params, x, tuple(graph.latent)))


def two_phases(
    target: Target,
    batch: Batch,
    model: Rows,
    posterior: Posterior | None,
    weights: PerRow | None = None,
) -> Params:
    """Return the gradient of the batch's loss.

    :param model: rows that stand for draws of the target.
    :param posterior: of the latents given the batch; None only where these are one
        layer.
    :param weights: weights of the model rows, with the sum of the batch's weights;
        equal by default.
    """
    graph = target.graph
    params = target.params
    if weights is None:
        size = len(next(iter(model.values())))
        weights = jnp.broadcast_to(batch.weights.sum() / size, size)
    if posterior is None or tractable_posterior(graph):
        # Two terms instead of one over joined rows: XLA then reuses the products that
        # the latents of the data or of the chains were drawn with, which saves one in
        # six.
        terms = ((batch.rows, batch.weights), (model, -weights))
        return jax.grad(
            lambda p: sum(_weighted_free_energy(graph, p, *term) for term in terms)
        )(params)
    signed = jnp.concatenate([batch.weights, -weights])
    data = posterior.statistics(graph, params, batch.rows)
    drawn = graph.statistics(model)
    joined = {b: jnp.concatenate([data[b], t]) for b, t in drawn.items() if b in data}
    return energy.gradient_at(graph, params, joined, signed)


class Phase(NamedTuple):
    """Result of a set of coupled pairs.

    :param gradient: weighted sum of energy gradients over the pairs.
    :param length: adaptive length of the pairs of the next step.
    :param metrics: meeting times and other scalars of the history.
    """

    gradient: Params
    length: Scalar
    metrics: dict[str, Array]


def pair_metrics(outcome: Outcome, window: Window) -> dict[str, Array]:
    """Return meeting times, window, cost, trials and acceptance as scalars."""
    met = outcome.meeting_time >= 0
    tau = jnp.where(met, outcome.meeting_time, 0)
    corrected = ~met | (tau > window.k + window.lag)
    sweeps = jnp.where(met, jnp.maximum(window.m, tau) + tau - window.lag, 0)
    # One reduction compiles two kernels for all; it is of floats because integers would
    # overflow.
    sums = jnp.stack(
        [a.astype(jnp.result_type(float)) for a in (~met, tau, sweeps, corrected)]
    ).sum(1)
    num_met = jnp.maximum(len(met) - sums[0], 1)
    metrics = {
        "meeting_time_mean": sums[1] / num_met,
        "meeting_time_max": tau.max(),
        "num_unmet": sums[0].astype(jnp.int32),
        "lag": window.lag,
        "k": window.k,
        "m": window.m,
        "sweeps": sums[2] / num_met,
        "trials": outcome.trials,
        "corrected": sums[3] / len(met),
    }
    return (
        metrics
        if outcome.acceptance is None
        else metrics | {"acceptance": outcome.acceptance}
    )


@partial(jax.jit, static_argnums=(0, 3))
def init_pool(
    graph: FactorGraph, params: Params, data: Rows, size: int, key: Key
) -> Blocks:
    """Choose random rows of the data, cyclically if fewer than ``size``, and draw their latents."""
    count = len(next(iter(data.values())))
    index = jnp.argsort(random.words(random.fold_in(key, 3), count))[
        jnp.arange(size) % count
    ]
    rows = {b: jnp.take(v, index, axis=0) for b, v in data.items()}
    return complete_rows(Target(graph, params), rows, random.fold_in(key, 4))


def sweep_pool(
    graph: FactorGraph, params: Params, pool: Rows, clamped: Collection[str], key: Key
) -> Rows:
    """Move a pool or persistent chains by one sweep of the blocks that are not clamped."""
    keys = row_keys(key, len(next(iter(pool.values()))))
    return draw_sweep(Target(graph, params), pool, gibbs_sweep(graph, clamped), keys)[0]


def with_pool(target: Target, move: mixture.Mixture, pool: Rows, key: Key) -> Target:
    """Return a target with the pool, its marginalised blocks redrawn given the others."""
    keys = row_keys(key, len(next(iter(pool.values()))))
    rows = Layer(move.marginalize).draw(target, pool, keys)[0]
    proposals = mixture.make_pool(
        target.graph, target.params, move, rows, target.clamped
    )
    return dataclasses.replace(target, pool=proposals)
