# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A log density as a sum of terms that are told apart, and which units interact in it.

A log density is traced from its end backward, through sums, moves, masks, scales and products of what
depends on different units, up to what is none of these: the *terms*, arrays of elements each of which is some
function of the units that it reads. What is between, the *tail*, is affine in the terms of any one
unit, the others held. So

- two units interact if an element reads both, or if elements that read them are multiplied; no other do. That
  is read off the program: it holds whatever the values are, and may only err toward interacting;
- where a layer holds no two units that interact, each unit's part of the log density is the sum of the
  elements that read it, times their coefficients, the gradient of the tail: one evaluation of the terms for
  each value of all units at once gives every unit's conditional.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import math
from typing import Any

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.traced.dependence.program import Program, Step, bind
from ebmpp.traced.dependence.propagation import propagate
from ebmpp.traced.dependence.pullback import guarded, is_harmless, multiplies
from ebmpp.traced.dependence.rules import Known, in_floats, is_affine, is_wide
from ebmpp.traced.dependence.unit_sets import UnitSets

_MOST = 2**21  # pairs of units, beyond which they are not listed


class Terms:
    """The terms of a program, and the pairs of units that interact.

    :param program: a scalar function of units.
    :param arguments: the values of its arguments.
    :param values: by site, all values that its units can take, ``(K, *shape)`` or ``(K, 1, ..., 1)``: what is
        the same for all values of the one unit that it reads, such as whether they are in the support, is
        known to read none.
    :param products: whether what multiplies different units is part of the tail; if not it is a term, and the
        tail is affine in all terms together.
    """

    def __init__(
        self,
        program: Program,
        arguments: Sequence[Any],
        values: Mapping[str, np.ndarray] | None = None,
        products: bool = True,
    ) -> None:
        sizes = {name: math.prod(program.shapes[slot]) for name, slot in program.own.items()}
        self._products = products
        self.program, self.sets = program, UnitSets(sum(sizes.values()))
        #: the first unit of each site; units are numbered through the flattened sites
        self.first = dict(zip(sizes, np.cumsum([0, *sizes.values()])[:-1].tolist(), strict=True))
        known = Known(program, arguments)
        own = {}
        for name, slot in program.own.items():
            shape = program.shapes[slot]
            own[slot] = self.first[name] + 1 + np.arange(math.prod(shape)).reshape(shape)
        self._reads, self._flows = propagate(program, self.sets, own, known, _same(program, values or {}))
        #: slots of the terms, and which of their elements matter
        self.live: dict[int, np.ndarray] = {}
        self.tail: list[Step] = []
        self._pairs: list[np.ndarray] = []
        self._count = 0
        self._backward()
        self.relied = frozenset(program.arguments.index(slot) for slot in known.relied)
        self._flows.clear()

    @property
    def edges(self) -> np.ndarray | None:
        """Pairs of units that interact, ``(pairs, 2)``, each once; None where there are too many to list."""
        if self._count > _MOST:
            return None
        size = self.sets.size
        pairs = np.concatenate([np.zeros((0, 2), np.int64), *self._pairs])
        codes = np.unique(pairs.min(1) * size + pairs.max(1))
        return np.stack([codes // size, codes % size], 1)

    @property
    def most_together(self) -> int:
        """The most units that one element reads: as many layers are needed at least."""
        return max((int(self.sets.sizes(self._term(slot)).max(initial=0)) for slot in self.live), default=0)

    def elements(self, slot: int) -> tuple[np.ndarray, np.ndarray]:
        """Elements of a term (flattened) and the units that they read, a pair of numbers each."""
        return self.sets.members(self._term(slot))

    def _term(self, slot: int) -> np.ndarray:
        return np.where(self.live[slot], self._reads[slot], 0).ravel()

    # -- analysis --------------------------------------------------------------------------------

    def _backward(self) -> None:
        program = self.program
        live: dict[int, np.ndarray] = {program.output: np.ones((), bool)}
        for step in reversed(program.steps):
            matters = {o: live[o] for o in step.outputs if o in live}
            if not matters or step.outputs[0] not in self._flows:
                continue
            through = [i for i, slot in enumerate(step.inputs) if slot in self._reads]
            both = self._products and step.name == "mul" and len(through) == 2
            product = both and self._disjoint(step, live[step.outputs[0]])
            if not product and not is_affine(program, step, through):
                self.live |= matters
                for slot in matters:
                    live.pop(slot)
                continue
            self.tail.append(step)
            at = [live.get(o, np.zeros(program.shapes[o], bool)) for o in step.outputs]
            back = self._flows[step.outputs[0]].backward(at)
            for i in through:
                slot = step.inputs[i]
                live[slot] = live.get(slot, np.zeros(program.shapes[slot], bool)) | back[i]
        self.tail.reverse()
        self.live |= {slot: live[slot] for slot in program.own.values() if slot in live}
        self.live = {
            s: at for s, at in self.live.items() if s in self._reads and (at & (self._reads[s] > 0)).any()
        }
        for slot in self.live:
            self._join(np.unique(self._term(slot)))

    def _disjoint(self, step: Step, live: np.ndarray) -> bool:
        """Whether no element multiplies two things that one unit is read for; then pairs are taken down."""
        a, b = (np.broadcast_to(self._reads[i], live.shape)[live] for i in step.inputs)
        both = self._reads[step.outputs[0]][live]
        sizes = self.sets.sizes
        if not all(is_wide(self.program.dtypes[i]) for i in step.inputs):
            return False
        if (sizes(both) != sizes(a) + sizes(b)).any():
            return False
        pairs = np.unique(np.stack([a, b], 1), axis=0)
        count = int((sizes(pairs[:, 0]) * sizes(pairs[:, 1])).sum())
        self._count += count
        if count <= _MOST:
            (i, u), (j, v) = (self.sets.members(pairs[:, side]) for side in range(2))
            many = np.bincount(j, minlength=len(pairs))
            start = np.cumsum(many) - many
            offset = np.repeat(start[i] - (np.cumsum(many[i]) - many[i]), many[i])
            self._pairs.append(np.stack([np.repeat(u, many[i]), v[offset + np.arange(len(offset))]], 1))
        return True

    def _join(self, numbers: np.ndarray) -> None:
        """Take down that all units of each set interact."""
        sizes = self.sets.sizes(numbers)
        count = int((sizes * (sizes - 1) // 2).sum())
        self._count += count
        if count > _MOST:
            return
        for size in np.unique(sizes[sizes > 1]):
            each = self.sets.members(numbers[sizes == size])[1].reshape(-1, size)
            a, b = np.triu_indices(size, 1)
            self._pairs.append(np.stack([each[:, a].ravel(), each[:, b].ravel()], 1))

    # -- evaluation ------------------------------------------------------------------------------

    def evaluate(self, given: Mapping[int, Any], slots: Iterable[int]) -> dict[int, Array]:
        """Some of the terms, as floats.

        :param given: values of all of the program's inputs.
        """
        made = self.program.run(given, slots)
        return {slot: _as_float(jnp.asarray(v)) for slot, v in made.items()}

    def coefficients(self, given: Mapping[int, Any], terms: Mapping[int, Array]) -> dict[int, Array]:
        """The derivatives of the log density in the terms; in those of a unit they do not depend on it."""
        program = self.program
        inside = {o for step in self.tail for o in step.outputs} | set(terms)
        outside = {i for step in self.tail for i in step.inputs} - inside
        around = program.run(given, outside)

        def total(terms: Mapping[int, Array]) -> Array:
            values = around | dict(terms)
            for step in self.tail:
                made = in_floats(step, [values[i] for i in step.inputs], self._bound(step, inside))
                values |= zip(step.outputs, made, strict=True)
            return values.get(program.output, jnp.zeros(()))

        if program.output in terms:
            return {program.output: jnp.ones(())}
        return jax.grad(lambda terms: total(terms).astype(float))(dict(terms))

    def _bound(self, step: Step, inside: set[int]) -> Callable[[Step, list[Array]], Sequence[Any]]:
        """How a step of the tail is run, so that what does not count is pulled back as 0."""
        moving = [i for i, slot in enumerate(step.inputs) if slot in inside]
        constants = [self.program.constants.get(s, np.inf) for s in step.inputs if s not in inside]
        harmless = len(moving) == 1 and all(is_harmless(step, value) for value in constants)
        if not multiplies(step) or harmless:
            return bind
        return lambda step, operands: guarded(step, operands, moving)

    def weigh(self, slopes: Mapping[int, Array], terms: Mapping[int, Array]) -> dict[int, Array]:
        """Terms times their coefficients, of which a 0 is a term that does not count, be it infinite.

        So is a truth value that does not hold, as XLA has it for products.
        """
        made = {}
        for slot, term in terms.items():
            none = slopes[slot] == 0
            if self.program.dtypes[slot] == np.bool_:
                none = none | (term == 0)
            made[slot] = jnp.where(none, 0, slopes[slot] * term)
        return made


def _same(program: Program, values: Mapping[str, np.ndarray]) -> dict[int, np.ndarray]:
    """Of truth values that depend on nothing but units: where they are the same for every value of a unit.

    All units take their k-th value at once, so this holds for elements that read one unit.
    """
    asked = {step.inputs[0] for step in program.steps if step.name in ("reduce_and", "reduce_or", "select_n")}
    asked = sorted(
        s for s in asked if program.pure[s] and program.dependent[s] and program.dtypes[s] == np.bool_
    )
    if not asked or set(values) != set(program.own):
        return {}
    count = max(map(len, values.values()))
    stacked = {}
    for name, slot in program.own.items():
        table = values[name][np.minimum(np.arange(count), len(values[name]) - 1)]
        stacked[slot] = np.broadcast_to(table, (count, *program.shapes[slot])).astype(program.dtypes[slot])
    values = jax.device_get(jax.jit(jax.vmap(lambda own: program.run(own, asked)))(stacked))
    return {slot: (v == v[0]).all(0) for slot, v in values.items()}


def _as_float(value: Array) -> Array:
    return value.astype(jnp.result_type(float))
