# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The sets of units that every value of a program reads."""

from collections.abc import Callable

import numpy as np

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp

from ebmpp.dependence.flow import Flow, ReadSets
from ebmpp.dependence.program import Equation, Program, SlotValues
from ebmpp.dependence.rules import Known, flow_of
from ebmpp.dependence.unit_sets import UnitSets

_MOST_ROUNDS = 8  # of a scan's fixed point, after which all results read everything
#: By slot the sets of units that its elements read, and by the first result of an equation
#: its flow.
Propagated = tuple[dict[int, np.ndarray], dict[int, Flow]]


def propagate(
    program: Program,
    sets: UnitSets,
    units: SlotValues,
    known: Known,
    constant: SlotValues,
) -> Propagated:
    """Return the sets of units that slots read, if any, and each equation's flow by its first result.

    :param units: sets that the inputs read.
    :param constant: by slot, where a truth value is the same for all values of the one
        unit that it reads.
    """
    reads = dict(units)
    flows = {}
    for eqn in program.equations:
        depends = [i in reads for i in eqn.inputs]
        if not any(depends):
            continue
        flow = (
            Scan(program, eqn, known)
            if eqn.name == "scan"
            else flow_of(program, eqn, known, depends)
        )
        operands = [
            reads[i] if i in reads else np.zeros(program.shapes[i], int)
            for i in eqn.inputs
        ]
        for slot, read in zip(eqn.outputs, flow.forward(sets, operands), strict=True):
            if slot in constant:
                read = np.where(constant[slot] & (sets.sizes(read) <= 1), 0, read)
            if read.any():
                reads[slot] = read
        flows[eqn.outputs[0]] = flow
    return reads, flows


class Scan(Flow):
    """Dependence of a loop over leading axes: the fixed point over all rounds at once.

    A carry starts out reading nothing, and then reads what the round before does, until
    that no longer changes. Where it keeps changing, as in running sums, all results
    read everything.
    """

    def __init__(self, program: Program, eqn: Equation, known: Known) -> None:
        super().__init__(
            [program.shapes[i] for i in eqn.inputs],
            [program.shapes[o] for o in eqn.outputs],
        )
        self.program = program
        self.eqn = eqn
        self.known = known
        self.length = eqn.params["length"]
        self.reverse = eqn.params["reverse"]
        self.first = eqn.params["num_consts"]
        num_carry = eqn.params["num_carry"]
        self.carried = range(self.first, self.first + num_carry)
        self._body = core.jaxpr_as_fun(eqn.params["jaxpr"])

    def forward(self, sets: UnitSets, reads: ReadSets) -> ReadSets:
        dependent, values = self._classify({i for i, r in enumerate(reads) if r.any()})
        over_rounds = jax.vmap(
            self._body, [None if i < self.first else 0 for i in range(len(reads))]
        )
        rounds = self._trace(dependent, list(values), over_rounds, stacked=True)
        nothing = {
            i: np.zeros((self.length, *reads[i].shape), int) for i in self.carried
        }
        carry = {i: self._shifted(reads[i], nothing[i]) for i in self.carried}
        for _ in range(_MOST_ROUNDS):
            units = {rounds.sites[i]: carry.get(i, reads[i]) for i in dependent}
            units = {slot: r for slot, r in units.items() if r.any()}
            inside = Known(rounds, list(values.values()))
            reads_inside = propagate(rounds, sets, units, inside, {})[0]
            out = [
                reads_inside.get(o, np.zeros(rounds.shapes[o], int))
                for o in rounds.outputs
            ]
            shifted = {
                i: self._shifted(reads[i], out[i - self.first]) for i in self.carried
            }
            new = {i: sets.union(carry[i], shifted[i]) for i in self.carried}
            if all((new[i] == carry[i]).all() for i in carry):
                for i, slot in zip(values, rounds.arguments, strict=True):
                    if slot in inside.relied:
                        self.known.relied |= self.program.sources[self.eqn.inputs[i]]
                last = [
                    out[i][0 if self.reverse else -1] for i in range(len(self.carried))
                ]
                return last + out[len(self.carried) :]
            carry = new
        return super().forward(sets, reads)

    def _shifted(self, start: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Return the carry into each round: the start first, then the results of the round before."""

        def in_order(rounds):
            return rounds[::-1] if self.reverse else rounds

        return in_order(
            np.concatenate([start[None], in_order(out)[:-1]])[: self.length]
        )

    def _trace(
        self,
        dependent: list[int],
        known: list[int],
        fn: Callable,
        stacked: bool = False,
    ) -> Program:
        """Return ``fn`` of all inputs as a program; those neither dependent nor known are siblings."""
        avals = self.eqn.params["jaxpr"].in_avals

        def lead(i):
            return (self.length,) if stacked and i >= self.first else ()

        avals_of = {
            i: jax.ShapeDtypeStruct((*lead(i), *a.shape), a.dtype)
            for i, a in enumerate(avals)
        }

        def at(positions):
            return {i: avals_of[i] for i in positions}

        def by_position(sites: dict, siblings: dict, arguments: list) -> list:
            values = sites | siblings | dict(zip(known, arguments, strict=True))
            return fn(*(values[i] for i in avals_of))

        rest = [i for i in avals_of if i not in dependent and i not in known]
        return Program(
            by_position, at(dependent), at(rest), [avals_of[i] for i in known]
        )

    def _classify(self, dependent: set[int]) -> tuple[list[int], dict[int, np.ndarray]]:
        """Return the inputs that depend on units, through the carry too, and known values of others.

        What is carried is known, in each round, if it follows from its start alone, as
        a counter does.
        """
        while True:
            body = self._trace(sorted(dependent), [], self._body)
            more = {
                i for i in self.carried if body.depends(body.outputs[i - self.first])
            } - dependent
            if not more:
                break
            dependent = dependent | more
        values = {}
        for i, slot in enumerate(self.eqn.inputs):
            if (
                i not in dependent
                and (value := self.known.values.get(slot)) is not None
            ):
                values[i] = (
                    self._per_round(body, i, value) if i in self.carried else value
                )
        return sorted(dependent), {
            i: value for i, value in values.items() if value is not None
        }

    def _per_round(self, body: Program, i: int, start: np.ndarray) -> np.ndarray | None:
        """Return what input ``i`` is in each round; None where it follows from more than its start."""
        slot = body.siblings[i]
        out = body.outputs[i - self.first]
        if not body.sources[out] <= body.sources[slot]:
            return None

        def advance(carry, _):
            return (body.run({slot: carry}, [out])[out], carry)

        first = jnp.asarray(start, body.dtypes[slot])
        return np.asarray(lax.scan(advance, first, None, self.length, self.reverse)[1])
