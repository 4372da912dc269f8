# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Few discrete units drawn jointly, from the log density at each of their joint states."""

from collections.abc import Sequence
import itertools

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import Numbers, SiteArrays
from ebmpp.traced.block import SiteValues
from ebmpp.traced.model import Inputs
from ebmpp.traced.sweep.conditionals import ChainInputs, Conditionals, Visit, Visited


class Enumerated(Conditionals):
    """A joint draw of all units, as of one unit whose values are their joint states.

    :param units: the conditionals of single units.
    """

    def __init__(self, units: Conditionals) -> None:
        super().__init__(units.posterior, np.zeros(units.size, int))
        self.units = units
        valid = units.valid(np.arange(units.size))
        valid = np.broadcast_to(valid, (units.size, units.num_values))
        #: numbers of the values in each joint state, ``(states, units)``
        self.states = np.array([*itertools.product(*map(np.flatnonzero, valid))])

    def visit(
        self,
        fn: Visit,
        chains: Sequence[ChainInputs],
        carry: Array,
        backward: bool = False,
    ) -> Visited:
        weights = [self._log_weights(chain)[None] for chain in chains]
        choices, carry = fn(0, np.arange(1), weights, carry)
        pairs = zip(chains, choices)
        return [self._at(sites, *choice) for (sites, _), choice in pairs], carry

    def _at(self, sites: SiteValues, state: Array, accepted: Numbers) -> SiteArrays:
        """Return the sites in a joint state, ``(1,)``, if that is accepted."""
        numbers = jnp.asarray(self.states)[state[0]]
        accepted = jnp.broadcast_to(accepted, self.size)
        return self.put(sites, np.arange(self.size), numbers, accepted)

    def _log_weights(self, chain: ChainInputs) -> Array:
        """Return the log density of each joint state."""
        sites, inputs = chain
        program = self.posterior.program

        def density(state):
            moved = self._at(sites, state, np.ones(1, bool))
            at = self.posterior.inputs_at(moved, inputs)
            return program.run(at, [program.output])[program.output]

        return jax.vmap(density)(np.arange(len(self.states))[:, None])

    def begin(
        self, inputs: Inputs, held: Sequence[str], uniforms: Array
    ) -> tuple[SiteArrays, Array]:
        """Draw all units jointly, given the sites ``held``."""
        chain = self._chain(inputs)
        sites, _ = chain
        weights = self._log_weights(chain)
        is_free = np.ones(self.size, bool)
        for site in held:
            is_free[slice(*self.spans[site])] = False
        is_open = (is_free | (self.states == self.numbers(sites))).all(1)
        open_weights = jnp.where(is_open, weights, -jnp.inf)
        sites = self._at(sites, *self.choose(open_weights[None], uniforms[:1]))
        # conditionals of single units, by the states in which all others are the same
        differs = self.states != self.numbers(sites)
        others = differs.sum(1, keepdims=True) - differs
        is_value = self.states[..., None] == np.arange(self.num_values)
        is_neighbor = (others == 0)[..., None] & is_value
        table = jnp.where(is_neighbor, weights[:, None, None], -jnp.inf).max(0)
        # no state can be drawn beside one without a number
        return sites, jnp.where(jnp.isnan(weights).any(), jnp.nan, table)
