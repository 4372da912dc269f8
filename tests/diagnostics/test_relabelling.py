# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Label switching in the draws of a mixture of three.

Tests diagnostics/relabelling.py.
"""

from typing import Any

import numpy as np
import pytest

from ebmpp.diagnostics import relabel
from ebmpp.errors import ArgumentError

DRAWS, Y = 60, np.array([-2.2, -1.7, 0.1, 0.6, 2.1, 1.4, -0.9])


def draws() -> dict[str, np.ndarray]:
    """Draws of means, transition rows and labels, of components in one order."""
    rng = np.random.default_rng(0)
    means = np.array([-2.0, 0.0, 2.0]) + 0.3 * rng.normal(size=(DRAWS, 3))
    z = (log_probs(means) + rng.gumbel(size=(DRAWS, len(Y), 3))).argmax(-1)
    rows = rng.dirichlet(np.ones(3), (DRAWS, 3))
    return {"means": means, "rows": rows, "z": z, "scale": rng.normal(size=DRAWS)}


def log_probs(means: np.ndarray) -> np.ndarray:
    log = -0.5 * (Y[:, None] - means[..., None, :]) ** 2
    return log - np.log(np.exp(log).sum(-1, keepdims=True))


def switched(samples: dict) -> dict[str, np.ndarray]:
    """Samples with a random order of the components in each ten draws."""
    result, rng = (
        {name: a.copy() for name, a in samples.items()},
        np.random.default_rng(1),
    )
    for start in range(0, DRAWS, 10):
        order, at = rng.permutation(3), slice(start, start + 10)
        result["means"][at] = samples["means"][at][:, order]
        result["rows"][at] = samples["rows"][at][:, order][:, :, order]
        result["z"][at] = np.argsort(order)[samples["z"][at]]
    return result


def test_switched_components_are_put_in_one_order() -> None:
    original, mixed = draws(), switched(draws())
    before = {name: a.copy() for name, a in mixed.items()}
    result = relabel(
        mixed, {"z": log_probs(mixed["means"])}, {"means": 0, "rows": (0, -1)}
    )
    order = result["means"].mean(0).argsort()  # any one order of all draws
    assert np.array_equal(result["means"][..., order], original["means"])
    assert np.array_equal(result["rows"][..., order, :][..., order], original["rows"])
    assert np.array_equal(np.argsort(order)[result["z"]], original["z"])
    assert np.array_equal(result["scale"], mixed["scale"])
    # inputs unchanged
    assert all(np.array_equal(mixed[name], a) for name, a in before.items())


@pytest.mark.parametrize("axes", [(0, -1), [1, -2], np.array([0, 1]), (-1, 0)])
def test_axes_are_counted_from_either_end(axes: Any) -> None:
    mixed = switched(draws())
    logs = {"z": log_probs(mixed["means"])}
    expected = relabel(mixed, logs, {"means": 0, "rows": (0, 1)})
    result = relabel(mixed, logs, {"means": -1, "rows": axes})
    assert all(np.array_equal(result[name], expected[name]) for name in mixed)


@pytest.mark.parametrize(
    ("sites", "changed"),
    [
        (["mean"], {}),
        (3, {}),
        ({"means": 1}, {}),
        ({"means": -2}, {}),
        ({"means": (0, -1)}, {}),
        ({"means": 0.5}, {}),
        ({"means": False}, {}),
        ({"means": ()}, {}),
        ({"rows": (0, 0)}, {}),
        ({"rows": (0, 2)}, {}),
        (["scale"], {}),
        (["z"], {"z": np.zeros((DRAWS, 3), int)}),
        (["means"], {"z": np.full((DRAWS, len(Y)), 3)}),
        (["means"], {"z": np.full((DRAWS, len(Y)), 0.5)}),
        (["means"], {"z": np.full((DRAWS, len(Y)), np.nan)}),
        (["means"], {"z": np.zeros((DRAWS, 2), int)}),
        (["means"], {"z": 0}),
        (["means"], {"means": np.zeros((4, 3))}),
        (["means"], {"means": 0.0}),
    ],
)
def test_wrong_arguments_are_refused(sites: Any, changed: dict) -> None:
    samples = draws()
    logs = {"z": log_probs(samples["means"])}
    with pytest.raises(ArgumentError):
        relabel(samples | changed, logs, sites)
    with pytest.raises(ArgumentError):
        relabel(samples, {}, ["means"])


@pytest.mark.parametrize(
    "logs", [np.nan, -np.inf, 0.0, "a", None, np.zeros((DRAWS, len(Y), 0))]
)
def test_probabilities_must_sum_to_1(logs: Any) -> None:
    logs = np.full((DRAWS, len(Y), 3), logs) if isinstance(logs, float) else logs
    with pytest.raises(ArgumentError, match="log_conditionals"):
        relabel(draws(), {"z": logs}, ["means"])
