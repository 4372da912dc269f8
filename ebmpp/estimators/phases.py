# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Positive and negative phases, shared by all estimators.

A pool of mixture proposals is a set of states of the whole graph. A step moves it
before its pairs begin, by keys of its own: the pairs' draws do not enter it, so given
the past the pairs are unbiased.
"""

from collections.abc import Sequence
import dataclasses
from functools import partial, reduce
from typing import NamedTuple, Protocol, runtime_checkable
import warnings

from jaxtyping import PyTree

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import (
    Blocks,
    Eta,
    Key,
    Keys,
    Params,
    PerRow,
    Rows,
    Scalar,
    Statistics,
    checks,
    full_precision,
    num_rows,
    omit,
    random,
    select,
    sharding,
)
from ebmpp.coupling.engine import Outcome, Window
from ebmpp.errors import IntractableError, clash
from ebmpp.estimators.base import (
    Batch,
    ChainMetrics,
    Estimator,
    HasChains,
    PairMetrics,
)
from ebmpp.graph import FactorGraph, energy, tables
from ebmpp.graph.states import Clamped
from ebmpp.moves import Layer, Target, gibbs, gibbs_sweep, mixture, search
from ebmpp.moves.move import Move, draw_sweep, num_proposals
from ebmpp.moves.sweeps import MovesLike, complete_rows, resolve_moves


@runtime_checkable
class PosteriorApproximation(Protocol):
    """Posterior of graphs whose latents are not one layer; a hashable value."""

    def statistics(self, graph: FactorGraph, params: Params, rows: Rows) -> Statistics:
        """Return mean statistics of every block given the rows.

        :return: ``(rows, *statistic_shape)`` each.
        """


@dataclasses.dataclass(frozen=True)
class MeanField:
    """Mean-field posterior: independent units, by coordinate ascent on the lower bound.

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
    >>> estimator = ebmpp.PCD(num_chains=10, posterior=ebmpp.MeanField(10))
    >>> fit = ebmpp.fit(deep, ebmpp.data.bars_and_stripes(3), estimator=estimator, num_steps=3,
    ...                 rng_key=jax.random.key(0), progress_bar=False)
    >>> sorted(fit.params)
    ['h1', 'h1:h2', 'h2', 'v', 'v:h1']
    """

    passes: int = 20

    def __post_init__(self) -> None:
        checks.set_counts(self, "passes")

    def statistics(self, graph: FactorGraph, params: Params, rows: Rows) -> Statistics:
        """Return mean statistics of every block given the rows, exact for visible blocks."""

        def row_statistics(row):
            t = graph.statistics(row)
            return energy.mean_field(graph, params, t, self.passes)[0]

        return jax.vmap(row_statistics)(dict(rows))


def tractable_posterior(graph: FactorGraph) -> bool:
    """Return True if the latents given the visibles are one layer, which can be summed out."""
    return not graph.interacting(graph.latent)


def check_posterior(graph: FactorGraph, name: str, posterior: object) -> None:
    """Raise IntractableError without a posterior where the positive phase is intractable."""
    if posterior is not None:
        checks.instance(
            f"{name}: posterior",
            posterior,
            PosteriorApproximation,
            "one such as MeanField()",
        )
        return
    for a, b in graph.interacting(graph.latent):
        raise IntractableError(
            f"{name} has no exact positive phase: latent {clash(a, b)} given the "
            "visible ones. Use UCD(), which couples chains on the posterior, or a "
            f"variational one, {name}(posterior=MeanField())."
        )


class BiasedEstimator(Estimator):
    """Base class of estimators whose positive phase is exact, or by an approximation."""

    k: int
    posterior: PosteriorApproximation | None
    takes_missing = True

    def check(self, graph: FactorGraph) -> None:
        """Raise IntractableError without a posterior where one is needed."""
        check_posterior(graph, type(self).__name__, self.posterior)

    def complete(
        self, graph: FactorGraph, params: Params, batch: Batch, key: Key
    ) -> Batch:
        """Draw missing entries by k sweeps."""
        key = random.fold_in(key, 9)
        return complete_batch(graph, params, batch, self.k, key, self.posterior)


def row_keys(key: Key, rows: int) -> Keys:
    """Return one key per row."""
    return random.fold_in(key, jnp.arange(rows))


def take_rows(x: Rows, index: Array) -> Blocks:
    """Return the rows with these numbers."""
    return {b: jnp.take(v, index, axis=0) for b, v in x.items()}


@partial(jax.jit, static_argnums=(0, 1))  # op by op it compiles for seconds
def fresh_chains(graph: FactorGraph, count: int, key: Key) -> Rows:
    """Draw initial states of every block."""
    keys = row_keys(key, count)
    x = gibbs.initial_rows(graph, graph.families, keys)
    if graph.has_zeros:
        first = jax.random.key(0)
        params = {f.name: f.init_params(first, graph.families) for f in graph.factors}
        target = Target(graph, params)
        x = search.find_possible(target, x, random.fold_in(keys, 1))
    return sharding.rows(x)


def carried_chains(state: PyTree) -> Rows:
    """Return the model's chains in an estimator's state, which may be all of it."""
    if isinstance(state, HasChains):
        return state.model_chains
    return state if isinstance(state, dict) else {}


def cycle_chains(chains: Rows, fresh: Rows) -> Rows:
    """Repeat chains cyclically to the number of ``fresh`` ones, or return these.

    :param chains: if they are of other blocks, the result is ``fresh``.
    """
    if not fresh or set(chains) != set(fresh):
        return fresh
    return _cycle(num_rows(fresh), chains)


@partial(jax.jit, static_argnums=0)
def _cycle(count: int, chains: Rows) -> Rows:
    index = jnp.arange(count) % num_rows(chains)
    # sharded as fresh ones
    return sharding.rows(take_rows(chains, index))


def sweep_chains(
    target: Target, x: Rows, count: int, key: Key, moves: MovesLike = None
) -> tuple[Rows, ChainMetrics]:
    """Move every chain by ``count`` sweeps; return also the acceptance rate.

    :param moves: default: Gibbs draws of all layers.
    """
    rows = num_rows(x)
    sweep = resolve_moves(target.graph, moves, target.clamped, exact=False)

    def sweep_once(i, carry):
        x, accepted = carry
        keys = row_keys(random.fold_in(key, i), rows)
        x, accepted_now = draw_sweep(target, x, sweep, keys)
        return x, accepted + accepted_now.sum()

    start = dict(x), jnp.int32(0)
    if count == 1:  # without a loop XLA drops the last latent draw, which nothing reads
        x, accepted = sweep_once(0, start)
    else:
        x, accepted = lax.fori_loop(0, count, sweep_once, start)
    proposals = count * rows * num_proposals(sweep)
    return x, ChainMetrics(acceptance=accepted / proposals if proposals else None)


def posterior_of(graph: FactorGraph, params: Params, batch: Batch) -> Target:
    """Make the target of the latents and missing entries given the known entries."""
    complete = omit(batch.rows, batch.known)
    incomplete = select(batch.rows, batch.known)
    clamped = Clamped(complete, incomplete, dict(batch.known), (batch.num_rows,))
    return Target(graph, params, clamped)


def check_rows(graph: FactorGraph, params: Params, batch: Batch) -> None:
    """Refuse rows of probability zero, unless possible latents are hard to find.

    :raises StateError: with the numbers of the rows.
    """
    if graph.has_zeros:
        target = posterior_of(graph, params, batch)
        keys = row_keys(jnp.zeros(2, jnp.uint32), batch.num_rows)
        x = search.compiled_initial_states(target, keys)
        tables.check_possible(search.log_density(target, x))
        if text := search.check_starts("data", Target(graph, params), x):
            warnings.warn(f"data: {text}", stacklevel=3)


def sample_latents(graph: FactorGraph, params: Params, batch: Batch, key: Key) -> Rows:
    """Draw the latents given the rows, with missing entries at initial draws.

    Exact where the posterior is one layer and no entry is missing; else one sweep from
    initial draws.
    """

    def keys(number):
        return row_keys(random.fold_in(key, number), batch.num_rows)

    visible = dict(batch.rows)
    if batch.known:
        missing = gibbs.initial_rows(graph, batch.known, keys(2))
        visible |= gibbs.keep_observed(batch.known, batch.rows, missing)
    start = visible | gibbs.initial_rows(graph, graph.latent, keys(0))
    target = Target(graph, params, Clamped(visible))
    start = search.find_possible(target, start, keys(3))
    x, _ = draw_sweep(target, start, gibbs_sweep(graph, visible), keys(1))
    return x


def complete_batch(
    graph: FactorGraph,
    params: Params,
    batch: Batch,
    count: int,
    key: Key,
    posterior: PosteriorApproximation | None,
) -> Batch:
    """Draw missing entries given the known ones by Gibbs sweeps, biased like CD(count).

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
    target = posterior_of(graph, params, batch)
    x, _ = sweep_chains(target, start, count, random.fold_in(key, 1))
    return batch._replace(rows=select(x, batch.rows), known={})


def signed_gradient(
    graph: FactorGraph, params: Params, x: Rows, weights: PerRow
) -> Params:
    """Return the gradient of ``sum_i w_i E``, the latents summed out where that is exact.

    With weights 1/n on data rows and -1/N on model rows this is the gradient of the
    mean negative log-likelihood (Qiu et al. 2020, eq. 2), with one product per weight
    matrix for both phases.
    """
    if not tractable_posterior(graph):
        return energy.weighted_gradient(graph, params, x, weights)
    return jax.grad(lambda p: _weighted_free_energy(graph, p, x, weights))(params)


def positive_gradient(
    graph: FactorGraph,
    params: Params,
    batch: Batch,
    posterior: PosteriorApproximation | None,
) -> Params:
    """Return the gradient of ``sum_i w_i E`` over the batch.

    :param posterior: of the latents, where they are not one layer.
    """
    if posterior is None or tractable_posterior(graph):
        return signed_gradient(graph, params, batch.rows, batch.weights)
    means = posterior.statistics(graph, params, batch.rows)
    return energy.gradient_at(graph, params, means, batch.weights)


def reference_log_partition(graph: FactorGraph, eta0: Eta) -> Scalar:
    """Return log Z of independent units with these natural parameters."""
    return reduce(
        jnp.add, [f.log_normalizer(eta0[b]).sum() for b, f in graph.families.items()]
    )


@full_precision
def batch_log_likelihood(
    graph: FactorGraph, params: Params, batch: Batch, log_partition: Scalar
) -> Scalar | None:
    """Return the weighted mean of log p of the batch's rows, if it has a closed form."""
    if not tractable_posterior(graph) or batch.known:
        return None
    values = energy.summed_out(graph, params, batch.rows, tuple(graph.latent))
    return (values @ batch.weights) / batch.weights.sum() - log_partition


@full_precision
def _weighted_free_energy(
    graph: FactorGraph, params: Params, x: Rows, weights: PerRow
) -> Scalar:
    return -(weights @ energy.summed_out(graph, params, x, tuple(graph.latent)))


def two_phases(
    target: Target,
    batch: Batch,
    model: Rows,
    posterior: PosteriorApproximation | None,
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
        size = num_rows(model)
        weights = jnp.broadcast_to(batch.weights.sum() / size, size)
    if posterior is None or tractable_posterior(graph):

        def loss(params):
            # Two terms instead of one over joined rows: XLA then reuses the products
            # that the latents of the data or of the chains were drawn with, which
            # saves one in six.
            data = _weighted_free_energy(graph, params, batch.rows, batch.weights)
            return data + _weighted_free_energy(graph, params, model, -weights)

        return jax.grad(loss)(params)
    signed = jnp.concatenate([batch.weights, -weights])
    data = posterior.statistics(graph, params, batch.rows)
    drawn = graph.statistics(model)
    joined = {b: jnp.concatenate([data[b], t]) for b, t in drawn.items() if b in data}
    return energy.gradient_at(graph, params, joined, signed)


class Phase(NamedTuple):
    """Result of a set of coupled pairs.

    :param gradient: weighted sum of energy gradients over the pairs.
    :param length: adaptive length of the pairs of the next step.
    :param metrics: None for an exact phase, which needs no pairs.
    """

    gradient: Params
    length: Scalar
    metrics: PairMetrics | None


def pair_metrics(outcome: Outcome, window: Window) -> PairMetrics:
    """Return meeting times, window, cost, trials and acceptance as scalars."""
    met = outcome.meeting_time >= 0
    tau = jnp.where(met, outcome.meeting_time, 0)
    corrected = ~met | (tau > window.k + window.lag)
    sweeps = jnp.where(met, jnp.maximum(window.m, tau) + tau - window.lag, 0)
    # One reduction compiles two kernels for all; it is of floats because integers would
    # overflow.
    counts = [a.astype(float) for a in (~met, tau, sweeps, corrected)]
    num_unmet, tau_sum, sweep_sum, num_corrected = jnp.stack(counts).sum(1)
    num_met = jnp.maximum(len(met) - num_unmet, 1)
    return PairMetrics(
        meeting_time_mean=tau_sum / num_met,
        meeting_time_max=tau.max(),
        num_unmet=num_unmet.astype(jnp.int32),
        lag=window.lag,
        k=window.k,
        m=window.m,
        sweeps=sweep_sum / num_met,
        trials=outcome.trials,
        corrected=num_corrected / len(met),
        acceptance=outcome.acceptance,
    )


@partial(jax.jit, static_argnums=(0, 3))
def init_pool(
    graph: FactorGraph, params: Params, data: Rows, size: int, key: Key
) -> Blocks:
    """Choose random rows of the data, cyclically if too few, and draw their latents."""
    count = num_rows(data)
    order = jnp.argsort(random.words(random.fold_in(key, 3), count))
    rows = take_rows(data, order[jnp.arange(size) % count])
    return complete_rows(Target(graph, params), rows, random.fold_in(key, 4))


def sweep_pool(target: Target, pool: Rows, moves: Sequence[Move], key: Key) -> Rows:
    """Move a pool or persistent chains by one sweep."""
    pool, _ = draw_sweep(target, pool, moves, row_keys(key, num_rows(pool)))
    return pool


def attach_pool(target: Target, move: mixture.Mixture, pool: Rows, key: Key) -> Target:
    """Return a target with the pool, its marginalised blocks redrawn given the others."""
    rows = pool
    if move.marginalize:
        keys = row_keys(key, num_rows(pool))
        drawn, _ = Layer(move.marginalize).draw(target, pool, keys)
        rows = {**pool, **drawn}
    return dataclasses.replace(target, pool=mixture.make_pool(target, move, rows))
