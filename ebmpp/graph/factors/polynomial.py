# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Proof from its traced form that an energy is a polynomial, and states to try where there is none."""

from typing import Any

import numpy as np

from jax import Array
import jax.numpy as jnp

from ebmpp.families import Family

#: Operations that map polynomials to polynomials.
_ARITHMETIC = frozenset(
    "add add_any broadcast_in_dim concatenate conv_general_dilated convert_element_type copy cumsum "
    "dot_general integer_pow mul neg optimization_barrier pad reduce_precision reduce_sum reshape rev slice "
    "split square squeeze sub tile transpose".split()
)
#: The same, where the operands from the first number to the last do not depend on the variables.
_CONSTANT_OPERANDS = {
    "div": (1, 2),
    "dynamic_slice": (1, None),
    "dynamic_update_slice": (2, None),
    "gather": (1, 2),
    "scatter-add": (1, 2),
    "select_n": (0, 1),
}
_COUNTS = 128  # each of which is tried
_FAR = np.rint(np.geomspace(1, 1e5, 30))


def is_polynomial(jaxpr: Any, variables: list[bool]) -> bool:
    """Return True if all results are polynomials in the inputs that ``variables`` marks.

    A polynomial that is affine between random points is affine everywhere. Comparisons and roots
    are not polynomials, and may be affine on a part of the states.
    """
    varying = {v for v, varies in zip(jaxpr.invars, variables, strict=True) if varies}
    for equation in jaxpr.eqns:
        inputs = [not hasattr(v, "val") and v in varying for v in equation.invars]
        if any(inputs):
            if not _keeps_polynomials(equation, inputs):
                return False
            varying.update(equation.outvars)
    return True


def _keeps_polynomials(equation: Any, inputs: list[bool]) -> bool:
    name, params = equation.primitive.name, equation.params
    inner = params.get("call_jaxpr", params.get("jaxpr"))
    if inner is not None and name not in ("while", "cond"):
        inner = getattr(inner, "jaxpr", inner)
        if len(inner.invars) != len(inputs):
            return False
        return is_polynomial(inner, [True] * len(inputs) if name == "scan" else inputs)
    if name == "convert_element_type":
        return jnp.issubdtype(params["new_dtype"], jnp.inexact)
    if name == "integer_pow":
        return params["y"] >= 0
    return name in _ARITHMETIC or (
        name in _CONSTANT_OPERANDS and not any(inputs[slice(*_CONSTANT_OPERANDS[name])])
    )


def far_statistics(family: Family) -> list[Array]:
    """Return statistics of states over the range of a family, of equal units and of two random halves."""
    states, generator = family.states(), np.random.default_rng(0)
    if states is None:
        values = np.concatenate([np.arange(_COUNTS), _FAR, -_FAR])
    else:
        values = np.asarray(states)[np.linspace(0, len(states) - 1, min(len(states), _COUNTS)).astype(int)]
    values = values[np.asarray(family.in_support(values.astype(float)))]
    equal = [np.full(family.shape, value) for value in values]
    moved = [np.where(generator.random(family.shape) < 0.5, x, equal[0]) for x in equal[-2 * len(_FAR) :]]
    return [family.statistics(jnp.asarray(x, family.dtype)) for x in equal + moved]
