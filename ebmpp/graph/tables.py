# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Validation of training data: rows of the visible blocks, and their weights.

Arrays, lists, data frames, memory maps, dicts of these and :class:`~ebmpp.Observed` blocks are accepted.
Names and shapes are checked first, values when they are read. Rows are never broadcast.
"""

from collections.abc import Mapping
import contextlib
import math
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import checks, sharding
from ebmpp.core.types import Blocks, Numbers
from ebmpp.errors import StateError
from ebmpp.families import Gaussian
from ebmpp.families.values import is_concrete, settle
from ebmpp.graph import initialization, scales, states
from ebmpp.graph.declaration import Declaration


class Table(NamedTuple):
    """Data with checked names and shapes, and unchecked values."""

    values: Mapping[str, Numbers]
    """Visible blocks, ``(*batch, *shape)``."""
    known: Mapping[str, Numbers]
    """Masks of the partly observed blocks."""
    batch: tuple[int, ...]

    def take(self, index: np.ndarray) -> "Table":
        """Select rows by number."""
        values, known = ({b: np.asarray(v)[index] for b, v in x.items()} for x in (self.values, self.known))
        return Table(values, known, (len(index),))

    def observed(self) -> dict[str, Any]:
        """Return arrays and :class:`~ebmpp.Observed` blocks."""
        return _observed(self.values, self.known)


class Data(NamedTuple):
    """Checked data as rows on the device."""

    rows: Blocks
    """Visible blocks, ``(rows, *shape)``, with placeholders at unknown units."""
    known: Blocks
    """Masks of the partly observed blocks, ``(rows, *shape)``."""
    batch: tuple[int, ...]
    """Leading axes, whose product is ``rows``."""

    def observed(self) -> dict[str, Any]:
        """Return arrays and :class:`~ebmpp.Observed` blocks."""
        return _observed(self.rows, self.known)


def _observed(values: Mapping[str, Numbers], known: Mapping[str, Numbers]) -> dict[str, Any]:
    return {b: states.Observed(v, known[b]) if b in known else v for b, v in values.items()}


def as_table(graph: Declaration, data: Any, missing: str | None = None) -> Table:
    """Check names and shapes of data.

    :param missing: None to accept missing units, else the name of the consumer that does not.
    """
    blocks = states.as_visible(graph, data)
    states.check_present(blocks, graph.visible)
    values, known = states.as_arrays(graph.families, blocks)
    known = states.incomplete(known)
    if known and missing is not None:
        raise StateError(
            f"block {next(iter(known))!r} must have no unknown units, for {missing} takes complete rows. "
            "ebmpp.complete fills them in."
        )
    leading = {b: states.batch_shape(graph.families, {b: v}) for b, v in values.items()}
    is_valid = len(set(leading.values())) == 1
    checks.require(is_valid, "leading axes of the data", "the same in all blocks", leading, StateError)
    return Table(values, known, next(iter(leading.values())))


def one_axis(graph: Declaration, table: Table) -> int:
    """Return the number of rows."""
    shapes = {b: ("rows", *f.shape) for b, f in graph.visible.items()}
    is_valid = len(table.batch) == 1 and table.batch[0] > 0
    checks.require(is_valid, "data", f"of shapes {shapes}, with at least one row", table.batch, StateError)
    return table.batch[0]


def check_table(graph: Declaration, table: Table) -> Data:
    """Check the values, and convert them to the library's dtypes."""
    rows, known = {}, {}
    for b, v in table.values.items():
        family, mask = graph.families[b], table.known.get(b)
        rows[b] = settle(b, family, states.fill(family, v, mask)).reshape(-1, *family.shape)
        if mask is not None:
            with sharding.at_once() if is_concrete(mask) else contextlib.nullcontext():
                known[b] = jnp.asarray(mask).reshape(-1, *family.shape)
    return Data(rows, known, table.batch)


def as_data(graph: Declaration, data: Any, missing: str | None = "this") -> Data:
    """Return checked data with any leading axes; see :func:`as_table`."""
    return check_table(graph, as_table(graph, data, missing))


def check_rows(graph: Declaration, data: Any, missing: str | None = "this") -> tuple[dict[str, Array], int]:
    """Return checked data with one leading axis, and the number of rows; see :func:`as_table`."""
    table = as_table(graph, data, missing)
    size = one_axis(graph, table)
    return jax.device_put(check_table(graph, table).observed()), size


def mean_statistics(
    graph: Declaration, data: Any, weights: Any, warns: bool = False
) -> dict[str, initialization.Mean]:
    """Return the mean statistics of known entries, and the number of rows, by block."""
    rows, known, batch = as_data(graph, data, missing=None)
    checks.require(0 not in batch, "data", "at least one row", batch, StateError)
    if weights is not None and is_concrete(weights):
        check_weights(weights, math.prod(batch))
    means = {}
    for b, v in rows.items():
        family, inputs = graph.families[b], (v, known.get(b), weights)
        if isinstance(family, Gaussian) and all(map(is_concrete, inputs)):
            mean, variance, count = scales.moments(*inputs)
            if warns:
                scales.warn(graph, b, variance, count)
            means[b] = scales.with_default_row(family, mean, variance, count), None
        else:
            means[b] = initialization.mean_statistics(family, *inputs)
    return means


def check_weights(weights: Any, size: int) -> np.ndarray:
    """Return weights of the rows, scaled to mean 1."""
    array = np.asarray(weights)
    is_numeric = array.shape == (size,) and array.dtype.kind in "fiub"
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0))) if is_numeric else ()
    hint = f"It has {float(array[wrong[0]])} at row {wrong[0]}." if len(wrong) else ""
    expected = f"{size} finite numbers >= 0, one per row and not all zero"
    is_valid = is_numeric and not len(wrong) and array.any()
    checks.require(is_valid, "weights", expected, array, StateError, hint)
    array = array.astype(float)
    return (array / array.mean()).astype(np.dtype(jnp.result_type(float)))
