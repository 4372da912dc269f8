# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What an estimator is, and the two phases that all of them share."""

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp import bits, derived
from ebmpp.accumulators import weighted_gradient
from ebmpp.sweeps import initial_rows, schedule, sweep_rows

if TYPE_CHECKING:
    from ebmpp.graph import FactorGraph

Params = Any
Rows = dict[str, Array]


class Estimate(NamedTuple):
    """One step's gradient."""

    gradient: Params
    """Of the mean negative log-likelihood, a pytree like the params."""
    state: Any
    """What the estimator carries to the next step."""
    metrics: dict[str, Array]
    """Scalars for the history."""


@runtime_checkable
class Estimator(Protocol):
    """An estimator of the gradient: an immutable, hashable value."""

    def init(self, graph: "FactorGraph", params: Params, data: Rows, batch: int, pair: Array) -> Any:
        """The state before the first step; ``batch`` is the number of rows a step sees."""

    def estimate(
        self,
        graph: "FactorGraph",
        params: Params,
        state: Any,
        batch: Rows,
        pair: Array,
    ) -> Estimate:
        """One step: traced once, so everything that changes is an array."""


def tractable_posterior(graph: "FactorGraph") -> bool:
    """Whether the latents given the visibles are one layer, so that they can be summed out."""
    return not graph.interacting(graph.latent)


def row_pairs(pair: Array, rows: int) -> Array:
    """A key pair a row."""
    return bits.fold_in(pair, jnp.arange(rows))


def sample_latents(graph: "FactorGraph", params: Params, v: Rows, pair: Array) -> Rows:
    """States at the rows of ``v``: the latents drawn given them.

    Exact where the posterior is one layer; else one sweep over the latents from initial draws, which is
    a start and not a posterior draw.
    """
    rows = len(next(iter(v.values())))
    first, second = (row_pairs(bits.fold_in(pair, i), rows) for i in range(2))
    state = {**v, **initial_rows(graph, graph.latent, first)}
    return sweep_rows(graph, params, state, schedule(graph, clamped=graph.visible), second)


def signed_gradient(graph: "FactorGraph", params: Params, x: Rows, weights: Array) -> Params:
    """Gradient of ``sum_i w_i E`` over rows, the latents summed out where that is exact.

    With weights 1/n on data rows and -1/N on model rows this is the gradient of the mean negative
    log-likelihood (Qiu et al. 2020, eq. 2): one product a weight matrix for both phases.
    """
    if not tractable_posterior(graph):
        return weighted_gradient(graph, params, x, weights)
    v = {b: x[b] for b in graph.visible}
    latents = tuple(graph.latent)

    def free_energy(p: Params) -> Array:
        return -(weights @ jax.vmap(lambda row: derived.log_unnormalized(graph, p, row, latents))(v))

    return jax.grad(free_energy)(params)


def two_phases(graph: "FactorGraph", params: Params, data: Rows, model: Rows) -> Params:
    """Mean over ``data`` minus mean over ``model`` rows."""
    sizes = [len(next(iter(x.values()))) for x in (data, model)]
    weights = jnp.concatenate([jnp.full(sizes[0], 1 / sizes[0]), jnp.full(sizes[1], -1 / sizes[1])])
    both = {b: jnp.concatenate([data[b], model[b]]) for b in model if b in data}
    return signed_gradient(graph, params, both, weights)
