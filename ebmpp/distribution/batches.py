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
        if jax.tree.structure(tree) != jax.tree.structure(params.get(name)):
            return ()
        expected = jax.tree_util.tree_leaves_with_path(tree)
        for (path, struct), leaf in zip(
            expected, jax.tree.leaves(params[name]), strict=True
        ):
            shape = jnp.shape(leaf)
            place = name + jax.tree_util.keystr(path)
            axes[place] = shape[: max(0, len(shape) - struct.ndim)]
            if axes[place] + struct.shape != shape:
                raise checks.parameter_error(
                    f"factor {name!r}: params",
                    f"of shape (..., *{struct.shape})",
                    shape,
                )
    try:
        return jnp.broadcast_shapes(*axes.values())
    except ValueError:
        raise ParameterError(
            f"EnergyDistribution: leading axes of params must broadcast, got {axes}"
        ) from None


def flat(
    graph: FactorGraph, params: Params, batch: tuple[int, ...]
) -> tuple[Params, Params]:
    """Return params with one leading axis, if they have any; and 0 for each leaf that has it, else None."""
    shapes = dict(graph.param_shapes)
    params = {name: params[name] for name in graph.param_shapes}
    axes = jax.tree.map(
        lambda s, p: 0 if jnp.ndim(p) > s.ndim else None, shapes, params
    )

    def extend(s, p):
        return jnp.broadcast_to(p, batch + s.shape).reshape(-1, *s.shape)

    return jax.tree.map(
        lambda s, p: extend(s, p) if jnp.ndim(p) > s.ndim else p, shapes, params
    ), axes


def check_params(
    graph: FactorGraph, params: Params, batch: tuple[int, ...], values: bool
) -> None:
    """Check the params of a batch; sequentially only where their values decide whether they normalise."""
    if not batch:
        graph.check(params, values)
        return
    shapes = dict(graph.param_shapes)
    rows, _ = flat(graph, params, batch)

    def at(i):
        return jax.tree.map(
            lambda s, p: p[i] if jnp.ndim(p) > s.ndim else p, shapes, rows
        )

    graph.check(at(0), values=False)
    if values:
        states.check_finite(rows)
        always = all(
            np.isfinite(family.bounds).all() for family in graph.families.values()
        )
        for i in range(0 if always else math.prod(batch)):
            graph.check(at(i))
