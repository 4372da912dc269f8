# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Steps whose results do not count where their cotangent is zero, whatever their operands are there.

Of ``where(p, a * x, inf * x)`` the side that is not taken has the cotangent 0, and the chain rule would make
0 * inf of it, not a number, for all that comes before. Here 0 times anything is 0 on the way back, and what
is finite stays what it is, its own derivatives too.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.traced.dependence.program import Program, Step, bind

#: Primitives that multiply a cotangent by what may not be finite, element by element; and those that add up.
_ELEMENTWISE = ("abs", "div", "integer_pow", "log", "mul", "pow", "rsqrt", "sqrt", "square")
_CONTRACTIONS = ("dot_general", "conv_general_dilated")


def multiplies(step: Step) -> bool:
    """Whether a step pulls its cotangent back times values that may not be finite."""
    return step.name in (*_ELEMENTWISE, *_CONTRACTIONS)


def run_guarded(program: Program, given: Mapping[int, Any], slot: int) -> Any:
    """The value of a slot, to be differentiated in units of which it is a sum of powers."""

    def bound(step: Step, operands: Sequence[Any]) -> Sequence[Any]:
        moving = [i for i, operand in enumerate(step.inputs) if program.dependent[operand]]
        return guarded(step, operands, moving) if moving and multiplies(step) else bind(step, operands)

    return program.run(given, [slot], bound)[slot]


def is_harmless(step: Step, value: Any) -> bool:
    """Whether a step pulls a finite cotangent back as a finite one, by a constant operand."""
    value = np.asarray(value, float)
    return bool(np.isfinite(value).all() and (step.name != "div" or value.all()))


def guarded(step: Step, operands: Sequence[Array], moving: Sequence[int]) -> Sequence[Any]:
    """What a step makes of floats, to be differentiated.

    :param moving: positions of the operands whose cotangents are asked for.

    **Example**

    >>> import jax, jax.numpy as jnp
    >>> from ebmpp.traced.dependence.program import Program
    >>> times = Program(lambda own, *_: own["x"] * jnp.inf, {"x": 1.0}, {}, []).steps[0]
    >>> unused = lambda x: jnp.where(x > 2, guarded(times, [x, jnp.inf], [0])[0], 3 * x)
    >>> float(jax.grad(unused)(1.0)), float(jax.grad(lambda x: jnp.where(x > 2, jnp.inf * x, 3 * x))(1.0))
    (3.0, nan)
    """
    made = _each if step.name in _ELEMENTWISE else _contracted
    operands = jnp.broadcast_arrays(*operands) if step.name in _ELEMENTWISE else operands
    return [_pulled(lambda *values: bind(step, values)[0], made, moving)(*operands)]


_Pull = Callable[..., list[Array]]


def _pulled(
    fn: Callable[..., Array], rule: Callable[[_Pull, Sequence[Array], Array], list[Array]], moving: Sequence
) -> Callable[..., Array]:
    """``fn``, whose cotangents a rule makes, given how to pull them back as usual."""

    def pull(cotangent: Array, *operands: Array) -> list[Array]:
        whole = jax.vjp(fn, *operands)[1](cotangent)
        return [whole[i] for i in moving]

    def backward(operands: Sequence[Array], cotangent: Array) -> tuple[Array | None, ...]:
        made = dict(zip(moving, rule(pull, operands, cotangent), strict=True))
        return tuple(made.get(i) for i in range(len(operands)))

    guarded = jax.custom_vjp(fn)
    guarded.defvjp(lambda *operands: (fn(*operands), operands), backward)
    return guarded


def _each(pull: _Pull, operands: Sequence[Array], cotangent: Array) -> list[Array]:
    dead = cotangent == 0
    return [jnp.where(dead & ~jnp.isfinite(p), 0, p) for p in pull(cotangent, *operands)]


def _contracted(pull: _Pull, operands: Sequence[Array], cotangent: Array) -> list[Array]:
    """An element is a sum of products, some of which count: those are looked for where one is not finite."""
    finite = [jnp.isfinite(v) for v in operands]

    def rest() -> list[Array]:
        counts = pull(
            (cotangent != 0).astype(cotangent.dtype), *(1 - f.astype(cotangent.dtype) for f in finite)
        )
        clean = pull(cotangent, *(jnp.where(f, v, 0) for f, v in zip(finite, operands, strict=True)))
        whole = pull(cotangent, *operands)
        return [jnp.where(n > 0, w, c) for n, w, c in zip(counts, whole, clean, strict=True)]

    sound = jnp.stack([f.all() for f in finite]).all()
    return lax.cond(sound, lambda: pull(cotangent, *operands), rest)
