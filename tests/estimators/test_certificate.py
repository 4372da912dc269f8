# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The measured bias of gradients against enumeration.

Tests estimators/certificate.py.
"""

from typing import Any

import numpy as np
import pytest
from ucd_tools import (
    ROWS,
    STATES,
    assert_bias,
    bias_at,
    exact_gradient,
    initial,
    measure_bias,
    problem,
    sigmoid,
    visible_distribution,
    visible_transition,
)

import jax

from ebmpp import CD, PCD, UCD, ParticleUCD, TemperedPCD, WeightedPCD
from ebmpp.contrib import FPCD, Herding
from ebmpp.contrib.estimators.fpcd import FPCDState
from ebmpp.errors import ArgumentError, StateError, UnmetError
from ebmpp.estimators import Centered, Discriminative
from ebmpp.estimators.base import Repeats
from helpers import assert_law, nightly


@pytest.mark.nightly
@pytest.mark.parametrize(
    "estimator",
    [
        CD(),
        nightly(UCD(k=1, lag=1, num_slots=4)),
        nightly(ParticleUCD(num_particles=50, max_rungs=8)),
    ],
)
def test_measured_bias_matches_enumeration(estimator: Any) -> None:
    graph, params, data = problem("rbm")
    start = visible_distribution(data["v"], np.full(ROWS, 1 / ROWS))
    biased = isinstance(estimator, CD)
    model = np.linalg.matrix_power(visible_transition(params), 10_000)[0]
    result = measure_bias(estimator)
    assert_bias(result, bias_at(start if biased else model))
    assert (result.total.squared_bias > 5 * result.total.standard_error) == biased
    gradient = exact_gradient(graph, params, {"v": np.asarray(data["v"])[:4]})
    for name, factor in result.factors.items():
        assert_law(
            factor.squared_gradient,
            (gradient[name] ** 2).sum(),
            factor.gradient_error,
            6,
        )


@pytest.mark.parametrize(
    ("estimator", "state", "error", "message"),
    [
        (PCD(num_chains=10), None, ArgumentError, "state=fit.estimator_state"),
        (PCD(num_chains=2), PCD(num_chains=2), ArgumentError, "2 chains"),
        (
            UCD(init="persistent"),
            UCD(init="persistent", num_pairs=4),
            StateError,
            "400 rows",
        ),
        (Herding(), None, ArgumentError, "likelihood"),
        (Discriminative("v"), (), ArgumentError, "no bias"),
    ],
)
def test_gradients_that_cannot_be_judged_are_refused(
    estimator: Any, state: Any, error: type[Exception], message: str
) -> None:
    state = initial(state, "rbm") if hasattr(state, "estimate") else state
    with pytest.raises(error, match=message):
        if isinstance(estimator, Discriminative):
            estimator.repeats(state, 3)
        else:
            measure_bias(estimator, state)


CHAINS = 4000


@pytest.mark.nightly
@pytest.mark.parametrize("mixed", [False, True])
def test_bias_of_pcd_is_that_of_the_distribution_of_its_chains(mixed: bool) -> None:
    """Chains that are draws of the model have no bias, however noisy their mean is."""
    _, params, _ = problem("rbm")
    model = np.linalg.matrix_power(visible_transition(params), 10_000)[0]
    start = model if mixed else np.eye(16)[3] / 2 + np.eye(16)[9] / 2
    generator = np.random.default_rng(0)
    rows = STATES[generator.choice(16, CHAINS, p=start / start.sum())]
    hidden = sigmoid(np.asarray(params["h"]) + rows @ np.asarray(params["v:h"]))
    chains = {"v": rows, "h": generator.uniform(size=hidden.shape) < hidden}
    chains = {b: jax.numpy.asarray(a.astype(np.float32)) for b, a in chains.items()}
    result = measure_bias(PCD(num_chains=CHAINS), chains)
    assert result.chains == CHAINS // 40
    assert_bias(result, bias_at(start))
    assert (result.total.squared_bias > 3 * result.total.standard_error) == (not mixed)
    fast = FPCDState(chains, jax.tree.map(jax.numpy.zeros_like, params))
    same = measure_bias(FPCD(num_chains=CHAINS, rate=0.0), fast)
    assert same.total.squared_bias == pytest.approx(
        result.total.squared_bias, rel=1e-4, abs=1e-7
    )


@pytest.mark.nightly
def test_unmet_pairs_are_refused_unless_allowed() -> None:
    options = {"k": 0, "lag": 1, "max_sweeps": 2, "num_slots": 4}
    assert np.isfinite(
        measure_bias(UCD(**options, allow_unmet=True)).total.squared_bias
    )
    with pytest.raises(UnmetError, match="max_sweeps=2"):
        measure_bias(UCD(**options))


@pytest.mark.nightly
def test_repeats_use_groups_of_chains_or_the_same_state() -> None:
    groups = PCD(num_chains=11).repeats(initial(PCD(num_chains=11), "rbm"), 3)
    assert groups.chains == 3 and [len(s["v"]) for s in groups.states] == [3, 3, 3]
    assert (
        len(PCD(num_chains=2).repeats(initial(PCD(num_chains=2), "rbm"), 5).states) == 2
    )
    tempered = TemperedPCD(num_chains=6, num_temperatures=2)
    state = initial(tempered, "rbm")
    groups = tempered.repeats(state, 3)
    assert groups.estimator.num_chains == 2 and groups.states[0].chains["v"].shape == (
        2,
        2,
        4,
    )
    parts = np.concatenate([s.chains["v"] for s in groups.states])
    np.testing.assert_array_equal(parts, state.chains["v"])
    inner = Centered(PCD(num_chains=6))
    assert inner.repeats(initial(inner, "rbm"), 3).estimator == PCD(num_chains=6)
    weighted = WeightedPCD(num_chains=20, num_watchers=0)
    state = initial(weighted, "rbm")
    assert weighted.repeats(state, 2) == Repeats(weighted, (state, state))
    hybrid = Discriminative("v", PCD(num_chains=6))
    assert hybrid.repeats(initial(PCD(num_chains=6), "rbm"), 3).chains == 2
