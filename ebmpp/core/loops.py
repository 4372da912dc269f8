# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What keeps XLA from fusing too much on a CPU."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import lax
import jax.numpy as jnp

from ebmpp.core import backend

_Tree = TypeVar("_Tree")
_LEAST = 8192  # numbers: below, the loop costs more than it saves


def pays(numbers: int) -> bool:
    """Whether :func:`apart` does, for so many numbers: not where a loop inside a loop waits for the host."""
    return numbers >= _LEAST and not backend.accelerated()


def apart(make: Callable[..., _Tree], *given: Any) -> _Tree:
    """What ``make`` returns of what is given, computed once: XLA fuses nothing into a loop, nor repeats it.

    It can be differentiated by what is given, as ``make`` itself, which a loop whose turns are not known
    could not be in reverse.
    """

    @jax.custom_jvp
    def once(*given: Any) -> _Tree:
        made = jax.eval_shape(make, *given)
        nothing = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), made)
        turn = lambda _: (jnp.array(False), make(*given))
        return lax.while_loop(lambda carry: carry[0], turn, (jnp.array(True), nothing))[1]

    once.defjvp(lambda primals, tangents: jax.jvp(make, primals, tangents))
    return once(*given)
