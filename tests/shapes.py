# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What the test run checks of annotations, in the rooms that conftest.py names: shapes and dtypes."""

from collections.abc import Callable
import inspect
from typing import Any, get_args

from beartype import beartype
from jaxtyping import AbstractArray


def check(fn: Callable[..., Any]) -> Callable[..., Any]:
    """beartype, on what is said of arrays alone: of other mistakes the package itself tells."""
    fn.__annotations__ = {name: hint for name, hint in fn.__annotations__.items() if _tells_a_shape(hint)}
    return beartype(fn)


def _tells_a_shape(hint: Any) -> bool:
    if inspect.isclass(hint) and issubclass(hint, AbstractArray):
        return True
    return any(map(_tells_a_shape, get_args(hint)))
