# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Validation of arguments: one function per kind, with one form of error.

Each function takes the argument's name ("fit: batch_size") and returns the value in the
form that the library uses. Errors say what the argument must be and what was given.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
import difflib
import functools
import inspect
import math
import operator
import os
from pathlib import Path
import re
from typing import Any, SupportsFloat, SupportsIndex, TypeVar

from jaxtyping import PyTree
import numpy as np

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding

from ebmpp.core import random
from ebmpp.core.compile import is_traced
from ebmpp.errors import ArgumentError, DeclarationError, ParameterError, StateError

T = TypeVar("T")
Error = type[Exception]

#: Largest count: loops and windows count in 32 bits.
LARGEST = 2**31 - 1

_DIMS = re.compile(r".*_dim_\d+")  # xarray's names of a block's axes
_AXES = ("chain", "draw", "row", "sample")  # of draws


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


def count(name: str, value: object, least: int = 1, most: int = LARGEST) -> int:
    """Return an integer in a range as an int; raise ArgumentError for others, and bools."""
    number = None
    if isinstance(value, SupportsIndex) and not isinstance(value, bool | np.bool_):
        with suppress(TypeError):
            number = operator.index(value)
    if number is not None and least <= number <= most:
        return number
    limits = f"of at least {least}" if most == LARGEST else f"from {least} to {most}"
    if number is not None and number > most == LARGEST:
        limits += f", and at most {most}"
    hint = ""
    if isinstance(value, float | np.floating) and float(value).is_integer():
        hint = f"Give {int(value)}."
    raise error(name, f"an int {limits}", value, hint=hint)


def optional_count(name: str, value: object, least: int = 1) -> int | None:
    """Return an integer as :func:`count` does, or None."""
    return None if value is None else count(name, value, least)


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
    value: object,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
) -> float:
    """Return a finite number in a range as a float; ``above`` and ``below`` are exclusive."""
    result = math.nan
    if isinstance(value, SupportsFloat) and not isinstance(value, bool | np.bool_):
        with suppress(TypeError, ValueError):
            result = float(value)
    is_inside = above < result < below and least <= result <= most
    if not is_inside or not math.isfinite(result):
        raise error(name, f"a number{_range(above, least, below, most)}", value)
    return result


def _range(above: float, least: float, below: float, most: float) -> str:
    """Describe bounds in words, or as an interval if there are two."""
    low = max(above, least)
    high = min(below, most)
    if math.isfinite(low) and math.isfinite(high):
        left = "(" if above >= least else "["
        right = ")" if below <= most else "]"
        return f" in {left}{low:g}, {high:g}{right}"
    if math.isfinite(low):
        return f" above {low:g}" if above >= least else f" of at least {low:g}"
    if math.isfinite(high):
        return f" below {high:g}" if below <= most else f" of at most {high:g}"
    return ""


def choice(name: str, value: T, known: Iterable[T], also: str = "") -> T:
    """Return one of the known strings; raise ArgumentError, with the closest, for others."""
    known = tuple(known)
    if isinstance(value, str) and value in known:
        return value
    listed = ", ".join(map(repr, known)) + (f", or {also}" if also else "")
    raise ArgumentError(
        f"{name} must be one of {listed}, got {tell(value)}.{_closest(value, known)}"
    )


def _closest(value: object, known: Iterable[object]) -> str:
    if not isinstance(value, str):
        return ""
    close = difflib.get_close_matches(value, map(str, known), 1)
    return f" Did you mean {close[0]!r}?" if close else ""


def flag(name: str, value: object) -> bool:
    """Return a bool; raise ArgumentError for other values."""
    if not isinstance(value, bool | np.bool_):
        raise error(name, "True or False", value)
    return bool(value)


def function(name: str, value: T, inputs: str = "", arguments: int | None = None) -> T:
    """Return a callable of so many arguments; raise ArgumentError for other values.

    :param inputs: what it is a function of, in words.
    """
    number = "" if arguments is None else f" (number of arguments: {arguments})"
    if not callable(value) or arguments is not None and not _accepts(value, arguments):
        raise error(name, f"a function{inputs and ' of ' + inputs}{number}", value)
    return value


def _accepts(fn: Callable, arguments: int) -> bool:
    try:
        inspect.signature(fn).bind(*range(arguments))
    except TypeError:
        return False
    except ValueError:  # C functions have no signature
        pass
    return True


def instance(name: str, value: Any, kind: type[T], what: str = "") -> T:
    """Return an instance of a class, raise ArgumentError for other values.

    :param what: the instance in words, by default "a" and the class's name.
    """
    # a class has the methods that a protocol requires
    is_class = isinstance(value, type)
    if not isinstance(value, kind) or is_class:
        hint = f"Call it: {value.__name__}(...)." if is_class else ""
        raise error(name, what or f"a {kind.__name__}", value, hint=hint)
    return value


def key(name: str, value: object) -> Array:
    """Return one jax key, typed or legacy; raise ArgumentError for seeds or several keys."""
    hint = ""
    if isinstance(value, Array | np.ndarray):
        is_typed = random.is_typed(value)
        is_legacy = value.dtype == np.uint32 and value.shape[-1:] in ((2,), (4,))
        is_key = is_typed or is_legacy
        axes = value.shape if is_typed else value.shape[:-1]
        if is_key and not axes:
            return jnp.asarray(value)
        if is_key and 0 not in axes:
            hint = f"Give {name.split()[-1]}[0]."
    elif isinstance(value, int | np.integer) and not isinstance(value, bool):
        hint = f"Give jax.random.key({value})."
    raise error(name, "one jax key, such as jax.random.key(0)", value, hint=hint)


def on_host(
    name: str, *values: PyTree, instead: str = "Call it outside, on known values"
) -> None:
    """Raise ArgumentError in a caller's jit, vmap or grad, as known values are needed."""
    # a stream's rows come later
    known = [value for value in values if not isinstance(value, Iterator)]
    if is_traced(known):
        where = "jax.jit, jax.vmap or jax.grad, or in a compiled monitor of fit"
        raise ArgumentError(f"{name} cannot be traced by {where}. {instead}.")


def block_name(value: Any) -> str:
    """Return a block name; raise DeclarationError if draws, files or calls cannot hold it."""
    reason = None
    if not isinstance(value, str) or not value:
        reason = "a name is a non-empty string"
    elif value == "clamped":
        reason = "it is the argument that clamps"
    elif value in _AXES:
        reason = "draws have an axis of that name"
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
    values: Iterable[str] | str,
    known: Iterable[str],
    kind: Error = ArgumentError,
) -> tuple[str, ...]:
    """Return one name or several; raise an error for unknown ones, and one given twice.

    :param what: the kind of name, such as "block".
    """
    known = tuple(known)
    if not isinstance(values, Iterable):
        raise error(f"each {what}", f"one of {known}", values, kind)
    result = (values,) if isinstance(values, str) else tuple(values)
    for i, name in enumerate(result):
        if name not in known:
            listed = ", ".join(map(repr, known)) or "none"
            raise kind(
                f"unknown {what} {name!r}; there is {listed}.{_closest(name, known)}"
            )
        if name in result[:i]:
            raise kind(f"{what} {name!r} must be named once, got {list(result)}.")
    return result


def numbers(
    name: str, value: object, kind: Error = ArgumentError
) -> np.ndarray | Array:
    """Return an array of real numbers; raise an error for others, ragged and masked values."""
    refuse_mask(name, value, kind)
    cause = ""
    try:
        array = value if isinstance(value, Array) else np.asarray(value)
    # RuntimeError: torch's, for a gradient
    except (TypeError, ValueError, RuntimeError) as problem:
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


def refuse_mask(name: str, value: object, kind: Error = ArgumentError) -> None:
    """Raise an error for a masked array of numpy, whose mask a conversion would ignore."""
    leaves = jax.tree.leaves(value) if isinstance(value, list | tuple) else [value]
    masked = next((v for v in leaves if isinstance(v, np.ma.MaskedArray)), None)
    if masked is not None:
        hint = "Fill its entries in, as ebmpp.complete does for data, or drop them."
        raise error(name, "numbers without a mask", masked, kind, hint)


def placeable(name: str, value: object, kind: Error = ArgumentError) -> None:
    """Raise an error for an array over a mesh with explicit axes, unless ``mesh=`` is set.

    Every operation on an array with explicit axes would have to name the placement of
    its result.
    """
    if not isinstance(value, Array) or isinstance(value, Tracer):
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


def path(name: str, value: object, expected: str = "the path of a file") -> Path:
    """Return a path; raise ArgumentError for other values, and strings that are none."""
    is_path = isinstance(value, str | os.PathLike)
    if not is_path or not str(value) or "\0" in str(value):
        raise error(name, expected, value)
    return Path(value)


def input_file(name: str, value: object) -> Path:
    """Return the path of a file to read; raise FileNotFoundError if there is none."""
    file = path(name, value)
    if file.is_dir():
        raise error(name, "a file", file, hint="It is a directory.")
    if not file.exists():
        raise error(name, "a file that exists", file, FileNotFoundError)
    return file


def output_file(name: str, value: object) -> Path:
    """Return the path of a file to write; raise ArgumentError where none can be written."""
    file = path(name, value)
    is_writable = file.parent.is_dir() and os.access(file.parent, os.W_OK)
    if file.exists():
        is_writable &= file.is_file() and os.access(file, os.W_OK)
    if not is_writable:
        hint = "Create its directory or fix the permissions."
        raise error(name, "a file that can be written", file, hint=hint)
    return file


def sequence(name: str, value: object, elements: str) -> Sequence[PyTree]:
    """Return a list or tuple of ``elements``; raise ArgumentError for others, and strings."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise error(name, f"a list of {elements}", value)
    return value


def tell(value: object) -> str:
    """Return a short description of a value, for errors; of an array the shape."""
    kind = type(value).__name__
    if kind in ("ArrayImpl", "ndarray"):
        kind = "array"
    kind = f"an {kind}" if kind[0].lower() in "aeiou" else f"a {kind}"
    if isinstance(value, Array | np.ndarray):
        return f"{kind} of shape {value.shape} and dtype {value.dtype}"
    if isinstance(value, os.PathLike):  # in full, as the end of a path matters
        return repr(os.fspath(value))
    text = repr(value)
    return text if len(text) <= 80 else f"{kind} ({text[:60]}...)"
