# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Unbiased expectations against enumeration, starts, clamped blocks, unmet pairs and arguments."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from ucd_tools import flat, problem
import zoo

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, Bias, Bilinear, FactorGraph
from ebmpp.errors import ArgumentError, StateError, UnmetError
from ebmpp.sampling.expectation import UnbiasedEstimate
from helpers import assert_law, random_params

PAIRS = 2000
WINDOWS = [(0, 0, 1), (1, 1, 1), (2, 6, 3), (5, 5, 5), (3, 4, 2)]


def statistics(x: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {"h": x["h"], "v": x["v"], "v:h": jnp.outer(x["v"], x["h"])}


def estimate(seed: int = 1, **options: Any) -> UnbiasedEstimate:
    graph, params, _ = problem("rbm")
    options = {"rng_key": jax.random.key(seed), "num_pairs": PAIRS, **options}
    return ebmpp.unbiased_expectation(graph, params, statistics, **options)


def exact() -> np.ndarray:
    joint = zoo.Oracle(*problem("rbm")[:2], {})
    weights = np.exp(joint.log_weights - joint.log_z)
    both = np.einsum("s,si,sj->ij", weights, joint.x["v"], joint.x["h"])
    return flat({"h": weights @ joint.x["h"], "v": weights @ joint.x["v"], "v:h": both})


@pytest.mark.parametrize(("k", "m", "lag"), WINDOWS)
def test_estimates_are_unbiased(k: int, m: int, lag: int) -> None:
    result = estimate(k=k, m=m, lag=lag)
    assert_law(flat(result.value), exact(), flat(result.standard_error), exact().size * len(WINDOWS))
    assert result.met.all() and result.meeting_time.max() > lag + 1
    assert (result.cost == np.maximum(m, result.meeting_time) + result.meeting_time - lag).all()


def test_standard_errors_match_the_spread_of_estimates() -> None:
    results = [estimate(seed, k=0, m=2) for seed in range(40)]
    spread = np.std([flat(r.value) for r in results], axis=0, ddof=1)
    errors = np.mean([flat(r.standard_error) for r in results], axis=0)
    assert (np.abs(np.log(spread / errors)) < 0.45).all()  # 0.11 is one standard error


def test_starts_are_used_and_checked() -> None:
    ones = {"v": jnp.ones(4)}
    first = estimate(init=lambda key: ones)
    rows = {"v": np.ones((PAIRS, 4), np.float32)}
    np.testing.assert_array_equal(first.meeting_time, estimate(init=rows).meeting_time)
    assert (first.meeting_time != estimate().meeting_time).any()
    for init, message in (
        ({"v": jnp.full(4, 2.0)}, "block 'v'.*0, 1"),
        ({"v": jnp.ones((5, 4))}, r"\(5,\).*\(2000,\)"),
        ({"w": jnp.ones(4)}, "'w'"),
        (3, "dict.*3"),
    ):
        with pytest.raises(StateError, match=message):
            estimate(init=init)


#: "k", "fn" and "init" are arguments of unbiased_expectation
NAMES = ("k", "init")


def test_clamped_blocks_give_posterior_expectations() -> None:
    graph = FactorGraph(
        {"k": Bernoulli(2), "init": Bernoulli(2)},
        {"fn": Bernoulli(2)},
        [*map(Bias, (*NAMES, "fn")), *(Bilinear(name, "fn") for name in NAMES)],
    )
    params, clamped = random_params(graph, 1, scale=2.0), {"k": np.float32([1, 0])}
    posterior = zoo.Oracle(graph, params, clamped)
    weights = np.exp(posterior.log_weights - posterior.log_z)
    result = ebmpp.unbiased_expectation(
        graph, params, lambda x: x["fn"], rng_key=zoo.KEY, num_pairs=PAIRS, clamped=clamped
    )
    assert result.meeting_time.max() > 1
    assert_law(result.value, weights @ posterior.x["fn"], result.standard_error)
    search = ebmpp.local_search(graph, params, rng_key=zoo.KEY, clamped=clamped)
    assert search.state["k"].tolist() == [1, 0]
    run = lambda **options: ebmpp.local_search(graph, params, rng_key=zoo.KEY, **options)
    for options, message in (
        ({"k": clamped["k"], "clamped": clamped}, "block 'k'.*once"),
        ({"clamped": 3}, "clamped .*3"),
        ({"clamped": {"z": clamped["k"]}}, "'z'"),
    ):
        with pytest.raises(StateError, match=message):
            run(**options)
    with pytest.raises(StateError, match="every block is clamped"):
        estimate(v=jnp.ones(4), h=jnp.ones(3))


def test_unmet_pairs_raise_or_are_dropped_with_a_warning() -> None:
    with pytest.raises(UnmetError, match="of 2000 pairs .*max_sweeps"):
        estimate(max_sweeps=2)
    with pytest.warns(UserWarning, match="biased"):
        result = estimate(max_sweeps=2, unmet="drop")
    free = estimate()
    assert result.num_unmet == (~result.met).sum() == (free.meeting_time > 2).sum() > 0
    assert np.isinf(result.meeting_time[~result.met]).all() and np.isinf(result.cost[~result.met]).all()
    np.testing.assert_array_equal(result.meeting_time[result.met], free.meeting_time[result.met])
    # means of the pairs that met alone
    early = (free.meeting_time <= 2).mean()
    assert 0.1 < early < 0.95
    assert np.abs(flat(result.value) - exact()).max() > 5 * flat(result.standard_error).min()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pairs": 0}, "num_pairs .*0"),
        ({"k": 3, "m": 2}, "m .*3.*2"),
        ({"lag": 0}, "lag .*0"),
        ({"lag": 3, "max_sweeps": 3}, "max_sweeps .*3"),
        ({"max_sweeps": 2.0}, "max_sweeps .*2.0"),
        ({"unmet": "ignore"}, "unmet .*'ignore'"),
        ({"coupling": "best"}, "'best'"),
        ({"mesh": 8}, "mesh .*Mesh"),
    ],
)
def test_invalid_arguments_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        estimate(**options)


def test_repr_shows_values_and_errors() -> None:
    result = estimate()
    scalar = dataclasses.replace(result, value=jnp.float32(0.51234), standard_error=jnp.float32(0.00456))
    assert repr(scalar).startswith("UnbiasedEstimate(0.5123 +- 0.0046; 2000 pairs, 0 unmet, ")
    assert repr(result).startswith("UnbiasedEstimate(19 numbers from ")
