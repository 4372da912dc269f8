# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The door through which data enter: rows of the visible blocks, and their weights.

Arrays, lists, data frames, memory maps, dicts of them and :class:`~ebmpp.Observed` ones come in alike: names
and shapes are looked at first, values when they are read, and a row is never broadcast to others.
"""

from collections.abc import Mapping
import contextlib
import math
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import sharding
from ebmpp.core.types import Blocks, Numbers
from ebmpp.errors import StateError
from ebmpp.families.values import is_concrete, settle
from ebmpp.graph import initialization, states
from ebmpp.graph.declaration import Declaration


class Table(NamedTuple):
    """Data as they were given: names and shapes are checked, values are not."""

    values: Mapping[str, Numbers]
    """A visible block each, ``(*batch, *shape)``."""
    known: Mapping[str, Numbers]
    """Of the blocks that lack units, which are known."""
    batch: tuple[int, ...]

    def take(self, index: np.ndarray) -> "Table":
        """Rows by number."""
        values, known = ({b: np.asarray(v)[index] for b, v in x.items()} for x in (self.values, self.known))
        return Table(values, known, (len(index),))

    def observed(self) -> dict[str, Any]:
        """As they were given, block by block."""
        return _observed(self.values, self.known)


class Data(NamedTuple):
    """Checked data as rows on the device."""

    rows: Blocks
    """The visible blocks, ``(rows, *shape)``; something harmless stands at unknown units."""
    known: Blocks
    """Of the blocks that lack units, which are known, ``(rows, *shape)``."""
    batch: tuple[int, ...]
    """The leading axes, of which ``rows`` is the product."""

    def observed(self) -> dict[str, Any]:
        """What they were given as, but in rows."""
        return _observed(self.rows, self.known)


def _observed(values: Mapping[str, Numbers], known: Mapping[str, Numbers]) -> dict[str, Any]:
    return {b: states.Observed(v, known[b]) if b in known else v for b, v in values.items()}


def as_table(graph: Declaration, data: Any, missing: str | None = None) -> Table:
    """Data whose values are looked at later.

    :param data: rows of the visible blocks, a dict or a bare array for the only one.
    :param missing: None where units may be missing; else what takes whole rows alone, in words.
    :raises StateError: for a wrong name, type or shape, or rows that are not as many in each block.
    """
    given = states.as_visible(graph, data)
    states.check_present(given, graph.visible)
    values, known = states.as_arrays(graph.families, given)
    known = {b: k for b, k in known.items() if not (is_concrete(k) and bool(np.asarray(k).all()))}
    if known and missing is not None:
        raise StateError(
            f"block {next(iter(known))!r} has units that are not known, and {missing} takes whole rows; "
            "ebmpp.complete fills them in"
        )
    leading = {}
    for b, v in values.items():
        states.batch_shape(graph.families, {b: v})
        leading[b] = v.shape[: v.ndim - len(graph.families[b].shape)]
    if len(set(leading.values())) > 1:
        raise StateError(
            f"blocks of the data have unlike leading axes, {leading}: give each block as many rows, for "
            "rows of data are not broadcast"
        )
    return Table(values, known, next(iter(leading.values())))


def one_axis(graph: Declaration, table: Table) -> int:
    """How many rows there are.

    :raises StateError: where there is none, or no axis of them, or more axes than one.
    """
    if len(table.batch) != 1 or table.batch[0] < 1:
        raise StateError(
            f"data need one leading axis of at least one row; got leading axes {table.batch} before the "
            f"blocks' own shapes { ({b: f.shape for b, f in graph.visible.items()}) }"
        )
    return table.batch[0]


def check_table(graph: Declaration, table: Table) -> Data:
    """Values looked at, and narrowed.

    :raises StateError: for a value outside the support, or one that floats cannot hold.
    """
    rows, known = {}, {}
    for b, v in table.values.items():
        family, mask = graph.families[b], table.known.get(b)
        rows[b] = settle(b, family, states.fill(family, v, mask)).reshape(-1, *family.shape)
        if mask is not None:
            with sharding.at_once() if is_concrete(mask) else contextlib.nullcontext():
                known[b] = jnp.asarray(mask).reshape(-1, *family.shape)
    return Data(rows, known, table.batch)


def as_data(graph: Declaration, data: Any, missing: str | None = "this") -> Data:
    """Checked data, with any leading axes; see :func:`as_table`."""
    return check_table(graph, as_table(graph, data, missing))


def check_rows(graph: Declaration, data: Any, missing: str | None = "this") -> tuple[dict[str, Array], int]:
    """Checked data as rows on the device, and how many; see :func:`as_table`.

    :return: a dict of arrays; of :class:`~ebmpp.Observed` ones where units are missing.
    """
    table = as_table(graph, data, missing)
    size = one_axis(graph, table)
    return jax.device_put(check_table(graph, table).observed()), size


def mean_statistics(graph: Declaration, data: Any, weights: Any) -> dict[str, initialization.Mean]:
    """Means of the statistics of known entries, and of how many rows, a block."""
    rows, known, batch = as_data(graph, data, missing=None)
    if 0 in batch:
        raise StateError(f"data have no rows (leading axes {batch}), and so no base rates: give at least one")
    if weights is not None and is_concrete(weights):
        check_weights(weights, math.prod(batch))
    mean = lambda b, v: initialization.mean_statistics(graph.families[b], v, known.get(b), weights)
    return {b: mean(b, v) for b, v in rows.items()}


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
