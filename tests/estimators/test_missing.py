# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Rows with missing entries: the likelihood of known entries, its gradient, and refusals."""

from typing import Any

import numpy as np
import pytest
from ucd_tools import assert_mean, exact_gradient, key, log_likelihood, problem
import zoo

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp import CD, PCD, UCD, Gaussian, Observed, exact, layered
from ebmpp.contrib import LocalModeUCD
from ebmpp.errors import IntractableError, StateError
from ebmpp.estimators import Batch, Centered, Discriminative, Estimator, MeanField
from ebmpp.estimators.phases import complete_batch
from helpers import assert_rows_law, nightly, random_params

DRAWS = 600


def some_rows(name: str, num_rows: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ``v``, and which units are known: all of the first, none of the last."""
    generator = np.random.default_rng(0)
    values = zoo.rows(name, num_rows)["v"]
    known = generator.random(values.shape) < 0.6
    known[0], known[-1] = True, False
    return values, known


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["rbm", "deep", "categorical"])
def test_likelihood_of_known_entries_matches_enumeration(name: str) -> None:
    graph, params, (values, known) = zoo.graph(name), zoo.params(name), some_rows(name)
    expected = log_likelihood(graph, params, {"v": values}, {"v": known})
    result = exact.log_likelihood(graph, params, {"v": Observed(values, known)})
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=2e-6)
    assert abs(expected[-1]) < 1e-9  # nothing is known


@pytest.mark.nightly
@pytest.mark.parametrize("latent", [nightly(ebmpp.Bernoulli(2)), Gaussian(2)])
def test_unknown_gaussian_units_are_integrated_out(latent: ebmpp.Family) -> None:
    graph = layered(v=Gaussian(2), h=latent)
    params = random_params(graph, 2, scale=0.3)
    v, grid = np.array([[0.7, np.nan], [-1.2, np.nan]]), np.linspace(-12, 12, 801)
    rows = np.stack(np.broadcast_arrays(v[:, :1], grid), -1)
    dense = np.asarray(exact.log_likelihood(graph, params, rows), float)
    expected = np.log(np.trapezoid(np.exp(dense), grid, axis=1))
    result = exact.log_likelihood(graph, params, Observed.where_finite(v))
    np.testing.assert_allclose(result, expected, atol=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "estimator"),
    [
        ("rbm", UCD(k=1, lag=1, num_slots=4)),
        nightly(
            "rbm", UCD(k=0, m=2, init="uniform", marginalize="layers", num_slots=4)
        ),
        nightly("deep", UCD(k=1, lag=1, num_slots=2)),
        nightly("categorical", UCD(k=1, lag=2, init="local_mode", num_slots=4)),
        nightly("categorical", LocalModeUCD(k=1, num_slots=4)),
    ],
)
def test_mean_gradient_matches_exact_gradient(name: str, estimator: UCD) -> None:
    graph, (values, known) = zoo.graph(name), some_rows(name)
    params = random_params(graph, 3, scale=1.2)
    weights = np.arange(1.0, 6) / 15
    hidden = np.where(known, values, values.min()).astype(values.dtype)
    batch = Batch(
        {"v": jnp.asarray(hidden)},
        jnp.asarray(weights, jnp.float32),
        {"v": jnp.asarray(known)},
    )
    state = estimator.init_state(graph, params, batch.rows, 5, key(0))
    draw = lambda seed: (
        estimator.estimate(
            graph, params, state, batch, jnp.stack([jnp.uint32(3), seed])
        ).gradient
    )
    gradients = jax.jit(lambda seeds: jax.lax.map(draw, seeds))(
        np.arange(DRAWS, dtype=np.uint32)
    )
    gradients = jax.device_get(gradients)
    expected = exact_gradient(graph, params, {"v": values}, weights, {"v": known})
    assert_mean(
        [{n: g[i] for n, g in gradients.items()} for i in range(DRAWS)], expected
    )


def test_missing_entries_are_drawn_from_their_posterior() -> None:
    graph, params, _ = problem("rbm")
    row, known = np.float32([1, 0, 0, 1]), np.array([True, False, False, True])
    batch = Batch.uniform(
        {"v": jnp.asarray(np.tile(row, (4000, 1)))},
        {"v": jnp.asarray(np.tile(known, (4000, 1)))},
    )
    result = jax.jit(complete_batch, static_argnums=(0, 3))(
        graph, params, batch, 30, key(1), None
    )
    assert not result.known
    np.testing.assert_array_equal(
        np.asarray(result.rows["v"])[:, known], np.tile(row[known], (4000, 1))
    )
    joint = zoo.Oracle(graph, params, {})
    weights = np.exp(joint.log_weights - joint.log_z) * (joint.x["v"] == row)[
        :, known
    ].all(1)
    expected = weights @ joint.x["v"][:, ~known] / weights.sum()
    assert_rows_law(np.asarray(result.rows["v"])[:, ~known], expected)


def test_base_rates_are_those_of_known_entries() -> None:
    table = np.array([[1, np.nan, 0, 1], [1, np.nan, np.nan, 0], [0, np.nan, 1, 0.0]])
    bias = np.asarray(zoo.graph("rbm").init(zoo.KEY, Observed.where_finite(table))["v"])
    counts = (~np.isnan(table)).sum(0)
    rates = (np.nansum(table, 0) + 0.5) / (counts + 1)  # one pseudo-row of 1/2
    np.testing.assert_allclose(1 / (1 + np.exp(-bias)), rates, rtol=1e-5)
    weights = np.array([0, 0, 3.0])
    weighted = zoo.graph("rbm").init(
        zoo.KEY, Observed.where_finite(table), weights=weights
    )["v"]
    assert weighted[0] < 0 < weighted[2]


class Plain(Estimator):
    """A custom estimator that does not handle missing entries."""

    def init_state(
        self, graph: Any, params: Any, data: Any, batch: int, pair: Any
    ) -> tuple:
        return ()

    def estimate(
        self, graph: Any, params: Any, state: Any, batch: Any, pair: Any
    ) -> Any:
        raise AssertionError("must not be called")


def train(data: Any, estimator: Any, graph: Any = None, **options: Any) -> Any:
    options = {
        "num_steps": 2,
        "optimizer": optax.sgd(0.2),
        "progress_bar": False,
        **options,
    }
    graph = zoo.graph("rbm") if graph is None else graph
    return ebmpp.fit(graph, data, rng_key=zoo.KEY, estimator=estimator, **options)


@pytest.mark.parametrize(
    "estimator",
    [Centered(CD()), Discriminative("v"), Plain()],
    ids=lambda e: type(e).__name__,
)
def test_estimators_of_complete_rows_refuse_missing_entries(estimator: Any) -> None:
    data = Observed(*some_rows("rbm"))
    with pytest.raises(StateError, match="block 'v' .*missing entries"):
        train(data, estimator)
    stages = [ebmpp.Stage(num_steps=1), ebmpp.Stage(num_steps=1, estimator=estimator)]
    with pytest.raises(StateError, match="missing entries"):
        ebmpp.fit(
            zoo.graph("rbm"), data, rng_key=zoo.KEY, schedule=stages, progress_bar=False
        )


@pytest.mark.nightly
def test_other_refusals_of_missing_entries() -> None:
    values, known = some_rows("rbm")
    with pytest.raises(IntractableError, match=r"MeanField\(passes=20\)"):
        train(
            Observed(*some_rows("deep")), PCD(posterior=MeanField()), zoo.graph("deep")
        )
    with pytest.raises(StateError, match=r"block 'v' .*nan.*Observed.where_finite"):
        train(np.where(known, values, np.nan), UCD())
    with pytest.raises(StateError, match="pool"):
        train(Observed(values, known), UCD(method="mixture", pool_size=4))
