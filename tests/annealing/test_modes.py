# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Modes that particles miss, on models with a first-order transition on the path.

Tests annealing/modes.py.
"""

import math
from typing import Any
import warnings

import numpy as np
import pytest
from scipy.special import gammaln, logsumexp
import zoo

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Spin
from ebmpp.annealing import modes, particle_pairs, particles, systems
from ebmpp.annealing.ladder import Ladder
from ebmpp.annealing.path import Path
from ebmpp.annealing.reference import Pilot, log_partition
from helpers import assert_law, random_params

SIZE = 100
GRAPH = ebmpp.layered(a=Spin(SIZE), b=Spin(SIZE))


def two_phases(
    coupling: float, strong: float, weak: float, share: float, field: float
) -> tuple[dict[str, Any], float, float]:
    """Return a mean-field ferromagnet in fields of both signs, log Z and P(a is mostly up)."""
    first = round(share * SIZE)
    counts = np.meshgrid(
        np.arange(first + 1), np.arange(SIZE - first + 1), indexing="ij"
    )
    h = np.array([strong, weak]) + field
    j = coupling / SIZE
    total = sum(2 * k - n for k, n in zip(counts, (first, SIZE - first), strict=True))
    log_weight = 0.0
    for k, n, f in zip(counts, (first, SIZE - first), h, strict=True):
        log_weight += gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)
        log_weight += f * (2 * k - n) + n * np.logaddexp(j * total + f, -j * total - f)
    log_z = logsumexp(log_weight)
    up = np.exp(log_weight - log_z)[total > 0.2 * SIZE].sum()
    fields = np.where(np.arange(SIZE) < first, *h).astype(np.float32)
    weights = np.full((SIZE, SIZE), j, np.float32)
    return {"a": fields, "b": fields, "a:b": weights}, float(log_z), float(up)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "share"),
    [
        ((1.9, 1.5, -0.6, 0.3, 0.0750), 0.90),
        ((1.9, 1.5, -0.6, 0.3, 0.0583), 0.12),
        ((1.8, 2.0, -0.5, 0.2, 0.1594), 0.90),
        ((1.7, 1.5, -0.6, 0.3, 0.1249), 0.90),
    ],
)
def test_missed_modes_warn(model: tuple, share: float) -> None:
    """The path follows the mode of more entropy, which has a tenth of the weight or the rest."""
    params, log_z, up = two_phases(*model)
    assert up == pytest.approx(share, abs=0.01)
    silent = 0
    for seed in range(6):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = ebmpp.smc(GRAPH, params, rng_key=jax.random.key(seed))
        low, high = result.interval()
        silent += not (low < log_z < high or caught)
        if result.doubt and "another mode" in result.doubt:
            total = result.log_partition + result.log_missed
            assert total == pytest.approx(log_z, abs=0.15)
    assert silent <= (1 if model[0] == 1.7 else 0)


@pytest.mark.nightly
@pytest.mark.parametrize(("scale", "most"), [(0.5, 1), (1.0, 1), (2.0, 1)])
def test_machines_without_a_transition_do_not_warn(scale: float, most: int) -> None:
    graph = ebmpp.layered(v=ebmpp.Bernoulli(16), h=ebmpp.Bernoulli(16))
    params = random_params(graph, 7, scale)
    log_z = float(ebmpp.exact.log_partition(graph, params))
    alarms = 0
    for seed in range(20):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = ebmpp.smc(graph, params, rng_key=jax.random.key(seed))
        assert abs(result.log_partition - log_z) < max(0.02, 5 * result.standard_error)
        alarms += "another mode" in str(result.doubt)
    assert alarms <= most


def test_the_missed_part_is_that_of_the_half_without_particles() -> None:
    """Chains in two corners, particles in one of them, pilots of a known Z in both."""
    graph = ebmpp.layered(a=Spin(3), b=Spin(2))
    params = random_params(graph)
    up = jnp.where(jnp.arange(10) < 4, 1.0, -1.0)[:, None]
    x = {b: up * jnp.ones(f.shape) for b, f in graph.families.items()}
    chains = Pilot(x, {b: 2 * v for b, v in x.items()})
    path = Path.line(graph, {b: 0 * v[0] for b, v in x.items()}, params)

    def pilot_of(part: float) -> Any:
        """Pilots whose particles are in the half of their reference."""

        def pilot(line: Path) -> Ladder:
            sign = jnp.sign(line.eta0["a"][0])
            log_z = math.log(part) - log_partition(graph, line.eta0)
            system = systems.Systems(
                {b: sign * jnp.ones((20, *x[b].shape[1:])) for b in path.sampled},
                jnp.zeros((1, 20)),
                jnp.full(1, log_z),
                *[jnp.zeros(1)] * 4,
            )
            return Ladder(*[jnp.zeros(1)] * 4, system)

        return pilot

    corner = {b: -jnp.ones((5, *v.shape[1:])) for b, v in x.items()}
    missed = lambda part: modes.log_missed(
        path, chains, pilot_of(part), corner, np.full(5, 0.2), 0.0
    )
    # the other half has no particles; their own half counts if pilots find much more
    assert missed(2.0) == pytest.approx(math.log(3.0), rel=1e-5)
    assert missed(4.0) == pytest.approx(math.log(1 + 4.0 + 3.0), rel=1e-5)
    still = Pilot({b: v[:1] for b, v in x.items()}, chains.eta)
    assert modes.log_missed(path, still, pilot_of(2.0), corner, np.ones(5), 0.0) == 0


@pytest.mark.nightly
def test_few_particles_are_a_doubt_and_leave_measures_undefined() -> None:
    graph, params = zoo.graph("rbm"), zoo.params("rbm")
    with pytest.warns(UserWarning, match="fewer than 30 particles, or 20 per island"):
        result = ebmpp.smc(graph, params, rng_key=zoo.KEY, num_particles=20)
    for name in ("correlation", "relative_ancestry", "log_missed"):
        assert math.isnan(getattr(result, name))
    with pytest.warns(UserWarning, match="fewer than 30"):
        ebmpp.ais(graph, params, rng_key=zoo.KEY, num_particles=20, num_temperatures=10)


@pytest.mark.nightly
def test_sweeps_share_one_program() -> None:
    graph, params = zoo.graph("rbm"), zoo.params("rbm")
    run = lambda sweeps: ebmpp.smc(
        graph, params, rng_key=zoo.KEY, num_particles=200, num_sweeps=sweeps
    )
    first = run(2)
    sizes = len(particles._run_rungs), len(particle_pairs._run_pairs)
    with jax.log_compiles(), warnings.catch_warnings():
        assert run(7).num_sweeps == 7
    assert sizes == (len(particles._run_rungs), len(particle_pairs._run_pairs))
    assert (run(2).log_weights == first.log_weights).all()


@pytest.mark.nightly
def test_brackets_end_where_perfect_draws_do_not() -> None:
    """Chains of two phases do not meet; the upper side then starts from approximate draws."""
    params, _, _ = two_phases(1.9, 1.5, -0.6, 0.3, 0.075)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = ebmpp.bracket(
            GRAPH, params, rng_key=zoo.KEY, num_particles=50, num_temperatures=100
        )
    assert not result.guaranteed


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
def test_intervals_of_brackets_and_pairs_of_systems_hold_the_truth() -> None:
    """A hundred small models: 0.95 intervals of both, and standard scores of pairs."""
    graph = zoo.graph("rbm")
    held = 0
    scores = []
    for seed in range(100):
        params = random_params(graph, seed, 2.0)
        key = jax.random.key(seed)
        bracket = ebmpp.bracket(
            graph, params, rng_key=key, num_particles=100, num_temperatures=50
        )
        low, high = bracket.interval()
        held += low <= zoo.Oracle(graph, params, {}).log_z <= high
        pairs = ebmpp.particle_expectation(
            graph,
            params,
            first_unit,
            rng_key=key,
            num_particles=50,
            num_pairs=40,
            ladder=[0, 0.2, 0.5, 1],
        )
        mean = float(ebmpp.exact.moments(graph, params)["v"][0])
        scores.append((float(pairs.value) - mean) / float(pairs.standard_error))
    print("bracket", held, "pairs", np.mean(np.abs(scores) < 1.96), np.std(scores))
    assert held >= 93
    assert np.mean(np.abs(scores) < 2.023) >= 0.88
    assert_law(np.mean(scores), 0.0, np.std(scores) / 10)


def first_unit(x: dict[str, jax.Array]) -> jax.Array:
    return x["v"][0]
