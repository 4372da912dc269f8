# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Checks of shapes and dtypes in annotations, for the rooms that conftest.py names."""

from collections.abc import Callable
import inspect
import types
from typing import Any, Union, get_args, get_origin

from beartype import beartype
from jaxtyping import AbstractArray
import numpy as np

from jax import Array


def check(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Apply beartype to annotations of arrays only: the package reports other wrong
    arguments itself."""
    hints = {
        name: hint for name, hint in fn.__annotations__.items() if _has_shape(hint)
    }
    fn.__annotations__ = {name: _with_numpy(hint) for name, hint in hints.items()}
    return beartype(fn)


def _is_array(hint: Any) -> bool:
    return inspect.isclass(hint) and issubclass(hint, AbstractArray)


def _has_shape(hint: Any) -> bool:
    return _is_array(hint) or any(map(_has_shape, get_args(hint)))


def _with_numpy(hint: Any) -> Any:
    """Allow NumPy arrays in place of jax's: the type checker distinguishes them."""
    if _is_array(hint):
        return (
            hint.dtype[Union[Array, np.ndarray], hint.dim_str]
            if hint.array_type is Array
            else hint
        )
    inner = tuple(map(_with_numpy, get_args(hint)))
    if not inner:
        return hint
    origin = get_origin(hint)
    return Union[inner] if origin in (Union, types.UnionType) else origin[inner]
