# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Meeting is what the coupling says: pairs of reals meet, and a draw that cannot be made is flagged."""

from functools import cache, partial
from typing import Any

import numpy as np
import numpyro.distributions as dist
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, FactorGraph, Gaussian, layered
from ebmpp.core import random
from ebmpp.errors import ArgumentError, DeclarationError, UnmetError
from ebmpp.moves.couplings import Trial
from ebmpp.moves.gibbs import initial_rows
from ebmpp.moves.langevin import Langevin
from ebmpp.moves.layer import Layer
from ebmpp.moves.move import couple_focused, coupled_sweep, draw_sweep, equal
from ebmpp.moves.sweeps import resolve_moves
from ebmpp.moves.target import Target
from ebmpp.ppl import Conjugate, CoupledComposite, composite_expectation
from ebmpp.sampling import engine
from ebmpp.sampling.accumulators import EnergyGradient
from ebmpp.sampling.engine import Window, run_pairs
from helpers import often, pair, slow

PAIRS = 64
SWEEP = jax.jit(coupled_sweep, static_argnums=2)
REFLECTED = (Layer(("v",), "reflection"), Layer(("h",), "maximal"))


def steps(size: int) -> tuple[Langevin, Layer]:
    """Langevin steps that are taken: of 1,000 units those of 1.0 would be refused 24 times of 25."""
    return Langevin(("v",), 1.0 if size < 100 else 0.5, 2), Layer(("h",), "maximal")


@cache
def machine(size: int) -> FactorGraph:
    return layered(v=Gaussian(size, variance="learned"), h=Bernoulli(5))


def at_scale(size: int, scale: float, mean: float) -> dict[str, jax.Array]:
    """Units of standard deviation ``scale``, and hidden ones that move all of them by a third of it."""
    precision = scale**-2
    weight = 0.3 / scale / np.sqrt(size)
    return {
        "v": jnp.tile(jnp.float32([mean * scale * precision, -0.5 * precision]), (size, 1)),
        "h": jnp.full(5, -5 * weight * mean * scale),
        "v:h": jnp.full((size, 5), weight, jnp.float32),
    }


def times_of_sweeps(graph: FactorGraph, params: Any, moves: Any, key: jax.Array, x: dict) -> np.ndarray:
    """Meeting times by ``coupled_sweep`` from one start, with the words that the engine draws."""
    keys = random.fold_in(key, jnp.arange(PAIRS))
    target = Target(graph, params)
    ahead, _ = jax.jit(draw_sweep, static_argnums=2)(target, x, moves, random.fold_in(keys, 1))
    z = {b: jnp.stack([ahead[b], x[b]]) for b in x}
    found = np.full(PAIRS, -1)
    for t in range(2, 60):
        z, together, broken, _ = SWEEP(target, z, moves, random.fold_in(keys, t))
        assert not broken.any()
        same = np.all([equal(v) for v in z.values()], axis=0)
        np.testing.assert_array_equal(same, together)  # one value has the same bits in both chains
        assert same[found > 0].all()  # and they stay
        found = np.where((found < 0) & same, t, found)
        if (found > 0).all():
            return found
    raise AssertionError(f"{(found < 0).sum()} pairs did not meet")


@pytest.mark.parametrize(
    "moves", [None, slow(REFLECTED), slow(steps)], ids=["maximal", "reflection", "langevin"]
)
@pytest.mark.parametrize("size", often([3, 30, 1000], 30))
def test_pairs_of_reals_meet_at_every_size_and_scale(size: int, moves: Any) -> None:
    graph, key = machine(size), random.key_pair(jax.random.key(3))
    moves = resolve_moves(graph, steps(size) if moves is steps else moves)
    x = initial_rows(graph, graph.families, random.fold_in(key, 1, jnp.arange(PAIRS)))
    for scale in (1e-3, 0.07, 1.0, 1e3):
        params = at_scale(size, scale, 1.0)
        start = x | {"v": scale * x["v"]}
        window = Window(*(jnp.int32(n) for n in (1, 1, 1, 60)))
        made = run_pairs(Target(graph, params), moves, EnergyGradient(), 16, start, start, key, window)
        tau = np.asarray(made.meeting_time)
        np.testing.assert_array_equal(tau, times_of_sweeps(graph, params, moves, key, start))
        assert int(made.broken) == 0 and tau.max() > 2


@pytest.mark.slow
def test_a_narrow_gaussian_meets_as_soon_as_a_wide_one() -> None:
    graph = machine(10)
    for precision in (-100.0, -0.5):
        params = {
            "v": jnp.tile(jnp.array([0.3, precision]), (10, 1)),
            "h": jnp.zeros(5),
            "v:h": jnp.full((10, 5), -1e-3),
        }
        made = ebmpp.unbiased_expectation(
            graph,
            params,
            lambda x: x["v"].mean(),
            rng_key=jax.random.key(1),
            num_pairs=PAIRS,
            init={"v": jnp.full(10, 0.5)},
            max_sweeps=100,
        )
        assert made.num_unmet == 0 and made.meeting_time.mean() <= 3
        assert abs(made.value - -0.15 / precision) < 6 * made.standard_error + 1e-3


def test_reals_that_share_noise_alone_are_refused() -> None:
    graph = layered(v=Gaussian(2), h=Gaussian(2))
    with pytest.raises(DeclarationError, match="blocks 'v', 'h' could only come near"):
        resolve_moves(graph, "common")
    resolve_moves(layered(v=Gaussian(2), h=Bernoulli(2)), "common")  # h meets, and then v
    resolve_moves(graph, ("maximal", "common"))


# -- draws that cannot be made ---------------------------------------------------------------------


class Lopsided(Bernoulli):
    """Of a log-ratio that is too small by 1 at every value: its residual has no mass."""

    def unit_log_ratio(self, eta: jax.Array, other: jax.Array, statistics: jax.Array) -> jax.Array:
        return super().unit_log_ratio(eta, other, statistics) - 1


@pytest.mark.parametrize("max_sweeps", [None, 2])
def test_a_residual_without_mass_ends_and_is_told(
    max_sweeps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "MOST_TRIALS", 4096)
    graph = pair(Lopsided(2), Bernoulli(2))
    params = {"a": jnp.zeros(2), "b": jnp.zeros(2), "a:b": jnp.ones((2, 2))}
    run_pairs.clear_cache()
    with pytest.raises(UnmetError, match=r"\d+ of them because a draw could not be made"):
        ebmpp.unbiased_expectation(
            graph, params, lambda x: x["a"], rng_key=jax.random.key(0), num_pairs=20, max_sweeps=max_sweeps
        )
    run_pairs.clear_cache()


def test_a_sweep_gives_up_a_residual_without_mass() -> None:
    graph, rows = pair(Lopsided(2), Bernoulli(2)), jnp.ones(9, bool)
    eta = {"a": jnp.stack([jnp.zeros((9, 2)), jnp.ones((9, 2))])}
    z = {"a": jnp.zeros((2, 9, 2)), "b": jnp.zeros((2, 9, 2))}
    pairs = random.fold_in(random.key_pair(jax.random.key(0)), jnp.arange(9))
    draw = Trial(pairs, rows, ~rows, most=50)
    made = couple_focused(Target(graph, {}), eta, z, Layer(("a",), "maximal"), 0, draw)
    np.testing.assert_array_equal(made.broken, ~made.together["a"])
    assert made.broken.any() and not (made.broken & made.accept_y).any()


def test_a_pair_that_fails_after_it_has_met_is_not_done() -> None:
    """What it lacks until sweep m would count as nothing."""
    unit = dist.Normal(0.0, 1.0)
    law = lambda s: dist.Normal(0.0, jnp.where(s["a"] > 2, jnp.nan, 1.0))
    kernel = CoupledComposite([Conjugate("a", lambda s: unit, unit), Conjugate("b", law, unit)])
    run = partial(
        composite_expectation, kernel, lambda s: s["a"], rng_key=jax.random.key(0), num_pairs=50, k=1
    )
    with pytest.raises(
        UnmetError, match=r"(\d+) of 50 pairs had not met .*\1 of them because a draw could not"
    ):
        run(m=100)
    with pytest.warns(UserWarning, match="the estimate is biased"):
        made = run(m=20, unmet="drop")
    assert 0 < made.num_unmet < 50 and np.isinf(made.meeting_time[~made.met]).all()


# -- max_sweeps ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "is an int of at least 1, not 0"),
        (True, "is an int of at least 1, not True"),
        (2.0, r"is an int of at least 1, not 2.0 \(give 2\)"),
        (3, "is more than the lag, 3, or None for no limit; got 3"),
    ],
)
def test_a_limit_at_which_no_pair_could_have_met_is_refused(value: object, message: str) -> None:
    graph = pair(Bernoulli(2), Bernoulli(2))
    with pytest.raises(ArgumentError, match=f"unbiased_expectation: max_sweeps {message}"):
        ebmpp.unbiased_expectation(
            graph,
            graph.init(jax.random.key(0)),
            lambda x: x["a"],
            rng_key=jax.random.key(0),
            lag=3,
            max_sweeps=value,
        )
    with pytest.raises(ArgumentError, match=f"UCD: max_sweeps {message}"):
        ebmpp.UCD(k=1, lag=3, max_sweeps=value)


def test_an_adaptive_lag_stays_below_the_limit() -> None:
    window = ebmpp.UCD(max_sweeps=5).window(jnp.float32(40.0))
    assert (int(window.lag), int(window.k)) == (4, 40)
    with pytest.raises(ArgumentError, match="more than the lag, 1"):
        ebmpp.UCD(max_sweeps=1)
