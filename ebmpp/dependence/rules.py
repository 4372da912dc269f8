# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The flow of each primitive, and which primitives are affine."""

from collections.abc import Callable, Sequence
import math
from typing import Any

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import sharding
from ebmpp.dependence.flow import (
    Contraction,
    Flow,
    Gathered,
    Joined,
    Lookup,
    Scattered,
)
from ebmpp.dependence.program import (
    Bind,
    Equation,
    Program,
    evaluate_equation,
    scan_body,
)

ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e "
    "cbrt ceil clamp convert_element_type copy copy_p cos cosh digamma div eq erf "
    "erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag "
    "integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne neg "
    "nextafter not or polygamma population_count pow real reduce_precision "
    "regularized_incomplete_beta rem round rsqrt select_n shift_left "
    "shift_right_arithmetic shift_right_logical sign sin sinh sqrt square "
    "stop_gradient sub tan tanh xor zeta".split()
)
_REDUCED = frozenset(
    "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor".split()
)
_ALONG = frozenset(
    "cumlogsumexp cummax cummin cumprod cumsum sort cholesky triangular_solve".split()
)
#: Primitives that move elements, and the positions of operands that say where to.
MOVING: dict[str, Callable[[int], range]] = dict.fromkeys(
    "broadcast_in_dim concatenate pad reshape rev slice split squeeze stack tile transpose unstack".split(),
    lambda count: range(0),
) | {
    "gather": lambda count: range(1, 2),
    "dynamic_slice": lambda count: range(1, count),
    "dynamic_update_slice": lambda count: range(2, count),
    "scatter": lambda count: range(1, 2),
    "select_n": lambda count: range(1),
}
LINEAR = frozenset(
    "add add_any convert_element_type copy copy_p cumsum name neg reduce_precision reduce_sum sub".split()
)
#: Primitives that are affine in their other operands, and the positions of those in
#: which they need not be.
_AFFINE: dict[str, Callable[[int], range]] = (
    MOVING
    | dict.fromkeys(LINEAR, lambda count: range(0))
    | dict.fromkeys(
        ("div", "scatter-add", "conv_general_dilated"), lambda count: range(1, 2)
    )
)
#: Primitives that are affine in either operand while the other is fixed.
PRODUCTS = ("mul", "dot_general")
#: Primitives whose result is zero where their operands, or one factor, are.
_ZERO_KEEPING = frozenset(
    "mul add sub neg div convert_element_type copy broadcast_in_dim concatenate "
    "reshape rev slice squeeze transpose select_n gather".split()
)
_MOST_TAPS = 512
# of arrays that are searched for zeros, or whose elements are followed
_MOST_ELEMENTS = 2**24


def is_affine(program: Program, eqn: Equation, depends: Sequence[int]) -> bool:
    """Return True if an equation is jointly affine in the operands at the positions ``depends``."""
    if eqn.name in PRODUCTS:
        return len(depends) == 1 and is_wide(program.dtypes[eqn.inputs[depends[0]]])
    if eqn.name not in _AFFINE or set(depends) & set(
        _AFFINE[eqn.name](len(eqn.inputs))
    ):
        return False
    return all(_is_exact(program, eqn, i) for i in depends)


def _is_exact(program: Program, eqn: Equation, operand: int) -> bool:
    """Return True if the arithmetic is that of real numbers: no rounding, no wrapping of integers."""
    source = program.dtypes[eqn.inputs[operand]]
    target = program.dtypes[eqn.outputs[0]]
    if eqn.name == "div":
        return jnp.issubdtype(source, np.floating)
    if eqn.name != "convert_element_type":
        return is_wide(source)
    same_kind = jnp.issubdtype(target, np.floating) or source.kind == target.kind
    return is_wide(target) and (source == np.bool_ or (is_wide(source) and same_kind))


def is_polynomial(program: Program) -> bool:
    """Return True if all results are polynomials in the units, by the primitives that compute them."""
    return all(_keeps_polynomials(program, eqn) for eqn in program.equations)


def _keeps_polynomials(program: Program, eqn: Equation) -> bool:
    depends = program.dependent(eqn)
    if not depends or eqn.name in (*PRODUCTS, "conv_general_dilated", "square"):
        return True
    if eqn.name == "integer_pow":
        return eqn.params["y"] >= 0
    if eqn.name == "scan":
        return is_polynomial(scan_body(eqn))
    return is_affine(program, eqn, depends)


def is_wide(dtype: np.dtype) -> bool:
    """Return True if sums and products of a dtype are exact as of real numbers."""
    return jnp.issubdtype(dtype, np.floating) or dtype in (np.int32, np.int64)


class Known:
    """Values of slots that depend on constants and arguments alone, as far as flows ask for them.

    Indices and matrices among the arguments are used, and their slots collected in
    ``relied``: another call must have the same values. Masks and factors among them are
    not used: data may be zero by chance.
    """

    def __init__(self, program: Program, arguments: Sequence[Any]) -> None:
        self.program = program
        self.relied = set[int]()
        slots = {slot for eqn in program.equations for slot in self._requested(eqn)}
        inputs = dict(zip(program.arguments, arguments, strict=True))
        available = inputs | program.constants
        rest = sorted(slots - set(available))
        computed = (
            jax.jit(lambda inputs: program.run(inputs, rest))(inputs) if rest else {}
        )
        self.values = {
            slot: np.asarray(computed.get(slot, available.get(slot))) for slot in slots
        }

    def _requested(self, eqn: Equation) -> list[int]:
        """Return the known slots whose values the equation's flow uses."""
        program = self.program
        slots = []
        if not any(map(program.depends, eqn.inputs)):
            return []
        if eqn.name in (*MOVING, "scatter-add"):
            slots = [eqn.inputs[i] for i in _AFFINE[eqn.name](len(eqn.inputs))]
        elif eqn.name in (*PRODUCTS, "conv_general_dilated"):
            slots = [
                f
                for slot in eqn.inputs
                if not program.depends(slot)
                for f in self._factors(slot)
            ]
        elif eqn.name == "scan":
            slots = [slot for slot in eqn.inputs if not program.is_key(slot)]
        slots = [
            s
            for s in slots
            if program.is_known(s) and math.prod(program.shapes[s]) <= _MOST_ELEMENTS
        ]
        return [
            s
            for s in slots
            if eqn.name not in ("mul", "select_n") or not program.sources[s]
        ]

    def places(self, slot: int) -> np.ndarray | None:
        """Return a value that says where elements come from; None where it is unknown."""
        value = self.values.get(slot)
        if value is not None:
            self.relied |= self.program.sources[slot]
        return value

    def _factors(self, slot: int) -> list[int]:
        """Return known slots from which the zeros of ``slot`` follow."""
        if self.program.is_known(slot):
            return [slot]
        eqn = self.program.makers.get(slot)
        large = math.prod(self.program.shapes[slot]) > _MOST_ELEMENTS
        if eqn is None or eqn.name not in _ZERO_KEEPING or large:
            return []
        return [factor for i in eqn.inputs for factor in self._factors(i)]

    def nonzero(self, slot: int) -> np.ndarray:
        """Return where a value may differ from zero, whatever is unknown."""
        value = self.values.get(slot)
        shape = self.program.shapes[slot]
        if value is not None:
            if not (value != 0).all():
                self.relied |= self.program.sources[slot]
            return np.asarray(value != 0)
        eqn = self.program.makers.get(slot)
        if eqn is None or eqn.name not in _ZERO_KEEPING or not self._factors(slot):
            return np.ones(shape, bool)
        if eqn.name in MOVING:
            moved = _gathered(
                eqn,
                self,
                [self.program.shapes[i] for i in eqn.inputs],
                [shape],
            )
            if moved is None:
                return np.ones(shape, bool)
            flat = np.concatenate(
                [*(self.nonzero(i).ravel() for i in eqn.inputs), [True]]
            )
            return flat[moved.origins[eqn.outputs.index(slot)][0]]
        factors = eqn.inputs[:1] if eqn.name == "div" else eqn.inputs
        combine = np.logical_and if eqn.name == "mul" else np.logical_or
        return combine.reduce(
            [np.broadcast_to(self.nonzero(i), shape) for i in factors]
        )


def flow_of(
    program: Program, eqn: Equation, known: Known, depends: Sequence[bool]
) -> Flow:
    """Return the flow of an equation, given which of its operands depend on units; at least one does."""
    shapes = [program.shapes[i] for i in eqn.inputs]
    results = [program.shapes[o] for o in eqn.outputs]
    if max(map(math.prod, shapes + results)) <= _MOST_ELEMENTS:
        moved = _gathered(eqn, known, shapes, results) if eqn.name in MOVING else None
        moved = moved or _summed(eqn, known, shapes, results, depends)
        if moved is not None:
            return moved
    if eqn.name == "gather":
        return Lookup(shapes, results, eqn.params)
    if eqn.name in ELEMENTWISE:
        zeros = {}
        if eqn.name == "mul" and not all(depends):
            zeros[int(depends[1])] = np.broadcast_to(
                ~known.nonzero(eqn.inputs[depends[0]]), results[0]
            )
        return Joined(shapes, results, [()] * len(shapes), zeros=zeros)
    if eqn.name in _REDUCED:
        return Joined(shapes, results, [tuple(eqn.params["axes"])], remain=False)
    if eqn.name in _ALONG:
        return Joined(shapes, results, _axes_along(eqn, shapes))
    if eqn.name == "dot_general":
        nonzero = {i: known.nonzero(eqn.inputs[i]) for i in range(2) if not depends[i]}
        return Contraction(shapes, results, eqn.params["dimension_numbers"], nonzero)
    return Flow(shapes, results)


def _axes_along(eqn: Equation, shapes: list) -> list[tuple[int, ...]]:
    """Return, per operand, the axes along which all elements of the results depend on all of its own."""
    last = len(shapes[0]) - 1
    match eqn.name:
        case "sort":
            return [(eqn.params["dimension"],)] * len(shapes)
        case "cholesky":
            return [(last - 1, last)]
        case "triangular_solve":
            return [
                (last - 1, last),
                (last - 1 if eqn.params["left_side"] else last,),
            ]
    return [(eqn.params["axis"],)]


def _scatter_add(
    eqn: Equation, operand: Array, indices: Array, updates: Array
) -> Array:
    """Return the result of a scatter-add for arrays of another dtype."""
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    return lax.scatter_add(
        operand, indices, updates, **{name: eqn.params[name] for name in names}
    )


def in_floats(
    eqn: Equation, operands: Sequence[Any], bind: Bind = evaluate_equation
) -> Sequence[Any]:
    """Return the results of an affine equation in floats, so that integers have derivatives too."""
    arrays = [jnp.asarray(v) for v in operands]
    if eqn.name == "convert_element_type":
        return arrays
    dtype = jnp.result_type(float)
    # indices and choices remain integers
    is_index = eqn.name in (
        "scatter-add",
        *MOVING,
    )
    indices = _AFFINE[eqn.name](len(arrays)) if is_index else range(0)
    floats = [v if i in indices else v.astype(dtype) for i, v in enumerate(arrays)]
    if eqn.name == "scatter-add":
        return [_scatter_add(eqn, *floats)]
    params = dict(eqn.params)
    if "preferred_element_type" in params:
        params["preferred_element_type"] = dtype
    return bind(eqn._replace(params=params), floats)


def _summed(
    eqn: Equation,
    known: Known,
    shapes: list,
    results: list,
    depends: Sequence[bool],
) -> Flow | None:
    """Return the flow of a sum of elements from known places."""

    def zeros_of(shape):
        return jnp.zeros(shape, jnp.float32)

    def numbers_of(shape):
        return jnp.arange(1, math.prod(shape) + 1, dtype=jnp.float32).reshape(shape)

    if eqn.name == "scatter-add":
        index = known.places(eqn.inputs[1])
        if index is None:
            return None
        # the gradient of the updates is the number of each one's target
        with sharding.eager():

            def add(updates):
                return _scatter_add(
                    eqn, zeros_of(shapes[0]), jnp.asarray(index), updates
                )

            (targets,) = jax.vjp(add, zeros_of(shapes[2]))[1](numbers_of(results[0]))
        return Scattered(shapes, results, np.asarray(targets).astype(int) - 1)
    if eqn.name != "conv_general_dilated" or depends[1]:
        return None
    taps = np.argwhere(known.nonzero(eqn.inputs[1]))
    if not 0 < len(taps) <= _MOST_TAPS:
        return None
    params = {
        **eqn.params,
        "precision": lax.Precision.HIGHEST,
        "preferred_element_type": None,
    }
    with sharding.eager():
        kernels = (
            zeros_of((len(taps), *shapes[1]))
            .at[(jnp.arange(len(taps)), *taps.T)]
            .set(1.0)
        )
        plain = eqn._replace(params=params)

        def convolve(kernel):
            return evaluate_equation(plain, [numbers_of(shapes[0]), kernel])[0]

        origins = np.rint(np.asarray(jax.vmap(convolve)(kernels))).astype(int) - 1
    return Gathered(shapes, results, [origins])


def _gathered(
    eqn: Equation, known: Known, shapes: list, results: list
) -> Gathered | None:
    """Return the flow of an equation that moves elements to known places."""
    values = {i: known.places(eqn.inputs[i]) for i in MOVING[eqn.name](len(eqn.inputs))}
    if any(v is None for v in values.values()):
        return None
    starts = np.cumsum([0, *map(math.prod, shapes)])

    def number(i, shape):
        return np.arange(starts[i], starts[i + 1], dtype=np.int32).reshape(shape)

    numbers = [values.get(i, number(i, shape)) for i, shape in enumerate(shapes)]
    if eqn.name in _ON_HOST:
        origins = [_ON_HOST[eqn.name](eqn.params, *numbers)]
    else:
        with sharding.eager():
            origins = [
                np.asarray(o)
                for o in evaluate_equation(eqn, [jnp.asarray(a) for a in numbers])
            ]
    # of updates of one place, any may win
    if eqn.name == "scatter" and len(
        np.unique(origins[0][origins[0] >= starts[2]])
    ) < math.prod(shapes[2]):
        return None
    # a gather fills in the least integer, which is no element
    return Gathered(shapes, results, [np.where(o < 0, -1, o)[None] for o in origins])


def _broadcast(params: Any, a: np.ndarray) -> np.ndarray:
    new = [
        d
        for d in range(len(params["shape"]))
        if d not in params["broadcast_dimensions"]
    ]
    return np.broadcast_to(np.expand_dims(a, new), params["shape"])


def _reshape(params: Any, a: np.ndarray) -> np.ndarray:
    a = a if params["dimensions"] is None else a.transpose(params["dimensions"])
    return a.reshape(params["new_sizes"])


def _slice(params: Any, a: np.ndarray) -> np.ndarray:
    strides = params["strides"] or [1] * a.ndim
    return a[
        tuple(map(slice, params["start_indices"], params["limit_indices"], strides))
    ]


#: Moves by numpy, which jax would compile for each shape.
_ON_HOST: dict[str, Callable[..., np.ndarray]] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": lambda params, *arrays: np.concatenate(arrays, params["dimension"]),
    "reshape": _reshape,
    "select_n": lambda params, which, *cases: np.choose(which.astype(int), cases),
    "slice": _slice,
    "squeeze": lambda params, a: a.squeeze(tuple(params["dimensions"])),
    "transpose": lambda params, a: a.transpose(params["permutation"]),
}
