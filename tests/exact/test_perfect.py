# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Perfect draws against enumeration, and refusals.

Tests exact/coupling_from_the_past.py, exact/perfect.py.
"""

from typing import Any

import networkx as nx
import numpy as np
from oracle import statistics_of
import pytest
import zoo

import jax
import jax.numpy as jnp

from ebmpp import (
    Bernoulli,
    Binomial,
    Categorical,
    FactorGraph,
    Spin,
    layered,
    perfect_sample,
)
from ebmpp.errors import IntractableError, UnmetError
from helpers import alone, assert_rows_law, nightly, often, pair, random_params

NUM_SAMPLES = 4000
PAST, BONDS = "coupling_from_the_past", "random_cluster"
GRAPHS = {
    "chain": lambda: layered(a=Bernoulli(3), b=Spin(2), c=Bernoulli(2)),
    "counts": lambda: pair(Binomial(2, total_count=3), Spin(2)),
    "categorical": lambda: pair(Categorical(2, 3), Bernoulli(2)),
    "alone": lambda: alone(Spin(3)),
    "spins": lambda: pair(Spin(2), Spin(2)),
    "mixed": lambda: pair(Spin(2), Bernoulli(2)),
}


def assert_joint_moments(graph: FactorGraph, params: Any, x: dict[str, Any]) -> None:
    """First and second moments of all statistics."""
    joint = zoo.Oracle(graph, params, {})
    columns = lambda x: [
        statistics_of(f, np.asarray(x[b])) for b, f in graph.families.items()
    ]
    states, draws = (np.concatenate(columns(values), axis=1) for values in (joint.x, x))
    upper = np.triu_indices(states.shape[1])
    moments = lambda t: np.concatenate(
        [t, np.einsum("ri,rj->rij", t, t)[:, *upper]], axis=1
    )
    assert_rows_law(
        moments(draws), np.exp(joint.log_weights - joint.log_z) @ moments(states)
    )


def attractive(graph: FactorGraph, signs: dict[str, float]) -> dict[str, Any]:
    """Random params whose interactions of two blocks have one sign each."""
    params = random_params(graph, 1)
    return {
        n: signs.get(n, 1.0) * jnp.abs(a) if ":" in n else a for n, a in params.items()
    }


@pytest.mark.parametrize(
    ("name", "signs"),
    [
        nightly("chain", {}),
        ("chain", {"a:b": -1.0, "b:c": -1.0}),
        nightly("counts", {"a:b": -1.0}),
    ],
)
def test_coupling_from_the_past_matches_enumeration(
    name: str, signs: dict[str, float]
) -> None:
    graph = GRAPHS[name]()
    params = attractive(graph, signs)
    draws = perfect_sample(
        graph, params, NUM_SAMPLES, rng_key=jax.random.key(0), method=PAST
    )
    assert_joint_moments(graph, params, draws)


@pytest.mark.parametrize("name", often(["chain", "categorical", "alone"], "chain"))
def test_draws_by_enumeration_match_enumeration(name: str) -> None:
    graph = GRAPHS[name]()
    params = random_params(graph, 2)
    assert_joint_moments(
        graph,
        params,
        perfect_sample(graph, params, NUM_SAMPLES, rng_key=jax.random.key(2)),
    )


@pytest.mark.nightly
def test_unbounded_blocks_are_drawn_given_the_others() -> None:
    graph = zoo.graph("gaussian")
    draws = perfect_sample(
        graph, zoo.params("gaussian"), NUM_SAMPLES, rng_key=jax.random.key(0)
    )
    for b, mean in zoo.moments("gaussian").items():
        assert_rows_law(np.asarray(draws[b]), mean)


@pytest.mark.parametrize(
    ("up", "strength"), [nightly(1.0, 1.5), nightly(-1.0, 0.3), (-1.0, 1.5)]
)
def test_random_clusters_match_enumeration(up: float, strength: float) -> None:
    """Fields of one sign: of spins at 0, of units in {0, 1} at 1/2."""
    graph, w = GRAPHS["mixed"](), strength * np.float32([[0.7, 0.3], [0.2, 0.9]])
    a, b = up * np.float32([0.2, 0.4]) - 0.5 * w.sum(1), up * np.float32([0.1, 0.3])
    params = {
        name: jnp.asarray(value) for name, value in {"a": a, "b": b, "a:b": w}.items()
    }
    draws = perfect_sample(
        graph, params, NUM_SAMPLES, rng_key=jax.random.key(3), method=BONDS
    )
    assert_joint_moments(graph, params, draws)


@pytest.mark.nightly
def test_random_clusters_couple_where_single_units_do_not() -> None:
    graph = FactorGraph.from_networkx(
        nx.grid_2d_graph(8, 8), Spin, shared=True, bias=False
    )
    params = {"x:x": jnp.float32(1.0)}
    with pytest.raises(UnmetError, match="random_cluster"):
        perfect_sample(
            graph, params, 4, rng_key=jax.random.key(0), method=PAST, max_sweeps=1024
        )
    x = np.asarray(
        perfect_sample(
            graph, params, 40, rng_key=jax.random.key(0), method=BONDS, max_sweeps=32
        )["x"]
    )
    magnet = x.reshape(40, -1).mean(1)
    # both phases
    assert (np.abs(magnet) > 0.9).mean() > 0.8 and 8 < (magnet > 0).sum() < 32


def spin_params(coupling: float) -> dict[str, Any]:
    return {
        "a": jnp.full(2, 0.1),
        "b": jnp.zeros(2),
        "a:b": coupling * jnp.ones((2, 2)),
    }


@pytest.mark.nightly
def test_draws_depend_on_their_number_alone_and_work_under_jit_and_vmap() -> None:
    graph, params, rng_key = GRAPHS["spins"](), spin_params(0.3), jax.random.key(4)
    for method in (PAST, "enumerate"):
        draw = lambda p, k, method=method: perfect_sample(
            graph, p, 6, rng_key=k, method=method
        )
        draws, first = (
            draw(params, rng_key),
            perfect_sample(graph, params, 2, rng_key=rng_key, method=method),
        )
        stacked = jax.tree.map(lambda a: jnp.stack([a, 0.5 * a]), params)
        both = jax.jit(jax.vmap(draw, (0, None)))(stacked, rng_key)
        for b, v in draws.items():
            np.testing.assert_array_equal(both[b][0], v)
            np.testing.assert_array_equal(first[b], v[:2])


@pytest.mark.nightly
def test_failures_are_nan_under_jit_and_errors_outside() -> None:
    graph, rng_key = GRAPHS["spins"](), jax.random.key(0)
    draw = jax.jit(
        lambda p: perfect_sample(
            graph, p, 4, rng_key=rng_key, method=PAST, max_sweeps=1
        )
    )
    assert np.isnan(draw(spin_params(3.0))["a"]).any()  # not met
    signs = spin_params(0.3) | {"a:b": jnp.array([[1.0, -1.0], [1.0, 1.0]])}
    assert np.isnan(draw(signs)["a"]).all()  # not attractive
    with pytest.raises(UnmetError, match="of 4 pairs.* 1 sweeps"):
        perfect_sample(
            graph, spin_params(3.0), 4, rng_key=rng_key, method=PAST, max_sweeps=1
        )
    with pytest.raises(IntractableError, match="both signs"):
        perfect_sample(
            graph,
            spin_params(0.3) | {"b": jnp.full(2, -1.0)},
            rng_key=rng_key,
            method=BONDS,
        )
