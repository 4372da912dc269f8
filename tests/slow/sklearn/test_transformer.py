# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""scikit-learn's own estimator checks, custom families, and classification of digits."""

import dataclasses
from typing import Any

import numpy as np
from own_families import Ternary
import pytest
from scipy.ndimage import convolve
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import minmax_scale
from sklearn.utils.estimator_checks import parametrize_with_checks

import jax.numpy as jnp

from ebmpp import exact
from ebmpp.sklearn import HarmoniumTransformer
from helpers import assert_rows_law

#: Training is stochastic, and an epoch has a step per batch of rows, not of weights.
EXPECTED = dict.fromkeys(
    ("check_sample_weight_equivalence_on_dense_data", "check_sample_weight_equivalence_on_sparse_data"),
    "a row of weight 2 is two rows in the base rates, and in the gradient on average only",
)


@parametrize_with_checks(
    [HarmoniumTransformer(), HarmoniumTransformer(visible="gaussian", learning_rate=1e-5)],
    expected_failed_checks=lambda model: EXPECTED,
)
def test_scikit_learn_checks(estimator: Any, check: Any) -> None:
    check(estimator)


def test_draws_of_standardised_columns_are_in_their_units() -> None:
    rows = np.random.default_rng(0).normal([5, -2], [3, 0.5], (40, 2))
    model = HarmoniumTransformer(2, random_state=3, n_iter=1).fit(rows)
    mean = exact.moments(model.graph_, model.params_)["v"]
    assert_rows_law(model.sample(20_000, n_sweeps=50), model.scaler_.inverse_transform([mean])[0])


@dataclasses.dataclass(frozen=True, repr=False)
class Squared(Ternary):
    """The values 0, 1 and 2 with their square as statistic, so the mean statistic is not a value."""

    bounds = (0.0, 4.0)

    def statistics(self, x: Any) -> Any:
        return super().statistics(x) ** 2

    def _logits(self, eta: Any) -> Any:
        return jnp.stack([0 * eta, eta, 4 * eta], -1)


def test_means_are_accepted_only_where_values_are_their_own_statistic() -> None:
    rows = np.random.default_rng(0).integers(0, 2, (6, 3))
    with pytest.raises(ValueError, match="X has 3 at row 0, column 0"):
        HarmoniumTransformer(2, visible=Squared(3), n_iter=1).fit(3 * np.ones((6, 3)))
    HarmoniumTransformer(2, visible=Ternary(3), n_iter=1).fit(1.5 * rows)


def shifted_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the digits, and each shifted by a pixel in four directions, as in scikit-learn's example."""
    images, labels = load_digits(return_X_y=True)
    kernels = np.zeros((5, 3, 3))
    for kernel, place in zip(kernels, [(1, 1), (0, 1), (1, 0), (1, 2), (2, 1)], strict=True):
        kernel[place] = 1
    shift = lambda kernel: [convolve(x.reshape(8, 8), kernel, mode="constant").ravel() for x in images]
    return minmax_scale(np.concatenate([shift(kernel) for kernel in kernels])), np.tile(labels, 5)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_features_classify_digits_better_than_pixels() -> None:
    train, test, train_y, test_y = train_test_split(*shifted_digits(), test_size=0.2, random_state=0)
    pixels = LogisticRegression(C=100, max_iter=200).fit(train, train_y).score(test, test_y)
    model = HarmoniumTransformer(100, learning_rate=0.06, n_iter=10, random_state=0).fit(train)
    classify = LogisticRegression(C=6000, max_iter=200).fit(model.transform(train), train_y)
    # with 500 iterations 0.78 and 0.94; BernoulliRBM with the same settings has 0.93
    assert pixels < 0.8 and classify.score(model.transform(test), test_y) > 0.91
