# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A Gaussian-Bernoulli machine whose distribution is an exact mixture, for tests of Langevin steps."""

from functools import cache
from typing import Any

import numpy as np
from oracle import Oracle
import zoo

PARAMS = {
    "v": np.array([[0.3, -2.0], [0.1, -0.1]], np.float32),  # variances 1/4 and 5
    "h": np.array([-0.3, 0.2], np.float32),
    "v:h": np.array([[1.5, -1.0], [-0.4, 0.3]], np.float32),
}
VARIANCE = np.array([0.25, 5.0])


@cache
def oracle() -> Oracle:
    return Oracle(zoo.graph("learned"), PARAMS, {})


def mixture() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every h, its probability, and the mean of v given it."""
    exact = oracle()
    return exact.x["h"], np.exp(exact.log_weights - exact.log_z), exact.mean


def moments(v: Any, h: Any) -> np.ndarray:
    """First and second moments of v, and of v with h; ``(rows, 10)``."""
    v, h = np.asarray(v, float), np.asarray(h, float)
    second = (v[:, :, None] * v[:, None]).reshape(len(v), -1)
    return np.concatenate([v, second, (v[:, :, None] * h[:, None]).reshape(len(v), -1)], 1)


def exact_moments() -> np.ndarray:
    h, p, mean = mixture()
    conditional = moments(mean, h)
    conditional[:, 2:6] += np.diag(VARIANCE).reshape(-1)
    return p @ conditional


def stationary(rows: int, seed: int) -> dict[str, np.ndarray]:
    """Independent draws of the model."""
    return oracle().draw(np.random.default_rng(seed), rows)
