# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Metropolis chains with uniform proposals on tiny models, as matrices: float64, state by state."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ebmpp import FactorGraph
from helpers import assert_law, enumerate_numpy


class Law:
    """A tiny model's joint states and their probabilities.

    :param among: which states the model is held to.
    """

    def __init__(
        self, graph: FactorGraph, params: Any, among: Callable[[dict], bool] = lambda x: True
    ) -> None:
        every, weights, _ = enumerate_numpy(graph, params)
        inside = [i for i, x in enumerate(every) if among(x)]
        self.states = [every[i] for i in inside]
        self.target = weights[inside] / weights[inside].sum()

    def at(self, **blocks: Any) -> np.ndarray:
        """The law of a chain that is surely at the state where ``blocks`` are."""
        here = [all(np.array_equal(x[b], v) for b, v in blocks.items()) for x in self.states]
        assert sum(here) == 1
        return np.array(here, float)

    def assert_law(self, drawn: dict, law: np.ndarray, comparisons: int) -> None:
        """Frequencies of the states among independent rows, against their probabilities."""
        blocks = list(drawn)
        table = np.array([np.concatenate([x[b] for b in blocks]) for x in self.states])
        rows = np.concatenate([np.asarray(drawn[b], float) for b in blocks], -1)
        hits = (rows[:, None] == table).all(-1)
        assert hits.any(1).all(), "a draw outside the states"
        likely = len(rows) * law > 10
        assert likely.sum() > 1
        share, wanted = hits.mean(0), law
        share = np.append(share[likely], share[~likely].sum())
        wanted = np.append(wanted[likely], wanted[~likely].sum())
        assert_law(share, wanted, np.sqrt(wanted * (1 - wanted) / len(rows)), comparisons)


class Chain(Law):
    """A chain that proposes some blocks, uniformly, and then redraws those it sums out.

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
        kept = [tuple(np.concatenate([x[b] for b in x if b not in summed])) for x in self.states]
        order = {values: i for i, values in enumerate(dict.fromkeys(kept))}
        group = np.array([order[values] for values in kept])
        marginal = np.bincount(group, self.target)
        # alpha[i, j]: the chance that a chain in group i takes the proposal of group j
        alpha = np.minimum(1, marginal[None, :] / marginal[:, None])
        move = alpha / len(order)
        np.fill_diagonal(move, 0)
        np.fill_diagonal(move, 1 - move.sum(1))
        self.accept = alpha.mean(1)[group]
        self.step = move[group][:, group] * (self.target / marginal[group])
        self._alpha = alpha if not summed else None

    def law(self, start: np.ndarray, t: int) -> np.ndarray:
        """The law after ``t`` sweeps."""
        return start @ np.linalg.matrix_power(self.step, t)

    def pairs(self, start: np.ndarray, lag: int, times: int) -> np.ndarray:
        """Joint laws of X_t and Y_{t - lag} for t = lag, lag + 1, ...: one proposal and one uniform.

        :return: shape ``(times, states, states)``.
        """
        joint = (start[:, None] * np.linalg.matrix_power(self.step, lag)).T
        made, alpha = [], self._alpha
        both = np.minimum(alpha[:, None], alpha[None, :]) / len(alpha)
        only_x, only_y = alpha[:, None] / len(alpha) - both, alpha[None, :] / len(alpha) - both
        for _ in range(times):
            made.append(joint)
            stay = joint * (1 - (both + only_x + only_y).sum(-1))
            lead = np.einsum("ij,ijp->pj", joint, only_x)
            follow = np.einsum("ij,ijp->ip", joint, only_y)
            joint = stay + lead + follow + np.diag(np.einsum("ij,ijp->p", joint, both))
            np.testing.assert_allclose(joint.sum(), 1)
        return np.array(made)
