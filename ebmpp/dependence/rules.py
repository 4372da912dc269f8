# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The flow of each primitive, and which primitives are affine."""

from collections.abc import Callable, Sequence
from functools import partial
import math

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import select, sharding
from ebmpp.dependence.flow import Contraction, Flow, Gathered, Joined, Lookup, Scattered
from ebmpp.dependence.program import (
    Bind,
    Equation,
    Named,
    Program,
    Values,
    evaluate_equation,
    scan_body,
)

ELEMENTWISE = frozenset(
    """
    abs add add_any ceil clamp div floor max min mul neg nextafter rem round sign sub
    copy copy_p convert_element_type name reduce_precision select_n stop_gradient
    eq ge gt is_finite le lt ne
    and not or xor population_count
    shift_left shift_right_arithmetic shift_right_logical
    cbrt exp exp2 expm1 integer_pow log log1p logistic pow rsqrt sqrt square
    acos acosh asin asinh atan atan2 atanh cos cosh sin sinh tan tanh
    bessel_i0e bessel_i1e digamma erf erf_inv erfc igamma igamma_grad_a igammac
    lgamma polygamma regularized_incomplete_beta zeta
    imag real
    """.split()
)
_REDUCED = frozenset(
    """
    argmax argmin
    reduce_and reduce_or reduce_xor
    reduce_max reduce_min reduce_prod reduce_sum
    """.split()
)
_ALONG = frozenset(
    """
    cumlogsumexp cummax cummin cumprod cumsum
    sort cholesky triangular_solve
    """.split()
)
#: Primitives that move elements, and which operands say where to.
MOVING: dict[str, slice] = dict.fromkeys(
    """
    broadcast_in_dim concatenate pad reshape rev slice split
    squeeze stack tile transpose unstack
    """.split(),
    slice(0),
) | {
    "gather": slice(1, 2),
    "dynamic_slice": slice(1, None),
    "dynamic_update_slice": slice(2, None),
    "scatter": slice(1, 2),
    "select_n": slice(1),
}
LINEAR = frozenset(
    """
    add add_any sub neg reduce_sum cumsum
    copy copy_p convert_element_type name reduce_precision
    """.split()
)
#: Primitives that are affine in their other operands, and in which they need not be.
_AFFINE: dict[str, slice] = (
    MOVING
    | dict.fromkeys(LINEAR, slice(0))
    | dict.fromkeys(("div", "scatter-add", "conv_general_dilated"), slice(1, 2))
)
# primitives that may be infinite for finite operands
_SINGULAR = frozenset(
    """
    acosh atanh digamma div erf_inv integer_pow lgamma log log1p polygamma pow rsqrt tan
    zeta
    """.split()
)
#: Primitives that are affine in either operand while the other is fixed.
PRODUCTS = ("mul", "dot_general")
SUMS = ("dot_general", "conv_general_dilated", "reduce_sum")
#: Primitives whose result is zero where their operands, or one factor, are.
_ZERO_KEEPING = frozenset(
    """
    add sub neg mul div convert_element_type copy
    broadcast_in_dim concatenate gather reshape rev select_n slice squeeze transpose
    """.split()
)
_MOST_TAPS = 512
# larger arrays are not searched for zeros, and their elements are not followed, nor
# are sums with more derivatives in units
_MOST_ELEMENTS = 2**24


def is_affine(program: Program, eqn: Equation, depends: Sequence[int]) -> bool:
    """Return True if an equation is jointly affine in the operands at the positions ``depends``."""
    if eqn.name in PRODUCTS:
        return len(depends) == 1 and is_wide(program.dtypes[eqn.inputs[depends[0]]])
    if eqn.name not in _AFFINE or not set(index_operands(eqn)).isdisjoint(depends):
        return False
    return all(_is_exact(program, eqn, i) for i in depends)


def index_operands(eqn: Equation) -> range:
    """Return the positions of operands in which an affine primitive need not be affine."""
    return range(len(eqn.inputs))[_AFFINE[eqn.name]]


def _is_exact(program: Program, eqn: Equation, operand: int) -> bool:
    """Return True if the arithmetic is that of real numbers, without rounding or wrapping."""
    source = program.dtypes[eqn.inputs[operand]]
    target = program.dtypes[eqn.outputs[0]]
    if eqn.name == "div":
        return jnp.issubdtype(source, np.floating)
    if eqn.name != "convert_element_type":
        return is_wide(source)
    same_kind = jnp.issubdtype(target, np.floating) or source.kind == target.kind
    return is_wide(target) and (source == np.bool_ or (is_wide(source) and same_kind))


def is_polynomial(program: Program) -> bool:
    """Return True if all results are polynomials in the units, by their primitives."""
    return all(_keeps_polynomials(program, eqn) for eqn in program.equations)


def is_finite(program: Program) -> bool:
    """Return True if results at finite operands are finite, by primitives and constants."""
    constants = program.constants.values()
    finite = (ELEMENTWISE | _REDUCED) - _SINGULAR
    return all(np.isfinite(c).all() for c in constants) and all(
        eqn.name in finite or _keeps_polynomials(program, eqn)
        for eqn in program.equations
    )


def _keeps_polynomials(program: Program, eqn: Equation) -> bool:
    depends = program.dependent(eqn)
    if not depends or eqn.name in (*PRODUCTS, "conv_general_dilated", "square"):
        return True
    if eqn.name == "integer_pow":
        return eqn.params["y"] >= 0
    if eqn.name == "scan":
        return is_polynomial(scan_body(eqn))
    return is_affine(program, eqn, depends)


def linear_sums(program: Program) -> list[int]:
    """Return slots with affine sums over units from which, and from units, the result follows."""
    size = sum(map(program.size, program.sites.values()))
    affine = set(program.sites.values())
    sums = set[int]()
    for eqn in program.equations:
        depends = program.dependent(eqn)
        slots = [eqn.inputs[i] for i in depends]
        first = eqn.outputs[0]
        # increments of narrower floats would lose digits
        is_full = program.dtypes[first] == jnp.result_type(float)
        is_inside = slots and affine.issuperset(slots)
        if is_inside and is_full and is_affine(program, eqn, depends):
            affine.update(eqn.outputs)
            if eqn.name in SUMS and program.size(first) * size <= _MOST_ELEMENTS:
                sums.add(first)
    after = program.needed([program.output], sums)
    read = {program.output}.union(*(eqn.inputs for eqn in after))
    return sorted(sums & read)


def is_wide(dtype: np.dtype) -> bool:
    """Return True if sums and products of a dtype are exact as of real numbers."""
    return jnp.issubdtype(dtype, np.floating) or dtype in (np.int32, np.int64)


class Known:
    """Values of slots that depend on constants and arguments alone, as far as flows ask for them.

    Indices and matrices among the arguments are used, and their slots collected in
    ``relied``: another call must have the same values. Masks and factors among them are
    not used: data may be zero by chance.
    """

    def __init__(self, program: Program, arguments: Values) -> None:
        self.program = program
        self.relied = set[int]()
        slots = {slot for eqn in program.equations for slot in self._requested(eqn)}
        inputs = dict(zip(program.arguments, arguments))
        values = inputs | program.constants
        if rest := sorted(slots - set(values)):
            values |= jax.jit(lambda inputs: program.run(inputs, rest))(inputs)
        self.values = {slot: np.asarray(values[slot]) for slot in slots}

    def _requested(self, eqn: Equation) -> list[int]:
        """Return the known slots whose values the equation's flow uses."""
        program = self.program
        if not program.dependent(eqn):
            return []
        slots = []
        if eqn.name in (*MOVING, "scatter-add"):
            slots = [eqn.inputs[i] for i in index_operands(eqn)]
        elif eqn.name in (*PRODUCTS, "conv_general_dilated"):
            for slot in eqn.inputs:
                slots += [] if program.depends(slot) else self._factors(slot)
        elif eqn.name == "scan":
            slots = [slot for slot in eqn.inputs if not program.is_key(slot)]
        if eqn.name in ("mul", "select_n"):
            slots = [slot for slot in slots if not program.sources[slot]]
        return [
            slot for slot in slots if program.is_known(slot) and self.is_small(slot)
        ]

    def is_small(self, slot: int) -> bool:
        """Return True if the elements of a slot are followed."""
        return self.program.size(slot) <= _MOST_ELEMENTS

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
        if eqn is None or eqn.name not in _ZERO_KEEPING or not self.is_small(slot):
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
        everywhere = np.ones(shape, bool)
        eqn = self.program.makers.get(slot)
        if eqn is None or eqn.name not in _ZERO_KEEPING or not self._factors(slot):
            return everywhere
        factors = eqn.inputs[:1] if eqn.name == "div" else eqn.inputs
        masks = map(self.nonzero, factors)
        if eqn.name not in MOVING:
            combine = np.logical_and if eqn.name == "mul" else np.logical_or
            return combine.reduce([np.broadcast_to(mask, shape) for mask in masks])
        moved = _gathered(eqn, self)
        if moved is None:
            return everywhere
        flat = np.concatenate([*map(np.ravel, masks), [True]])
        return flat[moved.origins[eqn.outputs.index(slot)][0]]


def flow_of(eqn: Equation, known: Known, depends: Sequence[bool]) -> Flow:
    """Return the flow of an equation, given which of its operands depend on units."""
    flow = None
    if all(map(known.is_small, (*eqn.inputs, *eqn.outputs))):
        if eqn.name in MOVING:
            flow = _gathered(eqn, known)
        elif eqn.name == "scatter-add":
            flow = _scattered(eqn, known)
        elif eqn.name == "conv_general_dilated" and not depends[1]:
            flow = _convolved(eqn, known)
    if flow is not None:
        return flow
    if eqn.name == "gather":
        return Lookup(eqn)
    if eqn.name in ELEMENTWISE:
        zeros = {}
        if eqn.name == "mul" and not all(depends):
            factor, other = (0, 1) if depends[1] else (1, 0)
            is_zero = ~known.nonzero(eqn.inputs[factor])
            zeros[other] = np.broadcast_to(is_zero, eqn.results[0])
        return Joined(eqn, [()] * len(eqn.inputs), zeros=zeros)
    if eqn.name in _REDUCED:
        return Joined(eqn, [tuple(eqn.params["axes"])], remain=False)
    if eqn.name in _ALONG:
        return Joined(eqn, _axes_along(eqn))
    if eqn.name == "dot_general":
        nonzero = {i: known.nonzero(eqn.inputs[i]) for i in range(2) if not depends[i]}
        return Contraction(eqn, nonzero)
    return Flow(eqn)


def _axes_along(eqn: Equation) -> list[tuple[int, ...]]:
    """Return, per operand, the axes along which all results depend on all elements."""
    rank = len(eqn.shapes[0])
    matrix = (rank - 2, rank - 1)
    match eqn.name:
        case "sort":
            return [(eqn.params["dimension"],)] * len(eqn.inputs)
        case "cholesky":
            return [matrix]
        case "triangular_solve":
            return [matrix, matrix[:1] if eqn.params["left_side"] else matrix[1:]]
    return [(eqn.params["axis"],)]


def _scatter_add(eqn: Equation) -> Callable[..., Array]:
    """Return a scatter-add for arrays of any dtype."""
    names = "dimension_numbers indices_are_sorted unique_indices mode".split()
    return partial(lax.scatter_add, **select(eqn.params, names))


def in_floats(
    eqn: Equation, operands: Values, bind: Bind = evaluate_equation
) -> Values:
    """Return the results of an affine equation in floats, so that integers have derivatives too."""
    arrays = [jnp.asarray(v) for v in operands]
    if eqn.name == "convert_element_type":
        return arrays
    dtype = jnp.result_type(float)
    # indices and choices remain integers
    is_index = eqn.name in (*MOVING, "scatter-add")
    indices = index_operands(eqn) if is_index else ()
    floats = [v if i in indices else v.astype(dtype) for i, v in enumerate(arrays)]
    if eqn.name == "scatter-add":
        return [_scatter_add(eqn)(*floats)]
    params = dict(eqn.params)
    if "preferred_element_type" in params:
        params["preferred_element_type"] = dtype
    return bind(eqn._replace(params=params), floats)


def _scattered(eqn: Equation, known: Known) -> Scattered | None:
    """Return the flow of a scatter-add to known places."""
    index = known.places(eqn.inputs[1])
    if index is None:
        return None
    target, _, updates = eqn.shapes
    # the gradient of the updates is the number of each one's target
    with sharding.eager():
        start = jnp.zeros(target, jnp.float32)
        add = partial(_scatter_add(eqn), start, jnp.asarray(index))
        _, pullback = jax.vjp(add, jnp.zeros(updates, jnp.float32))
        (targets,) = pullback(_numbers(target))
    return Scattered(eqn, np.asarray(targets).astype(int) - 1)


def _convolved(eqn: Equation, known: Known) -> Gathered | None:
    """Return the flow of a convolution with known filters, one map per tap."""
    taps = np.argwhere(known.nonzero(eqn.inputs[1]))
    if not 0 < len(taps) <= _MOST_TAPS:
        return None
    image_shape, kernel_shape = eqn.shapes
    params = dict(eqn.params)
    params["precision"] = lax.Precision.HIGHEST
    params["preferred_element_type"] = None
    plain = eqn._replace(params=params)
    count = len(taps)

    def convolve(kernel):
        image = _numbers(image_shape)
        return evaluate_equation(plain, [image, kernel])[0]

    with sharding.eager():
        kernels = jnp.zeros((count, *kernel_shape), jnp.float32)
        one_tap = kernels.at[(jnp.arange(count), *taps.T)]
        numbers = jax.vmap(convolve)(one_tap.set(1.0))
        origins = np.rint(np.asarray(numbers)).astype(int) - 1
    return Gathered(eqn, [origins])


def _numbers(shape: tuple[int, ...]) -> Array:
    """Return the numbers of elements from 1 on, as floats."""
    return jnp.arange(1, math.prod(shape) + 1, dtype=jnp.float32).reshape(shape)


def _gathered(eqn: Equation, known: Known) -> Gathered | None:
    """Return the flow of an equation that moves elements to known places."""
    values = {i: known.places(eqn.inputs[i]) for i in index_operands(eqn)}
    if any(v is None for v in values.values()):
        return None
    starts = np.cumsum([0, *map(math.prod, eqn.shapes)])
    operands = [
        values[i]
        if i in values
        else np.arange(starts[i], starts[i + 1], dtype=np.int32).reshape(shape)
        for i, shape in enumerate(eqn.shapes)
    ]
    if eqn.name in _ON_HOST:
        origins = [_ON_HOST[eqn.name](eqn.params, *operands)]
    else:
        with sharding.eager():
            moved = evaluate_equation(eqn, list(map(jnp.asarray, operands)))
            origins = list(map(np.asarray, moved))
    if eqn.name == "scatter":
        (origin,) = origins
        updates = np.unique(origin[origin >= starts[2]])
        if len(updates) < math.prod(
            eqn.shapes[2]
        ):  # of several of one place, any may win
            return None
    # a gather fills in the least integer, which is no element
    return Gathered(eqn, [np.where(o < 0, -1, o)[None] for o in origins])


def _broadcast(params: Named, a: np.ndarray) -> np.ndarray:
    shape = params["shape"]
    new = set(range(len(shape))).difference(params["broadcast_dimensions"])
    return np.broadcast_to(np.expand_dims(a, sorted(new)), shape)


def _reshape(params: Named, a: np.ndarray) -> np.ndarray:
    a = a if params["dimensions"] is None else a.transpose(params["dimensions"])
    return a.reshape(params["new_sizes"])


def _slice(params: Named, a: np.ndarray) -> np.ndarray:
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
