# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Replicas of a target, ladders of temperatures and swaps; tempered sweeps are in test_sweeps.py.

Tests moves/ensemble.py, moves/rungs.py, moves/tempering.py.
"""

import numpy as np
from oracle import numpy_energy
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Bias, Bilinear, Categorical, Factor, FactorGraph, Gaussian
from ebmpp.errors import ArgumentError, DomainError
from ebmpp.moves import tempering
from ebmpp.moves.ensemble import Ensemble, equalize, log_ratio, new_order, permute
from ebmpp.moves.target import Target
from helpers import pair, random_params, random_state

BETAS = np.array([0.0, 0.4, 1.0], np.float32)


@pytest.fixture(scope="module")
def mixed() -> tuple[FactorGraph, dict, dict]:
    """A graph, its params, and rows of three replicas."""
    graph = pair(Gaussian(2, "learned"), Categorical(3, 4))
    rows = {
        b: random_state(f, i, (4, 3)) for i, (b, f) in enumerate(graph.families.items())
    }
    return graph, random_params(graph, 1), rows


def at_beta(params: dict, beta: float) -> dict:
    """Params of the model whose interactions are weighted by ``beta``."""
    return params | {"a:b": beta * np.asarray(params["a:b"])}


@pytest.mark.nightly
def test_replicas_have_the_energies_and_conditionals_of_their_temperatures(
    mixed,
) -> None:
    graph, params, x = mixed

    @jax.jit
    def run(params, x):
        ensemble = Ensemble.at_betas(Target(graph, params), jnp.asarray(BETAS))
        eta = ensemble.map(lambda target, x: target.natural(x, ("b",))["b"], x)
        return eta, log_ratio(ensemble, x, 0)

    eta, ratio = run(params, x)
    state = lambda row, source: {b: v[row, source] for b, v in x.items()}
    at = lambda row, source, beta: numpy_energy(
        graph, at_beta(params, beta), state(row, source)
    )
    natural = jax.jit(lambda params, x: graph.natural_parameters(params, x, "b"))
    for row in range(4):
        # a swap is accepted with the ratio of the densities after and before
        for low in range(2):
            b, c = BETAS[low], BETAS[low + 1]
            gain = (
                at(row, low, b)
                + at(row, low + 1, c)
                - at(row, low + 1, b)
                - at(row, low, c)
            )
            np.testing.assert_allclose(ratio[row, low], gain, rtol=1e-3, atol=1e-4)
    for r, beta in enumerate(BETAS):
        expected = natural(at_beta(params, beta), {b: v[:, r] for b, v in x.items()})
        np.testing.assert_allclose(eta[:, r], expected, rtol=1e-4, atol=1e-5)


def test_an_ensemble_is_a_pytree_with_the_states_of_all_replicas(mixed) -> None:
    graph, params, x = mixed
    ensemble = Ensemble.at_betas(Target(graph, params), jnp.asarray(BETAS))
    leaves, structure = jax.tree.flatten(ensemble)
    restored = jax.tree.unflatten(structure, leaves)
    assert isinstance(restored, Ensemble) and restored.graph == graph
    assert ensemble.shape("a") == (3, 2) and ensemble.model.shape("a") == (2,)
    np.testing.assert_array_equal(ensemble.coldest(x)["a"], x["a"][:, -1])


def test_a_tempered_sweep_refuses_single_states() -> None:
    graph = pair(Bernoulli(2), Bernoulli(2))
    sweep = tempering.tempered_sweep(graph)
    with pytest.raises(ArgumentError, match="tempered"):
        ebmpp.unbiased_expectation(
            graph,
            random_params(graph),
            lambda x: x["a"],
            rng_key=jax.random.key(0),
            coupling=sweep,
        )


def precision_energy(weight, x, h):
    """An interaction that holds the variance of x; at module level, so that its graph
    is a value."""
    return (1 + h @ weight) * x[..., 1].sum()


@pytest.mark.nightly
def test_the_hottest_replica_must_normalise() -> None:
    precision = Factor("x", "h", energy=precision_energy, init=np.ones(2), name="p")
    factors = [Bias("h"), Bilinear("x", "h"), precision]
    graph = FactorGraph({"x": Gaussian(2, "learned")}, {"h": Bernoulli(2)}, factors)
    params = random_params(graph, scale=0.1)
    tempering.check_hot(graph, params, 0.5)
    with pytest.raises(DomainError, match="beta.*'x'"):
        tempering.check_hot(graph, params, 0.0)


def test_equalized_ladders_have_equal_rejections() -> None:
    """For a barrier that grows as beta squared, and rejections in proportion to its increase."""
    adapt = jax.jit(equalize)
    betas = np.linspace(0.0, 1.0, 6, dtype=np.float32)
    for _ in range(30):
        betas = np.asarray(adapt(betas, 0.9 * np.diff(betas**2)))
    np.testing.assert_allclose(betas, np.sqrt(np.linspace(0, 1, 6)), atol=0.01)
    for rejection in np.float32([[0] * 5, [1] * 5, [1, 0, 0, 0, 0], [0, 0, 0, 0, 1]]):
        ladder = np.asarray(adapt(np.float32([0.1, 0.2, 0.5, 0.6, 0.7, 1]), rejection))
        assert (
            ladder[0] == np.float32(0.1)
            and ladder[-1] == 1
            and (np.diff(ladder) > 0).all()
        )


def test_swaps_exchange_neighbours_of_one_parity() -> None:
    order = jax.jit(new_order)
    accepted = np.ones((1, 4), bool)
    assert np.asarray(order(accepted, 0))[0].tolist() == [1, 0, 3, 2, 4]
    assert np.asarray(order(accepted, 1))[0].tolist() == [0, 2, 1, 4, 3]
    assert np.asarray(order(~accepted, 1))[0].tolist() == [0, 1, 2, 3, 4]
    values, places = np.arange(10).reshape(1, 5, 2), [1, 0, 2, 4, 3]
    swapped = permute(jnp.asarray(values), jnp.array([places]))
    np.testing.assert_array_equal(swapped, values[:, places])
