# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Derivatives in which zero times an infinite number is zero.

In ``where(p, a * x, inf * x)`` the branch that is not selected has the cotangent 0,
from which the chain rule makes 0 * inf. Here 0 times anything is 0 on the way back, and
finite derivatives of any order are unchanged.
"""

from collections.abc import Callable, Sequence

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.dependence.program import (
    Bind,
    Equation,
    Program,
    SlotValues,
    Values,
    evaluate_equation,
)

#: Primitives that multiply a cotangent by values that may be infinite: element by
#: element, or in sums.
_ELEMENTWISE = "abs div integer_pow log mul pow rsqrt sqrt square".split()
_CONTRACTIONS = ("dot_general", "conv_general_dilated")


def guard(program: Program, is_moving: Callable[[int], bool]) -> Bind:
    """Return an evaluation that guards derivatives in moving slots where these may be nan."""

    def bind(eqn, operands):
        moving = [i for i, slot in enumerate(eqn.inputs) if is_moving(slot)]
        multiplies = eqn.name in (*_ELEMENTWISE, *_CONTRACTIONS)
        if moving and multiplies and not _is_harmless(program, eqn, moving):
            return guarded(eqn, operands, moving)
        return evaluate_equation(eqn, operands)

    return bind


def run_guarded(program: Program, inputs: SlotValues, slot: int) -> Array:
    """Return the value of a slot, with guarded derivatives in the units."""
    return program.run(inputs, [slot], guard(program, program.depends))[slot]


def _is_harmless(program: Program, eqn: Equation, moving: Sequence[int]) -> bool:
    """Return True for products with a constant that keeps finite cotangents finite."""
    is_product = eqn.name in ("mul", *_CONTRACTIONS) or (
        eqn.name == "div" and moving == [0]
    )
    if len(moving) != 1 or not is_product:
        return False
    value = np.asarray(program.constants.get(eqn.inputs[1 - moving[0]], np.inf), float)
    return bool(np.isfinite(value).all() and (eqn.name != "div" or value.all()))


def guarded(eqn: Equation, operands: Sequence[Array], moving: Sequence[int]) -> Values:
    """Return an equation's results, with guarded derivatives in the ``moving`` operands."""
    elementwise = eqn.name in _ELEMENTWISE
    if elementwise:
        operands = jnp.broadcast_arrays(*operands)

    def fn(*values):
        return evaluate_equation(eqn, values)[0]

    def pull(cotangent, *operands):
        cotangents = jax.vjp(fn, *operands)[1](cotangent)
        return [cotangents[i] for i in moving]

    def backward(operands, cotangent):
        if elementwise:
            is_dead = cotangent == 0
            pulled = [
                jnp.where(is_dead & ~jnp.isfinite(p), 0, p)
                for p in pull(cotangent, *operands)
            ]
        else:
            pulled = _pull_sum(pull, operands, cotangent)
        cotangents = dict(zip(moving, pulled))
        return tuple(cotangents.get(i) for i in range(len(operands)))

    evaluate = jax.custom_vjp(fn)
    evaluate.defvjp(lambda *operands: (fn(*operands), operands), backward)
    return [evaluate(*operands)]


def _pull_sum(
    pull: Callable,
    operands: Sequence[Array],
    cotangent: Array,
) -> list[Array]:
    """Pull back through sums of products; dead ones matter only where a factor is not finite."""
    finite = [jnp.isfinite(v) for v in operands]

    def without_dead_products():
        is_infinite = [1 - f.astype(cotangent.dtype) for f in finite]
        counts = pull((cotangent != 0).astype(cotangent.dtype), *is_infinite)
        finite_operands = [jnp.where(f, v, 0) for f, v in zip(finite, operands)]
        clean = pull(cotangent, *finite_operands)
        plain = pull(cotangent, *operands)
        return [jnp.where(n > 0, p, c) for n, p, c in zip(counts, plain, clean)]

    all_finite = jnp.stack([f.all() for f in finite]).all()
    return lax.cond(
        all_finite, lambda: pull(cotangent, *operands), without_dead_products
    )
