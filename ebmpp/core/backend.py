# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The backend that functions are compiled for: precision, interruption, fusion barriers."""

import atexit
from collections.abc import Callable
import functools
import os
import sys
from typing import ParamSpec, TypeVar

from jaxtyping import PyTree

import jax
from jax import Array, lax
import jax.numpy as jnp

_Tree = TypeVar("_Tree")
_P = ParamSpec("_P")
_MIN_SIZE = 8192  # values; for fewer the loop of a barrier costs more than it saves
# States whose product takes as long as splitting the weights, which XLA does not move
# out of a loop on a GPU: by bytes and launches for 784x500 on an H200, not measured.
_ROWS = 768
_abandoned: list[Array] = []  # results of computations whose wait was interrupted


def accelerated() -> bool:
    """Return True if the default device is not a CPU."""
    return jax.default_backend() != "cpu"


def full_precision(fn: Callable[_P, _Tree]) -> Callable[_P, _Tree]:
    """Trace the products of a function in full float32 unless the user has set a precision.

    Recent GPUs multiply float32 matrices in TF32 by default, with 10 bits of mantissa,
    and so would sample another model than the one whose params are reported. Every
    product derived from an energy is therefore traced at precision "highest", which
    also holds under autodiff, a user's ``jit`` and NumPyro's loops. A user can choose
    less by ``jax.default_matmul_precision("tensorfloat32")`` around a call, or by the
    option of that name.
    """

    @functools.wraps(fn)
    def pinned(*args: _P.args, **kwargs: _P.kwargs) -> _Tree:
        if jax.default_matmul_precision.value is not None:
            return fn(*args, **kwargs)
        with jax.default_matmul_precision("highest"):
            return fn(*args, **kwargs)

    return pinned


def splits_products(rows: int) -> bool:
    """Return True if products of ``rows`` states are to be taken in bfloat16, where exact.

    Not where x64 is enabled or a user has set a precision, such as
    ``jax.default_matmul_precision("float32")`` for rows that are no states, and not on
    NVIDIA's GPUs before compute capability 8, which convert to float32.
    """
    precision = jax.default_matmul_precision.value
    if not accelerated() or rows < _ROWS or precision not in (None, "highest"):
        return False
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    is_old = capability.startswith(("5.", "6.", "7."))
    return jnp.result_type(float) == jnp.float32 and not is_old


def product(x: Array, weights: Array) -> Array:
    """Return ``x @ weights`` in float32, on matrix units if ``x`` is in bfloat16."""
    if x.dtype == jnp.bfloat16 and weights.dtype == jnp.float32:
        return _exact_product(x, weights)
    return jnp.asarray(x, float) @ weights


@jax.custom_jvp
def _exact_product(x: Array, weights: Array) -> Array:
    """Return the product of a vector in bfloat16 and a matrix in float32, exact but for sums.

    A float32 has 24 significant bits, so it is the sum of three numbers of 8. Parts are
    stacked along the summed axis, which writes a third of what products side by side
    write, the small ones first: in float32 emulated in blocks of 16, the error of 784
    terms was 0.3 (rms) of that of float32, and 2.0 of it with the large ones first. They
    are split by ``reduce_precision``, because XLA may drop a conversion to
    bfloat16 and back.
    """
    high, rest = _split(weights)
    middle, low = _split(rest)
    parts = jnp.concatenate([low, middle, high]).astype(jnp.bfloat16)
    return lax.dot(
        jnp.concatenate([x] * 3),
        parts,
        precision=lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


_exact_product.defjvps(
    lambda tangent, _, x, weights: tangent.astype(weights.dtype) @ weights,
    lambda tangent, _, x, weights: x.astype(weights.dtype) @ tangent,
)


def _split(x: Array) -> tuple[Array, Array]:
    """Return the nearest numbers of 8 bits, and the rest."""
    rounded = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return rounded, x - rounded


def barrier_pays(size: int) -> bool:
    """Return True if :func:`fusion_barrier` of ``size`` values saves time on the default device."""
    return size >= _MIN_SIZE and not accelerated()


def fusion_barrier(fn: Callable[..., _Tree], *args: PyTree) -> _Tree:
    """Return ``fn(*args)`` from a loop of one turn, which XLA does not fuse or repeat."""

    @jax.custom_jvp
    def call(*args):
        shapes = jax.eval_shape(fn, *args)
        zeros = jax.tree.map(jnp.zeros_like, shapes)

        def body(_):
            return (jnp.array(False), fn(*args))

        return lax.while_loop(lambda carry: carry[0], body, (jnp.array(True), zeros))[1]

    call.defjvp(lambda primals, tangents: jax.jvp(fn, primals, tangents))
    return call(*args)


def materialize(fn: Callable[..., Array], *args: PyTree) -> Array:
    """Return ``fn(*args)``, from a barrier where it pays.

    Values of a part that are transposed and read by several fusions would otherwise be
    computed in each, column by column: 50 pairs of 32x32 spins took 2.3 in place of 0.9
    ms per sweep.
    """
    size = jax.eval_shape(fn, *args).size
    return fusion_barrier(fn, *args) if barrier_pays(size) else fn(*args)


def is_ready(tree: PyTree) -> bool:
    """Return True if the arrays of a tree are computed."""
    arrays = (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, Array))
    return all(a.is_ready() for a in arrays)


def wait(tree: _Tree) -> _Tree:
    """Return a tree once it is computed; Ctrl-C ends the wait, not the computation."""
    try:
        return jax.block_until_ready(tree)
    except KeyboardInterrupt:
        _abandoned.extend(jax.tree.leaves(tree)[:1])
        raise


@atexit.register
def _leave() -> None:
    """End the process if an interrupted computation still runs; jax would wait for it or crash."""
    if not is_ready(_abandoned):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)  # what a shell reports for Ctrl-C


def asynchronous(fn: Callable[..., _Tree]) -> Callable[..., _Tree]:
    """Return ``fn`` as a program that a CPU runs in the background; its wait can be interrupted.

    XLA runs a program of few operations (by its estimate, in which a loop has one turn)
    inside the call, which ignores signals. A sum of 4096 zeros exceeds its limit of
    about 1000. tests/test_interrupt.py shows whether it is still needed.
    """

    @functools.wraps(fn)
    def call(*args, **kwargs):
        leaves, structure = jax.tree.flatten(fn(*args, **kwargs))
        last = leaves[-1]
        bit = last.ravel()[0].astype(bool).astype(jnp.int32)
        # not negative, which XLA does not know
        total = (jnp.arange(4096, dtype=jnp.int32) & bit).sum()
        leaves[-1] = jnp.where(total < 0, jnp.zeros_like(last), last)
        return jax.tree.unflatten(structure, leaves)

    return call
