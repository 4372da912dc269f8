# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Params with leading axes: a batch of laws."""

import math

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import Params, checks
from ebmpp.errors import ParameterError
from ebmpp.graph import FactorGraph, states


def batch_shape(graph: FactorGraph, params: Params) -> tuple[int, ...]:
    """The leading axes of params, broadcast; () where factors are missing, which is told by a check.

    :raises ParameterError: for a shape that does not end in the factor's own, or axes that do not broadcast.
    """
    found: dict[str, tuple[int, ...]] = {}
    for name, tree in graph.param_shapes.items():
        wanted, given = jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(params.get(name))
        if len(wanted) != len(given):
            return ()
        for (path, own), leaf in zip(wanted, given, strict=True):
            lead = jnp.ndim(leaf) - own.ndim
            if lead < 0 or jnp.shape(leaf)[lead:] != own.shape:
                raise ParameterError(
                    f"factor {name!r}: params have shape {jnp.shape(leaf)}, expected {own.shape}, after "
                    "leading axes of a batch if there is one"
                )
            found[name + jax.tree_util.keystr(path)] = jnp.shape(leaf)[:lead]
    try:
        return jnp.broadcast_shapes(*found.values())
    except ValueError:
        raise ParameterError(
            f"EnergyDistribution: the params have leading axes {found}, which do not broadcast"
        ) from None


def flat(graph: FactorGraph, params: Params, batch: tuple[int, ...]) -> tuple[Params, list[int | None]]:
    """Params with one leading axis, of the size of ``batch``, where they have any.

    :return: these, and by leaf 0 where there is that axis, and None where there is not.
    """
    leaves, tree = jax.tree.flatten({name: params[name] for name in graph.param_shapes})
    own = [w.shape for w in jax.tree.leaves(dict(graph.param_shapes))]
    axes = [0 if jnp.ndim(p) > len(shape) else None for p, shape in zip(leaves, own, strict=True)]
    whole = lambda p, shape: jnp.broadcast_to(p, batch + shape).reshape(-1, *shape)
    each = zip(leaves, own, axes, strict=True)
    return jax.tree.unflatten(tree, [p if axis is None else whole(p, shape) for p, shape, axis in each]), axes


def check_each(graph: FactorGraph, params: Params, batch: tuple[int, ...], values: bool) -> None:
    """Params of every law of a batch; one by one only where their values decide whether they normalise.

    :raises ParameterError: naming the factor.
    """
    if not batch:
        return graph.check(params, values)
    made, axes = flat(graph, params, batch)
    leaves, tree = jax.tree.flatten(made)
    one = lambda i: jax.tree.unflatten(
        tree, [p if a is None else p[i] for p, a in zip(leaves, axes, strict=True)]
    )
    graph.check(one(0), values=False)
    if values:
        states.check_finite(made)
        always = all(np.isfinite(family.bounds).all() for family in graph.families.values())
        for i in range(0 if always else math.prod(batch)):
            graph.check(one(i))
    return None


def as_numbers(log_partition: Array | float | None, batch: tuple[int, ...]) -> Array | float | None:
    """:raises ParameterError: for anything but a number, or one for each law of a batch."""
    if log_partition is None:
        return None
    shape = jnp.shape(checks.numbers("log_partition", log_partition, ParameterError))
    if shape not in ((), batch):
        each = f", or {batch} of them, one for each law" if batch else ""
        raise ParameterError(
            f"log_partition is one number{each}, or a function of the params; got shape {shape}"
        )
    return log_partition
