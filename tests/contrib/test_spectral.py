# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Spectral descent: steepest descent in Schatten norms.

Tests contrib/spectral.py.
"""

from typing import Any

import numpy as np
import pytest

import jax
import optax

from ebmpp import Bernoulli, Categorical, layered
from ebmpp.contrib import spectral_descent


def step(
    gradient: Any, rate: float = 1.0, graph: Any = None, vectors: str = "euclidean"
) -> Any:
    optimizer = spectral_descent(rate, graph, vectors)
    gradient = jax.tree.map(np.float32, gradient)
    updates, _ = optimizer.update(gradient, optimizer.init(gradient), gradient)
    return jax.tree.map(lambda a: np.asarray(a, float), updates)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def nuclear_norm(matrix: np.ndarray) -> float:
    return float(np.linalg.norm(matrix, "nuc"))


@pytest.mark.parametrize(
    "matrix", [normal(0, 5, 3), normal(1, 3, 5), normal(2, 5, 2) @ normal(3, 2, 3)]
)
def test_a_matrix_step_is_steepest_descent_in_the_largest_singular_value(
    matrix: np.ndarray,
) -> None:
    update, nuclear = step(matrix), nuclear_norm(matrix)
    # <g, step> = -|g|_*^2 and |step| = |g|_*: equality in <g, s> >= -|g|_* |s|, at the
    # best length
    assert np.vdot(matrix, update) == pytest.approx(-(nuclear**2), rel=1e-4)
    assert np.linalg.norm(update, 2) == pytest.approx(nuclear, rel=1e-4)
    assert np.linalg.matrix_rank(update, tol=1e-3) == np.linalg.matrix_rank(matrix)


def test_vectors_move_along_the_gradient_or_its_signs() -> None:
    gradient = np.array([3.0, -1.0, 0.0])
    np.testing.assert_allclose(step(gradient, 0.5), [-1.5, 0.5, 0.0])
    np.testing.assert_allclose(step(gradient, 0.5, vectors="max"), [-2.0, 2.0, 0.0])
    for vectors in ("euclidean", "max"):
        zero = step({"w": np.zeros((4, 3)), "b": np.zeros(4)}, vectors=vectors)
        assert not zero["w"].any() and not zero["b"].any()


def test_a_graph_decides_what_is_a_matrix() -> None:
    # biases of a block of two axes are a vector; a weight is a matrix between its
    # blocks
    graph = layered(v=Categorical((2, 2), num_categories=3), h=Bernoulli(5))
    gradient = {
        "v": normal(0, 2, 2, 3),
        "h": normal(1, 5),
        "v:h": normal(2, 2, 2, 3, 5),
    }
    update = step(gradient, graph=graph)
    np.testing.assert_allclose(update["v"], -gradient["v"], rtol=1e-5)
    matrix, nuclear = (
        update["v:h"].reshape(12, 5),
        nuclear_norm(gradient["v:h"].reshape(12, 5)),
    )
    np.testing.assert_allclose(
        matrix.T @ matrix, nuclear**2 * np.eye(5), atol=1e-3 * nuclear**2
    )


def test_without_a_graph_a_tensor_is_the_matrix_closest_to_square() -> None:
    gradient = normal(0, 2, 3, 4)
    matrix, nuclear = step(gradient).reshape(6, 4), nuclear_norm(gradient.reshape(6, 4))
    np.testing.assert_allclose(
        matrix.T @ matrix, nuclear**2 * np.eye(4), atol=1e-3 * nuclear**2
    )


def test_it_takes_a_schedule_and_composes() -> None:
    gradient = np.ones(1, np.float32)
    optimizer = optax.chain(
        optax.scale(2.0), spectral_descent(optax.exponential_decay(1.0, 1, 0.5))
    )
    first, state = optimizer.update(gradient, optimizer.init(gradient), gradient)
    second, _ = optimizer.update(gradient, state, gradient)
    np.testing.assert_allclose([first, second], [[-2.0], [-1.0]])


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="vectors .*'taxi'"):
        spectral_descent(0.1, vectors="taxi")
