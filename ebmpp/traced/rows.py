# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Calls on the host with concrete values of all chains, also inside an eager ``jax.vmap``."""

from collections.abc import Callable, Sequence
import math
from typing import Any

from jaxtyping import PyTree
import numpy as np

import jax
from jax import Array
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import batching
import jax.numpy as jnp

from ebmpp.core import random

_ON_ROWS = Primitive("on_rows")
_ON_ROWS.multiple_results = True


def is_staged() -> bool:
    """Return True inside of ``jax.jit`` and ``jax.pmap``, where no value is concrete."""
    return isinstance(jnp.asarray(0.0), Tracer)


def all_in_row(mask: Array, num_axes: int) -> Array:
    """Return True where all elements beyond the leading axes hold."""
    return mask.reshape(*mask.shape[:num_axes], -1).all(-1)


def on_rows(fn: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
    """Call a function once with the concrete values of all chains; its errors reach the caller.

    :param fn: from a tree of arrays with a leading axis of chains to another one.
    :param tree: arrays of one chain; under ``jax.vmap`` tracers.
    """
    leaves, structure = jax.tree.flatten(tree)
    structures = []

    def flat(*rows):
        result = fn(jax.tree.unflatten(structure, rows))
        results, result_structure = jax.tree.flatten(result)
        structures.append(result_structure)
        return results

    arrays = map(jnp.asarray, leaves)
    results = _ON_ROWS.bind(*arrays, fn=flat, shape=())
    return jax.tree.unflatten(structures[0], results)


def checked(check: Callable[[PyTree], None], tree: PyTree) -> PyTree:
    """Return a tree of arrays after a check of its concrete values, with a leading axis of chains.

    Inside of ``jax.jit`` and ``jax.pmap`` the program raises the check's errors when
    its results are read.
    """

    def accept(rows):
        check(rows)
        return rows

    if not is_staged():
        return on_rows(accept, tree)

    def accept_one(values):
        check(jax.tree.map(lambda a: np.asarray(a)[None], values))
        return values

    shapes = jax.tree.map(jax.typeof, tree)
    return jax.pure_callback(accept_one, shapes, tree, vmap_method="sequential")


@_ON_ROWS.def_impl
def _call(
    *arrays: Array, fn: Callable[..., list[Array]], shape: tuple[int, ...]
) -> list[Array]:
    """Call the function with the leading axes, of this shape, merged to one of chains."""
    count = math.prod(shape)
    rows = [_on_host(a).reshape((count, *a.shape[len(shape) :])) for a in arrays]
    results = map(_on_host, fn(*rows))
    return [jax.device_put(a.reshape((*shape, *a.shape[1:]))) for a in results]


def _on_host(a: Array) -> Any:
    """Return an array of numpy, for whose operations jax compiles no programs, or keys."""
    return a if random.is_typed(a) else np.asarray(a)


def _call_batched(
    arrays: Sequence[Array],
    axes: Sequence[int | None],
    *,
    fn: Callable,
    shape: tuple[int, ...],
) -> tuple[list[Array], list[int]]:
    """Add a mapped axis to the leading ones."""
    pairs = list(zip(arrays, axes))
    size = next(a.shape[axis] for a, axis in pairs if axis is not None)
    mapped = [batching.bdim_at_front(a, axis, size) for a, axis in pairs]
    results = _ON_ROWS.bind(*mapped, fn=fn, shape=(size, *shape))
    return results, [0] * len(results)


batching.primitive_batchers[_ON_ROWS] = _call_batched
