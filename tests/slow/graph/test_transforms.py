# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Random graphs and trained models through conditioning, marginalisation, splitting and stacking."""

import itertools

from hypothesis import given, settings, strategies as st
import numpy as np
from oracle import enumerate_numpy
import pytest
from surgery_tools import STARS, check_condition, check_marginal, families, graphs, star

import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Bias, Bilinear, Binomial, Categorical, FactorGraph, Family, Spin, exact
from helpers import random_params


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
    factor = ebmpp.Factor("a", "h", init=np.ones(5), energy=energy, name="noise")
    check_marginal(
        FactorGraph({"a": Spin(5)}, {"h": Bernoulli(5)}, [Bias("a"), Bias("h"), factor]), scale=1.0
    )


def test_chain_is_eliminated_block_by_block() -> None:
    names = "abcde"
    factors = [*map(Bias, names), *(Bilinear(*e) for e in itertools.pairwise(names))]
    graph = FactorGraph({b: Categorical(1, 3) for b in names}, factors=factors)
    params = random_params(graph, scale=1.0)
    rest, theirs = ebmpp.marginalize(graph, tuple("bdc"), params=params)
    assert rest.edges == {("a", "e")} and set(theirs) == {"a", "e", "c"}
    states, probs, log_z = enumerate_numpy(graph, params)
    np.testing.assert_allclose(exact.log_partition(rest, theirs), log_z, rtol=1e-5)
    listed, weights = exact.probabilities(rest, theirs)
    table, expected = np.zeros((3, 3)), np.zeros((3, 3))
    table[listed["a"][:, 0], listed["e"][:, 0]] = weights
    for state, p in zip(states, probs, strict=True):
        expected[state["a"][0], state["e"][0]] += p
    np.testing.assert_allclose(table, expected, atol=1e-6)


@settings(max_examples=15)
@given(graphs(), st.integers(0, 99), st.booleans())
def test_conditioned_random_graphs(graph: FactorGraph, seed: int, partial: bool) -> None:
    check_condition(graph, seed, partial)
