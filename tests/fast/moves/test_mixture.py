# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The mixture move: its law against enumeration, pairs that meet and stay, and what it refuses."""

import dataclasses
import functools
from typing import Any

import networkx as nx
import numpy as np
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Binomial, Categorical, FactorGraph, Gaussian, Observed, Poisson, Spin, layered
from ebmpp.core import random
from ebmpp.errors import ArgumentError, IntractableError, StateError
from ebmpp.graph.states import as_given
from ebmpp.moves import Layer, Mixture, mixture_sweep
from ebmpp.moves.gibbs import initial_rows
from ebmpp.moves.mixture import make_pool
from ebmpp.moves.move import coupled_sweep, draw_sweep, equal
from ebmpp.moves.sweeps import resolve_moves
from ebmpp.moves.target import Target
from ebmpp.sampling import mixture_pool, pools
from ebmpp.sampling.engine import run_pairs
from helpers import (
    assert_law,
    assert_rows_law,
    enumerate_numpy,
    gated,
    numpy_statistics,
    often,
    pair,
    random_params,
    slow,
)

KEY = random.key_pair(jax.random.key(5))
SWEEP = jax.jit(coupled_sweep, static_argnums=2)
ALONE = jax.jit(draw_sweep, static_argnums=2)

FINITE = {
    "bernoulli": pair(Bernoulli(3), Bernoulli(2)),
    "spin": pair(Spin(2), Spin(3)),
    "potts": pair(Categorical(2, num_categories=3), Bernoulli(2)),
    "binomial": pair(Binomial(2, total_count=3), Spin(2)),
    "deep": layered(a=Bernoulli(2), h1=Spin(2), h2=Bernoulli(2)),
}


@functools.cache
def problem(name: str) -> tuple[FactorGraph, dict[str, Any]]:
    graph = FINITE[name]
    return graph, random_params(graph, seed=3, scale=2.5)


def pooled(graph: FactorGraph, params: Any, moves: Any, states: int = 6, **clamped: Any) -> Target:
    """A target with a pool of a few initial draws, which look little like the model."""
    (move, *_) = moves
    rows = initial_rows(graph, move.marginalize, random.fold_in(KEY, 8, jnp.arange(states)))
    target = Target(graph, params, as_given(graph.families, clamped))
    return Target(graph, params, target.given, make_pool(graph, params, move, rows, target.clamped))


def few(moves: tuple[Any, ...], components: int) -> tuple[Any, ...]:
    return (dataclasses.replace(moves[0], components=components), *moves[1:])


def exact_rows(graph: FactorGraph, params: Any, count: int) -> tuple[dict[str, jax.Array], list, np.ndarray]:
    """Rows from the model itself, all states and their probabilities."""
    states, weights, _ = enumerate_numpy(graph, params)
    chosen = np.random.default_rng(0).choice(len(states), count, p=weights)
    dtype = lambda b: graph.families[b].dtype
    rows = {b: jnp.asarray(np.stack([states[i][b] for i in chosen]), dtype(b)) for b in graph.families}
    return rows, states, weights


@pytest.mark.parametrize(("name", "components"), [*((name, 2) for name in FINITE), ("spin", 6), ("potts", 6)])
def test_the_model_is_left_as_it_is_and_proposals_are_taken(name: str, components: int) -> None:
    """From exact draws: the law of joint states after one move and the draw of what it summed out.

    From two components at a time of a pool of six, and from all of them.
    """
    graph, params = problem(name)
    moves = few(mixture_sweep(graph)[:2], components)
    count = 40_000
    x, states, weights = exact_rows(graph, params, count)
    target = pooled(graph, params, moves)
    new, taken = ALONE(target, x, moves, random.fold_in(KEY, jnp.arange(count)))
    assert 0.1 < float(taken.mean()) < 0.95  # else it says nothing
    stacked = lambda s: np.concatenate([np.asarray(s[b], float).reshape(-1) for b in graph.families])
    table = np.stack([stacked(s) for s in states])
    rows = np.concatenate([np.asarray(new[b], float).reshape(count, -1) for b in graph.families], 1)
    share = np.array([(rows == t).all(1).mean() for t in table])
    assert share.sum() == pytest.approx(1)
    some = weights * count > 10
    assert_law(share[some], weights[some], np.sqrt(weights[some] * (1 - weights[some]) / count))


@pytest.mark.parametrize("name", ["potts", "deep"])
def test_from_one_state_the_chain_finds_the_model(name: str) -> None:
    """So that a move that did nothing would fail."""
    graph, params = problem(name)
    moves, count = mixture_sweep(graph)[:2], 20_000
    target = pooled(graph, params, moves)
    x = jax.tree.map(
        lambda v: jnp.tile(v[:1], (count, *(1,) * (v.ndim - 1))), exact_rows(graph, params, 1)[0]
    )
    for t in range(40):
        x, _ = ALONE(target, x, moves, random.fold_in(random.fold_in(KEY, t), jnp.arange(count)))
    states, weights, _ = enumerate_numpy(graph, params)
    for b, family in graph.families.items():
        wanted = sum(w * numpy_statistics(family, s[b]) for s, w in zip(states, weights, strict=True))
        assert_rows_law(numpy_statistics(family, np.asarray(x[b])), wanted, comparisons=20)


@pytest.mark.parametrize("name", ["unit", slow("learned")])
def test_gaussian_blocks_have_their_moments(name: str) -> None:
    graph = pair(Gaussian(2, variance=name), Bernoulli(3))
    params = random_params(graph, seed=3, scale=0.5)
    for move in (Mixture(("a",), ("b",), 3), Mixture(("b",), ("a",))):
        moves, count = (move, Layer(move.marginalize, "maximal")), 20_000
        target = pooled(graph, params, moves)
        x = initial_rows(graph, graph.families, random.fold_in(KEY, 1, jnp.arange(count)))
        for t in range(25):
            x, _ = ALONE(target, x, moves, random.fold_in(random.fold_in(KEY, t), jnp.arange(count)))
        moments = ebmpp.exact.moments(graph, params)
        statistics = graph.statistics(x)
        for b in graph.families:
            assert_rows_law(statistics[b], np.asarray(moments[b]), comparisons=20)


AGREE = FINITE | {"gaussian": pair(Gaussian(3), Bernoulli(2)), "poisson": pair(Poisson(2), Bernoulli(2))}


@pytest.mark.parametrize("name", often(AGREE, "deep"))
def test_pairs_that_agree_stay_together_bit_by_bit(name: str) -> None:
    graph = AGREE[name]
    params = random_params(graph, seed=3, scale=0.4)
    moves = few(mixture_sweep(graph), 4)
    target, rows = pooled(graph, params, moves), 300
    x = initial_rows(graph, graph.families, random.fold_in(KEY, 1, jnp.arange(rows)))
    y = initial_rows(graph, graph.families, random.fold_in(KEY, 2, jnp.arange(rows)))
    z, met = {b: jnp.stack([x[b], y[b]]) for b in x}, np.zeros(rows, bool)
    for t in range(12):
        keys = random.fold_in(random.fold_in(KEY, t), jnp.arange(rows))
        z, together, broken, _ = SWEEP(target, z, moves, keys)
        same = np.all([equal(v) for v in z.values()], axis=0)
        np.testing.assert_array_equal(same, together)
        assert same[met].all() and not broken.any()
        met = same
    assert met.mean() > 0.9


def test_each_chain_of_a_pair_has_the_law_of_one_alone() -> None:
    graph, params = problem("bernoulli")
    moves, count = mixture_sweep(graph)[:2], 40_000
    target = pooled(graph, params, moves)
    starts = [exact_rows(graph, params, count)[0] for _ in range(2)]
    turned = {b: jnp.roll(v, 1, 0) for b, v in starts[1].items()}  # independent of the other
    z = {b: jnp.stack([starts[0][b], turned[b]]) for b in turned}
    z, together, _, taken = SWEEP(target, z, moves, random.fold_in(KEY, jnp.arange(count)))
    moments = ebmpp.exact.moments(graph, params)
    for b, v in z.items():
        for chain in v:
            assert_rows_law(chain, np.asarray(moments[b]), comparisons=10)
    assert 0.1 < together.mean() < taken.mean() / 2  # at once where both accept


def test_expectations_are_the_models_whatever_the_pool_and_compile_once() -> None:
    graph, params = problem("bernoulli")
    moments = np.asarray(ebmpp.exact.moments(graph, params)["a"])
    fn = lambda x: x["a"]
    made = []
    for seed in range(3):
        pool = {"a": np.random.default_rng(seed).integers(0, 2, (7, 3)).astype(np.float32)}
        before = run_pairs._cache_size(), pools._make._cache_size()
        estimate = ebmpp.unbiased_expectation(
            graph, params, fn, rng_key=jax.random.key(1), num_pairs=2000, coupling="mixture", pool=pool,
            num_slots=8,
        )  # fmt: skip
        assert seed == 0 or before == (run_pairs._cache_size(), pools._make._cache_size())
        assert_law(estimate.value, moments, estimate.standard_error, 9)
        assert 0.2 < estimate.acceptance < 1
        made.append(estimate.meeting_time)
    assert (made[0] != made[1]).any()  # the pool is read


def test_a_made_pool_is_that_of_its_rows() -> None:
    graph, params = problem("deep")
    options = {"rng_key": jax.random.key(1), "num_pairs": 100, "coupling": "mixture", "num_slots": 8}
    rows = {"a": np.eye(2, dtype=np.float32), "h2": np.ones((2, 2), np.float32)}
    pool = mixture_pool(graph, params, rows, rng_key=jax.random.key(0))
    assert pool.eta["h1"].shape == (2, 2) and pool.log_normalizer.shape == (2,)
    fn = lambda x: x["a"]
    one, other = (ebmpp.unbiased_expectation(graph, params, fn, pool=p, **options) for p in (rows, pool))
    np.testing.assert_array_equal(one.value, other.value)
    visible = ebmpp.unbiased_expectation(graph, params, fn, pool={"a": rows["a"]}, **options)  # h2 is drawn
    assert np.isfinite(visible.value).all()


@pytest.mark.slow
def test_a_clamped_block_is_held_in_pool_and_pairs() -> None:
    graph, params = problem("deep")
    held = np.array([1.0, -1.0], np.float32)
    moves = mixture_sweep(layered(a=Bernoulli(2), h1=Spin(2), h2=Bernoulli(2)))
    assert [move.blocks for move in moves] == [("h1",), ("a", "h2"), ("h1",), ("a", "h2")]
    graph3 = layered(a=Bernoulli(2), h1=Spin(2), h2=Bernoulli(2), h3=Spin(2))
    params3 = random_params(graph3, seed=1, scale=1.0)
    estimate = ebmpp.unbiased_expectation(
        graph3, params3, lambda x: x["h2"], rng_key=jax.random.key(2), num_pairs=3000, coupling="mixture",
        pool={"h2": np.eye(2, dtype=np.float32), "a": np.eye(2, dtype=np.float32)}, h1=held, num_slots=8,
    )  # fmt: skip
    states, weights, _ = enumerate_numpy(graph3, params3)
    some = [i for i, s in enumerate(states) if (s["h1"] == held).all()]
    weight = weights[some] / weights[some].sum()
    wanted = sum(w * states[i]["h2"] for i, w in zip(some, weight, strict=True))
    assert_law(estimate.value, wanted, estimate.standard_error)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (gated(), "in two layers, each independent given the other, and here they are 3: 'a'; 'b'; 'c'"),
        (
            FactorGraph.from_networkx(nx.cycle_graph(4), Spin),
            "units of block 'x' interact",
        ),
        (FactorGraph({"a": Bernoulli(2)}, factors=[ebmpp.Bias("a")]), "here they are 1: 'a'"),
    ],
)
def test_graphs_of_other_shapes_are_refused_by_name(graph: FactorGraph, message: str) -> None:
    with pytest.raises(IntractableError, match=message):
        resolve_moves(graph, "mixture")


def test_blocks_that_do_not_go_together_are_refused() -> None:
    graph, params = problem("deep")
    with pytest.raises(IntractableError, match="'a' and 'h1' interact, so they cannot be proposed together"):
        resolve_moves(graph, (Mixture(("a", "h1"), ("h2",)), Layer(("h2",))))
    with pytest.raises(
        IntractableError, match="'a' and 'h1' interact, so they cannot be summed out together"
    ):
        resolve_moves(graph, (Mixture(("h2",), ("a", "h1")), Layer(("a",)), Layer(("h1",))))
    with pytest.raises(ArgumentError, match="the next move must be a Layer"):
        resolve_moves(graph, (Mixture(("h1",), ("a", "h2")), Layer(("h1",), "maximal"), Layer(("a", "h2"))))
    with pytest.raises(ArgumentError, match="Mixture: components is an int of at least 1, not 0"):
        resolve_moves(graph, few(mixture_sweep(graph), 0))
    with pytest.raises(ArgumentError, match="at least one block to propose"):
        resolve_moves(graph, (Mixture((), ("h1",)), Layer(("h1",)), Layer(("a", "h2"))))
    moves = mixture_sweep(graph)
    with pytest.raises(StateError, match="proposes from a pool of values of"):
        ALONE(
            Target(graph, params), exact_rows(graph, params, 3)[0], moves, random.fold_in(KEY, jnp.arange(3))
        )


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"coupling": "mixture"}, ArgumentError, "give pool={'a': rows}, or rows of other blocks"),
        ({"pool": {"a": np.ones((2, 3))}}, ArgumentError, 'a pool is for coupling="mixture"'),
        ({"coupling": "mixture", "pool": 3}, StateError, "pool is a dict of blocks"),
        ({"coupling": "mixture", "pool": {"a": np.ones(3)}}, StateError, r"leading axes \(\), expected one"),
        ({"coupling": "mixture", "pool": {"c": np.ones((2, 3))}}, StateError, "'c'"),
        ({"coupling": "mixture", "pool": {"a": np.ones((2, 3)) / 2}}, StateError, "block 'a'"),
        (
            {"coupling": "mixture", "pool": {"b": np.ones((2, 2))},
             "a": Observed(np.ones(3), np.array([True, False, False]))},
            StateError, "a pool is of one law, and units of a block are observed",
        ),
    ],
)  # fmt: skip
def test_pools_that_do_not_fit_are_refused(given: Any, error: type, message: str) -> None:
    graph, params = problem("bernoulli")
    with pytest.raises(error, match=message):
        ebmpp.unbiased_expectation(graph, params, lambda x: x["a"], rng_key=jax.random.key(0), **given)


@pytest.mark.slow
def test_a_pool_that_does_not_help_is_told_of() -> None:
    graph = pair(Bernoulli(60), Bernoulli(60))
    params = {"a": jnp.zeros(60), "b": jnp.zeros(60), "a:b": 2 * jnp.eye(60)}  # 60 pairs of units, mostly 1
    far = {b: np.zeros((5, 60), np.float32) for b in "ab"}
    options = {"rng_key": jax.random.key(0), "num_pairs": 8, "num_slots": 8, "k": 400}  # to chains at rest
    fn = lambda x: x["b"].mean()
    with pytest.warns(UserWarning, match="of the proposals from the pool were accepted, so pairs meet by"):
        made = ebmpp.unbiased_expectation(graph, params, fn, coupling="mixture", pool=far, **options)
    assert made.met.all()
