# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Stochastic spectral descent: steepest descent for weights measured by their largest singular value."""

from collections.abc import Mapping
import math
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp
import optax

from ebmpp.core import checks
from ebmpp.errors import ArgumentError
from ebmpp.graph import FactorGraph

_VECTORS = ("euclidean", "max")


def spectral_descent(
    learning_rate: optax.ScalarOrSchedule, graph: FactorGraph | None = None, vectors: str = "euclidean"
) -> optax.GradientTransformation:
    """Stochastic spectral descent, an optimiser for :func:`ebmpp.fit`.

    A step minimises ``<g, step> + |step|^2 / (2 rate)``, leaf by leaf, in a norm that suits the
    log-partition function:

    - A matrix with the gradient U diag(s) V^T moves by ``-rate sum(s) U V^T``: the norm is the largest
      singular value (Schatten-infinity), its dual the sum of all. Singular values that are zero in
      floating point stay zero.
    - A vector moves along -g as in plain gradient descent ("euclidean"), or by ``-rate |g|_1 sign(g)``,
      the norm being the largest entry ("max").

    Why so: log Z is a log-sum-exp over states, so a change U of the weights of a Boltzmann machine of m
    and n units in {0, 1} raises it above its tangent by at most half the square of the largest |v^T U h|,
    which is no more than m n |U|^2 / 2 in this norm and in Frobenius' alike; a step in this norm is promised
    the larger decrease. For biases it is the other way round: m |u|^2 / 2 in the Euclidean norm promises
    more than m^2 |u|^2 / 2 in the largest entry. 1 / (m n) is thus a rate at which a step of the weights
    alone cannot overshoot with exact gradients; rates in use are far larger. Costs one singular value
    decomposition a weight and step.

    :param learning_rate: a number or an optax schedule.
    :param graph: tells what a leaf is: the params of a :class:`~ebmpp.Bias` are a vector whatever their
        shape, and those of a :class:`~ebmpp.Bilinear` a matrix of the first block's units by the second's.
        Other leaves, and all without a graph: one axis or none is a vector, two are a matrix, and more are
        cut in two where the matrix comes out closest to square.
    :param vectors: the norm for vectors, "euclidean" or "max".
    :raises ArgumentError: for another ``vectors``.

    **References**

    1. Carlson, Cevher, Carin (2015), *Stochastic spectral descent for restricted Boltzmann machines*. Its
       proximal steps only: no momentum, no preconditioner, an exact decomposition, and a rate of one's own
       in the place of the bound's constants.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> fit = ebmpp.fit(rbm, ebmpp.data.bars_and_stripes(3), rng_key=jax.random.key(0), num_steps=5,
    ...                 estimator=ebmpp.CD(k=1), optimizer=ebmpp.training.spectral_descent(0.05, rbm),
    ...                 progress_bar=False)
    >>> fit.params["v:h"].shape
    (9, 4)
    """
    if not callable(learning_rate):
        checks.number("spectral_descent: learning_rate", learning_rate)
    return optax.chain(sharp(graph, vectors), optax.scale_by_learning_rate(learning_rate))


def sharp(graph: FactorGraph | None = None, vectors: str = "euclidean") -> optax.GradientTransformation:
    """The direction of :func:`spectral_descent`: the sharp operator of each leaf's norm.

    ``<g, sharp(g)> = |sharp(g)|^2 = |g|_dual^2``. For chains of one's own with other optax transformations.

    :param graph: as for :func:`spectral_descent`.
    :param vectors: likewise.
    """
    checks.choice("spectral_descent: vectors", vectors, _VECTORS)

    def update(gradient: Any, params: Any) -> Any:
        del params
        if graph is None:
            return jax.tree.map(lambda g: _sharp(g, None, vectors), gradient)
        if not isinstance(gradient, Mapping):
            raise ArgumentError(
                "spectral_descent: with a graph the gradient is a dict keyed by factor name, not a "
                f"{type(gradient).__name__}"
            )
        axes = {f.name: f.row_axes(graph.families) for f in graph.factors}
        each = lambda name: lambda g: _sharp(g, axes.get(name), vectors)
        return {name: jax.tree.map(each(name), leaves) for name, leaves in gradient.items()}

    return optax.stateless(update)


def _squarest(shape: tuple[int, ...]) -> int:
    if len(shape) < 2:
        return 0
    sides = lambda i: (math.prod(shape[:i]), math.prod(shape[i:]))
    return min(range(1, len(shape)), key=lambda i: max(sides(i)))


def _sharp(gradient: Array, cut: int | None, vectors: str) -> Array:
    """:param cut: how many axes are the matrix's rows; 0 for a vector, None where nobody says."""
    cut = _squarest(gradient.shape) if cut is None else cut
    if not cut:
        largest = vectors == "max"
        return jnp.abs(gradient).sum() * jnp.sign(gradient) if largest else gradient
    matrix = gradient.reshape(math.prod(gradient.shape[:cut]), -1)
    u, s, vt = jnp.linalg.svd(matrix, full_matrices=False)
    # what is zero but for rounding has no direction of its own
    kept = s > max(matrix.shape) * jnp.finfo(s.dtype).eps * s[0]
    return (s.sum() * (u * kept) @ vt).reshape(gradient.shape)
