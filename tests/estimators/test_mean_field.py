# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Mean-field posteriors: the variational bound by enumeration, and the positive phase
made of them."""

import itertools
from typing import Any

import numpy as np
from oracle import Oracle
import pytest
from ucd_tools import estimate, key
import zoo

import jax

from ebmpp import PCD
from ebmpp.errors import ArgumentError, IntractableError
from ebmpp.estimators import MeanField
from helpers import random_params

ROWS = np.float32([[1, 0, 0], [1, 1, 1], [0, 1, 1]])


def params() -> dict[str, Any]:
    return random_params(zoo.graph("deep"), seed=4, scale=1.5)


def means_of(passes: int) -> dict[str, np.ndarray]:
    """Mean statistics of every block after so many passes."""
    statistics = jax.jit(MeanField(passes).statistics, static_argnums=0)
    return jax.device_get(statistics(zoo.graph("deep"), params(), {"v": ROWS}))


def bound(means: dict[str, np.ndarray], row: int) -> float:
    """E_q[log weight] plus the entropy of q, by enumeration of the latents."""
    posterior = Oracle(zoo.graph("deep"), params(), {"v": ROWS[row].astype(float)})
    log_q = 0.0
    for b in ("h1", "h2"):
        on = np.asarray(means[b][row], float)
        log_q = log_q + np.log(np.where(posterior.x[b] == 1, on, 1 - on)).sum(1)
    return float(np.exp(log_q) @ (posterior.log_weights - log_q))


def test_passes_raise_the_bound_to_a_local_maximum_below_the_likelihood() -> None:
    results = [means_of(passes) for passes in (1, 2, 50, 51)]
    bounds = np.array([[bound(means, row) for row in range(3)] for means in results])
    assert (np.diff(bounds, axis=0) > -1e-5).all() and (
        bounds[2] - bounds[0] > 1e-3
    ).any()
    np.testing.assert_allclose(bounds[2], bounds[3], atol=1e-5)
    log_z = [
        Oracle(zoo.graph("deep"), params(), {"v": v.astype(float)}).log_z for v in ROWS
    ]
    assert (bounds[2] < log_z).all()
    for b, unit, shift in itertools.product(("h1", "h2"), range(2), (-0.02, 0.02)):
        moved = {name: v.copy() for name, v in results[2].items()}
        moved[b][0, unit] += shift
        assert bound(moved, 0) < bounds[2, 0]


def test_pcd_uses_mean_field_for_its_positive_phase() -> None:
    graph, estimator = zoo.graph("deep"), PCD(num_chains=4, posterior=MeanField(50))
    weights = np.float32([0.5, 0.3, 0.2])
    chains = estimator.init_state(graph, params(), {"v": ROWS}, 3, key(0))
    result = estimate(estimator, graph, params(), chains, {"v": ROWS}, key(1), weights)
    means = means_of(50)
    positive = np.einsum("n,ni,nj->ij", weights, means["v"], means["h1"])
    negative = np.einsum("ni,nj->ij", result.state["v"], result.state["h1"]) / 4
    np.testing.assert_allclose(result.gradient["v:h1"], negative - positive, atol=1e-5)


def test_invalid_arguments_raise() -> None:
    with pytest.raises(ArgumentError, match="passes .*0"):
        MeanField(0)
    with pytest.raises(IntractableError, match=r"PCD\(posterior=MeanField\(\)\)"):
        PCD(num_chains=2).init_state(
            zoo.graph("deep"), params(), {"v": ROWS}, 1, key(0)
        )
