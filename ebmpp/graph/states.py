# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Validation of states, clamped blocks and params."""

from collections.abc import Collection, Iterable, Mapping
import contextlib
import dataclasses
from functools import lru_cache
from typing import Any, NamedTuple

from jaxtyping import PyTree
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import (
    BatchShape,
    Blocks,
    Numbers,
    Params,
    StateLike,
    checks,
    is_concrete,
    omit,
    select,
    sharding,
)
from ebmpp.errors import IntractableError, ParameterError, StateError, clash
from ebmpp.families.family import Families, Family
from ebmpp.families.values import as_array, cast_values
from ebmpp.graph.declaration import Declaration

#: Arrays, lists or :class:`Observed` by block.
ValuesByBlock = Mapping[str, PyTree]


def check_names(
    names: Iterable[str] | str, known: Iterable[str], what: str = "block"
) -> tuple[str, ...]:
    """Return one name or several, all of them known and different."""
    return checks.names(what, names, known, StateError)


def as_visible(graph: Declaration, data: StateLike) -> dict[str, PyTree]:
    """Return data as a dict of visible blocks; anything but a dict stands for the only one."""
    if isinstance(data, Mapping):
        check_names(data, graph.visible, "visible block")
        return dict(data)
    if len(graph.visible) != 1:
        raise checks.state_error(
            "data", f"a dict of the visible blocks {list(graph.visible)}", data
        )
    return {next(iter(graph.visible)): data}


def batch_shape(families: Families, x: Mapping[str, Numbers]) -> BatchShape:
    """Return the broadcast leading axes of the blocks of ``x``."""
    leading = {}
    for name, value in x.items():
        shape = families[name].shape
        split = value.ndim - len(shape)
        if not split >= 0 or value.shape[split:] != shape:
            raise checks.state_error(
                f"block {name!r}",
                f"of shape ({', '.join(['...', *map(str, shape)])})",
                value.shape,
                hint="Reshape the values, or declare the block with their shape.",
            )
        leading[name] = value.shape[:split]
    try:
        return np.broadcast_shapes(*leading.values())
    except ValueError:
        raise StateError(
            f"leading axes of the blocks must broadcast, got {leading}"
        ) from None


def check_present(names: Iterable[str], needed: Iterable[str]) -> None:
    """Check that all needed blocks are given."""
    names = sorted(names)
    needed = list(needed)
    missing = next((name for name in needed if name not in names), None)
    if missing is not None:
        raise checks.state_error(
            "a state",
            f"a dict of the blocks {needed}",
            names,
            hint=f"{missing!r} is missing.",
        )


def as_rows(
    families: Families, x: ValuesByBlock, needed: Iterable[str] = ()
) -> tuple[Blocks, BatchShape]:
    """Return a validated state as rows, ``(rows, *shape)`` per block, and its batch shape."""
    if not isinstance(x, Mapping):
        raise checks.state_error("a state", f"a dict of the blocks {list(families)}", x)
    arrays = {b: as_array(b, v) for b, v in x.items()}
    rows, _, batch = as_partial_rows(families, arrays, needed)
    return rows, batch


def as_partial_rows(
    families: Families,
    x: ValuesByBlock,
    needed: Iterable[str] = (),
    check: bool = True,
) -> tuple[Blocks, Blocks, BatchShape]:
    """Return rows of a state with :class:`Observed` blocks, their masks, and the batch shape.

    :param check: False to check names and shapes only, not values.
    """
    check_names(x, families)
    values, known = as_arrays(families, x)
    batch = batch_shape(families, values)
    check_present(x, needed)

    def as_rows(family: Family, x: Numbers) -> Array:
        full = jnp.broadcast_to(x, batch + family.shape)
        return full.reshape(-1, *family.shape)

    rows = {}
    masks = {}
    for b, value in values.items():
        family = families[b]
        mask = known.get(b)
        if mask is not None:
            value = _fill(family, value, mask)
            # a concrete mask stays concrete: its values are counted
            with sharding.eager() if is_concrete(mask) else contextlib.nullcontext():
                masks[b] = as_rows(family, mask)
        rows[b] = as_rows(family, cast_values(b, family, value, check))
    return rows, masks, batch


def incomplete(known: ValuesByBlock) -> dict[str, PyTree]:
    """Return the masks that leave units unknown, or may do so if traced."""
    return {
        b: k
        for b, k in known.items()
        if not (is_concrete(k) and bool(np.asarray(k).all()))
    }


def check_summable(
    graph: Declaration, blocks: Iterable[str], known: Collection[str] = ()
) -> None:
    """Check that blocks and the unknown units of the blocks ``known`` can be summed out jointly."""
    for a, b in graph.interacting((*blocks, *known)):
        names = " or ".join(map(repr, dict.fromkeys((a, b))))
        remedy = f"Give a value for {names}; the layers are {graph.block_layers}."
        if known:
            remedy = (
                "Give all units of "
                f"{[n for n in dict.fromkeys((a, b)) if n in known]}, draw them by "
                "ebmpp.complete, or call exact.log_likelihood for small models."
            )
        raise IntractableError(
            f"{clash(a, b)}, so they cannot be summed out in closed form. {remedy}"
        )


class Observed(NamedTuple):
    """Values of a partly observed block, accepted where a clamped block is.

    Unknown units are free: half an image is completed, or missing entries of a table. A
    ``numpy.ma.MaskedArray`` stands for one, whose masked entries are unknown.

    :param values: shape ``(*batch, *shape)``; entries at unknown units are ignored and
        may be nan.
    :param known: mask of the known units, of a shape that broadcasts to that of
        ``values``.

    **Example**

    >>> import jax, jax.numpy as jnp, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> v = jnp.array([1.0, 0.0, jnp.nan, jnp.nan])
    >>> result = ebmpp.local_search(rbm, rbm.init(jax.random.key(0)), rng_key=jax.random.key(1),
    ...                             v=ebmpp.Observed(v, ~jnp.isnan(v)))
    >>> result.state["v"][:2].tolist()
    [1.0, 0.0]
    """

    values: PyTree
    known: PyTree

    def __getitem__(self, rows: Any) -> Any:
        """Select rows of values and mask by a slice, numbers or a mask.

        **Example**

        >>> table = Observed.where_finite(np.array([[1.0, np.nan], [0.0, 1.0]]))
        >>> table[1:].known.tolist()
        [[True, True]]
        """
        values = as_array("values", self.values)
        known = as_array("known", self.known)
        # one mask for all rows
        is_shared = known.ndim < values.ndim or len(known) < len(values)
        return Observed(values[rows], known if is_shared else known[rows])

    @classmethod
    def where_finite(cls, values: ArrayLike) -> "Observed":
        """Mark the finite entries of a table as known.

        :param values: numbers, shape ``(*batch, *shape)``.

        **Example**

        >>> Observed.where_finite([1.0, float("nan")]).known.tolist()
        [True, False]
        """
        values = as_array("values", values)
        return cls(values, values.__array_namespace__().isfinite(values))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Clamped:
    """Values that a call holds fixed, ``(rows, *shape)`` per block; one row stands for all.

    :param keep: masks of the known units of the partly observed blocks ``partial``.
    :param batch: leading axes, whose product is ``rows``.
    """

    full: Blocks = dataclasses.field(default_factory=dict)
    partial: Blocks = dataclasses.field(default_factory=dict)
    keep: Blocks = dataclasses.field(default_factory=dict)
    batch: BatchShape = dataclasses.field(default=(), metadata={"static": True})

    def take(self, rows: Numbers) -> "Clamped":
        """Select rows by number."""
        return jax.tree.map(lambda v: v if len(v) == 1 else v[rows], self)


def merge_clamped(blocks: ValuesByBlock) -> dict[str, PyTree]:
    """Merge blocks by keyword with ``clamped={...}``, for blocks named like arguments."""
    blocks = dict(blocks)
    named = blocks.pop("clamped", {})
    if not isinstance(named, Mapping) or not blocks.keys().isdisjoint(named):
        raise checks.state_error(
            "clamped", f"a dict of blocks other than {list(blocks)}", named
        )
    return {**blocks, **named}


def as_clamped(
    families: Families, blocks: ValuesByBlock, check: bool = True
) -> Clamped:
    """Validate clamped and :class:`Observed` blocks, or their names and shapes only."""
    rows, known, batch = as_partial_rows(families, merge_clamped(blocks), check=check)
    if 0 in batch:
        raise checks.state_error(
            f"clamped blocks {list(rows)}", "at least one row", batch
        )
    full = omit(rows, known)
    return Clamped(full, select(rows, known), known, batch)


def as_arrays(
    families: Families, blocks: ValuesByBlock
) -> tuple[dict[str, Numbers], dict[str, Numbers]]:
    """Return arrays of values, and masks of :class:`Observed` and of masked blocks."""
    values = {}
    known = {}
    for b, v in blocks.items():
        if isinstance(v, np.ma.MaskedArray):
            v = Observed(v.data, ~np.ma.getmaskarray(v))
        if isinstance(v, Observed):
            values[b], known[b] = as_observed(b, families[b], v)
        else:
            values[b] = as_array(b, v)
    return values, known


def as_observed(
    name: str, family: Family, observed: Observed
) -> tuple[Numbers, Numbers]:
    """Return values and a mask of the same shape."""
    value = as_array(name, observed.values)
    known = as_array(name, observed.known)
    batch_shape({name: family}, {name: value})
    try:
        full = known.__array_namespace__().broadcast_to(known, value.shape)
    except ValueError:
        full = known
    if known.dtype != bool or full.shape != value.shape:
        raise checks.state_error(
            f"block {name!r}: known",
            f"booleans of a shape that broadcasts to {value.shape}",
            known,
        )
    return value, full


def _fill(family: Family, value: Numbers, known: Numbers) -> Numbers:
    """Replace values at unknown units by ones in the support."""
    default = placeholder(family)
    if isinstance(value, np.ndarray) and is_concrete(known):
        return np.where(np.asarray(known), value, default.astype(value.dtype))
    return jnp.where(known, cast_values("", family, value, check=False), default)


@lru_cache(maxsize=128)
def placeholder(family: Family) -> np.ndarray:
    """Return values of a block in its support."""
    with sharding.eager():
        words = jnp.zeros((*family.shape, family.num_words), jnp.uint32)
        return np.asarray(family.initial(words))


def check_params(expected: Params, params: Params) -> None:
    """Compare names, structure and shapes of params with a tree of shapes by factor."""
    check_factors(expected, params)
    for name, tree in expected.items():
        leaves = jax.tree.leaves(params[name])
        for leaf in leaves:
            checks.placeable(f"factor {name!r}", leaf, ParameterError)
        shapes = jax.tree.map(np.shape, tree)
        actual = jax.tree.map(np.shape, params[name])

        known = Array | np.ndarray | np.generic
        foreign = [  # torch's
            type(a)
            for a in leaves
            if hasattr(a, "__array__") and not isinstance(a, known)
        ]
        if shapes != actual or foreign:
            raise checks.parameter_error(
                f"factor {name!r}: params",
                f"arrays of jax or numpy of shape {shapes}",
                foreign or actual,
            )


def check_factors(expected: Params, params: Mapping) -> None:
    """Compare the names of params and factors."""
    is_dict = isinstance(params, Mapping)
    if not is_dict or params.keys() != expected.keys():
        raise checks.parameter_error(
            "params",
            f"a dict of the factors {list(expected)}",
            list(params) if is_dict else params,
        )


def ordered_params(graph: Declaration, params: Params) -> dict[str, PyTree]:
    """Return the params in the order of the factors."""
    check_factors(graph.param_shapes, params)
    return {f.name: params[f.name] for f in graph.factors}


def check_finite(params: Params) -> None:
    """Check that params are finite numbers."""
    for name, tree in params.items():
        for leaf in jax.tree.leaves(tree):
            checks.numbers(f"factor {name!r}", leaf, ParameterError)
            if not is_concrete(leaf):
                continue
            wrong = np.count_nonzero(~np.isfinite(np.asarray(leaf)))
            if wrong:
                raise checks.parameter_error(
                    f"factor {name!r}: params",
                    "finite",
                    leaf,
                    hint=f"{wrong} entries are not finite: in place of -inf, declare "
                    "zeros by Table(..., log_weights=...), clamp the block, or give a "
                    "number such as -30, whose factor is 1e-13.",
                )
