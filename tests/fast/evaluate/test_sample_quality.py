# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Measures of samples: against closed forms, slow oracles and laws."""

import numpy as np
import pytest
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
from helpers import assert_law

RNG = np.random.default_rng(0)
BITS = RNG.integers(0, 2, (60, 7))
SAMPLES, HELD_OUT, VALIDATION = BITS[:37], BITS[37:50], BITS[50:]

# -- indirect sampling likelihood ------------------------------------------------------------------


def bernoulli_density(rows, samples, beta):
    """log of the mixture, unit by unit."""
    same = (rows[:, None] == samples[None]).astype(float)
    each = (same * np.log(beta) + (1 - same) * np.log1p(-beta)).sum(-1)
    return logsumexp(each, axis=1) - np.log(len(samples))


@pytest.mark.parametrize("chunk", [8, 1024])
def test_bernoulli_kernel_against_a_sum_over_samples(chunk):
    tried = [0.6, 0.75, 0.9]
    options = {"validation": VALIDATION, "num_samples": [1, 5, 37], "bandwidth": tried, "chunk": chunk}
    made = indirect_likelihood(SAMPLES, HELD_OUT, **options)
    for i, n in enumerate([1, 5, 37]):
        best = max(tried, key=lambda b, n=n: bernoulli_density(VALIDATION, SAMPLES[:n], b).mean())
        wanted = bernoulli_density(HELD_OUT, SAMPLES[:n], best)
        assert made.bandwidth[i] == best and made.at_edge[i] == (best != 0.75)
        np.testing.assert_allclose(made.log_density[i], wanted, rtol=1e-5)
        np.testing.assert_allclose(made.value[i], wanted.mean(), rtol=1e-5)
        np.testing.assert_allclose(made.standard_error[i], wanted.std(ddof=1) / np.sqrt(13), rtol=1e-4)
    spins = indirect_likelihood(2 * SAMPLES - 1, 2 * HELD_OUT - 1, bandwidth=0.75, num_samples=[37])
    np.testing.assert_allclose(spins.log_density[0], bernoulli_density(HELD_OUT, SAMPLES, 0.75), rtol=1e-5)


def test_gaussian_kernel_against_a_sum_over_samples():
    x, rows, sigma = RNG.normal(size=(50, 2, 2)) + 100, RNG.normal(size=(9, 2, 2)) + 100, 0.3
    made = indirect_likelihood(x, rows, bandwidth=sigma)
    square = ((rows[:, None] - x[None]) ** 2).sum((-1, -2))
    wanted = logsumexp(-0.5 * square / sigma**2, 1) - np.log(50) - 4 * np.log(sigma * np.sqrt(2 * np.pi))
    np.testing.assert_allclose(made.log_density[0], wanted, rtol=1e-4)
    assert made.kernel == "gaussian"


def test_density_does_not_underflow_far_from_the_samples():
    made = indirect_likelihood(np.zeros((5, 2000)), np.ones((3, 2000)), bandwidth=0.99)
    np.testing.assert_allclose(made.value, 2000 * np.log(0.01), rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give validation=rows, or one bandwidth"),
        ({"bandwidth": 0.4}, r"beta in \(1/2, 1\); got \[0.4\]"),
        ({"bandwidth": 0.9, "num_samples": [5, 5]}, "increasing ints from 1 to 37"),
        ({"bandwidth": 0.9, "num_samples": [38]}, "increasing ints from 1 to 37"),
        ({"bandwidth": 0.9, "kernel": "box"}, "kernel is one of 'bernoulli', 'gaussian', not 'box'"),
        ({"bandwidth": 0.9, "chunk": 0}, "chunk is an int of at least 1, not 0"),
        ({"validation": np.zeros((2, 6))}, r"validation has rows of shape \(6,\), and samples of \(7,\)"),
    ],
)
def test_wrong_arguments_of_the_likelihood(options, message):
    with pytest.raises(ValueError, match=message):
        indirect_likelihood(SAMPLES, HELD_OUT, **options)


def test_rows_are_checked():
    with pytest.raises(ValueError, match="same two values"):
        indirect_likelihood(SAMPLES / 2, HELD_OUT, kernel="bernoulli", bandwidth=0.9)
    with pytest.raises(ValueError, match="samples has 1 values that are not finite, the first in row 1"):
        indirect_likelihood(np.array([[0.0], [np.nan]]), np.ones((2, 1)), bandwidth=0.9)
    with pytest.raises(ValueError, match=r"held_out is an array .* got shape \(7,\)"):
        indirect_likelihood(SAMPLES, HELD_OUT[0], bandwidth=0.9)


# -- Frechet distance ------------------------------------------------------------------------------


def test_frechet_distance_of_gaussians_against_the_matrix_square_root():
    a, b = RNG.normal(size=(2, 5, 5))
    cov, other = a @ a.T, b @ b.T
    mean, moved = RNG.normal(size=(2, 5))
    root = linalg.sqrtm(cov @ other).real
    wanted = ((mean - moved) ** 2).sum() + np.trace(cov + other - 2 * root)
    np.testing.assert_allclose(gaussian_frechet(mean, cov, moved, other), wanted, rtol=1e-8)
    # of singular ones, along one line: (s - s')^2
    line = np.outer([1.0, 2.0], [1.0, 2.0]) / 5
    np.testing.assert_allclose(gaussian_frechet(np.zeros(2), 4 * line, np.zeros(2), 9 * line), 1.0)
    assert gaussian_frechet(mean, cov, mean, cov) < 1e-10 * np.trace(cov)


def test_bias_is_as_stated_and_extrapolated_away():
    """Over repeated draws: the plain value is too large, the extrapolated one right, its error honest."""
    rng, d = np.random.default_rng(1), 6
    scale, mean = np.linspace(0.5, 2, d), np.full(d, 0.2)
    truth = gaussian_frechet(np.zeros(d), np.eye(d), mean, np.diag(scale**2))
    draw = lambda: (rng.normal(size=(200, d)), mean + scale * rng.normal(size=(200, d)))
    made = [frechet_distance(*draw(), extrapolate=True) for _ in range(150)]
    value, better, error = (
        np.array([getattr(m, f) for m in made]) for f in ("value", "extrapolated", "standard_error")
    )
    of_mean = better.std(ddof=1) / np.sqrt(len(made))
    assert value.mean() > truth + 5 * of_mean
    assert_law(better.mean(), truth, of_mean)
    np.testing.assert_allclose(error.mean(), better.std(), rtol=0.2)


def test_features_are_called_in_batches():
    seen = []

    def features(rows):
        seen.append(len(rows))
        return rows.reshape(len(rows), -1)[:, :2]

    x, y = RNG.normal(size=(50, 2, 3)), RNG.normal(size=(40, 2, 3))
    made = frechet_distance(x, y, features=features, batch_size=30)
    assert seen == [30, 20, 30, 10] and made.num_features == 2 and np.isnan(made.extrapolated)
    np.testing.assert_allclose(made.value, frechet_distance(x[:, 0, :2], y[:, 0, :2]).value)
    with pytest.raises(ValueError, match=r"features maps .* from 50 rows it made shape \(50,\)"):
        frechet_distance(x, y, features=lambda rows: rows[:, 0, 0])


def test_classifier_features_tell_digits_from_noise_and_are_reproducible():
    made, again = (ClassifierFeatures.fit(num_epochs=8) for _ in range(2))
    images, labels = data.digits(labels=True)
    rows = data.binarize(images)
    np.testing.assert_array_equal(made(rows), again(rows))
    assert made.accuracy > 0.7 and (made.predict(rows) == labels).mean() > 0.7
    hidden = made(rows[:5])
    out = hidden @ made.network.coefs_[1] + made.network.intercepts_[1]
    np.testing.assert_array_equal(out.argmax(1), made.predict(rows[:5]))
    near = frechet_distance(rows[::2], rows[1::2], features=made).value
    shuffled = np.random.default_rng(0).permuted(rows, axis=0)  # each pixel's rate, and nothing else
    assert frechet_distance(rows[::2], shuffled, features=made).value > 10 * near
    with pytest.raises(ValueError, match="images and labels, or neither"):
        ClassifierFeatures.fit(rows)


def test_the_network_of_digits_is_named_and_made_once():
    rows = data.binarize(data.digits())
    by_name = frechet_distance(rows[:200], rows[200:], features="digits")
    assert by_name == frechet_distance(rows[:200], rows[200:], features=ClassifierFeatures.of_digits())
    assert by_name.num_features == 64 and ClassifierFeatures.of_digits() is ClassifierFeatures.of_digits()
    assert by_name.value != frechet_distance(rows[:200], rows[200:]).value
    with pytest.raises(ValueError, match="images of 64 pixels apart, and these have 7: train a network"):
        frechet_distance(BITS, BITS, features="digits")
    with pytest.raises(ValueError, match="or a function of rows, or None, not 'inception'"):
        frechet_distance(BITS, BITS, features="inception")


def test_images_reach_a_network_resized_coloured_and_scaled():
    seen = []

    def network(images):
        seen.append(np.asarray(images))
        return images[:, 0, :, 0]

    rows = np.array([[0.0, 1.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5]])
    made = ImageFeatures(network, (2, 2), size=(4, 4), channels=2, bounds=(-1.0, 3.0))(rows)
    (images,) = seen
    assert images.shape == (2, 4, 4, 2)
    np.testing.assert_allclose(images[0, 1, :, 1], [-1, 0, 2, 3], atol=1e-6)  # half-pixel centres
    np.testing.assert_allclose(images[1], 1.0)
    np.testing.assert_array_equal(made, images[:, 0, :, 0])
    with pytest.raises(
        ValueError, match=r"images of shape \(2, 2\) with values in \[0, 1\]; .*of 4 values.*to 2"
    ):
        ImageFeatures(network, (2, 2))(2 * rows)
    with pytest.raises(ValueError, match="a height and a width each"):
        ImageFeatures(network, (4,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.zeros(2), np.eye(3), np.zeros(2), np.eye(2)), r"got \(2,\) and cov of \(3, 3\)"),
        ((np.zeros(2), np.eye(2), np.zeros(3), np.eye(3)), r"shapes \(2,\) and \(3,\), which differ"),
        ((np.zeros(2), np.eye(2), np.zeros(2), -np.eye(2)), "other_cov is not a covariance"),
    ],
)
def test_wrong_moments(arguments, message):
    with pytest.raises(ValueError, match=message):
        gaussian_frechet(*arguments)


def test_too_few_rows():
    with pytest.raises(ValueError, match="at least 40 rows on either side; got 30 and 50"):
        frechet_distance(np.eye(30, 3), np.eye(50, 3), extrapolate=True)
    with pytest.raises(ValueError, match="at least 2 rows; got 1 samples"):
        frechet_distance(np.eye(1, 3), np.eye(50, 3))


# -- adversarial accuracy --------------------------------------------------------------------------


def brute_force(real, synthetic):
    """Both halves with ties at one half, row by row."""
    made = []
    for own, other in ((real, synthetic), (synthetic, real)):
        told = []
        for i, row in enumerate(own):
            inside = min(((row - x) ** 2).sum() for j, x in enumerate(own) if j != i)
            across = min(((row - x) ** 2).sum() for x in other)
            told.append(0.5 if inside == across else float(across > inside))
        made.append(np.mean(told))
    return made


@pytest.mark.parametrize("chunk", [8, 1024])
@pytest.mark.parametrize("binary", [True, False])
def test_adversarial_accuracy_against_a_loop(binary, chunk):
    rng = np.random.default_rng(3)
    real, synthetic = rng.normal(size=(2, 30, 5))
    if binary:
        real, synthetic = real > 0, synthetic > 0.5
    made = adversarial_accuracy(real, synthetic, chunk=chunk)
    wanted = brute_force(real.astype(float), synthetic.astype(float))
    np.testing.assert_allclose([made.real, made.synthetic, made.value], [*wanted, np.mean(wanted)], rtol=1e-6)
    assert (made.tied > 0.1) == binary


def test_copies_and_strangers():
    rows = RNG.normal(size=(40, 3))
    assert adversarial_accuracy(rows, rows).value == 0.0  # every nearest neighbour is the copy
    assert adversarial_accuracy(rows, rows + 100).value == 1.0
    with pytest.raises(ValueError, match="two sets of one size, at least 2; got 40 real and 30"):
        adversarial_accuracy(rows, rows[:30])
