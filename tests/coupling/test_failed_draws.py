# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Pairs of real units meet, and a draw that cannot be made is flagged."""

from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from ucd_tools import key
import zoo

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, FactorGraph, Gaussian, layered
from ebmpp.contrib import Langevin
from ebmpp.core import random
from ebmpp.coupling import engine
from ebmpp.coupling.accumulators import EnergyGradient
from ebmpp.coupling.engine import Window, run_pairs
from ebmpp.errors import DeclarationError, UnmetError
from ebmpp.moves import Layer, couplings
from ebmpp.moves.couplings import Trial
from ebmpp.moves.gibbs import initial_rows
from ebmpp.moves.move import couple_focused, coupled_sweep, draw_sweep, rows_equal
from ebmpp.moves.sweeps import resolve_moves
from ebmpp.moves.target import Target
from helpers import nightly, pair

PAIRS = 64
coupled = jax.jit(coupled_sweep, static_argnums=2)
draw = jax.jit(draw_sweep, static_argnums=2)
REFLECTED = (Layer(("v",), "reflection"), Layer(("h",), "maximal"))
LANGEVIN = (Langevin(("v",), 1.0, 2), Layer(("h",), "maximal"))


@cache
def machine(size: int) -> FactorGraph:
    return layered(v=Gaussian(size, variance="learned"), h=Bernoulli(5))


def at_scale(size: int, scale: float) -> dict[str, jax.Array]:
    """Units of mean and standard deviation ``scale``; hidden ones move all of them by a
    third of it."""
    weight = 0.3 / scale / np.sqrt(size)
    v = np.tile(np.float32([1 / scale, -0.5 * scale**-2]), (size, 1))
    full = lambda shape, value: jnp.asarray(np.full(shape, value, np.float32))
    return {
        "v": jnp.asarray(v),
        "h": full(5, -5 * weight * scale),
        "v:h": full((size, 5), weight),
    }


def times_of_sweeps(
    graph: FactorGraph, params: Any, moves: Any, pair: jax.Array, x: dict
) -> np.ndarray:
    """Meeting times by single sweeps, with the words that the engine draws."""
    keys, target = random.fold_in(pair, np.arange(PAIRS)), Target(graph, params)
    leading, _ = draw(target, x, moves, random.fold_in(keys, 1))
    z = {b: jnp.stack([leading[b], x[b]]) for b in x}
    times = np.full(PAIRS, -1)
    for t in range(2, 60):
        z, together, broken, _ = coupled(target, z, moves, random.fold_in(keys, t))
        assert not broken.any()
        same = np.all([rows_equal(v) for v in z.values()], axis=0)
        # equal values have the same bits in both chains
        np.testing.assert_array_equal(same, together)
        assert same[times > 0].all()  # and they stay equal
        times = np.where((times < 0) & same, t, times)
        if (times > 0).all():
            return times
    raise AssertionError(f"{(times < 0).sum()} pairs did not meet")


@pytest.mark.parametrize(
    ("size", "moves", "by_sweeps"),
    [
        nightly(30, None, False),
        nightly(3, None, True),
        nightly(1000, REFLECTED, True),
        nightly(30, LANGEVIN, True),
    ],
    ids=str,
)
def test_pairs_of_real_units_meet_at_every_scale(
    size: int, moves: Any, by_sweeps: bool
) -> None:
    graph, pair = machine(size), key(3)
    moves = resolve_moves(graph, moves)
    x = jax.jit(lambda keys: initial_rows(graph, graph.families, keys))(
        random.fold_in(pair, 1, np.arange(PAIRS))
    )
    for scale in (1e-3, 1e3):
        params = at_scale(size, scale)
        start = {**x, "v": np.float32(scale) * np.asarray(x["v"])}
        window = Window(*(np.int32(n) for n in (1, 1, 1, 60)))
        result = run_pairs(
            Target(graph, params),
            moves,
            EnergyGradient(),
            16,
            start,
            start,
            pair,
            window,
        )
        tau = np.asarray(result.meeting_time)
        assert int(result.broken) == 0 and tau.min() > 0 and tau.max() > 2
        if by_sweeps:
            np.testing.assert_array_equal(
                tau, times_of_sweeps(graph, params, moves, pair, start)
            )


def test_real_units_that_only_share_noise_are_refused() -> None:
    graph = layered(v=Gaussian(2), h=Gaussian(2))
    with pytest.raises(DeclarationError, match="'v', 'h'"):
        resolve_moves(graph, "common")
    # h meets, and then v
    resolve_moves(layered(v=Gaussian(2), h=Bernoulli(2)), "common")
    resolve_moves(graph, ("maximal", "common"))


class Lopsided(Bernoulli):
    """Log ratios are too small by 1 at every value, so that the residual has no mass."""

    def unit_log_ratio(
        self, eta: jax.Array, other: jax.Array, statistics: jax.Array
    ) -> jax.Array:
        return super().unit_log_ratio(eta, other, statistics) - 1


def test_a_residual_without_mass_is_flagged() -> None:
    graph, rows = pair(Lopsided(2), Bernoulli(2)), np.ones(9, bool)
    eta = {"a": np.stack([np.zeros((9, 2), np.float32), np.ones((9, 2), np.float32)])}
    z = {b: np.zeros((2, 9, 2), np.float32) for b in ("a", "b")}

    @jax.jit
    def attempt(pairs: jax.Array) -> Any:
        trial = Trial(pairs, jnp.asarray(rows), jnp.asarray(~rows), most=50)
        return couple_focused(
            Target(graph, {}), eta, z, Layer(("a",), "maximal"), 0, trial
        )

    result = attempt(random.fold_in(key(0), np.arange(9)))
    np.testing.assert_array_equal(result.broken, ~result.together["a"])
    assert result.broken.any() and not (result.broken & result.accept_y).any()


@pytest.mark.nightly
def test_a_residual_without_mass_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.MOST_TRIALS == couplings.MOST_TRIALS
    monkeypatch.setattr(engine, "MOST_TRIALS", 4096)
    graph = pair(Lopsided(2), Bernoulli(2))
    params = {"a": jnp.zeros(2), "b": jnp.zeros(2), "a:b": jnp.ones((2, 2))}
    run = partial(
        ebmpp.unbiased_expectation,
        graph,
        params,
        lambda x: x["a"],
        rng_key=zoo.KEY,
        num_pairs=20,
    )
    for max_sweeps in (None, 2):
        with pytest.raises(UnmetError, match=r"\d+ because a draw failed"):
            run(max_sweeps=max_sweeps)
