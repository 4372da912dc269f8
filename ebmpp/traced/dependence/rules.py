# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Which flow each primitive has."""

from collections.abc import Callable, Sequence
import math
from typing import Any

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import sharding
from ebmpp.traced.dependence.flow import (
    Along,
    Contraction,
    Elementwise,
    Flow,
    Lookup,
    Moved,
    Scattered,
    Solution,
    Taps,
)
from ebmpp.traced.dependence.program import Program, Step, bind

_ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp "
    "convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt "
    "igamma igamma_grad_a igammac imag integer_pow is_finite le lgamma log log1p logistic lt max min mul "
    "name ne neg nextafter not or polygamma population_count pow real reduce_precision "
    "regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta".split()
)
_REDUCTIONS = frozenset(
    "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor".split()
)
_CUMULATIVE = frozenset("cumlogsumexp cummax cummin cumprod cumsum".split())
#: Primitives that move elements, and the operands that tell where to.
MOVING: dict[str, Callable[[int], range]] = dict.fromkeys(
    "broadcast_in_dim concatenate expand_dims pad reshape rev slice split squeeze stack tile transpose "
    "unstack".split(),
    lambda count: range(0),
) | {
    "gather": lambda count: range(1, 2),
    "dynamic_slice": lambda count: range(1, count),
    "dynamic_update_slice": lambda count: range(2, count),
    "scatter": lambda count: range(1, 2),
    "select_n": lambda count: range(1),
}
_SUMMING = ("scatter-add", "conv_general_dilated")
#: Primitives that are affine in their other operands, and the operands in which they need not be.
_AFFINE: dict[str, Callable[[int], range]] = (
    MOVING
    | dict.fromkeys(
        "add add_any convert_element_type copy copy_p cumsum neg reduce_sum sub".split(),
        lambda count: range(0),
    )
    | dict.fromkeys(("div", "scatter-add", "conv_general_dilated"), lambda count: range(1, 2))
)
#: Affine in either operand while the other is held.
PRODUCTS = ("mul", "dot_general")
#: Primitives whose result is zero where that of their operands, or of one factor, is.
_ZERO_KEEPING = frozenset(
    "mul add sub neg div convert_element_type copy broadcast_in_dim concatenate expand_dims reshape rev "
    "slice squeeze transpose select_n gather".split()
)
_MOST_TAPS = 512
MOST = 2**24  # elements of what is looked at for zeros, or moved


def is_affine(program: Program, step: Step, depends: Sequence[int]) -> bool:
    """Whether a step is affine in the operands that depend on units, at these positions, together."""
    if step.name in PRODUCTS:
        return len(depends) == 1 and is_wide(program.dtypes[step.inputs[depends[0]]])
    fixed = _AFFINE.get(step.name)
    if fixed is None or set(depends) & set(fixed(len(step.inputs))):
        return False
    return all(_counts(program, step, i) for i in depends)


def integers(step: Step) -> range:
    """Positions of operands that are indices or choices: they stay so where others become floats."""
    fixed = _AFFINE[step.name] if step.name in ("scatter-add", *MOVING) else None
    return fixed(len(step.inputs)) if fixed else range(0)


def _counts(program: Program, step: Step, operand: int) -> bool:
    """Whether arithmetic is that of real numbers: floats, and whole numbers that do not wrap."""
    source = program.dtypes[step.inputs[operand]]
    if step.name == "div":  # of whole numbers it rounds
        return jnp.issubdtype(source, np.floating)
    if step.name != "convert_element_type":
        return is_wide(source)
    target = program.dtypes[step.outputs[0]]
    to_float = jnp.issubdtype(target, np.floating)
    return is_wide(target) and (
        source == np.bool_ or (is_wide(source) and (to_float or source.kind == target.kind))
    )


def is_wide(dtype: np.dtype) -> bool:
    """Whether sums and products are those of real numbers."""
    return jnp.issubdtype(dtype, np.floating) or dtype in (np.int32, np.int64)


class Known:
    """Values of slots that depend on constants and arguments alone, as far as flows ask for them.

    Of arguments, whose values may be others at the next call, what would follow from a mask or a product's
    zeros is not used: data would often decide it by chance. Indices and matrices are used, and the
    arguments in :attr:`relied` must then stay what they are.

    :param arguments: the arguments' values.
    """

    def __init__(self, program: Program, arguments: Sequence[Any]) -> None:
        self.program, self.relied = program, set()
        asked = {slot for step in program.steps for slot in self._asked(step)}
        given = dict(zip(program.arguments, arguments, strict=True))
        at_hand = given | program.constants
        left = sorted(asked - set(at_hand))
        made = jax.jit(lambda given: program.run(given, left))(given) if left else {}
        self.values = {slot: np.asarray(made.get(slot, at_hand.get(slot))) for slot in asked}

    def _asked(self, step: Step) -> list[int]:
        """Slots that the step's flow asks for, if they are known."""
        program, depends = self.program, [self.program.dependent[i] for i in step.inputs]
        if not any(depends):
            return []
        if step.name in MOVING:
            found = [step.inputs[i] for i in MOVING[step.name](len(step.inputs))]
        elif step.name == "scatter-add":
            found = [step.inputs[1]]
        elif step.name in (*PRODUCTS, "conv_general_dilated"):
            found = [
                f for s, own in zip(step.inputs, depends, strict=True) if not own for f in self._leaves(s)
            ]
        elif step.name == "scan":
            found = [s for s in step.inputs if not jnp.issubdtype(program.dtypes[s], jax.dtypes.prng_key)]
        else:
            return []
        fixed = step.name in ("mul", "select_n")
        known = [slot for slot in found if program.sources[slot] is not None]
        return [
            s for s in known if math.prod(program.shapes[s]) <= MOST and not (fixed and program.sources[s])
        ]

    def places(self, slot: int) -> np.ndarray | None:
        """A value that tells where elements come from; None where it is not known."""
        value = self.values.get(slot)
        if value is not None:
            self.relied |= self.program.sources[slot] or set()
        return value

    def zeros(self, slot: int) -> np.ndarray | None:
        """Where a value is zero whatever is not known; None where it may be anything anywhere."""
        found = self._nonzero(slot)
        return None if found.all() else ~found

    # -- zeros of what is a product or a sum of known and of other values ---------------------------

    def _leaves(self, slot: int) -> list[int]:
        """Known slots that tell where ``slot`` is zero."""
        if self.program.sources[slot] is not None:
            return [slot]
        step = self.program.makers.get(slot)
        if step is None or step.name not in _ZERO_KEEPING or math.prod(self.program.shapes[slot]) > MOST:
            return []
        return [leaf for i in step.inputs for leaf in self._leaves(i)]

    def _nonzero(self, slot: int) -> np.ndarray:
        """Where a slot may be other than zero."""
        value, shape = self.values.get(slot), self.program.shapes[slot]
        if value is not None:
            if not (value != 0).all():
                self.relied |= self.program.sources[slot] or set()
            return np.asarray(value != 0)
        step = self.program.makers.get(slot)
        if step is None or step.name not in _ZERO_KEEPING or not self._leaves(slot):
            return np.ones(shape, bool)
        if step.name in MOVING:
            shapes = [self.program.shapes[i] for i in step.inputs]
            moved = _moved(step, self, shapes, [self.program.shapes[o] for o in step.outputs])
            if moved is None:
                return np.ones(shape, bool)
            each = np.concatenate([*(self._nonzero(i).ravel() for i in step.inputs), [True]])
            return each[moved.origins[step.outputs.index(slot)]]
        if step.name == "mul":
            a, b = (np.broadcast_to(self._nonzero(i), shape) for i in step.inputs)
            return a & b
        numerators = step.inputs[:1] if step.name == "div" else step.inputs
        return np.logical_or.reduce([np.broadcast_to(self._nonzero(i), shape) for i in numerators])


def flow_of(program: Program, step: Step, known: Known, depends: Sequence[bool]) -> Flow:
    """The flow of a step.

    :param depends: which operands depend on units, at least one.
    """
    shapes = [program.shapes[i] for i in step.inputs]
    results = [program.shapes[o] for o in step.outputs]
    if max(map(math.prod, shapes + results)) <= MOST:
        moved = _moved(step, known, shapes, results) if step.name in MOVING else None
        if moved is None and step.name in _SUMMING:
            moved = _summed(step, known, shapes, results, depends)
        if moved is not None:
            return moved
    if step.name == "gather":
        return Lookup(shapes, results, step.params)
    if step.name == "mul" and depends[0] != depends[1]:
        zeros = known.zeros(step.inputs[depends[0]])
        where = {} if zeros is None else {int(depends[1]): np.broadcast_to(zeros, results[0])}
        return Elementwise(shapes, results, where)
    if step.name in _ELEMENTWISE:
        return Elementwise(shapes, results)
    if step.name in _REDUCTIONS:
        return Along(shapes, results, tuple(step.params["axes"]), stay=False)
    if step.name in _CUMULATIVE:
        return Along(shapes, results, (step.params["axis"],), stay=True)
    if step.name == "sort":
        return Along(shapes, results, (step.params["dimension"],), stay=True)
    if step.name == "cholesky":
        return Along(shapes, results, (len(shapes[0]) - 2, len(shapes[0]) - 1), stay=True)
    if step.name == "triangular_solve":
        return Solution(shapes, results, -2 if step.params["left_side"] else -1)
    if step.name == "dot_general":
        zeros = {i: known.zeros(step.inputs[i]) for i in range(2) if not depends[i]}
        nonzero = {i: ~z for i, z in zeros.items() if z is not None}
        return Contraction(shapes, results, step.params["dimension_numbers"], nonzero)
    return Flow(shapes, results)


def scatter_add(step: Step, operand: Array, indices: Array, updates: Array) -> Array:
    """What a step that adds updates to an array makes of arrays of another dtype."""
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    return lax.scatter_add(operand, indices, updates, **{name: step.params[name] for name in names})


def in_floats(
    step: Step, operands: Sequence[Any], bound: Callable[[Step, list[Array]], Sequence[Any]] = bind
) -> Sequence[Any]:
    """What an affine step makes of its operands as floats, that whole numbers have derivatives too.

    :param bound: what makes it of floats.
    """
    arrays = [jnp.asarray(v) for v in operands]
    if step.name == "convert_element_type":
        return arrays
    dtype = jnp.result_type(float)
    floats = [v if i in integers(step) else v.astype(dtype) for i, v in enumerate(arrays)]
    if step.name == "scatter-add":
        return [scatter_add(step, *floats)]
    params = dict(step.params)
    if "preferred_element_type" in params:
        params["preferred_element_type"] = dtype
    return bound(step._replace(params=params), floats)


def _summed(
    step: Step, known: Known, shapes: list, results: list, depends: Sequence[bool]
) -> Scattered | Taps | None:
    """Of sums of what is moved to places that are known."""
    nothing = lambda shape: jnp.zeros(shape, jnp.float32)
    number = lambda shape: jnp.arange(1, math.prod(shape) + 1, dtype=jnp.float32).reshape(shape)
    if step.name == "scatter-add":
        index = known.places(step.inputs[1])
        if index is None:
            return None
        with sharding.at_once():  # the updates' derivatives tell which element they go to
            put = lambda updates: scatter_add(step, nothing(shapes[0]), jnp.asarray(index), updates)
            (targets,) = jax.vjp(put, nothing(shapes[2]))[1](number(results[0]))
        return Scattered(shapes, results, np.asarray(targets).astype(int) - 1)
    zeros = known.zeros(step.inputs[1])
    taps = np.argwhere(np.ones(shapes[1], bool) if zeros is None else ~zeros)
    if depends[1] or len(taps) > _MOST_TAPS or len(taps) == 0:
        return None
    params = {**step.params, "precision": lax.Precision.HIGHEST, "preferred_element_type": None}
    with sharding.at_once():
        kernels = nothing((len(taps), *shapes[1])).at[(jnp.arange(len(taps)), *taps.T)].set(1.0)
        own = step._replace(params=params)
        made = jax.vmap(lambda kernel: bind(own, [number(shapes[0]), kernel])[0])(kernels)
    origins = np.rint(np.asarray(made)).astype(int) - 1
    return Taps(shapes, results, [Moved(shapes, results, [origin]) for origin in origins])


def _moved(step: Step, known: Known, shapes: list, results: list) -> Moved | None:
    """Of a step that moves elements to places that are known."""
    places = MOVING[step.name](len(step.inputs))
    values = {i: known.places(step.inputs[i]) for i in places}
    if any(v is None for v in values.values()):
        return None
    start, operands = 0, []
    for i, shape in enumerate(shapes):
        size = math.prod(shape)
        operands.append(values.get(i, np.arange(start, start + size, dtype=np.int32).reshape(shape)))
        start += size
    origins = _on_host(step, operands)
    if origins is None:
        with sharding.at_once():
            origins = bind(step, [jnp.asarray(a) for a in operands])
    origins = [np.asarray(o) for o in origins]
    if step.name == "scatter":  # of updates of one place any may win
        updates = start - math.prod(shapes[2])
        if len(np.unique(origins[0][origins[0] >= updates])) < math.prod(shapes[2]):
            return None
    # what a gather fills in is no element: the least integer
    return Moved(shapes, results, [np.where(o < 0, -1, o) for o in origins])


def _on_host(step: Step, operands: list[np.ndarray]) -> list[np.ndarray] | None:
    """What numpy does at once, and jax would compile for."""
    a, params = operands[0], step.params
    if step.name == "broadcast_in_dim":
        shape = params["shape"]
        spread = [1] * len(shape)
        for size, d in zip(a.shape, params["broadcast_dimensions"], strict=True):
            spread[d] = size
        return [np.broadcast_to(a.reshape(spread), shape)]
    if step.name == "reshape" and params["dimensions"] is None:
        return [a.reshape(params["new_sizes"])]
    if step.name == "squeeze":
        return [a.squeeze(tuple(params["dimensions"]))]
    if step.name == "expand_dims":
        return [np.expand_dims(a, tuple(params["dimensions"]))]
    if step.name == "transpose":
        return [a.transpose(params["permutation"])]
    if step.name == "concatenate":
        return [np.concatenate(operands, params["dimension"])]
    if step.name == "slice":
        strides = params["strides"] or [1] * a.ndim
        bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
        return [a[tuple(slice(*b) for b in bounds)]]
    if step.name == "select_n":
        which = np.broadcast_to(a.astype(int), operands[1].shape)
        return [np.choose(which, operands[1:])]
    return None
