# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Herding: learning at zero temperature."""

import dataclasses
from typing import TYPE_CHECKING

from jax import Array
import jax.numpy as jnp

from ebmpp import bits
from ebmpp.accumulators import weighted_gradient
from ebmpp.estimators.base import Batch, Estimate, Params, Rows
from ebmpp.estimators.phases import fresh_chains, row_pairs, whole_visible
from ebmpp.search import local_modes
from ebmpp.sweeps import hold, initial_rows, schedule

if TYPE_CHECKING:
    from ebmpp.graph import FactorGraph


@dataclasses.dataclass(frozen=True)
class Herding:
    """Herding: the states of the model climb to a mode, and the params move away from where they are.

    Both phases are at zero temperature: latents of the data are at a mode of their posterior, and the states
    go on from step to step by local search, layer after layer set to its mode. With ``optax.sgd(1.0)`` this
    is herding; the params do not converge and are not meant to, but the visited states have the data's
    moments.
    **No likelihood is climbed.**

    :param num_chains: persistent states, at least 1.
    :raises ValueError: for another number.

    **References**

    1. Welling (2009), *Herding dynamic weights for partially observed random field models*.
    2. Breuleux, Bengio, Vincent (2011), section 2.

    **Example**

    >>> import jax, optax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Spin(9), h=ebmpp.Spin(4))
    >>> data = 2 * ebmpp.data.bars_and_stripes(3) - 1
    >>> fit = ebmpp.fit(rbm, data, rng_key=jax.random.key(0), estimator=ebmpp.Herding(num_chains=10),
    ...                 optimizer=optax.sgd(1.0), num_steps=5, progress_bar=False)
    >>> fit.estimator_state["v"].shape
    (10, 9)
    """

    num_chains: int = 1
    takes_missing = True

    def __post_init__(self) -> None:
        if not isinstance(self.num_chains, int) or self.num_chains < 1:
            raise ValueError(f"Herding: num_chains is a positive int, not {self.num_chains!r}")

    def init(self, graph: "FactorGraph", params: Params, data: Rows, batch: int, pair: Array) -> Rows:
        """States at initial draws of every block."""
        return fresh_chains(graph, self.num_chains, pair)

    def estimate(
        self, graph: "FactorGraph", params: Params, state: Rows, batch: Batch, pair: Array
    ) -> Estimate:
        """Data with their latents at a mode, minus the states, which are at modes of all blocks."""
        size = len(batch.weights)
        keys = [row_pairs(bits.fold_in(pair, i), n) for i, n in enumerate((size, size, self.num_chains))]
        drawn = initial_rows(graph, graph.families, keys[0])
        start = drawn | batch.rows | hold(batch.known, batch.rows, {b: drawn[b] for b in batch.known})
        layers = schedule(graph, whole_visible(graph, batch))
        data = local_modes(graph, params, start, layers, keys[1], batch.known).x
        model = local_modes(graph, params, state, schedule(graph), keys[2], {}).x
        equal = jnp.broadcast_to(batch.weights.sum() / self.num_chains, self.num_chains)
        both = {b: jnp.concatenate([data[b], model[b]]) for b in model}
        gradient = weighted_gradient(graph, params, both, jnp.concatenate([batch.weights, -equal]))
        return Estimate(gradient, model, {})
