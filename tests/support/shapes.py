# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What the test run checks of annotations, in the rooms that conftest.py names: shapes and dtypes."""

from collections.abc import Callable
import inspect
import types
from typing import Any, Union, get_args, get_origin

from beartype import beartype
from jaxtyping import AbstractArray
import numpy as np

from jax import Array


def check(fn: Callable[..., Any]) -> Callable[..., Any]:
    """beartype, on what is said of arrays alone: of other mistakes the package itself tells."""
    hints = {name: hint for name, hint in fn.__annotations__.items() if _tells_a_shape(hint)}
    fn.__annotations__ = {name: _with_numpy(hint) for name, hint in hints.items()}
    return beartype(fn)


def _is_array(hint: Any) -> bool:
    return inspect.isclass(hint) and issubclass(hint, AbstractArray)


def _tells_a_shape(hint: Any) -> bool:
    return _is_array(hint) or any(map(_tells_a_shape, get_args(hint)))


def _with_numpy(hint: Any) -> Any:
    """NumPy's arrays do for jax's in the tests; which of them is meant, ty checks."""
    if _is_array(hint):
        return hint.dtype[Union[Array, np.ndarray], hint.dim_str] if hint.array_type is Array else hint
    inner = tuple(map(_with_numpy, get_args(hint)))
    if not inner:
        return hint
    origin = get_origin(hint)
    return Union[inner] if origin in (Union, types.UnionType) else origin[inner]
