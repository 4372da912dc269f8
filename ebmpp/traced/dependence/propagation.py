# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Which units every value of a program reads."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

import jax
from jax import lax
from jax.extend import core

from ebmpp.traced.dependence.flow import Flow, Reads
from ebmpp.traced.dependence.program import Program, Step
from ebmpp.traced.dependence.rules import Known, flow_of
from ebmpp.traced.dependence.unit_sets import UnitSets

_ROUNDS = 8  # of a scan, after which what it carries is taken to read all that it may


def propagate(
    program: Program,
    sets: UnitSets,
    own: Mapping[int, np.ndarray],
    known: Known,
    same: Mapping[int, np.ndarray] | None = None,
) -> tuple[dict[int, np.ndarray], dict[int, Flow]]:
    """The sets of units that slots read, and how: of a step's flow by its first result.

    :param own: what the inputs read.
    :param same: where truth values do not depend on the one unit that they read.
    :return: slots that are left out read nothing.
    """
    reads, flows, same = dict(own), {}, same or {}
    for step in program.steps:
        depends = [i in reads for i in step.inputs]
        if not any(depends):
            continue
        flow = Scan(program, step, known) if step.name == "scan" else flow_of(program, step, known, depends)
        operands = [reads[i] if i in reads else np.zeros(program.shapes[i], int) for i in step.inputs]
        for slot, made in zip(step.outputs, flow.forward(sets, operands), strict=True):
            if slot in same:
                made = np.where(same[slot] & (sets.sizes(made) <= 1), 0, made)
            if made.any():
                reads[slot] = made
        flows[step.outputs[0]] = flow
    return reads, flows


class _Body(NamedTuple):
    """A scan's body as a program, and which inputs are of which kind."""

    program: Program
    own: list[int]
    fixed: list[int]
    """Inputs whose values are known; the program's arguments, in this order."""


class Scan(Flow):
    """A loop over leading axes: its body is looked at for all rounds at once.

    What is carried from round to round is taken to read nothing first, then what the round before says,
    until that changes no more. Where it goes on changing, as in running sums, all results read everything.
    """

    def __init__(self, program: Program, step: Step, known: Known) -> None:
        super().__init__([program.shapes[i] for i in step.inputs], [program.shapes[o] for o in step.outputs])
        self.program, self.step, self.known = program, step, known
        self.first, self.carried = step.params["num_consts"], step.params["num_carry"]

    def forward(self, sets: UnitSets, reads: Reads) -> Reads:
        dependent = {i for i, r in enumerate(reads) if r.any()}
        body = self._classify(dependent)
        whole = self._trace(body.own, body.fixed, self._over_rounds)
        values = self._values(body)
        carry = {self.first + j: self._shifted(reads[self.first + j], None) for j in range(self.carried)}
        for _ in range(_ROUNDS):
            given = {whole.own[_name(i)]: carry[i] if i in carry else reads[i] for i in body.own}
            given = {slot: r for slot, r in given.items() if r.any()}
            inside = Known(whole, [values[i] for i in body.fixed])
            found = propagate(whole, sets, given, inside)[0]
            out = [found.get(o, np.zeros(whole.shapes[o], int)) for o in whole.outputs]
            new = {
                i: sets.union(old, self._shifted(reads[i], out[i - self.first])) for i, old in carry.items()
            }
            if all((new[i] == carry[i]).all() for i in carry):
                self._rely(body, [whole.arguments.index(slot) for slot in inside.relied])
                last = 0 if self.step.params["reverse"] else -1
                return [out[j][last] for j in range(self.carried)] + out[self.carried :]
            carry = new
        return super().forward(sets, reads)

    def _shifted(self, start: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        """What each round is given: the start first, then what the round before made."""
        length = self.step.params["length"]
        made = np.zeros((length, *start.shape), int)
        first, rest, before = (
            (-1, slice(0, -1), slice(1, None))
            if self.step.params["reverse"]
            else (0, slice(1, None), slice(0, -1))
        )
        if length:
            made[first] = start
        if out is not None:
            made[rest] = out[before]
        return made

    def _body(self, *inputs: jax.Array) -> list[jax.Array]:
        return core.jaxpr_as_fun(self.step.params["jaxpr"])(*inputs)

    def _over_rounds(self, *inputs: jax.Array) -> list[jax.Array]:
        axes = [None] * self.first + [0] * (len(inputs) - self.first)
        return jax.vmap(self._body, in_axes=axes)(*inputs)

    def _trace(self, own: list[int], fixed: list[int], fn: Callable) -> Program:
        """``fn`` of all inputs as a program; those neither own nor fixed may be anything."""
        avals, rounds = self.step.params["jaxpr"].in_avals, fn == self._over_rounds
        lead = lambda i: (self.step.params["length"],) if rounds and i >= self.first else ()
        like = [jax.ShapeDtypeStruct((*lead(i), *a.shape), a.dtype) for i, a in enumerate(avals)]
        rest = [i for i in range(len(avals)) if i not in (*own, *fixed)]

        def called(own_values: dict, others: dict, arguments: list) -> list:
            given = {**own_values, **others, **{_name(i): a for i, a in zip(fixed, arguments, strict=True)}}
            return fn(*(given[_name(i)] for i in range(len(avals))))

        pick = lambda which: {_name(i): like[i] for i in which}
        return Program(called, pick(own), pick(rest), [like[i] for i in fixed])

    def _classify(self, dependent: set[int]) -> _Body:
        """Which inputs depend on units, and which are known, what is carried included."""
        fixed = {i for i, slot in enumerate(self.step.inputs) if slot in self.known.values} - dependent
        while True:
            made = _Body(
                self._trace(sorted(dependent), sorted(fixed), self._body), sorted(dependent), sorted(fixed)
            )
            program = made.program
            carried = {self.first + j: program.outputs[j] for j in range(self.carried)}
            more = {i for i, out in carried.items() if program.dependent[out]} - dependent
            less = {i for i, out in carried.items() if program.sources[out] is None} & fixed
            if not more and not less:
                return made
            dependent, fixed = dependent | more, fixed - less - more

    def _values(self, body: _Body) -> dict[int, np.ndarray]:
        """Known inputs, those of all rounds where they differ."""
        values = {i: self.known.values[self.step.inputs[i]] for i in body.fixed}
        carried = [i for i in body.fixed if self.first <= i < self.first + self.carried]
        looped = [i for i in body.fixed if i >= self.first + self.carried]
        if not carried:
            return values
        slots = dict(zip(body.fixed, body.program.arguments, strict=True))
        outputs = [body.program.outputs[i - self.first] for i in carried]

        def one(carry: list, x: list) -> tuple[list, list]:
            given = {slots[i]: v for i, v in values.items()}
            given |= {slots[i]: v for i, v in zip([*carried, *looped], [*carry, *x], strict=True)}
            found = body.program.run(given, outputs)
            return [found[o] for o in outputs], carry

        start, x = [values[i] for i in carried], [values[i] for i in looped]
        rounds, back = self.step.params["length"], self.step.params["reverse"]
        run = jax.jit(lambda start, x: lax.scan(one, start, x, rounds, back)[1])
        made = run(
            [np.asarray(v, body.program.dtypes[slots[i]]) for i, v in zip(carried, start, strict=True)], x
        )
        return values | {i: np.asarray(v) for i, v in zip(carried, made, strict=True)}

    def _rely(self, body: _Body, used: list[int]) -> None:
        """Take down the arguments that known inputs come from, also through what is carried."""
        position = {slot: i for i, slot in zip(body.fixed, body.program.arguments, strict=True)}
        pending, seen = [body.fixed[n] for n in used], set()
        while pending:
            i = pending.pop()
            if i in seen:
                continue
            seen.add(i)
            self.known.relied |= self.program.sources[self.step.inputs[i]] or set()
            if self.first <= i < self.first + self.carried:
                sources = body.program.sources[body.program.outputs[i - self.first]] or ()
                pending.extend(position[slot] for slot in sources)


def _name(i: int) -> str:
    """An input's name; they sort as the numbers do."""
    return f"{i:06d}"
