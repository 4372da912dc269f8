# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Estimators that compile in no time and tell what they were given, for tests of training."""

import dataclasses
from typing import Any

import numpy as np

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp import Bernoulli, FactorGraph, Gaussian
from ebmpp.estimators.base import Estimate, Estimator
from ebmpp.training import Fit
from helpers import pair

NUMBERED = pair(Gaussian(1), Bernoulli(1))
ROWS = np.arange(10, dtype=np.float32)[:, None]


@dataclasses.dataclass(frozen=True)
class Recorder(Estimator):
    """An estimator of one's own: its history tells which rows a step saw, its gradient pulls to zero."""

    def init(self, graph: FactorGraph, params: Any, data: Any, batch: int, key: jax.Array) -> jax.Array:
        return jnp.array(batch)

    def estimate(self, graph: FactorGraph, params: Any, state: Any, batch: Any, key: Any) -> Estimate:
        first = next(iter(batch.rows.values())).reshape(len(batch.weights), -1)[:, 0]
        gradient = jax.tree.map(lambda p: p - 1, params)
        seen = {f"row {i}": row for i, row in enumerate(first)}
        seen |= {f"weight {i}": weight for i, weight in enumerate(batch.weights)}
        return Estimate(gradient, state, {"word": key[0], **seen})


def numbered(data: Any = ROWS, estimator: Any = Recorder(), **given: Any) -> Fit:
    """A run that records which rows its steps see."""
    settings = {"rng_key": jax.random.key(0), "num_steps": 5, "progress_bar": False, **given}
    if "schedule" in settings:
        settings |= {"num_steps": None}
    else:
        settings |= {"estimator": estimator}
    return ebmpp.fit(NUMBERED, data, **settings)


def mapped(rows, path):
    """The same rows in a file."""
    made = np.memmap(path, mode="w+", dtype=rows.dtype, shape=rows.shape)
    made[:] = rows
    made.flush()
    return np.memmap(path, mode="r", dtype=rows.dtype, shape=rows.shape)


def rows_seen(made: Fit) -> np.ndarray:
    """Which rows each step saw, shape (steps, batch)."""
    return _seen(made, "row ").astype(int)


def weights_seen(made: Fit) -> np.ndarray:
    """Their weights, likewise."""
    return _seen(made, "weight ")


def _seen(made: Fit, kind: str) -> np.ndarray:
    names = [name for name in made.history if str(name).startswith(kind)]
    return np.stack([made.history[name].values for name in names], axis=1)


def leaves(tree: Any) -> np.ndarray:
    return np.concatenate([np.asarray(leaf, float).ravel() for leaf in jax.tree.leaves(tree)])


def assert_same_run(first: Fit, second: Fit) -> None:
    """Bitwise, in everything a run makes."""
    for name in ("params", "optimizer_state", "estimator_state", "best_params"):
        jax.tree.map(np.testing.assert_array_equal, getattr(first, name), getattr(second, name))
    assert first.best_step == second.best_step
    assert first.history.identical(second.history)
    assert {n: v.dtype for n, v in first.history.items()} == {n: v.dtype for n, v in second.history.items()}


@dataclasses.dataclass(frozen=True)
class Walker(Recorder):
    """It carries a random walk, which is its gradient: whatever is lost on the way shows in the params."""

    steps_per_batch: int = 1
    adopts: bool = False
    metric: str = "walk"

    def init(self, graph: FactorGraph, params: Any, data: Any, batch: int, key: jax.Array) -> dict:
        return {"at": jax.random.normal(jax.random.wrap_key_data(key)), "steps": jnp.array(0)}

    def estimate(self, graph: FactorGraph, params: Any, state: Any, batch: Any, key: Any) -> Estimate:
        made = super().estimate(graph, params, state, batch, key)
        walk = state["at"] + jax.random.normal(jax.random.wrap_key_data(key))
        metrics = made.metrics | {self.metric: walk, "count": state["steps"]}
        gradient = jax.tree.map(lambda g: g + 0.1 * walk, made.gradient)
        return Estimate(gradient, {"at": walk, "steps": state["steps"] + 1}, metrics)

    def adopt(self, old: Any, fresh: Any) -> Any:
        return old if self.adopts else fresh
