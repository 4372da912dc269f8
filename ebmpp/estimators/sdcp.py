# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Stochastic difference-of-convex programming: contrastive divergence with a linearised positive phase."""

import dataclasses
from typing import Any, NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import checks, random
from ebmpp.core.types import Key, Params, Rows
from ebmpp.estimators.base import Batch, Estimate, Estimator, Repeats
from ebmpp.estimators.contrastive import CD
from ebmpp.estimators.phases import (
    Posterior,
    check_posterior,
    complete_batch,
    fresh_chains,
    row_keys,
    signed_gradient,
    sweep_chains,
    tractable_posterior,
)
from ebmpp.graph import FactorGraph
from ebmpp.graph.energy import gradient_at
from ebmpp.moves.gibbs import initial_rows
from ebmpp.moves.layer import gibbs_sweep
from ebmpp.moves.move import draw_sweep
from ebmpp.moves.target import Target


class SDCPState(NamedTuple):
    """What :class:`SDCP` carries from inner step to inner step."""

    inner: Array
    """Which inner step is next, counted from 0."""
    positive: Params
    """The positive phase at the params of inner step 0: minus the gradient of g."""
    chains: Rows


@dataclasses.dataclass(frozen=True)
class SDCP(Estimator):
    """Stochastic difference-of-convex programming: d steps on each batch, its positive phase held fixed.

    For small rates and few epochs: d updates for the sweeps of one of :class:`CD`.

    The negative log-likelihood is f - g, both convex where the energy is linear in the params. g is
    replaced by its tangent at the params that the batch meets first, and f - tangent, which is convex, is
    descended for d steps. Its gradient is that of :class:`CD`, with two differences: the positive phase
    keeps its value from inner step 0, and the chains, which start at the batch's rows, go on from inner
    step to inner step, each time under the params of that step.

    An inner step is a step of :func:`ebmpp.fit`, so that any optimiser takes it, and ``steps_per_batch``
    asks for every batch d times in a row. The d steps of k sweeps sum to those of one of CD(d k), with d
    updates instead of one. Biased like CD, which d = 1 is.

    :param d: inner steps a batch, at least 1.
    :param k: sweeps an inner step, at least 1.
    :param posterior: a stand-in for the exact posterior where that is not one layer: :class:`MeanField`.
    :raises ArgumentError: for a d or k that is not a positive int.

    **References**

    1. Upadhya, Sastry (2017), *Learning RBM with a DC programming approach*, Algorithm 2 (one row) and
       Algorithm 3 (a batch). The latter as printed never resets the accumulated step between inner steps;
       this is Algorithm 2, averaged over the batch.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> fit = ebmpp.fit(rbm, ebmpp.data.bars_and_stripes(3), rng_key=jax.random.key(0), num_steps=6,
    ...                 estimator=ebmpp.estimators.SDCP(d=3, k=4), progress_bar=False)
    >>> fit.history.gradient_norm.shape
    (6,)
    """

    d: int = 3
    k: int = 4
    posterior: Posterior | None = None
    takes_missing = True

    def __post_init__(self) -> None:
        checks.set_counts(self, "d", "k")

    @property
    def steps_per_batch(self) -> int:
        """Steps in a row that need the same rows: d."""
        return self.d

    def repeats(self, state: Any, count: int) -> Repeats:
        """From inner step 0: what is carried past it is of the rows that it was begun with."""
        fresh = state if self.d == 1 else state._replace(inner=jnp.zeros_like(state.inner))
        return Repeats(self, (fresh,) * count)

    def init(self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key) -> Any:
        """At inner step 0, which reads neither chains nor the positive phase; nothing is carried if d = 1."""
        check_posterior(graph, "SDCP", self.posterior)
        if self.d == 1:
            return ()
        chains = fresh_chains(graph, batch, key)
        return SDCPState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), chains)

    def estimate(self, graph: FactorGraph, params: Params, state: Any, batch: Batch, key: Key) -> Estimate:
        """The tangent's gradient minus that of chains k sweeps on."""
        if self.d == 1:
            return CD(self.k, self.posterior).estimate(graph, params, state, batch, key)

        size, at = len(batch.weights), random.fold_in(key, 0)

        def begin() -> tuple[Params, Rows]:
            latents = initial_rows(graph, graph.latent, row_keys(random.fold_in(at, 0), size))
            own, posterior = random.fold_in(at, 2), self.posterior
            whole = complete_batch(graph, params, batch, self.k, own, posterior)
            return self._positive_phase(graph, params, whole), _like({**whole.rows, **latents}, state.chains)

        go_on = lambda: (state.positive, state.chains)
        positive, chains = lax.cond(state.inner == 0, begin, go_on)
        # Algorithm 2 goes on from the visible units: latents are drawn anew under the params of the step.
        held, target = gibbs_sweep(graph, graph.visible), Target(graph, params)
        start, _ = draw_sweep(target, chains, held, row_keys(random.fold_in(at, 1), size))
        model, _ = sweep_chains(target, start, self.k, random.fold_in(key, 1))
        negative = signed_gradient(graph, params, model, -batch.weights)  # a chain counts as its row does
        state = SDCPState((state.inner + 1) % self.d, positive, model)
        return Estimate(jax.tree.map(jnp.add, positive, negative), state, {})

    def _positive_phase(self, graph: FactorGraph, params: Params, batch: Batch) -> Params:
        if self.posterior is None or tractable_posterior(graph):
            return signed_gradient(graph, params, batch.rows, batch.weights)
        data = self.posterior.statistics(graph, params, batch.rows)
        return gradient_at(graph, params, data, batch.weights)


def _like(rows: Rows, other: Rows) -> Rows:
    """``rows`` in the dtypes of ``other``: both branches of a conditional must agree."""
    return {b: v.astype(other[b].dtype) for b, v in rows.items()}
