# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Proposals from first-order fields of any energy: exactness, pairs, and missing modes."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import zoo

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Bias, Bilinear, Categorical, Factor, FactorGraph, exact
from ebmpp.core import random
from ebmpp.moves import Mixture, Target, mixture_sweep
from ebmpp.moves.mixture import largest_weight, make_pool
from ebmpp.moves.move import coupled_sweep, draw_sweep
from helpers import assert_law

ROWS = 4000
PAIRS = 1000
KEY = jax.random.key(3)


def network(params: Any, v: Any, c: Any) -> Any:
    x = jnp.concatenate([2 * v - 1, c.ravel()])
    return jnp.tanh(jnp.tanh(x @ params["w"]) @ params["m"]) @ params["u"]


def declare() -> FactorGraph:
    """A network over bits and categories, and latents that an ordinary factor joins."""
    draw = np.random.default_rng(2).standard_normal
    init = {"w": draw((9, 8)), "m": draw((8, 4)), "u": 2 * draw(4)}
    return FactorGraph(
        {"v": Bernoulli(3), "c": Categorical(2, 3)},
        {"h": Bernoulli(2)},
        [
            Factor("v", "c", energy=network, init=init, affine=False),
            Bias("h"),
            Bilinear("v", "h"),
        ],
    )


@functools.cache
def problem(tries: int = 4) -> tuple[Target, tuple, dict, np.ndarray]:
    """Return a target with a pool, proposals from it, all states and their probabilities.

    The draw of the latents that are summed out follows the proposal.
    """
    graph = declare()
    weights = np.random.default_rng(4).standard_normal((3, 2))
    params = graph.init(KEY) | {"v:h": weights, "h": np.array([0.5, -0.3])}
    states, probs = jax.device_get(exact.probabilities(graph, params))
    *_, move, last = mixture_sweep(graph)
    move = dataclasses.replace(move, tries=tries)
    target = Target(graph, params)
    pool = make_pool(target, move, drawn(states, probs, 12, 1))
    target = dataclasses.replace(target, pool=pool)
    return target, (move, last), states, probs


def drawn(states: dict, probs: np.ndarray, count: int, seed: int) -> dict:
    share = probs.astype(float)
    index = np.random.default_rng(seed).choice(len(probs), count, p=share / share.sum())
    return {b: v[index] for b, v in states.items()}


def keys(number: int) -> Any:
    return random.fold_in(np.array([0, 5], np.uint32), number, np.arange(ROWS))


def assert_exact(x: dict, states: dict, probs: np.ndarray, num_tests: int) -> None:
    """Assert that rows have the exact frequencies of products of all values."""

    def features(x):
        units = [np.asarray(x["v"]), np.asarray(x["h"])]
        units += [np.asarray(x["c"]) == k for k in (1, 2)]
        t = np.concatenate(units, 1).astype(float)
        first, second = np.triu_indices(t.shape[1])
        return t[:, first] * t[:, second]

    values = features(x)
    error = values.std(0, ddof=1) / len(values) ** 0.5
    varies = error > 0
    mean = probs.astype(float) @ features(states)
    assert_law(
        values.mean(0)[varies], mean[varies], error[varies], num_tests * varies.sum()
    )


def test_sweeps_sum_out_latents_and_propose_the_rest() -> None:
    graph = declare()
    *local, move, last = mixture_sweep(graph)
    assert (move.blocks, move.marginalize, move.tries) == (("v", "c"), ("h",), 16)
    assert [m.blocks for m in local] == [("v",), ("c",)] and last.blocks == ("h",)
    _, move, last = mixture_sweep(graph, ["v"])
    assert (move.blocks, move.marginalize) == (("c",), ("h",))
    *_, move = mixture_sweep(MODES)
    assert (move.blocks, move.marginalize) == (("v",), ())


@pytest.mark.parametrize("tries", [1, 4])
def test_single_chains_keep_the_distribution(tries: int) -> None:
    target, moves, states, probs = problem(tries)
    assert probs.max() > 40 * probs.min()
    x = drawn(states, probs, ROWS, 2)
    x, accepted = _alone(target, x, moves, keys(0))
    assert_exact(x, states, probs, 1)
    assert 0.05 < accepted.mean() < 0.95


_alone = jax.jit(draw_sweep, static_argnums=2)
_coupled = jax.jit(coupled_sweep, static_argnums=2)


@pytest.mark.nightly
@pytest.mark.parametrize("tries", [1, 4])
def test_pairs_keep_the_distribution_and_stay_together(tries: int) -> None:
    target, moves, states, probs = problem(tries)
    x, y = (drawn(states, probs, ROWS, seed) for seed in (3, 4))
    z = {b: np.stack([x[b], y[b]]) for b in x}
    has_met = np.zeros(ROWS, bool)
    for t in range(8):
        z, agrees, broken, _ = _coupled(target, z, moves, keys(t))
        z = jax.device_get(z)
        equal = [(v[0] == v[1]).all(1) for v in z.values()]
        assert not np.asarray(broken).any()
        assert np.all(equal, axis=0)[np.asarray(agrees)].all()
        assert np.asarray(agrees)[has_met].all()
        has_met = np.asarray(agrees)
        for chain in range(2):
            assert_exact({b: v[chain] for b, v in z.items()}, states, probs, 16)
    assert has_met.mean() > 0.3


def estimate(tries: int = 4, **options: Any) -> Any:
    target, moves, states, probs = problem(tries)
    options = {
        "rng_key": KEY,
        "num_pairs": PAIRS,
        "coupling": moves,
        "pool": drawn(states, probs, 12, 1),
    } | options
    return ebmpp.unbiased_expectation(
        target.graph, target.params, lambda x: (x["v"], x["c"] == 2, x["h"]), **options
    )


@pytest.mark.nightly
@pytest.mark.parametrize("tries", [1, 4])
def test_expectations_are_unbiased(tries: int) -> None:
    *_, states, probs = problem(tries)
    est = estimate(tries, k=1, num_slots=64)
    exact_values = states["v"], states["c"] == 2, states["h"]
    for value, error, of_states in zip(
        est.value, est.standard_error, exact_values, strict=True
    ):
        assert_law(value, probs.astype(float) @ of_states, error, 7)
    assert 0.05 < est.acceptance < 0.95 and est.largest_weight > 1
    assert "largest weight" in str(est._card())
    if tries > 1:  # draws do not depend on the pairs that run at once
        fewer = estimate(tries, num_pairs=300, num_slots=7, k=1)
        np.testing.assert_array_equal(fewer.meeting_time, est.meeting_time[:300])


def two_modes(params: Any, v: Any) -> Any:
    mean = (2 * v - 1).mean()
    return -params["a"] * mean**2 - params["b"] * mean


MODES = FactorGraph(
    {"v": Bernoulli(10)},
    factors=[
        Factor(
            "v",
            energy=two_modes,
            init={"a": np.array(18.0), "b": np.array(0.2)},
            affine=False,
        )
    ],
)


@pytest.mark.nightly
def test_a_mode_that_the_pool_lacks_shows_in_meeting_times() -> None:
    """Pairs that start in the pool's mode meet at once, and hide the other mode."""
    params = MODES.init(KEY)
    states, probs = jax.device_get(exact.probabilities(MODES, params))
    truth = probs.astype(float) @ states["v"][:, 0]
    pool = {"v": np.float32(np.random.default_rng(0).random((20, 10)) < 0.9)}
    assert 0.2 < truth < 0.8  # both modes count
    results = {}
    for name, init in (("pool", pool["v"][0]), ("independent", None)):
        results[name] = ebmpp.unbiased_expectation(
            MODES,
            params,
            lambda x: x["v"][0],
            rng_key=KEY,
            num_pairs=PAIRS,
            coupling="mixture",
            pool=pool,
            init=None if init is None else {"v": init},
            k=1,
        )
    near, far = results["pool"], results["independent"]
    assert (near.meeting_time > 30).mean() < 0.03 < 0.2 < (far.meeting_time > 30).mean()
    assert far.largest_weight > 1000
    assert_law(far.value, truth, far.standard_error, 1)


def test_an_energy_that_is_nan_is_reported() -> None:
    target, moves, states, _ = problem()
    x = {b: np.repeat(v[:1], ROWS, axis=0) for b, v in states.items()}

    @jax.jit
    def draw(bias, keys):
        params = target.params | {"h": bias}
        changed = dataclasses.replace(target, params=params)
        return draw_sweep(changed, x, moves[:1], keys)

    bias = target.params["h"]
    for factor in (1.0, np.nan):
        moved, _ = draw(bias * factor, keys(1))
        assert ((np.asarray(moved["c"]) < 0) == np.isnan(factor)).all()


@pytest.mark.nightly
def test_weights_of_equal_densities_are_one() -> None:
    """Without interactions the proposal is the model."""
    graph = ebmpp.layered(v=Bernoulli(4), h=Bernoulli(2))
    target = Target(graph, jax.tree.map(np.zeros_like, graph.init(KEY)))
    move = Mixture(("h",), ("v",), tries=3)
    rows = {"v": np.ones((5, 4), np.float32), "h": np.ones((5, 2), np.float32)}
    target = dataclasses.replace(target, pool=make_pool(target, move, rows))
    weight = largest_weight(target, move, rows, keys(0)[:5])
    np.testing.assert_allclose(weight, 1, rtol=1e-5)


def test_one_proposal_from_conditionals_takes_known_words() -> None:
    """In two layers, draws equal a separate Metropolis-Hastings step bit by bit."""
    graph, params = zoo.graph("rbm"), zoo.params("rbm")
    move = mixture_sweep(graph)[0]
    assert (move.blocks, move.marginalize, move.tries) == (("h",), ("v",), 1)
    oracle = zoo.oracle("rbm")
    rows, x = (oracle.draw(np.random.default_rng(n), n) for n in (5, 200))
    target = Target(graph, params)
    pool = make_pool(target, move, rows)
    target = dataclasses.replace(target, pool=pool)
    drawn, accepted = move.draw(target, x, keys(0)[:200])
    words = random.words(keys(0)[:200], 6)
    eta = np.asarray(pool.eta["h"])
    proposal = graph.families["h"].sample(words[:, :3, None], eta[words[:, 3] % 5])

    def log_weight(h):
        h = np.asarray(h, float)
        field = params["v"] + h @ np.asarray(params["v:h"]).T
        log_target = h @ params["h"] + np.logaddexp(0, field).sum(1)
        log_proposal = h @ eta.T - np.logaddexp(0, eta).sum(1)
        return log_target - np.logaddexp.reduce(log_proposal, axis=1)

    log_u = np.log(random.uniform(words[:, 4]))
    accept = log_u < log_weight(proposal) - log_weight(x["h"])
    assert 0 < accept.sum() < 200
    np.testing.assert_array_equal(accepted, accept)
    np.testing.assert_array_equal(
        drawn["h"], np.where(accept[:, None], proposal, x["h"])
    )
