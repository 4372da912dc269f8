# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Stochastic spectral descent: steepest descent in the largest singular value."""

from collections.abc import Mapping
import math
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import optax

from ebmpp.core import checks
from ebmpp.core.backend import full_precision
from ebmpp.errors import ArgumentError
from ebmpp.graph import FactorGraph


def spectral_descent(
    learning_rate: optax.ScalarOrSchedule,
    graph: FactorGraph | None = None,
    vectors: str = "euclidean",
) -> optax.GradientTransformation:
    r"""Return the optimiser of stochastic spectral descent, for :func:`ebmpp.fit`.

    A step minimises :math:`\langle g, s \rangle + |s|^2 / (2 \eta)`, leaf by leaf, in a
    norm that suits the log-partition function:

    - A matrix with the gradient :math:`U \mathrm{diag}(\sigma) V^T` moves by
      :math:`-\eta (\sum_i \sigma_i) U V^T`: the norm is the largest singular value, its
      dual the sum of all. Singular values that are zero in floating point stay zero.
    - A vector moves along -g ("euclidean"), or by :math:`-\eta |g|_1 \mathrm{sign}(g)`
      ("max": the norm is the largest entry).

    The reason: log Z is a log-sum-exp over states, so a change U of the weights of a
    Boltzmann machine of m and n units in {0, 1} raises it above its tangent by at most
    half the square of the largest :math:`|v^T U h|`, which is at most
    :math:`m n |U|^2 / 2` in this norm and in the Frobenius norm. A step in this norm is
    thus guaranteed the larger decrease. For biases it is the other way round. 1 / (m n)
    is a rate at which a step of the weights alone cannot overshoot with exact
    gradients; rates in use are far larger. Each step costs one singular value
    decomposition per weight.

    :param learning_rate: a number or an optax schedule.
    :param graph: decides which leaves are matrices: the params of a
        :class:`~ebmpp.Bias` are a vector whatever their shape, and a
        :class:`~ebmpp.Bilinear` has a matrix of the first block's units by the
        second's. Other leaves, and all leaves without a graph: one axis or none is a
        vector, two are a matrix, and more are split where the matrix comes out closest
        to square.
    :param vectors: the norm for vectors, "euclidean" or "max".
    :raises ArgumentError: for another ``vectors`` or ``learning_rate``.

    **References**

    1. Carlson, Cevher, Carin (2015), *Stochastic spectral descent for restricted
       Boltzmann machines*. Its proximal steps only: no momentum, no preconditioner, an
       exact decomposition, and a free rate in place of the bound's constants.

    **Example**

    >>> import jax, ebmpp
    >>> from ebmpp.contrib import spectral_descent
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> fit = ebmpp.fit(rbm, ebmpp.data.bars_and_stripes(3), rng_key=jax.random.key(0), num_steps=5,
    ...                 estimator=ebmpp.CD(k=1), optimizer=spectral_descent(0.05, rbm),
    ...                 progress_bar=False)
    >>> fit.params["v:h"].shape
    (9, 4)
    """
    if not callable(learning_rate):
        checks.number("spectral_descent: learning_rate", learning_rate)
    checks.choice("spectral_descent: vectors", vectors, ("euclidean", "max"))

    def sharp(gradient: Any, params: Any) -> Any:
        """Return the direction s with ``<g, s> = |s|^2 = |g|_dual^2``."""
        del params
        if graph is None:
            return jax.tree.map(lambda g: _sharp(g, None, vectors), gradient)
        if not isinstance(gradient, Mapping):
            raise ArgumentError(
                "spectral_descent: with a graph the gradient must be a dict keyed by "
                f"factor name, got {type(gradient).__name__}."
            )
        axes = {f.name: f.row_axes(graph.families) for f in graph.factors}

        def leaf(name):
            return lambda g: _sharp(g, axes.get(name), vectors)

        return {
            name: jax.tree.map(leaf(name), leaves) for name, leaves in gradient.items()
        }

    return optax.chain(
        optax.stateless(sharp), optax.scale_by_learning_rate(learning_rate)
    )


def _squarest(shape: tuple[int, ...]) -> int:
    if len(shape) < 2:
        return 0

    def sides(i):
        return (math.prod(shape[:i]), math.prod(shape[i:]))

    return min(range(1, len(shape)), key=lambda i: max(sides(i)))


@full_precision
def _sharp(gradient: Array, row_axes: int | None, vectors: str) -> Array:
    """:param row_axes: number of axes of the matrix's rows; 0 for a vector, None if unknown."""
    row_axes = _squarest(gradient.shape) if row_axes is None else row_axes
    if not row_axes:
        return (
            jnp.abs(gradient).sum() * jnp.sign(gradient)
            if vectors == "max"
            else gradient
        )
    matrix = gradient.reshape(math.prod(gradient.shape[:row_axes]), -1)
    u, s, vt = jnp.linalg.svd(matrix, full_matrices=False)
    # singular vectors of singular values that are zero up to rounding are arbitrary
    valid = s > max(matrix.shape) * jnp.finfo(s.dtype).eps * s[0]
    return (s.sum() * (u * valid) @ vt).reshape(gradient.shape)
