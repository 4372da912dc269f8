# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments: one for each kind of thing that a user gives, and one dialect for what is wrong.

Each takes the name that the user knows the argument by ("fit: batch_size"), and returns the value in the form
that the library goes on with. The first word of an error says where, then what was expected and what was
given.
"""

from collections.abc import Iterable, Iterator, Sequence
import difflib
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
from ebmpp.errors import ArgumentError, DeclarationError

T = TypeVar("T")

#: The largest count: loops and windows count in 32 bits.
LARGEST = 2**31 - 1

_DIMS = re.compile(r".*_dim_\d+")  # what xarray calls the axes of a block
#: The axes of draws, and the argument by which a block of any other name is clamped.
_TAKEN = ("chain", "draw", "row", "sample", "clamped")


def count(name: str, value: Any, least: int = 1, most: int = LARGEST) -> int:
    """A whole number, as an int.

    :param value: an int, numpy's ints and jax's included; no bool.
    :raises ArgumentError: for anything else, or one out of range.
    """
    try:
        made = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except (TypeError, jax.errors.JAXTypeError):
        made = None
    told = f"an int of at least {least}" if most == LARGEST else f"an int from {least} to {most}"
    if made is None:
        whole = isinstance(value, float | np.floating) and float(value).is_integer()
        hint = f" (give {int(value)})" if whole else ""
        raise ArgumentError(f"{name} is {told}, not {tell(value)}{hint}")
    if made < least or made > most:
        room = f", and at most {most}" if made > most == LARGEST else ""
        raise ArgumentError(f"{name} is {told}{room}, not {tell(value)}")
    return made


def optional_count(name: str, value: object, least: int = 1, most: int = LARGEST) -> int | None:
    """A whole number or None.

    :raises ArgumentError: as :func:`count` does.
    """
    return None if value is None else count(name, value, least, most)


def set_counts(owner: object, *fields: str, least: int = 1, optional: bool = False) -> None:
    """Fields of a frozen dataclass that are whole numbers, made ints.

    :param optional: whether None stays.
    :raises ArgumentError: as :func:`count` does.
    """
    check = optional_count if optional else count
    for field in fields:
        made = check(f"{type(owner).__name__}: {field}", getattr(owner, field), least)
        object.__setattr__(owner, field, made)


def number(
    name: str,
    value: Any,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
) -> float:
    """A finite number, as a float.

    :param above: what it must be greater than; ``least``, ``below`` and ``most`` likewise.
    :raises ArgumentError: for anything else.
    """
    try:
        made = math.nan if isinstance(value, bool | np.bool_ | str | bytes) else float(value)
    except (TypeError, ValueError, jax.errors.JAXTypeError):
        made = math.nan
    if not (math.isfinite(made) and above < made < below and least <= made <= most):
        raise ArgumentError(f"{name} is a number{_range(above, least, below, most)}, not {tell(value)}")
    return made


def _range(above: float, least: float, below: float, most: float) -> str:
    """Bounds in words, or as an interval where there are two."""
    low, high = max(above, least), min(below, most)
    if math.isfinite(low) and math.isfinite(high):
        return f" in {'(' if above >= least else '['}{low:g}, {high:g}{')' if below <= most else ']'}"
    if math.isfinite(low):
        return f" above {low:g}" if above >= least else f" of at least {low:g}"
    if math.isfinite(high):
        return f" below {high:g}" if below <= most else f" of at most {high:g}"
    return ""


def choice(name: str, value: T, known: Iterable[T], also: str = "") -> T:
    """One of what is known.

    :param also: what else would do, in words.
    :raises ArgumentError: for anything else, with the nearest word.
    """
    known = tuple(known)
    if isinstance(value, str) and value in known:
        return value
    near = difflib.get_close_matches(value, map(str, known), 1) if isinstance(value, str) else ()
    hint = f"; did you mean {near[0]!r}?" if near else ""
    listed = ", ".join(map(repr, known)) + (f", or {also}" if also else "")
    raise ArgumentError(f"{name} is one of {listed}, not {tell(value)}{hint}")


def flag(name: str, value: object) -> bool:
    """True or False.

    :raises ArgumentError: for anything else: a word, or a number that was meant for another argument.
    """
    if not isinstance(value, bool | np.bool_):
        raise ArgumentError(f"{name} is True or False, not {tell(value)}")
    return bool(value)


def function(name: str, value: T, of: str = "", arguments: int | None = None) -> T:
    """Something that can be called.

    :param of: what it is called with, in words.
    :param arguments: how many that are, where it can be asked before.
    :raises ArgumentError: for anything else.
    """
    wanted = f"{name} is a function{' of ' + of if of else ''}"
    if not callable(value):
        raise ArgumentError(f"{wanted}, not {tell(value)}")
    if arguments is not None and not _takes(value, arguments):
        many = "one argument" if arguments == 1 else f"{arguments} arguments"
        raise ArgumentError(f"{wanted}, {many}; {tell(value)} takes others")
    return value


def _takes(fn: Any, count: int) -> bool:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return True  # of C functions nobody knows
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def instance(name: str, value: Any, kind: type[T] | tuple[type, ...], what: str) -> T:
    """Of a class.

    :param what: what is expected, in words ("a FactorGraph").
    :raises ArgumentError: for anything else; a class is told apart.
    """
    if isinstance(value, type):  # before the rest: a class has the methods that a protocol asks for
        raise ArgumentError(f"{name} is {what}, and got a class: call it, {value.__name__}(...)")
    if not isinstance(value, kind):
        raise ArgumentError(f"{name} is {what}, not {tell(value)}")
    return value


def key(name: str, value: Any) -> Array:
    """One jax key, typed or legacy.

    :raises ArgumentError: for a seed, a batch of keys, or anything else.
    """
    remedy = "such as jax.random.key(0)"
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        raise ArgumentError(f"{name} is a jax key, not the number {value}: give jax.random.key({value})")
    if not isinstance(value, jax.Array | np.ndarray):
        raise ArgumentError(f"{name} is a jax key, {remedy}, not {tell(value)}")
    typed = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    if not typed and (value.dtype != np.uint32 or value.ndim == 0 or value.shape[-1] not in (2, 4)):
        raise ArgumentError(f"{name} is a jax key, {remedy}, not {tell(value)}")
    axes = value.shape if typed else value.shape[:-1]
    if 0 in axes:
        raise ArgumentError(f"{name} is one jax key, not an empty array of keys")
    if axes:
        one = f"{name.split()[-1]}[0]"
        raise ArgumentError(f"{name} is one jax key, not an array of keys of shape {axes}: give one, {one}")
    return jnp.asarray(value)


def on_host(name: str, *given: Any, instead: str = "call it outside, on values that are known") -> None:
    """That a function which goes by values is not part of a caller's program.

    :param given: what it was given, and may be traced.
    :param instead: what to do.
    :raises ArgumentError: under jax.jit, jax.vmap, jax.grad, or in a monitor of ``fit`` that is compiled.
    """
    if is_traced([each for each in given if not isinstance(each, Iterator)]):  # a stream's rows come later
        raise ArgumentError(
            f"{name} runs from the host: under jax.jit, jax.vmap or jax.grad, or in a function that is a "
            f"monitor of fit, it cannot be traced: {instead}"
        )


def block_name(value: object) -> str:
    """A name that a block can go by.

    :raises DeclarationError: for one that draws, files or calls could not hold.
    """
    if not isinstance(value, str) or not value:
        raise DeclarationError(f"a block's name is a non-empty string, not {tell(value)}")
    reason = None
    if value in _TAKEN:
        reason = "draws have an axis of that name" if value != "clamped" else "it is the argument that clamps"
    elif _DIMS.fullmatch(value):
        reason = "so xarray names the axes of draws"
    elif "/" in value or value in (".", ".."):
        reason = "it would be a path in the tree of draws"
    elif "[" in value or "]" in value:
        reason = "brackets name the parts of a block whose units interact"
    elif value != value.strip() or not value.isprintable():
        reason = "spaces at its ends and signs that do not print are lost in files"
    if reason:
        raise DeclarationError(f"a block cannot be named {value!r}: {reason}; choose another name")
    return value


def names(
    what: str, given: Iterable[object], known: Iterable[str], error: type[Exception] = ArgumentError
) -> None:
    """That each of ``given`` is among ``known``.

    :param what: what they name ("block").
    :raises error: for the first that is not, with all that are known.
    """
    known = tuple(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1) if isinstance(name, str) else ()
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise error(f"unknown {what} {name!r}; there is {', '.join(map(repr, known)) or 'none'}{hint}")


def numbers(name: str, value: Any, error: type[Exception] = ArgumentError) -> np.ndarray | Array:
    """An array of numbers, as it is; lists become arrays.

    :raises error: for objects, words, ragged lists and whatever else does not hold numbers.
    """
    try:
        made = value if isinstance(value, jax.Array) else np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as cause:  # torch has a RuntimeError for what has a gradient
        raise error(f"{name}: expected an array of numbers, got {tell(value)} ({cause})") from None
    if jnp.issubdtype(made.dtype, np.complexfloating):
        raise error(
            f"{name}: expected real numbers, got complex ones; give their real part, if that is meant"
        )
    numeric = jnp.issubdtype(made.dtype, np.number) and made.dtype.kind != "m"  # bfloat16 is, times are not
    if made.dtype != bool and not numeric:
        dtype = "" if hasattr(value, "dtype") else f" of dtype {made.dtype}"
        raise error(f"{name}: expected an array of numbers, got {tell(value)}{dtype}")
    placeable(name, made, error)
    return made


def placeable(name: str, value: Any, error: type[Exception] = ArgumentError) -> None:
    """That jax may choose where lies what is made of an array.

    :raises error: for one over a mesh with explicit axes, for which each operation would have to say it; not
        where ``mesh=`` has taken over.
    """
    if not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return
    mesh = value.sharding.mesh if isinstance(value.sharding, NamedSharding) else None
    chosen = AxisType.Auto in jax.sharding.get_abstract_mesh().axis_types
    if mesh is not None and AxisType.Explicit in mesh.axis_types and not chosen:
        raise error(
            f"{name}: an array over a mesh with explicit axes, {mesh.axis_names}; give mesh=, where there is "
            f"one, or make the mesh with axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)}"
        )


def sequence(name: str, value: Any, of: str) -> Sequence[Any]:
    """A list or tuple, as it is.

    :param of: of what, in words.
    :raises ArgumentError: for anything else, a single word too.
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ArgumentError(f"{name} is a list of {of}, not {tell(value)}")
    return value


def tell(value: object) -> str:
    """A value as an error shows it: short, and of arrays the shape."""
    if isinstance(value, jax.Array | np.ndarray):
        return f"{_article(type(value).__name__)} of shape {value.shape} and dtype {value.dtype}"
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{_article(type(value).__name__)} ({shown[:60]}...)"


def _article(word: str) -> str:
    word = "array" if word in ("ArrayImpl", "ndarray") else word
    return f"{'an' if word[0].lower() in 'aeiou' else 'a'} {word}"
