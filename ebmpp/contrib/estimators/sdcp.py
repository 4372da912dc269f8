# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Stochastic difference-of-convex programming: CD with a linearised positive phase."""

import dataclasses
from typing import NamedTuple

from jaxtyping import PyTree

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import checks, random
from ebmpp.core.types import Key, Params, Rows
from ebmpp.estimators.base import Batch, Estimate, Estimator, Repeats
from ebmpp.estimators.centering import Centered
from ebmpp.estimators.contrastive import CD
from ebmpp.estimators.phases import (
    PosteriorApproximation,
    check_posterior,
    complete_batch,
    fresh_chains,
    positive_gradient,
    row_keys,
    signed_gradient,
    sweep_chains,
)
from ebmpp.graph import FactorGraph
from ebmpp.moves.gibbs import initial_rows
from ebmpp.moves.move import draw_sweep, gibbs_sweep
from ebmpp.moves.target import Target


class SDCPState(NamedTuple):
    """State of :class:`SDCP` between inner steps."""

    inner: Array
    """Index of the next inner step."""
    positive: Params
    """Positive phase at the params of inner step 0: minus the gradient of g."""
    chains: Rows

    @property
    def model_chains(self) -> Rows:
        """Chains after the last inner step."""
        return self.chains


@dataclasses.dataclass(frozen=True)
class SDCP(Estimator):
    """Stochastic difference-of-convex programming: d steps per batch at one positive phase.

    For small rates and few epochs: d updates for the sweeps of one step of
    :class:`ebmpp.CD`.

    The negative log-likelihood is f - g, both convex where the energy is linear in the
    params. g is replaced by its tangent at the params that the batch meets first, and
    f - tangent, which is convex, is descended for d steps. The gradient is that of
    :class:`ebmpp.CD` with two differences: the positive phase keeps its value from
    inner step 0, and the chains, which start at the batch's rows, continue from inner
    step to inner step under the params of each.

    An inner step is a step of :func:`ebmpp.fit`, so any optimiser can be used;
    ``steps_per_batch`` requests each batch d times. Its d steps of k sweeps cost one
    step of CD(d k). Biased like CD, which d = 1 is.

    :param d: inner steps per batch.
    :param k: sweeps per inner step.
    :param posterior: an approximation such as :class:`~ebmpp.MeanField`,
        needed where the latents given the visibles are not one layer.
    :raises ArgumentError: for numbers out of range.

    **References**

    1. Upadhya, Sastry (2017), *Learning RBM with a DC programming approach*, Algorithm
       2 (one row) and Algorithm 3 (a batch). The latter as printed never resets the
       accumulated step between inner steps; this is Algorithm 2, averaged over the
       batch.

    **Example**

    >>> import jax, ebmpp
    >>> from ebmpp.contrib import SDCP
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> fit = ebmpp.fit(rbm, ebmpp.data.bars_and_stripes(3), rng_key=jax.random.key(0), num_steps=6,
    ...                 estimator=SDCP(d=3, k=4), progress_bar=False)
    >>> fit.history.gradient_norm.shape
    (6,)
    """

    d: int = 3
    k: int = 4
    posterior: PosteriorApproximation | None = None
    takes_missing = True

    def __post_init__(self) -> None:
        checks.set_counts(self, "d", "k")

    @property
    def steps_per_batch(self) -> int:
        """Number of consecutive steps that need the same rows: d."""
        return self.d

    def init_state(
        self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key
    ) -> PyTree:
        """Begin at inner step 0, which reads neither chains nor the positive phase.

        The state is empty if d = 1.
        """
        check_posterior(graph, "SDCP", self.posterior)
        if self.d == 1:
            return ()
        chains = fresh_chains(graph, batch, key)
        return SDCPState(
            jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), chains
        )

    def estimate(
        self, graph: FactorGraph, params: Params, state: PyTree, batch: Batch, key: Key
    ) -> Estimate:
        """Subtract the gradient at chains of k more sweeps from the tangent's."""
        if self.d == 1:
            return CD(self.k, self.posterior).estimate(graph, params, state, batch, key)

        size = batch.num_rows
        start_key = random.fold_in(key, 0)

        def begin() -> tuple[Params, Rows]:
            latent_keys = row_keys(random.fold_in(start_key, 0), size)
            latents = initial_rows(graph, graph.latent, latent_keys)
            missing_key = random.fold_in(start_key, 2)
            complete = complete_batch(
                graph, params, batch, self.k, missing_key, self.posterior
            )
            x = {**complete.rows, **latents}
            chains = {b: v.astype(state.chains[b].dtype) for b, v in x.items()}
            return positive_gradient(graph, params, complete, self.posterior), chains

        positive, chains = lax.cond(
            state.inner == 0, begin, lambda: (state.positive, state.chains)
        )
        # Algorithm 2 continues from the visible units: latents are redrawn under the
        # params of the step.
        target = Target(graph, params)
        latent_moves = gibbs_sweep(graph, graph.visible)
        sweep_keys = row_keys(random.fold_in(start_key, 1), size)
        start, _ = draw_sweep(target, chains, latent_moves, sweep_keys)
        model, _ = sweep_chains(target, start, self.k, random.fold_in(key, 1))
        # a chain has its row's weight
        negative = signed_gradient(graph, params, model, -batch.weights)
        state = SDCPState((state.inner + 1) % self.d, positive, model)
        return Estimate(jax.tree.map(jnp.add, positive, negative), state, {})

    def repeats(self, state: PyTree, count: int) -> Repeats:
        # inner step 0: a state past it belongs to the rows that it began with
        if self.d > 1:
            state = state._replace(inner=jnp.zeros_like(state.inner))
        return Repeats(self, (state,) * count)


def CSDCP(
    d: int = 3,
    k: int = 4,
    sliding: float = 0.01,
    posterior: PosteriorApproximation | None = None,
) -> Centered:
    """Return ``Centered(SDCP(d, k, posterior), sliding)``: S-DCP with centered gradients.

    :param d: inner steps per batch.
    :param k: sweeps per inner step.
    :param sliding: see :class:`~ebmpp.Centered`.
    :param posterior: see :class:`SDCP`.

    **References**

    1. Upadhya, Sastry (2017), Algorithm 4, but for the offsets: see
       :class:`~ebmpp.Centered`.

    **Example**

    >>> from ebmpp.contrib import CSDCP
    >>> CSDCP(d=6, k=4)
    Centered(estimator=SDCP(d=6, k=4, posterior=None), sliding=0.01, rates=())
    """
    return Centered(SDCP(d, k, posterior), sliding)
