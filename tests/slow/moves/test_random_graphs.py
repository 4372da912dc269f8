# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Coupled sweeps over random graphs, families and couplings."""

import itertools

from hypothesis import given, settings, strategies as st
import numpy as np

import jax
import jax.numpy as jnp

from ebmpp import Bernoulli, Bias, Bilinear, Categorical, FactorGraph, Gaussian, Poisson, Spin
from ebmpp.core import random
from ebmpp.moves.couplings import KINDS
from ebmpp.moves.gibbs import initial_rows
from ebmpp.moves.layer import Layer
from ebmpp.moves.move import coupled_sweep, draw_sweep, equal
from ebmpp.moves.sweeps import metropolis_sweep, resolve_moves
from ebmpp.moves.target import Target
from helpers import random_params

ROWS, SWEEPS = 6, 2
FAMILIES = {
    "bernoulli": Bernoulli,
    "spin": Spin,
    "categorical": lambda n: Categorical(n, 3),
    "gaussian": Gaussian,
    "poisson": Poisson,
}
#: Poisson and Gaussian blocks that interact need not normalise
BOUNDED = ("bernoulli", "spin", "categorical")


@st.composite
def graphs(draw: st.DrawFn) -> FactorGraph:
    """Up to four blocks of one or two units, with random admissible edges."""
    names = "abcd"[: draw(st.integers(1, 4))]
    kinds = {name: draw(st.sampled_from(sorted(FAMILIES))) for name in names}
    blocks = {name: FAMILIES[kind](draw(st.integers(1, 2))) for name, kind in kinds.items()}
    allowed = [e for e in itertools.combinations(names, 2) if any(kinds[b] in BOUNDED for b in e)]
    edges = draw(st.sets(st.sampled_from(allowed))) if allowed else set()
    factors = [*map(Bias, names), *itertools.starmap(Bilinear, sorted(edges))]
    return FactorGraph({"a": blocks.pop("a")}, blocks, factors)


def trajectory(graph: FactorGraph, kind: str, seed: int, *, same_start: bool) -> list[dict]:
    """Stacked pairs before and after each sweep."""
    coupling = metropolis_sweep(graph, proposal="initial") if kind == "metropolis" else kind
    moves, sweep = resolve_moves(graph, coupling), jax.jit(coupled_sweep, static_argnums=2)
    target = Target(graph, random_params(graph, seed=seed % 1000, scale=0.3))
    key = random.key_pair(jax.random.key(seed))
    starts = [
        initial_rows(graph, graph.families, random.fold_in(key, chain, jnp.arange(ROWS)))
        for chain in ((0, 0) if same_start else (0, 1))
    ]
    states = [{b: jnp.stack([x[b] for x in starts]) for b in graph.families}]
    for t in range(SWEEPS):
        z, _, broken, _ = sweep(target, states[-1], moves, random.fold_in(key, 2 + t, jnp.arange(ROWS)))
        assert not broken.any()
        states.append(z)
    return states


KINDS_AND_METROPOLIS = [kind for kind in KINDS if kind != "independent"] + ["metropolis"]
seeds = st.integers(0, 2**31 - 1)


@settings(max_examples=3)
@given(graphs(), st.sampled_from(KINDS_AND_METROPOLIS), seeds)
def test_equal_chains_stay_equal_and_in_their_support(graph: FactorGraph, kind: str, seed: int) -> None:
    for z in trajectory(graph, kind, seed, same_start=True):
        for b, v in z.items():
            assert equal(v).all()
            assert graph.families[b].in_support(v).all()


@settings(max_examples=3)
@given(graphs(), st.sampled_from(KINDS_AND_METROPOLIS), seeds)
def test_pairs_that_met_stay_together(graph: FactorGraph, kind: str, seed: int) -> None:
    states = trajectory(graph, kind, seed, same_start=False)
    has_met = np.array([np.all([equal(v) for v in z.values()], axis=0) for z in states])
    assert (np.diff(has_met.astype(int), axis=0) >= 0).all()


@settings(max_examples=3)
@given(graphs(), st.sampled_from(["common", "reflection", "metropolis"]), seeds)
def test_leading_chain_ignores_the_follower_where_trials_cannot_fail(
    graph: FactorGraph, kind: str, seed: int
) -> None:
    runs = (trajectory(graph, kind, seed, same_start=same) for same in (True, False))
    for z, other in zip(*runs, strict=True):
        for b in z:
            np.testing.assert_allclose(z[b][0], other[b][0], rtol=1e-4, atol=1e-5)


@settings(max_examples=3)
@given(graphs(), seeds)
def test_a_sweep_draws_its_layers_in_order(graph: FactorGraph, seed: int) -> None:
    keys = random.fold_in(random.key_pair(jax.random.key(seed)), jnp.arange(ROWS))
    target = Target(graph, random_params(graph, scale=0.3))
    x = initial_rows(graph, graph.families, keys)
    result, accepted = draw_sweep(target, x, resolve_moves(graph, None), keys)
    expected = dict(x)
    for index, blocks in enumerate(target.layers):
        expected |= Layer(blocks).draw(target, expected, random.fold_in(keys, index))[0]
    assert (accepted == 0).all()
    for b in expected:
        np.testing.assert_array_equal(result[b], expected[b])
