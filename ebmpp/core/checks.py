# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Validation of arguments: one function per kind, with one form of error.

Each function takes the argument's name ("fit: batch_size") and returns the value in the
form that the library uses. Errors say what the argument must be and what was given.
"""

from collections.abc import Iterable, Iterator, Sequence
import difflib
import functools
import inspect
import math
import operator
import re
from typing import Any, TypeVar

import numpy as np

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding

from ebmpp.core.compile import is_traced
from ebmpp.errors import ArgumentError, DeclarationError, ParameterError, StateError

T = TypeVar("T")
Error = type[Exception]

#: Largest count: loops and windows count in 32 bits.
LARGEST = 2**31 - 1

_DIMS = re.compile(r".*_dim_\d+")  # xarray's names of a block's axes
#: Axes of draws, and the argument that clamps blocks of any other name.
_RESERVED = ("chain", "draw", "row", "sample", "clamped")


def error(
    name: str, expected: str, value: object, kind: Error = ArgumentError, hint: str = ""
) -> Exception:
    """Return an error that says what an argument must be and what was given.

    :param name: the argument, such as "fit: batch_size".
    :param hint: a sentence that says how to fix it.
    """
    return kind(f"{name} must be {expected}, got {tell(value)}.{hint and ' ' + hint}")


declaration_error = functools.partial(error, kind=DeclarationError)
state_error = functools.partial(error, kind=StateError)
parameter_error = functools.partial(error, kind=ParameterError)


def count(name: str, value: Any, least: int = 1, most: int = LARGEST) -> int:
    """Return an integer in a range as an int; raise ArgumentError for other values, bools included."""
    try:
        number = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except (TypeError, jax.errors.JAXTypeError):
        number = None
    if number is None or not least <= number <= most:
        is_whole = isinstance(value, float | np.floating) and float(value).is_integer()
        hint = f" Give {int(value)}." if is_whole else ""
        limits = (
            f"of at least {least}" if most == LARGEST else f"from {least} to {most}"
        )
        limits += (
            f", and at most {most}"
            if number is not None and number > most == LARGEST
            else ""
        )
        raise ArgumentError(f"{name} must be an int {limits}, got {tell(value)}.{hint}")
    return number


def optional_count(
    name: str, value: object, least: int = 1, most: int = LARGEST
) -> int | None:
    """Return an integer as :func:`count` does, or None."""
    return None if value is None else count(name, value, least, most)


def set_counts(
    owner: object, *fields: str, least: int = 1, optional: bool = False
) -> None:
    """Validate integer fields of a frozen dataclass, and store them as ints."""
    check = optional_count if optional else count
    for field in fields:
        number = check(f"{type(owner).__name__}: {field}", getattr(owner, field), least)
        object.__setattr__(owner, field, number)


def number(
    name: str,
    value: Any,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
) -> float:
    """Return a finite number in a range as a float; ``above`` and ``below`` are exclusive."""
    try:
        result = (
            math.nan
            if isinstance(value, bool | np.bool_ | str | bytes)
            else float(value)
        )
    except (TypeError, ValueError, jax.errors.JAXTypeError):
        result = math.nan
    if (
        not math.isfinite(result)
        or not above < result < below
        or not least <= result <= most
    ):
        raise error(name, f"a number{_range(above, least, below, most)}", value)
    return result


def _range(above: float, least: float, below: float, most: float) -> str:
    """Describe bounds in words, or as an interval if there are two."""
    low = max(above, least)
    high = min(below, most)
    if math.isfinite(low) and math.isfinite(high):
        return (
            f" in {'(' if above >= least else '['}{low:g}, "
            f"{high:g}{')' if below <= most else ']'}"
        )
    if math.isfinite(low):
        return f" above {low:g}" if above >= least else f" of at least {low:g}"
    if math.isfinite(high):
        return f" below {high:g}" if below <= most else f" of at most {high:g}"
    return ""


def choice(name: str, value: T, known: Iterable[T], also: str = "") -> T:
    """Return one of the known strings; raise ArgumentError, with the closest one, for other values."""
    known = tuple(known)
    if isinstance(value, str) and value in known:
        return value
    listed = ", ".join(map(repr, known)) + (f", or {also}" if also else "")
    raise ArgumentError(
        f"{name} must be one of {listed}, got {tell(value)}.{_closest(value, known)}"
    )


def _closest(value: object, known: Iterable[object]) -> str:
    close = (
        difflib.get_close_matches(value, map(str, known), 1)
        if isinstance(value, str)
        else ()
    )
    return f" Did you mean {close[0]!r}?" if close else ""


def flag(name: str, value: object) -> bool:
    """Return a bool; raise ArgumentError for other values."""
    if not isinstance(value, bool | np.bool_):
        raise error(name, "True or False", value)
    return bool(value)


def function(name: str, value: T, inputs: str = "", arguments: int | None = None) -> T:
    """Return a callable of so many arguments, ``inputs`` in words; raise ArgumentError for other values."""
    number = "" if arguments is None else f" (number of arguments: {arguments})"
    if not callable(value) or arguments is not None and not _accepts(value, arguments):
        raise error(name, f"a function{inputs and ' of ' + inputs}{number}", value)
    return value


def _accepts(fn: Any, arguments: int) -> bool:
    try:
        inspect.signature(fn).bind(*range(arguments))
    except TypeError:
        return False
    except ValueError:  # C functions have no signature
        pass
    return True


def instance(name: str, value: Any, kind: type[T] | tuple[type, ...], what: str) -> T:
    """Return an instance of a class, ``what`` in words; raise ArgumentError for other values."""
    # a class has the methods that a protocol requires
    is_class = isinstance(value, type)
    if not isinstance(value, kind) or is_class:
        raise error(
            name,
            what,
            value,
            hint=f"Call it: {value.__name__}(...)." if is_class else "",
        )
    return value


def key(name: str, value: Any) -> Array:
    """Return one jax key, typed or legacy; raise ArgumentError for seeds, several keys or other values."""
    is_array = isinstance(value, jax.Array | np.ndarray)
    is_typed = is_array and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    hint = ""
    if is_typed or (
        is_array and value.dtype == np.uint32 and value.shape[-1:] in ((2,), (4,))
    ):
        axes = value.shape if is_typed else value.shape[:-1]
        if not axes:
            return value if isinstance(value, jax.Array) else jnp.asarray(value)
        hint = f" Give {name.split()[-1]}[0]." if 0 not in axes else ""
    elif isinstance(value, int | np.integer) and not isinstance(value, bool):
        hint = f" Give jax.random.key({value})."
    raise ArgumentError(
        f"{name} must be one jax key, such as jax.random.key(0), got {tell(value)}.{hint}"
    )


def on_host(
    name: str, *values: Any, instead: str = "Call it outside, on known values"
) -> None:
    """Raise ArgumentError if a function that needs known values is traced by a caller's jit, vmap or grad."""
    # a stream's rows come later
    known = [value for value in values if not isinstance(value, Iterator)]
    if is_traced(known):
        where = "jax.jit, jax.vmap or jax.grad, or in a compiled monitor of fit"
        raise ArgumentError(f"{name} cannot be traced by {where}. {instead}.")


def block_name(value: Any) -> str:
    """Return a valid block name; raise DeclarationError for one that draws, files or calls cannot hold."""
    reason = None
    if not isinstance(value, str) or not value:
        reason = "a name is a non-empty string"
    elif value in _RESERVED:
        reason = (
            "draws have an axis of that name"
            if value != "clamped"
            else "it is the argument that clamps"
        )
    elif _DIMS.fullmatch(value):
        reason = "xarray gives such names to axes of draws"
    elif "/" in value or value in (".", ".."):
        reason = "it would be a path in the tree of draws"
    elif "[" in value or "]" in value:
        reason = "brackets name the parts of a block whose units interact"
    elif value != value.strip() or not value.isprintable():
        reason = "files lose outer spaces and unprintable characters"
    if reason:
        raise DeclarationError(
            f"a block cannot be named {value!r}: {reason}. Choose another name."
        )
    return value


def names(
    what: str,
    values: Iterable[object],
    known: Iterable[str],
    kind: Error = ArgumentError,
) -> None:
    """Raise an error for the first value that is not a known name; ``what`` it names is such as "block"."""
    known = tuple(known)
    for name in values:
        if name not in known:
            listed = ", ".join(map(repr, known)) or "none"
            raise kind(
                f"unknown {what} {name!r}; there is {listed}.{_closest(name, known)}"
            )


def numbers(name: str, value: Any, kind: Error = ArgumentError) -> np.ndarray | Array:
    """Return an array of real numbers; refuse objects, strings, ragged lists, times and complex numbers."""
    cause = ""
    try:
        array = value if isinstance(value, jax.Array) else np.asarray(value)
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ) as problem:  # RuntimeError: torch's, for a gradient
        array = np.empty(0, object)
        cause = f" ({problem})"
    is_real = any(
        jnp.issubdtype(array.dtype, kind)
        for kind in (np.bool_, np.integer, np.floating)
    )
    # numpy counts time differences as integers
    if not is_real or array.dtype.kind == "m":
        raise kind(
            f"{name} must be an array of real numbers, got {tell(value)}{cause}."
        )
    placeable(name, array, kind)
    return array


def placeable(name: str, value: Any, kind: Error = ArgumentError) -> None:
    """Raise an error for an array over a mesh with explicit axes, unless ``mesh=`` is set.

    Every operation on an array with explicit axes would have to name the placement of
    its result.
    """
    if not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return
    mesh = value.sharding.mesh if isinstance(value.sharding, NamedSharding) else None
    is_set = AxisType.Auto in jax.sharding.get_abstract_mesh().axis_types
    if mesh is not None and AxisType.Explicit in mesh.axis_types and not is_set:
        raise kind(
            f"{name} must not be over a mesh with explicit axes, got "
            f"{mesh.axis_names}. Give mesh=, where that is an argument, or make the "
            "mesh with axis_types=(jax.sharding.AxisType.Auto,) * "
            f"{len(mesh.axis_names)}."
        )


def sequence(name: str, value: Any, elements: str) -> Sequence[Any]:
    """Return a list or tuple of ``elements``; raise ArgumentError for other values, strings included."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise error(name, f"a list of {elements}", value)
    return value


def tell(value: object) -> str:
    """Return a short description of a value, for errors; of an array the shape."""
    is_array = isinstance(value, jax.Array | np.ndarray)
    kind = (
        "array"
        if type(value).__name__ in ("ArrayImpl", "ndarray")
        else type(value).__name__
    )
    kind = f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"
    if is_array:
        return f"{kind} of shape {value.shape} and dtype {value.dtype}"
    text = repr(value)
    return text if len(text) <= 80 else f"{kind} ({text[:60]}...)"
