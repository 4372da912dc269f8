# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Sums, annealing, particles, tempering and search on graphs with a network as a factor."""

import math

from network_graphs import NAMES, Enumerated, enumerated
import numpy as np
from numpyro.infer import MCMC
import pytest

import jax

import ebmpp
from ebmpp.annealing import reverse_ais
from helpers import assert_law, assert_rows_law, often

KEY = jax.random.key(3)
CASES = often(NAMES, "ordinary latents")
NUM = 1000


def mean_statistics(case: Enumerated) -> dict[str, np.ndarray]:
    return case.mean(jax.device_get(case.graph.statistics(case.states)))


@pytest.mark.parametrize("name", CASES)
def test_sums_over_states_are_exact(name: str) -> None:
    case = enumerated(name)
    graph, params = case.graph, case.params
    assert ebmpp.exact.log_partition(graph, params) == pytest.approx(
        case.log_z, abs=1e-4
    )
    values = ebmpp.exact.log_likelihood(graph, params, case.rows)
    rows = [{b: v[i] for b, v in case.rows.items()} for i in range(4)]
    expected = [case.log_likelihood(row) for row in rows]
    np.testing.assert_allclose(values, expected, atol=1e-4)
    gradient = jax.grad(
        lambda p: -ebmpp.exact.log_likelihood(graph, p, case.rows).mean()
    )(params)
    compare = lambda g, e: np.testing.assert_allclose(g, e, atol=1e-4)
    jax.tree.map(compare, gradient, case.loss_gradient())
    moments = ebmpp.exact.moments(graph, params)
    for b, mean in mean_statistics(case).items():
        np.testing.assert_allclose(moments[b], mean, atol=1e-4)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:the effective sample size")
def test_annealed_weights_are_unbiased_in_both_directions(name: str) -> None:
    case = enumerated(name)
    options = {
        "rng_key": KEY,
        "num_particles": NUM,
        "ladder": [0, 0.3, 1],
    }
    below = ebmpp.ais(case.graph, case.params, **options)
    above = reverse_ais(case.graph, case.params, **options)
    assert_rows_law(np.exp(below.log_weights - case.log_z), 1.0)
    assert_rows_law(np.exp(above.log_weights + case.log_z), 1.0)
    assert above.unbiased


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_a_bracket_and_particles_hold_log_z(name: str) -> None:
    case = enumerated(name)
    graph, params = case.graph, case.params
    bracket = ebmpp.bracket(
        graph, params, rng_key=KEY, num_particles=NUM, num_temperatures=50
    )
    assert bracket.exact == pytest.approx(case.log_z, abs=1e-4)
    system = ebmpp.smc(graph, params, rng_key=KEY, num_particles=NUM)
    for side in (bracket.lower, bracket.upper, system):
        assert_law(side.log_partition, case.log_z, side.standard_error, 3)
    for b, mean in mean_statistics(case).items():
        x = np.asarray(graph.statistics(system.particles)[b], float)
        islands = (system.weights.reshape((NUM,) + (1,) * (x.ndim - 1)) * x).reshape(
            10, -1, *x.shape[1:]
        )
        shares = system.weights.reshape(10, -1).sum(1)
        # a ratio of sums over islands, by the delta method
        parts = islands.sum(1) - shares.reshape((10,) + (1,) * (x.ndim - 1)) * mean
        error = parts.std(0, ddof=1) * math.sqrt(10)
        assert (np.abs(parts.sum(0)) < 6 * error).all()


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_pairs_and_coupled_systems_are_unbiased(name: str) -> None:
    case = enumerated(name)
    graph, params = case.graph, case.params
    exact = mean_statistics(case)
    size = sum(v.size for v in exact.values())
    particles = ebmpp.particle_expectation(
        graph, params, graph.statistics, rng_key=KEY, num_particles=20, num_pairs=300
    )
    pairs = ebmpp.unbiased_expectation(
        graph, params, graph.statistics, rng_key=KEY, num_pairs=1000
    )
    for result in (particles, pairs):
        assert result.met.all()
        for b, mean in exact.items():
            assert_law(result.value[b], mean, result.standard_error[b], size)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:the effective sample size")
def test_annealing_moves_all_units_at_once() -> None:
    """The pilots too take the moves, which cost two gradients in place of evaluations."""
    case = enumerated("ordinary latents")
    graph, params = case.graph, case.params
    options = {
        "rng_key": KEY,
        "num_particles": NUM,
        "moves": ebmpp.moves.informed_sweep(graph),
    }
    below = ebmpp.ais(graph, params, ladder=[0, 0.3, 1], **options)
    above = reverse_ais(graph, params, ladder=[0, 0.3, 1], **options)
    assert_rows_law(np.exp(below.log_weights - case.log_z), 1.0)
    assert_rows_law(np.exp(above.log_weights + case.log_z), 1.0)
    system = ebmpp.smc(graph, params, **options)
    assert_law(system.log_partition, case.log_z, system.standard_error)
    options |= {"num_particles": 20, "num_pairs": 300}
    pairs = ebmpp.particle_expectation(graph, params, graph.statistics, **options)
    exact = mean_statistics(case)
    size = sum(v.size for v in exact.values())
    for b, mean in exact.items():
        assert_law(pairs.value[b], mean, pairs.standard_error[b], size)


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_tempered_chains_keep_the_distribution(name: str) -> None:
    case = enumerated(name)
    kernel = ebmpp.ParallelTempering(case.graph, betas=(0.0, 0.5, 1.0))
    mcmc = MCMC(
        kernel,
        num_warmup=20,
        num_samples=1,
        num_chains=NUM,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(KEY, case.params)
    drawn = case.graph.statistics(mcmc.get_samples())
    exact = mean_statistics(case)
    size = sum(v.size for v in exact.values())
    for b, mean in exact.items():
        assert_rows_law(drawn[b], mean, size)


@pytest.mark.parametrize("name", CASES)
def test_local_search_ends_where_no_unit_wants_to_change(name: str) -> None:
    case = enumerated(name)
    graph = case.graph
    starts = {b: v[:50] for b, v in case.states.items()}
    x, steps = ebmpp.local_search(graph, case.params, rng_key=KEY, init=starts)
    assert (np.asarray(steps) > 0).any()
    for b, family in graph.families.items():
        eta = graph.natural_parameters(case.params, x, b)
        np.testing.assert_array_equal(family.mode(eta), x[b])
