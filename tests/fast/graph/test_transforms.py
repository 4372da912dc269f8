# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Conditioning, splitting, renaming, merging and stacking of graphs and their params."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from surgery_tools import check_condition
import zoo

import jax

from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Binomial,
    Categorical,
    Factor,
    FactorGraph,
    Gaussian,
    Observed,
    Spin,
    condition,
    layered,
)
from ebmpp.errors import DeclarationError, ParameterError, StateError
from ebmpp.graph import merge, rename, split, stack
from helpers import gated, random_params, random_state, slow

# -- conditioning ----------------------------------------------------------------------------------


@pytest.mark.parametrize("partial", [slow(False), True])
def test_conditioning_keeps_the_joint_density(partial: bool) -> None:
    blocks = {"a": Categorical(1, 3), "b": Binomial(2, total_count=2), "c": Spin(2)}
    gate = Factor("a", "b", "c", init=np.full((3, 2, 2), 0.1), energy=third_order, name="gate")
    factors = [*map(Bias, "abc"), Bilinear("a", "b"), Bilinear("b", "c"), gate]
    check_condition(FactorGraph(blocks, factors=factors), 4, partial)


def third_order(weight: jax.Array, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    return -jax.numpy.einsum("ijk,i,j,k", weight, a.ravel(), b, c)


def test_conditioned_graphs_compare_by_value_and_compose() -> None:
    rbm, params = zoo.graph("rbm"), zoo.params("rbm")
    v = np.float32([1, 0, 1, 0])
    rest = condition(rbm, v=v)
    assert rest == condition(rbm, v=v.astype(int)) and hash(rest) == hash(condition(rbm, v=v))
    assert rest != condition(rbm, v=1 - v) and condition(rbm) is rbm
    assert condition(rbm, v=Observed(v, np.zeros(4, bool))) == rbm
    twice = condition(condition(rbm, v=Observed(v, v > 0)), v=v[1::2])
    expected = rbm.free_energy(params, v)
    for graph in (rest, twice):
        np.testing.assert_allclose(graph.free_energy(params, {}), expected, rtol=1e-6)
    apart = condition(zoo.graph("deep"), h1=np.ones(3))
    assert apart.edges == set() and list(apart.visible) == ["v"] and list(apart.latent) == ["h2"]


VALUES = [
    ({"w": np.zeros(4)}, StateError, "unknown block 'w'"),
    ({"v": np.zeros((5, 4))}, StateError, r"leading axes \(5,\)"),
    ({"v": np.full(4, 2.0)}, StateError, "block 'v' .* got 2.0"),
    ({"v": np.zeros(4), "h": np.zeros(3)}, DeclarationError, "no unit is left"),
]


@pytest.mark.parametrize(("values", "error", "message"), VALUES)
def test_wrong_values(values: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        condition(zoo.graph("rbm"), **values)


def test_traced_values_are_refused() -> None:
    free_energy = lambda v: condition(zoo.graph("rbm"), v=v).free_energy(zoo.params("rbm"), {})
    with pytest.raises(StateError, match="block 'v' is traced"):
        jax.jit(free_energy)(np.zeros(4))


# -- splitting -------------------------------------------------------------------------------------


def gate(w: jax.Array, v: jax.Array, y: jax.Array) -> jax.Array:
    return v[..., 0].sum() * (w @ y[:, 1])


def shared() -> FactorGraph:
    factors = [Bias("v", shared=(1,)), Bias("h", shared=(0,)), Bilinear("v", "h")]
    return FactorGraph({"v": Bernoulli((2, 3))}, {"h": Bernoulli(4)}, factors)


def learned() -> FactorGraph:
    custom = Factor("v", "y", init=np.ones(2), name="gate", energy=gate)
    factors = [Bias("v", name="field"), Bias("y"), Bilinear("y", "v"), custom]
    return FactorGraph({"v": Gaussian((2, 2), variance="learned")}, {"y": Categorical(2, 3)}, factors)


SPLITS = {
    "units": (shared, "h", None),
    "pieces": (shared, "v", {"a": [0, 4], "b": [2, 3, 1, 5]}),
    "one piece": (shared, "v", {"all": range(6)}),
    "learned": (learned, "v", {"even": np.eye(2, dtype=bool), "odd": ~np.eye(2, dtype=bool)}),
}


@pytest.mark.parametrize("name", ["units", "pieces", "learned", slow("one piece")])
def test_split_blocks_keep_the_density(name: str) -> None:
    """Also where units share a bias, which stays one param."""
    declare, block, into = SPLITS[name]
    graph = declare()
    params = random_params(graph, 6, scale=0.2)
    pieces, theirs = split(graph, block, into, params=params)
    assert split(graph, block, into) == pieces
    pieces.check(theirs)
    if name != "learned":
        assert theirs[block].shape == params[block].shape == pieces.param_shapes[block].shape
    x = {b: random_state(f, seed=5, rows=(4,)) for b, f in graph.families.items()}
    flat = x[block].reshape(4, -1)
    places = {f"{block}_{i}": [i] for i in range(flat.shape[1])} if into is None else into
    units = {b: np.flatnonzero(u) if np.asarray(u).dtype == bool else list(u) for b, u in places.items()}
    state = {b: v for b, v in x.items() if b != block} | {b: flat[:, u] for b, u in units.items()}
    actual, expected = pieces.log_density(theirs, state), graph.log_density(params, x)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_by_default_every_unit_is_a_block() -> None:
    params = zoo.params("rbm")
    units, theirs = split(zoo.graph("rbm"), "h", params=params)
    assert list(units.latent) == ["h_0", "h_1", "h_2"] and units.layers == (("v",), ("h_0", "h_1", "h_2"))
    np.testing.assert_array_equal(theirs["v:h_1"][:, 0], params["v:h"][:, 1])
    np.testing.assert_array_equal(theirs["h_0"], params["h"][:1])


def test_bias_that_no_two_units_share_is_split() -> None:
    graph = FactorGraph({"v": Spin((1, 2))}, factors=[Bias("v", shared=(0,))])
    units, theirs = split(graph, "v", params={"v": np.array([[1.0, 2.0]])})
    assert units.factors == (Bias("v_0_0"), Bias("v_0_1")) and not units.edges
    assert theirs["v_0_1"].tolist() == [2.0]


def from_key(key: jax.Array) -> jax.Array:
    return jax.random.normal(key, (2, 3))


@pytest.mark.parametrize("init", [np.arange(6.0).reshape(2, 3), from_key], ids=["array", "function"])
def test_split_biases_keep_their_init(init: Any) -> None:
    graph = FactorGraph({"v": Categorical(2, 3)}, {"h": Spin(1)}, [Bias("v", init=init), Bilinear("v", "h")])
    pieces = split(graph, "v", {"last": [1], "first": [0]})
    expected = np.asarray(init(zoo.KEY) if callable(init) else init)
    factors = {f.name: f for f in pieces.factors}
    for name, i in (("last", 1), ("first", 0)):
        np.testing.assert_array_equal(factors[name].init_params(zoo.KEY, pieces.families), expected[[i]])
    assert pieces == split(graph, "v", {"last": [1], "first": [0]})


# -- names, and several graphs -----------------------------------------------------------------------


def test_renaming_keeps_the_energy() -> None:
    rbm, params = zoo.graph("rbm"), zoo.params("rbm")
    renamed, theirs = rename(rbm, {"v": "h", "h": "v"}, factors={"v": "field"}, params=params)
    assert renamed.factors == (Bias("h", name="field"), Bias("v"), Bilinear("h", "v"))
    x = {b: random_state(f, seed=2) for b, f in rbm.families.items()}
    energy = renamed.energy(theirs, {"h": x["v"], "v": x["h"]})
    np.testing.assert_allclose(energy, rbm.energy(params, x), rtol=1e-6)
    assert rename(gated(), {"a": "x"}).factors[-1].name == "x:b:c"
    assert rename(renamed, {"v": "h", "h": "v"}, factors={"field": "v"}) == rbm


def test_merged_energies_add() -> None:
    rbm, params = zoo.graph("rbm"), zoo.params("rbm")
    labels = FactorGraph({"y": Categorical(1, 3)}, {"h": Bernoulli(3)}, [Bias("y"), Bilinear("y", "h")])
    others = random_params(labels, seed=7)
    merged, theirs = merge(rbm, labels, params=[params, others])
    assert list(merged.visible) == ["v", "y"] and list(merged.latent) == ["h"]
    x = {b: random_state(f, seed=2) for b, f in merged.families.items()}
    energies = [g.energy(p, {b: x[b] for b in g.families}) for g, p in ((rbm, params), (labels, others))]
    np.testing.assert_allclose(merged.energy(theirs, x), sum(map(float, energies)), rtol=1e-5)


def test_stack_is_the_deep_model() -> None:
    rbm, params = zoo.graph("rbm"), zoo.params("rbm")
    upper = layered(h=Bernoulli(3), g=Bernoulli(4))
    others = random_params(upper, seed=7)
    stacked, theirs = stack(rbm, upper, params=[params, others])
    deep = layered(v=Bernoulli(4), h=Bernoulli(3), g=Bernoulli(4))
    assert (stacked.visible, stacked.latent, stacked.edges) == (deep.visible, deep.latent, deep.edges)
    assert set(stacked.factors) == set(deep.factors)
    np.testing.assert_allclose(theirs["h"], (np.asarray(params["h"]) + np.asarray(others["h"])) / 2)
    np.testing.assert_array_equal(theirs["h:g"], others["h:g"])
    deep.check(theirs)


def bias(block: str, family: Any, name: str | None = None) -> FactorGraph:
    return FactorGraph({block: family}, factors=[Bias(block, name=name or block)])


CALLS: dict[str, tuple[Callable[[FactorGraph, dict], Any], type[Exception], str]] = {
    "missing": (lambda g, p: split(g, "v", params={"v": p["v"]}), ParameterError, "lacks factor 'h'"),
    "shape": (lambda g, p: split(g, "v", params=p | {"v": np.zeros(5)}), ParameterError, r"'v': .* \(5,\)"),
    "partition": (lambda g, p: split(g, "v", {"a": [0], "b": [0, 1]}), DeclarationError, r"'b': \[0, 1\]"),
    "block there": (lambda g, p: split(g, "v", {"h": range(4)}), DeclarationError, "block 'h' is there"),
    "split unknown": (lambda g, p: split(g, "w"), StateError, "unknown block 'w'"),
    "same blocks": (lambda g, p: rename(g, {"v": "h"}), DeclarationError, "both be named 'h'"),
    "same factors": (
        lambda g, p: rename(g, {}, factors={"v": "b", "h": "b"}),
        DeclarationError,
        "both be named 'b'",
    ),
    "unknown factor": (lambda g, p: rename(g, {}, factors={"w": "u"}), DeclarationError, "factor .* 'w'"),
    "unknown block": (lambda g, p: rename(g, {"w": "u"}), StateError, "unknown block 'w'"),
    "same graph": (lambda g, p: merge(g, g), DeclarationError, "factor named 'v'"),
    "families": (lambda g, p: merge(g, bias("h", Spin(2), "x")), DeclarationError, "block 'h' is Bern"),
    "params": (lambda g, p: merge(g, bias("y", Spin(2)), params=[p]), ValueError, "2 graphs, not of 1"),
    "no graph": (lambda g, p: merge(), DeclarationError, "at least one graph"),
    "stack": (lambda g, p: stack(g, layered(v=Bernoulli(4), g=Bernoulli(2))), DeclarationError, "block 'v'"),
}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_arguments(name: str) -> None:
    call, error, message = CALLS[name]
    with pytest.raises(error, match=message):
        call(zoo.graph("rbm"), zoo.params("rbm"))
