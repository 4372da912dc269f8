# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The backend that functions are compiled for, and barriers against fusion by XLA on a CPU."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import lax
import jax.numpy as jnp

_Tree = TypeVar("_Tree")
_MIN_SIZE = 8192  # values; for fewer the loop of a barrier costs more than it saves


def accelerated() -> bool:
    """Return True if the default device is not a CPU."""
    return jax.default_backend() != "cpu"


def barrier_pays(size: int) -> bool:
    """Return True if :func:`fusion_barrier` saves time for ``size`` values on the default device."""
    return size >= _MIN_SIZE and not accelerated()


def fusion_barrier(fn: Callable[..., _Tree], *args: Any) -> _Tree:
    """Return ``fn(*args)`` computed in a loop of one turn, which XLA neither fuses with others nor repeats.

    The result is differentiable with respect to ``args``, also in reverse.
    """

    @jax.custom_jvp
    def call(*args: Any) -> _Tree:
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(fn, *args))
        body = lambda _: (jnp.array(False), fn(*args))
        return lax.while_loop(lambda carry: carry[0], body, (jnp.array(True), zeros))[1]

    call.defjvp(lambda primals, tangents: jax.jvp(fn, primals, tangents))
    return call(*args)
