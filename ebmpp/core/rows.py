# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Helpers for arrays whose leading axis counts rows."""

from collections.abc import Callable, Container, Iterable, Mapping, Sized
from typing import Any, TypeVar, cast

from jaxtyping import PyTree
import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import backend

A = TypeVar("A", np.ndarray, Array)
T = TypeVar("T")


def num_rows(x: Mapping[str, Sized]) -> int:
    """Return the length of the first axis of a state, which its blocks share."""
    return len(next(iter(x.values())))


def expand(x: A, target: np.ndarray | Array) -> A:
    """Append axes of length 1 to ``x`` until it has as many as ``target``.

    >>> import numpy as np
    >>> expand(np.ones(3), target=np.ones((3, 4, 2))).shape
    (3, 1, 1)
    """
    return cast(A, x.reshape(x.shape + (1,) * (target.ndim - x.ndim)))


def select(values: Mapping[str, T], names: Iterable[str]) -> dict[str, T]:
    """Return the values of these names, in their order."""
    return {name: values[name] for name in names}


def omit(values: Mapping[str, T], names: Container[str]) -> dict[str, T]:
    """Return the values of all other names, in their order."""
    return {name: v for name, v in values.items() if name not in names}


def at_index(tree: T, index: Any) -> T:
    """Return every array of a tree at an index; None adds a first axis."""
    return jax.tree.map(lambda a: a[index], tree)


def merge_axes(tree: T) -> T:
    """Merge the first two axes of every array of a tree."""
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), tree)


def in_chunks(fn: Callable[..., PyTree], size: int, *rows: PyTree) -> PyTree:
    """Return ``fn`` of each row; on a CPU of ``size`` rows at once, whatever their number.

    XLA chooses vectors and products by shapes, which changes the last bits: without
    chunks, nine of ten pairs of chains of a Gaussian ended otherwise among 37 pairs than
    among 10.
    """
    batched = jax.vmap(fn)
    if backend.accelerated():
        return batched(*rows)
    count = len(jax.tree.leaves(rows)[0])
    number = -(-count // size)

    def split(a):
        return jnp.resize(a, (number, size, *a.shape[1:]))  # repeats rows to fill

    chunks = jax.tree.map(split, rows)
    shapes = jax.eval_shape(jax.vmap(batched), *chunks)
    results = jax.tree.map(jnp.zeros_like, shapes)

    def add_chunk(i, results):
        values = batched(*at_index(chunks, i))
        return jax.tree.map(lambda a, value: a.at[i].set(value), results, values)

    # XLA would merge a loop of one turn with what surrounds it, and round otherwise
    turns = lax.optimization_barrier(jnp.int32(number))
    results = lax.fori_loop(0, turns, add_chunk, results)
    return jax.tree.map(lambda a: merge_axes(a)[:count], results)
