# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""local_search ends at states whose density no layer can raise."""

from functools import cache

from mcmc_tools import strong_params
from metropolis_tools import Law
import numpy as np
import pytest
import zoo

import ebmpp
from ebmpp.errors import StateError


@cache
def model() -> Law:
    return Law(zoo.graph("deep"), strong_params("deep", 2.0))


def assert_modes(state: dict, fixed: dict) -> np.ndarray:
    """Assert that no layer can raise the probability of a row.

    :param fixed: masks, which broadcast to ``state``, of units that the search must not change.
    :return: the probability of each row.
    """
    states = {b: np.array([x[b] for x in model().states]) for b in state}
    values = []
    for row in range(len(state["v"])):
        equal = {b: states[b] == np.asarray(v[row]) for b, v in state.items()}
        (value,) = model().target[np.all([e.all(1) for e in equal.values()], axis=0)]
        for layer in zoo.graph("deep").layers:
            reachable = np.ones(len(model().states), bool)
            for b, e in equal.items():
                mask = np.broadcast_to(fixed.get(b, False), np.shape(state[b]))[row]
                reachable &= (e | ~(mask | (b not in layer))).all(1)
            assert model().target[reachable].max() <= value * 1.0001
        values.append(value)
    return np.array(values)


def test_no_layer_can_raise_the_density_of_a_result():
    mode = ebmpp.local_search(zoo.graph("deep"), strong_params("deep", 2.0), rng_key=zoo.KEY, num_rows=200)
    values = assert_modes(mode.state, {})
    assert (mode.steps >= 0).all() and len(np.unique(mode.steps)) > 1
    assert values.max() == pytest.approx(model().target.max(), rel=1e-4)  # one of 200 is the global mode


def test_observed_units_stay_and_the_others_are_optimal():
    known = np.random.default_rng(1).random((25, 3)) < 0.4
    observed = ebmpp.Observed(np.where(known, [0.0, 1.0, 0.0], np.nan), known)
    h2 = ebmpp.Observed(np.array([1, 7]), np.array([True, False]))  # the 7 is ignored
    mode = ebmpp.local_search(
        zoo.graph("deep"), strong_params("deep", 2.0), rng_key=zoo.KEY, v=observed, h2=h2
    )
    v = np.asarray(mode.state["v"])
    assert (v == [0, 1, 0])[known].all() and (mode.state["h2"][:, 0] == 1).all()
    assert_modes(mode.state, {"v": known, "h2": h2.known})


def test_wrong_calls_are_refused():
    everything = {"v": np.ones(3), "h1": np.ones(3), "h2": np.ones(2)}
    with pytest.raises(StateError, match="every block is clamped"):
        ebmpp.local_search(zoo.graph("deep"), strong_params("deep"), rng_key=zoo.KEY, **everything)
    with pytest.raises(StateError, match=r"num_rows=3.*\(2,\)"):
        ebmpp.local_search(
            zoo.graph("deep"), strong_params("deep"), rng_key=zoo.KEY, num_rows=3, v=np.ones((2, 3))
        )
