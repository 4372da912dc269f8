# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Which flow each primitive has."""

from collections.abc import Callable, Sequence
import math

import numpy as np

import jax
import jax.numpy as jnp

from ebmpp.ppl.dependence.flow import Along, Contraction, Elementwise, Flow, Lookup, Moved
from ebmpp.ppl.dependence.program import Program, Step, bind

_ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp "
    "convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt "
    "igamma igamma_grad_a igammac imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne "
    "neg nextafter not or polygamma population_count pow real reduce_precision regularized_incomplete_beta "
    "rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square "
    "stop_gradient sub tan tanh xor zeta".split()
)
_REDUCTIONS = frozenset(
    "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor".split()
)
_CUMULATIVE = frozenset("cumlogsumexp cummax cummin cumprod cumsum".split())
#: Primitives that move elements, and the operands that tell where to.
MOVING: dict[str, Callable[[int], range]] = dict.fromkeys(
    "broadcast_in_dim concatenate expand_dims pad reshape rev slice split squeeze transpose".split(),
    lambda count: range(0),
) | {
    "gather": lambda count: range(1, 2),
    "dynamic_slice": lambda count: range(1, count),
    "dynamic_update_slice": lambda count: range(2, count),
    "select_n": lambda count: range(1),
}
#: Primitives that are affine in their other operands, and the operands in which they need not be.
_AFFINE: dict[str, Callable[[int], range]] = MOVING | dict.fromkeys(
    "add add_any convert_element_type copy copy_p cumsum neg reduce_sum sub".split(), lambda count: range(0)
) | {"div": lambda count: range(1, 2)}
#: Affine in either operand while the other is held.
PRODUCTS = ("mul", "dot_general")
MOST = 2**24  # elements of what is looked at for zeros, or moved


def affine_operands(program: Program, step: Step) -> tuple[int, ...] | None:
    """Positions of operands that depend on units, if the step is affine in them together; None if not."""
    depends = tuple(i for i, slot in enumerate(step.inputs) if program.dependent[slot])
    if step.name in PRODUCTS:
        return depends if len(depends) == 1 and is_wide(program.dtypes[step.inputs[depends[0]]]) else None
    if step.name not in _AFFINE or set(depends) & set(_AFFINE[step.name](len(step.inputs))):
        return None
    return depends if all(_counts(program, step, i) for i in depends) else None


def _counts(program: Program, step: Step, operand: int) -> bool:
    """Whether arithmetic is that of real numbers: floats, and whole numbers that do not wrap."""
    source = program.dtypes[step.inputs[operand]]
    if step.name == "div":  # of whole numbers it rounds
        return jnp.issubdtype(source, np.floating)
    if step.name != "convert_element_type":
        return is_wide(source)
    target = program.dtypes[step.outputs[0]]
    to_float = jnp.issubdtype(target, np.floating)
    return is_wide(target) and (source == bool or (is_wide(source) and (to_float or source.kind == target.kind)))


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

    def __init__(self, program: Program, arguments: Sequence[np.ndarray]) -> None:
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
        elif step.name in PRODUCTS:
            found = [slot for slot, own in zip(step.inputs, depends, strict=True) if not own]
        else:
            return []
        fixed = step.name in ("mul", "select_n")
        known = [slot for slot in found if program.sources[slot] is not None]
        return [s for s in known if math.prod(program.shapes[s]) <= MOST and not (fixed and program.sources[s])]

    def places(self, slot: int) -> np.ndarray | None:
        """A value that tells where elements come from."""
        value = self.values.get(slot)
        if value is not None:
            self.relied |= self.program.sources[slot] or set()
        return value

    def zeros(self, slot: int) -> np.ndarray | None:
        """Where a value is zero; None where it is not known, or nowhere zero."""
        value = self.values.get(slot)
        if value is None or (value != 0).all():
            return None
        self.relied |= self.program.sources[slot] or set()
        return value == 0


def flow_of(program: Program, step: Step, known: Known) -> Flow:
    """The flow of a step of which at least one operand depends on units."""
    shapes = [program.shapes[i] for i in step.inputs]
    results = [program.shapes[o] for o in step.outputs]
    depends = [program.dependent[i] for i in step.inputs]
    if step.name in MOVING and max(map(math.prod, shapes + results)) <= MOST:
        moved = _moved(step, known, shapes, results)
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
    if step.name == "dot_general":
        zeros = {i: known.zeros(step.inputs[i]) for i in range(2) if not depends[i]}
        nonzero = {i: ~z for i, z in zeros.items() if z is not None}
        return Contraction(shapes, results, step.params["dimension_numbers"], nonzero)
    return Flow(shapes, results)


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
        with jax.ensure_compile_time_eval():
            origins = bind(step, [jnp.asarray(a) for a in operands])
    origins = [np.asarray(o) for o in origins]
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


