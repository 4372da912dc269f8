# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Clusters: the components, the law against enumeration, coupled pairs, and what is refused."""

import networkx as nx
import numpy as np
from numpyro.infer import MCMC
import pytest
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import (
    UCD,
    Bernoulli,
    Bias,
    Bilinear,
    Categorical,
    Factor,
    FactorGraph,
    Gaussian,
    MaximalCoupling,
    Observed,
    Pairwise,
    Spin,
    exact,
)
from ebmpp.core import random
from ebmpp.errors import IntractableError, ParameterError, StateError
from ebmpp.graph.factors.pairwise import table
from ebmpp.kernels import SwendsenWang
from ebmpp.moves import Clusters, cluster_sweep
from ebmpp.moves.clusters import components
from ebmpp.moves.gibbs import initial_rows
from ebmpp.moves.move import coupled_sweep, equal
from ebmpp.moves.target import Target
from helpers import assert_law, assert_rows_law, random_params

CHAINS = 3000
GRAPHS = {
    # weights of either sign, and a field a unit
    "ising": FactorGraph.from_networkx(nx.grid_2d_graph(2, 3, periodic=True), Spin),
    "potts": FactorGraph.from_networkx(nx.cycle_graph(5), lambda n: Categorical(n, 3)),
    "bernoulli": FactorGraph.from_networkx(nx.complete_graph(5), Bernoulli),
    "semi-restricted": FactorGraph(
        {"v": Bernoulli((2, 2))},
        {"h": Spin(2)},
        [Bias("v"), Bias("h"), Bilinear("v", "h"), Pairwise("v", nx.grid_2d_graph(2, 2))],
    ),
    "two factors": FactorGraph(
        {"x": Spin(4)},
        factors=[
            Bias("x"),
            Pairwise("x", nx.path_graph(4)),
            Pairwise("x", [(0, 1), (0, 3)], name="more"),
        ],
    ),
}
PARAMS = {name: random_params(graph, seed=3, scale=1.2) for name, graph in GRAPHS.items()}
PARAMS["potts"]["x:x"] = jnp.abs(PARAMS["potts"]["x:x"])


def products(x):
    """All products of two units' statistics, of one state."""
    flat = jnp.concatenate([jnp.ravel(v) for _, v in sorted(x.items())])
    return jnp.outer(flat, flat)[jnp.triu_indices(len(flat))]


def statistics(name):
    return lambda x: products(GRAPHS[name].statistics(x))


def expected(name, states=None, probs=None):
    if states is None:
        states, probs = exact.probabilities(GRAPHS[name], PARAMS[name])
    return np.average(jax.vmap(statistics(name))(dict(states)), axis=0, weights=np.asarray(probs))


def run(kernel, params, num_chains=CHAINS, num_warmup=25, num_samples=1, **held):
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), params, **held)
    return mcmc


# -- components --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("graph", "chance"),
    [
        (nx.grid_2d_graph(12, 12), 0.5),
        (nx.path_graph(200), 0.98),
        (nx.star_graph(60), 0.5),  # a hub of more neighbours than slots
        (nx.complete_graph(12), 0.1),  # more slots than are unrolled
    ],
)
def test_components_are_those_of_scipy(graph: nx.Graph, chance: float) -> None:
    edges = np.array(nx.convert_node_labels_to_integers(graph).edges)
    bonds = np.random.default_rng(0).random((len(edges), 5)) < chance
    found = np.asarray(components(table(len(graph), edges), jnp.asarray(bonds)))
    for row in range(5):
        a, b = edges[bonds[:, row]].T
        _, wanted = connected_components(coo_array((np.ones(len(a)), (a, b)), shape=[len(graph)] * 2))
        first = np.unique(wanted, return_index=True)[1]
        np.testing.assert_array_equal(found[:, row], first[wanted])


# -- the law -----------------------------------------------------------------------------------------

slow = pytest.mark.slow
NAMES = ["ising", "potts"]
NAMES += [pytest.param(name, marks=slow) for name in ("bernoulli", "two factors", "semi-restricted")]


@pytest.mark.parametrize("name", NAMES)
def test_clusters_draw_the_model(name: str) -> None:
    drawn = run(SwendsenWang(GRAPHS[name]), PARAMS[name]).get_samples()
    assert_rows_law(jax.vmap(statistics(name))(drawn), expected(name))


@slow
@pytest.mark.parametrize("name", ["ising", "potts"])
def test_coupled_estimates_are_unbiased(name: str) -> None:
    found = ebmpp.unbiased_expectation(
        GRAPHS[name],
        PARAMS[name],
        statistics(name),
        rng_key=jax.random.key(1),
        num_pairs=CHAINS,
        k=1,
        m=3,
        lag=2,
        coupling=Clusters("x"),
    )
    assert found.met.all() and found.meeting_time.max() > 3
    assert_law(found.value, expected(name), found.standard_error)


@slow
def test_units_that_are_held_hold_their_clusters() -> None:
    name, known = "ising", np.array([True, False, False, True, False, False])
    given = Observed(np.where(known, [1.0, 1, 1, -1, 1, 1], np.nan), known)
    listed, probs = exact.probabilities(GRAPHS[name], PARAMS[name])
    agree = (np.asarray(listed["x"])[:, known] == [1.0, -1.0]).all(1)
    wanted = expected(name, {"x": np.asarray(listed["x"])[agree]}, np.asarray(probs)[agree])
    drawn = run(SwendsenWang(GRAPHS[name]), PARAMS[name], x=given).get_samples()
    assert (np.asarray(drawn["x"])[:, known] == [1.0, -1.0]).all()
    assert_rows_law(jax.vmap(statistics(name))(drawn), wanted)


@slow
def test_pairs_given_held_units_agree_there_and_meet() -> None:
    graph, known = GRAPHS["potts"], np.array([True, False, False, False, False])
    held = Observed(np.array([2, 0, 0, 0, 0]), known)
    found = ebmpp.unbiased_expectation(
        graph,
        PARAMS["potts"],
        lambda x: graph.statistics(x)["x"],
        rng_key=jax.random.key(2),
        num_pairs=CHAINS,
        coupling=Clusters("x"),
        x=held,
    )
    listed, probs = exact.probabilities(graph, PARAMS["potts"])
    agree = np.asarray(listed["x"])[:, 0] == 2
    each = np.asarray(graph.statistics({"x": listed["x"][agree]})["x"])
    wanted = np.average(each, axis=0, weights=np.asarray(probs)[agree])
    assert_law(found.value, wanted, found.standard_error)


# -- pairs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["ising", *(pytest.param(n, marks=slow) for n in ("potts", "semi-restricted"))]
)
def test_pairs_that_agree_stay_together_and_others_have_chains_of_their_own(name: str) -> None:
    graph, params, key = GRAPHS[name], PARAMS[name], random.key_pair(jax.random.key(5))
    sweep, rows = jax.jit(coupled_sweep, static_argnums=2), jnp.arange(40)
    x = initial_rows(graph, graph.families, random.fold_in(key, 0, rows))
    other = initial_rows(graph, graph.families, random.fold_in(key, 1, rows))
    together, apart = ({b: jnp.stack([x[b], y[b]]) for b in x} for y in (x, other))
    met, target = [], Target(graph, params)
    for t in range(6):
        pairs = random.fold_in(key, 2 + t, rows)
        together, _, broken, _ = sweep(target, together, cluster_sweep(graph), pairs)
        apart, *_ = sweep(target, apart, cluster_sweep(graph), pairs)
        assert not broken.any() and all(equal(v).all() for v in together.values())
        met.append(np.all([equal(v) for v in apart.values()], axis=0))
        if graph.families.keys() == {"x"}:  # no trial can fail, so the leader does not see its follower
            np.testing.assert_array_equal(apart["x"][0], together["x"][0])
    assert (np.diff(np.array(met).astype(int), axis=0) >= 0).all() and met[-1].any()


@slow
def test_kernels_of_pairs_take_clusters() -> None:
    graph = GRAPHS["ising"]
    mcmc = run(MaximalCoupling(graph, coupling=Clusters("x")), PARAMS["ising"], 50, 0, 15)
    assert mcmc.last_state.met.all()


@slow
def test_the_gradient_of_ucd_is_that_of_the_likelihood() -> None:
    graph, params = GRAPHS["ising"], PARAMS["ising"]
    data = np.sign(np.random.default_rng(1).normal(size=(8, 6))).astype(np.float32)
    estimator = UCD(num_pairs=2000, k=2, lag=2, m=4, coupling=(Clusters("x"),))
    batch = ebmpp.estimators.base.Batch({"x": jnp.asarray(data)}, jnp.full(8, 1 / 8))
    state = estimator.init(graph, params, batch.rows, 8, jnp.array([0, 1], jnp.uint32))
    one = jax.jit(lambda pair: estimator.estimate(graph, params, state, batch, pair).gradient)
    drawn = [one(jnp.array([i, 7], jnp.uint32)) for i in range(24)]
    wanted = exact.grad_log_likelihood(graph, params, data)
    for factor in wanted:
        assert_rows_law(np.stack([d[factor] for d in drawn]), -np.asarray(wanted[factor]))


# -- what is refused ---------------------------------------------------------------------------------

NEGATIVE = PARAMS["potts"] | {"x:x": -PARAMS["potts"]["x:x"]}


@pytest.mark.parametrize("kernel", [SwendsenWang, lambda g: MaximalCoupling(g, coupling=cluster_sweep(g))])
def test_categories_that_repel_make_no_clusters(kernel) -> None:
    with pytest.raises(ParameterError, match=r"'x:x' has a weight of -.*weights of at least 0.*BlockedGibbs"):
        kernel(GRAPHS["potts"]).init(jax.random.key(0), 0, None, (NEGATIVE,), {})
    with pytest.raises(ParameterError, match="weights of at least 0"):
        ebmpp.unbiased_expectation(
            GRAPHS["potts"], NEGATIVE, statistics("potts"), rng_key=jax.random.key(0), coupling=Clusters("x")
        )


def test_where_weights_cannot_be_looked_at_no_draw_is_wrong() -> None:
    graph, rows = GRAPHS["potts"], jnp.zeros((4, 2), jnp.uint32)
    x = {"x": jnp.zeros((4, 5), jnp.int32)}
    new, _ = jax.jit(lambda p: Clusters("x").draw(Target(graph, p), x, rows))(NEGATIVE)
    assert (new["x"] == -1).all()
    z = {"x": jnp.zeros((2, 4, 5), jnp.int32)}
    _, _, broken, _ = jax.jit(lambda p: coupled_sweep(Target(graph, p), z, (Clusters("x"),), rows))(NEGATIVE)
    assert broken.all()


def gate(w, t):
    return -w * t[0] * t[1]


@pytest.mark.parametrize(
    ("graph", "error", "told"),
    [
        (ebmpp.layered(x=Spin(2), h=Spin(2)), IntractableError, "no units that interact"),
        (FactorGraph.from_networkx(nx.path_graph(3), Gaussian), IntractableError, "Spin, Bernoulli or Cate"),
        (
            FactorGraph(
                {"x": Spin(2)},
                factors=[
                    Bias("x"),
                    Factor("x", energy=gate, init=np.ones(()), lateral={"x": [(0, 1)]}, name="w"),
                ],
            ),
            IntractableError,
            "made of Pairwise factors, not of Factor",
        ),
        (FactorGraph.from_networkx(nx.path_graph(3), Spin, block="y"), StateError, "'x'"),
    ],
)
def test_what_makes_no_clusters(graph: FactorGraph, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        Clusters("x").check(graph)


def test_a_graph_without_lateral_pairs_has_no_clusters() -> None:
    with pytest.raises(IntractableError, match="in no block of .* do units interact"):
        SwendsenWang(ebmpp.layered(v=Spin(2), h=Spin(2)))
