# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The measured bias of gradients against enumeration."""

from typing import Any

import numpy as np
import pytest
from ucd_tools import (
    ROWS,
    assert_bias,
    bias_at,
    exact_gradient,
    initial,
    measure_bias,
    problem,
    visible_distribution,
    visible_transition,
)

from ebmpp import CD, PCD, UCD
from ebmpp.contrib import Herding
from ebmpp.errors import ArgumentError, StateError
from ebmpp.estimators import Discriminative
from ebmpp.estimators.base import repeats
from helpers import assert_law, slow


@pytest.mark.parametrize("estimator", [CD(), slow(UCD(k=1, lag=1, num_slots=4))])
def test_measured_bias_matches_enumeration(estimator: Any) -> None:
    graph, params, data = problem("rbm")
    start = visible_distribution(data["v"], np.full(ROWS, 1 / ROWS))
    biased = isinstance(estimator, CD)
    model = np.linalg.matrix_power(visible_transition(params), 10_000)[0]
    result = measure_bias(estimator)
    assert_bias(result, bias_at(start if biased else model))
    assert (result.total.squared_bias > 5 * result.total.standard_error) == biased
    if biased:
        assert result.total.bias_norm == pytest.approx(result.total.squared_bias**0.5)
    gradient = exact_gradient(graph, params, {"v": np.asarray(data["v"])[:4]})
    for name, factor in result.factors.items():
        assert_law(factor.squared_gradient, (gradient[name] ** 2).sum(), factor.gradient_error, 6)


@pytest.mark.parametrize(
    ("estimator", "state", "error", "message"),
    [
        (PCD(num_chains=10), None, ArgumentError, "state=fit.estimator_state"),
        (PCD(num_chains=2), PCD(num_chains=2), ArgumentError, "2 chains"),
        (UCD(start="persistent"), UCD(start="persistent", num_pairs=4), StateError, "400 rows"),
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
            repeats(estimator, state, 3)
        else:
            measure_bias(estimator, state)
