# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Coupled sweeps over random graphs, families and couplings: what holds whatever they are."""

import itertools

from hypothesis import given, settings, strategies as st
import numpy as np
import pytest

import jax
import jax.numpy as jnp

from ebmpp import (
    Bernoulli,
    Bias,
    Bilinear,
    Categorical,
    FactorGraph,
    Gaussian,
    Observed,
    Poisson,
    Spin,
    unbiased_expectation,
)
from ebmpp.core import random
from ebmpp.errors import IntractableError
from ebmpp.moves.couplings import KINDS
from ebmpp.moves.gibbs import initial_rows
from ebmpp.moves.layer import Layer
from ebmpp.moves.metropolis import Metropolis
from ebmpp.moves.move import coupled_sweep, draw_sweep, equal
from ebmpp.moves.sweeps import metropolis_sweep, resolve_moves
from ebmpp.moves.target import Target
from helpers import random_params

ROWS, SWEEPS = 6, 2
FAMILIES = {
    "bernoulli": lambda n: Bernoulli(n),
    "spin": lambda n: Spin(n),
    "categorical": lambda n: Categorical(n, 3),
    "gaussian": lambda n: Gaussian(n),
    "poisson": lambda n: Poisson(n),
}
#: Poisson and Gaussian blocks next to one another need not normalise
BOUNDED = ("bernoulli", "spin", "categorical")


@st.composite
def graphs(draw: st.DrawFn) -> FactorGraph:
    """Up to four blocks of one or two units, any edges between those that may have one."""
    count = draw(st.integers(1, 4))
    names = "abcd"[:count]
    kinds = {name: draw(st.sampled_from(sorted(FAMILIES))) for name in names}
    blocks = {name: FAMILIES[kind](draw(st.integers(1, 2))) for name, kind in kinds.items()}
    allowed = [e for e in itertools.combinations(names, 2) if any(kinds[b] in BOUNDED for b in e)]
    edges = draw(st.sets(st.sampled_from(allowed))) if allowed else set()
    factors = [*map(Bias, names), *itertools.starmap(Bilinear, sorted(edges))]
    return FactorGraph({"a": blocks.pop("a")}, blocks, factors)


def sweeps_of(graph: FactorGraph, coupling: object, seed: int, apart: bool) -> list[dict[str, jax.Array]]:
    """The stacked pairs before and after each of some sweeps; ``apart`` or from one start."""
    moves = resolve_moves(graph, coupling)
    sweep = jax.jit(coupled_sweep, static_argnums=2)
    params = random_params(graph, seed=seed % 1000, scale=0.3)
    key = random.key_pair(jax.random.key(seed))
    x = initial_rows(graph, graph.families, random.fold_in(key, 0, jnp.arange(ROWS)))
    y = initial_rows(graph, graph.families, random.fold_in(key, 1, jnp.arange(ROWS))) if apart else x
    found = [{b: jnp.stack([x[b], y[b]]) for b in x}]
    for t in range(SWEEPS):
        pairs = random.fold_in(key, 2 + t, jnp.arange(ROWS))
        z, _, broken, _ = sweep(Target(graph, params), found[-1], moves, pairs)
        assert not broken.any()
        found.append(z)
    return found


def coupling_of(graph: FactorGraph, kind: str) -> object:
    return metropolis_sweep(graph, proposal="initial") if kind == "metropolis" else kind


KINDS_AND_MORE = [kind for kind in KINDS if kind != "independent"] + ["metropolis"]


@pytest.mark.slow
@settings(max_examples=3)
@given(graphs(), st.sampled_from(KINDS_AND_MORE), st.integers(0, 2**31 - 1))
def test_chains_that_agree_stay_together_and_in_their_support(
    graph: FactorGraph, kind: str, seed: int
) -> None:
    for z in sweeps_of(graph, coupling_of(graph, kind), seed, apart=False):
        for b, v in z.items():
            assert equal(v).all()
            assert graph.families[b].in_support(v).all()


@settings(max_examples=3)
@given(graphs(), st.sampled_from(KINDS_AND_MORE), st.integers(0, 2**31 - 1))
def test_pairs_that_met_stay_together_while_others_go_on(graph: FactorGraph, kind: str, seed: int) -> None:
    paths = sweeps_of(graph, coupling_of(graph, kind), seed, apart=True)
    met = np.array([np.all([equal(v) for v in z.values()], axis=0) for z in paths])
    assert (np.diff(met.astype(int), axis=0) >= 0).all()


@settings(max_examples=3)
@given(graphs(), st.sampled_from(["common", "reflection", "metropolis"]), st.integers(0, 2**31 - 1))
def test_where_trials_cannot_fail_the_leading_chain_does_not_see_the_other(
    graph: FactorGraph, kind: str, seed: int
) -> None:
    together = sweeps_of(graph, coupling_of(graph, kind), seed, apart=False)
    apart = sweeps_of(graph, coupling_of(graph, kind), seed, apart=True)
    for one, other in zip(together, apart, strict=True):
        for b in one:
            np.testing.assert_allclose(one[b][0], other[b][0], rtol=1e-4, atol=1e-5)


@settings(max_examples=3)
@given(graphs(), st.integers(0, 2**31 - 1))
def test_one_chain_alone_is_blocked_gibbs(graph: FactorGraph, seed: int) -> None:
    params, key = random_params(graph, scale=0.3), random.key_pair(jax.random.key(seed))
    pairs = random.fold_in(key, jnp.arange(ROWS))
    x = initial_rows(graph, graph.families, pairs)
    target, wanted = Target(graph, params), dict(x)
    drawn, taken = draw_sweep(target, x, resolve_moves(graph, None), pairs)
    for index, blocks in enumerate(target.layers):
        wanted |= Layer(blocks).draw(target, wanted, random.fold_in(pairs, index))[0]
    assert (taken == 0).all()
    for b in wanted:
        np.testing.assert_array_equal(drawn[b], wanted[b])


RBM = FactorGraph({"a": Bernoulli(2)}, {"b": Bernoulli(2)}, [Bias("a"), Bias("b"), Bilinear("a", "b")])


def test_moves_must_change_every_free_block() -> None:
    only_a = resolve_moves(RBM, None)[:1]
    with pytest.raises(ValueError, match=r"change blocks \['a'\], and the free blocks are \['a', 'b'\]"):
        resolve_moves(RBM, only_a)
    assert resolve_moves(RBM, only_a, clamped=("b",)) == only_a
    assert resolve_moves(RBM, only_a[0], clamped=("b",)) == only_a


@pytest.mark.parametrize(
    ("moves", "error", "told"),
    [
        (
            (Layer(("a", "b")),),
            IntractableError,
            "'a' and 'b' interact, so they cannot be drawn as one layer",
        ),
        ((Layer(("a",), "maximl"), Layer(("b",))), ValueError, "coupling 'maximl' is unknown"),
        ((Metropolis(("a", "b"), "unform"),), ValueError, "proposal 'unform' is unknown"),
        ((Layer(("b",)), Metropolis(("a",), marginalize=("b",))), ValueError, "must be a Layer that draws"),
    ],
)
def test_moves_that_would_sample_another_law_are_refused(
    moves: tuple, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        resolve_moves(RBM, moves)


def test_a_block_with_observed_units_is_not_summed_out() -> None:
    moves = metropolis_sweep(RBM, marginalize="b")
    seen = Observed(jnp.ones(2), jnp.array([True, False]))
    with pytest.raises(IntractableError, match="'b' has observed units, so it cannot be summed out"):
        unbiased_expectation(
            RBM, random_params(RBM), lambda x: x, rng_key=jax.random.key(0), coupling=moves, b=seen
        )
