# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Products in full float32.

GPUs of the last years multiply float32 in TF32 unless they are told otherwise: weights of 10 bits, so that
what is sampled is another model than the one whose params are reported. So every product that follows from an
energy is pinned to "highest" where it is traced, which holds under autodiff, a user's ``jit`` and NumPyro's
loops too. Less is a user's own word for another model: ``jax.default_matmul_precision("tensorfloat32")``
around a call, or the option of that name, goes before.
"""

from collections.abc import Callable
import functools
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
T = TypeVar("T")


def full_precision(fn: Callable[P, T]) -> Callable[P, T]:
    """The same function, its products in full float32 unless the user has asked for something else.

    **Example**

    >>> import jax.numpy as jnp
    >>> product = full_precision(lambda a: a @ a)
    >>> "HIGHEST" in str(jax.make_jaxpr(product)(jnp.eye(2)))
    True
    >>> with jax.default_matmul_precision("tensorfloat32"):
    ...     "HIGHEST" in str(jax.make_jaxpr(product)(jnp.eye(2)))
    False
    """

    @functools.wraps(fn)
    def pinned(*args: P.args, **kwargs: P.kwargs) -> T:
        if jax.default_matmul_precision.value is not None:
            return fn(*args, **kwargs)
        with jax.default_matmul_precision("highest"):
            return fn(*args, **kwargs)

    return pinned
