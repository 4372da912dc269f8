# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

import itertools

from hypothesis import given, settings, strategies as st
import numpy as np
import pytest
from surgery_tools import families

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Binomial,
    Categorical,
    Exponential,
    Factor,
    FactorGraph,
    Family,
    Gaussian,
    Poisson,
    Spin,
    exact,
    layered,
    marginalize,
)
from ebmpp.errors import DeclarationError, IntractableError, StateError
from ebmpp.graph import split
from ebmpp.graph.transforms import marginalize as elimination
from helpers import assert_law, enumerate_numpy, random_params, random_state, slow


def star(hidden: Family, *leaves: Family) -> FactorGraph:
    """A block in the middle, which nobody sees, and others around it."""
    visible = dict(zip("abcd", leaves, strict=False))
    factors = [*map(Bias, [*visible, "h"]), *(Bilinear(b, "h") for b in visible)]
    return FactorGraph(visible, {"h": hidden}, factors)


def check(graph: FactorGraph, seed: int = 0, scale: float = 0.4, rows: int = 16) -> None:
    """The density of the rest and its gradient are those of the graph with h summed out."""
    params = random_params(graph, seed, scale)
    made, theirs = marginalize(graph, "h", params=params)
    kept = {b: random_state(f, seed=i, rows=(rows,)) for i, (b, f) in enumerate(made.families.items())}
    wanted = jax.jit(lambda p: graph.marginal(p, kept, "h"))(params)
    scale = max(1.0, float(jnp.abs(wanted).max()))
    np.testing.assert_allclose(jax.jit(made.log_density)(theirs, kept), wanted, atol=1e-5 * scale)
    gradient = jax.jit(jax.grad(lambda p: graph.marginal(p, kept, "h").sum()))(params)
    new = jax.jit(jax.grad(lambda p: made.log_density(p, kept).sum()))(theirs)
    new = {**{n: v for n, v in new.items() if n != "h"}, **new["h"]}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * scale), new, dict(gradient)
    )


@pytest.mark.slow
@settings(max_examples=12)
@given(families(3), st.lists(families(1), min_size=1, max_size=3), st.integers(0, 99))
def test_any_star_of_small_blocks(hidden: Family, leaves: list[Family], seed: int) -> None:
    leaves = [Spin(1) if isinstance(f, Binomial) else f for f in leaves]
    check(star(hidden, *leaves), seed)


STARS = {
    "finite": (Bernoulli(3), Bernoulli(1), Spin(1), Categorical(1, 3)),
    "counts": (Poisson(2), Binomial(1, total_count=1), Bernoulli(1)),
    "gaussian": (Gaussian(2), Gaussian(1, variance="learned"), Gaussian(1, variance="learned"), Spin(1)),
}


@pytest.mark.parametrize("name", ["finite", *(slow(n) for n in ("counts", "gaussian"))])
def test_the_density_of_the_rest(name: str) -> None:
    check(star(*STARS[name]), scale=0.2 if name == "gaussian" else 0.8)


@pytest.mark.slow
def test_units_that_are_paired_are_summed_out_pair_by_pair() -> None:
    noisy = Factor("a", "h", init=np.ones(5), energy=lambda w, a, h: -jnp.vdot(w, a * h[::-1]), name="noise")
    check(FactorGraph({"a": Spin(5)}, {"h": Bernoulli(5)}, [Bias("a"), Bias("h"), noisy]), scale=1.0)


def test_a_block_without_neighbours_leaves_its_normaliser() -> None:
    graph = FactorGraph({"a": Spin(2)}, {"h": Exponential(2)}, [Bias("a"), Bias("h", name="rate")])
    params = random_params(graph)
    made, theirs = marginalize(graph, "h", params=params)
    assert set(theirs) == {"a", "h"} and made.edges == set()
    spins = np.logaddexp(params["a"], -params["a"]).sum()
    expected = spins - np.log(-params["rate"]).sum()
    np.testing.assert_allclose(exact.log_partition(made, theirs), expected, rtol=1e-6)
    np.testing.assert_allclose(-made.free_energy(theirs, {}), expected, rtol=1e-6)


@pytest.mark.slow
def test_a_chain_is_eliminated_block_by_block() -> None:
    names = "abcde"
    graph = FactorGraph(
        {b: Categorical(1, 3) for b in names},
        factors=[*map(Bias, names), *(Bilinear(*e) for e in itertools.pairwise(names))],
    )
    params = random_params(graph, scale=1.0)
    made, theirs = marginalize(graph, tuple("bdc"), params=params)
    assert made.edges == {("a", "e")} and set(theirs) == {"a", "e", "c"}
    states, probs, log_z = enumerate_numpy(graph, params)
    np.testing.assert_allclose(exact.log_partition(made, theirs), log_z, rtol=1e-5)
    listed, given = exact.probabilities(made, theirs)
    table, wanted = np.zeros((3, 3)), np.zeros((3, 3))
    table[listed["a"][:, 0], listed["e"][:, 0]] = given
    for state, p in zip(states, probs, strict=True):
        wanted[state["a"][0], state["e"][0]] += p
    np.testing.assert_allclose(table, wanted, atol=1e-6)


@pytest.mark.slow
def test_a_machine_over_few_pixels_becomes_fully_visible() -> None:
    rbm = layered(v=Bernoulli(4), h=Bernoulli(3))
    params = random_params(rbm, scale=1.0)
    apart, theirs = split(rbm, "v", params=params)
    made, theirs = marginalize(apart, "h", params=theirs, name="all")
    assert made.layers == (("v_0",), ("v_1",), ("v_2",), ("v_3",)) and not made.latent
    states, probs, _ = enumerate_numpy(rbm, params)
    mean = np.tensordot(probs, [s["v"] for s in states], 1)
    units = lambda x: jnp.concatenate([x[f"v_{i}"] for i in range(4)])
    # the coupled chains of the new graph have the law of the old one
    est = ebmpp.unbiased_expectation(made, theirs, units, rng_key=jax.random.key(0), num_pairs=2000, k=2)
    assert_law(est.value, mean, est.standard_error)


def test_what_has_no_graph_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    rbm = layered(v=Bernoulli(4), h=Bernoulli(3))
    with pytest.raises(IntractableError, match="unit 0 of block 'h' depends on 4 units of block 'v', which"):
        marginalize(rbm, "h")
    with pytest.raises(IntractableError, match="'h' .Gaussian.2.*not affine .*'b': Gaussian.1.*learned"):
        marginalize(star(Gaussian(2), Spin(1), Gaussian(1)), "h")
    monkeypatch.setattr(elimination, "_MOST_ENTRIES", 17)
    wide = FactorGraph(
        {b: Categorical(1, 3) for b in "ab"}, {"h": Bernoulli(2)}, [Bilinear("a", "h"), Bilinear("b", "h")]
    )
    with pytest.raises(IntractableError, match="table of 18 entries over the joint values of"):
        marginalize(wide, "h")
    with pytest.raises(DeclarationError, match="'a' is the last block; graph.marginal"):
        marginalize(FactorGraph({"a": Spin(1)}, factors=[Bias("a")]), "a")
    with pytest.raises(StateError, match="unknown block 'w'"):
        marginalize(rbm, "w")
    with pytest.raises(DeclarationError, match="name is that of one factor"):
        marginalize(rbm, ["v", "h"], name="x")
    with pytest.raises(DeclarationError, match="two factors are named 'a'"):
        marginalize(star(Bernoulli(1), Spin(1)), "h", name="a")
