# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Calls on the host with concrete values of all chains, also inside an eager ``jax.vmap``."""

from collections.abc import Callable, Sequence

from jaxtyping import PyTree
import numpy as np

import jax
from jax import Array
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import batching
import jax.numpy as jnp

from ebmpp.core import merge_axes

_ON_ROWS = Primitive("on_rows")
_ON_ROWS.multiple_results = True


def is_staged() -> bool:
    """Return True inside of ``jax.jit`` and ``jax.pmap``, where no value is concrete."""
    return isinstance(jnp.zeros(()), Tracer)


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

    chains = [jnp.asarray(leaf)[None] for leaf in leaves]
    results = _ON_ROWS.bind(*chains, fn=flat)
    return jax.tree.unflatten(structures[0], [result[0] for result in results])


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
def _call(*rows: Array, fn: Callable[..., list[Array]]) -> list[Array]:
    return fn(*rows)


def _call_batched(
    rows: Sequence[Array], axes: Sequence[int | None], *, fn: Callable
) -> tuple[list[Array], list[int]]:
    """Merge a mapped axis with that of the chains."""
    pairs = list(zip(rows, axes))
    size = next(a.shape[axis] for a, axis in pairs if axis is not None)
    mapped = [batching.bdim_at_front(a, axis, size) for a, axis in pairs]
    merged = merge_axes(mapped)
    results = _ON_ROWS.bind(*merged, fn=fn)
    split = [a.reshape(size, -1, *a.shape[1:]) for a in results]
    return split, [0] * len(split)


batching.primitive_batchers[_ON_ROWS] = _call_batched
