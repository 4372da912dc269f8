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
import math
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.dependence.program import Equation, Program
from ebmpp.dependence.rules import in_floats, is_affine
from ebmpp.traced.block import SiteValues
from ebmpp.traced.sweep.conditionals import ChainInputs, Conditionals, Visit, Visited
from ebmpp.traced.sweep.posterior import ModelDensity

_MOST_SHARES = 2**24  # numbers
#: Steps that keep elements in their order.
_IN_ORDER = frozenset(
    "add add_any broadcast_in_dim convert_element_type copy div expand_dims mul neg "
    "reshape squeeze sub".split()
)


class _SequentialState(NamedTuple):
    """The state of a chain between two units."""

    sites: dict[str, Array]
    sums: dict[int, Array]
    """Present values of slots that are affine in the units, in floats."""
    density: Array
    """The log density of the present values."""


class Sequential(Conditionals):
    """Conditionals of units in order, each a layer by itself.

    :param posterior: the log density.
    """

    def __init__(self, posterior: ModelDensity) -> None:
        super().__init__(
            posterior,
            np.arange(sum(math.prod(posterior.shapes[s]) for s in posterior.sites)),
        )
        program = posterior.program
        self.before, self.sums = _affine_part(program)
        if (
            self.size * sum(math.prod(program.shapes[s]) for s in self.sums)
            > _MOST_SHARES
        ):
            self.before = []
            self.sums = []
        equations = program.needed(
            [program.output], [*program.sites.values(), *self.sums]
        )
        after = [eqn for eqn in equations if any(map(program.depends, eqn.inputs))]
        #: slots that do not depend on units and are read repeatedly
        self.fixed = {
            i
            for eqn in (*after, *self.before)
            for i in eqn.inputs
            if not program.depends(i)
        }

    def visit(
        self,
        fn: Visit,
        chains: Sequence[ChainInputs],
        carry: Any,
        backward: bool = False,
    ) -> Visited:
        states, fixed = zip(*(self._start(*chain) for chain in chains), strict=True)
        for name, (start, stop) in (
            reversed(self.spans.items()) if backward else self.spans.items()
        ):

            def step(
                i: Array,
                loop: tuple,
                name: str = name,
                start: int = start,
                stop: int = stop,
            ) -> tuple:
                states, carry = loop
                unit = stop - 1 - i if backward else start + i
                pairs = zip(states, fixed, strict=True)
                visited = [
                    self._visit_unit(s, *f, name, unit, unit - start) for s, f in pairs
                ]
                picked, carry = fn(
                    unit, unit[None], [logits for logits, _ in visited], carry
                )
                return tuple(
                    take(*c) for (_, take), c in zip(visited, picked, strict=True)
                ), carry

            states, carry = lax.fori_loop(0, stop - start, step, (states, carry))
        return [state.sites for state in states], carry

    def _start(
        self, sites: SiteValues, inputs: Mapping[int, Any]
    ) -> tuple[_SequentialState, tuple]:
        """Return a chain's state, values of slots that do not depend on units, and shares in the sums."""
        program = self.posterior.program
        shares = _Shares(self.size)
        fixed = dict(inputs) | program.run(inputs, self.fixed)
        values = program.constants | fixed
        for name, (start, _) in self.spans.items():
            slot = program.sites[name]
            values[slot] = sites[name].astype(jnp.result_type(float))
            shares.ordered[slot] = (
                start,
                jnp.ones(program.shapes[slot], values[slot].dtype),
            )
        for eqn in self.before:
            operands = [values[i] for i in eqn.inputs]
            shares.propagate(eqn, operands)
            values |= zip(eqn.outputs, in_floats(eqn, operands), strict=True)
        sums = {s: values[s] for s in self.sums}
        state = _SequentialState(dict(sites), sums, self._density(fixed, sites, sums))
        return state, (fixed, {s: shares.dense(s) for s in self.sums})

    def _visit_unit(
        self,
        state: _SequentialState,
        fixed: Mapping,
        shares: Mapping,
        name: str,
        unit: Array,
        place: Array,
    ) -> tuple[Array, Callable[[Array, Array], _SequentialState]]:
        """Return a unit's log probabilities, and the state with its new value, by number, if accepted."""
        value = state.sites[name]
        share = {slot: v[unit] for slot, v in shares.items()}
        present = value.ravel()[place]
        table, valid = (a.reshape(len(a), -1) for a in self.posterior.values[name])
        column = jnp.minimum(place, table.shape[1] - 1)
        table = jnp.asarray(table, value.dtype)[:, column]
        valid = jnp.asarray(valid)[:, column]
        number = ((table == present) & valid).argmax()
        count = len(table)

        def moved(k: Array) -> tuple[dict[str, Array], dict[int, Array]]:
            new = value.ravel().at[place].set(table[k]).reshape(value.shape)
            step = (table[k] - present).astype(jnp.result_type(float))
            return {**state.sites, name: new}, {
                s: v + step * share[s] for s, v in state.sums.items()
            }

        others = jnp.arange(count - 1) + (jnp.arange(count - 1) >= number)

        def density(k):
            return self._density(fixed, *moved(k))

        moves = (
            density(others[0])[None]
            if count == 2
            else lax.map(density, others, batch_size=count)
        )
        densities = jnp.full(count, state.density).at[others].set(moves)

        def take(numbers: Array, accepted: Array) -> _SequentialState:
            k = jnp.where(accepted[0], numbers[0], number)
            return _SequentialState(*moved(k), densities[k])

        return jnp.where(valid, densities, -jnp.inf)[None], take

    def _density(
        self, fixed: Mapping[int, Any], sites: SiteValues, sums: Mapping[int, Array]
    ) -> Array:
        program = self.posterior.program
        slots = {program.sites[name]: v for name, v in sites.items()} | dict(sums)
        cast = {slot: _cast(v, program.dtypes[slot]) for slot, v in slots.items()}
        return program.run({**fixed, **cast}, [program.output])[program.output]


class _Shares:
    """Shares of the units in values, propagated through each equation.

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
            place = jnp.arange(share.size)
            spread = jnp.zeros((self.size, share.size), share.dtype)
            spread = spread.at[start + place, place].set(share.ravel())
            self._dense[slot] = spread.reshape(self.size, *share.shape)
        return self._dense[slot]

    def propagate(self, eqn: Equation, operands: list[Any]) -> None:
        """Record the shares in an equation's results.

        :param operands: values of its operands.
        """
        depends = [
            i
            for i, slot in enumerate(eqn.inputs)
            if slot in self.ordered or slot in self._dense
        ]
        slots = [eqn.inputs[i] for i in depends]
        ordered = all(slot in self.ordered for slot in slots)
        starts = {self.ordered[slot][0] for slot in slots} if ordered else set()
        if eqn.name == "dot_general" and ordered and operands[depends[0]].ndim == 1:
            summed, batch = (
                sides[1 - depends[0]] for sides in eqn.params["dimension_numbers"]
            )
            # a column of the matrix per unit, without a product
            if len(summed) == 1 and not batch:
                start, share = self.ordered[slots[0]]
                matrix = jnp.moveaxis(
                    jnp.asarray(operands[1 - depends[0]], share.dtype), summed[0], 0
                )
                rows = matrix * share.reshape(-1, *(1,) * (matrix.ndim - 1))
                spread = jnp.zeros((self.size, *rows.shape[1:]), rows.dtype)
                self._dense[eqn.outputs[0]] = spread.at[start : start + len(rows)].set(
                    rows
                )
                return
        elif len(starts) == 1 and eqn.name in _IN_ORDER:
            shares = [self.ordered[slot][1] for slot in slots]
            results = _pushed(eqn, operands, depends, shares)
            if all(a.size == share.size for a in results for share in shares):
                self.ordered |= {
                    o: (min(starts), a)
                    for o, a in zip(eqn.outputs, results, strict=True)
                }
                return

        def push(*tangents):
            return _pushed(eqn, operands, depends, list(tangents))

        self._dense |= zip(
            eqn.outputs, jax.vmap(push)(*map(self.dense, slots)), strict=True
        )


def _pushed(
    eqn: Equation, operands: list[Any], depends: list[int], tangents: list[Array]
) -> list[Array]:
    """Return the tangents of an affine equation's results."""

    def results(*moving: Array) -> list[Array]:
        values = list(operands)
        for i, v in zip(depends, moving, strict=True):
            values[i] = v
        return list(in_floats(eqn, values))

    return jax.jvp(results, tuple(operands[i] for i in depends), tuple(tangents))[1]


def _cast(value: Array, dtype: Any) -> Array:
    is_rounded = jnp.issubdtype(dtype, jnp.integer) and jnp.issubdtype(
        value.dtype, jnp.floating
    )
    return (jnp.rint(value) if is_rounded else value).astype(dtype)


def _affine_part(program: Program) -> tuple[list[Equation], list[int]]:
    """Return the equations that are affine in all units jointly, and the results that others read."""
    affine = {*program.sites.values()}
    before = []
    read = {program.output}
    for eqn in program.equations:
        depends = program.dependent(eqn)
        inside = depends and all(eqn.inputs[i] in affine for i in depends)
        if inside and is_affine(program, eqn, depends):
            affine.update(eqn.outputs)
            before.append(eqn)
        elif depends:
            read.update(eqn.inputs)
    return before, sorted((read & affine) - {*program.sites.values()})
