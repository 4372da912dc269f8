# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Sums and joint draws of forests, against enumeration in float64.

Tests moves/forests/logs.py, moves/forests/paths.py, moves/forests/structure.py,
moves/forests/sums.py, moves/forests/trees.py.
"""

import itertools

from hypothesis import HealthCheck, given, settings, strategies as st
import networkx as nx
import numpy as np
import pytest

import jax
import jax.numpy as jnp

from ebmpp.moves import forests
from ebmpp.moves.forests import Forest
from helpers import assert_law, nightly

STATES = 3
# one program for each forest; outside of a program each operation is one
draw = jax.jit(forests.draw, static_argnums=0)
draw_pair = jax.jit(forests.draw_pair, static_argnums=0)
log_sum = jax.jit(forests.log_sum, static_argnums=0)
marginals = jax.jit(forests.marginals, static_argnums=0)
most_probable = jax.jit(forests.most_probable, static_argnums=0)


def random_forest(rng: np.random.Generator, num_units: int) -> Forest:
    """A random forest: each unit but the first is joined to an earlier one, or starts a tree."""
    edges = [(u, rng.integers(u)) for u in range(1, num_units) if rng.random() < 0.8]
    order = rng.permutation(num_units)
    return Forest(
        num_units, [(order[a], order[b])[:: rng.choice([-1, 1])] for a, b in edges]
    )


#: paths of 4, 3 and 2 units, not in order
PATHS = Forest(9, [(0, 5), (5, 1), (7, 1), (8, 6), (6, 2), (3, 4)])


def random_tables(
    rng: np.random.Generator, forest: Forest, zeros: float, batch: tuple = ()
) -> tuple:
    """Log weights with hard zeros, and 2 or 3 states per unit; state 0 of all units is possible."""
    unary = rng.normal(size=(*batch, forest.num_units, STATES))
    pairwise = 2 * rng.normal(size=(*batch, len(forest.edges), STATES, STATES))
    for table in (unary, pairwise):
        possible = (
            table[..., 0, 0].copy() if table is pairwise else table[..., 0].copy()
        )
        table[rng.random(table.shape) < zeros] = -np.inf
        table[(..., 0, 0) if table is pairwise else (..., 0)] = possible
    unary[..., rng.random(forest.num_units) < 0.3, 2] = -np.inf
    return unary.astype(np.float32), pairwise.astype(np.float32)


def enumerate_states(forest: Forest, unary: np.ndarray, pairwise: np.ndarray) -> tuple:
    """All joint states and their log weights."""
    states = np.array(list(itertools.product(range(STATES), repeat=forest.num_units)))
    logs = unary.astype(float)[np.arange(forest.num_units), states].sum(1)
    if len(forest.edges):
        a, b = forest.edges.T
        logs = logs + pairwise.astype(float)[
            np.arange(len(a)), states[:, a], states[:, b]
        ].sum(1)
    return states, logs


def forests_of(name: str, rng: np.random.Generator) -> Forest:
    return PATHS if name == "paths" else random_forest(rng, 6)


@pytest.mark.nightly
def test_paths_are_arms_from_their_ends_to_their_centres() -> None:
    rng = np.random.default_rng(2)
    units, edges, roots = PATHS.arms
    assert units.shape == (2, 5) and (units < 0).sum() == 4
    for arm, between, root in zip(units.T, edges.T, roots, strict=True):
        path = [*arm[arm >= 0], PATHS.roots[root]]
        ends = [set(PATHS.edges[edge]) for edge in between[between >= 0]]
        assert ends == [set(pair) for pair in itertools.pairwise(path)]
    unary, pairwise = random_tables(rng, PATHS, zeros=0.2)
    exact = np.logaddexp.reduce(enumerate_states(PATHS, unary, pairwise)[1])
    np.testing.assert_allclose(log_sum(PATHS, unary, pairwise), exact, rtol=1e-5)
    copies = [PATHS.edges + 9 * i for i in range(2)]  # more arms than are sliced
    twice = Forest(18, np.concatenate(copies))
    tables = (np.concatenate([table, table]) for table in (unary, pairwise))
    np.testing.assert_allclose(log_sum(twice, *tables), 2 * exact, rtol=1e-5)
    assert (
        Forest(5, [(0, 1), (0, 2), (0, 3)]).arms is None and Forest(2, []).arms is None
    )


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(st.integers(0, 2**31))
def test_sums_marginals_and_modes_are_those_of_enumeration(seed: int) -> None:
    rng = np.random.default_rng(seed)
    forest = random_forest(rng, 6)
    unary, pairwise = random_tables(rng, forest, zeros=0.3)
    states, logs = enumerate_states(forest, unary, pairwise)
    weights = np.exp(logs - np.logaddexp.reduce(logs))
    results = lambda a, b: (
        log_sum(forest, a, b),
        marginals(forest, a, b),
        most_probable(forest, a, b),
    )
    total, (units, pairs), (mode, log_weight) = jax.jit(results)(unary, pairwise)
    np.testing.assert_allclose(total, np.logaddexp.reduce(logs), rtol=1e-5, atol=1e-5)
    one_hot = np.eye(STATES)[states]
    np.testing.assert_allclose(units, np.tensordot(weights, one_hot, 1), atol=1e-5)
    for edge, (a, b) in enumerate(forest.edges):
        exact = np.einsum("s,si,sj->ij", weights, one_hot[:, a], one_hot[:, b])
        np.testing.assert_allclose(pairs[edge], exact, atol=1e-5)
    np.testing.assert_allclose(log_weight, logs.max(), rtol=1e-5)
    np.testing.assert_array_equal(mode, states[logs.argmax()])


@pytest.mark.parametrize("name", ["trees", "paths"])
def test_draws_follow_the_joint_distribution_and_never_enter_impossible_states(
    name: str,
) -> None:
    rng = np.random.default_rng(3)
    forest = forests_of(name, rng)
    unary, pairwise = random_tables(rng, forest, zeros=0.3)
    states, logs = enumerate_states(forest, unary, pairwise)
    weights = np.exp(logs - np.logaddexp.reduce(logs))
    uniforms = rng.random((4000, forest.num_units), np.float32)
    drawn = np.asarray(draw(forest, unary, pairwise, jnp.asarray(uniforms)))
    np.testing.assert_array_equal(draw(forest, unary, pairwise, uniforms[0]), drawn[0])
    count = np.bincount(
        drawn @ STATES ** np.arange(forest.num_units)[::-1], minlength=len(states)
    )
    assert drawn.dtype == np.int32
    assert not count[weights == 0].any()
    error = np.sqrt(weights * (1 - weights) / len(drawn))
    frequent = weights > 0.01
    assert_law(count[frequent] / len(drawn), weights[frequent], error[frequent])


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["trees", "paths"])
def test_coupled_draws_have_both_marginals_and_meet(name: str) -> None:
    rng = np.random.default_rng(5)
    forest = forests_of(name, rng)
    unary, pairwise = random_tables(rng, forest, zeros=0.2, batch=(2, 1))
    uniforms = jnp.asarray(rng.random((4000, forest.num_units, 3), np.float32))
    pair = np.asarray(draw_pair(forest, unary, pairwise, uniforms))
    assert pair.shape == (2, 4000, forest.num_units)
    one_hot = np.eye(STATES)[pair]
    exact = np.asarray(marginals(forest, unary, pairwise)[0])[:, 0]
    for chain in range(2):
        error = np.sqrt(exact[chain] * (1 - exact[chain]).clip(0) / 4000)
        assert_law(one_hot[chain].mean(0), exact[chain], np.maximum(error, 1e-5))
    roots = forest.roots  # where a maximal coupling is equal with probability 1 - TV
    assert_law(
        (pair[0] == pair[1]).mean(0)[roots],
        np.minimum(*exact)[roots].sum(-1),
        np.full(len(roots), 0.5 / np.sqrt(4000)),
    )
    same = draw_pair(forest, jnp.stack([unary[0], unary[0]]), pairwise[0], uniforms)
    np.testing.assert_array_equal(same[0], same[1])


@pytest.mark.nightly
def test_gradients_are_finite_where_a_state_or_everything_is_impossible() -> None:
    forest = Forest(3, [(0, 1), (2, 1)])
    unary = np.zeros((2, 3, 2), np.float32)
    unary[0, 0, 1] = -np.inf
    unary[1, 2] = -np.inf  # the second row has no possible state
    pairwise = np.zeros((2, 2, 2), np.float32)
    pairwise[0, 0, 0] = -np.inf
    total, gradient = (
        log_sum(forest, unary, pairwise),
        marginals(forest, unary, pairwise),
    )
    np.testing.assert_allclose(total, [np.log(2), -np.inf], rtol=1e-6)
    assert all(np.isfinite(g).all() for g in gradient)
    np.testing.assert_allclose(gradient[0][0], [[1, 0], [0, 1], [0.5, 0.5]], atol=1e-6)


@pytest.mark.nightly
def test_a_long_chain_keeps_the_digits_of_its_conditionals() -> None:
    forest = Forest(2001, np.stack([np.arange(2000), np.arange(1, 2001)], 1))
    unary = np.full((2001, 2), 50.0, np.float32)
    unary[:, 1] += 0.5
    pairwise = np.log(np.array([[[0.9, 0.1], [0.1, 0.9]]], np.float32)).repeat(2000, 0)
    transfer = np.exp(pairwise[0].astype(float)) * np.exp([0.0, 0.5])
    row, logs = np.exp([0.0, 0.5]), 0.0
    for _ in range(2000):
        row = row @ transfer
        logs, row = logs + np.log(row.sum()), row / row.sum()
    np.testing.assert_allclose(
        log_sum(forest, unary, pairwise), logs + 2001 * 50, rtol=1e-6
    )
    left, right = np.linalg.eig(transfer.T), np.linalg.eig(transfer)
    stationary = left[1][:, left[0].argmax()] * right[1][:, right[0].argmax()]
    units = marginals(forest, unary, pairwise)[0]
    np.testing.assert_allclose(units[1000], stationary / stationary.sum(), rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("num_units", [1, 4])
def test_units_without_edges_are_independent(num_units: int) -> None:
    forest, empty = Forest(num_units, []), np.zeros((0, 2, 2), np.float32)
    unary = np.log(np.array([[0.25, 0.75]], np.float32)).repeat(num_units, 0)
    np.testing.assert_allclose(log_sum(forest, unary, empty), 0, atol=1e-6)
    drawn = draw(forest, unary, empty, jnp.full((2, num_units), 0.3))
    np.testing.assert_array_equal(drawn, np.ones((2, num_units)))


@pytest.mark.parametrize(
    "edges", [[(0, 1), (1, 2), (2, 0)], [(0, 1), (1, 0)], [(1, 1)], [(0, 3)], [(-1, 0)]]
)
def test_a_forest_refuses_cycles_and_unknown_units(edges: list) -> None:
    with pytest.raises(ValueError, match="edges"):
        Forest(3, edges)


@pytest.mark.nightly
def test_forests_compare_by_value_and_order_edges_in_few_steps() -> None:
    rng = np.random.default_rng(0)
    tree = nx.random_labeled_tree(200, seed=1)
    forest = Forest(200, list(tree.edges))
    assert forest == Forest(200, list(tree.edges))
    assert hash(forest) == hash(Forest(200, list(tree.edges)))
    assert forest != random_forest(rng, 200)
    assert forest.depth.max() == nx.radius(tree)
    child, parent, edge = forest.steps
    assert child.size <= 2 * 199 + len(child)
    done = np.full(201, -1)
    for number, (c, p, e) in enumerate(zip(child, parent, edge, strict=True)):
        for unit, above, between in zip(
            c[c < 200], p[c < 200], e[c < 200], strict=True
        ):
            assert set(forest.edges[between]) == {unit, above}
            done[unit] = number
    for unit, above in zip(child[child < 200], parent[child < 200], strict=True):
        assert above in forest.roots or done[unit] < done[above]
    chain = Forest(1001, np.stack([np.arange(1000), np.arange(1, 1001)], 1))
    assert chain.steps.shape == (3, 500, 2)


@pytest.mark.parametrize("kind", ["path", nightly("tree")])
def test_rounding_of_long_sums_does_not_add_up(kind: str) -> None:
    """All shifts are equal, so successive sums would round in one direction."""
    count = 20_000
    above = np.arange(count - 1) if kind == "path" else np.arange(count - 1) // 2
    forest = forests.Forest(count, np.stack([above, np.arange(1, count)], 1))
    table = np.log(np.array([[0.9, 0.1], [0.1, 0.9]], np.float32))
    constant = np.float32(-0.9189385)
    log_sum = forests.log_sum(
        forest,
        np.full((count, 2), constant),
        np.broadcast_to(table, (count - 1, 2, 2)),
    )
    exact = count * float(constant) + np.log(2)
    assert abs(float(log_sum) - exact) <= np.spacing(np.float32(-exact))
