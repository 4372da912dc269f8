# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What tells one run from another: functions by what they compute and hold, and differences in words."""

from collections.abc import Mapping
import dataclasses
import functools
import re
import types
from typing import Any

import numpy as np

import jax
from jax import core
import jax.numpy as jnp

from ebmpp.core.archive import digest, hashed

#: Their functions are known by name: what a newer version computes is meant to be the same.
_LIBRARIES = ("ebmpp", "jax", "jaxlib", "numpy", "optax", "numpyro")


def function_identity(fn: Any) -> str:
    """A hash of a function: its name, what it computes, and the values that it holds.

    Code, constants, defaults and the values of a closure count, functions among them likewise, arrays by
    every byte. What a function looks up by a global name counts by that name alone.
    """
    return hashed(_told(fn, frozenset()))


def _told(value: Any, above: frozenset[int]) -> Any:
    """A value as JSON values that are the same in the next process."""
    if id(value) in above:
        return "itself"
    inner = functools.partial(_told, above=above | {id(value)})
    if isinstance(value, core.Tracer):
        return "traced"
    if isinstance(value, jax.Array | np.ndarray):
        keys = isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        return digest({"array": jax.random.key_data(value) if keys else value})
    if isinstance(value, types.CodeType):
        return [value.co_name, value.co_code.hex(), list(value.co_names), *map(inner, value.co_consts)]
    if isinstance(value, types.FunctionType):
        if value.__module__.partition(".")[0] in _LIBRARIES and not value.__closure__:
            return [value.__module__, value.__qualname__]
        cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        held = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items()]
        return [value.__module__, value.__qualname__, inner(value.__code__), *map(inner, held)]
    if isinstance(value, functools.partial):
        return ["partial", inner(value.func), inner(value.args), inner(value.keywords)]
    if isinstance(value, types.MethodType):
        return ["method", inner(value.__func__), inner(value.__self__)]
    if isinstance(value, Mapping):
        return ["mapping", *sorted([str(k), inner(v)] for k, v in value.items())]
    if isinstance(value, set | frozenset):
        return ["set", *sorted(map(str, map(inner, value)))]  # their order is another in each process
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(inner, value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return [type(value).__qualname__, inner(fields)]
    wrapped = getattr(value, "__wrapped__", None)  # what jax.jit and its like hold
    return inner(wrapped) if isinstance(wrapped, types.FunctionType) else without_addresses(repr(value))


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents
    except ValueError:  # a function that is not defined yet
        return False
    return True


def without_addresses(text: str) -> str:
    """A repr without the addresses at which things stand in this process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """In words, what two runs differ in; empty for one run.

    :param there: what identifies the one that was saved; ``here``, the one that goes on.
    """
    found = [(name, there.get(name), here.get(name)) for name in {**there, **here}]
    changed = sorted((f for f in found if f[1] != f[2]), key=lambda f: _is_digest(f[2]))  # words first
    return [f"{name}: {short(a)} there, {short(b)} here" for name, a, b in changed]


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def short(value: Any) -> str:
    """A value as an error shows it; of a hash its beginning tells that it is another."""
    shown = f"{value[:8]}..." if _is_digest(value) else repr(value)
    return shown if len(shown) <= 400 else f"{shown[:400]}..."
