# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The path of a run: params at a stride of steps while it goes on, thinned to a path of models at its end."""

from collections.abc import Sequence
from typing import Any
import warnings

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.annealing import annealing_path, ladders
from ebmpp.annealing.path import Path
from ebmpp.core import checks
from ebmpp.core.types import Eta, Params
from ebmpp.errors import ArgumentError
from ebmpp.graph import FactorGraph
from ebmpp.training.batches import Selection

_ROOM = 64
_PARTICLES, _EVENNESS, _MOST = 500, 0.5, 1024  # of the pilot that thins


def room(keep_path: bool | int) -> int | None:
    """How many candidates to keep; None for no path.

    :raises ArgumentError: for anything but True, False, or a number of at least 2.
    """
    if isinstance(keep_path, bool | np.bool_):
        return _ROOM if keep_path else None
    return checks.count("fit: keep_path, unless it is True or False,", keep_path, least=2)


def reference(graph: FactorGraph, sample: Selection) -> Eta:
    """Where the path starts: independent units at the data's base rates.

    :raises ArgumentError: for a family that cannot tell the natural parameter of a base rate.
    """
    try:
        return annealing_path.base_rates(graph, sample.observed(), sample.weights)
    except NotImplementedError as error:
        raise ArgumentError(
            f"fit: keep_path starts from units at the data's base rates, and {error or 'a family'} has no "
            "from_mean, which makes a natural parameter of mean statistics: define it, or leave keep_path out"
        ) from error


class Trail:
    """The params at every ``stride``-th step; where there is no room for more every second one is dropped.

    So memory does not grow with the run, and what is kept depends on the steps alone.

    :param size: how many to keep, at most, from step to step.
    :param params: of the right structure.
    """

    def __init__(self, size: int, params: Params) -> None:
        self.size, self.stride = size, 1
        self._like, self._steps, self._kept = params, [], []

    def see(self, step: int, params: Params) -> None:
        """The params after ``step`` steps; the same step again changes nothing."""
        if step % self.stride or (self._steps and step <= self._steps[-1]):
            return
        self._steps, self._kept = [*self._steps, step], [*self._kept, params]
        if len(self._steps) > self.size:
            self._steps, self._kept, self.stride = self._steps[::2], self._kept[::2], 2 * self.stride

    def leaves(self) -> list[Any]:
        """For a checkpoint."""
        columns = zip(*map(jax.tree.leaves, self._kept), strict=True)
        like = jax.tree.leaves(self._like)
        stacked = map(np.stack, columns) if self._kept else (np.empty((0, *a.shape), a.dtype) for a in like)
        return [np.array(self.stride), np.array(self._steps, np.int64), *stacked]

    def load(self, leaves: Sequence[np.ndarray]) -> None:
        """What :meth:`leaves` made."""
        stride, steps, *stacked = leaves
        self.stride, self._steps = int(stride), steps.tolist()
        of = lambda i: jax.tree.unflatten(
            jax.tree.structure(self._like), [jnp.asarray(a[i]) for a in stacked]
        )
        self._kept = [of(i) for i in range(len(self._steps))]

    def path(self, graph: FactorGraph, eta0: Eta, last: Params, key: Array) -> Path:
        """From independent units through what was kept to the last params, in knots as many as that needs.

        :param eta0: natural parameters of the units.
        :param key: ``(2,)``, of the pilot that thins it.
        """
        whole = Path.through(graph, eta0, self._kept).to(last)
        made = ladders.thinned(whole, key, _PARTICLES, _EVENNESS, _MOST)
        if made is not None:
            return made
        warnings.warn(
            f"fit: from independent units to the last params it takes more than {_MOST} knots for half of "
            f"the particles to stay effective between any two: the path has all {len(whole)} checkpoints "
            "instead, of which neighbours are far apart. Checkpoints may be noisy (lower the rate, or "
            "average the gradient over more chains), or too few (keep_path=1000)",
            stacklevel=3,
        )
        return whole
