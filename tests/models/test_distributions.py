# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Small models of models/ against their formulas: likelihoods, gradients, chains and
conditionals."""

from collections.abc import Callable, Mapping
import dataclasses
from functools import cache
import itertools
from typing import Any

import numpy as np
from oracle import Oracle, numpy_statistics, unit_values
import pytest
from scipy import stats
from scipy.special import logsumexp, softmax

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import FactorGraph, contrib, exact
from helpers import assert_law, assert_rows_law, random_params
from models import (
    categorical,
    conditional,
    convolutional,
    custom_energy,
    denoising,
    gaussian_bernoulli,
    harmonium,
    ising,
    semi_restricted,
    third_order,
)

pytestmark = pytest.mark.nightly

Array = np.ndarray
KEY = jax.random.key(0)
# all values of two binary latents
PAIRS = np.array(list(itertools.product([0.0, 1.0], repeat=2)))


def in_float64(params: Any) -> Any:
    return jax.tree.map(lambda a: np.asarray(a, float), params)


@cache
def gaussian() -> FactorGraph:
    """Return the graph, which collection of the tests must not compile."""
    return gaussian_bernoulli.declare(3, 2)


GAUSSIAN_PARAMS = {
    "v:h": {
        "mean": np.float32([0.5, -0.2, 0.0]),
        "log_variance": np.float32([-1.0, 0.0, 1.0]),
        "weight": np.float32([[0.8, -0.5], [0.3, 1.0], [-1.2, 0.4]]),
        "bias": np.float32([0.2, -0.4]),
    }
}
WORD_PARAMS = {
    "words:topics": {
        "words": np.float32([0.3, -0.4, 0.1]),
        "weight": np.float32([[1.0, -0.5], [-0.3, 0.8], [0.2, 0.6]]),
        "latents": np.float32([-0.4, 0.3]),
    }
}
COUNTS = np.array([[3.0, 0, 1], [0, 2, 2]])


def mixture(params: Any) -> tuple[Array, Array, Array]:
    """Return log-weights of every h, and the means and variances of v given h."""
    p = in_float64(params)["v:h"]
    variance, centre = (
        np.exp(p["log_variance"]),
        p["mean"] + (PAIRS - 0.5) @ p["weight"].T,
    )
    log_weight = (
        PAIRS @ p["bias"] + (centre**2 / variance + p["log_variance"]).sum(1) / 2
    )
    return log_weight, centre, variance


def log_sum_of_documents(params: Any, tokens: int) -> float:
    """Return log Z of the replicated softmax: given the topics its words are independent."""
    p = in_float64(params)["words:topics"]
    words = logsumexp(p["words"] + PAIRS @ p["weight"].T, axis=1)
    return logsumexp(tokens * (PAIRS @ p["latents"] + words))


def document_log_probability(params: Any, words: Any, tokens: int) -> float:
    """Return log p of words in order, with the topics summed out."""
    p = in_float64(params)["words:topics"]
    counts = np.bincount(words, minlength=3).astype(float)
    terms = (
        counts @ p["words"]
        + PAIRS @ (p["weight"].T @ counts)
        + tokens * (PAIRS @ p["latents"])
    )
    return logsumexp(terms) - log_sum_of_documents(params, tokens)


def pooled_energy(p: Mapping[str, Any], v: Array, h: Array) -> float:
    """Return the energy pixel by pixel: cell 0 of a map has five states, the last of
    which is off."""
    total = -(p["v"] * v).sum() - sum(
        p["h"][k, 0, 0] @ h[k, 0, 0] for k in range(len(h))
    )
    for k, i, j in np.ndindex(len(h), 2, 2):
        total -= (
            h[k, 0, 0, 2 * i + j] * (p["v:h"][k, 0] * v[i : i + 2, j : j + 2]).sum()
        )
    return float(total)


def gated_energy(p: Mapping[str, Any], x: Array, y: Array, h: Array) -> float:
    w, total = p["x:y:h"], -(p["x"] @ x + p["y"] @ y + p["h"] @ h)
    for f, i, j, k in np.ndindex(w["x"].shape[1], len(x), len(y), len(h)):
        total -= w["x"][i, f] * w["y"][j, f] * w["h"][k, f] * x[i] * y[j] * h[k]
    return float(total)


def selected_energy(p: Mapping[str, Any], v: Array, z: Array, h: Array) -> float:
    k, w = int(z[0].argmax()), p["v:z:h"]
    inner = v @ w["w"][k] @ h + w["b"][k] @ v + w["c"][k] @ h
    return float(-inner - p["v"] @ v - p["z"][0, k])


def enumerated(
    graph: FactorGraph, params: Any, energy: Any
) -> tuple[list[dict], Array]:
    """Return statistics of every state, and log weights, in float64."""
    params, blocks = in_float64(params), []
    for family in graph.families.values():
        units = itertools.product(unit_values(family), repeat=family.size)
        blocks.append(
            [numpy_statistics(family, np.array(x).reshape(family.shape)) for x in units]
        )
    states = [
        dict(zip(graph.families, state, strict=True))
        for state in itertools.product(*blocks)
    ]
    return states, np.array([-energy(params, **state) for state in states])


@dataclasses.dataclass
class Case:
    """A graph, its params, and an independent log Z in float64."""

    graph: FactorGraph
    params: Any
    log_z: Callable[[Any], float]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


ENERGIES = {
    "convolutional": (lambda: convolutional.declare(3, 1, 2, 2), pooled_energy),
    "third order": (lambda: third_order.declare(2, 2, 3), gated_energy),
    "custom": (
        lambda: custom_energy.declare(3, 3, 2, supervised=False),
        selected_energy,
    ),
}


def energy_case(name: str) -> Case:
    declare, energy = ENERGIES[name]
    graph = declare()
    params = random_params(graph, seed=3, scale=0.8)
    return Case(
        graph, params, lambda p: np.logaddexp.reduce(enumerated(graph, p, energy)[1])
    )


def semi_restricted_case(kind: str) -> Case:
    graph = semi_restricted.declare(kind, 2, 2, neighbours=8)
    return Case(
        graph,
        random_params(graph, seed=3, scale=0.8),
        lambda p: Oracle(graph, p, {}).log_z,
    )


def gaussian_case(**options: Any) -> Case:
    return Case(
        gaussian(), GAUSSIAN_PARAMS, lambda p: logsumexp(mixture(p)[0]), options
    )


CASES = {
    **{name: lambda name=name: energy_case(name) for name in ENERGIES},
    "semi-restricted": lambda: semi_restricted_case("semi-restricted"),
    "fully visible": lambda: semi_restricted_case("fully visible"),
    "gaussian": gaussian_case,
    "gaussian langevin": lambda: gaussian_case(
        coupling=contrib.langevin_sweep(gaussian(), step_size=1.2, num_steps=3)
    ),
    "documents": lambda: Case(
        harmonium.replicated(3, 3, 2), WORD_PARAMS, lambda p: log_sum_of_documents(p, 3)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_exact_and_coupled_gradients(name: str) -> None:
    case = CASES[name]()
    log_z = case.log_z(case.params)
    np.testing.assert_allclose(
        exact.log_partition(case.graph, case.params), log_z, rtol=1e-5
    )
    gradient = jax.grad(lambda p: -exact.log_partition(case.graph, p))(case.params)
    leaves, tree = jax.tree.flatten(in_float64(case.params))
    # finite differences of the last entry of each leaf
    for i, leaf in enumerate(leaves):
        moved = [a.copy() for a in leaves]
        moved[i].flat[leaf.size - 1] += 1e-4
        slope = (log_z - case.log_z(jax.tree.unflatten(tree, moved))) / 1e-4
        np.testing.assert_allclose(
            jax.tree.leaves(gradient)[i].ravel()[-1], slope, rtol=2e-3, atol=2e-4
        )
    energy_gradient = lambda x: jax.grad(lambda p: case.graph.energy(p, x))(case.params)
    estimate = ebmpp.unbiased_expectation(
        case.graph,
        case.params,
        energy_gradient,
        rng_key=KEY,
        num_pairs=3000,
        **case.options,
    )
    size = sum(leaf.size for leaf in leaves)
    check = lambda value, expected, error: assert_law(value, expected, error, size)
    jax.tree.map(check, estimate.value, gradient, estimate.standard_error)


def test_gaussian_likelihood_is_that_of_a_mixture() -> None:
    log_weight, centre, variance = mixture(GAUSSIAN_PARAMS)
    normals = [stats.multivariate_normal(c, np.diag(variance)) for c in centre]
    v = np.random.default_rng(0).normal(size=(20, 3))
    expected = np.log(
        sum(
            w * normal.pdf(v)
            for w, normal in zip(softmax(log_weight), normals, strict=True)
        )
    )
    likelihood = exact.log_likelihood(gaussian(), GAUSSIAN_PARAMS, v.astype(np.float32))
    np.testing.assert_allclose(likelihood, expected, rtol=1e-5)


@pytest.mark.parametrize("tokens", [2, 3])
def test_replicated_softmax_of_every_length_shares_its_params(tokens: int) -> None:
    graph = harmonium.replicated(tokens, 3, 2)
    documents = np.array(list(itertools.product(range(3), repeat=tokens)))
    expected = np.array(
        [document_log_probability(WORD_PARAMS, d, tokens) for d in documents]
    )
    np.testing.assert_allclose(np.exp(expected).sum(), 1, rtol=1e-5)
    likelihood = exact.log_likelihood(graph, WORD_PARAMS, documents)
    np.testing.assert_allclose(likelihood, expected, rtol=2e-5, atol=2e-5)


def test_completions_of_a_table_against_enumeration() -> None:
    graph = categorical.declare(3, 3, 2)
    params = random_params(graph, seed=4, scale=1.0)
    joint = Oracle(graph, params, {})
    row, known = np.array([2, 0, 1], np.int32), np.array([True, False, False])
    weights = np.where(
        joint.x["v"][:, 0] == 2, np.exp(joint.log_weights - joint.log_z), 0
    )
    expected = np.tensordot(
        weights / weights.sum(), joint.x["v"][..., None] == np.arange(3), 1
    )
    data = categorical.Table(
        row[None], np.tile(row, (200, 1)), np.tile(known, (200, 1))
    )
    samples = categorical.posterior(graph, params, data, sweeps=100, seed=0)
    assert_rows_law(samples[:, 1:], expected[1:])
    assert (categorical.search(graph, params, data, seed=0)[:, 0] == 2).all()


def test_labels_of_digits_and_halves_against_enumeration() -> None:
    graph = conditional.declare(4, 2)
    params = random_params(graph, seed=2, scale=1.0)
    joint, v = Oracle(graph, params, {}), np.float32([1, 0, 0, 1])

    def labels(pixels: int) -> Array:
        agrees = (joint.x["v"][:, :pixels] == v[:pixels]).all(1)
        weights = np.where(agrees, np.exp(joint.log_weights - joint.log_z), 0)
        share = np.bincount(joint.x["y"][:, 0].astype(int), weights, minlength=10)
        return share / share.sum()

    probabilities = conditional.label_probabilities(graph, params, v[None])[0]
    np.testing.assert_allclose(probabilities, labels(4), rtol=1e-4)
    # one chain per row, so that the spread of rows gives the standard error
    given_h, completed = conditional.labels_of_halves(
        graph, params, np.tile(v, (300, 1)), seed=0
    )
    assert_rows_law(given_h, labels(2))
    assert (completed[:, :2] == v[:2]).all()


def test_ising_prior_counts_pairs_of_equal_neighbours() -> None:
    prior = denoising.ising(4, 0.3)
    x = np.random.default_rng(0).integers(0, 2, (5, 4, 4))
    s = 2 * x - 1
    pairs = (s[:, 1:] * s[:, :-1]).sum((1, 2)) + (s[:, :, 1:] * s[:, :, :-1]).sum(
        (1, 2)
    )
    energy = prior.graph.energy(
        prior.params, prior.layout.split(jnp.asarray(x, jnp.float32))
    )
    np.testing.assert_allclose(np.ptp(np.asarray(energy) + 0.3 * pairs), 0, atol=1e-5)


def test_energy_of_the_infinite_lattice_is_the_limit_of_strips() -> None:
    """Compare with the transfer matrix of a strip of width 8, which is close below the
    critical coupling."""
    rows = np.array(list(itertools.product([-1, 1], repeat=8)))
    inside, across = (rows * np.roll(rows, 1, axis=1)).sum(1), rows @ rows.T

    def free_energy(coupling: float) -> float:
        half = np.exp(0.5 * coupling * inside)
        matrix = half[:, None] * np.exp(coupling * across) * half
        return np.log(np.linalg.eigvalsh(matrix)[-1]) / 8

    # the effect of the width grows with the coupling
    for coupling, gap in (
        (0.2, 2e-4),
        (0.3, 5e-3),
    ):
        slope = (free_energy(coupling + 1e-4) - free_energy(coupling - 1e-4)) / 2e-4
        assert float(ising.energy_per_spin(coupling)) == pytest.approx(-slope, abs=gap)


def test_spontaneous_magnetisation() -> None:
    assert ising.spontaneous_magnetization([0.1, 0.43]).tolist() == [0, 0]
    # in a frozen lattice one flipped spin costs four bonds: 1 - 2 exp(-8 K) to first
    # order
    assert float(ising.spontaneous_magnetization(1.0)) == pytest.approx(
        1 - 2 * np.exp(-8), abs=1e-4
    )
