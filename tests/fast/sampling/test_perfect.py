# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Perfect draws against enumeration, and what is refused."""

import networkx as nx
import numpy as np
import pytest

import jax
import jax.numpy as jnp

from ebmpp import (
    Bernoulli,
    Binomial,
    Categorical,
    Factor,
    FactorGraph,
    Gaussian,
    Spin,
    exact,
    layered,
    perfect_sample,
)
from ebmpp.errors import IntractableError, ParameterError, UnmetError
from helpers import (
    FAMILIES,
    alone,
    assert_rows_law,
    enumerate_numpy,
    gated,
    numpy_statistics,
    pair,
    random_params,
)

NUM_SAMPLES = 4000
CHAIN = layered(a=Bernoulli(3), b=Spin(2), c=Bernoulli(2))
SPINS = pair(Spin(2), Spin(2))
PAST, BONDS = "coupling_from_the_past", "random_cluster"


def attractive(graph, seed=1, signs=None):
    """Random params whose interactions of two blocks have one sign each."""
    params = random_params(graph, seed)
    signs = {f: 1.0 for f in params if ":" in f} | (signs or {})
    return params | {f: sign * jnp.abs(params[f]) for f, sign in signs.items()}


def assert_joint_law(graph, params, x):
    """First and second moments of all statistics."""
    listed, probs, _ = enumerate_numpy(graph, params)
    flat = lambda s, rows: np.concatenate(
        [numpy_statistics(f, s[b]).reshape(rows, -1) for b, f in graph.families.items()], axis=1
    )
    exactly = flat({b: np.stack([s[b] for s in listed]) for b in graph.families}, len(listed))
    drawn = flat({b: np.asarray(v) for b, v in x.items()}, len(x["a"]))
    upper = np.triu_indices(exactly.shape[1])
    moments = lambda t: np.concatenate([t, np.einsum("ri,rj->rij", t, t)[:, *upper]], axis=1)
    assert_rows_law(moments(drawn), probs @ moments(exactly))


@pytest.mark.parametrize("signs", [{}, {"a:b": -1.0}, {"a:b": -1.0, "b:c": -1.0}])
def test_coupling_from_the_past_has_the_law(signs):
    params = attractive(CHAIN, signs=signs)
    x = perfect_sample(CHAIN, params, jax.random.key(0), NUM_SAMPLES, method=PAST)
    assert_joint_law(CHAIN, params, x)


def test_coupling_of_counts_has_the_law():
    graph = pair(Binomial(2, total_count=3), Spin(2))
    params = attractive(graph, signs={"a:b": -1.0})
    assert_joint_law(
        graph, params, perfect_sample(graph, params, jax.random.key(1), NUM_SAMPLES, method=PAST)
    )


def test_a_cycle_of_blocks():
    names = "abcd"
    factors = [
        Factor(x, y, energy=_edge_energy, init=np.zeros(())) for x, y in zip(names, "bcda", strict=True)
    ]
    graph = FactorGraph({b: Spin(1) for b in names}, factors=factors)
    even = {f.name: jnp.float32(-0.5 if f.name == "a:b" else 0.5) for f in factors}
    with pytest.raises(IntractableError, match="not attractive"):  # one frustrated edge
        perfect_sample(graph, even, jax.random.key(0), method=PAST)
    balanced = even | {"c:d": jnp.float32(-0.5)}
    x = perfect_sample(graph, balanced, jax.random.key(0), NUM_SAMPLES, method=PAST)
    weight, total = 0.0, 0.0
    for s in np.ndindex(2, 2, 2, 2):
        a, b, c, d = (2 * i - 1 for i in s)
        p = np.exp(0.5 * (-a * b + b * c - c * d + d * a))
        weight, total = weight + p, total + p * a * c
    assert_rows_law(np.asarray(x["a"] * x["c"]), [total / weight])


def _edge_energy(weight, a, b):
    return -weight * a[0] * b[0]


@pytest.mark.parametrize(
    "graph", [CHAIN, pair(Categorical(2, 3), Bernoulli(2)), alone(Spin(3))], ids=range(3)
)
def test_enumeration_has_the_law(graph):
    params = random_params(graph, 2)
    assert_joint_law(graph, params, perfect_sample(graph, params, jax.random.key(2), NUM_SAMPLES))


def test_enumeration_draws_infinite_blocks_given_the_others():
    graph = pair(Gaussian(2), Bernoulli(2))
    params = random_params(graph, 3) | {"a:b": jnp.array([[2.0, -1.0], [0.5, 1.0]])}
    x = perfect_sample(graph, params, jax.random.key(0), NUM_SAMPLES)
    assert_rows_law(np.asarray(x["a"]), exact.moments(graph, params)["a"])


def test_draws_depend_on_their_own_place_and_cross_jit_and_vmap():
    params = spin_params(0.3)
    key = jax.random.key(4)
    draw = lambda p, k: perfect_sample(SPINS, p, k, 6, PAST)
    many = draw(params, key)
    few = perfect_sample(SPINS, params, key, 2, PAST)
    stacked = jax.tree.map(lambda a: jnp.stack([a, 0.5 * a]), params)
    both = jax.jit(jax.vmap(draw, (0, None)))(stacked, key)
    for b, v in many.items():
        np.testing.assert_array_equal(few[b], v[:2])
        np.testing.assert_array_equal(both[b][0], v)
    listed = perfect_sample(SPINS, params, key, 6, "enumerate")
    jitted = jax.jit(lambda p: perfect_sample(SPINS, p, key, 6, "enumerate"))(params)
    for b, v in listed.items():
        np.testing.assert_array_equal(jitted[b], v)


def spin_params(coupling):
    return {"a": jnp.full(2, 0.1), "b": jnp.zeros(2), "a:b": coupling * jnp.ones((2, 2))}


def test_what_is_no_perfect_draw_is_nan_under_jit():
    draw = jax.jit(lambda p: perfect_sample(SPINS, p, jax.random.key(0), 3, PAST, max_sweeps=1))
    assert np.isnan(draw(spin_params(3.0))["a"]).any()  # not met
    mixed = spin_params(0.3) | {"a:b": jnp.array([[1.0, -1.0], [1.0, 1.0]])}
    assert np.isnan(draw(mixed)["a"]).all()  # not attractive


@pytest.mark.parametrize(
    ("graph", "method", "error", "message"),
    [
        (pair(Categorical(2, 3), Spin(2)), PAST, IntractableError, "block 'a' .*no lowest and highest"),
        (pair(FAMILIES["gaussian"], Spin(2)), PAST, IntractableError, "Bernoulli, Spin and Binomial"),
        (gated(), PAST, IntractableError, "factor 'a:b:c' is over 3 blocks"),
        (SPINS, PAST, IntractableError, "interactions of blocks 'a' and 'b' are of both signs"),
        (layered(a=Spin(30), b=Spin(30)), "enumerate", IntractableError, r"2\*\*30 joint states"),
        (layered(a=Gaussian(2), b=Gaussian(2)), "enumerate", IntractableError, "Gaussian blocks"),
        (layered(a=Gaussian(2), b=Gaussian(2)), "auto", IntractableError, "no perfect sample"),
        (SPINS, "heat", ValueError, "method is one of 'auto', 'enumerate'"),
        (pair(Binomial(2, 3), Spin(2)), BONDS, IntractableError, "they are of Bernoulli and Spin units"),
        (gated(), BONDS, IntractableError, "factor 'a:b:c' is over 3 blocks"),
        (SPINS, BONDS, IntractableError, "blocks 'a' and 'b' have interactions below 0"),
    ],
)
def test_what_is_refused(graph, method, error, message):
    params = random_params(graph, 1, scale=0.2)
    with pytest.raises(error, match=message):
        perfect_sample(graph, params, jax.random.key(0), method=method)


def test_more_that_is_refused():
    with pytest.raises(UnmetError, match="of 4 pairs of chains had not met after 1 sweeps"):
        perfect_sample(SPINS, spin_params(3.0), jax.random.key(0), 4, PAST, max_sweeps=1)
    with pytest.raises(ParameterError, match="lacks factor"):
        perfect_sample(SPINS, {}, jax.random.key(0))
    with pytest.raises(ValueError, match="num_samples"):
        perfect_sample(SPINS, spin_params(0.3), jax.random.key(0), 0)
    with pytest.raises(IntractableError, match="the fields are of both signs"):
        perfect_sample(SPINS, spin_params(0.3) | {"b": jnp.full(2, -1.0)}, jax.random.key(0), method=BONDS)


# -- random clusters -------------------------------------------------------------------------------


@pytest.mark.parametrize("up", [1.0, -1.0])
@pytest.mark.parametrize("strength", [0.3, 1.5])
def test_random_clusters_have_the_law(up, strength):
    # fields of one sign, of spins at 0 and of units in 0 and 1 at 1/2
    w = strength * jnp.array([[0.7, 0.3], [0.2, 0.9]])
    params = {"a": up * jnp.array([0.2, 0.4]) - 0.5 * w.sum(1), "b": up * jnp.array([0.1, 0.3]), "a:b": w}
    x = perfect_sample(MIXED, params, jax.random.key(3), NUM_SAMPLES, BONDS)
    assert_joint_law(MIXED, params, x)


MIXED = pair(Spin(2), Bernoulli(2))
GRID = FactorGraph.from_networkx(nx.grid_2d_graph(3, 3), Spin, shared=True, bias=False, block="a")


@pytest.mark.parametrize("coupling", [0.3, 0.8])
def test_random_clusters_of_a_lattice_have_the_law(coupling):
    params = {"a:a": jnp.float32(coupling)}
    x = perfect_sample(GRID, params, jax.random.key(4), NUM_SAMPLES, BONDS)
    assert_joint_law(GRID, params, x)


def test_random_clusters_couple_where_single_units_do_not():
    graph = FactorGraph.from_networkx(nx.grid_2d_graph(8, 8), Spin, shared=True, bias=False)
    params = {"x:x": jnp.float32(1.0)}
    with pytest.raises(UnmetError, match="take method='random_cluster'"):
        perfect_sample(graph, params, jax.random.key(0), 4, PAST, max_sweeps=1024)
    x = np.asarray(perfect_sample(graph, params, jax.random.key(0), 40, BONDS, max_sweeps=32)["x"])
    magnet = x.reshape(40, -1).mean(1)
    assert (np.abs(magnet) > 0.9).mean() > 0.8 and 8 < (magnet > 0).sum() < 32  # both phases
