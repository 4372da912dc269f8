# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Scales of real data: moments on the host in double precision, and warnings of scales that do not fit."""

from typing import Any
import warnings

import numpy as np

from ebmpp.core.types import Params
from ebmpp.families import Gaussian
from ebmpp.graph.declaration import Declaration
from ebmpp.graph.factors import Bilinear

_CHUNK = 4096  # rows in double precision at once
_NEAR = 3.0  # standard deviations between the data and the row that stands for the default distribution
_DOUBT = 5.0  # standard errors of a variance


def moments(x: Any, known: Any, weights: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean, variance and number of known rows of each unit; squares are those of centred rows."""
    x = np.asarray(x)
    weight = np.ones(len(x)) if weights is None else np.asarray(weights, float)
    starts = range(0, len(x), _CHUNK)

    def averages(function: Any) -> np.ndarray:
        sums = np.zeros((2, *x.shape[1:]))
        for part in (slice(s, s + _CHUNK) for s in starts):
            w = weight[part].reshape(-1, *(1,) * (x.ndim - 1)) * (
                1 if known is None else np.asarray(known[part])
            )
            sums += [(w * function(x[part].astype(float))).sum(0), np.broadcast_to(w, x[part].shape).sum(0)]
        return sums[0] / np.where(sums[1] > 0, sums[1], 1)

    mean = averages(lambda rows: rows)
    variance = averages(lambda rows: (rows - mean) ** 2)
    count = np.full(x.shape[1:], len(x)) if known is None else np.asarray(known).sum(0)
    return mean, variance, count


def with_default_row(
    family: Gaussian, mean: np.ndarray, variance: np.ndarray, count: np.ndarray
) -> np.ndarray:
    """Return the mean statistics of the rows and of one of variance 1, as near to 0 as the data allow.

    A row at 0 would widen columns of mean 10,000 and standard deviation 3 to 224.
    """
    reach = _NEAR * np.sqrt(variance if family.learned else 1.0)
    near = np.where(count > 0, np.clip(0.0, mean - reach, mean + reach), 0.0)
    moved = (mean - near) / (count + 1)
    centre = mean - moved
    spread = (count * (variance + moved**2) + 1 + (near - centre) ** 2) / (count + 1)
    return np.stack([centre, spread + centre**2], -1) if family.learned else centre


def warn(graph: Declaration, block: str, variance: np.ndarray, count: np.ndarray) -> None:
    """Warn of constant columns of a learned variance, and of columns that a variance of 1 does not fit."""
    family, interacts = graph.families[block], any(f.interacts for f in graph.factors if block in f.blocks)
    if not isinstance(family, Gaussian):
        return
    if family.learned:
        wrong = (variance == 0) & (count > 1)
        message = "are constant, so their precision grows without end in training. Drop them, or add noise"
    else:
        error = np.sqrt(2 / np.maximum(count, 1))
        standardised = variance.size > 1 and (np.abs(variance - 1) <= error**2).all()
        wrong = interacts & ((variance < 1 - _DOUBT * error) | (standardised & (_DOUBT * error < 1)))
        message = (
            "have no more variance than the 1 that the family assumes given the other blocks, so nothing is "
            'left for these to explain. Take variance="learned", or data of a larger scale'
        )
    if wrong.any():
        places = [tuple(map(int, place)) if wrong.ndim > 1 else int(place[0]) for place in np.argwhere(wrong)]
        listed = f"{places[:10]}{'...' if len(places) > 10 else ''}"
        warnings.warn(f"block {block!r}: columns {listed} {message}.", UserWarning, stacklevel=4)


def warn_if_stuck(graph: Declaration, params: Params) -> None:
    """Warn of latents whose gradients are zero: their conditional mean is 0 while all their params are."""
    for block, family in graph.latent.items():
        if isinstance(family, Gaussian) and not family.learned:
            names = [f.name for f in graph.factors if block in f.blocks]
            joins = any(type(f) is Bilinear for f in graph.factors if block in f.blocks)
            if joins and not any(np.any(params[name]) for name in names):
                warnings.warn(
                    f"block {block!r}: all params of its factors {names} are 0, where every gradient of "
                    "conditional means is 0, so training leaves them there. Start from random weights, "
                    'scheme="gaussian".',
                    UserWarning,
                    stacklevel=4,
                )
