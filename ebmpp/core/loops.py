# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What keeps XLA from fusing too much on a CPU."""

from collections.abc import Callable

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import backend

_LEAST = 8192  # numbers: below, the loop costs more than it saves


def pays(numbers: int) -> bool:
    """Whether :func:`apart` does, for so many numbers: not where a loop inside a loop waits for the host."""
    return numbers >= _LEAST and not backend.accelerated()


def apart(make: Callable[[], Array]) -> Array:
    """What ``make`` returns, computed once: XLA fuses nothing into a loop, nor repeats it."""
    made = jax.eval_shape(make)
    start = jnp.array(True), jnp.zeros(made.shape, made.dtype)
    return lax.while_loop(lambda c: c[0], lambda _: (jnp.array(False), make()), start)[1]
