# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Recorder of a path of params, from which bridges to the model are made."""

from collections.abc import Iterator
import warnings

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.annealing import Path, ladder
from ebmpp.core import Eta, Params, checks
from ebmpp.graph import FactorGraph
from ebmpp.training.observers.base import Observer
from ebmpp.training.steps import TrainState

_DEFAULT_CAPACITY = 64
# pilot that thins a path
_NUM_PARTICLES = 500
_MIN_CESS = 0.5
_MAX_KNOTS = 1024


class PathRecorder(Observer):
    """Recorder of the params at the multiples of ``period``.

    When it is full every second entry is dropped and ``period`` doubles.

    :param keep_path: True for the default capacity, or the largest number of entries,
        at least 2.
    :param params: params of the right structure.
    """

    def __init__(self, keep_path: bool | int, params: Params) -> None:
        capacity = _DEFAULT_CAPACITY if keep_path is True else keep_path
        self.capacity = checks.count(
            "fit: keep_path, unless it is True or False,", capacity, least=2
        )
        self.period = 1
        self._template = params
        self._steps: list[int] = []
        self._params: list[Params] = []

    def at(self, step: int, state: TrainState, is_last: bool) -> None:
        self.record(step, state.params)

    def record(self, step: int, params: Params) -> None:
        """Record the params after ``step`` steps; a repeated step changes nothing."""
        if step % self.period or (self._steps and step <= self._steps[-1]):
            return
        self._steps.append(step)
        self._params.append(params)
        if len(self._steps) > self.capacity:
            self._steps = self._steps[::2]
            self._params = self._params[::2]
            self.period *= 2

    def leaves(self) -> list[ArrayLike]:
        """Return arrays for a checkpoint, once there is an entry."""
        stacked = jax.tree.map(lambda *entries: np.stack(entries), *self._params)
        return [
            np.array(self.period),
            np.array(self._steps, np.int64),
            *jax.tree.leaves(stacked),
        ]

    def load(self, leaves: Iterator[np.ndarray]) -> None:
        """Restore the arrays of :meth:`leaves`, the next ones of an iterator."""
        self.period = int(next(leaves))
        self._steps = next(leaves).tolist()
        stacked = jax.tree.map(lambda _: next(leaves), self._template)
        self._params = [
            jax.tree.map(lambda a, i=i: jnp.asarray(a[i]), stacked)
            for i in range(len(self._steps))
        ]

    def path(self, graph: FactorGraph, eta0: Eta, last: Params, key: Array) -> Path:
        """Return the path from units of ``eta0`` through the entries to the last params."""
        complete = Path.through(graph, eta0, self._params).to(last)
        thinned = ladder.thinned(complete, key, _NUM_PARTICLES, _MIN_CESS, _MAX_KNOTS)
        if thinned is not None:
            return thinned
        warnings.warn(
            f"fit: the path needs more than {_MAX_KNOTS} knots for half of the "
            "particles to stay effective between neighbours, so it has all "
            f"{len(complete)} checkpoints. They may be noisy (lower the rate, or "
            "average the gradient over more chains) or too few (keep_path=1000).",
            stacklevel=3,
        )
        return complete
