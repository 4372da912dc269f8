# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

import numpy as np
import pytest

import jax
import jax.numpy as jnp
import optax

from ebmpp import Bernoulli, Categorical, layered
from ebmpp.training import spectral_descent
from ebmpp.training.optimizers import sharp


def step(gradient, rate=1.0, graph=None, vectors="euclidean"):
    optimizer = spectral_descent(rate, graph, vectors)
    updates, _ = optimizer.update(gradient, optimizer.init(gradient), gradient)
    return updates


def norms(matrix):
    """Schatten-infinity norm and its dual."""
    return np.linalg.norm(matrix, 2), np.linalg.norm(matrix, "nuc")


def random(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize(
    "matrix",
    [random(0, 5, 3), random(1, 3, 5), random(2, 6, 2) @ random(3, 2, 4), np.outer([1, 2, 3], [1.0, -1])],
)
def test_matrix_step_is_steepest_descent_in_the_largest_singular_value(matrix):
    moved = np.asarray(step(jnp.asarray(matrix, jnp.float32)), float)
    (largest, _), (_, nuclear) = norms(moved), norms(matrix)
    # <g, step> = -|g|_*^2 and |step| = |g|_*: equality in <g, s> >= -|g|_* |s|, at the best length
    assert np.vdot(matrix, moved) == pytest.approx(-(nuclear**2), rel=1e-4)
    assert largest == pytest.approx(nuclear, rel=1e-4)
    value = lambda s: np.vdot(matrix, s) + norms(s)[0] ** 2 / 2
    others = [moved + 0.3 * random(seed, *matrix.shape) for seed in range(20)]
    assert min(map(value, [*others, 0.9 * moved, 1.1 * moved])) > value(moved)
    # what has no singular value is not moved
    assert np.linalg.matrix_rank(moved, tol=1e-3) == np.linalg.matrix_rank(matrix)


def test_vectors_move_along_the_gradient_or_its_signs():
    g = jnp.array([3.0, -1.0, 0.0])
    np.testing.assert_allclose(step(g, 0.5), [-1.5, 0.5, 0.0])
    np.testing.assert_allclose(step(g, 0.5, vectors="max"), [-2.0, 2.0, 0.0])
    np.testing.assert_allclose(step(jnp.array(2.0)), -2.0)


@pytest.mark.parametrize("vectors", ["euclidean", "max"])
def test_zero_gradients_do_not_move(vectors):
    made = step({"w": jnp.zeros((4, 3)), "b": jnp.zeros(4)}, vectors=vectors)
    jax.tree.map(lambda u: np.testing.assert_array_equal(u, 0), made)


def test_a_graph_says_what_is_a_matrix():
    # biases of a block of two axes are a vector; a weight is cut between its blocks
    graph = layered(v=Categorical((2, 2), num_categories=3), h=Bernoulli(5))
    g = {"v": random(0, 2, 2, 3), "h": random(1, 5), "v:h": random(2, 2, 2, 3, 5)}
    made = step(jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), g), graph=graph)
    np.testing.assert_allclose(made["v"], -g["v"], rtol=1e-5)
    matrix = np.asarray(made["v:h"]).reshape(12, 5)
    nuclear = norms(g["v:h"].reshape(12, 5))[1]
    np.testing.assert_allclose(matrix.T @ matrix, nuclear**2 * np.eye(5), atol=1e-3 * nuclear**2)


def test_without_a_graph_leaves_are_cut_closest_to_square():
    g = random(0, 2, 3, 4)
    made = np.asarray(step(jnp.asarray(g, jnp.float32))).reshape(6, 4)
    nuclear = norms(g.reshape(6, 4))[1]
    np.testing.assert_allclose(made.T @ made, nuclear**2 * np.eye(4), atol=1e-3 * nuclear**2)


def test_takes_a_schedule_and_other_transformations():
    g = jnp.array([1.0])
    optimizer = optax.chain(optax.scale(2.0), spectral_descent(optax.exponential_decay(1.0, 1, 0.5)))
    state = optimizer.init(g)
    first, state = optimizer.update(g, state, g)
    second, _ = optimizer.update(g, state, g)
    np.testing.assert_allclose([first, second], [[-2.0], [-1.0]])


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="vectors is one of 'euclidean', 'max', not 'taxi'"):
        spectral_descent(0.1, vectors="taxi")
    graph = layered(v=Bernoulli(2), h=Bernoulli(2))
    with pytest.raises(TypeError, match="keyed by factor name, not a list"):
        sharp(graph).update([jnp.ones(2)], optax.EmptyState())
