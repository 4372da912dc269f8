# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Slices of packed parts: the natural parameters and draws of gathers, without gathers.

Tests graph/factors/shifts.py.
"""

from collections.abc import Iterator
import contextlib
import re
from unittest import mock

from hypothesis import assume, given, settings, strategies as st
import networkx as nx
import numpy as np
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import (
    Bernoulli,
    Bias,
    Categorical,
    FactorGraph,
    Gaussian,
    Observed,
    Pairwise,
    Spin,
)
from ebmpp.core import backend, random
from ebmpp.graph.energy import natural_rows
from ebmpp.moves import gibbs, gibbs_sweep
from ebmpp.moves.move import draw_sweep
from ebmpp.moves.target import Target
from helpers import nightly, random_params, random_state

ROWS = 3


def lattice(shape: tuple[int, ...], periodic: bool, diagonal: bool = False) -> nx.Graph:
    """A square or cubic lattice, or a triangular one by diagonals of the squares."""
    graph = nx.grid_graph(shape[::-1], periodic=periodic)
    if diagonal:
        for site in list(graph):
            near = tuple(i + 1 for i in site)
            if periodic:
                near = tuple(np.mod(near, shape).tolist())
            if near in graph:
                graph.add_edge(site, near)
    return graph


def ising(graph: nx.Graph, family: type = Spin, shared: bool = True) -> FactorGraph:
    """A model of one block over the sites of a graph."""
    return FactorGraph.from_networkx(graph, family, shared=shared)


@contextlib.contextmanager
def packing(is_on: bool) -> Iterator[None]:
    """Pack parts, or do not."""
    with mock.patch.object(gibbs, "_packing_pays", lambda split, rows: is_on):
        yield


SIDES = {
    1: st.tuples(st.sampled_from([24, 30])),
    2: st.tuples(st.integers(6, 9), st.sampled_from([8, 10])),
    3: st.tuples(st.integers(4, 5), st.just(4), st.sampled_from([4, 6])),
}
TRIANGULAR = st.tuples(st.sampled_from([6, 9]), st.sampled_from([9, 12]))


@st.composite
def lattices(draw: st.DrawFn) -> FactorGraph:
    """Lattices with boundaries of each kind and pairs in any order; some do not pack."""
    is_triangular = draw(st.booleans())
    count = 2 if is_triangular else draw(st.integers(1, 3))
    shape = np.array(draw(TRIANGULAR if is_triangular else SIDES[count]))
    is_periodic = np.array(draw(st.tuples(*[st.booleans()] * count)))
    sites = np.indices(shape).reshape(count, -1).T
    steps = [*np.eye(count, dtype=int), *[np.ones(count, int)] * is_triangular]
    pairs = []
    for step in steps:
        near = np.where(is_periodic, (sites + step) % shape, sites + step)
        inside = (near < shape).all(1)
        pairs.append(np.stack([sites[inside], near[inside]], 1))
    edges = np.concatenate(pairs)
    edges = edges[
        np.random.default_rng(draw(st.integers(0, 9))).permutation(len(edges))
    ]
    families = [Spin, Bernoulli, lambda s: Categorical(s, 3), Gaussian]
    family = draw(st.sampled_from(families))
    factor = Pairwise("x", edges, shared=draw(st.booleans()))
    return FactorGraph({"x": family(tuple(shape))}, factors=[Bias("x"), factor])


@settings(max_examples=5, deadline=None)
@given(lattices())
def test_slices_have_the_natural_parameters_of_gathers_and_autodiff(
    graph: FactorGraph,
) -> None:
    split = graph.splits["x"]
    assume(None not in split.shifts)
    family = graph.families["x"]
    params = random_params(graph, scale=0.1)
    x = {"x": random_state(family, 0, (ROWS,))}

    def visit(is_on: bool) -> tuple[list[np.ndarray], np.ndarray]:
        def run(params, x):
            etas = []

            def new(natural, families, part):
                eta = natural()["x"]
                etas.append(eta)
                return {"x": families["x"].mode(eta)}

            return etas, gibbs.visit(Target(graph, params), x, ("x",), new)["x"]

        with packing(is_on):
            return jax.jit(run)(params, x)

    slices, packed = visit(True)
    gathers, unpacked = visit(False)
    for eta, expected in zip(slices, gathers, strict=True):
        np.testing.assert_allclose(eta, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(packed, unpacked, rtol=1e-5, atol=1e-6)
    eta = natural_rows(graph, params, x, ["x"])["x"]
    eta = eta.reshape(ROWS, family.size, *family.stat_shape)[:, split.units[0]]
    np.testing.assert_allclose(slices[0], eta, rtol=1e-5, atol=1e-6)


LATTICES = {
    "torus": lattice((8, 6), True),
    "open": lattice((8, 7), False),
    "cubic": lattice((4, 4, 4), True),
    "open cubic": lattice((3, 5, 6), False),
    "triangular": lattice((9, 9), True, diagonal=True),
    "open triangular": lattice((8, 9), False, diagonal=True),
}


@pytest.mark.parametrize("name", LATTICES)
def test_sweeps_of_lattices_have_no_gathers_and_no_scatters(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator, where lattices of all sizes are packed."""
    monkeypatch.setattr(gibbs, "accelerated", lambda: True)
    kernel = ebmpp.BlockedGibbs(ising(LATTICES[name]))
    params = kernel.graph.init(jax.random.key(0))
    state = kernel.init(jax.random.split(jax.random.key(1), 2), 0, None, (params,), {})
    jaxpr = str(jax.make_jaxpr(kernel.sample)(state, (params,), {}))
    assert "threefry" in jaxpr or "shift_left" in jaxpr
    assert not re.findall(r"\b(?:gather|scatter)[\w-]*\[", jaxpr)


@pytest.mark.parametrize(
    "graph",
    [
        nx.random_regular_graph(3, 40, seed=1),
        lattice((5, 5), False),
        nx.star_graph(7),
        nx.complete_graph(4),
    ],
)
def test_other_graphs_are_gathered(graph: nx.Graph) -> None:
    assert ising(graph).splits["x"].shifts == [None]


@pytest.mark.parametrize(
    ("name", "family", "observed"),
    [
        ("torus", Spin, True),
        nightly("torus", Bernoulli, False),
        nightly("open triangular", lambda n: Categorical(n, 3), True),
        nightly("cubic", Gaussian, False),
    ],
)
def test_draws_are_those_of_gathers(
    name: str, family: type, observed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In loops of their own, which large lattices have."""
    monkeypatch.setattr(backend, "_MIN_SIZE", 1)
    graph = ising(LATTICES[name], family, shared=False)
    params = random_params(graph, scale=0.1)
    size = graph.families["x"].size
    values = random_state(graph.families["x"], 1)
    blocks = {"x": Observed(values, np.arange(size) % 3 == 0)} if observed else {}
    target = Target.checked("test", graph, params, blocks)

    def run(target):
        keys = random.fold_in(np.array([0, 1], np.uint32), jnp.arange(ROWS))
        x = target.with_observed(gibbs.initial_rows(graph, ["x"], keys))
        return draw_sweep(target, x, gibbs_sweep(graph), keys)[0]["x"]

    drawn = []
    for is_on in (True, False):
        with packing(is_on):
            drawn.append(np.asarray(jax.jit(lambda t: run(t))(target)))
    assert len(np.unique(drawn[0])) > 1
    if observed:
        known = np.arange(size) % 3 == 0
        np.testing.assert_array_equal(
            drawn[0][:, known], np.tile(values[known], (ROWS, 1))
        )
    np.testing.assert_allclose(drawn[0], drawn[1], rtol=1e-4, atol=1e-5)


def test_large_lattices_are_packed() -> None:
    large = ising(lattice((64, 64), True)).splits["x"]
    small = ising(lattice((8, 8), True)).splits["x"]
    with mock.patch.object(gibbs, "accelerated", lambda: False):
        assert gibbs._packing_pays(large, 1) and gibbs._packing_pays(large, 32)
        assert not gibbs._packing_pays(small, 4) and not gibbs._packing_pays(large, 100)
    with mock.patch.object(gibbs, "accelerated", lambda: True):
        assert gibbs._packing_pays(large, 100) and gibbs._packing_pays(small, 1)
