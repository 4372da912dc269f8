# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A traced function as one flat list of primitive steps, parts of which can be run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import math
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array
from jax.extend import core
import jax.numpy as jnp

#: Primitives that only call another program, by the name under which they hold it.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
_EXPANDED = (
    2**22
)  # products of a contraction, both of whose sides depend on the units, that are made one by one


class Step(NamedTuple):
    """One primitive, from slots to slots."""

    primitive: Any
    params: Mapping[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.primitive.name


class Program:
    """A function of units' values, of their surroundings, and of arguments, primitive by primitive.

    Every value has a slot, a number. Calls are inlined, steps that the result does not need are dropped, and
    of each slot is told whether it depends on the units, on the surroundings, or on arguments alone.

    :param fn: ``fn(own, others, arguments)``, of one array or several.
    :param own: arrays of the units' values, in a dict.
    :param others: arrays in a dict, whose values may be any at another call.
    :param arguments: arrays in a list, whose values are known.
    """

    def __init__(
        self, fn: Callable[..., Any], own: Mapping[str, Any], others: Mapping[str, Any], arguments: Sequence
    ) -> None:
        closed = jax.make_jaxpr(fn)(dict(own), dict(others), list(arguments))
        self.steps: list[Step] = []
        self.shapes: list[tuple[int, ...]] = []
        self.dtypes: list[Any] = []
        self.dependent: list[bool] = []  # on the units
        self.pure: list[bool] = []  # whether it depends on nothing but units and constants
        self.sources: list[
            frozenset[int] | None
        ] = []  # arguments it depends on; None where on more than those
        self.constants: dict[int, Any] = {}
        self._by_id: dict[int, int] = {}
        slots = [self._slot(v.aval) for v in closed.jaxpr.invars]
        self.own = dict(zip(sorted(own), slots, strict=False))
        self.others = dict(zip(sorted(others), slots[len(own) :], strict=False))
        self.arguments = slots[len(own) + len(others) :]
        for slot in self.own.values():
            self.dependent[slot], self.sources[slot] = True, None
        for slot in self.others.values():
            self.pure[slot], self.sources[slot] = False, None
        for slot in self.arguments:
            self.pure[slot], self.sources[slot] = False, frozenset([slot])
        self.outputs = self._inline(closed.jaxpr, closed.consts, slots)
        self.steps = self.needed(self.outputs, ())
        #: the step that makes a slot
        self.makers = {slot: step for step in self.steps for slot in step.outputs}
        self._by_id.clear()

    @property
    def output(self) -> int:
        """The slot of the only result."""
        (slot,) = self.outputs
        return slot

    # -- making ----------------------------------------------------------------------------------

    def _slot(self, aval: Any) -> int:
        self.shapes.append(tuple(aval.shape))
        self.dtypes.append(aval.dtype)
        self.dependent.append(False)
        self.pure.append(True)
        self.sources.append(frozenset())
        return len(self.shapes) - 1

    def _constant(self, value: Any, aval: Any) -> int:
        key = id(value)
        if key not in self._by_id:
            self._by_id[key] = slot = self._slot(aval)
            keep = isinstance(value, jax.Array) and not jnp.issubdtype(value.dtype, np.number)
            self.constants[slot] = value if keep else np.asarray(value, aval.dtype)
        return self._by_id[key]

    def _inline(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[int]) -> list[int]:
        found = dict(zip(jaxpr.invars, inputs, strict=True))
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            found[var] = self._constant(value, var.aval)

        def slot(v: Any) -> int:
            if not isinstance(v, core.Literal):
                return found[v]
            made = self._slot(v.aval)  # scalars: never worth sharing
            self.constants[made] = np.asarray(v.val, v.aval.dtype)
            return made

        for eqn in jaxpr.eqns:
            made = self._equation(eqn, [slot(v) for v in eqn.invars])
            found |= dict(zip(eqn.outvars, made, strict=True))
        return [slot(v) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, inputs: Sequence[int]) -> list[int]:
        held = _CALLS.get(eqn.primitive.name)
        if held is not None and held in eqn.params:
            inner = eqn.params[held]
            if isinstance(inner, core.ClosedJaxpr):
                return self._inline(inner.jaxpr, inner.consts, inputs)
            return self._inline(inner, (), inputs)
        if eqn.primitive.name == "dot_general" and self.dependent[inputs[0]] and self.dependent[inputs[1]]:
            expanded = _expanded(*(self.shapes[i] for i in inputs), eqn.params["dimension_numbers"])
            if expanded is not None:
                args = (jax.ShapeDtypeStruct(self.shapes[i], self.dtypes[i]) for i in inputs)
                dtype = eqn.outvars[0].aval.dtype
                made = jax.make_jaxpr(lambda a, b: expanded(a.astype(dtype), b.astype(dtype)))(*args)
                return self._inline(made.jaxpr, made.consts, inputs)
        outputs = [self._slot(v.aval) for v in eqn.outvars]
        sources = [self.sources[i] for i in inputs]
        known = None if None in sources else frozenset().union(*sources)  # ty: ignore[invalid-argument-type]
        for out in outputs:
            self.dependent[out] = any(self.dependent[i] for i in inputs)
            self.pure[out] = all(self.pure[i] for i in inputs)
            self.sources[out] = known
        self.steps.append(Step(eqn.primitive, eqn.params, tuple(inputs), tuple(outputs)))
        return outputs

    # -- running ---------------------------------------------------------------------------------

    def needed(self, wanted: Iterable[int], given: Iterable[int]) -> list[Step]:
        """The steps that ``wanted`` slots need beyond the slots ``given``, in order."""
        want, have, made = set(wanted), set(given), []
        for step in reversed(self.steps):
            if any(o in want and o not in have for o in step.outputs):
                made.append(step)
                want.update(step.inputs)
        return made[::-1]

    def inputs(
        self, own: Mapping[str, Any], others: Mapping[str, Any], arguments: Sequence[Any]
    ) -> dict[int, Any]:
        """Slots of all inputs, of the dtypes that were traced."""
        values = {self.own[name]: own[name] for name in self.own}
        values |= {self.others[name]: others[name] for name in self.others}
        values |= dict(zip(self.arguments, arguments, strict=True))
        numbers = {s: jnp.issubdtype(self.dtypes[s], np.generic) for s in values}  # and not keys
        return {s: jnp.asarray(v, self.dtypes[s]) if numbers[s] else v for s, v in values.items()}

    def run(
        self,
        given: Mapping[int, Any],
        wanted: Iterable[int],
        bound: Callable[..., Sequence[Any]] | None = None,
    ) -> dict[int, Any]:
        """Values of ``wanted`` slots.

        :param given: values of the inputs, or of whatever slots are before the wanted ones.
        :param bound: what a step makes of its operands; the primitive's own result unless given.
        """
        bound = bind if bound is None else bound
        wanted = list(wanted)
        values = self.constants | dict(given)
        for step in self.needed(wanted, given):
            values |= zip(step.outputs, bound(step, [values[i] for i in step.inputs]), strict=True)
        return {slot: values[slot] for slot in wanted}


def bind(step: Step, operands: Sequence[Any]) -> Sequence[Any]:
    """What a step makes of its operands, a list."""
    made = step.primitive.bind(*operands, **step.params)
    return made if step.primitive.multiple_results else [made]


def _expanded(left: tuple[int, ...], right: tuple[int, ...], dimensions: Any) -> Callable | None:
    """A contraction as a product and a sum; None where the products would be too many."""
    (sum_left, sum_right), (batch_left, batch_right) = dimensions
    free_left = [d for d in range(len(left)) if d not in (*sum_left, *batch_left)]
    free_right = [d for d in range(len(right)) if d not in (*sum_right, *batch_right)]
    if math.prod(left) * math.prod(right[d] for d in free_right) > _EXPANDED:
        return None

    def expanded(a: Array, b: Array) -> Array:
        a = a.transpose([*batch_left, *free_left, *sum_left])
        b = b.transpose([*batch_right, *free_right, *sum_right])
        k, m, n = len(batch_left), len(free_left), len(free_right)
        a = jnp.expand_dims(a, range(k + m, k + m + n))
        b = jnp.expand_dims(b, range(k, k + m))
        return (a * b).sum(range(k + m + n, k + m + n + len(sum_left)))

    return expanded
