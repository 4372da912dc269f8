# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""That a run stays what it should be: finite, met, and a model that normalises."""

import math
import time

import numpy as np

from jax import Array

from ebmpp.core import sharding
from ebmpp.core.types import Params
from ebmpp.errors import DivergenceError, DomainError, NormalizationError
from ebmpp.estimators import Estimator
from ebmpp.graph import FactorGraph
from ebmpp.training.history import Log

# A check of 1000 Gaussian units beside 1000 others takes 13 s on two cores: looks in passing take a
# twentieth of the time at most.
_REST = 20
_CARRIED = "The error's .params are {}, and .history holds the steps before"


class Guard:
    """Looks at a run now and then, and keeps the params that were good when it last looked.

    :param graph: the model; only one with an unbounded block can stop normalising.
    :param params: those of the start, which are good.
    :param log: of the run.
    """

    def __init__(self, graph: FactorGraph, params: Params, log: Log) -> None:
        self.graph, self.good, self._log = graph, params, log
        self._seen, self._next = 0, 0.0
        self.bounded = all(math.isfinite(b) for f in graph.families.values() for b in f.bounds)

    def look(self, done: int, params: Params, ok: Array, estimator: Estimator, needed: bool = True) -> None:
        """After ``done`` steps.

        :param needed: False for a look in passing: a model whose check takes long is then let go on.
        :param ok: False from the first step that was not finite; params are those before it.
        :param estimator: of the last step, which is told of in errors.
        :raises NormalizationError: for params under which the model does not normalise.
        :raises DivergenceError: where a step was not finite, or a pair unmet.
        """
        failed = None if bool(ok) else self._log.failed_at()
        idle = sharding.processes() == 1 and time.monotonic() > self._next  # clocks differ
        if not self.bounded and (needed or failed is not None or idle):
            self._check(done if failed is None else failed, params)
        if failed is not None:
            raise DivergenceError(
                f"training stopped at step {failed}: {self._reason(failed, estimator)}. "
                + _CARRIED.format("those before that step"),
                params,
                self._log.dataset(failed),
                failed,
            )
        if self.bounded:
            self.good = params

    def _check(self, done: int, params: Params) -> None:
        started = time.monotonic()
        try:
            self.graph.check(params)
        except DomainError as error:
            raise NormalizationError(
                f"training stopped after step {done}: {error} In training, lower the learning rate, or "
                "hold the params where the model normalises by optimizers.projected(...). "
                + _CARRIED.format(f"the last that were seen to normalise, after {self._seen} steps"),
                self.good,
                self._log.dataset(done),
                done,
            ) from error
        self.good, self._seen = params, done
        self._next = time.monotonic() + _REST * (time.monotonic() - started)

    def _reason(self, step: int, estimator: Estimator) -> str:
        told = {name: v[step] for name, v in self._log.steps.columns().items()}
        unmet = np.nansum([told.get(name, 0) for name in ("num_unmet", "posterior_num_unmet")])
        if unmet:
            return (
                f"{unmet:.0f} coupled pairs of {estimator!r} had not met. Raise its max_sweeps (of "
                "ParticleUCD: max_systems), or see UCD(allow_unmet=True), which biases the gradient. Without "
                "a limit, params are too large for their floats: lower the learning rate"
            )
        norm = float(told["gradient_norm"])
        return f"gradient or params were not finite (gradient norm {norm:.4g}): lower the learning rate"
