# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Monitors, callbacks, and the params at a monitor's best value."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import math

from jaxtyping import PyTree
import numpy as np

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import Params, backend, checks
from ebmpp.training.callbacks import SIGNS, Callback, Progress
from ebmpp.training.history import Log
from ebmpp.training.observers.base import Periodic
from ebmpp.training.observers.guard import Guard
from ebmpp.training.steps import TrainState


@dataclasses.dataclass
class Monitoring(Periodic):
    """Evaluate the monitors and call the callbacks, any of which may end the run."""

    period: int
    log: Log
    guard: Guard
    callbacks: Sequence[Callback]
    best: "BestParams | None"

    def at(self, step: int, state: TrainState, is_last: bool) -> bool:
        if not self.is_due(step, is_last):
            return False
        # else the device need not be waited for
        if self.callbacks or not self.guard.is_bounded:
            self.guard.check(step, state)
        self.log.monitor(step, state.params, state.estimator)
        if self.best is not None:
            backend.wait(state.ok)
            value = self.log.monitored.last[self.best.name]
            self.best.record(step, value, state.params)
        if not self.callbacks:
            return False
        progress = Progress(
            step, _copy(state.params), _copy(state.estimator), self.log.dataset()
        )
        results = [bool(callback(progress)) for callback in self.callbacks]
        return any(results)


def _copy(tree: PyTree) -> PyTree:
    """Return a pytree of new containers."""
    return jax.tree.map(lambda leaf: leaf, tree)


class BestParams:
    """Recorder of the params at the best value of a monitor; the first of equals, never at nan.

    :param keep_best: the monitor's name, or a tuple of it and "max" or "min".
    :param params: params of the right structure.
    """

    def __init__(
        self, keep_best: object, monitors: Mapping[str, object], params: Params
    ) -> None:
        pair = (keep_best, "max") if isinstance(keep_best, str) else keep_best
        expected = 'a monitor\'s name, or (name, "min")'
        self.name, self.mode = checks.instance("fit: keep_best", pair, tuple, expected)
        checks.choice("fit: keep_best's mode", self.mode, SIGNS)
        checks.names("monitor in fit: keep_best", [self.name], monitors)
        self._value = -math.inf
        self._step = -1
        self._params = params

    @property
    def result(self) -> tuple[Params | None, int | None]:
        """The best params and their step; None if there was no value."""
        return (None, None) if self._step < 0 else (self._params, self._step)

    def record(self, step: int, value: float, params: Params) -> None:
        """Compare the monitor's value at these params."""
        signed = SIGNS[self.mode] * float(value)
        if signed > self._value:
            self._value = signed
            self._step = step
            self._params = params

    def leaves(self) -> list[ArrayLike]:
        """Return arrays for a checkpoint."""
        leaves = jax.tree.leaves(self._params)
        return [np.array(self._value), np.array(self._step), *leaves]

    def load(self, leaves: Iterator[np.ndarray]) -> None:
        """Restore the arrays of :meth:`leaves`, the next ones of an iterator."""
        self._value = float(next(leaves))
        self._step = int(next(leaves))
        self._params = jax.tree.map(lambda _: jnp.asarray(next(leaves)), self._params)
