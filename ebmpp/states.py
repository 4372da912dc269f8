# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Checks of states and params: every mistake gets a message with a name, a value and a remedy."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.errors import ParameterError, StateError
from ebmpp.families import Family


def is_concrete(x: object) -> bool:
    """Whether values can be looked at now (not under jit, vmap or grad)."""
    return not isinstance(x, jax.core.Tracer)


def check_names(given: Iterable[str], known: Iterable[str], what: str = "block") -> None:
    """:raises StateError: for a name that is not among ``known``."""
    known = tuple(known)
    unknown = [name for name in given if name not in known]
    if unknown:
        raise StateError(f"unknown {what} {unknown[0]!r}; this graph has {', '.join(map(repr, known))}")


def check_values(name: str, family: Family, x: Array) -> None:
    """:raises StateError: for NaN or a value outside the support, with the first place it stands."""
    if not is_concrete(x):
        return
    with jax.ensure_compile_time_eval():  # under jit, known values would be staged, not looked at
        wrong = np.argwhere(~np.asarray(family.in_support(x)))
        wanted = describe(family) if len(wrong) else ""
    if len(wrong):
        index = tuple(int(i) for i in wrong[0])
        raise StateError(
            f"block {name!r} ({family!r}) got {np.asarray(x)[index]!s} at index {index}"
            f" ({len(wrong)} such value{'s' if len(wrong) > 1 else ''}); expected {wanted}"
        )


def describe(family: Family) -> str:
    """What values a family takes, in words."""
    states = family.states()
    if states is not None and len(states) <= 3:
        return f"values in {{{', '.join(f'{s:g}' for s in np.asarray(states))}}}"
    if states is not None:
        return f"whole numbers from {states[0]:g} to {states[-1]:g}"
    return str(family.support).strip("<>") or "values in its support"


def as_array(name: str, value: object) -> Array:
    """:raises StateError: for what jax cannot hold as numbers."""
    try:
        with jax.ensure_compile_time_eval():  # so that known values stay known under jit
            return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise StateError(f"block {name!r}: expected an array, got {type(value).__name__}") from error


def batch_shape(families: Mapping[str, Family], x: Mapping[str, Array]) -> tuple[int, ...]:
    """The leading axes that the blocks of ``x`` share (broadcast).

    :raises StateError: unknown block, wrong trailing shape, or axes that do not broadcast.
    """
    check_names(x, families)
    leading = {}
    for name, value in x.items():
        shape = families[name].shape
        split = value.ndim - len(shape)
        if split < 0 or value.shape[split:] != shape:
            wanted = ", ".join(["...", *map(str, shape)])
            raise StateError(f"block {name!r} got shape {value.shape}, expected ({wanted})")
        leading[name] = value.shape[:split]
    try:
        return np.broadcast_shapes(*leading.values())
    except ValueError:
        raise StateError(f"leading axes of the blocks do not broadcast: {leading}") from None


def as_rows(
    families: Mapping[str, Family], x: Mapping[str, Any], needed: Iterable[str] = ()
) -> tuple[dict[str, Array], tuple[int, ...]]:
    """A checked state as rows: every block of shape ``(rows, *shape)``, and the batch shape.

    :raises StateError: a block of ``needed`` that is missing, or anything the checks above refuse.
    """
    x = {name: as_array(name, value) for name, value in dict(x).items()}
    batch = batch_shape(families, x)
    missing = [name for name in needed if name not in x]
    if missing:
        raise StateError(
            f"block {missing[0]!r} is missing: got {sorted(x)}, and expected a value for "
            f"{', '.join(repr(n) for n in needed)}"
        )
    rows = {}
    for name, value in x.items():
        check_values(name, families[name], value)
        shape = families[name].shape
        rows[name] = jnp.broadcast_to(value, batch + shape).reshape(-1, *shape)
    return rows, batch


def check_params(expected: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    """Compare names, structure and shapes with those of the declaration.

    :param expected: a dict of pytrees of ``jax.ShapeDtypeStruct``, keyed by factor name.
    :raises ParameterError: naming the factor.
    """
    if not isinstance(params, Mapping):
        raise ParameterError(f"params is a dict keyed by factor name, not {type(params).__name__}")
    for name in params:
        if name not in expected:
            raise ParameterError(f"params has {name!r}, and the factors are {sorted(expected)}")
    for name, tree in expected.items():
        if name not in params:
            raise ParameterError(f"params lacks factor {name!r}; it has {sorted(params)}")
        wanted, given = jax.tree.map(np.shape, tree), jax.tree.map(np.shape, params[name])
        if wanted != given:
            raise ParameterError(f"factor {name!r}: params have shape {given}, expected {wanted}")


def check_finite(params: Mapping[str, Any]) -> None:
    """:raises ParameterError: for NaN or infinity in params, naming the factor."""
    for name, tree in params.items():
        for leaf in jax.tree.leaves(tree):
            if is_concrete(leaf) and not np.isfinite(np.asarray(leaf)).all():
                bad = int((~np.isfinite(np.asarray(leaf))).sum())
                raise ParameterError(f"factor {name!r}: {bad} of {leaf.size} params are not finite")
