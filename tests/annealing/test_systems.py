# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Particle systems, and pairs of chains of them, against exact sums.

Tests annealing/ladder.py, annealing/particle_pairs.py, annealing/particles.py,
annealing/systems.py.
"""

from functools import partial
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats
from ucd_tools import exact_means, grad_log_partition, key, problem, two_modes
import zoo

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp.annealing import Path, particle_pairs, systems
from ebmpp.annealing.ladder import find_ladder
from ebmpp.core import random
from ebmpp.errors import ArgumentError, DomainError
from helpers import assert_law, assert_rows_law, nightly, often, random_params

ISLANDS, NUM = 2000, 20  # 40,000 rows: jax 0.10.2 sums wrongly beyond 32,768
SCALES = {"gaussian": 0.7, "learned": 0.3, "poisson": 0.5}


def keys_of(count: int, seed: int = 0) -> np.ndarray:
    return np.stack([np.full(count, seed), np.arange(count)], 1).astype(np.uint32)


def scaled(params: dict[str, Any], factor: float) -> dict[str, Any]:
    return {
        name: jnp.asarray(np.float32(factor) * np.asarray(a))
        for name, a in params.items()
    }


def model(name: str) -> tuple[ebmpp.FactorGraph, dict[str, Any]]:
    """Return a graph and params; "rbm" gets two modes, so that systems resample."""
    graph = zoo.graph(name)
    return graph, two_modes() if name == "rbm" else random_params(
        graph, seed=1, scale=SCALES.get(name, 1.0)
    )


def uniform(graph: ebmpp.FactorGraph) -> dict[str, jax.Array]:
    """Return a reference that is far from most models."""
    return {b: f.default_eta() for b, f in graph.families.items()}


@partial(jax.jit, static_argnums=(3, 4))
def climb(
    path: Path, places: Any, keys: Any, num: int, sweeps: int = 1
) -> systems.Systems:
    start = systems.draw_initial(path, keys, num)
    return systems.run_rungs(path, places, 1, len(places), start, keys, sweeps)


@pytest.mark.parametrize(
    "name",
    often(
        [*SCALES, "categorical", "binomial", "lattice", "gated", "deep", "rbm"], "rbm"
    ),
)
def test_partition_estimates_and_weighted_sums_are_unbiased(name: str) -> None:
    """Few particles, a far reference and long rungs, so that systems resample and every
    factor matters."""
    graph, params = model(name)
    eta0 = uniform(graph)
    path = Path.through(graph, eta0, [scaled(params, 0.5), params])
    result = climb(path, np.float32([0.0, 0.4, 1.0, 2.0]), keys_of(ISLANDS), NUM)
    if name == "rbm":
        assert (
            0.1 < result.offspring_variance.mean() < 5 and np.std(result.weights) > 0.01
        )
    log_z0 = sum(
        float(f.log_normalizer(eta0[b]).sum()) for b, f in graph.families.items()
    )
    log_z = zoo.Oracle(graph, params, {}).log_z
    z = np.exp(np.asarray(systems.total_log_z(result), float) + log_z0 - log_z)
    assert_rows_law(z, 1.0)
    # Z times the weighted mean of anything has the model's mean
    exact = grad_log_partition(graph, params)
    values = jax.jit(lambda path, params, x: systems.energy_gradient(path, params, x))
    for factor, g in jax.device_get(values(path, params, result)).items():
        rows = z.reshape(-1, *(1,) * (g.ndim - 1)) * g
        assert_rows_law(rows, -exact[factor], comparisons=60)


@pytest.mark.nightly
def test_places_are_knots_and_linear_between_them() -> None:
    graph, params = model("rbm")
    double = scaled(params, 2)
    path = Path.through(graph, uniform(graph), [params, double])
    for s, beta, scale in (
        (0, 0, 1),
        (0.25, 0.25, 1),
        (1, 1, 1),
        (1.5, 1, 1.5),
        (2, 1, 2),
    ):
        rung = path.at(jnp.float32(s))
        assert float(rung.beta) == beta
        np.testing.assert_array_equal(
            rung.params["v:h"], scale * np.asarray(params["v:h"])
        )
    cut = path.cut(jnp.array([0.0, 1.5, 2.0, 9.0]), 3)
    assert int(cut.num) == 3 and cut.betas[:3].tolist() == [0, 1, 1]
    np.testing.assert_array_equal(cut.params["v:h"], double["v:h"])
    assert path.to(double) is path and int(path.to(params).num) == 4


@pytest.mark.nightly
def test_ladders_have_the_requested_threshold() -> None:
    graph, params, _ = problem("rbm")
    path = Path.line(graph, uniform(graph), params)
    find = jax.jit(find_ladder, static_argnums=(2, 4))
    rungs = []
    for threshold in (0.9, 0.99):
        ladder = find(path, key(0), 1000, threshold, 64)
        places = np.asarray(ladder.places)[: int(ladder.count)]
        assert places[0] == 0 and places[-1] == 1 and (np.diff(places) > 0).all()
        rungs.append(len(places))
    cess = float(climb(path, places, keys_of(10), 1000).min_cess.mean())
    assert 0.9 * threshold < cess < 0.5 + threshold / 2
    assert rungs[1] > 2 * rungs[0]


def toy(spread: float) -> particle_pairs.Propose:
    """Return a source of systems whose log Z is normal and whose value grows with it."""

    def propose(keys: jax.Array) -> tuple:
        noise = jax.scipy.special.ndtri(random.open_uniform(random.words(keys, 2)))
        return spread * noise[:, 0], {"f": noise}, jnp.ones(len(keys))

    return propose


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("k", "m"), [nightly(0, 0), nightly(0, 1), (1, 3), nightly(2, 6)]
)
def test_means_over_pairs_of_systems_are_unbiased(k: int, m: int) -> None:
    """Under weights exp(s z) a normal z has mean s; the second value does not matter to
    Z and has mean 0."""
    spread = 0.8
    run = jax.jit(jax.vmap(lambda key: particle_pairs.run_pair(toy(spread), key, k, m)))
    result = jax.device_get(run(keys_of(20_000, seed=10 * k + m)))
    assert_rows_law(result.total["f"], [spread, 0.0])
    tau = result.meeting_time
    assert (result.num_systems == np.maximum(tau, m) + 1).all()
    # tau = 1 if the first proposal is accepted: E min(1, exp(d)) with d normal of
    # variance 2 s**2
    width = math.sqrt(2) * spread
    chance = 0.5 + math.exp(spread**2) * stats.norm.cdf(-width)
    assert_law((tau == 1).mean(), chance, math.sqrt(chance * (1 - chance) / len(tau)))
    assert (result.longest <= tau + m).all() and not result.broken.any()


@pytest.mark.nightly
def test_stopped_pairs_are_unmet_and_undefined_values_broken() -> None:
    run = jax.jit(jax.vmap(lambda key: particle_pairs.run_pair(toy(3.0), key, 0, 1, 3)))
    result = jax.device_get(run(keys_of(2000)))
    assert set(result.meeting_time) == {-1, 1, 2} and (result.num_systems <= 3).all()
    undefined = lambda keys: (jnp.nan * jnp.ones(len(keys)), *toy(1.0)(keys)[1:])
    assert bool(
        jax.jit(lambda: particle_pairs.run_pair(undefined, key(0), 0, 1).broken)()
    )


def test_smc_estimates_are_within_their_errors() -> None:
    graph, params = model("rbm")
    log_z, exact = zoo.Oracle(graph, params, {}).log_z, exact_means(graph, params)
    errors, means = [], []
    for seed in range(15):
        options = {
            "rng_key": jax.random.key(seed),
            "num_particles": 1000,
            "ladder": [0, 0.2, 0.5, 1],
        }
        result = ebmpp.smc(graph, params, **options)
        errors.append((result.log_partition - log_z) / result.standard_error)
        particles = np.asarray(result.particles["v"])
        assert particles.shape == (1000, 4) and result.weights.sum() == pytest.approx(1)
        means.append(result.weights @ particles)
        log_weights = result.log_weights - result.log_weights.max()
        np.testing.assert_allclose(
            result.weights, np.exp(log_weights) / np.exp(log_weights).sum(), rtol=1e-4
        )
    assert 0.4 < np.mean(np.square(errors)) < 2.5
    assert_rows_law(means, exact["v"])
    assert result.weights.std() > 0.1 / 1000
    assert result.effective_sample_size > 250 and 0.4 < result.distinct_ancestors <= 1
    assert result.num_rungs == 3 and len(result.log_z) == 10
    heirs = systems.Systems(
        {}, np.zeros((2, 4)), *[np.array([3, 0, 0, 3, 1, 2, 3, 0])] * 5
    )
    assert systems.distinct_ancestors(heirs).tolist() == [0.5, 1.0]
    heirs = heirs._replace(offspring_variance=np.array([2, 0]))
    assert systems.relative_ancestry(heirs).tolist() == [1.0, 1.0]
    assert result.log_partition == pytest.approx(np.log(np.mean(np.exp(result.log_z))))
    assert repr(result).startswith("ParticleSystem(")


@pytest.mark.nightly
def test_rungs_take_more_sweeps_where_particles_do_not_move() -> None:
    """Sweeps that leave particles near their old states warn, whatever their number."""
    graph, frozen = zoo.graph("rbm"), scaled(two_modes(), 16)
    options = {"rng_key": zoo.KEY, "num_particles": 1000}
    with pytest.warns(UserWarning, match="num_sweeps"):
        assert ebmpp.smc(graph, frozen, num_sweeps=1, **options).correlation > 0.6
    with pytest.warns(UserWarning, match="correlated by"):
        result = ebmpp.smc(graph, frozen, **options)
    assert result.num_sweeps == 20
    low, high = result.interval(0.9999)
    assert low < zoo.Oracle(graph, frozen, {}).log_z < high
    assert ebmpp.smc(graph, two_modes(), **options).num_sweeps == 1


@pytest.mark.parametrize("name", often(["rbm", "deep", "lattice"], "rbm"))
def test_particle_expectations_are_unbiased(name: str) -> None:
    graph, params = model(name)
    exact = exact_means(graph, params)
    # a far reference, so that some proposals are rejected
    options = {
        "path": Path.through(graph, uniform(graph), [params]),
        "ladder": [0, 0.3, 0.6, 1],
    }
    options |= {"rng_key": zoo.KEY, "num_particles": NUM, "num_pairs": 150}
    result = ebmpp.particle_expectation(graph, params, graph.statistics, **options)
    for b in graph.families:
        assert_law(result.value[b], exact[b], result.standard_error[b], comparisons=30)
    assert result.met.all() and result.lag == 1 and result.acceptance < 0.99
    assert (result.cost == NUM * 3 * (np.maximum(result.meeting_time, 1) + 1)).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_particles": 15}, "num_particles .*15"),
        ({"num_particles": 505}, "num_islands.*505"),
        ({"num_islands": 5}, "num_islands .*5"),
        ({"path": "beta"}, "path"),
        ({"path": 3}, "path"),
        ({"ladder": "linear"}, "ladder"),
        ({"ladder": [0, 0.5]}, "from 0 to 1"),
        ({"cess_threshold": 1}, "cess_threshold"),
        ({"num_sweeps": 0}, "num_sweeps"),
    ],
)
def test_invalid_arguments_of_smc_raise(options: dict[str, Any], message: str) -> None:
    graph, params = model("rbm")
    with pytest.raises(ArgumentError, match=message):
        ebmpp.smc(graph, params, rng_key=zoo.KEY, **options)


@pytest.mark.nightly
def test_other_refusals() -> None:
    graph, params = model("rbm")
    other, its_params = model("deep")
    with pytest.raises(ArgumentError, match="path"):
        ebmpp.smc(
            graph,
            params,
            rng_key=zoo.KEY,
            path=Path.line(other, uniform(other), its_params),
        )
    with pytest.raises(ArgumentError, match="smc.*traced"):
        jax.jit(lambda p: ebmpp.smc(graph, p, rng_key=zoo.KEY).log_partition)(params)
    with pytest.raises(ArgumentError, match="max_systems"):
        ebmpp.particle_expectation(
            graph, params, lambda x: x["v"], rng_key=zoo.KEY, max_systems=2
        )
    broken = {name: jnp.full(a.shape, 3e38) for name, a in params.items()}
    with pytest.raises(DomainError, match="not finite"):
        ebmpp.smc(
            graph, broken, rng_key=zoo.KEY, num_particles=1000, ladder=[0, 0.2, 0.5, 1]
        )
