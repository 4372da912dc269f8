# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Phases of coupled pairs, their metrics, and the pool of mixture proposals.

A pool is a set of states of the whole graph. A step moves it before its pairs begin, by keys of its own: the
pairs' draws do not enter it, so given the past the pairs are unbiased.
"""

from collections.abc import Collection
import dataclasses
from functools import partial
from typing import NamedTuple

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import random
from ebmpp.core.types import Blocks, Key, Params, Rows, Scalar
from ebmpp.coupling.engine import Outcome, Window
from ebmpp.coupling.pools import complete_rows
from ebmpp.estimators.phases import row_keys
from ebmpp.graph import FactorGraph
from ebmpp.moves.mixture import Mixture, make_pool
from ebmpp.moves.move import Layer, draw_sweep, gibbs_sweep
from ebmpp.moves.target import Target


class Phase(NamedTuple):
    """Result of a set of coupled pairs.

    :param gradient: weighted sum of energy gradients over the pairs.
    :param length: adaptive length of the pairs of the next step.
    :param metrics: meeting times and other scalars of the history.
    """

    gradient: Params
    length: Scalar
    metrics: dict[str, Array]


def pair_metrics(outcome: Outcome, window: Window) -> dict[str, Array]:
    """Return meeting times, window, cost, trials and acceptance as scalars."""
    met = outcome.meeting_time >= 0
    tau = jnp.where(met, outcome.meeting_time, 0)
    corrected = ~met | (tau > window.k + window.lag)
    sweeps = jnp.where(met, jnp.maximum(window.m, tau) + tau - window.lag, 0)
    # One reduction compiles two kernels for all; it is of floats because integers would overflow.
    sums = jnp.stack([a.astype(jnp.result_type(float)) for a in (~met, tau, sweeps, corrected)]).sum(1)
    num_met = jnp.maximum(len(met) - sums[0], 1)
    metrics = {
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
    return metrics if outcome.acceptance is None else metrics | {"acceptance": outcome.acceptance}


@partial(jax.jit, static_argnums=(0, 3))
def init_pool(graph: FactorGraph, params: Params, data: Rows, size: int, key: Key) -> Blocks:
    """Choose random rows of the data, cyclically if fewer than ``size``, and draw their latents."""
    count = len(next(iter(data.values())))
    index = jnp.argsort(random.words(random.fold_in(key, 3), count))[jnp.arange(size) % count]
    rows = {b: jnp.take(v, index, axis=0) for b, v in data.items()}
    return complete_rows(Target(graph, params), rows, random.fold_in(key, 4))


def sweep_pool(graph: FactorGraph, params: Params, pool: Rows, clamped: Collection[str], key: Key) -> Rows:
    """Move a pool or persistent chains by one sweep of the blocks that are not clamped."""
    keys = row_keys(key, len(next(iter(pool.values()))))
    return draw_sweep(Target(graph, params), pool, gibbs_sweep(graph, clamped), keys)[0]


def with_pool(target: Target, move: Mixture, pool: Rows, key: Key) -> Target:
    """Return a target with the pool, its marginalised blocks redrawn given the others."""
    keys = row_keys(key, len(next(iter(pool.values()))))
    rows = Layer(move.marginalize).draw(target, pool, keys)[0]
    return dataclasses.replace(
        target, pool=make_pool(target.graph, target.params, move, rows, target.clamped)
    )
