# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Scores of samples: bandwidths, bias, reproducibility and refusals."""

import numpy as np
import pytest
from scipy.special import logsumexp

from ebmpp import data
from ebmpp.errors import ArgumentError
from ebmpp.evaluate import (
    ClassifierFeatures,
    ImageFeatures,
    adversarial_accuracy,
    frechet_distance,
    gaussian_frechet,
    indirect_likelihood,
)
from helpers import assert_law

RNG = np.random.default_rng(0)
BITS = RNG.integers(0, 2, (60, 7))
SAMPLES, HELD_OUT, VALIDATION = BITS[:37], BITS[37:50], BITS[50:]


def bernoulli_density(rows, samples, beta):
    same = (rows[:, None] == samples).sum(-1)
    return logsumexp(same * np.log(beta) + (7 - same) * np.log1p(-beta), axis=1) - np.log(len(samples))


def test_validation_rows_choose_the_bandwidth():
    bandwidths, sizes = [0.6, 0.75, 0.9], [1, 37]
    options = {"validation": VALIDATION, "num_samples": sizes, "bandwidth": bandwidths, "chunk": 8}
    result = indirect_likelihood(SAMPLES, HELD_OUT, **options)
    for i, n in enumerate(sizes):
        best = max(bandwidths, key=lambda b, n=n: bernoulli_density(VALIDATION, SAMPLES[:n], b).mean())
        expected = bernoulli_density(HELD_OUT, SAMPLES[:n], best)
        assert result.bandwidth[i] == best and result.at_edge[i] == (best != 0.75)
        np.testing.assert_allclose(result.log_density[i], expected, rtol=1e-5)
        np.testing.assert_allclose(result.standard_error[i], expected.std(ddof=1) / np.sqrt(13), rtol=1e-4)


def test_frechet_distances_are_biased_as_stated_and_extrapolated():
    rng, d = np.random.default_rng(1), 6
    scale, mean = np.linspace(0.5, 2, d), np.full(d, 0.2)
    exact = gaussian_frechet(np.zeros(d), np.eye(d), mean, np.diag(scale**2))
    draw = lambda: (rng.normal(size=(200, d)), mean + scale * rng.normal(size=(200, d)))
    results = [frechet_distance(*draw(), extrapolate=True) for _ in range(150)]
    names = ("value", "extrapolated", "standard_error")
    value, extrapolated, error = (np.array([getattr(r, name) for r in results]) for name in names)
    error_of_mean = extrapolated.std(ddof=1) / np.sqrt(len(results))
    assert value.mean() > exact + 5 * error_of_mean
    assert_law(extrapolated.mean(), exact, error_of_mean)
    np.testing.assert_allclose(error.mean(), extrapolated.std(), rtol=0.2)


def test_classifier_features_are_reproducible():
    features, repeated = (ClassifierFeatures.fit(num_epochs=8) for _ in range(2))
    images, labels = data.digits(labels=True)
    rows = data.binarize(images)
    np.testing.assert_array_equal(features(rows), repeated(rows))
    assert features.accuracy > 0.7 and (features.predict(rows) == labels).mean() > 0.7


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: indirect_likelihood(SAMPLES, HELD_OUT), "validation"),
        (lambda: indirect_likelihood(SAMPLES, HELD_OUT, bandwidth=0.4), "0.4"),
        (lambda: gaussian_frechet(np.zeros(2), np.eye(2), np.zeros(2), -np.eye(2)), "other_cov"),
        (lambda: frechet_distance(np.eye(30, 3), np.eye(50, 3), extrapolate=True), "30"),
        (lambda: frechet_distance(BITS, BITS, features="inception"), "'inception'"),
        (lambda: ImageFeatures(lambda images: images, (4,)), "height"),
        (lambda: adversarial_accuracy(SAMPLES, HELD_OUT), "37.*13"),
    ],
)
def test_invalid_arguments_are_refused(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
