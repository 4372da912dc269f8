# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Compiled programs: for vectors as wide as the processor's, soon, and not piling up."""

from collections.abc import Callable, Hashable
from contextvars import ContextVar
from functools import cache, update_wrapper
import os
import threading
from types import FunctionType
from typing import Any

import jax
from jax.core import Tracer
import jax.numpy as jnp

from ebmpp.core import backend

_KEPT = 16
_Quick = Callable[..., bool]
_WIDE = "xla_cpu_prefer_vector_width", "512"
_QUICK = "xla_cpu_use_fusion_emitters", False
# What is launched as CUDA graphs; XLA's own choice is all but loops and branches.
_GRAPHS = (
    "xla_gpu_enable_command_buffer",
    "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,WHILE,CONDITIONAL",
)
_quick_here: ContextVar[bool] = ContextVar("quick_here", default=False)


class Program:
    """``jax.jit`` of a function, compiled as suits the device where the host calls it.

    XLA asks LLVM for vectors of 256 bits, whatever the processor has. With 512, on one that has them, 1000
    coupled pairs took 0.86 (16x16), 0.86 (200x100) and 0.92 (784x500) of the time, ten sweeps of an Ising
    torus 0.62 and of a complete network of 784 units 0.52, and compiling as long as before. Elsewhere
    it changes nothing. jax takes such an option of a whole program alone, so inside a caller's ``jax.jit`` it
    is the caller's to say, and what ``XLA_FLAGS`` names is left as it is. On a GPU of NVIDIA's, where
    ``EBMPP_CUDA_GRAPHS=1``, loops and branches lie in CUDA graphs, which the host does not wait for.

    :param fn: traced by jax.
    :param quick: of what a call is given, whether to compile by XLA's older emitters of kernels, which take
        0.6 to 0.75 of the time where there are hundreds of kernels. A kernel that writes where it reads is
        not vectorised then (:func:`quick_here`): measure before you ask for it. The XLA of jax 0.12 has the
        usual emitters alone, and is asked for nothing.
    :param options: of ``jax.jit``.
    """

    def __init__(self, fn: Callable, *, quick: _Quick | None = None, **options: Any) -> None:
        self._fn, self._quick, self._options = fn, quick, options
        self._inner: Any = jax.jit(fn, **options)
        self._made: dict[tuple, Any] = {}
        update_wrapper(self, fn)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """What the function returns."""
        if traced((given, named)):
            return self._inner(*given, **named)
        asked = _asked(self._quick is not None and self._quick(*given, **named))
        if not asked:
            return self._inner(*given, **named)
        if asked not in self._made:
            self._made[asked] = jax.jit(self._fn, compiler_options=dict(asked), **self._options)
        token = _quick_here.set(_QUICK in asked)  # read while it is traced
        try:
            return self._made[asked](*given, **named)
        finally:
            _quick_here.reset(token)

    def lower(self, *given: Any, **named: Any) -> jax.stages.Lowered:
        """As of ``jax.jit``."""
        return self._inner.lower(*given, **named)

    def eval_shape(self, *given: Any, **named: Any) -> Any:
        """As of ``jax.jit``."""
        return self._inner.eval_shape(*given, **named)

    def clear_cache(self) -> None:
        """As of ``jax.jit``."""
        for program in (self._inner, *self._made.values()):
            program.clear_cache()

    def _cache_size(self) -> int:
        return sum(program._cache_size() for program in (self._inner, *self._made.values()))


def quick_here() -> bool:
    """Whether what is being traced is compiled quick, so that no kernel should write where it reads."""
    return _quick_here.get()


def traced(given: Any) -> bool:
    """Whether a caller's program is being traced, of these values or around them."""
    some = (isinstance(leaf, Tracer) for leaf in jax.tree.leaves(given))
    return any(some) or isinstance(jnp.zeros(()), Tracer)


def _asked(quick: bool) -> tuple[tuple[str, Any], ...]:
    """What is asked of the compiler."""
    flags = os.environ.get("XLA_FLAGS", "")
    if backend.accelerated():
        # Only where it is asked for: nobody has run loops in a graph of these programs.
        wanted = (_GRAPHS,) if os.environ.get("EBMPP_CUDA_GRAPHS") == "1" and backend.cuda() else ()
    else:
        wanted = (_WIDE, _QUICK) if quick else (_WIDE,)
    return tuple(option for option in wanted if option[0] not in flags and _known(*option))


@cache
def _known(name: str, value: Any) -> bool:
    """Whether this XLA knows an option: one that does not refuses to compile."""
    try:
        jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


class Programs:
    """A function compiled for each value of its first arguments; of the last few of them it is kept.

    ``jax.jit(..., static_argnums=...)`` keeps every program until ``jax.clear_caches()``: a small one takes
    a megabyte and some five memory mappings, of which Linux grants a process 65530. This forgets the one that
    was used longest ago. A call with values that are kept compiles nothing.

    :param fn: traced by jax.
    :param statics: how many of its first arguments are hashable values, not arrays; or the places of those
        that are.
    :param kept: of how many values the programs are kept.
    :param quick: of what a call is given, as of a :class:`Program`; asked once a program.
    :param also: of what a call is given, what else programs are told apart by.
    """

    def __init__(
        self,
        fn: FunctionType,
        statics: int | tuple[int, ...],
        kept: int = _KEPT,
        quick: _Quick | None = None,
        also: Callable[..., Hashable] | None = None,
    ) -> None:
        self._fn, self._kept, self._quick, self._also = fn, kept, quick, also
        self._places = tuple(range(statics)) if isinstance(statics, int) else statics
        self._programs: dict[Hashable, Program] = {}  # the newest is the last
        self._lock = threading.Lock()
        update_wrapper(self, fn)

    def __len__(self) -> int:
        return len(self._programs)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """What the function returns."""
        program, rest = self._found(given)
        return program(*rest, **named)

    def lower(self, *given: Any, **named: Any) -> jax.stages.Lowered:
        """As of ``jax.jit``."""
        program, rest = self._found(given)
        return program.lower(*rest, **named)

    def shapes(self, *given: Any) -> Any:
        """Those of what the function returns; nothing is compiled, and such shapes are traced once."""
        program, rest = self._found(given)
        return program.eval_shape(*rest)

    def clear_cache(self) -> None:
        """As of ``jax.jit``."""
        with self._lock:
            while self._programs:
                self._programs.popitem()[1].clear_cache()

    def _cache_size(self) -> int:
        return sum(program._cache_size() for program in self._programs.values())

    def _found(self, given: tuple) -> tuple[Program, list]:
        """The program of a call's values, and its other arguments."""
        values = tuple(given[i] for i in self._places)
        rest = [a for i, a in enumerate(given) if i not in self._places]
        return self._program(values, None if self._also is None else self._also(*given)), rest

    def _program(self, values: tuple[Hashable, ...], also: Hashable = None) -> Program:
        with self._lock:
            program = self._programs.pop((values, also), None)
            if program is None:
                program = self._new(values)
            self._programs[values, also] = program
            if len(self._programs) > self._kept:
                self._programs.pop(next(iter(self._programs))).clear_cache()
            return program

    def _new(self, values: tuple[Hashable, ...]) -> Program:
        def whole(rest: tuple) -> list:
            all_ = list(rest)
            for place, value in zip(self._places, values, strict=True):  # in their order
                all_.insert(place, value)
            return all_

        def bound(*rest: Any, **named: Any) -> Any:
            return self._fn(*whole(rest), **named)

        bound.__name__ = self._fn.__name__  # in logs and profiles
        if (ask := self._quick) is None:
            return Program(bound)
        known: list[bool] = []  # asked once

        def quick(*rest: Any, **named: Any) -> bool:
            if not known:
                known.append(ask(*whole(rest), **named))
            return known[0]

        return Program(bound, quick=quick)


def compiled(
    statics: int | tuple[int, ...],
    kept: int = _KEPT,
    quick: _Quick | None = None,
    also: Callable[..., Hashable] | None = None,
) -> Callable[[FunctionType], Programs]:
    """:class:`Programs` as a decorator.

    **Example**

    >>> @compiled(statics=1)
    ... def power(exponent, x):
    ...     return x**exponent
    >>> [int(power(n, 2)) for n in range(20)][-1], len(power)
    (524288, 16)
    """
    return lambda fn: Programs(fn, statics, kept, quick, also)
