# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Random graphs and trained models through conditioning, marginalisation, splitting and stacking."""

import itertools

from hypothesis import given, settings, strategies as st
import numpy as np
import pytest
from surgery_tools import STARS, check_condition, check_marginal, families, graphs, star
import zoo

import jax.numpy as jnp

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Binomial,
    Categorical,
    Factor,
    FactorGraph,
    Family,
    Spin,
    exact,
    layered,
    marginalize,
)
from ebmpp.graph import split, stack
from helpers import assert_law, enumerate_numpy, random_params

FIT = {"rng_key": zoo.KEY, "num_steps": 20, "progress_bar": False, "estimator": ebmpp.CD()}


@settings(max_examples=12)
@given(families(3), st.lists(families(1), min_size=1, max_size=3), st.integers(0, 99))
def test_marginals_of_random_stars(hidden: Family, leaves: list[Family], seed: int) -> None:
    leaves = [Spin(1) if isinstance(f, Binomial) else f for f in leaves]
    check_marginal(star(hidden, *leaves), seed)


@pytest.mark.parametrize("name", ["counts", "gaussian"])
def test_marginals_of_stars(name: str) -> None:
    check_marginal(star(*STARS[name]), scale=0.2 if name == "gaussian" else 0.8)


def test_paired_units_are_summed_out_pair_by_pair() -> None:
    energy = lambda w, a, h: -jnp.vdot(w, a * h[::-1])
    factor = Factor("a", "h", init=np.ones(5), energy=energy, name="noise")
    check_marginal(
        FactorGraph({"a": Spin(5)}, {"h": Bernoulli(5)}, [Bias("a"), Bias("h"), factor]), scale=1.0
    )


def test_chain_is_eliminated_block_by_block() -> None:
    names = "abcde"
    factors = [*map(Bias, names), *(Bilinear(*e) for e in itertools.pairwise(names))]
    graph = FactorGraph({b: Categorical(1, 3) for b in names}, factors=factors)
    params = random_params(graph, scale=1.0)
    rest, theirs = marginalize(graph, tuple("bdc"), params=params)
    assert rest.edges == {("a", "e")} and set(theirs) == {"a", "e", "c"}
    states, probs, log_z = enumerate_numpy(graph, params)
    np.testing.assert_allclose(exact.log_partition(rest, theirs), log_z, rtol=1e-5)
    listed, weights = exact.probabilities(rest, theirs)
    table, expected = np.zeros((3, 3)), np.zeros((3, 3))
    table[listed["a"][:, 0], listed["e"][:, 0]] = weights
    for state, p in zip(states, probs, strict=True):
        expected[state["a"][0], state["e"][0]] += p
    np.testing.assert_allclose(table, expected, atol=1e-6)


def test_split_model_without_latents_has_unbiased_estimates() -> None:
    rbm, params = zoo.graph("rbm"), zoo.params("rbm")
    pieces, theirs = split(rbm, "v", params=params)
    visible, theirs = marginalize(pieces, "h", params=theirs, name="all")
    assert visible.layers == (("v_0",), ("v_1",), ("v_2",), ("v_3",)) and not visible.latent
    fn = lambda x: jnp.concatenate([x[f"v_{i}"] for i in range(4)])
    result = ebmpp.unbiased_expectation(visible, theirs, fn, rng_key=zoo.KEY, num_pairs=2000, k=2)
    assert_law(result.value, zoo.moments("rbm")["v"], result.standard_error)


@settings(max_examples=15)
@given(graphs(), st.integers(0, 99), st.booleans())
def test_conditioned_random_graphs(graph: FactorGraph, seed: int, partial: bool) -> None:
    check_condition(graph, seed, partial)


def test_stack_of_trained_machines_can_be_trained() -> None:
    rows = ebmpp.data.bars_and_stripes(3)
    lower, upper = layered(v=Bernoulli(9), h=Bernoulli(4)), layered(h=Bernoulli(4), g=Bernoulli(3))
    first = ebmpp.fit(lower, rows, **FIT).params
    second = ebmpp.fit(upper, np.float32(lower.mean(first, {"v": rows}, "h") > 0.5), **FIT).params
    deep, params = stack(lower, upper, params=[first, second])
    estimator = ebmpp.PCD(num_chains=10, posterior=ebmpp.estimators.MeanField(5))
    fit = ebmpp.fit(deep, rows, params=params, **{**FIT, "estimator": estimator})
    assert np.isfinite(fit.params["h:g"]).all()
