# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Herding: learning at zero temperature."""

import dataclasses
from typing import NamedTuple, NoReturn

from jax import Array
import jax.numpy as jnp

from ebmpp.core import checks, random
from ebmpp.core.types import Key, Params, Rows
from ebmpp.errors import ArgumentError
from ebmpp.estimators.base import Batch, Estimate, Estimator
from ebmpp.estimators.phases import fresh_chains, posterior_of, row_keys
from ebmpp.graph import FactorGraph
from ebmpp.graph.energy import weighted_gradient
from ebmpp.moves.target import Target
from ebmpp.sampling.search import local_modes, start


class HerdingState(NamedTuple):
    """What :class:`Herding` carries."""

    x: Rows
    """The states that go on, ``(num_chains, *shape)`` a block."""
    kept: Rows
    """The last that were visited, ``(num_kept, *shape)`` a block; see :meth:`visited` for their order."""
    place: Array
    """Where the next ones are put."""
    filled: Array
    """How many of ``kept`` there are yet."""

    def visited(self) -> Rows:
        """The visited states that are kept, oldest first, those of one step in a row: the pseudo-samples."""
        count, size = int(self.filled), len(next(iter(self.kept.values())))
        order = (int(self.place) - count + jnp.arange(count)) % size
        return {b: v[order] for b, v in self.kept.items()}

    def visit(self, x: Rows) -> "HerdingState":
        """The next states, which take the place of the oldest."""
        rows, size = (len(next(iter(v.values()))) for v in (x, self.kept))
        at = (self.place + jnp.arange(rows)) % size
        kept = {b: v.at[at].set(x[b]) for b, v in self.kept.items()}
        filled = jnp.minimum(self.filled + rows, size)
        return HerdingState(x, kept, (self.place + rows) % size, filled)


@dataclasses.dataclass(frozen=True)
class Herding(Estimator):
    """Herding: the states of the model climb to a mode, and the params move away from where they are.

    For pseudo-samples with the data's moments, and not for a model.

    Both phases are at zero temperature: latents of the data are at a mode of their posterior, and the states
    go on from step to step by local search, layer after layer set to its mode. With ``optax.sgd(1.0)`` this
    is herding; the params do not converge and are not meant to, but the visited states have the data's
    moments. They are what herding makes: ``fit.estimator_state.visited()`` has them, oldest first.
    **No likelihood is climbed.**

    :param num_chains: persistent states, at least 1.
    :param num_kept: how many of the last visited states are kept, of all chains together, at least
        ``num_chains``: ``num_steps * num_chains`` keeps the whole run. Each step copies them once.
    :raises ArgumentError: for other numbers.

    **References**

    1. Welling (2009), *Herding dynamic weights for partially observed random field models*.
    2. Breuleux, Bengio, Vincent (2011), section 2.

    **Example**

    >>> import jax, optax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Spin(9), h=ebmpp.Spin(4))
    >>> data = 2 * ebmpp.data.bars_and_stripes(3) - 1
    >>> fit = ebmpp.fit(rbm, data, rng_key=jax.random.key(0),
    ...                 estimator=ebmpp.estimators.Herding(num_chains=10), optimizer=optax.sgd(1.0),
    ...                 num_steps=50, progress_bar=False)
    >>> fit.estimator_state.visited()["v"].shape  # 50 steps of 10 states
    (500, 9)
    """

    num_chains: int = 1
    num_kept: int = 1000
    takes_missing = True

    def __post_init__(self) -> None:
        checks.count("Herding: num_chains", self.num_chains)
        checks.count("Herding: num_kept", self.num_kept, least=self.num_chains)

    def init(self, graph: FactorGraph, params: Params, data: Rows, batch: int, key: Key) -> HerdingState:
        """States at initial draws of every block, none of them visited."""
        x = fresh_chains(graph, self.num_chains, key)
        kept = {b: jnp.zeros((self.num_kept, *v.shape[1:]), v.dtype) for b, v in x.items()}
        return HerdingState(x, kept, jnp.array(0, jnp.int32), jnp.array(0, jnp.int32))

    def estimate(
        self, graph: FactorGraph, params: Params, state: HerdingState, batch: Batch, key: Key
    ) -> Estimate:
        """Data with their latents at a mode, minus the states, which are at modes of all blocks."""
        size = len(batch.weights)
        keys = [row_keys(random.fold_in(key, i), n) for i, n in enumerate((size, size, self.num_chains))]
        target = posterior_of(graph, params, batch)
        data = local_modes(target, start(target, keys[0]), keys[1]).x
        model = local_modes(Target(graph, params), state.x, keys[2]).x
        equal = jnp.broadcast_to(batch.weights.sum() / self.num_chains, self.num_chains)
        both = {b: jnp.concatenate([data[b], model[b]]) for b in model}
        gradient = weighted_gradient(graph, params, both, jnp.concatenate([batch.weights, -equal]))
        return Estimate(gradient, state.visit(model), {})

    def repeats(self, state: HerdingState, count: int) -> NoReturn:
        """:raises ArgumentError: always."""
        raise ArgumentError(f"{self!r} climbs no likelihood, so its gradient is not one that could be biased")
