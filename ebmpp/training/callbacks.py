# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Callbacks of a training run, and recorders of its best params and of its path."""

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import math
from typing import TYPE_CHECKING, Any
import warnings

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.annealing import Path, ladder
from ebmpp.core import Eta, Params, checks
from ebmpp.graph import FactorGraph

if TYPE_CHECKING:
    import xarray as xr

_SIGNS = {"max": 1, "min": -1}  # by mode
_CAPACITY = 64  # of a path recorder
# of the pilot that thins a path
_PARTICLES = 500
_MIN_CESS = 0.5
_MAX_KNOTS = 1024


@dataclasses.dataclass(frozen=True)
class Progress:
    """State of a run, for a callback of :func:`ebmpp.fit`, before ``step`` is done.

    Callbacks cannot change the run: dicts are copies, and arrays are read-only.

    :param step: number of steps done.
    :param params: params after these steps, as is ``estimator_state``.
    :param history: the history so far, as in :class:`ebmpp.Fit`, including the
        monitors' values at ``step``.
    """

    step: int
    params: Params
    estimator_state: Any
    history: "xr.Dataset"


Callback = Callable[[Progress], bool | None]


@dataclasses.dataclass(frozen=True)
class EarlyStop:
    """Callback that stops a run whose monitor no longer improves.

    :param monitor: name of the monitor.
    :param patience: number of consecutive values without an improvement that stop the
        run.
    :param mode: "max" where larger is better, or "min".
    :param min_delta: smallest improvement that counts, not negative.
    :raises ArgumentError: for invalid arguments, and during the run for an unknown
        monitor.

    **Example**

    >>> import jax, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> data = ebmpp.data.bars_and_stripes(3)
    >>> fit = ebmpp.fit(rbm, data, rng_key=jax.random.key(0), estimator=ebmpp.CD(), progress_bar=False,
    ...                 monitors={"loglik": ebmpp.monitors.log_likelihood(rbm, data)}, monitor_every=2,
    ...                 callbacks=[ebmpp.training.EarlyStop("loglik", patience=2, min_delta=10.0)])
    >>> fit.history.sizes["step"]
    4
    """

    monitor: str
    patience: int = 5
    mode: str = "max"
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        checks.instance("EarlyStop: monitor", self.monitor, str, "a monitor's name")
        checks.count("EarlyStop: patience", self.patience)
        checks.choice("EarlyStop: mode", self.mode, _SIGNS)
        checks.number("EarlyStop: min_delta", self.min_delta, least=0)

    def __call__(self, progress: Progress) -> bool:
        """Return True to stop the run."""
        names = [
            str(n)
            for n, v in progress.history.data_vars.items()
            if v.dims == ("monitor_step",)
        ]
        checks.names("monitor of EarlyStop", [self.monitor], names)
        best = -math.inf
        waited = 0
        for value in _SIGNS[self.mode] * progress.history[self.monitor].values:
            better = value > best + self.min_delta  # False for nan
            best, waited = (value, 0) if better else (best, waited + 1)
        return waited >= self.patience


class BestParams:
    """Recorder of the params at the best value of a monitor; the first of equals, never at nan.

    :param keep_best: the monitor's name, or a tuple of it and "max" or "min".
    :param params: params of the right structure.
    """

    def __init__(
        self,
        keep_best: str | tuple[str, str],
        monitors: Mapping[str, Any],
        params: Params,
    ) -> None:
        pair = (keep_best, "max") if isinstance(keep_best, str) else keep_best
        expected = 'a monitor\'s name, or (name, "min")'
        self.name, self.mode = checks.instance("fit: keep_best", pair, tuple, expected)
        checks.choice("fit: keep_best's mode", self.mode, _SIGNS)
        checks.names("monitor in fit: keep_best", [self.name], monitors)
        self._value = -math.inf
        self._step = -1
        self._params = params

    @property
    def result(self) -> tuple[Params | None, int | None]:
        """The best params and their step; None if there was no value."""
        return (None, None) if self._step < 0 else (self._params, self._step)

    def record(self, step: int, value: Any, params: Params) -> None:
        """Compare the monitor's value at these params."""
        signed = _SIGNS[self.mode] * float(value)
        if signed > self._value:
            self._value = signed
            self._step = step
            self._params = params

    def leaves(self) -> list[Any]:
        """Return arrays for a checkpoint."""
        return [
            np.array(self._value),
            np.array(self._step),
            *jax.tree.leaves(self._params),
        ]

    def load(self, leaves: Iterator[np.ndarray]) -> None:
        """Restore the arrays of :meth:`leaves`, the next ones of an iterator."""
        self._value = float(next(leaves))
        self._step = int(next(leaves))
        self._params = jax.tree.map(lambda _: jnp.asarray(next(leaves)), self._params)


class PathRecorder:
    """Recorder of the params at every ``stride``-th step.

    When it is full every second entry is dropped and the stride doubles.

    :param keep_path: True for the default capacity, or the largest number of entries,
        at least 2.
    :param params: params of the right structure.
    """

    def __init__(self, keep_path: bool | int, params: Params) -> None:
        capacity = _CAPACITY if keep_path is True else keep_path
        self.capacity = checks.count(
            "fit: keep_path, unless it is True or False,", capacity, least=2
        )
        self.stride = 1
        self._template = params
        self._steps = []
        self._params = []

    def record(self, step: int, params: Params) -> None:
        """Record the params after ``step`` steps; a repeated step changes nothing."""
        if step % self.stride or (self._steps and step <= self._steps[-1]):
            return
        self._steps = [*self._steps, step]
        self._params = [*self._params, params]
        if len(self._steps) > self.capacity:
            self._steps = self._steps[::2]
            self._params = self._params[::2]
            self.stride = 2 * self.stride

    def leaves(self) -> list[Any]:
        """Return arrays for a checkpoint, once there is an entry."""
        stacked = jax.tree.map(lambda *entries: np.stack(entries), *self._params)
        return [
            np.array(self.stride),
            np.array(self._steps, np.int64),
            *jax.tree.leaves(stacked),
        ]

    def load(self, leaves: Iterator[np.ndarray]) -> None:
        """Restore the arrays of :meth:`leaves`, the next ones of an iterator."""
        self.stride = int(next(leaves))
        self._steps = next(leaves).tolist()
        stacked = jax.tree.map(lambda _: next(leaves), self._template)
        self._params = [
            jax.tree.map(lambda a: jnp.asarray(a[i]), stacked)
            for i in range(len(self._steps))
        ]

    def path(self, graph: FactorGraph, eta0: Eta, last: Params, key: Array) -> Path:
        """Return the path from units of ``eta0`` through the entries to the last params, thinned."""
        complete = Path.through(graph, eta0, self._params).to(last)
        thinned = ladder.thinned(complete, key, _PARTICLES, _MIN_CESS, _MAX_KNOTS)
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
