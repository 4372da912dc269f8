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
    corrected = ~met | (tau > window.k + window.lag)
    sweeps = jnp.where(met, jnp.maximum(window.m, tau) + tau - window.lag, 0)
    # one reduction, which is two kernels to compile, for all; of floats, since whole numbers would overflow
    sums = jnp.stack([a.astype(jnp.result_type(float)) for a in (~met, tau, sweeps, corrected)]).sum(1)
    num_met = jnp.maximum(len(met) - sums[0], 1)
    made = {
        "meeting_time_mean": sums[1] / num_met,
        "meeting_time_max": tau.max(),
        "num_unmet": sums[0].astype(jnp.int32),
        "lag": window.lag,
        "k": window.k,
        "m": window.m,
        "sweeps": sums[2] / num_met,
        "trials": outcome.trials,
        "corrected": sums[3] / len(met),
    }
    return made if outcome.acceptance is None else made | {"acceptance": outcome.acceptance}
