# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""One figure of a published analysis beside ours."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC


class Row(NamedTuple):
    """A published figure, and ours with its error."""

    quantity: str
    published: float
    ours: float
    error: float
    """Monte Carlo standard error of ours, or what rounding of the published figure allows."""
    unit: float = 0.0
    """Half of the last digit of the published figure."""

    @property
    def agrees(self) -> bool:
        """True if the figures differ by at most two errors and the rounding."""
        return abs(self.ours - self.published) <= 2 * self.error + self.unit


def means(mcmc: MCMC, published: Mapping[str, tuple[float, float]]) -> list[Row]:
    """Return posterior means with Monte Carlo errors.

    :param published: by site, possibly with an index as in "x[1]", the published mean
        and half of its last digit.
    """
    draws = mcmc.get_samples(group_by_chain=True)
    rows = []
    for name, (value, unit) in published.items():
        site, _, index = name.partition("[")
        values = np.asarray(draws[site], float)
        if index:
            values = values[(..., *map(int, index[:-1].split(",")))]
        error = values.std() / np.sqrt(effective_sample_size(values))
        rows.append(Row(name, value, float(values.mean()), float(error), unit))
    return rows
