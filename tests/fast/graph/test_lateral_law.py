# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks whose units interact: kernels, couplings, search and training, against enumeration."""

import functools

import networkx as nx
import numpy as np
from numpyro.infer import MCMC
import pytest

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import (
    PCD,
    UCD,
    Bernoulli,
    Bias,
    Bilinear,
    BlockedGibbs,
    Categorical,
    Factor,
    FactorGraph,
    Gaussian,
    MaximalCoupling,
    Observed,
    Pairwise,
    ParallelTempering,
    Spin,
    exact,
)
from ebmpp.estimators import MeanField
from helpers import assert_law, assert_rows_law, random_params, slow

CHAINS = 3000


def gate(w, v, h):
    """Two visible units and a latent one at a time."""
    return -w[0] * v[0] * v[1] * h[0] - w[1] * v[1] * v[2] * h[1]


GRAPHS = {
    "ising": FactorGraph.from_networkx(nx.grid_2d_graph(2, 3), Spin),
    "potts": FactorGraph.from_networkx(nx.cycle_graph(5), lambda n: Categorical(n, 3)),
    "many parts": FactorGraph.from_networkx(nx.complete_graph(6), Bernoulli),
    "semi-restricted": FactorGraph(
        {"v": Bernoulli(4)},
        {"h": Bernoulli(2)},
        [Bias("v"), Bias("h"), Bilinear("v", "h"), Pairwise("v", nx.cycle_graph(4))],
    ),
    "lateral latents": FactorGraph(
        {"v": Bernoulli(2)},
        {"h": Spin(3)},
        [Bias("v"), Bias("h"), Bilinear("v", "h"), Pairwise("h", nx.path_graph(3))],
    ),
    "custom": FactorGraph(
        {"v": Bernoulli(3)},
        {"h": Spin(2)},
        [
            Bias("v"),
            Bias("h"),
            Factor("v", "h", energy=gate, init=np.zeros(2), lateral={"v": [(0, 1), (1, 2)]}),
        ],
    ),
}


@functools.cache
def params_of(name: str):
    return random_params(GRAPHS[name], seed=3, scale=0.9)


def statistics(name: str):
    return lambda x: GRAPHS[name].statistics(x)


@pytest.mark.parametrize(
    "name", ["potts", "many parts", slow("ising"), slow("semi-restricted"), slow("lateral latents")]
)
def test_gibbs_draws_the_model(name: str) -> None:
    graph = GRAPHS[name]
    mcmc = MCMC(
        BlockedGibbs(graph),
        num_warmup=25,
        num_samples=1,
        num_chains=CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(0), params_of(name))
    wanted = exact.moments(graph, params_of(name))
    for block, x in mcmc.get_samples().items():
        assert_rows_law(graph.families[block].statistics(x), wanted[block])


COUPLED = [
    ("ising", None),
    slow("potts", None),
    slow("many parts", None),
    slow("semi-restricted", ("maximal", "common")),
    slow("lateral latents", None),
    slow("custom", None),
    slow("ising", "common"),
    slow("ising", "maximal_independent"),
]


@pytest.mark.parametrize(("name", "coupling"), COUPLED)
def test_coupled_estimates_are_unbiased(name: str, coupling) -> None:
    graph = GRAPHS[name]
    found = ebmpp.unbiased_expectation(
        graph,
        params_of(name),
        statistics(name),
        rng_key=jax.random.key(1),
        num_pairs=CHAINS,
        k=1,
        m=3,
        lag=2,
        coupling=coupling,
    )
    assert found.met.all() and found.meeting_time.max() > 3
    wanted = exact.moments(graph, params_of(name))
    for block, value in found.value.items():
        assert_law(value, wanted[block], found.standard_error[block])


@pytest.mark.slow
def test_held_units_stay_and_the_others_follow_them() -> None:
    """Of an Ising ring two spins are observed: the rest has their conditional law, in both kernels."""
    graph, params = GRAPHS["ising"], params_of("ising")
    known = np.array([True, False, False, True, False, False])
    given = Observed(np.where(known, [1.0, 1, 1, -1, 1, 1], np.nan), known)
    listed, probs = exact.probabilities(graph, params)
    agree = (np.asarray(listed["x"])[:, known] == [1.0, -1.0]).all(1)
    wanted = np.average(np.asarray(listed["x"])[agree], axis=0, weights=np.asarray(probs)[agree])
    found = ebmpp.unbiased_expectation(
        graph, params, lambda x: x["x"], rng_key=jax.random.key(2), num_pairs=CHAINS, x=given
    )
    assert_law(found.value, wanted, found.standard_error)
    mcmc = MCMC(BlockedGibbs(graph), num_warmup=20, num_samples=400, progress_bar=False)
    mcmc.run(jax.random.key(3), params, x=given)
    drawn = np.asarray(mcmc.get_samples()["x"])
    assert (drawn[:, known] == [1.0, -1.0]).all() and (drawn[:, ~known].std(0) > 0).all()


def test_pairs_that_have_met_stay_together() -> None:
    pairs = MCMC(
        MaximalCoupling(GRAPHS["many parts"]),
        num_warmup=0,
        num_samples=12,
        num_chains=50,
        chain_method="vectorized",
        progress_bar=False,
    )
    pairs.run(jax.random.key(4), params_of("many parts"), extra_fields=("y", "met"))
    x = np.asarray(pairs.get_samples(group_by_chain=True)["x"])
    fields = pairs.get_extra_fields(group_by_chain=True)
    same = (x == np.asarray(fields["y"]["x"])).all(-1)
    assert same[:, -1].all() and not same[:, 0].all()
    np.testing.assert_array_equal(np.maximum.accumulate(same, axis=1), same)


def test_search_ends_where_no_unit_would_change() -> None:
    graph, params = GRAPHS["many parts"], params_of("many parts")
    start = {"x": np.random.default_rng(0).integers(0, 2, (20, 6)).astype(np.float32)}
    found = ebmpp.local_search(graph, params, rng_key=jax.random.key(5), init=start).state
    np.testing.assert_array_equal(graph.mode(params, found, "x"), found["x"])


@pytest.mark.slow
def test_tempered_chains_draw_the_model() -> None:
    graph, params = GRAPHS["ising"], params_of("ising")
    mcmc = MCMC(
        ParallelTempering(graph, betas=[0.0, 0.5, 1.0]),
        num_warmup=20,
        num_samples=1,
        num_chains=1500,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(jax.random.key(6), params)
    assert_rows_law(mcmc.get_samples()["x"], exact.moments(graph, params)["x"])


@pytest.mark.slow
def test_annealing_brackets_the_exact_sum() -> None:
    for name in ("ising", "semi-restricted"):
        graph, params = GRAPHS[name], params_of(name)
        made = ebmpp.ais(graph, params, rng_key=jax.random.key(7), num_particles=400, num_temperatures=30)
        wanted = float(exact.log_partition(graph, params))
        assert abs(float(made.log_partition) - wanted) < 4 * float(made.standard_error) + 1e-3


@pytest.mark.slow
def test_an_attractive_lattice_is_drawn_from_the_past() -> None:
    graph = FactorGraph.from_networkx(nx.grid_2d_graph(2, 3), Spin, shared=True)
    params = {"x": jnp.linspace(-0.5, 0.5, 6), "x:x": jnp.array(0.4)}
    drawn = ebmpp.perfect_sample(
        graph, params, rng_key=jax.random.key(8), num_samples=2000, method="coupling_from_the_past"
    )
    assert_rows_law(drawn["x"], exact.moments(graph, params)["x"])


def test_a_fully_visible_machine_learns_the_moments_of_its_data() -> None:
    """Maximum likelihood matches means and products; PCD with many chains comes close."""
    graph = GRAPHS["many parts"]
    states, probs = exact.probabilities(graph, random_params(graph, seed=9, scale=1.0))
    rows = np.random.default_rng(0).choice(len(probs), 2000, p=np.asarray(probs) / np.sum(probs))
    data = np.asarray(states["x"])[rows]
    fit = ebmpp.fit(
        graph,
        data,
        estimator=PCD(num_chains=2000),
        optimizer=optax.adam(optax.cosine_decay_schedule(0.1, 200)),
        num_steps=200,
        batch_size=2000,
        rng_key=jax.random.key(0),
        progress_bar=False,
    )
    gradient = exact.grad_log_likelihood(graph, fit.params, data)
    assert max(float(jnp.abs(g).max()) for g in gradient.values()) < 0.03


@pytest.mark.slow
@pytest.mark.parametrize("name", ["semi-restricted", "lateral latents"])
def test_the_gradient_of_ucd_is_that_of_the_likelihood(name: str) -> None:
    """Where latents interact the positive phase is a second set of pairs, unbiased too."""
    graph, params = GRAPHS[name], params_of(name)
    data = np.random.default_rng(1).integers(0, 2, (8, graph.families["v"].size)).astype(np.float32)
    estimator = UCD(num_pairs=2000, k=2, lag=2, m=4)
    batch = ebmpp.estimators.base.Batch({"v": jnp.asarray(np.tile(data, (100, 1)))}, jnp.full(800, 1 / 800))
    state = estimator.init(graph, params, batch.rows, 800, jnp.array([0, 1], jnp.uint32))
    one = jax.jit(lambda pair: estimator.estimate(graph, params, state, batch, pair).gradient)
    drawn = [one(jnp.array([i, 7], jnp.uint32)) for i in range(24)]
    wanted = exact.grad_log_likelihood(graph, params, data)
    for factor in wanted:
        assert_rows_law(np.stack([d[factor] for d in drawn]), -np.asarray(wanted[factor]))


def test_mean_field_takes_latents_that_interact() -> None:
    """Its fixed point: each latent unit's mean is that of its conditional at the means of the others."""
    graph, params = GRAPHS["lateral latents"], params_of("lateral latents")
    v = {"v": jnp.array([[1.0, 0.0]])}
    mean = MeanField(100).statistics(graph, params, v)["h"][0]
    weight = np.zeros((3, 3))
    for w, (i, j) in zip(params["h:h"], nx.path_graph(3).edges, strict=True):
        weight[i, j] = weight[j, i] = w
    eta = params["h"] + v["v"][0] @ params["v:h"] + weight @ mean
    np.testing.assert_allclose(mean, np.tanh(eta), atol=1e-5)


@pytest.mark.slow
def test_gaussian_fields_meet_and_agree() -> None:
    graph = FactorGraph.from_networkx(nx.cycle_graph(4), Gaussian)
    params = {"x": jnp.array([0.5, -1.0, 0.2, 0.0]), "x:x": jnp.array([0.3, -0.2, 0.1, 0.4])}
    found = ebmpp.unbiased_expectation(
        graph, params, lambda x: x["x"], rng_key=jax.random.key(1), num_pairs=CHAINS, coupling="reflection"
    )
    assert found.met.all()
    assert_law(found.value, exact.moments(graph, params)["x"], found.standard_error)
