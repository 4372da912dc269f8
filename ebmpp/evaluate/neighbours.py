# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Nearest-neighbour adversarial accuracy: can real and synthetic rows be told apart?"""

import dataclasses
from typing import Any

from jaxtyping import Bool, Float
import numpy as np

from ebmpp.core.statistics import standard_error
from ebmpp.errors import ArgumentError
from ebmpp.evaluate.rows import as_rows, square_distances


@dataclasses.dataclass(frozen=True)
class AdversarialAccuracy:
    """How well the nearest neighbour tells real from synthetic; see :func:`adversarial_accuracy`."""

    value: float
    """Half the sum of the next two: 1/2 where they cannot be told apart."""
    real: float
    """Share of real rows that are nearer to another real row than to a synthetic one."""
    synthetic: float
    """Share of synthetic rows that are nearer to another synthetic row than to a real one."""
    standard_error: float
    """As if the rows' answers were independent. They share neighbours: over repeated draws the value spreads
    a quarter more than this for real-valued rows, half more for binary ones with many ties."""
    tied: float
    """Share of rows at the same distance from both, which count one half."""

    def __repr__(self) -> str:
        return (
            f"AdversarialAccuracy({self.value:.3f} +- {self.standard_error:.2g}; real {self.real:.3f}, "
            f"synthetic {self.synthetic:.3f}, tied {self.tied:.3f})"
        )


def adversarial_accuracy(real: Any, synthetic: Any, *, chunk: int = 1024) -> AdversarialAccuracy:
    """Accuracy of the nearest neighbour, left out, at telling real rows from synthetic ones.

    1/2 is indistinguishable. Above, the synthetic rows are somewhere else than the real ones, or have
    missed some of them. Below, they are too near: copies of the real rows. So give it held-out rows for
    quality, training rows for copying; the difference of the two is the privacy loss of the paper. It hardly
    sees a rare mode that is missed, and distances of raw pixels are no judgement of the eye.

    Ties count one half here (the paper's strict inequality counts them 0, and calls binary rows with many
    of them copies); ``value - tied / 2`` is the strict one.

    :param real: shape ``(rows, *shape)``, at least two rows.
    :param synthetic: as many: a larger set would have the nearer neighbours.
    :param chunk: rows whose distances from all others are in memory together.
    :raises ArgumentError: for arrays that do not fit.

    **References**

    1. Yale, Dash, Dutta, Guyon, Pavao, Bennett (2019), *Assessing privacy and quality of synthetic health
       data*, where it is AA_TS.

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
            f"adversarial_accuracy compares two sets of one size, at least 2; got {len(a)} real and {len(b)} "
            "synthetic rows: draw as many of the larger at random"
        )
    of_real, ties = _nearer(a, b, chunk)
    of_synthetic, others = _nearer(b, a, chunk)
    each, tied = np.concatenate([of_real, of_synthetic]), np.concatenate([ties, others])
    means = (float(a.mean()) for a in (each, of_real, of_synthetic))
    return AdversarialAccuracy(*means, float(standard_error(each)), float(tied.mean()))


def _nearer(
    own: Float[np.ndarray, "rows units"], other: Float[np.ndarray, "rows units"], chunk: int
) -> tuple[Float[np.ndarray, "rows"], Bool[np.ndarray, "rows"]]:
    """Whether each row's nearest neighbour is its own kind (1/2 where tied), and where it is tied."""
    inside, across = _nearest(own, own, chunk, True), _nearest(own, other, chunk, False)
    tied = inside == across
    return np.where(tied, 0.5, across > inside), tied


def _nearest(
    rows: Float[np.ndarray, "rows units"],
    others: Float[np.ndarray, "others units"],
    chunk: int,
    without_self: bool,
) -> Float[np.ndarray, "rows"]:
    """Squared distance of each row from the nearest."""
    made: list[float] = []
    for square in square_distances(rows, others, chunk):
        if without_self:
            np.fill_diagonal(square[:, len(made) :], np.inf)
        made.extend(square.min(1))
    return np.array(made)
