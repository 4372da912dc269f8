# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A traced log density as a sum of terms, and the units that interact in it.

From its end backward, a log density is a sum: through sums, moves, masks, scales and
products of values that depend on different units, up to primitives that are none of
these. Their results are the *terms*, arrays of elements each of which is a function of
the units that it reads. The equations in between, the *tail*, are affine in the terms
of any one unit, the others fixed. Therefore:

- Two units interact if an element reads both, or if elements that read them are
  multiplied. That is read off the program, so it holds for all values, and can only err
  toward interaction.
- Where no two units of a layer interact, a unit's part of the log density is the sum of
  the elements that read it, times their coefficients, the gradient of the tail.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np
from scipy import sparse

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import sum_by_halves
from ebmpp.dependence.flow import Flow
from ebmpp.dependence.program import Equation, Program, SlotValues
from ebmpp.dependence.propagation import propagate
from ebmpp.dependence.pullback import guard
from ebmpp.dependence.rules import Known, in_floats, is_affine, is_wide
from ebmpp.dependence.unit_sets import UnitSets

_MOST_PAIRS = 2**21  # of units that interact, beyond which they are not listed


class SumOfTerms:
    """The terms of a log density, and the pairs of units that interact.

    :param program: a scalar function of units.
    :param arguments: values of its arguments.
    :param tables: by site, all values of its units, ``(K, *shape)`` or
        ``(K, 1, ..., 1)``. A truth value that is the same for all values of the one
        unit that it reads is then known to read none.
    :param products: True if products of different units belong to the tail; if not they
        are terms, and the tail is affine in all terms jointly.
    """

    def __init__(
        self,
        program: Program,
        arguments: Sequence,
        tables: Mapping,
        products: bool,
    ) -> None:
        self.program = program
        self._products = products
        #: True if the tail has products of different units
        self.has_products = False
        # units are numbered through the flattened sites
        units = {}
        #: numbers of the units of each site
        self.numbers: dict[str, range] = {}
        size = 0
        for site, slot in program.sites.items():
            numbers = range(size, size + program.size(slot))
            self.numbers[site] = numbers
            units[slot] = 1 + np.array(numbers).reshape(program.shapes[slot])
            size = numbers.stop
        self.sets = UnitSets(size)
        known = Known(program, arguments)
        constant = _constant_truths(program, tables)
        self._reads, flows = propagate(program, self.sets, units, known, constant)
        #: slots of the terms, and which of their elements matter
        self.live: dict[int, np.ndarray] = {}
        self.tail: list[Equation] = []
        self._count = 0
        self._pairs = sparse.csr_array((size, size), dtype=bool)
        self._trace_back(flows)
        self.relied = frozenset(program.arguments.index(slot) for slot in known.relied)

    @cached_property
    def edges(self) -> np.ndarray | None:
        """Pairs of units that interact, ``(pairs, 2)``, each once; None where they are too many."""
        if self._count > _MOST_PAIRS:
            return None
        pairs = sparse.csr_array(sparse.triu(self._pairs + self._pairs.T, 1))
        pairs.sort_indices()
        return np.stack(pairs.nonzero(), 1).astype(np.int64)

    @cached_property
    def is_forest(self) -> bool:
        """True if the units that interact form a forest."""
        edges = self.edges
        size = self.sets.size
        if edges is None or len(edges) >= size:
            return False
        entries = (np.ones(len(edges)), tuple(edges.T))
        adjacency = sparse.coo_array(entries, (size, size))
        count, _ = sparse.csgraph.connected_components(adjacency, directed=False)
        return count == size - len(edges)

    @property
    def most_together(self) -> int:
        """The largest number of units that one element reads, a lower bound of the layers."""
        sizes = [self.sets.sizes(self._sets(slot)).max(initial=0) for slot in self.live]
        return int(max(sizes, default=0))

    def elements(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the flat elements of a term and the units that they read, as pairs of numbers."""
        element, unit = self.sets.rows(self._sets(slot)).nonzero()
        return element.astype(np.int64), unit.astype(np.int64)

    def reads_of(self, site: str) -> tuple[np.ndarray, np.ndarray]:
        """Return elements of the concatenated terms, and the units of a site that they read."""
        sets = np.concatenate([self._sets(slot) for slot in self.live])
        units = self.numbers[site]
        return self.sets.rows(sets)[:, units.start : units.stop].nonzero()

    def _sets(self, slot: int) -> np.ndarray:
        return np.where(self.live[slot], self._reads[slot], 0).ravel()

    def _trace_back(self, flows: Mapping[int, Flow]) -> None:
        """Find the tail and the terms, with the elements that matter, from the end backward."""
        program = self.program
        reads = self._reads
        live = {program.output: np.ones((), bool)}

        def live_at(slot):
            return live.get(slot, np.zeros(program.shapes[slot], bool))

        for eqn in reversed(program.equations):
            matters = {o: live[o] for o in eqn.outputs if o in live}
            first = eqn.outputs[0]
            if not matters or first not in flows:
                continue
            through = [i for i, slot in enumerate(eqn.inputs) if slot in reads]
            is_product = self._products and eqn.name == "mul" and len(through) == 2
            joins = is_product and self._multiply(eqn, live[first])
            if not joins and not is_affine(program, eqn, through):
                self.live |= matters
                for slot in matters:
                    live.pop(slot)
                continue
            self.tail.append(eqn)
            back = flows[first].backward(list(map(live_at, eqn.outputs)))
            for i in through:
                slot = eqn.inputs[i]
                live[slot] = live_at(slot) | back[i]
        self.tail.reverse()
        self.live |= {s: live[s] for s in program.sites.values() if s in live}
        for slot in list(self.live):
            if slot not in reads or not self._sets(slot).any():
                del self.live[slot]
                continue
            numbers = np.unique(self._sets(slot))
            sizes = self.sets.sizes(numbers)
            self._add_pairs(numbers, numbers, int((sizes * (sizes - 1) // 2).sum()))

    def _multiply(self, eqn: Equation, live: np.ndarray) -> bool:
        """Return True, and record pairs, if no unit is read by both factors of a product."""
        factors = [
            np.broadcast_to(self._reads[i], live.shape)[live] for i in eqn.inputs
        ]
        sizes = self.sets.sizes
        wide = all(is_wide(self.program.dtypes[i]) for i in eqn.inputs)
        both = self._reads[eqn.outputs[0]][live]
        is_disjoint = sizes(both) == sum(map(sizes, factors))
        if not wide or not is_disjoint.all():
            return False
        self.has_products = True
        first, second = np.unique(factors, axis=1)
        count = (sizes(first) * sizes(second)).sum()
        self._add_pairs(first, second, int(count))
        return True

    def _add_pairs(self, first: np.ndarray, second: np.ndarray, count: int) -> None:
        """Record that the units of each set of ``first`` interact with units of its partner."""
        self._count += count
        if count and self._count <= _MOST_PAIRS:  # a set of one unit has no pair
            self._pairs = self._pairs + self.sets.rows(first).T @ self.sets.rows(second)

    def evaluate(
        self,
        inputs: SlotValues,
        slots: Iterable[int],
        guarded: bool = False,
    ) -> dict[int, Array]:
        """Return some of the terms, as floats, given values of all of the program's inputs.

        :param guarded: True for derivatives in all inputs, in which zero times infinity
            is zero.
        """
        bind = guard(self.program, self._is_moving) if guarded else None
        values = self.program.run(inputs, slots, bind)
        return {slot: jnp.asarray(v).astype(float) for slot, v in values.items()}

    def _is_moving(self, slot: int) -> bool:
        """Return True for floats that depend on an input."""
        return bool(self.program.sources[slot]) and jnp.issubdtype(
            self.program.dtypes[slot], np.floating
        )

    def coefficients(self, inputs: SlotValues) -> dict[int, Array]:
        """Return the derivatives in the terms; in the terms of a unit these do not depend on it."""
        return jax.grad(self._total(inputs))(self.evaluate(inputs, self.live))

    def expand(
        self,
        inputs: SlotValues,
        guarded: bool = False,
    ) -> tuple[Array, dict[int, Array]]:
        """Return the log density without elements that read units, and derivatives in the terms.

        Both are the same for all values of the units, as the tail must be affine in all
        terms jointly.
        """
        terms = self.evaluate(inputs, self.live, guarded)
        rest = {}
        for slot, term in terms.items():
            is_read = self._sets(slot).reshape(term.shape) > 0
            rest[slot] = jnp.where(is_read, 0, term)
        return jax.value_and_grad(self._total(inputs, guarded))(rest)

    def _total(
        self,
        inputs: SlotValues,
        guarded: bool = False,
    ) -> Callable[[dict], Array]:
        """Return the log density as a function of the terms."""
        program = self.program
        inside = {o for eqn in self.tail for o in eqn.outputs} | set(self.live)
        inputs_of_tail = {i for eqn in self.tail for i in eqn.inputs}
        outside = (inputs_of_tail | {program.output}) - inside
        bind = guard(program, self._is_moving) if guarded else None
        rest = program.run(inputs, outside, bind)

        def is_moving(slot):
            return slot in inside or (guarded and self._is_moving(slot))

        bind_tail = guard(program, is_moving)

        def bind_in_floats(eqn, operands):
            if guarded and eqn.name == "reduce_sum":
                axes = eqn.params["axes"]
                summed = jnp.moveaxis(operands[0], axes, range(len(axes)))
                flat = summed.reshape(-1, *summed.shape[len(axes) :])
                return [sum_by_halves(flat.astype(float))]
            return in_floats(eqn, operands, bind_tail)

        def total(terms):
            values = program.run({**rest, **terms}, [program.output], bind_in_floats)
            return jnp.asarray(values[program.output], float)

        return total

    def multiply(
        self,
        coefficients: Mapping[int, Array],
        terms: Mapping[int, Array],
    ) -> dict[int, Array]:
        """Return the terms times their coefficients.

        A coefficient of 0 cancels an infinite term, and so does a truth value that does
        not hold.
        """
        result = {}
        for slot, term in terms.items():
            cancelled = coefficients[slot] == 0
            if self.program.dtypes[slot] == np.bool_:
                cancelled = cancelled | (term == 0)
            result[slot] = jnp.where(cancelled, 0, coefficients[slot] * term)
        return result


def _constant_truths(
    program: Program,
    tables: Mapping[str, np.ndarray],
) -> dict[int, np.ndarray]:
    """Return where truth values that depend on units alone are the same for every value of a unit.

    All units take their k-th value at once, so this holds for elements that read one
    unit.
    """
    num_sites = len(program.sites)

    def is_candidate(slot):
        is_truth = program.dtypes[slot] == np.bool_
        last = max(program.sources[slot], default=num_sites)
        return is_truth and last < num_sites

    choosing = ("reduce_and", "reduce_or", "select_n")
    inputs = {eqn.inputs[0] for eqn in program.equations if eqn.name in choosing}
    slots = sorted(filter(is_candidate, inputs))
    if not slots or set(tables) != set(program.sites):
        return {}
    count = max(map(len, tables.values()))
    stacked = {}
    for name, slot in program.sites.items():
        table = tables[name][np.minimum(np.arange(count), len(tables[name]) - 1)]
        values = np.broadcast_to(table, (count, *program.shapes[slot]))
        stacked[slot] = values.astype(program.dtypes[slot])
    run = jax.jit(jax.vmap(lambda sites: program.run(sites, slots)))
    truths = jax.device_get(run(stacked))
    return {slot: (v == v[0]).all(0) for slot, v in truths.items()}
