# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Pairs are made ready some at a time: their draws do not depend on it, and memory holds no more of them."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp.core import random
from ebmpp.moves.sweeps import resolve_moves
from ebmpp.moves.target import Target
from ebmpp.sampling import slots
from ebmpp.sampling.accumulators import EnergyGradient
from ebmpp.sampling.engine import Window, run_pairs
from ebmpp.sampling.pairs import Fresh
from helpers import random_params

JOBS, PART = 70, 32  # the last part begins among those of the part before
GRAPH = ebmpp.layered(v=ebmpp.Bernoulli(5), h=ebmpp.Bernoulli(4))
PARAMS = random_params(GRAPH, seed=4, scale=1.2)
ROWS = np.random.default_rng(0).integers(0, 2, (JOBS, 5)).astype(np.float32)
MOVES = resolve_moves(GRAPH, None)


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Call it, and pairs are made ready in parts from there on."""

    def begin() -> None:
        monkeypatch.setattr(slots, "_READY", PART)
        run_pairs.clear_cache()

    yield begin
    run_pairs.clear_cache()


def ink(x: dict[str, jax.Array]) -> jax.Array:
    return x["v"].sum() + 10 * x["h"][0]


STARTS = {
    "from rows, the chains apart": {"init": {"v": ROWS}, "independent_starts": True, "m": 5, "lag": 3},
    "given a row each, over devices": {"v": ROWS, "mesh": jax.make_mesh((2,), ("rows",))},
}


def test_pairs_in_parts_are_those_of_one_run(in_parts: Callable[[], None]) -> None:
    made = lambda options: ebmpp.unbiased_expectation(
        GRAPH, PARAMS, ink, rng_key=jax.random.key(3), num_pairs=JOBS, **options
    )
    whole = {name: made(options) for name, options in STARTS.items()}
    in_parts()
    for name, options in STARTS.items():
        parts = made(options)
        assert len(np.unique(parts.meeting_time)) > 1, name
        np.testing.assert_array_equal(parts.meeting_time, whole[name].meeting_time, err_msg=name)
        np.testing.assert_allclose(parts.value, whole[name].value, rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(parts.standard_error, whole[name].standard_error, rtol=1e-6, err_msg=name)


def test_sums_and_counts_in_parts_are_those_of_one_run(in_parts: Callable[[], None]) -> None:
    """What all pairs share counts each of them once, those of two parts too."""
    window = Window(*(jnp.int32(n) for n in (1, 6, 4, 7)))  # some are stopped
    x = {"v": jnp.asarray(ROWS), "h": jnp.ones((JOBS, 4))}
    key, weights = random.key_pair(jax.random.key(8)), jnp.linspace(0, 2, JOBS)

    def run() -> Any:
        return run_pairs(Target(GRAPH, PARAMS), MOVES, EnergyGradient(), 16, x, None, key, window, weights)

    whole = run()
    in_parts()
    parts = run()
    assert 0 < (np.asarray(whole.meeting_time) < 0).sum() < JOBS
    np.testing.assert_array_equal(parts.meeting_time, whole.meeting_time)
    np.testing.assert_allclose(parts.trials, whole.trials, rtol=1e-6)
    for name, total in whole.total.items():
        np.testing.assert_allclose(parts.total[name], total, rtol=1e-5, atol=1e-4, err_msg=name)


def test_memory_grows_by_a_key_and_a_time_a_pair(in_parts: Callable[[], None]) -> None:
    graph = ebmpp.layered(v=ebmpp.Bernoulli(300), h=ebmpp.Bernoulli(40))
    params = jax.eval_shape(graph.init, jax.random.key(0))
    window = Window(*(np.int32(n) for n in (1, 1, 1, 0)))
    in_parts()

    def size(jobs: int) -> int:
        keys, key = jnp.zeros((jobs, 2), jnp.uint32), jax.ShapeDtypeStruct((2,), jnp.uint32)
        statics = resolve_moves(graph, None), EnergyGradient(), 16
        starts = Fresh(keys, {}, "uniform")
        made = run_pairs.lower(Target(graph, params), *statics, starts, None, key, window)
        memory = made.compile().memory_analysis()
        return memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes

    more = (size(16 * PART) - size(8 * PART)) / (8 * PART)
    assert 8 <= more < 64, f"{more} bytes a pair"  # a pair's start alone is 1360
