# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0

import itertools
from typing import Any

from hypothesis import given, settings, strategies as st
import numpy as np
import pytest
from surgery_tools import PARAMS, RBM, graphs

import jax
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
    Gaussian,
    Observed,
    Poisson,
    Spin,
    condition,
    exact,
    layered,
)
from ebmpp.errors import DeclarationError, ParameterError, StateError
from ebmpp.graph import merge, rename, split, stack
from helpers import enumerate_numpy, gated, random_params, random_state, slow

# -- conditioning ----------------------------------------------------------------------------------


def matching(states: list[dict], given: dict[str, Any]) -> np.ndarray:
    """Which states agree with what is given, at known units."""
    agrees = lambda x, v: np.all((x == v.values) | ~v.known) if isinstance(v, Observed) else np.all(x == v)
    return np.array([all(agrees(x[b], v) for b, v in given.items()) for x in states])


@pytest.mark.slow
@settings(max_examples=15)
@given(graphs(), st.integers(0, 99), st.booleans())
def test_the_rest_of_any_graph_is_summed(graph: FactorGraph, seed: int, partial: bool) -> None:
    check_rest(graph, seed, partial)


@pytest.mark.parametrize("partial", [slow(False), True])
def test_the_rest_is_summed(partial: bool) -> None:
    blocks = {"a": Categorical(1, 3), "b": Binomial(2, total_count=2), "c": Spin(2)}
    check_rest(FactorGraph(blocks, factors=[*map(Bias, "abc"), *chain("abc")]), 4, partial)


def chain(names: str) -> list[Factor]:
    return [Bilinear(*pair) for pair in itertools.pairwise(names)]


def check_rest(graph: FactorGraph, seed: int, partial: bool) -> None:
    params = random_params(graph, seed)
    first, *others = graph.families
    held = {first: random_state(graph.families[first], seed)}
    if partial and graph.families[others[0]].size > 1:
        family = graph.families[others[0]]
        held[others[0]] = Observed(random_state(family, seed + 1), np.arange(family.size) == 0)
    made = condition(graph, **held)
    states, probs, log_z = enumerate_numpy(graph, params)
    among = matching(states, held)
    np.testing.assert_allclose(
        exact.log_partition(made, params), log_z + np.log(probs[among].sum()), rtol=1e-5, atol=1e-5
    )
    for b in made.families:
        x = np.array([s[b].ravel()[-made.families[b].size :] for s, keep in zip(states, among) if keep])
        t = np.asarray(graph.families[b].statistics(jnp.asarray(x)))
        wanted = np.tensordot(probs[among] / probs[among].sum(), t, 1)
        np.testing.assert_allclose(exact.moments(made, params)[b], wanted, atol=2e-5)


@pytest.fixture(scope="module")
def counts() -> FactorGraph:
    """Base measures that are not 1, and a factor of its own over three blocks."""
    blocks = {"v": Poisson(2), "w": Binomial(3, total_count=4)}
    gate = Factor("v", "w", "h", init=0.1 * np.ones((2, 3, 2)), energy=gate_energy, name="gate")
    return FactorGraph(
        blocks, {"h": Spin(2)}, [Bias("v"), Bias("w"), Bias("h"), Bias("w", name="again"), gate]
    )


def gate_energy(weight: jax.Array, v: jax.Array, w: jax.Array, h: jax.Array) -> jax.Array:
    return -jnp.einsum("ijk,i,j,k", weight, v, w, h)


def test_densities_conditionals_and_gradients_are_the_graphs_own(counts: FactorGraph) -> None:
    params = random_params(counts, seed=3, scale=0.2)
    v, w, h = (random_state(f, seed=i) for i, f in enumerate(counts.families.values()))
    made = condition(counts, v=v)
    assert list(made.param_shapes) == list(counts.param_shapes) and made.edges == {("w", "h")}
    x, rest = {"v": v, "w": w, "h": h}, {"w": w, "h": h}
    log_density, gradient = jax.jit(jax.value_and_grad(lambda p: counts.log_density(p, x)))(params)
    given, theirs = jax.jit(jax.value_and_grad(lambda p: made.log_density(p, rest)))(params)
    np.testing.assert_allclose(given, log_density, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), theirs, gradient)
    asked = ((made, {"w": w}), (counts, {"v": v, "w": w}))
    eta = [jax.jit(g.natural_parameters, static_argnums=2)(params, s, "h") for g, s in asked]
    np.testing.assert_allclose(*eta, rtol=1e-5)
    partial = condition(counts, w=Observed(w, np.array([True, False, True])), v=v)
    assert dict(partial.visible) == {"w": Binomial(1, total_count=4)}
    given = jax.jit(partial.log_density)(params, {"w": w[1:2], "h": h})
    np.testing.assert_allclose(given, log_density, rtol=1e-5)


def test_what_is_conditioned_is_a_value_and_trains() -> None:
    v = np.float32([1, 0, 1])
    made = condition(RBM, v=v)
    assert made == condition(RBM, v=v.astype(int)) and hash(made) == hash(condition(RBM, v=v))
    assert made != condition(RBM, v=1 - v) and condition(RBM) is RBM
    assert condition(RBM, v=Observed(v, np.zeros(3, bool))) == RBM
    again = condition(condition(RBM, v=Observed(v, v > 0)), v=v[1:2])
    np.testing.assert_allclose(again.free_energy(PARAMS, {}), made.free_energy(PARAMS, {}), rtol=1e-6)
    both = condition(layered(v=Bernoulli(2), h=Bernoulli(2), g=Bernoulli(2)), h=np.ones(2))
    assert both.edges == set() and list(both.visible) == ["v"] and list(both.latent) == ["g"]


def test_what_cannot_be_conditioned_is_told() -> None:
    with pytest.raises(StateError, match="unknown block 'w'; there is 'v', 'h'"):
        condition(RBM, w=np.zeros(3))
    with pytest.raises(StateError, match="got leading axes .5,., and a graph is conditioned on one state"):
        condition(RBM, v=np.zeros((5, 3)))
    with pytest.raises(StateError, match="block 'v' .Bernoulli.3.. got 2.0 at index"):
        condition(RBM, v=np.full(3, 2.0))
    with pytest.raises(DeclarationError, match="no unit is left .* graph.log_density is the number"):
        condition(RBM, v=np.zeros(3), h=np.zeros(2))
    with pytest.raises(StateError, match="the value of block 'v' is traced .* clamp the block"):
        jax.jit(lambda v: condition(RBM, v=v).free_energy(PARAMS, {}))(np.zeros(3))


# -- splitting and names ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_split_block_has_the_same_law() -> None:
    graph = FactorGraph(
        {"v": Gaussian((2, 2), variance="learned")},
        {"y": Categorical(2, 3)},
        [Bias("v", name="own"), Bias("y"), Bilinear("y", "v"), gate_of("v", "y")],
    )
    params = random_params(graph, scale=0.2)
    mask = np.array([[True, False], [False, True]])
    made, theirs = split(graph, "v", {"even": mask, "odd": ~mask}, params=params)
    assert list(made.visible) == ["even", "odd"] and theirs["y:odd"].shape == (2, 3, 2)
    assert [f.name for f in made.factors] == ["own:even", "own:odd", "y", "y:even", "y:odd", "gate"]
    x = {b: random_state(f, seed=5, rows=(4,)) for b, f in graph.families.items()}
    pieces = {"even": x["v"][:, mask], "odd": x["v"][:, ~mask], "y": x["y"]}
    values = jax.jit(made.log_density)(theirs, pieces), jax.jit(graph.log_density)(params, x)
    np.testing.assert_allclose(*values, rtol=1e-5, atol=1e-5)


def test_by_default_every_unit_is_a_block() -> None:
    made, theirs = split(RBM, "h", params=PARAMS)
    assert list(made.latent) == ["h_0", "h_1"] and made.layers == (("v",), ("h_0", "h_1"))
    np.testing.assert_array_equal(theirs["v:h_1"][:, 0], PARAMS["v:h"][:, 1])
    np.testing.assert_array_equal(theirs["h_0"], PARAMS["h"][:1])


def gate_of(a: str, b: str) -> Factor:
    return Factor(a, b, init=np.ones(2), name="gate", energy=lambda w, v, y: v[..., 0].sum() * (w @ y[:, 1]))


SHARED = FactorGraph(
    {"v": Bernoulli((2, 3))},
    {"h": Bernoulli(4)},
    [Bias("v", shared=(1,)), Bias("h", shared=(0,)), Bilinear("v", "h")],
)


@pytest.mark.parametrize(
    ("block", "into"), [("h", None), ("v", {"a": [0, 4], "b": [2, 3, 1, 5]}), ("v", {"all": range(6)})]
)
def test_a_bias_that_units_share_stays_one_param(block: str, into: dict[str, Any] | None) -> None:
    params = random_params(SHARED, seed=6)
    made, theirs = split(SHARED, block, into, params=params)
    assert split(SHARED, block, into) == made
    assert theirs[block].shape == params[block].shape == made.param_shapes[block].shape
    made.check(theirs)
    plain = FactorGraph(SHARED.visible, SHARED.latent, [Bias("v"), Bias("h"), Bilinear("v", "h")])
    full = {n: np.broadcast_to(p, plain.param_shapes[n].shape) for n, p in params.items()}
    states, probs, log_z = enumerate_numpy(plain, full)
    np.testing.assert_allclose(exact.log_partition(made, theirs), log_z, rtol=1e-5)
    places = {f"h_{i}": [i] for i in range(4)} if into is None else into
    mean = np.tensordot(probs, np.array([x[block].ravel() for x in states]), 1)
    moments = exact.moments(made, theirs)
    for name, units in places.items():
        np.testing.assert_allclose(moments[name], mean[list(units)], atol=2e-6)


def test_a_bias_that_no_two_units_share_is_split() -> None:
    one = FactorGraph({"v": Spin((1, 2))}, factors=[Bias("v", shared=(0,))])
    made, theirs = split(one, "v", params={"v": np.array([[1.0, 2.0]])})
    assert made.factors == (Bias("v_0_0"), Bias("v_0_1")) and not made.edges
    assert theirs["v_0_1"].tolist() == [2.0]


def from_key(key: jax.Array) -> jax.Array:
    return jax.random.normal(key, (2, 3))


@pytest.mark.parametrize("init", [np.arange(6.0).reshape(2, 3), from_key])
def test_biases_begin_where_they_did(init: Any) -> None:
    graph = FactorGraph({"v": Categorical(2, 3)}, {"h": Spin(1)}, [Bias("v", init=init), Bilinear("v", "h")])
    made = split(graph, "v", {"last": [1], "first": [0]})
    key = jax.random.key(0)
    wanted = np.asarray(init(key) if callable(init) else init)
    for name, i in (("last", 1), ("first", 0)):
        factor = next(f for f in made.factors if f.name == name)
        start = factor.init_params(key, made.families)
        np.testing.assert_array_equal(start, wanted[[i]])
    assert made == split(graph, "v", {"last": [1], "first": [0]}) and hash(made) is not None


def test_params_that_do_not_fit_are_told() -> None:
    with pytest.raises(ParameterError, match="params lacks factor 'h'"):
        split(RBM, "v", params={"v": PARAMS["v"]})
    with pytest.raises(ParameterError, match=r"factor 'v': params have shape \(4,\), expected \(3,\)"):
        split(RBM, "v", params=PARAMS | {"v": np.zeros(4)})


def test_what_is_no_partition_is_told() -> None:
    with pytest.raises(DeclarationError, match=r"each of the 3 units .* got .'a': \[0\], 'b': \[0, 1\]"):
        split(RBM, "v", {"a": [0], "b": [0, 1]})
    with pytest.raises(DeclarationError, match="block 'h' is there already"):
        split(RBM, "v", {"h": [0, 1, 2]})
    with pytest.raises(StateError, match="unknown block 'w'"):
        split(RBM, "w")


def test_names_and_params_go_together() -> None:
    made, theirs = rename(RBM, {"v": "h", "h": "v"}, factors={"v": "own"}, params=PARAMS)
    assert made.factors == (Bias("h", name="own"), Bias("v"), Bilinear("h", "v"))
    x = {b: random_state(f, seed=2) for b, f in RBM.families.items()}
    swapped = {"h": x["v"], "v": x["h"]}
    np.testing.assert_array_equal(jax.jit(made.energy)(theirs, swapped), jax.jit(RBM.energy)(PARAMS, x))
    assert rename(gated(), {"a": "x"}).factors[-1].name == "x:b:c"
    assert rename(made, {"v": "h", "h": "v"}, factors={"own": "v"}) == RBM
    with pytest.raises(DeclarationError, match="blocks 'v' and 'h' would both be named 'h'"):
        rename(RBM, {"v": "h"})
    with pytest.raises(DeclarationError, match="factors 'v' and 'h' would both be named 'b'"):
        rename(RBM, {}, factors={"v": "b", "h": "b"})
    with pytest.raises(DeclarationError, match="no factor is named 'w'; the factors are"):
        rename(RBM, {}, factors={"w": "u"})
    with pytest.raises(StateError, match="unknown block 'w'"):
        rename(RBM, {"w": "u"})
    with pytest.raises(ParameterError, match="params lacks factor 'h'"):
        rename(RBM, {}, params={"v": PARAMS["v"]})


# -- several graphs --------------------------------------------------------------------------------


def test_merged_energies_add() -> None:
    labels = FactorGraph({"y": Categorical(1, 3)}, {"h": Bernoulli(2)}, [Bias("y"), Bilinear("y", "h")])
    own = random_params(labels, seed=7)
    made, theirs = merge(RBM, labels, params=[PARAMS, own])
    assert list(made.visible) == ["v", "y"] and list(made.latent) == ["h"]
    x = {b: random_state(f, seed=2) for b, f in made.families.items()}
    each = [g.energy(p, {b: x[b] for b in g.families}) for g, p in ((RBM, PARAMS), (labels, own))]
    np.testing.assert_allclose(made.energy(theirs, x), sum(each), rtol=1e-6)
    with pytest.raises(DeclarationError, match="two of the graphs have a factor named 'v': Bias.'v'. and"):
        merge(RBM, RBM)
    with pytest.raises(DeclarationError, match="block 'h' is Bernoulli.2. in one graph and Spin.2. in"):
        merge(RBM, FactorGraph({"h": Spin(2)}, factors=[Bias("h", name="x")]))
    with pytest.raises(ValueError, match="params are those of each of 2 graphs, not of 1"):
        merge(RBM, labels, params=[PARAMS])
    with pytest.raises(DeclarationError, match="give at least one graph"):
        merge()


def test_a_stack_is_the_deep_model() -> None:
    upper = layered(h=Bernoulli(2), g=Bernoulli(4))
    own = random_params(upper, seed=7)
    made, theirs = stack(RBM, upper, params=[PARAMS, own])
    deep = layered(v=Bernoulli(3), h=Bernoulli(2), g=Bernoulli(4))
    assert (made.visible, made.latent, made.edges) == (deep.visible, deep.latent, deep.edges)
    assert set(made.factors) == set(deep.factors)
    np.testing.assert_allclose(theirs["h"], (PARAMS["h"] + own["h"]) / 2)
    np.testing.assert_array_equal(theirs["h:g"], own["h:g"])
    deep.check(theirs)
    with pytest.raises(DeclarationError, match="visible block 'v' of a graph is no latent block of the one"):
        stack(RBM, layered(v=Bernoulli(2), g=Bernoulli(4)))
    clash = FactorGraph({"h": Bernoulli(2)}, {"g": Bernoulli(1)}, [Bias("h"), Bilinear("h", "g", name="v")])
    with pytest.raises(DeclarationError, match="are both named 'v'; rename"):
        stack(RBM, clash)


@pytest.mark.slow
def test_a_stack_of_trained_machines_can_be_trained_on() -> None:
    rows = ebmpp.data.bars_and_stripes(3)
    settings = {"rng_key": jax.random.key(0), "num_steps": 20, "progress_bar": False, "estimator": ebmpp.CD()}
    lower = layered(v=Bernoulli(9), h=Bernoulli(4))
    first = ebmpp.fit(lower, rows, **settings)
    upper = layered(h=Bernoulli(4), g=Bernoulli(3))
    means = np.asarray(lower.mean(first.params, {"v": rows}, "h") > 0.5, np.float32)
    second = ebmpp.fit(upper, means, **settings)
    deep, params = stack(lower, upper, params=[first.params, second.params])
    settings["estimator"] = ebmpp.PCD(num_chains=10, posterior=ebmpp.estimators.MeanField(5))
    made = ebmpp.fit(deep, rows, params=params, **settings)
    assert np.isfinite(made.params["h:g"]).all()
