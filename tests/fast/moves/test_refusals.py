# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Moves that would sample another distribution are refused; default sweeps are composed as documented."""

import dataclasses
from typing import Any

import networkx as nx
import numpy as np
import pytest
import zoo

import ebmpp
from ebmpp import Bernoulli, Bias, FactorGraph, Gaussian, Observed, Spin
from ebmpp.contrib import Metropolis, Metropolized, metropolis_sweep, metropolized_sweep
from ebmpp.errors import ArgumentError, DeclarationError, IntractableError, StateError
from ebmpp.moves import Layer, Mixture, gibbs_sweep, mixture_sweep
from ebmpp.moves.sweeps import resolve_moves
from helpers import pair


def test_moves_must_change_exactly_the_free_blocks() -> None:
    graph = zoo.graph("rbm")
    only_v = resolve_moves(graph, None)[:1]
    with pytest.raises(ArgumentError, match=r"\['v'\].*\['h', 'v'\]"):
        resolve_moves(graph, only_v)
    assert resolve_moves(graph, only_v, clamped=("h",)) == only_v
    assert resolve_moves(graph, only_v[0], clamped=("h",)) == only_v


V_AND_H1 = Layer(("v",)), Layer(("h1",))


@pytest.mark.parametrize(
    ("name", "moves", "error", "message"),
    [
        ("rbm", (Layer(("v", "h")),), IntractableError, "'v' and 'h'"),
        ("rbm", (Layer(("v",), "maximl"), Layer(("h",))), ArgumentError, "'maximl'"),
        ("rbm", (Metropolis(("v", "h"), "unform"),), ArgumentError, "'unform'"),
        ("rbm", (Layer(("h",)), Metropolis(("v",), marginalize=("h",))), ArgumentError, "Layer"),
        ("poisson", (Metropolis(("v", "h")),), DeclarationError, "'v'"),
        ("deep", (Mixture(("v", "h1"), ("h2",)), Layer(("h2",))), IntractableError, "'v' and 'h1'"),
        ("deep", (Mixture(("h2",), ("v", "h1")), *V_AND_H1), IntractableError, "'v' and 'h1'"),
        ("deep", (Mixture(("h1",), ("v", "h2")), Layer(("h1",)), Layer(("v", "h2"))), ArgumentError, "Layer"),
        ("rbm", (Metropolized(("v",), "maximal"), Layer(("h",))), ArgumentError, "'maximal'"),
        ("rbm", (Metropolized(("v", "h")),), IntractableError, "interact"),
        ("gaussian", (Metropolized(("v",)), Layer(("h",))), IntractableError, "'v'"),
    ],
)
def test_invalid_moves_are_refused(name: str, moves: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        resolve_moves(zoo.graph(name), moves)


def test_real_blocks_that_only_share_noise_are_refused() -> None:
    """Such pairs come near each other and never meet."""
    graph = FactorGraph.from_networkx(nx.path_graph(2), Gaussian)
    with pytest.raises(DeclarationError, match="'x'"):
        resolve_moves(graph, "common")


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (lambda: zoo.graph("gated"), "'a'.*'b'.*'c'"),
        (lambda: zoo.graph("lattice"), "'x'"),
        (lambda: FactorGraph({"a": Bernoulli(2)}, factors=[Bias("a")]), "'a'"),
    ],
)
def test_mixtures_need_two_layers(graph: Any, message: str) -> None:
    with pytest.raises(IntractableError, match=message):
        resolve_moves(graph(), "mixture")


def test_mixtures_propose_the_smaller_layer_from_at_least_one_component() -> None:
    moves = mixture_sweep(zoo.graph("deep"))
    assert [move.blocks for move in moves] == [("h1",), ("v", "h2"), ("h1",), ("v", "h2")]
    with pytest.raises(ArgumentError, match="components.*0"):
        resolve_moves(zoo.graph("deep"), (dataclasses.replace(moves[0], components=0), *moves[1:]))


def test_metropolized_sweeps_move_the_visible_blocks_by_default() -> None:
    graph = zoo.graph("rbm")
    assert metropolized_sweep(graph) == (Metropolized(("v",)), Layer(("h",)))
    assert metropolized_sweep(graph, blocks="h", clamped=("v",)) == (Metropolized(("h",)),)
    assert metropolized_sweep(zoo.graph("gaussian")) == gibbs_sweep(zoo.graph("gaussian"))
    with pytest.raises(ArgumentError, match="'c'"):
        metropolized_sweep(graph, blocks="c")
    with pytest.raises(IntractableError, match="'b'"):
        metropolized_sweep(pair(Spin(2), Gaussian(2)), blocks="b")


def test_observed_units_are_not_summed_out_and_pools_must_fit() -> None:
    graph, params = zoo.graph("rbm"), zoo.params("rbm")
    units = lambda x: x["v"]
    run = lambda **options: ebmpp.unbiased_expectation(graph, params, units, rng_key=zoo.KEY, **options)
    observed = {b: Observed(np.ones(n), np.arange(n) == 1) for b, n in (("v", 4), ("h", 3))}
    with pytest.raises(IntractableError, match="'h'"):
        run(coupling=metropolis_sweep(graph, marginalize="h"), h=observed["h"])
    with pytest.raises(ArgumentError, match="mixture"):
        run(pool={"v": np.ones((2, 4))})
    with pytest.raises(ArgumentError, match="pool"):
        run(coupling="mixture")
    pools = {
        "pool": 3,
        "leading": {"v": np.ones(4)},
        "'c'": {"c": np.ones((2, 3))},
        "0.5": {"v": np.ones((2, 4)) / 2},
    }
    for message, pool in pools.items():
        with pytest.raises(StateError, match=message):
            run(coupling="mixture", pool=pool)
    with pytest.raises(StateError, match="observed"):
        run(coupling="mixture", pool={"h": np.ones((2, 3))}, v=observed["v"])
