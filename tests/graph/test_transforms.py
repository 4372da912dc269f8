# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Conditioning, splitting, marginalising, renaming, merging and stacking of graphs and
their params.

Tests contrib/graphs.py, graph/transforms/condition.py, graph/transforms/marginalize.py.
"""

import itertools
from typing import Any

import numpy as np
from oracle import enumerate_numpy
import pytest
import zoo

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Categorical,
    FactorGraph,
    Family,
    Spin,
    condition,
    marginalize,
)
from ebmpp.contrib.graphs import merge, rename, split, stack
from ebmpp.errors import IntractableError, StateError
from ebmpp.graph.transforms import marginalize as elimination
from helpers import gated, nightly, often, random_params, random_state

#: a latent block, and its visible neighbours
STARS = {
    "finite": (Bernoulli(2), Spin(1), Categorical(1, 3)),
    "counts": (ebmpp.Poisson(2), ebmpp.Binomial(1, total_count=1), Bernoulli(1)),
    "gaussian": (
        ebmpp.Gaussian(2),
        *[ebmpp.Gaussian(1, variance="learned")] * 2,
        Spin(1),
    ),
}


def star(hidden: Family, *leaves: Family) -> FactorGraph:
    """A latent block ``h`` and visible blocks around it."""
    visible = dict(zip("abcd", leaves, strict=False))
    factors = [*map(Bias, [*visible, "h"]), *(Bilinear(b, "h") for b in visible)]
    return FactorGraph(visible, {"h": hidden}, factors)


def check_marginal(graph: FactorGraph, seed: int = 0, scale: float = 0.4) -> None:
    """The density and its gradient agree with the graph with h summed out."""
    params = random_params(graph, seed, scale)
    rest, theirs = marginalize(graph, "h", params=params)
    x = {
        b: random_state(f, seed=i, rows=(16,))
        for i, (b, f) in enumerate(rest.families.items())
    }

    @jax.jit
    def derive(params: dict, theirs: dict) -> tuple:
        expected = lambda p: graph.log_marginal(p, x, "h")
        actual = lambda p: rest.log_density(p, x)
        slopes = [
            jax.grad(lambda p, f=f: f(p).sum())(p)
            for f, p in ((actual, theirs), (expected, params))
        ]
        return actual(theirs), expected(params), *slopes

    actual, expected, slope, expected_slope = jax.device_get(derive(params, theirs))
    size = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(actual, expected, atol=1e-5 * size)
    slope = {**{n: v for n, v in slope.items() if n != "h"}, **slope["h"]}
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * size)
    jax.tree.map(close, slope, dict(expected_slope))


def check_condition(graph: FactorGraph, seed: int, partial: bool) -> None:
    """Conditioning on the first block, and on a unit of the second, keeps the joint density."""
    params = random_params(graph, seed)
    first, second, *_ = graph.families
    x = {
        b: random_state(f, seed + i, (4,))
        for i, (b, f) in enumerate(graph.families.items())
    }
    x[first] = np.repeat(x[first][:1], 4, 0)
    values: dict[str, Any] = {first: x[first][0]}
    rest = {b: v for b, v in x.items() if b != first}
    if partial and graph.families[second].size > 1:
        x[second][:, 0] = x[second][0, 0]
        values[second] = ebmpp.Observed(
            x[second][0], np.arange(graph.families[second].size) == 0
        )
        rest[second] = x[second][:, 1:]
    conditioned = condition(graph, **values)
    derive = jax.jit(
        lambda p: (conditioned.log_density(p, rest), graph.log_density(p, x))
    )
    np.testing.assert_allclose(*derive(params), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("partial", [nightly(False), True])
def test_conditioning_keeps_the_joint_density(partial: bool) -> None:
    blocks = {
        "a": Categorical(1, 3),
        "b": ebmpp.Binomial(2, total_count=2),
        "c": Spin(2),
    }
    gate = ebmpp.Factor(
        "a", "b", "c", init=np.full((3, 2, 2), 0.1), energy=third_order, name="gate"
    )
    factors = [*map(Bias, "abc"), Bilinear("a", "b"), Bilinear("b", "c"), gate]
    check_condition(FactorGraph(blocks, factors=factors), 4, partial)


def third_order(
    weight: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array
) -> jax.Array:
    return -jax.numpy.einsum("ijk,i,j,k", weight, a.ravel(), b, c)


def test_conditioned_graphs_compare_by_value_and_compose() -> None:
    rbm, params = zoo.graph("rbm"), zoo.params("rbm")
    v = np.float32([1, 0, 1, 0])
    rest = condition(rbm, v=v)
    assert rest == condition(rbm, v=v.astype(int)) and hash(rest) == hash(
        condition(rbm, v=v)
    )
    assert rest != condition(rbm, v=1 - v) and condition(rbm) is rbm
    assert condition(rbm, v=ebmpp.Observed(v, np.zeros(4, bool))) == rbm
    twice = condition(condition(rbm, v=ebmpp.Observed(v, v > 0)), v=v[1::2])
    expected = rbm.free_energy(params, v)
    for graph in (rest, twice):
        np.testing.assert_allclose(graph.free_energy(params, {}), expected, rtol=1e-6)
    deep = condition(zoo.graph("deep"), h1=np.ones(3))
    assert (deep.edges, list(deep.visible), list(deep.latent)) == (set(), ["v"], ["h2"])


def test_traced_values_are_refused() -> None:
    free_energy = lambda v: condition(zoo.graph("rbm"), v=v).free_energy(
        zoo.params("rbm"), {}
    )
    with pytest.raises(StateError, match="block 'v'.*traced"):
        jax.jit(free_energy)(np.zeros(4))


def gate(w: jax.Array, v: jax.Array, y: jax.Array) -> jax.Array:
    return v[..., 0].sum() * (w @ y[:, 1])


def shared() -> FactorGraph:
    factors = [Bias("v", shared=(1,)), Bias("h", shared=(0,)), Bilinear("v", "h")]
    return FactorGraph({"v": Bernoulli((2, 3))}, {"h": Bernoulli(4)}, factors)


def learned() -> FactorGraph:
    custom = ebmpp.Factor("v", "y", init=np.ones(2), name="gate", energy=gate)
    factors = [Bias("v", name="field"), Bias("y"), Bilinear("y", "v"), custom]
    return FactorGraph(
        {"v": ebmpp.Gaussian((2, 2), variance="learned")},
        {"y": Categorical(2, 3)},
        factors,
    )


SPLITS = {
    "units": (shared, "h", None),
    "pieces": (shared, "v", {"a": [0, 4], "b": [2, 3, 1, 5]}),
    "one piece": (shared, "v", {"all": range(6)}),
    "learned": (
        learned,
        "v",
        {"even": np.eye(2, dtype=bool), "odd": ~np.eye(2, dtype=bool)},
    ),
}


@pytest.mark.parametrize("name", often(SPLITS, "pieces"))
def test_split_blocks_keep_the_density(name: str) -> None:
    """Also where units share a bias, which stays one param."""
    declare, block, into = SPLITS[name]
    graph = declare()
    params = random_params(graph, 6, scale=0.2)
    pieces, theirs = split(graph, block, into, params=params)
    assert split(graph, block, into) == pieces
    pieces.check(theirs)
    if name != "learned":
        assert (
            theirs[block].shape
            == params[block].shape
            == pieces.param_shapes[block].shape
        )
    x = {b: random_state(f, seed=5, rows=(4,)) for b, f in graph.families.items()}
    flat = x[block].reshape(4, -1)
    places = (
        {f"{block}_{i}": [i] for i in range(flat.shape[1])} if into is None else into
    )
    units = {
        b: np.flatnonzero(u) if np.asarray(u).dtype == bool else list(u)
        for b, u in places.items()
    }
    state = {b: v for b, v in x.items() if b != block} | {
        b: flat[:, u] for b, u in units.items()
    }
    actual, expected = pieces.log_density(theirs, state), graph.log_density(params, x)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_by_default_every_unit_is_a_block() -> None:
    params = zoo.params("rbm")
    units, theirs = split(zoo.graph("rbm"), "h", params=params)
    assert list(units.latent) == ["h_0", "h_1", "h_2"] and units.layers == (
        ("v",),
        ("h_0", "h_1", "h_2"),
    )
    np.testing.assert_array_equal(theirs["v:h_1"][:, 0], params["v:h"][:, 1])
    np.testing.assert_array_equal(theirs["h_0"], params["h"][:1])


def test_split_biases_keep_their_init() -> None:
    init = lambda key: jax.random.normal(key, (2, 3))
    graph = FactorGraph(
        {"v": Categorical(2, 3)},
        {"h": Spin(1)},
        [Bias("v", init=init), Bilinear("v", "h")],
    )
    pieces = split(graph, "v", {"last": [1], "first": [0]})
    expected = np.asarray(init(zoo.KEY))
    factors = {f.name: f for f in pieces.factors}
    for name, i in (("last", 1), ("first", 0)):
        np.testing.assert_array_equal(
            factors[name].init_params(zoo.KEY, pieces.families), expected[[i]]
        )
    assert pieces == split(graph, "v", {"last": [1], "first": [0]})


@pytest.mark.nightly
def test_density_and_gradient_of_the_rest() -> None:
    check_marginal(star(*STARS["finite"]), scale=0.8)


def test_block_without_neighbours_leaves_its_normaliser() -> None:
    graph = FactorGraph(
        {"a": Spin(2)}, {"h": ebmpp.Exponential(2)}, [Bias("a"), Bias("h", name="rate")]
    )
    params = random_params(graph)
    rest, theirs = marginalize(graph, "h", params=params)
    assert set(theirs) == {"a", "h"} and rest.edges == set()
    bias, rate = np.asarray(params["a"]), np.asarray(params["rate"])
    expected = np.logaddexp(bias, -bias).sum() - np.log(-rate).sum()
    np.testing.assert_allclose(-rest.free_energy(theirs, {}), expected, rtol=1e-6)


def test_marginals_without_a_closed_form_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(elimination, "_MAX_ENTRIES", 17)
    blocks = {b: Categorical(1, 3) for b in "ab"}
    wide = FactorGraph(
        blocks, {"h": Bernoulli(2)}, [Bilinear("a", "h"), Bilinear("b", "h")]
    )
    with pytest.raises(IntractableError, match="got 18"):
        marginalize(wide, "h")


def test_renaming_keeps_the_energy() -> None:
    rbm, params = zoo.graph("rbm"), zoo.params("rbm")
    renamed, theirs = rename(
        rbm, {"v": "h", "h": "v"}, factors={"v": "field"}, params=params
    )
    assert renamed.factors == (Bias("h", name="field"), Bias("v"), Bilinear("h", "v"))
    x = {b: random_state(f, seed=2) for b, f in rbm.families.items()}
    energy = renamed.energy(theirs, {"h": x["v"], "v": x["h"]})
    np.testing.assert_allclose(energy, rbm.energy(params, x), rtol=1e-6)
    assert rename(gated(), {"a": "x"}).factors[-1].name == "x:b:c"
    assert rename(renamed, {"v": "h", "h": "v"}, factors={"field": "v"}) == rbm


def test_merged_energies_add() -> None:
    rbm, params = zoo.graph("rbm"), zoo.params("rbm")
    labels = FactorGraph(
        {"y": Categorical(1, 3)}, {"h": Bernoulli(3)}, [Bias("y"), Bilinear("y", "h")]
    )
    others = random_params(labels, seed=7)
    merged, theirs = merge(rbm, labels, params=[params, others])
    assert list(merged.visible) == ["v", "y"] and list(merged.latent) == ["h"]
    x = {b: random_state(f, seed=2) for b, f in merged.families.items()}
    energies = [
        g.energy(p, {b: x[b] for b in g.families})
        for g, p in ((rbm, params), (labels, others))
    ]
    np.testing.assert_allclose(
        merged.energy(theirs, x), sum(map(float, energies)), rtol=1e-5
    )


def test_stack_is_the_deep_model() -> None:
    rbm, params = zoo.graph("rbm"), zoo.params("rbm")
    upper = ebmpp.layered(h=Bernoulli(3), g=Bernoulli(4))
    others = random_params(upper, seed=7)
    stacked, theirs = stack(rbm, upper, params=[params, others])
    deep = ebmpp.layered(v=Bernoulli(4), h=Bernoulli(3), g=Bernoulli(4))
    assert (stacked.visible, stacked.latent, stacked.edges) == (
        deep.visible,
        deep.latent,
        deep.edges,
    )
    assert set(stacked.factors) == set(deep.factors)
    np.testing.assert_allclose(
        theirs["h"], (np.asarray(params["h"]) + np.asarray(others["h"])) / 2
    )
    np.testing.assert_array_equal(theirs["h:g"], others["h:g"])
    deep.check(theirs)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["counts", "gaussian"])
def test_marginals_of_stars(name: str) -> None:
    check_marginal(star(*STARS[name]), scale=0.2 if name == "gaussian" else 0.8)


@pytest.mark.nightly
def test_paired_units_are_summed_out_pair_by_pair() -> None:
    energy = lambda w, a, h: -jnp.vdot(w, a * h[::-1])
    factor = ebmpp.Factor("a", "h", init=np.ones(5), energy=energy, name="noise")
    graph = FactorGraph(
        {"a": Spin(5)}, {"h": Bernoulli(5)}, [Bias("a"), Bias("h"), factor]
    )
    check_marginal(graph, scale=1.0)


@pytest.mark.nightly
def test_chain_is_eliminated_block_by_block() -> None:
    names = "abcde"
    factors = [*map(Bias, names), *(Bilinear(*e) for e in itertools.pairwise(names))]
    graph = FactorGraph({b: Categorical(1, 3) for b in names}, factors=factors)
    params = random_params(graph, scale=1.0)
    rest, theirs = ebmpp.marginalize(graph, tuple("bdc"), params=params)
    assert rest.edges == {("a", "e")} and set(theirs) == {"a", "e", "c"}
    states, probs, log_z = enumerate_numpy(graph, params)
    np.testing.assert_allclose(
        ebmpp.exact.log_partition(rest, theirs), log_z, rtol=1e-5
    )
    listed, weights = ebmpp.exact.probabilities(rest, theirs)
    table, expected = np.zeros((3, 3)), np.zeros((3, 3))
    table[listed["a"][:, 0], listed["e"][:, 0]] = weights
    for state, p in zip(states, probs, strict=True):
        expected[state["a"][0], state["e"][0]] += p
    np.testing.assert_allclose(table, expected, atol=1e-6)
