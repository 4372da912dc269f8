# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Units drawn sequentially where all of them interact, at the cost of the changes of one unit.

A log density often reads its units through sums first, as a regression does through
``x @ (z * b)``: values that are affine in all units jointly, which is read off the
traced program. A sweep keeps the present values of these sums and the share that each
unit adds to them. A unit's conditional then takes K - 1 evaluations of what follows the
sums, because the log density at the present value is known.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import Numbers, SiteArrays, expand
from ebmpp.dependence.program import Equation, Program, SlotValues
from ebmpp.dependence.rules import SUMS, in_floats, is_affine
from ebmpp.traced.block import SiteValues
from ebmpp.traced.sweep.conditionals import ChainInputs, Conditionals, Visit, Visited
from ebmpp.traced.sweep.posterior import ModelDensity

_MOST_SHARES = 2**24  # numbers
#: Primitives that keep elements in their order.
_IN_ORDER = frozenset(
    "add add_any broadcast_in_dim convert_element_type copy div expand_dims mul neg "
    "reshape squeeze sub".split()
)


class _SequentialState(NamedTuple):
    """The state of a chain between two units."""

    sites: SiteArrays
    sums: dict[int, Array]
    """Present values of slots that are affine in the units, in floats."""
    density: Array
    """The log density of the present values."""


class _Fixed(NamedTuple):
    """Values of one chain that do not change with its units."""

    values: SlotValues
    """Of slots that do not depend on units."""
    shares: dict[int, Array]
    """What each unit adds to the sums, ``(units, *shape)``."""


class Sequential(Conditionals):
    """Conditionals of units in order, each a layer by itself.

    :param posterior: the log density.
    """

    def __init__(self, posterior: ModelDensity) -> None:
        program = posterior.program
        size = sum(map(program.size, program.sites.values()))
        super().__init__(posterior, np.arange(size))
        self.before, self.sums = affine_part(program)
        if size * sum(map(program.size, self.sums)) > _MOST_SHARES:
            self.before = []
            self.sums = []
        repeated = filter(program.dependent, program.equations)
        read = {slot for eqn in repeated for slot in eqn.inputs}
        #: slots that do not depend on units and are read repeatedly
        self.fixed = {slot for slot in read if not program.depends(slot)}

    def visit(
        self,
        fn: Visit,
        chains: Sequence[ChainInputs],
        carry: Array,
        backward: bool = False,
    ) -> Visited:
        states, fixed = zip(*(self._start(*chain) for chain in chains))
        loop = states, carry

        def visit_unit(name, i, loop):
            states, carry = loop
            start, stop = self.spans[name]
            number, i = jnp.divmod(i, stop - start)  # of passes, and within one
            unit = stop - 1 - i if backward else start + i
            visits = [
                self._visit_unit(*chain, name, unit) for chain in zip(states, fixed)
            ]
            logits, takes = zip(*visits)
            # each pass draws from other random words
            layer = unit + number * self.size
            choices, carry = fn(layer, unit[None], logits, carry)
            states = [take(*choice) for take, choice in zip(takes, choices)]
            return tuple(states), carry

        for name in reversed(self.spans) if backward else self.spans:
            start, stop = self.spans[name]
            count = self.num_passes * (stop - start)
            loop = lax.fori_loop(0, count, partial(visit_unit, name), loop)
        states, carry = loop
        return [state.sites for state in states], carry

    def _start(
        self, sites: SiteValues, inputs: SlotValues
    ) -> tuple[_SequentialState, _Fixed]:
        program = self.posterior.program
        shares = _Shares(self.size)
        fixed = {**inputs, **program.run(inputs, self.fixed)}
        values = program.constants | fixed
        for name, (start, _) in self.spans.items():
            slot = program.sites[name]
            values[slot] = sites[name].astype(float)
            shares.ordered[slot] = (start, jnp.ones_like(values[slot]))
        for eqn in self.before:
            operands = [values[i] for i in eqn.inputs]
            shares.propagate(eqn, operands)
            values |= zip(eqn.outputs, in_floats(eqn, operands))
        sums = {slot: values[slot] for slot in self.sums}
        density = self._density(fixed, sites, sums)
        state = _SequentialState(dict(sites), sums, density)
        return state, _Fixed(fixed, {slot: shares.dense(slot) for slot in self.sums})

    def _visit_unit(
        self,
        state: _SequentialState,
        fixed: _Fixed,
        name: str,
        unit: Array,
    ) -> tuple[Array, Callable[[Array, Numbers], _SequentialState]]:
        """Return a unit's log probabilities, and a function of its choice to the new state."""
        place = unit - self.spans[name][0]
        value = state.sites[name]
        share = {slot: v[unit] for slot, v in fixed.shares.items()}
        present = value.ravel()[place]
        table, valid = (a.reshape(len(a), -1) for a in self.posterior.values[name])
        column = jnp.minimum(place, table.shape[1] - 1)
        table = jnp.asarray(table, value.dtype)[:, column]
        valid = jnp.asarray(valid)[:, column]
        number = ((table == present) & valid).argmax()
        count = len(table)

        def moved(k):
            flat = value.ravel().at[place].set(table[k])
            new = flat.reshape(value.shape)
            change = (table[k] - present).astype(float)
            sums = {slot: v + change * share[slot] for slot, v in state.sums.items()}
            return {**state.sites, name: new}, sums

        def density(k):
            return self._density(fixed.values, *moved(k))

        others = jnp.arange(count - 1)
        others += others >= number
        if count == 2:
            at_others = density(others[0])[None]
        else:
            at_others = lax.map(density, others, batch_size=count)
        densities = jnp.full(count, state.density).at[others].set(at_others)

        def take(numbers, accepted):
            k = jnp.where(accepted[0], numbers[0], number)
            return _SequentialState(*moved(k), densities[k])

        return jnp.where(valid, densities, -jnp.inf)[None], take

    def _density(
        self, fixed: SlotValues, sites: SiteValues, sums: Mapping[int, Array]
    ) -> Array:
        program = self.posterior.program
        values = self.posterior.inputs_at(sites, fixed)
        for slot, value in sums.items():
            dtype = program.dtypes[slot]
            if jnp.issubdtype(dtype, np.integer):
                value = jnp.rint(value)
            values[slot] = value.astype(dtype)
        return program.run(values, [program.output])[program.output]


class _Shares:
    """Shares of the units in values, propagated equation by equation.

    :param size: number of units.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        #: for values with one element per unit, in order: the first unit, and the share
        #: of each
        self.ordered: dict[int, tuple[int, Array]] = {}
        self._dense: dict[int, Array] = {}

    def dense(self, slot: int) -> Array:
        """Return the shares of all units in a slot, ``(units, *shape)``."""
        if slot not in self._dense:
            start, share = self.ordered[slot]
            dense = self._among_all(start, jnp.diag(share.ravel()))
            self._dense[slot] = dense.reshape(self.size, *share.shape)
        return self._dense[slot]

    def _among_all(self, start: int, rows: Array) -> Array:
        """Return the rows of some units in order, with zeros for all others."""
        blank = jnp.zeros((self.size, *rows.shape[1:]), rows.dtype)
        return blank.at[start : start + len(rows)].set(rows)

    def propagate(self, eqn: Equation, operands: list[Array]) -> None:
        """Record the shares in an equation's results.

        :param operands: values of its operands.
        """
        known = {*self.ordered, *self._dense}
        moving = [i for i, slot in enumerate(eqn.inputs) if slot in known]
        slots = [eqn.inputs[i] for i in moving]
        if all(slot in self.ordered for slot in slots):
            if eqn.name == "dot_general" and self._multiply(eqn, operands, moving[0]):
                return
            if eqn.name in _IN_ORDER and self._keep_order(eqn, operands, moving):
                return

        push = jax.vmap(partial(_pushed, eqn, operands, moving))
        results = push(*map(self.dense, slots))
        self._dense |= zip(eqn.outputs, results)

    def _multiply(self, eqn: Equation, operands: list[Array], moving: int) -> bool:
        """Record a vector's product with a matrix, which has a row per unit, if it is one."""
        other = 1 - moving
        summed, batch = (sides[other] for sides in eqn.params["dimension_numbers"])
        if operands[moving].ndim != 1 or len(summed) != 1 or batch:
            return False
        start, share = self.ordered[eqn.inputs[moving]]
        matrix = jnp.asarray(operands[other], share.dtype)
        matrix = jnp.moveaxis(matrix, summed[0], 0)
        rows = matrix * expand(share, matrix)
        self._dense[eqn.outputs[0]] = self._among_all(start, rows)
        return True

    def _keep_order(
        self, eqn: Equation, operands: list[Array], moving: list[int]
    ) -> bool:
        """Record results with one element per unit, of the same units in order, if they are."""
        starts, shares = zip(*(self.ordered[eqn.inputs[i]] for i in moving))
        if len(set(starts)) != 1:
            return False
        results = _pushed(eqn, operands, moving, *shares)
        if {a.size for a in results} != {share.size for share in shares}:
            return False
        for slot, share in zip(eqn.outputs, results):
            self.ordered[slot] = (starts[0], share)
        return True


def _pushed(
    eqn: Equation, operands: list[Array], moving: list[int], *tangents: Array
) -> list[Array]:
    """Return the tangents of an affine equation's results."""

    def results(*primals):
        values = list(operands)
        for i, v in zip(moving, primals):
            values[i] = v
        return list(in_floats(eqn, values))

    primals = tuple(operands[i] for i in moving)
    return jax.jvp(results, primals, tangents)[1]


def affine_part(program: Program) -> tuple[list[Equation], list[int]]:
    """Return the equations affine in all units, and their sums over units that others read.

    Others of their results take no longer to compute again than to update.
    """
    units = {*program.sites.values()}
    affine = set(units)
    before = []
    summed = set()
    read = {program.output}
    for eqn in program.equations:
        depends = program.dependent(eqn)
        inside = depends and all(eqn.inputs[i] in affine for i in depends)
        if inside and is_affine(program, eqn, depends):
            affine.update(eqn.outputs)
            if eqn.name in SUMS or not summed.isdisjoint(eqn.inputs):
                summed.update(eqn.outputs)
            before.append(eqn)
        elif depends:
            read.update(eqn.inputs)
    return before, sorted(read & summed)
