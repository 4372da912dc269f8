# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Params with leading axes: a batch of distributions."""

import math

import numpy as np

import jax
import jax.numpy as jnp

from ebmpp.core import Params, checks
from ebmpp.errors import ParameterError
from ebmpp.graph import FactorGraph, states


def batch_shape(graph: FactorGraph, params: Params) -> tuple[int, ...]:
    """Return the broadcast leading axes of params; () where factors are missing, which is checked later."""
    axes: dict[str, tuple[int, ...]] = {}
    for name, tree in graph.param_shapes.items():
        expected, leaves = jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(params.get(name))
        if len(expected) != len(leaves):
            return ()
        for (path, struct), leaf in zip(expected, leaves, strict=True):
            shape, place = jnp.shape(leaf), name + jax.tree_util.keystr(path)
            axes[place] = shape[: max(0, len(shape) - struct.ndim)]
            fits, expected_shape = axes[place] + struct.shape == shape, f"of shape (..., *{struct.shape})"
            checks.require(fits, f"factor {name!r}: params", expected_shape, shape, ParameterError)
    try:
        return jnp.broadcast_shapes(*axes.values())
    except ValueError:
        raise ParameterError(
            f"EnergyDistribution: leading axes of params must broadcast, got {axes}"
        ) from None


def flat(graph: FactorGraph, params: Params, batch: tuple[int, ...]) -> tuple[list, list[int | None]]:
    """Return leaves of params with one leading axis, if they have any; and 0 for each that has it."""
    leaves = jax.tree.leaves({name: params[name] for name in graph.param_shapes})
    shapes = [leaf.shape for leaf in jax.tree.leaves(dict(graph.param_shapes))]
    axes = [0 if jnp.ndim(p) > len(shape) else None for p, shape in zip(leaves, shapes, strict=True)]
    extend = lambda p, shape: jnp.broadcast_to(p, batch + shape).reshape(-1, *shape)
    leaves = [p if a is None else extend(p, s) for p, s, a in zip(leaves, shapes, axes, strict=True)]
    return leaves, axes


def unflatten(graph: FactorGraph, leaves: list) -> Params:
    """Return params with these leaves."""
    return jax.tree.unflatten(jax.tree.structure(dict(graph.param_shapes)), leaves)


def check_params(graph: FactorGraph, params: Params, batch: tuple[int, ...], values: bool) -> None:
    """Check the params of a batch; sequentially only where their values decide whether they normalise."""
    if not batch:
        graph.check(params, values)
        return
    leaves, axes = flat(graph, params, batch)
    at = lambda i: [p if a is None else p[i] for p, a in zip(leaves, axes, strict=True)]
    graph.check(unflatten(graph, at(0)), values=False)
    if values:
        states.check_finite(unflatten(graph, leaves))
        always = all(np.isfinite(family.bounds).all() for family in graph.families.values())
        for i in range(0 if always else math.prod(batch)):
            graph.check(unflatten(graph, at(i)))
