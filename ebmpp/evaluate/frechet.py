# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Frechet distance of features: of normal distributions with the features' means and covariances."""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

from jaxtyping import Float, Shaped
import numpy as np

from ebmpp.core import checks
from ebmpp.core.statistics import standard_error
from ebmpp.errors import ArgumentError
from ebmpp.evaluate.features import ClassifierFeatures
from ebmpp.evaluate.rows import as_rows

Features = Callable[[np.ndarray], Any]

_GROUPS = 20  # of rows that are left out in turn


@dataclasses.dataclass(frozen=True)
class FrechetDistance:
    """A squared Frechet distance; see :func:`frechet_distance`."""

    value: float
    """From all rows: too large on average, the more so the fewer the rows."""
    extrapolated: float
    """To infinitely many rows, by the jackknife; may be below 0; nan unless asked for."""
    standard_error: float
    """Of both, by the jackknife, over draws of samples and reference rows; nan unless asked for."""
    num_samples: int
    num_reference: int
    num_features: int

    def __repr__(self) -> str:
        more = f", extrapolated {self.extrapolated:.4g} +- {self.standard_error:.2g}"
        more = "" if math.isnan(self.extrapolated) else more
        return (
            f"FrechetDistance({self.value:.4g}{more}; {self.num_features} features of {self.num_samples} "
            f"samples and {self.num_reference} reference rows)"
        )


def gaussian_frechet(mean: Any, cov: Any, other_mean: Any, other_cov: Any) -> float:
    """Squared Frechet (2-Wasserstein) distance of two normal distributions, exact.

    ``|m - m'|^2 + tr C + tr C' - 2 tr (C^(1/2) C' C^(1/2))^(1/2)``, by symmetric eigenvalue problems, so that
    singular covariances do no harm.

    :param mean: shape ``(d,)``.
    :param cov: shape ``(d, d)``, symmetric, no eigenvalue below 0.
    :return: at least 0.
    :raises ArgumentError: for shapes that do not fit, or a matrix that is no covariance.

    **References**

    1. Dowson, Landau (1982), *The Frechet distance between multivariate normal distributions*.

    **Example**

    >>> gaussian_frechet(np.zeros(2), np.eye(2), np.array([3.0, 0.0]), 4 * np.eye(2))
    11.0
    """
    mean, other_mean = np.asarray(mean, float), np.asarray(other_mean, float)
    cov, other_cov = _covariance("cov", cov, mean), _covariance("other_cov", other_cov, other_mean)
    if mean.shape != other_mean.shape:
        raise ArgumentError(f"the means have shapes {mean.shape} and {other_mean.shape}, which differ")
    values, vectors = np.linalg.eigh(cov)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    inner = np.linalg.eigvalsh(root @ other_cov @ root)
    shared = np.sqrt(np.maximum(inner, 0)).sum()
    distance = ((mean - other_mean) ** 2).sum() + np.trace(cov) + np.trace(other_cov) - 2 * shared
    return max(float(distance), 0.0)


def _covariance(name: str, given: Any, mean: Float[np.ndarray, "..."]) -> Float[np.ndarray, "d d"]:
    cov = np.asarray(given, float)
    if mean.ndim != 1 or cov.shape != (mean.size, mean.size):
        raise ArgumentError(
            f"means have shape (d,) and covariances (d, d); got {mean.shape} and {name} of {cov.shape}"
        )
    scale = np.abs(cov).max(initial=0)
    if not np.allclose(cov, cov.T, atol=1e-8 * scale) or np.linalg.eigvalsh(cov).min() < -1e-6 * scale:
        raise ArgumentError(f"{name} is not a covariance: it is not symmetric, or has a negative eigenvalue")
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
    """Squared Frechet distance of samples from reference rows, in the space of some features.

    It compares means and covariances of the features and nothing else. **It is biased upwards** with finitely
    many rows, by about the number of features squared over that of rows: compare figures of the same numbers
    of rows only, and put held-out data in for the samples once, to see what is 0 here. ``extrapolate=True``
    computes it on subsets and extends the line in 1/rows to 0, which takes most of the bias away.

    **It is the FID of the literature only with the Inception network's features**: with that network at
    hand, :class:`~ebmpp.evaluate.ImageFeatures` scales, resizes and runs it. "digits" is a small network that
    tells scikit-learn's digits apart (:class:`~ebmpp.evaluate.ClassifierFeatures`, which trains one on other
    images too), and figures of one such network compare with those of that same network alone. Without
    ``features``, rows are compared as they are.

    :param samples: shape ``(samples, *shape)``.
    :param reference: shape ``(rows, *shape)``, the data.
    :param features: from an array ``(batch, *shape)`` to one ``(batch, d)``, any callable; or "digits", for
        rows of 8x8 pixels in [0, 1].
    :param extrapolate: whether to extrapolate to infinitely many rows. Give the samples in the order of the
        chain: groups of successive ones are left out, so the standard error knows of their dependence.
    :param seed: of the groups of reference rows.
    :param batch_size: rows that ``features`` is called with.
    :raises ArgumentError: for arrays or features that do not fit, or too few rows.

    **References**

    1. Heusel et al. (2017), *GANs trained by a two time-scale update rule converge to a local Nash
       equilibrium*, where it is FID.
    2. Chong, Forsyth (2020), *Effectively unbiased FID and Inception Score and where to find them*; they fit
       the line to subsets of many sizes.

    **Example**

    >>> import numpy as np
    >>> draw = np.random.default_rng(0).normal
    >>> frechet_distance(draw(size=(2000, 5)), draw(size=(2000, 5)) + 1.0, extrapolate=True)
    FrechetDistance(4.978, extrapolated 4.967 +- 0.13; 5 features of 2000 samples and 2000 reference rows)
    """
    as_rows(samples=samples, reference=reference)
    checks.flag("frechet_distance: extrapolate", extrapolate)
    seed = checks.count("frechet_distance: seed", seed, least=0)
    batch_size = checks.count("frechet_distance: batch_size", batch_size)
    if isinstance(features, str):
        features = _named(features, np.asarray(samples))
    a, b = (_features(features, np.asarray(x), batch_size) for x in (samples, reference))
    if min(len(a), len(b)) < 2:
        raise ArgumentError(
            f"a covariance takes at least 2 rows; got {len(a)} samples and {len(b)} reference rows"
        )
    value, (line, error) = _between(a, b), (math.nan, math.nan)
    if extrapolate:
        line, error = _jackknife(a, b, value, np.random.default_rng(seed))
    return FrechetDistance(value, line, error, len(a), len(b), a.shape[1])


def _named(name: str, rows: np.ndarray) -> Features:
    checks.choice("frechet_distance: features", name, ("digits",), also="a function of rows, or None")
    if rows[0].size != 64:
        raise ArgumentError(
            f'features="digits" tells images of 64 pixels apart, and these have {rows[0].size}: train a '
            "network of their own by ClassifierFeatures.fit(images, labels)"
        )
    return ClassifierFeatures.of_digits()


def _features(
    features: Features | None, rows: Shaped[np.ndarray, "rows ..."], batch_size: int
) -> Float[np.ndarray, "rows d"]:
    if features is None:
        return rows.reshape(len(rows), -1).astype(float)
    checks.function("frechet_distance: features", features, "rows")
    batches = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    parts = [np.asarray(features(batch)) for batch in batches]
    for batch, p in zip(batches, parts, strict=True):
        if p.ndim != 2 or len(p) != len(batch) or not np.isfinite(p).all():
            raise ArgumentError(
                f"features maps (batch, *shape) to finite numbers of shape (batch, d); from {len(batch)} "
                f"rows it made shape {p.shape}"
            )
    return np.concatenate(parts).astype(float)


def _between(a: Float[np.ndarray, "samples d"], b: Float[np.ndarray, "rows d"]) -> float:
    moments = [m for x in (a, b) for m in (x.mean(0), np.atleast_2d(np.cov(x, rowvar=False)))]
    return gaussian_frechet(*moments)


def _jackknife(a: np.ndarray, b: np.ndarray, value: float, rng: np.random.Generator) -> tuple[float, float]:
    """The value at infinitely many rows, were it linear in 1/rows, and its standard error.

    Groups of successive samples are left out, so that the dependence of a chain's samples is seen; those of
    the reference rows are at random.
    """
    least = _GROUPS * 2
    if min(len(a), len(b)) < least:
        raise ArgumentError(
            f"to extrapolate, give at least {least} rows on either side; got {len(a)} and {len(b)}"
        )
    groups = (np.array_split(np.arange(len(a)), _GROUPS), np.array_split(rng.permutation(len(b)), _GROUPS))
    without = [_between(np.delete(a, i, 0), np.delete(b, j, 0)) for i, j in zip(*groups, strict=True)]
    pseudo = _GROUPS * value - (_GROUPS - 1) * np.array(without)
    return float(pseudo.mean()), float(standard_error(pseudo))
