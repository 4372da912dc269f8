# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""BlockedGibbs: the law of its draws, against enumeration."""

import itertools

from gibbs_tools import PARAMS, RBM, draws, perturbed, sampler
import numpy as np
import pytest

import jax
import jax.numpy as jnp

from ebmpp import Bernoulli, Bias, Bilinear, Categorical, Factor, FactorGraph, Gaussian, Spin, layered
from helpers import assert_law, assert_rows_law


def _gate(w, x, y, h):
    return -jnp.einsum("ijk,i,j,k", w, x, y, h)


THREE_WAY = FactorGraph(
    {"x": Bernoulli(2), "y": Bernoulli(2)},
    {"h": Spin(2)},
    [Bias("x"), Bias("y"), Bias("h"), Factor("x", "y", "h", energy=_gate, init=jnp.ones((2, 2, 2)))],
)
MIXED = FactorGraph(
    {"v": Bernoulli(3)},
    {"h": Categorical(2, 3)},
    [Bias("v"), Bias("h"), Bilinear("v", "h")],
)
LAWS = {
    "rbm": (RBM, {}),
    "rbm, v clamped": (RBM, {"v": [1.0, 0.0, 1.0, 1.0]}),
    "deep": (layered(v=Bernoulli(3), h1=Bernoulli(3), h2=Bernoulli(2)), {}),
    "deep, v clamped": (layered(v=Bernoulli(3), h1=Bernoulli(3), h2=Bernoulli(2)), {"v": [1.0, 1.0, 0.0]}),
    "three-way": (THREE_WAY, {}),
    "three-way, x clamped": (THREE_WAY, {"x": [1.0, 1.0]}),
    "categorical": (MIXED, {}),
}


def _enumerate(graph, clamped):
    """Every state of a small discrete graph that agrees with ``clamped``."""
    units = []
    for b, family in graph.families.items():
        if b in clamped:
            units += [[value] for value in clamped[b]]
        else:
            units += [np.asarray(family.states()).tolist()] * family.size
    table = np.array(list(itertools.product(*units)))
    stops = np.cumsum([f.size for f in graph.families.values()])[:-1]
    parts = np.split(table, stops, axis=1)
    return {b: p.astype(f.dtype) for (b, f), p in zip(graph.families.items(), parts, strict=True)}


def _last_draws(graph, params, clamped, chains=4000, sweeps=30):
    """The last draws of many chains: independent of one another, so standard errors are simple."""
    mcmc = sampler(graph, 1, chains, num_warmup=sweeps)
    return {b: x[:, -1] for b, x in draws(mcmc, jax.random.key(11), params, **clamped).items()}


def _assert_frequencies(observed, probabilities):
    """Frequencies of the cells that are likely enough for a normal law, and of the others together."""
    n = len(observed)
    frequencies = np.bincount(observed, minlength=len(probabilities)) / n
    likely = n * probabilities > 10
    p = np.append(probabilities[likely], probabilities[~likely].sum())
    assert_law(np.append(frequencies[likely], frequencies[~likely].sum()), p, np.sqrt(p * (1 - p) / n))


@pytest.mark.parametrize("case", LAWS)
def test_law_against_enumeration(case):
    graph, clamped = LAWS[case]
    params = perturbed(graph, scale=0.5)
    clamped = {b: np.array(v) for b, v in clamped.items()}
    table = _enumerate(graph, clamped)
    logits = np.asarray(graph.log_density(params, table), np.float64)
    probabilities = np.exp(logits - logits.max())
    probabilities /= probabilities.sum()
    last = _last_draws(graph, params, clamped)
    free = list(last)
    states = np.concatenate([table[b] for b in free], axis=1)
    drawn = np.concatenate([last[b] for b in free], axis=1)
    lookup = {tuple(s): i for i, s in enumerate(states.tolist())}
    assert len(lookup) == len(states)
    _assert_frequencies(np.array([lookup[tuple(d)] for d in drawn.tolist()]), probabilities)


@pytest.mark.parametrize("variance", ["unit", "learned"])
def test_law_of_a_gaussian_bernoulli_machine(variance):
    graph = layered(v=Gaussian(3, variance=variance), h=Bernoulli(2))
    params = graph.init(jax.random.key(0))
    if variance == "learned":  # means 0.5, variances 2: eta = (0.25, -0.25)
        params["v"] = jnp.stack([jnp.full(3, 0.25), jnp.full(3, -0.25)], axis=-1)
    params |= {"h": jnp.array([0.3, -0.4]), "v:h": jnp.array([[0.8, -0.5], [0.2, 0.6], [-0.7, 0.1]])}
    hidden = np.array(list(itertools.product([0.0, 1.0], repeat=2)))
    logits = np.asarray(-graph.free_energy(params, {"h": jnp.array(hidden)}), np.float64)
    weights = np.exp(logits - logits.max())
    weights /= weights.sum()
    last = _last_draws(graph, params, {})
    _assert_frequencies((last["h"] @ [2, 1]).astype(int), weights)
    # v given h is Gaussian, so v's law is a mixture with these two moments
    law = graph.conditional(params, {"h": jnp.array(hidden)}, "v")
    mean, variance_of = np.asarray(law.mean), np.asarray(law.variance)
    first = weights @ mean
    second = weights @ (variance_of + mean**2)
    moments = np.stack([last["v"], last["v"] ** 2], axis=1)
    assert_rows_law(moments, np.stack([first, second]))


def test_posteriors_of_many_rows():
    """One run, many rows of ``v``: each row's ``h`` follows its own conditional, which is exact."""
    v = np.array(list(itertools.product([0.0, 1.0], repeat=4)))
    exact = np.asarray(RBM.mean(PARAMS, {"v": jnp.array(v)}, "h"))
    drawn = draws(sampler(RBM, 1, 3000), jax.random.key(5), PARAMS, v=v)["h"][:, 0]
    assert_law(drawn.mean(0), exact, np.sqrt(exact * (1 - exact) / len(drawn)))
