# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Units drawn one after another where all of them interact, at what one unit changes.

A log density often reads its units through sums first, a regression through ``x @ (z * b)``: values that are
affine in all units together, which the traced program tells. Of these the sweep keeps the present values and,
from one look at the beginning, what each unit adds to them: a unit's conditional then takes K - 1 evaluations
of what comes after the sums, the log density at the present value being known.
"""

from collections.abc import Callable, Mapping
import math
from typing import Any, NamedTuple

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.traced.dependence import Program
from ebmpp.traced.dependence.program import Step
from ebmpp.traced.dependence.rules import in_floats, is_affine
from ebmpp.traced.posterior import Posterior

_MOST = 2**24  # numbers that say what units add


class Carry(NamedTuple):
    """What goes from unit to unit."""

    sites: dict[str, Array]
    sums: dict[int, Array]
    """Present values of slots that are affine in the units, in floats."""
    density: Array
    """The log density of the present values."""
    kept: Array


class OneByOne:
    """Sweeps over units, one at a time.

    :param posterior: the model.
    :param spans: by site, the numbers of its units.
    """

    def __init__(self, posterior: Posterior, spans: Mapping[str, tuple[int, int]]) -> None:
        self.posterior, self.spans = posterior, dict(spans)
        self.size = max((stop for _, stop in spans.values()), default=0)
        program = posterior.program
        self.before, self.sums = _affine(program)
        if self.size * sum(math.prod(program.shapes[s]) for s in self.sums) > _MOST:
            self.before, self.sums = [], []
        steps = program.needed([program.output], [*program.own.values(), *self.sums])
        after = [step for step in steps if any(program.dependent[i] for i in step.inputs)]
        #: slots beside the units that are looked at again and again
        self.around = {i for step in (*after, *self.before) for i in step.inputs if not program.dependent[i]}

    def sweep(
        self,
        sites: Mapping[str, Array],
        given: Mapping[int, Any],
        draw: Callable[[Array, Array], tuple[Array, Array]],
        backward: bool = False,
    ) -> tuple[dict[str, Array], Array]:
        """All units, one after the other.

        :param sites: the block's own sites.
        :param given: values of the program's inputs.
        :param draw: of a unit's number and its log probabilities up to a constant, ``(1, values)``: the
            number of its value, and whether it may be taken, ``(1,)`` both.
        :param backward: the last unit first.
        :return: the sites, and how many units kept their values.
        """
        around = dict(given) | self.posterior.program.run(given, self.around)
        sums, shares = self._shares(sites, around)
        density = self._density(around, sites, sums)
        carry = Carry(dict(sites), sums, density, jnp.zeros((), jnp.int32))
        order = list(self.spans.items())
        for name, (start, stop) in reversed(order) if backward else order:

            def one(i: Array, carry: Carry, name: str = name, start: int = start, stop: int = stop) -> Carry:
                unit = stop - 1 - i if backward else start + i
                mine = {slot: share[unit] for slot, share in shares.items()}
                return self._unit(carry, around, mine, name, unit, unit - start, draw)

            carry = lax.fori_loop(0, stop - start, one, carry)
        return carry.sites, carry.kept

    def _unit(
        self,
        carry: Carry,
        around: Mapping[int, Any],
        shares: Mapping[int, Array],
        name: str,
        unit: Array,
        place: Array,
        draw: Callable[[Array, Array], tuple[Array, Array]],
    ) -> Carry:
        value = carry.sites[name]
        now = value.ravel()[place]
        table, valid = (a.reshape(len(a), -1) for a in self.posterior.values[name])
        column = jnp.minimum(place, table.shape[1] - 1)
        table, valid = jnp.asarray(table, value.dtype)[:, column], jnp.asarray(valid)[:, column]
        number, count = ((table == now) & valid).argmax(), len(table)

        def moved(k: Array) -> tuple[dict[str, Array], dict[int, Array]]:
            new = value.ravel().at[place].set(table[k]).reshape(value.shape)
            step = (table[k] - now).astype(jnp.result_type(float))
            return {**carry.sites, name: new}, {s: v + step * shares[s] for s, v in carry.sums.items()}

        others = jnp.arange(count - 1) + (jnp.arange(count - 1) >= number)
        at = lambda k: self._density(around, *moved(k))
        found = at(others[0])[None] if count == 2 else lax.map(at, others, batch_size=count)
        each = jnp.full(count, carry.density).at[others].set(found)
        chosen, sound = draw(unit, jnp.where(valid, each, -jnp.inf)[None])
        k = jnp.where(sound[0], chosen[0], number)
        sites, sums = moved(k)
        return Carry(sites, sums, each[k], carry.kept + ~sound[0])

    def _density(
        self, around: Mapping[int, Any], sites: Mapping[str, Array], sums: Mapping[int, Array]
    ) -> Array:
        program = self.posterior.program
        values = {program.own[name]: _cast(v, program, program.own[name]) for name, v in sites.items()}
        values |= {slot: _cast(v, program, slot) for slot, v in sums.items()}
        return program.run({**around, **values}, [program.output])[program.output]

    def _shares(
        self, sites: Mapping[str, Array], around: Mapping[int, Any]
    ) -> tuple[dict[int, Array], dict[int, Array]]:
        """Values of the sums, and what each unit adds to them, ``(units, *shape)``."""
        if not self.sums:
            return {}, {}
        program = self.posterior.program
        values, shares = program.constants | dict(around), _Shares(self.size)
        for name, (start, _) in self.spans.items():
            slot = program.own[name]
            values[slot] = sites[name].astype(jnp.result_type(float))
            shares.own[slot] = start, jnp.ones(program.shapes[slot], values[slot].dtype)
        for step in self.before:
            operands = [values[i] for i in step.inputs]
            shares.through(step, operands)
            values |= zip(step.outputs, in_floats(step, operands), strict=True)
        return {s: values[s] for s in self.sums}, {s: shares.of(s) for s in self.sums}


class _Shares:
    """What units add to values, step by step.

    :param size: how many units there are.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        #: of values whose elements are one unit's each, in order: the first unit, and what each one adds
        self.own: dict[int, tuple[int, Array]] = {}
        #: of others, ``(units, *shape)``
        self.all: dict[int, Array] = {}

    def of(self, slot: int) -> Array:
        """What all units add to a slot, ``(units, *shape)``."""
        if slot not in self.all:
            start, each = self.own[slot]
            place = jnp.arange(each.size)
            spread = jnp.zeros((self.size, each.size), each.dtype).at[start + place, place].set(each.ravel())
            self.all[slot] = spread.reshape(self.size, *each.shape)
        return self.all[slot]

    def through(self, step: Step, operands: list[Any]) -> None:
        """Take down what units add to a step's results.

        :param operands: the values of its operands.
        """
        depends = [i for i, slot in enumerate(step.inputs) if slot in self.own or slot in self.all]
        single = all(step.inputs[i] in self.own for i in depends)
        starts = {self.own[step.inputs[i]][0] for i in depends} if single else set()
        if step.name == "dot_general" and single and operands[depends[0]].ndim == 1:
            self.all[step.outputs[0]] = self._rows(step, operands, depends[0])
            return
        if len(starts) == 1 and step.name in _IN_ORDER:
            each = [self.own[step.inputs[i]][1] for i in depends]
            made = _pushed(step, operands, depends, each)
            if all(a.size == e.size for a in made for e in each):
                self.own |= {o: (next(iter(starts)), a) for o, a in zip(step.outputs, made, strict=True)}
                return
        each = [self.of(step.inputs[i]) for i in depends]
        made = jax.vmap(lambda *tangents: _pushed(step, operands, depends, list(tangents)))(*each)
        self.all |= zip(step.outputs, made, strict=True)

    def _rows(self, step: Step, operands: list[Any], vector: int) -> Array:
        """Of a matrix times units: a column of the matrix each, and no product of two matrices."""
        start, each = self.own[step.inputs[vector]]
        summed, batch = (sides[1 - vector] for sides in step.params["dimension_numbers"])
        if len(summed) != 1 or batch:
            return jax.vmap(lambda t: _pushed(step, operands, [vector], [t])[0])(self.of(step.inputs[vector]))
        matrix = jnp.moveaxis(jnp.asarray(operands[1 - vector], each.dtype), summed[0], 0)
        rows = matrix * each.reshape(-1, *(1,) * (matrix.ndim - 1))
        return jnp.zeros((self.size, *rows.shape[1:]), rows.dtype).at[start : start + len(rows)].set(rows)


#: Steps that keep elements in their order.
_IN_ORDER = frozenset(
    "add add_any broadcast_in_dim convert_element_type copy div expand_dims mul neg reshape squeeze "
    "sub".split()
)


def _pushed(step: Step, operands: list[Any], depends: list[int], tangents: list[Array]) -> list[Array]:
    """Tangents of an affine step's results."""

    def made(*moving: Array) -> list[Array]:
        values = list(operands)
        for i, v in zip(depends, moving, strict=True):
            values[i] = v
        return list(in_floats(step, values))

    return jax.jvp(made, tuple(operands[i] for i in depends), tuple(tangents))[1]


def _cast(value: Array, program: Program, slot: int) -> Array:
    dtype = program.dtypes[slot]
    if jnp.issubdtype(dtype, jnp.integer) and jnp.issubdtype(value.dtype, jnp.floating):
        value = jnp.rint(value)
    return value.astype(dtype)


def _affine(program: Program) -> tuple[list[Step], list[int]]:
    """The steps that are affine in all units together, and those of their results that others look at."""
    affine, before, wanted = {*program.own.values()}, [], set()
    for step in program.steps:
        depends = [i for i, slot in enumerate(step.inputs) if program.dependent[slot]]
        inside = depends and all(step.inputs[i] in affine for i in depends)
        if inside and is_affine(program, step, depends):
            affine.update(step.outputs)
            before.append(step)
        elif depends:
            wanted.update(slot for slot in step.inputs if slot in affine)
    wanted |= {program.output} & affine
    return before, sorted(wanted - {*program.own.values()})
