# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Scores of samples: values, bias, reproducibility and refusals.

Tests contrib/sample_quality/features.py, contrib/sample_quality/frechet.py,
contrib/sample_quality/neighbours.py, contrib/sample_quality/parzen.py,
contrib/sample_quality/rows.py.
"""

import numpy as np
import pytest
from scipy import linalg
from scipy.special import logsumexp

from ebmpp import data
from ebmpp.contrib.sample_quality import (
    ClassifierFeatures,
    ImageFeatures,
    adversarial_accuracy,
    frechet_distance,
    gaussian_frechet,
    indirect_likelihood,
)
from ebmpp.errors import ArgumentError
from helpers import assert_law

pytestmark = pytest.mark.nightly

BITS = np.random.default_rng(0).integers(0, 2, (60, 7))
SAMPLES, HELD_OUT, VALIDATION = BITS[:37], BITS[37:50], BITS[50:]


def bernoulli_density(rows, samples, beta):
    same = (rows[:, None] == samples).sum(-1)
    return logsumexp(
        same * np.log(beta) + (7 - same) * np.log1p(-beta), axis=1
    ) - np.log(len(samples))


def test_indirect_likelihood_with_a_validated_bandwidth_matches_a_sum_over_samples():
    bandwidths, sizes = [0.6, 0.75, 0.9], [1, 37]
    options = {
        "validation": VALIDATION,
        "num_samples": sizes,
        "bandwidth": bandwidths,
        "chunk": 8,
    }
    result = indirect_likelihood(SAMPLES, HELD_OUT, **options)
    for i, n in enumerate(sizes):
        best = max(
            bandwidths,
            key=lambda b, n=n: bernoulli_density(VALIDATION, SAMPLES[:n], b).mean(),
        )
        expected = bernoulli_density(HELD_OUT, SAMPLES[:n], best)
        assert result.bandwidth[i] == best and result.at_edge[i] == (best != 0.75)
        np.testing.assert_allclose(result.log_density[i], expected, rtol=1e-5)
        np.testing.assert_allclose(result.value[i], expected.mean(), rtol=1e-5)
        np.testing.assert_allclose(
            result.standard_error[i], expected.std(ddof=1) / np.sqrt(13), rtol=1e-4
        )


def test_frechet_distance_matches_the_matrix_square_root_and_extrapolates():
    rng, d = np.random.default_rng(1), 6
    scale, mean = np.linspace(0.5, 2, d), np.full(d, 0.2)
    exact = gaussian_frechet(np.zeros(d), np.eye(d), mean, np.diag(scale**2))
    draw = lambda: (rng.normal(size=(200, d)), mean + scale * rng.normal(size=(200, d)))
    pairs = [draw() for _ in range(150)]
    results = [frechet_distance(*pair, extrapolate=True) for pair in pairs]
    a, b = pairs[0]
    covariances = [np.cov(x, rowvar=False) for x in (a, b)]
    root = linalg.sqrtm(covariances[0] @ covariances[1]).real
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(
        sum(covariances) - 2 * root
    )
    np.testing.assert_allclose(results[0].value, expected, rtol=1e-5)
    names = ("value", "extrapolated", "standard_error")
    value, extrapolated, error = (
        np.array([getattr(r, name) for r in results]) for name in names
    )
    error_of_mean = extrapolated.std(ddof=1) / np.sqrt(len(results))
    assert value.mean() > exact + 5 * error_of_mean
    assert_law(extrapolated.mean(), exact, error_of_mean)
    np.testing.assert_allclose(error.mean(), extrapolated.std(), rtol=0.2)


def test_classifier_features_are_reproducible_and_separate_digits_from_noise():
    features, repeated = (ClassifierFeatures.fit(num_epochs=8) for _ in range(2))
    images, labels = data.digits(labels=True)
    rows = data.binarize(images)
    np.testing.assert_array_equal(features(rows), repeated(rows))
    assert features.accuracy > 0.7 and (features.predict(rows) == labels).mean() > 0.7
    near = frechet_distance(rows[::2], rows[1::2], features=features).value
    shuffled = np.random.default_rng(0).permuted(rows, axis=0)
    assert frechet_distance(rows[::2], shuffled, features=features).value > 5 * near


def test_image_features_resize_and_scale():
    rows = np.array([[0.0, 1.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5]])
    options = {"size": (4, 4), "channels": 2, "bounds": (-1.0, 3.0)}
    pixels = ImageFeatures(lambda images: images[:, 1, :, 1], (2, 2), **options)(rows)
    np.testing.assert_allclose(pixels, [[-1, 0, 2, 3], [1, 1, 1, 1]], atol=1e-6)


def test_adversarial_accuracy_of_copies_and_of_distant_rows():
    rows = np.random.default_rng(0).normal(size=(40, 3))
    assert adversarial_accuracy(rows, rows).value == 0.0
    assert adversarial_accuracy(rows, rows + 100).value == 1.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: indirect_likelihood(SAMPLES, HELD_OUT), "validation"),
        (lambda: indirect_likelihood(SAMPLES, HELD_OUT, bandwidth=0.4), "0.4"),
        (
            lambda: indirect_likelihood(
                SAMPLES, HELD_OUT, bandwidth=0.9, num_samples=[5, 3]
            ),
            "num_samples",
        ),
        (
            lambda: gaussian_frechet(np.zeros(2), np.eye(2), np.zeros(2), -np.eye(2)),
            "other_cov",
        ),
        (
            lambda: frechet_distance(np.eye(30, 3), np.eye(50, 3), extrapolate=True),
            "30",
        ),
        (lambda: frechet_distance(BITS, BITS, features="inception"), "'inception'"),
        (lambda: ImageFeatures(lambda images: images, (4,)), "shape"),
        (lambda: adversarial_accuracy(SAMPLES, HELD_OUT), "37.*13"),
        (
            lambda: adversarial_accuracy(np.full((5, 2), np.nan), np.ones((5, 2))),
            "real",
        ),
    ],
)
def test_invalid_arguments_are_refused(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()
