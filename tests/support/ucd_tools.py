# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Problems with exact gradients, and a compiled step, shared by the tests of estimators."""

from collections.abc import Callable, Mapping
import functools
from typing import Any

import numpy as np
from oracle import Oracle
import zoo

import jax
import jax.numpy as jnp

from ebmpp import FactorGraph, ParticleUCD
from ebmpp.estimators import GradientBias, gradient_bias
from ebmpp.estimators.base import Batch, Estimate
from helpers import assert_law, assert_rows_law, random_params

Array = np.ndarray
#: independent steps of a mean gradient, and rows of each
BATCHES, ROWS = 40, 400
#: noise of the params: strong enough that pairs take several sweeps to meet
SCALES = {"rbm": 2.0, "deep": 1.2, "gaussian": 0.8}
_SHARES = np.array([0.5, 2.5, 0.0, 1.5], np.float32)
WEIGHTS = np.tile(_SHARES, ROWS // 4) / ROWS  # of sum 1.125
_PATTERN = np.array(
    [[1, 0, 0, 1], [1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 1, 0]], np.float32
)


def key(seed: int) -> jax.Array:
    """Return the key pair of ``jax.random.key(seed)``, without compiling anything."""
    return jnp.asarray(np.array([0, seed], np.uint32))


def flat(tree: Any) -> Array:
    """Return all leaves of a tree as one vector in float64."""
    return np.concatenate(
        [np.asarray(leaf, float).ravel() for leaf in jax.tree.leaves(tree)]
    )


@functools.cache
def problem(
    name: str, rows: int = ROWS
) -> tuple[FactorGraph, dict[str, Any], dict[str, jax.Array]]:
    """Return a graph of the zoo, strong params, and rows far from the model's distribution."""
    graph = zoo.graph(name)
    pattern = np.tile(_PATTERN, (rows // 4, 1))[:, : graph.families["v"].size]
    return (
        graph,
        random_params(graph, seed=2, scale=SCALES[name]),
        {"v": jnp.asarray(pattern)},
    )


def two_modes(weight: float = 3.0, field: float = 0.3) -> dict[str, Any]:
    """Return params of the zoo's rbm whose two modes have unequal weight: chains seldom
    leave one."""
    full = lambda shape, value: jnp.asarray(np.full(shape, value, np.float32))
    fields = {"v": full(4, field - 1.5 * weight), "h": full(3, field - 2 * weight)}
    return fields | {"v:h": full((4, 3), weight)}


@functools.partial(jax.jit, static_argnums=(0, 1))
def estimate(
    estimator: Any,
    graph: FactorGraph,
    params: Any,
    state: Any,
    rows: Any,
    pair: Any,
    weights: Any = None,
) -> Estimate:
    """Return one step's estimate."""
    batch = Batch.uniform(rows) if weights is None else Batch(rows, weights)
    return estimator.estimate(graph, params, state, batch, pair)


def log_likelihood(
    graph: FactorGraph,
    params: Any,
    rows: Mapping[str, Array],
    known: Mapping[str, Array] | None = None,
) -> Array:
    """Return log p of each row by enumeration in float64, or of its known entries where
    units are finite."""
    joint = Oracle(graph, params, {})
    size = len(next(iter(rows.values())))
    if known is None:
        row = lambda i: {b: np.asarray(v[i], float) for b, v in rows.items()}
        return (
            np.array([Oracle(graph, params, row(i)).log_z for i in range(size)])
            - joint.log_z
        )
    values = []
    for i in range(size):
        agree = [
            ((joint.x[b] == rows[b][i]) | ~known[b][i]).reshape(len(joint.x[b]), -1)
            for b in rows
        ]
        values.append(
            np.logaddexp.reduce(joint.log_weights[np.concatenate(agree, 1).all(1)])
        )
    return np.array(values) - joint.log_z


def differences(value: Callable[[Any], float], params: Any) -> dict[str, Array]:
    """Return the gradient of a function of params in float64, by central differences."""
    base, step = {n: np.asarray(a, float) for n, a in params.items()}, 1e-4
    gradient = {name: np.zeros(a.shape) for name, a in base.items()}
    for name, a in base.items():
        for index in np.ndindex(a.shape):
            up, down = a.copy(), a.copy()
            up[index] += step
            down[index] -= step
            gradient[name][index] = (
                value({**base, name: up}) - value({**base, name: down})
            ) / (2 * step)
    return gradient


def grad_log_partition(graph: FactorGraph, params: Any) -> dict[str, Array]:
    """Return the gradient of the exact log Z."""
    return differences(lambda p: Oracle(graph, p, {}).log_z, params)


def exact_means(graph: FactorGraph, params: Any) -> dict[str, Array]:
    """Return the mean statistics of every block: the gradients by the biases, which
    every graph here has."""
    gradient = grad_log_partition(graph, params)
    return {block: gradient[block] for block in graph.families}


def exact_gradient(
    graph: FactorGraph,
    params: Any,
    rows: Mapping[str, Array],
    weights: Array | None = None,
    known: Mapping[str, Array] | None = None,
) -> dict[str, Array]:
    """Return the gradient of -sum_i w_i log p(row_i)."""
    size = len(next(iter(rows.values())))
    weights = np.full(size, 1 / size) if weights is None else np.asarray(weights, float)
    return differences(
        lambda p: -float(weights @ log_likelihood(graph, p, rows, known)), params
    )


def step(estimator: Any, name: str, state: Any, seed: int) -> Estimate:
    """Return one step on a problem's weighted rows, on the host."""
    graph, params, data = problem(name)
    return jax.device_get(
        estimate(estimator, graph, params, state, data, key(seed), WEIGHTS)
    )


def initial(estimator: Any, name: str, seed: int = 0) -> Any:
    """Return the state of an estimator before its first step on a problem."""
    return estimator.init_state(*problem(name), ROWS, key(seed))


@functools.cache
def problem_gradient(name: str) -> dict[str, Array]:
    """Return the exact gradient of a problem's weighted loss."""
    graph, params, data = problem(name)
    return exact_gradient(graph, params, {"v": np.asarray(data["v"])[:4]}, _SHARES / 4)


def assert_mean(gradients: list[Any], exact: Mapping[str, Array]) -> None:
    """Assert that independent gradients have the exact mean, factor by factor."""
    size = sum(np.size(value) for value in exact.values())
    for factor, value in exact.items():
        assert_rows_law(
            np.stack([np.asarray(g[factor]) for g in gradients]), value, size
        )


def assert_unbiased(
    estimator: Any, name: str, batches: int = BATCHES
) -> list[dict[str, Array]]:
    """Assert that steps of an estimator are unbiased at fixed params, and return their metrics."""
    state, gradients, metrics = initial(estimator, name), [], []
    for seed in range(batches):
        result = step(estimator, name, state, seed + 1)
        # an adaptive lag moves, and every step stays unbiased given the past
        state = result.state
        gradients.append(result.gradient)
        metrics.append(result.metrics)
    exact = problem_gradient(name)
    assert max(np.abs(value).max() for value in exact.values()) > 0.1
    assert_mean(gradients, exact)
    return metrics


STATES = np.array(list(np.ndindex(2, 2, 2, 2)), float)
HIDDEN = np.array(list(np.ndindex(2, 2, 2)), float)


def sigmoid(eta: Array) -> Array:
    """Return P(unit is on) at a natural parameter."""
    return 1 / (1 + np.exp(-np.asarray(eta, float)))


def _probabilities(states: Array, on: Array) -> Array:
    return np.prod(np.where(states[None] == 1, on[:, None], 1 - on[:, None]), -1)


def visible_transition(params: Any) -> Array:
    """Return P(v' | v) of one sweep that draws the hidden units, then the visible ones."""
    p = {name: np.asarray(a, float) for name, a in params.items()}
    down = _probabilities(STATES, sigmoid(p["v"] + HIDDEN @ p["v:h"].T))
    return _probabilities(HIDDEN, sigmoid(p["h"] + STATES @ p["v:h"])) @ down


def visible_distribution(rows: Array, weights: Array) -> Array:
    """Return the weight of each visible state among rows."""
    return (
        (np.asarray(rows)[:, None] == STATES).all(-1) * np.asarray(weights)[:, None]
    ).sum(0)


def phase(params: Any, rows: Array, weights: Array) -> dict[str, Array]:
    """Return sum_i w_i E[-dE/dparams | v_i]."""
    rows, weights = np.asarray(rows, float), np.asarray(weights, float)
    hidden = sigmoid(
        np.asarray(params["h"], float) + rows @ np.asarray(params["v:h"], float)
    )
    both = np.einsum("n,ni,nj->ij", weights, rows, hidden)
    return {"v": weights @ rows, "h": weights @ hidden, "v:h": both}


def difference(
    first: Mapping[str, Array], second: Mapping[str, Array]
) -> dict[str, Array]:
    """Return ``first - second`` by factor."""
    return {name: np.asarray(value) - second[name] for name, value in first.items()}


def measure_bias(estimator: Any, state: Any = None, **options: Any) -> GradientBias:
    """Return the measured bias of an estimator on the rows of the zoo's rbm, without weights."""
    graph, params, data = problem("rbm")
    reference = ParticleUCD(num_particles=400, max_rungs=8)
    options = {
        "num_repeats": 40,
        "num_references": 60,
        "reference": reference,
    } | options
    return gradient_bias(
        graph,
        params,
        np.asarray(data["v"]),
        estimator,
        state,
        rng_key=jax.random.key(0),
        **options,
    )


def bias_at(start: Array) -> dict[str, Array]:
    """Return the exact bias where chains are one sweep from the distribution ``start``."""
    params = problem("rbm")[1]
    transition = visible_transition(params)
    model = np.linalg.matrix_power(transition, 10_000)[0]
    return phase(params, STATES, start @ transition - model)


def assert_bias(result: GradientBias, exact: Mapping[str, Array]) -> None:
    """Assert a measured bias coordinate by coordinate, by factor and in all."""
    squared = {name: float((value**2).sum()) for name, value in exact.items()}
    size = sum(value.size for value in exact.values())
    for name, part in result.factors.items():
        assert_law(result.bias[name], exact[name], result.bias_error[name], size)
        assert_law(part.squared_bias, squared[name], part.standard_error, size)
    assert_law(
        result.total.squared_bias,
        sum(squared.values()),
        result.total.standard_error,
        size,
    )
