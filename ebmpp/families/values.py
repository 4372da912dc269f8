# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Validation of one block's values, from any container of numbers to the library's dtypes.

Values are checked in the dtype in which they are given: 64-bit counts that were
narrowed first would silently wrap or round to other counts.
"""

from typing import Any

import numpy as np

from jax import Array
import jax.numpy as jnp

from ebmpp.core import Numbers, checks, is_concrete, sharding
from ebmpp.errors import StateError
from ebmpp.families.family import Family


def as_array(name: str, value: Any) -> Numbers:
    """Return an array of numbers of any dtype, without a copy; a memory map is not read.

    Data frames are converted column by column, and anything with ``__array__`` by
    numpy. Values with a mask are refused.
    """
    where = f"block {name!r}"
    if isinstance(value, tuple) and _is_pair_with_mask(value):
        hint = (
            "Pass ebmpp.Observed(values, known) where missing units are accepted, or "
            "use ebmpp.complete."
        )
        raise StateError(
            f"{where}: must be numbers without a mask, got {type(value).__name__}. {hint}"
        )
    if hasattr(value, "iloc") and hasattr(value, "columns"):
        return _from_frame(where, value)
    if isinstance(value, list | tuple) and not is_concrete(value):
        return jnp.asarray(value)
    return checks.numbers(where, value, StateError)


def _is_pair_with_mask(value: tuple) -> bool:
    """Return True for an Observed, or a tuple of values and booleans that was meant as one."""
    if hasattr(value, "known"):
        return True
    are_arrays = all(isinstance(v, np.ndarray | Array | list) for v in value)
    if len(value) != 2 or not are_arrays:
        return False
    mask = value[1]
    return is_concrete(mask) and np.asarray(mask).dtype == bool


def _from_frame(where: str, frame: Any) -> np.ndarray:
    for name, dtype in zip(frame.columns, frame.dtypes, strict=True):
        if dtype.kind not in "biuf":
            raise StateError(
                f"{where}: column {name!r} of the data frame must hold numbers, got {dtype}"
            )
    plain = all(isinstance(dtype, np.dtype) for dtype in frame.dtypes)
    common = np.result_type(*frame.dtypes, bool) if plain else np.dtype(float)
    if common.kind == "f" and any(dtype.kind in "iu" for dtype in frame.dtypes):
        # doubles would round integers past 2**53 before they are checked
        common = np.longdouble
    return frame.to_numpy(common) if plain else frame.to_numpy(common, na_value=np.nan)


def cast_values(name: str, family: Family, value: Numbers, check: bool = True) -> Array:
    """Convert values of :func:`as_array` to the dtype of the family's draws.

    :raises StateError: for a value outside the support, or one that jax's default
        floats cannot hold.
    """
    if not is_concrete(value):
        return jnp.asarray(value, family.dtype)
    # concrete values stay concrete under jit
    with sharding.eager(), np.errstate(over="ignore"):
        narrow = value.astype(jnp.result_type(float))
        if check:
            check_values(name, family, narrow, value)
            _check_width(name, family, narrow, value)
        return jnp.asarray(narrow, family.dtype)


def check_values(
    name: str, family: Family, x: Numbers, original: Numbers | None = None
) -> None:
    """Check values against the support, as they were before they were narrowed."""
    if not is_concrete(x):
        return
    with sharding.eager():
        # on the host: nothing to compile
        narrow = np.asarray(x)
        wrong = ~np.asarray(family.in_support(narrow))
        if not wrong.any():
            return
        before = narrow if original is None else np.asarray(original)
        # overflow is reported by _check_width
        wrong &= ~np.isinf(narrow) | ~np.isfinite(before.astype(float))
        _refuse(name, family, wrong, before, describe(family))


def _check_width(name: str, family: Family, narrow: Numbers, original: Numbers) -> None:
    """Refuse an integer that floats round, or a number that overflows."""
    kind = original.dtype.kind
    floats = np.finfo(narrow.dtype)
    digits = floats.bits if kind == "f" else floats.nmant + 1
    if kind not in "iuf" or original.dtype.itemsize * 8 <= digits:
        return
    original = np.asarray(original)
    held = np.asarray(narrow)
    wrong = np.isinf(held) & np.isfinite(original)
    if family.states() is not None or getattr(family.support, "is_discrete", False):
        with np.errstate(invalid="ignore"):
            wrong = wrong | (held.astype(original.dtype) != original)
        if kind != "f":  # converting back past the last integer depends on the machine
            wrong |= held >= 2.0 ** (8 * original.dtype.itemsize - (kind == "i"))
    expected = f"numbers that {held.dtype} holds (or set jax_enable_x64)"
    _refuse(name, family, wrong, original, expected)


def _refuse(
    name: str, family: Family, wrong: np.ndarray, values: np.ndarray, expected: str
) -> None:
    """Raise an error for the first value that is wrong, if any is."""
    if not wrong.any():
        return
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    raise StateError(
        f"block {name!r} ({family!r}) must have {expected}, got "
        f"{values[index]!s} at index {index} and {int(wrong.sum())} such "
        f"values. {_remedy(family, values[wrong])}"
    )


def _remedy(family: Family, wrong: np.ndarray) -> str:
    """Return what a user can do about values outside the support."""
    if np.isnan(wrong.astype(float)).any():
        return "ebmpp.Observed.where_finite(values) marks nan as missing."
    states = family.states()
    if states is not None and len(states) == 2:
        return (
            "ebmpp.data.binarize(values, threshold=...) turns grey levels into {0, 1}."
        )
    return "Draws of a custom family must be in its support."


def describe(family: Family) -> str:
    """Return the values of a family in words."""
    states = family.states()
    if states is not None and len(states) <= 3:
        return f"values in {{{', '.join(f'{s:g}' for s in np.asarray(states))}}}"
    if states is not None:
        return f"integers from {states[0]:g} to {states[-1]:g}"
    return str(family.support).strip("<>") or "values in its support"
