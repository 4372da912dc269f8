# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What the operations of an energy tell of it: where all are sums and products, that it is multi-affine.

A proof, and soon found: nothing is compiled, where :mod:`~ebmpp.graph.probe` compiles the energy and its
gradients (a Boltzmann machine of a new size 0.12 s, and 0.01 s so). It says nothing of other energies.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import jax
from jax import Array
from jax.extend import core
import jax.numpy as jnp

# Each value by the numbers of the blocks that it depends on, in each of which it is affine.
_Blocks = frozenset[int]

_SUMS = frozenset(
    "add sub neg reduce_sum cumsum add_any reshape broadcast_in_dim transpose squeeze expand_dims slice "
    "concatenate pad rev copy iota convert_element_type".split()
)
_PRODUCTS = frozenset({"mul", "dot_general", "conv_general_dilated"})
_CALLS = frozenset({"jit", "pjit", "closed_call"})
_NONE: _Blocks = frozenset()


def is_multi_affine(energy: Callable[..., Array], params: Any, statistics: Sequence[Any]) -> bool:
    """Whether ``energy(params, *statistics)`` is a number, affine in each of ``statistics``, for sure.

    Finite too, but for sums and products of finite numbers that are too large for their type.

    :param params: finite where it is to be found out.
    :param statistics: of each block, or their shapes.

    **Example**

    >>> is_multi_affine(lambda w, v, h: -v @ w @ h, jnp.ones((3, 2)), [jnp.ones(3), jnp.ones(2)])
    True
    >>> is_multi_affine(lambda w, v, h: -v @ w @ v, jnp.ones((3, 3)), [jnp.ones(3), jnp.ones(2)])
    False
    """
    leaves = jax.tree.leaves(params)
    if not all(_is_finite(leaf) for leaf in leaves):
        return False
    try:
        traced, made = jax.make_jaxpr(energy, return_shape=True)(params, *statistics)
    except Exception:  # whatever a user's code raises is told by who runs it
        return False
    if not (isinstance(made, jax.ShapeDtypeStruct) and made.shape == () and _is_float(made)):
        return False
    given = [_NONE] * len(leaves) + [frozenset({i}) for i in range(len(statistics))]
    return _of_program(traced, given) is not None


def _is_finite(value: Any) -> bool:
    value = np.asarray(value)
    return not jnp.issubdtype(value.dtype, jnp.inexact) or bool(np.isfinite(value).all())


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jnp.floating)


def _of_program(program: core.ClosedJaxpr, given: Sequence[_Blocks]) -> list[_Blocks] | None:
    """Of what a program returns; None where that is not known to be affine."""
    if not all(_is_finite(constant) for constant in program.consts):
        return None
    known: dict[Any, _Blocks] = dict.fromkeys(program.jaxpr.constvars, _NONE)
    known |= dict(zip(program.jaxpr.invars, given, strict=True))
    for step in program.jaxpr.eqns:
        if any(isinstance(v, core.Literal) and not _is_finite(v.val) for v in step.invars):
            return None
        inputs = [_NONE if isinstance(v, core.Literal) else known[v] for v in step.invars]
        outputs = _of_step(step, inputs)
        if outputs is None:
            return None
        known |= dict(zip(step.outvars, outputs, strict=True))
    return [_NONE if isinstance(v, core.Literal) else known[v] for v in program.jaxpr.outvars]


def _of_step(step: Any, inputs: Sequence[_Blocks]) -> list[_Blocks] | None:
    name, together = step.primitive.name, _NONE.union(*inputs)
    if name in _CALLS:
        return _of_program(step.params["jaxpr"], inputs)
    if _rounds(step, inputs):
        return None
    if name in _SUMS:
        known = True
    elif name in _PRODUCTS:
        known = inputs[0].isdisjoint(inputs[1])
    elif name == "div":  # by a number that is known, so that it is finite
        by = step.invars[1]
        known = isinstance(by, core.Literal) and bool(np.all(by.val != 0))
    elif name == "select_n":
        known = not inputs[0]
    else:
        known = False
    return [together] if known else None


def _rounds(step: Any, inputs: Sequence[_Blocks]) -> bool:
    """Whether values that depend on a block become whole numbers, or floats of fewer bits."""
    given = [v.aval.dtype for v, blocks in zip(step.invars, inputs, strict=True) if blocks]
    return any(
        not _is_float(v.aval) or v.aval.dtype.itemsize < d.itemsize for v in step.outvars for d in given
    )
