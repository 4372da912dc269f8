# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""One block's values, from whatever holds numbers to the library's own width, checked on the way.

Values are checked in the width in which they are given: 64-bit counts that were narrowed first would wrap
or round into other counts without a word.
"""

from typing import Any

import numpy as np

import jax
from jax import Array
from jax.core import Tracer
import jax.numpy as jnp

from ebmpp.core import Numbers, checks, sharding
from ebmpp.errors import StateError
from ebmpp.families.family import Family


def is_concrete(x: object) -> bool:
    """Whether values can be looked at now (not under jit, vmap or grad)."""
    return not isinstance(x, Tracer)


def as_array(name: str, value: Any) -> Numbers:
    """Numbers as they are given, of any width; nothing is copied, and of a memory map nothing is read.

    Data frames are taken column by column, in their order; so is anything that has ``__array__``.

    :param name: of the block.
    :raises StateError: for what does not hold real numbers, and for two things that belong into an
        :class:`~ebmpp.Observed`.
    """
    where = f"block {name!r}"
    if isinstance(value, tuple) and hasattr(value, "known"):
        raise StateError(
            f"{where}: got an Observed, and every unit needs a value here; ebmpp.complete fills in the others"
        )
    if isinstance(value, tuple) and _are_values_and_known(value):
        raise StateError(
            f"{where}: got a tuple of values and booleans; if these say which units are known, give "
            "ebmpp.Observed(values, known)"
        )
    # numpy takes a list of masked rows for one of what is under the masks
    each = jax.tree.leaves(value) if isinstance(value, list | tuple) else [value]
    if any(isinstance(v, np.ma.MaskedArray) for v in each):
        raise StateError(
            f"{where}: got a masked array; give ebmpp.Observed(values.filled(0), ~values.mask) for what the "
            "mask leaves (of a list of them, of np.ma.stack(list))"
        )
    if hasattr(value, "iloc") and hasattr(value, "columns"):
        return _of_frame(where, value)
    if isinstance(value, list | tuple) and any(not is_concrete(v) for v in each):
        return jnp.asarray(value)
    return checks.numbers(where, value, StateError)


def _are_values_and_known(value: tuple) -> bool:
    arrays = [isinstance(v, np.ndarray | Array | list) for v in value]
    if len(value) != 2 or not all(arrays):
        return False
    return all(map(is_concrete, jax.tree.leaves(value[1]))) and np.asarray(value[1]).dtype == bool


def _of_frame(where: str, frame: Any) -> np.ndarray:
    for name, dtype in zip(frame.columns, frame.dtypes, strict=True):
        if dtype.kind not in "biuf":
            raise StateError(f"{where}: column {name!r} of the data frame holds {dtype}, not numbers")
    plain = all(isinstance(dtype, np.dtype) for dtype in frame.dtypes)
    common = np.result_type(*frame.dtypes, bool) if plain else np.dtype(float)
    if common.kind == "f" and any(dtype.kind in "iu" for dtype in frame.dtypes):
        common = np.longdouble  # doubles would round whole numbers past 2**53 before they are checked
    return frame.to_numpy(common) if plain else frame.to_numpy(common, na_value=np.nan)  # pandas' own types


def settle(name: str, family: Family, given: Numbers, check: bool = True) -> Array:
    """Values as draws of the family have them.

    :param given: of :func:`as_array`.
    :param check: whether to look at values.
    :raises StateError: for a value outside the support, or one that jax's default floats cannot hold.
    """
    dtype = jnp.result_type(float)
    if not is_concrete(given):
        return jnp.asarray(given, family.dtype)
    with sharding.at_once(), np.errstate(over="ignore"):  # known values stay known under jit
        made = given.astype(dtype)
        if check:
            check_values(name, family, made, given)
            _check_width(name, family, made, given)
        return jnp.asarray(made, family.dtype)


def check_values(name: str, family: Family, x: Numbers, given: Numbers | None = None) -> None:
    """Check values against the support.

    :param given: the same before they were narrowed, to be shown.
    :raises StateError: for NaN or a value outside the support, with the first place it stands.
    """
    if not is_concrete(x):
        return
    with sharding.at_once():  # under jit, known values would be staged, not looked at
        wrong = ~np.asarray(family.in_support(np.asarray(x)))  # on the host: nothing to compile
        if given is not None and np.isinf(infinite := np.asarray(x)).any():
            # what became infinite on the way is told as that
            wrong &= ~(np.isinf(infinite) & np.isfinite(np.asarray(given).astype(float)))
        if wrong.any():
            wrong, wanted = np.argwhere(wrong), describe(family)
            shown = np.asarray(x if given is None else given)[tuple(wrong[0])]
            hint = "; ebmpp.Observed.where_finite(values) says that nan is missing" if shown != shown else ""
            _refuse(name, family, wrong, shown, f"; expected {wanted}{hint}")


def _check_width(name: str, family: Family, made: Numbers, given: Numbers) -> None:
    """:raises StateError: for a whole number that floats round, or a number that becomes infinite."""
    kind, floats = given.dtype.kind, np.finfo(made.dtype)
    if kind not in "iuf" or given.dtype.itemsize * 8 <= (floats.bits if kind == "f" else floats.nmant + 1):
        return
    given, held = np.asarray(given), np.asarray(made)
    wrong = np.isinf(held) & np.isfinite(given)
    if family.states() is not None or getattr(family.support, "is_discrete", False):
        with np.errstate(invalid="ignore"):
            wrong = wrong | (held.astype(given.dtype) != given)
        if kind != "f":  # the way back of what is past the last number is whatever the machine makes of it
            wrong |= held >= 2.0 ** (8 * given.dtype.itemsize - (kind == "i"))
    if wrong.any():
        places = np.argwhere(wrong)
        shown, became = given[tuple(places[0])], held[tuple(places[0])]
        remedy = 'give values of another unit, or jax.config.update("jax_enable_x64", True)'
        why = f", which {held.dtype} cannot hold: it would be {became:.17g}; {remedy}"
        _refuse(name, family, places, shown, why)


def _refuse(name: str, family: Family, places: np.ndarray, shown: Any, why: str) -> None:
    index = tuple(int(i) for i in places[0])
    count = f"{len(places)} such value{'s' if len(places) > 1 else ''}"
    raise StateError(f"block {name!r} ({family!r}) got {shown!s} at index {index} ({count}){why}")


def describe(family: Family) -> str:
    """What values a family takes, in words."""
    states = family.states()
    if states is not None and len(states) <= 3:
        return f"values in {{{', '.join(f'{s:g}' for s in np.asarray(states))}}}"
    if states is not None:
        return f"whole numbers from {states[0]:g} to {states[-1]:g}"
    return str(family.support).strip("<>") or "values in its support"
