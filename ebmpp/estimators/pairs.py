# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What coupled pairs give an estimator: a phase, and what the history tells of it."""

from typing import NamedTuple

from jax import Array
import jax.numpy as jnp

from ebmpp.core.types import Params, Scalar
from ebmpp.sampling.engine import Outcome, Window


class Phase(NamedTuple):
    """What a set of coupled pairs gives."""

    gradient: Params
    """The weighted sum of energy gradients over the pairs."""
    length: Scalar
    """How far the pairs of the next step run, if that is adaptive."""
    metrics: dict[str, Array]
    """Meeting times, and what else the history keeps."""


def metrics_of(outcome: Outcome, window: Window) -> dict[str, Array]:
    """Meeting times, window, cost, trials and acceptance, as scalars."""
    met = outcome.meeting_time >= 0
    tau = jnp.where(met, outcome.meeting_time, 0)
    made = {
        "meeting_time_mean": tau.sum() / jnp.maximum(met.sum(), 1),
        "meeting_time_max": tau.max(),
        "num_unmet": (~met).sum(),
        "lag": window.lag,
        "k": window.k,
        "m": window.m,
        "sweeps": (jnp.maximum(window.m, tau) + tau - window.lag).sum(where=met) / jnp.maximum(met.sum(), 1),
        "trials": outcome.trials,
        "corrected": (~met | (tau > window.k + window.lag)).mean(),
    }
    return made if outcome.acceptance is None else made | {"acceptance": outcome.acceptance}
