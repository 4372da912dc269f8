# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Nearest-neighbour adversarial accuracy of real and synthetic rows."""

import dataclasses
from typing import Any

from jaxtyping import Bool, Float
import numpy as np

from ebmpp.contrib.sample_quality.rows import as_rows, square_distances
from ebmpp.core.statistics import standard_error
from ebmpp.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class AdversarialAccuracy:
    """Accuracy of the nearest neighbour as a classifier; see :func:`adversarial_accuracy`."""

    value: float
    """Mean of ``real`` and ``synthetic``: 1/2 for indistinguishable sets."""
    real: float
    """Share of real rows that are nearer to another real row than to a synthetic one."""
    synthetic: float
    """Share of synthetic rows that are nearer to another synthetic row than to a real one."""
    standard_error: float
    """Standard error for independent rows. Rows share neighbours: over repeated draws
    the value's standard
    deviation is a quarter larger for real-valued rows, and half larger for binary rows
    with many ties."""
    tied: float
    """Share of rows at equal distance from both sets, which count one half."""

    def __repr__(self) -> str:
        return (
            f"AdversarialAccuracy({self.value:.3f} +- {self.standard_error:.2g}; real "
            f"{self.real:.3f}, synthetic {self.synthetic:.3f}, tied {self.tied:.3f})"
        )


def adversarial_accuracy(
    real: Any, synthetic: Any, *, chunk: int = 1024
) -> AdversarialAccuracy:
    """Return the leave-one-out accuracy of nearest neighbours on real and synthetic rows.

    A value of 1/2 means indistinguishable. A larger value means that the synthetic rows
    lie elsewhere or miss some of the real ones. A smaller value means that they are
    copies of real rows. Use held-out rows to measure quality and training rows to
    detect copying; the paper calls the difference the privacy loss. The score is
    insensitive to a rare missing mode, and distances of raw pixels differ from
    perception.

    Ties count one half. The paper counts them 0, which makes binary rows with many ties
    look like copies; ``value - tied / 2`` is the paper's score.

    :param real: shape ``(rows, *shape)``, at least two rows.
    :param synthetic: as many rows; a larger set would have nearer neighbours.
    :param chunk: number of rows whose distances from all others are in memory at a
        time.
    :raises ArgumentError: arrays that do not fit.

    **References**

    1. Yale, Dash, Dutta, Guyon, Pavao, Bennett (2019), *Assessing privacy and quality
       of synthetic health data*, where it is AA_TS.

    **Example**

    >>> import numpy as np
    >>> draw = np.random.default_rng(1).normal
    >>> adversarial_accuracy(draw(size=(500, 3)), draw(size=(500, 3)))
    AdversarialAccuracy(0.504 +- 0.016; real 0.488, synthetic 0.520, tied 0.000)
    >>> adversarial_accuracy(draw(size=(500, 3)), draw(size=(500, 3)) + 5).value
    1.0
    """
    a, b = as_rows(real=real, synthetic=synthetic)
    if len(a) != len(b) or len(a) < 2:
        raise ArgumentError(
            "real and synthetic must have the same number of rows, at least 2, got "
            f"{len(a)} and {len(b)}. Choose as many of the larger set at random"
        )
    real_score, real_tied = _own_set(a, b, chunk)
    synthetic_score, synthetic_tied = _own_set(b, a, chunk)
    scores = np.concatenate([real_score, synthetic_score])
    tied = np.concatenate([real_tied, synthetic_tied])
    means = (float(score.mean()) for score in (scores, real_score, synthetic_score))
    return AdversarialAccuracy(
        *means, float(standard_error(scores)), float(tied.mean())
    )


def _own_set(
    rows: Float[np.ndarray, "rows units"],
    other: Float[np.ndarray, "rows units"],
    chunk: int,
) -> tuple[Float[np.ndarray, "rows"], Bool[np.ndarray, "rows"]]:
    """Return 1 per row whose nearest neighbour is in its own set (1/2 if tied), and ties."""
    inside = _nearest(rows, rows, chunk, True)
    across = _nearest(rows, other, chunk, False)
    tied = inside == across
    return np.where(tied, 0.5, across > inside), tied


def _nearest(
    rows: Float[np.ndarray, "rows units"],
    others: Float[np.ndarray, "others units"],
    chunk: int,
    without_self: bool,
) -> Float[np.ndarray, "rows"]:
    """Return the squared distance from each row to its nearest neighbour."""
    nearest: list[float] = []
    for square in square_distances(rows, others, chunk):
        if without_self:
            np.fill_diagonal(square[:, len(nearest) :], np.inf)
        nearest.extend(square.min(1))
    return np.array(nearest)
