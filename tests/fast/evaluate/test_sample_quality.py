# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Scores of samples, one smoke test each; tests/slow has their statistics and refusals."""

import numpy as np
from scipy import linalg
from scipy.special import logsumexp

from ebmpp import data
from ebmpp.evaluate import (
    ClassifierFeatures,
    ImageFeatures,
    adversarial_accuracy,
    frechet_distance,
    gaussian_frechet,
    indirect_likelihood,
)


def test_indirect_likelihood_matches_a_sum_over_samples():
    bits = np.random.default_rng(0).integers(0, 2, (50, 7))
    samples, rows, beta = bits[:37], bits[37:], 0.75
    same = (rows[:, None] == samples).sum(-1)
    expected = logsumexp(same * np.log(beta) + (7 - same) * np.log1p(-beta), axis=1) - np.log(37)
    result = indirect_likelihood(samples, rows, bandwidth=beta)
    np.testing.assert_allclose(result.log_density[0], expected, rtol=1e-5)
    np.testing.assert_allclose(result.value[0], expected.mean(), rtol=1e-5)


def test_frechet_distance_matches_the_matrix_square_root():
    a, b = np.random.default_rng(0).normal(size=(2, 60, 5))
    b = 0.3 + 2 * b
    covariances = [np.cov(x, rowvar=False) for x in (a, b)]
    root = linalg.sqrtm(covariances[0] @ covariances[1]).real
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(sum(covariances) - 2 * root)
    value = gaussian_frechet(a.mean(0), covariances[0], b.mean(0), covariances[1])
    np.testing.assert_allclose(value, expected, rtol=1e-8)
    np.testing.assert_allclose(frechet_distance(a, b).value, expected, rtol=1e-5)


def test_classifier_features_separate_digits_from_noise():
    features = ClassifierFeatures.fit(num_epochs=3)
    rows = data.binarize(data.digits())
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
