# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Validation of training data: rows of the visible blocks, their scales and their weights.

Arrays, lists, data frames, memory maps, dicts of these and :class:`~ebmpp.Observed`
blocks are accepted. Names and shapes are checked first, values when they are read. Rows
are never broadcast.
"""

from collections.abc import Callable
import math
from typing import NamedTuple
import warnings

from jaxtyping import PyTree
import numpy as np

import jax
import jax.numpy as jnp

from ebmpp.core import Blocks, Params, PerRow, checks, expand, is_concrete
from ebmpp.errors import StateError
from ebmpp.families import Gaussian
from ebmpp.graph import initialization, states
from ebmpp.graph.declaration import Declaration
from ebmpp.graph.factors import Bilinear
from ebmpp.graph.initialization import Mean, Moments

_CHUNK = 4096  # rows in double precision at once
_DOUBT = 5.0  # standard errors of a variance


class Table(NamedTuple):
    """Data of visible blocks of checked names and shapes; :func:`check_table` checks values."""

    rows: dict[str, PyTree]
    """Visible blocks, ``(*batch, *shape)``; on the device ``(rows, *shape)``."""
    known: dict[str, PyTree]
    """Masks of the partly observed blocks, whose unknown units have placeholders on the device."""
    batch: tuple[int, ...]
    """Leading axes, whose product is the number of rows."""

    def take(self, index: np.ndarray) -> "Table":
        """Select rows by number."""
        rows, known = (
            {b: np.asarray(v)[index] for b, v in x.items()}
            for x in (self.rows, self.known)
        )
        return Table(rows, known, (len(index),))

    def observed(self) -> dict[str, PyTree]:
        """Return arrays and :class:`~ebmpp.Observed` blocks."""
        known = self.known
        return {
            b: states.Observed(v, known[b]) if b in known else v
            for b, v in self.rows.items()
        }


def check_possible(log_density: PerRow) -> None:
    """Refuse rows of probability zero, unless they are traced.

    :raises StateError: with their numbers.
    """
    if not is_concrete(log_density):
        return
    wrong = np.flatnonzero(np.isneginf(log_density)).tolist()
    if wrong:
        listed = ", ".join(map(str, wrong[:5])) + (", ..." if len(wrong) > 5 else "")
        raise StateError(
            f"data: rows must have positive probability, got log-likelihood -inf at "
            f"{len(wrong)} of {np.size(log_density)} rows ({listed}). Drop these rows, "
            "or give the values that they take a finite log weight."
        )


def as_table(graph: Declaration, data: PyTree, missing: str | None = None) -> Table:
    """Check names and shapes of data.

    :param missing: None to accept missing units, else the name of the consumer that
        does not.
    """
    blocks = states.as_visible(graph, data)
    states.check_present(blocks, graph.visible)
    values, known = states.as_arrays(graph.families, blocks)
    known = states.incomplete(known)
    if known and missing is not None:
        block, mask = next(iter(known.items()))
        raise checks.state_error(
            f"block {block!r}",
            f"known in all units, as {missing} needs",
            mask,
            hint="ebmpp.complete fills in missing ones.",
        )
    leading = {b: states.batch_shape(graph.families, {b: v}) for b, v in values.items()}
    if len(set(leading.values())) != 1:
        raise checks.state_error(
            "leading axes of the data", "the same in all blocks", leading
        )
    return Table(values, known, next(iter(leading.values())))


def one_axis(graph: Declaration, table: Table) -> int:
    """Return the number of rows."""
    shapes = {b: ("rows", *f.shape) for b, f in graph.visible.items()}
    if len(table.batch) != 1 or 0 in table.batch:
        raise checks.state_error(
            "data", f"of shapes {shapes}, with at least one row", table.batch
        )
    return table.batch[0]


def check_table(graph: Declaration, table: Table) -> Table:
    """Check the values, and convert them to the library's dtypes."""
    return Table(*states.as_partial_rows(graph.families, table.observed()))


def as_data(graph: Declaration, data: PyTree, missing: str | None) -> Table:
    """Return checked data with any leading axes; see :func:`as_table`."""
    return check_table(graph, as_table(graph, data, missing))


def check_rows(
    graph: Declaration, data: PyTree, missing: str | None
) -> tuple[Blocks, int]:
    """Return checked data with one leading axis, and the number of rows; see :func:`as_table`."""
    table = as_table(graph, data, missing)
    size = one_axis(graph, table)
    return jax.device_put(check_table(graph, table).observed()), size


def mean_statistics(
    graph: Declaration, data: PyTree, weights: PyTree, warns: bool = False
) -> dict[str, Mean | Moments]:
    """Return the mean statistics of known entries, and the number of rows, by block.

    :param data: not checked again if it is a table.
    """
    if not isinstance(data, Table):
        data = as_data(graph, data, missing=None)
    rows, known, batch = data
    if 0 in batch:
        raise checks.state_error("data", "at least one row", batch)
    if weights is not None and is_concrete(weights):
        check_weights(weights, math.prod(batch))
    means: dict[str, Mean | Moments] = {}
    for b, v in rows.items():
        family = graph.families[b]
        inputs = (v, known.get(b), weights)
        if isinstance(family, Gaussian) and is_concrete(inputs):
            means[b] = moments = _moments(*inputs)
            if warns:
                interacts = any(f.interacts for f in graph.touching([b]))
                _warn_of_scales(b, family, interacts, moments)
        else:
            means[b] = initialization.mean_statistics(family, *inputs)
    return means


def check_weights(weights: PyTree, size: int) -> np.ndarray:
    """Return weights of the rows, scaled to mean 1."""
    array = np.asarray(checks.numbers("weights", weights, StateError))
    has_shape = array.shape == (size,)
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0))) if has_shape else ()
    if not has_shape or len(wrong) or not array.any():
        raise checks.state_error(
            "weights",
            f"{size} finite numbers >= 0, one per row and not all zero",
            array,
            hint=f"It has {float(array[wrong[0]])} at row {wrong[0]}."
            if len(wrong)
            else "",
        )
    array = array.astype(float)
    return (array / array.mean()).astype(jnp.result_type(float))


def _moments(x: PyTree, known: PyTree, weights: PyTree) -> Moments:
    """Return moments of the known rows of each unit; squares are of centred rows."""
    x = np.asarray(x)
    weight = np.ones(len(x)) if weights is None else np.asarray(weights, float)
    weight = expand(weight, target=x)
    known = np.True_ if known is None else np.asarray(known)
    known = np.broadcast_to(known, x.shape)

    def averages(function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        total = np.zeros(x.shape[1:])
        size = np.zeros(x.shape[1:])
        for start in range(0, len(x), _CHUNK):
            part = slice(start, start + _CHUNK)
            w = weight[part] * known[part]
            total += (w * function(x[part].astype(float))).sum(0)
            size += w.sum(0)
        return total / np.where(size > 0, size, 1)

    mean = averages(lambda rows: rows)
    return Moments(mean, averages(lambda rows: (rows - mean) ** 2), known.sum(0))


def _warn_of_scales(
    block: str,
    family: Gaussian,
    interacts: bool,
    moments: Moments,
) -> None:
    """Warn of constant columns, and of columns that a variance of 1 does not fit."""
    _, variance, count = moments
    if family.learned:
        wrong = (variance == 0) & (count > 1)
        message = (
            "are constant, so their precision grows without end in training. Drop "
            "them, or add noise"
        )
    else:
        error = np.sqrt(2 / np.maximum(count, 1))
        standardised = variance.size > 1 and (np.abs(variance - 1) <= error**2).all()
        wrong = interacts & (
            (variance < 1 - _DOUBT * error) | (standardised & (_DOUBT * error < 1))
        )
        message = (
            "have no more variance than the 1 that the family assumes given the other "
            "blocks, so nothing is "
            'left for these to explain. Take variance="learned", or data of a larger scale'
        )
    if wrong.any():
        where = np.argwhere(wrong) if wrong.ndim > 1 else np.flatnonzero(wrong)
        places = where.tolist()
        listed = f"{places[:10]}{'...' if len(places) > 10 else ''}"
        warnings.warn(
            f"block {block!r}: columns {listed} {message}.", UserWarning, stacklevel=4
        )


def warn_if_stuck(graph: Declaration, params: Params) -> None:
    """Warn of latents whose gradients are zero, as their conditional means are."""
    for block, family in graph.latent.items():
        if not isinstance(family, Gaussian) or family.learned:
            continue
        factors = graph.touching([block])
        names = [f.name for f in factors]
        are_zero = not any(np.any(params[name]) for name in names)
        if are_zero and any(isinstance(f, Bilinear) for f in factors):
            warnings.warn(
                f"block {block!r}: all params of its factors {names} are 0, where "
                "every gradient of "
                "conditional means is 0, so training leaves them there. Start from random weights, "
                'scheme="gaussian".',
                stacklevel=4,
            )
