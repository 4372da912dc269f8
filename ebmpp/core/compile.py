# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Bounded caches of compiled functions, their compiler options, and JAX's cache on disk.

:func:`compiled` is for programs that depend on what a user declares (a graph, a family,
a function, a number of steps), of which a process may see any number; for expensive
programs, which run or compile faster with its options; and for calls that may not end.
``jax.jit`` is for small functions of arrays, and for programs that are dropped when
the call that made them returns.
"""

from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterator
import contextlib
from contextvars import ContextVar
import dataclasses
from functools import cache, partial, update_wrapper
import gc
import os
import pathlib
import tempfile
import threading
from types import CodeType, FunctionType
from typing import Any
import warnings
from weakref import WeakSet

from jaxtyping import PyTree

import jax
from jax.core import Tracer
from jax.experimental.compilation_cache import compilation_cache
import jax.numpy as jnp

from ebmpp.core import backend
from ebmpp.errors import ArgumentError

_Options = tuple[tuple[str, Any], ...]
# XLA asks LLVM for vectors of 256 bits. Where a processor has 512, those took 0.86
# (16x16, 200x100) and 0.92 (784x500) of the time for 1000 coupled pairs, 0.62 for an
# Ising torus, and as long to compile.
_WIDE = ("xla_cpu_prefer_vector_width", "512")
# XLA's older emitters compile hundreds of kernels in 0.6 to 0.75 of the time. They do
# not vectorise a kernel that writes where it reads. The XLA of jax 0.12 does not know
# the option.
_FAST = ("xla_cpu_use_fusion_emitters", False)
# XLA takes it for a whole process only.
_ROLLED = "--xla_backend_extra_options=xla_cpu_disable_loop_unrolling"
# Of LLVM's levels, XLA asks for the third. The second compiles in 0.85 of the time, and
# PCD, CD, ParticleUCD and smc run as fast; but coupled pairs, by the older emitters, took
# 1.05 to 1.2 times as long. The first aborted the process on chains of two or three
# replicas ("Cannot select ... SUBV_BROADCAST_LOAD"). Level 0, at which all tests run,
# takes a third; programs that run once are slower.
_LEVEL = "xla_backend_optimization_level"
_fast: ContextVar[bool] = ContextVar("fast", default=False)


def is_fast_compile() -> bool:
    """Return True while a function is traced that is compiled by the older emitters."""
    return _fast.get()


def is_traced(inputs: PyTree) -> bool:
    """Return True if any leaf is a tracer, or if the call is made while a function is traced."""
    # a constant is traced, too; `jnp.zeros` would compile a program
    leaves = jax.tree.leaves((jnp.asarray(0.0), inputs))
    return any(isinstance(leaf, Tracer) for leaf in leaves)


def is_concrete(x: PyTree) -> bool:
    """Return True unless a leaf of ``x`` is traced by jit, vmap or grad."""
    return not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(x))


@dataclasses.dataclass
class _Program:
    """A function jitted for one value of the static arguments."""

    inlined: Any
    """Without compiler options, which a call inside a caller's ``jax.jit`` cannot set."""
    called: Any = None
    """With compiler options, from the first other call on."""
    is_fast: bool = False
    """True if it is compiled by the older emitters."""

    def jits(self) -> set[Any]:
        """Return the jitted functions."""
        return {self.inlined, self.called} - {None}


@dataclasses.dataclass(eq=False, repr=False)
class Compiled:
    """A function compiled for each value of its static arguments; :func:`compiled` makes it."""

    fn: Callable[..., PyTree]
    statics: int | tuple[int, ...] = 0
    size: int = 16
    fast_compile: Callable[..., bool] | None = None
    once: bool = False
    key: Callable[..., Hashable] | None = None
    unbounded: bool = False

    def __post_init__(self) -> None:
        statics = self.statics
        self._places = tuple(range(statics)) if isinstance(statics, int) else statics
        self._programs: dict[Hashable, _Program] = {}  # the newest is the last
        self._lock = threading.Lock()
        update_wrapper(self, self.fn)

    def __len__(self) -> int:
        return len(self._programs)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Call the function, compiling it where the static arguments or the shapes are new."""
        program, arrays = self._lookup(args)
        if is_traced((arrays, kwargs)):
            return program.inlined(*arrays, **kwargs)
        is_new = program.called is None
        if is_new:
            is_fast = bool(self.fast_compile and self.fast_compile(*args, **kwargs))
            options = _options(is_fast, self.once)
            program.is_fast = _FAST in options
            program.called = self._jit(program.inlined, options)
        token = _fast.set(program.is_fast)
        try:
            with _collection_paused() if is_new else contextlib.nullcontext():
                result = program.called(*arrays, **kwargs)
        finally:
            _fast.reset(token)
        return backend.wait(result) if self.unbounded else result

    def lower(self, *args: PyTree, **kwargs: PyTree) -> jax.stages.Lowered:
        """Lower the function, as ``jax.jit`` does."""
        program, arrays = self._lookup(args)
        return program.inlined.lower(*arrays, **kwargs)

    def _cache_size(self) -> int:
        return sum(
            jitted._cache_size()
            for program in self._programs.values()
            for jitted in program.jits()
        )

    def _lookup(self, args: tuple) -> tuple[_Program, list]:
        """Return the program of the static arguments, and the other arguments."""
        static = {i: args[i] for i in self._places}
        arrays = [a for i, a in enumerate(args) if i not in static]
        key = (*static.values(), self.key and self.key(*args))
        with self._lock:
            program = self._programs.pop(key, None)
            if program is None:
                _warn_of_new_functions(static)
                program = _Program(jax.jit(self._bind(static)))
            self._programs[key] = program
            if len(self._programs) > self.size:
                oldest = self._programs.pop(next(iter(self._programs)))
                for jitted in oldest.jits():
                    jitted.clear_cache()
        return program, arrays

    def _bind(self, static: dict[int, Hashable]) -> Callable:
        def bound(*arrays, **kwargs):
            args = list(arrays)
            for i, value in static.items():  # in ascending order
                args.insert(i, value)
            return self.fn(*args, **kwargs)

        update_wrapper(bound, self.fn, ("__name__",), ())  # in logs and profiles
        return bound

    def _jit(self, inlined: Any, options: _Options) -> Any:
        if not options:
            return inlined
        fn = inlined.__wrapped__
        fn = backend.asynchronous(fn) if self.unbounded else fn
        return jax.jit(fn, compiler_options=dict(options))


def compiled(fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Compile a function for each value of its static arguments; the most recently used are kept.

    It is called as ``jax.jit`` is, or decorates. ``jax.jit(..., static_argnums=...)``
    keeps every program until ``jax.clear_caches()``: a small one takes a megabyte and
    some five memory mappings, of which Linux grants a process 65530. jax takes compiler
    options for a whole program, so none are set inside a caller's ``jax.jit``. Options
    that ``XLA_FLAGS`` names keep their values.

    :param statics: number of leading arguments that are hashable values, not arrays, or
        their positions.
    :param size: number of values of the static arguments whose programs are kept.
    :param fast_compile: called once per program with the arguments; True to compile by
        XLA's older emitters. Measure before you ask for it.
    :param once: True for programs that run once, which LLVM does not optimise.
    :param key: called with the arguments; a further part of the cache key, hashable.
    :param unbounded: True for a run that may not end soon: a call waits for its result,
        and Ctrl-C ends the wait.

    >>> @compiled(statics=1)
    ... def power(exponent, x):
    ...     return x**exponent
    >>> [int(power(n, 2)) for n in range(20)][-1], len(power)
    (524288, 16)
    """
    return partial(Compiled, **options) if fn is None else Compiled(fn, **options)


def _options(is_fast: bool, once: bool) -> _Options:
    """Return the compiler options for the default device."""
    if backend.accelerated():
        return ()
    flags = os.environ.get("XLA_FLAGS", "")
    level = 3 if is_fast else 2
    options = [_WIDE, (_LEVEL, 0 if once else level), *([_FAST] if is_fast else [])]
    requested = tuple(o for o in options if o[0] not in flags)
    if _are_known(requested):
        return requested
    return tuple(o for o in requested if _are_known((o,)))


@contextlib.contextmanager
def _collection_paused() -> Generator[None]:
    """Pause the collection of garbage, which took 4 to 14 % of the CPU time of a first call."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def _are_known(options: _Options) -> bool:
    """Return True if XLA knows the options; it does not compile with an unknown one."""
    try:
        jax.jit(lambda: 0, compiler_options=dict(options)).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


_seen: WeakSet[FunctionType] = WeakSet()
_compilations: Counter[CodeType] = Counter()


def _warn_of_new_functions(static: object) -> None:
    """Warn once when a third function of one line of code is about to be compiled."""
    for fn in _functions(static):
        if fn in _seen:
            continue
        _seen.add(fn)
        _compilations[fn.__code__] += 1
        if _compilations[fn.__code__] == 3:
            warnings.warn(
                f"{fn.__name__} of {fn.__code__.co_filename}, line "
                f"{fn.__code__.co_firstlineno}, has been compiled three times, because "
                "each call passed a new function object. Define the function once, "
                "outside the loop that makes these calls.",
                stacklevel=4,
            )


def _functions(value: object) -> Iterator[FunctionType]:
    """Yield the functions that a static argument holds."""
    if isinstance(value, FunctionType):
        yield value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        # another value of a field that is not compared is no reason to compile again
        value = [
            getattr(value, field.name)
            for field in dataclasses.fields(value)
            if field.compare
        ]
    elif isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        for item in value:
            yield from _functions(item)


def enable_compilation_cache(
    directory: str | os.PathLike[str] | None = None,
) -> pathlib.Path:
    """Keep compiled programs on disk, where the next process finds them.

    This turns on `JAX's persistent compilation cache
    <https://docs.jax.dev/en/latest/persistent_compilation_cache.html>`_. By default JAX
    does not store programs that compile within a second; most programs of a small model
    are of that size, so all are stored. Programs that were compiled before the call
    stay in memory and are not stored, so call it first.

    JAX runs what it finds in the directory: do not share one with users whom you do not
    trust. Unless a logging level is set, errors that XLA logs about each program that
    it reads are silenced.

    It also adds an option to the environment variable ``XLA_FLAGS``, unless that names
    its own ``xla_backend_extra_options``: XLA no longer unrolls loops on CPUs, so that
    coupled pairs compile in three quarters of the time. XLA reads the variable once,
    before the first computation of a process. A later call has no such effect.

    :param directory: a local directory, created if it does not exist. None: the
        directory that JAX is configured with (the environment variable
        ``JAX_COMPILATION_CACHE_DIR``), else ``$XDG_CACHE_HOME/ebmpp/jax``, else
        ``~/.cache/ebmpp/jax``.
    :return: the directory.
    :raises ArgumentError: for a directory that cannot be created or written.

    **Example**

    >>> import tempfile, ebmpp
    >>> ebmpp.enable_compilation_cache(tempfile.mkdtemp()).is_dir()
    True
    """
    if directory is None:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        configured = getattr(jax.config, "jax_compilation_cache_dir", None)
        directory = configured or pathlib.Path(base, "ebmpp", "jax")
    try:
        if not os.fspath(directory):
            raise OSError("an empty path is the current directory")
        path = pathlib.Path(directory).expanduser().absolute()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    # RuntimeError: a user without a home directory
    except (OSError, TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            "enable_compilation_cache: directory must be a writable path, got "
            f"{directory!r} ({error}). Give another one, or set "
            "JAX_COMPILATION_CACHE_DIR."
        ) from error
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # JAX opens its cache at the first program that it compiles, and would ignore a
    # later directory.
    compilation_cache.reset_cache()
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_backend_extra_options" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_ROLLED}"
    # jax 0.10.1 logs two errors for each program that it reads, about hints that no
    # processor has. The second update is of Python's loggers alone.
    if getattr(jax.config, "jax_logging_level", None) == "NOTSET":
        jax.config.update("jax_logging_level", "CRITICAL")
        jax.config.update("jax_logging_level", "NOTSET")
    return path
