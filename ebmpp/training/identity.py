# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What tells one run from another: the numbers of its optimisers and the functions that watch it."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import re
import types
from typing import Any

import numpy as np

import jax
import jax.numpy as jnp
import optax

from ebmpp.core.archive import digest, hashed
from ebmpp.core.types import Params

#: Step counts at which schedules are looked at.
_COUNTS = tuple(digit * 10**power for power in range(1, 6) for digit in (1, 2, 5))
_TOLERANCE = 1e-4  # relative: what one update is on another kind of device differs by some 1e-6
_MOVES = "optimizer"
#: Their functions are known by name: what a newer version computes is meant to be the same.
_LIBRARIES = ("ebmpp", "jax", "jaxlib", "numpy", "optax", "numpyro")


def optimizer_moves(optimizer: optax.GradientTransformation, params: Params) -> list[list[float]]:
    """What an optimiser makes of fixed gradients: so rates, schedules and momenta are told apart.

    Three updates in a row from the start, of gradients that differ in size and sign; then one at each of some
    step counts up to half a million, so that schedules show, at the counts that are looked at. Each leaf is
    told by two weighted sums, of what is above 0 and of what is below.

    :return: numbers to compare up to a tolerance.
    """
    gradients = [_pattern(params, scale) for scale in (1.0, -0.5, 0.25)]
    at, update = _pattern(params, 0.1), jax.jit(optimizer.update)
    state, made = optimizer.init(at), []
    for gradient in gradients:
        updates, state = update(gradient, state, at)
        made.append(_sums(updates))
    for count in _COUNTS:
        made.append(_sums(update(gradients[0], _counted(state, count), at)[0]))
    return made


def _pattern(params: Params, scale: float) -> Params:
    """Numbers between ``scale`` / 2 and ``scale``, one in three of them negative."""

    def leaf(a: Any) -> Any:
        index = np.arange(np.size(a)).reshape(np.shape(a))
        sizes = 0.5 + 0.5 * np.modf(index * 0.618034)[0]
        return jnp.asarray(scale * np.where(index % 3 == 2, -sizes, sizes), jnp.result_type(a))

    return jax.tree.map(leaf, params)


def _counted(state: Any, count: int) -> Any:
    """The state with its step counts set."""
    is_count = lambda a: jnp.issubdtype(jnp.result_type(a), jnp.integer) and jnp.ndim(a) == 0
    return jax.tree.map(lambda a: jnp.full_like(a, count) if is_count(a) else a, state)


def _sums(updates: Params) -> list[float]:
    made = []
    for leaf in map(np.asarray, jax.tree.leaves(updates)):
        flat = leaf.astype(float).ravel()
        weights = 1 + np.modf(np.arange(flat.size) * 0.381966)[0]
        made += [float(weights @ np.maximum(flat, 0)), float(weights @ np.maximum(-flat, 0))]
    return made


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


def monitor_identity(monitors: Mapping[str, Callable[..., Any]]) -> dict[str, str]:
    """Hashes by name."""
    return {name: function_identity(fn) for name, fn in sorted(monitors.items())}


def without_addresses(text: str) -> str:
    """A repr without the addresses at which things stand in this process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def fingerprint(run: Mapping[str, Any]) -> str:
    """A hash of what identifies a run, but for what is compared up to a tolerance."""
    return hashed({name: value for name, value in run.items() if name != _MOVES})


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """In words, what two runs differ in; empty for one run.

    :param there: what identifies the one that was saved; ``here``, the one that goes on.
    """
    told = []
    for name in {**there, **here}:
        a, b = there.get(name), here.get(name)
        if name == _MOVES:
            wrong = [i for i, (x, y) in enumerate(zip(a or (), b or (), strict=False)) if not _close(x, y)]
            if wrong:
                stage = f" of stage {wrong[0]}" if len(b or ()) > 1 else ""
                told.append(
                    f"optimizer{stage}: it makes other updates here of the same gradients (another rate?)"
                )
        elif name == "monitors" and a != b and a and b and a.keys() == b.keys():
            changed = [n for n in a if a[n] != b[n]]
            told.append(f"monitors: {changed[0]!r} is another function here, or holds other values")
        elif a != b:
            told.append(f"{name}: {_short(a)} there, {_short(b)} here")
    return told


def _close(a: list[list[float]], b: list[list[float]]) -> bool:
    x, y = np.asarray(a, float), np.asarray(b, float)
    if x.shape != y.shape:
        return False
    sizes = (x + np.abs(y)).reshape(len(x), -1, 2).sum(-1, keepdims=True)
    off = np.abs(x - y).reshape(sizes.shape[0], -1, 2)
    return bool(((off <= _TOLERANCE * sizes) | np.isnan(off)).all())


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 400 else f"{shown[:400]}..."
