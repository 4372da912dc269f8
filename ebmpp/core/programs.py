# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Compiled programs that do not pile up: a process that trains many models keeps those of the last few."""

from collections.abc import Callable, Hashable
from functools import partial, update_wrapper
import threading
from types import FunctionType
from typing import Any

import jax

_KEPT = 16


class Programs:
    """A function compiled for each value of its first arguments; of the last few of them it is kept.

    ``jax.jit(..., static_argnums=...)`` keeps every program until ``jax.clear_caches()``: a small one takes
    a megabyte and some five memory mappings, of which Linux grants a process 65530. This forgets the one that
    was used longest ago. A call with values that are kept compiles nothing.

    :param fn: traced by jax.
    :param statics: how many of its first arguments are hashable values, not arrays.
    :param kept: of how many values the programs are kept.
    """

    def __init__(self, fn: FunctionType, statics: int, kept: int = _KEPT) -> None:
        self._fn, self._statics, self._kept = fn, statics, kept
        self._programs: dict[tuple[Hashable, ...], Any] = {}  # the newest is the last
        self._lock = threading.Lock()
        update_wrapper(self, fn)

    def __len__(self) -> int:
        return len(self._programs)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """What the function returns."""
        return self._program(given[: self._statics])(*given[self._statics :], **named)

    def shapes(self, *given: Any) -> Any:
        """Those of what the function returns; nothing is compiled, and such shapes are traced once."""
        return self._program(given[: self._statics]).eval_shape(*given[self._statics :])

    def _program(self, values: tuple[Hashable, ...]) -> Any:
        with self._lock:
            program = self._programs.pop(values, None)
            if program is None:
                bound: Any = partial(self._fn, *values)
                bound.__name__ = self._fn.__name__  # in logs and profiles
                program = jax.jit(bound)
            self._programs[values] = program
            if len(self._programs) > self._kept:
                self._programs.pop(next(iter(self._programs))).clear_cache()
            return program


def compiled(statics: int, kept: int = _KEPT) -> Callable[[FunctionType], Programs]:
    """:class:`Programs` as a decorator.

    **Example**

    >>> @compiled(statics=1)
    ... def power(exponent, x):
    ...     return x**exponent
    >>> [int(power(n, 2)) for n in range(20)][-1], len(power)
    (524288, 16)
    """
    return lambda fn: Programs(fn, statics, kept)
