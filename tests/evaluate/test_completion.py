# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Completion of partially observed rows against enumeration.

Tests evaluate/completion.py.
"""

import functools
from typing import Any

import numpy as np
from oracle import statistics_of
import pytest
import zoo

import jax

import ebmpp
from ebmpp import Bernoulli, Categorical, Observed, layered
from helpers import assert_law, random_params

KEY = jax.random.key(3)
#: a half, a random mask, all but one entry, nothing
TABLE = np.array(
    [[2, 0, np.nan, np.nan], [np.nan, 1, np.nan, 2], [0, 1, np.nan, 2], [np.nan] * 4]
)
BLOCKS = ("v", "h1", "h2")


@functools.cache
def deep() -> tuple[ebmpp.FactorGraph, dict[str, Any]]:
    graph = layered(v=Categorical(4, 3), h1=Bernoulli(2), h2=Bernoulli(2))
    return graph, random_params(graph, seed=1, scale=1.0)


@functools.cache
def completed(method: str = "posterior") -> ebmpp.evaluate.Completion:
    options = {"num_chains": 400, "num_warmup": 30, "num_samples": 30}
    if method == "local_mode":
        options = {"num_chains": 50, "method": method}
    return ebmpp.complete(
        *deep(), rng_key=KEY, v=Observed.where_finite(TABLE), **options
    )


@functools.cache
def posterior(row: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The states that agree with a row, and their probabilities."""
    joint = zoo.Oracle(*deep(), {})
    known = np.isfinite(TABLE[row])
    agree = (joint.x["v"] == TABLE[row])[:, known].all(1)
    weights = np.exp(
        joint.log_weights[agree] - np.logaddexp.reduce(joint.log_weights[agree])
    )
    return {b: v[agree] for b, v in joint.x.items()}, weights


def table_of(block: str, x: Any) -> np.ndarray:
    """Statistics, ``(rows, statistics)``."""
    return statistics_of(deep()[0].families[block], np.asarray(x))


@pytest.mark.nightly
@pytest.mark.parametrize("row", range(len(TABLE)))
def test_means_draws_and_modes_match_the_posterior(row: int) -> None:
    result, (states, weights), known = (
        completed(),
        posterior(row),
        np.isfinite(TABLE[row]),
    )
    for b in BLOCKS:
        exact = weights @ table_of(b, states[b])
        mean, error = (
            np.asarray(a[b][row]).ravel() for a in (result.mean, result.standard_error)
        )
        assert_law(mean, exact, error, 4 * 16)
        draws = table_of(b, result.draws[b][:, row])
        spread = draws.std(0, ddof=1) / np.sqrt(len(draws))
        # a value that no draw takes shows no error: use that of its probability
        bound = np.sqrt(np.abs(exact * (1 - exact)) / len(draws))
        assert_law(draws.mean(0), exact, np.maximum(spread, bound), 4 * 16)
        np.testing.assert_array_equal(result.mode[b][row], states[b][weights.argmax()])
    assert (result.draws["v"][:, row][:, known] == TABLE[row][known]).all()
    np.testing.assert_array_equal(result.standard_error["v"][row][known], 0)
    np.testing.assert_array_equal(
        result.mean["v"][row][known].argmax(-1), TABLE[row][known]
    )


@pytest.mark.nightly
def test_means_have_less_noise_than_draws() -> None:
    result, free = completed(), ~np.isfinite(TABLE)
    spread = (result.draws["v"][..., None] == np.arange(3)).std(0, ddof=1) / np.sqrt(
        400
    )
    assert (result.standard_error["v"][free].mean(0) < 0.5 * spread[free].mean(0)).all()
    assert result.r_hat.shape == (4,) and (result.r_hat < 1.05).all()


@pytest.mark.nightly
def test_local_modes_are_the_most_probable_states() -> None:
    result, (graph, params) = completed("local_mode"), deep()
    assert result.standard_error is None and result.r_hat is None
    for row in range(len(TABLE)):
        states, weights = posterior(row)
        for b in BLOCKS:
            np.testing.assert_array_equal(
                result.mode[b][row], states[b][weights.argmax()]
            )
    np.testing.assert_allclose(
        result.log_density, graph.log_density(params, result.mode), rtol=1e-5
    )
    for b in BLOCKS:  # means are those given the rest
        mean = np.array(graph.mean(params, result.mode, b))
        if b == "v":
            known = np.isfinite(TABLE)
            mean[known] = np.eye(3)[TABLE[known].astype(int)]
        np.testing.assert_allclose(result.mean[b], mean, atol=1e-6)


def test_one_free_layer_is_exact_and_leading_axes_are_kept() -> None:
    graph, params = zoo.graph("gaussian"), zoo.params("gaussian")
    v = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)
    result = ebmpp.complete(
        graph, params, rng_key=KEY, num_chains=2, num_warmup=0, num_samples=1, v=v
    )
    exact = 1 / (1 + np.exp(-(np.asarray(params["h"]) + v @ np.asarray(params["v:h"]))))
    np.testing.assert_allclose(result.mean["h"], exact, rtol=1e-5)
    assert set(result.mean) == {"h"} and result.draws["h"].shape == (2, 2, 5, 2)
    assert result.mode["h"].shape == (2, 5, 2)
    np.testing.assert_allclose(result.standard_error["h"], 0, atol=1e-7)


@pytest.mark.nightly
def test_rows_do_not_depend_on_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"rng_key": KEY, "num_chains": 3, "num_warmup": 2, "num_samples": 2}
    run = lambda table: ebmpp.complete(
        *deep(), v=Observed.where_finite(table), **options
    )
    together, first = run(TABLE), run(TABLE[:1])
    # three rows at a time
    monkeypatch.setattr(ebmpp.evaluate.completion, "_MAX_CHAINS", 9)
    parts = run(TABLE)
    for b in BLOCKS:
        np.testing.assert_array_equal(together.draws[b], parts.draws[b])
        np.testing.assert_array_equal(together.draws[b][:, :1], first.draws[b])
        np.testing.assert_allclose(together.mean[b], parts.mean[b], atol=1e-6)
