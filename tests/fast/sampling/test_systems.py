# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Particle systems, and pairs of chains of them, against enumeration and exact sums."""

from functools import partial
import math

from annealing_tools import GRAPHS, KEY, PAIR, SCALE, model, uniform
import networkx as nx
import numpy as np
import pytest
from scipy import stats

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Bias, Bilinear, Binomial, Factor, FactorGraph, Pairwise, Spin, exact, layered
from ebmpp.core import random
from ebmpp.errors import ArgumentError, DomainError, UnmetError
from ebmpp.sampling import Path, annealing_path, independence, particle_pairs, system_values, systems
from helpers import assert_law, assert_rows_law, often, random_params

ISLANDS, NUM = 400, 20
TRIPLE = Factor("a", "b", "c", energy=lambda w, a, b, c: -w * a.sum() * b.sum() * c.sum(), init=jnp.ones(()))
GRID = Pairwise("v", nx.convert_node_labels_to_integers(nx.grid_2d_graph(3, 3)))
OTHERS = {
    "binomial": layered(v=Binomial(4, total_count=3), h=Bernoulli(4)),
    "third order": FactorGraph(
        {"a": Bernoulli(3)}, {"b": Spin(3), "c": Bernoulli(2)}, [*map(Bias, "abc"), TRIPLE]
    ),
    "lattice": FactorGraph(
        {"v": Spin((3, 3))}, {"h": Bernoulli(4)}, [Bias("v"), GRID, Bias("h"), Bilinear("v", "h")]
    ),
}
RESAMPLES = ("categorical", "three layers", "lattice")
NAMES = ["rbm", "dbm", "categorical", "gaussian", "harmonium", "three layers", *OTHERS]


def some(name: str) -> tuple[FactorGraph, dict, float]:
    if name in GRAPHS:
        return model(name, 1)
    graph = OTHERS[name]
    params = random_params(graph, 1, SCALE.get(name, 0.7))
    return graph, params, float(exact.log_partition(graph, params))


@partial(jax.jit, static_argnums=(3, 4))
def climbed(path: Path, places: jax.Array, keys: jax.Array, num: int, sweeps: int = 1) -> systems.Systems:
    made = systems.begin(path, keys, num)
    return systems.climb(path, places, 1, len(places), made, keys, sweeps)


def keys_of(count: int, seed: int = 0) -> jax.Array:
    return random.fold_in(random.key_pair(jax.random.key(seed)), jnp.arange(count))


@pytest.mark.parametrize("name", often(NAMES, "dbm", "gaussian"))
def test_z_and_weighted_sums_are_unbiased(name: str) -> None:
    """Few particles, far starts and long rungs, so that systems resample, and steps of a wrong order show."""
    graph, params, log_z = some(name)
    eta0 = uniform(graph)
    path = Path.through(graph, eta0, [jax.tree.map(lambda a: 0.5 * a, params), params])
    made = climbed(path, jnp.array([0.0, 0.4, 1.0, 2.0]), keys_of(ISLANDS), NUM)
    assert made.even.max() < 0.999
    assert name not in RESAMPLES or made.resampled.mean() > 0.1
    z = np.exp(np.asarray(systems.total_log_z(made)) + annealing_path.log_partition_of(graph, eta0) - log_z)
    assert_rows_law(z, 1.0)
    # Z times the weighted mean of anything has the model's mean: of the energy's gradient too
    exactly = jax.tree.map(jnp.negative, jax.grad(lambda p: exact.log_partition(graph, p))(params))
    for name_, g in system_values.energy_gradient(path, params, made).items():
        rows = z.reshape(-1, *(1,) * (g.ndim - 1)) * np.asarray(g)
        assert_rows_law(rows, exactly[name_], comparisons=60)


@pytest.mark.slow
def test_a_line_is_a_path_of_two_knots_alike() -> None:
    graph, params, _ = model("rbm", 2)
    eta0 = uniform(graph)
    line, knots = Path.line(graph, eta0, params), Path.through(graph, eta0, [params])
    places = jnp.array([0.0, 0.3, 1.0])
    one, other = (climbed(p, places, keys_of(2), 50) for p in (line, knots))
    assert line.is_line and not knots.is_line
    np.testing.assert_allclose(systems.total_log_z(one), systems.total_log_z(other), rtol=1e-5)


def test_places_are_exactly_knots_and_between_them_straight() -> None:
    graph, params, _ = model("rbm", 2)
    double = jax.tree.map(lambda a: 2 * a, params)
    path = Path.through(graph, uniform(graph), [params, double])
    for s, beta, scale in ((0, 0, 1), (0.25, 0.25, 1), (1, 1, 1), (1.5, 1, 1.5), (2, 1, 2)):
        rung = path.at(jnp.float32(s))
        assert float(rung.beta) == beta
        np.testing.assert_array_equal(rung.params["v:h"], scale * params["v:h"])
    cut = path.cut(jnp.array([0.0, 1.5, 2.0, 9.0]), 3)
    assert int(cut.num) == 3 and cut.betas[:3].tolist() == [0, 1, 1]
    np.testing.assert_array_equal(cut.params["v:h"], double["v:h"])
    again = path.to(double)
    assert again is path and int(path.to(params).num) == 4


def test_ladders_are_as_even_as_asked_for() -> None:
    graph, params, _ = model("rbm", 3)
    path = Path.line(graph, uniform(graph), jax.tree.map(lambda a: 2 * a, params))
    find = jax.jit(systems.find_ladder, static_argnums=(2, 3, 4))
    rungs = []
    for least in (0.9, 0.99):
        ladder = find(path, PAIR, 1000, least, 64)
        places = np.asarray(ladder.places)[: int(ladder.count)]
        assert places[0] == 0 and places[-1] == 1 and (np.diff(places) > 0).all()
        made = climbed(path, jnp.asarray(places), keys_of(10), 1000)
        assert 0.9 * least < float(made.even.mean()) < 0.5 + least / 2
        rungs.append(len(places))
    assert rungs[1] > 2 * rungs[0]
    short = find(path, PAIR, 1000, 0.99, 8)  # no room: the last step is a long one, which the ladder says
    assert not bool(short.whole()) and float(short.places[-1]) == 1


def test_more_rungs_compile_nothing() -> None:
    graph, params, _ = model("rbm", 3)
    path = Path.line(graph, uniform(graph), params)
    traces = []

    @jax.jit
    def run(path: Path, places: jax.Array, count: jax.Array) -> jax.Array:
        traces.append(1)
        made = systems.begin(path, keys_of(2), 10)
        return systems.total_log_z(systems.climb(path, places, 1, count, made, keys_of(2)))

    places = np.zeros(16, np.float32)
    for count in (2, 5, 9):
        places[:count] = np.linspace(0, 1, count)
        run(path, places, np.int32(count))
    assert len(traces) == 1


# -- coupled chains of systems ---------------------------------------------------------------------


def toy(spread: float) -> independence.Propose:
    """Systems whose log Z is normal, and whose value grows with it."""

    def propose(keys: jax.Array) -> tuple:
        words = random.words(keys, 2)
        noise = jax.scipy.special.ndtri(random.open_uniform(words))
        log_z = spread * noise[:, 0]
        return log_z, {"f": noise}, jnp.ones(len(keys))

    return propose


@pytest.mark.parametrize(("k", "m"), [(0, 0), (0, 1), (1, 1), (1, 3), (2, 6)])
def test_means_over_pairs_are_unbiased(k: int, m: int) -> None:
    """Under weights exp(s z) a normal z has mean s; the second value does not matter to Z and has mean 0."""
    spread, like = 0.8, {"f": jax.ShapeDtypeStruct((2,), jnp.float32)}
    run = jax.jit(jax.vmap(lambda key: independence.run_pair(toy(spread), like, key, k, m)))
    made = run(keys_of(20_000, seed=10 * k + m))
    assert_rows_law(made.total["f"], [spread, 0.0])
    tau, systems_run = np.asarray(made.meeting_time), np.asarray(made.num_systems)
    assert (systems_run == np.maximum(tau, m) + 1).all()
    # the first meeting is at 1 if the first proposal is taken: E min(1, exp(d)), d normal of variance 2 s**2
    width = math.sqrt(2) * spread
    chance = 0.5 + math.exp(spread**2) * stats.norm.cdf(-width)
    assert_law((tau == 1).mean(), chance, math.sqrt(chance * (1 - chance) / len(tau)))
    assert (np.asarray(made.longest) <= tau + m).all() and made.broken.sum() == 0


def test_pairs_that_are_stopped_are_unmet_and_what_is_no_number_is_broken() -> None:
    like = {"f": jax.ShapeDtypeStruct((2,), jnp.float32)}
    run = jax.jit(jax.vmap(lambda key: independence.run_pair(toy(3.0), like, key, 0, 1, 3)))
    made = run(keys_of(2000))
    tau = np.asarray(made.meeting_time)
    assert set(tau) == {-1, 1, 2} and (np.asarray(made.num_systems) <= 3).all()

    def nothing(keys: jax.Array) -> tuple:
        return jnp.full(len(keys), jnp.nan), {"f": jnp.zeros((len(keys), 2))}, jnp.ones(len(keys))

    assert bool(independence.run_pair(nothing, like, PAIR, 0, 1).broken)


# -- from the host ---------------------------------------------------------------------------------


def test_smc_within_its_errors_and_what_it_tells() -> None:
    z = []
    for seed in range(6):
        graph, params, log_z = model("rbm", seed)
        made = ebmpp.smc(graph, params, rng_key=jax.random.key(seed), num_particles=500)
        z.append((made.log_partition - log_z) / made.standard_error)
        assert made.particles["v"].shape == (500, 7) and set(made.particles) == set(graph.families)
        assert made.weights.sum() == pytest.approx(1) and made.weights.shape == (500,)
        assert made.effective_sample_size > 250 and 0 < made.distinct_ancestors <= 1
        assert made.num_rungs == len(made.betas) - 1 and len(made.log_z) == 10
        assert made.log_partition == pytest.approx(np.log(np.mean(np.exp(made.log_z))))
    assert 0.5 < np.mean(np.square(z)) < 4  # of t-distributed numbers of nine degrees of freedom
    rows = {"v": np.float32([[1, 0, 1, 0, 1, 0, 1]])}
    exactly = float(exact.log_likelihood(graph, params, rows)[0])
    assert made.average_log_likelihood(rows).value == pytest.approx(exactly, abs=0.1)
    assert repr(made).startswith("ParticleSystem(")


@pytest.mark.parametrize("name", often(["rbm", "dbm", "lattice"], "dbm"))
def test_particle_expectations_are_unbiased(name: str) -> None:
    graph, params, _ = some(name)
    options = {"num_particles": NUM, "num_pairs": 150, "ladder": [0, 0.3, 0.6, 1]}
    fn = lambda x: {b: graph.statistics(x)[b] for b in graph.families}
    made = ebmpp.particle_expectation(graph, params, fn, rng_key=KEY, **options)
    exactly = exact.moments(graph, params)
    for b in graph.families:
        assert_law(made.value[b], exactly[b], made.standard_error[b], comparisons=30)
    assert made.met.all() and made.lag == 1 and made.acceptance < 0.99
    assert (made.cost == NUM * 3 * (np.maximum(made.meeting_time, 1) + 1)).all()
    assert {"meeting_time", "met", "cost"} <= set(ebmpp.to_datatree(made).meeting)


def test_a_pairs_draws_depend_on_its_number_alone() -> None:
    graph, params, _ = model("rbm", 1)
    run = lambda pairs: ebmpp.particle_expectation(
        graph, params, lambda x: x["v"], rng_key=KEY, num_particles=NUM, num_pairs=pairs, ladder=[0, 1]
    )
    many, few = run(8), run(3)
    np.testing.assert_array_equal(many.meeting_time[:3], few.meeting_time)


def test_unmet_pairs_are_told_of() -> None:
    graph, params, _ = model("rbm", 1)
    far = jax.tree.map(lambda a: 10 * a, params)
    options = {"rng_key": KEY, "num_particles": 2, "num_pairs": 30, "ladder": [0, 1], "max_systems": 3}
    run = lambda unmet: ebmpp.particle_expectation(graph, far, lambda x: x["v"], unmet=unmet, **options)
    with pytest.raises(UnmetError, match="of 30 pairs of particle systems had not met after 3 systems"):
        run("raise")
    with pytest.warns(UserWarning, match="were dropped: the estimate is biased"):
        made = run("drop")
    assert made.num_unmet == (~made.met).sum() > 0


def test_a_system_that_holds_for_long_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(particle_pairs, "LONG_STAY", 3)
    graph, params, _ = model("rbm", 1)
    far = jax.tree.map(lambda a: 10 * a, params)
    options = {"rng_key": KEY, "num_particles": 2, "num_pairs": 60, "ladder": [0, 1]}
    with pytest.warns(UserWarning, match="the tail of Z is heavy"):
        made = ebmpp.particle_expectation(graph, far, lambda x: x["v"], **options)
    assert made.meeting_time.max() > 3


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"num_particles": 15}, "num_particles is an int of at least 20"),
        ({"num_particles": 505}, "multiple of num_islands; got 505"),
        ({"num_islands": 5}, "num_islands is an int of at least 10"),
        ({"path": "beta"}, 'path is "line", fit.path or a list of params'),
        ({"path": 3}, "path"),
        ({"ladder": "linear"}, "ladder"),
        ({"ladder": [0, 0.5]}, "places increase from 0 to 1"),
        ({"evenness": 1}, "evenness"),
        ({"num_sweeps": 0}, "num_sweeps"),
    ],
)
def test_smc_refuses(given: dict, told: str) -> None:
    graph, params, _ = model("rbm", 1)
    with pytest.raises(ArgumentError, match=told):
        ebmpp.smc(graph, params, rng_key=KEY, **given)


def test_a_path_of_another_graph_is_refused_and_nothing_runs_under_jit() -> None:
    graph, params, _ = model("rbm", 1)
    other, its, _ = model("dbm", 1)
    with pytest.raises(ArgumentError, match="smc: the path is one of"):
        ebmpp.smc(graph, params, rng_key=KEY, path=Path.line(other, uniform(other), its))
    with pytest.raises(ArgumentError, match="smc runs from the host"):
        jax.jit(lambda p: ebmpp.smc(graph, p, rng_key=KEY).log_partition)(params)
    with pytest.raises(ArgumentError, match="max_systems is at least m \\+ 2"):
        ebmpp.particle_expectation(graph, params, lambda x: x["v"], rng_key=KEY, max_systems=2)
    broken = jax.tree.map(lambda a: jnp.where(a == a, 3e38, a), params)
    with pytest.raises(DomainError, match="weights that are not finite"):
        ebmpp.smc(graph, broken, rng_key=KEY, num_particles=100, ladder=[0, 1])
