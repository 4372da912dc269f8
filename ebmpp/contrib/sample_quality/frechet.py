# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Frechet distance between the normal approximations of two sets of features."""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

from jaxtyping import Float, Shaped
import numpy as np

from ebmpp.contrib.sample_quality.features import ClassifierFeatures
from ebmpp.contrib.sample_quality.rows import as_rows
from ebmpp.core import checks
from ebmpp.core.statistics import standard_error
from ebmpp.errors import ArgumentError

Features = Callable[[np.ndarray], Any]

_GROUPS = 20  # of the jackknife


@dataclasses.dataclass(frozen=True)
class FrechetDistance:
    """Squared Frechet distance; see :func:`frechet_distance`."""

    value: float
    """Distance of all rows, biased upwards; the bias falls with the number of rows."""
    extrapolated: float
    """Jackknife extrapolation to infinitely many rows, possibly negative; nan unless requested."""
    standard_error: float
    """Jackknife standard error of both, over samples and reference rows; nan unless requested."""
    num_samples: int
    num_reference: int
    num_features: int

    def __repr__(self) -> str:
        more = f", extrapolated {self.extrapolated:.4g} +- {self.standard_error:.2g}"
        more = "" if math.isnan(self.extrapolated) else more
        return (
            f"FrechetDistance({self.value:.4g}{more}; {self.num_features} features of "
            f"{self.num_samples} samples and {self.num_reference} reference rows)"
        )


def gaussian_frechet(mean: Any, cov: Any, other_mean: Any, other_cov: Any) -> float:
    r"""Return the squared Frechet (2-Wasserstein) distance of two normal distributions.

    .. math:: |m - m'|^2 + \operatorname{tr} C + \operatorname{tr} C'
        - 2 \operatorname{tr} (C^{1/2} C' C^{1/2})^{1/2}

    Symmetric eigenvalue problems keep this exact for singular covariances.

    :param mean: shape ``(d,)``.
    :param cov: shape ``(d, d)``, symmetric and positive semidefinite.
    :param other_mean: shape ``(d,)``.
    :param other_cov: as ``cov``.
    :raises ArgumentError: shapes that do not fit, or a matrix that is not a covariance.

    **References**

    1. Dowson, Landau (1982), *The Frechet distance between multivariate normal
       distributions*.

    **Example**

    >>> gaussian_frechet(np.zeros(2), np.eye(2), np.array([3.0, 0.0]), 4 * np.eye(2))
    11.0
    """
    mean = np.asarray(mean, float)
    other_mean = np.asarray(other_mean, float)
    if mean.ndim != 1 or mean.shape != other_mean.shape:
        raise ArgumentError(
            f"means must have the same shape (d,), got {mean.shape} and {other_mean.shape}"
        )
    cov, other_cov = (
        _covariance(*c, len(mean)) for c in (("cov", cov), ("other_cov", other_cov))
    )
    values, vectors = np.linalg.eigh(cov)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    inner = np.linalg.eigvalsh(root @ other_cov @ root)
    shared = np.sqrt(np.maximum(inner, 0)).sum()
    distance = (
        ((mean - other_mean) ** 2).sum()
        + np.trace(cov)
        + np.trace(other_cov)
        - 2 * shared
    )
    return max(float(distance), 0.0)


def _covariance(name: str, value: Any, size: int) -> Float[np.ndarray, "d d"]:
    cov = np.asarray(value, float)
    scale = np.abs(cov).max(initial=0)
    if (
        cov.shape != (size, size)
        or not np.allclose(cov, cov.T, atol=1e-8 * scale)
        or np.linalg.eigvalsh(cov).min() < -1e-6 * scale
    ):
        raise ArgumentError(
            f"{name} must be a symmetric positive semidefinite matrix of shape "
            f"({size}, {size}), got {checks.tell(cov)}"
        )
    return cov


def frechet_distance(
    samples: Any,
    reference: Any,
    *,
    features: Features | str | None = None,
    extrapolate: bool = False,
    seed: int = 0,
    batch_size: int = 4096,
) -> FrechetDistance:
    """Return the squared Frechet distance between features of samples and of reference rows.

    Only means and covariances of the features are compared. **The distance is biased
    upwards**, by about the squared number of features divided by the number of rows.
    Compare distances for equal numbers of rows only, and compute the distance of
    held-out data once as a baseline. ``extrapolate=True`` extrapolates linearly in the
    inverse number of rows, which removes most of the bias.

    **This is the FID of the literature only for the Inception network's features**;
    :class:`ImageFeatures` scales and resizes images for it. Without ``features`` the
    rows themselves are compared.

    :param samples: shape ``(samples, *shape)``.
    :param reference: shape ``(rows, *shape)``, the data.
    :param features: a function from an array ``(batch, *shape)`` to one ``(batch, d)``;
        or "digits", a small classifier of scikit-learn's digits
        (:class:`ClassifierFeatures`), for rows of 8x8 pixels in [0, 1].
    :param extrapolate: extrapolate to infinitely many rows. Give the samples in the
        order of the chain: the jackknife leaves out successive ones, so its standard
        error includes their dependence.
    :param seed: seed of the jackknife's groups of reference rows.
    :param batch_size: number of rows per call of ``features``.
    :raises ArgumentError: arrays or features that do not fit, or too few rows.

    **References**

    1. Heusel et al. (2017), *GANs trained by a two time-scale update rule converge to a
       local Nash equilibrium*, on the FID.
    2. Chong, Forsyth (2020), *Effectively unbiased FID and Inception Score and where to
       find them*, who extrapolate from subsets of many sizes.

    **Example**

    >>> import numpy as np
    >>> draw = np.random.default_rng(0).normal
    >>> frechet_distance(draw(size=(2000, 5)), draw(size=(2000, 5)) + 1.0, extrapolate=True)
    FrechetDistance(4.978, extrapolated 4.967 +- 0.13; 5 features of 2000 samples and
    2000 reference rows)
    """
    as_rows(samples=samples, reference=reference)
    seed = checks.count("frechet_distance: seed", seed, least=0)
    batch_size = checks.count("frechet_distance: batch_size", batch_size)
    if isinstance(features, str):
        features = _named_features(features, np.asarray(samples))
    a, b = (
        _features(features, np.asarray(x), batch_size) for x in (samples, reference)
    )
    least = 2 * _GROUPS if extrapolate else 2
    if min(len(a), len(b)) < least:
        raise ArgumentError(
            f"frechet_distance needs at least {least} samples and reference rows, got "
            f"{len(a)} and {len(b)}"
        )
    value = _distance(a, b)
    line = math.nan
    error = math.nan
    if extrapolate:
        line, error = _jackknife(a, b, value, np.random.default_rng(seed))
    return FrechetDistance(value, line, error, len(a), len(b), a.shape[1])


def _named_features(name: str, rows: np.ndarray) -> Features:
    checks.choice(
        "frechet_distance: features",
        name,
        ("digits",),
        also="a function of rows, or None",
    )
    if rows[0].size != 64:
        raise ArgumentError(
            f'features="digits" needs images of 64 pixels, got {rows[0].size}. Train '
            "another network by "
            "ClassifierFeatures.fit(images, labels)"
        )
    return ClassifierFeatures.of_digits()


def _features(
    features: Features | None, rows: Shaped[np.ndarray, "rows ..."], batch_size: int
) -> Float[np.ndarray, "rows d"]:
    if features is None:
        return rows.reshape(len(rows), -1).astype(float)
    batches = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    results = [np.asarray(features(batch)) for batch in batches]
    for batch, result in zip(batches, results, strict=True):
        if (
            result.ndim != 2
            or len(result) != len(batch)
            or not np.isfinite(result).all()
        ):
            raise ArgumentError(
                f"features must return finite numbers of shape ({len(batch)}, d), got "
                f"shape {result.shape}"
            )
    return np.concatenate(results).astype(float)


def _distance(
    a: Float[np.ndarray, "samples d"], b: Float[np.ndarray, "rows d"]
) -> float:
    moments = [
        m for x in (a, b) for m in (x.mean(0), np.atleast_2d(np.cov(x, rowvar=False)))
    ]
    return gaussian_frechet(*moments)


def _jackknife(
    a: np.ndarray, b: np.ndarray, value: float, rng: np.random.Generator
) -> tuple[float, float]:
    """Return the value at infinitely many rows, if it is linear in 1/rows, and its standard error.

    Groups of samples are successive, so that a chain's dependence is included; groups
    of rows are random.
    """
    groups = (
        np.array_split(np.arange(len(a)), _GROUPS),
        np.array_split(rng.permutation(len(b)), _GROUPS),
    )
    without = [
        _distance(np.delete(a, i, 0), np.delete(b, j, 0))
        for i, j in zip(*groups, strict=True)
    ]
    pseudo = _GROUPS * value - (_GROUPS - 1) * np.array(without)
    return float(pseudo.mean()), float(standard_error(pseudo))
