# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Matrix products in full float32.

Recent GPUs multiply float32 matrices in TF32 by default, with 10 bits of mantissa, and
so would sample another model than the one whose params are reported. Every product
derived from an energy is therefore traced at precision "highest", which also holds
under autodiff, a user's ``jit`` and NumPyro's loops. A user can choose less by
``jax.default_matmul_precision("tensorfloat32")`` around a call, or by the option of
that name.
"""

from collections.abc import Callable
import functools
from typing import ParamSpec, TypeVar

import jax

P = ParamSpec("P")
T = TypeVar("T")


def full_precision(fn: Callable[P, T]) -> Callable[P, T]:
    """Trace the products of a function in full float32 unless the user has set a precision."""

    @functools.wraps(fn)
    def pinned(*args: P.args, **kwargs: P.kwargs) -> T:
        if jax.default_matmul_precision.value is not None:
            return fn(*args, **kwargs)
        with jax.default_matmul_precision("highest"):
            return fn(*args, **kwargs)

    return pinned
