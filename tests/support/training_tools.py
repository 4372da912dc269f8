# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A cheap estimator that records its inputs, and runs of :func:`ebmpp.fit` that use it."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import zoo

import jax
import jax.numpy as jnp
import optax

import ebmpp
from ebmpp.estimators.base import Estimate, Estimator
from ebmpp.training import FitResult

# One object per transformation: optax compares them by identity, and a new one would
# compile again.
SGD, ADAM = optax.sgd(0.5), optax.adam(0.1)
BATCH = 4
#: ten rows of the graph "binomial": row i is (i % 4, i // 4), so a batch shows which
#: rows it has
ROWS = np.stack([np.arange(10) % 4, np.arange(10) // 4], 1).astype(np.float32)
ZEROS = {
    "v": np.zeros(2, np.float32),
    "h": np.zeros(2, np.float32),
    "v:h": np.zeros((2, 2), np.float32),
}


@dataclasses.dataclass(frozen=True)
class Recorder(Estimator):
    """An estimator whose metrics are its inputs, and whose gradient is ``params - 1 +
    noise * walk``.

    Its state is a random walk, so the params show if any of it is lost. With
    ``noise=0`` and ``SGD`` the params go from 0 to ``1 - 0.5**t`` in t steps.
    """

    noise: float = 0.0
    steps_per_batch: int = 1
    adopts: bool = False
    metric: str = "walk"

    def init_state(
        self, graph: Any, params: Any, data: Any, batch: int, key: Any
    ) -> dict[str, jax.Array]:
        return {
            "walk": _uniform(key),
            "steps": jnp.array(0),
            "batch_size": jnp.array(batch),
        }

    def estimate(
        self, graph: Any, params: Any, state: Any, batch: Any, key: Any
    ) -> Estimate:
        walk = state["walk"] + _uniform(key)
        rows = batch.rows["v"] @ 4.0 ** jnp.arange(batch.rows["v"].shape[1])
        metrics = {"word": key[0], self.metric: walk, "count": state["steps"]}
        metrics |= {f"row {i}": row for i, row in enumerate(rows)}
        metrics |= {f"weight {i}": weight for i, weight in enumerate(batch.weights)}
        gradient = jax.tree.map(lambda p: p - 1 + self.noise * walk, params)
        return Estimate(
            gradient, state | {"walk": walk, "steps": state["steps"] + 1}, metrics
        )

    def adopt(self, old: Any, fresh: Any) -> Any:
        return old if self.adopts else fresh


WALKER = Recorder(noise=0.1)


def _uniform(key: jax.Array) -> jax.Array:
    return (key[0] % 2001).astype(float) / 1000 - 1


def train(
    data: Any = ROWS,
    estimator: Estimator = WALKER,
    graph: str = "binomial",
    **options: Any,
) -> FitResult:
    """Run five steps from zero params on a graph of the zoo, unless ``options`` differ."""
    zeros = {
        name: np.zeros(a.shape, np.float32)
        for name, a in zoo.graph(graph).param_shapes.items()
    }
    defaults = {"rng_key": zoo.KEY, "params": zeros, "progress_bar": False}
    if hasattr(data, "shape"):
        defaults["batch_size"] = BATCH
    if "schedule" not in options:
        defaults |= {"num_steps": 5, "estimator": estimator, "optimizer": SGD}
    return ebmpp.fit(zoo.graph(graph), data, **defaults | options)


def as_memmap(rows: np.ndarray, path: Path) -> np.memmap:
    """Write rows to a file, and return it memory-mapped."""
    array = np.memmap(path, mode="w+", dtype=rows.dtype, shape=rows.shape)
    array[:] = rows
    array.flush()
    return np.memmap(path, mode="r", dtype=rows.dtype, shape=rows.shape)


def rows_seen(fit: FitResult) -> np.ndarray:
    """Row numbers in the batch of each step, shape ``(steps, batch)``."""
    return _columns(fit, "row ").astype(int)


def weights_seen(fit: FitResult) -> np.ndarray:
    """Weights of these rows, the same shape."""
    return _columns(fit, "weight ")


def _columns(fit: FitResult, prefix: str) -> np.ndarray:
    names = [name for name in fit.history if str(name).startswith(prefix)]
    return np.stack([fit.history[name].values for name in names], axis=1)


def leaves(tree: Any) -> np.ndarray:
    """All numbers of a pytree in one vector."""
    return np.concatenate(
        [np.asarray(leaf, float).ravel() for leaf in jax.tree.leaves(tree)]
    )


def assert_same_run(first: FitResult, second: FitResult) -> None:
    """Assert that two runs agree bitwise in params, states, best params and history."""
    for name in ("params", "optimizer_state", "estimator_state", "best_params"):
        jax.tree.map(
            np.testing.assert_array_equal, getattr(first, name), getattr(second, name)
        )
    assert first.best_step == second.best_step
    assert first.history.identical(second.history)
    assert {n: v.dtype for n, v in first.history.items()} == {
        n: v.dtype for n, v in second.history.items()
    }


def assert_continues(second: FitResult, uninterrupted: FitResult) -> None:
    """Assert that a run ends as a longer one does, with the last part of its history."""
    for name in ("params", "optimizer_state", "estimator_state"):
        jax.tree.map(
            np.testing.assert_array_equal,
            getattr(second, name),
            getattr(uninterrupted, name),
        )
    for name in second.history:
        last = uninterrupted.history[name].values[-second.history.sizes["step"] :]
        np.testing.assert_array_equal(second.history[name].values, last, err_msg=name)
    assert second.num_steps == uninterrupted.num_steps
