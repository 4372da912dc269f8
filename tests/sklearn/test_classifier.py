# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The classifier: probabilities against enumeration, weights, options and scikit-learn's checks.

Tests sklearn/classifier.py.
"""

import pickle
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.utils.estimator_checks import parametrize_with_checks

from ebmpp import PCD, exact
from ebmpp.errors import ArgumentError
from ebmpp.sklearn import HarmoniumClassifier

GENERATOR = np.random.default_rng(0)
X = GENERATOR.integers(0, 2, (40, 3)).astype(np.float32)
Y = np.array(["no", "yes"])[(X[:, 0] != X[:, 1]).astype(int)]


def small(**options: Any) -> HarmoniumClassifier:
    defaults = {"n_components": 4, "batch_size": 20, "n_iter": 2, "random_state": 0}
    return HarmoniumClassifier(**defaults | options)


def test_probabilities_are_those_of_the_joint_model() -> None:
    model = small().fit(X, Y)
    assert model.classes_.tolist() == ["no", "yes"] and model.scaler_ is None
    log_joint = [
        exact.log_likelihood(
            model.graph_, model.params_, {"v": X, "label": np.full((len(X), 1), label)}
        )
        for label in range(2)
    ]
    joint = np.exp(np.stack(log_joint, 1))
    expected = joint / joint.sum(1, keepdims=True)
    np.testing.assert_allclose(model.predict_proba(X), expected, atol=1e-5)
    assert (model.predict(X) == model.classes_[expected.argmax(1)]).all()


def test_it_learns_what_a_linear_classifier_cannot() -> None:
    model = small(n_components=16, n_iter=300, learning_rate=0.05).fit(X, Y)
    assert model.score(X, Y) == 1


def test_rows_of_weight_0_are_left_out_and_the_scaler_is_weighted() -> None:
    rows = GENERATOR.normal(2, 3, (40, 3))
    weights = np.r_[np.ones(30), np.zeros(10)]
    weighted = small().fit(rows, Y, sample_weight=weights)
    alone = small().fit(rows[:30], Y[:30], sample_weight=np.ones(30))
    np.testing.assert_array_equal(
        weighted.predict_proba(rows), alone.predict_proba(rows)
    )
    np.testing.assert_allclose(weighted.scaler_.mean_, rows[:30].mean(0))


def test_a_generative_loss_changes_the_params() -> None:
    alone, both = small().fit(X, Y), small(generative=PCD(num_chains=20)).fit(X, Y)
    assert not np.allclose(alone.params_["v:h"], both.params_["v:h"])


def test_copies_and_files_give_the_same_model() -> None:
    model = small().fit(X, Y)
    cloned = clone(model).fit(X, Y)
    read = pickle.loads(pickle.dumps(model))
    for other in (cloned, read):
        np.testing.assert_array_equal(other.predict_proba(X), model.predict_proba(X))


@pytest.mark.parametrize(
    ("options", "labels", "match"),
    [
        ({"n_components": 0}, Y, "n_components must be"),
        ({"learning_rate": 0}, Y, "learning_rate must be"),
        ({"weight": -1}, Y, "weight must be"),
        ({"generative": "pcd"}, Y, "generative must be"),
        ({"visible": "poison"}, Y, "visible must be"),
        ({}, np.zeros(40), "y must have at least 2 classes, got 1 class"),
    ],
)
def test_wrong_options_and_labels_are_refused(
    options: dict, labels: np.ndarray, match: str
) -> None:
    with pytest.raises(ArgumentError, match=match):
        small(**options).fit(X, labels)


EXPECTED = {
    "check_sample_weight_equivalence_on_dense_data": "equal to 1e-6, in float32"
}


@pytest.mark.nightly
@parametrize_with_checks(
    [HarmoniumClassifier(8, n_iter=40, random_state=0)],
    expected_failed_checks=lambda model: EXPECTED,
)
def test_scikit_learns_checks(estimator: HarmoniumClassifier, check: Any) -> None:
    check(estimator)
