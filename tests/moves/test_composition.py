# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Default sweeps, and mixture proposals inside the engine: unbiased for any pool, the
data of one program.

Tests moves/move.py, moves/target.py.
"""

import numpy as np
import pytest
import zoo

import ebmpp
from ebmpp.contrib import Metropolized, metropolized_sweep
from ebmpp.core import random
from ebmpp.coupling.engine import run_pairs
from ebmpp.errors import StateError
from ebmpp.moves import Layer, gibbs_sweep, mixture_sweep
from ebmpp.moves.move import draw_sweep
from ebmpp.moves.sweeps import resolve_moves
from ebmpp.moves.target import Target
from helpers import assert_law


def statistics(x):
    return x["v"], x["h"]


@pytest.mark.nightly
def test_expectations_are_unbiased_for_any_pool_and_compile_once() -> None:
    graph, params = zoo.graph("rbm"), zoo.params("rbm")
    values = []
    for seed in range(2):
        pool = {
            "v": np.random.default_rng(seed).integers(0, 2, (7, 4)).astype(np.float32)
        }
        num_programs = run_pairs._cache_size()
        result = ebmpp.unbiased_expectation(
            graph,
            params,
            statistics,
            rng_key=zoo.KEY,
            num_pairs=zoo.NUM_PAIRS,
            coupling="mixture",
            pool=pool,
        )
        assert seed == 0 or num_programs == run_pairs._cache_size()
        for b, value, error in zip(
            "vh", result.value, result.standard_error, strict=True
        ):
            assert_law(value, zoo.moments("rbm")[b], error, 14)
        assert 0.2 < result.acceptance < 1
        values.append(result.value[0])
    assert (values[0] != values[1]).any()  # the pool is read


def test_targets_without_a_pool_are_refused() -> None:
    graph = zoo.graph("rbm")
    x, keys = (
        zoo.oracle("rbm").draw(np.random.default_rng(0), 3),
        random.fold_in(np.zeros(2, np.uint32), np.arange(3)),
    )
    with pytest.raises(StateError, match="pool"):
        draw_sweep(Target(graph, zoo.params("rbm")), x, mixture_sweep(graph), keys)


def test_moves_change_the_free_blocks() -> None:
    graph = zoo.graph("rbm")
    only_v = resolve_moves(graph, None)[:1]
    assert resolve_moves(graph, only_v, clamped=("h",)) == only_v
    assert resolve_moves(graph, only_v[0], clamped=("h",)) == only_v


def test_mixtures_propose_the_smaller_layer() -> None:
    moves = mixture_sweep(zoo.graph("deep"))
    assert [move.blocks for move in moves] == [
        ("h1",),
        ("v", "h2"),
        ("h1",),
        ("v", "h2"),
    ]


def test_metropolized_sweeps_move_the_visible_blocks_by_default() -> None:
    graph = zoo.graph("rbm")
    assert metropolized_sweep(graph) == (Metropolized(("v",)), Layer(("h",)))
    assert metropolized_sweep(graph, blocks="h", clamped=("v",)) == (
        Metropolized(("h",)),
    )
    assert metropolized_sweep(zoo.graph("gaussian")) == gibbs_sweep(
        zoo.graph("gaussian")
    )
