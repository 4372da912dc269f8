# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Calls on the host with the concrete values of all chains, also inside of an eager ``jax.vmap``."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import jax
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import batching
import jax.numpy as jnp

_ON_ROWS = Primitive("on_rows")
_ON_ROWS.multiple_results = True


def is_staged() -> bool:
    """Return True inside of ``jax.jit`` and ``jax.pmap``, where no value is concrete."""
    return isinstance(jnp.zeros(()), Tracer)


def on_rows(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Call a function once with the concrete values of all chains; its errors reach the caller.

    :param fn: from a tree of arrays with a leading axis of chains to another one.
    :param tree: arrays of one chain; under ``jax.vmap`` tracers.
    """
    leaves, structure = jax.tree.flatten(tree)
    structures = []

    def flat(*rows: Any) -> list[Any]:
        results, result_structure = jax.tree.flatten(
            fn(jax.tree.unflatten(structure, rows))
        )
        structures.append(result_structure)
        return results

    results = _ON_ROWS.bind(*(jnp.asarray(leaf)[None] for leaf in leaves), fn=flat)
    return jax.tree.unflatten(structures[0], [result[0] for result in results])


def checked(check: Callable[[Any], None], tree: Any) -> Any:
    """Return a tree of arrays after a check of its concrete values, with a leading axis of chains.

    Inside of ``jax.jit`` and ``jax.pmap`` the program raises the check's errors when
    its results are read.
    """

    def accept(rows: Any) -> Any:
        check(rows)
        return rows

    if not is_staged():
        return on_rows(accept, tree)

    def accept_one(values: Any) -> Any:
        return jax.tree.map(
            lambda a: a[0], accept(jax.tree.map(lambda a: np.asarray(a)[None], values))
        )

    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)
    return jax.pure_callback(accept_one, shapes, tree, vmap_method="sequential")


@_ON_ROWS.def_impl
def _call(*rows: Any, fn: Callable[..., list[Any]]) -> list[Any]:
    return fn(*rows)


def _call_batched(
    rows: Sequence[Any], axes: Sequence[Any], *, fn: Callable[..., list[Any]]
) -> tuple:
    """Merge a mapped axis with that of the chains."""
    size = next(
        a.shape[axis] for a, axis in zip(rows, axes, strict=True) if axis is not None
    )
    in_front = [
        batching.bdim_at_front(a, axis, size)
        for a, axis in zip(rows, axes, strict=True)
    ]
    results = _ON_ROWS.bind(*(a.reshape(-1, *a.shape[2:]) for a in in_front), fn=fn)
    return [a.reshape(size, -1, *a.shape[1:]) for a in results], [0] * len(results)


batching.primitive_batchers[_ON_ROWS] = _call_batched
