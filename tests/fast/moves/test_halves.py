# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Units that share a hash get the draws that they get by themselves, bit for bit."""

import networkx as nx
import numpy as np
import pytest

import jax
import jax.numpy as jnp

from ebmpp import Bernoulli, Binomial, Categorical, FactorGraph, Gaussian, Poisson, Spin, layered
from ebmpp.core import loops, programs, random
from ebmpp.core.programs import Program, quick_here
from ebmpp.families import Family
from ebmpp.graph.parts import View
from ebmpp.moves import gibbs, gibbs_sweep, halves
from ebmpp.moves.move import draw_sweep
from ebmpp.moves.target import Target


class _Level(Spin):
    """Values that a byte holds, of a family made elsewhere."""

    def states(self) -> jax.Array:
        return jnp.array([-1.0, 1.0])


@pytest.mark.parametrize(("size", "rows"), [(1, 7), (9, 16), (9, 17), (64, 40)])
@pytest.mark.parametrize(
    "make", [Bernoulli, Spin, _Level, lambda n: Categorical(n, 5)], ids=["0/1", "spin", "own", "categories"]
)
def test_values_are_those_of_a_word_a_unit(make: type, size: int, rows: int) -> None:
    family: Family = make(size)
    assert halves.suits(family)
    keys = random.fold_in(random.key_pair(jax.random.key(size)), jnp.arange(rows))
    eta = 2 * jax.random.normal(jax.random.key(rows), (rows, *family.statistic_shape))
    words = random.words(keys, gibbs.num_words(View({"x": family}), ["x"]))
    expected = gibbs.draw_rows(View({"x": family}), ["x"], {"x": eta}, words)["x"]
    made = halves.draw(family, jnp.swapaxes(eta, 0, 1), keys)
    assert made.dtype == expected.dtype
    np.testing.assert_array_equal(made.T, expected)
    assert size * rows < 20 or len(np.unique(made)) > 1


def test_values_that_no_byte_holds_or_that_take_more_words_are_drawn_by_themselves() -> None:
    assert not any(map(halves.suits, [Categorical(3, 200), Gaussian(3), Poisson(3)]))
    assert halves.suits(Categorical(3, 100))
    assert halves.suits(Binomial(3, 5)) == (Binomial.num_words == 1)


@pytest.mark.parametrize(
    "make", [Spin, lambda s: Categorical(s, 3), Gaussian], ids=["spin", "potts", "gaussian"]
)
@pytest.mark.parametrize("side", [4, 5], ids=["two parts", "three parts"])
def test_large_sweeps_are_those_of_small_ones(make: type, side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = FactorGraph.from_networkx(nx.grid_2d_graph(side, side, periodic=True), family=make)
    small = lambda a: 0.05 * jax.random.normal(jax.random.key(a.size), a.shape)  # so that Gaussians normalise
    params = jax.tree.map(lambda a: a + small(a), graph.init(jax.random.key(0)))
    keys = random.fold_in(random.key_pair(jax.random.key(1)), jnp.arange(30))
    x = gibbs.initial_rows(graph, ["x"], keys)
    sweep = lambda: draw_sweep(Target(graph, params), x, gibbs_sweep(graph), keys)[0]["x"]
    few = jax.jit(lambda: sweep())()
    monkeypatch.setattr(loops, "_LEAST", 1)
    assert loops.pays(1)
    large = jax.jit(lambda: sweep())()
    assert len(np.unique(few)) > 1
    if make is Gaussian:  # sums may be rounded otherwise
        np.testing.assert_allclose(large, few, rtol=1e-4, atol=1e-5)
    else:
        np.testing.assert_array_equal(large, few)


@pytest.mark.parametrize("make", [Spin, Gaussian], ids=["spin", "gaussian"])
def test_large_sweeps_have_the_gradient_of_small_ones(make: type, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = FactorGraph.from_networkx(nx.cycle_graph(6), family=make, shared=True, bias=False)
    keys = random.fold_in(random.key_pair(jax.random.key(1)), jnp.arange(4))
    x = gibbs.initial_rows(graph, ["x"], keys)

    def drawn(coupling: jax.Array) -> jax.Array:
        params = graph.init(jax.random.key(0)) | {"x:x": coupling}
        return (draw_sweep(Target(graph, params), x, gibbs_sweep(graph), keys)[0]["x"] ** 2).sum()

    few = jax.grad(drawn)(jnp.array(0.1))
    monkeypatch.setattr(loops, "_LEAST", 1)
    np.testing.assert_allclose(jax.grad(lambda c: drawn(c))(jnp.array(0.1)), few, rtol=1e-5)
    assert (few == 0) == (make is Spin)


@pytest.mark.parametrize("make", [Spin, Gaussian], ids=["spin", "gaussian"])
def test_draws_of_programs_compiled_quick_are_the_same(make: type) -> None:
    graph = layered(v=make(200), h=make(100))
    params, rows = graph.init(jax.random.key(0)), 50
    keys = random.fold_in(random.key_pair(jax.random.key(1)), jnp.arange(rows))
    start = gibbs.initial_rows(graph, graph.families, keys)
    sweep = lambda x: draw_sweep(Target(graph, params), x, gibbs_sweep(graph), keys)[0]
    seen = []
    quick = Program(lambda x: seen.append(quick_here()) or sweep(x), quick=lambda x: True)
    made, expected = quick(start), jax.jit(sweep)(start)
    assert seen == [programs._known(*programs._QUICK)] and not quick_here()
    for b in graph.families:
        np.testing.assert_allclose(made[b], expected[b], rtol=1e-5, atol=1e-5)
        assert len(np.unique(made[b])) > 1
