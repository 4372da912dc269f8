# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The sets of units that every value of a program reads."""

from collections.abc import Iterable

import numpy as np

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp

from ebmpp.dependence.flow import Flow, ReadSets
from ebmpp.dependence.program import Equation, Program, SlotValues, scan_body
from ebmpp.dependence.rules import Known, flow_of
from ebmpp.dependence.unit_sets import UnitSets

_MOST_ROUNDS = 8  # of a scan's fixed point, after which all results read everything
#: By slot the sets of units that its elements read, and by the first result of an
#: equation its flow.
Propagated = tuple[dict[int, np.ndarray], dict[int, Flow]]


def propagate(
    program: Program,
    sets: UnitSets,
    units: SlotValues,
    known: Known,
    constant: SlotValues,
) -> Propagated:
    """Return the sets of units that slots read, and each equation's flow by its first result.

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
        is_scan = eqn.name == "scan"
        flow = Scan(eqn, known) if is_scan else flow_of(eqn, known, depends)
        operands = [_read_at(program, reads, slot) for slot in eqn.inputs]
        for slot, read in zip(eqn.outputs, flow.forward(sets, operands)):
            if slot in constant:
                read = np.where(constant[slot] & (sets.sizes(read) <= 1), 0, read)
            if read.any():
                reads[slot] = read
        flows[eqn.outputs[0]] = flow
    return reads, flows


def _read_at(program: Program, reads: SlotValues, slot: int) -> np.ndarray:
    """Return the sets that a slot reads, empty where it is not listed."""
    return reads[slot] if slot in reads else np.zeros(program.shapes[slot], int)


class Scan(Flow):
    """Dependence of a loop over leading axes: the fixed point over all rounds at once.

    A carry starts out reading nothing, and then reads what the round before does, until
    that no longer changes. Where it keeps changing, as in running sums, all results
    read everything.
    """

    def __init__(self, eqn: Equation, known: Known) -> None:
        super().__init__(eqn)
        params = eqn.params
        self.known = known
        self.length = params["length"]
        self.reverse = params["reverse"]
        self.first = params["num_consts"]
        self.carried = range(self.first, self.first + params["num_carry"])

    def forward(self, sets: UnitSets, reads: ReadSets) -> ReadSets:
        dependent, values = self._classify({i for i, r in enumerate(reads) if r.any()})
        rounds = self._all_rounds(dependent, list(values))
        carry = {}
        for i in self.carried:
            nothing = np.zeros((self.length, *reads[i].shape), int)
            carry[i] = self._shifted(reads[i], nothing)
        for _ in range(_MOST_ROUNDS):
            units = {rounds.sites[i]: carry.get(i, reads[i]) for i in dependent}
            units = {slot: r for slot, r in units.items() if r.any()}
            known = Known(rounds, list(values.values()))
            reads_inside, _ = propagate(rounds, sets, units, known, {})
            out = [_read_at(rounds, reads_inside, slot) for slot in rounds.outputs]
            joined = {}
            for i in self.carried:
                shifted = self._shifted(reads[i], out[i - self.first])
                joined[i] = sets.union(carry[i], shifted)
            if all((joined[i] == carry[i]).all() for i in carry):
                self._rely_on(values, known)
                last = 0 if self.reverse else -1
                count = len(self.carried)
                return [r[last] for r in out[:count]] + out[count:]
            carry = joined
        return super().forward(sets, reads)

    def _rely_on(self, positions: Iterable[int], inside: Known) -> None:
        """Record the inputs, of those at ``positions``, on whose values the rounds rely."""
        for i, slot in zip(positions, inside.program.arguments):
            if slot in inside.relied:
                self.known.relied |= self.known.program.sources[self.eqn.inputs[i]]

    def _shifted(self, start: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Return the carry into each round: the start, then the results of the round before."""
        if self.reverse:
            return np.concatenate([out[1:], start[None]])[: self.length]
        return np.concatenate([start[None], out[:-1]])[: self.length]

    def _all_rounds(self, dependent: list[int], known: list[int]) -> Program:
        """Return all rounds as a program, whose inputs neither dependent nor known are siblings."""
        body = self.eqn.params["jaxpr"]
        axes = [None if i < self.first else 0 for i in range(len(body.in_avals))]
        shapes = {}
        for i, (aval, axis) in enumerate(zip(body.in_avals, axes)):
            lead = () if axis is None else (self.length,)
            shapes[i] = jax.ShapeDtypeStruct((*lead, *aval.shape), aval.dtype)

        def by_position(sites, siblings, arguments):
            values = sites | siblings | dict(zip(known, arguments))
            return jax.vmap(core.jaxpr_as_fun(body), axes)(*map(values.get, shapes))

        sites = {i: shapes[i] for i in dependent}
        rest = {i: a for i, a in shapes.items() if i not in (*dependent, *known)}
        return Program(by_position, sites, rest, [shapes[i] for i in known])

    def _classify(self, dependent: set[int]) -> tuple[list[int], dict[int, np.ndarray]]:
        """Return the inputs that depend on units, also by the carry, and known values of others.

        What is carried is known, in each round, if it follows from its start alone, as
        a counter does.
        """
        body = scan_body(self.eqn)
        sources = {i: body.sources[o] for i, o in zip(self.carried, body.outputs)}
        for _ in self.carried:  # the longest way from one carry to another
            dependent = dependent | {i for i in sources if sources[i] & dependent}
        values = {}
        for i, slot in enumerate(self.eqn.inputs):
            if i in dependent or slot not in self.known.values:
                continue
            value = self.known.values[slot]
            if i in self.carried:
                value = self._per_round(body, i, value)
            if value is not None:
                values[i] = value
        return sorted(dependent), values

    def _per_round(self, body: Program, i: int, start: np.ndarray) -> np.ndarray | None:
        """Return input ``i`` in each round; None where it follows from more than its start."""
        slot = body.sites[i]
        out = body.outputs[i - self.first]
        if not body.sources[out] <= body.sources[slot]:
            return None

        def advance(carry, _):
            return (body.run({slot: carry}, [out])[out], carry)

        first = jnp.asarray(start, body.dtypes[slot])
        return np.asarray(lax.scan(advance, first, None, self.length, self.reverse)[1])
