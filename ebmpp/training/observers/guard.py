# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Checks that steps were finite, and that the model normalises."""

import dataclasses

import numpy as np

from ebmpp import errors
from ebmpp.core import Params, backend
from ebmpp.estimators.base import UNMET
from ebmpp.graph import FactorGraph, normalization
from ebmpp.training.history import Log
from ebmpp.training.observers.base import Observer
from ebmpp.training.steps import Stages, TrainState

# steps between checks that the params are finite, for which the device is waited for
_CHECK_EVERY = 50


@dataclasses.dataclass
class Guard(Observer):
    """Check of the params and steps of a run, which keeps the last valid params.

    :param valid_params: at first the params before the first step.
    :param valid_step: number of steps done at these.
    """

    graph: FactorGraph
    stages: Stages
    log: Log
    valid_params: Params
    valid_step: int = 0

    def next_stop(self, step: int) -> int:
        return step + 1 + -step % _CHECK_EVERY

    def at(self, step: int, state: TrainState, is_last: bool) -> None:
        is_due = step % _CHECK_EVERY == 1
        if is_last or (is_due and not backend.wait(state.ok)):
            self.check(step, state)

    def check(self, done: int, state: TrainState) -> None:
        """Raise TrainingError if a step was not finite, or the model does not normalise.

        :param done: number of steps done.
        """
        failed = None
        if not backend.wait(state.ok):  # at the first step that was not finite
            failed = int(np.flatnonzero(~self.log.steps.columns()["ok"])[0])
        step = done if failed is None else failed
        try:
            if not normalization.is_bounded(self.graph):
                self.graph.check(state.params)
        except errors.DomainError as error:
            message = (
                f"training stopped after step {step}: {error} The params after "
                f"{self.valid_step} steps were valid. Lower the learning rate, or keep "
                "the params in the domain by optimizers.projected(...)."
            )
            raise self.log.failure(
                errors.NormalizationError, message, self.valid_params, step
            ) from error
        if failed is not None:
            message = f"training stopped at step {failed}: {self._reason(failed)}"
            raise self.log.failure(
                errors.DivergenceError, message, state.params, failed
            )
        self.valid_params = state.params
        self.valid_step = done

    def _reason(self, step: int) -> str:
        """Return why a step was not finite, in words."""
        metrics = {name: v[step] for name, v in self.log.steps.columns().items()}
        num_unmet = np.nansum([metrics.get(name, 0) for name in UNMET])
        if num_unmet:
            estimator = self.stages[self.stages.at(step)].estimator
            return (
                f"{num_unmet:.0f} coupled pairs of {estimator!r} had not met. Raise "
                "its max_sweeps (of ParticleUCD: max_systems), or see "
                "UCD(allow_unmet=True), which biases the gradient. Without a limit, "
                "params are too large for their floats: lower the learning rate."
            )
        norm = metrics["gradient_norm"]
        return (
            f"gradient or params were not finite (gradient norm {norm:.4g}). Lower the "
            "learning rate."
        )
