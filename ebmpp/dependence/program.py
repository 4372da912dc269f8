# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A traced function as a flat list of primitive equations, parts of which can be run."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
import contextlib
import math
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp

#: Primitives that only call an inner program.
_CALLS = frozenset(
    """
    jit pjit closed_call core_call checkpoint remat2
    custom_jvp_call custom_vjp_call
    """.split()
)
# a very low number, of which as many can be added, replaces -inf
_MOST_IMPOSSIBLE = 2**20
# larger contractions of two sides that depend on units remain one equation
_MOST_PRODUCTS = 2**22

#: Arrays, or their shapes, by name or number.
Named = Mapping[Any, Any]
Shapes = Sequence[tuple[int, ...]]
#: Values of an equation's inputs or outputs: arrays or jax keys.
Values = Sequence[Any]
#: Values, or facts on these, by slot.
SlotValues = Mapping[int, Any]
#: Evaluates an equation, given values of its inputs.
Bind = Callable[["Equation", Values], Values]


class Equation(NamedTuple):
    """One primitive, from slots to slots."""

    primitive: Any
    params: Mapping[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    shapes: Shapes
    """Shapes of the inputs."""
    results: Shapes
    """Shapes of the outputs."""

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.primitive.name


class Program:
    """A function of a block's sites, of their siblings and of arguments, as a list of primitives.

    Each value has a slot, a number. Inner programs are inlined, and equations that no
    result needs are dropped.

    :param fn: ``fn(sites, siblings, arguments)``, one array or several.
    :param sites: arrays by name; their elements are the units.
    :param siblings: arrays by name, whose values are unknown; the values of
        ``arguments`` are known.
    """

    def __init__(
        self,
        fn: Callable,
        sites: Named,
        siblings: Named,
        arguments: Sequence,
    ) -> None:
        closed = jax.make_jaxpr(fn)(dict(sites), dict(siblings), list(arguments))
        self.equations: list[Equation] = []
        self.shapes: list[tuple[int, ...]] = []
        self.dtypes: list[Any] = []
        #: inputs that each slot depends on
        self.sources: list[frozenset[int]] = []
        self.constants: dict[int, Any] = {}
        inputs = closed.jaxpr.invars
        slots = [self._slot(v.aval, frozenset([i])) for i, v in enumerate(inputs)]
        rest = iter(slots)
        self.sites = {name: next(rest) for name in sorted(sites)}
        self.siblings = {name: next(rest) for name in sorted(siblings)}
        self.arguments = list(rest)
        self.outputs = self._inline(closed.jaxpr, closed.consts, slots)
        self.equations = self.needed(self.outputs, ())
        self.evaluate = evaluate_equation
        #: the equation that computes each slot
        self.makers = {slot: eqn for eqn in self.equations for slot in eqn.outputs}

    @property
    def output(self) -> int:
        """The slot of the only result."""
        (slot,) = self.outputs
        return slot

    def depends(self, slot: int) -> bool:
        """Return True if a slot depends on units."""
        return min(self.sources[slot], default=math.inf) < len(self.sites)

    def dependent(self, eqn: Equation) -> list[int]:
        """Return the positions of an equation's inputs that depend on units."""
        return [i for i, slot in enumerate(eqn.inputs) if self.depends(slot)]

    def is_known(self, slot: int) -> bool:
        """Return True if a slot depends on nothing but arguments and constants."""
        first = len(self.sites) + len(self.siblings)
        return min(self.sources[slot], default=first) >= first

    def size(self, slot: int) -> int:
        """Return the number of elements of a slot."""
        return math.prod(self.shapes[slot])

    def is_key(self, slot: int) -> bool:
        """Return True if a slot holds jax keys."""
        return jnp.issubdtype(self.dtypes[slot], jax.dtypes.prng_key)

    def _slot(self, aval: Any, sources: frozenset[int]) -> int:
        self.shapes.append(tuple(aval.shape))
        self.dtypes.append(aval.dtype)
        self.sources.append(sources)
        return len(self.shapes) - 1

    def _constant(self, value: Any, aval: Any) -> int:
        slot = self._slot(aval, frozenset())
        self.constants[slot] = (
            value if self.is_key(slot) else np.asarray(value, aval.dtype)
        )
        return slot

    def _inline(
        self,
        jaxpr: core.Jaxpr,
        consts: Values,
        inputs: Sequence[int],
    ) -> list[int]:
        """Append the equations of a jaxpr, and return the slots of its results."""
        slots = dict(zip(jaxpr.invars, inputs))
        for var, const in zip(jaxpr.constvars, consts):
            slots[var] = self._constant(const, var.aval)

        def slot(v):
            is_literal = isinstance(v, core.Literal)
            return self._constant(v.val, v.aval) if is_literal else slots[v]

        for eqn in jaxpr.eqns:
            outputs = self._append(eqn, list(map(slot, eqn.invars)))
            slots |= zip(eqn.outvars, outputs)
        return list(map(slot, jaxpr.outvars))

    def _append(self, eqn: core.JaxprEqn, inputs: Sequence[int]) -> list[int]:
        primitive = eqn.primitive
        inner = None
        if primitive.name in _CALLS:
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        elif primitive.name == "dot_general" and all(map(self.depends, inputs)):
            sides = [
                jax.ShapeDtypeStruct(self.shapes[i], self.dtypes[i]) for i in inputs
            ]
            result: Any = eqn.outvars[0].aval
            inner = _written_out(eqn.params["dimension_numbers"], sides, result.dtype)
        if isinstance(inner, core.ClosedJaxpr):
            return self._inline(inner.jaxpr, inner.consts, inputs)
        if inner is not None:
            return self._inline(inner, (), inputs)
        sources = frozenset[int]().union(*(self.sources[i] for i in inputs))
        outputs = [self._slot(v.aval, sources) for v in eqn.outvars]
        shapes = [self.shapes[i] for i in inputs]
        results = [self.shapes[o] for o in outputs]
        slots = tuple(inputs), tuple(outputs)
        self.equations.append(Equation(primitive, eqn.params, *slots, shapes, results))
        return outputs

    @contextlib.contextmanager
    def relaxed(self) -> Generator[None]:
        """Run what is traced inside with a very low number in place of -inf in each equation."""
        self.evaluate = _evaluate_above
        try:
            yield
        finally:
            self.evaluate = evaluate_equation

    def needed(
        self,
        targets: Iterable[int],
        available: Iterable[int],
    ) -> list[Equation]:
        """Return the equations between ``available`` and ``targets`` slots, in order."""
        available = set(available)
        missing = set(targets) - available
        equations = []
        for eqn in reversed(self.equations):
            if not missing.isdisjoint(eqn.outputs):
                equations.append(eqn)
                missing.update(set(eqn.inputs) - available)
        return equations[::-1]

    def inputs(self, values: Named, arguments: Values) -> dict[int, Any]:
        """Return the values of all input slots in the traced dtypes; other names are ignored."""
        slots = {
            slot: values[name] for name, slot in (self.sites | self.siblings).items()
        }
        slots |= zip(self.arguments, arguments)
        return {
            s: v if self.is_key(s) else jnp.asarray(v, self.dtypes[s])
            for s, v in slots.items()
        }

    def run(
        self,
        known: SlotValues,
        targets: Iterable[int],
        bind: Bind | None = None,
    ) -> dict[int, Any]:
        """Return the values of the ``targets`` slots, given the values of slots that precede them.

        :param bind: replaces :func:`evaluate_equation`.
        """
        evaluate = bind or self.evaluate
        targets = list(targets)
        values = self.constants | dict(known)
        for eqn in self.needed(targets, known):
            results = evaluate(eqn, [values[i] for i in eqn.inputs])
            values |= zip(eqn.outputs, results)
        return {slot: values[slot] for slot in targets}


def scan_body(eqn: Equation) -> Program:
    """Return one round of a scan as a program, whose sites are all of its inputs by position."""
    closed = eqn.params["jaxpr"]
    fn = core.jaxpr_as_fun(closed)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in closed.in_avals]
    return Program(
        lambda sites, *_: fn(*sites.values()),
        dict(enumerate(shapes)),
        {},
        [],
    )


def evaluate_equation(eqn: Equation, operands: Values) -> Values:
    """Return an equation's results, a list."""
    results = eqn.primitive.bind(*operands, **eqn.params)
    return results if eqn.primitive.multiple_results else [results]


def _evaluate_above(eqn: Equation, operands: Values) -> list[Any]:
    """Return an equation's results with a very low number in place of -inf."""

    def without_infinity(a):
        if not jnp.issubdtype(a.dtype, np.floating):
            return a
        # one operation, as there are many equations
        return lax.max(a, jnp.finfo(a.dtype).min / _MOST_IMPOSSIBLE)

    return list(map(without_infinity, evaluate_equation(eqn, operands)))


def _written_out(
    dimensions: Any,
    sides: Sequence[jax.ShapeDtypeStruct],
    dtype: np.dtype,
) -> core.ClosedJaxpr | None:
    """Return a contraction as a program of products and a sum; None where these are too many."""
    (sum_left, sum_right), (batch_left, batch_right) = dimensions

    def free(side, *fixed):
        return [d for d in range(side.ndim) if d not in fixed]

    left, right = sides
    free_left = free(left, *sum_left, *batch_left)
    free_right = free(right, *sum_right, *batch_right)
    num_right = math.prod(right.shape[d] for d in free_right)
    if left.size * num_right > _MOST_PRODUCTS:
        return None

    def contraction(a, b):
        a = a.astype(dtype).transpose([*batch_left, *free_left, *sum_left])
        b = b.astype(dtype).transpose([*batch_right, *free_right, *sum_right])
        # (batch, free of a, free of b, summed)
        start = len(batch_left)
        middle = start + len(free_left)
        stop = middle + len(free_right)
        a = jnp.expand_dims(a, range(middle, stop))
        b = jnp.expand_dims(b, range(start, middle))
        return (a * b).sum(range(stop, a.ndim))

    return jax.make_jaxpr(contraction)(left, right)
