# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Metropolis chains with uniform proposals on tiny models, as transition matrices in float64."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from oracle import enumerate_numpy

from ebmpp import FactorGraph
from helpers import assert_law


class Law:
    """Joint states of a tiny model and their probabilities.

    :param among: a predicate of the states to which the model is restricted.
    """

    def __init__(
        self,
        graph: FactorGraph,
        params: Any,
        among: Callable[[dict], bool] = lambda x: True,
    ) -> None:
        states, weights, _ = enumerate_numpy(graph, params)
        inside = [i for i, x in enumerate(states) if among(x)]
        self.states = [states[i] for i in inside]
        self.target = weights[inside] / weights[inside].sum()

    def at(self, **blocks: Any) -> np.ndarray:
        """Return the distribution concentrated on the state with the values ``blocks``."""
        is_here = [
            all(np.array_equal(x[b], v) for b, v in blocks.items()) for x in self.states
        ]
        assert sum(is_here) == 1
        return np.array(is_here, float)

    def assert_law(self, samples: dict, law: np.ndarray, comparisons: int) -> None:
        """Compare frequencies of the states among independent rows with probabilities."""
        table = np.array([np.concatenate([x[b] for b in samples]) for x in self.states])
        rows = np.concatenate([np.asarray(v, float) for v in samples.values()], -1)
        hits = (rows[:, None] == table).all(-1)
        assert hits.any(1).all(), "a sample is outside the states"
        likely = len(rows) * law > 10
        assert likely.sum() > 1
        share, exact = (
            np.append(p[likely], p[~likely].sum()) for p in (hits.mean(0), law)
        )
        assert_law(share, exact, np.sqrt(exact * (1 - exact) / len(rows)), comparisons)


class Chain(Law):
    """A chain that proposes some blocks uniformly, and then redraws the blocks that it sums out.

    :param summed: blocks that are summed out of the acceptance ratio.
    """

    def __init__(
        self,
        graph: FactorGraph,
        params: Any,
        summed: Sequence[str] = (),
        among: Callable[[dict], bool] = lambda x: True,
    ) -> None:
        super().__init__(graph, params, among)
        proposed = [
            tuple(np.concatenate([x[b] for b in x if b not in summed]))
            for x in self.states
        ]
        order = {values: i for i, values in enumerate(dict.fromkeys(proposed))}
        group = np.array([order[values] for values in proposed])
        marginal = np.bincount(group, self.target)
        # alpha[i, j]: the probability that a chain in group i accepts the proposal of
        # group j
        alpha = np.minimum(1, marginal[None, :] / marginal[:, None])
        move = alpha / len(order)
        np.fill_diagonal(move, 0)
        np.fill_diagonal(move, 1 - move.sum(1))
        self.accept = alpha.mean(1)[group]
        self.step = move[group][:, group] * (self.target / marginal[group])
        self._alpha = alpha if not summed else None

    def law(self, start: np.ndarray, t: int) -> np.ndarray:
        """Return the distribution after ``t`` sweeps."""
        return start @ np.linalg.matrix_power(self.step, t)

    def pairs(self, start: np.ndarray, lag: int, times: int) -> np.ndarray:
        """Return the joint distributions of X_t and Y_{t - lag} for t = lag, lag + 1, ...

        Both chains get one proposal and one uniform.

        :return: shape ``(times, states, states)``.
        """
        joint = (start[:, None] * np.linalg.matrix_power(self.step, lag)).T
        joints, alpha = [], self._alpha
        both = np.minimum(alpha[:, None], alpha[None, :]) / len(alpha)
        only_x, only_y = (
            alpha[:, None] / len(alpha) - both,
            alpha[None, :] / len(alpha) - both,
        )
        for _ in range(times):
            joints.append(joint)
            stay = joint * (1 - (both + only_x + only_y).sum(-1))
            lead = np.einsum("ij,ijp->pj", joint, only_x)
            follow = np.einsum("ij,ijp->ip", joint, only_y)
            joint = stay + lead + follow + np.diag(np.einsum("ij,ijp->p", joint, both))
            np.testing.assert_allclose(joint.sum(), 1)
        return np.array(joints)
