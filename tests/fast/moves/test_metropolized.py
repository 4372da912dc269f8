# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The metropolised Gibbs move: its law, its transitions, its pairs, and what is refused."""

import itertools

import networkx as nx
import numpy as np
import pytest
from scipy.special import logsumexp

import jax
import jax.numpy as jnp

from ebmpp import (
    Bernoulli,
    Binomial,
    Categorical,
    FactorGraph,
    Gaussian,
    Observed,
    Spin,
    exact,
    unbiased_expectation,
)
from ebmpp.core import random
from ebmpp.errors import ArgumentError, IntractableError
from ebmpp.moves import Layer, Metropolized, gibbs_sweep, metropolized_sweep
from ebmpp.moves.metropolized import _chances
from ebmpp.moves.move import coupled_sweep, draw_sweep, equal
from ebmpp.moves.sweeps import resolve_moves
from ebmpp.moves.target import Target
from helpers import (
    FAMILIES,
    FINITE,
    assert_law,
    assert_rows_law,
    numpy_log_base,
    numpy_statistics,
    pair,
    random_params,
    unit_values,
)

ROWS = 20_000
GRAPHS = {
    "layers": pair(Categorical(2, 3), Spin(2)),
    "counts": pair(Bernoulli(2), Binomial(1, 3)),
    "lattice": FactorGraph.from_networkx(nx.cycle_graph(4), Spin),
}


def conditional(kind: str, eta: np.ndarray) -> tuple[list[float], np.ndarray]:
    """Values of a unit and their log probabilities, in numpy."""
    unit = type(FAMILIES[kind])(1, *([3] if kind in ("categorical", "binomial") else []))
    values = unit_values(unit)
    weights = [
        np.sum(eta * numpy_statistics(unit, np.array([x]))[0]) + numpy_log_base(unit, np.array([x]))
        for x in values
    ]
    return values, np.array(weights) - logsumexp(weights)


def from_the_model(graph: FactorGraph, params: dict, rows: int = ROWS) -> dict[str, jax.Array]:
    """Independent exact draws."""
    states, probs = exact.probabilities(graph, params)
    probs = np.asarray(probs, float) / np.asarray(probs, float).sum()
    index = np.random.default_rng(7).choice(len(probs), size=rows, p=probs)
    return {b: v[index].astype(graph.families[b].dtype) for b, v in states.items()}


@pytest.mark.parametrize("scale", [0.5, 8.0, 200.0])
@pytest.mark.parametrize("kind", FINITE)
def test_transitions_are_those_of_liu_and_in_detailed_balance(kind: str, scale: float) -> None:
    family = type(FAMILIES[kind])(1, *([3] if kind in ("categorical", "binomial") else []))
    eta = scale * np.random.default_rng(0).normal(size=family.statistic_shape)
    values, log_p = conditional(kind, eta[0])
    made = jnp.stack(
        [
            _chances(family, jnp.asarray(eta[None], float), jnp.full((1, 1), x, family.dtype))[0, 0]
            for x in values
        ]
    )
    assert np.isfinite(made).all() and (made >= 0).all()
    np.testing.assert_allclose(made.sum(1), 1, rtol=1e-6)
    for i, j in itertools.permutations(range(len(values)), 2):
        log_rest = [logsumexp(np.delete(log_p, k)) for k in (i, j)]
        wanted = np.exp(log_p[j] - max(log_rest))
        np.testing.assert_allclose(made[i, j], wanted, rtol=2e-4, atol=1e-30)


@pytest.mark.parametrize("name", GRAPHS)
def test_the_law_stays_as_it_is_and_values_change_oftener(name: str) -> None:
    graph = GRAPHS[name]
    params = random_params(graph, seed=3, scale=0.8)
    start = from_the_model(graph, params)
    keys = random.fold_in(random.key_pair(jax.random.key(1)), jnp.arange(ROWS))
    target = Target(graph, params)
    sweep = jax.jit(draw_sweep, static_argnums=2)
    after, taken = sweep(target, start, metropolized_sweep(graph, blocks=tuple(graph.families)), keys)
    assert (taken == 0).all()
    for b, exact_mean in exact.moments(graph, params).items():
        assert_rows_law(graph.statistics({b: after[b]})[b], exact_mean)
    plain, _ = sweep(target, start, gibbs_sweep(graph), keys)
    change = lambda x: np.mean([np.mean(x[b] != start[b]) for b in graph.families])
    assert change(after) > 1.1 * change(plain)


@pytest.mark.parametrize("name", GRAPHS)
def test_each_chain_of_a_pair_moves_as_one_alone(name: str) -> None:
    graph = GRAPHS[name]
    params = random_params(graph, seed=4, scale=0.8)
    target, moves = Target(graph, params), metropolized_sweep(graph)
    rng = np.random.default_rng(2)
    one = {
        b: rng.choice(unit_values(f), size=(2, *f.shape)).astype(f.dtype) for b, f in graph.families.items()
    }
    z = {b: jnp.repeat(jnp.asarray(v)[:, None], ROWS, 1) for b, v in one.items()}
    keys = random.fold_in(random.key_pair(jax.random.key(5)), jnp.arange(ROWS))
    pairs, _, broken, _ = jax.jit(coupled_sweep, static_argnums=2)(target, z, moves, keys)
    assert not broken.any()
    alone = jax.jit(draw_sweep, static_argnums=2)
    for chain in range(2):
        apart = random.fold_in(keys, 7 + chain)
        wanted, _ = alone(target, {b: v[chain] for b, v in z.items()}, moves, apart)
        for b in graph.families:
            coupled, single = (
                np.asarray(graph.statistics({b: x[b]})[b], float) for x in ({b: pairs[b][chain]}, wanted)
            )
            error = np.sqrt((coupled.var(0) + single.var(0)) / ROWS)
            assert_law(coupled.mean(0) - single.mean(0), 0.0, error)


def test_pairs_that_agree_stay_together_and_pairs_apart_meet() -> None:
    graph = GRAPHS["layers"]
    params = random_params(graph, seed=5, scale=0.8)
    start = from_the_model(graph, params, rows=200)
    keys = random.fold_in(random.key_pair(jax.random.key(5)), jnp.arange(200))
    z = {b: jnp.stack([v, v]) for b, v in start.items()}
    z, met, _, _ = jax.jit(coupled_sweep, static_argnums=2)(
        Target(graph, params), z, metropolized_sweep(graph), keys
    )
    assert met.all() and all(equal(v).all() for v in z.values())
    coupling = (*metropolized_sweep(graph), *gibbs_sweep(graph))
    made = unbiased_expectation(
        graph,
        params,
        graph.statistics,
        rng_key=jax.random.key(0),
        coupling=coupling,
        num_pairs=4000,
        k=1,
        m=3,
    )
    for b, exact_mean in exact.moments(graph, params).items():
        assert_law(made.value[b], exact_mean, made.standard_error[b])


@pytest.mark.slow
def test_units_that_are_held_stay() -> None:
    graph = GRAPHS["lattice"]
    (block,) = graph.families
    seen = Observed(jnp.array([1.0, -1.0, 1.0, 1.0]), jnp.array([True, False, True, False]))
    params = random_params(graph, seed=6)
    coupling = (*metropolized_sweep(graph), *gibbs_sweep(graph))
    found = unbiased_expectation(
        graph,
        params,
        lambda x: x[block],
        rng_key=jax.random.key(1),
        coupling=coupling,
        num_pairs=2000,
        **{block: seen},
    )
    assert found.value[0] == 1 and found.value[2] == 1
    states, probs = (
        np.asarray(a, float) for a in (lambda s, p: (s[block], p))(*exact.probabilities(graph, params))
    )
    fits = (states[:, 0] == 1) & (states[:, 2] == 1)
    wanted = (states[fits] * probs[fits, None]).sum(0) / probs[fits].sum()
    assert_law(found.value, wanted, found.standard_error)


@pytest.mark.parametrize(
    ("move", "graph", "error", "told"),
    [
        (Metropolized(("b",)), pair(Bernoulli(2), Gaussian(2)), IntractableError, "infinitely many values"),
        (Metropolized(("b",), "maximal"), pair(Bernoulli(2), Spin(2)), ArgumentError, '"common" alone'),
        (Metropolized(("a", "b")), pair(Bernoulli(2), Spin(2)), IntractableError, "interact"),
    ],
)
def test_what_it_cannot_draw_is_refused(
    move: Metropolized, graph: FactorGraph, error: type[Exception], told: str
) -> None:
    rest = tuple(Layer((b,)) for b in graph.families if b not in move.blocks)
    with pytest.raises(error, match=told):
        resolve_moves(graph, (move, *rest))


def test_the_visible_blocks_are_moved_unless_others_are_named() -> None:
    graph = pair(Bernoulli(2), Spin(2))
    assert metropolized_sweep(graph) == (Metropolized(("a",)), Layer(("b",)))
    assert metropolized_sweep(graph, blocks="b", clamped=("a",)) == (Metropolized(("b",)),)
    assert metropolized_sweep(pair(Gaussian(2), Spin(2))) == gibbs_sweep(pair(Gaussian(2), Spin(2)))
    with pytest.raises(ArgumentError, match="'c'"):
        metropolized_sweep(graph, blocks="c")
    with pytest.raises(IntractableError, match="infinitely many values"):
        metropolized_sweep(pair(Bernoulli(2), Gaussian(2)), blocks="b")
