# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Herding: learning at zero temperature."""

import dataclasses
from typing import NamedTuple, NoReturn

from jax import Array
import jax.numpy as jnp

from ebmpp.core import checks, random
from ebmpp.core.rows import num_rows
from ebmpp.core.types import Key, Params, Rows
from ebmpp.errors import ArgumentError
from ebmpp.estimators.base import Batch, Estimate, Estimator
from ebmpp.estimators.phases import fresh_chains, posterior_of, row_keys
from ebmpp.graph import FactorGraph
from ebmpp.graph.energy import weighted_gradient
from ebmpp.moves.search import initial_states, local_modes
from ebmpp.moves.target import Target


class HerdingState(NamedTuple):
    """State of :class:`Herding`."""

    x: Rows
    """Current states, ``(num_chains, *shape)`` per block."""
    buffer: Rows
    """Ring buffer of visited states, ``(num_kept, *shape)`` per block."""
    position: Array
    """Index at which the next states are stored."""
    size: Array
    """Number of valid states in the buffer."""

    def visited(self) -> Rows:
        """Return the stored states, oldest first: the pseudo-samples."""
        count = int(self.size)
        capacity = num_rows(self.buffer)
        order = (int(self.position) - count + jnp.arange(count)) % capacity
        return {b: v[order] for b, v in self.buffer.items()}

    def visit(self, x: Rows) -> "HerdingState":
        """Store the next states in place of the oldest."""
        rows = num_rows(x)
        capacity = num_rows(self.buffer)
        index = (self.position + jnp.arange(rows)) % capacity
        buffer = {b: v.at[index].set(x[b]) for b, v in self.buffer.items()}
        size = jnp.minimum(self.size + rows, capacity)
        return HerdingState(x, buffer, (self.position + rows) % capacity, size)


@dataclasses.dataclass(frozen=True)
class Herding(Estimator):
    """Herding: the model's states climb to a mode, and the params move away from it.

    For pseudo-samples with the data's moments, not for a model. Both phases are at zero
    temperature: the latents of the data are at a mode of their posterior, and the
    model's states continue from step to step by local search, each layer in turn set to
    its mode. With ``optax.sgd(1.0)`` this is herding. The params do not converge, but
    the visited states have the data's moments: ``fit.estimator_state.visited()``
    returns them, oldest first. **No likelihood is climbed.**

    :param num_chains: persistent states.
    :param num_kept: number of visited states that are kept, over all chains, at least
        ``num_chains``. ``num_steps * num_chains`` keeps the whole run. Each step copies
        them once.
    :raises ArgumentError: for numbers out of range.

    **References**

    1. Welling (2009), *Herding dynamic weights for partially observed random field
       models*.
    2. Breuleux, Bengio, Vincent (2011), section 2.

    **Example**

    >>> import jax, optax, ebmpp
    >>> from ebmpp.contrib import Herding
    >>> rbm = ebmpp.layered(v=ebmpp.Spin(9), h=ebmpp.Spin(4))
    >>> data = 2 * ebmpp.data.bars_and_stripes(3) - 1
    >>> fit = ebmpp.fit(rbm, data, rng_key=jax.random.key(0), estimator=Herding(num_chains=10),
    ...                 optimizer=optax.sgd(1.0), num_steps=50, progress_bar=False)
    >>> fit.estimator_state.visited()["v"].shape  # 50 steps of 10 states
    (500, 9)
    """

    num_chains: int = 1
    num_kept: int = 1000
    takes_missing = True

    def __post_init__(self) -> None:
        checks.count("Herding: num_chains", self.num_chains)
        checks.count("Herding: num_kept", self.num_kept, least=self.num_chains)

    def init_state(
        self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key
    ) -> HerdingState:
        """Draw initial states of every block; none of them counts as visited."""
        x = fresh_chains(graph, self.num_chains, key)
        buffer = {
            b: jnp.zeros((self.num_kept, *v.shape[1:]), v.dtype) for b, v in x.items()
        }
        return HerdingState(x, buffer, jnp.array(0, jnp.int32), jnp.array(0, jnp.int32))

    def estimate(
        self,
        graph: FactorGraph,
        params: Params,
        state: HerdingState,
        batch: Batch,
        key: Key,
    ) -> Estimate:
        """Subtract the statistics at modes of all blocks from those at modes of the latents."""
        size = batch.num_rows
        start_keys = row_keys(random.fold_in(key, 0), size)
        data_keys = row_keys(random.fold_in(key, 1), size)
        model_keys = row_keys(random.fold_in(key, 2), self.num_chains)
        target = posterior_of(graph, params, batch)
        data = local_modes(target, initial_states(target, start_keys), data_keys).x
        model = local_modes(Target(graph, params), state.x, model_keys).x
        equal = jnp.broadcast_to(batch.weights.sum() / self.num_chains, self.num_chains)
        both = {b: jnp.concatenate([data[b], model[b]]) for b in model}
        weights = jnp.concatenate([batch.weights, -equal])
        gradient = weighted_gradient(graph, params, both, weights)
        return Estimate(gradient, state.visit(model), {})

    def repeats(self, state: HerdingState, count: int) -> NoReturn:
        raise ArgumentError(
            f"{self!r} climbs no likelihood, so the bias of its gradient is not defined."
        )
