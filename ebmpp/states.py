# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Checks of states and params: every mistake gets a message with a name, a value and a remedy."""

from collections.abc import Iterable, Mapping
import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.errors import ParameterError, StateError
from ebmpp.families import Family

if TYPE_CHECKING:
    from ebmpp.graph import FactorGraph


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


class Observed(NamedTuple):
    """Values of a block of which only some units are known: give it where a clamped block is taken.

    The other units are free. So half an image is completed, or a table's missing entries.

    :param values: shape ``(*batch, *shape)``; what stands at unknown units is ignored (nan will do).
    :param known: which units are known, of the same shape or one that broadcasts to it.

    **Example**

    >>> import jax, jax.numpy as jnp, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> v = jnp.array([1.0, 0.0, jnp.nan, jnp.nan])
    >>> made = ebmpp.local_search(rbm, rbm.init(jax.random.key(0)), rng_key=jax.random.key(1),
    ...                           v=ebmpp.Observed(v, ~jnp.isnan(v)))
    >>> made.state["v"][:2].tolist()
    [1.0, 0.0]
    """

    values: Any
    known: Any

    @classmethod
    def where_finite(cls, values: Any) -> "Observed":
        """What is known of a table whose missing entries are nan (or infinite).

        :param values: numbers, shape ``(*batch, *shape)``.

        **Example**

        >>> Observed.where_finite([1.0, float("nan")]).known.tolist()
        [True, False]
        """
        values = np.asarray(values)
        return cls(values, np.isfinite(values))


class Given(NamedTuple):
    """What a call holds fixed, as rows of shape ``(rows, *shape)``; one row where nothing has an axis."""

    whole: dict[str, Array]
    """Blocks that are clamped."""
    partial: dict[str, Array]
    """Blocks of which some units are observed."""
    keep: dict[str, Array]
    """Which units those are."""
    batch: tuple[int, ...]
    """The leading axes, of which ``rows`` is the product."""


def as_given(families: Mapping[str, Family], given: Mapping[str, Any], check: bool = True) -> Given:
    """Clamped blocks and :class:`Observed` ones, checked.

    :param check: whether to look at values also (names and shapes are checked anyway).
    :raises StateError: for a wrong name, shape or value.
    """
    check_names(given, families)
    values, known = {}, {}
    for b, v in given.items():
        if isinstance(v, Observed):
            values[b], known[b] = _as_observed(b, families[b], v)
        else:
            values[b] = as_array(b, v)
    batch = batch_shape(families, values)
    if 0 in batch:
        shapes = {b: v.shape for b, v in values.items()}
        raise StateError(f"clamped blocks have no rows: shapes {shapes}; give at least one row")
    rows = {}
    for b, v in values.items():
        if check:
            check_values(b, families[b], v)
        full = jnp.broadcast_to(v.astype(families[b].dtype), batch + families[b].shape)
        rows[b] = full.reshape(-1, *families[b].shape)
    keep = {b: jnp.broadcast_to(k, batch + families[b].shape) for b, k in known.items()}
    keep = {b: k.reshape(-1, *families[b].shape) for b, k in keep.items()}
    whole = {b: v for b, v in rows.items() if b not in known}
    return Given(whole, {b: rows[b] for b in known}, keep, batch)


def _as_observed(name: str, family: Family, given: Observed) -> tuple[Array, Array]:
    """Values with something harmless at unknown units, and which are known."""
    known, given_values = as_array(name, given.known), given.values
    if is_concrete(known) and not isinstance(given_values, jax.Array):
        with contextlib.suppress(ValueError):  # a wrong shape is told below
            hidden = np.broadcast_to(known, np.shape(given_values))
            given_values = np.where(hidden, given_values, 0)  # jax_debug_nans would not let nan in
    value = as_array(name, given_values)
    if known.dtype != bool:
        raise StateError(f"block {name!r}: known is an array of booleans, not of {known.dtype}")
    batch_shape({name: family}, {name: value})
    try:
        known = jnp.broadcast_to(known, value.shape)
    except ValueError:
        raise StateError(
            f"block {name!r}: known has shape {known.shape}, which does not broadcast to that of the "
            f"values, {value.shape}"
        ) from None
    harmless = family.initial(jnp.zeros((*family.shape, family.num_words), jnp.uint32))
    return jnp.where(known, value, harmless.astype(value.dtype)), known


def check_params(expected: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    """Compare names, structure and shapes with those of the declaration.

    :param expected: a dict of pytrees of ``jax.ShapeDtypeStruct``, keyed by factor name.
    :raises ParameterError: naming the factor.
    """
    check_factors(expected, params)
    for name, tree in expected.items():
        wanted, given = jax.tree.map(np.shape, tree), jax.tree.map(np.shape, params[name])
        if wanted != given:
            raise ParameterError(f"factor {name!r}: params have shape {given}, expected {wanted}")


def check_factors(expected: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    """Compare names with those of the declaration.

    :raises ParameterError: naming the factor.
    """
    if not isinstance(params, Mapping):
        raise ParameterError(f"params is a dict keyed by factor name, not {type(params).__name__}")
    for name in params:
        if name not in expected:
            raise ParameterError(f"params has {name!r}, and the factors are {sorted(expected)}")
    for name in expected:
        if name not in params:
            raise ParameterError(f"params lacks factor {name!r}; it has {sorted(params)}")


def check_finite(params: Mapping[str, Any]) -> None:
    """:raises ParameterError: for NaN or infinity in params, naming the factor."""
    for name, tree in params.items():
        for leaf in jax.tree.leaves(tree):
            if is_concrete(leaf) and not np.isfinite(np.asarray(leaf)).all():
                bad = int((~np.isfinite(np.asarray(leaf))).sum())
                raise ParameterError(f"factor {name!r}: {bad} of {leaf.size} params are not finite")


# -- rows of data ---------------------------------------------------------------------------------


def check_rows(graph: "FactorGraph", data: Any) -> tuple[dict[str, Array], int]:
    """Checked data as arrays on the device, and how many rows.

    :param data: rows of the visible blocks, a dict or a bare array for the only one.
    :raises StateError: for a wrong name, shape or value, or no rows.
    """
    rows, batch = as_rows(graph.families, graph.as_visible(data), tuple(graph.visible))
    if len(batch) != 1 or batch[0] < 1:
        raise StateError(
            f"data need one leading axis of at least one row; got leading axes {batch} before the blocks' "
            f"own shapes { ({b: f.shape for b, f in graph.visible.items()}) }"
        )
    return {b: jax.device_put(v.astype(graph.families[b].dtype)) for b, v in rows.items()}, batch[0]


def check_weights(weights: Any, size: int) -> np.ndarray:
    """Weights of the rows, scaled to mean 1.

    :raises StateError: for a wrong shape, a weight that is negative or not finite, or all zero.
    """
    given = np.asarray(weights)
    if given.shape != (size,) or given.dtype.kind not in "fiub":
        raise StateError(
            f"weights are one number a row of the data, shape ({size},); got shape {given.shape} of "
            f"{given.dtype}"
        )
    given = given.astype(float)
    wrong = np.flatnonzero(~(np.isfinite(given) & (given >= 0)))
    if len(wrong):
        raise StateError(
            f"weights are finite and not negative; got {given[wrong[0]]} at row {wrong[0]} "
            f"({len(wrong)} such)"
        )
    if not given.any():
        raise StateError("weights are all zero: at least one row needs a positive weight")
    return (given / given.mean()).astype(np.dtype(jnp.result_type(float)))
