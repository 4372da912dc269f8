# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Params with leading axes: a batch of distributions, or sets of parameters."""

from collections.abc import Iterator, Mapping
import math

import jax
import jax.numpy as jnp

from ebmpp.core import BatchShape, Params, checks, select
from ebmpp.errors import ParameterError
from ebmpp.graph import normalization, states
from ebmpp.graph.graph import FactorGraph


def leading_axes(graph: FactorGraph, params: Params) -> BatchShape:
    """Return the broadcast leading axes of params; () for params of other factors.

    These are refused later.
    """
    axes = {}
    if not isinstance(params, Mapping) or params.keys() != graph.param_shapes.keys():
        return ()
    for name, tree in graph.param_shapes.items():
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        if structure != jax.tree.structure(params.get(name)):
            return ()
        for (path, expected), leaf in zip(leaves, jax.tree.leaves(params[name])):
            shape = jnp.shape(leaf)
            batch = shape[: max(0, len(shape) - expected.ndim)]
            if batch + expected.shape != shape or 0 in batch:
                raise checks.parameter_error(
                    f"factor {name!r}: params",
                    f"of shape (..., *{expected.shape}), without empty axes",
                    shape,
                )
            axes[name + jax.tree_util.keystr(path)] = batch
    try:
        return jnp.broadcast_shapes(*axes.values())
    except ValueError:
        raise ParameterError(
            f"leading axes of params must broadcast, got {axes}"
        ) from None


def flatten_axes(
    graph: FactorGraph, params: Params, batch: BatchShape
) -> tuple[Params, Params]:
    """Return params whose leading axes, if they have any, are one; and the number of the axis.

    That is 0 for a leaf with leading axes, else None.
    """

    def axis(expected, leaf):
        return 0 if jnp.ndim(leaf) > expected.ndim else None

    def flatten(expected, leaf):
        if axis(expected, leaf) is None:
            return leaf
        rows = jnp.broadcast_to(leaf, batch + expected.shape)
        return rows.reshape(-1, *expected.shape)

    shapes = dict(graph.param_shapes)
    params = select(params, shapes)
    return jax.tree.map(flatten, shapes, params), jax.tree.map(axis, shapes, params)


def each_set(graph: FactorGraph, params: Params, batch: BatchShape) -> Iterator[Params]:
    """Yield the sets of params of a batch."""
    rows, _ = flatten_axes(graph, params, batch)

    def at(index):
        def select(expected, leaf):
            return leaf[index] if jnp.ndim(leaf) > expected.ndim else leaf

        return jax.tree.map(select, dict(graph.param_shapes), rows)

    yield from map(at, range(math.prod(batch)))


def check_batch(
    graph: FactorGraph, params: Params, batch: BatchShape, values: bool
) -> None:
    """Check the params of a batch.

    Sets of params are checked one after the other only where their values decide
    whether they normalise.
    """
    if not batch:
        graph.check(params, values)
        return
    graph.check(next(each_set(graph, params, batch)), values=False)
    if not values:
        return
    states.check_finite(params)
    if normalization.is_bounded(graph):
        return
    for single in each_set(graph, params, batch):
        graph.check(single)
