# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Runs of coupled pairs on tiny graphs, and their exact answers, shared by the tests of
sampling."""

from collections.abc import Callable
import functools
import itertools
import math
import threading
from typing import Any

import numpy as np
from ucd_tools import flat, grad_log_partition, key, sigmoid
import zoo

import jax
import jax.numpy as jnp

from ebmpp import Bernoulli, FactorGraph
from ebmpp.coupling.accumulators import EnergyGradient
from ebmpp.coupling.engine import Outcome, Window, run_pairs
from ebmpp.moves.sweeps import resolve_moves
from ebmpp.moves.target import Target
from helpers import assert_law, pair, random_params

#: pairs of a run, and independent runs
JOBS, RUNS = 500, 40
SCALES = {"tiny": 2.5, "poisson": 0.5, "learned": 0.4, "gated": 1.2}


@functools.cache
def graph_of(name: str) -> FactorGraph:
    """Return two layers of two binary units, or a graph of the zoo."""
    return pair(Bernoulli(2), Bernoulli(2)) if name == "tiny" else zoo.graph(name)


@functools.cache
def params_of(name: str) -> dict[str, Any]:
    """Return params strong enough for meeting times above 1."""
    return random_params(graph_of(name), seed=4, scale=SCALES.get(name, 1.2))


def starts_of(name: str, jobs: int = JOBS) -> dict[str, jax.Array]:
    """Return starts far from the model's distribution."""
    families = graph_of(name).families
    return {
        b: jnp.asarray(np.ones((jobs, *f.shape), f.dtype)) for b, f in families.items()
    }


def run(
    name: str = "tiny",
    seed: int = 0,
    window: tuple[int, int, int] = (1, 1, 1),
    coupling: Any = None,
    params: Any = None,
    starts: Any = None,
    num_slots: int = 16,
    max_sweeps: int = 0,
    accumulator: Any = EnergyGradient(),
) -> Outcome:
    """Run all pairs from equal starts; ``window`` is k, m and the lag."""
    graph = graph_of(name)
    target = Target(graph, params_of(name) if params is None else params)
    x = starts_of(name) if starts is None else starts
    numbers = Window(*(np.int32(n) for n in (*window, max_sweeps)))
    moves = resolve_moves(graph, coupling)
    return jax.device_get(
        run_pairs(target, moves, accumulator, num_slots, x, x, key(seed), numbers)
    )


def assert_unbiased(
    name: str, coupling: Any, windows: list[tuple[int, int, int]]
) -> None:
    """Assert that the mean energy gradient of many runs is exact for every window."""
    exact = -flat(grad_log_partition(graph_of(name), params_of(name)))
    for window in windows:
        k, m, lag = window
        runs = [run(name, seed, window, coupling) for seed in range(RUNS)]
        tau = np.stack([r.meeting_time for r in runs])
        # there was something to correct
        assert tau.min() >= lag and tau.max() > lag + 1
        means = np.stack([flat(r.total) for r in runs]) / (JOBS * (m - k + 1))
        error = means.std(0, ddof=1) / math.sqrt(RUNS)
        # Student's t of 39 degrees of freedom: its tails at 1e-4 equal the tails of a
        # normal 15 % wider
        assert_law(means.mean(0), exact, 1.15 * error, exact.size * len(windows))


def _common(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Joint distribution of two vectors of bits drawn from the same uniforms, unit by unit."""
    units = [
        [[1 - max(a, b), max(b - a, 0)], [max(a - b, 0), min(a, b)]]
        for a, b in zip(p, q, strict=True)
    ]
    bits = list(itertools.product((0, 1), repeat=len(p)))
    entry = lambda x, y: math.prod(u[c][d] for u, c, d in zip(units, x, y, strict=True))
    return np.array([[entry(x, y) for y in bits] for x in bits])


def _joint(kind: str, p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Joint distribution of a coupled layer whose units are on with probabilities p and q."""
    common = _common(p, q)
    if kind == "common" or np.array_equal(p, q):
        return common
    left, right = common.sum(1), common.sum(0)
    overlap = np.diag(np.minimum(left, right))
    missing = 1 - np.trace(overlap)
    rest_left, rest_right = (
        np.maximum(left - right, 0) / missing,
        np.maximum(right - left, 0) / missing,
    )
    if kind == "maximal_independent":
        return overlap + missing * np.outer(rest_left, rest_right)
    # Proposals share uniforms until one is accepted; the other chain then continues by
    # itself.
    accept_left = np.maximum(1 - right / left, 0)[:, None]
    accept_right = np.maximum(1 - left / right, 0)[None, :]
    both = common * accept_left * accept_right
    only_left = (common * accept_left * (1 - accept_right)).sum(1)
    only_right = (common * (1 - accept_left) * accept_right).sum(0)
    neither = (common * (1 - accept_left) * (1 - accept_right)).sum()
    residual = both + np.outer(only_left, rest_right) + np.outer(rest_left, only_right)
    return overlap + missing * residual / (1 - neither)


def meeting_tail(kinds: tuple[str, str], times: int) -> np.ndarray:
    """Return P(tau > t) for t = 1, 2, ... with a lag of 1, both chains starting at all ones."""
    bias_a, bias_b, weight = (
        np.asarray(params_of("tiny")[name], float) for name in ("a", "b", "a:b")
    )
    states = np.array(list(itertools.product((0, 1), repeat=2)), float)
    given_b, given_a = (
        sigmoid(bias_a + states @ weight.T),
        sigmoid(bias_b + states @ weight),
    )
    pair_a = np.array([[_joint(kinds[0], p, q) for q in given_b] for p in given_b])
    pair_b = np.array([[_joint(kinds[1], p, q) for q in given_a] for p in given_a])
    leading_a = _common(given_b[3], given_b[3]).diagonal()
    joint = np.zeros((4, 4, 4, 4))  # a of X, a of Y, b of X, b of Y
    for a in range(4):
        joint[a, 3, :, 3] = leading_a[a] * _common(given_a[a], given_a[a]).diagonal()
    tail = []
    for _ in range(times):
        tail.append(1 - np.einsum("iijj", joint))
        joint = np.einsum("kl,klij,ijmn->ijmn", joint.sum((0, 1)), pair_a, pair_b)
    np.testing.assert_allclose(joint.sum(), 1)
    return np.array(tail)


def in_time(call: Callable[[], Any], seconds: float = 120) -> Any:
    """Return the result of ``call`` or fail: a loop on the device cannot be interrupted."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, f"no result after {seconds} seconds"
    return results[0]
